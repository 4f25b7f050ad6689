"""8 x 8 algebra of a warp over the tokens of a verify step: quad t of a warp has token t, its lanes two columns or 4 channels."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from ..configs.verify import MAX_TOKENS
from .memory import store_vector
from .warp_ops import mma_16816, pack_bf16, unpack_bf16

OWN = 4  # channels of a token that a lane prepares


def split_bf16(low, high):
    """A pair of fp32 as packed bf16 hi and packed bf16 remainder."""
    hi = pack_bf16(low, high)
    back_low, back_high = unpack_bf16(hi)
    return hi, pack_bf16(low - back_low, high - back_high)


def split_four(x):
    """4 fp32 as (hi, hi, lo, lo) words."""
    hi0, lo0 = split_bf16(x[0], x[1])
    hi1, lo1 = split_bf16(x[2], x[3])
    return hi0, hi1, lo0, lo1


def product(rX, rY):
    """Elementwise product of a lane's channels."""
    return [rX[i] * rY[i] for i in range(OWN)]


def put_words(w0, w1, ptr):
    """Two words as one 8-byte store."""
    rPair = cute.make_rmem_tensor(cute.make_layout(2), Uint32)
    rPair[0], rPair[1] = w0, w1
    store_vector(rPair, ptr, 2)


def as_float(word):
    """A word's bits as fp32."""
    bits = cute.make_rmem_tensor(cute.make_layout(1), Uint32)
    bits[0] = word
    return cute.recast_tensor(bits, Float32)[0]


def word_ptr(ptr, align=4):
    """A pointer to bf16 as one to words of two."""
    return cute.make_ptr(Uint32, ptr.toint(), ptr.memspace, assumed_align=max(align, ptr.alignment))


def store_words(rX, ptr):
    """Registers of bf16 to global memory as words."""
    words = cute.recast_tensor(rX, Uint32)
    cute.autovec_copy(words, cute.make_tensor(word_ptr(ptr), words.layout))


def scan_registers(rDecay):
    """Start of a scan: a token's own decay, nothing behind it, its group is itself."""
    rS, rE, rTotal = (cute.make_rmem_tensor(cute.make_layout(OWN), Float32) for _ in range(3))
    for i in range(OWN):
        rS[i], rE[i], rTotal[i] = rDecay[i], Float32(1.0), rDecay[i]
    return rS, rE, rTotal


@cute.jit
def scan(rS: cute.Tensor, rE: cute.Tensor, rTotal: cute.Tensor, token: Int32, level: cutlass.Constexpr):
    """Join groups of 2^level tokens in pairs: products up to a token (rS), behind it (rE) and of its group (rTotal)."""
    upper = (token & (1 << level)) != 0
    for i in cutlass.range_constexpr(OWN):
        other = cute.arch.shuffle_sync_bfly(rTotal[i], offset=4 << level)
        rS[i] = rS[i] * other if upper else rS[i]
        rE[i] = rE[i] if upper else rE[i] * other
        rTotal[i] = rTotal[i] * other


@cute.jit
def unit_lower_inverse(a0: Float32, a1: Float32, lane: Int32):
    """(I + A)^-1 for a strictly lower A; a lane has row lane // 4, columns 2 (lane % 4) and the next, of both.

    Substitution down the rows: row s is final when it is subtracted from those below.
    """
    token, l4 = lane // 4, lane % 4
    x0 = Float32(1.0) if token == 2 * l4 else Float32(0.0)
    x1 = Float32(1.0) if token == 2 * l4 + 1 else Float32(0.0)
    for s in cutlass.range_constexpr(MAX_TOKENS - 1):
        factor = cute.arch.shuffle_sync(a0 if cutlass.const_expr(s % 2 == 0) else a1, lane - l4 + s // 2)
        above0, above1 = cute.arch.shuffle_sync(x0, 4 * s + l4), cute.arch.shuffle_sync(x1, 4 * s + l4)
        x0 = x0 - factor * above0
        x1 = x1 - factor * above1
    return x0, x1


def times(rX, matrix, start):
    """start + X M^T for the accumulators X (16 rows x 8 tokens) and an 8 x 8 M as (hi, lo) words of its accumulators."""
    hi0, lo0 = split_bf16(rX[0], rX[1])
    hi1, lo1 = split_bf16(rX[2], rX[3])
    acc = start
    for part in matrix:
        acc = mma_16816((hi0, hi1, lo0, lo1), (part, part), acc, "bf16")
    return acc
