"""Patches of lmdeploy's scheduler side: who owns state slots, and when prefixes are forgotten."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import numpy as np

from .cache import drafts_of
from .states import CompactStateManager


def patch_paging_state_manager(module: ModuleType) -> None:
    """The scheduler's state manager."""

    def build_state_manager(cache_config: Any) -> CompactStateManager:
        slots, shapes = cache_config.num_state_caches, cache_config.states_shapes
        return CompactStateManager(
            1 if slots is None else slots,
            checkpoint_budget=cache_config.prefix_cache_state_budget,
            log_rows=cache_config.max_batches if shapes and drafts_of(shapes) else 0,
        )

    module.build_state_manager = build_state_manager  # type: ignore[attr-defined]


def patch_paging_block_trie_checkpoint_lifecycle(module: ModuleType) -> None:
    """The trie's checkpoint lifecycle."""
    from .checkpoints import CompactCheckpointLifecycle

    module.StateCheckpointLifecycle = CompactCheckpointLifecycle  # type: ignore[attr-defined]


def _detached(root: Any) -> list[int]:
    """Detach every node below a root, leaves first; the KV blocks the trie held."""
    order, stack = [], list(root.children.values())
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(node.children.values())
    for node in reversed(order):
        node.detach_leaf()
    return [node.block_id for node in order]


def patch_paging_block_trie_trie(module: ModuleType) -> None:
    """`BlockTrie.forget_prefixes`: no prefix is found any more, sequences keep their blocks. What follows a hit is cached.

    Behind a checkpoint inside a KV block lmdeploy 0.18.0 keeps all of a prompt's blocks private, so that nothing of it is saved,
    and every further turn of a session is computed from the end of the first.
    """
    extend = module.BlockTrie._extend_trie_path

    def forget_prefixes(self: Any) -> None:
        blocks = [block for root in self._roots.values() for block in _detached(root)]
        self._roots.clear()
        self.leaves.clear()
        if blocks:
            self.allocator.free(np.array(blocks, dtype=np.int64))

    @functools.wraps(extend)
    def extend_behind_hits(self: Any, seq: Any, node: Any, num_complete_blocks: int) -> None:
        extend(self, seq, node, num_complete_blocks)
        overlap = seq.prefix_cache.recompute_overlap
        if overlap.fresh_block_range is not None:
            # The first call has followed the path as far as there is one. What comes now nobody else has: the sequence's own
            # blocks, among them the one with the frozen part, which the forward completes.
            overlap.clear_fresh_block_range()
            extend(self, seq, seq.prefix_cache.trie_cursor, num_complete_blocks)

    module.BlockTrie.forget_prefixes = forget_prefixes
    module.BlockTrie._extend_trie_path = extend_behind_hits


def forget(scheduler: Any) -> None:
    """Forget what the current weights or memory computed: checkpoints first, then the KV they belong to."""
    scheduler.state_manager.new_weights()
    scheduler.block_trie.forget_prefixes()


def patch_paging_scheduler(module: ModuleType) -> None:
    """A sequence whose state has run past its history starts anew.

    The forward after a sequence's last one is queued before its end is known, so the state of a session that goes on may
    have consumed a token that the next turn gives again. The ledger knows; the sequence is recomputed (or matched).
    """
    schedule = module.Scheduler.schedule

    @functools.wraps(schedule)
    def schedule_checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        manager = self.state_manager
        for seq in self.waiting:
            if manager.is_allocated(seq) and not manager.stands_at(seq, seq.num_history_ids):
                seq.state.release_paging_resources()
        return schedule(self, *args, **kwargs)

    module.Scheduler.schedule = schedule_checked


def patch_paging_prefill_scheduler(module: ModuleType) -> None:
    """Under admission a session that goes on keeps its state, and what loses its match is judged once more.

    lmdeploy 0.18.0 asks every sequence for a new slot, also one that has a state, and takes its history when there is none. What
    was a short turn behind a long history is then a long prompt, past the gates for long prompts and in a batch with others.
    """
    attempt, outcome = module._PrefillAdmissionAttempt, module._PrefillAdmissionResult
    admit, rollback = attempt._admit_runtime_state, attempt._rollback_match_after_resource_failure

    @functools.wraps(admit)
    def admit_unless_held(self: Any) -> Any:
        return None if self.prefill_scheduler.state_manager.is_allocated(self.seq) else admit(self)

    @functools.wraps(rollback)
    def rollback_and_judge(self: Any, reason: str) -> Any:
        rejection = rollback(self, reason)
        if rejection is not None:
            return rejection
        prefill, seq = self.prefill_scheduler, self.seq
        if not self.turn_policy.allows_nonfinal_long_prefill and prefill._prefill_kv_token_limit(seq) is not None:
            return outcome.skip()
        tokens = self.batch_prefill_tokens + prefill._prefill_admission_token_count(seq)
        if self.batch_has_prefill and tokens > prefill.cache_config.max_prefill_token_num:
            return self._token_budget_rejection()
        return None

    attempt._admit_runtime_state = admit_unless_held
    attempt._rollback_match_after_resource_failure = rollback_and_judge
