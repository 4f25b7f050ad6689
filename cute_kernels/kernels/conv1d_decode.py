"""One token of the causal conv per sequence, window read and written by slot id.

    y[n, c] = act(bias[c] + sum_j weight[c, j] x[t - W + 1 + j, c]),  t = positions[n]

A thread owns `vec` channels of `rows` sequences, whose taps it loads once; grid (channel blocks, groups of sequences). It reads
the W - 1 columns of tokens t-1, t-2, … of all its sequences at once, and writes
    in place (read id == write id): the column of token t, which nobody reads in this step;
    into another slot: that column and the W - 2 older ones that the next token needs.
A channel of a sequence has one thread, so no order among blocks matters. With no read slot the history is zero; a row with
neither slot writes a zero output and nothing else.
Launched dependently: ids, taps and windows are loaded while the previous kernel drains if it wrote none of them (SETTLED);
x and the output wait for it.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32

from ..compile.cache import cute_compile
from ..compile.fake import fake_ids, fake_stream
from ..configs.conv1d import BIAS, PLAIN, SETTLED, SILU, ConvDecodeKey
from ..device.conv import ConvMath, copy_into, fake_parameters, fake_rings, fake_tokens, window_ptr
from ..device.memory import store_vector, widen, zero_vector
from ..device.state_io import row_ptr, slot_is_valid

GRID_Y = 65535  # groups in the grid's y dimension; more go to its z dimension


class Arguments(NamedTuple):
    """What the compiled function takes, then the stream."""

    mX: cute.Tensor  # (N, C), row stride any multiple of 16 bytes
    mWeight: cute.Tensor  # (C, W)
    mBias: cute.Tensor  # (1, C); any matrix without BIAS
    mState: cute.Tensor  # (S, W, C), slot stride any multiple of 16 bytes
    mReadIds: cute.Tensor  # (N,) int32
    mWriteIds: cute.Tensor  # (N,) int32
    mPositions: cute.Tensor  # (N,) int32
    mOut: cute.Tensor  # (N, C), may be mX
    flags: Int32  # SETTLED | BIAS | SILU | PLAIN


class ConvDecode:
    def __init__(self, key: ConvDecodeKey):
        self.key = key
        self.math = ConvMath(key, key.vec)
        self.vec, self.rows, self.width = key.vec, key.rows, key.width

    @cute.jit
    def __call__(self, *arguments):
        a, stream = Arguments(*arguments[:-1]), arguments[-1]
        n, channels = cute.size(a.mX, mode=[0]), cute.size(a.mX, mode=[1])
        width, height = self.key.threads * self.vec, self.rows * self.key.lanes
        groups = (n + height - 1) // height
        grid = [(channels + width - 1) // width, cutlass.min(groups, Int32(GRID_Y)), (groups + GRID_Y - 1) // GRID_Y]
        self.kernel.set_name_prefix(self.key.symbol(), remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(a, n, channels).launch(
            grid=grid, block=[self.key.threads, self.key.lanes, 1], stream=stream, use_pdl=(a.flags & PLAIN) == 0,
            min_blocks_per_mp=self.key.blocks, preferred_smem_carveout=0 if self.key.blocks else None,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, a: Arguments, n: Int32, channels: Int32):
        column, lane, _ = cute.arch.thread_idx()
        bidx, bidy, bidz = cute.arch.block_idx()
        first = ((bidz * GRID_Y + bidy) * self.key.lanes + lane) * self.rows
        own_channel = (bidx * self.key.threads + column) * self.vec
        if (a.flags & SETTLED) == 0:
            cute.arch.griddepcontrol_wait()
        # A thread without work loads what the last row's or last channels' thread loads: only the stores need a branch.
        channel = cutlass.min(own_channel, channels - self.vec)
        rows = [cutlass.min(first + r, n - 1) for r in range(self.rows)]
        reads = [Int32(a.mReadIds[row]) for row in rows]
        writes = [Int32(a.mWriteIds[row]) for row in rows]
        positions = [Int32(a.mPositions[row]) for row in rows]
        windows = []
        for r in cutlass.range_constexpr(self.rows):
            windows.append(self.load_window(a.mState, reads[r], positions[r], channel))
        parameters = self.math.parameters(a.mWeight, a.mBias, channel, a.flags & BIAS, a.flags & SILU)
        if (a.flags & SETTLED) != 0:
            cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        inputs = self.math.registers(self.rows)
        for r in cutlass.range_constexpr(self.rows):
            copy_into(row_ptr(a.mX, rows[r], channel, self.math.align), inputs[r], self.vec)
        if own_channel < channels:
            for r in cutlass.range_constexpr(self.rows):
                if first + r < n:
                    self.finish(
                        a.mState, a.mOut, parameters, windows[r], inputs[r], first + r, reads[r], writes[r], positions[r],
                        channel,
                    )  # fmt: skip

    @cute.jit
    def load_window(self, mState: cute.Tensor, read: Int32, position: Int32, channel: Int32):
        """The W - 1 inputs before this token, oldest first."""
        window = [zero_vector(BFloat16, self.vec) for _ in range(self.width - 1)]
        if slot_is_valid(read, cute.size(mState, mode=[0])):
            for j in cutlass.range_constexpr(self.width - 1):
                token = position + (j - (self.width - 1))
                copy_into(window_ptr(mState, read, token, channel, self.width, self.vec), window[j], self.vec)
        return window

    @cute.jit
    def finish(
        self,
        mState: cute.Tensor,
        mOut: cute.Tensor,
        parameters,
        window,
        rX: cute.Tensor,
        row: Int32,
        read: Int32,
        write: Int32,
        position: Int32,
        channel: Int32,
    ):
        """One sequence's output and its new column, in another slot the older ones too."""
        num_slots = cute.size(mState, mode=[0])
        stores = slot_is_valid(write, num_slots)
        rOut = zero_vector(BFloat16, self.vec)
        if slot_is_valid(read, num_slots) | stores:
            rows = [widen(rH, self.vec) for rH in window] + [widen(rX, self.vec)]
            rOut.store(self.math.output(rows, parameters).load())
        store_vector(rOut, row_ptr(mOut, row, channel, self.math.align), self.vec)
        if stores:
            store_vector(rX, window_ptr(mState, write, position, channel, self.width, self.vec), self.vec)
            if read != write:
                for j in cutlass.range_constexpr(1, self.width - 1):
                    token = position + (j - (self.width - 1))
                    target = window_ptr(mState, write, token, channel, self.width, self.vec)
                    store_vector(window[j], target, self.vec)


def build(key: ConvDecodeKey):
    """Compile one specialisation."""
    n, c = cute.sym_int(), cute.sym_int(divisibility=8)
    weight, bias = fake_parameters(key, c)
    return cute_compile(
        ConvDecode(key), fake_tokens(n, c), weight, bias, fake_rings(key.width, c), fake_ids(n, Int32),
        fake_ids(n, Int32), fake_ids(n, Int32), fake_tokens(n, c), Int32(0), fake_stream(),
    )  # fmt: skip
