"""MooncakeStateStore: checkpoints travel between the pool and a Mooncake Store.

The half at the ledger, on the ledger's thread; no method waits for the store. A scheduler's loop gains four calls::

    store = MooncakeStateStore.connect(life, pool, StoreIdentity("qwen3.5-9b", revision), MooncakeConfig("10.0.0.1:50051"))
    store.find(request, positions)          # when a request arrives: which of these boundaries does the store hold?
    if not store.pending(request): ...      # then admit it: what was loaded is a checkpoint like any other
    store.put(entry)                        # for each of plan.entries: stored when a lease can be had
    store.poll()                            # once a step: completions, deadlines, fences that have passed

Whatever goes wrong costs a checkpoint or a recomputation. A state enters the index only if every rank read the right
number of bytes under the right key with the right checksum; a put counts only when it was seen in the store afterwards.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from .errors import ErrorClass
from .index import IndexEntry
from .lifecycle import Lifecycle
from .mooncake import MooncakeConfig
from .pool import StatePool
from .requests import Phase, StateRequest
from .store_base import Active, Doomed, Find, StoreBase
from .store_keys import StoreIdentity
from .store_transfer import StateTransfer
from .store_types import Completion, Job, StoreSettings

#: Seconds that closing waits for calls in flight.
CLOSE_S = 10.0


class MooncakeStateStore(StoreBase):
    """See the module's text. `ports[r]` moves the bytes of rank r; the ledger's `ranks` is their number."""

    @classmethod
    def connect(
        cls,
        life: Lifecycle,
        pools: StatePool | Sequence[StatePool],
        identity: StoreIdentity,
        config: MooncakeConfig,
        settings: StoreSettings | None = None,
        *,
        mode: str = "auto",
    ) -> MooncakeStateStore:
        """A store over pools of this process, one per rank, each with its own Mooncake client. `mode`: see store_memory.

        "auto" over RDMA tries to move GPU slots directly.
        """
        ranks = [pools] if isinstance(pools, StatePool) else list(pools)
        if mode == "auto" and config.protocol == "rdma" and all(pool.device.type == "cuda" for pool in ranks):
            mode = "direct"
        ports = []
        with ExitStack() as undo:
            for pool in ranks:
                client = config.connect()
                undo.callback(client.close, CLOSE_S)
                ports.append(StateTransfer(pool, client, settings, mode=mode))
                undo.callback(ports[-1].close, CLOSE_S)
            store = cls(life, identity, ports, settings)
            undo.pop_all()
        return store

    # Puts

    def put(self, entry: IndexEntry) -> bool:
        """Wants a checkpoint stored. False: it is no checkpoint now, or the store takes nothing at present."""
        self._follow_pool()
        if not self._serves() or not self._current(entry) or entry.stored or not self.ledger.max_puts:
            self.counters.puts_refused += 1
            return False
        if id(entry) in self._queued:
            return True
        if len(self._backlog) >= self.settings.backlog:
            self.counters.puts_lost += 1
            return False
        self._backlog.append(entry)
        self._queued.add(id(entry))
        self._start_puts()
        return True

    def _current(self, entry: IndexEntry) -> bool:
        return entry.node is not None and entry.epoch == self.ledger.epoch and self.ledger.is_current(entry.handle)

    def _start_puts(self) -> None:
        while self._backlog and self.ledger.puts_in_flight < self.ledger.max_puts:
            entry = self._backlog[0]
            keys = self._keys
            if not self._serves() or keys is None or not self._current(entry):
                self._forget_put()
                self.counters.puts_lost += 1
                continue
            (name,) = keys.names(entry.key, [entry.position])
            if self._avoids(name, put=True):
                self._forget_put()
                self.counters.puts_refused += 1
                continue
            now = self._clock()
            if self.breaker.waits(now):
                return
            lease = self.life.begin_put(entry, deadline=now + self.settings.put_deadline_s)
            if lease is None:
                return
            self.breaker.allows(now)
            self._backlog.popleft()
            self._begin(Active(lease, name, keys, entry))

    def _forget_put(self) -> None:
        self._queued.discard(id(self._backlog.popleft()))

    # Finds and loads

    def find(self, request: StateRequest, positions: Sequence[int], *, limit: int | None = None) -> bool:
        """Asks which boundaries of a waiting request the store holds, and loads the longest that all ranks have.

        Only boundaries past what the local index has, at most `limit` (what other caches hold), outside media spans and
        with a token left to compute. True: `pending(request)` until it is settled; False: nothing to wait for.
        """
        self._follow_pool()
        keys = self._keys
        if request.phase is not Phase.WAITING or self.pending(request) or not self._serves() or keys is None:
            return False
        if not self.ledger.max_gets:
            return False
        most = len(request.key) - 1
        allowed = most if limit is None else min(most, limit)
        local = self.index.lookup(request.key, limit=limit).position
        wanted = sorted(
            {p for p in positions if local < p <= allowed and not request.key.inside_media(p)}, reverse=True
        )
        names = keys.names(request.key, wanted[: self.settings.max_candidates])
        names = [name for name in names if not self._avoids(name)]
        if not names:
            return False
        if not self.breaker.allows(self._clock()):
            self.counters.finds_refused += 1
            return False
        self.counters.finds += 1
        deadline = self._clock() + self.settings.find_deadline_s
        find = Find(request, names, limit, deadline, self.settings.attempts, self.ledger.epoch)
        op = self._number()
        self._finds[op] = find
        texts = tuple(keys.of_rank(name, rank) for name in names for rank in range(keys.ranks))
        self.ports[0].submit(Job(op, "find", texts, deadline=deadline))
        return True

    def pending(self, request: StateRequest) -> bool:
        """Whether a find or load of this request may still spare it computing."""
        asked = (*self._finds.values(), *self._parked)
        return request.phase is Phase.LOADING or any(find.request is request for find in asked)

    def _found(self, done: Completion) -> None:
        find = self._finds.pop(done.op, None)
        if find is None:
            self.counters.late += 1
            return
        if not done.ok:
            self.counters.finds_failed += 1
            self._log.failure("find", done.error, done.reason)
            return
        ranks = len(self.ports)
        here = [all(done.present[i * ranks : (i + 1) * ranks]) for i in range(len(find.names))]
        find.names = [name for name, present in zip(find.names, here) if present]
        self.counters.finds_hit += bool(find.names)
        self._load(find)

    def _load(self, find: Find) -> None:
        """Begins to load the longest boundary that is left; the request just waits for admission if it cannot."""
        request, keys = find.request, self._keys
        known = self.life.requests.get(request.id) is request and request.phase is Phase.WAITING
        if not known or not self._serves() or keys is None or find.epoch != self.ledger.epoch:
            return
        find.names = [name for name in find.names if not self._avoids(name)]
        local = self.index.lookup(request.key, limit=find.limit).position
        if not find.names or find.attempts <= 0 or local >= find.names[0].position:
            return
        if self.ledger.gets_in_flight >= self.ledger.max_gets and self._clock() < find.deadline:
            self._parked.append(find)
            return
        name = find.names.pop(0)
        find.attempts -= 1
        deadline = self._clock() + self.settings.get_deadline_s
        lease = self.life.begin_load(request, name.position, deadline=deadline)
        if lease is None:
            return
        active = self._active.get(lease.op)
        if active is None:
            active = Active(lease, name, keys, None)
            self._begin(active)
        active.waiting.append(find)

    # Transfers

    def _begin(self, active: Active) -> None:
        self._active[active.lease.op] = active
        self._advance(active)

    def _advance(self, active: Active) -> None:
        """Hands a lease to the ranks once its fence has passed; ends it if it must not start."""
        lease = active.lease
        if lease.revoked:
            for rank in range(len(self.ports)):
                self._report(active, rank, False, ErrorClass.STALE)
        elif self.ledger.may_start(lease):
            active.queued = True
            slot, step = lease.handle.slot, lease.position
            job = Job(lease.op, lease.kind, (), slot, step, lease.after_step, lease.deadline)
            for rank, port in enumerate(self.ports):
                port.submit(replace(job, keys=(active.keys.of_rank(active.name, rank),)))

    def poll(self) -> None:
        """Takes in what has happened: completions, deadlines, fences. Call once a step, on the ledger's thread."""
        now = self._clock()
        for rank, port in enumerate(self.ports):
            for done in port.completions():
                self._take(rank, done, now)
        self._expire(now)
        for active in [active for active in self._active.values() if not active.queued]:
            self._advance(active)
        self._remove_bad(now)
        parked, self._parked = self._parked, []
        for find in parked:
            self._load(find)
        self._start_puts()
        self._follow_pool()

    def _take(self, rank: int, done: Completion, now: float) -> None:
        if done.transport:
            self._unreachable(now, f"{done.kind}: {done.reason}")
        elif done.ok or done.error is not ErrorClass.IO:
            self.breaker.success()
        if done.kind == "find":
            self._found(done)
        elif done.kind == "remove":
            self._removed(done, now)
        else:
            active = self._active.get(done.op)
            if active is not None:
                self._count(active, rank, done, now)
                self._report(active, rank, done.ok, done.error)
            else:
                # Past its deadline: the slot stays in quarantine, the memory may be given up again.
                self.counters.late += 1
                (self.ledger.put_end if done.kind == "put" else self.ledger.get_end)(done.op, rank=rank, ok=done.ok)

    def _count(self, active: Active, rank: int, done: Completion, now: float) -> None:
        if done.kind == "put":
            self.counters.put_bytes += done.payload_bytes
            self.counters.puts_present += done.ok and not done.stored
        else:
            self.counters.get_bytes += done.payload_bytes
        if not done.ok:
            active.reasons.append(f"rank {rank}: {done.reason}")
            if done.bad:
                active.bad = True
                when, key = now + self.settings.remove_after_s, active.keys.of_rank(active.name, rank)
                self._doomed.append(Doomed(when, rank, key, active.name.text))

    def _report(self, active: Active, rank: int, ok: bool, error: ErrorClass) -> None:
        """Tells the ledger of one rank's end; settles the lease when it was the last."""
        lease = active.lease
        if lease.kind == "put":
            outcome = self.ledger.put_end(lease.op, rank=rank, ok=ok, error=error)
        else:
            outcome = self.life.end_load(lease.op, rank=rank, ok=ok, error=error)
        if outcome is None:
            return
        del self._active[lease.op]
        if active.entry is not None:
            self._queued.discard(id(active.entry))
        if outcome.error is None:
            self._avoided.pop(active.name.text, None)
        else:
            self._log.failure(f"{lease.kind} of {active.name.text}", outcome.error, "; ".join(active.reasons))
        if lease.kind == "put":
            self.counters.puts_stored += outcome.ok
            self.counters.puts_failed += not outcome.ok
            if outcome.ok and active.entry is not None:
                active.entry.stored = True
            return
        if outcome.ok and isinstance(lease.entry, IndexEntry):
            lease.entry.stored = True
        self.counters.gets_ok += outcome.error is None
        self.counters.gets_failed += outcome.error is not None
        if outcome.error is not None:
            # A put that ends well clears this; of a bad payload's key none is tried before it is gone.
            seconds = math.inf if active.bad else self.settings.retry_after_s
            self._avoid(active.name.text, seconds, puts=active.bad)
            for find in active.waiting:
                self._load(find)

    def _expire(self, now: float) -> None:
        """Deadlines: jobs that have not started end at once, those that run cost their slot."""
        for op in [op for op, find in self._finds.items() if find.deadline <= now]:
            del self._finds[op]
            self.counters.finds_failed += 1
            reason = f"no answer within {self.settings.find_deadline_s} s"
            self._log.failure("find", ErrorClass.IO, reason)
            # One that stood behind other transfers was not asked: that says nothing about the store.
            if self.ports[0].withdraw(op):
                self.counters.withdrawn += 1
            else:
                self.ports[0].replace(op)
                self._unreachable(now, f"find: {reason}")
        for active in list(self._active.values()):
            deadline = active.lease.deadline
            if deadline is None or deadline > now:
                continue
            for rank, port in enumerate(self.ports):
                if not active.queued or port.withdraw(active.lease.op):
                    self.counters.withdrawn += 1
                    active.reasons.append(f"rank {rank}: not started before its deadline")
                    self._report(active, rank, False, ErrorClass.IO)
        for lease in self.life.expire(now):
            expired = self._active.pop(lease.op, None)
            if expired is None:
                continue
            self.counters.expired += 1
            self._unreachable(now, f"{lease.kind}: past its deadline")
            self._log.failure(
                f"{lease.kind} of {expired.name.text}", ErrorClass.STUCK, f"slot {lease.handle.slot} is in quarantine"
            )
            if expired.entry is not None:
                self._queued.discard(id(expired.entry))
            self._avoid(expired.name.text, self.settings.retry_after_s, puts=True)
            for port in self.ports:
                port.replace(lease.op)

    def settle(self, timeout_s: float) -> bool:
        """Polls until nothing is queued or in flight. False if that takes longer than `timeout_s`."""
        limit = self._clock() + timeout_s
        while self._backlog or self._active or self._finds or self._parked:
            if self._clock() >= limit:
                return False
            self.poll()
            time.sleep(0.0005)
        return True

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Takes nothing more, waits for what runs and closes the clients.

        StuckLeaseError if a call still hangs after `timeout_s`: the pool's memory must stay; call again later.
        """
        self._closed = True
        self._doomed.clear()
        while self._backlog:
            self._forget_put()
            self.counters.puts_lost += 1
        self.settle(timeout_s)
        for port in self.ports:
            port.close(timeout_s)
        self.poll()
