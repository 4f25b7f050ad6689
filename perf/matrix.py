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
    "step": ("decode", "verify"),
    "conv": ("conv",),
    "gdn_prefill": ("gdn_prefill",),
    "kda_prefill": ("kda_prefill",),
}
IN_MEMORY = {"gdn_prefill": "flashinfer", "kda_prefill": "cudnn"}
COMPILE_LIMIT_S = 240.0  # what is not ready then is measured without the peers that it waits for
GRACE_S = 60.0  # beyond its budget, for the case in hand and the start


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
    """Families that have cases, in the order they are measured."""
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
    budget_s: float = 420.0,
    compile_limit_s: float = COMPILE_LIMIT_S,
    jobs: int | None = None,
    command: str = "",
    say: Callable[[str], None] = print,
) -> list[str]:
    """Measure cases into `out`, one file a family; gives the families whose process failed.

    Args:
        budget_s: seconds of measuring, over all families; a family may use what those before it left. What does not fit is
            named in its file.
        compile_limit_s: seconds for peers to compile in; groups that are not done are measured without them, and say so.
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
        while any(_is_compiling(family) for family in families):
            time.sleep(0.1)
        say(f"peers compiled and tuned in {time.monotonic() - began:.0f} s; without: {cold or 'none'}")
        return _give_turns(families, budget_s, cold, say)


def _is_compiling(family: Family) -> bool:
    assert family.process is not None
    return family.process.poll() is None and not family.turn.ready.exists()


def _give_turns(
    families: Sequence[Family], budget_s: float, cold: Sequence[tuple[str, str]], say: Callable[[str], None]
) -> list[str]:
    failed = []
    began = time.monotonic()
    for family in families:
        assert family.process is not None
        left = budget_s - (time.monotonic() - began)
        family.turn.give(max(left, 1.0), cold)
        try:
            status = family.process.wait(max(left, 1.0) + GRACE_S)
        except subprocess.TimeoutExpired:
            family.process.kill()
            status = -1
        if status:
            failed.append(family.name)
        say(f"{family.name}: status {status}, {time.monotonic() - began:.0f} s of measuring so far")
    return failed
