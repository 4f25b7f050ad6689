"""A linear-attention layer between its projections, a verify step in one launch: conv, replay, new tokens and gated norm.

    q, k, v = silu(conv(x)) rounded to bf16;  the recurrence as in `recurrent_verify`;  y = o / rms(o) * w * act(z)

A block of 8 warps owns one (sequence n, value head h) with all 128 rows of V; grid (HV, N).
1  ids and counts; the state is on its way into shared memory by one bulk copy; then logged tokens, window and taps are loaded,
   and only then a dependent launch waits for the kernel before it (`settled`);
2  16 lanes a token, four warps for v of the new tokens and for the logged ones, four for k and q: x, conv, window and log, then
   norms, k.q and gates to shared memory; a warp prepares act(z) w of one token; one barrier;
3  replay, store and new tokens on registers as in `recurrent_verify`, o to shared memory; one barrier; a warp norms one token.
States, windows and logs equal those of `causal_conv1d_verify` and the bare verify bit for bit; o enters the norm unrounded.

Why sharing a window is free of races. Its ring has W = 4 columns, the input of token t of the sequence stands in column t mod 4.
p tokens are committed in the read slot, a drafts of the step before are accepted. All heads of a row read the window. In place
they read the columns of tokens p - 3 + a .. p - 1 (younger ones come from the log) and write those of max(p, p - 3 + a) ..
p + a - 1: both lie within the three consecutive tokens p - 3 + a .. p + a - 1 and are disjoint, so no byte is both read and
written in a launch and no order among blocks is needed. Into another slot all three columns are written; no row reads that
slot in this call. Logged inputs are read from one half of the log and written to the other. Each channel has one writer:
v channels their own block, q and k channels the first value head of the key head.
Ids, counts and rows that are dead or cut off: the rules of `recurrent_verify`.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor

from ..compile.cache import cute_compile
from ..compile.fake import fake_ids, fake_matrix, fake_stream, fake_vector
from ..configs.layer import CONV_BIAS, CONV_WIDTH, MAPPED, NORM_BF16, SETTLED, SILU_GATE, LayerVerifyKey
from ..configs.verify import MAX_TOKENS
from ..device.arith import fma_rn
from ..device.conv import DTYPES, fake_tokens
from ..device.draft_layer import HISTORY, commit_history, history_address, load_weight, log_x_ptr, output_gates
from ..device.layer_parts import convolved, gated, load_taps_into
from ..device.memory import load_vector, offset_ptr, smem_ptr, store_vector
from ..device.predicated import load_into_where, load_words_where, zero_words
from ..device.reduce import sum_over
from ..device.state_io import row_ptr
from ..device.token_step import HEAD_DIM, NORM_LANES, NORM_VALUES, lane_in_row, vector_width
from .recurrent_verify import GRID_Y, SCALARS, RecurrentVerify, fake_heads


class LayerVerify(RecurrentVerify):
    def __init__(self, key: LayerVerifyKey):
        super().__init__(key.verify)
        self.layer = key
        self.weight_dtype = DTYPES[key.weight]

    @cute.jit
    def __call__(
        self,
        mX: cute.Tensor,  # (T, C) bf16 raw q | k | v, row stride any multiple of 8
        mGate: cute.Tensor,  # GDN a (T, HV); KDA raw gate (T, HV, K); bf16
        mBeta: cute.Tensor,  # (T, HV) bf16 logits
        mZ: cute.Tensor,  # (T, HV * V) bf16 output gate
        mTaps: cute.Tensor,  # (C, W)
        mConvBias: cute.Tensor,  # (C, 1), or anything of the taps' dtype where there is none
        mConvState: cute.Tensor,  # (S, W, C) bf16, slot stride any multiple of 16 bytes
        mALog: cute.Tensor,  # (HV,) fp32
        mBias: cute.Tensor,  # GDN (HV,), KDA (HV * K,) fp32
        mNormWeight: cute.Tensor,  # (V,) fp32, or (V / 2,) words of two bf16
        mState: cute.Tensor,  # (S, HV, V, K), slot stride any multiple of 16 bytes
        mReadIds: cute.Tensor,  # (N,) int32
        mWriteIds: cute.Tensor,  # (N,) int32
        mPositions: cute.Tensor,  # (N,) int32, committed tokens in the read slot
        mCu: cute.Tensor,  # (N + 1,) int32
        mLogK: cute.Tensor,  # (B, 2, Tmax, HK, K) bf16
        mLogU: cute.Tensor,  # (B, 2, Tmax, HV, V) fp32
        mLogGate: cute.Tensor,  # GDN (B, 2, Tmax, HV) fp32 decay; KDA (B, 2, Tmax, HV, K) bf16 raw gate
        mLogX: cute.Tensor,  # (B, 2, Tmax, C) bf16 raw inputs
        mHalf: cute.Tensor,  # (B,) int32, half to read
        mRows: cute.Tensor,  # (any,) int32, log rows of the batch rows with MAPPED
        mAccepted: cute.Tensor,  # (N,) int32
        mOut: cute.Tensor,  # (T, HV * V) bf16
        flags: Int32,  # bits of configs/layer.py
        scale: Float32,
        lower_bound: Float32,
        eps: Float32,
        stream,
    ):
        n, hv = cute.size(mReadIds, mode=[0]), cute.size(mState, mode=[1])
        hk = cute.size(mLogK, mode=[3])
        self.kernel.set_name_prefix(self.layer.symbol(), remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            mX, mGate, mBeta, mZ, mTaps, mConvBias, mConvState, mALog, mBias, mNormWeight, mState, mReadIds, mWriteIds,
            mPositions, mCu, mLogK, mLogU, mLogGate, mLogX, mHalf, mRows, mAccepted, mOut, flags, scale, lower_bound, eps, n,
            hk, Float32(hk) / Float32(hv),
        ).launch(
            grid=[hv, cutlass.min(n, Int32(GRID_Y)), (n + GRID_Y - 1) // GRID_Y],
            block=[self.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.layer.blocks,
            preferred_smem_carveout=100,
            use_pdl=True,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,
        mGate: cute.Tensor,
        mBeta: cute.Tensor,
        mZ: cute.Tensor,
        mTaps: cute.Tensor,
        mConvBias: cute.Tensor,
        mConvState: cute.Tensor,
        mALog: cute.Tensor,
        mBias: cute.Tensor,
        mNormWeight: cute.Tensor,
        mState: cute.Tensor,
        mReadIds: cute.Tensor,
        mWriteIds: cute.Tensor,
        mPositions: cute.Tensor,
        mCu: cute.Tensor,
        mLogK: cute.Tensor,
        mLogU: cute.Tensor,
        mLogGate: cute.Tensor,
        mLogX: cute.Tensor,
        mHalf: cute.Tensor,
        mRows: cute.Tensor,
        mAccepted: cute.Tensor,
        mOut: cute.Tensor,
        flags: Int32,
        scale: Float32,
        lower_bound: Float32,
        eps: Float32,
        n: Int32,
        hk: Int32,
        heads_ratio: Float32,  # HK / HV
    ):
        tidx, _, _ = cute.arch.thread_idx()
        head, row_low, row_high = cute.arch.block_idx()
        seq = row_high * GRID_Y + row_low
        if (flags & SETTLED) == 0:
            cute.arch.griddepcontrol_wait()
        if seq < n:
            position = load_words_where(seq < n, offset_ptr(mPositions.iterator, seq, Int32, 4), 1)[0].to(Int32)
            row = self.resolve_row(
                mReadIds, mWriteIds, mCu, mLogK, mHalf, mRows, mAccepted, cute.size(mState, mode=[0]), (flags & MAPPED) != 0,
                seq, head, heads_ratio,
            )  # fmt: skip
            # No position is that small. The question keeps its load here, beside the ids' and not behind them.
            known = position > -(1 << 31)
            row = (*row[:2], row[2] & known, row[3] & known, *row[4:])
            reads, writes, start, length = row[2], row[3], row[7], row[8]
            if reads | writes:
                self.layer_row(
                    (mX, mGate, mBeta, mZ, mTaps, mConvBias, mConvState, mALog, mBias, mNormWeight, mState, mLogK, mLogU,
                     mLogGate, mLogX, mOut),
                    row, position, flags, scale, lower_bound, eps, tidx, head, hk,
                )  # fmt: skip
            if not (reads | writes):
                self.wait((flags & SETTLED) != 0)
                self.zero_rows(mOut, tidx, head, Int32(0), start, start + length)
            if seq == n - 1:
                self.zero_rows(mOut, tidx, head, Int32(0), Int32(mCu[n]), cute.size(mOut, mode=[0]))

    @cute.jit
    def layer_row(
        self,
        tensors,
        row,
        position: Int32,
        flags: Int32,
        scale: Float32,
        lower_bound: Float32,
        eps: Float32,
        tidx: Int32,
        head: Int32,
        hk: Int32,
    ):
        (
            mX, mGate, mBeta, mZ, mTaps, mConvBias, mConvState, mALog, mBias, mNormWeight, mState, mLogK, mLogU, mLogGate, mLogX,
            mOut,
        ) = tensors  # fmt: skip
        read, write, reads, writes, logged, log_in, log_out, start, length, replayed, key_head, first_of_key_head = row
        smem = cutlass.utils.SmemAllocator()
        sLanding = smem.allocate_tensor(self.dtype, cute.make_layout(HEAD_DIM * HEAD_DIM), 128)
        sOld = smem.allocate_tensor(Float32, cute.make_layout(MAX_TOKENS * self.old_record), 16)
        sNew = smem.allocate_tensor(Float32, cute.make_layout(self.block.words), 16)
        sGate = smem.allocate_tensor(Float32, cute.make_layout(MAX_TOKENS * HEAD_DIM), 16)
        sO = smem.allocate_tensor(Float32, cute.make_layout(MAX_TOKENS * HEAD_DIM), 16)
        bar = smem.allocate_array(Int64, 1)
        self.land_tile(sLanding, bar, mState, read, reads, head * HEAD_DIM * HEAD_DIM, tidx)

        # Threads 128.. have k and q of the new tokens, the others their v and the logged tokens; `thread_new` is for the former.
        lane, warp, thread = tidx % 32, tidx // 32, tidx % 128
        token, vector = thread // NORM_LANES, thread % NORM_LANES * NORM_VALUES
        thread_new = (tidx + 128) % 256
        keys = tidx >= 128
        channel_q = key_head * HEAD_DIM + vector
        channel = (hk * HEAD_DIM + channel_q) if keys else ((2 * hk + head) * HEAD_DIM + vector)
        old = self.old_registers()
        self.load_old(old, mLogK, mLogU, mLogGate, tidx, head, Int32(0), key_head, log_in, replayed)
        rTaps = cute.make_rmem_tensor(cute.make_layout(NORM_VALUES * CONV_WIDTH), self.weight_dtype)
        load_taps_into(mTaps, rTaps, channel, NORM_VALUES)
        rTapsQ = rTaps
        if const_expr(self.weight_dtype is BFloat16):  # fp32 taps of both would take too many registers
            rTapsQ = zero_words(NORM_VALUES * CONV_WIDTH)
            load_into_where(keys, rTapsQ, offset_ptr(mTaps.iterator, channel_q * CONV_WIDTH, BFloat16, 16))
        bf16 = flags & NORM_BF16
        weight = load_weight(mNormWeight, lane * 4, bf16, 4)
        self.wait((flags & SETTLED) != 0)

        window = (position, read, reads, replayed, log_in)
        inputs, inputs_q = ([zero_words(NORM_VALUES) for _ in range(CONV_WIDTH)] for _ in range(2))
        sources = (mX, mConvState, mLogX)
        self.load_inputs(inputs, sources, window, channel, token, start, length, Boolean(True))
        self.load_inputs(inputs_q, sources, window, channel_q, token, start, length, keys)
        rGate, rBeta = self.block.gate_registers()
        self.block.load_gates(rGate, rBeta, mGate, mBeta, thread_new, start, length, head)
        rZ = load_words_where(warp < length, row_ptr(mZ, start + warp, head * HEAD_DIM + lane * 4, 8), 2)

        parameters = self.block.parameters(mALog, mBias, tidx, head)
        destination = (mConvState, mLogX, position, read, write, writes, replayed, logged, log_out)
        if tidx < 128:
            self.put_old(old, parameters, sOld.iterator, Boolean(True), lower_bound, tidx, replayed)
        self.store_inputs(inputs, destination, channel, token, length, first_of_key_head | (tidx < 128))
        rY = convolved(mConvBias, inputs, rTaps, channel, flags & CONV_BIAS, NORM_VALUES)
        if keys:
            self.store_inputs(inputs_q, destination, channel_q, token, length, first_of_key_head)
            if const_expr(self.weight_dtype is Float32):
                load_taps_into(mTaps, rTapsQ, channel_q, NORM_VALUES)
            rQ = convolved(mConvBias, inputs_q, rTapsQ, channel_q, flags & CONV_BIAS, NORM_VALUES)
            new = (rY, rQ, None, rGate, rBeta)
            self.block.put(new, parameters, sNew.iterator, Boolean(True), scale, lower_bound, thread, length)
            if logged:
                self.log_vectors(
                    new, mLogK, mLogGate, thread, head, Int32(0), key_head, first_of_key_head, log_out, length
                )
                if const_expr(not self.kda):
                    if thread < length:
                        at = thread * self.block.record + self.block.at_scalars + 2
                        self.log_decay((sNew.iterator + at).load(), mLogGate, thread, head, log_out)
        if tidx < 128:
            self.block.put_values(rY, sNew.iterator, thread)
        rG = cute.make_rmem_tensor(cute.make_layout(4), Float32)
        gates = output_gates(rZ, weight, flags & SILU_GATE, bf16)
        for i in cutlass.range_constexpr(4):
            rG[i] = gates[i]
        store_vector(rG, smem_ptr(sGate.iterator, warp * HEAD_DIM + lane * 4, Float32, 16), 4)
        cute.arch.sync_threads()

        inner = (head * HEAD_DIM + tidx // 8 * self.rows) * HEAD_DIM + lane_in_row(lane) * vector_width(self.dtype)
        self.run_tile(
            sLanding, [], bar, sOld, sNew, mState, mLogU, sO, inner, tidx, head, Int32(0), write, reads, writes, Boolean(False),
            logged, log_out, start, length, replayed,
        )  # fmt: skip
        cute.arch.sync_threads()
        if warp < length:
            at = warp * HEAD_DIM + lane * 4
            rO = load_vector(smem_ptr(sO.iterator, at, Float32, 16), 4)
            squares = Float32(0.0)
            for i in cutlass.range_constexpr(4):
                squares = fma_rn(rO[i], rO[i], squares)
            squares = sum_over(squares, 32)
            norm = cute.math.rsqrt(squares * Float32(1.0 / HEAD_DIM) + eps, fastmath=True)
            rG = load_vector(smem_ptr(sGate.iterator, at, Float32, 16), 4)
            store_vector(gated(rO, norm, rG, 4), row_ptr(mOut, start + warp, head * HEAD_DIM + lane * 4, 8), 4)

    def put_output(self, output, start, t, place, own, o):
        """o of a token into shared memory, where the norm finds it."""
        output[t * HEAD_DIM + own] = o

    @cute.jit
    def load_inputs(
        self,
        inputs,
        sources,
        window,
        channel: Int32,
        token: Int32,
        start: Int32,
        length: Int32,
        wanted: Boolean,
    ):
        """Issue the loads of what this thread's token needs, oldest first: new inputs, and those before the first of them."""
        mX, mConvState, mLogX = sources
        for j in cutlass.range_constexpr(CONV_WIDTH):
            t = token - (HISTORY - j)
            address = row_ptr(mX, start + t, channel, 16).toint()
            live = token < length
            if const_expr(j < HISTORY):
                before, known = history_address(mConvState, mLogX, channel, -t, window, NORM_VALUES)
                address = before if t < 0 else address
                live = known if t < 0 else live
            source = cute.make_ptr(BFloat16, address, cute.AddressSpace.gmem, assumed_align=16)
            load_into_where(wanted & live, inputs[j], source)

    @cute.jit
    def store_inputs(self, inputs, destination, channel: Int32, token: Int32, length: Int32, owner: Boolean):
        """The committed window by the threads of token 0, which hold it, and each token's own input to the log."""
        mConvState, mLogX, position, read, write, writes, replayed, logged, log_out = destination
        if writes & owner & (token == 0):
            for j in cutlass.range_constexpr(HISTORY):
                commit_history(
                    inputs[j], mConvState, channel, Int32(HISTORY - j), position, read, write, replayed, NORM_VALUES
                )
        if logged & owner & (token < length):
            store_vector(inputs[HISTORY], log_x_ptr(mLogX, log_out + token, channel, NORM_VALUES), NORM_VALUES)


def build(key: LayerVerifyKey):
    """Compile one specialisation for sm_90a from fake tensors."""
    return compile_layer(LayerVerify(key))


def compile_layer(kernel: LayerVerify):
    """Compile a layer's verify from fake tensors."""
    tokens, n, slots, hk, hv = (cute.sym_int() for _ in range(5))
    log_rows, max_tokens = cute.sym_int(), cute.sym_int()
    channels, values = cute.sym_int(divisibility=HEAD_DIM), cute.sym_int(divisibility=HEAD_DIM)
    weight = kernel.weight_dtype

    def log(dtype, *inner):
        shape = (log_rows, 2, max_tokens, *inner)
        return make_fake_compact_tensor(dtype, shape, stride_order=tuple(reversed(range(len(shape)))), assumed_align=16)

    windows = (cute.sym_int64(divisibility=8), channels, 1)
    return cute_compile(
        kernel,
        fake_tokens(tokens, channels),
        fake_heads(BFloat16, tokens, hv, *((HEAD_DIM,) if kernel.kda else ()), **({} if kernel.kda else SCALARS)),
        fake_heads(BFloat16, tokens, hv, **SCALARS),
        fake_tokens(tokens, values),
        make_fake_compact_tensor(weight, (channels, CONV_WIDTH), stride_order=(1, 0), assumed_align=16),
        fake_matrix(weight),
        make_fake_tensor(BFloat16, (slots, CONV_WIDTH, channels), stride=windows, assumed_align=16),
        fake_vector(Float32, hv),
        fake_vector(Float32, align=16) if kernel.kda else fake_vector(Float32, hv),
        fake_vector(Float32, align=16),
        fake_heads(kernel.dtype, slots, hv, HEAD_DIM, HEAD_DIM, divisibility=128 // kernel.dtype.width),
        fake_ids(n, Int32),
        fake_ids(n, Int32),
        fake_ids(n, Int32),
        fake_vector(Int32),
        log(BFloat16, hk, HEAD_DIM),
        log(Float32, hv, HEAD_DIM),
        log(BFloat16, hv, HEAD_DIM) if kernel.kda else log(Float32, hv),
        log(BFloat16, channels),
        fake_ids(log_rows, Int32),
        fake_vector(Int32),
        fake_ids(n, Int32),
        fake_tokens(tokens, values),
        Int32(0),
        Float32(1.0),
        Float32(-1.0),
        Float32(1e-6),
        fake_stream(),
    )
