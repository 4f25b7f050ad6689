"""Random request schedules through lmdeploy's own host code never break the ledger, and every answer is the cold one."""

from __future__ import annotations

import os
from typing import Any

import pytest

pytestmark = pytest.mark.lmdeploy
pytest.importorskip("lmdeploy", reason="lmdeploy is not installed")

from hypothesis import HealthCheck, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule  # noqa: E402
from lmd_flow import Flow, MessageStatus, next_token  # noqa: E402

ALIGNMENT = "LMDEPLOY_COMPACT_PREFILL_SAVE_ALIGNMENT"


class Schedules(RuleBasedStateMachine):
    """Arrivals, steps, cancels, further turns, sleep and new weights in any order on a small pool."""

    @initialize(
        max_batches=st.integers(1, 4),
        budget=st.sampled_from([0, 1, 2, 3, 5, 12]),
        extra=st.integers(-2, 1),
        prefill_tokens=st.sampled_from([128, 256, 1024]),
        blocks=st.sampled_from([18, 40, 200]),
        alignment=st.sampled_from(["0", "64", "128"]),
        caching=st.sampled_from([True, True, True, False]),
    )
    def start(
        self,
        max_batches: int,
        budget: int,
        extra: int,
        prefill_tokens: int,
        blocks: int,
        alignment: str,
        caching: bool,
    ) -> None:
        os.environ[ALIGNMENT] = alignment
        try:
            self.flow = self.make(
                max_batches=max_batches,
                budget=budget,
                num_slots=max(1, max_batches + budget + extra),
                prefill_tokens=prefill_tokens,
                blocks=blocks,
                caching=caching,
            )
        finally:
            del os.environ[ALIGNMENT]
        # What each open session has been given and has answered, or None once new weights mixed into it.
        self.spoken: dict[int, tuple[Any, list[int], int] | None] = {}
        self.open: list[Any] = []

    def make(self, **sizes: Any) -> Flow:
        return Flow(**sizes)

    def prompt(self, root: int, length: int, tail: int) -> list[int]:
        shared = [(i * 5 + root) % 11 + 3 for i in range(length)]
        return [*shared, tail + 20, tail % 7 + 30]

    @rule(
        root=st.integers(0, 2),
        length=st.integers(1, 420),
        tail=st.integers(0, 5),
        new=st.integers(1, 12),
        image=st.none() | st.tuples(st.integers(0, 300), st.integers(1, 90), st.sampled_from("ab")),
    )
    def add(self, root: int, length: int, tail: int, new: int, image: tuple[int, int, str] | None) -> None:
        if len(self.open) >= 6:
            return
        tokens = self.prompt(root, length, tail)
        if image is not None:
            first, size, content = image
            image = (first, first + size, content) if first + size <= length else None
        seq = self.flow.add(tokens, new, image)
        self.open.append(seq)
        self.spoken[seq.seq_id] = (seq, tokens, self.flow.device.epoch)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.flow.step()

    @precondition(lambda self: self.open)
    @rule(pick=st.integers(0, 5))
    def cancel(self, pick: int) -> None:
        self.flow.cancel(self.open.pop(pick % len(self.open)))

    @rule()
    def end_finished(self) -> None:
        for seq in [seq for seq in self.open if seq.status == MessageStatus.STOPPED]:
            self.judge(seq)
            self.open.remove(seq)
            self.flow.end(seq)

    @rule(length=st.integers(1, 90), new=st.integers(1, 5))
    def next_turn(self, length: int, new: int) -> None:
        for seq in self.open:
            if seq.status == MessageStatus.STOPPED:
                self.judge(seq)
                turn = self.prompt(1, length, 3)
                known = self.spoken[seq.seq_id]
                if known is not None:
                    self.spoken[seq.seq_id] = (seq, [*known[1], *map(int, seq.generated_ids), *turn], known[2])
                self.flow.go_on(seq, turn, new)
                return

    @rule()
    def update_weights(self) -> None:
        self.flow.update_weights()
        for seq in self.open:
            self.spoken[seq.seq_id] = None

    @rule()
    def sleep_and_wake(self) -> None:
        self.flow.sleep()
        self.open.clear()
        self.flow.wake()

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "flow"):
            self.flow.ledger_is_sound()

    def judge(self, seq: Any) -> None:
        """What a finished request answered is what it answers alone, on an empty cache."""
        known = self.spoken[seq.seq_id]
        if known is None:
            return
        _, context, epoch = known
        context = list(context)
        for token in seq.generated_ids:
            assert int(token) == next_token(tuple(context), epoch)
            context.append(int(token))

    def teardown(self) -> None:
        if not hasattr(self, "flow"):
            return
        for _ in range(400):
            self.flow.step()
            self.end_finished()
            if not self.open:
                break
        for seq in self.open:  # what the KV cache or the pool is too small for waits for ever, and may be cancelled
            self.flow.cancel(seq)
        for _ in range(10):
            self.flow.step()
        ledger = self.flow.ledger
        assert ledger.available == ledger.num_slots
        assert ledger.demand == 0


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
