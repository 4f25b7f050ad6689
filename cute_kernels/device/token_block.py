"""Up to 8 tokens of one (sequence, value head), made ready for `token_step` in shared memory.

128 threads load: 16 lanes a token for k, q, the block's rows of v and KDA's raw gate; 8 threads for beta and GDN's gate.
`load` and `parameters` only issue loads, so that a caller gets all of its loads under way before `put` waits for the first
of them to do norms, k.q and gates. In shared memory a token is a record of `record` fp32 words: k, q, KDA's
decays, (beta, k.q, GDN's decay), v as bf16.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Uint32, const_expr

from .arith import sigmoid
from .memory import load_vector, offset_ptr, smem_ptr, store_vector, widen
from .predicated import load_half_where, load_into_where, zero_words
from .state_io import row_ptr
from .token_step import (
    HEAD_DIM,
    NORM_LANES,
    NORM_VALUES,
    decay_factor,
    normalize_pair,
    put_channels,
    take_channels,
)

TOKENS = 8


@cute.jit
def put_decays(
    bounded: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
    rRaw: cute.Tensor,
    parameters: cute.Tensor,
    base: cute.Pointer,
    offset: Int32,
    lower_bound: Float32,
    lane16: Int32,
):
    """KDA's decays of a lane's 8 channels of a token into shared memory; `parameters` from `TokenBlock.parameters`."""
    rDecay = cute.make_rmem_tensor(cute.make_layout(NORM_VALUES), Float32)
    rRaw = widen(rRaw, NORM_VALUES)
    for i in cutlass.range_constexpr(NORM_VALUES):
        rDecay[i] = decay_factor(bounded, rRaw[i], parameters[i], parameters[NORM_VALUES], lower_bound)
    put_channels(rDecay, base, offset, lane16, dtype)


class TokenBlock:
    """Static facts of a block: kind, pool dtype, rows of V of the thread block."""

    def __init__(self, kind, dtype, tile):
        self.kda, self.bounded = kind != "gdn", kind == "kda_bounded"
        self.dtype, self.tile = dtype, tile
        self.width = tile // NORM_LANES  # values of v a lane moves
        self.at_q = HEAD_DIM
        self.at_decay = 2 * HEAD_DIM
        self.at_scalars = (3 if self.kda else 2) * HEAD_DIM  # beta, k.q, GDN's decay
        self.at_v = self.at_scalars + 4
        self.record = self.at_v + tile // 2
        self.words = TOKENS * self.record

    def registers(self):
        """Zeroed registers for `load`: k, q, v, the gate (KDA: of the lane's channels), beta."""
        return (zero_words(NORM_VALUES), zero_words(NORM_VALUES), zero_words(self.width), *self.gate_registers())

    def gate_registers(self):
        """Zeroed registers for `load_gates`; a single bf16 is the low half of a word."""
        return zero_words(NORM_VALUES if self.kda else 2), zero_words(2)

    @cute.jit
    def parameters(self, mALog: cute.Tensor, mBias: cute.Tensor, thread: Int32, head: Int32) -> cute.Tensor:
        """Issue the loads of a thread's dt_bias (KDA: of its 8 channels) and, last, A_log."""
        count = NORM_VALUES if const_expr(self.kda) else 1
        rP = cute.make_rmem_tensor(cute.make_layout(count + 1), Float32)
        first = head * HEAD_DIM + thread % NORM_LANES * NORM_VALUES if const_expr(self.kda) else head
        rBias = load_vector(offset_ptr(mBias.iterator, first, Float32, 16 if const_expr(self.kda) else 4), count)
        for i in cutlass.range_constexpr(count):
            rP[i] = rBias[i]
        rP[count] = mALog[head]
        return rP

    @cute.jit
    def load(
        self,
        raw,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mGate: cute.Tensor,
        mBeta: cute.Tensor,
        thread: Int32,  # 0..127
        start: Int32,  # row of the block's first token
        count: Int32,  # tokens of the block
        key_head: Int32,
        head: Int32,
        column: Int32,  # first row of V of the thread block within its head
    ):
        """Issue the loads of tokens 0..count-1 into `raw`; other tokens' registers become zero."""
        rK, rQ, rV, rGate, rBeta = raw
        token, lane16 = thread // NORM_LANES, thread % NORM_LANES
        row, live = start + token, token < count
        inner = key_head * HEAD_DIM + lane16 * NORM_VALUES
        load_into_where(live, rK, row_ptr(mK, row, inner, 16))
        load_into_where(live, rQ, row_ptr(mQ, row, inner, 16))
        load_into_where(live, rV, row_ptr(mV, row, head * HEAD_DIM + column + lane16 * self.width, 2 * self.width))
        self.load_gates(rGate, rBeta, mGate, mBeta, thread, start, count, head)

    @cute.jit
    def load_gates(
        self,
        rGate: cute.Tensor,
        rBeta: cute.Tensor,
        mGate: cute.Tensor,
        mBeta: cute.Tensor,
        thread: Int32,
        start: Int32,
        count: Int32,
        head: Int32,
    ):
        """Issue the loads of the tokens' gates and beta, the part of `load` that no conv precedes."""
        if const_expr(self.kda):
            token, lane16 = thread // NORM_LANES, thread % NORM_LANES
            inner = head * HEAD_DIM + lane16 * NORM_VALUES
            load_into_where(token < count, rGate, row_ptr(mGate, start + token, inner, 16))
        else:
            words = cute.recast_tensor(rGate, Uint32)
            words[0] = load_half_where(thread < count, row_ptr(mGate, start + thread, head, 2))
        words = cute.recast_tensor(rBeta, Uint32)
        words[0] = load_half_where(thread < count, row_ptr(mBeta, start + thread, head, 2))

    def put(self, raw, parameters, base, l2norm, scale, lower_bound, thread, count):
        """Norms, k.q and gates of a loaded block into shared memory at `base`. All lanes of a warp with tokens take part."""
        raw_k, raw_q, raw_v, raw_gate, raw_beta = raw
        self.put_vectors(raw_k, raw_q, base, l2norm, scale, thread)
        self.put_values(raw_v, base, thread)
        self.put_gates(raw_gate, raw_beta, parameters, base, lower_bound, thread, count)

    @cute.jit
    def put_vectors(
        self, raw_k: cute.Tensor, raw_q: cute.Tensor, base: cute.Pointer, l2norm: Boolean, scale: Float32, thread: Int32
    ):
        """The part of `put` that needs k and q of a token, normalised here."""
        token, lane16 = thread // NORM_LANES, thread % NORM_LANES
        rK, rQ, kq = normalize_pair(raw_k, raw_q, scale, l2norm)
        at = token * self.record
        put_channels(rK, base, at, lane16, self.dtype)
        put_channels(rQ, base, at + self.at_q, lane16, self.dtype)
        if lane16 == 0:
            (base + (at + self.at_scalars + 1)).store(kq)

    @cute.jit
    def put_gates(
        self,
        raw_gate: cute.Tensor,
        raw_beta: cute.Tensor,
        parameters: cute.Tensor,
        base: cute.Pointer,  # fp32, shared
        lower_bound: Float32,
        thread: Int32,
        count: Int32,
    ):
        """The part of `put` that needs what `load_gates` loaded."""
        token, lane16 = thread // NORM_LANES, thread % NORM_LANES
        if const_expr(self.kda):
            if token < count:
                at = token * self.record + self.at_decay
                put_decays(self.bounded, self.dtype, raw_gate, parameters, base, at, lower_bound, lane16)
        if thread < count:
            scalars = base + (thread * self.record + self.at_scalars)
            scalars.store(sigmoid(widen(raw_beta, 2)[0]))
            if const_expr(not self.kda):
                gate = widen(raw_gate, 2)[0]
                (scalars + 2).store(decay_factor(self.bounded, gate, parameters[0], parameters[1], lower_bound))

    def put_values(self, raw_v, base, thread):
        """v of a thread's token into shared memory."""
        at = thread // NORM_LANES * self.record + self.at_v
        place = smem_ptr(base, at, BFloat16, 16) + thread % NORM_LANES * self.width
        store_vector(raw_v, smem_ptr(place, 0, BFloat16, 2 * self.width), self.width)

    def take(self, base, t, l8, own):
        """Arguments of `token_step` for token `t`: k, q, decay, beta, v of the block's row `own`, k.q."""
        at = t * self.record
        rK = take_channels(base, at, l8)
        rQ = take_channels(base, at + self.at_q, l8)
        scalars = load_vector(smem_ptr(base, at + self.at_scalars, Float32, 16), 4)
        decay = take_channels(base, at + self.at_decay, l8) if self.kda else scalars[2]
        v_own = Float32((smem_ptr(base, at + self.at_v, BFloat16, 16) + own).load())
        return rK, rQ, decay, scalars[0], v_own, scalars[1]
