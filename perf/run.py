"""Run cases: check, time every contender side by side, write rows."""

from __future__ import annotations

import gc
import importlib
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from . import environment, peers, schema
from .bench import Prepared, WrongResultError, gate
from .cases import Case, registry_order
from .inputs import Workspace
from .timing import GraphTimer, Timer, Timings, WallTimer

GPU_POOL_BYTES = 4 * 2**30
SHARED_ROWS = 32768  # the longest prefill of the registry
CPU_POOL_BYTES = 64 * 2**20
GARBAGE_BYTES = 40 * 2**30  # reserved before a case: above it memory is given back
SAVE_EVERY_S = 3.0
NOT_RUN = "not run: "  # begins what `failures` says of a case that was not reached
ALONE = "not asked: for so many drafts peers would compile kernels of their own"
DEVICE_LOST = "the device failed in a case before"
NAMED_CASES = 20  # that a resumed run is recorded with by name; of more it is their number
FIXED_COST_BYTES = 2**16  # below it a launch's fixed cost is all there is, and a floor of bytes says nothing

BENCHES = {
    "gdn_decode": "bench_decode",
    "kda_decode": "bench_decode",
    "advance_state_ids": "bench_decode",
    "gdn_layer_decode": "bench_layer",
    "kda_layer_decode": "bench_layer",
    "gdn_verify": "bench_verify",
    "kda_verify": "bench_verify",
    "gdn_commit": "bench_verify",
    "kda_commit": "bench_verify",
    "gdn_prefill": "bench_prefill",
    "kda_prefill": "bench_prefill",
    "causal_conv1d_prefill": "bench_conv",
    "causal_conv1d_decode": "bench_conv",
}


class Clock:
    """Seconds by what they went to."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to `name`."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] += time.monotonic() - began


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _row(
    case: Case,
    prepared: Prepared,
    errors: dict[str, dict[str, float]],
    timings: Timings,
    copy: float | None,
) -> dict[str, Any]:
    """One row of the schema."""
    work = case.work
    times = timings.by_name
    slab = [t.us for name, t in times.items() if name.startswith("slab_copy")]
    others = {n: t for n, t in times.items() if not n.startswith(("ours", "slab_copy"))}
    row: dict[str, Any] = {
        "op": case.op,
        "geometry": case.geometry.id,
        "workload": case.workload.name,
        "state_dtype": case.state_dtype,
        "ours_us": _round(times["ours"].us),
        "floor_us": None if copy is None or work.bytes < FIXED_COST_BYTES else _round(work.bytes / copy / 1e6),
        "slab_copy_us": _round(min(slab)) if slab else None,
        "spread": round(times["ours"].spread, 4),
        "peers": {name: _round(timing.us) for name, timing in others.items()},
        "case": case.name,
        "heads": case.geometry.heads,
        "model": f"{case.geometry.model} TP{case.geometry.tp}",
        "bytes": work.bytes,
        "flops": work.flops,
        "rotation_mib": prepared.rotation_bytes // 2**20,
        "launches": {c.name: len(c.launches) for c in prepared.contenders},
        "error": {name: {k: float(f"{v:.2e}") for k, v in ratios.items()} for name, ratios in errors.items() if ratios},
    }
    if case.gates:
        row["gates"] = case.gates
    if case.accepted is not None:
        row["accepted"] = case.accepted
    for name, timing in times.items():
        if name.startswith("ours_"):
            row[f"{name}_us"] = _round(timing.us)
    missing = prepared.missing | timings.failures
    if missing:
        row["peers_missing"] = missing
    in_place = [c.name for c in prepared.contenders if c.in_place and c.name in others]
    if in_place:
        row["in_place_peers"] = in_place
    eager = [name for name, timing in others.items() if not timing.graph]
    if eager:
        row["eager_peers"] = eager
    if timings.clock_mhz is not None:
        row["clock_mhz"] = round(timings.clock_mhz)
    return row | prepared.notes


def run_case(
    case: Case,
    ws: Workspace,
    timer: Timer,
    adapters: dict[str, ModuleType],
    copy_tb_s: float | None,
    clock: Clock | None = None,
) -> dict[str, Any]:
    """Check and time one case. Raises what one of our operators raises; peers only lose their column."""
    bench = importlib.import_module(f".{BENCHES[case.op]}", __package__)
    clock = clock or Clock()
    with torch.no_grad():
        with clock.phase("prepare"):
            prepared: Prepared = bench.prepare(case, ws, adapters)
        with clock.phase("check"):
            errors = gate(prepared, ws)
        with clock.phase("time"):
            timings = timer.time(prepared.contenders)
    return _row(case, prepared, errors, timings, copy_tb_s)


def workspace(device: torch.device, gates: Mapping[str, Sequence[str | None]] | None = None) -> Workspace:
    """Memory that cases share: pools far above the L2 cache on a GPU, small ones elsewhere."""
    if device.type == "cuda":
        return Workspace(device, GPU_POOL_BYTES, SHARED_ROWS, gates)
    return Workspace(device, CPU_POOL_BYTES)


def run(
    cases: Sequence[Case],
    *,
    device: torch.device,
    peer_names: str = "all",
    commit: str | None = None,
    command: Sequence[str] = (),
    budget_s: float | None = None,
    say: Callable[[str], None] = print,
    save: Callable[[dict[str, Any]], object] = lambda result: None,
    without: Callable[[Case], Mapping[str, str]] = lambda case: {},
    before: Mapping[str, Any] | None = None,
    begin: Callable[[Case], object] = lambda case: None,
) -> dict[str, Any]:
    """Run cases in order and give a result of the schema. A case that fails is named in `failures` and the rest go on.

    After a failure that leaves the device unusable no further case is run.

    budget_s: after this many seconds the remaining cases are named as skipped. save: called with the result so far every
    SAVE_EVERY_S seconds, so that a run that is ended early leaves what it has. without: peers that a case has to do without,
    and why. before: a result that this one goes on from, of `unfinished`: its rows and failures stay, and `write` keeps the
    environments of its files. begin: called before every case.
    """
    began, clock = time.monotonic(), Clock()
    with clock.phase("start"):
        adapters, status = peers.load(peer_names)
        env = environment.describe(device, commit, status, command)
    cuda = device.type == "cuda"
    say(f"{env['device']}, copy {env['copy_tb_s']} TB/s, matmul {env['matmul_tflop_s']} TFLOP/s, peers {status}")
    sets: dict[str, dict[str | None, None]] = {}
    for case in cases:
        if case.op.endswith("_prefill") and not case.op.startswith("causal"):
            sets.setdefault(case.geometry.id, {})[case.gates] = None
    gates = {name: tuple(found) for name, found in sets.items()}
    ws = workspace(device, gates)
    timer: Timer = GraphTimer() if cuda else WallTimer()
    rows: list[dict[str, Any]] = list(before["rows"]) if before else []
    failures: dict[str, str] = dict(before["failures"]) if before else {}
    files = {"files": before["files"]} if before else {}
    saved = time.monotonic()
    for number, case in enumerate(cases):
        if budget_s is not None and time.monotonic() - began > budget_s:
            failures |= {late.name: f"{NOT_RUN}time budget" for late in cases[number:]}
            break
        begin(case)
        _collect(cuda)
        try:
            start = time.monotonic()
            absent = dict.fromkeys(adapters, ALONE) if case.alone else dict(without(case))
            present = {name: adapter for name, adapter in adapters.items() if name not in absent}
            try:
                row = run_case(case, ws, timer, present, env["copy_tb_s"], clock)
                why = None
            except WrongResultError:
                raise
            except Exception as error:
                if not present or (cuda and not _device_works()):
                    raise
                why = f"the case failed beside the peers: {type(error).__name__}: {str(error)[:200]}"
            if why is not None:  # the error is gone by now, and with it what its frames held
                # A peer may have spoiled memory or what it shares with others: our row does not depend on it.
                absent |= dict.fromkeys(present, why)
                ws.fill()
                _collect(cuda, least=0)
                row = run_case(case, ws, timer, {}, env["copy_tb_s"], clock)
            named = {name: why for name, why in absent.items() if name in adapters}
            if named:
                row["peers_missing"] = row.get("peers_missing", {}) | named
            row["seconds"] = _round(time.monotonic() - start)
            schema.validate({"environment": env, "rows": [row]})
            rows.append(row)
        except Exception as error:
            failures[case.name] = f"{type(error).__name__}: {str(error)[:400]}"
            say(f"{case.name}: FAILED {failures[case.name]}")
            if cuda and not _device_works():
                failures |= {late.name: f"{NOT_RUN}{DEVICE_LOST}" for late in cases[number + 1 :]}
                break
            continue
        say(describe(rows[-1]))
        if time.monotonic() - saved > SAVE_EVERY_S:
            left = {late.name: f"{NOT_RUN}the run was ended" for late in cases[number + 1 :]}
            env["seconds"] = round(time.monotonic() - began, 1)
            save({"environment": env, "rows": rows, "failures": failures | left, **files})
            saved = time.monotonic()
    env["clocks"] |= {"end": environment.clocks()} if cuda else {}
    env["seconds_by_phase"] = {name: round(seconds, 1) for name, seconds in clock.seconds.items()}
    env["seconds"] = round(time.monotonic() - began, 1)
    return {"environment": env, "rows": rows, "failures": failures, **files}


def _collect(cuda: bool, least: int = GARBAGE_BYTES) -> None:
    """Give back memory where much is reserved, because peers that allocate by themselves find none else.

    Graphs that are gone leave their pools reserved, and peers leave cycles behind that hold what they wrote in a graph. Not
    before every case, because it takes a tenth of a second.
    """
    if cuda and torch.cuda.memory_reserved() > least:
        gc.collect()
        torch.cuda.empty_cache()


def _device_works() -> bool:
    """Whether the device still runs work: an illegal access, of a peer's kernel for one, ends all use of it by this process."""
    try:
        torch.cuda.synchronize()
        return bool(torch.ones(1, device="cuda").sum().item() == 1.0)
    except RuntimeError:
        return False


def unfinished(out: Path, cases: Sequence[Case]) -> tuple[dict[str, Any], list[Case]]:
    """What a folder already holds of these cases, and the cases that were not run.

    The first is one result without an environment; its `files` are the files with rows of these cases, by stem, as they stand.
    """
    names = {case.name for case in cases}
    rows: list[dict[str, Any]] = []
    failures: dict[str, str] = {}
    files: dict[str, dict[str, Any]] = {}
    for stem in sorted({case.file for case in cases}):
        if (out / f"{stem}.json").is_file():
            found = schema.load(out / f"{stem}.json")
            kept = [row for row in found["rows"] if row.get("case") in names]
            rows += kept
            files |= {stem: found} if kept else {}
            failed = found.get("failures", {})
            failures |= {n: why for n, why in failed.items() if n in names and not why.startswith(NOT_RUN)}
    done = {row["case"] for row in rows} | failures.keys()
    return {"rows": rows, "failures": failures, "files": files}, [case for case in cases if case.name not in done]


def _resumed(kept: dict[str, Any], env: dict[str, Any], cases: list[str]) -> dict[str, Any]:
    """The environment of a file that a run went on from, with what that run adds: these cases, and where it differs."""
    recorded = ("command", "date", "commit", "peers", "copy_tb_s", "matmul_tflop_s", "seconds")
    entry = {name: env.get(name) for name in recorded}
    facts = ("device", "driver", "python", "torch", "cuda", "triton", "cutlass_dsl", "tvm_ffi")
    entry |= {name: env.get(name) for name in facts if env.get(name) != kept.get(name)}
    entry |= {"host": env["host"]} if "host" in env else {}
    entry["cases"] = cases if len(cases) <= NAMED_CASES else len(cases)
    return kept | {"resumed": [*kept.get("resumed", ()), entry]}


def _gone_on(found: dict[str, Any], result: dict[str, Any]) -> dict[str, Any] | None:
    """A file that a run went on from, with what the run found out; None where that is nothing."""
    known = {row.get("case") for row in found["rows"]}
    anew = [row["case"] for row in result["rows"] if row["case"] not in known]
    if anew:
        return result | {"environment": _resumed(found["environment"], result["environment"], anew)}
    before = found.get("failures", {})
    told = {n: why for n, why in result["failures"].items() if not why.startswith(NOT_RUN) and before.get(n) != why}
    return found | {"failures": before | told} if told else None


def describe(row: dict[str, Any]) -> str:
    """One line for the terminal."""
    text = f"{row['case']:<48} {row['ours_us']:9.2f} us"
    if row["floor_us"]:
        text += f"  {row['ours_us'] / row['floor_us']:5.2f} x floor"
    if row["slab_copy_us"]:
        text += f"  slab {row['slab_copy_us']:8.2f}"
    text += "".join(f"  {name} {us:.2f}" for name, us in row["peers"].items())
    return text + f"  spread {row['spread']:.3f}"


def write(result: dict[str, Any], out: Path, by_case: dict[str, Case]) -> list[Path]:
    """Write the result: a `.json` path takes all rows, a folder one file a family. Nothing invalid is written.

    A file that the result goes on from keeps its environment; it is left alone where no row was measured anew, unless a case
    failed.
    """
    ordered = sorted(result["rows"], key=lambda row: registry_order(by_case[row["case"]]))
    result = result | {"rows": ordered}
    if out.suffix == ".json":
        targets = {out: result}
    else:
        targets = {}
        for stem in sorted({by_case[row["case"]].file for row in result["rows"]}):
            rows = [row for row in result["rows"] if by_case[row["case"]].file == stem]
            failed = {name: why for name, why in result["failures"].items() if by_case[name].file == stem}
            content = {"environment": result["environment"], "rows": rows, "failures": failed}
            found = result.get("files", {}).get(stem)
            changed = _gone_on(found, content) if found else content
            if changed is not None:
                targets[out / f"{stem}.json"] = changed
    for path, content in targets.items():
        replace(path, content)
    return list(targets)


def replace(path: Path, result: dict[str, Any]) -> None:
    """Write a valid result file at once: a reader, and a run that is killed, sees whole files only."""
    schema.validate(result)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(dump(result))
    os.replace(fresh, path)


def dump(result: dict[str, Any]) -> str:
    """JSON with one row a line: small, and a diff shows which rows moved."""
    rows = ",\n".join("  " + json.dumps(row) for row in result["rows"])
    environment_text = json.dumps(result["environment"], indent=1)
    failures = json.dumps(result.get("failures", {}), indent=1)
    return f'{{"environment": {environment_text},\n "failures": {failures},\n "rows": [\n{rows}\n ]}}\n'
