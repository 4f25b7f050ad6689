"""Ledger: who may touch which slot of the pool, and when.

Pure Python, no torch, one thread: transfer threads post their completions to the thread that owns the ledger. The
classes it is built of split by job: ledger_base (state, tokens), ledger_steps (requests, steps, fences), ledger_cache
(checkpoints), leases (transfers); this file adds weight epochs, failed steps and sleep.
"""

from __future__ import annotations

from collections.abc import Iterable

from .errors import StuckLeaseError
from .leases import LeaseLedger
from .slots import Holder, SlotRecord


class Ledger(LeaseLedger):
    """The ledger of one pool; every rank's memory follows it.

    `num_slots` slots, the first `reserved` of which are never granted. `in_place=False`: kernels cannot write the slot
    they read. `policy`: "late" keeps step tokens until the step's fence, "early" until its kernels are queued. `ranks`:
    completions of a transfer that make one; `fence_ranks` (default `ranks`): reports of a step's fence that make one, 1
    where transfer threads wait for their own rank's event. `max_publishes_per_step`, `max_puts`, `max_gets`: caps.
    """

    def bump_epoch(self) -> list[Holder]:
        """New weights: every checkpoint is un-indexed, running requests with state are tainted and returned."""
        if self.mode not in ("run", "asleep"):
            raise self._closed()
        self.epoch += 1
        self._uncache_all(self.records, "epoch")
        tainted = [holder for holder in self.holders.values() if holder.rec is not None]
        for holder in tainted:
            holder.tainted = True
        return tainted

    def step_failed(self, step: int) -> list[Holder]:
        """A submitted step failed: what it and later steps made is revoked; returns the requests that lost their state.

        The fences of the steps still have to come. The caller drops or restarts the returned requests.
        """
        made = {id(rec) for number in self._products if number >= step for rec in self._products[number]}
        self._uncache_all((rec for rec in self.records if id(rec) in made), "failed")
        for lease in (*self.leases.values(), *self.stuck.values()):
            if lease.kind == "put" and id(self.records[lease.handle.slot]) in made:
                lease.revoked = True
        return [h for h in self.holders.values() if h.rec is not None and h.rec.write_step >= step > self.done]

    def drain(self) -> None:
        """No new request, step, lookup, publish or transfer from here on; what runs goes on to its end."""
        if self.mode != "run":
            raise self._closed()
        if self._planned:
            raise self.broken(f"drain while step {self._planned} is open")
        self.mode = "drain"

    def resume(self) -> None:
        """Back to running after a drain that did not end in sleep."""
        if self.mode != "drain":
            raise self.broken(f"resume in mode {self.mode!r}")
        self.mode = "run"

    def quiet(self) -> bool:
        """Whether nothing touches the memory: every fence has passed and no transfer is without its terminal report."""
        return self.done == self.submitted and not self.leases and not self.stuck

    def sleep(self) -> None:
        """Drained and quiet: every checkpoint is un-indexed and every slot is free; the memory may be freed.

        StuckLeaseError, with nothing changed, while a fence or transfer is outstanding.
        """
        if self.mode != "drain":
            raise self.broken(f"sleep in mode {self.mode!r}")
        if not self.quiet():
            raise StuckLeaseError(
                f"memory is in use: steps done {self.done} of {self.submitted}, "
                f"{len(self.leases)} transfers running, {len(self.stuck)} past their deadline"
            )
        if self.holders:
            raise self.broken(f"sleep with {len(self.holders)} requests admitted")
        self._uncache_all(self.records, "sleep")
        taken = self.num_slots - self.reserved - len(self.free) - self.quarantined
        if taken:
            raise self.broken(f"{taken} slots are held after the drain")
        self.mode = "asleep"

    def wake(self) -> None:
        """New memory: the next incarnation, all slots free, no checkpoint."""
        if self.mode != "asleep":
            raise self.broken(f"wake in mode {self.mode!r}")
        self.incarnation += 1
        for rec in self.records:
            rec.handle = None
            if rec.quarantined:
                rec.quarantined = False
                self.quarantined -= 1
                self._settle(rec)
        self.mode = "run"

    def _uncache_all(self, records: Iterable[SlotRecord], reason: str) -> None:
        for rec in records:
            if rec.entry is not None:
                self._uncache(rec, reason)
