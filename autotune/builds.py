"""Compile the candidates of a sweep in parallel processes and drop those that break their resource budget. Needs no GPU."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
from collections.abc import Callable, Sequence

from ..cute_kernels.compile.build import build_entry, rejection
from ..cute_kernels.compile.fingerprint import TARGET
from ..cute_kernels.compile.manifest import Entry


def build_candidates(
    entries: Sequence[Entry], jobs: int, advance: Callable[[], object] = lambda: None
) -> dict[str, str | None]:
    """Build each entry once; for its symbol, None or why the candidate is out: it does not compile, spills, is too big.

    Args:
        entries: what to build; objects go to the compile cache, where the operators find them.
        jobs: worker processes (the compiler aborts a process that compiles in two threads).
        advance: called after each.
    """
    os.environ.setdefault("CUTE_DSL_ARCH", TARGET)
    unique = {entry.key.symbol(): entry for entry in entries}
    reasons: dict[str, str | None] = {}
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
