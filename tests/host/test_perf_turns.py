"""Whose turn it is to be measured: nothing else may use the GPU meanwhile."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from compact_state.perf import matrix
from compact_state.perf.cases import select


@pytest.mark.parametrize("limit_s", [60.0, 0.3])
def test_no_family_is_measured_while_another_compiles_within_the_limit(
    limit_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    families = matrix.by_family(select("causal_conv1d_decode,gdn_decode", "Q1:B(1|4):"), tmp_path)
    conv, step = families
    for family in families:
        family.process = SimpleNamespace(poll=lambda: None)  # type: ignore[assignment]
    conv.turn.ready.touch()
    turns: list[tuple[str, bool]] = []

    def turn(family: matrix.Family, *arguments: object) -> int:
        turns.append((family.name, step.is_ready))
        return 0

    monkeypatch.setattr(matrix, "_turn", turn)
    monkeypatch.setattr(matrix, "unfinished", lambda out, cases: ({}, []))
    timer = threading.Timer(0.6, step.turn.ready.touch)
    timer.start()
    now = time.monotonic()
    assert matrix._give_turns(families, tmp_path, now + 60.0, {}, [], lambda text: None, now + limit_s) == []
    timer.join()
    assert turns == [("conv", limit_s == 60.0), ("step", True)]
