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


def softplus_gate(slope, rate):
    """A function like `log_decay_softplus` of a raw value and its channel's offset, without branches, for results kept in fp16.

    In base 2, softplus(t) = max(t, 0) + log2(1 + e), e = 2^-|t| <= 1; the logarithm is 2 log2(e) artanh(z), z = e / (2 + e)
    <= 1/3, whose series in z^2 ends with the third term, with an error of 9e-6 of the result at most.
    """
    first = 2 * LOG2E * rate
    second, third = first * Float32(0.33246271), first * Float32(0.22447722)

    def gate(raw, offset):
        t = raw * slope + offset
        e = cute.math.exp2(-cute.math.absf(t), fastmath=True)
        z = e * cute.arch.rcp_approx(Float32(2.0) + e)
        square = z * z
        return z * (first + square * (second + square * third)) + cute.arch.fmin(rate * t, Float32(0.0))

    return gate
