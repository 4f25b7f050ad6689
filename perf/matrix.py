"""The whole matrix in one command: peers compile in parallel, then one process a family measures, one at a time.

Two kinds of peers: those that keep compiled and tuned kernels on disk are warmed by processes of their own (`warm`); those whose
compiler keeps them in memory alone (IN_MEMORY) must compile in the process that times them, which does so in the same phase. No
family is timed before all of that is over, and never two at once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import peers
from .cases import Case
from .warm import pattern, warm

FAMILIES = {
    "conv": ("conv",),
    "gdn_prefill": ("gdn_prefill",),
    "kda_prefill": ("kda_prefill",),
    "step": ("decode", "verify"),
}
COST = {"conv": 0.7, "gdn_prefill": 2.0, "kda_prefill": 1.5, "step": 1.0}  # of a case, relative: how time is shared
IN_MEMORY = {"gdn_prefill": "flashinfer", "kda_prefill": "cudnn"}
COMPILE_LIMIT_S = 150.0  # what is not warm then is measured without the peers that keep kernels on disk
START_S = 8.0  # of a family's turn: imports are done, copy bandwidth and matrix rate are not
GRACE_S = 15.0  # beyond its share, for the case in hand


@dataclass
class Turn:
    """A file pair by which a family says that it is ready and is told to go."""

    stem: Path

    @property
    def ready(self) -> Path:
        """Written by the family's process."""
        return self.stem.with_suffix(".ready")

    @property
    def go(self) -> Path:
        """Written by the one who gives turns."""
        return self.stem.with_suffix(".go")

    def wait(self) -> tuple[float, set[tuple[str, str]]]:
        """Say ready, and wait to be told to go; gives the seconds to measure in and the groups whose peers did not compile.

        Raises RuntimeError when its parent is gone.
        """
        parent = os.getppid()
        self.ready.touch()
        while not self.go.exists():
            if os.getppid() != parent:
                raise RuntimeError("the process that gives turns has ended")
            time.sleep(0.05)
        seconds, cold = json.loads(self.go.read_text())
        return seconds, {(family, name) for family, name in cold}

    def give(self, seconds: float, cold: Sequence[tuple[str, str]] = ()) -> None:
        """Tell the family to go."""
        text = self.stem.with_suffix(".text")
        text.write_text(json.dumps([seconds, cold]))
        text.rename(self.go)


@dataclass
class Family:
    """A family's cases and the process that measures them."""

    name: str
    cases: list[Case]
    turn: Turn
    process: subprocess.Popen[bytes] | None = None


def by_family(cases: Sequence[Case], folder: Path) -> list[Family]:
    """Families that have cases, in the order they are measured when all are ready."""
    found = []
    for name, files in FAMILIES.items():
        chosen = [case for case in cases if case.file in files]
        if chosen:
            found.append(Family(name, chosen, Turn(folder / name)))
    return found


def measure(
    cases: Sequence[Case],
    out: Path,
    *,
    peer_names: str = "all",
    device: str = "cuda",
    commit: str | None = None,
    total_s: float = 480.0,
    compile_limit_s: float = COMPILE_LIMIT_S,
    jobs: int | None = None,
    command: str = "",
    say: Callable[[str], None] = print,
) -> list[str]:
    """Measure cases into `out`, one file a family; gives the families whose process failed.

    Args:
        total_s: seconds for everything. Each family gets a share of what is left, by cases and their cost; cases that do not
            fit are named in its file, the late ones of the registry first.
        compile_limit_s: seconds for the peers that keep kernels on disk; groups that are not done are measured without them,
            and say so.
        jobs: processes of the compile phase.
        command: what to record as the command.
    """
    began = time.monotonic()
    wanted = peers.wanted(peer_names)
    with tempfile.TemporaryDirectory() as temporary:
        families = by_family(cases, Path(temporary))
        for family in families:
            arguments = ["--case", pattern(family.cases), "--peers", peer_names, "--device", device, "--out", str(out)]
            arguments += ["--turn", str(family.turn.stem), "--record", command]
            arguments += ["--commit", commit] if commit else []
            kept = IN_MEMORY.get(family.name)
            arguments += ["--warm-here", kept] if kept in wanted else []
            family.process = subprocess.Popen(
                [sys.executable, "-m", "compact_state.perf", "run", *arguments],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        on_disk = {name: [peer for peer in wanted if peer != IN_MEMORY.get(name)] for name in FAMILIES}
        cold = warm(cases, on_disk.__getitem__, jobs, say, limit_s=compile_limit_s)
        say(f"peers compiled and tuned in {time.monotonic() - began:.0f} s; cold: {cold or 'none'}")
        try:
            return _give_turns(families, began + total_s, cold, say)
        finally:
            for family in families:
                if family.process is not None and family.process.poll() is None:
                    family.process.kill()


def _next(families: Sequence[Family], deadline: float) -> Family:
    """The first family that is ready: one may still compile while another is measured, which its processor does not feel."""
    while time.monotonic() < deadline:
        for family in families:
            assert family.process is not None
            if family.turn.ready.exists() or family.process.poll() is not None:
                return family
        time.sleep(0.1)
    return families[0]


def _give_turns(
    families: Sequence[Family], deadline: float, cold: Sequence[tuple[str, str]], say: Callable[[str], None]
) -> list[str]:
    failed = []
    left = list(families)
    while left:
        family = _next(left, deadline)
        assert family.process is not None
        weights = {other.name: len(other.cases) * COST[other.name] for other in left}
        remaining = deadline - time.monotonic()
        share = (remaining - START_S * len(left)) * weights[family.name] / sum(weights.values())
        left.remove(family)
        began = time.monotonic()
        family.turn.give(max(share, 1.0) + START_S, cold)
        try:
            status = family.process.wait(max(min(share + START_S + GRACE_S, remaining), 1.0))
        except subprocess.TimeoutExpired:
            family.process.kill()
            status = -1
        if status:
            failed.append(family.name)
        say(f"{family.name}: status {status}, {time.monotonic() - began:.0f} s of {share + START_S:.0f}")
    return failed
