"""Device-side id tracking: the specialisations of `kernels/state_ids.py`."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ..compile.manifest import Entry, ResourceBudget


@dataclass(frozen=True)
class StateIdsKey:
    """Everything that changes the code. counts: positions advance by a tensor, not by 1. half, next_ids: see the kernel."""

    counts: bool
    half: bool
    next_ids: bool

    def symbol(self) -> str:
        """C identifier of the specialisation."""
        parts = ("counts", self.counts), ("half", self.half), ("next", self.next_ids)
        return "advance_state_ids" + "".join(f"_{name}" for name, given in parts if given)


@functools.cache
def choose(counts: bool, half: bool, next_ids: bool) -> StateIdsKey:
    """The specialisation for the optional tensors of a call."""
    return StateIdsKey(counts, half, next_ids)


def shipped() -> list[Entry]:
    """Entries of the manifest."""
    keys = [
        choose(*flags) for flags in ((c, h, n) for c in (False, True) for h in (False, True) for n in (False, True))
    ]
    return [Entry("state_ids", key, ResourceBudget(32, 0)) for key in keys]
