"""Public device-side id tracking: what happens to slot ids between two steps, without a host round trip."""

from __future__ import annotations

import torch

from . import reference
from .compile.cache import jit_cache
from .configs.state_ids import COUNTS, HALF, NEXT_IDS, StateIdsKey
from .errors import InvalidArgumentError
from .opaque import operator
from .validation import REFUSALS, Backend, check_ids, runs_kernels

_advance = jit_cache("state_ids")
KEY = StateIdsKey()


@operator("read_ids", "write_ids", "positions", "log_half")
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
    kernels = runs_kernels(backend, "read_ids", read_ids)
    optional = {
        "num_tokens": num_tokens,
        "num_accepted": num_accepted,
        "log_half": log_half,
        "next_write_ids": next_write_ids,
    }
    if kernels and read_ids.shape != (0,):
        try:
            _launch(read_ids, write_ids, positions, num_slots, num_tokens, num_accepted, log_half, next_write_ids)
        except REFUSALS:
            # The loaded function refused, before it launched: say which argument and what it may be.
            _check(read_ids, write_ids, positions, num_slots, optional)
            raise
        return
    _check(read_ids, write_ids, positions, num_slots, optional)
    if not kernels:
        reference.advance_state_ids(read_ids, write_ids, positions, num_slots=num_slots, **optional)


def _check(
    read_ids: torch.Tensor,
    write_ids: torch.Tensor,
    positions: torch.Tensor,
    num_slots: int,
    optional: dict[str, torch.Tensor | None],
) -> None:
    check_ids("read_ids", read_ids, None, read_ids.device)
    given = {name: ids for name, ids in optional.items() if ids is not None}
    for name, ids in {"write_ids": write_ids, "positions": positions, **given}.items():
        check_ids(name, ids, read_ids.shape[0], read_ids.device)
    if not isinstance(num_slots, int) or not 0 <= num_slots < 2**31:
        raise InvalidArgumentError("num_slots", repr(num_slots), "the number of slots of the pool, an int below 2**31")


def _launch(
    read_ids: torch.Tensor,
    write_ids: torch.Tensor,
    positions: torch.Tensor,
    num_slots: int,
    num_tokens: torch.Tensor | None,
    num_accepted: torch.Tensor | None,
    log_half: torch.Tensor | None,
    next_write_ids: torch.Tensor | None,
) -> None:
    """Without its flag a tensor is not looked at: the read ids stand in for it."""
    if not 0 <= num_slots < 2**31:
        raise ValueError
    flags = 0
    counts, half, next_ids = read_ids, read_ids, read_ids
    if num_accepted is not None and num_tokens is not None:
        check_ids("num_tokens", num_tokens, read_ids.shape[0], read_ids.device)
    if num_accepted is not None or num_tokens is not None:
        counts, flags = num_tokens if num_accepted is None else num_accepted, flags | COUNTS
    if log_half is not None:
        half, flags = log_half, flags | HALF
    if next_write_ids is not None:
        next_ids, flags = next_write_ids, flags | NEXT_IDS
    _advance(KEY)(read_ids, write_ids, positions, counts, half, next_ids, num_slots, flags)
