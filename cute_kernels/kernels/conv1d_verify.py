"""Causal conv of draft tokens with a log of raw inputs, and the commit of accepted drafts alone.

A call (a) forms the window after the accepted drafts: tokens p + a - 1, p + a - 2, … (p committed tokens in the read slot, a of
the previous call's drafts accepted) come from the log where they are drafts, else from the ring; (b) writes it to the write
slot; (c) runs the new tokens from it; (d) logs their raw inputs in the half of the log that is not being read.

A thread owns 4 channels of one sequence and does all of this for them; grid (channel blocks, sequences + 1). No two threads
touch one address, so in place needs no order. (A fused kernel, where several blocks share a window, relies on more: with W
columns, the tokens read, p - W + 1 + a … p - 1, and those written, at most the last W - 1 of p … p + a - 1, are fewer than W
consecutive ones and so in distinct columns.)
With no read slot the history is zero. A count outside 0 … Tmax makes a row void, like a row with neither slot: zero output,
nothing else. The block row behind the last sequence clears the output behind cu[N].
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Int32, Int64
from cutlass.cute.runtime import make_fake_compact_tensor

from ..compile.cache import cute_compile
from ..compile.fake import fake_ids, fake_stream
from ..configs.conv1d import BIAS, MAPPED, PLAIN, SETTLED, SILU, ConvCommitKey, ConvVerifyKey
from ..device.conv import (
    ConvMath,
    copy_into,
    fake_parameters,
    fake_rings,
    fake_tokens,
    token_ptr,
    vector_bytes,
    window_ptr,
)
from ..device.memory import offset_ptr, store_vector, widen, zero_vector
from ..device.state_io import row_ptr, slot_is_valid

VEC = 4
THREADS = 64
BLOCK = THREADS * VEC
AHEAD = 8  # tokens whose loads are in flight together: the usual largest draft
GRID_Y = 65535


class LogRow:
    """What one row of the batch reads and writes, after the id rule."""

    def __init__(self, read, write, reads, writes, accepted, logged, row, half):
        self.read, self.write, self.reads, self.writes = read, write, reads, writes
        self.accepted, self.logged, self.row, self.half = accepted, logged, row, half


def resolve_row(a, row):
    """Ids, log row, half and accepted count of a batch row; see `reference/ids.py` for the same rule."""
    num_slots, max_tokens = cute.size(a.mState, mode=[0]), cute.size(a.mLog, mode=[2])
    accepted = Int32(a.mAccepted[row])
    sound = (accepted >= 0) & (accepted <= max_tokens)
    read, write = Int32(a.mReadIds[row]), Int32(a.mWriteIds[row])
    reads, writes = sound & slot_is_valid(read, num_slots), sound & slot_is_valid(write, num_slots)
    batch, mapped = cute.size(a.mHalf, mode=[0]), (a.flags & MAPPED) != 0
    log_row = row + (Int32(a.mRows[row]) - row) * mapped.to(Int32)
    logged = (reads | writes) & slot_is_valid(log_row, batch)
    half = Int32(a.mHalf[cutlass.min(cutlass.max(log_row, Int32(0)), batch - 1)]) & 1
    kept = accepted * logged.to(Int32)
    return LogRow(read, write, reads, writes, kept, logged, log_row, half)


class _Conv:
    """Window handling that verify and commit share."""

    def log_ptr(self, mLog, row, half, token, channel):
        """Log (B, 2, Tmax, C): `VEC` channels of a draft token."""
        max_tokens, channels = cute.size(mLog, mode=[2]), cute.size(mLog, mode=[3])
        index = Int64((row * 2 + half) * max_tokens + token) * channels + channel
        return offset_ptr(mLog.iterator, index, mLog.element_type, vector_bytes(mLog.element_type, VEC))

    @cute.jit
    def committed_window(
        self,
        mState: cute.Tensor,
        mLog: cute.Tensor,
        read: Int32,
        reads: Boolean,
        accepted: Int32,
        row: Int32,
        half: Int32,
        position: Int32,
        channel: Int32,
    ):
        """The last W - 1 inputs after the accepted drafts, oldest first."""
        history = [zero_vector(mState.element_type, VEC) for _ in range(self.width - 1)]
        for j in cutlass.range_constexpr(self.width - 1):
            draft = accepted + (j - (self.width - 1))
            if draft >= 0:
                copy_into(self.log_ptr(mLog, row, half, draft, channel), history[j], VEC)
            elif reads:
                copy_into(window_ptr(mState, read, position + draft, channel, self.width, VEC), history[j], VEC)
        return history

    @cute.jit
    def store_window(
        self,
        mState: cute.Tensor,
        history,
        read: Int32,
        write: Int32,
        accepted: Int32,
        position: Int32,
        channel: Int32,
    ):
        """Write the committed window; in place only the accepted drafts' columns change."""
        for j in cutlass.range_constexpr(self.width - 1):
            draft = accepted + (j - (self.width - 1))
            if (draft >= 0) | (read != write):
                target = window_ptr(mState, write, position + draft, channel, self.width, VEC)
                store_vector(history[j], target, VEC)


class VerifyArguments(NamedTuple):
    """What the compiled function takes, then the stream."""

    mX: cute.Tensor  # (T, C), row stride any multiple of 16 bytes
    mWeight: cute.Tensor  # (C, W)
    mBias: cute.Tensor  # (1, C); any matrix without BIAS
    mState: cute.Tensor  # (S, W, C), slot stride any multiple of 16 bytes
    mReadIds: cute.Tensor  # (N,) int32
    mWriteIds: cute.Tensor  # (N,) int32
    mPositions: cute.Tensor  # (N,) int32, committed tokens in the read slot
    mCuSeqlens: cute.Tensor  # (N + 1,) int32
    mLog: cute.Tensor  # (B, 2, Tmax, C) raw inputs
    mHalf: cute.Tensor  # (B,) int32, half to read
    mRows: cute.Tensor  # (N,) int32, log row of each batch row; any ids without MAPPED: row n has log row n
    mAccepted: cute.Tensor  # (N,) int32
    mOut: cute.Tensor  # (T, C)
    flags: Int32  # SETTLED | BIAS | SILU | MAPPED | PLAIN


class ConvVerify(_Conv):
    def __init__(self, key: ConvVerifyKey):
        self.key = key
        self.width = key.width
        self.math = ConvMath(key, VEC)

    @cute.jit
    def __call__(self, *arguments):
        a, stream = VerifyArguments(*arguments[:-1]), arguments[-1]
        rows, channels = cute.size(a.mReadIds, mode=[0]) + 1, cute.size(a.mX, mode=[1])
        grid = [(channels + BLOCK - 1) // BLOCK, cutlass.min(rows, Int32(GRID_Y)), (rows + GRID_Y - 1) // GRID_Y]
        self.kernel.set_name_prefix(self.key.symbol(), remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(a).launch(grid=grid, block=[THREADS, 1, 1], stream=stream, use_pdl=(a.flags & PLAIN) == 0)  # fmt: skip

    @cute.kernel
    def kernel(self, a: VerifyArguments):
        tidx, _, _ = cute.arch.thread_idx()
        bidx, bidy, bidz = cute.arch.block_idx()
        n, total, channels = cute.size(a.mReadIds, mode=[0]), cute.size(a.mX, mode=[0]), cute.size(a.mX, mode=[1])
        index, own_channel = bidz * GRID_Y + bidy, (bidx * THREADS + tidx) * VEC
        # Threads without work load what the last row's or last channels' thread loads: only stores need a branch.
        row, channel = cutlass.min(index, n - 1), cutlass.min(own_channel, channels - VEC)
        if (a.flags & SETTLED) == 0:
            cute.arch.griddepcontrol_wait()
        log = resolve_row(a, row)
        position = Int32(a.mPositions[row])
        parameters = self.math.parameters(a.mWeight, a.mBias, channel, a.flags & BIAS, a.flags & SILU)
        history = self.committed_window(
            a.mState, a.mLog, log.read, log.reads, log.accepted, log.row, log.half, position, channel
        )
        first, last = Int32(a.mCuSeqlens[row]), Int32(a.mCuSeqlens[row + 1])
        if (a.flags & SETTLED) != 0:
            cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        live, writes, logged = log.reads | log.writes, log.writes, log.logged
        if own_channel < channels:
            if index < n:
                if writes:
                    self.store_window(a.mState, history, log.read, log.write, log.accepted, position, channel)
                if live:
                    self.run_tokens(
                        a.mX, a.mLog, a.mOut, parameters, history, first, last, logged, log.row, log.half ^ 1, channel
                    )
                else:
                    self.clear(a.mOut, first, last, channel)
            elif index == n:
                self.clear(a.mOut, Int32(a.mCuSeqlens[n]), total, channel)

    @cute.jit
    def run_tokens(
        self,
        mX: cute.Tensor,
        mLog: cute.Tensor,
        mOut: cute.Tensor,
        parameters,
        history,
        first: Int32,
        last: Int32,
        logged: Boolean,
        log_row: Int32,
        log_half: Int32,
        channel: Int32,
    ):
        """Outputs of tokens first .. last in groups of `AHEAD`, their raw inputs to the log (as many as it holds)."""
        width, align = self.width, self.math.align
        max_tokens = cute.size(mLog, mode=[2])
        for start in cutlass.range(first, last, AHEAD, unroll=1):
            raw = self.math.registers(AHEAD)
            for t in cutlass.range_constexpr(AHEAD):
                if start + t < last:
                    copy_into(token_ptr(mX, start, t, channel, align), raw[t], VEC)
            inputs = history + raw
            for t in cutlass.range_constexpr(AHEAD):
                if start + t < last:
                    rows = [widen(inputs[t + j], VEC) for j in range(width)]
                    rY = self.math.output(rows, parameters)
                    store_vector(rY, token_ptr(mOut, start, t, channel, align), VEC)
                    token = start - first + t
                    if logged & (token < max_tokens):
                        store_vector(raw[t], self.log_ptr(mLog, log_row, log_half, token, channel), VEC)
            for j in cutlass.range_constexpr(width - 1):
                history[j].store(raw[AHEAD - (width - 1) + j].load())

    @cute.jit
    def clear(self, mOut: cute.Tensor, first: Int32, last: Int32, channel: Int32):
        for t in cutlass.range(first, last, unroll=1):
            store_vector(zero_vector(BFloat16, VEC), row_ptr(mOut, t, channel, self.math.align), VEC)


class CommitArguments(NamedTuple):
    """What the compiled function takes, then the stream."""

    mState: cute.Tensor  # (S, W, C)
    mReadIds: cute.Tensor  # (N,) int32
    mWriteIds: cute.Tensor  # (N,) int32
    mPositions: cute.Tensor  # (N,) int32
    mLog: cute.Tensor  # (B, 2, Tmax, C)
    mHalf: cute.Tensor  # (B,) int32
    mRows: cute.Tensor  # (N,) int32
    mAccepted: cute.Tensor  # (N,) int32
    flags: Int32  # MAPPED


class ConvCommit(_Conv):
    def __init__(self, key: ConvCommitKey):
        self.key = key
        self.width = key.width

    @cute.jit
    def __call__(self, *arguments):
        a, stream = CommitArguments(*arguments[:-1]), arguments[-1]
        rows, channels = cute.size(a.mReadIds, mode=[0]), cute.size(a.mState, mode=[2])
        grid = [(channels + BLOCK - 1) // BLOCK, cutlass.min(rows, Int32(GRID_Y)), (rows + GRID_Y - 1) // GRID_Y]
        self.kernel.set_name_prefix(self.key.symbol(), remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(a).launch(grid=grid, block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, a: CommitArguments):
        tidx, _, _ = cute.arch.thread_idx()
        bidx, bidy, bidz = cute.arch.block_idx()
        row, channel = bidz * GRID_Y + bidy, (bidx * THREADS + tidx) * VEC
        if (row < cute.size(a.mReadIds, mode=[0])) & (channel < cute.size(a.mState, mode=[2])):
            log = resolve_row(a, row)
            if log.writes:
                position = Int32(a.mPositions[row])
                history = self.committed_window(
                    a.mState, a.mLog, log.read, log.reads, log.accepted, log.row, log.half, position, channel
                )
                self.store_window(a.mState, history, log.read, log.write, log.accepted, position, channel)


def build(key: ConvVerifyKey | ConvCommitKey):
    """Compile one specialisation of either form."""
    n, batch, c = cute.sym_int(), cute.sym_int(), cute.sym_int(divisibility=8)
    rings = fake_rings(key.width, c)
    log = make_fake_compact_tensor(BFloat16, (batch, 2, cute.sym_int(), c), stride_order=(3, 2, 1, 0), assumed_align=16)
    ids = lambda: fake_ids(n, Int32)
    if isinstance(key, ConvCommitKey):
        return cute_compile(
            ConvCommit(key),
            rings,
            ids(),
            ids(),
            ids(),
            log,
            fake_ids(batch, Int32),
            ids(),
            ids(),
            Int32(0),
            fake_stream(),
        )
    total = cute.sym_int()
    weight, bias = fake_parameters(key, c)
    return cute_compile(
        ConvVerify(key), fake_tokens(total, c), weight, bias, rings, ids(), ids(), ids(),
        fake_ids(cute.sym_int(), Int32), log, fake_ids(batch, Int32), ids(), ids(), fake_tokens(total, c),
        Int32(0), fake_stream(),
    )  # fmt: skip
