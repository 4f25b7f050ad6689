"""Checkpoints of lmdeploy's prefix trie as slots of the pool.

The trie keeps what it is good at: token and media identity, KV blocks, frozen partial blocks. The ledger decides about
slots. A checkpoint moves no state: at the end of a prefill the sequence hands its slot to the node and writes elsewhere
from then on; inside a prefill the kernels write the state at each boundary to a slot of its own; a restore reads the
checkpoint's slot and writes another.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ...pool.handles import SlotHandle
from ...pool.slots import Holder
from .. import envs
from .eviction import Eviction
from .states import CompactStateManager

if TYPE_CHECKING:
    NodeStateCheckpoint: Any = object
    StateCheckpointLifecycle: Any = object
else:
    from lmdeploy.pytorch.paging.block_trie.checkpoint_lifecycle import StateCheckpointLifecycle
    from lmdeploy.pytorch.paging.block_trie.node import NodeStateCheckpoint


@dataclass(slots=True)
class CompactCheckpoint(NodeStateCheckpoint):  # type: ignore[misc]
    """A node's checkpoint; `handle` names the life of its slot once it is published."""

    handle: SlotHandle | None = None


@dataclass
class Save:
    """One checkpoint that a forward is to make: `handle` None = the sequence's own slot at the forward's end."""

    node: Any
    checkpoint: CompactCheckpoint
    handle: SlotHandle | None


@dataclass
class ForwardPlan:
    """What one prefill forward reads, writes and keeps. `exports[i]`: (tokens within the call, slot) of sequence i.

    With drafts, `log_rows[i]` is the draft log row of sequence i, and `commits` names what is folded into slots before the
    forward: (slot, tokens in it, tokens to add, log row, log half).
    """

    reads: list[int]
    writes: list[int]
    exports: list[list[tuple[int, int]]]
    log_rows: list[int] | None = None
    commits: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    kv_restores: list[tuple[int, int]] = field(default_factory=list)
    kv_saves: list[tuple[int, int]] = field(default_factory=list)


def boundaries(start: int, end: int, alignment: int, limit: int) -> list[int]:
    """At most `limit` multiples of `alignment` strictly between `start` and `end`, thinned to every second, fourth, …, ascending.

    The one nearest the end always stays: it is the deepest that a prompt with another tail can hit.
    """
    if alignment <= 0 or limit <= 0:
        return []
    inside = list(range((start // alignment + 1) * alignment, end, alignment))
    while len(inside) > limit:
        alignment *= 2
        inside = [position for position in inside[:-1] if position % alignment == 0] + inside[-1:]
    return inside


class CompactCheckpointLifecycle(StateCheckpointLifecycle):  # type: ignore[misc]
    """lmdeploy's checkpoint lifecycle with the ledger as the one owner of slots."""

    _state_manager: CompactStateManager

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.alignment = envs.prefill_save_alignment()
        self._pending: dict[int, list[Save]] = {}
        # Whether the forward planned last is a prefill: a decode step neither saves nor restores.
        self._planned_prefill = False
        if self._state_manager is not None:
            ledger, budget = self._state_manager.ledger, self._state_manager.checkpoint_budget
            ledger.on_uncache = self._on_uncache
            self._eviction = Eviction(ledger, self.alignment, budget // 2)

    # Planning

    def plan_prefill(self, seqs: Sequence[Any], ends: Sequence[int]) -> ForwardPlan:
        """Plan the prefill forward that takes each sequence from its history to `ends[i]` tokens."""
        manager, ledger = self._state_manager, self._state_manager.ledger
        self._planned_prefill = True
        step = ledger.begin_step()
        plan = ForwardPlan([], [], [])
        try:
            for seq, end in zip(seqs, ends):
                holder = manager.holder(seq)
                plan.commits += manager.catch_up(seq)
                if holder.position != seq.num_history_ids:
                    raise ledger.broken(
                        f"sequence {seq.seq_id} goes on from {seq.num_history_ids} tokens with the state of {holder.position}"
                    )
                self._plan_restore(seq, plan)
                plan.exports.append(self._plan_saves(seq, holder, step, end, plan))
            counts = [end - seq.num_history_ids for seq, end in zip(seqs, ends)]
            plan.reads, plan.writes = manager.submit(step, seqs, counts)
            plan.log_rows = manager.begin_logs(seqs, ends)
        except Exception:
            for seq in seqs:
                self.discard_save(seq)
            if ledger.submitted < step:
                ledger.abandon(step)
            raise
        return plan

    def plan_decode(self, seqs: Sequence[Any]) -> tuple[list[int], list[int]] | None:
        """Plan a decode forward; the ids, or None when every row writes the slot it reads, as the device knows already."""
        manager = self._state_manager
        step = manager.ledger.begin_step()
        try:
            reads, writes = manager.submit_decode(step, seqs)
        except Exception:
            manager.ledger.abandon(step)
            raise
        return None if reads == writes else (reads, writes)

    def _plan_restore(self, seq: Any, plan: ForwardPlan) -> None:
        restore = seq.prefix_cache.restore
        if not restore.is_selected:
            return
        if not restore.pinned:
            raise self._state_manager.ledger.broken(f"sequence {seq.seq_id} reads a checkpoint that it did not pin")
        checkpoint = restore.node.state_checkpoint
        if checkpoint is None:
            raise self._state_manager.ledger.broken(f"sequence {seq.seq_id} reads a checkpoint that is gone")
        if checkpoint.frozen_block_id >= 0:
            block = seq.logical_blocks[checkpoint.step // self._block_size]
            plan.kv_restores.append((int(checkpoint.frozen_block_id), int(block)))

    def _plan_saves(self, seq: Any, holder: Holder, step: int, end: int, plan: ForwardPlan) -> list[tuple[int, int]]:
        """Reserve the checkpoints of one sequence; returns its exports."""
        self.discard_save(seq)
        if not (self._prefix_cache_enabled and self._state_checkpoints_enabled) or holder.tainted:
            return []
        start = seq.num_history_ids
        limit = max(1, self._state_manager.checkpoint_budget // 2)
        inside = boundaries(start, end, self.alignment, limit)
        nodes = self._anchors(seq, [*inside, end])
        saves: list[Save] = []
        # From the end backwards: when slots run out the deep ones exist, and eviction meets them before the shared ones.
        for position in reversed(inside):
            node = nodes.get(position)
            if node is None or node.state_checkpoint is not None or not seq.is_prefix_cache_boundary_safe(position):
                continue
            handle = self._state_manager.ledger.alloc_besteffort(step)
            if handle is None:
                break
            node.state_checkpoint = CompactCheckpoint(slot=handle.slot, step=position)
            saves.append(Save(node, node.state_checkpoint, handle))
        last = self._plan_end(seq, end, nodes.get(end - end % self._block_size), plan)
        self._pending[seq.seq_id] = saves if last is None else [*saves, last]
        return sorted((save.checkpoint.step - start, save.checkpoint.slot) for save in saves)

    def _plan_end(self, seq: Any, end: int, node: Any, plan: ForwardPlan) -> Save | None:
        """The checkpoint at the forward's end, with a frozen copy of the KV block that it ends in, if it ends in one."""
        if end > seq.num_valid_ids or node is None or not seq.is_prefix_cache_boundary_safe(end):
            return None
        old = node.state_checkpoint
        if old is not None:
            if not old.published or old.step == end or self.is_pinned(node):
                return None
            self.release_checkpoint(node)
        frozen = -1
        if end % self._block_size:
            try:
                frozen = int(self._allocator.allocate(1, "gpu")[0])
            except MemoryError:
                return None
            plan.kv_saves.append((int(seq.logical_blocks[end // self._block_size]), frozen))
        node.state_checkpoint = CompactCheckpoint(slot=-1, step=end, frozen_block_id=frozen)
        return Save(node, node.state_checkpoint, None)

    def _anchors(self, seq: Any, positions: Sequence[int]) -> dict[int, Any]:
        """The attached nodes of the sequence's path that stand at full-block positions, by position."""
        wanted = {position - position % self._block_size for position in positions}
        found: dict[int, Any] = {}
        node = seq.prefix_cache.trie_cursor
        while node is not None and len(found) < len(wanted):
            if node.prefix_len in wanted and node.is_attached_or_root():
                found[node.prefix_len] = node
            node = node.parent
        return found

    # Publishing

    def finish_forward_dispatch(self, seqs: Sequence[Any], *, has_save_plan: bool = False) -> None:
        """The forward is in the workers' queue: publish what it makes, forget the restores it has taken over."""
        for seq in seqs if self._planned_prefill else ():
            saves = self._pending.get(seq.seq_id, [])
            while saves:  # where one fails, the rest stays reserved, for `discard_save`
                self._publish(seq, saves.pop(0))
            self._pending.pop(seq.seq_id, None)
            if seq.prefix_cache.restore.pinned:
                seq.prefix_cache.restore.clear()
        self._planned_prefill = False
        self._state_manager.dispatched()

    def _publish(self, seq: Any, save: Save) -> None:
        """Seal the slot, give it to the node, index it. The reservation is gone if the pool refuses."""
        node, checkpoint = save.node, save.checkpoint
        if node.state_checkpoint is not checkpoint:
            return
        ledger, holder = self._state_manager.ledger, self._state_manager.holder(seq)
        if holder.tainted or not node.is_attached_or_root():
            self._drop_reservation(save)
            return
        try:
            checkpoint.exact_match_data = self._snapshot_match_data(node, seq)
            if save.handle is None:
                handle = ledger.publish(holder, checkpoint.step, node)
            else:
                done = ledger.export(ledger.submitted, save.handle, holder, checkpoint.step, node)
                handle = save.handle if done else None
        except Exception:
            self._drop_reservation(save)
            raise
        if handle is None:
            self._drop_reservation(save)
            return
        checkpoint.handle, checkpoint.slot = handle, handle.slot
        checkpoint.published = True
        checkpoint.last_access_time = time.perf_counter()
        self._eviction.published(handle, checkpoint.step, save.handle is None and checkpoint.step == seq.num_valid_ids)
        self._index.add(node)

    def unpin_saves(self, seqs: Sequence[Any]) -> None:
        """The forward's output has arrived; with it its fence."""
        self._state_manager.output_arrived()

    def discard_save(self, seq: Any) -> bool:
        """Forget what a sequence reserved and has not published. Its slots are free once the forward has passed."""
        saves = self._pending.pop(seq.seq_id, ())
        for save in saves:
            self._drop_reservation(save)
        return bool(saves)

    def _drop_reservation(self, save: Save) -> None:
        if save.node.state_checkpoint is save.checkpoint:
            self._forget(save.node)

    def _forget(self, node: Any) -> None:
        """Take a checkpoint off its node: index entry and frozen block. The slot is not touched here."""
        checkpoint = node.state_checkpoint
        if checkpoint.exact_match_data is not None:
            self._index.remove_entry(node, self._index.make_node_key(node))
        node.state_checkpoint = None
        if checkpoint.frozen_block_id >= 0:
            self._allocator.free(np.array([checkpoint.frozen_block_id], dtype=np.int64))

    def _on_uncache(self, node: object, reason: str) -> None:
        self._forget(node)

    # Restoring

    def pin_restore(self, seq: Any) -> bool:
        """Give a sequence under admission R on the checkpoint it matched. False: match nothing, or try later."""
        restore = seq.prefix_cache.restore
        if not restore.is_selected or restore.pinned:
            return False
        checkpoint = restore.node.state_checkpoint
        ledger = self._state_manager.ledger
        if checkpoint is None or not checkpoint.published or not ledger.is_current(checkpoint.handle):
            return False
        if not self._state_manager.pin(seq, checkpoint.handle):
            return False
        checkpoint.last_access_time = time.perf_counter()
        self._eviction.hit(checkpoint.handle, checkpoint.step)
        restore.pinned = True
        return True

    def unpin_restore(self, seq: Any) -> bool:
        """Take a restore back that no forward has taken over yet."""
        restore = seq.prefix_cache.restore
        if not restore.pinned:
            return False
        self._state_manager.unpin(seq)
        restore.clear()
        return True

    # Capacity

    def make_runtime_state_available(self) -> bool:
        """Whether one more sequence can be admitted. The ledger evicts checkpoints when it grants slots, not here."""
        return self._state_manager is not None and self._state_manager.can_admit()

    def is_pinned(self, node: Any) -> bool:
        """Whether a sequence or a transfer stands on the node's checkpoint."""
        checkpoint = node.state_checkpoint
        if checkpoint is None or checkpoint.handle is None:
            return False
        record = self._state_manager.ledger.granted(checkpoint.handle)
        return record.readers > 0 or record.puts > 0

    def release_checkpoint(self, node: Any) -> None:
        """Take the checkpoint off a node; the node and its KV block stay. Raises RuntimeError if it is pinned."""
        checkpoint = node.state_checkpoint
        if checkpoint is None:
            return
        if self.is_pinned(node):
            raise RuntimeError("Cannot release a pinned SSM prefix-cache checkpoint.")
        if checkpoint.handle is None:
            self._forget(node)
        else:
            self._state_manager.ledger.uncache(checkpoint.handle, "released")

    def _is_evictable_checkpoint(self, node: Any) -> bool:
        checkpoint = node.state_checkpoint
        return checkpoint is not None and checkpoint.published and not self.is_pinned(node)
