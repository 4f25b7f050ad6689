"""Token-by-token prefill of GDN or KDA for packed sequences of any length, states by slot id.

    s = S diag(decay);  u = beta (v - s k);  S <- s + u k^T;  o = scale S q          for every token of the sequence

The fallback of the chunkwise prefills: right for every gate, mixed lengths and any checkpoint position, and bit-equal to
decode and verify. A block owns `tile` rows of V of one (sequence n, value head h); grid (HV * 128 / tile, N).
The state tile lives in registers from the first token to the last: 8 lanes a V row, `rows` rows a lane. Tokens go by blocks
of 8: while one block is computed from shared memory the next one's q, k, v and gates are on their way into registers; two
buffers, so one block barrier for 8 tokens.
Checkpoints are stored straight from registers when their token count is reached; the running state is not rounded.
Races: rows of V are disjoint between blocks, so in place needs no order. An id outside the pool reads zeros and stores
nothing; outputs are still computed. Output rows beyond cu[N] become zeros. A sequence whose length lies outside
min_tokens..max_tokens is left alone, so that another kernel can take the long ones of the same call.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32

from ..compile.cache import cute_compile
from ..compile.fake import fake_ids, fake_stream, fake_vector
from ..compile.fake_heads import fake_gates, fake_heads, fake_states
from ..configs.verify import RecurrentPrefillKey
from ..device.memory import store_vector, zero_vector
from ..device.reduce import owned_row
from ..device.state_io import row_ptr, slot_is_valid, slot_ptr
from ..device.token_block import TOKENS, TokenBlock
from ..device.token_step import (
    HEAD_DIM,
    holds_output,
    lane_in_row,
    load_rows_if,
    store_rows,
    token_step,
    vector_width,
    widen_rows,
)
from .recurrent_verify import GRID_Y

NEVER = 2**31 - 1  # token count no checkpoint has


class RecurrentPrefill:
    def __init__(self, key: RecurrentPrefillKey):
        self.key = key
        self.dtype = {"float32": Float32, "bfloat16": BFloat16}[key.state]
        self.kda = key.kind != "gdn"
        self.rows, self.tile = key.rows, key.tile
        self.tiles = HEAD_DIM // self.tile
        self.threads = 32 * key.warps
        self.block = TokenBlock(key.kind, self.dtype, self.tile)

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (T, HK, K) bf16, row stride any multiple of 8
        mK: cute.Tensor,  # (T, HK, K) bf16
        mV: cute.Tensor,  # (T, HV, V) bf16
        mGate: cute.Tensor,  # GDN a (T, HV); KDA raw gate (T, HV, K); bf16
        mBeta: cute.Tensor,  # (T, HV) bf16 logits
        mALog: cute.Tensor,  # (HV,) fp32
        mBias: cute.Tensor,  # GDN (HV,), KDA (HV * K,) fp32
        mState: cute.Tensor,  # (S, HV, V, K), slot stride any multiple of 16 bytes
        mReadIds: cute.Tensor,  # (N,) int32
        mWriteIds: cute.Tensor,  # (N,) int32
        mCu: cute.Tensor,  # (N + 1,) int32
        mCheckpointCu: cute.Tensor,  # (N + 1,) int32; any tensor without `checkpoints`, and so the next two
        mEnds: cute.Tensor,  # (M,) int32
        mSlots: cute.Tensor,  # (M,) int32
        mOut: cute.Tensor,  # (T, HV, V) bf16
        checkpoints: Int32,  # 0: keep no states on the way
        min_tokens: Int32,  # sequences outside min..max tokens are left alone
        max_tokens: Int32,
        l2norm: Int32,  # 0: q and k are normalised already
        scale: Float32,
        lower_bound: Float32,
        overlaps: Int32,  # 1: starts when the launch before it has started, which must write nothing that this one touches
        stream,
    ):
        n = cute.size(mReadIds, mode=[0])
        hk, hv = cute.size(mQ, mode=[1]), cute.size(mV, mode=[1])
        self.kernel.set_name_prefix(self.key.symbol(), remove_cutlass_symbol=True, keep_mangled_name=False)
        tensors = (
            mQ, mK, mV, mGate, mBeta, mALog, mBias, mState, mReadIds, mWriteIds, mCu, mCheckpointCu, mEnds, mSlots, mOut,
        )  # fmt: skip
        self.kernel(
            tensors, checkpoints, min_tokens, max_tokens, l2norm, scale, lower_bound, n, Float32(hk) / Float32(hv)
        ).launch(
            grid=[hv * self.tiles, cutlass.min(n, Int32(GRID_Y)), (n + GRID_Y - 1) // GRID_Y],
            block=[self.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=3,  # ptxas spills into a tighter budget when it is free to choose
            preferred_smem_carveout=50,
            use_pdl=overlaps,
        )

    @cute.kernel
    def kernel(
        self,
        tensors,  # those of `__call__`, in order
        checkpoints: Int32,
        min_tokens: Int32,
        max_tokens: Int32,
        l2norm: Int32,
        scale: Float32,
        lower_bound: Float32,
        n: Int32,
        heads_ratio: Float32,  # HK / HV
    ):
        mReadIds, mWriteIds, mCu, _, _, _, mOut = tensors[8:]
        tidx, _, _ = cute.arch.thread_idx()
        place, row_low, row_high = cute.arch.block_idx()
        seq = row_high * GRID_Y + row_low
        cute.arch.griddepcontrol_launch_dependents()  # what follows waits itself, for the end of this launch
        if seq < n:
            head, column = place // self.tiles, place % self.tiles * self.tile
            # (h + 1/2) HK / HV is never an integer, so truncation gives h // (HV // HK) exactly.
            key_head = Int32((Float32(head) + Float32(0.5)) * heads_ratio)
            start = Int32(mCu[seq])
            length = cutlass.max(Int32(mCu[seq + 1]) - start, 0)
            if length >= min_tokens and length <= max_tokens:
                self.sequence(
                    tensors, Int32(mReadIds[seq]), Int32(mWriteIds[seq]), checkpoints, l2norm != 0, scale, lower_bound, tidx, seq,
                    head, key_head, column, start, length,
                )  # fmt: skip
            if seq == n - 1:
                vectors = self.tile // 8
                inner = head * HEAD_DIM + column + tidx % vectors * 8
                first = Int32(mCu[n]) + tidx // vectors
                for row in cutlass.range(first, cute.size(mOut, mode=[0]), self.threads // vectors, unroll=1):
                    store_vector(zero_vector(BFloat16, 8), row_ptr(mOut, row, inner, 16), 8)
                if place == 0:
                    # What follows waits for this launch alone, so it ends after the one that it overlaps. One block waits: all
                    # of them would keep later ones from starting.
                    cute.arch.griddepcontrol_wait()

    @cute.jit
    def sequence(
        self,
        tensors,
        read: Int32,
        write: Int32,
        checkpoints: Int32,
        l2norm: Boolean,
        scale: Float32,
        lower_bound: Float32,
        tidx: Int32,
        seq: Int32,
        head: Int32,
        key_head: Int32,
        column: Int32,
        start: Int32,
        length: Int32,
    ):
        mQ, mK, mV, mGate, mBeta, mALog, mBias, mState, _, _, _, mCheckpointCu, mEnds, mSlots, mOut = tensors
        smem = cutlass.utils.SmemAllocator()
        sTokens = smem.allocate_tensor(Float32, cute.make_layout(2 * self.block.words), 16)
        lane = tidx % 32
        l8 = lane_in_row(lane)
        tile_row = tidx // 8 * self.rows  # the lane's first row within the tile
        own = tile_row + owned_row(lane, self.rows)
        inner = (head * HEAD_DIM + column + tile_row) * HEAD_DIM + l8 * vector_width(self.dtype)
        num_slots = cute.size(mState, mode=[0])
        stored = load_rows_if(slot_is_valid(read, num_slots), slot_ptr(mState, read, inner), self.rows, self.dtype)
        parameters = self.block.parameters(mALog, mBias, tidx, head)
        raw = self.block.registers()
        self.block.load(raw, mQ, mK, mV, mGate, mBeta, tidx, start, length, key_head, head, column)
        entry, last_entry, next_end = Int32(0), Int32(0), Int32(NEVER)
        if checkpoints != 0:
            entry, last_entry = Int32(mCheckpointCu[seq]), Int32(mCheckpointCu[seq + 1])
            if entry < last_entry:
                next_end = Int32(mEnds[entry])
            while next_end < 1:  # ignored; ends ascend
                entry += 1
                next_end = Int32(NEVER)
                if entry < last_entry:
                    next_end = Int32(mEnds[entry])
        rS = widen_rows(stored, self.rows, self.dtype)

        done = Int32(0)
        while done < length:
            count = cutlass.min(length - done, TOKENS)
            base = sTokens.iterator + (done // TOKENS) % 2 * self.block.words
            self.block.put(raw, parameters, base, l2norm, scale, lower_bound, tidx, count)
            cute.arch.sync_threads()
            ahead = done + TOKENS
            self.block.load(raw, mQ, mK, mV, mGate, mBeta, tidx, start + ahead, length - ahead, key_head, head, column)
            for t in cutlass.range(count, unroll=1):
                rK, rQ, decay, beta, v_own, kq = self.block.take(base, t, l8, own)
                o, _ = token_step(rS, rK, rQ, decay, beta, v_own, kq, lane, self.rows)
                if holds_output(lane, self.rows):
                    rO = cute.make_rmem_tensor(cute.make_layout(1), BFloat16)
                    rO[0] = BFloat16(o)
                    store_vector(rO, row_ptr(mOut, start + done + t, head * HEAD_DIM + column + own, 2), 1)
                while next_end == done + t + 1:
                    slot = Int32(mSlots[entry])
                    if slot_is_valid(slot, num_slots):
                        store_rows(rS, slot_ptr(mState, slot, inner), self.rows, self.dtype)
                    entry += 1
                    next_end = Int32(NEVER)
                    if entry < last_entry:
                        next_end = Int32(mEnds[entry])
            done = ahead
        if slot_is_valid(write, num_slots):
            store_rows(rS, slot_ptr(mState, write, inner), self.rows, self.dtype)


def build(key: RecurrentPrefillKey):
    """Compile one specialisation for sm_90a from fake tensors."""
    kernel = RecurrentPrefill(key)
    tokens, n, hk, hv = (cute.sym_int() for _ in range(4))
    return cute_compile(
        kernel,
        fake_heads(BFloat16, tokens, hk, HEAD_DIM),
        fake_heads(BFloat16, tokens, hk, HEAD_DIM),
        fake_heads(BFloat16, tokens, hv, HEAD_DIM),
        fake_gates(tokens, hv, *((HEAD_DIM,) if kernel.kda else ())),
        fake_gates(tokens, hv),
        fake_vector(Float32, hv),
        fake_vector(Float32, align=16),
        fake_states(kernel.dtype, cute.sym_int(), hv, HEAD_DIM),
        fake_ids(n, Int32),
        fake_ids(n, Int32),
        fake_vector(Int32),
        fake_vector(Int32),
        fake_vector(Int32),
        fake_vector(Int32),
        fake_heads(BFloat16, tokens, hv, HEAD_DIM),
        Int32(0),
        Int32(0),
        Int32(2**31 - 1),
        Int32(1),
        Float32(1.0),
        Float32(-1.0),
        Int32(0),
        fake_stream(),
    )
