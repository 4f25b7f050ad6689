"""Lifecycle: what a scheduler calls, from admission to completion, with ledger and index kept in step.

No payload is copied anywhere here: a checkpoint is published by sealing the slot it is in, and restored by reading that
slot and writing another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

from .errors import CapacityError, ConfigError, ErrorClass, StuckLeaseError
from .fences import Fence, FenceQueue
from .handles import SlotHandle
from .index import CheckpointIndex, IndexEntry
from .leases import IoLease, IoOutcome
from .ledger import Ledger
from .observe import Snapshot, snapshot, traced
from .prefix import PrefixKey
from .requests import Phase, StateRequest, StepPlan, StepRow
from .slots import Holder

if TYPE_CHECKING:
    from .pool import StatePool


class Lifecycle:
    """Requests over one ledger and index. One thread calls it."""

    def __init__(self, ledger: Ledger, index: CheckpointIndex, pool: StatePool | None = None) -> None:
        if index.ledger is not ledger or (pool is not None and pool.ledger is not ledger):
            raise ConfigError("ledger", "another than that of index or pool", "one ledger for all three")
        self.ledger, self.index, self.pool = ledger, index, pool
        self.fences = FenceQueue(ledger)
        self.requests: dict[Hashable, StateRequest] = {}
        self.skipped_checkpoints = 0
        self._loads: dict[int, tuple[IoLease, list[StateRequest]]] = {}

    # Requests

    def add(self, request_id: Hashable, key: PrefixKey) -> StateRequest:
        """A new request, waiting. It holds nothing yet."""
        if request_id in self.requests:
            raise self.ledger.broken(f"request {request_id!r} added twice")
        request = self.requests[request_id] = StateRequest(request_id, key)
        return request

    def admit(
        self, request: StateRequest, *, limit: int | None = None, usable: Callable[[int], bool] | None = None
    ) -> bool:
        """Starts a waiting request on the longest usable checkpoint. False: it has to wait for slots; nothing changed.

        After True compute from token `request.resumed` on. `limit` and `usable` as in `CheckpointIndex.lookup`.
        """
        if request.phase is not Phase.WAITING:
            raise self.ledger.broken(f"admission of request {request.id!r}, which is {request.phase.value}")
        try:
            request.holder = self.ledger.admit(request.id)
        except CapacityError:
            return False
        try:
            request.resumed = self.index.hit(request.holder, request.key, limit=limit, usable=usable)
        except BaseException:
            self.ledger.drop(request.holder)
            request.holder = None
            raise
        request.phase = Phase.RUNNING
        return True

    def extend(self, request: StateRequest, tokens: Sequence[int]) -> None:
        """Appends generated tokens to the request's key."""
        request.key = request.key.extended(tokens)

    def resolve(self, request: StateRequest, position: int) -> None:
        """States the exact position of a request's state once its accepted drafts are known."""
        self.ledger.resolve(self._holder(request), position)

    def finish(self, request: StateRequest, *, publish: bool = True) -> IndexEntry | None:
        """Ends a request. Its last state becomes a checkpoint if `publish` and it may: no copy, the slot changes hands."""
        return self._end(request, Phase.ENDED, publish)

    def preempt(self, request: StateRequest, *, publish: bool = True) -> IndexEntry | None:
        """Takes a running request's slots; it waits for admission again and resumes from the longest checkpoint left."""
        return self._end(request, Phase.WAITING, publish)

    def cancel(self, request: StateRequest) -> None:
        """Ends a request in any phase. Slots that steps or transfers still use come back when those are done."""
        if request.phase is not Phase.ENDED:
            self._end(request, Phase.ENDED, False)

    def _end(self, request: StateRequest, phase: Phase, publish: bool) -> IndexEntry | None:
        if request.phase is Phase.ENDED:
            raise self.ledger.broken(f"request {request.id!r} has ended")
        if request.phase is Phase.LOADING:
            self._stop_waiting(request)
        entry = None
        holder, request.holder = request.holder, None
        if phase is Phase.ENDED:
            del self.requests[request.id]
        request.phase, request.resumed = phase, 0
        if holder is None:
            return None
        exact = holder.owns and 0 < holder.position <= len(request.key)
        if publish and exact and not holder.tainted and self.ledger.mode == "run":
            entry = self.index.reserve(request.key, holder.position, "final")
            if entry is not None:
                handle = self.ledger.publish_final(holder, holder.position, entry)
                if handle is None:
                    return None
                self.index.confirm(entry, handle)
                return entry
        self.ledger.drop(holder)
        return None

    def _holder(self, request: StateRequest) -> Holder:
        if request.holder is None:
            raise self.ledger.broken(f"request {request.id!r} is {request.phase.value}, not running")
        return request.holder

    # Steps

    def plan(self, rows: Sequence[StepRow]) -> StepPlan:
        """Plans and submits the next step. Launch its kernels, then call `launched`.

        A checkpoint inside a row is an extra output of the kernels; one at a row's end is the running slot itself, sealed
        in place. Checkpoints that find no slot are skipped. CapacityError: nothing changed; wait for a fence or preempt.
        """
        with traced("pool.plan"):
            return self._plan(rows)

    def _plan(self, rows: Sequence[StepRow]) -> StepPlan:
        ledger = self.ledger
        holders = [row.request.holder or self._holder(row.request) for row in rows]
        before = [0 if (rec := holder.rec) is None else rec.position for holder in holders]
        wanted = any(row.positions for row in rows)
        step = ledger.begin_step()
        try:
            exports = self._reserve(step, rows, before) if wanted else {}
            reads, writes = ledger.submit(step, holders, [row.tokens for row in rows])
        except BaseException:
            if ledger.submitted < step:
                ledger.abandon(step)
            raise
        if not wanted:
            return StepPlan(step, reads, writes, before, [0] * (len(rows) + 1))
        plan = StepPlan(step, reads, writes, before, cu=[0])
        for number in range(len(rows)):
            for entry, handle in exports.get(number, ()):
                self._export(plan, step, holders[number], before[number], entry, handle)
            plan.cu.append(len(plan.ends))
        for number, row in enumerate(rows):
            end = before[number] + row.tokens
            if end > 0 and end in row.positions:
                published = self.publish(row.request)
                if published is not None:
                    plan.entries.append(published)
        return plan

    def _reserve(
        self, step: int, rows: Sequence[StepRow], before: Sequence[int]
    ) -> dict[int, list[tuple[IndexEntry, SlotHandle]]]:
        exports: dict[int, list[tuple[IndexEntry, SlotHandle]]] = {}
        # What is short goes to the deepest: a row's end first, which needs no slot besides, then from there back.
        pending = sum(start + row.tokens in row.positions for start, row in zip(before, rows))
        for number, row in enumerate(rows):
            if not row.positions or before[number] < 0 or row.tokens <= 0:
                continue
            start, end = before[number], before[number] + row.tokens
            for position in sorted(set(row.positions), reverse=True):
                if not start < position < end:
                    continue
                spare = self.ledger.available > self.ledger.demand
                entry = self.index.reserve(row.request.key, position, "export", pending=pending) if spare else None
                handle = None if entry is None else self.ledger.alloc_besteffort(step)
                if entry is None or handle is None:
                    self.skipped_checkpoints += 1
                else:
                    exports.setdefault(number, []).insert(0, (entry, handle))
                    pending += 1
        return exports

    def _export(
        self, plan: StepPlan, step: int, holder: Holder, start: int, entry: IndexEntry, handle: SlotHandle
    ) -> None:
        # Another row of this very step may have the same prefix: the first one is cached.
        known = self.index.get(entry.key, entry.position) is not None
        if known or not self.ledger.export(step, handle, holder, entry.position, entry):
            self.skipped_checkpoints += 1
            return
        self.index.confirm(entry, handle)
        plan.ends.append(entry.position - start)
        plan.slots.append(handle.slot)
        plan.entries.append(entry)

    def publish(self, request: StateRequest, *, kind: str = "publish") -> IndexEntry | None:
        """Makes the request's present state a checkpoint without copying it. None if it may not or need not be one.

        The state must be exact: `request.position` tokens of `request.key`, with no draft waiting to be folded in.
        """
        holder = self._holder(request)
        position = holder.position
        if position < 0:
            raise self.ledger.broken(f"publish of request {request.id!r} whose position the host does not know")
        if not self.ledger.may_publish(holder) or not 0 < position <= len(request.key):
            self.skipped_checkpoints += 1
            return None
        entry = self.index.reserve(request.key, position, kind)
        handle = None if entry is None else self.ledger.publish(holder, position, entry)
        if entry is None or handle is None:
            self.skipped_checkpoints += 1
            return None
        self.index.confirm(entry, handle)
        return entry

    def launched(self, step: int, fence: Fence | None = None) -> None:
        """The step's kernels are queued; `fence` was recorded after them (None: they have already run)."""
        self.fences.record(step, fence)

    def poll(self) -> int:
        """Takes in every fence that has passed; returns the last step that is done."""
        with traced("pool.poll"):
            return self.fences.poll()

    def snapshot(self) -> Snapshot:
        """Slots by condition, holders, ages, transfers and counters at this moment."""
        return snapshot(self.ledger, self.index)

    def failed(self, step: int) -> list[StateRequest]:
        """A submitted step failed: its checkpoints are revoked, requests that lost their state wait for admission again.

        Call `launched` for it all the same, with a fence behind what was queued: its slots come back with that.
        """
        lost = {id(holder) for holder in self.ledger.step_failed(step)}
        requests = [request for request in self.requests.values() if id(request.holder) in lost]
        for request in requests:
            self.preempt(request, publish=False)
        return requests

    # Transfers

    def begin_put(self, entry: IndexEntry, *, deadline: float | None = None) -> IoLease | None:
        """A lease for storing a checkpoint; None while the caps or admitted requests leave no room."""
        try:
            return self.ledger.put_begin(entry.handle, deadline=deadline)
        except CapacityError:
            return None

    def begin_load(self, request: StateRequest, position: int, *, deadline: float | None = None) -> IoLease | None:
        """A waiting request asks the store for the state at `position`; None: recompute. Two that ask for one share it."""
        if request.phase is not Phase.WAITING:
            raise self.ledger.broken(f"load for request {request.id!r}, which is {request.phase.value}")
        for lease, waiting in self._loads.values():
            current = lease.epoch == self.ledger.epoch and not lease.cancelled
            if current and lease.position == position and isinstance(lease.entry, IndexEntry):
                key = lease.entry.key
                if key.digest(position) == request.key.digest(position):
                    waiting.append(request)
                    request.phase, request.load_op = Phase.LOADING, lease.op
                    return lease
        # Asked before the index makes room: no checkpoint is evicted for a load that cannot begin.
        may = self.ledger.may_get()
        entry = self.index.reserve(request.key, position, "load") if may else None
        begun = None if entry is None else self.ledger.get_begin(position, entry, deadline=deadline)
        self.ledger.counters.e_capacity += not may
        if begun is not None:
            self._loads[begun.op] = (begun, [request])
            request.phase, request.load_op = Phase.LOADING, begun.op
        return begun

    def end_load(self, op: int, *, rank: int = 0, ok: bool, error: ErrorClass = ErrorClass.IO) -> IoOutcome | None:
        """One rank's completion of a load. Once all are in, the requests wait for admission, whatever the outcome."""
        outcome = self.ledger.get_end(op, rank=rank, ok=ok, error=error)
        if outcome is None:
            return None
        entry = outcome.lease.entry
        if outcome.ok and isinstance(entry, IndexEntry):
            if self.index.get(entry.key, entry.position) is None:
                self.index.confirm(entry, outcome.lease.handle)
            else:
                self.ledger.uncache(outcome.lease.handle, "duplicate")
        self._wake_waiting(op)
        return outcome

    def expire(self, now: float) -> list[IoLease]:
        """Quarantines the slots of transfers past their deadline; requests that waited for one recompute."""
        late = self.ledger.expire(now)
        for lease in late:
            self._wake_waiting(lease.op)
        return late

    def _wake_waiting(self, op: int) -> None:
        for request in self._loads.pop(op, (None, []))[1]:
            request.phase, request.load_op = Phase.WAITING, 0

    def _stop_waiting(self, request: StateRequest) -> None:
        _, waiting = self._loads.get(request.load_op, (None, [request]))
        waiting.remove(request)
        if not waiting:
            self.ledger.get_cancel(request.load_op)
        request.load_op = 0

    # The pool's modes

    def new_weights(self) -> list[StateRequest]:
        """New weights: all checkpoints go; returns the running requests whose state now mixes weights (never published).

        In a pool that runs or sleeps; PoolClosedError while it drains.
        """
        tainted = {id(holder) for holder in self.ledger.bump_epoch()}
        return [request for request in self.requests.values() if id(request.holder) in tainted]

    def sleep(
        self,
        *,
        deadline_s: float,
        progress: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Drains and frees the memory. Running requests wait for admission after the wake.

        `progress` takes in transfer completions while this waits. StuckLeaseError when a step or transfer is still live
        after `deadline_s`: the memory is kept and the pool stays drained; call again, or `resume`.
        """
        if self.ledger.mode == "run":
            self.ledger.drain()
        for request in list(self.requests.values()):
            if request.holder is not None:
                self.preempt(request, publish=False)
        limit = clock() + deadline_s
        while True:
            self.poll()
            if progress is not None:
                progress()
            if self.ledger.quiet():
                break
            if clock() >= limit:
                raise StuckLeaseError(
                    f"sleep waited {deadline_s} s: steps done {self.ledger.done} of {self.ledger.submitted}, "
                    f"{len(self.ledger.leases) + len(self.ledger.stuck)} transfers without an end"
                )
            time.sleep(0.0005)
        self.ledger.sleep()
        if self.pool is not None:
            self.pool.release()

    def resume(self) -> None:
        """Runs on after a sleep that failed."""
        self.ledger.resume()

    def wake(self) -> None:
        """New memory, a new incarnation, an empty index."""
        if self.pool is not None:
            self.pool.allocate()
        self.ledger.wake()
