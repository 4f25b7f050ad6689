"""A projection of few rows that lets the next kernel start beside it, which cuBLAS' kernels do not.

What a launch gains by loading its states early shows behind such a kernel alone: behind any other it starts when that has ended.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

ROWS = 16  # the fewest of a tensor-core product
WIDE = 64  # columns a block owns
DEEP = 128  # of the inner dimension a step


@triton.jit
def _product(x, w, out, rows, width, deep: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr):
    gdc_launch_dependents()  # each waits for this grid's end before it reads what it writes
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    inner = tl.arange(0, DEEP)
    total = tl.zeros((ROWS, WIDE), tl.float32)
    for start in range(0, deep, DEEP):
        left = tl.load(x + row[:, None] * deep + start + inner[None, :], mask=row[:, None] < rows, other=0.0)
        total += tl.dot(left, tl.load(w + (start + inner[:, None]) * width + column[None, :]))
    tl.store(out + row[:, None] * width + column[None, :], total.to(tl.bfloat16), mask=row[:, None] < rows)


def mm(x: torch.Tensor, w: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """`torch.mm(x, w, out=out)` for contiguous bf16 tensors: up to 16 rows, inner and outer sizes in whole tiles."""
    (rows, deep), width = x.shape, w.shape[1]
    if rows > ROWS or deep % DEEP or width % WIDE:
        raise ValueError(f"[{rows}, {deep}] x [{deep}, {width}]: at most {ROWS} rows, multiples of {DEEP} and {WIDE}")
    _product[(width // WIDE,)](x, w, out, rows, width, deep, ROWS, WIDE, DEEP, num_warps=4, num_stages=4)
    return out
