"""Handles: how anything outside the ledger names a slot.

A bare slot number says nothing about *which life* of the slot is meant. A handle also carries the slot's generation
(plus one at every free) and the pool's incarnation (plus one at every wake), so a message that arrives late is
recognised. Packed into 64 bits for index entries, transfer records and messages between processes.
"""

from __future__ import annotations

from typing import NamedTuple

from .errors import ConfigError

SLOT_BITS, GENERATION_BITS, INCARNATION_BITS = 20, 32, 12
MAX_SLOTS = 1 << SLOT_BITS
GENERATION_MASK = (1 << GENERATION_BITS) - 1
INCARNATION_MASK = (1 << INCARNATION_BITS) - 1


class SlotHandle(NamedTuple):
    """One life of one slot: `slot` < 2**20, `generation` modulo 2**32, `incarnation` modulo 2**12."""

    slot: int
    generation: int
    incarnation: int

    def pack(self) -> int:
        """The handle as one unsigned 64-bit integer: incarnation, generation, slot from high to low bits."""
        return (self.incarnation << (SLOT_BITS + GENERATION_BITS)) | (self.generation << SLOT_BITS) | self.slot

    @classmethod
    def unpack(cls, packed: int) -> SlotHandle:
        """The inverse of `pack`. Raises ConfigError for a number that is no unsigned 64-bit integer."""
        if not isinstance(packed, int) or not 0 <= packed < 1 << 64:
            raise ConfigError("packed", packed, "an unsigned 64-bit integer")
        return cls(
            packed & (MAX_SLOTS - 1),
            (packed >> SLOT_BITS) & GENERATION_MASK,
            packed >> (SLOT_BITS + GENERATION_BITS),
        )
