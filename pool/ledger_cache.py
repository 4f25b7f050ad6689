"""The ledger's operations on checkpoints: a checkpoint is a sealed slot with C."""

from __future__ import annotations

from .handles import SlotHandle
from .ledger_steps import StepLedger
from .slots import Holder, SlotRecord


class CacheLedger(StepLedger):
    """Publish, export and un-index. None of them moves a payload byte. See `Ledger`."""

    def may_publish(self, holder: Holder) -> bool:
        """Whether `publish` at the right position would be granted now."""
        rec = holder.rec
        over_cap = self.max_publishes_per_step is not None and self._publishes >= self.max_publishes_per_step
        return (
            self.mode == "run"
            and rec is not None
            and rec.owner is holder
            and rec.epoch == self.epoch
            and not holder.tainted
            and not over_cap
            and len(self.free) + len(self.evictable) + self.waiting > self.demand
        )

    def publish(self, holder: Holder, position: int, entry: object) -> SlotHandle | None:
        """Seals the request's state and gives it C; the request keeps R and its next step writes a fresh slot.

        None when it is refused: the cap of publishes per step is reached, the request's state mixes weight epochs, or
        the extra slot cannot be spared. InvariantError when the state does not stand at `position`.
        """
        rec = self._publishable(holder, position)
        if rec is None or not self.may_publish(holder):
            self.counters.publishes_refused += 1
            return None
        rec.owner = None
        rec.readers = 1
        self.demand += 1
        self._publishes += 1
        self.counters.publishes += 1
        return self._seal(rec, entry)

    def publish_final(self, holder: Holder, position: int, entry: object) -> SlotHandle | None:
        """Hands a finished request's state to the cache and drops the request. None: freed, it may not be cached."""
        rec = self._publishable(holder, position)
        if rec is None:
            self.counters.publishes_refused += 1
            self.drop(holder)
            return None
        self.demand -= self._charge(holder)
        holder.closed, holder.rec = True, None
        del self.holders[holder.id]
        self.counters.drops += 1
        rec.owner = None
        self.counters.publishes += 1
        handle = self._seal(rec, entry)
        self._settle(rec)
        return handle

    def _publishable(self, holder: Holder, position: int) -> SlotRecord | None:
        if self.mode != "run":
            raise self._closed()
        rec = holder.rec
        if holder.closed or rec is None or rec.owner is not holder or rec.gen != holder.gen:
            raise self.broken(f"publish of request {holder.id!r}, which owns no slot")
        if rec.position != position or position <= 0:
            raise self.broken(f"publish at {position}, but slot {rec.slot} stands at {rec.position}")
        return None if holder.tainted or rec.epoch != self.epoch else rec

    def export(self, step: int, handle: SlotHandle, holder: Holder, position: int, entry: object) -> bool:
        """Seals a slot that the step just submitted writes besides its outputs: the state of `holder` at `position`.

        False (the slot is freed at the fence) when the request's state mixes weight epochs.
        """
        rec = self.granted(handle)
        if step != self.submitted or rec.write_step != step or rec.sealed or rec.owner is not None:
            raise self.broken(f"export of slot {rec.slot} at step {step}: it is no output of the last step")
        holders, counts = self._last_rows
        count = counts[holders.index(holder)] if holder in holders else 0
        end = -1 if holder.rec is None else holder.rec.position
        if not 0 < position <= end or position <= end - count:
            raise self.broken(f"export at {position}: request {holder.id!r} goes to {end} by {count} in step {step}")
        if holder.tainted or rec.epoch != self.epoch:
            self.counters.exports_skipped += 1
            return False
        self._pin(rec)
        rec.position = position
        self.counters.exports += 1
        self._seal(rec, entry)
        self._settle(rec)
        return True

    def _seal(self, rec: SlotRecord, entry: object) -> SlotHandle:
        rec.sealed = True
        rec.entry = entry
        if rec.write_step > self.done:
            self._products.setdefault(rec.write_step, []).append(rec)
        self.log.append((self.submitted, "cache", rec.slot, rec.position))
        return self.handle(rec)

    def uncache(self, handle: SlotHandle, reason: str) -> None:
        """Takes C off a slot, which is always allowed; the slot is free as soon as nothing else holds it."""
        rec = self.granted(handle)
        if rec.entry is None:
            raise self.broken(f"slot {rec.slot} is not cached")
        self._uncache(rec, reason)
