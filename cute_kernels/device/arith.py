"""Scalar arithmetic: pinned multiplies and adds, and the gates.

The compiler contracts `S * g + k * u` one way in a replay loop and another way in a token loop, which moves a state by one
ulp. Where two kernels promise equal bits they use `mul_rn` and `fma_rn`, which no pass rewrites.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass._mlir.dialects import llvm


def _pinned(instruction, constraints, *operands):
    return Float32(
        llvm.inline_asm(
            res=Float32.mlir_type,
            operands_=[Float32(x).ir_value() for x in operands],
            asm_string=instruction,
            constraints=constraints,
            has_side_effects=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )


def mul_rn(a, b):
    """a * b, rounded once, never contracted."""
    return _pinned("mul.rn.f32 $0, $1, $2;", "=f,f,f", a, b)


def add_rn(a, b):
    """a + b, rounded once, never contracted."""
    return _pinned("add.rn.f32 $0, $1, $2;", "=f,f,f", a, b)


def fma_rn(a, b, c):
    """a * b + c, rounded once."""
    return _pinned("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", a, b, c)


@cute.jit
def sigmoid(x: Float32) -> Float32:
    """1 / (1 + exp(-x)); saturates to 0 and 1, never NaN for finite x."""
    return cute.arch.rcp_approx(Float32(1.0) + cute.math.exp(-x, fastmath=True))


@cute.jit
def silu(x: Float32) -> Float32:
    """x * sigmoid(x)."""
    return x * sigmoid(x)


@cute.jit
def softplus(x: Float32) -> Float32:
    """log(1 + exp(x)) to fp32 accuracy over the whole range.

    `log(1 + e)` loses all bits of a small e; the factor e / ((1 + e) - 1) puts them back (the log1p correction).
    """
    e = cute.math.exp(x, fastmath=True)
    w = Float32(1.0) + e
    d = w - Float32(1.0)
    y = cute.math.log(w, fastmath=True) * (e * cute.arch.rcp_approx(d)) if d > Float32(0.0) else e
    return x if x > Float32(20.0) else y


@cute.jit
def log_decay_softplus(raw: Float32, bias: Float32, a_log: Float32) -> Float32:
    """g = -exp(A_log) * softplus(raw + dt_bias), the natural logarithm of the decay."""
    return -cute.math.exp(a_log, fastmath=True) * softplus(raw + bias)


@cute.jit
def log_decay_bounded(raw: Float32, bias: Float32, a_log: Float32, lower_bound: Float32) -> Float32:
    """g = L * sigmoid(exp(A_log) * (raw + dt_bias)), L < 0."""
    return lower_bound * sigmoid(cute.math.exp(a_log, fastmath=True) * (raw + bias))


@cute.jit
def decay_of(g: Float32) -> Float32:
    """exp(g) for g <= 0; zero where it underflows."""
    return cute.math.exp(g, fastmath=True)


@cute.jit
def round_to(x: Float32, dtype: cutlass.Constexpr) -> Float32:
    """x rounded to `dtype` and back."""
    return Float32(dtype(x)) if cutlass.const_expr(dtype is not Float32) else x


def divide(value, by) -> Int32:
    """Quotient of two numbers that are not negative: half the instructions of a signed division, which rounds down."""
    return Int32(Uint32(value) // Uint32(by))
