"""What a sweep has measured so far, one JSON line a trial, so that an interrupted one goes on where it stopped."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .space import Settings, Shape


@dataclass(frozen=True)
class Trial:
    """One candidate in one case: microseconds and spread, or why it has none.

    is_default: the heuristic's choice when it was measured. facts: what the figure depends on; a trial with other facts is
    not resumed.
    """

    case: str
    kernel: str
    shape: Shape
    settings: Settings
    us: float | None = None
    spread: float | None = None
    error: str | None = None
    is_default: bool = False
    facts: dict[str, Any] = field(default_factory=dict)


class Journal:
    """An append-only file of trials. Lines that do not parse, such as a half-written last one, are skipped."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._trials: dict[str, list[Trial]] = {}
        for line in path.read_text().splitlines() if path is not None and path.is_file() else ():
            try:
                trial = Trial(**json.loads(line))
                self._trials.setdefault(trial.case, []).append(trial)
            except (TypeError, ValueError):
                continue

    def found(self, case: str, candidates: list[Settings], facts: dict[str, Any]) -> list[Trial] | None:
        """The trials of a case if all its candidates were tried under these facts, else None.

        Candidates are timed interleaved, so figures of one case are only comparable when they come from one go.
        """
        known = [trial for trial in self._trials.get(case, ()) if trial.facts == facts]
        latest = {json.dumps(trial.settings, sort_keys=True): trial for trial in known}
        wanted = [json.dumps(settings, sort_keys=True) for settings in candidates]
        return [latest[name] for name in wanted] if all(name in latest for name in wanted) else None

    def trials(self, kernel: str) -> list[Trial]:
        """The latest trial of every case and settings of a kernel, under the facts of the journal's last one."""
        of_kernel = [trial for trials in self._trials.values() for trial in trials if trial.kernel == kernel]
        if not of_kernel:
            return []
        facts = of_kernel[-1].facts
        latest = {
            (trial.case, json.dumps(trial.settings, sort_keys=True)): trial
            for trial in of_kernel
            if trial.facts == facts
        }
        return list(latest.values())

    def add(self, trials: list[Trial]) -> None:
        """Record the trials of one case."""
        for trial in trials:
            self._trials.setdefault(trial.case, []).append(trial)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a+b") as file:
                if file.tell() and not self._path.read_bytes().endswith(b"\n"):
                    file.write(b"\n")  # the last run ended in the middle of a line
                file.write("".join(json.dumps(asdict(trial)) + "\n" for trial in trials).encode())
