"""Fake tensors with a dimension of heads, as in `fake`: packed tokens, pools of states and logs of drafts."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import BFloat16
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor


def fake_heads(dtype: Any, rows: Any, count: Any, *inner: int, divisibility: int = 8, align: int = 16) -> Any:
    """[rows, count, *inner] with a 64-bit row stride, all inner dimensions compact."""
    dense = [1]
    for size in reversed(inner):
        dense.insert(0, dense[0] * size)
    stride = (cute.sym_int64(divisibility=divisibility), *dense)
    return make_fake_tensor(dtype, (rows, count, *inner), stride=stride, assumed_align=align)


def fake_gates(rows: Any, count: Any, *channels: int) -> Any:
    """bf16 gates of tokens: [rows, count], or [rows, count, channels] in whole vectors."""
    return fake_heads(BFloat16, rows, count, *channels, **({} if channels else {"divisibility": 1, "align": 2}))


def fake_states(dtype: Any, slots: Any, count: Any, size: int) -> Any:
    """A pool [slots, count, size, size]: slot stride a multiple of 16 bytes."""
    return fake_heads(dtype, slots, count, size, size, divisibility=128 // dtype.width)


def fake_log(dtype: Any, rows: Any, tokens: Any, *inner: Any) -> Any:
    """A log of drafts [rows, 2, tokens, *inner], compact."""
    shape = (rows, 2, tokens, *inner)
    return make_fake_compact_tensor(dtype, shape, stride_order=tuple(reversed(range(len(shape)))), assumed_align=16)
