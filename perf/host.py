"""What a public call costs the host: taken after all timing, by one process while no other of the harness runs.

The time of a batch of eager calls is taken without waiting for the device, after a batch that is not counted; the figure is
the median over many batches. A batch is so short that its launches fit in the device's queue. A case is taken again where the
core was not the process's own before or after (`core.py`), at once and, because what shares it may stay for seconds, behind all
other cases, the most disturbed first: which of the takes counts follows from that alone, not from its time.
"""

from __future__ import annotations

import datetime
import functools
import importlib
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from . import schema
from .cases import Case
from .core import QUIET, Core
from .inputs import Workspace

CALLS = 16  # of a batch
BATCHES = 31
MIN_BATCHES = 7
DEVICE_US = 3000.0  # device time of a batch at most
CASE_US = 60_000.0  # time of all batches of a case, about
TAKES = 4  # of a case at most, one behind the other
PASSES = 8  # over cases that were disturbed each time, the first one over all
CALL_US = 10.0  # what a call is taken to last at least when batches are counted


def microseconds(
    launches: Sequence[Callable[[], Any]], synchronize: Callable[[], None], batches: int = BATCHES, calls: int = CALLS
) -> float:
    """Python time of one eager public call: median over batches of calls."""
    samples = []
    for batch in range(batches + 1):
        synchronize()
        start = time.perf_counter()
        for i in range(calls):
            launches[(batch * calls + i) % len(launches)]()
        samples.append((time.perf_counter() - start) * 1e6 / calls)
    synchronize()
    return statistics.median(samples[1:])


def take(measured: Callable[[], float], core: Core) -> tuple[float, float]:
    """How much the core was slowed at most around the take that was disturbed least, and what was measured in it."""
    takes: list[tuple[float, float]] = []
    while not takes or (takes[-1][0] > QUIET and core.patience_s > 0 and len(takes) < TAKES):
        began, before = time.monotonic(), core.settle()
        us = measured()
        takes.append((max(before, core.slowdown()), us))
        core.patience_s -= time.monotonic() - began if len(takes) > 1 else 0.0
    return min(takes, key=lambda each: each[0])


def measure(
    cases: Sequence[tuple[Case, float]],
    ws: Workspace,
    say: Callable[[str], None],
    core: Core,
    deadline: float = math.inf,
    keep: Callable[[dict[str, tuple[float, float]]], None] = lambda found: None,
) -> dict[str, tuple[float, float]]:
    """What `take` gives of our operator by the name of the case; with each case comes the device time of a call in microseconds.

    A case that fails is named and left out; so is one that `deadline` leaves no time for. keep: is given what is found after
    each pass over the cases that were always disturbed.
    """
    found: dict[str, tuple[float, float]] = {}
    left = list(cases)
    for number in range(PASSES):
        disturbed = []
        for case, device_us in left:
            began = time.monotonic()
            if began >= deadline or (number and core.patience_s <= 0):
                break
            try:
                with torch.no_grad():
                    taken = take(_timed(case, device_us, ws), core)
            except Exception as error:
                say(f"{case.name}: no host time: {type(error).__name__}: {str(error)[:200]}")
                continue
            found[case.name] = min(found.get(case.name, taken), taken, key=lambda each: each[0])
            if found[case.name][0] > QUIET:
                disturbed.append((case, device_us))
            if number:
                core.patience_s -= time.monotonic() - began
        keep(found)
        # Behind steps prefill, for which no line is drawn.
        left = sorted(disturbed, key=lambda each: (each[0].op.endswith("_prefill"), -found[each[0].name][0]))
        if not left:
            break
        if deadline < math.inf:  # what is left of it may go to what was disturbed
            core.patience_s = deadline - time.monotonic()
    return found


def _timed(case: Case, device_us: float, ws: Workspace) -> Callable[[], float]:
    """`microseconds` of our operator, with as many calls and batches as its device time allows."""
    from .run import BENCHES

    bench = importlib.import_module(f".{BENCHES[case.op]}", __package__)
    prepared = bench.prepare(case, ws, {})
    ours = next(contender for contender in prepared.contenders if contender.name == "ours")
    if ws.device.type != "cuda":
        return functools.partial(microseconds, ours.launches, lambda: None, 1, 1)
    calls = max(2, min(CALLS, int(DEVICE_US / device_us)))
    batches = int(CASE_US / (calls * max(device_us, CALL_US)))
    batches = max(MIN_BATCHES, min(BATCHES, batches))
    return functools.partial(microseconds, ours.launches, torch.cuda.synchronize, batches, calls)


def add(
    results: Sequence[dict[str, Any]],
    cases: Sequence[Case],
    ws: Workspace,
    say: Callable[[str], None],
    deadline: float = math.inf,
    save: Callable[[], object] = lambda: None,
) -> int:
    """Measure the rows of these cases and put `host_us` and how much the core was slowed into them; the environment says when
    and how. Gives how many.

    save: called whenever figures have been put into `results`.
    """
    by_name = {case.name: case for case in cases}
    rows = {row["case"]: row for result in results for row in result["rows"] if row.get("case") in by_name}
    if not rows:
        return 0
    load, began, core = os.getloadavg()[0], time.monotonic(), Core()
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")

    def put(found: dict[str, tuple[float, float]]) -> None:
        for name, (slowdown, host_us) in found.items():
            rows[name] |= {"host_us": round(host_us, 2), "host_slowdown": round(slowdown, 2)}
        for result in results:
            slowed = [found[row["case"]][0] for row in result["rows"] if row.get("case") in found]
            if slowed:
                result["environment"]["host"] = {
                    "how": f"one process alone after all timing, median of up to {BATCHES} batches of up to {CALLS} eager calls, "
                    f"taken again until a loop of Python takes at most {QUIET} of its fastest before and after",
                    "disturbed": sum(each > QUIET for each in slowed),
                    "load": round(load, 2),
                    "cores": os.cpu_count(),
                    "seconds": round(time.monotonic() - began, 1),
                    "date": date,
                }
        save()

    # Prefill last: a line is drawn for the others.
    names = sorted(rows, key=lambda name: by_name[name].op.endswith("_prefill"))
    found = measure([(by_name[name], rows[name]["ours_us"]) for name in names], ws, say, core, deadline, put)
    core.leave()
    return len(found)


def update(
    out: Path, cases: Sequence[Case], device: torch.device, say: Callable[[str], None], limit_s: float = math.inf
) -> int:
    """Measure what the result files of a folder hold of these cases and write the files again. Gives how many rows.

    limit_s: seconds; what is not taken by then has no figure.
    """
    deadline = time.monotonic() + limit_s
    from .run import replace, workspace

    paths = [path for stem in sorted({case.file for case in cases}) if (path := out / f"{stem}.json").is_file()]
    results = {path: schema.load(path) for path in paths}

    def save() -> None:
        for path, result in results.items():
            replace(path, result)

    count = add(list(results.values()), cases, workspace(device), say, deadline, save)
    disturbed = sum(result["environment"].get("host", {}).get("disturbed", 0) for result in results.values())
    say(f"host times of {count} rows, {disturbed} never undisturbed")
    return count
