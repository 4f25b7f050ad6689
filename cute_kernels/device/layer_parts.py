"""Pieces of a fused layer step: conv of one token's channels, the output gate, the gated norm."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32

from ..configs.layer import CONV_WIDTH
from .arith import sigmoid
from .conv import SILU_EXPONENT, convolve, copy_into, load_bias
from .memory import load_vector, narrow, offset_ptr, widen

HISTORY = CONV_WIDTH - 1


@cute.jit
def convolved(
    mConvBias: cute.Tensor, rows, rTaps: cute.Tensor, channel: Int32, biased: Int32, vec: cutlass.Constexpr
) -> cute.Tensor:
    """silu(conv) of `vec` channels of a token, rounded to bf16; `rows`: raw inputs, oldest first, the token's own last."""
    rBias = load_bias(mConvBias, channel, vec, biased)
    inputs = [widen(rX, vec) for rX in rows]
    taps = widen(rTaps, vec * CONV_WIDTH)
    return narrow(convolve(inputs, taps, rBias, vec, CONV_WIDTH, SILU_EXPONENT), vec, BFloat16)


@cute.jit
def output_gate(
    mNormWeight: cute.Tensor, rZ: cute.Tensor, first: Int32, silu: Boolean, weight_bf16: Boolean, vec: cutlass.Constexpr
) -> cute.Tensor:
    """act(z) w of `vec` values of V from value `first` of the head."""
    rX = widen(rZ, vec)
    rW = cute.make_rmem_tensor(cute.make_layout(vec), Float32)
    if weight_bf16:
        raw = load_vector(offset_ptr(mNormWeight.iterator, first, BFloat16, 2 * vec), vec)
        rW.store(widen(raw, vec).load())
    if not weight_bf16:
        copy_into(offset_ptr(mNormWeight.iterator, first, Float32, 4 * vec), rW, vec)
    rG = cute.make_rmem_tensor(cute.make_layout(vec), Float32)
    for i in cutlass.range_constexpr(vec):
        factor = rX[i] if silu else Float32(1.0)
        rG[i] = factor * sigmoid(rX[i]) * rW[i]
    return rG


def gated(rO, norm, rG, vec):
    """o / rms(o) act(z) w of `vec` values in bf16."""
    rY = cute.make_rmem_tensor(cute.make_layout(vec), Float32)
    for i in range(vec):
        rY[i] = rO[i] * norm * rG[i]
    return narrow(rY, vec, BFloat16)
