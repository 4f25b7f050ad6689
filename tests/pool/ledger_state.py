"""What the world around the ledger consists of (memory, queue, requests, index, store, transfers), how it is saved and put
back, and what tells two worlds apart. Contents are digests of what a slot ought to hold.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from operator import attrgetter
from typing import Any

GARBAGE = ("garbage",)
Value = tuple[Any, ...]


class Violation(AssertionError):
    """A property of the pool does not hold."""


class Op:
    """What one queued step does on the device."""

    __slots__ = ("exports", "failed", "rows", "step")

    def __init__(self, step: int, rows: list[tuple[int, int, Value | None, Value]], exports: list[tuple[int, Value]]):
        self.step, self.rows, self.exports, self.failed = step, rows, exports, False


class Transfer:
    """A put or get on its way. `halves`: payload halves that have moved."""

    __slots__ = ("halves", "key", "lease", "payload")

    def __init__(self, lease: Any, key: Value, payload: list[Value]):
        self.lease, self.key, self.payload, self.halves = lease, key, payload, 0


class Request:
    """A request of the world: its holder and the value that its state ought to have."""

    __slots__ = ("holder", "value")

    def __init__(self, holder: Any):
        self.holder = holder
        self.value: Value | None = None


class Entry:
    """An index entry: the value that its slot ought to have, and its handle."""

    __slots__ = ("handle", "key")

    def __init__(self, key: Value):
        self.key = key
        self.handle: Any = None


Saved = tuple[Any, ...]


class Fields(dict[type, tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]]):
    """Slot names of a class, and a function that reads them all. Mutants bring classes of their own."""

    def __missing__(self, cls: type) -> tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]:
        names = tuple(cls.__slots__)  # type: ignore[attr-defined]
        self[cls] = (names, attrgetter(*names))
        return self[cls]


FIELDS = Fields()
#: Attributes that are set once.
FIXED = {"records", "log", "counters"}


def copied(value: Any) -> Any:
    """A dict, or a list, with its lists: as deep as the world and the ledger change them."""
    if type(value) is list:
        return [inner.copy() if type(inner) is list else inner for inner in value]
    if value and type(next(iter(value.values()))) is list:
        return {key: inner.copy() for key, inner in value.items()}
    return value.copy()


def split(attributes: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
    """Attributes that are values, and copies of those that are containers."""
    values, containers = {}, []
    for name, value in attributes.items():
        if isinstance(value, (list, dict)):
            if name not in FIXED:
                containers.append((name, copied(value)))
        else:
            values[name] = value
    return values, containers


class WorldState:
    """`api`: modules of the pool under test (the real one or a mutant)."""

    def __init__(
        self,
        api: Any,
        *,
        slots: int = 3,
        requests: int = 2,
        policy: str = "late",
        in_place: bool = True,
        ranks: int = 1,
        max_position: int = 3,
        max_queue: int = 2,
        max_epoch: int = 1,
        shared: int = 1,
    ) -> None:
        self.api, self.shared = api.__name__, shared
        self.ledger = api.ledger.Ledger(
            slots, policy=policy, in_place=in_place, ranks=ranks, max_puts=1, max_gets=1, max_publishes_per_step=2
        )
        self.ledger.log = deque(maxlen=0)
        self.ledger.on_uncache = self.uncached
        if policy == "late":
            self.ledger.on_free = self.poison
        self.names, self.max_position, self.max_queue, self.max_epoch = requests, max_position, max_queue, max_epoch
        self.memory: list[list[Value]] = [[GARBAGE, GARBAGE] for _ in range(slots)]
        self.queue: list[Op] = []
        self.executed = 0
        self.reported = [0] * ranks
        self.running: dict[int, Request] = {}
        self.index: dict[Value, Entry] = {}
        self.store: dict[Value, Value] = {}
        self.put: Transfer | None = None
        self.get: Transfer | None = None
        self.stuck: list[Transfer] = []
        self.failures = 0
        self.sleeps = 0
        self.reasons = 0

    @property
    def errors(self) -> Any:
        return sys.modules[self.api + ".errors"]

    def save(self) -> Saved:
        """Everything that `do` can change, as plain tuples. `load` puts this very world back there."""
        ledger = self.ledger
        parts: list[Any] = [*ledger.records, *ledger.leases.values(), *ledger.stuck.values()]
        parts += [t for t in (self.put, self.get, *self.stuck) if t is not None]
        parts += self.queue
        parts += self.index.values()
        for request in self.running.values():
            parts += (request, request.holder)
        slots = [(part, FIELDS[type(part)][1](part)) for part in parts]
        payloads = [(part, part.payload.copy()) for part in parts if type(part) is Transfer]
        return slots, payloads, *split(vars(ledger)), *split(vars(self))

    def load(self, saved: Saved) -> None:
        slots, payloads, ledger, ledger_containers, world, world_containers = saved
        for part, values in slots:
            for name, value in zip(FIELDS[type(part)][0], values):
                setattr(part, name, value)
        for transfer, payload in payloads:
            transfer.payload = payload.copy()
        vars(self.ledger).update(ledger)
        vars(self).update(world)
        for target, containers in ((self.ledger, ledger_containers), (self, world_containers)):
            for name, value in containers:
                setattr(target, name, copied(value))

    # Values

    def value(self, stream: int, position: int, epoch: int) -> Value:
        """The state after `position` tokens of a stream; streams are equal in their first `shared` tokens."""
        return ("state", epoch, position, stream if position > self.shared else 0)

    def grown(self, value: Value | None, stream: int, count: int) -> Value:
        epoch = self.ledger.epoch
        if value is None:
            return self.value(stream, count, epoch)
        if value[0] != "state" or value[1] != epoch:
            return ("mixed", epoch, value[2] + count, stream)
        return self.value(stream, value[2] + count, epoch)

    # Callbacks of the ledger

    def uncached(self, entry: Entry, reason: str) -> None:
        if reason not in ("evicted", "epoch", "sleep", "failed", "stuck", "duplicate"):
            raise Violation(f"I14 a checkpoint went for no recorded reason: {reason}")
        self.reasons += 1
        if self.index.get(entry.key) is entry:
            del self.index[entry.key]

    def poison(self, slot: int) -> None:
        self.memory[slot] = [GARBAGE, GARBAGE]

    # Look-ups

    def movable(self, transfer: Transfer) -> bool:
        """Whether the transfer's thread goes on: it waits for the event of `after_step` on the device."""
        lease = transfer.lease
        return transfer.halves < 2 and (
            transfer.halves > 0 or (lease.after_step <= self.executed and not lease.revoked)
        )

    def position(self, name: int) -> int:
        value = self.running[name].value
        return 0 if value is None else value[2]

    def longest(self, name: int) -> Entry | None:
        best = None
        for position in range(1, self.max_position):
            best = self.index.get(self.value(name, position, self.ledger.epoch), best)
        return best

    def state(self) -> tuple[Any, ...]:
        """What tells this world from another one; step numbers count from the last one done."""
        ledger, done = self.ledger, self.ledger.done

        def since(step: int) -> int:
            return max(step - done, 0)

        slots = tuple(
            (
                rec.sealed,
                rec.epoch,
                rec.position,
                None if rec.owner is None else rec.owner.id,
                rec.readers,
                None if rec.entry is None else rec.entry.key,
                since(rec.write_step),
                since(rec.read_step),
                rec.puts,
                rec.get_op > 0,
                rec.quarantined,
                since(rec.waits_for),
            )
            for rec in ledger.records
        )
        transfers = tuple(
            None
            if t is None
            else (
                t.key,
                t.lease.kind,
                t.lease.handle.slot,
                t.halves,
                tuple(t.payload),
                t.lease.pending,
                t.lease.failed,
                since(t.lease.after_step),
                t.lease.cancelled,
                t.lease.revoked,
                t.lease.epoch,
            )
            for t in (self.put, self.get, *self.stuck)
        )
        return (
            slots,
            tuple(rec.slot for rec in ledger.free),
            tuple(ledger.evictable),
            tuple(
                (name, r.value, None if r.holder.rec is None else r.holder.rec.slot, r.holder.tainted)
                for name, r in sorted(self.running.items())
            ),
            tuple((op.step - done, tuple(op.rows), tuple(op.exports), op.failed) for op in self.queue),
            since(self.executed),
            tuple(since(seen) for seen in self.reported),
            ledger.submitted - done,
            tuple(map(tuple, self.memory)),
            tuple(sorted(self.store)),
            transfers,
            ledger.epoch,
            ledger._publishes,
            self.failures,
            self.sleeps,
        )
