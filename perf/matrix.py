"""The whole matrix in one command: peers compile in parallel, then one process a family measures, one at a time; the host
times come last, from one process alone.

Two kinds of peers (`warm.ON_DISK`, `warm.IN_MEMORY`): those that keep compiled and tuned kernels on disk are warmed by processes
of their own; those whose compiler keeps them in memory alone must compile in the process that times them, which does so in the
same phase. No family is timed before all of that is over, within the limit of compiling, and never two at once: a peer that runs
its kernels for the first time beside a case makes some of its rounds half as long again.
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

from . import peers, schema
from .cases import Case
from .run import replace, unfinished
from .warm import IN_MEMORY, Cold, environment, family_of, installed, pattern, precompile, warm

FAMILIES = ("conv", "step", "gdn_prefill", "kda_prefill")
COST = {"conv": 0.3, "gdn_prefill": 1.5, "kda_prefill": 1.0, "step": 0.7}  # of a case, relative: how time is shared
COMPILE_LIMIT_S = 150.0  # what is not warm then is measured without the peers that keep kernels on disk
START_S = 8.0  # of a family's turn: imports are done, copy bandwidth and matrix rate are not
END_S = 3.0  # for the last case and the files, before the process is ended
PATIENCE_S = 30.0  # for a peer that still compiles when nothing else is left to measure, beyond the limit of compiling
GRACE_S = 15.0  # beyond its share, for the case in hand
HOST_S = 45.0  # for the host times, beside which nothing else runs
RESTARTS = 2  # of a family whose process was lost, each without the case that lost it
RESTART_S = 25.0  # a restart needs at least
CACHE = Path.home() / ".cache" / "compact-state" / "peers"


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

    @property
    def case(self) -> Path:
        """Holds the name of the case in hand: the one that a lost process was lost in."""
        return self.stem.with_suffix(".case")

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
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    @property
    def in_memory(self) -> tuple[str, ...]:
        """Peers that compile in the process that measures."""
        return tuple(dict.fromkeys(name for case in self.cases for name in IN_MEMORY.get(case.op, ())))

    def start(self, peer_names: Sequence[str], *more: str, compile_here: bool = True) -> None:
        """Start the process that measures, beside these peers; one that still runs is ended."""
        self.stop()
        for path in (self.turn.ready, self.turn.go):
            path.unlink(missing_ok=True)
        here = [name for name in self.in_memory if name in peer_names] if compile_here else []
        added = ["--peers", ",".join(peer_names) or "none", *(["--warm-here", ",".join(here)] if here else []), *more]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "compact_state.perf", "run", *self.arguments, *added],
            env={**os.environ, **self.environment, "OMP_NUM_THREADS": "1"},
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
    for name in FAMILIES:
        chosen = [case for case in cases if family_of(case) == name]
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
    cache: Path = CACHE,
    logs: Path | None = None,
    host_s: float = HOST_S,
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
        cache: folder in which peers keep what they compile and tune: a second run finds it there.
        logs: folder of what the compiling processes say.
        host_s: of these, seconds for the host times; with 0 `python -m perf host` adds them when the machine is quiet.
    """
    began = time.monotonic()
    wanted = peers.wanted(peer_names)
    for case in cases:
        (out / f"{case.file}.json").unlink(missing_ok=True)  # a row of another run must not pass for one of this
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
    precompile(wanted)
    with tempfile.TemporaryDirectory() as temporary:
        families = by_family(cases, Path(temporary))
        try:
            for family in families:
                family.arguments = ["--case", pattern(family.cases), "--device", device, "--out", str(out)]
                family.arguments += ["--turn", str(family.turn.stem), "--record", command]
                family.arguments += ["--commit", commit] if commit else []
                family.environment = environment(cache, family.name)
                family.start(wanted)
            cold = warm(cases, installed(wanted), jobs, say, logs, compile_limit_s, cache)
            compiled_s = time.monotonic() - began
            say(f"peers compiled and tuned in {compiled_s:.0f} s; cold: {cold or 'none'}")
            until = began + min(compile_limit_s, total_s)
            failed = _give_turns(families, out, began + total_s - host_s, cold, wanted, say, until)
        finally:
            for family in families:
                family.stop()
    if host_s and _host_times(cases, out, device, host_s):
        failed.append("host times")
    _stamp(out, cases, {"compile_s": round(compiled_s, 1), "command_s": round(time.monotonic() - began, 1)})
    return failed


def _host_times(cases: Sequence[Case], out: Path, device: str, limit_s: float) -> int:
    """Host times of all rows in a process of its own; its status, -1 where it had to be ended."""
    command = [sys.executable, "-m", "compact_state.perf", "host", "--device", device, "--out", str(out)]
    command += ["--case", pattern(cases), "--limit", f"{limit_s:.0f}"]
    try:
        return subprocess.run(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=limit_s + START_S, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        return -1


def _stamp(out: Path, cases: Sequence[Case], times: dict[str, float]) -> None:
    """Add to every file's environment how long the whole command took."""
    for stem in sorted({case.file for case in cases}):
        path = out / f"{stem}.json"
        if path.is_file():
            result = schema.load(path)
            result["environment"] |= times
            replace(path, result)


def _next(families: Sequence[Family], wanted: Sequence[str], say: Callable[[str], None], until: float = 0.0) -> Family:
    """The first family that is ready.

    When all that are left still compile then, `until` at the earliest, the first one starts again without the peers it waits for.
    """
    until = max(until, time.monotonic() + PATIENCE_S)
    while time.monotonic() < until:
        for family in families:
            if family.is_ready:
                return family
        time.sleep(0.1)
    slow = families[0]
    say(f"{slow.name}: without {', '.join(slow.in_memory)}, which still compiles")
    slow.start([name for name in wanted if name not in slow.in_memory])
    while not slow.is_ready:
        time.sleep(0.1)
    return slow


def _turn(family: Family, share: float, limit: float, cold: Cold) -> int:
    """Let a family measure; its process's status, -1 where it had to be ended."""
    assert family.process is not None
    family.turn.give(max(share - END_S, 1.0) + START_S, cold)
    try:
        return family.process.wait(max(min(share + START_S + GRACE_S, limit), 1.0))
    except subprocess.TimeoutExpired:
        family.stop()
        return -1


def _give_turns(
    families: Sequence[Family],
    out: Path,
    deadline: float,
    cold: Cold,
    wanted: Sequence[str],
    say: Callable[[str], None],
    until: float,
) -> list[str]:
    failed = []
    waiting = list(families)
    while time.monotonic() < until and not all(family.is_ready for family in families):
        time.sleep(0.1)
    while waiting:
        family = _next(waiting, wanted, say, until)
        weights = {other.name: len(other.cases) * COST[other.name] for other in waiting}
        remaining = deadline - time.monotonic()
        share = (remaining - START_S * len(waiting)) * weights[family.name] / sum(weights.values())
        waiting.remove(family)
        began = time.monotonic()
        status = _turn(family, share, remaining, cold)
        for _ in range(RESTARTS):
            spent = time.monotonic() - began
            if status == -1 or share - spent < RESTART_S or not unfinished(out, family.cases)[1]:
                break
            say(f"{family.name}: status {status}, goes on with the cases that were not run")
            family.start(wanted, "--resume", compile_here=False)
            while not family.is_ready:
                time.sleep(0.1)
            status = _turn(family, share - spent, deadline - time.monotonic(), cold)
        if status:
            failed.append(family.name)
        say(f"{family.name}: status {status}, {time.monotonic() - began:.0f} s of {share + START_S:.0f}")
    return failed
