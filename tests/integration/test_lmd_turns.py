"""The host flow of a chat: each turn goes on from the state of the one before, or from what the pool has of it."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest

pytestmark = pytest.mark.lmdeploy
pytest.importorskip("lmdeploy", reason="lmdeploy is not installed")

from lmd_flow import Flow  # noqa: E402  after the skip: it imports lmdeploy
from lmd_prompts import answer, prompt  # noqa: E402


@pytest.fixture(autouse=True)
def _alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMDEPLOY_COMPACT_PREFILL_SAVE_ALIGNMENT", "128")


def test_the_next_turn_resumes_at_the_end_of_the_first_prompt() -> None:
    flow = Flow()
    first = flow.serve(prompt(330), 6)
    turn = prompt(330) + list(first.generated_ids) + prompt(40, seed=3)
    flow.end(first)
    second = flow.serve(turn, 3)
    # 330 is off the block grid: the checkpoint comes with a frozen copy of the KV block it ends in.
    assert second.cached_tokens == 330
    assert flow.device.copies == 2
    assert list(second.generated_ids) == answer(turn, 3)


def test_every_turn_of_a_session_is_found_by_the_next() -> None:
    """Behind a hit inside a KV block 0.18.0 saves nothing: the third turn finds no more than the second did."""
    flow = Flow(blocks=1024)
    said, found = prompt(150, 1), []
    for turn in range(5):
        said = said + prompt(90, 10 + turn)
        seq = flow.serve(said, 3)
        assert list(seq.generated_ids) == answer(said, 3)
        found.append(int(seq.cached_tokens))
        flow.end(seq)
    # 420 ends in the block behind the boundary 384: of the two the boundary is kept.
    assert found == [0, 240, 330, 384, 510]


def test_two_sessions_that_part_behind_one_hit_share_nothing_else() -> None:
    flow = Flow(blocks=1024, max_batches=4)
    said = prompt(200, 1)
    flow.end(flow.serve(said, 2))
    for turn in range(3):
        # The same beginning and the same next tokens in the block that the hit ends in, then other ones.
        asked = [said + prompt(20, 5) + prompt(100, 20 + 3 * turn + tail) for tail in (0, 1, 1)]
        seqs = [flow.add(tokens, 3) for tokens in asked]
        flow.run()
        for seq, tokens in zip(seqs, asked):
            assert list(seq.generated_ids) == answer(tokens, 3)
            assert seq.cached_tokens >= 200
            flow.end(seq)
    flow.run()


@pytest.mark.parametrize("caching", [False, True])
def test_a_session_that_goes_on_is_not_given_a_state_that_ran_ahead(caching: bool) -> None:
    flow = Flow(caching=caching)
    seq = flow.serve(prompt(200), 5)
    spoken = list(seq.generated_ids)
    # The forward after the last one was queued before the end was known.
    assert flow.manager.holder(seq).position > seq.num_history_ids
    turn = prompt(30, 4)
    flow.go_on(seq, turn, 4)
    flow.run()
    assert list(seq.generated_ids) == answer(prompt(200) + spoken + turn, 4)


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("beside", [0, 9])
def test_a_turn_in_chunks_has_no_place_in_the_batch_that_its_last_turn_left(caching: bool, beside: int) -> None:
    """The place stays in an idle engine's batch; another request may decode between the chunks."""
    flow = Flow(caching=caching, max_batches=2, prefill_tokens=128)
    seq = flow.serve(prompt(200), 3)
    spoken, turn = list(seq.generated_ids), prompt(300, 4)
    other = flow.add(prompt(20, seed=2), beside) if beside else None
    for _ in range(3):
        flow.step()
    flow.go_on(seq, turn, 4)
    flow.run()
    assert list(seq.generated_ids) == answer(prompt(200) + spoken + turn, 4)
    assert other is None or list(other.generated_ids) == answer(prompt(20, seed=2), beside)


@pytest.mark.parametrize(
    ("limit", "allows", "batch", "tokens", "ends"),
    [
        (None, False, 0, 100, None),
        (256, True, 0, 300, None),
        (256, False, 0, 300, "skip"),
        (None, False, 200, 57, "budget"),
        (None, False, 200, 56, None),
        (None, False, 0, 300, None),
    ],
)
def test_what_loses_its_match_passes_the_gates_of_long_prompts_and_of_the_batch(
    limit: int | None, allows: bool, batch: int, tokens: int, ends: str | None
) -> None:
    """A short turn behind a history that is gone is a long prompt: 0.18.0 lets it join others in one forward."""
    from lmdeploy.pytorch.paging import prefill_scheduler

    attempt = SimpleNamespace(
        seq="seq",
        prefill_scheduler=SimpleNamespace(
            _prefill_kv_token_limit=lambda seq: limit,
            _prefill_admission_token_count=lambda seq: tokens,
            cache_config=SimpleNamespace(max_prefill_token_num=256),
        ),
        turn_policy=SimpleNamespace(allows_nonfinal_long_prefill=allows),
        batch_has_prefill=batch > 0,
        batch_prefill_tokens=batch,
        _prefix_match=mock.Mock(),
        _resource_rollback_rejection=None,
        _token_budget_rejection=lambda: "budget",
    )
    rollback = prefill_scheduler._PrefillAdmissionAttempt._rollback_match_after_resource_failure
    skip = prefill_scheduler._PrefillAdmissionResult.skip()
    assert rollback(attempt, "no slot") == (skip if ends == "skip" else ends)
    attempt._prefix_match.rollback.assert_called_once_with("no slot")
    attempt._resource_rollback_rejection = "before"
    assert rollback(attempt, "no slot") == "before"
