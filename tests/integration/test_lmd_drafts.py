"""Drafts in the host flow: lmdeploy's own scheduler, step inputs and verification over slots that stay one state wide."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.lmdeploy
pytest.importorskip("lmdeploy", reason="lmdeploy is not installed")

from lmd_drafts import draft_flow  # noqa: E402
from lmd_flow import Flow, MessageStatus  # noqa: E402
from lmd_prompts import answer, is_empty, prompt  # noqa: E402


@pytest.fixture(autouse=True)
def _alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMDEPLOY_COMPACT_PREFILL_SAVE_ALIGNMENT", "128")


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("chance", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("drafts", [1, 3, 7])
def test_greedy_answers_with_drafts_are_those_without(drafts: int, chance: float, caching: bool) -> None:
    flow = draft_flow(drafts, chance=chance, caching=caching)
    seqs = [flow.add(prompt(length, length), new) for length, new in ((450, 30), (1, 17), (70, 9), (128, 24))]
    flow.run()
    wanted = [answer(prompt(length, length), new) for length, new in ((450, 30), (1, 17), (70, 9), (128, 24))]
    assert [list(seq.generated_ids) for seq in seqs] == wanted
    seen = {0.0: {1}, 0.5: set(range(1, 2 + min(drafts, 2))), 1.0: {1 + drafts}}[chance]
    assert seen <= set(flow.device.accepted)
    if chance != 0.5:
        assert seen == set(flow.device.accepted)
    for seq in seqs:
        flow.end(seq)
    flow.run()
    assert is_empty(flow)
    assert not flow.manager.logs.owners


@pytest.mark.parametrize("drafts", [2, 3])
@pytest.mark.parametrize("count", [1, 4])
def test_A11_prompts_as_long_as_a_verify_step(drafts: int, count: int) -> None:
    flow = draft_flow(drafts, caching=False)
    lengths = [1 + drafts] * count
    seqs = [flow.add(prompt(length, seed), 11) for seed, length in enumerate(lengths)]
    flow.run()
    assert flow.device.forwards[0]["lengths"] == lengths
    assert [list(seq.generated_ids) for seq in seqs] == [answer(prompt(n, s), 11) for s, n in enumerate(lengths)]


def test_H10_drafts_with_prefix_caching_hit_and_answer_as_without() -> None:
    flow = draft_flow(3, budget=12)
    for seed in (5, 6, 7):
        tokens = prompt(400) + prompt(30, seed)
        seq = flow.serve(tokens, 15)
        assert seq.cached_tokens == (0 if seed == 5 else 256)
        assert list(seq.generated_ids) == answer(tokens, 15)
        flow.end(seq)
        flow.run()


def test_the_first_verify_reads_the_checkpoint_and_counts_travel_on_the_device() -> None:
    flow = draft_flow(3)
    flow.serve(prompt(450), 30)
    assert flow.checkpoints == [128, 256, 384, 450]
    prefill, first, *later = flow.device.forwards
    [[_, published, *_]], [[again, fresh, accepted, row, half]] = prefill["ids"], first["ids"]
    assert (again, accepted, half) == (published, 0, 0)
    assert fresh != published
    # From then on in place; each step commits what the step before it accepted, and reads the half that one wrote.
    counts = flow.device.accepted
    for step, forward in enumerate(later):
        assert forward["ids"] == [[fresh, fresh, counts[step], row, (step + 1) % 2]]
    assert len(set(counts[: len(later)])) > 1


def test_rows_of_one_batch_keep_their_own_counts_when_others_come_and_go() -> None:
    flow = draft_flow(3, max_batches=4)
    long = flow.add(prompt(100), 60)
    flow.step()
    seqs = [flow.add(prompt(80 + seed, seed), 5 + 9 * seed) for seed in range(1, 6)]
    flow.run()
    assert list(long.generated_ids) == answer(prompt(100), 60)
    assert [list(seq.generated_ids) for seq in seqs] == [answer(prompt(80 + s, s), 5 + 9 * s) for s in range(1, 6)]


def test_a_hit_needs_a_block_beyond_the_checkpoint_and_starts_an_empty_log() -> None:
    flow = draft_flow(3)
    flow.end(flow.serve(prompt(450), 20))
    flow.run()
    count = len(flow.device.forwards)
    seq = flow.serve(prompt(450) + prompt(9, 5), 20)
    # The draft's KV of a position depends on the next token: lmdeploy recomputes one block more, so 450 is no match.
    assert seq.cached_tokens == 384
    assert list(seq.generated_ids) == answer(prompt(450) + prompt(9, 5), 20)
    assert flow.device.forwards[count]["ids"][0][2] == 0
    assert flow.device.forwards[count + 1]["ids"][0][2] == 0


def test_the_next_turn_folds_what_the_last_step_accepted_into_the_slot_first() -> None:
    """0.18.0 leaves the last token of such a turn out (`ar_spec/sequence.py`), and keeps drafts in its history."""
    flow = draft_flow(3, chance=0.8, caching=False)
    for seed in range(12):
        tokens = prompt(120 + seed, seed)
        seq = flow.add(tokens, 9 + seed)
        while seq.num_new_tokens < 6:
            flow.step()
        # The step after the last one is another request's prefill, so that nothing commits its tokens.
        other = flow.add(prompt(20, seed + 50), 1)
        flow.run()
        tokens += [int(token) for token in seq.generated_ids]
        turn = prompt(30 + seed, 4)
        flow.go_on(seq, turn, 6)
        flow.run()
        assert list(seq.generated_ids) == answer(tokens + turn, 6)
        flow.end(seq)
        flow.end(other)
    assert flow.device.commits > 2


@pytest.mark.parametrize("steps", [2, 3, 5])
def test_a_session_stopped_in_the_middle_of_its_answer_goes_on_without_its_drafts(steps: int) -> None:
    flow = draft_flow(3, chance=0.7, caching=False)
    tokens, turn = prompt(90, steps), prompt(40, 4)
    seq = flow.add(tokens, 60)
    while seq.num_new_tokens < steps:
        flow.step()
    flow.scheduler.stop_session(seq.session_id)
    flow.run()
    spoken = [int(token) for token in seq.generated_ids]
    assert len(seq.history_cache) > seq.num_valid_ids, "there are drafts to be forgotten"
    flow.go_on(seq, turn, 6)
    flow.run()
    assert list(seq.generated_ids) == answer(tokens + spoken + turn, 6)


def test_every_turn_of_a_session_is_found_by_later_ones_with_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMDEPLOY_COMPACT_PREFILL_SAVE_ALIGNMENT", "512")
    flow = draft_flow(3, chance=0.6, blocks=1024, max_batches=4, budget=24)
    said, found = prompt(150, 1), []
    for turn in range(6):
        said += prompt(90, 10 + turn)
        seq = flow.serve(said, 80)
        found.append(int(seq.cached_tokens))
        assert list(seq.generated_ids) == answer(said, 80)
        said += [int(token) for token in seq.generated_ids]
        flow.end(seq)
    # Of prompts of 240, 410, 580, … tokens, a hit needs one cached block beyond its checkpoint.
    assert found == [0, 0, 240, 512, 580, 750]


@pytest.mark.parametrize(("slots", "batch"), [(2, 2), (3, 3), (4, 3)])
def test_a_turn_keeps_its_state_under_admission_when_no_slot_is_left(slots: int, batch: int) -> None:
    """0.18.0 asks for another slot, takes the history, and puts the long prompt of a short turn into a batch."""
    flow = draft_flow(1, chance=0.0, max_batches=batch, budget=0, num_slots=slots, prefill_tokens=128, blocks=40)
    tokens = prompt(282, 1)
    seq = flow.serve(tokens, 1)
    for seed in range(2, batch + 1):
        flow.serve(prompt(5, seed), 1)
    assert seq.num_history_ids == len(tokens)
    tokens += [int(token) for token in seq.generated_ids]
    turn = prompt(35, 9)
    other = flow.add(prompt(3, 10), 1)
    flow.go_on(seq, turn, 4)
    done = len(flow.device.forwards)
    flow.run()
    assert list(seq.generated_ids) == answer(tokens + turn, 4)
    assert list(other.generated_ids) == answer(prompt(3, 10), 1)
    # The turn alone is prefilled, beside the other request.
    assert sorted(flow.device.forwards[done]["lengths"]) == [3, len(turn) + 1]


def test_a_stop_inside_the_accepted_tokens_folds_only_those_before_it() -> None:
    flow = draft_flow(7, chance=1.0, caching=False)
    # 1 + 8 + 3 of the next 8: the third accepted token of the second step is the last.
    seq = flow.add(prompt(120), 12)
    flow.step()
    flow.step()
    flow.add(prompt(20, 3), 1)
    flow.run()
    spoken = [int(token) for token in seq.generated_ids]
    assert spoken == answer(prompt(120), 12)
    turn = prompt(40, 4)
    flow.go_on(seq, turn, 5)
    count = len(flow.device.forwards)
    flow.run()
    assert flow.device.commits == 1
    # Nothing of the 131 tokens before is computed again: the answer's last token and the turn.
    assert flow.device.forwards[count]["lengths"] == [41]
    assert list(seq.generated_ids) == answer(prompt(120) + spoken + turn, 5)


def test_a_published_turn_is_hit_at_the_position_that_its_key_names() -> None:
    flow = draft_flow(3, chance=0.8, budget=16)
    tokens = prompt(200)
    seq = flow.serve(tokens, 20)
    for turn_number in range(3):
        tokens = tokens + [int(token) for token in seq.generated_ids]
        turn = prompt(90, 4 + turn_number)
        tokens = tokens + turn
        flow.go_on(seq, turn, 20)
        flow.run()
    assert flow.checkpoints == [128, 200, 256, 384, 512]
    # `ledger_is_sound` compares every published slot with its key after each step; and it is found.
    flow.end(seq)
    flow.run()
    again = flow.serve(tokens + prompt(70, 9), 5)
    assert again.cached_tokens > 300
    assert list(again.generated_ids) == answer(tokens + prompt(70, 9), 5)


@pytest.mark.parametrize("steps", range(1, 9))
def test_a_cancel_after_any_verify_step_returns_slot_and_log_row(steps: int) -> None:
    flow = draft_flow(3)
    other, victim = flow.add(prompt(90, 8), 30), flow.add(prompt(300), 40)
    for _ in range(steps):
        flow.step()
    flow.cancel(victim)
    flow.ledger_is_sound()
    late = flow.add(prompt(100, 2), 20)  # takes the row at once
    flow.run()
    assert list(other.generated_ids) == answer(prompt(90, 8), 30)
    assert list(late.generated_ids) == answer(prompt(100, 2), 20)
    flow.end(other)
    flow.end(late)
    flow.run()
    assert is_empty(flow)
    assert not flow.manager.logs.owners


def test_a_stopped_session_gives_its_log_row_to_a_running_one_and_is_recomputed() -> None:
    flow = draft_flow(3, max_batches=3, budget=8, chance=1.0, caching=False, num_slots=9)
    first = flow.add(prompt(120), 12)
    while first.num_new_tokens < 9:
        flow.step()
    flow.add(prompt(20, 3), 1)  # nothing commits the last step of `first`
    flow.run()
    assert first.compact_trail.span() == (128, 132)
    spoken = [int(token) for token in first.generated_ids]
    others = [flow.add(prompt(60, seed), 9) for seed in range(4, 8)]
    flow.run()
    assert [list(seq.generated_ids) for seq in others] == [answer(prompt(60, s), 9) for s in range(4, 8)]
    assert first.compact_trail.span() == (128, 128)
    flow.go_on(first, prompt(40, 4), 5)
    flow.run()
    assert flow.device.commits == 0
    assert list(first.generated_ids) == answer(prompt(120) + spoken + prompt(40, 4), 5)


def test_kv_pressure_preempts_and_recomputes_with_drafts() -> None:
    flow = draft_flow(3, max_batches=3, budget=4, blocks=14)
    seqs = [flow.add(prompt(180, seed), 70) for seed in range(3)]
    for _ in range(1500):
        if not flow.step():
            break
        for seq in seqs:
            if seq.status == MessageStatus.STOPPED and seq.session_id in flow.scheduler.sessions:
                flow.end(seq)
    assert [list(seq.generated_ids) for seq in seqs] == [answer(prompt(180, s), 70) for s in range(3)]


def test_a_chunked_prompt_between_the_verify_steps_of_another() -> None:
    flow = draft_flow(3, prefill_tokens=256, budget=20)
    running = flow.add(prompt(90, 8), 60)
    for _ in range(3):
        flow.step()
    long = flow.add(prompt(900), 20)
    flow.run()
    assert list(running.generated_ids) == answer(prompt(90, 8), 60)
    assert list(long.generated_ids) == answer(prompt(900), 20)


def test_sleep_and_new_weights_with_drafts_in_flight() -> None:
    flow = draft_flow(3)
    flow.add(prompt(300), 40)
    for _ in range(4):
        flow.step()
    flow.sleep()
    assert len(flow.ledger.free) == flow.ledger.num_slots
    assert not flow.manager.logs.owners
    flow.wake()
    seq = flow.add(prompt(300), 30)
    for _ in range(4):
        flow.step()
    flow.update_weights()
    flow.run()
    assert flow.checkpoints == []
    flow.end(seq)
    assert list(flow.serve(prompt(300), 9).generated_ids) == answer(prompt(300), 9, epoch=1)


def test_without_drafts_there_are_no_logs_and_ids_are_two_wide() -> None:
    flow = Flow()
    flow.serve(prompt(100), 4)
    assert flow.manager.logs is None
    assert all(len(ids) == 2 for forward in flow.device.forwards for ids in forward["ids"])
