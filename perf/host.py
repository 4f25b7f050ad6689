"""What a public call costs the host: taken after all timing, by one process while no other of the harness runs.

The time of a batch of eager calls is taken without waiting for the device, after a batch that is not counted; the figure is
the median over many batches. A batch is so short that its launches fit in the device's queue. A case is taken again where the
core was not the process's own before or after (`core.py`): which of the takes counts follows from that alone, not from its time.
"""

from __future__ import annotations

import datetime
import functools
import importlib
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
TAKES = 4  # of a case at most
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
    cases: Sequence[tuple[Case, float]], ws: Workspace, say: Callable[[str], None], core: Core
) -> dict[str, tuple[float, float]]:
    """What `take` gives of our operator by the name of the case; with each case comes the device time of a call in microseconds.

    A case that fails is named and left out.
    """
    from .run import BENCHES

    found: dict[str, tuple[float, float]] = {}
    for case, device_us in cases:
        bench = importlib.import_module(f".{BENCHES[case.op]}", __package__)
        try:
            with torch.no_grad():
                prepared = bench.prepare(case, ws, {})
                ours = next(contender for contender in prepared.contenders if contender.name == "ours")
                if ws.device.type == "cuda":
                    calls = max(2, min(CALLS, int(DEVICE_US / device_us)))
                    batches = int(CASE_US / (calls * max(device_us, CALL_US)))
                    batches = max(MIN_BATCHES, min(BATCHES, batches))
                    wait: Callable[[], None] = torch.cuda.synchronize
                else:
                    wait, batches, calls = (lambda: None), 1, 1
                timed = functools.partial(microseconds, ours.launches, wait, batches, calls)
                found[case.name] = take(timed, core)
        except Exception as error:
            say(f"{case.name}: no host time: {type(error).__name__}: {str(error)[:200]}")
    return found


def add(
    result: dict[str, Any], cases: Sequence[Case], ws: Workspace, say: Callable[[str], None], core: Core | None = None
) -> int:
    """Measure the rows of these cases and put `host_us` into them; the environment says when and how. Gives how many."""
    by_name = {case.name: case for case in cases}
    rows = {row["case"]: row for row in result["rows"] if row.get("case") in by_name}
    if not rows:
        return 0
    load, began, core = os.getloadavg()[0], time.monotonic(), core or Core()
    found = measure([(by_name[name], row["ours_us"]) for name, row in rows.items()], ws, say, core)
    core.leave()
    for name, (_, host_us) in found.items():
        rows[name]["host_us"] = round(host_us, 2)
    result["environment"]["host"] = {
        "how": f"one process alone after all timing, median of up to {BATCHES} batches of up to {CALLS} eager calls, up to "
        f"{TAKES} times until a loop of Python takes at most {QUIET} of its fastest before and after",
        "disturbed": sum(slowed > QUIET for slowed, _ in found.values()),
        "load": round(load, 2),
        "cores": os.cpu_count(),
        "seconds": round(time.monotonic() - began, 1),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
    }
    return len(found)


def update(out: Path, cases: Sequence[Case], device: torch.device, say: Callable[[str], None]) -> int:
    """Measure what the result files of a folder hold of these cases and write the files again. Gives how many rows."""
    from .run import replace, workspace

    ws, core = workspace(device), Core()
    count = 0
    for stem in sorted({case.file for case in cases}):
        path = out / f"{stem}.json"
        if path.is_file():
            result = schema.load(path)
            added = add(result, [case for case in cases if case.file == stem], ws, say, core)
            replace(path, result)
            say(f"{path.name}: host time of {added} rows")
            count += added
    return count
