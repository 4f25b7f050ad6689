"""The slot-id rule of every operator, stated once for the references.

An id outside ``[0, num_slots)`` means *none*: reading none gives a zero state and touches no memory, writing none
writes nothing. A row that reads none and writes none is *void*: its output is zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..draft_log import DraftLog
from ..errors import InvalidArgumentError


def valid_ids(ids: torch.Tensor, num_slots: int) -> torch.Tensor:
    """``[N]`` bool: which ids name a slot."""
    return (ids >= 0) & (ids < num_slots)


def void_rows(read_ids: torch.Tensor, write_ids: torch.Tensor, num_slots: int) -> torch.Tensor:
    """``[N]`` bool: rows that neither read nor write a slot."""
    return ~(valid_ids(read_ids, num_slots) | valid_ids(write_ids, num_slots))


def load_slots(pool: torch.Tensor, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``pool[ids]`` as a new contiguous ``[N, ...]`` tensor in ``dtype``, zeros for none."""
    valid = valid_ids(ids, pool.shape[0])
    values = torch.zeros(ids.shape[0], *pool.shape[1:], dtype=dtype, device=pool.device)
    values[valid] = pool[ids[valid].long()].to(dtype)
    return values


def store_slots(pool: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> None:
    """``pool[ids] = values`` rounded once to the pool's dtype; rows whose id is none are dropped."""
    valid = valid_ids(ids, pool.shape[0])
    pool[ids[valid].long()] = values[valid].to(pool.dtype)


@dataclass(frozen=True)
class LogAccess:
    """How each batch row of a verify or commit call uses the draft log.

    Attributes:
        read_ids, write_ids: the call's ids, with both replaced by none in rows whose count is out of range.
        void: ``[N]`` bool, rows that read and write nothing.
        logged: ``[N]`` bool, rows that have a log row and are not void.
        rows: ``[N]`` int64 log rows (0 where not logged).
        half: ``[N]`` int64 half to read (0 where not logged).
        accepted: ``[N]`` int64 tokens to replay (0 where not logged).
    """

    read_ids: torch.Tensor
    write_ids: torch.Tensor
    void: torch.Tensor
    logged: torch.Tensor
    rows: torch.Tensor
    half: torch.Tensor
    accepted: torch.Tensor


def resolve_log(
    log: DraftLog, read_ids: torch.Tensor, write_ids: torch.Tensor, num_accepted: torch.Tensor, num_slots: int
) -> LogAccess:
    """Apply the id rule to ids, log rows and accepted counts.

    A count outside ``0..Tmax`` is a stale or corrupt row: it is treated as if both ids were none, so that it reads
    and writes no slot and no log. A count of 0 commits nothing and keeps the state that is read.
    """
    in_range = (num_accepted >= 0) & (num_accepted <= log.max_tokens)
    read_ids = torch.where(in_range, read_ids, -1)
    write_ids = torch.where(in_range, write_ids, -1)
    void = void_rows(read_ids, write_ids, num_slots)
    rows = torch.arange(read_ids.shape[0], device=read_ids.device) if log.rows is None else log.rows.long()
    logged = (rows >= 0) & (rows < log.batch) & ~void
    rows = torch.where(logged, rows, 0)
    return LogAccess(
        read_ids=read_ids,
        write_ids=write_ids,
        void=void,
        logged=logged,
        rows=rows,
        half=torch.where(logged, log.half.long()[rows], 0),
        accepted=torch.where(logged, num_accepted.long(), 0),
    )


def record_log(
    destination: torch.Tensor, access: LogAccess, rows: torch.Tensor, step: int, values: torch.Tensor
) -> None:
    """Write ``values[i]`` of batch row ``rows[i]`` as draft token ``step`` of the half that is not being read."""
    keep = access.logged[rows]
    rows = rows[keep]
    destination[access.rows[rows], access.half[rows] ^ 1, step] = values[keep].to(destination.dtype)


def draft_lengths(cu_seqlens: torch.Tensor, log: DraftLog) -> torch.Tensor:
    """New tokens per row of a verify call, ``[N]`` int64; more than the log holds is an error."""
    lengths = cu_seqlens.long().diff()
    if lengths.numel() and int(lengths.max()) > log.max_tokens:
        raise InvalidArgumentError(
            "cu_seqlens", f"{int(lengths.max())} tokens in one row", f"at most the draft log's {log.max_tokens}"
        )
    return lengths
