"""Load, legacy against compact, caching off and on: four engines on one GPU, their trials alternating."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import traffic
from .fleet import ENGINE, EngineError, Fleet, Spec

SPREAD = (
    "seconds",
    "output_tok_s",
    "ttft_ms",
    "ttft_last_ms",
    "tpot_ms",
    "step_ms",
    "step_p99_ms",
    "step_max_ms",
    "gc_ms",
    "gc_longest_ms",
    "cached_tokens",
    "checkpoints",
    "transient_mib",
)


@dataclass(frozen=True)
class Case:
    """`requests` prompts at once of `input` tokens, of which half is shared, and `output` tokens for each.

    `only` is on, off or empty: the caching setting of the engines that run it. `groups`: different beginnings. With more than
    one turn, each adds as many new tokens to all that was said before.
    """

    requests: int
    input: int
    output: int
    trials: int = 5
    only: str = ""
    groups: int = traffic.GROUPS
    turns: int = 1

    @property
    def name(self) -> str:
        """Such as 64x2048+256; with /32 for another number of beginnings than usual, with *4 for so many turns."""
        name = f"{self.requests}x{self.input}+{self.output}"
        name += "" if self.groups == traffic.GROUPS else f"/{self.groups}"
        return name if self.turns == 1 else f"{name}*{self.turns}"

    @classmethod
    def parse(cls, text: str) -> Case:
        """From `64x2048+256` or `64x2048+256/32*4:7@on`: 32 beginnings, 4 turns, 7 trials. Raises ValueError."""
        found = re.fullmatch(r"(\d+)x(\d+)\+(\d+)(?:/(\d+))?(?:\*(\d+))?(?::(\d+))?(?:@(on|off))?", text)
        if found is None:
            allowed = "REQUESTSxINPUT+OUTPUT[/BEGINNINGS][*TURNS][:TRIALS][@on|@off]"
            raise ValueError(f"case={text!r}: allowed: {allowed}, such as 64x2048+256")
        requests, input_, output, groups, turns, trials, only = found.groups()
        sizes = int(requests), int(input_), int(output)
        return cls(*sizes, int(trials or cls.trials), only or "", int(groups or cls.groups), int(turns or 1))


CASES = ("64x2048+256", "16x16384+256", "16x2048+2048", "8x16384+2048")


def specs(
    model: str, variants: tuple[str, ...], caching: tuple[bool, ...], settings: dict[str, Any] | None = None
) -> list[Spec]:
    """One engine for each variant and caching setting.

    A variant is `legacy`, `compact`, or compact with variables, such as `split:LMDEPLOY_COMPACT_FUSED_DECODE=0`; `@on` or `@off`
    behind it leaves the other caching setting out.
    """
    specs = []
    for on in caching:
        for text in variants:
            text, _, only = text.partition("@")
            name, _, variables = text.partition(":")
            if only in ("", "on" if on else "off"):
                specs.append(
                    Spec(
                        "legacy" if name == "legacy" else "compact",
                        model,
                        {**(settings or {}), "enable_prefix_caching": on},
                        dict(pair.split("=", 1) for pair in variables.split(":") if pair),
                        name=f"{name}-{'on' if on else 'off'}",
                    )
                )
    return specs


def spread(trials: list[dict[str, Any]]) -> dict[str, Any]:
    """Per figure [least, median, most] over the trials; figures that a trial does not have are left out."""
    result: dict[str, Any] = {"trials": len(trials)}
    for name in SPREAD:
        values = [trial[name] for trial in trials if trial.get(name) is not None]
        if values:
            result[name] = [min(values), statistics.median(values), max(values)]
    return result


def run(
    model: str,
    cases: list[Case],
    *,
    engines: list[Spec],
    logs: Path,
    budget_s: float,
    start_s: float,
    save: Callable[[dict[str, Any]], None],
    say: Callable[[str], None] = print,
    profile: Sequence[str] = (),
    engine: list[str] = ENGINE,
) -> dict[str, Any]:
    """Alternate the trials of each case; stop at the budget, keep what is there.

    An engine is warmed up with one batch of each set of beginnings. No two cases share a prompt. `start_s` is what the
    engines may take to start; those that need longer are left out.
    """
    began = time.monotonic()
    result: dict[str, Any] = {"start": {}, "serving": [], "trials": [], "profiles": [], "notes": []}

    def left() -> float:
        return budget_s - (time.monotonic() - began)

    with Fleet(engines, logs, limit_s=start_s, engine=engine) as fleet:
        result["start"] = {label: running.ready for label, running in fleet.engines.items()}
        result["notes"] += [f"{label} did not start: {error}" for label, error in fleet.failed.items()]
        result["start_together_s"] = fleet.start_s
        say(f"{fleet.start_s} s: {result['start']}")

        def trial(row: dict[str, Any]) -> None:
            result["trials"].append(row)
            result["serving"] = _rows(result["trials"], model)
            save(result)
            say(f"{left():6.1f} {row}")

        warm: set[tuple[str, int, int]] = set()
        for number, case in enumerate(cases, 1):
            _case(case, fleet, result["notes"], left, trial, 100 * number, warm)
            # Once the first case is in, before the longer ones use the budget up.
            for label in [label for label in profile if label in fleet.engines] if case is cases[0] else ():
                _profile(label, fleet, result, left)
                save(result)
    result["seconds"] = round(time.monotonic() - began, 1)
    save(result)
    return result


def _profile(label: str, fleet: Fleet, result: dict[str, Any], left: Callable[[], float]) -> None:
    """A prefill and some decode steps by GPU kernel, then both by Python function."""
    for host, (requests, input_, output) in ((False, (32, 2048, 1)), (False, (64, 64, 32)), (True, (64, 2048, 64))):
        if left() < 10:
            return
        where = {"engine": label, "case": f"{requests}x{input_}+{output}"}
        asked = {"requests": requests, "input": input_, "output": output, "seed": 9000 + host, "host": host}
        try:
            result["profiles"].append({**where, **fleet[label].ask("profile", **asked)})
        except EngineError as error:
            result["notes"].append(f"{where}: {error}")


def _case(
    case: Case,
    fleet: Fleet,
    notes: list[str],
    left: Callable[[], float],
    done: Callable[[dict[str, Any]], None],
    seed: int,
    warm: set[tuple[str, int, int]],
) -> None:
    longest = 0.0
    for trial in range(-1, case.trials):
        # A machine that drifts favours nobody: every other round runs the other way.
        order = [label for label in fleet.engines if label.endswith(case.only)]
        for label in order if trial % 2 else order[::-1]:
            if trial < 0 and (label, case.input, case.groups) in warm:
                continue
            warm.add((label, case.input, case.groups))
            if left() < 1.5 * longest + 1:
                notes.append(f"{case.name}: the budget ended before trial {trial} of {label}")
                return
            started = time.monotonic()
            try:
                sizes = {name: getattr(case, name) for name in ("requests", "input", "output", "groups", "turns")}
                figures = fleet[label].ask("load", seed=seed + trial, **sizes)
            except EngineError as error:
                notes.append(f"{case.name} {label}: {error}")
                fleet.drop(label, error)
                continue
            longest = max(longest, time.monotonic() - started)
            done({"case": case.name, "engine": label, "trial": trial, **figures})


def _rows(trials: list[dict[str, Any]], model: str) -> list[dict[str, Any]]:
    """Spread of each engine and case, the warm-up (trial -1) kept apart."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for trial in trials:
        rows.setdefault((trial["case"], trial["engine"]), []).append(trial)
    summary = []
    for (case, label), some in rows.items():
        variant, _, caching = label.partition("-")
        counted = [trial for trial in some if trial["trial"] >= 0]
        warm_up = next((trial["seconds"] for trial in some if trial["trial"] < 0), None)
        head = {"model": Path(model).name, "case": case, "variant": variant, "caching": caching}
        summary.append({**head, "warm_up_s": warm_up, **spread(counted)})
    return summary
