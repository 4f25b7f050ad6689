"""Time of the ledger's operations on the host: single operations at 10,000 slots, and a step of 256 rows.

    python -m compact_state.perf.pool_ledger [--json FILE]

Targets: p99 of each operation <= 5 us, a step of 256 rows <= 150 us. Times are those of the thread on its processor, so
that other processes of the machine do not count; `--wall` takes the wall clock instead. Garbage collection is off: it
strikes whoever allocates next, and what it costs depends on the rest of the process.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..pool import CheckpointIndex, Ledger, Lifecycle, PrefixKey, StepRow

SLOTS = 10_000
ROWS = 256
BURST = 64
OPERATION_LIMIT_US = 5.0
STEP_LIMIT_US = 150.0
CLOCK = time.thread_time_ns


@dataclass(frozen=True)
class Timing:
    """Microseconds of one operation over `count` calls."""

    name: str
    count: int
    p50_us: float
    p99_us: float
    limit_us: float

    @property
    def holds(self) -> bool:
        return self.p99_us <= self.limit_us


def timing(name: str, samples: list[int], limit_us: float, overhead: float) -> Timing:
    """Percentiles of samples in ns, less what timing itself costs."""
    ordered = sorted(max(sample - overhead, 0) / 1000 for sample in samples)
    return Timing(name, len(ordered), statistics.median(ordered), ordered[int(0.99 * len(ordered))], limit_us)


def overhead_ns() -> float:
    """Median cost of timing a call that does nothing: the clock, and handing the arguments on."""
    bench = Bench.__new__(Bench)
    bench.samples = {}
    for _ in range(2000):
        bench.timed("nothing", _nothing, 1, [None], [1])
    return statistics.median(bench.samples["nothing"])


def _nothing(step: int, holders: list[None], counts: list[int]) -> None:
    pass


class Bench:
    """A pool of 10,000 slots in mid-life: running requests, half of the slots cached."""

    def __init__(self) -> None:
        self.ledger = Ledger(SLOTS, max_puts=SLOTS, max_gets=SLOTS)
        self.samples: dict[str, list[int]] = {}
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
        holders = [timed("admit", ledger.admit, next(self.names)) for _ in range(BURST)]
        handles, exports = [], []
        for holder in holders:
            step = timed("begin_step", ledger.begin_step)
            export = timed("alloc_besteffort", ledger.alloc_besteffort, step)
            timed("submit (1 row, fresh slot)", ledger.submit, step, [holder], [8])
            timed("export", ledger.export, step, export, holder, 4, object())
            timed("step_launched", ledger.step_launched, step)
            timed("step_done", ledger.step_done, step)
            exports.append(export)
        for holder in holders:
            handles.append(timed("publish", ledger.publish, holder, 8, object()))
        leases = [timed("put_begin", ledger.put_begin, handle) for handle in handles]
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
        leases = [timed("get_begin", ledger.get_begin, 8, object()) for _ in holders]
        for lease in leases:
            timed("get_end", ledger.get_end, lease.op, ok=True)
        for _ in range(2 * BURST):
            timed("evict_oldest", ledger.evict_oldest)


def operations(rounds: int) -> list[Timing]:
    """Every single operation, `rounds` times."""
    bench = Bench()
    overhead = overhead_ns()
    for _ in range(5):
        bench.round()
    bench.samples.clear()
    for _ in range(-(-rounds // BURST)):
        bench.round()
    return [timing(name, samples, OPERATION_LIMIT_US, overhead) for name, samples in bench.samples.items()]


def steps(rounds: int) -> list[Timing]:
    """Ledger time of one step of 256 rows: begin, submit, launched, done; and the whole plan of the lifecycle."""
    overhead = overhead_ns()
    results = []
    for name, movers in (("step of 256 rows, in place", 0), ("step of 256 rows, 16 copy on write", 16)):
        ledger = Ledger(SLOTS)
        holders = [ledger.admit(number) for number in range(ROWS)]
        samples = []
        for number in range(rounds + 20):
            for holder in holders[:movers] if number else ():
                ledger.publish(holder, holder.position, object())
            start = CLOCK()
            step = ledger.begin_step()
            ledger.submit(step, holders)
            ledger.step_launched(step)
            ledger.step_done(step)
            samples.append(CLOCK() - start)
        results.append(timing(name, samples[20:], STEP_LIMIT_US, overhead))
    life = Lifecycle(ledger := Ledger(SLOTS), CheckpointIndex(ledger))
    rows = []
    for number in range(ROWS):
        request = life.add(number, PrefixKey([number] * 8))
        life.admit(request)
        rows.append(StepRow(request))
    samples = []
    for _ in range(rounds + 20):
        start = CLOCK()
        plan = life.plan(rows)
        life.launched(plan.step)
        life.poll()
        samples.append(CLOCK() - start)
    results.append(timing("Lifecycle.plan of 256 rows, in place", samples[20:], 2 * STEP_LIMIT_US, overhead))
    return results


def main(arguments: list[str] | None = None) -> int:
    """Prints the table; 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="also write the figures there")
    parser.add_argument("--rounds", type=int, default=3000)
    parser.add_argument("--wall", action="store_true", help="wall clock instead of processor time")
    options = parser.parse_args(arguments)
    if options.wall:
        global CLOCK
        CLOCK = time.perf_counter_ns
    gc.collect()
    gc.freeze()
    gc.disable()
    timings = operations(options.rounds) + steps(max(options.rounds // 3, 100))
    print(f"{'operation':40} {'calls':>7} {'p50 us':>8} {'p99 us':>8} {'limit':>7}")
    for item in timings:
        mark = "" if item.holds else "  MISSED"
        print(f"{item.name:40} {item.count:7} {item.p50_us:8.2f} {item.p99_us:8.2f} {item.limit_us:7.0f}{mark}")
    if options.json:
        with open(options.json, "w") as file:
            rows = [{"op": t.name, "calls": t.count, "p50_us": t.p50_us, "p99_us": t.p99_us} for t in timings]
            json.dump({"slots": SLOTS, "python": platform.python_version(), "rows": rows}, file, indent=1)
    return 0 if all(item.holds for item in timings) else 1


if __name__ == "__main__":
    raise SystemExit(main())
