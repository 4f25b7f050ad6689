"""Pieces of a fused layer's verify step: inputs before its first new token, norm weights that are loaded early."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from ..configs.layer import CONV_WIDTH
from .arith import sigmoid
from .conv import vector_bytes, window_ptr
from .memory import offset_ptr, store_vector
from .predicated import load_words_where
from .warp_ops import unpack_bf16
from .wy_math import as_float

HISTORY = CONV_WIDTH - 1


def log_x_ptr(mLogX, row, channel, vec):
    """`vec` raw inputs of a token of the draft log (B, 2, Tmax, C), tokens counted over the whole log."""
    index = Int64(row) * cute.size(mLogX, mode=[3]) + channel
    return offset_ptr(mLogX.iterator, index, BFloat16, vector_bytes(BFloat16, vec))


@cute.jit
def history_address(
    mConvState: cute.Tensor, mLogX: cute.Tensor, channel: Int32, age: Int32, window, vec: cutlass.Constexpr
):
    """Address of the input `age` tokens before the first new one, and whether there is one.

    An accepted draft's stands in the log, an older one's in the ring; `window`: (position, read, reads, replayed, log_in).
    """
    position, read, reads, replayed, log_in = window
    draft = replayed - age
    ring = window_ptr(mConvState, read, position + draft, channel, CONV_WIDTH, vec).toint()
    log = log_x_ptr(mLogX, log_in + draft, channel, vec).toint()
    address = log if draft >= 0 else ring
    return address, (draft >= 0) | reads


@cute.jit
def commit_history(
    rX: cute.Tensor,
    mConvState: cute.Tensor,
    channel: Int32,
    age: Int32,
    position: Int32,
    read: Int32,
    write: Int32,
    replayed: Int32,
    vec: cutlass.Constexpr,
):
    """Store that input in its column of the write slot; in place only the accepted drafts' columns change."""
    draft = replayed - age
    if (draft >= 0) | (read != write):
        store_vector(rX, window_ptr(mConvState, write, position + draft, channel, CONV_WIDTH, vec), vec)


def load_weight(mNormWeight, first, weight_bf16, n):
    """Issue the loads of `n` values of the norm's weight: as fp32 words and as bf16 words, zeros where it is the other."""
    wide = offset_ptr(mNormWeight.iterator, first, Float32, 4 * n)
    narrow = offset_ptr(mNormWeight.iterator, first, BFloat16, 2 * n)
    return load_words_where(weight_bf16 == 0, wide, n), load_words_where(weight_bf16, narrow, n // 2)


@cute.jit
def output_gates(z, weight, silu: Int32, weight_bf16: Int32):
    """act(z) w of `z`, words of two bf16, with a weight of `load_weight`; a tuple of fp32."""
    wide, narrow = weight
    gates = []
    for i in cutlass.range_constexpr(len(z)):
        values, pair = unpack_bf16(z[i]), unpack_bf16(narrow[i])
        for e in cutlass.range_constexpr(2):
            w = pair[e] if weight_bf16 != 0 else as_float(wide[2 * i + e])
            factor = values[e] if silu != 0 else Float32(1.0)
            gates.append(factor * sigmoid(values[e]) * w)
    return gates
