"""One result file from the parts that the programs wrote, and the tables that documents show of it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..tables import table

KINDS = {
    "pairs": "four rounds of eight prompts",
    "longer": "the same, of seven: not that of one token",
    "hits": "hits, cold prompts",
    "mixed": "mixed load with cancels, cold prompts",
    "sleep": "after sleep and wakeup, before",
}
FILE = Path(__file__).resolve().parents[1] / "results" / "h200" / "lmdeploy.json"


def merge(parts: Sequence[dict[str, Any]], base: dict[str, Any] | None = None) -> dict[str, Any]:
    """Parts in order, on top of `base`; a later row of one model, case, variant and caching, or engine, replaces an earlier one.

    The first part's environment stands for all, with every part's command and commit; `commits` and the rows say which is whose.
    """
    first = parts[0]["environment"] if base is None else base["environment"]
    result: dict[str, Any] = {**(base or {}), "environment": dict(first), "rows": []}
    for name in ("command", "commit"):
        said = [first[name], *(p["environment"][name] for p in parts)]
        result["environment"][name] = "; ".join(dict.fromkeys("; ".join(said).split("; ")))
    rows = {_case(row): row for row in result.pop("serving", [])}
    result["commits"] = dict(result.get("commits", {}))
    for part in parts:
        commit = part["environment"]["commit"]
        for command, found in part.items():
            if command == "environment":
                continue
            if command != "load":
                result["commits"][command] = commit
            if command != "load":
                # Engines are judged, and servers started, by more than one command.
                result[command] = {**result.get(command, {}), **found} if command in ("judge", "server") else found
                continue
            for row in (row for row in found["serving"] if row["trials"]):
                rows[_case(row)] = {"commit": commit, **row}
                result.setdefault("start", {}).setdefault(row["model"], {}).update(found["start"])
    return {**result, "serving": list(rows.values())}


def _case(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(row[name] for name in ("model", "case", "caching", "variant"))


def dump(result: dict[str, Any], path: Path) -> None:
    """Write a result with one row a line."""
    lines = []
    for name, value in result.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in value) + "\n ]"
        elif isinstance(value, dict) and name != "environment":
            text = "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(row)}" for key, row in value.items()) + "\n }"
        else:
            text = json.dumps(value, indent=1)
        lines.append(f" {json.dumps(name)}: {text}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _range(values: list[float], digits: int = 0) -> str:
    low, middle, high = (f"{value:,.{digits}f}" for value in values)
    return f"{middle} ({low} to {high})"


def _order(model: str, case: str, caching: str, variant: str) -> tuple[object, ...]:
    """Where a row stands: by model, then requests, tokens in and out as numbers, caching off first."""
    return model, [int(number) for number in re.findall(r"\d+", case)], caching, variant


def load_table(result: dict[str, Any]) -> str:
    """Every case, legacy against compact: medians with the least and the most over the trials."""
    rows = {(r["model"], r["case"], r["caching"], r["variant"]): r for r in result["serving"]}
    lines = []
    for (model, case, caching, variant), compact in sorted(rows.items(), key=lambda row: _order(*row[0])):
        legacy = rows.get((model, case, caching, "legacy"))
        if variant != "compact" or legacy is None:
            continue
        gain = compact["output_tok_s"][1] / legacy["output_tok_s"][1] - 1
        lines.append(
            [
                f"{model} {case}",
                caching,
                _range(legacy["output_tok_s"]),
                _range(compact["output_tok_s"]),
                f"{gain:+.0%}",
            ]
            + [
                f"{legacy[name][1]:,.{digits}f} / {compact[name][1]:,.{digits}f}" if name in legacy else "-"
                for name, digits in (("ttft_ms", 0), ("tpot_ms", 2), ("cached_tokens", 0))
            ]
            + [str(min(legacy["trials"], compact["trials"])), compact.get("commit", "-")]
        )
    header = ["model, requests x input + output", "caching", "legacy tok/s", "compact tok/s", "gain"]
    return table([*header, "TTFT ms", "TPOT ms", "tokens hit", "trials", "commit"], lines)


def _alike(pairs: dict[str, Any]) -> dict[str, str]:
    """Engines whose answers and logits are bit by bit those of one named before, and the first of these."""
    same = [
        name.split(" / ")
        for name, compared in pairs.items()
        if compared["equal"] == compared["answers"] and compared["largest"] == 0
    ]
    seconds = {second for _, second in same}
    return {second: first for first, second in same if first not in seconds}


def equality_table(result: dict[str, Any]) -> str:
    """Comparisons of answers, on one GPU, on two, and of a mixture of experts; says so when there is none.

    An engine that answers as another does is compared with no third one, and what has the same figures is one line.
    """
    found = result.get("equality")
    if found is None:
        return "Answers have not been compared with logits on a GPU yet."
    some = []
    for part, model in ((found, ""), (result.get("ray", {}), ""), (result.get("moe", {}), "MoE: ")):
        alike = _alike(part.get("pairs", {}))
        for kind in KINDS:
            for name, compared in part.get(kind, {}).items():
                first, _, second = name.partition(" / ")
                if not second or (first not in alike and alike.get(second, first) == first):
                    some.append((kind, model + name, compared))
    engines: dict[tuple[str, ...], list[str]] = {}
    for kind, name, compared in some:
        figures = [f"{compared[key]:.3f}" if key in compared else "-" for key in ("rms", "largest", "widest_margin")]
        same = f"{compared['equal']} of {compared['answers']}"
        line = (KINDS[kind], same, *figures, "yes" if compared["passed"] else "no")
        engines.setdefault(line, []).append(name)
    lines = [[kind, ", ".join(names), *line] for (kind, *line), names in engines.items()]
    header = [
        "compared",
        "engines",
        "same ids",
        "logits rms",
        "largest",
        "widest margin where ids part",
        "within bounds",
    ]
    return table(header, lines)


def judge_table(result: dict[str, Any]) -> str:
    """Every engine's answers beside fp32, those of the same figures in one line; says so when there are none."""
    found = result.get("judge")
    if found is None:
        return "Answers have not been judged yet."
    engines: dict[tuple[str, ...], list[str]] = {}
    for engine, groups in found.items():
        for group, some in groups.items():
            figures = [f"{some[name]:.3f}" if name in some else "-" for name in ("rms", "largest", "behind", "gap")]
            tokens = [f"{some['others']} of {some['tokens']}" if "tokens" in some else "-"]
            line = (group, str(some["answers"]), *figures[:2], *tokens, *figures[2:])
            engines.setdefault(line, []).append(engine)
    lines = [[", ".join(names), *line] for line, names in engines.items()]
    header = ["engines", "prompts", "answers", "logits rms", "largest", "other tokens", "behind by", "gap where parted"]
    return table(header, lines)


def start_table(result: dict[str, Any]) -> str:
    """Seconds from import to ready, of either engine: caches of compilers empty, and filled; says so when there are none."""
    first = result.get("first_start", {})
    lines = []
    for model, engines in result.get("start", {}).items():
        filled = {
            name.partition("-")[0]: engines[name]["start_s"] for name in ("legacy-on", "compact-on") if name in engines
        }
        shown = [first.get(f"{variant} {model}") for variant in ("legacy", "compact")]
        shown += [filled.get(variant) for variant in ("legacy", "compact")]
        lines.append([model, *("-" if seconds is None else f"{seconds:.0f}" for seconds in shown)])
    header = ["model", "caches empty: legacy s", "compact s", "caches of that run: legacy s", "compact s"]
    return table(header, lines) if lines else "No start has been timed yet."


def blocks(result: dict[str, Any]) -> dict[str, str]:
    """Named blocks for documents."""
    return {
        "lmdeploy": load_table(result),
        "start": start_table(result),
        "equality": equality_table(result),
        "judge": judge_table(result),
    }
