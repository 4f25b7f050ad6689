"""The base of the store connector: its state, the names it does not ask for, and how it follows the pool's modes."""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from .errors import ConfigError, ErrorClass, StateIOError
from .index import IndexEntry
from .leases import IoLease
from .lifecycle import Lifecycle
from .requests import StateRequest
from .store_keys import StateKeys, StateName, StoreIdentity
from .store_report import StoreLog
from .store_types import Breaker, Completion, Job, RankPort, StoreCounters, StoreSettings

logger = logging.getLogger("compact_state.store")
#: Names remembered as not worth asking for.
MAX_AVOIDED = 4096
#: Tries to remove a bad key before it is left to its next reader.
MAX_REMOVALS = 8


@dataclass
class Find:
    """A request that waits to hear what the store holds; `names` are the boundaries still to try, longest first."""

    request: StateRequest
    names: list[StateName]
    limit: int | None
    deadline: float
    attempts: int
    epoch: int


@dataclass
class Active:
    """A lease of this store.

    `queued`: its jobs were submitted. `bad`: a stored payload is wrong. `waiting`: finds that go on if the load fails.
    """

    lease: IoLease
    name: StateName
    keys: StateKeys
    entry: IndexEntry | None
    queued: bool = False
    bad: bool = False
    waiting: list[Find] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


class Doomed(NamedTuple):
    """A key with a bad payload, to be removed by its rank at a time. `text`: the name it belongs to."""

    when: float
    rank: int
    key: str
    text: str
    tries: int = 1


class StoreBase:
    """See `MooncakeStateStore`."""

    def __init__(
        self,
        life: Lifecycle,
        identity: StoreIdentity,
        ports: Sequence[RankPort],
        settings: StoreSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if len(ports) != life.ledger.ranks:
            raise ConfigError("ports", len(ports), f"one per rank of the ledger ({life.ledger.ranks})")
        self.life, self.ledger, self.index = life, life.ledger, life.index
        self.ports = list(ports)
        self.settings = settings or StoreSettings()
        self.counters = StoreCounters()
        self.breaker = Breaker(self.settings.breaker_failures, self.settings.breaker_cooldown_s)
        self._keys: StateKeys | None = StateKeys(identity, [port.layout_digest for port in self.ports])
        self._epoch = self.ledger.epoch
        self._incarnation = self.ledger.incarnation
        self._attach_at = -math.inf
        self._clock = clock
        self._log = StoreLog(logger, self.counters, clock)
        self._backlog: deque[IndexEntry] = deque()
        self._queued: set[int] = set()
        self._active: dict[int, Active] = {}
        self._finds: dict[int, Find] = {}
        #: Finds with an answer whose load waits for another to end.
        self._parked: list[Find] = []
        self._next = -1
        #: Names not asked for before a time, since their load failed or their key is to be removed; and whether they are
        #: not put either.
        self._avoided: OrderedDict[str, tuple[float, bool]] = OrderedDict()
        self._doomed: deque[Doomed] = deque()
        self._removing: dict[int, Doomed] = {}
        self._closed = False

    # Names that are not asked for

    def _avoid(self, text: str, seconds: float, *, puts: bool) -> None:
        self._avoided[text] = (self._clock() + seconds, puts)
        self._avoided.move_to_end(text)
        while len(self._avoided) > MAX_AVOIDED:
            self._avoided.popitem(last=False)

    def _avoids(self, name: StateName, *, put: bool = False) -> bool:
        until, puts = self._avoided.get(name.text, (-math.inf, False))
        if until <= self._clock():
            self._avoided.pop(name.text, None)
            return False
        return puts or not put

    def _remove_bad(self, now: float) -> None:
        while self._doomed and self._doomed[0].when <= now:
            doomed = self._doomed.popleft()
            op = self._number()
            self._removing[op] = doomed
            self.ports[doomed.rank].submit(Job(op, "remove", (doomed.key,)))

    def _removed(self, done: Completion, now: float) -> None:
        doomed = self._removing.pop(done.op)
        if not done.ok and doomed.tries < MAX_REMOVALS:
            # Under lease, mostly: reading it granted one, and another reader may have come.
            self._doomed.append(doomed._replace(when=now + self.settings.remove_after_s, tries=doomed.tries + 1))
            return
        self.counters.keys_removed += done.ok
        self._avoided.pop(doomed.text, None)
        if not done.ok:
            self._log.failure(f"removal of {doomed.text}", done.error, done.reason)

    def _unreachable(self, now: float, reason: str) -> None:
        """The store gave no answer."""
        if self.breaker.failure(now):
            self.counters.breaker_opened += 1
            self._log.failure("breaker", ErrorClass.IO, f"opens after {reason}")

    # The pool's modes

    def _serves(self) -> bool:
        return (
            not self._closed
            and self._keys is not None
            and self._epoch == self.ledger.epoch
            and self.ledger.mode == "run"
            and self._incarnation == self.ledger.incarnation
        )

    def _follow_pool(self) -> None:
        """Memory is unregistered while the pool sleeps and registered at its new place after it woke."""
        if self._closed:
            return
        if self.ledger.mode == "asleep" or self.ledger.incarnation != self._incarnation:
            for port in self.ports:
                port.detach()
        now = self._clock()
        if self.ledger.mode != "asleep" and self.ledger.incarnation != self._incarnation and now >= self._attach_at:
            try:
                for port in self.ports:
                    port.attach()
            except StateIOError as error:
                self._attach_at = now + self.settings.breaker_cooldown_s
                self._log.failure("registration after the wake", error.error_class, str(error))
            else:
                self._incarnation = self.ledger.incarnation

    def new_weights(self, weights: str | None) -> None:
        """After `life.new_weights()`: the new weights' immutable identity. Until it comes nothing is stored or found.

        None: there is none, the store stays closed to states of these weights. ConfigError before `life.new_weights()`.
        """
        if weights is not None and self._epoch == self.ledger.epoch:
            raise ConfigError("weights", weights, "an identity after life.new_weights(), which empties the local index")
        if weights is not None and self._keys is not None:
            self._keys = StateKeys(replace(self._keys.identity, weights=weights), self._keys.layouts)
            self._epoch = self.ledger.epoch

    def _number(self) -> int:
        self._next -= 1
        return self._next
