"""Causal conv of packed sequences; windows read, written and kept at checkpoints by slot id, in one launch.

    y[t, c] = act(bias[c] + sum_j weight[c, j] x[t - W + 1 + j, c]),  tokens before the call from the read slot

Work   Each sequence is cut into tiles of `tokens` tokens from its own first token. Sequence i owns the tile numbers
       from cu[i] // tokens + i on: enough for its length, strictly ascending, so a warp finds its sequence in `cu_seqlens` by a
       32-way search. The numbers of one more sequence are the rows behind cu[N], which become zero.
Grid   (ceil(C / 32 vec), tile groups + entry groups). A warp owns 32 * vec channels of one tile, a thread `vec` of them.
Data   A full tile issues all its loads at once and slides the window through registers: x is read once, plus W - 1 rows of halo
       from L1 or L2. A sequence's last, shorter tile does the same with a check for each token.
Slots  Only a sequence's first tile needs tokens from before the call: a tile is at least W - 1 tokens long. The thread that
       reads them then writes the final window (its tokens come from x, or from the history in registers) and the checkpoints
       nearer than W - 1 tokens to the start. So a column of a slot is read and written by one thread, in program order, and in
       place needs nothing else. Later checkpoints hold tokens of x alone: each has a warp of its own.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, const_expr

from ..compile.cache import cute_compile
from ..compile.fake import fake_ids, fake_stream
from ..configs.conv1d import BIAS, CHECKPOINTS, SILU, ConvPrefillKey
from ..device.conv import (
    ConvMath,
    copy_into,
    fake_parameters,
    fake_rings,
    fake_tokens,
    last_not_above,
    token_ptr,
    window_ptr,
)
from ..device.memory import load_vector, store_vector, widen, zero_vector
from ..device.state_io import row_ptr, slot_is_valid

WARPS = 4  # tiles a block
GRID_Y = 65535


class Arguments(NamedTuple):
    """What the compiled function takes, then the stream."""

    mX: cute.Tensor  # (T, C), row stride any multiple of 16 bytes
    mWeight: cute.Tensor  # (C, W)
    mBias: cute.Tensor  # (1, C); any matrix without BIAS
    mState: cute.Tensor  # (S, W, C), slot stride any multiple of 16 bytes
    mReadIds: cute.Tensor  # (N,) int32
    mWriteIds: cute.Tensor  # (N,) int32
    mPositions: cute.Tensor  # (N,) int32
    mCuSeqlens: cute.Tensor  # (N + 1,) int32
    mEntries: cute.Tensor  # (N + 1,) int32, prefix sums of kept entries; any ids without CHECKPOINTS, as the next two
    mEnds: cute.Tensor  # (M,) int32, ascending in a sequence
    mSlots: cute.Tensor  # (M,) int32
    mOut: cute.Tensor  # (T, C), no memory in common with mX
    flags: Int32  # BIAS | SILU | CHECKPOINTS


class ConvPrefill:
    def __init__(self, key: ConvPrefillKey):
        self.key = key
        self.math = ConvMath(key, key.vec)
        self.vec, self.tokens, self.width = key.vec, key.tokens, key.width

    @cute.jit
    def __call__(self, *arguments):
        a, stream = Arguments(*arguments[:-1]), arguments[-1]
        total, channels = cute.size(a.mX, mode=[0]), cute.size(a.mX, mode=[1])
        n = cute.size(a.mReadIds, mode=[0])
        tile_groups = (total // self.tokens + n + WARPS) // WARPS  # total // tokens + n + 1 tiles
        entries = cute.size(a.mEnds, mode=[0]) if (a.flags & CHECKPOINTS) != 0 else Int32(0)
        groups = tile_groups + (entries + WARPS - 1) // WARPS
        block = 32 * self.vec
        grid = [(channels + block - 1) // block, cutlass.min(groups, Int32(GRID_Y)), (groups + GRID_Y - 1) // GRID_Y]
        self.kernel.set_name_prefix(self.key.symbol(), remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(a, n, tile_groups).launch(
            grid=grid, block=[32, WARPS, 1], stream=stream, use_pdl=self.key.pdl, min_blocks_per_mp=self.key.blocks,
            preferred_smem_carveout=0 if self.key.blocks else None,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, a: Arguments, n: Int32, tile_groups: Int32):
        lane, warp, _ = cute.arch.thread_idx()
        bidx, bidy, bidz = cute.arch.block_idx()
        total, channels = cute.size(a.mX, mode=[0]), cute.size(a.mX, mode=[1])
        group = bidz * GRID_Y + bidy
        channel = (bidx * 32 + lane) * self.vec
        if const_expr(self.key.pdl):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        if group < tile_groups:
            tile = group * WARPS + warp
            sequence = last_not_above(a.mCuSeqlens, n + 1, tile, lane, self.tokens)
            begin = Int32(a.mCuSeqlens[sequence])
            number = tile - (begin // self.tokens + sequence)
            start = begin + number * self.tokens
            if channel < channels:
                if sequence < n:
                    end = cutlass.min(Int32(a.mCuSeqlens[sequence + 1]), total)
                    if (start < end) | (number == 0):
                        self.tile(a, sequence, begin, start, end, channel)
                else:
                    for t in cutlass.range(start, cutlass.min(start + self.tokens, total), unroll=1):
                        store_vector(
                            zero_vector(BFloat16, self.vec), row_ptr(a.mOut, t, channel, self.math.align), self.vec
                        )
        else:
            entry = (group - tile_groups) * WARPS + warp
            if entry < cute.size(a.mEnds, mode=[0]):
                sequence = last_not_above(a.mEntries, n + 1, entry, lane, None)
                if (sequence < n) & (channel < channels):
                    begin = Int32(a.mCuSeqlens[sequence])
                    end = Int32(a.mEnds[entry])
                    if (end >= self.width - 1) & (end <= Int32(a.mCuSeqlens[sequence + 1]) - begin):
                        position = Int32(a.mPositions[sequence])
                        self.keep_window(a.mX, a.mState, Int32(a.mSlots[entry]), position, begin, end, channel, None)

    @cute.jit
    def tile(self, a: Arguments, sequence: Int32, begin: Int32, start: Int32, end: Int32, channel: Int32):
        """Outputs of tokens start .. min(start + tokens, end); in a sequence's first tile its windows too."""
        vec, width, align = self.vec, self.width, self.math.align
        full = start + self.tokens <= end
        raw = self.math.registers(self.tokens)
        if full:
            for t in cutlass.range_constexpr(self.tokens):
                copy_into(token_ptr(a.mX, start, t, channel, align), raw[t], vec)
        else:
            for t in cutlass.range_constexpr(self.tokens - 1):
                if start + t < end:
                    copy_into(token_ptr(a.mX, start, t, channel, align), raw[t], vec)
        history = [zero_vector(BFloat16, vec) for _ in range(width - 1)]
        if start == begin:
            read = Int32(a.mReadIds[sequence])
            if slot_is_valid(read, cute.size(a.mState, mode=[0])):
                for j in cutlass.range_constexpr(width - 1):
                    token = Int32(a.mPositions[sequence]) + (j - (width - 1))
                    copy_into(window_ptr(a.mState, read, token, channel, width, vec), history[j], vec)
        else:
            for j in cutlass.range_constexpr(width - 1):
                copy_into(row_ptr(a.mX, start + (j - (width - 1)), channel, align), history[j], vec)
        if start == begin:
            position = Int32(a.mPositions[sequence])
            self.keep_window(
                a.mX, a.mState, Int32(a.mWriteIds[sequence]), position, begin, end - begin, channel, history
            )
            if (a.flags & CHECKPOINTS) != 0:
                self.keep_near_checkpoints(a, sequence, position, begin, end, channel, history)
        parameters = self.math.parameters(a.mWeight, a.mBias, channel, a.flags & BIAS, a.flags & SILU)
        inputs = history + raw
        if full:
            rows = [widen(rH, vec) for rH in history]
            for t in cutlass.range_constexpr(self.tokens):
                rows.append(widen(raw[t], vec))
                rY = self.math.output(rows[t : t + width], parameters)
                store_vector(rY, token_ptr(a.mOut, start, t, channel, align), vec)
        else:
            for t in cutlass.range_constexpr(self.tokens - 1):
                if start + t < end:
                    rows = [widen(inputs[t + j], vec) for j in range(width)]
                    rY = self.math.output(rows, parameters)
                    store_vector(rY, token_ptr(a.mOut, start, t, channel, align), vec)

    @cute.jit
    def keep_near_checkpoints(
        self, a: Arguments, sequence: Int32, position: Int32, begin: Int32, end: Int32, channel: Int32, history
    ):
        """The checkpoints that still need tokens from before the call; ends ascend, so the first far one stops the loop."""
        entry, last = Int32(a.mEntries[sequence]), Int32(a.mEntries[sequence + 1])
        count = Int32(self.width)
        if entry < last:
            count = Int32(a.mEnds[entry])
        while count < self.width - 1:
            if (count >= 1) & (count <= end - begin):
                self.keep_window(a.mX, a.mState, Int32(a.mSlots[entry]), position, begin, count, channel, history)
            entry += 1
            count = Int32(self.width)
            if entry < last:
                count = Int32(a.mEnds[entry])

    @cute.jit
    def keep_window(
        self,
        mX: cute.Tensor,
        mState: cute.Tensor,
        slot: Int32,
        position: Int32,
        begin: Int32,
        count: Int32,
        channel: Int32,
        history,
    ):
        """Write the last W - 1 inputs after `count` tokens of the call to a slot; without `history`, count >= W - 1."""
        vec, width = self.vec, self.width
        if slot_is_valid(slot, cute.size(mState, mode=[0])):
            for back in cutlass.range_constexpr(1, width):
                index = count - back
                target = window_ptr(mState, slot, position + index, channel, width, vec)
                if const_expr(history is None):
                    store_vector(load_vector(row_ptr(mX, begin + index, channel, self.math.align), vec), target, vec)
                elif index >= 0:
                    store_vector(load_vector(row_ptr(mX, begin + index, channel, self.math.align), vec), target, vec)
            if const_expr(history is not None):
                for j in cutlass.range_constexpr(width - 1):
                    if count <= j:
                        token = position + (j - (width - 1))
                        store_vector(history[j], window_ptr(mState, slot, token, channel, width, vec), vec)


def build(key: ConvPrefillKey):
    """Compile one specialisation."""
    total, n, c, m = cute.sym_int(), cute.sym_int(), cute.sym_int(divisibility=8), cute.sym_int()
    weight, bias = fake_parameters(key, c)
    bounds = cute.sym_int()
    return cute_compile(
        ConvPrefill(key), fake_tokens(total, c), weight, bias, fake_rings(key.width, c), fake_ids(n, Int32),
        fake_ids(n, Int32), fake_ids(n, Int32), fake_ids(bounds, Int32), fake_ids(bounds, Int32), fake_ids(m, Int32),
        fake_ids(m, Int32), fake_tokens(total, c), Int32(0), fake_stream(),
    )  # fmt: skip
