"""What the pool tells the outside: a snapshot, Prometheus metrics, nvtx ranges, and a dump for a broken invariant.

prometheus-client and nvtx are optional: without them `register_metrics` says so and `traced` costs one attribute read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from .errors import ConfigError
from .slots import Condition

if TYPE_CHECKING:
    from .index import CheckpointIndex
    from .ledger import Ledger
    from .ledger_base import LedgerBase

#: Slots that a snapshot lists one by one; the counts cover all of them.
LISTED = 64


@dataclass(frozen=True)
class SlotView:
    """One slot that is not free: who holds it and for how many steps."""

    slot: int
    generation: int
    condition: str
    position: int
    holders: tuple[str, ...]
    age_steps: int


@dataclass(frozen=True)
class Snapshot:
    """The pool at one moment. `slots` lists the oldest slots that are held, the rest are only counted."""

    mode: str
    epoch: int
    incarnation: int
    conditions: dict[str, int]
    evictable: int
    demand: int
    requests: int
    steps_in_flight: int
    puts: int
    gets: int
    stuck: int
    counters: dict[str, int]
    checkpoints: int = 0
    hit_tokens: int = 0
    misses: dict[str, int] = field(default_factory=dict)
    slots: tuple[SlotView, ...] = ()


def snapshot(ledger: Ledger, index: CheckpointIndex | None = None, *, listed: int = LISTED) -> Snapshot:
    """Counts of slots by condition, their holders and ages, transfers and counters. O(slots)."""
    conditions = {condition.value: 0 for condition in Condition}
    readers: dict[int, list[str]] = {}
    # Copied: a scrape runs on a thread of its own.
    for holder in list(ledger.holders.values()):
        if holder.rec is not None:
            readers.setdefault(holder.rec.slot, []).append(f"request {holder.id}")
    for lease in (*ledger.leases.values(), *ledger.stuck.values()):
        readers.setdefault(lease.handle.slot, []).append(f"{lease.kind} {lease.op}")
    held = []
    for rec in ledger.records[ledger.reserved :]:
        condition = ledger.condition(rec.slot)
        conditions[condition.value] += 1
        if condition is not Condition.FREE:
            who = readers.get(rec.slot, []) + (["cache"] if rec.entry is not None else [])
            age = ledger.submitted - rec.since
            held.append(SlotView(rec.slot, rec.gen, condition.value, rec.position, tuple(who), age))
    held.sort(key=lambda view: (-view.age_steps, view.slot))
    return Snapshot(
        mode=ledger.mode,
        epoch=ledger.epoch,
        incarnation=ledger.incarnation,
        conditions=conditions,
        evictable=len(ledger.evictable),
        demand=ledger.demand,
        requests=len(ledger.holders),
        steps_in_flight=ledger.submitted - ledger.done,
        puts=ledger.puts_in_flight,
        gets=ledger.gets_in_flight,
        stuck=len(ledger.stuck),
        counters=asdict(ledger.counters),
        checkpoints=0 if index is None else index.size,
        hit_tokens=0 if index is None else index.hit_tokens,
        misses={} if index is None else dict(index.misses),
        slots=tuple(held[:listed]),
    )


def register_metrics(
    ledger: Ledger, index: CheckpointIndex | None = None, *, registry: Any = None, prefix: str = "compact_state"
) -> Any:
    """A Prometheus collector that reads the pool when it is scraped. ConfigError if prometheus-client is missing."""
    try:
        from prometheus_client import REGISTRY
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    except ImportError:
        raise ConfigError("prometheus_client", "not installed", "pip install prometheus-client") from None

    class PoolCollector:
        def collect(self) -> Iterator[Any]:
            yield from _families(snapshot(ledger, index, listed=0), prefix, GaugeMetricFamily, CounterMetricFamily)

    collector = PoolCollector()
    (REGISTRY if registry is None else registry).register(collector)
    return collector


def _families(view: Snapshot, prefix: str, gauge: Any, counter: Any) -> Iterator[Any]:
    slots = gauge(f"{prefix}_slots", "Slots by condition", labels=["condition"])
    for condition, count in view.conditions.items():
        slots.add_metric([condition], count)
    yield slots
    for name, text, value in (
        ("evictable_slots", "Checkpoints that nothing else holds", view.evictable),
        ("demand_slots", "Slots that admitted requests may still need for one step each", view.demand),
        ("requests", "Admitted requests", view.requests),
        ("steps_in_flight", "Steps submitted and not done", view.steps_in_flight),
        ("checkpoints", "Checkpoints in the index", view.checkpoints),
        ("weights_epoch", "Weight updates since start", view.epoch),
    ):
        yield gauge(f"{prefix}_{name}", text, value=value)
    transfers = gauge(f"{prefix}_transfers", "Transfers in flight", labels=["kind"])
    for kind, count in (("put", view.puts), ("get", view.gets), ("stuck", view.stuck)):
        transfers.add_metric([kind], count)
    yield transfers
    errors = counter(f"{prefix}_errors", "Errors handled, by class", labels=["class"])
    events = counter(f"{prefix}_events", "Events of the ledger", labels=["event"])
    for name, count in view.counters.items():
        if name.startswith("e_"):
            errors.add_metric(["E_" + name[2:].upper()], count)
        else:
            events.add_metric([name], count)
    yield errors
    yield events
    misses = counter(f"{prefix}_lookup_misses", "Lookups without a hit, by reason", labels=["reason"])
    for reason, count in view.misses.items():
        misses.add_metric([reason], count)
    yield misses
    yield counter(f"{prefix}_hit_tokens", "Tokens that hits made unnecessary to compute", value=view.hit_tokens)


@contextmanager
def _plain(_name: str) -> Iterator[None]:
    yield


def traced(name: str) -> Any:
    """A context manager: an nvtx range around a pool step where nvtx is installed, nothing otherwise."""
    return _RANGE(name)


def _range_factory() -> Any:
    try:
        import nvtx
    except ImportError:
        return _plain
    return lambda name: nvtx.annotate(name, domain="compact_state.pool")


_RANGE = _range_factory()


def dump_text(ledger: LedgerBase) -> str:
    """Every slot that is not free, and the last events, one a line."""
    lines = [
        f"mode={ledger.mode} incarnation={ledger.incarnation} epoch={ledger.epoch} submitted={ledger.submitted} "
        f"launched={ledger.launched} done={ledger.done} free={len(ledger.free)} evictable={len(ledger.evictable)} "
        f"waiting={ledger.waiting} demand={ledger.demand}"
    ]
    for rec in ledger.records:
        condition = ledger.condition(rec.slot)
        if condition is not Condition.FREE:
            owner = None if rec.owner is None else rec.owner.id
            lines.append(
                f"slot={rec.slot} gen={rec.gen} {condition.value} sealed={rec.sealed} epoch={rec.epoch} "
                f"position={rec.position} owner={owner!r} readers={rec.readers} cached={rec.entry is not None} "
                f"write_step={rec.write_step} read_step={rec.read_step} puts={rec.puts} get={rec.get_op}"
            )
    lines += [f"step={step} {event} slot={slot} position={position}" for step, event, slot, position in ledger.log]
    return "\n".join(lines)
