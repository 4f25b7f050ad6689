"""What comes between two steps: failed steps, new weights, sleep, transfers that start, hang and end."""

import pytest

from compact_state.pool import (
    InvariantError,
    Phase,
    PoolClosedError,
    SlotHandle,
    StepRow,
    StuckLeaseError,
)
from compact_state.pool.handles import GENERATION_MASK, INCARNATION_MASK
from compact_state.pool.invariants import check
from tests.pool.lifecycle_world import World


def test_a_failed_step_takes_its_checkpoints_and_states_with_it() -> None:
    world = World(10)
    good = world.request("good", [7] * 40)
    assert world.life.admit(good)
    world.prefill(good, [8], positions=[8])
    bad = world.request("bad", range(40))
    assert world.life.admit(bad)
    plan = world.step([StepRow(bad, 16, positions=[8, 16])], run=False)
    reader = world.request("reader", range(40))
    assert world.life.admit(reader)
    assert reader.resumed == 16
    lease = world.life.begin_put(plan.entries[0])
    assert lease is not None
    assert not world.ledger.may_start(lease)
    lost = world.life.failed(plan.step)
    assert {request.id for request in lost} == {"bad", "reader"}
    assert [entry.position for entry in world.index.entries()] == [8]
    assert lease.revoked
    outcome = world.ledger.put_end(lease.op, ok=False)
    assert outcome is not None
    assert not outcome.ok
    world.queue.clear()
    world.ledger.step_done(plan.step)
    assert world.life.admit(bad)
    assert bad.resumed == 0
    world.prefill(bad, [16])
    check(world.ledger, world.index)


def test_new_weights_clear_the_cache_and_taint_what_runs() -> None:
    world = World(8)
    request = world.request("a", range(60))
    idle = world.request("idle", range(60))
    assert world.life.admit(request)
    world.prefill(request, [16], positions=[8, 16])
    assert [r.id for r in world.life.new_weights()] == ["a"]
    assert world.index.size == 0
    assert world.index.removed == {"epoch": 2}
    world.prefill(request, [16], positions=[24, 32])
    assert world.index.size == 0
    assert world.life.publish(request) is None
    assert world.life.finish(request) is None
    assert world.life.admit(idle)
    assert idle.resumed == 0
    world.prefill(idle, [16], positions=[16])
    assert [entry.epoch for entry in world.index.entries()] == [1]


def test_sleep_waits_for_steps_and_transfers_and_never_frees_under_them() -> None:
    world = World(6)
    request = world.request("a", range(60))
    assert world.life.admit(request)
    world.prefill(request, [16], positions=[16])
    (entry,) = world.index.entries()
    lease = world.life.begin_put(entry)
    assert lease is not None
    world.step([StepRow(request, 4)], run=False)
    with pytest.raises(StuckLeaseError, match="steps done 1 of 2"):
        world.life.sleep(deadline_s=0.0)
    assert world.ledger.mode == "drain"
    assert request.phase is Phase.WAITING
    with pytest.raises(PoolClosedError):
        world.life.plan([])
    world.life.resume()
    world.life.launched(world.life.plan([]).step)
    world.run()
    with pytest.raises(StuckLeaseError, match="1 transfers"):
        world.life.sleep(deadline_s=0.0)
    world.life.sleep(deadline_s=5.0, progress=lambda: world.ledger.put_end(lease.op, ok=True) and None)
    assert world.ledger.mode == "asleep"
    old = entry.handle
    world.life.wake()
    assert not world.ledger.is_current(old)
    assert world.life.admit(request)
    assert request.resumed == 0
    with pytest.raises(InvariantError, match="stale handle"):
        world.ledger.put_begin(old)


def test_a_stuck_transfer_is_quarantined_and_keeps_the_memory() -> None:
    world = World(4)
    request = world.request("a", range(20))
    lease = world.life.begin_load(request, 8, deadline=10.0)
    assert lease is not None
    assert world.life.expire(9.0) == []
    assert world.life.expire(10.0) == [lease]
    assert request.phase is Phase.WAITING
    assert world.ledger.condition(lease.handle.slot).value == "quarantined"
    check(world.ledger, world.index)
    world.ledger.drain()
    with pytest.raises(StuckLeaseError, match="1 past their deadline"):
        world.ledger.sleep()
    assert world.life.end_load(lease.op, ok=True) is None
    assert world.index.size == 0
    assert world.ledger.condition(lease.handle.slot).value == "quarantined"
    world.ledger.sleep()
    world.life.wake()
    assert len(world.ledger.free) == 4
    check(world.ledger, world.index)


def test_cancel_while_loading_keeps_the_destination_until_the_end() -> None:
    world = World(2)
    one, two = world.request("one", range(20)), world.request("two", range(20))
    lease = world.life.begin_load(one, 8)
    assert lease is not None
    assert world.life.begin_load(two, 8) is lease
    world.life.cancel(one)
    assert not lease.cancelled
    world.life.cancel(two)
    assert lease.cancelled
    assert world.ledger.condition(lease.handle.slot).value == "loading"
    outcome = world.life.end_load(lease.op, ok=True)
    assert outcome is not None
    assert not outcome.ok
    world.idle()
    assert world.index.size == 0


def test_I8_G8_a_load_that_fails_leaves_everything_as_before() -> None:
    world = World(4, ranks=2)
    request = world.request("a", range(20))
    before = len(world.ledger.free)
    lease = world.life.begin_load(request, 8)
    assert lease is not None
    assert world.life.end_load(lease.op, rank=0, ok=True) is None
    outcome = world.life.end_load(lease.op, rank=1, ok=False)
    assert outcome is not None
    assert (outcome.ok, outcome.error) == (False, "E_RANK")
    assert world.ledger.counters.e_rank == 1
    assert len(world.ledger.free) == before
    assert world.life.admit(request)
    assert request.resumed == 0


def test_a_load_on_all_ranks_is_a_hit() -> None:
    world = World(4, ranks=2)
    request = world.request("a", range(20))
    lease = world.life.begin_load(request, 8)
    assert lease is not None
    world.memory[lease.handle.slot] = request.key.slice(0, 8)
    world.life.end_load(lease.op, rank=1, ok=True)
    assert world.life.end_load(lease.op, rank=1, ok=True) is None
    assert world.ledger.counters.e_stale == 1
    outcome = world.life.end_load(lease.op, rank=0, ok=True)
    assert outcome is not None
    assert outcome.ok
    assert world.life.admit(request)
    assert request.resumed == 8


def test_I1_I3_a_put_keeps_the_slot_and_an_old_completion_is_stale() -> None:
    world = World(2, budget=1)
    request = world.request("a", range(20))
    assert world.life.admit(request)
    world.prefill(request, [8])
    entry = world.life.preempt(request)
    assert entry is not None
    lease = world.life.begin_put(entry)
    assert lease is not None
    stored = world.memory[entry.handle.slot]
    world.index.remove(entry, "evicted")
    assert world.life.admit(request)
    assert request.resumed == 0
    plan = world.step([StepRow(request, 8)])
    assert plan.write_ids != [entry.handle.slot]
    assert world.memory[entry.handle.slot] == stored
    assert not world.life.admit(world.request("b", range(4)))
    outcome = world.ledger.put_end(lease.op, ok=True)
    assert outcome is not None
    assert outcome.ok
    assert world.ledger.put_end(lease.op, ok=True) is None
    assert world.ledger.counters.e_stale == 1
    assert world.life.admit(world.life.requests["b"])


def test_I6_what_is_no_checkpoint_cannot_be_stored() -> None:
    world = World(4)
    request = world.request("a", range(20))
    assert world.life.admit(request)
    world.prefill(request, [8])
    assert request.holder is not None
    assert request.holder.rec is not None
    with pytest.raises(InvariantError, match="not cached"):
        world.ledger.put_begin(world.ledger.handle(request.holder.rec))
    entry = world.life.finish(request)
    assert entry is not None
    world.index.remove(entry)
    with pytest.raises(InvariantError, match="stale handle"):
        world.ledger.put_begin(entry.handle)


@pytest.mark.parametrize("end", ["preempt", "finish", "cancel"])
def test_a_request_that_leaves_while_loading_is_not_touched_by_the_loads_end(end: str) -> None:
    world = World(6)
    request = world.request("a", range(20))
    lease = world.life.begin_load(request, 8)
    assert lease is not None
    getattr(world.life, end)(request)
    assert lease.cancelled
    waits = end == "preempt"
    assert (request.id in world.life.requests) == waits
    assert not waits or world.life.admit(request)
    phase, holder = request.phase, request.holder
    world.life.end_load(lease.op, ok=False)
    assert (request.phase, request.holder) == (phase, holder)
    if waits:
        world.prefill(request, [8])
        world.life.cancel(request)
    world.idle()


@pytest.mark.parametrize("end", ["preempt", "finish"])
def test_an_ended_request_does_not_end_again(end: str) -> None:
    world = World(6)
    request = world.request("a", range(20))
    assert world.life.admit(request)
    world.life.finish(request)
    world.life.cancel(request)
    with pytest.raises(InvariantError, match="request 'a' has ended"):
        getattr(world.life, end)(request)
    assert request.phase is Phase.ENDED
    assert not world.life.requests
    world.idle()


def test_new_weights_share_no_load_with_the_old_ones() -> None:
    world = World(6)
    old, new = world.request("old", range(20)), world.request("new", range(20))
    before = world.life.begin_load(old, 8)
    world.life.new_weights()
    after = world.life.begin_load(new, 8)
    assert before is not None
    assert after is not None
    assert after is not before
    outcome = world.life.end_load(before.op, ok=True)
    assert outcome is not None
    assert not outcome.ok
    world.memory[after.handle.slot] = new.key.slice(0, 8)
    world.life.end_load(after.op, ok=True)
    assert world.life.admit(new)
    assert new.resumed == 8


def test_an_admission_that_raises_admits_nobody() -> None:
    world = World(4)
    first = world.request("first", range(8))
    assert world.life.admit(first)
    world.prefill(first, [8])
    world.life.finish(first)
    request = world.request("a", range(20))

    def raises(position: int) -> bool:
        raise RuntimeError("asked for the blocks of a request that is gone")

    with pytest.raises(RuntimeError):
        world.life.admit(request, usable=raises)
    assert (request.phase, request.holder, world.ledger.demand) == (Phase.WAITING, None, 0)
    assert world.life.admit(request)
    assert request.resumed == 8


@pytest.mark.parametrize("max_gets", [0, 1])
def test_a_load_that_finds_no_room_costs_no_checkpoint(max_gets: int) -> None:
    world = World(6, budget=2, max_gets=max_gets)
    for name in range(2):
        request = world.request(name, [name] * 8)
        assert world.life.admit(request)
        world.prefill(request, [8])
        world.life.finish(request)
    for number in range(max_gets):
        assert world.life.begin_load(world.request(f"loads {number}", [7 + number] * 9), 4) is not None
    size = world.index.size
    assert world.life.begin_load(world.request("late", range(20)), 8) is None
    assert world.index.size == size
    assert world.ledger.counters.e_capacity == 1


def test_the_budget_holds_while_a_step_and_loads_are_under_way() -> None:
    world = World(30, budget=3)
    request = world.request("a", range(100))
    assert world.life.admit(request)
    world.prefill(request, [60], positions=range(10, 61, 10))
    # The deepest: of this prompt's states they spare most.
    assert sorted(entry.position for entry in world.index.entries()) == [40, 50, 60]
    leases = [world.life.begin_load(world.request(number, [number] * 9), 4) for number in range(5)]
    assert [lease is not None for lease in leases] == [True, True, False, False, False]
    assert [entry.position for entry in world.index.entries()] == [60], "the request still reads it"
    world.prefill(request, [10, 10], positions=[70, 80])
    assert [entry.position for entry in world.index.entries()] == [80], "60 was read until the step to 70 ended"
    for lease in leases[:2]:
        assert lease is not None
        world.memory[lease.handle.slot] = lease.entry.key.slice(0, 4)  # type: ignore[union-attr]
        world.life.end_load(lease.op, ok=True)
    assert world.index.size == 3
    world.prefill(request, [10], positions=[90])
    assert world.index.size == 3


def test_weights_that_change_during_sleep_are_other_weights() -> None:
    world = World(4)
    world.life.sleep(deadline_s=0.0)
    assert world.life.new_weights() == []
    assert world.ledger.epoch == 1
    world.life.wake()
    world.ledger.drain()
    with pytest.raises(PoolClosedError):
        world.life.new_weights()


@pytest.mark.parametrize(
    ("other", "shared"),
    [
        ({"media": [(2, 4, b"cat"), (9, 12, b"x")]}, True),
        ({"media": [(2, 4, b"cat"), (8, 12, b"y")]}, True),
        ({"media": [(2, 4, b"cat")]}, True),
        ({"media": [(2, 4, b"dog"), (8, 12, b"x")]}, False),
        ({"media": [(2, 4, b"cats"), (8, 12, b"x")]}, False),
        ({"media": [(2, 5, b"cat"), (8, 12, b"x")]}, False),
        ({"media": [(3, 4, b"cat"), (8, 12, b"x")]}, False),
        ({"media": [(8, 12, b"x")]}, False),
        ({"media": [(2, 4, b"cat"), (7, 8, b"cat")]}, False),
        ({"adapter": ""}, False),
        ({"adapter": "n"}, False),
    ],
)
def test_one_load_serves_requests_whose_states_are_the_same(other: dict[str, object], shared: bool) -> None:
    """What comes behind the boundary does not matter, all before it does: tokens, media, adapter."""
    world = World(6)
    key: dict[str, object] = {"media": [(2, 4, b"cat"), (8, 12, b"x")]}
    first, second = world.request("a", range(20), **key), world.request("b", range(20), **{**key, **other})
    assert first.key.digest(8) != world.request("c", [*range(7), 99, *range(20)], **key).key.digest(8)
    lease = world.life.begin_load(first, 8)
    assert lease is not None
    assert (world.life.begin_load(second, 8) is lease) == shared
    assert (first.key.digest(8) == second.key.digest(8)) == shared


def test_handles_stay_apart_where_generations_and_incarnations_wrap() -> None:
    world = World(2)
    for rec in world.ledger.records:
        rec.gen = GENERATION_MASK
    world.ledger.incarnation = INCARNATION_MASK
    handles = []
    for number in range(3):
        request = world.request(number, [number] * 8)
        assert world.life.admit(request)
        world.prefill(request, [8])
        entry = world.life.finish(request)
        assert entry is not None
        handles.append(entry.handle)
        assert SlotHandle.unpack(entry.handle.pack()) == entry.handle
        assert world.ledger.is_current(entry.handle)
        world.index.remove(entry)
        assert not world.ledger.is_current(entry.handle)
        world.life.sleep(deadline_s=0.0)
        world.life.wake()
    assert [(handle.generation, handle.incarnation) for handle in handles] == [
        (GENERATION_MASK, INCARNATION_MASK), (0, 0), (1, 1)
    ]  # fmt: skip
    assert not any(world.ledger.is_current(handle) for handle in handles)
    check(world.ledger, world.index)
