"""Which checkpoint goes first when a slot is needed: the one least missed, not the oldest.

A long prompt leaves a checkpoint every few hundred tokens, more than the pool has slots, and most of them are never asked
for. By age alone each such prompt would push out what all others left. So a checkpoint stays for a number of turnovers of the
pool that grows with the power of two in its boundary's number: of old prompts ever coarser grids remain, and a prompt that
shares a beginning with one of them is computed from the nearest grid point. What was hit stays twice as long, and the ones
hit last, half a budget of them, go only when nothing else is left.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict

from ...pool.handles import SlotHandle
from ...pool.ledger import Ledger

# Turnovers for an odd boundary and for a prompt's end; twice as many for every second boundary, and so on up to sixteen times:
# more would keep the grids of a workload that is over.
TURNOVERS, MOST = 4, 16


class Eviction:
    """The order of eviction of one ledger's checkpoints; a turnover is as many grants of slots as the pool has slots."""

    def __init__(self, ledger: Ledger, alignment: int, most_proven: int) -> None:
        self._ledger, self._alignment, self._most_proven = ledger, alignment, most_proven
        # (grants of slots until which it stays, slot, life of the slot); entries that `_until` does not name are over.
        self._heap: list[tuple[int, int, SlotHandle]] = []
        self._until: dict[int, tuple[int, SlotHandle]] = {}
        self._proven: OrderedDict[SlotHandle, None] = OrderedDict()
        ledger.on_evict = self._choose

    def published(self, handle: SlotHandle, position: int, ends_prompt: bool) -> None:
        """There is a checkpoint of `position` tokens in the slot."""
        self._keep(handle, TURNOVERS if ends_prompt else self._turnovers(position))

    def hit(self, handle: SlotHandle, position: int) -> None:
        """A request goes on from the checkpoint."""
        self._keep(handle, 2 * self._turnovers(position))
        for old in [old for old in self._proven if not self._ledger.is_current(old)]:
            del self._proven[old]
        self._proven[handle] = None
        self._proven.move_to_end(handle)
        if len(self._proven) > self._most_proven:
            self._proven.popitem(last=False)

    def _turnovers(self, position: int) -> int:
        if self._alignment <= 0 or position % self._alignment:
            return TURNOVERS
        number = position // self._alignment
        return TURNOVERS * min(number & -number, MOST)

    def _keep(self, handle: SlotHandle, turnovers: int) -> None:
        until = self._ledger.counters.allocs + turnovers * self._ledger.num_slots
        self._until[handle.slot] = until, handle
        heapq.heappush(self._heap, (until, handle.slot, handle))
        if len(self._heap) > 4 * self._ledger.num_slots:
            self._heap = [entry for entry in self._heap if self._counts(*entry)]
            heapq.heapify(self._heap)

    def _counts(self, until: int, slot: int, handle: SlotHandle) -> bool:
        return self._until.get(slot) == (until, handle) and self._ledger.is_current(handle)

    def _choose(self) -> None:
        """Move the slot that goes first to the front of those that could be evicted."""
        passed_over = []
        while self._heap:
            entry = heapq.heappop(self._heap)
            _, slot, handle = entry
            if not self._counts(*entry):
                continue
            if slot in self._ledger.evictable and handle not in self._proven:
                self._ledger.evictable.move_to_end(slot, last=False)
                break
            passed_over.append(handle)
        # Held, or proven: looked at again a turnover later.
        for handle in passed_over:
            self._keep(handle, 1)
