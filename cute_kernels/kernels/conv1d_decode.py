"""One token of the causal conv per sequence, window read and written by slot id.

    y[n, c] = act(bias[c] + sum_j weight[c, j] x[t - W + 1 + j, c]),  t = positions[n]

A thread owns 8 channels of one sequence; grid (channel blocks, sequences). It reads the W - 1 columns of tokens t-1, t-2, … and
its x, all in flight at once, and writes
    in place (read id == write id): the column of token t, which nobody reads in this step;
    into another slot: that column and the W - 2 older ones that the next token needs.
A channel has one thread, so no order among blocks matters. With no read slot the history is zero; a row with neither slot writes
a zero output and nothing else.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, const_expr

from ..compile.cache import cute_compile
from ..compile.fake import fake_ids, fake_stream
from ..configs.conv1d import ConvDecodeKey
from ..device.conv import ConvMath, copy_into, fake_parameters, fake_rings, fake_tokens, window_ptr
from ..device.memory import store_vector, widen, zero_vector
from ..device.state_io import row_ptr, slot_is_valid

VEC = 8
GRID_Y = 65535  # rows of the grid; more sequences go to its z dimension


class ConvDecode:
    def __init__(self, key: ConvDecodeKey):
        self.key = key
        self.math = ConvMath(key, VEC)

    @cute.jit
    def __call__(
        self,
        mX: cute.Tensor,  # (N, C), row stride any multiple of 16 bytes
        mWeight: cute.Tensor,  # (C, W)
        mBias: cute.Tensor | None,  # (C,)
        mState: cute.Tensor,  # (S, W, C), slot stride any multiple of 16 bytes
        mReadIds: cute.Tensor,  # (N,) int32
        mWriteIds: cute.Tensor,  # (N,) int32
        mPositions: cute.Tensor,  # (N,) int32
        mOut: cute.Tensor,  # (N, C)
        stream,
    ):
        n, channels = cute.size(mX, mode=[0]), cute.size(mX, mode=[1])
        block = self.key.threads * VEC
        grid = [(channels + block - 1) // block, cutlass.min(n, Int32(GRID_Y)), (n + GRID_Y - 1) // GRID_Y]
        self.kernel.set_name_prefix(self.key.symbol(), remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(mX, mWeight, mBias, mState, mReadIds, mWriteIds, mPositions, mOut, n, channels).launch(
            grid=grid, block=[self.key.threads, 1, 1], stream=stream, use_pdl=self.key.pdl
        )

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,
        mWeight: cute.Tensor,
        mBias: cute.Tensor | None,
        mState: cute.Tensor,
        mReadIds: cute.Tensor,
        mWriteIds: cute.Tensor,
        mPositions: cute.Tensor,
        mOut: cute.Tensor,
        n: Int32,
        channels: Int32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        bidx, bidy, bidz = cute.arch.block_idx()
        width = self.key.width
        row = bidz * GRID_Y + bidy
        channel = (bidx * self.key.threads + tidx) * VEC
        if const_expr(self.key.pdl and not self.key.early):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        # A thread past the last channel loads the last vector: loads need no branch, only the stores do.
        active = (row < n) & (channel < channels)
        row, channel = cutlass.min(row, n - 1), cutlass.min(channel, channels - VEC)
        read, write, position = Int32(mReadIds[row]), Int32(mWriteIds[row]), Int32(mPositions[row])
        rTaps, rBias = self.math.parameters(mWeight, mBias, channel)
        num_slots = cute.size(mState, mode=[0])
        history = [zero_vector(BFloat16, VEC) for _ in range(width - 1)]
        if slot_is_valid(read, num_slots):
            for j in cutlass.range_constexpr(width - 1):
                token = position + (j - (width - 1))
                copy_into(window_ptr(mState, read, token, channel, width, VEC), history[j], VEC)
        if const_expr(self.key.early and self.key.pdl):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        if active:
            writes = slot_is_valid(write, num_slots)
            rOut = zero_vector(BFloat16, VEC)
            if slot_is_valid(read, num_slots) | writes:
                rX = self.math.registers(1)[0]
                copy_into(row_ptr(mX, row, channel, self.math.align), rX, VEC)
                rows = [widen(rH, VEC) for rH in history] + [widen(rX, VEC)]
                rY = self.math.output(rows, rTaps, rBias)
                for i in cutlass.range_constexpr(VEC):
                    rOut[i] = rY[i]
                if writes:
                    store_vector(rX, window_ptr(mState, write, position, channel, width, VEC), VEC)
                    if read != write:
                        for j in cutlass.range_constexpr(1, width - 1):
                            token = position + (j - (width - 1))
                            store_vector(history[j], window_ptr(mState, write, token, channel, width, VEC), VEC)
            store_vector(rOut, row_ptr(mOut, row, channel, self.math.align), VEC)


def build(key: ConvDecodeKey):
    """Compile one specialisation."""
    n, c = cute.sym_int(), cute.sym_int(divisibility=8)
    weight, bias = fake_parameters(key, c)
    return cute_compile(
        ConvDecode(key), fake_tokens(n, c), weight, bias, fake_rings(key.width, c), fake_ids(n, Int32),
        fake_ids(n, Int32), fake_ids(n, Int32), fake_tokens(n, c), fake_stream(),
    )  # fmt: skip
