"""What the two halves of the store connector say to each other, its settings and its counters.

The half at the ledger decides (store.py); the half at the memory moves bytes (store_transfer.py), one for each rank. In
one process they meet directly; across processes `Job` and `Completion` are the messages, both picklable.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple, Protocol

from .errors import ConfigError, ErrorClass, check_int


@dataclass(frozen=True)
class StoreSettings:
    """Limits of the store connector. Times are seconds.

    Attributes:
        workers: transfer threads per rank.
        put_deadline_s, get_deadline_s: after these a transfer that still runs puts its slot into quarantine.
        find_deadline_s: how long a request waits to hear what the store holds.
        breaker_failures: transport failures in a row that open the breaker.
        breaker_cooldown_s: time between two probes of a store whose breaker is open.
        max_wedged: threads per rank that may hang in a call and be replaced.
        backlog: checkpoints that wait for a put; more are dropped.
        attempts: boundaries that a request tries to load before it recomputes.
        max_candidates: boundaries a request asks for at once.
        retry_after_s: how long a state whose load failed is not asked for again.
        remove_after_s: how long after a bad payload was read its key is removed: reading grants a lease.
    """

    workers: int = 4
    put_deadline_s: float = 10.0
    get_deadline_s: float = 5.0
    find_deadline_s: float = 1.0
    breaker_failures: int = 3
    breaker_cooldown_s: float = 5.0
    max_wedged: int = 4
    backlog: int = 64
    attempts: int = 2
    max_candidates: int = 64
    retry_after_s: float = 30.0
    remove_after_s: float = 12.0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(item.default, int):
                check_int(item.name, value, 0 if item.name in ("max_wedged", "backlog") else 1)
            elif not isinstance(value, (int, float)) or not value >= 0:
                raise ConfigError(item.name, repr(value), "0 or more seconds")


@dataclass(frozen=True)
class Job:
    """One rank's part of an operation. `op` is the lease's number for put and get, negative for the others.

    `keys` has one key for put, get and remove. `after_step`: the slot may be touched once that step's fence has passed.
    """

    op: int
    kind: str
    keys: tuple[str, ...]
    slot: int = -1
    step: int = 0
    after_step: int = 0
    deadline: float | None = None


class Completion(NamedTuple):
    """The terminal report of one rank's part. `present[i]`: whether key i of a find is there.

    `transport`: the failure says something about the connection, not about the state. `stored`: False for a put that
    found its key already there. `bad`: the stored payload is wrong and its key ought to go.
    """

    op: int
    kind: str
    ok: bool
    error: ErrorClass = ErrorClass.IO
    reason: str = ""
    transport: bool = False
    stored: bool = False
    bad: bool = False
    payload_bytes: int = 0
    present: tuple[bool, ...] = ()


class RankPort(Protocol):
    """The transfer half of one rank, as the ledger's half sees it. No method blocks on the store."""

    @property
    def layout_digest(self) -> str: ...

    def submit(self, job: Job) -> None:
        """Queues a job; exactly one completion follows."""

    def withdraw(self, op: int) -> bool:
        """True if the job had not started and never will: no completion follows. False: its completion will come."""

    def replace(self, op: int) -> None:
        """The job's thread hangs: another may take its place."""

    def completions(self) -> Sequence[Completion]:
        """Terminal reports since the last call."""

    def attach(self) -> None:
        """The pool has memory: registers it with the transport. StateIOError if that refuses it."""

    def detach(self) -> None:
        """The pool gives its memory up: unregisters it. Nothing may be in flight."""

    def close(self, timeout_s: float) -> None:
        """Ends the threads and the client. StuckLeaseError if a call still hangs: the memory must stay."""


@dataclass
class StoreCounters:
    """Events of the store connector since start. Lease outcomes are in the ledger's counters too."""

    puts_stored: int = 0
    puts_present: int = 0
    puts_failed: int = 0
    puts_refused: int = 0
    puts_lost: int = 0
    put_bytes: int = 0
    gets_ok: int = 0
    gets_failed: int = 0
    get_bytes: int = 0
    finds: int = 0
    finds_hit: int = 0
    finds_failed: int = 0
    finds_refused: int = 0
    expired: int = 0
    withdrawn: int = 0
    late: int = 0
    keys_removed: int = 0
    breaker_opened: int = 0
    errors: dict[str, int] = field(default_factory=lambda: {error.value: 0 for error in ErrorClass})


class Breaker:
    """Opens after `failures` in a row; then one probe every `cooldown_s` until one succeeds. Thread-safe."""

    def __init__(self, failures: int, cooldown_s: float) -> None:
        self.limit, self.cooldown_s = failures, cooldown_s
        self.opened = 0
        self._row = 0
        self._probe_at = 0.0
        self._lock = threading.Lock()

    @property
    def open(self) -> bool:
        """Whether operations are refused, probes aside."""
        return self._row >= self.limit

    def waits(self, now: float) -> bool:
        """Whether nothing may go now. Unlike `allows` this takes no probe."""
        return self.open and now < self._probe_at

    def allows(self, now: float) -> bool:
        """Whether an operation may go: always while closed, once a cooldown while open."""
        if not self.open:
            return True
        with self._lock:
            if now < self._probe_at:
                return False
            self._probe_at = now + self.cooldown_s
            return True

    def success(self) -> None:
        """The store has answered."""
        self._row = 0

    def failure(self, now: float) -> bool:
        """A transport failure. True if it opens the breaker."""
        with self._lock:
            self._row += 1
            self._probe_at = now + self.cooldown_s
            opens = self._row == self.limit
            self.opened += opens
            return opens
