"""A linear-attention layer between its projections, a verify step in one launch: conv, replay, new tokens and gated norm.

    q, k, v = silu(conv(x)) rounded to bf16;  the recurrence as in `recurrent_verify`;  y = o / rms(o) * w * act(z)

A block of 8 warps owns one (sequence n, value head h) with all 128 rows of V; grid (HV, N).
1  ids and counts; the state is on its way into shared memory by one bulk copy; then logged tokens, window and taps are loaded,
   and only then a dependent launch waits for the kernel before it (`settled`);
2  six warps convolve the new tokens, log their inputs and commit the window (`draft_conv`), four prepare the logged tokens and
   the gates, each act(z) w of one token; one barrier; then four warps put norms of the new tokens and k.q to shared memory;
3  replay, store and new tokens on registers as in `recurrent_verify`, a barrier before the first new token, o to shared memory;
   one barrier; a warp norms one token.
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
from cutlass import BFloat16, Boolean, Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_tensor

from ..compile.cache import cute_compile
from ..compile.fake import fake_ids, fake_matrix, fake_stream, fake_vector
from ..compile.fake_heads import fake_gates, fake_log, fake_states
from ..configs.layer import CONV_BIAS, CONV_WIDTH, MAPPED, NORM_BF16, PLAIN, SETTLED, SILU_GATE, LayerVerifyKey
from ..configs.verify import MAX_TOKENS
from ..device.arith import fma_rn
from ..device.conv import DTYPES, fake_tokens
from ..device.draft_conv import CONV_THREADS, DraftConv
from ..device.draft_layer import load_weight, output_gates, weight_values
from ..device.layer_parts import gated
from ..device.memory import load_vector, smem_ptr, store_vector
from ..device.predicated import load_int_where, load_words_where, store_word_where
from ..device.reduce import sum_over
from ..device.state_io import row_ptr
from ..device.token_step import HEAD_DIM, NORM_LANES, NORM_VALUES
from .recurrent_verify import GRID_Y, RecurrentVerify


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
        mNormWeight: cute.Tensor,  # (V,) bf16, or (2 V,): fp32 in pieces
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
        tensors = (
            mX, mGate, mBeta, mZ, mTaps, mConvBias, mConvState, mALog, mBias, mNormWeight, mState, mReadIds, mWriteIds,
            mPositions, mCu, mLogK, mLogU, mLogGate, mLogX, mHalf, mRows, mAccepted, mOut,
        )  # fmt: skip
        self.kernel(tensors, flags, scale, lower_bound, eps, n, hk, Float32(hk) / Float32(hv)).launch(
            grid=[hv, cutlass.min(n, Int32(GRID_Y)), (n + GRID_Y - 1) // GRID_Y],
            block=[self.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.layer.blocks,
            preferred_smem_carveout=100,
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
        mState, mReadIds, mWriteIds, mPositions, mCu, mLogK, _, _, _, mHalf, mRows, mAccepted, mOut = tensors[10:]
        tidx, _, _ = cute.arch.thread_idx()
        head, row_low, row_high = cute.arch.block_idx()
        seq = row_high * GRID_Y + row_low
        early = ((flags & SETTLED) != 0) & (seq * cute.size(mState, mode=[1]) + head < self.key.early)
        if not early:
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        if seq < n:
            position = load_int_where(seq < n, mPositions, seq)
            row = self.resolve_row(
                (mReadIds, mWriteIds, mCu, mLogK, mHalf, mRows, mAccepted), cute.size(mState, mode=[0]), (flags & MAPPED) != 0,
                seq, head, heads_ratio,
            )  # fmt: skip
            # No position is that small. The question keeps its load here, beside the ids' and not behind them.
            known = position > -(1 << 31)
            row = row._replace(reads=row.reads & known, writes=row.writes & known)
            if row.reads | row.writes:
                self.layer_row(tensors, row, position, early, flags, scale, lower_bound, eps, tidx, head, hk)
            if not (row.reads | row.writes):
                self.wait(early)
                self.zero_rows(mOut, tidx, head, Int32(0), row.start, row.start + row.length)
            if seq == n - 1:
                self.zero_rows(mOut, tidx, head, Int32(0), Int32(mCu[n]), cute.size(mOut, mode=[0]))

    @cute.jit
    def layer_row(
        self,
        tensors,
        row,
        position: Int32,
        early: Boolean,
        flags: Int32,
        scale: Float32,
        lower_bound: Float32,
        eps: Float32,
        tidx: Int32,
        head: Int32,
        hk: Int32,
    ):
        (
            mX, mGate, mBeta, mZ, mTaps, mConvBias, mConvState, mALog, mBias, mNormWeight, mState, _, _, _, _, mLogK, mLogU,
            mLogGate, mLogX, _, _, _, mOut,
        ) = tensors  # fmt: skip
        read, write, reads, writes, logged, log_in, log_out, start, length, replayed, key_head, first_of_key_head = row
        smem = cutlass.utils.SmemAllocator()
        sLanding = smem.allocate_tensor(self.dtype, cute.make_layout(HEAD_DIM * HEAD_DIM), 128)
        sOld = smem.allocate_tensor(Float32, cute.make_layout(MAX_TOKENS * self.old_record), 16)
        sNew = smem.allocate_tensor(Float32, cute.make_layout(self.block.words), 16)
        sGate = smem.allocate_tensor(Float32, cute.make_layout(MAX_TOKENS * HEAD_DIM), 16)
        sO = smem.allocate_tensor(Float32, cute.make_layout(MAX_TOKENS * HEAD_DIM), 16)
        bars = smem.allocate_array(Int64, self.landings)
        self.land_rows(mState, sLanding, bars, read, reads, head * HEAD_DIM, tidx)

        # Warps 2 to 7 convolve, 0 to 3 have the logged tokens, 4 to 7 the new ones.
        lane, warp, thread = tidx % 32, tidx // 32, tidx % 128
        thread_new = (tidx + 128) % 256
        conv = DraftConv(self.weight_dtype, (tidx + CONV_THREADS) % 256, head, key_head, hk)
        old = self.old_registers()
        self.load_old(old, (mLogK, mLogU, mLogGate), row, tidx, head, Int32(0))
        conv.load_history(mTaps, mConvState, mLogX, (position, read, reads, replayed, log_in))
        bf16 = flags & NORM_BF16
        weight = load_weight(mNormWeight, lane * 4, bf16, 4)
        self.wait(early)

        conv.load_inputs(mX, start, length)
        rGate, rBeta = self.block.gate_registers()
        self.block.load_gates(rGate, rBeta, mGate, mBeta, tidx, start, length, head)
        rZ = load_words_where(warp < length, row_ptr(mZ, start + warp, head * HEAD_DIM + lane * 4, 8), 2)
        parameters = self.block.parameters(mALog, mBias, tidx, head)
        if self.has_token(tidx, replayed):
            self.put_old(old, parameters, sOld.iterator, Boolean(True), lower_bound, tidx, replayed)
        if self.has_token(tidx, length):
            self.block.put_gates(rGate, rBeta, parameters, sNew.iterator, lower_bound, tidx, length)
            if logged:
                self.log_gate(rGate, sNew.iterator, mLogGate, tidx, head, log_out, length)
        # k and q of a token, as words, where its output will stand; v in its record.
        place = Int32((sO.iterator + (conv.part * HEAD_DIM // 2 + conv.place)).toint())
        step = Int32(4 * HEAD_DIM)
        if conv.part == 2:
            place = Int32((sNew.iterator + (self.block.at_v + conv.place)).toint())
            step = Int32(4 * self.block.record)
        destination = (position, read, write, writes, replayed, logged, log_out)
        conv.run(mConvBias, mConvState, mLogX, destination, first_of_key_head, flags & CONV_BIAS, length, place, step)
        if cute.arch.make_warp_uniform(warp) < length:
            rG = cute.make_rmem_tensor(cute.make_layout(4), Float32)
            gates = output_gates(rZ, weight_values(weight, bf16), flags & SILU_GATE)
            for i in cutlass.range_constexpr(4):
                rG[i] = gates[i]
            store_vector(rG, smem_ptr(sGate.iterator, warp * HEAD_DIM + lane * 4, Float32, 16), 4)
        cute.arch.sync_threads()

        if self.has_token(thread_new, length):
            at = 2 * (thread // NORM_LANES) * HEAD_DIM + thread % NORM_LANES * NORM_VALUES
            made = smem_ptr(sO.iterator, 0, BFloat16, 16) + at
            raw = [load_vector(smem_ptr(made, i * HEAD_DIM, BFloat16, 16), NORM_VALUES) for i in range(2)]
            self.block.put_vectors(raw[1], raw[0], sNew.iterator, Boolean(True), scale, thread)
            if logged & first_of_key_head:
                self.log_key(raw[1], mLogK, thread, key_head, log_out, length)
        self.run_tile((sLanding, bars, sOld, sNew), mState, mLogU, sO, row, Boolean(False), tidx, head, Int32(0))
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

    def join(self):
        """The warps that have no new token to normalise replay meanwhile."""
        cute.arch.sync_threads()

    def output_place(self, output, start, place, own):
        """Place in shared memory, where the norm finds it, of a lane's first output, and the step to the next token's."""
        return Int32((output.iterator + own).toint()), Int32(4 * HEAD_DIM)

    def put_output(self, condition, address, o):
        """An output where it goes."""
        store_word_where(condition, address, o)


def build(key: LayerVerifyKey):
    """Compile one specialisation for sm_90a from fake tensors."""
    return compile_layer(LayerVerify(key))


def compile_layer(kernel: LayerVerify):
    """Compile a layer's verify from fake tensors."""
    tokens, n, slots, hk, hv = (cute.sym_int() for _ in range(5))
    log_rows, max_tokens = cute.sym_int(), cute.sym_int()
    channels, values = cute.sym_int(divisibility=HEAD_DIM), cute.sym_int(divisibility=HEAD_DIM)
    weight, channels_of_gate = kernel.weight_dtype, (HEAD_DIM,) if kernel.kda else ()
    windows = (cute.sym_int64(divisibility=8), channels, 1)
    return cute_compile(
        kernel,
        fake_tokens(tokens, channels),
        fake_gates(tokens, hv, *channels_of_gate),
        fake_gates(tokens, hv),
        fake_tokens(tokens, values),
        fake_matrix(weight, channels, CONV_WIDTH),
        fake_matrix(weight),
        make_fake_tensor(BFloat16, (slots, CONV_WIDTH, channels), stride=windows, assumed_align=16),
        fake_vector(Float32, hv),
        fake_vector(Float32, align=16) if kernel.kda else fake_vector(Float32, hv),
        fake_vector(BFloat16, align=16),
        fake_states(kernel.dtype, slots, hv, HEAD_DIM),
        fake_ids(n, Int32),
        fake_ids(n, Int32),
        fake_ids(n, Int32),
        fake_vector(Int32),
        fake_log(BFloat16, log_rows, max_tokens, hk, HEAD_DIM),
        fake_log(Float32, log_rows, max_tokens, hv, HEAD_DIM),
        fake_log(BFloat16 if kernel.kda else Float32, log_rows, max_tokens, hv, *channels_of_gate),
        fake_log(BFloat16, log_rows, max_tokens, channels),
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
