"""From trials to a table: what is faster than the heuristic by enough, over which sizes, written with all timings.

The file's form is `cute_kernels.configs.tables`'; `timings` holds every trial, so that a table can be made again.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..cute_kernels.configs import tables
from .journal import Trial
from .space import Settings, Shape, Space, match, settings

THRESHOLD = 0.02  # what a table's choice must gain over the heuristic


@dataclass(frozen=True)
class Verdict:
    """What a size's cases say: the best settings, its time over the heuristic's (below 1 is faster), worst case of those.

    noise: the largest spread of the timings compared.
    """

    size: int
    settings: Settings
    ratio: float
    cases: tuple[str, ...]
    noise: float = 0.0

    def gains(self, threshold: float) -> bool:
        """Whether the gain reaches the threshold and stands out of the spread."""
        return 1.0 - self.ratio >= threshold and 1.0 - self.ratio > self.noise


def is_default(space: Space, trial: Trial) -> bool:
    """Whether a trial is what the heuristic of this code chooses; the one of the sweep's code may have chosen otherwise."""
    return trial.settings == settings(space.heuristic(**trial.shape))


def _ratios(space: Space, trials: Sequence[Trial]) -> dict[str, tuple[Settings, dict[str, float]]]:
    """By settings: the time over the default's in each case that has both."""
    found: dict[str, tuple[Settings, dict[str, float]]] = {}
    defaults = {trial.case: trial.us for trial in trials if trial.us and is_default(space, trial)}
    for trial in trials:
        default = defaults.get(trial.case)
        if trial.us is None or default is None:
            continue
        name = json.dumps(trial.settings, sort_keys=True)
        found.setdefault(name, (trial.settings, {}))[1][trial.case] = trial.us / default
    return found


def verdicts(space: Space, trials: Sequence[Trial]) -> dict[str, list[Verdict]]:
    """For each exact part of the shapes (as JSON) the best settings by size, in ascending order.

    Where several geometries have one size, the settings that are best in the mean and lose in none win.
    """
    grouped: dict[str, dict[int, list[Trial]]] = {}
    for trial in trials:
        exact = json.dumps(match(space, trial.shape), sort_keys=True)
        grouped.setdefault(exact, {}).setdefault(trial.shape[space.size], []).append(trial)
    result: dict[str, list[Verdict]] = {}
    for exact, sizes in grouped.items():
        for size in sorted(sizes):
            best: Verdict | None = None
            cases = {trial.case for trial in sizes[size] if trial.us and is_default(space, trial)}
            for found, by_case in _ratios(space, sizes[size]).values():
                if set(by_case) != cases or max(by_case.values()) > 1.0:
                    continue
                mean = math.exp(sum(math.log(ratio) for ratio in by_case.values()) / len(by_case))
                if best is None or mean < best.ratio:
                    best = Verdict(size, found, mean, tuple(sorted(by_case)), _noise(space, sizes[size], found))
            if best is not None:
                result.setdefault(exact, []).append(best)
    return result


def _noise(space: Space, trials: Sequence[Trial], chosen: Settings) -> float:
    """The largest spread among the default's and the chosen settings' timings."""
    compared = [trial for trial in trials if trial.us and (is_default(space, trial) or trial.settings == chosen)]
    return max((trial.spread or 0.0 for trial in compared), default=0.0)


def entries(space: Space, trials: Sequence[Trial], threshold: float = THRESHOLD) -> list[dict[str, Any]]:
    """Entries of a table: sizes whose best settings gain `threshold` at least and more than the spread; neighbours join.

    An entry holds from the smallest to the largest size measured and no further: a few blocks more than a wave, and what gained
    4 % loses 15.
    """
    made: list[dict[str, Any]] = []
    for exact, found in verdicts(space, trials).items():
        start = 0
        while start < len(found):
            end = start
            gains = found[start].gains(threshold)
            while end + 1 < len(found) and gains and _joins(found[end + 1], found[start].settings, threshold):
                end += 1
            if gains:
                worst = max(verdict.ratio for verdict in found[start : end + 1])
                best = min(verdict.ratio for verdict in found[start : end + 1])
                made.append({
                    "match": json.loads(exact),
                    "range": {space.size: [found[start].size, found[end].size]},
                    "set": found[start].settings,
                    "gain": [round(1.0 - worst, 4), round(1.0 - best, 4)],
                })  # fmt: skip
            start = end + 1
    return made


def _joins(verdict: Verdict, wanted: Settings, threshold: float) -> bool:
    return verdict.settings == wanted and verdict.gains(threshold)


def _timing(trial: Trial) -> dict[str, Any]:
    row: dict[str, Any] = {"case": trial.case, "shape": trial.shape, "set": trial.settings, "us": trial.us}
    row |= {"spread": trial.spread} if trial.spread is not None else {}
    row |= {"default": True} if trial.is_default else {}
    return row | ({"error": trial.error} if trial.error else {})


def trial_of(row: dict[str, Any], kernel: str, facts: dict[str, Any]) -> Trial:
    """A trial from a table's `timings`."""
    return Trial(
        row["case"], kernel, row["shape"], row["set"], row["us"], row.get("spread"), row.get("error"),
        row.get("default", False), facts,
    )  # fmt: skip


def merged(
    path: Path, space: Space, trials: Sequence[Trial], facts: dict[str, Any]
) -> tuple[list[Trial], dict[str, str]]:
    """`trials`, and those of other cases that the file at `path` holds under the same facts, with its hashes of code."""
    try:
        table = tables.read(path, space.kernel)
        if any(table["environment"].get(name) != value for name, value in facts.items()):
            return list(trials), {}
        old = [trial_of(row, space.kernel, facts) for row in table["timings"]]
    except (tables.TableError, KeyError, TypeError):
        return list(trials), {}
    fresh = {trial.case for trial in trials}
    return [trial for trial in old if trial.case not in fresh] + list(trials), table.get("code", {})


def table_of(
    space: Space,
    trials: Sequence[Trial],
    environment: dict[str, Any],
    threshold: float = THRESHOLD,
    code: dict[str, str] | None = None,
) -> dict[str, Any]:
    """A table of all trials. code: hashes of the kernels' instructions by symbol."""
    return {
        "format": tables.FORMAT,
        "kernel": space.kernel,
        "environment": environment,
        "threshold": threshold,
        "entries": entries(space, trials, threshold),
        "code": code or {},
        "timings": [_timing(trial) for trial in sorted(trials, key=lambda trial: trial.case)],
    }


def write(path: Path, table: dict[str, Any]) -> None:
    """Write a table in one step: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    timings = ",\n".join("  " + json.dumps(row) for row in table["timings"])
    found = ",\n".join("  " + json.dumps(row) for row in table["entries"])
    head = {name: value for name, value in table.items() if name not in ("entries", "timings")}
    text = json.dumps(head, indent=1)[:-2] + f',\n "entries": [\n{found}\n ],\n "timings": [\n{timings}\n ]\n}}\n'
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    os.replace(temporary, path)
    tables.forget()


def shape_text(shape: Shape) -> str:
    """A shape for a table's cell."""
    return ", ".join(f"{name} {value}" for name, value in shape.items())
