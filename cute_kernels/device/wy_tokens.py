"""What the tokens of a verify step contribute to its tensor-core form, by warps that have 16 channels of all tokens each.

A lane has 4 channels of token t = lane // 4. Into shared memory go the operands D k, D q and W k, and each warp's share of the
pairs k_t . D_jt k_j, q_t . D_jt k_j and of the squared norms; after a barrier every warp adds up the shares.
KDA's pairs: t and j < t differ first in bit b of their numbers; between them lies a multiple r of 2^b, and D_jt is (decays r..t
of row t) times (decays j+1..r-1 of column j), never a quotient. A scan over the tokens passes through both, for b = 0, 1, 2.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32, const_expr

from ..configs.verify import MAX_TOKENS
from ..configs.verify import WY_NORM_STRIDE as NORM_STRIDE
from ..configs.verify import WY_OLD_STRIDE as OLD_STRIDE
from ..configs.verify import WY_OPERAND_STRIDE as OPERAND_STRIDE
from .arith import mul_rn
from .kda_gate import decay_bounded, decay_softplus, gate_constants
from .memory import load_vector, smem_ptr, store_vector, widen, zero_vector
from .token_step import L2NORM_EPS
from .warp_ops import mma_1688_tf32, mma_16816, round_tf32
from .wy_math import OWN, product, put_words, scan, scan_registers, split_four

LEVELS = 3  # bits of a token's number


class WyTokens:
    """Methods of a kernel class that has `kda`, `bounded`, `pieces` (words of an operand) and `at` (first words of regions)."""

    @cute.jit
    def decays(
        self, rRaw: cute.Tensor, rBias: cute.Tensor, a_log: Float32, lower_bound: Float32, live: Boolean
    ) -> cute.Tensor:
        """KDA's decays of a lane's channels; 1 for a token the row does not have."""
        rDecay = cute.make_rmem_tensor(cute.make_layout(OWN), Float32)
        slope, rate = gate_constants(a_log, lower_bound, self.bounded)
        factor = decay_bounded if const_expr(self.bounded) else decay_softplus
        raw = widen(rRaw, OWN)
        for i in cutlass.range_constexpr(OWN):
            decay = factor(raw[i], slope, mul_rn(rBias[i], slope), rate)
            rDecay[i] = decay if live else Float32(1.0)
        return rDecay

    def operand(self, base, line, token, warp, l4):
        """Place of a lane's channels of a token in line `line` of the dots' operands."""
        return smem_ptr(
            base,
            self.at["operands"] + ((line * MAX_TOKENS + token) * OPERAND_STRIDE + warp * 16 + OWN * l4) // 2,
            Uint32,
            8,
        )

    @cute.jit
    def put_new(self, rawK: cute.Tensor, rawQ: cute.Tensor, rDecay, base: cute.Pointer, warp: Int32, lane: Int32):
        """Operands of the dots, and this warp's share of the pairs, from its 16 channels of the new tokens."""
        token, l4 = lane // 4, lane % 4
        wK, wQ = cute.recast_tensor(rawK, Uint32), cute.recast_tensor(rawQ, Uint32)
        zero = (Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0))
        rPairs = cute.make_rmem_tensor(cute.make_layout(4), Float32)  # (k.k, q.k) of (token, 2 l4), (token, 2 l4 + 1)
        raw = mma_16816((wK[0], wQ[0], wK[1], wQ[1]), (wK[0], wK[1]), zero, "bf16")
        for i in cutlass.range_constexpr(4):
            rPairs[i] = raw[i]
        if const_expr(not self.kda):
            put_words(wK[0], wK[1], self.operand(base, 0, token, warp, l4))
            put_words(wQ[0], wQ[1], self.operand(base, 1, token, warp, l4))
        else:
            rK, rQ = widen(rawK, OWN), widen(rawQ, OWN)
            rS, rE, rTotal = scan_registers(rDecay)
            for level in cutlass.range_constexpr(LEVELS):
                k, q, column = ([round_tf32(x) for x in product(rX, rY)] for rX, rY in ((rK, rS), (rQ, rS), (rK, rE)))
                acc = mma_1688_tf32((k[0], q[0], k[1], q[1]), (column[0], column[1]), zero)
                acc = mma_1688_tf32((k[2], q[2], k[3], q[3]), (column[2], column[3]), acc)
                for e in cutlass.range_constexpr(2):
                    here = ((token ^ (2 * l4 + e)) >> level) == 1
                    rPairs[e] = acc[e] if here else rPairs[e]
                    rPairs[2 + e] = acc[2 + e] if here else rPairs[2 + e]
                scan(rS, rE, rTotal, token, level)
            k = split_four(product(rK, rS))
            q = split_four(product(rQ, rS))
            for part in cutlass.range_constexpr(2):
                put_words(k[2 * part], k[2 * part + 1], self.operand(base, part, token, warp, l4))
                put_words(q[2 * part], q[2 * part + 1], self.operand(base, 2 + part, token, warp, l4))
        store_vector(rPairs, smem_ptr(base, self.at["pairs"] + (warp * 32 + lane) * 4, Float32, 16), 4)

    @cute.jit
    def put_old(self, rawK: cute.Tensor, rDecay, base: cute.Pointer, warp: Int32, lane: Int32):
        """W k of the logged tokens as operands of the commit (GDN: k, its W goes with u), and KDA's product of all decays."""
        token, l4 = lane // 4, lane % 4
        words = cute.make_rmem_tensor(cute.make_layout(2 * self.pieces), Uint32)
        if const_expr(self.kda):
            rS, rE, rTotal = scan_registers(rDecay)
            for level in cutlass.range_constexpr(LEVELS):
                scan(rS, rE, rTotal, token, level)
            split = split_four(product(widen(rawK, OWN), rE))
            for i in cutlass.range_constexpr(4):
                words[i] = split[i]
            if token == 0:
                store_vector(rTotal, smem_ptr(base, self.at["total"] + warp * 16 + OWN * l4, Float32, 16), OWN)
        else:
            wK = cute.recast_tensor(rawK, Uint32)
            words[0], words[1] = wK[0], wK[1]
        # The word of channels 32 j + 8 a + 2 p stands at 16 j + 4 p + a, so that 8 of a row are the columns of an mma tile.
        column = warp // 2 * 16 + l4 % 2 * 8 + warp % 2 * 2 + l4 // 2
        for part in cutlass.range_constexpr(self.pieces):
            at = base + (self.at["old"] + (part * MAX_TOKENS + token) * OLD_STRIDE + column)
            for i in cutlass.range_constexpr(2):
                smem_ptr(at, 4 * i, Uint32, 4).store(words[2 * part + i])

    @cute.jit
    def put_norms(
        self, rawK: cute.Tensor, rawQ: cute.Tensor, rawOld: cute.Tensor, base: cute.Pointer, warp: Int32, lane: Int32
    ):
        """This warp's share of the sums of squares of new k, new q and logged k."""
        token, l4 = lane // 4, lane % 4
        mine = Float32(0.0)
        for which in cutlass.range_constexpr(3):
            rX = widen((rawK, rawQ, rawOld)[which], OWN)
            squares = Float32(0.0)
            for i in cutlass.range_constexpr(OWN):
                squares += rX[i] * rX[i]
            for step in cutlass.range_constexpr(2):
                squares += cute.arch.shuffle_sync_bfly(squares, offset=1 << step)
            mine = squares if l4 == which else mine
        if l4 < 3:
            (base + (self.at["norms"] + (l4 * MAX_TOKENS + token) * NORM_STRIDE + warp)).store(mine)

    @cute.jit
    def put_decays(self, decay: Float32, base: cute.Pointer, lane: Int32):
        """GDN, one warp, lane t with the decay of new token t: the products between two tokens, and up to one."""
        token, column = lane // 4, lane % 4 * 2
        rBetween = cute.make_rmem_tensor(cute.make_layout(2), Float32)
        rBetween[0], rBetween[1] = Float32(1.0), Float32(1.0)
        upto = Float32(1.0)
        for t in cutlass.range_constexpr(MAX_TOKENS):
            factor = cute.arch.shuffle_sync(decay, t)
            upto = upto * factor if t <= lane else upto
            for e in cutlass.range_constexpr(2):
                rBetween[e] = rBetween[e] * factor if (t > column + e) & (t <= token) else rBetween[e]
        store_vector(rBetween, smem_ptr(base, self.at["between"] + 2 * lane, Float32, 8), 2)
        if lane < MAX_TOKENS:
            (base + (self.at["upto"] + lane)).store(upto)

    @cute.jit
    def put_old_decays(self, decay: Float32, base: cute.Pointer, lane: Int32):
        """GDN, one warp, lane t with the decay of logged token t: the product behind each token, and of all."""
        behind, total = Float32(1.0), Float32(1.0)
        for t in cutlass.range_constexpr(MAX_TOKENS):
            factor = cute.arch.shuffle_sync(decay, t)
            behind = behind * factor if t > lane else behind
            total = total * factor
        if lane < MAX_TOKENS:
            (base + (self.at["behind"] + lane)).store(behind)
        if lane == 0:
            (base + self.at["total"]).store(total)

    @cute.jit
    def norm(self, base: cute.Pointer, l2norm: Boolean, scale: Float32, lane: Int32) -> Float32:
        """Lane i of a warp: the factor of new k (i = 0..7), q (8..15, with the scale) and logged k (16..23) of token i % 8."""
        at = self.at["norms"] + cutlass.min(lane, 3 * MAX_TOKENS - 1) * NORM_STRIDE
        shares = load_vector(smem_ptr(base, at, Float32, 16), 8)
        squares = Float32(L2NORM_EPS)
        for i in cutlass.range_constexpr(8):
            squares += shares[i]
        factor = cute.math.rsqrt(squares, fastmath=True) if l2norm else Float32(1.0)
        return factor * scale if lane // MAX_TOKENS == 1 else factor

    @cute.jit
    def pairs(self, base: cute.Pointer, norm: Float32, lane: Int32):
        """beta A below the diagonal and C up to it, row t = lane // 4, columns 2 (lane % 4) and the next: (A, A, C, C)."""
        token, l4 = lane // 4, lane % 4
        rPairs = zero_vector(Float32, 4)
        for warp in cutlass.range_constexpr(8):
            share = load_vector(smem_ptr(base, self.at["pairs"] + (warp * 32 + lane) * 4, Float32, 16), 4)
            for i in cutlass.range_constexpr(4):
                rPairs[i] += share[i]
        row_k = cute.arch.shuffle_sync(norm, token) * (base + (self.at["beta"] + token)).load()
        row_q = cute.arch.shuffle_sync(norm, MAX_TOKENS + token)
        for e in cutlass.range_constexpr(2):
            j = 2 * l4 + e
            factor = cute.arch.shuffle_sync(norm, j)
            if const_expr(not self.kda):
                factor = factor * (base + (self.at["between"] + 2 * lane + e)).load()
            rPairs[e] = rPairs[e] * (row_k * factor) if j < token else Float32(0.0)
            rPairs[2 + e] = rPairs[2 + e] * (row_q * factor) if j <= token else Float32(0.0)
        return rPairs
