"""The store connector over a store in memory: what travels, which boundary, leases, reads that are no hit."""

import time
from dataclasses import replace

import pytest

from compact_state.pool import PrefixKey
from tests.pool.store_rig import PROMPT, QUICK, stored_by_another


@pytest.mark.parametrize("mode", ["host", "direct", "staged"])
def test_a_state_travels_to_another_pool(make, mode):
    first = make(mode=mode)
    entry = first.checkpoint(PROMPT[:10])
    assert first.put(entry)
    assert first.store.counters.puts_stored == 1
    assert first.ledger.counters.puts_ok == 1
    second = make(mode=mode)
    assert second.resume(PROMPT, [5, 10, 15]) == 10
    assert second.store.counters.gets_ok == second.ledger.counters.gets_ok == 1
    assert second.pools[0].copied_bytes == 0
    # The second time it is a local checkpoint.
    assert second.resume(PROMPT, [5, 10]) == 10
    assert second.store.counters.finds == 1


def test_the_longest_boundary_within_the_limits_is_loaded(make):
    stored_by_another(make, positions=(4, 8, 12, 16))
    rig = make(slots=8)
    assert rig.resume(PROMPT[:17], [4, 8, 12, 16]) == 16
    rig.evict_all()
    # One token is always left to compute, and what other caches hold is a limit.
    assert rig.resume(PROMPT[:16], [4, 8, 12, 16]) == 12
    rig.evict_all()
    request = rig.request(PROMPT)
    assert rig.store.find(request, [4, 8, 12, 16], limit=9)
    rig.settle(lambda: not rig.store.pending(request))
    assert rig.life.admit(request, limit=9)
    assert request.resumed == 8
    rig.life.cancel(request)
    # A longer local checkpoint is no hit past the limit: the shorter one is loaded all the same.
    rig.evict_all()
    rig.checkpoint(PROMPT[:16])
    request = rig.request(PROMPT)
    assert rig.store.find(request, [8], limit=9)
    rig.settle(lambda: not rig.store.pending(request))
    assert rig.life.admit(request, limit=9)
    assert request.resumed == 8
    rig.life.cancel(request)
    # Nothing past the local hit: nothing to ask.
    assert not rig.store.find(rig.request(PROMPT), [4, 8])


def test_H9_the_shorter_of_two_parts_decides(make):
    """KV is saved to 16, the state only to 8: the hit is 8. Saved state past the KV is not used."""
    stored_by_another(make, positions=(8,))
    rig = make()
    assert rig.resume(PROMPT, [8, 16]) == 8
    rig.evict_all()
    request = rig.request(PROMPT)
    assert not rig.store.find(request, [8, 16], limit=7)
    assert rig.life.admit(request, limit=7)
    assert request.resumed == 0
    rig.life.cancel(request)


def test_no_boundary_inside_media_is_asked_for(make):
    rig = make()
    assert not rig.store.find(rig.request(PROMPT, media=[(5, 15, b"image")]), [8, 12])
    assert rig.store.find(rig.request(PROMPT, media=[(5, 15, b"image")]), [8, 15])


def test_two_requests_share_one_load(make):
    stored_by_another(make)
    rig = make()
    requests = [rig.request(PROMPT), rig.request([*PROMPT, 7])]
    for request in requests:
        assert rig.store.find(request, [10])
    rig.settle(lambda: not any(rig.store.pending(request) for request in requests))
    assert rig.raw[0].calls["get"] == 1
    for request in requests:
        assert rig.life.admit(request)
        assert request.resumed == 10
        rig.life.cancel(request)


def test_loads_past_the_cap_wait_until_the_finds_deadline(make):
    stored_by_another(make, positions=(4, 8, 12))
    now = [0.0]
    rig = make(max_gets=1, clock=lambda: now[0])
    rig.raw[0].gate.clear()
    requests = [rig.request(PROMPT[: position + 1]) for position in (4, 8, 12)]
    for request, position in zip(requests, (4, 8, 12)):
        assert rig.store.find(request, [position])
    rig.settle(lambda: len(rig.store._parked) == 2)
    assert all(rig.store.pending(request) for request in requests)
    now[0] = QUICK.find_deadline_s - 0.1
    rig.raw[0].gate.set()
    rig.settle(lambda: rig.ledger.counters.gets_ok == 2)
    rig.raw[0].gate.clear()
    rig.settle(lambda: not rig.store._parked)
    now[0] = QUICK.find_deadline_s + 0.1
    rig.raw[0].gate.set()
    rig.settle(lambda: not any(rig.store.pending(request) for request in requests))
    for request in requests:
        assert rig.life.admit(request)
        assert request.resumed == len(request.key) - 1
        rig.life.cancel(request)


def test_a_load_that_others_keep_waiting_is_given_up_at_the_finds_deadline(make):
    stored_by_another(make, positions=(4, 8))
    now = [0.0]
    rig = make(max_gets=1, clock=lambda: now[0], settings=replace(QUICK, get_deadline_s=50.0))
    rig.raw[0].gate.clear()
    requests = [rig.request(PROMPT[: position + 1]) for position in (4, 8)]
    for request in requests:
        assert rig.store.find(request, [len(request.key) - 1])
    rig.settle(lambda: len(rig.store._parked) == 1)
    now[0] = QUICK.find_deadline_s
    rig.store.poll()
    assert sorted(rig.store.pending(request) for request in requests) == [False, True]
    rig.raw[0].gate.set()


def test_a_cancel_while_loading_frees_the_slot_only_at_the_end(make):
    stored_by_another(make)
    rig = make()
    request = rig.find_half_way(PROMPT, [10])
    free = len(rig.ledger.free)
    rig.life.cancel(request)
    rig.store.poll()
    assert len(rig.ledger.free) == free == 5
    rig.raw[0].gate.set()
    assert rig.store.settle(10)
    assert len(rig.ledger.free) == 6
    assert rig.index.size == 0


def test_I1_a_slot_is_not_reused_while_a_put_reads_it(make, backend):
    """The put is delayed; its checkpoint is evicted and the pool fills up meanwhile: the stored bytes are the old state."""
    rig = make(slots=3)
    entry = rig.checkpoint(PROMPT[:10])
    rig.put_half_way(entry)
    rig.index.remove(entry)
    slot = entry.handle.slot
    for number in range(4):
        assert rig.checkpoint([50 + number]).handle.slot != slot
    rig.raw[0].gate.set()
    assert rig.store.settle(10)
    rig.evict_all()
    assert len(rig.ledger.free) == 3
    assert make().resume(PROMPT, [10]) == 10


def test_I3_a_second_life_is_not_touched_by_the_old_put(make):
    rig = make()
    entry = rig.checkpoint(PROMPT[:10])
    rig.put_half_way(entry)
    request = rig.request(PROMPT)
    assert rig.life.admit(request)
    assert request.resumed == 10
    rig.run(request, 3)
    rig.life.preempt(request, publish=False)
    assert rig.life.admit(request)
    rig.raw[0].gate.set()
    assert rig.store.settle(10)
    rig.run(request, len(PROMPT) - request.position)
    assert rig.life.finish(request) is not None


def test_I6_only_a_checkpoint_can_be_stored(make, backend):
    rig = make()
    entry = rig.checkpoint(PROMPT[:10])
    rig.index.remove(entry)
    rig.checkpoint([1, 2, 3])  # the slot's next life
    assert not rig.store.put(entry)
    never = rig.index.reserve(PrefixKey(PROMPT), 5, "export")
    assert not rig.store.put(never)
    assert not backend.objects
    assert rig.store.counters.puts_refused == 2
    assert rig.put(rig.checkpoint(PROMPT[:10]))
    assert make().resume(PROMPT, [10]) == 10


@pytest.mark.parametrize(
    "code", [-704, 0, 1, 8703, 8704, 8704 + 63, -600, -703, -706, -707, -800, -801, -900, -901, -1]
)
def test_I10_only_a_full_read_is_a_hit(make, code):
    stored_by_another(make)
    rig = make()
    rig.raw[0].codes["get"] += [code, code]
    assert rig.resume(PROMPT, [10]) == 0
    assert rig.ledger.counters.gets_ok == rig.store.counters.gets_ok == 0
    assert len(rig.ledger.free) == rig.ledger.num_slots
    name = "e_data" if code == -801 else "e_io" if code in (-706, -707, -800, -900, -901, -1) else "e_miss"
    assert getattr(rig.ledger.counters, name) == 1
    rig.raw[0].codes.clear()
    rig.settle(lambda: not rig.store._doomed and not rig.store._removing)
    time.sleep(QUICK.retry_after_s)
    if code < 0:
        # The object itself was good: it is still there, and found once it is asked for again.
        assert rig.resume(PROMPT, [10]) == 10


@pytest.mark.parametrize("lie", [-1, 1])
def test_I10_a_length_that_is_off_by_one_is_a_miss_whatever_the_bytes(make, lie):
    stored_by_another(make)
    rig = make()
    rig.raw[0].lie = lie
    assert rig.resume(PROMPT, [10]) == 0
    assert rig.ledger.counters.e_miss == 1


def test_a_lease_that_ran_out_is_tried_once_more(make):
    stored_by_another(make)
    rig = make()
    rig.raw[0].codes["get"].append(-707)
    assert rig.resume(PROMPT, [10]) == 10


@pytest.mark.parametrize("call", ["exist", "put"])
@pytest.mark.parametrize("code", [-200, -600, -703, -704, -706, -707, -800, -900])
def test_a_put_that_fails_leaves_the_checkpoint_alone(make, call, code, backend):
    rig = make()
    entry = rig.checkpoint(PROMPT[:10])
    rig.raw[0].codes[call].append(code)
    assert not rig.put(entry)
    assert rig.store.counters.puts_failed == 1
    assert rig.ledger.counters.e_capacity == (code == -200)
    assert not backend.objects
    assert rig.index.get(entry.key, 10) is entry
    assert rig.put(entry)


def test_a_put_counts_only_when_the_key_is_seen(make, backend):
    """Mooncake answers 0 to a put while another client's unfinished put holds the key."""
    rig = make()
    entry = rig.checkpoint(PROMPT[:10])
    (name,) = rig.store._keys.names(entry.key, [10])
    backend.pending.add(rig.store._keys.of_rank(name, 0))
    assert not rig.put(entry)
    assert rig.ledger.counters.e_io == 1
    backend.pending.clear()
    assert rig.put(entry)


@pytest.mark.parametrize("other", [False, True], ids=["same", "another"])
def test_I13_a_key_that_exists_is_done(make, backend, other):
    """Whatever bytes the second writer has for it: the object stays one whole payload, the first one's."""
    first, second = make(), make()
    assert first.put(first.checkpoint(PROMPT[:10]))
    if other:
        second.weights = "what it should not be"
    assert second.put(second.checkpoint(PROMPT[:10]))
    assert make().resume(PROMPT, [10]) == 10
    assert second.store.counters.puts_present == 1
    assert second.raw[0].calls["put"] == 0
    assert len(backend.objects) == 1
