"""A sweep: build the candidates, drop what breaks its budget, time the rest case by case, write the table."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..cute_kernels.compile.cache import machine_code
from ..cute_kernels.compile.manifest import Entry
from ..cute_kernels.configs import tables
from ..perf import environment
from ..perf.cases import RANDOM, STATE_DTYPES, Case, registry, workload
from ..perf.geometries import PRIMARY, geometry
from ..perf.inputs import Workspace
from ..perf.timing import GraphTimer, Timer
from . import store
from .builds import build_candidates
from .journal import Journal, Trial
from .measure import measure_case
from .space import Key, Space, settings, space_of

POOL_BYTES = 2**30
Build = Callable[..., dict[str, str | None]]


class TuneError(RuntimeError):
    """A sweep that cannot give a table: no GPU, no compiler, or an operator that does not read tables."""


@dataclass
class Sweep:
    """What a sweep did. candidates: what was built. rejected: those that were not timed, by symbol, with the reason. left: cases
    the budget did not reach."""

    kernel: str
    candidates: list[Entry] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    rejected: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    resumed: int = 0
    table: Path | None = None
    entries: list[dict[str, Any]] = field(default_factory=list)


def cases_of(
    op: str, geometries: Sequence[str] = (), workloads: Sequence[str] = (), state_dtypes: Sequence[str] = STATE_DTYPES
) -> list[Case]:
    """Cases of one operator: the benchmark registry's, restricted, plus workloads that it does not have.

    Args:
        geometries: ids of `perf.geometries`; empty: the primary ones of the operator's kind.
        workloads: names such as B64 or B64T6; empty: the registry's.
        state_dtypes: "float32", "bfloat16" or both.

    Raises ValueError or KeyError for a name that is not known, and ValueError when nothing is left.
    """
    space, op, kind = space_of(op), op.split(":")[0], op.split("_")[0]
    chosen = geometries or [name for name in PRIMARY if kind not in ("gdn", "kda") or geometry(name).kind == kind]
    wrong = [name for name in chosen if kind in ("gdn", "kda") and geometry(name).kind != kind]
    if wrong:
        raise ValueError(f"geometry {', '.join(wrong)}: no {kind.upper()} geometry, which {op} needs")
    unknown = [name for name in state_dtypes if name not in STATE_DTYPES]
    if unknown:
        raise ValueError(f"state_dtype {', '.join(unknown)}: allowed: {', '.join(STATE_DTYPES)}")
    state_dtypes = [name for name in state_dtypes if name in space.states]
    known = [case for case in registry() if case.op == op and case.state_dtype in state_dtypes]
    if op.endswith("layer_decode"):  # with drafts it runs other kernels
        known = [case for case in known if case.accepted is None]
    found = [
        case for case in known if case.geometry.id in chosen and (not workloads or case.workload.name in workloads)
    ]
    have = {(case.geometry.id, case.workload.name, case.state_dtype) for case in found}
    gates = "fast" if op == "kda_prefill" else None
    accepted = RANDOM if op.endswith("_verify") else None
    for name in chosen:
        for load in workloads:
            for dtype in state_dtypes:
                if (name, load, dtype) not in have:
                    found.append(Case(op, geometry(name), workload(load), dtype, gates, accepted))
    if not found:
        raise ValueError(f"op {op!r}: no case for geometries {list(chosen)}, workloads {list(workloads)}")
    return found


def _candidates(space: Space, case: Case, near: bool = False) -> list[Key]:
    """Keys to try, the heuristic's among them. near: only those that differ from it in one field at most."""
    shape = space.shape(case)
    keys = space.candidates(shape)
    default = space.heuristic(**shape)
    if near:
        keys = [key for key in keys if len(settings(key).items() - settings(default).items()) <= 1]
    return keys if default in keys else [default, *keys]


def _facts(space: Space) -> dict[str, Any]:
    """What a figure depends on besides its case and settings."""
    return {
        "device": tables.device_name() or "cpu",
        "cutlass_dsl": tables.compiler(),
        "source": tables.code_digest(space.kernel),
    }


@functools.cache
def _environment(device: torch.device, commit: str | None, command: tuple[str, ...]) -> dict[str, Any]:
    """Measured once for all operators of a command."""
    return environment.describe(device, commit, {}, command)


def tune(
    op: str,
    *,
    geometries: Sequence[str] = (),
    workloads: Sequence[str] = (),
    state_dtypes: Sequence[str] = STATE_DTYPES,
    out: Path | None = None,
    journal: Path | None = None,
    jobs: int | None = None,
    budget_s: float | None = None,
    threshold: float = store.THRESHOLD,
    build_only: bool = False,
    near: bool = False,
    commit: str | None = None,
    command: Sequence[str] = (),
    progress: bool = True,
    build: Build = build_candidates,
    timer: Timer | None = None,
    device: torch.device | None = None,
) -> Sweep:
    """Sweep one operator and write its table.

    Args:
        op: operator with an entry in `space.SPACES`.
        geometries, workloads, state_dtypes: as for `cases_of`.
        out: folder of tables by device; default: the package's own. The file is `<out>/<device>/<kernel>.json`; trials it
            holds of other cases under the same GPU, compiler and sources stay.
        journal: file of trials; those measured under the same facts are not measured again.
        jobs: build processes, default one a core.
        budget_s: seconds after which no further case starts.
        threshold: what the best candidate must gain over the heuristic for an entry.
        build_only: compile and check resources, time nothing. Needs no GPU.
        near: try only keys that differ from the heuristic's in one field: after a change to a kernel that was swept before.
        commit, command: for the table's environment block.
        progress: draw progress bars.
        build, timer, device: replaced in tests.

    Raises ValueError for a wrong name, TuneError where the sweep cannot run.
    """
    began = time.monotonic()
    space, cases = space_of(op), cases_of(op, geometries, workloads, state_dtypes)
    if not build_only and device is None:
        if not torch.cuda.is_available():
            raise TuneError("tune: no CUDA device; allowed: build_only (--build-only), which needs none")
        device = torch.device("cuda")
    if not space.is_wired(space.shape(cases[0])):
        raise TuneError(f"{op}: its chooser in configs does not ask the tables, so no candidate could be forced")
    sweep = Sweep(space.kernel)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, disable=not progress) as bars:
        every = {key.symbol(): key for case in cases for key in _candidates(space, case, near)}
        task = bars.add_task("compiling", total=len(every))
        sweep.candidates = [space.entry(key) for key in every.values()]
        reasons = build(sweep.candidates, jobs or os.cpu_count() or 1, lambda: bars.advance(task))
        sweep.rejected = {symbol: reason for symbol, reason in reasons.items() if reason is not None}
        if build_only or device is None:
            return sweep
        cuda = device.type == "cuda"
        facts = _facts(space)
        book = Journal(journal)
        ws = Workspace(device, POOL_BYTES if cuda else 2**24)
        clock = timer or GraphTimer()
        task = bars.add_task(f"timing {op}", total=len(cases))
        for number, case in enumerate(cases):
            keys = [key for key in _candidates(space, case, near) if key.symbol() not in sweep.rejected]
            known = book.found(case.name, [settings(key) for key in keys], facts)
            if known is None:
                if budget_s is not None and time.monotonic() - began > budget_s:
                    sweep.left = [late.name for late in cases[number:]]
                    break
                known = measure_case(case, keys, space, ws, clock, facts)
                book.add(known)
            else:
                sweep.resumed += 1
            sweep.trials += known
            bars.advance(task)
    described = _environment(device, commit, tuple(command)) | facts
    _write(sweep, space, out or tables.SHIPPED, described, facts, threshold, _code(space, every))
    return sweep


def _code(space: Space, keys: Mapping[str, Key]) -> dict[str, str]:
    """Hashes of the instructions of the kernels that are built, by symbol."""
    found = {symbol: machine_code(space.kernel, key) for symbol, key in keys.items()}
    return {symbol: code for symbol, code in found.items() if code is not None}


def assemble(
    op: str,
    journal: Path,
    *,
    out: Path | None = None,
    threshold: float = store.THRESHOLD,
    environment_facts: dict[str, Any] | None = None,
) -> Sweep:
    """Make the table of an operator's kernel without a GPU, such as from the journal of a sweep that was ended.

    Args:
        journal: a journal, or (`.json`) a table, whose timings are judged again by this code's heuristic.
        environment_facts: what else is known of where it was measured, such as the driver.

    Raises TuneError where there is no such file or it has no trial of the kernel, tables.TableError for a bad table.
    """
    space = space_of(op)
    if not journal.is_file():
        raise TuneError(f"{journal}: no such file")
    code: dict[str, str] = {}
    if journal.suffix == ".json":
        table = tables.read(journal, space.kernel)
        code = table.get("code", {})
        known = {name: table["environment"].get(name) for name in _facts(space)}
        environment_facts = table["environment"] | (environment_facts or {})
        trials = [store.trial_of(row, space.kernel, known) for row in table["timings"]]
    else:
        trials = Journal(journal).trials(space.kernel)
    if not trials:
        raise TuneError(f"{journal}: no trial of {space.kernel}")
    sweep = Sweep(space.kernel, trials=trials, resumed=len({trial.case for trial in trials}))
    facts = trials[0].facts
    described = {"commit": environment.commit()} | (environment_facts or {}) | facts
    _write(sweep, space, out or tables.SHIPPED, described, facts, threshold, code)
    return sweep


def _write(
    sweep: Sweep,
    space: Space,
    out: Path,
    described: dict[str, Any],
    facts: dict[str, Any],
    threshold: float,
    code: dict[str, str],
) -> None:
    if not any(trial.us for trial in sweep.trials):
        return
    path = out / tables.folder_of(str(described["device"])) / f"{space.kernel}.json"
    trials, known = store.merged(path, space, sweep.trials, facts)
    table = store.table_of(space, trials, described, threshold, known | code)
    store.write(path, table)
    sweep.table, sweep.entries = path, table["entries"]
