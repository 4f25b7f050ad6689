"""Every shipped kernel compiles for sm_90a here, without spills, local memory or serialised wgmma, within its budget."""

from __future__ import annotations

import dataclasses
import os

import pytest

from compact_state.cute_kernels.compile.build import build_all, rejection
from compact_state.cute_kernels.compile.manifest import Entry, ResourceBudget, manifest
from compact_state.cute_kernels.compile.report import ResourceReport

pytestmark = pytest.mark.compile


def test_every_shipped_kernel_is_within_budget():
    entries = manifest()
    built = build_all(entries, os.cpu_count() or 1, progress=False)
    problems = {entry.key.symbol(): rejection(entry, report) for entry, _, report in built}
    assert not {symbol: reason for symbol, reason in problems.items() if reason}
    assert len(built) == len(entries)


@pytest.mark.parametrize(
    "change",
    [
        {"registers": 65},
        {"stack_bytes": 8},
        {"spill_store_bytes": 4},
        {"spill_load_bytes": 4},
        {"wgmma_serialized": True},
    ],
)
def test_the_gate_refuses(change):
    entry = Entry("state_ids", manifest()[0].key, ResourceBudget(max_registers=64))
    clean = ResourceReport(64, 0, 0, 0, False)
    assert rejection(entry, clean) is None
    assert rejection(entry, dataclasses.replace(clean, **change)) is not None


def test_a_built_entry_is_not_built_again():
    entry = next(entry for entry in manifest() if entry.kernel_file == "state_ids")
    [(_, path, report)] = build_all([entry], 1, progress=False)
    stamp = path.stat().st_mtime_ns
    assert build_all([entry], 1, progress=False) == [(entry, path, report)]
    assert path.stat().st_mtime_ns == stamp
