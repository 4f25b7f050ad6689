"""FenceQueue and its fences: what the ledger is told, in which order, and what is waited for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compact_state.pool.fences import CudaFence, FenceQueue, ImmediateFence


class HandFence:
    """Passes when its step is let go, or waited for."""

    def __init__(self) -> None:
        self.there, self.waits = False, 0

    def passed(self) -> bool:
        return self.there

    def wait(self) -> None:
        self.waits += 1
        self.there = True


class Told:
    """What a ledger hears."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.done = 0

    def step_launched(self, step: int) -> None:
        self.heard.append(("launched", step))

    def step_done(self, step: int, rank: int) -> None:
        self.heard.append(("done", step, rank))
        self.done = step


def test_fences_pass_in_order_and_are_reported_once() -> None:
    ledger = Told()
    queue = FenceQueue(ledger, rank=3)  # type: ignore[arg-type]
    first, second, third = HandFence(), HandFence(), HandFence()
    for step, fence in ((1, first), (2, second), (3, third)):
        queue.record(step, fence)
    assert ledger.heard == [("launched", 1), ("launched", 2), ("launched", 3)]
    ledger.heard.clear()
    second.there = True
    assert queue.poll() == 0
    assert (ledger.heard, len(queue)) == ([], 3)
    first.there = True
    assert queue.poll() == 2
    assert (ledger.heard, len(queue)) == ([("done", 2, 3)], 1)
    assert queue.poll() == 2
    assert ledger.heard == [("done", 2, 3)]
    assert (first.waits, second.waits, third.waits) == (0, 0, 0)
    assert queue.wait_oldest()
    assert (third.waits, ledger.heard[-1], len(queue)) == (1, ("done", 3, 3), 0)
    assert not queue.wait_oldest()


def test_waiting_for_all_takes_one_after_the_other() -> None:
    ledger = Told()
    queue = FenceQueue(ledger)  # type: ignore[arg-type]
    fences = [HandFence() for _ in range(3)]
    for step, fence in enumerate(fences, 1):
        queue.record(step, fence)
    queue.record(4)  # of the CPU: it has run
    queue.wait_all()
    assert [fence.waits for fence in fences] == [1, 1, 1]
    assert [heard for heard in ledger.heard if heard[0] == "done"] == [("done", 1, 0), ("done", 2, 0), ("done", 4, 0)]
    assert (ledger.done, len(queue)) == (4, 0)
    ImmediateFence().wait()


@pytest.mark.parametrize("stream", [None, "a stream"])
def test_a_cuda_fence_is_an_event_on_its_stream(stream: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    event = SimpleNamespace(
        record=lambda where: calls.append(("record", where)),
        query=lambda: calls.append("query") or 1,
        synchronize=lambda: calls.append("synchronize"),
    )
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"current of {device}")
    fence = CudaFence("cuda:1", stream)
    assert calls == [("record", stream or "current of cuda:1")]
    assert fence.passed() is True
    fence.wait()
    assert calls[1:] == ["query", "synchronize"]


def test_a_fence_that_raises_hides_none_before_it() -> None:
    ledger = Told()
    queue = FenceQueue(ledger)  # type: ignore[arg-type]

    class Broken(HandFence):
        def passed(self) -> bool:
            raise RuntimeError("an error of the device")

    queue.record(1, ImmediateFence())
    queue.record(2, Broken())
    with pytest.raises(RuntimeError, match="of the device"):
        queue.poll()
    assert (ledger.done, len(queue)) == (1, 1)
