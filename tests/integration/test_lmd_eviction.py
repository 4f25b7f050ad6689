"""What stays when checkpoints outnumber slots: the ones that were asked for before."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.lmdeploy
pytest.importorskip("lmdeploy", reason="lmdeploy is not installed")

from lmd_flow import Flow  # noqa: E402  after the skip: it imports lmdeploy


@pytest.fixture(autouse=True)
def _alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMDEPLOY_COMPACT_PREFILL_SAVE_ALIGNMENT", "128")


def prompt(length: int, seed: int) -> list[int]:
    return [(i * 7 + seed * 13 + i // 50) % 40 + 3 for i in range(length)]


def serve(flow: Flow, tokens: list[int]) -> int:
    """Tokens found for one request of its own session."""
    seq = flow.serve(tokens, 2)
    found = int(seq.cached_tokens)
    flow.end(seq)
    return found


def test_a_checkpoint_that_was_hit_outlives_a_flood_of_ones_that_were_not() -> None:
    flow = Flow(max_batches=2, budget=8, blocks=1024)
    shared = prompt(128, 1)
    assert serve(flow, shared + prompt(20, 2)) == 0
    assert serve(flow, shared + prompt(20, 3)) == 128
    for seed in range(10, 20):
        assert serve(flow, prompt(1000, seed)) == 0
    assert flow.ledger.counters.evictions > 20
    assert serve(flow, shared + prompt(20, 4)) == 128


def test_the_ones_that_were_hit_are_bounded_and_the_oldest_go_first() -> None:
    flow = Flow(max_batches=2, budget=8, blocks=1024)
    for seed in range(8):
        for tail in (100, 200):
            serve(flow, prompt(128, seed) + prompt(20, tail + seed))
    for seed in range(20, 40):
        serve(flow, prompt(1000, seed))
    found = [serve(flow, prompt(128, seed) + prompt(20, 300 + seed)) for seed in range(8)]
    assert found == [0, 0, 0, 0, 128, 128, 128, 128]


def test_touch_moves_only_what_could_be_evicted() -> None:
    flow = Flow(max_batches=2, budget=8, blocks=1024)
    serve(flow, prompt(300, 1))
    first, *_, last = flow.ledger.evictable.values()
    handle = flow.ledger.handle(first)
    assert flow.ledger.touch(handle)
    assert list(flow.ledger.evictable.values())[-1] is first is not last
    assert flow.ledger.evict_oldest()
    flow.ledger.uncache(handle, "released")
    assert not flow.ledger.touch(handle)
