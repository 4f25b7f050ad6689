"""Requests through the pool: a small scheduler over a simulated model whose state is the exact prefix it has seen."""

import contextlib
import random

import pytest

from compact_state.pool import (
    UNRESOLVED,
    CapacityError,
    InvariantError,
    Phase,
    StateRequest,
    StepPlan,
    StepRow,
)
from compact_state.pool.invariants import check
from tests.pool.lifecycle_world import World


def test_publish_is_the_same_slot_and_the_next_step_writes_another() -> None:
    world = World(3)
    request = world.request("a", range(12))
    assert world.life.admit(request)
    first = world.step([StepRow(request, 5)])
    assert (first.read_ids, first.positions) == ([-1], [0])
    again = world.step([StepRow(request, 1)])
    assert again.read_ids == again.write_ids == first.write_ids
    entry = world.life.publish(request)
    assert entry is not None
    assert entry.handle.slot == first.write_ids[0]
    assert entry.position == 6
    after = world.step([StepRow(request, 1)])
    assert after.read_ids == first.write_ids
    assert after.write_ids != after.read_ids
    world.life.finish(request, publish=False)
    other = world.request("b", range(12))
    assert world.life.admit(other)
    assert other.resumed == 6
    restored = world.step([StepRow(other, 2)])
    assert restored.read_ids == [entry.handle.slot]
    assert restored.write_ids != restored.read_ids
    world.life.finish(other)
    world.idle()


def test_checkpoints_inside_a_row_and_at_its_end() -> None:
    world = World(8)
    request = world.request("a", range(40))
    assert world.life.admit(request)
    plan = world.step([StepRow(request, 32, positions=range(8, 33, 8))])
    assert (plan.cu, plan.ends) == ([0, 3], [8, 16, 24])
    assert [entry.position for entry in plan.entries] == [8, 16, 24, 32]
    assert plan.entries[-1].handle.slot == plan.write_ids[0]
    world.life.finish(request)
    world.idle()


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("policy", ["late", "early"])
@pytest.mark.parametrize("seed", range(4))
def test_random_traffic_computes_every_state_right(seed: int, policy: str, in_place: bool) -> None:
    rng = random.Random(seed)
    world = World(11, budget=5, policy=policy, in_place=in_place, max_publishes_per_step=2)
    prefixes = [[rng.randrange(9) for _ in range(40)] for _ in range(3)]
    waiting = []
    for name in range(60):
        tokens = prefixes[rng.randrange(3)][: rng.randrange(4, 40)] + [rng.randrange(9) for _ in range(5)]
        waiting.append(world.request(name, tokens))
    running: list[StateRequest] = []
    steps = 0
    while waiting or running:
        steps += 1
        assert steps < 5000, "no progress"
        while waiting and len(running) < 4 and world.life.admit(waiting[0]):
            running.append(waiting.pop(0))
        rows = []
        for request in rng.sample(running, len(running)):
            left = len(request.key) - request.position
            rows.append(StepRow(request, min(left, rng.randrange(1, 9)), positions=range(4, 48, 4)))
        if rows:
            try:
                world.step(rows, run=rng.random() < 0.5)
            except CapacityError:
                assert len(world.life.fences), "refused although no step is outstanding"
                world.run()
        for request in list(running):
            if request.position == len(request.key):
                running.remove(request)
                world.life.finish(request, publish=rng.random() < 0.7)
            elif rng.random() < 0.03:
                running.remove(request)
                world.life.cancel(request)
            elif rng.random() < 0.03:
                running.remove(request)
                waiting.append(request)
                world.life.preempt(request)
        check(world.ledger, world.index)
    world.idle()
    assert world.index.hit_tokens > 0


def test_admission_reserves_what_decode_needs() -> None:
    """Two slots, two requests that publish after every step they can: neither ever waits for ever."""
    world = World(3)
    requests = [world.request(name, [name] * 30) for name in range(4)]
    admitted = [request for request in requests if world.life.admit(request)]
    assert len(admitted) == 3
    for _ in range(20):
        world.step([StepRow(request) for request in admitted])
        for request in admitted:
            world.life.publish(request)
    assert world.ledger.counters.publishes_refused == 0
    assert world.life.skipped_checkpoints > 0
    for request in requests:
        world.life.cancel(request)
    world.idle()


def test_G10_cancel_at_each_point_restores_the_free_count() -> None:
    world = World(4)
    seed = world.request("seed", range(20))
    assert world.life.admit(seed)
    world.prefill(seed, [16, 4])
    entry = world.life.finish(seed)
    assert entry is not None
    for point in ("before admission", "admitted", "first chunk", "middle chunk", "queued step"):
        request = world.request(point, [*range(20), *range(50, 90)])
        if point != "before admission":
            assert world.life.admit(request)
            assert request.resumed == 20
        if point in ("first chunk", "middle chunk"):
            world.prefill(request, [8] * (1 if point == "first chunk" else 2))
        if point == "queued step":
            world.step([StepRow(request, 8)], run=False)
        world.life.cancel(request)
        world.idle()
        assert world.index.size == 1
        assert len(world.ledger.evictable) == 1, "the cached source stays pinned"


def test_G12_a_cancelled_requests_slots_wait_for_its_kernel() -> None:
    world = World(3)
    request = world.request("a", range(30))
    assert world.life.admit(request)
    world.prefill(request, [10])
    plan = world.step([StepRow(request, 10)], run=False)
    free = len(world.ledger.free)
    world.life.cancel(request)
    assert len(world.ledger.free) == free
    assert world.ledger.condition(plan.write_ids[0]).value == "draining"
    frees = world.ledger.counters.frees
    world.run()
    assert world.ledger.counters.frees == frees + 1
    assert world.index.size == 0
    world.idle()


def test_G14_no_checkpoint_slot_is_no_error_and_no_live_slot_is_a_wait() -> None:
    world = World(8, max_puts=8)
    cached = []
    for name in range(4):
        request = world.request(name, [name] * 10)
        assert world.life.admit(request)
        world.prefill(request, [10])
        cached.append(world.life.finish(request))
    leases = [world.life.begin_put(entry) for entry in cached if entry]
    assert all(leases)
    live = [world.request(("live", name), [10 + name] * 20) for name in range(4)]
    assert all(world.life.admit(request) for request in live)
    plan = world.step([StepRow(request, 8, positions=[4, 8]) for request in live])
    assert plan.entries == []
    assert not world.life.admit(world.request("late", range(5)))
    for lease in leases:
        assert lease is not None
        world.ledger.put_end(lease.op, ok=True)
    assert world.life.admit(world.life.requests["late"])


def test_G1_first_piece_of_one_or_two_tokens_reads_nothing() -> None:
    for piece in (1, 2):
        world = World(2)
        request = world.request("a", range(60))
        assert world.life.admit(request)
        plan = world.step([StepRow(request, piece)])
        assert plan.read_ids == [-1]
        world.prefill(request, [1] * 50)
        assert world.memory[plan.write_ids[0]] == request.key.slice(0, piece + 50)


def test_G2_G4_poisoned_slots_never_reach_a_read() -> None:
    world = World(1)
    for secret in range(20):
        request = world.request(secret, [secret] * 9)
        assert world.life.admit(request)
        world.prefill(request, [4, 1, 1, 1])
        world.life.finish(request, publish=secret % 2 == 0)
        world.run()
    assert world.ledger.counters.frees == 20 - world.index.size


def test_G6_host_far_ahead_every_chunk_is_stored_as_it_was() -> None:
    for policy in ("late", "early"):
        world = World(12, policy=policy)
        request = world.request("a", range(48))
        assert world.life.admit(request)
        for _ in range(3):
            world.step([StepRow(request, 16, positions=range(8, 49, 8))], run=False)
        world.run()
        assert sorted(entry.position for entry in world.index.entries()) == [8, 16, 24, 32, 40, 48]


def test_G9_a_thousand_requests_leave_nothing_behind() -> None:
    rng = random.Random(9)
    world = World(16, budget=8)
    running: list[StateRequest] = []
    for number in range(1000):
        request = world.request(
            number % 50 if number % 50 not in world.life.requests else ("x", number), [number % 7] * 8
        )
        if world.life.admit(request):
            running.append(request)
        if running:
            rows = [StepRow(r) for r in running if r.position < len(r.key)]
            if rows:
                with contextlib.suppress(CapacityError):
                    world.step(rows, run=False)
            world.run()
        while running and (len(running) > 5 or rng.random() < 0.4):
            ended = running.pop(rng.randrange(len(running)))
            world.life.cancel(ended) if rng.random() < 0.5 else world.life.finish(ended)
        if request.phase is Phase.WAITING:
            world.life.cancel(request)
    for request in running:
        world.life.cancel(request)
    assert not world.life.requests
    world.idle()


def test_H1_every_checkpoint_says_what_it_holds() -> None:
    world = World(32)
    prompt = list(range(2002))
    request = world.request("a", prompt)
    assert world.life.admit(request)
    world.prefill(request, [364, 1236, 402], positions=[331, 364, 1599, 1600, 1601, 2002])
    world.life.finish(request, publish=False)
    assert sorted(entry.position for entry in world.index.entries()) == [331, 364, 1599, 1600, 1601, 2002]
    for resume in (331, 1599, 1601, 2531, 3011):
        longer = world.request(
            ("r", resume), [*prompt[: min(resume, 2002)], *range(5000, 5000 + max(resume - 2002, 0)), 9]
        )
        assert world.life.admit(longer)
        assert longer.resumed == max(p for p in (331, 364, 1599, 1600, 1601, 2002) if p <= resume)
        world.prefill(longer, [len(longer.key) - longer.position])
        world.life.finish(longer, publish=False)
    world.idle()


@pytest.mark.parametrize(("block", "interval"), [(816, 1648), (4, 1568), (64, 64), (64, 192)])
def test_H6_every_published_position_is_a_multiple_of_the_interval(block: int, interval: int) -> None:
    world = World(128)
    request = world.request("a", range(6000))
    assert world.life.admit(request)
    rng = random.Random(interval)
    while request.position < 6000:
        piece = min(block * rng.randrange(1, 9) + rng.randrange(3), 6000 - request.position)
        world.step([StepRow(request, piece, positions=range(interval, 6001, interval))], run=rng.random() < 0.2)
    world.run()
    positions = sorted(entry.position for entry in world.index.entries())
    assert positions == list(range(interval, 6001, interval))


def test_I9_boundaries_of_prompt_and_generation_are_saved_and_reused() -> None:
    world = World(16)
    request = world.request("a", range(100))
    assert world.life.admit(request)
    world.prefill(request, [100], positions=range(64, 1000, 64))
    for token in range(156):
        world.life.extend(request, [1000 + token])
        world.step([StepRow(request, positions=range(64, 1000, 64))])
    assert sorted(entry.position for entry in world.index.entries()) == [64, 128, 192, 256]
    key = request.key
    world.life.finish(request, publish=False)
    follow = world.life.add("b", key.extended(range(20)))
    assert world.life.admit(follow)
    assert follow.resumed == 256
    capped = world.life.add("c", key.extended(range(20)))
    assert world.life.admit(capped, limit=255)
    assert capped.resumed == 192


def test_F9_draft_steps_publish_only_exact_positions() -> None:
    world = World(4)
    request = world.request("a", range(200))
    assert world.life.admit(request)
    world.prefill(request, [61])
    world.life.plan([StepRow(request, UNRESOLVED)])
    assert request.position < 0
    with pytest.raises(InvariantError, match="does not know"):
        world.life.publish(request)
    world.life.resolve(request, 64)
    assert world.life.publish(request).position == 64  # type: ignore[union-attr]
    with pytest.raises(InvariantError, match="owns no slot"):
        world.life.resolve(request, 65)


def test_the_loop_of_the_package_docstring_runs_as_it_stands() -> None:
    import compact_state.pool as pool_package

    text = pool_package.__doc__ or ""
    code = text[text.index("    layout =") : text.index("`life.cancel(r)`")]
    code = "\n".join(line[4:] for line in code.splitlines())
    code = code.replace('"cuda"', '"cpu"').replace('CudaFence("cpu")', "ImmediateFence()")
    code = code.replace("uniform(24, channels=8192, value_heads=32)", "uniform(1, channels=8, value_heads=1)")
    lengths: dict[int, int] = {}

    def sample(plan: StepPlan) -> list[int]:
        return [1 if plan.step % 7 == 0 else 0 for _ in plan.read_ids]

    names = dict(vars(pool_package))
    requests = {number: [number % 5] * (700 + 300 * number % 2000) for number in range(80)}
    names.update(
        requests=requests, run=lambda plan, table: lengths.update({plan.step: table.rows}), sample=sample, EOS=1
    )
    exec(code, names)
    life = names["life"]
    assert not life.requests
    assert max(lengths.values()) == 64
    assert life.index.hit_tokens > 0
    check(life.ledger, life.index)
