"""What lmdeploy's own tests ask of a checkpoint's life, asked of the checkpoints on the pool's ledger."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

pytestmark = pytest.mark.lmdeploy
pytest.importorskip("lmdeploy", reason="lmdeploy is not installed")

from lmd_flow import BLOCK, Flow  # noqa: E402  after the skip: it imports lmdeploy
from lmd_prompts import answer, prompt  # noqa: E402

from compact_state.pool.errors import CapacityError  # noqa: E402


@pytest.fixture(autouse=True)
def _alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMDEPLOY_COMPACT_PREFILL_SAVE_ALIGNMENT", "128")


def node_at(flow: Flow, position: int) -> Any:
    """The trie node whose checkpoint stands at a position."""
    return next(r.entry for r in flow.ledger.records if r.entry is not None and r.position == position)


def free_blocks(flow: Flow) -> int:
    return int(flow.scheduler.block_manager.get_num_free_gpu_blocks())


def test_a_pinned_checkpoint_is_neither_released_nor_evicted() -> None:
    flow = Flow()
    flow.end(flow.serve(prompt(300), 1))
    checkpoints, node = flow.scheduler.state_checkpoints, node_at(flow, 256)
    seq = flow.add(prompt(300), 4)
    flow.scheduler.block_trie.match(seq)
    assert checkpoints.pin_restore(seq)
    assert checkpoints.is_pinned(node)
    with pytest.raises(RuntimeError, match="pinned"):
        checkpoints.release_checkpoint(node)
    while flow.ledger.evict_oldest():
        pass
    assert flow.checkpoints == [256]
    assert checkpoints.unpin_restore(seq)
    assert not checkpoints.unpin_restore(seq)
    assert checkpoints.evict(8) == 1
    assert node.state_checkpoint is None
    checkpoints.release_checkpoint(node)  # nothing is there any more: nothing happens
    flow.end(seq)
    assert list(flow.serve(prompt(300), 4).generated_ids) == answer(prompt(300), 4)


def test_a_session_that_has_a_state_can_take_a_checkpoint_that_reaches_further() -> None:
    flow = Flow()
    seq = flow.serve(prompt(200), 2)
    flow.end(flow.serve(prompt(330), 1))
    handle = node_at(flow, 256).state_checkpoint.handle
    assert flow.manager.holder(seq).rec.slot != handle.slot
    assert flow.manager.pin(seq, handle)
    assert flow.manager.holder(seq).rec.slot == handle.slot
    flow.ledger_is_sound()
    flow.manager.unpin(seq)
    assert seq.seq_id not in flow.ledger.holders
    flow.ledger_is_sound()


def test_a_match_that_would_starve_others_leaves_no_holder() -> None:
    flow = Flow()
    flow.end(flow.serve(prompt(330), 1))
    seq, handle = flow.add(prompt(400), 1), node_at(flow, 256).state_checkpoint.handle
    with mock.patch.object(flow.ledger, "hit", side_effect=CapacityError("none to spare")):
        assert not flow.manager.pin(seq, handle)
    assert seq.seq_id not in flow.ledger.holders
    assert flow.manager._tentative is None
    flow.run()
    assert seq.cached_tokens == 330


def test_a_publication_that_fails_leaves_neither_entry_nor_slot_nor_block(monkeypatch: pytest.MonkeyPatch) -> None:
    flow = Flow()
    checkpoints, blocks = flow.scheduler.state_checkpoints, free_blocks(flow)
    snapshot, calls = checkpoints._snapshot_match_data, []

    def failing(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise RuntimeError("no memory for the tokens")
        return snapshot(*arguments)

    monkeypatch.setattr(checkpoints, "_snapshot_match_data", failing)
    seq = flow.add(prompt(330), 3)
    with pytest.raises(RuntimeError, match="no memory"):
        flow.step()
    checkpoints.discard_save(seq)
    flow.end(seq)
    flow.manager._settle()
    assert flow.checkpoints == [256]
    flow.end(flow.serve(prompt(200) + prompt(50, 5), 1))
    assert 128 in flow.checkpoints, "the node is free for the next prompt that comes by"
    while flow.ledger.evict_oldest():
        pass
    flow.scheduler.block_trie.forget_prefixes()
    assert flow.checkpoints == []
    assert len(flow.ledger.free) == flow.ledger.num_slots
    assert free_blocks(flow) == blocks


def test_a_plan_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    flow = Flow()
    blocks, submit = free_blocks(flow), flow.manager.submit
    failing = mock.Mock(side_effect=RuntimeError("no ids"))
    monkeypatch.setattr(flow.manager, "submit", failing)
    seq = flow.add(prompt(330), 3)
    with pytest.raises(RuntimeError, match="no ids"):
        flow.step()
    monkeypatch.setattr(flow.manager, "submit", submit)
    flow.end(seq)
    assert flow.checkpoints == []
    assert len(flow.ledger.free) == flow.ledger.num_slots
    flow.scheduler.block_trie.forget_prefixes()
    assert free_blocks(flow) == blocks
    assert flow.serve(prompt(330), 3).cached_tokens == 0
    assert flow.checkpoints == [128, 256, 330]
    assert flow.scheduler.state_checkpoints._pending == {}


def test_an_end_that_is_no_safe_boundary_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    flow = Flow()
    seq = flow.add(prompt(330), 1)
    safe = seq.is_prefix_cache_boundary_safe
    monkeypatch.setattr(type(seq), "is_prefix_cache_boundary_safe", lambda self, step: step != 330 and safe(step))
    flow.run()
    assert flow.checkpoints == [128, 256]


def test_the_frozen_block_of_a_partial_end_goes_with_its_checkpoint() -> None:
    flow = Flow()
    flow.end(flow.serve(prompt(330), 1))
    node = node_at(flow, 330)
    assert node.state_checkpoint.frozen_block_id >= 0
    before = free_blocks(flow)
    flow.scheduler.state_checkpoints.release_checkpoint(node)
    assert free_blocks(flow) == before + 1
    assert 330 not in flow.checkpoints


def test_without_a_block_for_the_frozen_part_the_end_is_not_kept_and_nothing_else_is_missed() -> None:
    flow = Flow()
    lifecycle = flow.scheduler.state_checkpoints
    full = mock.Mock(wraps=lifecycle._allocator)
    full.allocate.side_effect = MemoryError
    with mock.patch.object(lifecycle, "_allocator", full):
        seq = flow.serve(prompt(330), 3)
    full.allocate.assert_called_once_with(1, "gpu")
    assert flow.checkpoints
    assert 330 not in flow.checkpoints
    flow.end(seq)
    again = flow.serve(prompt(330), 3)
    assert again.cached_tokens == 256
    assert 330 in flow.checkpoints


def test_prompts_whose_hashes_collide_are_told_apart_by_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    flow = Flow()
    trie = flow.scheduler.block_trie
    monkeypatch.setattr(trie, "_hash_block", lambda tokens, extra: 7)
    monkeypatch.setattr(trie._checkpoint_index, "_hash_block", lambda tokens, extra: 7)
    # The second prompt cannot be kept beside the first, whose place in the trie it would need; it must not be taken for it.
    for seed, cached in ((0, 0), (1, 0), (0, 256), (1, 0)):
        tokens = [*prompt(300, seed), *(prompt(20, 2) if cached else [])]
        seq = flow.serve(tokens, 2)
        assert seq.cached_tokens == cached
        assert list(seq.generated_ids) == answer(tokens, 2)
        flow.end(seq)


def test_a_match_that_finds_no_kv_blocks_gives_its_pin_back_and_waits() -> None:
    flow = Flow(max_batches=2, budget=4, blocks=16)
    flow.end(flow.serve(prompt(300), 1))
    long = flow.add(prompt(8 * BLOCK, 1), 40)
    flow.step()
    matching = flow.add([*prompt(300), *prompt(500, 2)], 2)
    flow.step()
    assert not flow.manager.is_allocated(matching)
    assert not matching.prefix_cache.restore.pinned
    assert flow.manager._tentative is None
    flow.run()
    assert list(long.generated_ids) == answer(prompt(8 * BLOCK, 1), 40)
    flow.end(long)
    flow.run()
    assert list(matching.generated_ids) == answer([*prompt(300), *prompt(500, 2)], 2)
