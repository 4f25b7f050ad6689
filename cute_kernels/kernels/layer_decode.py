"""A linear-attention layer between its projections, one token per sequence: conv, recurrence and gated norm in one launch.

    q, k, v = silu(conv(x)) rounded to bf16;  q, k normalised;  one GDN or KDA token;  y = o / rms(o) * w * act(z)

A block owns one (sequence n, value head h) with all 128 rows of V; grid (HV, N), so that the heads of a row run together.
1  one thread issues the state as bulk copies into shared memory, one a pass, all of them or the first `landed`; 16 lanes each for
   k, q and v load window and taps;
2  with `settled` it waits for the previous kernel only now (with `early` the first blocks do), else before 1; then the next
   kernel may start;
3  these lanes load x, convolve, write the window, normalise and form k.q; another warp prepares act(z) w, the last the gates;
4  one barrier; then, pass by pass: wait for its rows, `token_step`, S' from registers to the write slot, o to shared memory; with
   `landed` a later pass lands where every thread has read this one;
5  one barrier; one warp forms the norm of the 128 values of o and stores the row.
The token is `token_step` on bf16 q, k, v: states and windows equal those of conv decode and recurrent decode bit for bit.

Why sharing a window is free of races. Its ring has W = 4 columns, the input of token t stands in column t mod 4. All heads of a
row read it (q and k are convolved again by each value head of a key head). In place they read the columns of tokens t-3, t-2 and
t-1 and write that of t: four consecutive tokens, four distinct columns, so no byte is both read and written in a launch and no
order among blocks is needed. Into another slot the columns of t-2 and t-1 are copied too; no row reads that slot in this call.
Each channel has one writer: v channels their own block, q and k channels the first value head of the key head.
A row of V belongs to one block, which stores it only after the pass's copy has landed; later copies read other rows.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_tensor

from ..compile.cache import cute_compile
from ..compile.fake import fake_ids, fake_matrix, fake_stream, fake_vector
from ..compile.fake_heads import fake_gates, fake_states
from ..configs.layer import CONV_BIAS, CONV_WIDTH, NORM_BF16, PLAIN, SETTLED, SILU_GATE, LayerDecodeKey
from ..device.arith import fma_rn, mul_rn, sigmoid
from ..device.conv import DTYPES, copy_into, fake_tokens, window_ptr
from ..device.kept import land
from ..device.layer_parts import convolved, gated, output_gate
from ..device.memory import load_vector, made_here, offset_ptr, smem_ptr, store_vector, widen, zero_vector
from ..device.predicated import load_int_where
from ..device.reduce import owned_row, sum_over
from ..device.state_io import row_ptr, slot_is_valid, slot_ptr
from ..device.token_step import (
    HEAD_DIM,
    NORM_LANES,
    NORM_VALUES,
    decay_factor,
    dot_channels,
    holds_output,
    lane_in_row,
    load_rows,
    norm_factor,
    place_of,
    put_channels,
    store_rows,
    take_channels,
    token_step,
    vector_width,
    widen_rows,
)

GRID_Y = 65535  # rows of the grid; more sequences go to its z dimension
CONV_THREADS = 64  # 16 lanes each for k, q, v; the last 16 repeat v and store nothing
NORM_WARP = 2  # prepares act(z) w, and ends with the norm


class LayerDecode:
    def __init__(self, key: LayerDecodeKey):
        self.key = key
        self.dtype, self.weight_dtype = DTYPES[key.state], DTYPES[key.weight]
        self.kda = key.kind != "gdn"
        self.bounded = key.kind == "kda_bounded"
        self.rows, self.lanes, self.pass_rows = key.rows, key.lanes, key.pass_rows
        self.passes = HEAD_DIM // self.pass_rows
        self.landed = key.landed or self.passes
        self.pass_bytes = self.pass_rows * HEAD_DIM * self.dtype.width // 8
        self.threads = 32 * key.warps
        # The window comes a latency earlier: its position beside the ids, the copies by a warp without a window. Whole heads of
        # bf16 pools gain nothing.
        streams = key.landed > 4 or key.resident > 0
        self.ahead = key.state == "float32" or streams
        self.lander = 32 * NORM_WARP if self.ahead else 0
        # KDA's 128 gates: over as many of the threads that do not convolve as divide them evenly. In large batches the warp that
        # waits for the output gate has no share.
        self.gate_threads = min(HEAD_DIM, self.threads - (32 * (NORM_WARP + 1) if streams else CONV_THREADS))

    @cute.jit
    def __call__(
        self,
        mX: cute.Tensor,  # (N, C) bf16 raw q | k | v, row stride any multiple of 8
        mGate: cute.Tensor,  # GDN a (N, HV); KDA raw gate (N, HV, K); bf16
        mBeta: cute.Tensor,  # (N, HV) bf16 logits
        mZ: cute.Tensor,  # (N, HV * V) bf16 output gate
        mTaps: cute.Tensor,  # (C, W)
        mConvBias: cute.Tensor,  # (C, 1), or anything of the taps' dtype where there is none
        mConvState: cute.Tensor,  # (S, W, C) bf16, slot stride any multiple of 16 bytes
        mALog: cute.Tensor,  # (HV,) fp32
        mBias: cute.Tensor,  # GDN (HV,), KDA (HV * K,) fp32
        mNormWeight: cute.Tensor,  # (V,) bf16, or (2 V,): fp32 in pieces
        mState: cute.Tensor,  # (S, HV, V, K), slot stride any multiple of 16 bytes
        mReadIds: cute.Tensor,  # (N,) int32
        mWriteIds: cute.Tensor,  # (N,) int32
        mPositions: cute.Tensor,  # (N,) int32
        mOut: cute.Tensor,  # (N, HV * V) bf16
        flags: Int32,  # bits of configs/layer.py
        scale: Float32,
        lower_bound: Float32,
        eps: Float32,
        stream,
    ):
        n, hv = cute.size(mReadIds, mode=[0]), cute.size(mState, mode=[1])
        hk = (cute.size(mX, mode=[1]) // HEAD_DIM - hv) // 2
        self.kernel.set_name_prefix(self.key.symbol(), remove_cutlass_symbol=True, keep_mangled_name=False)
        tensors = (
            mX, mGate, mBeta, mZ, mTaps, mConvBias, mConvState, mALog, mBias, mNormWeight, mState, mReadIds, mWriteIds,
            mPositions, mOut,
        )  # fmt: skip
        self.kernel(tensors, flags, scale, lower_bound, eps, n, hk, Float32(hk) / Float32(hv)).launch(
            grid=[hv, cutlass.min(n, Int32(GRID_Y)), (n + GRID_Y - 1) // GRID_Y],
            block=[self.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.key.resident,
            preferred_smem_carveout=100 if self.key.resident else None,
            use_pdl=(flags & PLAIN) == 0,
        )

    @cute.kernel
    def kernel(
        self,
        tensors,  # those of `__call__`, in order
        flags: Int32,
        scale: Float32,
        lower_bound: Float32,
        eps: Float32,
        n: Int32,
        hk: Int32,
        heads_ratio: Float32,  # HK / HV
    ):
        mState, mReadIds, mWriteIds, mPositions, mOut = tensors[10:]
        tidx, _, _ = cute.arch.thread_idx()
        head, row_low, row_high = cute.arch.block_idx()
        seq = row_high * GRID_Y + row_low
        if seq < n:
            early = Boolean(True)
            if const_expr(self.key.early):
                heads, _, _ = cute.arch.grid_dim()
                early = ((flags & SETTLED) != 0) & (seq * heads + head < self.key.early)
                if not early:
                    cute.arch.griddepcontrol_wait()
                    cute.arch.griddepcontrol_launch_dependents()
            elif (flags & SETTLED) == 0:
                cute.arch.griddepcontrol_wait()
            num_slots = cute.size(mState, mode=[0])
            if const_expr(self.ahead):
                position = load_int_where(seq < n, mPositions, seq)
            read, write = Int32(mReadIds[seq]), Int32(mWriteIds[seq])
            if const_expr(not self.ahead):
                position = Int32(mPositions[seq])
            reads, writes = slot_is_valid(read, num_slots), slot_is_valid(write, num_slots)
            if const_expr(self.ahead):
                # No position is that small. The question keeps its load beside the ids': behind them it would be one that
                # the window's addresses wait for together with the taps.
                known = position > -(1 << 31)
                reads, writes = reads & known, writes & known
            if reads | writes:
                # (h + 1/2) HK / HV is never an integer, so truncation gives h // (HV // HK) exactly.
                key_head = Int32((Float32(head) + Float32(0.5)) * heads_ratio)
                first = (head == 0) | (Int32((Float32(head) - Float32(0.5)) * heads_ratio) != key_head)
                self.live_row(
                    tensors, flags, scale, lower_bound, eps, tidx, head, key_head, first, hk, seq, read, write, position, reads,
                    writes, early,
                )  # fmt: skip
            if not (reads | writes):
                cute.arch.griddepcontrol_wait()
                cute.arch.griddepcontrol_launch_dependents()
                if tidx < NORM_LANES:
                    target = row_ptr(mOut, seq, head * HEAD_DIM + tidx * NORM_VALUES, 16)
                    store_vector(zero_vector(BFloat16, NORM_VALUES), target, NORM_VALUES)

    @cute.jit
    def live_row(
        self,
        tensors,
        flags: Int32,
        scale: Float32,
        lower_bound: Float32,
        eps: Float32,
        tidx: Int32,
        head: Int32,
        key_head: Int32,
        first_of_key_head: Boolean,
        hk: Int32,
        seq: Int32,
        read: Int32,
        write: Int32,
        position: Int32,
        reads: Boolean,
        writes: Boolean,
        early: Boolean,
    ):
        mX, mGate, mBeta, mZ, mTaps, mConvBias, mConvState, mALog, mBias, mNormWeight, mState, _, _, _, mOut = tensors
        smem = cutlass.utils.SmemAllocator()
        sState = smem.allocate_tensor(self.dtype, cute.make_layout(self.landed * self.pass_rows * HEAD_DIM), 128)
        bars = smem.allocate_array(Int64, self.passes)
        sKQ = smem.allocate_tensor(Float32, cute.make_layout(2 * HEAD_DIM), 16)
        sV = smem.allocate_tensor(Float32, cute.make_layout(HEAD_DIM), 16)
        sGate = smem.allocate_tensor(Float32, cute.make_layout(HEAD_DIM), 16)  # act(z) w
        sDecay = smem.allocate_tensor(Float32, cute.make_layout(HEAD_DIM if self.kda else 4), 16)
        sO = smem.allocate_tensor(Float32, cute.make_layout(HEAD_DIM), 16)
        sScalar = smem.allocate_tensor(Float32, cute.make_layout(2), 8)  # beta, k.q
        if const_expr(self.key.unused_bytes()):
            smem.allocate(self.key.unused_bytes())

        lane, warp = tidx % 32, tidx // 32
        place = lane_in_row(lane, self.lanes)
        head_start = head * HEAD_DIM * HEAD_DIM
        self.land_state(mState, sState, bars, tidx, head, read, reads)

        vector = cutlass.min(tidx // NORM_LANES, 2)  # k, q, v
        key_block = key_head + (hk if vector == 0 else 0)
        channel = (2 * hk + head if vector == 2 else key_block) * HEAD_DIM + tidx % NORM_LANES * NORM_VALUES
        stores = writes & (tidx < 3 * NORM_LANES) & ((tidx >= 2 * NORM_LANES) | first_of_key_head)
        history = [zero_vector(BFloat16, NORM_VALUES) for _ in range(CONV_WIDTH - 1)]
        rTaps = cute.make_rmem_tensor(cute.make_layout(NORM_VALUES * CONV_WIDTH), self.weight_dtype)
        if tidx < CONV_THREADS:
            taps = offset_ptr(mTaps.iterator, Int64(channel) * CONV_WIDTH, self.weight_dtype, 16)
            copy_into(taps, rTaps, NORM_VALUES * CONV_WIDTH)
            if reads:
                for j in cutlass.range_constexpr(CONV_WIDTH - 1):
                    token = position + (j - (CONV_WIDTH - 1))
                    source = window_ptr(mConvState, read, token, channel, CONV_WIDTH, NORM_VALUES)
                    copy_into(source, history[j], NORM_VALUES)
        x_ptr = made_here(row_ptr(mX, seq, channel, 16), 16)
        if const_expr(self.key.early):
            if early:
                cute.arch.griddepcontrol_wait()
                cute.arch.griddepcontrol_launch_dependents()
        else:
            if (flags & SETTLED) != 0:
                cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()

        if tidx < CONV_THREADS:
            rX = load_vector(x_ptr, NORM_VALUES)
            if stores:
                self.store_window(mConvState, history, rX, channel, read, write, position)
            rY = convolved(mConvBias, [*history, rX], rTaps, channel, flags & CONV_BIAS, NORM_VALUES)
            self.put_vectors(rY, sKQ, sV, sScalar, scale, tidx)
        if warp == NORM_WARP:
            self.put_output_gate(mZ, mNormWeight, sGate, flags, lane, head, seq)
        self.put_gates(mGate, mBeta, mALog, mBias, sDecay, sScalar, lower_bound, tidx, head, seq)
        cute.arch.sync_threads()

        rK = take_channels(sKQ.iterator, 0, place, self.lanes)
        rQ = take_channels(sKQ.iterator, HEAD_DIM, place, self.lanes)
        decay = take_channels(sDecay.iterator, 0, place, self.lanes) if const_expr(self.kda) else sDecay[0]
        beta, kq = sScalar[0], sScalar[1]
        for p in cutlass.range_constexpr(self.passes):
            row0 = p * self.pass_rows + tidx // self.lanes * self.rows
            inner = row0 * HEAD_DIM + place * vector_width(self.dtype)
            own = row0 + owned_row(lane, self.rows, self.lanes)
            if reads:
                cute.arch.mbarrier_wait(bars + p, 0)
            back = (p - p % self.landed) * self.pass_rows * HEAD_DIM
            source = smem_ptr(sState.iterator, inner - back, self.dtype, 16)
            landed = load_rows(source, self.rows, self.dtype, self.lanes)
            if const_expr(p + self.landed < self.passes):
                # A barrier alone does not wait for loads that are under way, and the copy is no access of these threads.
                cute.arch.fence_view_async_shared()
                cute.arch.sync_threads()
                if tidx == self.lander and reads:
                    self.land_pass(mState, sState, bars, head_start, read, p + self.landed)
            rS = widen_rows(landed, self.rows, self.dtype, self.lanes)
            o, _ = token_step(rS, rK, rQ, decay, beta, sV[own], kq, lane, self.rows, self.lanes)
            if writes:
                target = slot_ptr(mState, write, head_start + inner)
                store_rows(rS, target, self.rows, self.dtype, self.lanes)
            if holds_output(lane, self.rows, self.lanes):
                sO[own] = o
        cute.arch.sync_threads()
        if warp == NORM_WARP:
            self.store_output(mOut, sO, sGate, eps, lane, head, seq)

    @cute.jit
    def land_state(
        self,
        mState: cute.Tensor,
        sState: cute.Tensor,
        bars: cute.Pointer,
        tidx: Int32,
        head: Int32,
        read: Int32,
        reads: Boolean,
    ):
        """Start the copies of the head's state, one barrier a pass; with no read slot the landing buffer is zeroed instead."""
        if tidx == self.lander:
            for p in cutlass.range_constexpr(self.passes):
                cute.arch.mbarrier_init(bars + p, 1)
            cute.arch.mbarrier_init_fence()
            if reads:
                for p in cutlass.range_constexpr(self.landed):
                    self.land_pass(mState, sState, bars, head * HEAD_DIM * HEAD_DIM, read, p)
        if not reads:
            width = vector_width(self.dtype)
            for i in cutlass.range(tidx, self.landed * self.pass_rows * HEAD_DIM // width, self.threads, unroll=1):
                store_vector(
                    zero_vector(self.dtype, width), smem_ptr(sState.iterator, i * width, self.dtype, 16), width
                )

    @cute.jit
    def land_pass(
        self,
        mState: cute.Tensor,
        sState: cute.Tensor,
        bars: cute.Pointer,
        head_start: Int32,
        read: Int32,
        p: cutlass.Constexpr,
    ):
        """Start the copy of one pass into its place of the landing buffer."""
        size = self.pass_rows * HEAD_DIM
        cute.arch.mbarrier_arrive_and_expect_tx(bars + p, self.pass_bytes)
        source, target = slot_ptr(mState, read, head_start) + p * size, sState.iterator + p % self.landed * size
        land(source, target, size, bars + p, self.key.kept)

    @cute.jit
    def store_window(
        self,
        mConvState: cute.Tensor,
        history,
        rX: cute.Tensor,
        channel: Int32,
        read: Int32,
        write: Int32,
        position: Int32,
    ):
        """The token's input into its column; into another slot also the two columns that the next token needs besides."""
        store_vector(rX, window_ptr(mConvState, write, position, channel, CONV_WIDTH, NORM_VALUES), NORM_VALUES)
        if read != write:
            for j in cutlass.range_constexpr(1, CONV_WIDTH - 1):
                token = position + (j - (CONV_WIDTH - 1))
                target = window_ptr(mConvState, write, token, channel, CONV_WIDTH, NORM_VALUES)
                store_vector(history[j], target, NORM_VALUES)

    @cute.jit
    def put_vectors(
        self, rY: cute.Tensor, sKQ: cute.Tensor, sV: cute.Tensor, sScalar: cute.Tensor, scale: Float32, tidx: Int32
    ):
        """Warp 0: normalised k (lanes 0..15), scaled q (16..31) and k.q into shared memory. Warp 1: v by its first 16 lanes."""
        lane16 = tidx % NORM_LANES
        if tidx < 32:
            is_q = tidx >= NORM_LANES
            rX = widen(rY, NORM_VALUES)
            words = cute.recast_tensor(rY, Int32)
            other = cute.make_rmem_tensor(cute.make_layout(NORM_VALUES // 2), Int32)
            for i in cutlass.range_constexpr(NORM_VALUES // 2):
                other[i] = cute.arch.shuffle_sync_bfly(words[i], offset=NORM_LANES)
            # As `normalize_pair`, with k and q in the two halves of the warp. A scale of one leaves k's bits alone.
            squares = sum_over(dot_channels(rX, rX), NORM_LANES)
            kq = sum_over(dot_channels(rX, widen(cute.recast_tensor(other, BFloat16), NORM_VALUES)), NORM_LANES)
            factor = mul_rn(norm_factor(squares, True), scale if is_q else Float32(1.0))
            rN = cute.make_rmem_tensor(cute.make_layout(NORM_VALUES), Float32)
            for i in cutlass.range_constexpr(NORM_VALUES):
                rN[i] = mul_rn(rX[i], factor)
            put_channels(rN, sKQ.iterator, (HEAD_DIM if is_q else 0), lane16, self.dtype)
            factor_q = cute.arch.shuffle_sync_bfly(factor, offset=NORM_LANES)
            if tidx == 0:
                sScalar[1] = mul_rn(mul_rn(kq, factor), factor_q)
        if tidx >= 32 and tidx < 32 + NORM_LANES:
            rV = widen(rY, NORM_VALUES)
            store_vector(rV, smem_ptr(sV.iterator, lane16 * NORM_VALUES, Float32, 16), NORM_VALUES)

    @cute.jit
    def put_output_gate(
        self,
        mZ: cute.Tensor,
        mNormWeight: cute.Tensor,
        sGate: cute.Tensor,
        flags: Int32,
        lane: Int32,
        head: Int32,
        seq: Int32,
    ):
        """act(z) w of 4 rows of V a lane."""
        rZ = load_vector(row_ptr(mZ, seq, head * HEAD_DIM + lane * 4, 8), 4)
        rG = output_gate(mNormWeight, rZ, lane * 4, (flags & SILU_GATE) != 0, (flags & NORM_BF16) != 0, 4)
        store_vector(rG, smem_ptr(sGate.iterator, lane * 4, Float32, 16), 4)

    @cute.jit
    def put_gates(
        self,
        mGate: cute.Tensor,
        mBeta: cute.Tensor,
        mALog: cute.Tensor,
        mBias: cute.Tensor,
        sDecay: cute.Tensor,
        sScalar: cute.Tensor,
        lower_bound: Float32,
        tidx: Int32,
        head: Int32,
        seq: Int32,
    ):
        """beta and the decay (KDA: one a channel, over the last threads) into shared memory."""
        if const_expr(self.kda):
            thread = tidx - (self.threads - self.gate_threads)
            if thread >= 0:
                width = HEAD_DIM // self.gate_threads
                inner = head * HEAD_DIM + thread * width
                raw = load_vector(row_ptr(mGate, seq, inner, 2 * width), width)
                bias = load_vector(offset_ptr(mBias.iterator, inner, Float32, 4 * width), width)
                for i in cutlass.range_constexpr(width):
                    sDecay[place_of(thread * width + i, self.dtype)] = decay_factor(
                        self.bounded, Float32(raw[i]), bias[i], mALog[head], lower_bound
                    )
        if tidx == self.threads - 1:
            if const_expr(not self.kda):
                raw_gate = Float32(load_vector(row_ptr(mGate, seq, head, 2), 1)[0])
                sDecay[0] = decay_factor(self.bounded, raw_gate, mBias[head], mALog[head], lower_bound)
            sScalar[0] = sigmoid(Float32(load_vector(row_ptr(mBeta, seq, head, 2), 1)[0]))

    @cute.jit
    def store_output(
        self, mOut: cute.Tensor, sO: cute.Tensor, sGate: cute.Tensor, eps: Float32, lane: Int32, head: Int32, seq: Int32
    ):
        """o / sqrt(mean o^2 + eps) * gate, 4 rows of V a lane of one warp."""
        rO = load_vector(smem_ptr(sO.iterator, lane * 4, Float32, 16), 4)
        rG = load_vector(smem_ptr(sGate.iterator, lane * 4, Float32, 16), 4)
        squares = Float32(0.0)
        for i in cutlass.range_constexpr(4):
            squares = fma_rn(rO[i], rO[i], squares)
        squares = sum_over(squares, 32)
        norm = cute.math.rsqrt(squares * Float32(1.0 / HEAD_DIM) + eps, fastmath=True)
        store_vector(gated(rO, norm, rG, 4), row_ptr(mOut, seq, head * HEAD_DIM + lane * 4, 8), 4)


def build(key: LayerDecodeKey):
    """Compile one specialisation for sm_90a from fake tensors."""
    kernel = LayerDecode(key)
    n, slots, hv = cute.sym_int(), cute.sym_int(), cute.sym_int()
    channels, values = cute.sym_int(divisibility=HEAD_DIM), cute.sym_int(divisibility=HEAD_DIM)
    window_strides = (cute.sym_int64(divisibility=8), channels, 1)
    return cute_compile(
        kernel,
        fake_tokens(n, channels),
        fake_gates(n, hv, *((HEAD_DIM,) if kernel.kda else ())),
        fake_gates(n, hv),
        fake_tokens(n, values),
        fake_matrix(kernel.weight_dtype, channels, CONV_WIDTH),
        fake_matrix(kernel.weight_dtype),
        make_fake_tensor(BFloat16, (slots, CONV_WIDTH, channels), stride=window_strides, assumed_align=16),
        fake_vector(Float32, hv),
        fake_vector(Float32, align=16) if kernel.kda else fake_vector(Float32, hv),
        fake_vector(BFloat16, align=16),
        fake_states(kernel.dtype, slots, hv, HEAD_DIM),
        fake_ids(n, Int32),
        fake_ids(n, Int32),
        fake_ids(n, Int32),
        fake_tokens(n, values),
        Int32(0),
        Float32(1.0),
        Float32(-1.0),
        Float32(1e-6),
        fake_stream(),
    )  # fmt: skip
