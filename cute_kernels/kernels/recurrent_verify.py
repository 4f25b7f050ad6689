"""Verify of GDN or KDA: replay accepted drafts from the log, store that state, run and log the new drafts; by slot id.

    replay, t < num_accepted:   S <- S diag(decay) + u k^T                                    (k, u, gate from the log)
    store S to the write slot, rounded once; go on from the stored bits
    new tokens, t < cu[n+1] - cu[n]:   s = S diag(decay);  u = beta (v - s k);  S <- s + u k^T;  o = scale S q

A block owns `tile` rows of V of one (sequence n, value head h); grid (HV * 128 / tile, N). The state is read once and
written once whatever the number of drafts.
1  every thread reads ids, counts and the log's half; the state tile is on its way at once, by one bulk copy into shared
   memory; then the logged tokens. Only after that a dependent launch waits for the kernel before it (`settled`);
2  all other loads are issued before any arithmetic: 16 lanes a token for k (logged and new), q, the tile's u and v, KDA's
   raw gates; then norms, k.q and gates go to shared memory; one block barrier;
3  replay and the new tokens run on registers: 8 lanes a V row, `rows` rows a lane, one reduction a token (`turned_step`). In
   between a warp's rows go back to where they landed and from there, by a bulk copy, to the write slot.
Races: rows of V are disjoint between blocks, so in place needs no order. Logged k and gates are read by several blocks, so
new ones go to the other half of the log; raw k is written by the first value head of a key head, GDN's decay and KDA's raw
gate by the first tile of a head, u by the lanes that own the row.
Rules: an id outside the pool reads zeros and stores nothing. A row with neither id, or with a count outside 0..Tmax, gives
zeros and touches no slot and no log. A row whose log row is out of range replays and logs nothing. Tokens of a row beyond
`MAX_TOKENS` or Tmax are not run. Output rows beyond cu[N] become zeros.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint32, const_expr

from ..compile.cache import cute_compile
from ..compile.fake import fake_ids, fake_stream, fake_vector
from ..compile.fake_heads import fake_gates, fake_heads, fake_log, fake_states
from ..configs.recurrent import PLAIN
from ..configs.verify import MAX_TOKENS, VerifyKey
from ..device.landed_rows import LandedRows
from ..device.memory import load_vector, offset_ptr, smem_ptr, store_vector, zero_vector
from ..device.predicated import load_int_where, load_into_where, store_half_where, store_word_where, zero_words
from ..device.state_io import row_ptr, slot_is_valid
from ..device.token_block import TokenBlock, put_decays
from ..device.token_step import (
    HEAD_DIM,
    NORM_LANES,
    NORM_VALUES,
    lane_in_row,
    normalize,
    put_channels,
    replay_step,
    round_rows,
    take_channels,
    vector_width,
    widen_rows,
)
from ..device.turned_step import load_turned, own_row, share_of, spread, store_turned, turned_step
from ..device.warp_ops import pack_bf16

GRID_Y = 65535  # rows in the grid's y dimension; more sequences go to z


class Row(NamedTuple):
    """What a row reads, writes, replays and runs after the rules above, and its key head."""

    read: Int32
    write: Int32
    reads: Boolean
    writes: Boolean
    logged: Boolean
    log_in: Int64  # first token of the half that is read, in tokens of the whole log
    log_out: Int64  # the same of the half that is written
    start: Int32
    length: Int32
    replayed: Int32
    key_head: Int32
    first_of_key_head: Boolean


class RecurrentVerify(LandedRows):
    def __init__(self, key: VerifyKey):
        self.key = key
        self.dtype = {"float32": Float32, "bfloat16": BFloat16}[key.state]
        self.kda = key.kind != "gdn"
        self.bounded = key.kind == "kda_bounded"
        self.commit = key.commit
        self.rows, self.warps, self.tile = key.rows, key.warps, key.tile
        self.tiles = HEAD_DIM // self.tile
        self.landings = 1  # copies of the state into shared memory, each with a barrier
        self.threads = 32 * self.warps
        self.width = self.tile // NORM_LANES  # u and v values of a token a prologue lane moves
        self.block = TokenBlock(key.kind, self.dtype, self.tile)
        # A logged token in shared memory: k, KDA's decays, the tile's u, GDN's decay.
        self.at_u = (2 if self.kda else 1) * HEAD_DIM
        self.old_record = self.at_u + self.tile + (0 if self.kda else 4)
        self.tile_bytes = self.tile * HEAD_DIM * self.dtype.width // 8

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor | None,  # (T, HK, K) bf16, row stride any multiple of 8; None in commit
        mK: cute.Tensor | None,  # (T, HK, K) bf16
        mV: cute.Tensor | None,  # (T, HV, V) bf16
        mGate: cute.Tensor | None,  # GDN a (T, HV); KDA raw gate (T, HV, K); bf16
        mBeta: cute.Tensor | None,  # (T, HV) bf16 logits
        mALog: cute.Tensor | None,  # (HV,) fp32; None in GDN commit
        mBias: cute.Tensor | None,  # GDN (HV,), KDA (HV * K,) fp32
        mState: cute.Tensor,  # (S, HV, V, K), slot stride any multiple of 16 bytes
        mReadIds: cute.Tensor,  # (N,) int32
        mWriteIds: cute.Tensor,  # (N,) int32
        mCu: cute.Tensor | None,  # (N + 1,) int32
        mLogK: cute.Tensor,  # (B, 2, Tmax, HK, K) bf16
        mLogU: cute.Tensor,  # (B, 2, Tmax, HV, V) fp32
        mLogGate: cute.Tensor,  # GDN (B, 2, Tmax, HV) fp32 decay; KDA (B, 2, Tmax, HV, K) bf16 raw gate
        mHalf: cute.Tensor,  # (B,) int32, half to read
        mRows: cute.Tensor,  # (any,) int32, log rows of the batch rows if `indexed`
        mAccepted: cute.Tensor,  # (N,) int32
        mOut: cute.Tensor | None,  # (T, HV, V) bf16
        indexed: Int32,  # 0: batch row n has log row n
        l2norm: Int32,  # 0: q and k are normalised already
        rounds: Int32,  # 1: round the state to a bf16 pool's dtype after every token, replayed ones included
        settled: Int32,  # 1: the kernel before this one wrote no ids, counts or halves, nor these slots and log rows; or PLAIN
        scale: Float32,
        lower_bound: Float32,
        stream,
    ):
        n, hk, hv = cute.size(mReadIds, mode=[0]), cute.size(mLogK, mode=[3]), cute.size(mLogU, mode=[3])
        grid = [hv * self.tiles, cutlass.min(n, Int32(GRID_Y)), (n + GRID_Y - 1) // GRID_Y]
        self.kernel.set_name_prefix(self.key.symbol(), remove_cutlass_symbol=True, keep_mangled_name=False)
        tensors = (
            mQ, mK, mV, mGate, mBeta, mALog, mBias, mState, mReadIds, mWriteIds, mCu, mLogK, mLogU, mLogGate, mHalf, mRows,
            mAccepted, mOut,
        )  # fmt: skip
        self.kernel(tensors, indexed, l2norm, rounds, settled, scale, lower_bound, n, Float32(hk) / Float32(hv)).launch(
            grid=grid,
            block=[self.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.key.blocks,
            preferred_smem_carveout=100 if self.key.blocks > 1 else None,
            use_pdl=settled != PLAIN if const_expr(self.key.pdl) else False,
        )

    @cute.kernel
    def kernel(
        self,
        tensors,  # those of `__call__`, in order
        indexed: Int32,
        l2norm: Int32,
        rounds: Int32,
        settled: Int32,
        scale: Float32,
        lower_bound: Float32,
        n: Int32,
        heads_ratio: Float32,  # HK / HV
    ):
        mState, mReadIds, mWriteIds, mCu, mLogK, _, _, mHalf, mRows, mAccepted, mOut = tensors[7:]
        tidx, _, _ = cute.arch.thread_idx()
        place, row_low, row_high = cute.arch.block_idx()
        seq = row_high * GRID_Y + row_low
        blocks, _, _ = cute.arch.grid_dim()
        early = (settled != 0) & (seq * blocks + place < self.key.early)
        if const_expr(self.key.pdl):
            if not early:
                cute.arch.griddepcontrol_wait()
                cute.arch.griddepcontrol_launch_dependents()
        if seq < n:
            head, tile = place // self.tiles, place % self.tiles
            row = self.resolve_row(
                (mReadIds, mWriteIds, mCu, mLogK, mHalf, mRows, mAccepted), cute.size(mState, mode=[0]), indexed != 0, seq, head,
                heads_ratio,
            )  # fmt: skip
            if row.reads | row.writes:
                self.live_row(tensors, row, l2norm != 0, rounds != 0, early, scale, lower_bound, tidx, head, tile)
            if const_expr(not self.commit):
                if not (row.reads | row.writes):
                    self.wait(early)
                    self.zero_rows(mOut, tidx, head, tile, row.start, row.start + row.length)
                if seq == n - 1:
                    self.zero_rows(mOut, tidx, head, tile, Int32(mCu[n]), cute.size(mOut, mode=[0]))

    @cute.jit
    def resolve_row(
        self,
        tensors,
        num_slots: Int32,
        indexed: Boolean,
        seq: Int32,
        head: Int32,
        heads_ratio: Float32,  # HK / HV
    ):
        """The `Row` of a block."""
        mReadIds, mWriteIds, mCu, mLogK, mHalf, mRows, mAccepted = tensors
        log_rows = cute.size(mHalf, mode=[0])
        max_tokens = cutlass.min(cute.size(mLogK, mode=[2]), MAX_TOKENS)
        read, write, accepted = Int32(mReadIds[seq]), Int32(mWriteIds[seq]), Int32(mAccepted[seq])
        # The half is asked for beside the ids, but where the log row must be known first.
        log_row, half = seq, load_int_where(seq < log_rows, mHalf, seq)
        if indexed:
            log_row = Int32(mRows[seq])
            half = load_int_where(slot_is_valid(log_row, log_rows), mHalf, log_row)
        start, length = Int32(0), Int32(0)
        if const_expr(not self.commit):
            start = Int32(mCu[seq])
            length = cutlass.max(cutlass.min(Int32(mCu[seq + 1]) - start, max_tokens), 0)
        counted = accepted.to(Uint32) <= max_tokens.to(Uint32)
        reads = counted & slot_is_valid(read, num_slots)
        writes = counted & slot_is_valid(write, num_slots)
        logged = (reads | writes) & slot_is_valid(log_row, log_rows)
        replayed = accepted if logged else Int32(0)
        half = half & 1
        log_in = (Int64(log_row) * 2 + half) * cute.size(mLogK, mode=[2])
        log_out = (Int64(log_row) * 2 + (half ^ 1)) * cute.size(mLogK, mode=[2])
        # (h + 1/2) HK / HV is never an integer, so truncation gives h // (HV // HK) exactly.
        key_head = Int32((Float32(head) + Float32(0.5)) * heads_ratio)
        first = (head == 0) | (Int32((Float32(head) - Float32(0.5)) * heads_ratio) != key_head)
        return Row(read, write, reads, writes, logged, log_in, log_out, start, length, replayed, key_head, first)

    @cute.jit
    def wait(self, early: Boolean):
        """An early block of a dependent launch waits for the kernel before it; then the next one may start.

        In this order, so that whatever ran two kernels back is complete when a kernel starts.
        """
        if const_expr(self.key.pdl):
            if early:
                cute.arch.griddepcontrol_wait()
                cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def zero_rows(self, mOut: cute.Tensor, tidx: Int32, head: Int32, tile: Int32, begin: Int32, end: Int32):
        """Zero this block's columns of output rows begin..end."""
        vectors = self.tile // 8
        inner = head * HEAD_DIM + tile * self.tile + tidx % vectors * 8
        for row in cutlass.range(begin + tidx // vectors, end, self.threads // vectors, unroll=1):
            store_vector(zero_vector(BFloat16, 8), row_ptr(mOut, row, inner, 16), 8)

    @cute.jit
    def live_row(
        self,
        tensors,
        row,
        l2norm: Boolean,
        rounds: Boolean,
        early: Boolean,
        scale: Float32,
        lower_bound: Float32,
        tidx: Int32,
        head: Int32,
        tile: Int32,
    ):
        mQ, mK, mV, mGate, mBeta, mALog, mBias, mState, _, _, _, mLogK, mLogU, mLogGate, _, _, _, mOut = tensors
        start, length, replayed, key_head = row.start, row.length, row.replayed, row.key_head
        smem = cutlass.utils.SmemAllocator()
        sLanding = smem.allocate_tensor(self.dtype, cute.make_layout(self.tile * HEAD_DIM), 128)
        sOld = smem.allocate_tensor(Float32, cute.make_layout(MAX_TOKENS * self.old_record), 16)
        sNew = None
        if const_expr(not self.commit):
            sNew = smem.allocate_tensor(Float32, cute.make_layout(self.block.words), 16)
        bars = smem.allocate_array(Int64, self.landings)

        self.land_rows(mState, sLanding, bars, row.read, row.reads, head * HEAD_DIM + tile * self.tile, tidx)
        column = tile * self.tile
        # Threads that have no share of the logged (new) tokens get numbers whose token no count reaches.
        thread_new = (tidx + self.threads - 128) % self.threads
        old = self.old_registers()
        self.load_old(old, (mLogK, mLogU, mLogGate), row, tidx, head, column)
        new, parameters = None, None
        if const_expr(not self.commit or self.kda):
            parameters = self.block.parameters(mALog, mBias, tidx, head)
        self.wait(early)
        if const_expr(not self.commit):
            new = self.block.registers()
            self.block.load(new, mQ, mK, mV, mGate, mBeta, thread_new, start, length, key_head, head, column)
        if self.has_token(tidx, replayed):
            self.put_old(old, parameters, sOld.iterator, l2norm, lower_bound, tidx, replayed)
        if const_expr(not self.commit):
            if self.has_token(thread_new, length):
                self.block.put(new, parameters, sNew.iterator, l2norm, scale, lower_bound, thread_new, length)
            if row.logged & row.first_of_key_head & (tile == 0):
                self.log_key(new[0], mLogK, thread_new, key_head, row.log_out, length)
            if row.logged & (column == 0):
                self.log_gate(new[3], sNew.iterator, mLogGate, thread_new, head, row.log_out, length)
        cute.arch.sync_threads()

        self.run_tile((sLanding, bars, sOld, sNew), mState, mLogU, mOut, row, rounds, tidx, head, column)

    @cute.jit
    def has_token(self, thread: Int32, count: Int32) -> Boolean:
        """Whether the warp of a thread has any of `count` tokens, 16 lanes each; the same for all its lanes."""
        return cute.arch.make_warp_uniform(thread // 32) * (32 // NORM_LANES) < count

    @cute.jit
    def run_tile(
        self,
        smem,
        mState: cute.Tensor,
        mLogU: cute.Tensor,
        output: cute.Tensor | None,
        row,
        rounds: Boolean,
        tidx: Int32,
        head: Int32,
        column: Int32,
    ):
        """Replay, store and run the new tokens on the block's rows of state, once their vectors are in shared memory."""
        sLanding, bars, sOld, sNew = smem
        start, length, replayed = row.start, row.length, row.replayed
        lane = tidx % 32
        l8 = lane_in_row(lane)
        own = (
            Int32(0) if const_expr(self.commit) else own_row(lane, self.rows)
        )  # without dots there is nothing to turn for
        tile_row = tidx // 8 * self.rows
        landed = smem_ptr(sLanding.iterator, tile_row * HEAD_DIM + l8 * vector_width(self.dtype), self.dtype, 16)
        if row.reads:
            cute.arch.mbarrier_wait(bars + tidx // (self.threads // self.landings), 0)
        rS = widen_rows(load_turned(landed, own, self.rows, self.dtype), self.rows, self.dtype)

        for t in cutlass.range(replayed, unroll=1):
            at = t * self.old_record
            rK = take_channels(sOld.iterator, at, l8)
            if const_expr(self.kda):
                decay = take_channels(sOld.iterator, at + HEAD_DIM, l8)
            else:
                decay = sOld[at + self.at_u + self.tile]
            if const_expr(self.commit):
                rU = load_vector(smem_ptr(sOld.iterator, at + self.at_u + tile_row, Float32, 4 * self.rows), self.rows)
            else:
                rU = spread(sOld[at + self.at_u + tile_row + own], self.rows)
            replay_step(rS, rK, rU, decay, self.rows)
            if const_expr(self.dtype is BFloat16):
                if rounds:
                    round_rows(rS, self.rows, self.dtype)
        if replayed > 0:
            store_turned(rS, landed, own, self.rows, self.dtype)
            cute.arch.fence_view_async_shared()
        self.send_rows(mState, sLanding, row.write, row.writes, head * HEAD_DIM + column, tidx // 32, lane)

        if const_expr(not self.commit):
            self.join()
            round_rows(rS, self.rows, self.dtype)
            place = head * HEAD_DIM + column + tile_row + own
            width = cute.size(mLogU, mode=[3]) * HEAD_DIM
            stores_o, stores_u = share_of(lane, self.rows) == 1, row.logged & (share_of(lane, self.rows) == 0)
            u_at = offset_ptr(mLogU.iterator, row.log_out * width + place, Float32, 4).toint()
            o_at, o_step = self.output_place(output, start, place, tile_row + own)
            for t in cutlass.range(length, unroll=1):
                rK, rQ, decay, beta, v_own, kq = self.block.take(sNew.iterator, t, l8, tile_row + own)
                o, u = turned_step(rS, rK, rQ, decay, beta, v_own, kq, self.rows)
                if const_expr(self.dtype is BFloat16):
                    if rounds:
                        round_rows(rS, self.rows, self.dtype)
                self.put_output(stores_o, o_at, o)
                store_word_where(stores_u, u_at, u)
                o_at += o_step
                u_at += Int64(width * 4)
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    def join(self):
        """Before the first new token, where its vectors come into shared memory later than the logged ones."""

    def output_place(self, output, start, place, own):
        """Address of a lane's first output, and the step to the next token's; `own`: its row of V within the block."""
        return row_ptr(output, start, place, 2).toint(), Int64(output.stride[0]) * 2

    def put_output(self, condition, address, o):
        """An output where it goes."""
        store_half_where(condition, address, pack_bf16(o, o))

    def old_registers(self):
        """Zeroed registers for `load_old`: k, u, KDA's raw gate or GDN's decay."""
        gate = zero_words(NORM_VALUES) if self.kda else zero_vector(Float32, 1)
        return zero_words(NORM_VALUES), zero_vector(Float32, self.width), gate

    @cute.jit
    def load_old(self, old, logs, row, tidx: Int32, head: Int32, column: Int32):
        """Issue the loads of the logged tokens that are replayed: threads 0..127, 16 lanes a token."""
        rK, rU, rGate = old
        mLogK, mLogU, mLogGate = logs
        log_in, replayed = row.log_in, row.replayed
        hk, hv = cute.size(mLogK, mode=[3]), cute.size(mLogU, mode=[3])
        token, lane16 = tidx // NORM_LANES, tidx % NORM_LANES
        live = token < replayed
        at = (log_in + token) * (hk * HEAD_DIM) + row.key_head * HEAD_DIM + lane16 * NORM_VALUES
        load_into_where(live, rK, offset_ptr(mLogK.iterator, at, BFloat16, 16))
        at = (log_in + token) * (hv * HEAD_DIM) + head * HEAD_DIM + column + lane16 * self.width
        load_into_where(live, rU, offset_ptr(mLogU.iterator, at, Float32, min(16, 4 * self.width)))
        if const_expr(self.kda):
            at = (log_in + token) * (hv * HEAD_DIM) + head * HEAD_DIM + lane16 * NORM_VALUES
            load_into_where(live, rGate, offset_ptr(mLogGate.iterator, at, BFloat16, 16))
        else:
            source = offset_ptr(mLogGate.iterator, (log_in + tidx) * hv + head, Float32, 4)
            load_into_where(tidx < replayed, rGate, source)

    @cute.jit
    def put_old(
        self,
        old,
        parameters: cute.Tensor | None,
        base: cute.Pointer,  # fp32, shared
        l2norm: Boolean,
        lower_bound: Float32,
        tidx: Int32,
        replayed: Int32,
    ):
        """Logged tokens into shared memory: normalised k, decays and the tile's u."""
        raw_k, raw_u, raw_gate = old
        token, lane16 = tidx // NORM_LANES, tidx % NORM_LANES
        rK = normalize(raw_k, Float32(1.0), l2norm, False)
        at = token * self.old_record
        put_channels(rK, base, at, lane16, self.dtype)
        place = smem_ptr(base, at + self.at_u, Float32, 16) + lane16 * self.width
        store_vector(raw_u, smem_ptr(place, 0, Float32, min(16, 4 * self.width)), self.width)
        if const_expr(self.kda):
            if token < replayed:
                put_decays(self.bounded, self.dtype, raw_gate, parameters, base, at + HEAD_DIM, lower_bound, lane16)
        else:
            if tidx < replayed:
                (base + (tidx * self.old_record + self.at_u + self.tile)).store(raw_gate[0])

    @cute.jit
    def log_key(
        self, raw: cute.Tensor, mLogK: cute.Tensor, thread: Int32, key_head: Int32, log_out: Int64, length: Int32
    ):
        """Raw k of the new tokens to the log, by one block."""
        token, inner = thread // NORM_LANES, key_head * HEAD_DIM + thread % NORM_LANES * NORM_VALUES
        if token < length:
            at = (log_out + token) * (cute.size(mLogK, mode=[3]) * HEAD_DIM) + inner
            store_vector(raw, offset_ptr(mLogK.iterator, at, BFloat16, 16), NORM_VALUES)

    @cute.jit
    def log_gate(
        self,
        raw: cute.Tensor,
        base: cute.Pointer,
        mLogGate: cute.Tensor,
        thread: Int32,
        head: Int32,
        log_out: Int64,
        length: Int32,
    ):
        """KDA's raw gate of the new tokens to the log, or GDN's decay by the thread that put it into a token's record."""
        hv = cute.size(mLogGate, mode=[3])
        if const_expr(self.kda):
            token, inner = thread // NORM_LANES, head * HEAD_DIM + thread % NORM_LANES * NORM_VALUES
            if token < length:
                at = (log_out + token) * (hv * HEAD_DIM) + inner
                store_vector(raw, offset_ptr(mLogGate.iterator, at, BFloat16, 16), NORM_VALUES)
        else:
            if thread < length:
                decay = (base + (thread * self.block.record + self.block.at_scalars + 2)).load()
                self.log_decay(decay, mLogGate, thread, head, log_out)

    def log_decay(self, decay, mLogGate, token, head, log_out):
        """GDN's decay of a new token to the log."""
        at = (log_out + token) * cute.size(mLogGate, mode=[3]) + head
        offset_ptr(mLogGate.iterator, at, Float32, 4).store(decay)


def build(key: VerifyKey):
    """Compile one specialisation for sm_90a from fake tensors."""
    return compile_verify(RecurrentVerify(key), key)


def compile_verify(kernel: RecurrentVerify, key: VerifyKey):
    """Compile a verify or commit kernel from fake tensors."""
    tokens, n, hk, hv = cute.sym_int(), cute.sym_int(), cute.sym_int(), cute.sym_int()
    log_rows, max_tokens = cute.sym_int(), cute.sym_int()
    new, channels = not key.commit, (HEAD_DIM,) if kernel.kda else ()
    return cute_compile(
        kernel,
        fake_heads(BFloat16, tokens, hk, HEAD_DIM) if new else None,
        fake_heads(BFloat16, tokens, hk, HEAD_DIM) if new else None,
        fake_heads(BFloat16, tokens, hv, HEAD_DIM) if new else None,
        fake_gates(tokens, hv, *channels) if new else None,
        fake_gates(tokens, hv) if new else None,
        fake_vector(Float32, hv) if new or kernel.kda else None,
        fake_vector(Float32, align=16) if new or kernel.kda else None,
        fake_states(kernel.dtype, cute.sym_int(), hv, HEAD_DIM),
        fake_ids(n, Int32),
        fake_ids(n, Int32),
        fake_vector(Int32) if new else None,
        fake_log(BFloat16, log_rows, max_tokens, hk, HEAD_DIM),
        fake_log(Float32, log_rows, max_tokens, hv, HEAD_DIM),
        fake_log(BFloat16 if kernel.kda else Float32, log_rows, max_tokens, hv, *channels),
        fake_ids(log_rows, Int32),
        fake_vector(Int32),
        fake_ids(n, Int32),
        fake_heads(BFloat16, tokens, hv, HEAD_DIM) if new else None,
        Int32(0),
        Int32(1),
        Int32(0),
        Int32(0),
        Float32(1.0),
        Float32(-1.0),
        fake_stream(),
    )
