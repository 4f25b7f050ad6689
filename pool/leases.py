"""Transfer leases: a store put reads a sealed slot, a store get writes a fresh one.

A lease is released only by a terminal completion on all ranks, never by a cancel; for a put it is the only protection
of the source, because the store has committed the bytes before anybody looks at a generation. A transfer starts once
the fence of `after_step` has passed. A lease past its deadline puts its slot into quarantine, for as long as the pool's
memory lives: the transfer may still touch it.
"""

from __future__ import annotations

from typing import NamedTuple

from .errors import CapacityError, ErrorClass
from .handles import SlotHandle
from .ledger_cache import CacheLedger
from .slots import SlotRecord


class IoLease:
    """One transfer in flight. `after_step`: do not start before its fence; `revoked`: do not start at all.

    `pending`: one bit for each rank that has not reported yet; `failed`: ranks that reported a failure.
    """

    __slots__ = (
        "after_step",
        "cancelled",
        "deadline",
        "entry",
        "epoch",
        "failed",
        "handle",
        "kind",
        "op",
        "pending",
        "position",
        "revoked",
    )

    def __init__(
        self,
        op: int,
        kind: str,
        handle: SlotHandle,
        pending: int,
        after_step: int,
        position: int,
        epoch: int,
        deadline: float | None,
        entry: object | None,
    ) -> None:
        self.op = op
        self.kind = kind
        self.handle = handle
        self.pending = pending
        self.failed = 0
        self.after_step = after_step
        self.position = position
        self.epoch = epoch
        self.deadline = deadline
        self.entry = entry
        self.cancelled = self.revoked = False


class IoOutcome(NamedTuple):
    """The end of a transfer on all ranks. `ok`: a put is stored everywhere; a get's state may be used and is cached."""

    lease: IoLease
    ok: bool
    error: ErrorClass | None


class LeaseLedger(CacheLedger):
    """put_begin/put_end, get_begin/get_end, deadlines. See `Ledger`."""

    def put_begin(self, handle: SlotHandle, *, deadline: float | None = None) -> IoLease:
        """A lease to read a sealed slot. CapacityError: too many puts, or admitted requests may need the slot."""
        if self.mode != "run":
            raise self._closed()
        rec = self.granted(handle)
        if not rec.sealed or rec.quarantined or rec.entry is None or rec.epoch != self.epoch:
            raise self.broken(f"put of slot {rec.slot}, which is not cached in this epoch")
        if self.puts_in_flight >= self.max_puts:
            self.counters.e_capacity += 1
            raise CapacityError(f"{self.puts_in_flight} puts in flight, {self.max_puts} allowed")
        if self._starves(rec):
            self.counters.e_capacity += 1
            raise CapacityError(f"a put of slot {rec.slot} would pin a slot that admitted requests may need")
        self._pin(rec)
        rec.puts += 1
        self.puts_in_flight += 1
        self.counters.puts += 1
        return self._lease("put", rec, rec.write_step, rec.position, deadline, None)

    def put_end(self, op: int, *, rank: int = 0, ok: bool, error: ErrorClass = ErrorClass.IO) -> IoOutcome | None:
        """One rank's terminal completion of a put. An outcome once all ranks are terminal; None before, or if stale."""
        lease = self._complete(op, "put", rank, ok)
        if lease is None:
            return None
        rec = self.records[lease.handle.slot]
        rec.puts -= 1
        self.puts_in_flight -= 1
        self._settle(rec)
        fault = self._fault(lease, error) if lease.failed or lease.revoked else None
        if fault is None:
            self.counters.puts_ok += 1
        return tuple.__new__(IoOutcome, (lease, fault is None, fault))

    def may_get(self) -> bool:
        """Whether `get_begin` would be granted now, in a pool that runs."""
        return self.gets_in_flight < self.max_gets and len(self.free) + len(self.evictable) > self.demand

    def get_begin(
        self, position: int, entry: object, *, deadline: float | None = None, after_step: int = 0
    ) -> IoLease | None:
        """A lease to load the state at `position` into a fresh slot; None if no slot or transfer can be spared.

        `entry`: what the slot is cached as once the load is good. `after_step`: a later step to wait for.
        """
        if self.mode != "run":
            raise self._closed()
        if position <= 0:
            raise self.broken(f"get of the state at {position}")
        if not self.may_get():
            self.counters.e_capacity += 1
            return None
        if not self.free:
            self.evict_oldest()
        rec = self.free.pop()
        # The slot was free, yet under the early policy a step may still use it on the device.
        last = rec.write_step if rec.write_step > rec.read_step else rec.read_step
        rec.epoch = self.epoch
        rec.since = self.submitted
        lease = self._lease("get", rec, last if last > after_step else after_step, position, deadline, entry)
        rec.get_op = lease.op
        self.gets_in_flight += 1
        counters = self.counters
        counters.allocs += 1
        counters.gets += 1
        return lease

    def get_cancel(self, op: int) -> None:
        """Nobody wants the state any more. The slot stays LOADING until the transfer is terminal on all ranks."""
        lease = self.leases.get(op)
        if lease is not None:
            lease.cancelled = True

    def get_end(self, op: int, *, rank: int = 0, ok: bool, error: ErrorClass = ErrorClass.IO) -> IoOutcome | None:
        """One rank's terminal completion of a get; `ok` = right size, header and checksum.

        Published (sealed, with C) only if all ranks are ok, nobody cancelled, the weights are
        the same and the pool runs; else the slot is free again.
        """
        lease = self._complete(op, "get", rank, ok)
        if lease is None:
            return None
        rec = self.records[lease.handle.slot]
        rec.get_op = 0
        self.gets_in_flight -= 1
        fault = self._fault(lease, error) if lease.failed or lease.revoked else None
        usable = fault is None and not lease.cancelled and lease.epoch == self.epoch and self.mode == "run"
        if usable:
            rec.sealed, rec.position, rec.entry = True, lease.position, lease.entry
            self.counters.gets_ok += 1
            self.log.append((self.submitted, "load", rec.slot, rec.position))
        self._settle(rec)
        return tuple.__new__(IoOutcome, (lease, usable, fault))

    def may_start(self, lease: IoLease) -> bool:
        """Whether the transfer may touch memory now: the fence it waits for has passed and it is not revoked."""
        return not lease.revoked and lease.after_step <= self.done

    def expire(self, now: float) -> list[IoLease]:
        """Quarantines the slot of every lease past its deadline and returns those leases."""
        late = [lease for lease in self.leases.values() if lease.deadline is not None and lease.deadline <= now]
        for lease in late:
            del self.leases[lease.op]
            self.stuck[lease.op] = lease
            lease.cancelled = True
            self.counters.e_stuck += 1
            rec = self.records[lease.handle.slot]
            if not rec.quarantined:
                rec.quarantined = True
                self.quarantined += 1
            if lease.kind == "put":
                rec.puts -= 1
                self.puts_in_flight -= 1
            else:
                rec.get_op = 0
                self.gets_in_flight -= 1
            if rec.entry is not None:
                self._uncache(rec, "stuck")
            self.log.append((self.submitted, "quarantine", rec.slot, rec.position))
        return late

    def _lease(
        self, kind: str, rec: SlotRecord, after_step: int, position: int, deadline: float | None, entry: object | None
    ) -> IoLease:
        op = self._next_op
        self._next_op = op + 1
        handle = rec.handle or self.handle(rec)
        lease = IoLease(op, kind, handle, self._all_ranks, after_step, position, rec.epoch, deadline, entry)
        self.leases[op] = lease
        return lease

    def _complete(self, op: int, kind: str, rank: int, ok: bool) -> IoLease | None:
        """Takes one rank's completion; the lease once all ranks are in and it was not quarantined."""
        lease = self.leases.get(op) or self.stuck.get(op)
        bit = 1 << rank
        if lease is None or lease.kind != kind or not lease.pending & bit:
            self.counters.e_stale += 1
            return None
        lease.pending ^= bit
        if not ok:
            lease.failed += 1
        if lease.pending:
            return None
        if self.leases.pop(op, None) is None:
            del self.stuck[op]
            self.counters.e_stale += 1
            return None
        return lease

    def _fault(self, lease: IoLease, error: ErrorClass) -> ErrorClass | None:
        if lease.revoked:
            return ErrorClass.STALE
        if not lease.failed:
            return None
        if lease.failed < self.ranks:
            error = ErrorClass.RANK
        name = error.value.lower()
        setattr(self.counters, name, getattr(self.counters, name) + 1)
        return error
