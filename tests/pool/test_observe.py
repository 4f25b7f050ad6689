"""What the pool shows: snapshot, metrics, dump."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from compact_state.pool import (
    CheckpointIndex,
    ConfigError,
    InvariantError,
    Ledger,
    Lifecycle,
    PrefixKey,
    StepRow,
    observe,
)
from compact_state.pool.observe import register_metrics
from tests.pool.store_fake import FakeBackend
from tests.pool.store_rig import Rig


def busy() -> Lifecycle:
    """One request running, one queued step, one checkpoint being stored, one load that got stuck, one slot owned."""
    life = Lifecycle(ledger := Ledger(8, reserved=1), CheckpointIndex(ledger))
    first = life.add("first", PrefixKey(range(20)))
    life.admit(first)
    plan = life.plan([StepRow(first, 8, positions=[4])])
    life.launched(plan.step)
    life.poll()
    life.begin_put(plan.entries[0])
    waiting = life.add("waiting", PrefixKey(range(50, 70)))
    life.begin_load(waiting, 8, deadline=1.0)
    life.expire(2.0)
    second = life.add("second", PrefixKey([9, 9, 9]))
    life.admit(second)
    plan = life.plan([StepRow(second, 2)])
    return life


def test_snapshot_counts_every_slot_and_names_holders_and_ages() -> None:
    life = busy()
    view = life.snapshot()
    assert sum(view.conditions.values()) == 7
    assert view.conditions["quarantined"] == 1
    assert view.conditions["sealed"] == 1
    assert view.conditions["owned"] == 1
    assert view.conditions["filling"] == 1
    assert (view.puts, view.gets, view.stuck, view.steps_in_flight, view.checkpoints) == (1, 0, 1, 1, 1)
    holders = {holder: slot for slot in view.slots for holder in slot.holders}
    assert holders["request first"].condition == "owned"
    assert holders["request first"].age_steps == 1
    assert holders["cache"] is holders["put 1"]
    assert holders["get 2"].condition == "quarantined"
    assert view.counters["e_stuck"] == 1
    assert view.misses["no_common_prefix"] == 1


def test_metrics_are_those_of_the_snapshot() -> None:
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()
    life = busy()
    register_metrics(life.ledger, life.index, registry=registry)
    value = registry.get_sample_value
    assert value("compact_state_slots", {"condition": "quarantined"}) == 1
    assert value("compact_state_errors_total", {"class": "E_STUCK"}) == 1
    assert value("compact_state_events_total", {"event": "steps"}) == 2
    assert value("compact_state_transfers", {"kind": "put"}) == 1
    assert value("compact_state_lookup_misses_total", {"reason": "no_common_prefix"}) == 1
    life.launched(2)
    life.poll()
    assert value("compact_state_steps_in_flight") == 0


def test_metrics_without_the_package_say_so(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match="pip install prometheus-client"):
        register_metrics(Ledger(1))


def test_a_broken_invariant_brings_the_ledgers_dump() -> None:
    life = busy()
    with pytest.raises(InvariantError, match="twice") as caught:
        life.ledger.admit("first")
    assert caught.value.error_class == "E_INVARIANT"
    assert life.ledger.counters.e_invariant == 1
    for text in ("owner='first'", "quarantined", "submitted=2", "quarantine slot="):
        assert text in caught.value.dump
    assert str(caught.value).endswith(caught.value.dump), "whoever logs the error has the dump"


def test_ranges_around_planning_polling_and_transfers(monkeypatch: Any) -> None:
    opened: list[str] = []

    @contextmanager
    def recorded(name: str) -> Iterator[None]:
        opened.append(name)
        yield
        opened.append(f"end of {name}")

    monkeypatch.setattr(observe, "_RANGE", recorded)
    rig = Rig([FakeBackend().client()])
    entry = rig.checkpoint([1, 2, 3])
    assert opened == ["pool.plan", "end of pool.plan", "pool.poll", "end of pool.poll"]
    opened.clear()
    assert rig.put(entry)
    assert opened == ["store.put", "end of store.put"]
    rig.close()


def test_a_scrape_survives_what_the_ledgers_thread_does_meanwhile() -> None:
    life = busy()

    class Interrupting:
        """A holder at which the scraping thread is interrupted by the ledger's: a request comes."""

        id = "interrupting"

        @property
        def rec(self) -> None:
            life.admit(life.add("came", PrefixKey([1])))

    life.ledger.holders = {"interrupting": Interrupting(), **life.ledger.holders}  # type: ignore[dict-item]
    view = life.snapshot()
    assert sum(view.conditions.values()) == 7
    assert "came" in life.requests
