"""One token of GDN or KDA per sequence, state read and written by slot id.

    s = diag(decay) S;  u = beta (v - s k);  S' = s + u k^T;  o = scale S' q

A block owns `tile` rows of V of one (sequence n, value head h); grid (HV * 128 / tile, N).
1  every thread reads the ids and issues its state loads, 16-byte vectors, to registers: 16 lanes a V row, `rows` rows a lane;
2  with PDL it waits for the previous kernel only now if that one wrote neither ids, slots nor weights (`settled`) and may still
   run, else before 1; then the next kernel may start: it does when the last block says so, so that one says it first;
3  all that is left is asked for at once: q, k by the first warp, v, gates and beta;
4  16 lanes each normalise k and q (8 channels) and form k.q, into shared memory (1 KiB); the last warp puts beta and the decay;
5  one block barrier; every thread reads its 8 k, q (and decay) values;
6  one pass over the registers gives s, s.k and s.q; one butterfly reduces all of a lane's rows; o = s.q + u (k.q);
7  S' goes from registers to the write slot, rounded once; o by the lanes that hold the s.q sums.
No block reads what another writes: rows of V are disjoint, so in place needs no order. A slot id outside the pool reads zeros
and stores nothing; a row with neither gives zeros.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, const_expr

from ..compile.cache import cute_compile
from ..compile.fake import fake_ids, fake_stream, fake_vector
from ..compile.fake_heads import fake_gates, fake_heads, fake_states
from ..configs.recurrent import PLAIN, RecurrentDecodeKey
from ..device.arith import sigmoid
from ..device.conv import copy_into
from ..device.memory import GMEM, load_vector, made_here, offset_ptr, smem_ptr, store_vector, zero_vector
from ..device.reduce import owned_row
from ..device.state_io import row_ptr, slot_is_valid, slot_ptr
from ..device.token_step import (
    HEAD_DIM,
    NORM_LANES,
    NORM_VALUES,
    decay_factor,
    holds_output,
    lane_in_row,
    load_rows_if,
    normalize_halves,
    place_of,
    put_channels,
    store_rows,
    take_channels,
    token_step,
    vector_width,
    widen_rows,
)

LANES = 16  # that share a row of V: with 8 a thread holds twice the k, q and decay, and fewer blocks fit an SM
GRID_Y = 65535  # rows of the grid; more sequences go to its z dimension


def bf16_ptr(address, align):
    """Pointer to bf16 in global memory."""
    return cute.make_ptr(BFloat16, address, GMEM, assumed_align=align)


class RecurrentDecode:
    def __init__(self, key: RecurrentDecodeKey):
        self.key = key
        self.dtype = {"float32": Float32, "bfloat16": BFloat16}[key.state]
        self.kda = key.kind != "gdn"
        self.bounded = key.kind == "kda_bounded"
        self.rows, self.warps, self.tile = key.rows, key.warps, key.tile
        self.tiles = HEAD_DIM // self.tile
        self.threads = 32 * self.warps
        # KDA's 128 decays: 4 a lane of the last warp, which no norm keeps busy; with many warps 2 a lane of the last two.
        self.gate_threads = 64 if self.warps >= 8 else 32
        self.gate_width = HEAD_DIM // self.gate_threads if self.kda else 1

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (N, HK, K) bf16, row stride any multiple of 8
        mK: cute.Tensor,  # (N, HK, K) bf16
        mV: cute.Tensor,  # (N, HV, V) bf16
        mGate: cute.Tensor,  # GDN a (N, HV); KDA raw gate (N, HV, K); bf16
        mBeta: cute.Tensor,  # (N, HV) bf16 logits
        mALog: cute.Tensor,  # (HV,) fp32
        mBias: cute.Tensor,  # GDN (HV,), KDA (HV * K,) fp32
        mState: cute.Tensor,  # (S, HV, V, K), slot stride any multiple of 16 bytes
        mReadIds: cute.Tensor,  # (N,) int32
        mWriteIds: cute.Tensor,  # (N,) int32
        mOut: cute.Tensor,  # (N, HV, V) bf16
        l2norm: Int32,  # 0: q and k are normalised already
        settled: Int32,  # 1: the kernel before this one wrote neither ids nor these slots; or PLAIN
        scale: Float32,
        lower_bound: Float32,
        stream,
    ):
        n, hv = cute.size(mReadIds, mode=[0]), cute.size(mV, mode=[1])
        hk = cute.size(mQ, mode=[1])
        grid_y = cutlass.min(n, Int32(GRID_Y))
        grid_z = (n + GRID_Y - 1) // GRID_Y
        self.kernel.set_name_prefix(self.key.symbol(), remove_cutlass_symbol=True, keep_mangled_name=False)
        tensors = mQ, mK, mV, mGate, mBeta, mALog, mBias, mState, mReadIds, mWriteIds, mOut
        self.kernel(
            tensors, l2norm, settled, scale, lower_bound, n, Float32(hk) / Float32(hv)
        ).launch(
            grid=[hv * self.tiles, grid_y, grid_z],
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=settled != PLAIN if const_expr(self.key.pdl) else False,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        tensors,  # those of `__call__`, in order
        l2norm: Int32,
        settled: Int32,
        scale: Float32,
        lower_bound: Float32,
        n: Int32,
        heads_ratio: Float32,  # HK / HV
    ):
        tidx, _, _ = cute.arch.thread_idx()
        place, row_low, row_high = cute.arch.block_idx()
        seq = row_high * GRID_Y + row_low
        if seq < n:
            tiles, _, _ = cute.arch.grid_dim()
            early = (settled != 0) & (seq * tiles + place < self.key.early)
            self.step(tensors, l2norm, early, scale, lower_bound, heads_ratio, tidx, place, seq)

    @cute.jit
    def step(
        self,
        tensors,
        l2norm: Int32,
        early: Boolean,
        scale: Float32,
        lower_bound: Float32,
        heads_ratio: Float32,
        tidx: Int32,
        block: Int32,
        seq: Int32,
    ):
        mQ, mK, mV, mGate, mBeta, mALog, mBias, mState, mReadIds, mWriteIds, mOut = tensors
        head, tile = block // self.tiles, block % self.tiles
        if const_expr(self.key.pdl):
            if not early:
                cute.arch.griddepcontrol_wait()
                cute.arch.griddepcontrol_launch_dependents()
        smem = cutlass.utils.SmemAllocator()
        sKQ = smem.allocate_tensor(Float32, cute.make_layout(2 * HEAD_DIM), 16)
        sDecay = smem.allocate_tensor(Float32, cute.make_layout(HEAD_DIM if self.kda else 1), 16)
        sScalar = smem.allocate_tensor(Float32, cute.make_layout(4), 16)  # beta, k.q, GDN's decay

        lane = tidx % 32
        place = lane_in_row(lane, LANES)
        row0 = tile * self.tile + tidx // LANES * self.rows
        num_slots = cute.size(mState, mode=[0])
        read, write = Int32(mReadIds[seq]), Int32(mWriteIds[seq])
        reads, writes = slot_is_valid(read, num_slots), slot_is_valid(write, num_slots)
        inner = (head * HEAD_DIM + row0) * HEAD_DIM + place * vector_width(self.dtype)
        vectors = load_rows_if(reads, slot_ptr(mState, read, inner), self.rows, self.dtype, LANES, self.key.kept)
        own = row0 + owned_row(lane, self.rows, LANES)
        # (h + 1/2) HK / HV is never an integer, so truncation gives h // (HV // HK) exactly.
        key_head = Int32((Float32(head) + Float32(0.5)) * heads_ratio)
        gate_thread = tidx - (self.threads - self.gate_threads)
        rBias = self.load_bias(mBias, gate_thread, head)
        a_log = mALog[head]
        first, second = self.input_addresses(mQ, mK, mGate, mBeta, tidx, gate_thread, seq, head, key_head)
        v_ptr = made_here(row_ptr(mV, seq, head * HEAD_DIM + own, 2), 2)
        if const_expr(self.key.pdl):
            if early:
                cute.arch.griddepcontrol_wait()
                cute.arch.griddepcontrol_launch_dependents()

        v_own = load_vector(v_ptr, 1)
        raw_k, raw_q = zero_vector(BFloat16, NORM_VALUES), zero_vector(BFloat16, NORM_VALUES)
        raw_gate, raw_beta = zero_vector(BFloat16, self.gate_width), zero_vector(BFloat16, 1)
        if tidx < 32:
            copy_into(bf16_ptr(first, 16), raw_k, NORM_VALUES)
            copy_into(bf16_ptr(second, 16), raw_q, NORM_VALUES)
        if gate_thread >= 0:
            copy_into(bf16_ptr(first, 2 * self.gate_width), raw_gate, self.gate_width)
            copy_into(bf16_ptr(second, 2), raw_beta, 1)
        if tidx < 32:
            self.put_vectors(raw_k, raw_q, sKQ, sScalar, l2norm, scale, tidx)
        if gate_thread >= 0:
            self.put_gates(raw_gate, raw_beta, rBias, a_log, sDecay, sScalar, lower_bound, gate_thread)
        cute.arch.sync_threads()

        rS = widen_rows(vectors, self.rows, self.dtype, LANES)
        rK = take_channels(sKQ.iterator, 0, place, LANES)
        rQ = take_channels(sKQ.iterator, HEAD_DIM, place, LANES)
        scalars = load_vector(smem_ptr(sScalar.iterator, 0, Float32, 16), 4)
        decay = take_channels(sDecay.iterator, 0, place, LANES) if const_expr(self.kda) else scalars[2]
        v_row = Float32(v_own[0])
        o, _ = token_step(rS, rK, rQ, decay, scalars[0], v_row, scalars[1], lane, self.rows, LANES)
        if writes:
            store_rows(rS, slot_ptr(mState, write, inner), self.rows, self.dtype, LANES)
        if holds_output(lane, self.rows, LANES):
            live = reads | writes
            rO = cute.make_rmem_tensor(cute.make_layout(1), BFloat16)
            rO[0] = BFloat16(o if live else Float32(0.0))
            store_vector(rO, row_ptr(mOut, seq, head * HEAD_DIM + own, 2), 1)

    @cute.jit
    def load_bias(self, mBias: cute.Tensor, gate_thread: Int32, head: Int32) -> cute.Tensor:
        """dt_bias of the thread's decays."""
        rBias = zero_vector(Float32, self.gate_width)
        if gate_thread >= 0:
            first = head * HEAD_DIM + gate_thread * self.gate_width if const_expr(self.kda) else head
            copy_into(offset_ptr(mBias.iterator, first, Float32, 4 * self.gate_width), rBias, self.gate_width)
        return rBias

    @cute.jit
    def input_addresses(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mGate: cute.Tensor,
        mBeta: cute.Tensor,
        tidx: Int32,
        gate_thread: Int32,
        seq: Int32,
        head: Int32,
        key_head: Int32,
    ):
        """Where the two things are that a thread asks for behind the wait: k and q, or gate and beta."""
        channel = key_head * HEAD_DIM + tidx % NORM_LANES * NORM_VALUES
        inner = head * HEAD_DIM + gate_thread * self.gate_width if const_expr(self.kda) else head
        k, q = row_ptr(mK, seq, channel, 16).toint(), row_ptr(mQ, seq, channel, 16).toint()
        gate, beta = row_ptr(mGate, seq, inner, 2 * self.gate_width).toint(), row_ptr(mBeta, seq, head, 2).toint()
        first, second = k if tidx < 32 else gate, q if tidx < 32 else beta
        return made_here(bf16_ptr(first, 2), 2).toint(), made_here(bf16_ptr(second, 2), 2).toint()

    @cute.jit
    def put_vectors(
        self,
        raw_k: cute.Tensor,
        raw_q: cute.Tensor,
        sKQ: cute.Tensor,
        sScalar: cute.Tensor,
        l2norm: Int32,
        scale: Float32,
        tidx: Int32,
    ):
        """Normalised k (lanes 0..15), scaled q (16..31) and k.q into shared memory by warp 0."""
        is_q = tidx >= NORM_LANES
        rX, kq = normalize_halves(raw_k, raw_q, is_q, scale, l2norm != 0)
        put_channels(rX, sKQ.iterator, (HEAD_DIM if is_q else 0), tidx % NORM_LANES, self.dtype)
        if tidx == 0:
            sScalar[1] = kq

    @cute.jit
    def put_gates(
        self,
        raw_gate: cute.Tensor,
        raw_beta: cute.Tensor,
        rBias: cute.Tensor,
        a_log: Float32,
        sDecay: cute.Tensor,
        sScalar: cute.Tensor,
        lower_bound: Float32,
        gate_thread: Int32,
    ):
        """beta and the decay (KDA: one a channel) into shared memory."""
        rDecay = cute.make_rmem_tensor(cute.make_layout(self.gate_width), Float32)
        for i in cutlass.range_constexpr(self.gate_width):
            rDecay[i] = decay_factor(self.bounded, Float32(raw_gate[i]), rBias[i], a_log, lower_bound)
        if const_expr(self.kda):
            at = place_of(gate_thread * self.gate_width, self.dtype)
            store_vector(rDecay, smem_ptr(sDecay.iterator, at, Float32, 4 * self.gate_width), self.gate_width)
        if gate_thread == 0:
            sScalar[0] = sigmoid(Float32(raw_beta[0]))
            if const_expr(not self.kda):
                sScalar[2] = rDecay[0]


def build(key: RecurrentDecodeKey):
    """Compile one specialisation for sm_90a from fake tensors."""
    kernel = RecurrentDecode(key)
    n, slots, hk, hv = cute.sym_int(), cute.sym_int(), cute.sym_int(), cute.sym_int()
    return cute_compile(
        kernel,
        fake_heads(BFloat16, n, hk, HEAD_DIM),
        fake_heads(BFloat16, n, hk, HEAD_DIM),
        fake_heads(BFloat16, n, hv, HEAD_DIM),
        fake_gates(n, hv, *((HEAD_DIM,) if kernel.kda else ())),
        fake_gates(n, hv),
        fake_vector(Float32, hv),
        fake_vector(Float32, align=16),
        fake_states(kernel.dtype, slots, hv, HEAD_DIM),
        fake_ids(n, Int32),
        fake_ids(n, Int32),
        fake_heads(BFloat16, n, hv, HEAD_DIM, align=2, divisibility=1),
        Int32(1),
        Int32(0),
        Float32(1.0),
        Float32(-1.0),
        fake_stream(),
    )
