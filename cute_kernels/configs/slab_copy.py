"""A copy of whole states by slot id: the measured ceiling of every kernel that reads one slot and writes another.

The kernel moves 4 KiB a block, 128 threads with two 16-byte vectors each: of all granules tried this came closest to the
copy bandwidth (docs/notes/decode.md). It knows nothing of dtypes: a state is so many 4 KiB granules.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..compile.manifest import Entry, ResourceBudget

THREADS = 128
VECTORS = 2  # 16-byte vectors a thread has in flight
GRANULE_BYTES = THREADS * VECTORS * 16


@dataclass(frozen=True)
class SlabCopyKey:
    """Everything that changes the code of `kernels/slab_copy.py`. pdl: start while the previous kernel drains."""

    pdl: bool

    def symbol(self) -> str:
        """C identifier of the specialisation."""
        return "slab_copy_pdl" if self.pdl else "slab_copy"


def rejection(slot_bytes: int) -> str | None:
    """Why slots of this size cannot be moved, or None."""
    if slot_bytes < GRANULE_BYTES or slot_bytes % GRANULE_BYTES:
        return f"slot of {slot_bytes} B: not a positive multiple of {GRANULE_BYTES} B"
    return None


def shipped() -> list[Entry]:
    """Entries of the manifest."""
    return [Entry("slab_copy", SlabCopyKey(pdl), ResourceBudget(max_registers=32)) for pdl in (False, True)]
