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
from dataclasses import dataclass, field
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
PATIENCE_S = 30.0  # for a peer that still compiles when nothing else is left to measure
GRACE_S = 15.0  # beyond its share, for the case in hand

Cold = dict[tuple[str, str], list[str]]  # by group of `warm`, peers that did not compile in time


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

    def wait(self) -> tuple[float, Cold]:
        """Say ready, and wait to be told to go; gives the seconds to measure in and what peers did not compile.

        Raises RuntimeError when its parent is gone.
        """
        parent = os.getppid()
        self.ready.touch()
        while not self.go.exists():
            if os.getppid() != parent:
                raise RuntimeError("the process that gives turns has ended")
            time.sleep(0.05)
        seconds, cold = json.loads(self.go.read_text())
        return seconds, {(family, name): names for family, name, names in cold}

    def give(self, seconds: float, cold: Cold) -> None:
        """Tell the family to go."""
        text = self.stem.with_suffix(".text")
        text.write_text(json.dumps([seconds, [[*key, names] for key, names in cold.items()]]))
        text.rename(self.go)


@dataclass
class Family:
    """A family's cases and the process that measures them."""

    name: str
    cases: list[Case]
    turn: Turn
    arguments: list[str] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None

    def start(self, peer_names: Sequence[str]) -> None:
        """Start the process that measures, beside these peers; one that still runs is ended."""
        self.stop()
        kept = IN_MEMORY.get(self.name)
        more = ["--peers", ",".join(peer_names) or "none", *(["--warm-here", kept] if kept in peer_names else [])]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "compact_state.perf", "run", *self.arguments, *more],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def stop(self) -> None:
        """End the process if it runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    @property
    def is_ready(self) -> bool:
        """Whether it waits for its turn, or has ended."""
        assert self.process is not None
        return self.turn.ready.exists() or self.process.poll() is not None


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
            family.arguments = ["--case", pattern(family.cases), "--device", device, "--out", str(out)]
            family.arguments += ["--turn", str(family.turn.stem), "--record", command]
            family.arguments += ["--commit", commit] if commit else []
            family.start(wanted)
        on_disk = {name: [peer for peer in wanted if peer != IN_MEMORY.get(name)] for name in FAMILIES}
        cold = warm(cases, on_disk.__getitem__, jobs, say, limit_s=compile_limit_s)
        say(f"peers compiled and tuned in {time.monotonic() - began:.0f} s; cold: {cold or 'none'}")
        try:
            return _give_turns(families, began + total_s, cold, wanted, say)
        finally:
            for family in families:
                family.stop()


def _next(families: Sequence[Family], wanted: Sequence[str], say: Callable[[str], None]) -> Family:
    """The first family that is ready: one may still compile while another is measured, which the GPU hardly feels.

    When all that are left still compile, the first one starts again without the peer it waits for.
    """
    began = time.monotonic()
    while time.monotonic() - began < PATIENCE_S:
        for family in families:
            if family.is_ready:
                return family
        time.sleep(0.1)
    slow = families[0]
    say(f"{slow.name}: without {IN_MEMORY.get(slow.name)}, which still compiles")
    slow.start([name for name in wanted if name != IN_MEMORY.get(slow.name)])
    while not slow.is_ready:
        time.sleep(0.1)
    return slow


def _give_turns(
    families: Sequence[Family],
    deadline: float,
    cold: Cold,
    wanted: Sequence[str],
    say: Callable[[str], None],
) -> list[str]:
    failed = []
    left = list(families)
    while left:
        family = _next(left, wanted, say)
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
            family.stop()
            status = -1
        if status:
            failed.append(family.name)
        say(f"{family.name}: status {status}, {time.monotonic() - began:.0f} s of {share + START_S:.0f}")
    return failed
