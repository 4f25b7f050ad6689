"""Fake tensors for `cute.compile`: shapes and strides are symbols, so that one object serves every batch and pool size.

One symbol used twice makes the loaded function check at call time that the two sizes agree.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor


def fake_stream() -> Any:
    """The caller's current stream, taken from the tensors' device at call time."""
    return make_fake_stream(use_tvm_ffi_env_stream=True)


def fake_ids(n: Any, dtype: Any) -> Any:
    """int32 [n], contiguous."""
    return make_fake_compact_tensor(dtype, (n,), assumed_align=4)


def fake_vector(dtype: Any, n: Any | None = None, align: int = 4) -> Any:
    """[n], contiguous; `n` defaults to a fresh symbol."""
    return make_fake_compact_tensor(dtype, (cute.sym_int() if n is None else n,), assumed_align=align)


def fake_matrix(dtype: Any, rows: Any | None = None, columns: Any | None = None, align: int = 16) -> Any:
    """[rows, columns], row-major and compact."""
    shape = (cute.sym_int() if rows is None else rows, cute.sym_int() if columns is None else columns)
    return make_fake_compact_tensor(dtype, shape, stride_order=(1, 0), assumed_align=align)


def fake_rows(dtype: Any, rows: Any | None = None, *, divisibility: int = 8, align: int = 16) -> Any:
    """[rows, width] with a 64-bit row stride that is a multiple of `divisibility` elements, last dimension contiguous."""
    shape = (cute.sym_int() if rows is None else rows, cute.sym_int())
    return make_fake_tensor(dtype, shape, stride=(cute.sym_int64(divisibility=divisibility), 1), assumed_align=align)


def fake_pool(dtype: Any) -> Any:
    """Pool view [slots, elements]: 64-bit slot stride, a multiple of 16 bytes."""
    stride = (cute.sym_int64(divisibility=128 // dtype.width), 1)
    return make_fake_tensor(dtype, (cute.sym_int(), cute.sym_int()), stride=stride, assumed_align=16)
