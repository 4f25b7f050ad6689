"""Device-side id tracking: the specialisation of `kernels/state_ids.py`."""

from __future__ import annotations

from dataclasses import dataclass

from ..compile.manifest import Entry, ResourceBudget

# Run-time flags: which optional tensors a call gives.
COUNTS = 1  # positions advance by a tensor, not by 1
HALF = 2
NEXT_IDS = 4


@dataclass(frozen=True)
class StateIdsKey:
    """Everything that changes the code. threads: rows a block."""

    threads: int = 128

    def symbol(self) -> str:
        """C identifier of the specialisation."""
        return f"advance_state_ids_t{self.threads}"


def shipped() -> list[Entry]:
    """Entries of the manifest."""
    return [Entry("state_ids", StateIdsKey(), ResourceBudget(32, 0))]
