"""Ahead-of-time build of the manifest: worker processes, a progress bar, resource reports, optionally one shared library.

python -m compact_state.cute_kernels.compile.build --out DIR [--shared] [--only PATTERN] [--jobs N]
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import filelock

from ..errors import CompileError, InvalidArgumentError
from . import shared_library
from .cache import _build_object, _is_whole, digest_of, object_path
from .fingerprint import TARGET, compiler_version
from .machine_code import code_hash
from .manifest import Entry, manifest
from .report import ResourceReport, compile_with_report
from .shared_library import replace_file


def _known_report(path: Path) -> ResourceReport | None:
    """The report beside a whole object, or None where either is missing or was not written to its end."""
    try:
        return ResourceReport(**json.loads(path.with_suffix(".json").read_text())) if _is_whole(path) else None
    except (OSError, ValueError, TypeError):
        return None


def build_entry(entry: Entry, keep_output: bool = False) -> tuple[Path, ResourceReport]:
    """Object file and report of one entry; compiled only when either is missing. Runs in a worker process."""
    path = object_path(entry.kernel_file, entry.key)
    with filelock.FileLock(f"{path}.lock", mode=0o600):
        report = _known_report(path)
        if report is None:
            _, report, text = compile_with_report(lambda: _build_object(entry.kernel_file, entry.key, path))
            written = json.dumps(report.as_dict())
            replace_file(path.with_suffix(".json"), lambda file: file.write_text(written))
            if keep_output:
                path.with_suffix(".remarks").write_text(text)
    return path, report


def rejection(entry: Entry, report: ResourceReport) -> str | None:
    """Why this specialisation may not ship, or None."""
    if report.spill_store_bytes or report.spill_load_bytes:
        return f"spills {report.spill_store_bytes} B stores, {report.spill_load_bytes} B loads"
    if report.stack_bytes:
        return f"uses {report.stack_bytes} B of local memory"
    if report.wgmma_serialized:
        return "ptxas serialised its wgmma instructions"
    if report.registers > entry.budget.max_registers:
        return f"uses {report.registers} registers, budget {entry.budget.max_registers}"
    shared = getattr(entry.key, "shared_bytes", lambda: 0)()
    if shared > entry.budget.max_shared_bytes:
        return f"uses {shared} B of shared memory, budget {entry.budget.max_shared_bytes}"
    return None


def build_all(entries: Sequence[Entry], jobs: int, progress: bool = True) -> list[tuple[Entry, Path, ResourceReport]]:
    """Build entries in parallel processes (threads abort the DSL); in order. Raises CompileError naming the entry."""
    from rich.progress import track

    os.environ.setdefault("CUTE_DSL_ARCH", TARGET)
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        futures = [pool.submit(build_entry, entry) for entry in entries]
        waiting = concurrent.futures.as_completed(futures)
        for _ in track(waiting, total=len(futures), description="compiling", disable=not progress):
            pass
    results = []
    for entry, future in zip(entries, futures):
        try:
            path, report = future.result()
        except Exception as error:
            raise CompileError(f"{entry.key.symbol()}: {error}") from error
        results.append((entry, path, report))
    return results


def link_objects(built: Sequence[tuple[Entry, Path]], out: Path) -> Path:
    """One shared library of entries and their object files, with its index. Raises CompileError."""
    symbols = {entry.key.symbol(): digest_of(entry.kernel_file, entry.key) for entry, _ in built}
    code = {entry.key.symbol(): code_hash(path) for entry, path in built}
    index = {"symbols": symbols, "code": code, "target": TARGET, "compiler": compiler_version()}
    return shared_library.link([path for _, path in built], out, index)


def _matching(only: str) -> list[Entry]:
    """Entries of the manifest whose symbols match a regular expression, at least one."""
    entries = manifest()
    try:
        found = [entry for entry in entries if re.search(only, entry.key.symbol())]
    except re.error as error:
        raise InvalidArgumentError("only", repr(only), f"a regular expression ({error})") from None
    if not found:
        raise InvalidArgumentError("only", repr(only), f"one that matches a symbol, such as {entries[0].key.symbol()}")
    return found


def build(out: Path | None, shared: bool, only: str = "", jobs: int | None = None, progress: bool = True) -> bool:
    """Build the manifest (or the symbols that match `only`), print its report; whether all of it is within budget.

    With `out` the objects, or with `shared` one library, are put there beside `report.json`. Raises InvalidArgumentError before
    anything is compiled.
    """
    from rich.console import Console
    from rich.table import Table

    if jobs is not None and jobs < 1:
        raise InvalidArgumentError("jobs", jobs, "at least 1")
    if shared and out is None:
        raise InvalidArgumentError("shared", "no out", "out, the folder for the library")
    entries = _matching(only)
    results = build_all(entries, jobs or os.cpu_count() or 1, progress)
    table = Table("kernel", "registers", "spill", "stack", "verdict")
    sound = True
    report = {}
    for entry, _, resources in results:
        reason = rejection(entry, resources)
        sound &= reason is None
        report[entry.key.symbol()] = resources.as_dict()
        spill = resources.spill_store_bytes + resources.spill_load_bytes
        table.add_row(
            entry.key.symbol(), str(resources.registers), str(spill), str(resources.stack_bytes), reason or "ok"
        )
    Console().print(table)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "report.json").write_text(json.dumps(report, indent=1, sort_keys=True))
        if shared:
            link_objects([(entry, path) for entry, path, _ in results], out)
        else:
            for _, path, _ in results:
                shutil.copy2(path, out)
    return sound


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--only", default="", help="regular expression on the kernels' symbols")
    parser.add_argument("--jobs", type=int)
    options = parser.parse_args(arguments)
    return 0 if build(options.out, options.shared, options.only, options.jobs) else 1


if __name__ == "__main__":
    raise SystemExit(main())
