"""What stays when checkpoints outnumber slots: the ones that were asked for before, and of old prompts a coarser grid."""

from __future__ import annotations

import random

import pytest

pytestmark = pytest.mark.lmdeploy
pytest.importorskip("lmdeploy", reason="lmdeploy is not installed")

from lmd_flow import Flow  # noqa: E402  after the skip: it imports lmdeploy
from lmd_prompts import prompt  # noqa: E402

from compact_state.integration.lmdeploy.checkpoints import boundaries  # noqa: E402
from compact_state.integration.lmdeploy.eviction import TURNOVERS, Eviction  # noqa: E402


@pytest.fixture(autouse=True)
def _alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMDEPLOY_COMPACT_PREFILL_SAVE_ALIGNMENT", "128")


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


def test_a_boundary_stays_with_the_power_of_two_in_its_number_up_to_sixteen() -> None:
    ledger = Flow(max_batches=2, budget=8, blocks=64).ledger
    turnovers = Eviction(ledger, 128, 4)._turnovers
    assert [turnovers(128 * number) // TURNOVERS for number in (1, 2, 3, 4, 12, 16, 32, 96, 1024)] == [
        1, 2, 1, 4, 4, 16, 16, 16, 16
    ]  # fmt: skip
    assert turnovers(200) == Eviction(ledger, 0, 4)._turnovers(512) == TURNOVERS


def test_thinned_boundaries_of_all_prompts_lie_on_one_grid() -> None:
    every = list(range(64, 1024, 64))
    assert boundaries(0, 1024, 64, 15) == every
    assert boundaries(0, 1024, 64, 14) == [*every[1::2], 960]
    assert boundaries(0, 1024, 64, 4) == [256, 512, 768, 960]
    assert boundaries(0, 1024, 64, 1) == [960]
    assert boundaries(300, 1030, 64, 4) == [512, 768, 1024]
    assert boundaries(300, 1030, 64, 0) == boundaries(300, 1030, 0, 4) == boundaries(64, 128, 64, 4) == []
    for start in range(0, 900, 37):
        for limit in range(1, 20):
            found = boundaries(start, start + 1000, 64, limit)
            assert len(found) <= limit
            assert found[-1] == (start + 999) // 64 * 64
            assert set(found) <= set(boundaries(start, start + 1000, 64, 99))


def rounds(flow: Flow, groups: int, shared: int, tail: int, count: int, first: int = 0) -> list[int]:
    """Tokens found in each round for prompts of which every one shares its beginning with one of the round before."""

    def drawn(length: int, *seed: int) -> list[int]:
        draw = random.Random(repr(seed))
        return [draw.randrange(3, 43) for _ in range(length)]

    found = []
    for turn in range(count):
        prompts = [drawn(shared, first, g) + drawn(tail, first, g, turn) for g in range(groups)]
        found.append(sum(serve(flow, tokens) for tokens in prompts))
    return found


def test_more_long_prompts_than_fit_with_all_their_checkpoints_are_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMDEPLOY_COMPACT_PREFILL_SAVE_ALIGNMENT", "64")
    flow = Flow(max_batches=2, budget=24, blocks=2048)
    # Sixteen checkpoints a prompt; those of two prompts fill the pool.
    assert rounds(flow, groups=6, shared=512, tail=512, count=3) == [0, 6 * 512, 6 * 512]


def test_short_prompts_keep_the_boundary_that_is_shared_before_their_own_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMDEPLOY_COMPACT_PREFILL_SAVE_ALIGNMENT", "64")
    flow = Flow(max_batches=2, budget=24, blocks=2048)
    assert rounds(flow, groups=12, shared=128, tail=128, count=2) == [0, 12 * 128]


def test_what_nobody_asks_for_any_more_goes_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMDEPLOY_COMPACT_PREFILL_SAVE_ALIGNMENT", "64")
    flow = Flow(max_batches=1, budget=6, blocks=8192)
    assert rounds(flow, groups=2, shared=512, tail=512, count=2) == [0, 2 * 512]
    old = {slot: record.gen for slot, record in flow.ledger.evictable.items()}
    assert rounds(flow, groups=3, shared=512, tail=512, count=90, first=500)[-1] == 3 * 512
    assert all(flow.ledger.records[slot].gen != generation for slot, generation in old.items())


def test_the_order_of_eviction_forgets_what_is_gone() -> None:
    flow = Flow(max_batches=2, budget=8, blocks=1024)
    eviction = flow.scheduler.state_checkpoints._eviction
    for seed in range(60):
        serve(flow, prompt(300, seed % 20) + prompt(20, seed))
        assert len(eviction._heap) <= 4 * flow.ledger.num_slots + 1
    flow.update_weights()
    assert not flow.ledger.evictable
    assert serve(flow, prompt(300, 1)) == 0
    while flow.ledger.evict_oldest():
        pass
    assert not eviction._heap or len(eviction._heap) <= 4 * flow.ledger.num_slots
