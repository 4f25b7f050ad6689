"""Device-side tracking of slot ids between steps."""

from __future__ import annotations

import torch

from .ids import valid_ids


@torch.no_grad()
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
) -> None:
    """After a step: the slot just written becomes the one to read next. In place, rows that write nothing are left
    alone.

    For every row whose write id is in ``[0, num_slots)``: ``read := write``; ``positions +=`` ``num_accepted`` if
    given, else ``num_tokens`` if given, else 1; ``log_half ^= 1`` if given; ``write := next_write_ids`` if given.

    Args:
        read_ids, write_ids, positions: ``[N]`` int32.
        num_slots: slots of the pool.
        num_tokens: ``[N]`` int32 tokens of this step.
        num_accepted: ``[N]`` int32 drafts this step committed.
        log_half: ``[N]`` int32 of ``DraftLog.half``, row n of the batch at n.
        next_write_ids: ``[N]`` int32.
    """
    written = valid_ids(write_ids, num_slots)
    if num_accepted is not None:
        progress = num_accepted
    elif num_tokens is not None:
        progress = num_tokens
    else:
        progress = torch.ones_like(positions)
    read_ids.copy_(torch.where(written, write_ids, read_ids))
    positions.copy_(torch.where(written, positions + progress, positions))
    if log_half is not None:
        log_half.copy_(torch.where(written, log_half ^ 1, log_half))
    if next_write_ids is not None:
        write_ids.copy_(torch.where(written, next_write_ids, write_ids))
