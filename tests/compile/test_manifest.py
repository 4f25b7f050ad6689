"""Every shipped kernel compiles for sm_90a here, without spills, local memory or serialised wgmma, within its budget."""

from __future__ import annotations

import collections
import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

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


def test_the_documents_say_how_many_there_are():
    text = (Path(__file__).parents[2] / "docs/compile.md").read_text()
    named = {kernel: int(number) for kernel, number in re.findall(r"^\| `(\w+)` \| (\d+) \|", text, re.MULTILINE)}
    assert named == collections.Counter(entry.kernel_file for entry in manifest())
    assert f"{sum(named.values())} ship." in text


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


def test_J12_building_and_linking_call_no_cuda_toolkit(tmp_path):
    """A slim image without nvcc: whatever of the toolkit is on the path fails when it is called, and says that it was."""
    tools, called = tmp_path / "tools", tmp_path / "called"
    tools.mkdir()
    for name in ("nvcc", "ptxas", "nvlink", "fatbinary", "cicc"):
        (tools / name).write_text(f"#!/bin/sh\necho {name} >> {called}\nexit 1\n")
        (tools / name).chmod(0o755)
    env = {name: value for name, value in os.environ.items() if name not in ("CUDA_HOME", "CUDA_PATH")}
    env |= {"PATH": f"{tools}:{os.environ['PATH']}", "COMPACT_STATE_CACHE_DIR": str(tmp_path / "cache")}
    command = "compact_state.cute_kernels.compile.build", "--only", "state_ids", "--jobs", "1", "--shared"
    subprocess.run(
        [sys.executable, "-m", *command, "--out", str(tmp_path / "library")], env=env, check=True, capture_output=True
    )
    assert (tmp_path / "library" / "compact_state_kernels.so").stat().st_size > 0
    assert not called.exists()
