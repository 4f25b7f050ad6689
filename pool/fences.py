"""Fences: when the device has finished a step. One event a step, polled by the thread that owns the ledger."""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

from .ledger import Ledger


class Fence(Protocol):
    """Passed once everything queued before it has run."""

    def passed(self) -> bool: ...

    def wait(self) -> None: ...


class ImmediateFence:
    """The fence of work that runs before the call returns: the CPU."""

    def passed(self) -> bool:
        """Always."""
        return True

    def wait(self) -> None:
        """Returns at once."""


class CudaFence:
    """A CUDA event recorded on `stream` (default: the current stream of `device`)."""

    def __init__(self, device: Any, stream: Any = None) -> None:
        import torch

        self.event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.event.record(torch.cuda.current_stream(device) if stream is None else stream)

    def passed(self) -> bool:
        """Whether the device has reached the event. Does not wait."""
        return bool(self.event.query())

    def wait(self) -> None:
        """Blocks the host until the device has reached the event."""
        self.event.synchronize()


class FenceQueue:
    """Fences of submitted steps in order, as this process's `rank` sees them; passing one tells the ledger.

    Other ranks report to `ledger.step_done(step, rank)`.
    """

    def __init__(self, ledger: Ledger, *, rank: int = 0) -> None:
        self.ledger, self.rank = ledger, rank
        self._queue: deque[tuple[int, Fence]] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def record(self, step: int, fence: Fence | None = None) -> None:
        """The step's work is queued on the device; `fence` comes after it (None: it has already run)."""
        self.ledger.step_launched(step)
        self._queue.append((step, fence or ImmediateFence()))

    def poll(self) -> int:
        """Reports every fence that has passed. Returns the last step that is done."""
        done = 0
        try:
            while self._queue and self._queue[0][1].passed():
                done = self._queue.popleft()[0]
        finally:
            if done:
                self.ledger.step_done(done, self.rank)
        return self.ledger.done

    def wait_oldest(self) -> bool:
        """Waits for the oldest fence and reports it. False if none is outstanding."""
        if not self._queue:
            return False
        self._queue[0][1].wait()
        self.poll()
        return True

    def wait_all(self) -> None:
        """Waits for every outstanding fence."""
        while self.wait_oldest():
            pass
