"""What the harness does where a device or a peer is not there: it says so at once."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from compact_state.perf import matrix
from compact_state.perf.cases import select
from compact_state.perf.cli import main
from compact_state.perf.warm import PACKAGES, installed


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU is what is tried")
@pytest.mark.parametrize("command", ["run", "all", "host"])
def test_a_missing_device_is_said_before_anything_starts(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *arguments, **options: pytest.fail("a process was started"))
    assert main([command, "--op", "gdn_decode", "--out", str(tmp_path / "out")]) == 2
    assert f"perf {command}: no CUDA device; allowed: --device cpu" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_peers_that_are_not_installed_are_not_warmed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each of 44 processes would find out by itself, after its imports."""
    monkeypatch.setitem(PACKAGES, "fla", ("no_such_package",))
    monkeypatch.setitem(PACKAGES, "lmdeploy", ("torch", "no_such_package.inside"))
    monkeypatch.setitem(PACKAGES, "flashinfer", ("torch",))
    assert installed(("flashinfer", "fla", "lmdeploy")) == ["flashinfer"]
    warmed: list[Any] = []
    monkeypatch.setattr(matrix, "warm", lambda cases, names, *rest: warmed.append(names) or {})
    monkeypatch.setattr(matrix, "precompile", lambda names: None)
    monkeypatch.setattr(matrix, "_give_turns", lambda *rest: [])
    monkeypatch.setattr(matrix.Family, "start", lambda *rest, **options: None)
    matrix.measure(select("gdn_decode", "Q1:B1:"), tmp_path, peer_names="flashinfer,fla", host_s=0.0)
    assert warmed == [["flashinfer"]]
