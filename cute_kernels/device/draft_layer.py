"""Output gates of a fused layer's verify step, whose norm weights are loaded early."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from .arith import sigmoid
from .memory import offset_ptr
from .predicated import load_words_where
from .warp_ops import unpack_bf16
from .wy_math import as_float


def load_weight(mNormWeight, first, weight_bf16, n):
    """Issue the loads of `n` values of the norm's weight: as fp32 words and as bf16 words, zeros where it is the other."""
    wide = offset_ptr(mNormWeight.iterator, first, Float32, 4 * n)
    narrow = offset_ptr(mNormWeight.iterator, first, BFloat16, 2 * n)
    return load_words_where(weight_bf16 == 0, wide, n), load_words_where(weight_bf16, narrow, n // 2)


@cute.jit
def weight_values(weight, weight_bf16: Int32):
    """What `load_weight` loaded, as fp32 whichever it is."""
    wide, narrow = weight
    values = []
    for i in cutlass.range_constexpr(len(narrow)):
        pair = unpack_bf16(narrow[i])
        for e in cutlass.range_constexpr(2):
            values.append(pair[e] if weight_bf16 != 0 else as_float(wide[2 * i + e]))
    return values


@cute.jit
def output_gates(z, weights, silu: Int32):
    """act(z) w of `z`, words of two bf16, with fp32 weights; a list of fp32."""
    gates = []
    for i in cutlass.range_constexpr(len(z)):
        values = unpack_bf16(z[i])
        for e in cutlass.range_constexpr(2):
            factor = values[e] if silu != 0 else Float32(1.0)
            gates.append(factor * sigmoid(values[e]) * weights[2 * i + e])
    return gates
