"""Sentences and Markdown tables about tables: what was gained over the heuristic, per geometry. Reads JSON only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..cute_kernels.configs import tables
from .journal import Trial
from .runner import Sweep
from .space import SPACES, Space
from .store import is_default, shape_text, trial_of, verdicts

MARK = "autotune"


def describe(sweep: Sweep) -> str:
    """What a sweep found, for the terminal."""
    lines = [f"{symbol}: not timed, {reason}" for symbol, reason in sorted(sweep.rejected.items())]
    for case in dict.fromkeys(trial.case for trial in sweep.trials):
        trials = [trial for trial in sweep.trials if trial.case == case and trial.us]
        default = next((trial for trial in trials if is_default(_space(sweep.kernel), trial)), None)
        if default is None or default.us is None:
            lines.append(f"{case}: the heuristic's own choice has no time")
            continue
        best = min(trials, key=lambda trial: trial.us or 0.0)
        gain = 100 * (1 - (best.us or 0.0) / default.us)
        lines.append(f"{case:<40} {default.us:9.2f} us, best {best.us:9.2f} ({gain:4.1f} %) {best.settings}")
    for exact, found in verdicts(_space(sweep.kernel), sweep.trials).items():
        best_of = "; ".join(f"{v.size}: {_values(v.settings)} {v.ratio:.3f}" for v in found)
        lines.append(f"best of {exact} by size, time over the heuristic's: {best_of}")
    failed = sum(trial.error is not None for trial in sweep.trials)
    lines.append(
        f"{len(sweep.trials)} trials ({failed} failed), {sweep.resumed} cases resumed, {len(sweep.left)} not reached, "
        f"{len(sweep.entries)} entries" + (f" in {sweep.table}" if sweep.table else "")
    )
    return "\n".join(lines)


def _space(kernel: str) -> Space:
    return next(space for space in SPACES.values() if space.kernel == kernel)


def _sets(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def _values(settings: dict[str, Any]) -> str:
    return "(" + " ".join(str(value) for value in settings.values()) + ")"


def _row(space: Space, case: str, trials: Sequence[Trial], chosen: dict[str, Any] | None) -> list[str]:
    timed = [trial for trial in trials if trial.us]
    default = next(trial for trial in timed if is_default(space, trial))
    before = next((trial for trial in timed if trial.is_default), default)
    best = min(timed, key=lambda trial: trial.us or 0.0)
    used = next((trial for trial in timed if trial.settings == chosen), default)
    gain = 1 - (used.us or 0.0) / (default.us or 1.0)
    text = f"{100 * gain:.1f} %" if used is not default else "heuristic stands"
    cells = [case]
    for trial in (before, default, used, best):
        cells += [f"{trial.us:.2f} {_values(trial.settings)}"]
    return [*cells, text]


def _chosen(entries: Sequence[dict[str, Any]], shape: dict[str, Any]) -> dict[str, Any] | None:
    entry = next((entry for entry in entries if tables._matches(entry, shape)), None)
    return None if entry is None else dict(entry["set"])


def table_block(path: Path) -> str:
    """Markdown about one table file. Raises tables.TableError."""
    table = tables.read(path, path.stem)
    space, environment = _space(path.stem), table["environment"]
    trials = [trial_of(row, path.stem, {}) for row in table["timings"]]
    timed = list(dict.fromkeys(trial.case for trial in trials if trial.us and is_default(space, trial)))
    entries = table["entries"]
    names = ", ".join(trials[0].settings) if trials else ""
    header = ["case", "heuristic when swept", "heuristic now", "used", "best", "gain of the table"]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for case in timed:
        of_case = [trial for trial in trials if trial.case == case]
        lines.append("| " + " | ".join(_row(space, case, of_case, _chosen(entries, of_case[0].shape))) + " |")
    errors = sorted({f"{_sets(trial.settings)}: {trial.error}" for trial in trials if trial.error})
    found = [
        f"- {shape_text(entry['match'])}, {space.size} {entry['range'][space.size][0]} to "
        f"{entry['range'][space.size][1]}: {_sets(entry['set'])}; {100 * entry['gain'][0]:.1f} to "
        f"{100 * entry['gain'][1]:.1f} % faster than the heuristic"
        for entry in entries
    ]
    sizes = sum(len(v) for v in verdicts(space, trials).values())
    parts = [
        f"## {path.stem}",
        f"From `autotune/tables/{path.parent.name}/{path.name}`: {environment['device']}, driver {environment.get('driver')}, "
        f"DSL {environment['cutlass_dsl']}, commit `{environment.get('commit')}`, {environment.get('date')}. {len(trials)} "
        f"trials in {len(timed)} cases ({sizes} sizes); an entry needs a gain of {100 * table.get('threshold', 0):.0f} %.",
        "\n".join(found) if found else "The heuristic is within the threshold everywhere: the table has no entry.",
        f"<details><summary>All cases: us ({names})</summary>\n\n" + "\n".join(lines) + "\n\n</details>",
    ]
    parts += ["Not timed: " + "; ".join(errors) + "."] if errors else []
    return "\n\n".join(parts)


def refresh(page: Path, folder: Path = tables.SHIPPED) -> None:
    """Put all shipped tables between the page's markers. Raises ValueError without them, tables.TableError for a bad file."""
    text = page.read_text()
    begin, end = f"<!-- {MARK} -->", f"<!-- /{MARK} -->"
    if begin not in text or end not in text:
        raise ValueError(f"{page}: lacks the markers {begin} and {end}")
    blocks = "\n\n".join(table_block(path) for path in sorted(folder.glob("*/*.json")))
    head, tail = text.split(begin)[0], text.split(end)[1]
    page.write_text(f"{head}{begin}\n{blocks or 'No table is shipped.'}\n{end}{tail}")


if __name__ == "__main__":
    refresh(Path(__file__).resolve().parents[1] / "docs" / "autotune.md")
