"""Drafts on the host: which log row a sequence has, and where its state stands while only the device knows the counts.

A verify forward commits what the forward before it accepted and leaves its own tokens in the draft log. So a slot stands
one forward behind the answers, and the tokens between the two are in the log. Counts stay on the device; the host learns
them from the outputs, later, and needs them only when a sequence goes on with another prompt.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ...pool.errors import InvariantError

# Statuses of a sequence that a forward may be planned for; any other one can spare its log row.
RUNNABLE = ("READY", "RUNNING")


@dataclass(slots=True)
class Trail:
    """One sequence since its last prefill, which ended at `base` tokens.

    `steps` verify forwards are planned, the outputs of `answers` of them have arrived, in which `total` tokens were
    accepted, `last` of them in the latest.
    """

    row: int
    base: int = 0
    steps: int = 0
    answers: int = 0
    total: int = 0
    last: int = 0

    def restart(self, base: int) -> None:
        """A prefill is planned that ends at `base` tokens; what the log holds is of no use after it."""
        self.base, self.steps, self.answers, self.total, self.last = base, 0, 0, 0, 0

    def answer(self, accepted: int) -> None:
        """The output of the next verify forward is here."""
        self.answers, self.total, self.last = self.answers + 1, self.total + accepted, accepted

    @property
    def half(self) -> int:
        """The half of the log that the latest forward planned will have written."""
        return self.steps & 1

    def span(self) -> tuple[int, int] | None:
        """Token counts that can be reached: the slot's own, and with all of the log. None: an output is missing.

        A forward whose output is not here has committed everything accepted before it; its own tokens do not count.
        """
        if self.steps == 0 or self.steps == self.answers + 1:
            return self.base + self.total, self.base + self.total
        if self.steps != self.answers:
            return None
        end = self.base + self.total
        return end - self.last, end if self.row >= 0 else end - self.last


class LogRows:
    """Rows of the draft logs, one per running sequence; `seq.compact_trail` is the sequence's Trail.

    A stopped sequence keeps its row, and with it the tokens that its next turn needs, until a running one needs a row.
    Forwards run in the order they are planned in, so a row given on is not written by its former owner any more.
    """

    def __init__(self, count: int) -> None:
        self.free = list(range(count - 1, -1, -1))
        self.owners: dict[int, Any] = {}

    def begin(self, seq: Any, end: int) -> Trail:
        """The trail of a sequence whose prefill, now planned, ends at `end` tokens."""
        trail: Trail | None = getattr(seq, "compact_trail", None)
        if trail is None or trail.row < 0:
            trail = seq.compact_trail = Trail(self._take())
            self.owners[trail.row] = seq
        trail.restart(end)
        return trail

    def forget(self, seq: Any) -> None:
        """The sequence gives up its state, and its row."""
        trail: Trail | None = getattr(seq, "compact_trail", None)
        if trail is None:
            return
        seq.compact_trail = None
        if trail.row >= 0:
            del self.owners[trail.row]
            self.free.append(trail.row)

    def _take(self) -> int:
        if self.free:
            return self.free.pop()
        for row, seq in self.owners.items():
            if seq.status.name not in RUNNABLE:
                seq.compact_trail.row = -1
                del self.owners[row]
                return row
        raise InvariantError("more sequences run than there are draft log rows", repr(sorted(self.owners)))


def patch_strategies_ar_spec_sequence(module: ModuleType) -> None:
    """A sequence's trail sees how many tokens each verify forward accepted; the next turn of a session is complete."""
    sequence = module.SchedulerSequenceARSpec
    decode, inputs = sequence._update_token_ids_decode, sequence._update_token_ids_inputs

    @functools.wraps(decode)
    def decode_counting(self: Any, token_ids: Any, *args: Any, **kwargs: Any) -> None:
        trail = getattr(self, "compact_trail", None)
        if trail is not None:
            # Before the update: it cuts the answer at a stop, which the device does not.
            trail.answer(int((token_ids > -1).sum()))
        decode(self, token_ids, *args, **kwargs)

    @functools.wraps(inputs)
    def inputs_complete(self: Any, token_ids: Any) -> None:
        # Drafts of the last turn are no history; and its last answer, which no forward has read, is part of this turn.
        self.history_cache.resize(self.num_valid_ids)
        inputs(self, token_ids)
        self._num_token_ids = self.num_valid_ids - self.num_history_ids

    sequence._update_token_ids_decode = decode_counting
    sequence._update_token_ids_inputs = inputs_complete
