"""The ledger's base: its state and the bookkeeping of tokens. Pure Python, O(1) per operation, one thread.

ledger_steps.py, ledger_cache.py and leases.py add the operations, ledger.py the pool's modes. Two quantities make
decode free of deadlock:

    demand      slots that admitted requests may still need to make one step each
    reachable   slots that are free, evictable, or held by nothing but steps already queued

Every operation that lowers `reachable` or raises `demand` on a request's behalf is refused when it would leave
`reachable < demand`; steps always end, so each admitted request can always be stepped after a wait.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import CapacityError, ConfigError, InvariantError, PoolClosedError, check_int
from .handles import GENERATION_MASK, INCARNATION_MASK, MAX_SLOTS, SlotHandle
from .slots import Condition, Holder, SlotRecord, condition_of

if TYPE_CHECKING:
    from .leases import IoLease


@dataclass(slots=True)
class Counters:
    """Events since start. Names of the E_* classes count errors that were handled, not raised."""

    steps: int = 0
    rows: int = 0
    rows_moved: int = 0
    allocs: int = 0
    frees: int = 0
    publishes: int = 0
    publishes_refused: int = 0
    exports: int = 0
    exports_skipped: int = 0
    hits: int = 0
    evictions: int = 0
    uncached: int = 0
    drops: int = 0
    puts: int = 0
    puts_ok: int = 0
    gets: int = 0
    gets_ok: int = 0
    e_capacity: int = 0
    e_stale: int = 0
    e_miss: int = 0
    e_io: int = 0
    e_data: int = 0
    e_rank: int = 0
    e_stuck: int = 0
    e_invariant: int = 0


class LedgerBase:
    """Slots, tokens, steps and fences. See `Ledger`."""

    def __init__(
        self,
        num_slots: int,
        *,
        reserved: int = 0,
        in_place: bool = True,
        policy: str = "late",
        ranks: int = 1,
        fence_ranks: int | None = None,
        max_publishes_per_step: int | None = None,
        max_puts: int = 8,
        max_gets: int = 8,
    ) -> None:
        fence_ranks = ranks if fence_ranks is None else fence_ranks
        check_int("num_slots", num_slots, 1, MAX_SLOTS)
        check_int("reserved", reserved, 0, num_slots - 1)
        check_int("ranks", ranks, 1)
        check_int("fence_ranks", fence_ranks, 1)
        check_int("max_publishes_per_step", max_publishes_per_step or 0, 0)
        check_int("max_puts", max_puts, 0)
        check_int("max_gets", max_gets, 0)
        if policy not in ("late", "early"):
            raise ConfigError("policy", policy, "late, early")
        self.num_slots, self.reserved, self.ranks = num_slots, reserved, ranks
        self.in_place, self.late = in_place, policy == "late"
        self.max_publishes_per_step = max_publishes_per_step
        self.max_puts, self.max_gets = max_puts, max_gets
        self.records = [SlotRecord(slot) for slot in range(num_slots)]
        # Last in, first out: a slot that is reused too early is noticed soonest.
        self.free = [self.records[slot] for slot in range(num_slots - 1, reserved - 1, -1)]
        #: Cached slots with no other token, least recently used first.
        self.evictable: OrderedDict[int, SlotRecord] = OrderedDict()
        self.holders: dict[Hashable, Holder] = {}
        self.counters = Counters()
        self.log: deque[tuple[int, str, int, int]] = deque(maxlen=512)
        self.epoch = 0
        self.incarnation = 0
        self.mode = "run"
        self.submitted = 0
        self.launched = 0
        self.done = 0
        self.release_step = 0
        self.demand = 0
        self.waiting = 0
        self.quarantined = 0
        #: Called with (entry, reason) whenever a slot loses its C; the index forgets the entry there.
        self.on_uncache: Callable[[object, str], None] | None = None
        #: Called before each eviction; may move another slot to the front of `evictable`.
        self.on_evict: Callable[[], None] | None = None
        #: Called with the slot number at each free, before it can be granted again (poison).
        self.on_free: Callable[[int], None] | None = None
        self._base_charge = 0 if in_place else 1
        self._planned = 0
        self._plan: list[SlotRecord] = []
        self._publishes = 0
        self._draining: dict[int, list[SlotRecord]] = {}
        self._products: dict[int, list[SlotRecord]] = {}
        self._rank_done = [0] * fence_ranks
        self._last_rows: tuple[Sequence[Holder], Sequence[int]] = ((), ())
        #: Transfers in flight by operation; those past their deadline stand in `stuck` until they report.
        self.leases: dict[int, IoLease] = {}
        self.stuck: dict[int, IoLease] = {}
        self.puts_in_flight = 0
        self.gets_in_flight = 0
        self._all_ranks = (1 << ranks) - 1
        self._next_op = 1

    # Reading the ledger

    @property
    def available(self) -> int:
        """Slots that can be granted now: free or evictable."""
        return len(self.free) + len(self.evictable)

    @property
    def reachable(self) -> int:
        """Slots that can be granted now or after steps already queued have passed."""
        return len(self.free) + len(self.evictable) + self.waiting

    def condition(self, slot: int) -> Condition:
        """The derived condition of a slot."""
        return condition_of(self.records[slot], self.release_step, self.submitted)

    def handle(self, rec: SlotRecord) -> SlotHandle:
        """The handle of the slot's present life."""
        handle = rec.handle
        if handle is None:
            # The class called as such goes through a Python frame: half of what a handle costs.
            fields = (rec.slot, rec.gen, self.incarnation & INCARNATION_MASK)
            handle = rec.handle = tuple.__new__(SlotHandle, fields)
        return handle

    def is_current(self, handle: SlotHandle) -> bool:
        """Whether the handle names the present life of its slot."""
        return (
            0 <= handle.slot < self.num_slots
            and self.records[handle.slot].gen == handle.generation
            and handle.incarnation == self.incarnation & INCARNATION_MASK
        )

    def granted(self, handle: SlotHandle) -> SlotRecord:
        """The record for a grant. A stale handle here is a bug of the caller: E_INVARIANT."""
        slot = handle[0]
        if 0 <= slot < self.num_slots:
            rec = self.records[slot]
            if rec.handle is handle or (rec.gen == handle[1] and handle[2] == self.incarnation & INCARNATION_MASK):
                return rec
        raise self.broken(f"grant with stale handle {handle}")

    def broken(self, message: str) -> InvariantError:
        """An InvariantError with the ledger's dump, counted. The caller raises it."""
        self.counters.e_invariant += 1
        return InvariantError(message, self.dump())

    def dump(self) -> str:
        """Every slot that is not free and the last events, as text."""
        from .observe import dump_text

        return dump_text(self)

    # Tokens

    def _charge(self, holder: Holder) -> int:
        rec = holder.rec
        return self._base_charge + (0 if rec is not None and rec.owner is holder else 1)

    def _release_hold(self, holder: Holder, rec: SlotRecord) -> None:
        if rec.owner is holder:
            rec.owner = None
        elif rec.readers > 0:
            rec.readers -= 1
        else:
            raise self.broken(f"request {holder.id!r} releases slot {rec.slot}, which it does not hold")

    def _starves(self, rec: SlotRecord) -> bool:
        """Whether pinning the slot would leave admitted requests without one that they may need."""
        if len(self.free) + len(self.evictable) + self.waiting > self.demand:
            return False
        return rec.waits_for != 0 or rec.slot in self.evictable

    def _pin(self, rec: SlotRecord) -> None:
        if rec.waits_for:
            rec.waits_for = 0
            self.waiting -= 1
        else:
            self.evictable.pop(rec.slot, None)

    def _settle(self, rec: SlotRecord) -> None:
        """Puts a slot that may have lost its last token where it belongs: waiting, evictable or free."""
        if rec.owner is not None or rec.readers or rec.puts or rec.get_op or rec.quarantined:
            return
        last = rec.write_step if rec.write_step > rec.read_step else rec.read_step
        if last > self.release_step:
            if not rec.waits_for:
                self.waiting += 1
            if rec.waits_for != last:
                rec.waits_for = last
                self._draining.setdefault(last, []).append(rec)
        elif rec.entry is not None:
            self.evictable[rec.slot] = rec
        else:
            rec.gen = (rec.gen + 1) & GENERATION_MASK
            rec.handle = None
            rec.sealed = False
            rec.position = 0
            self.counters.frees += 1
            if self.on_free is not None:
                self.on_free(rec.slot)
            self.free.append(rec)

    def _reclaim(self, count: int) -> None:
        """Evicts until `count` slots are free; CapacityError before anything is changed."""
        if len(self.free) + len(self.evictable) < count:
            self.counters.e_capacity += 1
            raise CapacityError(
                f"{count} slot(s) needed, {self.available} available now, {self.waiting} after the queued steps"
            )
        while len(self.free) < count:
            self.evict_oldest()

    def _closed(self) -> PoolClosedError:
        return PoolClosedError(f"the pool is in mode {self.mode!r}")

    def _not_open(self, step: int) -> InvariantError:
        return self.broken(f"step {step} is not the open one ({self._planned})")

    def evict_oldest(self) -> bool:
        """Evicts the least recently used checkpoint that nothing else holds, or `on_evict`'s choice. False if there is none."""
        if not self.evictable:
            return False
        if self.on_evict is not None:
            self.on_evict()
        _, rec = self.evictable.popitem(last=False)
        self._uncache(rec, "evicted")
        self.counters.evictions += 1
        return True

    def _uncache(self, rec: SlotRecord, reason: str) -> None:
        entry, rec.entry = rec.entry, None
        self.evictable.pop(rec.slot, None)
        self.counters.uncached += 1
        self.log.append((self.submitted, reason, rec.slot, rec.position))
        try:
            if self.on_uncache is not None and entry is not None:
                self.on_uncache(entry, reason)
        finally:
            self._settle(rec)
