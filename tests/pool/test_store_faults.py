"""Bad payloads, ranks that disagree, transfers that hang, a store that is gone: never a wrong state."""

import logging
from dataclasses import replace

import pytest

from compact_state.pool import ConfigError, StateIOError, StuckLeaseError
from compact_state.pool.store_transfer import StepFences
from tests.pool.store_rig import IDENTITY, PROMPT, QUICK, Fence, stored_by_another


def truncated(data):
    return data[:-1]


def longer(data):
    return data + b"x"


def corrupted(data):
    return data[:-100] + bytes([data[-100] ^ 1]) + data[-99:]


def wrong_header(data):
    return b"NOTSTATE" + data[8:]


def wrong_put_id(data):
    return data[:55] + bytes([data[55] ^ 1]) + data[56:]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (truncated, "e_miss"),
        (longer, "e_miss"),
        (corrupted, "e_data"),
        (wrong_header, "e_miss"),
        (wrong_put_id, "e_data"),
    ],
)
def test_I12_a_bad_payload_is_never_used_and_its_key_is_removed(make, backend, change, error):
    stored_by_another(make)
    (key,) = backend.objects
    good = backend.objects[key]
    backend.objects[key] = change(good)
    rig = make()
    assert rig.resume(PROMPT, [10]) == 0
    assert getattr(rig.ledger.counters, error) == 1
    # Reading granted a lease: the key goes when that has run out, never by force.
    rig.settle(lambda: rig.raw[0].calls["remove"] == 2)
    assert backend.objects
    backend.leased.clear()
    rig.settle(lambda: rig.store.counters.keys_removed == 1)
    assert not backend.objects
    assert rig.put(rig.checkpoint(PROMPT[:10]))
    assert make().resume(PROMPT, [10]) == 10


def test_another_states_bytes_under_this_key_are_refused(make, backend):
    """What a reader gets when a key is removed by force and its memory given to another object."""
    stored_by_another(make, positions=(10, 12))
    ten, twelve = sorted(backend.objects)
    backend.objects[ten] = backend.objects[twelve]
    rig = make()
    assert rig.resume(PROMPT[:11], [10]) == 0
    assert rig.ledger.counters.e_miss == 1


def test_I8_a_load_that_fails_falls_back_to_the_last_good_boundary(make, backend):
    stored_by_another(make, positions=(5, 10, 15))
    for key in backend.objects:
        if ":15:" in key:
            backend.objects[key] = corrupted(backend.objects[key])
    assert make().resume(PROMPT, [5, 10, 15]) == 10
    rig = make(settings=replace(QUICK, attempts=1))
    assert rig.resume(PROMPT, [5, 10, 15]) == 0


def test_I8_a_load_that_throws_falls_back_as_well(make, monkeypatch):
    stored_by_another(make, positions=(5, 10))
    rig = make()
    load, raised = rig.raw[0].batch_get_into_multi_buffers, []

    def throws(keys, *arguments):
        if ":10:" in keys[0]:
            raised.append(keys[0])
            raise RuntimeError("the transport broke")
        return load(keys, *arguments)

    monkeypatch.setattr(rig.raw[0], "batch_get_into_multi_buffers", throws)
    assert rig.resume(PROMPT, [5, 10]) == 5
    assert len(raised) == rig.ledger.counters.e_io == 1


def test_I16_a_state_that_failed_is_not_waited_for_again_at_once(make):
    stored_by_another(make)
    rig = make(settings=replace(QUICK, retry_after_s=30.0))
    rig.raw[0].codes["get"].append(-800)
    assert rig.resume(PROMPT, [10]) == 0
    for _ in range(10):
        assert not rig.store.find(rig.request(PROMPT), [10])
    assert rig.raw[0].calls["get"] == 1
    # A good put of it, or a good get, clears the entry before its time.
    assert rig.put(rig.checkpoint(PROMPT[:10]))
    rig.evict_all()
    assert rig.resume(PROMPT, [10]) == 10
    assert not rig.store._avoided


def test_G8_no_slot_for_a_load_means_recompute(make):
    stored_by_another(make)
    rig = make(slots=2)
    holders = [rig.request([number]) for number in (90, 91)]
    assert all(rig.life.admit(request) for request in holders)
    request = rig.request(PROMPT)
    rig.store.find(request, [10])
    rig.settle(lambda: not rig.store.pending(request))
    assert rig.raw[0].calls["get"] == 0
    assert len(rig.ledger.free) == 2
    for holder in holders:
        rig.life.cancel(holder)
    assert rig.life.admit(request)
    assert request.resumed == 0
    rig.life.cancel(request)


def test_I18_what_goes_before_it_is_stored_is_counted_as_lost(make):
    rig = make(slots=4, max_puts=1)
    entries = []
    rig.raw[0].gate.clear()
    for number in range(5):
        entries.append(rig.checkpoint([number, 1]))
        rig.store.put(entries[-1])
    rig.raw[0].gate.set()
    assert rig.store.settle(10)
    stored = sum(entry.stored for entry in entries)
    assert stored + rig.store.counters.puts_lost == 5
    assert 0 < rig.store.counters.puts_lost < 5
    other = make(slots=8)
    for number, entry in enumerate(entries):
        assert other.resume([number, 1, 2], [2]) == (2 if entry.stored else 0)


def test_I9_boundaries_of_prompt_and_answer_are_stored(make):
    """100 tokens of prompt and 156 generated, interval 64: a follow-up elsewhere reuses 256, or 192 when capped."""
    rig = make()
    request = rig.request(range(100))
    assert rig.life.admit(request)
    for entry in rig.run(request, 100, [64]):
        rig.store.put(entry)
    for token in range(156):
        rig.life.extend(request, [1000 + token])
        for entry in rig.run(request, 1, [p for p in (request.position + 1,) if p % 64 == 0]):
            rig.store.put(entry)
        rig.store.poll()
    assert rig.store.settle(10)
    assert rig.store.counters.puts_stored == 4
    follow_up = [*range(100), *range(1000, 1156), *range(20)]
    assert make().resume(follow_up, range(64, 276, 64)) == 256
    other = make()
    capped = other.request(follow_up)
    other.store.find(capped, range(64, 276, 64), limit=255)
    other.settle(lambda: not other.store.pending(capped))
    assert other.life.admit(capped, limit=255)
    assert capped.resumed == 192
    other.life.cancel(capped)
    rig.life.cancel(request)


def test_a_put_waits_for_the_fence_of_its_producer(make):
    rig, fence = make(), Fence()
    request = rig.request(PROMPT)
    assert rig.life.admit(request)
    (entry,) = rig.run(request, 10, [10], fence=fence)
    rig.store.put(entry)
    for _ in range(5):
        rig.store.poll()
    assert rig.raw[0].calls["exist"] == 0
    fence.open = True
    rig.settle(lambda: entry.stored)
    rig.life.cancel(request)


def test_a_put_of_a_failed_step_never_starts(make, backend):
    rig, fence = make(), Fence()
    request = rig.request(PROMPT)
    assert rig.life.admit(request)
    (entry,) = rig.run(request, 10, [10], fence=fence)
    rig.store.put(entry)
    rig.life.failed(rig.ledger.submitted)
    fence.open = True
    rig.life.poll()
    assert rig.store.settle(10)
    assert rig.store.counters.withdrawn == 0  # it ended at once, not by its deadline
    assert not entry.stored
    assert not backend.objects
    rig.life.cancel(request)


def test_transfer_threads_wait_for_their_own_ranks_fence(make):
    """Where the ledger hears of one rank's fence only, the others' threads wait for theirs."""
    waited = []
    rig = make(2, fence_ranks=1, wait_step=waited.append)
    assert rig.put(rig.checkpoint(PROMPT[:10]))
    assert waited == [1, 1]


def test_a_rank_waits_for_the_first_fence_that_covers_a_step():
    fences = StepFences(timeout_s=0.01)
    with pytest.raises(StateIOError, match="step 1 was not launched"):
        fences.wait(1)
    first, second = Fence(), Fence()
    fences.record(1, first)
    fences.record(3, second)
    fences.wait(2)
    assert (first.open, second.open) == (False, True)
    fences.wait(1)
    assert first.open
    fences.record(4, Fence())
    fences.wait(3)
    assert [step for step, _ in fences._fences] == [4]


# Ranks


def test_I4_each_rank_gets_its_own_bytes_and_another_size_misses(make, backend):
    stored_by_another(make, ranks=2)
    assert sorted(key[-6:] for key in backend.objects) == [":r0of2", ":r1of2"]
    assert make(2).resume(PROMPT, [10]) == 10
    single = make(1)
    assert single.resume(PROMPT, [10]) == 0
    assert single.raw[0].calls["get"] == 0


def test_one_rank_that_fails_rolls_all_back(make, backend):
    rig = make(2)
    entry = rig.checkpoint(PROMPT[:10])
    rig.raw[1].codes["put"].append(-800)
    assert not rig.put(entry)
    assert rig.ledger.counters.e_rank == 1
    # One rank's key is there: not a state.
    assert len(backend.objects) == 1
    reader = make(2)
    assert reader.resume(PROMPT, [10]) == 0
    assert reader.store.counters.finds == 1
    assert reader.raw[0].calls["get"] == reader.raw[1].calls["get"] == 0
    assert rig.put(entry)
    other = make(2)
    other.raw[0].codes["get"].append(-800)
    assert other.resume(PROMPT, [10]) == 0
    assert other.ledger.counters.e_rank == 1
    assert len(other.ledger.free) == other.ledger.num_slots


def test_ports_and_ranks_must_agree(make):
    rig = make(2)
    from compact_state.pool.store import MooncakeStateStore

    with pytest.raises(ConfigError, match="ports"):
        MooncakeStateStore(rig.life, IDENTITY, rig.ports[:1])


# Deadlines, breaker, threads


def test_a_stuck_transfer_costs_its_slot_and_a_late_end_is_stale(make, caplog):
    stored_by_another(make)
    now = [0.0]
    rig = make(clock=lambda: now[0], settings=replace(QUICK, workers=1))
    raw = rig.raw[0]
    request = rig.find_half_way(PROMPT, [10])
    now[0] = 100.0
    with caplog.at_level(logging.ERROR, "compact_state.store"):
        rig.store.poll()
    assert "E_STUCK" in caplog.text
    assert rig.ledger.quarantined == 1
    assert rig.ledger.counters.e_stuck == 1
    assert not rig.store.pending(request)
    assert rig.life.admit(request)
    assert request.resumed == 0
    rig.life.cancel(request)
    # Another thread took the place of the one that hangs: the only worker still answers.
    other = rig.request(PROMPT[:9])
    assert rig.store.find(other, [5])
    rig.settle(lambda: not rig.store.pending(other))
    assert rig.store.counters.finds_failed == 0
    rig.life.cancel(other)
    with pytest.raises(StuckLeaseError):
        rig.life.sleep(deadline_s=0.01, progress=rig.store.poll)
    rig.life.resume()
    with pytest.raises(StuckLeaseError, match="may still touch"):
        rig.ports[0].detach()
    raw.gate.set()
    rig.settle(lambda: not rig.ledger.stuck)
    assert rig.store.counters.late == 1
    assert rig.ledger.quarantined == 1  # for as long as the memory lives
    rig.life.sleep(deadline_s=5, progress=rig.store.poll)
    rig.life.wake()
    rig.store.poll()
    assert rig.ledger.quarantined == 0


def test_what_has_not_started_by_its_deadline_costs_no_slot(make):
    now = [0.0]
    rig = make(clock=lambda: now[0], settings=replace(QUICK, workers=1, max_wedged=0))
    entries = [rig.checkpoint([number]) for number in range(2)]
    rig.raw[0].gate.clear()
    for entry in entries:
        rig.store.put(entry)
    rig.settle(rig.raw[0].half_way.is_set)
    now[0] = 100.0
    rig.store.poll()
    assert rig.store.counters.withdrawn == 1
    assert rig.ledger.quarantined == 1
    rig.raw[0].gate.set()
    rig.settle(lambda: not rig.ledger.stuck)
    rig.close()
    assert rig.store.counters.late == 1  # the one that hung; the other never ran


def test_duplicate_and_unknown_completions_change_nothing(make):
    rig = make()
    entry = rig.checkpoint(PROMPT[:10])
    assert rig.put(entry)
    from compact_state.pool.store_types import Completion

    before = rig.ledger.counters.e_stale
    for op in (1, 1, 99):
        rig.store._take(0, Completion(op, "put", True), 0.0)
        rig.store._take(0, Completion(op, "get", False), 0.0)
    assert rig.ledger.counters.e_stale == before + 6
    rig.check_idle()
