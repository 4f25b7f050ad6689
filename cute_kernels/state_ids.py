"""Public device-side id tracking: what happens to slot ids between two steps, without a host round trip."""

from __future__ import annotations

import torch

from . import reference
from .compile.cache import jit_cache
from .configs import state_ids
from .errors import InvalidArgumentError
from .ranges import annotated
from .validation import Backend, check_ids, uses_kernels

_advance = jit_cache("state_ids")


@annotated
def advance_state_ids(
    read_ids: torch.Tensor,
    write_ids: torch.Tensor,
    positions: torch.Tensor,
    *,
    num_slots: int,
    num_tokens: torch.Tensor | None = None,
    num_accepted: torch.Tensor | None = None,
    log_half: torch.Tensor | None = None,
    next_write_ids: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> None:
    """After a step, in place: the slot just written becomes the one to read next.

    For rows whose write id is in `[0, num_slots)`: `read := write`; `positions +=` `num_accepted` if given, else
    `num_tokens` if given, else 1; `log_half ^= 1` if given; `write := next_write_ids` if given. Other rows stay.

    Args:
        read_ids, write_ids, positions: `[N]` int32 device tensors.
        num_slots: slots of the pool.
        num_tokens: `[N]` int32, tokens of this step. num_accepted: `[N]` int32, drafts this step committed.
        log_half: `[N]` int32, `DraftLog.half` with row n of the batch at n. next_write_ids: `[N]` int32.
        backend: "auto" (kernels on sm_90, references elsewhere), "kernels" or "reference".

    Raises:
        InvalidArgumentError, BackendUnavailableError: before any launch, nothing changed.
    """
    kernels = uses_kernels(backend, read_ids.device)
    if kernels and num_slots >= 0:
        if read_ids.shape[0] == 0:
            return
        counts = num_accepted if num_accepted is not None else num_tokens
        key = state_ids.choose(counts is not None, log_half is not None, next_write_ids is not None)
        try:  # the loaded function checks ranks, dtypes, sizes and devices by itself, before it launches
            _advance(key)(read_ids, write_ids, positions, counts, log_half, next_write_ids, num_slots)
            return
        except (TypeError, ValueError):
            pass  # the checks below say which argument it refused
    optional = {
        "num_tokens": num_tokens,
        "num_accepted": num_accepted,
        "log_half": log_half,
        "next_write_ids": next_write_ids,
    }
    for name, ids in {"read_ids": read_ids, "write_ids": write_ids, "positions": positions, **optional}.items():
        if ids is not None:
            check_ids(name, ids, read_ids.shape[0], read_ids.device)
    if num_slots < 0:
        raise InvalidArgumentError("num_slots", num_slots, "the number of slots of the pool")
    if kernels:
        raise InvalidArgumentError("read_ids", "ids that the kernel refuses", "contiguous int32 [N] on one device")
    reference.advance_state_ids(read_ids, write_ids, positions, num_slots=num_slots, **optional)
