"""Time the candidates of one case, checked and interleaved, under the protocol of `perf`.

All tensors are the sweep's own: nothing here can be given a pool that serves.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..cute_kernels.configs import tables
from ..perf.bench import Prepared
from ..perf.cases import Case
from ..perf.inputs import Workspace
from ..perf.run import BENCHES
from ..perf.timing import Contender, Timer
from .journal import Trial
from .space import Key, Settings, Space, settings

Launch = Callable[[], Any]
LAUNCHES = 160  # of a candidate's graph: enough to be cold, and choosing a key at each capture takes host time


def _under(kernel: str, wanted: Settings, launch: Launch) -> Launch:
    """The launch, with the kernel's chooser held to `wanted` while it runs (in a graph: while it is captured)."""

    def run() -> Any:
        with tables.forced(kernel, wanted):
            return launch()

    return run


def _wrong(prepared: Prepared, contender: Contender) -> str | None:
    """What is wrong with a candidate's results, or None."""
    ratios = prepared.check(contender)
    bad = {name: ratio for name, ratio in ratios.items() if not ratio <= prepared.tolerance[name]}
    return f"wrong result: RMS ratios {bad}, allowed {prepared.tolerance}" if bad else None


def _other_bits(contender: Contender, expected: torch.Tensor) -> str | None:
    """Candidates are chosen by size, so they must agree in every bit: a row's result may not depend on its batch."""
    out = contender.launches[0]()
    return None if torch.equal(out, expected) else "other bits than the heuristic's choice"


def measure_case(
    case: Case, keys: Sequence[Key], space: Space, ws: Workspace, timer: Timer, facts: dict[str, Any]
) -> list[Trial]:
    """One trial a key, in order. A candidate that fails, is wrong or differs in a bit has an error instead of a time.

    Pools are put back before every candidate is checked and before every timed round.
    """
    bench = importlib.import_module(f"..perf.{BENCHES[case.op]}", __package__)
    default = space.heuristic(**space.shape(case))
    made: list[Trial] = []
    contenders: dict[str, Contender] = {}
    with torch.no_grad():
        prepared: Prepared = bench.prepare(case, ws, {})
        ours = next(contender for contender in prepared.contenders if contender.name == "ours")
        restore = ws.save()
        expected = _under(space.kernel, settings(default), ours.launches[0])().clone()
        for key in keys:
            wanted = settings(key)
            launches = [_under(space.kernel, wanted, launch) for launch in ours.launches[:LAUNCHES]]
            trial = Trial(case.name, space.kernel, space.shape(case), wanted, is_default=key == default, facts=facts)
            contender = replace(ours, launches=launches, restore=restore)
            try:
                restore()
                error = _wrong(prepared, contender)
                restore()
                error = error or _other_bits(contender, expected)
            except Exception as failure:  # one candidate that cannot launch leaves the others to be timed
                error = f"{type(failure).__name__}: {str(failure)[:300]}"
            if error is None:
                contenders[key.symbol()] = replace(contender, name=key.symbol())
            made.append(replace(trial, error=error))
        timings = timer.time(list(contenders.values())) if contenders else None
        restore()
    trials = []
    for key, trial in zip(keys, made):
        if timings is not None and key.symbol() in timings.by_name:
            timing = timings.by_name[key.symbol()]
            trial = replace(trial, us=round(timing.us, 4), spread=round(timing.spread, 4))
        elif timings is not None and key.symbol() in timings.failures:
            trial = replace(trial, error=timings.failures[key.symbol()])
        trials.append(trial)
    return trials
