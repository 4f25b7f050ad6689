"""How a call is timed: CUDA-graph replay over rotated inputs, contenders interleaved, until the spread is small.

A contender is a list of launches that differ in slot ids (and, in prefill, in inputs). One graph holds all of them, and
together they touch several times the L2 cache, so every launch finds its data cold. A round replays each contender's graph
once, in turn: drift of clocks or temperature meets all alike. The figure is the median over rounds of graph time / launches.

Behind heavy work a chip lowers its clock for a tenth of a second, which costs those most that compute most. So the clock is
measured around every few rounds, by a kernel that waits for a number of cycles, and all contenders are taken again where rounds
met a lower clock than others do, or differ by more than they should.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

L2_BYTES = 60 * 2**20
COLD_BYTES = 4 * L2_BYTES  # what the launches of one graph touch at least
MAX_LAUNCHES = 240
WORK_US = 300.0  # device time of one graph at least: beside it the start of a graph is small
LAUNCH_US = 2.0  # what the smallest launch takes
BYTES_A_US = 4_000_000  # near the copy bandwidth; only decides how many launches make WORK_US
WARM_UP_S = 0.01  # of real work right before a case is timed, so that clocks are up
OWN = ("ours", "slab_copy")  # names of what must run in a graph
MIN_ROUNDS = 5
MAX_ROUNDS = 11
ENOUGH_SPREAD = 0.005
ROUND_BUDGET_S = 0.08  # device time after which no further rounds are added
SLOW_S = 0.012  # a replay that lasts longer needs fewer rounds: its own start and end are nothing beside it
SLOW_ROUNDS = 3
START_CYCLES = 2_000_000  # the device starts about a millisecond behind, so no launch gap is timed
CLOCK_CYCLES = 200_000  # a tenth of a millisecond, which events time to half a per cent
STEADY = 0.95  # of the fastest clock of the process, in all rounds of a take
DISTURBED_SPREAD = 0.05  # of any contender's rounds
TAKES = 4  # at most, until one is undisturbed
RECOVERY_S = 0.15  # how long a clock stays down
PATIENCE_S = 15.0  # of all that is taken again

Samples = dict[str, list[float]]


@dataclass
class Contender:
    """One implementation of one case.

    launches: calls that differ in ids or inputs; each returns its output. in_place: it writes the slots it reads. states:
    the first launch leaves its states in the pool. load: called before the first launch is checked. keep: tensors that must
    outlive the graph. restore: puts back what launches change in place, before every timed round and outside of its time.
    """

    name: str
    launches: Sequence[Callable[[], Any]]
    in_place: bool = False
    states: bool = True
    load: Callable[[], None] | None = None
    keep: Any = None
    restore: Callable[[], None] | None = None


@dataclass(frozen=True)
class Timing:
    """Median microseconds a launch, spread (quartile distance over median), whether it was timed in a graph."""

    us: float
    spread: float
    graph: bool = True


@dataclass
class Timings:
    """Results of one case by contender, and why others have none. clock_mhz: the lowest between rounds, where it was measured."""

    by_name: dict[str, Timing] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    clock_mhz: float | None = None


class PeerError(RuntimeError):
    """A peer's calls failed while they were timed."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}")
        self.name = name


class Timer(Protocol):
    """Something that times contenders side by side."""

    def time(self, contenders: Sequence[Contender]) -> Timings:
        """Median and spread of each; a contender that fails is reported, not raised, unless it is ours."""
        ...


def rotations(unique_bytes: int, minimum: int = 4) -> int:
    """Launches in a graph so that one replay touches COLD_BYTES and lasts about WORK_US."""
    cold = -(-COLD_BYTES // max(unique_bytes, 1))
    lasting = int(WORK_US / (LAUNCH_US + unique_bytes / BYTES_A_US))
    return max(minimum, min(MAX_LAUNCHES, max(cold, lasting)))


def summarize(samples: Sequence[float], graph: bool) -> Timing:
    """Median and quartile distance of samples in microseconds."""
    ordered = sorted(samples)
    median = statistics.median(ordered)
    low, high = ordered[len(ordered) // 4], ordered[(3 * len(ordered)) // 4]
    return Timing(median, (high - low) / median if median else 0.0, graph)


class Takes:
    """Which of several takes counts. fastest: the highest clock so far, MHz. patience_s: left for what is taken again."""

    def __init__(self, pause: Callable[[float], None] = time.sleep, patience_s: float = PATIENCE_S) -> None:
        self.fastest, self.patience_s, self._pause = 0.0, patience_s, pause

    def undisturbed(self, take: Callable[[], tuple[Samples, float]]) -> tuple[Samples, float]:
        """The first take at a steady clock and of a small spread, of TAKES at most, else the best: its clock, then its spread."""

        def quality(found: tuple[Samples, float]) -> tuple[float, float]:
            spreads = [summarize(samples, True).spread for samples in found[0].values()]
            return min(found[1], STEADY * self.fastest), -max([DISTURBED_SPREAD, *spreads])

        found = [take()]
        self.fastest = max(self.fastest, found[0][1])
        began = time.perf_counter()
        while max(map(quality, found)) < (STEADY * self.fastest, -DISTURBED_SPREAD):
            if len(found) == TAKES or time.perf_counter() - began > self.patience_s:
                break
            self._pause(RECOVERY_S)
            found.append(take())
            self.fastest = max(self.fastest, found[-1][1])
        self.patience_s -= time.perf_counter() - began
        return max(found, key=quality)


@dataclass(frozen=True)
class Runner:
    """A contender made ready: `run` does all its launches once, in a graph where they can be captured."""

    run: Callable[[], None]
    graph: bool
    launches: int
    restore: Callable[[], None] | None


class GraphTimer:
    """CUDA-graph replays timed by events."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._takes = Takes()

    def _capture(self, contender: Contender, pool: Any) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Raw capture calls: the context manager collects garbage and empties the cache each time, 0.1 s a contender.
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                for launch in contender.launches:
                    launch()
            finally:
                graph.capture_end()
        return graph

    def _runner(self, contender: Contender, pool: Any) -> Runner:
        """Something that does all launches once, warmed up; a peer that cannot be captured runs eagerly."""
        with torch.cuda.stream(self._stream):
            for launch in contender.launches[:2]:
                launch()
        torch.cuda.synchronize()
        count = len(contender.launches)
        try:
            graph = self._capture(contender, pool)
        except RuntimeError:
            if contender.name.startswith(OWN):
                raise
            torch.cuda.synchronize()

            def eager() -> None:
                for launch in contender.launches:
                    launch()

            eager()  # a capture that failed may have spoiled what the peer remembers: then it fails here
            torch.cuda.synchronize()
            return Runner(eager, False, count, contender.restore)
        return Runner(graph.replay, True, count, contender.restore)

    def time(self, contenders: Sequence[Contender]) -> Timings:
        """See Timer."""
        torch.cuda.synchronize()  # inputs were made on the default stream
        results = Timings()
        runners: dict[str, Runner] = {}
        # Graphs of one case share memory. A pool dies with its last graph, so the next case needs another.
        pool = torch.cuda.graph_pool_handle()
        for contender in contenders:
            try:
                runners[contender.name] = self._runner(contender, pool)
            except Exception as error:
                if contender.name.startswith("ours"):
                    raise
                results.failures[contender.name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        while True:
            try:
                samples, results.clock_mhz = self._takes.undisturbed(lambda: self._measure(runners))
                break
            except PeerError as failed:  # one that ran a moment ago: the others are timed without it
                del runners[failed.name]
                results.failures[failed.name] = str(failed)
        for name, runner in runners.items():
            results.by_name[name] = summarize(samples[name], runner.graph)
        return results

    def _measure(self, runners: dict[str, Runner]) -> tuple[Samples, float]:
        """Microseconds a launch of every round, by name, and the lowest clock. Raises PeerError where a peer's calls fail."""
        samples: Samples = {name: [] for name in runners}
        with torch.cuda.stream(self._stream):
            began = time.perf_counter()
            while time.perf_counter() - began < WARM_UP_S:
                for name, runner in runners.items():
                    self._run(name, runner)
                torch.cuda.synchronize()
            clocks = [self._rounds(runners, samples, SLOW_ROUNDS)]
            clocks.append(self._rounds(runners, samples, MIN_ROUNDS - SLOW_ROUNDS))
            while self._unsettled(samples, runners):
                clocks.append(self._rounds(runners, samples, 3))
        return samples, min(clocks)

    @staticmethod
    def _run(name: str, runner: Runner) -> None:
        try:
            runner.run()
        except Exception as error:
            if name.startswith(OWN):
                raise
            raise PeerError(name, error) from error

    @staticmethod
    def _waiting(cycles: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Events around a kernel that waits for so many cycles."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch.cuda._sleep(cycles)
        end.record()
        return start, end

    @staticmethod
    def _rounds(runners: dict[str, Runner], samples: Samples, count: int) -> float:
        """Take rounds; the lower one of the clocks before and behind them, in MHz."""
        marks = []
        torch.cuda._sleep(START_CYCLES)
        probes = [GraphTimer._waiting(CLOCK_CYCLES)]
        for _ in range(count):
            for name, runner in runners.items():
                if GraphTimer._is_done(samples[name], runner):
                    continue
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                if runner.restore is not None:
                    runner.restore()
                start.record()
                GraphTimer._run(name, runner)
                end.record()
                marks.append((name, start, end, runner.launches))
        probes.append(GraphTimer._waiting(CLOCK_CYCLES))
        torch.cuda.synchronize()
        for name, start, end, launches in marks:
            samples[name].append(start.elapsed_time(end) * 1e3 / launches)
        return min(CLOCK_CYCLES / (start.elapsed_time(end) * 1e3) for start, end in probes)

    @staticmethod
    def _unsettled(samples: Samples, runners: dict[str, Runner]) -> bool:
        """Whether more rounds would help and are affordable."""
        rounds = max(map(len, samples.values()), default=MAX_ROUNDS)
        spent = sum(sum(values) * runners[name].launches for name, values in samples.items()) / 1e6
        if rounds >= MAX_ROUNDS or spent > ROUND_BUDGET_S:
            return False
        left = [values for name, values in samples.items() if not GraphTimer._is_done(values, runners[name])]
        return any(summarize(values, True).spread > ENOUGH_SPREAD for values in left)

    @staticmethod
    def _is_done(taken: list[float], runner: Runner) -> bool:
        """Whether a contender is so slow that it has its rounds already."""
        return len(taken) >= SLOW_ROUNDS and taken[0] * runner.launches > SLOW_S * 1e6


class WallTimer:
    """Wall-clock timing without a GPU: exercises the harness in tests; its figures say nothing about speed."""

    def time(self, contenders: Sequence[Contender]) -> Timings:
        """See Timer."""
        results = Timings()
        for contender in contenders:
            samples = []
            for launch in list(contender.launches)[:3]:
                if contender.restore is not None:
                    contender.restore()
                start = time.perf_counter()
                launch()
                samples.append((time.perf_counter() - start) * 1e6)
            results.by_name[contender.name] = summarize(samples, False)
        return results
