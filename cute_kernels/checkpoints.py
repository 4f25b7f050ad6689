"""Which states inside a prefill call are to be kept, and where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


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
        """Build from one list of ``(end, slot)`` pairs per sequence."""
        cu = [0]
        for pairs in entries:
            cu.append(cu[-1] + len(pairs))
        flat = [pair for pairs in entries for pair in sorted(pairs)]

        def column(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        return cls(cu=column(cu), ends=column([end for end, _ in flat]), slots=column([slot for _, slot in flat]))
