"""The breaker, finds without an answer, caps of zero, stores that cannot be joined: nothing waits or is left behind."""

import threading
from dataclasses import replace

import pytest

from compact_state.pool import ConfigError, MooncakeConfig, StateIOError
from compact_state.pool.mooncake import StoreClient
from compact_state.pool.store import MooncakeStateStore
from compact_state.pool.store_types import Breaker, Job
from tests.pool.store_rig import IDENTITY, PROMPT, QUICK, Fence, Rig, stored_by_another


def test_a_dead_store_is_not_asked_again_and_again(make):
    settings = replace(QUICK, breaker_failures=2, breaker_cooldown_s=30.0, retry_after_s=0.0)
    rig = make(settings=settings, slots=12)
    for raw in rig.raw:
        raw.codes["exist"] += [-900] * 100
    for number in range(2):
        assert rig.resume(PROMPT, [10 + number]) == 0
    assert rig.store.breaker.open
    asked = rig.raw[0].calls["exist"]
    for _ in range(10):
        request = rig.request(PROMPT)
        assert not rig.store.find(request, [10])
        rig.life.cancel(request)
    entries = [rig.checkpoint([number]) for number in range(4)]
    for entry in entries:
        assert rig.store.put(entry)
    rig.store.poll()
    assert rig.raw[0].calls["exist"] == asked
    assert rig.store.counters.finds_refused == 10
    assert rig.store.counters.breaker_opened == 1


def test_a_store_that_is_back_gets_what_waited(make):
    rig = make(settings=replace(QUICK, breaker_failures=1, breaker_cooldown_s=0.05), max_puts=1)
    rig.raw[0].codes["exist"].append(-900)
    entries = [rig.checkpoint([number]) for number in range(3)]
    for entry in entries:
        rig.store.put(entry)
    assert rig.store.settle(10)
    assert [entry.stored for entry in entries] == [False, True, True]
    assert rig.store.counters.breaker_opened == 1
    assert not rig.store.breaker.open
    assert rig.put(entries[0])


def test_breaker_lets_one_probe_through_a_cooldown():
    breaker = Breaker(2, 10.0)
    assert not breaker.failure(0.0)
    assert breaker.allows(0.0)
    assert breaker.failure(1.0)
    assert not breaker.allows(10.9)
    assert breaker.allows(11.0)
    assert not breaker.allows(11.0)
    breaker.success()
    assert breaker.allows(11.0)
    assert breaker.opened == 1


def test_finds_behind_a_slow_transfer_say_nothing_against_the_store(make):
    now = [0.0]
    settings = replace(QUICK, workers=1, breaker_failures=2, find_deadline_s=1.0, put_deadline_s=100.0)
    rig = make(settings=settings, clock=lambda: now[0])
    entry = rig.checkpoint(PROMPT[:10])
    rig.put_half_way(entry)
    asked = rig.raw[0].calls["exist"]
    for _ in range(3):
        request = rig.request(PROMPT[5:])
        assert rig.store.find(request, [10])
        now[0] += 2.0
        rig.store.poll()
        assert not rig.store.pending(request)
    assert (rig.store.counters.finds_failed, rig.store.counters.withdrawn) == (3, 3)
    assert not rig.store.breaker.open
    rig.raw[0].gate.set()
    assert rig.store.settle(10)
    assert entry.stored
    # The put's own second look: the finds that nobody waits for were not asked.
    assert rig.raw[0].calls["exist"] == asked + 1


def hold(raw, monkeypatch):
    """Questions what the store holds wait: (event that lets them go on, event that one has come)."""
    answers, asked = threading.Event(), threading.Event()
    plain = raw.batch_is_exist

    def slow(keys):
        asked.set()
        assert answers.wait(20)
        return plain(keys)

    monkeypatch.setattr(raw, "batch_is_exist", slow)
    return answers, asked


def test_an_answer_about_old_weights_is_not_acted_on(make, monkeypatch):
    """Its name is that of the old weights' state: loading it now would make it a state of the new ones."""
    stored_by_another(make)
    rig = make()
    answers, asked = hold(rig.raw[0], monkeypatch)
    request = rig.request(PROMPT)
    assert rig.store.find(request, [10])
    assert asked.wait(20)
    rig.life.new_weights()
    rig.store.new_weights("weights-2")
    answers.set()
    rig.settle(lambda: not rig.store.pending(request))
    assert rig.store.counters.finds_hit == 1
    assert (rig.raw[0].calls["get"], rig.index.size) == (0, 0)


@pytest.mark.parametrize("code", [None, -900])
def test_a_find_that_hangs_counts_once_and_opens_the_breaker(make, monkeypatch, code):
    now = [0.0]
    rig = make(settings=replace(QUICK, breaker_failures=1, breaker_cooldown_s=50.0), clock=lambda: now[0])
    answers, asked = hold(rig.raw[0], monkeypatch)
    if code is not None:
        rig.raw[0].codes["exist"].append(code)
    request = rig.request(PROMPT)
    assert rig.store.find(request, [10])
    assert asked.wait(20)
    now[0] = 10.0
    rig.store.poll()
    assert not rig.store.pending(request)
    assert (rig.store.breaker.open, rig.store.counters.breaker_opened) == (True, 1)
    answers.set()
    rig.settle(lambda: rig.store.counters.late == 1)
    assert rig.store.counters.finds_failed == 1


def test_a_put_that_gets_no_lease_leaves_the_probe_to_others(make):
    now = [0.0]
    rig = make(slots=2, settings=replace(QUICK, breaker_failures=1, breaker_cooldown_s=5.0), clock=lambda: now[0])
    entry = rig.checkpoint(PROMPT[:10])
    for _ in range(2):
        assert rig.life.admit(rig.request([1, 2, 3]))
    rig.store.breaker.failure(now[0])
    assert rig.store.put(entry)
    now[0] = 6.0
    rig.store.poll()
    assert rig.ledger.puts_in_flight == 0
    waiting = rig.request(PROMPT[5:])
    assert rig.store.find(waiting, [10])
    assert rig.store.settle(0.0) is False
    rig.settle(lambda: not rig.store.pending(waiting))
    assert not rig.store.breaker.open
    for request in list(rig.life.requests.values()):
        rig.life.cancel(request)
    assert rig.store.settle(10)
    assert entry.stored


def test_one_put_in_a_cooldown_probes_a_store_that_did_not_answer(make):
    now = [0.0]
    rig = make(settings=replace(QUICK, breaker_failures=1, breaker_cooldown_s=5.0), clock=lambda: now[0])
    entries = [rig.checkpoint([number]) for number in range(2)]
    rig.store.breaker.failure(now[0])
    for entry in entries:
        assert rig.store.put(entry)
    now[0] = 6.0
    rig.raw[0].gate.clear()
    rig.settle(rig.raw[0].half_way.is_set)
    assert rig.ledger.puts_in_flight == 1
    rig.raw[0].gate.set()
    assert rig.store.settle(10)
    assert [entry.stored for entry in entries] == [True, True]


def test_a_put_whose_step_never_ends_costs_no_slot(make):
    now = [0.0]
    rig = make(settings=replace(QUICK, put_deadline_s=3.0), clock=lambda: now[0])
    request, fence = rig.request(PROMPT), Fence()
    assert rig.life.admit(request)
    (entry,) = rig.run(request, 10, [10], fence=fence)
    assert rig.store.put(entry)
    now[0] = 4.0
    rig.store.poll()
    assert (rig.ledger.quarantined, len(rig.ledger.leases)) == (0, 0)
    assert (rig.store.counters.withdrawn, rig.store.counters.puts_failed) == (1, 1)
    assert rig.raw[0].calls["exist"] == 0
    fence.open = True
    rig.life.poll()
    rig.life.cancel(request)


def test_nothing_is_put_under_a_key_that_is_to_go(make, backend):
    stored_by_another(make)
    (key,) = backend.objects
    backend.objects[key] = b"x" * len(backend.objects[key])
    now = [0.0]
    rig = make(settings=replace(QUICK, remove_after_s=50.0), clock=lambda: now[0])
    assert rig.resume(PROMPT, [10]) == 0
    entries = [rig.checkpoint(PROMPT[:10]), rig.checkpoint([7])]
    for entry in entries:
        rig.store.put(entry)
    assert rig.store.settle(10)
    assert [entry.stored for entry in entries] == [False, True]
    assert rig.store.counters.puts_refused == 1
    backend.leased.clear()
    now[0] = 60.0
    rig.settle(lambda: rig.store.counters.keys_removed == 1)
    assert rig.put(entries[0])


def test_caps_of_zero_make_nobody_wait(make):
    stored_by_another(make)
    rig = make(max_gets=0, max_puts=0)
    assert not rig.store.find(rig.request(PROMPT), [10])
    assert not rig.store.put(rig.checkpoint([1, 2, 3]))
    assert rig.store.settle(0.0)


# Joining a store


def test_a_store_that_is_joined_serves(backend, monkeypatch):
    rig = Rig([backend.client()])
    monkeypatch.setattr(MooncakeConfig, "connect", lambda config: StoreClient(backend.client()))
    store = MooncakeStateStore.connect(rig.life, rig.pools[0], IDENTITY, MooncakeConfig("localhost:1"), QUICK)
    entry = rig.checkpoint(PROMPT[:10])
    assert store.put(entry)
    assert store.settle(10)
    assert entry.stored
    assert (store.counters.puts_stored, store.counters.puts_present) == (1, 0)
    store.close()
    rig.close()


@pytest.mark.parametrize("fault", ["no master", "ranks", "pool refused", "ring refused"])
def test_a_store_that_cannot_be_joined_leaves_nothing_behind(backend, monkeypatch, fault):
    rig = Rig([backend.client(), backend.client()])
    pools = rig.pools[:1] if fault == "ranks" else rig.pools
    clients = []

    def connect(config):
        if len(clients) == 1 and fault == "no master":
            raise StateIOError("no Mooncake master")
        raw = backend.client()
        if len(clients) == 1 and fault == "pool refused":
            raw.refuse.add(rig.pools[1].nbytes)
        if len(clients) == 1 and fault == "ring refused":
            monkeypatch.setattr(raw, "register_buffer", lambda pointer, size: -600)
        clients.append(raw)
        return StoreClient(raw)

    monkeypatch.setattr(MooncakeConfig, "connect", connect)
    threads = threading.active_count()
    with pytest.raises(ConfigError if fault == "ranks" else StateIOError):
        MooncakeStateStore.connect(rig.life, pools, IDENTITY, MooncakeConfig("localhost:1"), QUICK)
    assert threading.active_count() == threads
    assert clients
    assert all(raw.closed and not raw.registered for raw in clients)
    rig.close()


def test_memory_that_is_refused_after_a_wake_is_offered_again(make):
    now = [0.0]
    rig = make(clock=lambda: now[0], settings=replace(QUICK, breaker_cooldown_s=5.0))
    rig.life.sleep(deadline_s=5, progress=rig.store.poll)
    rig.store.poll()
    rig.raw[0].refuse.add(rig.pools[0].nbytes)
    rig.life.wake()
    rig.store.poll()
    entry = rig.checkpoint(PROMPT[:10])
    assert not rig.store.put(entry)
    assert not rig.store.find(rig.request(PROMPT[5:]), [10])
    assert rig.store.counters.errors["E_IO"] == 1
    rig.raw[0].refuse.clear()
    rig.store.poll()
    assert not rig.store.put(entry)
    now[0] = 6.0
    assert rig.put(entry)


def test_a_step_that_never_came_says_nothing_for_the_store(make):
    """The transfer half's breaker stays open when a probe ends before the store was asked."""

    def no_fence(step):
        raise StateIOError(f"step {step} was not launched")

    rig = make(settings=replace(QUICK, breaker_failures=1, breaker_cooldown_s=0.0), wait_step=no_fence)
    port = rig.ports[0]
    port.breaker.failure(0.0)
    port.submit(Job(1, "get", ("key",), 0, 4, after_step=3))
    done = []
    rig.settle(lambda: done.extend(port.completions()) or done)
    assert (done[0].ok, done[0].reason) == (False, "step 3 was not launched")
    assert port.breaker.open


def test_memory_that_stays_registered_is_logged(make, monkeypatch, caplog):
    rig = make()
    plain = rig.raw[0].unregister_buffer
    monkeypatch.setattr(rig.raw[0], "unregister_buffer", lambda pointer: (plain(pointer) and -600) or -800)
    rig.life.sleep(deadline_s=5, progress=rig.store.poll)
    rig.store.poll()
    assert "memory stays registered: -800" in caplog.text
    rig.life.wake()
