"""Pieces of the depthwise causal conv that every conv kernel and the fused layer share.

A window is a ring of W raw inputs, [W, C] with the channel innermost; the input of token t of its sequence stands in column
t mod W. Sums run oldest tap first with pinned adds, so prefill, decode, verify and the fused layer give the same bits.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor

from .arith import fma_rn
from .memory import load_vector, narrow, offset_ptr, widen
from .state_io import row_ptr

DTYPES = {"float32": Float32, "bfloat16": BFloat16}


def vector_bytes(dtype, vec):
    """Alignment promised for `vec` consecutive channels: the vector's size, at most 16 bytes."""
    return min(16, vec * dtype.width // 8)


def ring_column(token, width):
    """Column of a token, also of one before the sequence's start (down to -2^29 width)."""
    shifted = Int32(token).to(Uint32) + Uint32(width << 29)
    return (shifted % Uint32(width)).to(Int32)


def window_ptr(mState, slot, token, channel, width, vec):
    """Pointer to `vec` channels of the column of `token` in a slot of mState (S, W, C)."""
    channels = cute.size(mState, mode=[2])
    offset = Int64(slot) * mState.stride[0] + Int64(ring_column(token, width) * channels + channel)
    return offset_ptr(mState.iterator, offset, mState.element_type, vector_bytes(mState.element_type, vec))


def token_ptr(mRows, first, t, channel, align):
    """Pointer to `channel` of row `first + t`, for rows after one whose address the compiler has."""
    return offset_ptr(row_ptr(mRows, first, channel, align), t * mRows.stride[0], mRows.element_type, align)


def copy_into(ptr, rX, vec):
    """Load `vec` elements into registers that exist already (usable inside a run-time branch)."""
    cute.autovec_copy(cute.make_tensor(ptr, cute.make_layout(vec)), rX)


def load_taps(mWeight, channel, width, vec):
    """Taps of `vec` channels as stored, from mWeight (C, W): one contiguous run, tap of channel e at e * width + tap."""
    size = mWeight.element_type.width // 8
    align = 16 if (vec * width * size) % 16 == 0 else 8
    ptr = offset_ptr(mWeight.iterator, Int64(channel) * width, mWeight.element_type, align)
    return load_vector(ptr, vec * width)


@cute.jit
def load_bias(mBias: cute.Tensor, channel: Int32, vec: cutlass.Constexpr, biased: Int32) -> cute.Tensor:
    """Start values (fp32) of the sums of `vec` channels: the bias, or -0, which changes no bit of a sum."""
    dtype = mBias.element_type
    rBias = cute.make_rmem_tensor(cute.make_layout(vec), Float32)
    for e in cutlass.range_constexpr(vec):
        rBias[e] = Float32(-0.0)
    if biased != 0:
        raw = load_vector(offset_ptr(mBias.iterator, channel, dtype, vector_bytes(dtype, vec)), vec)
        rBias.store(widen(raw, vec).load())
    return rBias


# An activation is (slope, offset) of the exponent in y / (1 + 2 ** (slope y + offset)): one code path for both kinds.
SILU_EXPONENT = (-math.log2(math.e), 0.0)
ZERO_EXPONENT = (0.0, -math.inf)


@cute.jit
def choose_exponent(silu: Int32):
    """The activation that a run-time flag names."""
    slope = Float32(SILU_EXPONENT[0]) if silu != 0 else Float32(ZERO_EXPONENT[0])
    offset = Float32(SILU_EXPONENT[1]) if silu != 0 else Float32(ZERO_EXPONENT[1])
    return slope, offset


def convolve(rows, rTaps, rBias, vec, width, exponent):
    """Outputs (fp32, `vec`) of one token. `rows`: `width` fp32 vectors, oldest first, the token's own last."""
    slope, offset = exponent
    rY = cute.make_rmem_tensor(cute.make_layout(vec), Float32)
    for e in range(vec):
        y = rBias[e]
        for tap in range(width):
            y = fma_rn(rows[tap][e], rTaps[e * width + tap], y)
        rY[e] = y * cute.arch.rcp_approx(Float32(1.0) + cute.math.exp2(fma_rn(y, slope, offset), fastmath=True))
    return rY


@cute.jit
def last_not_above(mPrefix: cute.Tensor, count: Int32, target: Int32, lane: Int32, tokens: cutlass.Constexpr) -> Int32:
    """Largest i < count whose key is <= target, found by a whole warp in log32(count) steps; the key of 0 must be.

    Key of i: mPrefix[i], or with `tokens` given the tile number mPrefix[i] // tokens + i at which sequence i starts.
    """
    low, high = Int32(0), count
    while high - low > 1:
        step = (high - low + 31) // 32
        i = low + (lane + 1) * step
        below = i < high
        key = Int32(mPrefix[cutlass.min(i, count - 1)])
        if const_expr(tokens is not None):
            key = key // tokens + i
        passed = cute.arch.popc(cute.arch.vote_ballot_sync(below & (key <= target)))
        low += passed * step
        high = cutlass.min(high, low + step)
    return low


class ConvMath:
    """Static facts of one conv specialisation and its per-token arithmetic."""

    def __init__(self, key, vec):
        self.width, self.vec = key.width, vec
        self.align = vector_bytes(BFloat16, vec)

    def parameters(self, mWeight, mBias, channel, biased, silu):
        """Taps and start values of this thread's channels in fp32, and the activation. The flags are 0 or not."""
        rTaps = widen(load_taps(mWeight, channel, self.width, self.vec), self.vec * self.width)
        return rTaps, load_bias(mBias, channel, self.vec, biased), choose_exponent(silu)

    def registers(self, count):
        """`count` uninitialised vectors of raw inputs."""
        return [cute.make_rmem_tensor(cute.make_layout(self.vec), BFloat16) for _ in range(count)]

    def output(self, rows, parameters):
        """One token's output vector in bf16, from fp32 rows."""
        rTaps, rBias, exponent = parameters
        return narrow(convolve(rows, rTaps, rBias, self.vec, self.width, exponent), self.vec, BFloat16)


# Fake tensors, for the `build` functions.


def fake_tokens(rows, channels):
    """bf16 [rows, C] with a 64-bit row stride, a multiple of 16 bytes."""
    stride = (cute.sym_int64(divisibility=8), 1)
    return make_fake_tensor(BFloat16, (rows, channels), stride=stride, assumed_align=16)


def fake_rings(width, channels):
    """bf16 [slots, W, C] with dense slots and a 64-bit slot stride, a multiple of 16 bytes."""
    stride = (cute.sym_int64(divisibility=8), channels, 1)
    return make_fake_tensor(BFloat16, (cute.sym_int(), width, channels), stride=stride, assumed_align=16)


def fake_parameters(key, channels):
    """Taps [C, W], and the bias as a matrix [1, C] so that the taps can stand in for an absent one."""
    dtype = DTYPES[key.weight]
    taps = make_fake_compact_tensor(dtype, (channels, key.width), stride_order=(1, 0), assumed_align=16)
    bias = make_fake_compact_tensor(dtype, (cute.sym_int(), cute.sym_int()), stride_order=(1, 0), assumed_align=16)
    return taps, bias
