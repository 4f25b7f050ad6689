"""Compile the candidates of a sweep in parallel processes and drop those that break their resource budget. Needs no GPU."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ..cute_kernels.compile import shared_library
from ..cute_kernels.compile.build import build_entry, link_objects, rejection
from ..cute_kernels.compile.cache import digest_of, dsl_available
from ..cute_kernels.compile.fingerprint import TARGET
from ..cute_kernels.compile.manifest import Entry, manifest


def build_candidates(
    entries: Sequence[Entry], jobs: int, advance: Callable[[], object] = lambda: None
) -> dict[str, str | None]:
    """Build each entry once; for its symbol, None or why the candidate is out: it does not compile, spills, is too big.

    What a library built ahead holds was found sound when it was linked. Where there is no compiler, the rest is out.

    Args:
        entries: what to build; objects go to the compile cache, where the operators find them.
        jobs: worker processes (the compiler aborts a process that compiles in two threads).
        advance: called after each.
    """
    os.environ.setdefault("CUTE_DSL_ARCH", TARGET)
    unique = {entry.key.symbol(): entry for entry in entries}
    ready = [symbol for symbol, entry in unique.items() if _is_linked(entry)]
    reasons: dict[str, str | None] = dict.fromkeys(ready)
    unique = {symbol: entry for symbol, entry in unique.items() if symbol not in reasons}
    for _ in ready:
        advance()
    if not dsl_available():
        return reasons | dict.fromkeys(unique, f"no compiler here, and not built ahead: {shared_library.describe()}")
    if not unique:
        return reasons
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(max(1, min(jobs, len(unique))), mp_context=context) as pool:
        waiting = {pool.submit(build_entry, entry): symbol for symbol, entry in unique.items()}
        for future in concurrent.futures.as_completed(waiting):
            symbol = waiting[future]
            try:
                _, report = future.result()
                reasons[symbol] = rejection(unique[symbol], report)
            except Exception as error:  # a candidate that fails to build is a finding, not the end of the sweep
                reasons[symbol] = f"{type(error).__name__}: {str(error)[:300]}"
            advance()
    return reasons


def _is_linked(entry: Entry) -> bool:
    if shared_library.folder() is None:
        return False
    return shared_library.find(entry.key.symbol(), digest_of(entry.kernel_file, entry.key)) is not None


def link_candidates(candidates: Iterable[Entry], out: Path, jobs: int) -> Path:
    """One library of sound candidates and of everything that ships, for a sweep on a machine without the compiler.

    Args:
        candidates: entries that are built and within their budgets.
        out: folder; `COMPACT_STATE_KERNELS` names it where the sweep runs.
        jobs: worker processes for what is not built yet.

    Raises CompileError.
    """
    unique = {entry.key.symbol(): entry for entry in (*manifest(), *candidates)}
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(max(1, jobs), mp_context=context) as pool:
        objects = [path for path, _ in pool.map(build_entry, unique.values())]
    return link_objects(list(zip(unique.values(), objects)), out)
