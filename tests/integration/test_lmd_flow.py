"""The host flow: requests through lmdeploy's own scheduler, trie and loop on the pool's ledger, in every phase."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.lmdeploy
pytest.importorskip("lmdeploy", reason="lmdeploy is not installed")

import lmd_flow  # noqa: E402  after the skip: it imports lmdeploy
from lmd_flow import Flow  # noqa: E402
from lmd_prompts import answer, is_empty, prompt  # noqa: E402


@pytest.fixture(autouse=True)
def _alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMDEPLOY_COMPACT_PREFILL_SAVE_ALIGNMENT", "128")


def test_prefill_publishes_its_end_and_the_boundaries_inside_without_a_copy_of_state() -> None:
    flow = Flow()
    seq = flow.serve(prompt(450), 4)
    assert list(seq.generated_ids) == answer(prompt(450), 4)
    assert flow.checkpoints == [128, 256, 384, 450]
    prefill, first, *_ = flow.device.forwards
    assert prefill["lengths"] == [450]
    assert prefill["exports"].ends.tolist() == [128, 256, 384]
    # The end was handed over: the first decode step reads the checkpoint and writes another slot, then in place.
    [[read, published]], [[again, fresh]] = prefill["ids"], first["ids"]
    assert (read, again) == (-1, published)
    assert fresh != published
    assert all(forward["ids"] == [[fresh, fresh]] for forward in flow.device.forwards[2:])


def test_a_hit_reads_the_checkpoint_and_writes_another_slot() -> None:
    flow = Flow()
    flow.end(flow.serve(prompt(450), 2))
    flow.run()
    count = len(flow.device.forwards)
    seq = flow.serve(prompt(450), 5)
    assert seq.cached_tokens == 384
    assert list(seq.generated_ids) == answer(prompt(450), 5)
    [[read, write]] = flow.device.forwards[count]["ids"]
    assert flow.device.forwards[count]["lengths"] == [66]
    assert flow.ledger.records[read].position == 384
    assert flow.ledger.records[read].sealed
    assert write != read


def test_a_prompt_shorter_than_the_prefill_budget_hits_its_own_prefix() -> None:
    flow = Flow(prefill_tokens=8192)
    flow.end(flow.serve(prompt(300), 1))
    assert flow.serve(prompt(300), 1).cached_tokens == 256


def test_H7_resume_is_as_far_as_a_checkpoint_reaches_not_as_far_as_kv_does() -> None:
    flow = Flow(budget=2)
    flow.end(flow.serve(prompt(450), 1))
    ledger = flow.ledger
    node = next(r.entry for r in ledger.records if r.entry is not None and r.position == 450)
    flow.scheduler.state_checkpoints.release_checkpoint(node)
    held = flow.checkpoints
    seq = flow.serve(prompt(450), 1)
    assert seq.cached_tokens == max(held)
    while ledger.evict_oldest():
        pass
    flow.end(seq)
    assert flow.serve(prompt(450), 1).cached_tokens == 0


def test_H10_equal_tokens_with_another_image_share_nothing_behind_it() -> None:
    flow = Flow()
    for content, cached in (("sky", 0), ("sea", 0), ("sky", 640), ("sea", 640)):
        seq = flow.serve(prompt(700), 3, image=(10, 26, content))
        assert seq.cached_tokens == cached, content
        assert list(seq.generated_ids) == answer(prompt(700), 3)
        flow.end(seq)
    assert flow.serve(prompt(700), 3).cached_tokens == 0


def test_H10_no_checkpoint_is_taken_inside_an_image() -> None:
    flow = Flow()
    flow.end(flow.serve(prompt(600), 3, image=(500, 530, "sky")))
    assert flow.checkpoints == [128, 256, 384, 600]
    longer = [*prompt(600), *prompt(30, 5)]
    for content, cached in (("sea", 384), ("sky", 600)):
        seq = flow.serve(longer, 3, image=(500, 530, content))
        assert seq.cached_tokens == cached, content
        flow.end(seq)


def test_H11_reuse_reaches_the_last_boundary_below_the_fork_and_saves_are_bounded() -> None:
    flow = Flow(budget=16, prefill_tokens=8192, blocks=512)
    shared, total = 3000, 3500
    flow.end(flow.serve(prompt(total), 1))
    saved = len(flow.checkpoints)
    assert saved <= 16 // 2 + 1
    fork = prompt(shared) + prompt(total - shared, seed=9)
    seq = flow.serve(fork, 2)
    below = [position for position in range(128, shared + 1, 128) if position <= shared]
    assert shared - 512 < seq.cached_tokens <= max(below)
    assert list(seq.generated_ids) == answer(fork, 2)


@pytest.mark.parametrize("alignment", [64, 128, 192, 1024])
def test_H6_every_published_position_is_on_the_interval_or_the_end(
    alignment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMDEPLOY_COMPACT_PREFILL_SAVE_ALIGNMENT", str(alignment))
    flow = Flow(budget=40)
    flow.serve(prompt(777), 1)
    inside = list(range(alignment, 777, alignment))
    # Where a boundary stands in the KV block of the end, it stands for the end as well.
    assert flow.checkpoints == (inside if 768 in inside else [*inside, 777])


def test_zero_alignment_saves_the_end_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMDEPLOY_COMPACT_PREFILL_SAVE_ALIGNMENT", "0")
    flow = Flow()
    flow.serve(prompt(400), 1)
    assert flow.checkpoints == [400]


def test_a_long_prompt_is_prefilled_in_chunks_that_hand_their_state_on() -> None:
    flow = Flow(prefill_tokens=256, budget=20)
    seq = flow.serve(prompt(900), 3)
    assert list(seq.generated_ids) == answer(prompt(900), 3)
    assert [forward["lengths"] for forward in flow.device.forwards[:4]] == [[256], [256], [256], [132]]
    assert flow.checkpoints == [128, 256, 384, 512, 640, 768, 896]
    flow.end(seq)
    again = flow.serve(prompt(900), 3)
    assert again.cached_tokens == 896
    assert list(again.generated_ids) == answer(prompt(900), 3)


def test_a_batch_with_different_numbers_of_exports_and_a_hit_among_them() -> None:
    flow = Flow(budget=16)
    flow.end(flow.serve(prompt(200), 1))
    flow.run()
    seqs = [
        flow.add(prompt(20, 1), 3),
        flow.add(prompt(200), 3),
        flow.add(prompt(390, 2), 3),
        flow.add(prompt(130, 4), 3),
    ]
    flow.run()
    assert [seq.cached_tokens for seq in seqs] == [0, 128, 0, 0]
    assert [list(seq.generated_ids) for seq in seqs] == [
        answer(prompt(20, 1), 3),
        answer(prompt(200), 3),
        answer(prompt(390, 2), 3),
        answer(prompt(130, 4), 3),
    ]


def test_two_readers_of_one_checkpoint_in_a_batch_with_its_producer() -> None:
    flow = Flow()
    producer = flow.add(prompt(256), 12)
    flow.step()
    readers = [flow.add(prompt(256) + prompt(20, seed), 4) for seed in (5, 6)]
    flow.run()
    assert [seq.cached_tokens for seq in readers] == [256, 256]
    ids = next(forward["ids"] for forward in flow.device.forwards if len(forward["lengths"]) == 2)
    assert ids[0][0] == ids[1][0]
    assert list(producer.generated_ids) == answer(prompt(256), 12)
    for seed, seq in zip((5, 6), readers):
        assert list(seq.generated_ids) == answer(prompt(256) + prompt(20, seed), 4)


def test_the_same_prompt_twice_in_one_batch_reserves_one_set_of_checkpoints() -> None:
    flow = Flow()
    seqs = [flow.add(prompt(300), 3), flow.add(prompt(300), 3)]
    flow.run()
    assert flow.checkpoints == [128, 256]
    assert all(list(seq.generated_ids) == answer(prompt(300), 3) for seq in seqs)


def test_more_requests_than_slots_are_served_by_evicting_checkpoints() -> None:
    flow = Flow(max_batches=3, budget=2)
    seqs = [flow.add(prompt(150 + 10 * seed, seed), 5) for seed in range(9)]
    for _ in range(400):
        if not flow.step():
            break
        for seq in [
            s for s in seqs if s.status == lmd_flow.MessageStatus.STOPPED and s.session_id in flow.scheduler.sessions
        ]:
            flow.end(seq)
    assert [list(seq.generated_ids) for seq in seqs] == [answer(prompt(150 + 10 * s, s), 5) for s in range(9)]
    assert flow.ledger.counters.evictions > 0
    assert is_empty(flow)


def test_G14_without_a_slot_to_spare_nothing_is_cached_and_nothing_raises() -> None:
    flow = Flow(max_batches=4, budget=0, num_slots=4)
    seqs = [flow.add(prompt(200, seed), 6) for seed in range(4)]
    flow.run()
    assert [list(seq.generated_ids) for seq in seqs] == [answer(prompt(200, s), 6) for s in range(4)]
    assert flow.checkpoints == []
    assert flow.ledger.counters.publishes_refused + flow.ledger.counters.exports_skipped > 0


def test_a_request_waits_while_every_slot_is_taken() -> None:
    flow = Flow(max_batches=4, budget=0, num_slots=2, caching=False)
    seqs = [flow.add(prompt(100, seed), 4) for seed in range(4)]
    for _ in range(100):
        flow.step()
        for seq in seqs:
            if seq.status == lmd_flow.MessageStatus.STOPPED and seq.session_id in flow.scheduler.sessions:
                flow.end(seq)
    assert [list(seq.generated_ids) for seq in seqs] == [answer(prompt(100, s), 4) for s in range(4)]


def test_caching_off_serves_in_place_and_keeps_nothing() -> None:
    flow = Flow(caching=False)
    seq = flow.serve(prompt(300), 5)
    assert list(seq.generated_ids) == answer(prompt(300), 5)
    assert {tuple(ids) for forward in flow.device.forwards[1:] for ids in forward["ids"]} == {
        tuple([flow.device.forwards[0]["ids"][0][1]] * 2)
    }
    flow.end(seq)
    flow.run()
    assert len(flow.ledger.free) == flow.ledger.num_slots


@pytest.mark.parametrize("steps", range(7))
def test_G10_a_cancel_at_any_point_returns_every_slot_and_unlocks_its_source(steps: int) -> None:
    flow = Flow(prefill_tokens=256, budget=12)
    flow.end(flow.serve(prompt(200), 1))
    flow.run()
    before = flow.checkpoints
    other = flow.add(prompt(90, 8), 20)
    victim = flow.add(prompt(200) + prompt(500, 3), 10)
    for _ in range(steps):
        flow.step()
    flow.cancel(victim)
    flow.ledger_is_sound()
    flow.run()
    assert list(other.generated_ids) == answer(prompt(90, 8), 20)
    flow.end(other)
    flow.run()
    assert is_empty(flow)
    assert set(before) <= set(flow.checkpoints) | {200}
    assert list(flow.serve(prompt(200) + prompt(500, 3), 4).generated_ids) == answer(prompt(200) + prompt(500, 3), 4)


def test_G12_a_cancel_during_a_chunk_publishes_nothing_of_it() -> None:
    flow = Flow(prefill_tokens=256, budget=12)
    seq = flow.add(prompt(700), 4)
    flow.step()
    assert len(flow.device.queue) == 1  # chunk 2 is queued and has not run
    running = flow.ledger.submitted
    held = [r.slot for r in flow.ledger.records if r.write_step == running]
    known = flow.checkpoints
    flow.cancel(seq)
    assert flow.checkpoints == known
    # Its slots are not granted again before the chunk's own step is behind them in the queue.
    assert not {rec.slot for rec in flow.ledger.free} & set(held)
    flow.run()
    assert max(flow.checkpoints) <= 256
    assert is_empty(flow)


def test_a_cancel_between_dispatch_and_publication_leaves_no_trace() -> None:
    flow = Flow()
    seq = flow.add(prompt(300), 4)
    inputs, running = flow._events.run_until_complete(flow.maker.send_next_inputs())
    assert running == [seq]
    flow.cancel(seq)
    flow._next = (inputs, running)
    flow.run()
    assert flow.checkpoints == []
    assert is_empty(flow)


def test_A6_a_recycled_slot_changes_by_its_own_requests_alone() -> None:
    flow = Flow(max_batches=2, budget=0, num_slots=3)
    first, second = flow.add(prompt(100), 3), flow.add(prompt(110, 1), 30)
    for _ in range(8):
        flow.step()
    flow.end(first)
    third = flow.add(prompt(90, 2), 12)
    flow.run()
    assert list(second.generated_ids) == answer(prompt(110, 1), 30)
    assert list(third.generated_ids) == answer(prompt(90, 2), 12)


def test_kv_pressure_preempts_and_recomputes() -> None:
    flow = Flow(max_batches=3, budget=4, blocks=14)
    seqs = [flow.add(prompt(180, seed), 70) for seed in range(3)]
    for _ in range(1500):
        if not flow.step():
            break
        for seq in seqs:
            if seq.status == lmd_flow.MessageStatus.STOPPED and seq.session_id in flow.scheduler.sessions:
                flow.end(seq)
    assert [list(seq.generated_ids) for seq in seqs] == [answer(prompt(180, s), 70) for s in range(3)]


def test_I25_three_rounds_of_sleep_leave_no_checkpoint_and_no_slot() -> None:
    flow = Flow()
    for round_ in range(3):
        flow.add(prompt(300), 20)
        for _ in range(3):
            flow.step()
        flow.sleep()
        assert flow.checkpoints == []
        assert flow.scheduler.block_trie._roots == {}
        assert flow.ledger.mode == "asleep"
        assert len(flow.ledger.free) == flow.ledger.num_slots
        flow.wake(["weights"])
        assert flow.ledger.mode == "asleep"
        flow.wake(["kv_cache"])
        assert flow.ledger.mode == "run"
        assert flow.ledger.incarnation == round_ + 1
        for cached in (0, 256):  # what is found then is KV of the new memory: the device knows no other
            seq = flow.serve(prompt(300), 3)
            assert seq.cached_tokens == cached
            assert list(seq.generated_ids) == answer(prompt(300), 3)
            flow.end(seq)


def test_I23_new_weights_find_nothing_of_the_old() -> None:
    flow = Flow()
    flow.end(flow.serve(prompt(300), 3))
    flow.update_weights()
    assert flow.checkpoints == []
    assert flow.scheduler.block_trie._roots == {}
    seq = flow.serve(prompt(300), 3)
    assert seq.cached_tokens == 0
    assert list(seq.generated_ids) == answer(prompt(300), 3, epoch=1)
    flow.end(seq)
    again = flow.serve(prompt(300), 3)
    assert again.cached_tokens == 256
    flow.sleep()
    flow.update_weights()
    flow.wake()
    seq = flow.serve(prompt(300), 3)
    assert (seq.cached_tokens, list(seq.generated_ids)) == (0, answer(prompt(300), 3, epoch=2))


def test_a_request_in_flight_during_an_update_never_publishes() -> None:
    flow = Flow(prefill_tokens=128, budget=16)
    seq = flow.add(prompt(600), 4)
    for _ in range(2):
        flow.step()
    flow.update_weights()
    flow.run()
    assert flow.checkpoints == []
    flow.end(seq)
    fresh = flow.serve(prompt(600), 2)
    assert fresh.cached_tokens == 0
    assert list(fresh.generated_ids) == answer(prompt(600), 2, epoch=1)


def test_the_kv_a_checkpoint_stands_on_is_not_evicted_before_it() -> None:
    flow = Flow(max_batches=2, budget=6, blocks=16)
    flow.end(flow.serve(prompt(300), 1))
    seqs = [flow.add(prompt(400, seed), 2) for seed in (1, 2, 3)]
    for _ in range(300):
        if not flow.step():
            break
        for seq in seqs:
            if seq.status == lmd_flow.MessageStatus.STOPPED and seq.session_id in flow.scheduler.sessions:
                flow.end(seq)
    assert [list(seq.generated_ids) for seq in seqs] == [answer(prompt(400, s), 2) for s in (1, 2, 3)]
    for seed in (3, 0):
        length = 400 if seed else 300
        seq = flow.serve(prompt(length, seed), 2)
        assert list(seq.generated_ids) == answer(prompt(length, seed), 2)
        flow.end(seq)
