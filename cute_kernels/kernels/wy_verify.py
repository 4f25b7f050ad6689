"""Verify of GDN or KDA on a bf16 pool with tensor cores: the new tokens never touch the state.

With S the committed state as stored, D_t the product of decays 0..t of the new tokens and D_jt that of j+1..t:

    commit    S   = bf16( S0 diag(W_total) + sum_j u_j (W_j k_j)^T )        W_j: decays after logged token j
    dots      P_t = S (D_t k_t),   R_t = S (D_t q_t)                         two 128 x 128 x 8 products
    pairs     A_tj = k_t . D_jt k_j,   C_tj = q_t . D_jt k_j                 one 16 x 8 x 128 product
    u         = (I + beta A)^-1 beta (v - P),   o = R + C u                  products with 8 x 8 matrices, q has the scale

Token by token the recurrence costs 4 fp32 instructions an element and token, which bounds a bf16 pool from 3 tokens on.
Here every token costs tensor-core dots against the bits that are stored anyway.

A block of 8 warps owns one (sequence n, value head h); grid (HV, N). A warp owns 16 rows of V throughout.
1  every thread issues its loads: the warp's rows of state by bulk copies into shared memory, its rows of u and v, and 4 channels
   of a token: the four lanes of quad t have token t, the warp has 16 channels;
2  a warp, on its 16 channels of all tokens: KDA's decays and their products by a scan over the quads, operands D k, D q and
   W k to shared memory, and the share of its channels in A, C and the norms by mma; one barrier of all;
3  a warp, on its 16 rows of V, 32 of K at a time: commit by mma, round, back to shared memory, dots by mma against the rounded
   registers; bulk copies store the rows. One warp first adds up the eight shares of A and C and inverts I + beta A by
   substitution over shuffles, for which the others wait at a second barrier; u and o by mma.
Operands: bf16 inputs are exact; what is fp32 goes in as hi + lo, so that a product is right to 16 bits, but for KDA's pairs, in
tf32. k and q stay raw, their norms and GDN's decays multiply sums and u. Decays enter as products between two tokens, never as
a quotient: any gate is safe.
Order of K: lane l of a quad has 8 consecutive values K = 32 j + 8 l + i, as 16-byte vectors. Taken as the column pair p =
i // 2 of quad lane l in mma tile 4 j + p, they are accumulators of the commit and, two tiles together, A operands of the
dots, with no shuffle. Rows of V: rows q and q + 8 of a tile are two neighbours of the warp's, so that stores are pairs. Quads
take turns between the halves of a warp's rows, which lie on different banks (`landed_rows`).
Ids, counts, log and races: as in `recurrent_verify`, whose host function and row rules this class shares.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint32, const_expr

from ..configs.verify import MAX_TOKENS, VerifyKey, wy_regions
from ..configs.verify import WY_OLD_STRIDE as OLD_STRIDE
from ..configs.verify import WY_OPERAND_STRIDE as OPERAND_STRIDE
from ..device.arith import sigmoid
from ..device.memory import load_vector, made_here, offset_ptr, smem_ptr, store_vector, zero_vector
from ..device.predicated import load_half_where, load_into_where, load_words_where, zero_words
from ..device.state_io import row_ptr
from ..device.token_step import HEAD_DIM, decay_factor
from ..device.warp_ops import ldmatrix4, mma_16816, pack_bf16, unpack_bf16
from ..device.wy_math import OWN, as_float, split_bf16, store_words, times, unit_lower_inverse, word_ptr
from ..device.wy_tokens import WyTokens
from . import recurrent_verify

SOLVED = 1  # named barrier: one warp's inverse is in shared memory
CHUNK = 32  # K values of one state row that a quad holds as four 16-byte vectors
CHUNKS = HEAD_DIM // CHUNK


def log_at(first, token, width, inner):
    """Element of a token of the log. Tokens of a log are fewer than 2^31, its elements may not be."""
    return Int64(Int32(first) + token) * Int64(width) + Int64(inner)


def own_row(warp, quad):
    """First of a lane's two rows of V within the head: quads take turns between the halves of the warp's 16 rows."""
    return warp * 16 + quad % 2 * 8 + quad // 2 * 2


class WyVerify(WyTokens, recurrent_verify.RecurrentVerify):
    def __init__(self, key: VerifyKey):
        super().__init__(key)
        self.landings, self.split = self.warps, True
        self.ahead = self.kda  # without a gate a channel it is level
        self.pieces = 2 if self.kda else 1  # words of an operand: hi and lo, or exact
        self.at, self.words = {}, 0  # first word of each region
        for name, size in wy_regions(self.kda, self.warps).items():
            self.at[name] = self.words
            self.words += size

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
        start, length, replayed = row.start, row.length, row.replayed
        smem = self.allocate()
        places = self.new_places(mQ, mK, mV, mGate, mBeta, tidx, head, row.key_head, start)
        if const_expr(self.ahead):
            if const_expr(not self.key.late):
                self.land_rows(mState, smem[1], smem[2], row.read, row.reads, head * HEAD_DIM, tidx)
            # Before the first load: between loads, addresses would wait for registers that loads have yet to read.
            places = iter([made_here(place, place.alignment) for place in places])
        tensors = mState, mLogK, mLogU, mLogGate
        old = self.load_early(smem, tensors, row, tidx, head, landing=self.ahead or self.key.late)
        if const_expr(self.key.late):
            # The tokens are needed first, and loads of a warp go out before its first lane has started copies.
            self.land_rows(mState, smem[1], smem[2], row.read, row.reads, head * HEAD_DIM, tidx)
        self.wait(early)
        new = self.new_registers()
        self.load_new(new, places, tidx, length)
        parameters = self.load_parameters(mALog, mBias, tidx, head)
        self.put_logged(smem[0], old, new[2:], parameters, lower_bound, tidx, replayed)
        self.run_row(smem, old, new, parameters, tensors, (mOut,), row, l2norm, scale, lower_bound, tidx, head)

    def allocate(self):
        """Shared memory of a block: the regions' first word, the landing buffer and its barriers, one a warp."""
        smem = cutlass.utils.SmemAllocator()
        sLanding = smem.allocate_tensor(BFloat16, cute.make_layout(self.landed_at(self.warps, 16 * HEAD_DIM, 0)), 128)
        bars = smem.allocate_array(Int64, self.landings)
        return smem.allocate_tensor(Float32, cute.make_layout(self.words), 128).iterator, sLanding, bars

    def new_registers(self):
        """Zeroed registers for new tokens: k and q of a lane's channels, the gate, words of v, beta's bits."""
        words, beta = (cute.make_rmem_tensor(cute.make_layout(n), Uint32) for n in (2, 1))
        words[0], words[1] = Uint32(0), Uint32(0)
        k, q, gate = (zero_words(OWN) for _ in range(3))
        beta[0] = Uint32(0)
        return k, q, gate, words, beta

    @cute.jit
    def load_early(self, smem, tensors, row, tidx: Int32, head: Int32, landing: cutlass.Constexpr = False):
        """Issue the loads of what the kernel before did not write: state (unless it is `landing`), logged u, k and gates."""
        _, sLanding, bars = smem
        mState, mLogK, mLogU, mLogGate = tensors
        log_in, replayed = row.log_in, row.replayed
        lane, warp = tidx % 32, tidx // 32
        quad, l4 = lane // 4, lane % 4
        if const_expr(not landing):
            self.land_rows(mState, sLanding, bars, row.read, row.reads, head * HEAD_DIM, tidx)
        hk, hv = cute.size(mLogK, mode=[3]), cute.size(mLogGate, mode=[3])
        channel = warp * 16 + OWN * l4  # the lane's first of token `quad`
        rWords = cute.make_rmem_tensor(cute.make_layout(4), Uint32)
        self.load_u(rWords, mLogU, head * HEAD_DIM + own_row(warp, quad), l4, log_in, replayed)
        rK, rGate = zero_words(OWN), zero_words(OWN)
        at = log_at(log_in, quad, hk * HEAD_DIM, row.key_head * HEAD_DIM + channel)
        load_into_where(quad < replayed, rK, offset_ptr(mLogK.iterator, at, BFloat16, 8))
        if const_expr(self.kda):
            at = log_at(log_in, quad, hv * HEAD_DIM, head * HEAD_DIM + channel)
            load_into_where(quad < replayed, rGate, offset_ptr(mLogGate.iterator, at, BFloat16, 8))
        else:  # the decay of a logged token
            source = offset_ptr(mLogGate.iterator, log_at(log_in, lane, hv, head), Float32, 4)
            words = cute.recast_tensor(rGate, Uint32)
            words[0] = load_words_where((warp == 1) & (lane < replayed), source, 1)[0]
        return cute.recast_tensor(rWords, Float32), rK, rGate  # u as (row, token)

    @cute.jit
    def load_parameters(self, mALog: cute.Tensor, mBias: cute.Tensor, tidx: Int32, head: Int32):
        """Issue the loads of the layer's parameters: A_log, dt_bias of a lane's channels (GDN: of the head).

        Behind all others: the exponential of A_log is scheduled before loads that follow it, which then wait for it.
        """
        rBias = zero_vector(Float32, OWN)
        if const_expr(self.kda):
            first = head * HEAD_DIM + tidx // 32 * 16 + OWN * (tidx % 4)
            rBias.store(load_vector(offset_ptr(mBias.iterator, first, Float32, 16), OWN).load())
        else:
            rBias[0] = mBias[head]
        return Float32(mALog[head]), rBias

    def new_places(self, mQ, mK, mV, mGate, mBeta, tidx, head, key_head, start):
        """Where a lane's new tokens are, each computed when it is asked for: k, q, v of two tokens, gate, beta."""
        lane, warp = tidx % 32, tidx // 32
        quad, l4 = lane // 4, lane % 4
        channel, row = key_head * HEAD_DIM + warp * 16 + OWN * l4, head * HEAD_DIM + own_row(warp, quad)
        yield row_ptr(mK, start + quad, channel, 8)
        yield row_ptr(mQ, start + quad, channel, 8)
        for e in range(2):
            yield row_ptr(mV, start + (2 * l4 + e), row, 4)
        yield from self.gate_places(mGate, mBeta, tidx, head, start)

    def gate_places(self, mGate, mBeta, tidx, head, start):
        """Where a thread's gate and beta are."""
        if self.kda:
            lane, warp = tidx % 32, tidx // 32
            yield row_ptr(mGate, start + lane // 4, head * HEAD_DIM + warp * 16 + OWN * (lane % 4), 8)
        else:
            yield row_ptr(mGate, start + tidx, head, 2)
        yield row_ptr(mBeta, start + tidx, head, 2)

    def load_new(self, new, places, tidx, length):
        """Issue the loads of the new tokens; those a row does not have stay zero."""
        rK, rQ, _, rV, _ = new
        lane = tidx % 32
        quad, l4 = lane // 4, lane % 4
        load_into_where(quad < length, rK, next(places))
        load_into_where(quad < length, rQ, next(places))
        for e in range(2):
            rV[e] = load_words_where(2 * l4 + e < length, next(places), 1)[0]
        self.load_gates(new, places, tidx, length)

    def load_gates(self, new, places, tidx, length):
        """KDA's raw gate of a lane's channels; beta and GDN's gate of one token by each of the first threads."""
        _, _, rGate, _, rBeta = new
        if self.kda:
            load_into_where(tidx % 32 // 4 < length, rGate, next(places))
        else:
            cute.recast_tensor(rGate, Uint32)[0] = load_half_where(tidx < length, next(places))
        rBeta[0] = load_half_where(tidx < length, next(places))

    @cute.jit
    def put_logged(
        self, base: cute.Pointer, old, coming, parameters, lower_bound: Float32, tidx: Int32, replayed: Int32
    ):
        """Operands of the commit. They need nothing of the new tokens, whose loads may still be under way.

        KDA: `coming` registers of new tokens count as used here, for the compiler would put their loads behind the decays of
        logged tokens, and the decays of new ones, which wait for the last loads, before. What uses them is a zero that a
        logged decay's sign gives.
        """
        _, rK, rGate = old
        a_log, rBias = parameters
        lane, warp = tidx % 32, tidx // 32
        if replayed > 0:
            rDecay = None
            if const_expr(self.kda):
                rDecay = self.decays(rGate, rBias, a_log, lower_bound, lane // 4 < replayed)
                zero = cute.recast_tensor(rDecay, Uint32)[OWN - 1] >> 31
                for rX in coming:
                    words = cute.recast_tensor(rX, Uint32)
                    for i in cutlass.range_constexpr(cute.size(words)):
                        words[i] = words[i] | zero
            self.put_old(rK, rDecay, base, warp, lane)
        if const_expr(not self.kda):
            if warp == 1:
                decay = as_float(cute.recast_tensor(rGate, Uint32)[0])
                self.put_old_decays(decay if lane < replayed else Float32(1.0), base, lane)

    @cute.jit
    def run_row(
        self,
        smem,
        old,
        new,
        parameters,
        tensors,
        output,
        row,
        l2norm: Boolean,
        scale: Float32,
        lower_bound: Float32,
        tidx: Int32,
        head: Int32,
    ):
        """Log, operands of the new tokens, commit and their results."""
        base, sLanding, bars = smem
        rOldU, rOldK, _ = old
        a_log, rBias = parameters
        rK, rQ, rGate, rV, rBeta = new
        mState, mLogK, mLogU, mLogGate = tensors
        _, write, reads, writes, logged, _, log_out, start, length, replayed, key_head, first_of_key_head = row
        lane, warp = tidx % 32, tidx // 32
        quad, l4 = lane // 4, lane % 4
        hk, hv = cute.size(mLogK, mode=[3]), cute.size(mLogGate, mode=[3])
        if logged and quad < length:
            channel = warp * 16 + OWN * l4
            if first_of_key_head:
                at = log_at(log_out, quad, hk * HEAD_DIM, key_head * HEAD_DIM + channel)
                store_words(rK, offset_ptr(mLogK.iterator, at, BFloat16, 8))
            if const_expr(self.kda):
                at = log_at(log_out, quad, hv * HEAD_DIM, head * HEAD_DIM + channel)
                store_words(rGate, offset_ptr(mLogGate.iterator, at, BFloat16, 8))
        if tidx < MAX_TOKENS:
            beta, _ = unpack_bf16(rBeta[0])
            (base + (self.at["beta"] + tidx)).store(sigmoid(beta) if tidx < length else Float32(0.0))
        if const_expr(not self.kda):
            if warp == 0:
                raw, _ = unpack_bf16(cute.recast_tensor(rGate, Uint32)[0])
                decay = decay_factor(False, raw, rBias[0], a_log, lower_bound)
                if logged and tidx < length:
                    self.log_decay(decay, mLogGate, tidx, head, log_out)
                self.put_decays(decay if tidx < length else Float32(1.0), base, lane)
        rDecay = None
        if const_expr(self.kda):
            rDecay = self.decays(rGate, rBias, a_log, lower_bound, quad < length)
        self.put_new(rK, rQ, rDecay, base, warp, lane)
        self.put_norms(rK, rQ, rOldK, base, warp, lane)
        cute.arch.sync_threads()

        if reads:
            cute.arch.mbarrier_wait(bars + warp, 0)
        norm = self.norm(base, l2norm, scale, lane)
        if (length > 0) & (warp == head % self.warps):
            self.solve(norm, base, lane)
        half = self.landed_at(warp, 16 * HEAD_DIM, quad % 2)
        landed = sLanding.iterator + (half + quad // 2 * 2 * HEAD_DIM + l4 * 8)
        rDots = self.commit_and_dot(landed, rOldU, norm, base, replayed, quad, l4)
        cute.arch.fence_view_async_shared()
        self.send_rows(mState, sLanding, write, writes, head * HEAD_DIM, warp, lane)
        if length > 0:
            cute.arch.barrier(barrier_id=SOLVED, number_of_threads=self.threads)
            self.finish(rDots, rV, norm, base, output, mLogU, head, warp, lane, logged, log_out, start, length)
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def load_u(self, rU: cute.Tensor, mLogU: cute.Tensor, row: Int32, l4: Int32, log_in: Int64, replayed: Int32):
        """u of logged tokens 2 l4, 2 l4 + 1 at rows `row`, `row` + 1: (row, token) in order."""
        width = cute.size(mLogU, mode=[3]) * HEAD_DIM
        for e in cutlass.range_constexpr(2):
            source = offset_ptr(mLogU.iterator, log_at(log_in, 2 * l4 + e, width, row), Float32, 8)
            rU[2 * e], rU[2 * e + 1] = load_words_where(2 * l4 + e < replayed, source, 2)

    @cute.jit
    def commit_and_dot(
        self,
        landed: cute.Pointer,
        rU: cute.Tensor,
        norm: Float32,
        base: cute.Pointer,
        replayed: Int32,
        quad: Int32,
        l4: Int32,
    ) -> cute.Tensor:
        """Commit, round and store the warp's 16 rows; returns their dots with D k (values 0..3) and D q (4..7)."""
        factors = [cute.arch.shuffle_sync(norm, 2 * MAX_TOKENS + 2 * l4 + e) for e in range(2)]
        scalar = Float32(1.0)  # GDN's product of all decays
        if const_expr(not self.kda):
            behind = load_vector(smem_ptr(base, self.at["behind"] + 2 * l4, Float32, 8), 2)
            for e in cutlass.range_constexpr(2):
                factors[e] = factors[e] * behind[e]
            scalar = (base + self.at["total"]).load()
        hi0, lo0 = split_bf16(rU[0] * factors[0], rU[2] * factors[1])
        hi1, lo1 = split_bf16(rU[1] * factors[0], rU[3] * factors[1])
        # Columns 0..7 and 8..15 of u against rows of W k: GDN hi and lo against k twice, KDA hi, then lo, against hi and lo.
        a_old = [(hi0, hi1, lo0, lo1)]
        if const_expr(self.kda):
            a_old = [(hi0, hi1, hi0, hi1), (lo0, lo1, lo0, lo1)]
        lane = quad * 4 + l4
        part = lane // 8 % 2 if const_expr(self.kda) else Int32(0)
        line = self.at["old"] + (part * MAX_TOKENS + lane % 8) * OLD_STRIDE + lane // 16 * 4
        line = Int32(smem_ptr(base, line, Uint32, 16).toint())
        rDots = zero_vector(Float32, 8)
        # 8 values of K of the lane's two rows, as words: (word, row) as they are loaded, (row, word) as mma takes them. A word
        # that is a part of both vectors would be copied before each mma. What makes it two is a zero the compiler cannot see.
        zero = replayed.to(Uint32) >> 8
        rState = cute.make_rmem_tensor(cute.make_layout((4, 2)), Uint32)
        rA = cute.make_rmem_tensor(cute.make_layout((2, 4)), Uint32)
        for j in cutlass.range_constexpr(CHUNKS):
            for r in cutlass.range_constexpr(2):
                source = word_ptr(landed + (r * HEAD_DIM + j * CHUNK), 16)
                cute.autovec_copy(cute.make_tensor(source, cute.make_layout(4)), rState[None, r])
            if replayed > 0:
                total = [scalar] * 8
                if const_expr(self.kda):
                    total = load_vector(smem_ptr(base, self.at["total"] + j * CHUNK + l4 * 8, Float32, 16), 8)
                b_old = [*ldmatrix4(line + 64 * j, transpose=True), *ldmatrix4(line + 64 * j + 32, transpose=True)]
                for p in cutlass.range_constexpr(4):
                    c0, c1 = unpack_bf16(rState[p, 0])
                    c2, c3 = unpack_bf16(rState[p, 1])
                    acc = (c0 * total[2 * p], c1 * total[2 * p + 1], c2 * total[2 * p], c3 * total[2 * p + 1])
                    for part in cutlass.range_constexpr(self.pieces):
                        acc = mma_16816(a_old[part], (b_old[2 * p], b_old[2 * p + 1]), acc, "bf16")
                    rA[0, p] = pack_bf16(acc[0], acc[1])
                    rA[1, p] = pack_bf16(acc[2], acc[3])
                for r in cutlass.range_constexpr(2):
                    for p in cutlass.range_constexpr(4):
                        rState[p, r] = rA[r, p] | zero
                    target = word_ptr(landed + (r * HEAD_DIM + j * CHUNK), 16)
                    cute.autovec_copy(rState[None, r], cute.make_tensor(target, cute.make_layout(4)))
            else:
                for r in cutlass.range_constexpr(2):
                    for p in cutlass.range_constexpr(4):
                        rA[r, p] = rState[p, r] | zero
            for which in cutlass.range_constexpr(2):
                acc = (rDots[4 * which], rDots[4 * which + 1], rDots[4 * which + 2], rDots[4 * which + 3])
                for part in cutlass.range_constexpr(self.pieces):
                    at = (which * self.pieces + part) * MAX_TOKENS + quad
                    place = self.at["operands"] + (at * OPERAND_STRIDE + j * CHUNK + l4 * 8) // 2
                    b = load_vector(smem_ptr(base, place, Uint32, 16), 4)
                    for half in cutlass.range_constexpr(2):
                        p = 2 * half
                        a = (rA[0, p], rA[1, p], rA[0, p + 1], rA[1, p + 1])
                        acc = mma_16816(a, (b[p], b[p + 1]), acc, "bf16")
                for i in cutlass.range_constexpr(4):
                    rDots[4 * which + i] = acc[i]
        return rDots

    @cute.jit
    def solve(self, norm: Float32, base: cute.Pointer, lane: Int32):
        """(I + beta A)^-1 and C as operands, hi and lo, in place of the first share of the pairs: a lane reads no other's."""
        rPairs = self.pairs(base, norm, lane)
        x0, x1 = unit_lower_inverse(rPairs[0], rPairs[1], lane)
        rWords = cute.make_rmem_tensor(cute.make_layout(4), Uint32)
        rWords[0], rWords[1] = split_bf16(x0, x1)
        rWords[2], rWords[3] = split_bf16(rPairs[2], rPairs[3])
        store_vector(rWords, smem_ptr(base, self.at["pairs"] + lane * 4, Uint32, 16), 4)

    @cute.jit
    def finish(
        self,
        rDots: cute.Tensor,
        rV: cute.Tensor,
        norm: Float32,
        base: cute.Pointer,
        output,
        mLogU: cute.Tensor,
        head: Int32,
        warp: Int32,
        lane: Int32,
        logged: Boolean,
        log_out: Int64,
        start: Int32,
        length: Int32,
    ):
        """u and o of the warp's 16 rows; a lane has two of them, of tokens 2 l4, 2 l4 + 1."""
        l4 = lane % 4
        solved = load_vector(smem_ptr(base, self.at["pairs"] + lane * 4, Uint32, 16), 4)
        rFactors = zero_vector(Float32, 6)  # beta, those of k and of q, of tokens 2 l4 and 2 l4 + 1
        for e in cutlass.range_constexpr(2):
            t = 2 * l4 + e
            rFactors[e] = (base + (self.at["beta"] + t)).load()
            rFactors[2 + e] = cute.arch.shuffle_sync(norm, t)
            rFactors[4 + e] = cute.arch.shuffle_sync(norm, MAX_TOKENS + t)
        if const_expr(not self.kda):
            upto = load_vector(smem_ptr(base, self.at["upto"] + 2 * l4, Float32, 8), 2)
            for e in cutlass.range_constexpr(2):
                rFactors[2 + e], rFactors[4 + e] = rFactors[2 + e] * upto[e], rFactors[4 + e] * upto[e]
        row = head * HEAD_DIM + own_row(warp, lane // 4)
        rY, rR = zero_vector(Float32, 4), zero_vector(Float32, 4)  # (token, row)
        for e in cutlass.range_constexpr(2):
            values = unpack_bf16(rV[e])
            for r in cutlass.range_constexpr(2):
                i = 2 * r + e
                rY[i] = rFactors[e] * (values[r] - rFactors[2 + e] * rDots[i])
                rR[i] = rFactors[4 + e] * rDots[4 + i]
        zero = (Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0))
        u = times(rY, (solved[0], solved[1]), zero)
        o = times(u, (solved[2], solved[3]), (rR[0], rR[1], rR[2], rR[3]))
        width = cute.size(mLogU, mode=[3]) * HEAD_DIM
        if logged:
            for e in cutlass.range_constexpr(2):
                t = 2 * l4 + e
                if t < length:
                    rPair = zero_vector(Float32, 2)
                    rPair[0], rPair[1] = u[e], u[2 + e]
                    store_vector(rPair, offset_ptr(mLogU.iterator, log_at(log_out, t, width, row), Float32, 8), 2)
        self.put_outputs(o, base, output, head, warp, lane, start, length)

    @cute.jit
    def put_outputs(
        self, o, base: cute.Pointer, output, head: Int32, warp: Int32, lane: Int32, start: Int32, length: Int32
    ):
        """A lane's outputs, (token, row) in order, rounded into their rows of the result."""
        row = head * HEAD_DIM + own_row(warp, lane // 4)
        for e in cutlass.range_constexpr(2):
            t = 2 * (lane % 4) + e
            if t < length:
                word_ptr(row_ptr(output[0], start + t, row, 4)).store(pack_bf16(o[e], o[2 + e]))


def build(key: VerifyKey):
    """Compile one specialisation for sm_90a from fake tensors."""
    return recurrent_verify.compile_verify(WyVerify(key), key)
