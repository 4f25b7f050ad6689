"""Up to 8 tokens of one (sequence, value head), made ready for `token_step` in shared memory.

128 threads load: 16 lanes a token for k, q, the block's rows of v and KDA's raw gate; 8 threads for beta and GDN's gate.
`load` only issues loads, so that a caller may run other work before `put` does norms, k.q and gates. In shared memory a
block is `floats` fp32 words: k, q, v (as bf16), decays, beta, k.q.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, const_expr

from .arith import sigmoid
from .memory import load_vector, offset_ptr, smem_ptr, store_vector, zero_vector
from .state_io import row_ptr
from .token_step import (
    HEAD_DIM,
    NORM_LANES,
    NORM_VALUES,
    decay_factor,
    dot_channels,
    normalize,
    put_channels,
    take_channels,
)

TOKENS = 8


@cute.jit
def put_decays(
    bounded: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
    rRaw: cute.Tensor,
    mALog: cute.Tensor,
    mBias: cute.Tensor,
    base: cute.Pointer,
    offset: Int32,
    lower_bound: Float32,
    lane16: Int32,
    head: Int32,
):
    """KDA's decays of a lane's 8 channels of a token into shared memory."""
    rBias = load_vector(offset_ptr(mBias.iterator, head * HEAD_DIM + lane16 * NORM_VALUES, Float32, 16), NORM_VALUES)
    rDecay = cute.make_rmem_tensor(cute.make_layout(NORM_VALUES), Float32)
    for i in cutlass.range_constexpr(NORM_VALUES):
        rDecay[i] = decay_factor(bounded, Float32(rRaw[i]), rBias[i], mALog[head], lower_bound)
    put_channels(rDecay, base, offset, lane16, dtype)


class RawTokens:
    """A thread's share of a block as loaded: k, q, v, KDA's gate of its 16-lane group's token; beta and GDN's gate."""

    def __init__(self, kda, width):
        self.k = zero_vector(BFloat16, NORM_VALUES)
        self.q = zero_vector(BFloat16, NORM_VALUES)
        self.v = zero_vector(BFloat16, width)
        self.gate = zero_vector(BFloat16, NORM_VALUES if kda else 1)
        self.beta = zero_vector(BFloat16, 1)

    @property
    def parts(self):
        return self.k, self.q, self.v, self.gate, self.beta


class TokenBlock:
    """Static facts of a block: kind, pool dtype, rows of V of the thread block."""

    def __init__(self, kind, dtype, tile):
        self.kda, self.bounded = kind != "gdn", kind == "kda_bounded"
        self.dtype, self.tile = dtype, tile
        self.width = tile // NORM_LANES  # values of v a lane moves
        self.at_q = TOKENS * HEAD_DIM
        self.at_v = 2 * self.at_q
        self.at_decay = self.at_v + TOKENS * tile // 2
        self.at_beta = self.at_decay + TOKENS * (HEAD_DIM if self.kda else 1)
        self.at_kq = self.at_beta + TOKENS
        self.floats = self.at_kq + TOKENS

    def registers(self):
        """Zeroed registers for `load`."""
        return RawTokens(self.kda, self.width).parts

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
        """Issue the loads of tokens 0..count-1 into `raw`; other tokens' registers keep what they hold."""
        rK, rQ, rV, rGate, rBeta = raw
        token, lane16 = thread // NORM_LANES, thread % NORM_LANES
        row = start + token
        vector = cute.make_layout(NORM_VALUES)
        if token < count:
            inner = key_head * HEAD_DIM + lane16 * NORM_VALUES
            cute.autovec_copy(cute.make_tensor(row_ptr(mK, row, inner, 16), vector), rK)
            cute.autovec_copy(cute.make_tensor(row_ptr(mQ, row, inner, 16), vector), rQ)
            source = row_ptr(mV, row, head * HEAD_DIM + column + lane16 * self.width, 2 * self.width)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(self.width)), rV)
            if const_expr(self.kda):
                inner = head * HEAD_DIM + lane16 * NORM_VALUES
                cute.autovec_copy(cute.make_tensor(row_ptr(mGate, row, inner, 16), vector), rGate)
        if thread < count:
            one = cute.make_layout(1)
            cute.autovec_copy(cute.make_tensor(row_ptr(mBeta, start + thread, head, 2), one), rBeta)
            if const_expr(not self.kda):
                cute.autovec_copy(cute.make_tensor(row_ptr(mGate, start + thread, head, 2), one), rGate)

    @cute.jit
    def put(
        self,
        raw,
        mALog: cute.Tensor,
        mBias: cute.Tensor,
        base: cute.Pointer,  # fp32, shared
        l2norm: Boolean,
        scale: Float32,
        lower_bound: Float32,
        thread: Int32,
        count: Int32,
        head: Int32,
    ):
        """Norms, k.q and gates of a loaded block into shared memory at `base`. All lanes of the 4 warps take part."""
        raw_k, raw_q, raw_v, raw_gate, raw_beta = raw
        token, lane16 = thread // NORM_LANES, thread % NORM_LANES
        rK = normalize(raw_k, scale, l2norm, False)
        rQ = normalize(raw_q, scale, l2norm, True)
        kq = dot_channels(rK, rQ)
        put_channels(rK, base, token * HEAD_DIM, lane16, self.dtype)
        put_channels(rQ, base, self.at_q + token * HEAD_DIM, lane16, self.dtype)
        if lane16 == 0:
            (base + self.at_kq + token).store(kq)
        place = smem_ptr(base, self.at_v, BFloat16, 2) + token * self.tile + lane16 * self.width
        store_vector(raw_v, smem_ptr(place, 0, BFloat16, 2 * self.width), self.width)
        if const_expr(self.kda):
            if token < count:
                offset = self.at_decay + token * HEAD_DIM
                put_decays(self.bounded, self.dtype, raw_gate, mALog, mBias, base, offset, lower_bound, lane16, head)
        if thread < count:
            (base + self.at_beta + thread).store(sigmoid(Float32(raw_beta[0])))
            if const_expr(not self.kda):
                decay = decay_factor(self.bounded, Float32(raw_gate[0]), mBias[head], mALog[head], lower_bound)
                (base + self.at_decay + thread).store(decay)

    def take(self, base, t, l8, own):
        """Arguments of `token_step` for token `t`: k, q, decay, beta, v of the block's row `own`, k.q."""
        rK = take_channels(base, t * HEAD_DIM, l8)
        rQ = take_channels(base, self.at_q + t * HEAD_DIM, l8)
        decay = take_channels(base, self.at_decay + t * HEAD_DIM, l8) if self.kda else (base + self.at_decay + t).load()
        beta, kq = (base + self.at_beta + t).load(), (base + self.at_kq + t).load()
        v_own = Float32((smem_ptr(base, self.at_v, BFloat16, 2) + t * self.tile + own).load())
        return rK, rQ, decay, beta, v_own, kq
