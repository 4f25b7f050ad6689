"""The slab copy as a contender: a kernel that moves the same slots and computes nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..cute_kernels.compile.cache import jit_cache
from ..cute_kernels.configs.slab_copy import SlabCopyKey, rejection
from .timing import Contender

_lookup = jit_cache("slab_copy")


def _copy(pool: torch.Tensor, read: torch.Tensor, write: torch.Tensor, pdl: bool) -> Callable[[], None]:
    if pool.device.type != "cuda":
        rows = pool.flatten(1)

        def copy_rows() -> None:
            rows[write.long()] = rows[read.long()]

        return copy_rows
    words = pool.flatten(1).view(torch.float32)
    key = SlabCopyKey(pdl)
    return lambda: _lookup(key)(words, read, write)  # looked up at the call: a library without it is a named failure


def slab_copies(pool: torch.Tensor, ids: list[list[torch.Tensor]]) -> list[Contender]:
    """With and without programmatic dependent launch; the report takes the faster. None if the slot is too small."""
    if rejection(pool[0].numel() * pool.element_size()):
        return []
    return [
        Contender(name, [_copy(pool, read, write, pdl) for read, write in ids])
        for name, pdl in (("slab_copy", False), ("slab_copy_pdl", True))
    ]
