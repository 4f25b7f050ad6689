"""lmdeploy's state manager over the pool's ledger: admission, steps, fences, sleep and new weights.

One forward is one step of the ledger. The plan of a forward is made while its inputs are made (`begin` … `submit`), its
checkpoints are published once it is dispatched, and its fence is the arrival of its output. Forwards of a rank run on one
stream in the order of their submission, so the ledger's early policy applies: a slot that only queued forwards still
use may be granted to a later one; transfers, which are on no stream, wait for fences all the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from ...pool.errors import CapacityError, InvariantError
from ...pool.ledger import Ledger
from ...pool.slots import UNRESOLVED, Holder
from .drafts import LogRows, Trail

# `logical_state` of an admitted sequence. Its slot is the ledger's business and changes; lmdeploy only asks for >= 0.
ADMITTED = 0


class CompactStateManager:
    """The surface of lmdeploy's StateManager. A sequence is known to the ledger by its `seq_id`."""

    def __init__(self, num_slots: int, *, checkpoint_budget: int = 0, log_rows: int = 0) -> None:
        self.ledger = Ledger(num_slots, policy="early")
        self.logs = LogRows(log_rows) if log_rows else None
        self.checkpoint_budget = checkpoint_budget
        self._in_flight: deque[int] = deque()
        # The sequence whose match is pinned while the scheduler still looks for KV blocks; at most one.
        self._tentative: int | None = None

    # Admission

    def is_allocated(self, seq: Any) -> bool:
        """Whether the sequence is admitted."""
        return bool(seq.logical_state >= 0)

    def holder(self, seq: Any) -> Holder:
        """The ledger's record of an admitted sequence. Raises InvariantError for another."""
        holder = self.ledger.holders.get(seq.seq_id)
        if holder is None:
            raise self.ledger.broken(f"sequence {seq.seq_id} has no state and is in a forward")
        return holder

    def can_admit(self) -> bool:
        """Whether one more sequence can be given every slot that its steps may need."""
        return self._tentative is not None or self.ledger.reachable > self.ledger.demand

    def pin(self, seq: Any, handle: Any) -> bool:
        """Give a sequence under admission R on a checkpoint. False: it would starve the ones already admitted."""
        ledger = self.ledger
        old = ledger.holders.get(seq.seq_id)
        if old is not None and old.rec is not None:
            # The next turn of a session, with a checkpoint that reaches further than its own state.
            ledger.drop(old)
            self._forget_log(seq)
            old = None
        try:
            holder = ledger.admit(seq.seq_id) if old is None else old
        except CapacityError:
            return False
        try:
            ledger.hit(holder, handle)
        except CapacityError:
            ledger.drop(holder)
            return False
        self._tentative = seq.seq_id
        return True

    def unpin(self, seq: Any) -> None:
        """Take the match of a rejected admission back."""
        if self._tentative == seq.seq_id:
            self._tentative = None
        holder = self.ledger.holders.get(seq.seq_id)
        if holder is not None:
            self.ledger.drop(holder)

    def allocate(self, seq: Any) -> None:
        """Admit a sequence (or confirm its pinned match). Raises CapacityError when `can_admit` was not asked."""
        if self._tentative == seq.seq_id:
            self._tentative = None
        if seq.seq_id not in self.ledger.holders:
            self.ledger.admit(seq.seq_id)
        seq.logical_state = ADMITTED

    def free(self, seq: Any) -> None:
        """End a sequence's hold. Forwards already queued keep what they use."""
        holder = self.ledger.holders.get(seq.seq_id)
        if holder is not None:
            self.ledger.drop(holder)
        self._forget_log(seq)
        seq.logical_state = -1

    def stands_at(self, seq: Any, position: int) -> bool:
        """Whether the state of an admitted sequence is, or by its draft log can become, the one after `position` tokens."""
        holder = self.ledger.holders.get(seq.seq_id)
        trail = self._trail(seq)
        if holder is None or trail is None or not trail.steps:
            return holder is not None and holder.position == position
        span = trail.span()
        return span is not None and span[0] <= position <= span[1]

    # Drafts

    def _trail(self, seq: Any) -> Trail | None:
        return None if self.logs is None else getattr(seq, "compact_trail", None)

    def _forget_log(self, seq: Any) -> None:
        if self.logs is not None:
            self.logs.forget(seq)

    def catch_up(self, seq: Any) -> list[tuple[int, int, int, int, int]]:
        """Before a prefill: what brings a sequence's slot from its last verify step to its history, and the ledger too.

        One commit (slot, tokens in it, tokens to add, log row, log half), or none.
        """
        trail, holder, history = self._trail(seq), self.holder(seq), seq.num_history_ids
        span = None if trail is None or not trail.steps else trail.span()
        if trail is None or span is None or holder.rec is None or not span[0] <= history <= span[1]:
            return []
        self.ledger.resolve(holder, history)
        behind = history - span[0]
        return [(holder.rec.slot, span[0], behind, trail.row, trail.half)] if behind else []

    def begin_logs(self, seqs: Sequence[Any], ends: Sequence[int]) -> list[int] | None:
        """The log rows of sequences whose prefill, now planned, ends at `ends` tokens; None without drafts."""
        if self.logs is None:
            return None
        return [self.logs.begin(seq, end).row for seq, end in zip(seqs, ends)]

    def submit_decode(self, step: int, seqs: Sequence[Any]) -> tuple[list[int], list[int]]:
        """`submit` of a decode forward; with drafts the device alone knows how many tokens it adds to each state."""
        if self.logs is None:
            return self.submit(step, seqs, [1] * len(seqs))
        trails = [self._trail(seq) for seq in seqs]
        for seq, trail in zip(seqs, trails):
            if trail is None or trail.row < 0:
                raise self.ledger.broken(f"sequence {seq.seq_id} is in a verify step and has no draft log")
        ids = self.submit(step, seqs, [UNRESOLVED] * len(seqs))
        for trail in trails:
            if trail is not None:
                trail.steps += 1
        return ids

    # Steps

    def submit(self, step: int, seqs: Sequence[Any], counts: Sequence[int]) -> tuple[list[int], list[int]]:
        """Close the plan of a forward: per sequence the slot to read (-1 = none) and the slot to write."""
        holders = [self.holder(seq) for seq in seqs]
        reads, writes = self.ledger.submit(step, holders, counts)
        self._in_flight.append(step)
        return reads, writes

    def dispatched(self) -> None:
        """The forward submitted last is in the workers' queue, its checkpoints are published."""
        if self.ledger.launched < self.ledger.submitted:
            self.ledger.step_launched(self.ledger.submitted)

    def output_arrived(self) -> None:
        """The output of the oldest forward in flight is here: its fence has passed."""
        if not self._in_flight:
            raise InvariantError("an output arrived for a forward that was not submitted", self.ledger.dump())
        self.ledger.step_done(self._in_flight.popleft())

    # Sleep and weights

    def sleep(self) -> None:
        """The workers have synchronised and every session has ended: the memory may go."""
        ledger = self.ledger
        if ledger.mode != "run":
            return
        self._settle()
        ledger.drain()
        ledger.sleep()

    def wake(self) -> None:
        """There is memory again, under the next incarnation."""
        if self.ledger.mode == "asleep":
            self.ledger.wake()

    def new_weights(self) -> None:
        """No checkpoint of the old weights is found any more; sequences in flight never publish theirs."""
        if self.ledger.mode == "run":
            self.ledger.bump_epoch()

    def _settle(self) -> None:
        ledger = self.ledger
        self.dispatched()
        if ledger.done < ledger.submitted:
            ledger.step_done(ledger.submitted)
        self._in_flight.clear()
        self._tentative = None

    def get_num_allocated_checkpoint_states(self) -> int:
        """Slots that hold a checkpoint."""
        return sum(record.entry is not None for record in self.ledger.records)
