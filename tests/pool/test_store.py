"""The store connector over a store in memory: codes, faults at every point, ranks, deadlines, the pool's modes."""

import logging
import pickle
import time
from dataclasses import replace

import pytest
import torch

from compact_state.pool import ConfigError, PoolClosedError, PrefixKey, StateIOError, StuckLeaseError
from compact_state.pool.mooncake import MooncakeConfig, error_of, is_transport
from compact_state.pool.store_keys import StoreIdentity
from compact_state.pool.store_report import register_store_metrics
from compact_state.pool.store_transfer import StateTransfer, StepFences
from compact_state.pool.store_types import Breaker, Job, StoreSettings
from tests.pool.store_fake import FakeBackend
from tests.pool.store_rig import IDENTITY, QUICK, Rig

PROMPT = list(range(20))


@pytest.fixture
def backend():
    return FakeBackend()


@pytest.fixture
def make(backend):
    """Builds rigs over one store and closes them; each must be idle and whole at its end."""
    rigs = []

    def build(ranks=1, **options):
        rig = Rig([backend.client() for _ in range(ranks)], **options)
        rig.raw = [client._raw for client in rig.clients]
        rigs.append(rig)
        return rig

    yield build
    for rig in rigs:
        for raw in rig.raw:
            raw.gate.set()
        rig.close()
        rig.check_idle()
        assert all(raw.closed and not raw.registered for raw in rig.raw)


class Fence:
    def __init__(self):
        self.open = False

    def passed(self):
        return self.open

    def wait(self):
        self.open = True


def stored_by_another(make, ranks=1, positions=(10,), **options):
    """Puts states of PROMPT at `positions` into the store by an engine of its own."""
    rig = make(ranks, **options)
    for position in positions:
        assert rig.put(rig.checkpoint(PROMPT[:position]))
    return rig


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


def test_a_cancel_while_loading_frees_the_slot_only_at_the_end(make):
    stored_by_another(make)
    rig = make()
    rig.raw[0].gate.clear()
    request = rig.request(PROMPT)
    rig.store.find(request, [10])
    rig.settle(rig.raw[0].half_way.is_set)
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
    rig.raw[0].gate.clear()
    rig.store.put(entry)
    rig.settle(rig.raw[0].half_way.is_set)
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
    rig.raw[0].gate.clear()
    rig.store.put(entry)
    rig.settle(rig.raw[0].half_way.is_set)
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


def test_I13_a_key_that_exists_is_done(make, backend):
    first, second = make(), make()
    assert first.put(first.checkpoint(PROMPT[:10]))
    assert second.put(second.checkpoint(PROMPT[:10]))
    assert second.store.counters.puts_present == 1
    assert second.raw[0].calls["put"] == 0
    assert len(backend.objects) == 1


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


def test_I16_a_state_that_failed_is_not_waited_for_again_at_once(make):
    stored_by_another(make)
    rig = make(settings=replace(QUICK, retry_after_s=30.0))
    rig.raw[0].codes["get"].append(-800)
    assert rig.resume(PROMPT, [10]) == 0
    for _ in range(10):
        assert not rig.store.find(rig.request(PROMPT), [10])
    assert rig.raw[0].calls["get"] == 1


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
    raw.gate.clear()
    request = rig.request(PROMPT)
    rig.store.find(request, [10])
    rig.settle(raw.half_way.is_set)
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
    rig.store.poll()
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
    rig.raw[0].gate.clear()
    rig.store.put(late)
    rig.settle(rig.raw[0].half_way.is_set)
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
    rig.raw[0].gate.clear()
    request = rig.request(PROMPT)
    rig.store.find(request, [10])
    rig.settle(rig.raw[0].half_way.is_set)
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
    rig.raw[0].gate.clear()
    rig.store.put(rig.checkpoint(PROMPT[:10]))
    rig.settle(rig.raw[0].half_way.is_set)
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
    rig.raw[0].gate.clear()
    rig.store.put(entry)
    rig.settle(rig.raw[0].half_way.is_set)
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
