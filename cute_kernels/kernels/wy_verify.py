"""Verify of GDN or KDA on a bf16 pool with tensor cores: the new tokens never touch the state.

With S the committed state as stored, D_t the product of decays 0..t of the new tokens and D_jt that of j+1..t:

    commit    S   = bf16( S0 diag(W_total) + sum_j u_j (W_j k_j)^T )        W_j: decays after logged token j
    dots      P_t = S (D_t k_t),   R_t = S (D_t q_t)                         two 128 x 128 x 8 products
    u_t = beta_t (v_t - P_t - sum_{j<t} (k_t . D_jt k_j) u_j)                8 x 8 triangular, row by row of V
    o_t = R_t + sum_{j<=t} (q_t . D_jt k_j) u_j                              q has the scale

Token by token the recurrence costs 4 fp32 instructions an element and token, which bounds a bf16 pool from 3 tokens on.
Here every token costs tensor-core dots against the bits that are stored anyway, so any T <= 8 runs at memory speed.

A block of 8 warps owns one (sequence n, value head h); grid (HV, N). A warp owns 16 rows of V.
1  every thread issues its loads: 16 rows x 128 K of state in 32 registers, u of the logged tokens, then k, q, v, gates;
2  16 lanes a token, threads 0..127 for new tokens and 128..255 for logged ones: norms and decays; one barrier;
3  the same threads: decay products, the 8 x 8 coefficients, and operands D k, D q, W k as two bf16 each (hi + lo, so
   that a product is right to 16 bits) to shared memory; one barrier;
4  a warp, 32 of K at a time: commit by mma, round, store, dots by mma against the rounded registers; then its 16 rows' P
   and R go through shared memory so that a lane has a row, solves for its u and gives its o.
Order of K: lane l of a quad has 8 consecutive values K = 32 j + 8 l + i, as 16-byte vectors. Taken as the column pair p =
i // 2 of quad lane l in mma tile 4 j + p, they are accumulators of the commit and, two tiles together, A operands of the
dots, with no shuffle. Operands in shared memory are laid out to match.
Ids, counts, log and races: as in `recurrent_verify`, whose host function and row rules this class shares.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint32, const_expr

from ..configs.verify import MAX_TOKENS, VerifyKey, wy_regions
from ..configs.verify import WY_DOTS_STRIDE as DOTS_STRIDE
from ..configs.verify import WY_OPERAND_STRIDE as OPERAND_STRIDE
from ..device.arith import sigmoid
from ..device.memory import load_vector, offset_ptr, smem_ptr, store_vector, zero_vector
from ..device.reduce import sum_over
from ..device.state_io import row_ptr, slot_ptr
from ..device.token_step import HEAD_DIM, NORM_LANES, NORM_VALUES, decay_factor, normalize
from ..device.warp_ops import mma_16816, pack_bf16, unpack_bf16
from . import recurrent_verify

CHUNK = 32  # K values of one state row that a quad holds as four 16-byte vectors
CHUNKS = HEAD_DIM // CHUNK


def split_bf16(low, high):
    """A pair of fp32 as packed bf16 hi and packed bf16 remainder."""
    hi = pack_bf16(low, high)
    back_low, back_high = unpack_bf16(hi)
    return hi, pack_bf16(low - back_low, high - back_high)


class WyVerify(recurrent_verify.RecurrentVerify):
    def __init__(self, key: VerifyKey):
        super().__init__(key)
        # Coefficients take several distances at once, so that their chains overlap; KDA's decays leave registers for two.
        self.near = 2 if self.kda else 4
        self.spread = NORM_LANES // (2 * self.near)  # lanes that end with the same sum
        self.at, self.words = {}, 0  # first word of each region
        for name, size in wy_regions(self.kda, self.warps).items():
            self.at[name] = self.words
            self.words += size

    @cute.jit
    def live_row(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mGate: cute.Tensor,
        mBeta: cute.Tensor,
        mALog: cute.Tensor,
        mBias: cute.Tensor,
        mState: cute.Tensor,
        mLogK: cute.Tensor,
        mLogU: cute.Tensor,
        mLogGate: cute.Tensor,
        mOut: cute.Tensor,
        l2norm: Boolean,
        rounds: Boolean,
        settled: Boolean,
        scale: Float32,
        lower_bound: Float32,
        tidx: Int32,
        head: Int32,
        tile: Int32,
        key_head: Int32,
        read: Int32,
        write: Int32,
        reads: Boolean,
        writes: Boolean,
        logged: Boolean,
        logs_key: Boolean,
        log_in: Int64,
        log_out: Int64,
        start: Int32,
        length: Int32,
        replayed: Int32,
    ):
        smem = cutlass.utils.SmemAllocator()
        sWords = smem.allocate_tensor(Float32, cute.make_layout(self.words), 128)
        base = sWords.iterator
        lane, warp = tidx % 32, tidx // 32
        quad, l4 = lane // 4, lane % 4
        inner = (head * HEAD_DIM + warp * 16 + quad) * HEAD_DIM + l4 * 8
        rState = cute.make_rmem_tensor(cute.make_layout((8, CHUNKS, 2)), BFloat16)
        rWords = cute.recast_tensor(rState, Uint32)  # (4, CHUNKS, 2)
        for i in cutlass.range_constexpr(8 * CHUNKS):
            rWords[i] = Uint32(0)
        if reads:
            for row in cutlass.range_constexpr(2):
                for j in cutlass.range_constexpr(CHUNKS):
                    source = slot_ptr(mState, read, inner) + (row * 8 * HEAD_DIM + j * CHUNK)
                    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(8)), rState[None, j, row])
        rU = zero_vector(Float32, 4)
        self.load_u(rU, mLogU, head, warp * 16 + quad, l4, log_in, replayed)

        thread = tidx % 128
        self.wait(settled)
        rK = cute.make_rmem_tensor(cute.make_layout(NORM_VALUES), Float32)
        rQ = cute.make_rmem_tensor(cute.make_layout(NORM_VALUES), Float32)
        if tidx < 128:
            new = self.block.registers()
            self.block.load(new, mQ, mK, mV, mGate, mBeta, thread, start, length, key_head, head, Int32(0))
            parameters = self.block.parameters(mALog, mBias, thread, head)
            rK.store(normalize(new[0], scale, l2norm, False).load())
            self.put_new(new, parameters, rK, base, lower_bound, thread, length)
            rQ.store(normalize(new[1], scale, l2norm, True).load())
            if logged:
                self.log_vectors(new, mLogK, mLogGate, thread, head, Int32(0), key_head, logs_key, log_out, length)
                if const_expr(not self.kda):
                    if thread < length:
                        self.log_decay((base + (self.at["decay"] + thread)).load(), mLogGate, thread, head, log_out)
        else:
            raw_k = zero_vector(BFloat16, NORM_VALUES)
            raw_gate = zero_vector(BFloat16, NORM_VALUES) if const_expr(self.kda) else zero_vector(Float32, 1)
            self.load_old_k(raw_k, raw_gate, mLogK, mLogGate, thread, head, key_head, log_in, replayed)
            parameters = self.block.parameters(mALog, mBias, thread, head)
            rK.store(normalize(raw_k, Float32(1.0), l2norm, False).load())
            self.put_old_decay(raw_gate, parameters, base, lower_bound, thread, replayed)
        cute.arch.sync_threads()
        if tidx < 128:
            self.put_operands(rK, rQ, base, thread, length)
        else:
            self.put_pairs(rK, base, thread, replayed)
        cute.arch.sync_threads()

        rDots = self.commit_and_dot(rWords, rState, rU, base, mState, inner, write, writes, replayed, quad, l4)
        self.solve(rDots, base, mOut, mLogU, warp, lane, head, logged, log_out, start, length)

    @cute.jit
    def load_u(
        self, rU: cute.Tensor, mLogU: cute.Tensor, head: Int32, row: Int32, l4: Int32, log_in: Int64, replayed: Int32
    ):
        """u of logged tokens 2 l4, 2 l4 + 1 at V rows `row`, `row` + 8: (token, row) in order."""
        width = cute.size(mLogU, mode=[3]) * HEAD_DIM
        for e in cutlass.range_constexpr(2):
            if 2 * l4 + e < replayed:
                source = offset_ptr(mLogU.iterator, (log_in + (2 * l4 + e)) * width + head * HEAD_DIM + row, Float32, 4)
                rU[e] = source.load()
                rU[2 + e] = (source + 8).load()

    @cute.jit
    def load_old_k(
        self,
        raw_k: cute.Tensor,
        raw_gate: cute.Tensor,
        mLogK: cute.Tensor,
        mLogGate: cute.Tensor,
        thread: Int32,
        head: Int32,
        key_head: Int32,
        log_in: Int64,
        replayed: Int32,
    ):
        """Issue the loads of a logged token's 8 channels of k and KDA's raw gate, or of GDN's decays."""
        hk, hv = cute.size(mLogK, mode=[3]), cute.size(mLogGate, mode=[3])
        token, lane16 = thread // NORM_LANES, thread % NORM_LANES
        vector = cute.make_layout(NORM_VALUES)
        if token < replayed:
            at = (log_in + token) * (hk * HEAD_DIM) + key_head * HEAD_DIM + lane16 * NORM_VALUES
            cute.autovec_copy(cute.make_tensor(offset_ptr(mLogK.iterator, at, BFloat16, 16), vector), raw_k)
            if const_expr(self.kda):
                at = (log_in + token) * (hv * HEAD_DIM) + head * HEAD_DIM + lane16 * NORM_VALUES
                cute.autovec_copy(cute.make_tensor(offset_ptr(mLogGate.iterator, at, BFloat16, 16), vector), raw_gate)
        if const_expr(not self.kda):
            if thread < replayed:
                raw_gate[0] = offset_ptr(mLogGate.iterator, (log_in + thread) * hv + head, Float32, 4).load()

    @cute.jit
    def put_new(
        self,
        new,
        parameters: cute.Tensor,
        rK: cute.Tensor,
        base: cute.Pointer,
        lower_bound: Float32,
        thread: Int32,
        length: Int32,
    ):
        """k, v, decays and beta of the new tokens into shared memory; coefficients to zero."""
        token, lane16 = thread // NORM_LANES, thread % NORM_LANES
        place = token * HEAD_DIM + lane16 * NORM_VALUES
        store_vector(rK, smem_ptr(base, self.at["keys"] + place, Float32, 16), NORM_VALUES)
        values = smem_ptr(base, self.at["values"], BFloat16, 16) + place
        store_vector(new[2], smem_ptr(values, 0, BFloat16, 16), NORM_VALUES)
        (base + (self.at["coefficients"] + thread)).store(Float32(0.0))
        if const_expr(self.kda):
            if token < length:
                rDecay = self.decays(new[3], parameters, lower_bound)
                store_vector(rDecay, smem_ptr(base, self.at["decay"] + place, Float32, 16), NORM_VALUES)
        if thread < length:
            (base + (self.at["beta"] + thread)).store(sigmoid(Float32(new[4][0])))
            if const_expr(not self.kda):
                decay = decay_factor(False, Float32(new[3][0]), parameters[0], parameters[1], lower_bound)
                (base + (self.at["decay"] + thread)).store(decay)

    @cute.jit
    def put_old_decay(
        self,
        raw_gate: cute.Tensor,
        parameters: cute.Tensor,
        base: cute.Pointer,
        lower_bound: Float32,
        thread: Int32,
        replayed: Int32,
    ):
        """Decays of the logged tokens into shared memory."""
        token, lane16 = thread // NORM_LANES, thread % NORM_LANES
        if const_expr(self.kda):
            if token < replayed:
                rDecay = self.decays(raw_gate, parameters, lower_bound)
                place = self.at["old_decay"] + token * HEAD_DIM + lane16 * NORM_VALUES
                store_vector(rDecay, smem_ptr(base, place, Float32, 16), NORM_VALUES)
        else:
            if thread < replayed:
                (base + (self.at["old_decay"] + thread)).store(raw_gate[0])

    @cute.jit
    def decays(self, raw_gate: cute.Tensor, parameters: cute.Tensor, lower_bound: Float32) -> cute.Tensor:
        """KDA's decays of 8 channels."""
        rDecay = cute.make_rmem_tensor(cute.make_layout(NORM_VALUES), Float32)
        for i in cutlass.range_constexpr(NORM_VALUES):
            rDecay[i] = decay_factor(
                self.bounded, Float32(raw_gate[i]), parameters[i], parameters[NORM_VALUES], lower_bound
            )
        return rDecay

    def load_decay(self, base, region, token, lane16):
        """A token's decays of 8 channels; for GDN 8 times the same register."""
        if self.kda:
            place = self.at[region] + token * HEAD_DIM + lane16 * NORM_VALUES
            return load_vector(smem_ptr(base, place, Float32, 16), NORM_VALUES)
        decay = (base + (self.at[region] + token)).load()
        return [decay] * NORM_VALUES

    @cute.jit
    def put_operands(self, rK: cute.Tensor, rQ: cute.Tensor, base: cute.Pointer, thread: Int32, length: Int32):
        """Coefficients of a new token against the tokens before it, then D k and D q as operands of the dots."""
        token, lane16 = thread // NORM_LANES, thread % NORM_LANES
        rW = cute.make_rmem_tensor(cute.make_layout(NORM_VALUES), Float32)  # decays j + 1 .. token
        for i in cutlass.range_constexpr(NORM_VALUES):
            rW[i] = Float32(1.0)
        beta = (base + (self.at["beta"] + token)).load()
        for group in cutlass.range_constexpr(MAX_TOKENS // self.near):
            if group * self.near < length:
                sums = cute.make_rmem_tensor(cute.make_layout(2 * self.near), Float32)  # (k.k, q.k) by distance
                for i in cutlass.range_constexpr(2 * self.near):
                    sums[i] = Float32(0.0)
                for step in cutlass.range_constexpr(self.near):
                    back = group * self.near + step
                    j = cutlass.max(token - back, 0)
                    place = self.at["keys"] + j * HEAD_DIM + lane16 * NORM_VALUES
                    rOther = load_vector(smem_ptr(base, place, Float32, 16), NORM_VALUES)
                    decay = self.load_decay(base, "decay", j, lane16)
                    for i in cutlass.range_constexpr(NORM_VALUES):
                        weighted = rW[i] * rOther[i]
                        sums[2 * step] += weighted * rK[i]
                        sums[2 * step + 1] += weighted * rQ[i]
                        rW[i] = rW[i] * decay[i] if back <= token else rW[i]
                for level in cutlass.range_constexpr(self.near.bit_length()):  # transposing butterfly
                    half = self.near >> level
                    offset = NORM_LANES >> (level + 1)
                    upper = (lane16 & offset) != 0
                    for i in cutlass.range_constexpr(half):
                        kept = sums[half + i] if upper else sums[i]
                        sent = sums[i] if upper else sums[half + i]
                        sums[i] = kept + cute.arch.shuffle_sync_bfly(sent, offset=offset)
                total = sum_over(sums[0], self.spread)
                distance = group * self.near + lane16 // (2 * self.spread)
                if distance <= token and token < length and lane16 % self.spread == 0:
                    row = base + (self.at["coefficients"] + token * MAX_TOKENS + token - distance)
                    if lane16 // self.spread % 2 == 1:
                        (row + MAX_TOKENS * MAX_TOKENS).store(total)
                    elif distance > 0:
                        row.store(beta * total)
        live = token < length
        rHi = cute.make_rmem_tensor(cute.make_layout(4), Uint32)
        rLo = cute.make_rmem_tensor(cute.make_layout(4), Uint32)
        for which in cutlass.range_constexpr(2):
            rX = rK if const_expr(which == 0) else rQ
            for i in cutlass.range_constexpr(4):
                low = rX[2 * i] * rW[2 * i] if live else Float32(0.0)
                high = rX[2 * i + 1] * rW[2 * i + 1] if live else Float32(0.0)
                rHi[i], rLo[i] = split_bf16(low, high)
            for part in cutlass.range_constexpr(2):
                row = (2 * which + part) * MAX_TOKENS + token
                place = self.at["operands"] + (row * OPERAND_STRIDE + lane16 * NORM_VALUES) // 2
                store_vector(rHi if const_expr(part == 0) else rLo, smem_ptr(base, place, Uint32, 16), 4)

    @cute.jit
    def put_pairs(self, rK: cute.Tensor, base: cute.Pointer, thread: Int32, replayed: Int32):
        """W k of the logged tokens as operand of the commit, two tokens a word, and the product of all decays."""
        token, lane16 = thread // NORM_LANES, thread % NORM_LANES
        rW = cute.make_rmem_tensor(cute.make_layout(NORM_VALUES), Float32)
        for i in cutlass.range_constexpr(NORM_VALUES):
            rW[i] = Float32(1.0)
        for j in cutlass.range(token + 1, replayed, unroll=1):
            decay = self.load_decay(base, "old_decay", j, lane16)
            for i in cutlass.range_constexpr(NORM_VALUES):
                rW[i] = rW[i] * decay[i]
        if token == 0 and replayed > 0:
            decay = self.load_decay(base, "old_decay", 0, lane16)
            if const_expr(self.kda):
                rTotal = cute.make_rmem_tensor(cute.make_layout(NORM_VALUES), Float32)
                for i in cutlass.range_constexpr(NORM_VALUES):
                    rTotal[i] = rW[i] * decay[i]
                place = self.at["total"] + lane16 * NORM_VALUES
                store_vector(rTotal, smem_ptr(base, place, Float32, 16), NORM_VALUES)
            else:
                if lane16 == 0:
                    (base + self.at["total"]).store(rW[0] * decay[0])
        live, even = token < replayed, token % 2 == 0
        rX = cute.make_rmem_tensor(cute.make_layout(NORM_VALUES), Float32)
        for i in cutlass.range_constexpr(NORM_VALUES):
            rX[i] = rK[i] * rW[i] if live else Float32(0.0)
        # A warp has tokens 2m and 2m + 1: the even one's lanes take channels 0..3 of both, the odd one's 4..7.
        for i in cutlass.range_constexpr(4):
            mine = rX[i] if even else rX[i + 4]
            theirs = cute.arch.shuffle_sync_bfly(rX[i + 4] if even else rX[i], offset=16)
            hi, lo = split_bf16(mine if even else theirs, theirs if even else mine)
            rPair = cute.make_rmem_tensor(cute.make_layout(2), Uint32)
            rPair[0], rPair[1] = hi, lo
            channel = i if even else Int32(i + 4)
            column = (lane16 // 4 * 4 + channel // 2) * 8 + lane16 % 4 * 2 + channel % 2
            store_vector(rPair, smem_ptr(base, self.at["pairs"] + (column * 4 + token // 2) * 2, Uint32, 8), 2)

    @cute.jit
    def commit_and_dot(
        self,
        rWords: cute.Tensor,
        rState: cute.Tensor,
        rU: cute.Tensor,
        base: cute.Pointer,
        mState: cute.Tensor,
        inner: Int32,
        write: Int32,
        writes: Boolean,
        replayed: Int32,
        quad: Int32,
        l4: Int32,
    ) -> cute.Tensor:
        """Commit, round and store the warp's 16 rows; returns their dots with D k (values 0..3) and D q (4..7)."""
        hi0, lo0 = split_bf16(rU[0], rU[1])
        hi1, lo1 = split_bf16(rU[2], rU[3])
        rDots = cute.make_rmem_tensor(cute.make_layout(8), Float32)
        for i in cutlass.range_constexpr(8):
            rDots[i] = Float32(0.0)
        for j in cutlass.range_constexpr(CHUNKS):
            if replayed > 0:
                if const_expr(self.kda):
                    total = load_vector(smem_ptr(base, self.at["total"] + j * CHUNK + l4 * 8, Float32, 16), 8)
                else:
                    total = [(base + self.at["total"]).load()] * 8
                for p in cutlass.range_constexpr(4):
                    c0, c1 = unpack_bf16(rWords[p, j, 0])
                    c2, c3 = unpack_bf16(rWords[p, j, 1])
                    acc = (c0 * total[2 * p], c1 * total[2 * p + 1], c2 * total[2 * p], c3 * total[2 * p + 1])
                    place = self.at["pairs"] + (((4 * j + p) * 8 + quad) * 4 + l4) * 2
                    pair = load_vector(smem_ptr(base, place, Uint32, 8), 2)
                    acc = mma_16816((hi0, hi1, lo0, lo1), (pair[0], pair[0]), acc, "bf16")
                    acc = mma_16816((hi0, hi1, lo0, lo1), (pair[1], pair[1]), acc, "bf16")
                    rWords[p, j, 0] = pack_bf16(acc[0], acc[1])
                    rWords[p, j, 1] = pack_bf16(acc[2], acc[3])
            if writes:
                for row in cutlass.range_constexpr(2):
                    target = slot_ptr(mState, write, inner) + (row * 8 * HEAD_DIM + j * CHUNK)
                    cute.autovec_copy(rState[None, j, row], cute.make_tensor(target, cute.make_layout(8)))
            for which in cutlass.range_constexpr(2):
                acc = (rDots[4 * which], rDots[4 * which + 1], rDots[4 * which + 2], rDots[4 * which + 3])
                for part in cutlass.range_constexpr(2):
                    row = (2 * which + part) * MAX_TOKENS + quad
                    place = self.at["operands"] + (row * OPERAND_STRIDE + j * CHUNK + l4 * 8) // 2
                    b = load_vector(smem_ptr(base, place, Uint32, 16), 4)
                    for half in cutlass.range_constexpr(2):
                        p = 2 * half
                        a = (rWords[p, j, 0], rWords[p, j, 1], rWords[p + 1, j, 0], rWords[p + 1, j, 1])
                        acc = mma_16816(a, (b[p], b[p + 1]), acc, "bf16")
                for i in cutlass.range_constexpr(4):
                    rDots[4 * which + i] = acc[i]
        return rDots

    @cute.jit
    def solve(
        self,
        rDots: cute.Tensor,
        base: cute.Pointer,
        mOut: cute.Tensor,
        mLogU: cute.Tensor,
        warp: Int32,
        lane: Int32,
        head: Int32,
        logged: Boolean,
        log_out: Int64,
        start: Int32,
        length: Int32,
    ):
        """u and o of the warp's 16 rows. A lane has one row; the two halves of the warp store tokens 0..3 and 4..7."""
        dots = self.at["dots"] + warp * 16 * DOTS_STRIDE
        for which in cutlass.range_constexpr(2):
            for row in cutlass.range_constexpr(2):
                rPair = cute.make_rmem_tensor(cute.make_layout(2), Float32)
                rPair[0], rPair[1] = rDots[4 * which + 2 * row], rDots[4 * which + 2 * row + 1]
                place = dots + (lane // 4 + 8 * row) * DOTS_STRIDE + which * 8 + lane % 4 * 2
                store_vector(rPair, smem_ptr(base, place, Float32, 8), 2)
        cute.arch.sync_warp()
        row, late = lane % 16, lane // 16
        place = warp * 16 + row
        rP = load_vector(smem_ptr(base, dots + row * DOTS_STRIDE, Float32, 16), 8)
        rR = load_vector(smem_ptr(base, dots + row * DOTS_STRIDE + 8 + late * 4, Float32, 16), 4)
        rBeta = load_vector(smem_ptr(base, self.at["beta"], Float32, 16), 8)
        values = smem_ptr(base, self.at["values"], BFloat16, 16) + place
        rU = cute.make_rmem_tensor(cute.make_layout(MAX_TOKENS), Float32)
        for t in cutlass.range_constexpr(MAX_TOKENS):
            u = rBeta[t] * (Float32((values + t * HEAD_DIM).load()) - rP[t])
            if const_expr(t > 0):
                coefficients = load_vector(
                    smem_ptr(base, self.at["coefficients"] + t * MAX_TOKENS, Float32, 16), 4 if t <= 4 else 8
                )
                for j in cutlass.range_constexpr(t):
                    u -= coefficients[j] * rU[j]
            # Tokens the row does not have: whatever their operands hold must not reach the sums below.
            rU[t] = u if t < length else Float32(0.0)
        hv = cute.size(mLogU, mode=[3])
        column = head * HEAD_DIM + place
        for i in cutlass.range_constexpr(4):
            t = late * 4 + i
            first = self.at["coefficients"] + MAX_TOKENS * MAX_TOKENS + t * MAX_TOKENS
            coefficients = load_vector(smem_ptr(base, first, Float32, 16), 8)
            o = rR[i]
            for j in cutlass.range_constexpr(MAX_TOKENS):
                o += coefficients[j] * rU[j]
            if t < length:
                row_ptr(mOut, start + t, column, 2).store(BFloat16(o))
                if logged:
                    u = rU[i] if late == 0 else rU[i + 4]
                    offset_ptr(mLogU.iterator, (log_out + t) * (hv * HEAD_DIM) + column, Float32, 4).store(u)


def build(key: VerifyKey):
    """Compile one specialisation for sm_90a from fake tensors."""
    return recurrent_verify.compile_verify(WyVerify(key), key)
