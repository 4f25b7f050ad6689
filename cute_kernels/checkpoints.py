"""Which states inside a prefill call are to be kept, and where."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .errors import InvalidArgumentError


@dataclass(frozen=True)
class Checkpoints:
    """Copies of intermediate states, written by the same launch that computes them.

    Entries ``cu[i]:cu[i + 1]`` belong to sequence ``i``. Each says: the state after the first ``ends[e]`` tokens *of
    this call* goes to slot ``slots[e]``. Any position is allowed, on a chunk boundary or off it.

    Attributes:
        cu: ``[N + 1]`` int32, prefix sums of entries per sequence.
        ends: ``[M]`` int32, token counts within this call, ascending within a sequence. A count outside
            ``1..len(sequence)`` is ignored.
        slots: ``[M]`` int32 destination slots; outside ``[0, num_slots)`` the entry is skipped.
    """

    cu: torch.Tensor
    ends: torch.Tensor
    slots: torch.Tensor

    @classmethod
    def from_lists(
        cls, entries: Sequence[Sequence[tuple[int, int]]], device: torch.device | str | None = None
    ) -> Checkpoints:
        """Build from one list of ``(end, slot)`` pairs per sequence. Raises InvalidArgumentError for anything else."""
        try:
            flat = [(end, slot) for pairs in entries for end, slot in sorted(pairs)]
            ends, slots = (torch.tensor([pair[i] for pair in flat], dtype=torch.int32) for i in (0, 1))
            cu = torch.tensor([0, *itertools.accumulate(map(len, entries))], dtype=torch.int32)
        except (TypeError, ValueError, RuntimeError):
            raise InvalidArgumentError(
                "entries", entries, "a list of (end, slot) pairs of int32 per sequence"
            ) from None
        return cls(cu=cu.to(device), ends=ends.to(device), slots=slots.to(device))
