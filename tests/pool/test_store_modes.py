"""Sleep, new weights, closing, memory that cannot be registered, settings, codes and counters of the store."""

import logging
import pickle
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compact_state.pool import ConfigError, PoolClosedError, StateIOError, StuckLeaseError, store_base
from compact_state.pool.mooncake import MooncakeConfig, error_of, is_transport
from compact_state.pool.store_keys import StoreIdentity
from compact_state.pool.store_report import register_store_metrics
from compact_state.pool.store_transfer import StateTransfer
from compact_state.pool.store_types import Completion, Job, StoreSettings
from tests.pool.store_rig import PROMPT, QUICK, Rig, stored_by_another

# The pool's modes


def test_I21_sleep_unregisters_and_wake_registers_the_new_place(make):
    rig = make()
    entry = rig.checkpoint(PROMPT[:10])
    assert rig.put(entry)
    memory = rig.pools[0].memory
    assert memory.data_ptr() in rig.raw[0].registered
    old = memory.data_ptr()
    rig.life.sleep(deadline_s=5, progress=rig.store.poll)
    # The connector keeps the memory until it is unregistered.
    assert old in rig.raw[0].registered
    rig.store.poll()
    assert old not in rig.raw[0].registered
    assert not rig.store.put(entry)
    request = rig.request(PROMPT)
    assert not rig.store.find(request, [10])
    blocker = memory  # the old place stays taken
    rig.life.wake()
    # Whoever asks first finds the memory registered.
    assert rig.store.find(request, [10])
    new = rig.pools[0].memory.data_ptr()
    assert new != blocker.data_ptr()
    assert new in rig.raw[0].registered
    assert rig.resume(PROMPT, [10]) == 10


def test_new_weights_need_a_new_identity(make):
    rig = make()
    assert rig.put(rig.checkpoint(PROMPT[:10]))
    with pytest.raises(ConfigError, match=r"after life\.new_weights"):
        rig.store.new_weights("weights-2")
    late = rig.checkpoint(PROMPT[:12])
    rig.put_half_way(late)
    waiting = rig.request(PROMPT)
    rig.life.new_weights()
    rig.weights = "weights-2"
    rig.raw[0].gate.set()
    assert rig.store.settle(10)
    assert not rig.store.find(waiting, [10, 12])
    assert not rig.store.put(rig.checkpoint(PROMPT[:14]))
    rig.store.new_weights(None)
    assert not rig.store.find(waiting, [10, 12])
    rig.store.new_weights("weights-2")
    rig.evict_all()
    assert rig.resume(PROMPT, [10, 12]) == 0
    assert rig.put(rig.checkpoint(PROMPT[:10]))
    assert make(identity=StoreIdentity("toy model", "weights-2")).resume(PROMPT, [10, 12]) == 10


def test_a_load_that_new_weights_overtake_is_not_used(make):
    stored_by_another(make)
    rig = make()
    request = rig.find_half_way(PROMPT, [10])
    rig.life.new_weights()
    rig.raw[0].gate.set()
    rig.settle(lambda: not rig.store.pending(request))
    assert rig.index.size == 0
    assert len(rig.ledger.free) == 6
    rig.life.cancel(request)


def test_after_close_nothing_reaches_the_client(make):
    rig = make()
    entry = rig.checkpoint(PROMPT[:10])
    rig.close()
    rig.close()
    assert not rig.store.put(entry)
    assert not rig.store.find(rig.request(PROMPT), [10])
    rig.store.poll()
    for call in (lambda: rig.clients[0].exist(["x"]), lambda: rig.clients[0].get("x", [0], [1])):
        with pytest.raises(PoolClosedError):
            call()
    rig.ports[0].submit(Job(7, "put", ("x",)))
    (completion,) = rig.ports[0].completions()
    assert not completion.ok


def test_close_waits_for_a_transfer_and_refuses_when_it_hangs(make):
    rig = make()
    rig.put_half_way(rig.checkpoint(PROMPT[:10]))
    with pytest.raises(StuckLeaseError, match="memory must stay"):
        rig.store.close(0.05)
    assert not rig.raw[0].closed
    rig.raw[0].gate.set()


# Memory


def test_a_range_that_the_transport_refuses(backend):
    raw = backend.client()
    raw.refuse.add(6 * 8704)
    with pytest.raises(StateIOError, match="refused"):
        Rig([raw])
    staged = backend.client()
    staged.refuse.add(6 * 8704)
    rig = Rig([staged], mode="staged")
    assert rig.put(rig.checkpoint(PROMPT[:10]))
    rig.close()


def test_gpu_memory_that_cannot_be_registered_is_staged(backend, caplog):
    """Here a host pool plays the GPU's."""
    raw = backend.client()
    raw.refuse.add(6 * 8704)
    rig = Rig([raw], mode="direct")
    assert rig.ports[0].memory.mode == "staged"
    assert "transfers are staged" in caplog.text
    assert rig.put(rig.checkpoint(PROMPT[:10]))
    rig.close()


def test_large_slots_pass_the_window_in_pieces(make, monkeypatch):
    from compact_state.pool import store_memory

    monkeypatch.setattr(store_memory, "WINDOW_BYTES", 1000)
    first, second = make(mode="direct"), make(mode="host")
    assert first.put(first.checkpoint(PROMPT[:10]))
    assert second.resume(PROMPT, [10]) == 10


def test_a_slot_that_changes_under_a_put_is_noticed_by_the_reader(make):
    """Nothing in the pool does this; if it happened, the checksum would say so."""
    rig = make()
    entry = rig.checkpoint(PROMPT[:10])
    rig.put_half_way(entry)
    rig.pools[0].memory[entry.handle.slot, -1] ^= 1
    rig.raw[0].gate.set()
    assert rig.store.settle(10)
    rig.pools[0].memory[entry.handle.slot, -1] ^= 1
    other = make()
    assert other.resume(PROMPT, [10]) == 0
    assert other.ledger.counters.e_data == 1
    assert torch.count_nonzero(other.pools[0].memory != 0xFF) == 0 or other.ledger.counters.gets_ok == 0


# Settings, messages, metrics


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("workers", 0),
        ("workers", 1.5),
        ("breaker_failures", 0),
        ("put_deadline_s", -1.0),
        ("find_deadline_s", float("nan")),
        ("workers", True),
        ("get_deadline_s", "5"),
        ("put_deadline_s", None),
    ],
)
def test_settings_that_cannot_work_are_refused(argument, value):
    with pytest.raises(ConfigError, match=argument):
        StoreSettings(**{argument: value})


def test_config_names_what_is_wrong(tmp_path):
    with pytest.raises(ConfigError, match="master"):
        MooncakeConfig("localhost")
    with pytest.raises(ConfigError, match="protocol"):
        MooncakeConfig("localhost:1", protocol="ucx")
    file = tmp_path / "mooncake.json"
    file.write_text('{"master_server_address": "h:5", "metadata_server": "P2PHANDSHAKE", "device_name": "mlx5_0"}')
    assert MooncakeConfig.from_json(file) == MooncakeConfig("h:5", protocol="rdma", device="mlx5_0")
    file.write_text("{}")
    with pytest.raises(ConfigError, match="master_server_address"):
        MooncakeConfig.from_json(file)


def test_modes_of_memory(make):
    rig = make()
    with pytest.raises(ConfigError, match="mode"):
        StateTransfer(rig.pools[0], rig.clients[0], mode="gpu")


def test_codes_have_classes():
    assert [error_of(code, "get").value for code in (-704, -703, -600)] == ["E_MISS"] * 3
    assert [error_of(code, "put").value for code in (-200, -801, -600, -900)] == [
        "E_CAPACITY",
        "E_DATA",
        "E_IO",
        "E_IO",
    ]
    assert [is_transport(code) for code in (-900, -901, -800, -1, -101)] == [True] * 5
    assert not any(is_transport(code) for code in (0, 64, -200, -600, -703, -704, -705, -706, -707, -714, -801))


def test_messages_between_the_halves_can_be_sent(make):
    rig = make()
    job = Job(1, "put", ("key",), 3, 10, 2, 5.0)
    assert pickle.loads(pickle.dumps(job)) == job
    rig.ports[0].submit(replace(job, deadline=0.0))
    rig.settle(lambda: bool(rig.ports[0]._done))
    (completion,) = rig.ports[0].completions()
    assert pickle.loads(pickle.dumps(completion)) == completion


@pytest.mark.parametrize("kind", ["put", "get", "find", "remove"])
def test_a_job_whose_deadline_passed_while_it_waited_asks_the_store_nothing(make, kind):
    rig = make(clock=lambda: 5.0)
    rig.ports[0].submit(Job(1, kind, ("key",), 3, deadline=5.0))
    rig.settle(lambda: bool(rig.ports[0]._done))
    (completion,) = rig.ports[0].completions()
    assert (completion.ok, completion.reason) == (False, "its deadline passed while it waited")
    assert not sum(rig.raw[0].calls.values())


def test_failures_are_counted_by_class_and_do_not_flood_the_log(make, caplog):
    prometheus = pytest.importorskip("prometheus_client")
    rig = make(settings=replace(QUICK, retry_after_s=0.0, breaker_failures=100))
    registry = prometheus.CollectorRegistry()
    register_store_metrics(rig.store, registry=registry)
    rig.raw[0].codes["exist"] += [-900] * 20
    with caplog.at_level(logging.WARNING, "compact_state.store"):
        for _ in range(20):
            rig.resume(PROMPT, [10])
    assert registry.get_sample_value("compact_state_store_errors_total", {"class": "E_IO"}) == 20
    assert registry.get_sample_value("compact_state_store_events_total", {"event": "finds"}) == 20
    assert registry.get_sample_value("compact_state_store_breaker_open") == 0
    assert 1 <= len(caplog.records) < 10


def by_hand(make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[float], list[Any]]:
    """A store whose clock is set by hand and whose only rank takes notes."""
    store, now, notes = make().store, [100.0], []
    monkeypatch.setattr(store, "_clock", lambda: now[0])
    note = lambda what: lambda: notes.append(what)
    port = SimpleNamespace(submit=notes.append, attach=note("attach"), detach=note("detach"))
    monkeypatch.setattr(store, "ports", [port])
    return store, now, notes


def test_a_bad_key_goes_when_its_lease_has_run_out_and_is_given_up_in_the_end(make, monkeypatch):
    store, now, jobs = by_hand(make, monkeypatch)
    store._doomed.append(store_base.Doomed(101.0, 0, "a key", "its name"))
    store._avoid("its name", 1e9, puts=True)
    for tries in range(store_base.MAX_REMOVALS):
        store._remove_bad(now[0] + 0.99)
        assert len(jobs) == tries, "still under lease"
        now[0] += 1.0
        store._remove_bad(now[0])
        assert [(job.kind, job.keys) for job in jobs[tries:]] == [("remove", ("a key",))]
        store._removed(Completion(jobs[-1].op, "remove", False), now[0])
        now[0] += store.settings.remove_after_s - 1.0
    store._remove_bad(now[0] + 100)
    assert len(jobs) == store_base.MAX_REMOVALS
    assert (store.counters.keys_removed, len(store._doomed), "its name" in store._avoided) == (0, 0, False)
    store._doomed.append(store_base.Doomed(0.0, 0, "another", "its name"))
    store._remove_bad(now[0])
    store._removed(Completion(jobs[-1].op, "remove", True), now[0])
    assert (store.counters.keys_removed, len(store._doomed)) == (1, 0)


def test_memory_is_registered_once_a_life(make, monkeypatch):
    store, _, notes = by_hand(make, monkeypatch)
    store._follow_pool()
    assert notes == []
    monkeypatch.setattr(store.ledger, "incarnation", store.ledger.incarnation + 1)
    for _ in range(3):
        store._follow_pool()
    assert notes == ["detach", "attach"]
    monkeypatch.setattr(store, "_closed", True)
    monkeypatch.setattr(store.ledger, "incarnation", store.ledger.incarnation + 1)
    store._follow_pool()
    assert notes == ["detach", "attach"]


def test_names_that_are_not_asked_for_are_forgotten_in_time_and_in_number(make, monkeypatch):
    store, now, _ = by_hand(make, monkeypatch)
    monkeypatch.setattr(store_base, "MAX_AVOIDED", 2)
    for text, puts in (("a", False), ("b", True), ("a", False), ("c", False)):
        store._avoid(text, 5.0, puts=puts)
    named = lambda text, **options: store._avoids(SimpleNamespace(text=text), **options)
    assert [named(text) for text in "abc"] == [True, False, True], "b went first: a was named again"
    store._avoid("b", 5.0, puts=True)
    assert named("b", put=True)
    assert not named("c", put=True)
    now[0] += 5.0
    assert not named("b")
    assert not store._avoided or "b" not in store._avoided
    store.new_weights(None)  # says that there are none, whatever the pool has
