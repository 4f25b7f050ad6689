"""The ledger's operations on requests, steps and fences."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from .errors import CapacityError, ConfigError
from .handles import SlotHandle
from .ledger_base import LedgerBase
from .slots import UNRESOLVED, Holder, SlotRecord


class StepLedger(LedgerBase):
    """Admission, hits, drops, steps and fences. See `Ledger`."""

    # Requests

    def admit(self, request_id: Hashable) -> Holder:
        """Registers a request and reserves what its steps may need. CapacityError: nothing changed, try later."""
        if self.mode != "run":
            raise self._closed()
        if request_id in self.holders:
            raise self.broken(f"request {request_id!r} admitted twice")
        charge = self._base_charge + 1
        if len(self.free) + len(self.evictable) + self.waiting < self.demand + charge:
            self.counters.e_capacity += 1
            raise CapacityError(f"admission needs {charge} slot(s), {self.reachable - self.demand} can be spared")
        holder = Holder(request_id)
        self.holders[request_id] = holder
        self.demand += charge
        return holder

    def hit(self, holder: Holder, handle: SlotHandle) -> None:
        """Gives a request without state R on a cached slot. CapacityError: admitted requests may need that slot."""
        if self.mode != "run":
            raise self._closed()
        rec = self.granted(handle)
        if holder.closed or holder.rec is not None:
            raise self.broken(f"hit for request {holder.id!r}, which is closed or has state")
        if not rec.sealed or rec.entry is None or rec.epoch != self.epoch:
            raise self.broken(f"hit on slot {rec.slot}, which is not cached in this epoch")
        if self._starves(rec):
            self.counters.e_capacity += 1
            raise CapacityError(f"pinning slot {rec.slot} would leave {self.reachable - 1} for {self.demand}")
        self._pin(rec)
        rec.readers += 1
        holder.rec, holder.gen = rec, rec.gen
        self.counters.hits += 1

    def drop(self, holder: Holder) -> None:
        """Ends a request's hold (finish, abort, preempt): O or R go at once, steps and transfers keep theirs."""
        if holder.closed:
            raise self.broken(f"request {holder.id!r} dropped twice")
        rec = holder.rec
        self.demand -= self._charge(holder)
        holder.closed, holder.rec = True, None
        del self.holders[holder.id]
        self.counters.drops += 1
        if rec is not None:
            self._release_hold(holder, rec)
            self._settle(rec)

    def resolve(self, holder: Holder, position: int) -> None:
        """States the exact position of a request's state once the accepted count of its last step is known."""
        rec = holder.rec
        if rec is None or rec.owner is not holder or position < 0:
            raise self.broken(f"resolve of request {holder.id!r} to {position}: it owns no slot")
        rec.position = position

    # Steps

    def begin_step(self) -> int:
        """Opens the next step for planning and returns its number. Close it with submit or abandon."""
        if self.mode != "run":
            raise self._closed()
        if self._planned:
            raise self.broken(f"step {self._planned} is still open")
        self._planned = self.submitted + 1
        return self._planned

    def alloc_besteffort(self, step: int) -> SlotHandle | None:
        """A slot for an export of `step`, or None when admitted requests may need all that is left."""
        if step != self._planned or not step:
            raise self._not_open(step)
        if len(self.free) + len(self.evictable) <= self.demand:
            self.counters.exports_skipped += 1
            return None
        if not self.free:
            self.evict_oldest()
        rec = self.free.pop()
        rec.epoch = self.epoch
        rec.write_step = step
        rec.since = self.submitted
        self.counters.allocs += 1
        self._plan.append(rec)
        return self.handle(rec)

    def abandon(self, step: int) -> None:
        """Closes a planned step that is not submitted: its allocations go back."""
        if step != self._planned or not step:
            raise self._not_open(step)
        self._planned = 0
        plan, self._plan = self._plan, []
        for rec in plan:
            # Not 0: under the early policy an earlier step may still write it on the device.
            rec.write_step = self.release_step
            self._settle(rec)

    def submit(
        self, step: int, holders: Sequence[Holder], counts: Sequence[int] | None = None
    ) -> tuple[list[int], list[int]]:
        """Closes the plan: per request the slot to read (-1 = none) and the slot to write.

        In place iff the slot is the request's own and unsealed; else a fresh slot is written and the old one is read
        only. `counts[i]` = tokens the step adds to request i (default 1), UNRESOLVED if known on the device alone.
        CapacityError: nothing changed, the step stays open; wait for a fence and call again, or abandon.
        """
        if step != self._planned or not step:
            raise self._not_open(step)
        if counts is None:
            counts = [1] * len(holders)
        elif len(counts) != len(holders):
            raise ConfigError("counts", len(counts), f"one per request ({len(holders)})")
        elif counts and min(counts) < 0 and (bad := [n for n in counts if n < 0 and n != UNRESOLVED]):
            raise ConfigError("counts", bad[0], "0 or more tokens, or UNRESOLVED")
        if len(holders) > 1 and len(set(holders)) != len(holders):
            raise self.broken("one request twice in a step")
        in_place = self.in_place
        movers = 0
        for holder in holders:
            rec = holder.rec
            if rec is None or rec.owner is not holder or not in_place:
                movers += 1
                if holder.closed:
                    raise self.broken(f"step for request {holder.id!r}, which is closed")
        if movers > len(self.free):
            self._reclaim(movers)
        self.submitted = step
        self._planned = 0
        self._publishes = 0
        self._last_rows = (holders, counts)
        counters = self.counters
        counters.steps += 1
        counters.rows += len(holders)
        if movers:
            counters.rows_moved += movers
            counters.allocs += movers
        reads: list[int] = []
        writes: list[int] = []
        for holder, count in zip(holders, counts):
            rec = holder.rec
            if in_place and rec is not None and rec.owner is holder:
                if rec.gen != holder.gen or rec.sealed:
                    raise self.broken(f"write of request {holder.id!r} in place: slot {rec.slot} is sealed or stale")
                rec.write_step = step
                rec.position += count
                slot = rec.slot
                reads.append(slot)
                writes.append(slot)
            else:
                new = self.free.pop()  # there are enough: reclaimed above
                new.epoch = self.epoch
                new.write_step = new.since = step
                if rec is None:
                    reads.append(-1)
                    new.position = count
                    self.demand -= 1
                else:
                    reads.append(rec.slot)
                    new.position = rec.position + count
                    self._leave(holder, rec, step)
                new.owner = holder
                holder.rec, holder.gen = new, new.gen
                writes.append(new.slot)
        if self._plan:
            plan, self._plan = self._plan, []
            for rec in plan:
                self._settle(rec)
        return reads, writes

    def _leave(self, holder: Holder, old: SlotRecord, step: int) -> None:
        """The request's state moves to another slot: `step` still reads the old one, which is its no longer."""
        if old.gen != holder.gen:
            raise self.broken(f"request {holder.id!r} reads slot {old.slot} of another life")
        if old.owner is not holder:
            self.demand -= 1
        self._release_hold(holder, old)
        old.read_step = step
        self._settle(old)

    def step_launched(self, step: int) -> None:
        """The step's kernels are queued and its fence is recorded. The early policy releases step tokens here."""
        if not self.launched < step <= self.submitted:
            raise self.broken(f"step {step} launched after {self.launched}, submitted {self.submitted}")
        self.launched = step
        if not self.late:
            self._release_to(step)

    def step_done(self, step: int, rank: int = 0) -> None:
        """The fence of `step` has passed on `rank`. A fence that has passed before is counted and ignored."""
        if not 0 <= rank < len(self._rank_done):
            raise ConfigError("rank", rank, f"0 .. {len(self._rank_done) - 1}")
        if step > self.submitted:
            raise self.broken(f"fence of step {step}, but only {self.submitted} were submitted")
        if step <= self._rank_done[rank]:
            self.counters.e_stale += 1
            return
        self._rank_done[rank] = step
        done = step if len(self._rank_done) == 1 else min(self._rank_done)
        if done > self.done:
            products = self._products
            while products and (first := next(iter(products))) <= done:
                del products[first]
            self.done = done
            if done > self.release_step:
                self._release_to(done)

    def _release_to(self, step: int) -> None:
        number, self.release_step = self.release_step, step
        while number < step:
            number += 1
            for rec in self._draining.pop(number, ()):
                if rec.waits_for == number:
                    rec.waits_for = 0
                    self.waiting -= 1
                    self._settle(rec)
