"""The KDA gate as decay factors alpha = exp(g) <= 1, for many values: one multiply-add and two or three special functions.

bounded   g = L sigmoid(e^A (x + bias))
softplus  g = -e^A log(1 + e^(x + bias))
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

LOG2E = 1.4426950408889634


@cute.jit
def gate_constants(a_log: Float32, lower_bound: Float32, bounded: cutlass.Constexpr):
    """(slope, rate) of a head: the exponent's slope in x + bias, and the factor of the result, both in base 2."""
    scale = cute.math.exp(a_log, fastmath=True)
    if cutlass.const_expr(bounded):
        return -LOG2E * scale, LOG2E * lower_bound
    return Float32(LOG2E), -scale


def log_decay_bounded(raw, slope, offset, rate):
    """L sigmoid(.) in base 2, where offset = slope * bias."""
    e = cute.math.exp2(raw * slope + offset, fastmath=True)
    return rate * cute.arch.rcp_approx(Float32(1.0) + e)


def decay_bounded(raw, slope, offset, rate):
    """exp(L sigmoid(.)), where offset = slope * bias."""
    return cute.math.exp2(log_decay_bounded(raw, slope, offset, rate), fastmath=True)


@cute.jit
def log_decay_softplus(raw: Float32, slope: Float32, offset: Float32, rate: Float32) -> Float32:
    """-e^A softplus(.) in base 2. Below e = 2^-6 the logarithm's series keeps what 1 + e would lose."""
    t = raw * slope + offset
    e = cute.math.exp2(t, fastmath=True)
    series = e * (LOG2E + e * (-LOG2E / 2 + e * (LOG2E / 3)))
    logarithm = cute.math.log2(Float32(1.0) + e, fastmath=True)
    value = series if e < Float32(0.015625) else logarithm
    value = t if t > Float32(30.0) else value
    return rate * value


def decay_softplus(raw, slope, offset, rate):
    """exp(-e^A softplus(.))."""
    return cute.math.exp2(log_decay_softplus(raw, slope, offset, rate), fastmath=True)
