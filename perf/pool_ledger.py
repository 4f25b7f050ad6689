"""Time of the ledger's operations on the host: single operations at 10,000 slots, and a step of 256 rows.

    python -m compact_state.perf.pool_ledger [--json FILE]

Targets: p99 of each operation <= 5 us, a step of 256 rows <= 150 us. Other processes and the hypervisor only ever add to
a wall-clock time, so each short trial has percentiles of its own and an operation's figure is the least over the trials.
A loop that never changes is timed among the operations: what its p99 exceeds its p50 by is interference. Operations
come in bursts of one a row of a step, transfers in groups as large as their cap; the first of a burst finds code and data
out of the caches and has a column of its own. Garbage collection is on, after gc.freeze() as once a process has warmed up.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..pool import CheckpointIndex, Ledger, Lifecycle, PrefixKey, StepRow

SLOTS = 10_000
ROWS = 256
OPERATION_LIMIT_US = 5.0
STEP_LIMIT_US = 150.0
CONTROL = "the control: an empty loop of 40 turns"
CLOCK = time.perf_counter_ns
Samples = dict[str, list[int]]


@dataclass(frozen=True)
class Timing:
    """Microseconds of one operation: percentiles of the quietest trial, the p99 of all samples of all trials together,
    and the median of first calls of a burst."""

    op: str
    calls: int
    p50_us: float
    p99_us: float
    p99_all_us: float
    first_us: float
    limit_us: float

    @property
    def holds(self) -> bool:
        return self.p99_us <= self.limit_us


def percentile(samples: list[int], part: float) -> float:
    """In microseconds."""
    return sorted(samples)[int(part * len(samples))] / 1000


def timing(op: str, trials: list[list[int]], limit_us: float, overhead_us: float = 0.0, burst: int = 1) -> Timing:
    """Percentiles of trials in ns, less what timing itself costs. Every `burst`-th sample is the first of a burst."""
    least = [min(percentile(samples, part) for samples in trials) for part in (0.5, 0.99)]
    pooled = percentile([sample for samples in trials for sample in samples], 0.99)
    first = percentile([sample for samples in trials for sample in samples[::burst]], 0.5)
    figures = [round(max(value - overhead_us, 0.0), 3) for value in (*least, pooled, first)]
    return Timing(op, sum(map(len, trials)), *figures, limit_us)


def control(*_: object) -> None:
    """Work that is the same at every call, about as long as an operation."""
    for _turn in range(40):
        pass


def nothing(*_: object) -> None:
    """What is left of a sample is the clock, and handing the arguments on."""


class Bench:
    """A pool of 10,000 slots in mid-life: running requests, half of the slots cached."""

    def __init__(self) -> None:
        self.ledger = Ledger(SLOTS)
        self.samples: Samples = {}
        self.names: Iterator[int] = iter(range(1 << 60))
        self.handles = [self.cached() for _ in range(SLOTS // 2)]

    def cached(self) -> object:
        ledger = self.ledger
        holder = ledger.admit(next(self.names))
        step = ledger.begin_step()
        ledger.submit(step, [holder], [8])
        handle = ledger.publish_final(holder, 8, object())
        ledger.step_launched(step)
        ledger.step_done(step)
        return handle

    def timed(self, name: str, call: Callable[..., Any], *args: object, **options: object) -> Any:
        start = CLOCK()
        result = call(*args, **options)
        self.samples.setdefault(name, []).append(CLOCK() - start)
        return result

    def round(self) -> None:
        """Every operation on a burst of requests and slots, as a scheduler's pass makes them."""
        ledger, timed = self.ledger, self.timed
        holders = [timed("admit", ledger.admit, next(self.names)) for _ in range(ROWS)]
        handles, exports = [], []
        for holder in holders:
            timed(CONTROL, control, 1, [holder], [1])
            timed("nothing", nothing, 1, [holder], [1])
            step = timed("begin_step", ledger.begin_step)
            export = timed("alloc_besteffort", ledger.alloc_besteffort, step)
            timed("submit (1 row, fresh slot)", ledger.submit, step, [holder], [8])
            timed("export", ledger.export, step, export, holder, 4, object())
            timed("step_launched", ledger.step_launched, step)
            timed("step_done", ledger.step_done, step)
            exports.append(export)
        for holder in holders:
            handles.append(timed("publish", ledger.publish, holder, 8, object()))
        for start in range(0, ROWS, ledger.max_puts):
            some = handles[start : start + ledger.max_puts]
            leases = [timed("put_begin", ledger.put_begin, handle) for handle in some]
            for lease in leases:
                timed("put_end", ledger.put_end, lease.op, ok=True)
        for name in ("submit (1 row, copy on write)", "submit (1 row, in place)"):
            for holder in holders:
                step = ledger.begin_step()
                timed(name, ledger.submit, step, [holder], [1])
                ledger.step_launched(step)
                ledger.step_done(step)
        for holder in holders:
            timed("drop", ledger.drop, holder)
        readers = [ledger.admit(next(self.names)) for _ in holders]
        for reader, handle in zip(readers, handles):
            timed("hit", ledger.hit, reader, handle)
        for reader in readers:
            ledger.drop(reader)
        for handle in handles:
            timed("uncache", ledger.uncache, handle, "evicted")
        for _ in range(0, ROWS, ledger.max_gets):
            leases = [timed("get_begin", ledger.get_begin, 8, object()) for _ in range(ledger.max_gets)]
            for lease in leases:
                timed("get_end", ledger.get_end, lease.op, ok=True)
        for _ in range(2 * ROWS):
            timed("evict_oldest", ledger.evict_oldest)


def operations(calls: int, trials: int) -> list[Timing]:
    """Every single operation, at least `calls` times a trial."""
    bench = Bench()
    for _ in range(5):
        bench.round()
    found: list[Samples] = []
    bursts = -(-calls // ROWS)
    for _ in range(trials):
        bench.samples = {}
        for _ in range(bursts):
            bench.round()
        found.append(bench.samples)
    overhead_us = timing("nothing", [samples.pop("nothing") for samples in found], 0.0).p50_us
    results = []
    for op in sorted(found[0]):
        samples = [trial[op] for trial in found]
        results.append(timing(op, samples, OPERATION_LIMIT_US, overhead_us, len(samples[0]) // bursts))
    return results


def steps(calls: int, trials: int) -> list[Timing]:
    """Ledger time of one step of 256 rows: begin, submit, launched, done; and the whole plan of the lifecycle."""
    results = []
    for name, movers in (("step of 256 rows, in place", 0), ("step of 256 rows, 16 copy on write", 16)):
        ledger = Ledger(SLOTS)
        holders = [ledger.admit(number) for number in range(ROWS)]
        found: list[list[int]] = [[] for _ in range(trials + 1)]
        for samples in found:
            for _ in range(calls):
                for holder in holders[:movers] if ledger.submitted else ():
                    ledger.publish(holder, holder.position, object())
                start = CLOCK()
                step = ledger.begin_step()
                ledger.submit(step, holders)
                ledger.step_launched(step)
                ledger.step_done(step)
                samples.append(CLOCK() - start)
        results.append(timing(name, found[1:], STEP_LIMIT_US))
    life = Lifecycle(ledger := Ledger(SLOTS), CheckpointIndex(ledger))
    rows = []
    for number in range(ROWS):
        request = life.add(number, PrefixKey([number] * 8))
        life.admit(request)
        rows.append(StepRow(request))
    found = [[] for _ in range(trials + 1)]
    for samples in found:
        for _ in range(calls):
            start = CLOCK()
            plan = life.plan(rows)
            life.launched(plan.step)
            life.poll()
            samples.append(CLOCK() - start)
    results.append(timing("Lifecycle.plan of 256 rows, in place", found[1:], STEP_LIMIT_US))
    return results


def processor() -> str:
    """The processor's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def main(arguments: list[str] | None = None) -> int:
    """Prints the table; 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="also write the figures there")
    parser.add_argument("--calls", type=int, default=1024, help="of each operation in a trial")
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--processor-time", action="store_true", help="the thread's time instead of the wall clock")
    options = parser.parse_args(arguments)
    if options.processor_time:
        global CLOCK
        CLOCK = time.thread_time_ns
    gc.collect()
    gc.freeze()
    timings = operations(options.calls, options.trials) + steps(options.calls // 8, 2 * options.trials)
    print(f"{'operation':40} {'calls':>7} {'p50 us':>8} {'p99 us':>8} {'of all':>8} {'first':>8} {'limit':>7}")
    for item in timings:
        mark = "" if item.holds else "  MISSED"
        values = (item.p50_us, item.p99_us, item.p99_all_us, item.first_us)
        figures = " ".join(f"{value:8.2f}" for value in values) + f" {item.limit_us:7.0f}"
        print(f"{item.op:40} {item.calls:7} {figures}{mark}")
    if options.json:
        environment = {
            "processor": processor(), "cores": os.cpu_count(), "load": list(os.getloadavg()),
            "python": platform.python_version(), "slots": SLOTS, "trials": options.trials,
            "clock": "processor" if options.processor_time else "wall",
            "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        }  # fmt: skip
        text = json.dumps({"environment": environment, "rows": [asdict(item) for item in timings]}, indent=1)
        Path(options.json).write_text(text + "\n")
    return 0 if all(item.holds for item in timings) else 1


if __name__ == "__main__":
    raise SystemExit(main())
