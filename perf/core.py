"""A core for the calling thread, and whether the thread has it to itself: a fixed loop of Python against its own fastest time.

What shares a core (a sibling thread, another guest of the machine) does not show in the load that a process can read, and makes
every call half as long again for a second or two.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable

QUIET = 1.1  # how much longer than its fastest the loop may take
LOOPS = 5  # of which the median counts, for the fastest as well: a single loop may be quicker than any call ever is
TRIED = 6  # cores in a row before a pause
MOST_TRIED = 2 * TRIED  # at a time: something else may be done meanwhile
PAUSE_S = 0.1
PATIENCE_S = 12.0  # of all waiting and of all that is taken again, together


def spin() -> float:
    """Seconds of a fixed loop, about a third of a millisecond."""
    began = time.perf_counter()
    total = 0
    for number in range(8000):
        total += number & 7
    return time.perf_counter() - began


class Core:
    """The core that a thread runs on. spin: gives the seconds of a fixed piece of work. patience_s: what is left of it."""

    def __init__(self, spin: Callable[[], float] = spin, patience_s: float = PATIENCE_S) -> None:
        self._spin, self.patience_s = spin, patience_s
        self._all = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
        self._order = sorted(self._all)
        self._fastest = math.inf
        for _ in range(4 * LOOPS):
            self.slowdown()

    def slowdown(self) -> float:
        """How much longer the loop takes now than its fastest."""
        median = sorted(self._spin() for _ in range(LOOPS))[LOOPS // 2]
        self._fastest = min(self._fastest, median)
        return median / self._fastest

    def settle(self) -> float:
        """Stay, or go to a core where the loop is quick; gives its slowdown there, above `QUIET` where none was found.

        Then it is the quickest of those that were tried.
        """
        found, tried = self.slowdown(), 0
        seen: dict[int, float] = {}
        while found > QUIET and self.patience_s > 0 and tried < MOST_TRIED and self._order:
            began = time.monotonic()
            self._order.append(self._order.pop(0))
            os.sched_setaffinity(0, {self._order[0]})
            tried += 1
            if tried % TRIED == 0:
                time.sleep(PAUSE_S)
            found = seen[self._order[0]] = self.slowdown()
            self.patience_s -= time.monotonic() - began
        if seen and found > min(seen.values()):
            best = min(seen, key=seen.__getitem__)
            os.sched_setaffinity(0, {best})
            self._order.remove(best)
            self._order.insert(0, best)
            found = seen[best]
        return found

    def leave(self) -> None:
        """Allow all cores again."""
        if self._all:
            os.sched_setaffinity(0, self._all)
