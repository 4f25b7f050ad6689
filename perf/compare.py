"""Two result sets side by side: the same cases of two commits, and which moved by more than their spread."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Any

from . import schema
from .cases import FILES

RESULTS = "perf/results/h200"
ROOT = Path(__file__).resolve().parents[1]
STEMS = frozenset(FILES.values())
LEAST_CHANGE = 0.01


def load_set(source: str) -> list[dict[str, Any]]:
    """Results of a file, a folder, or a git revision of this repository (its committed files).

    Raises ValueError when `source` is none of these.
    """
    path = Path(source)
    if path.is_file():
        return [schema.load(path)]
    if path.is_dir():
        return [schema.load(file) for file in sorted(path.glob("*.json")) if file.stem in STEMS]
    listing = subprocess.run(
        ["git", "ls-tree", "-r", "--name-only", source, "--", RESULTS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode:
        raise ValueError(f"{source!r}: allowed: a result file, a folder of them, or a revision of this repository")
    results = []
    for name in listing.stdout.split():
        if Path(name).parent != Path(RESULTS) or Path(name).suffix != ".json" or Path(name).stem not in STEMS:
            continue  # the same folder holds other kinds of results, and what development wrote
        text = subprocess.run(
            ["git", "show", f"{source}:{name}"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        result = json.loads(text)
        schema.validate(result)
        results.append(result)
    return results


def _rows(results: list[dict[str, Any]]) -> dict[tuple[Any, ...], dict[str, Any]]:
    return {schema.identity(row): row for result in results for row in result["rows"]}


def compare(base: list[dict[str, Any]], new: list[dict[str, Any]]) -> str:
    """Markdown table of the common cases, most slowed first, with the geometric mean of new over base."""
    before, after = _rows(base), _rows(new)
    common = [key for key in after if key in before]
    if not common:
        return "no common cases"
    ratios = {key: after[key]["ours_us"] / before[key]["ours_us"] for key in common}
    mean = math.exp(sum(math.log(value) for value in ratios.values()) / len(ratios))
    lines = ["| case | base us | new us | new / base | |", "|---|---|---|---|---|"]
    for key in sorted(common, key=lambda k: -ratios[k]):
        row, old = after[key], before[key]
        noise = max(row["spread"], old["spread"], LEAST_CHANGE)
        verdict = "" if abs(ratios[key] - 1) <= noise else "slower" if ratios[key] > 1 else "faster"
        name = " ".join(str(part) for part in key if part is not None)
        lines.append(f"| {name} | {old['ours_us']} | {row['ours_us']} | {ratios[key]:.3f} | {verdict} |")
    lines.append("")
    lines.append(f"geometric mean {mean:.3f} over {len(common)} cases")
    return "\n".join(lines)
