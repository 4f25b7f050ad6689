"""Peers compiled and tuned ahead of a run: one process for a peer and a group of cases, several at once.

FlashInfer's GDN kernels, FLA and lmdeploy keep what they compiled on disk, in the folder of `environment`, so that a run which
comes after finds it there. FLA's tuner tries every configuration on the first geometry of a family; on the others FLA takes what
it chose there (its own cache of configurations, in which numbers of heads need not agree), else tuning takes longer than all
the rest. Tuning shares the GPU among the processes.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import importlib
import importlib.util
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from .cases import Case

POOL_BYTES = 2**29
FIRST = ("Q1", "G1", "G4")  # tuned by themselves: G4's gate runs other kernels than G1's
TUNING = {
    "fla",
    "lmdeploy",
}  # peers that tune for long; without them in time a case is measured without them
COMPILE_THREADS = 8
DONE = "warm: "  # begins the line by which a process says that a peer is done
SOUND = "sound: "  # and the line by which it says that nothing failed that the peer has a kernel for
PACKAGES = {
    "flashinfer": ("flashinfer", "cutlass"),
    "fla": ("fla",),
    "cudnn": ("cudnn",),
    "lmdeploy": ("lmdeploy", "tilelang", "fla"),
    "flashkda": ("flash_kda",),
}

# Peers with a kernel for an operator, by where they keep what they compiled: on disk for all processes, or in their own memory.
ON_DISK = {
    "gdn_decode": ("flashinfer", "lmdeploy"),
    "gdn_verify": ("flashinfer", "lmdeploy"),
    "gdn_layer_decode": ("lmdeploy",),
    "gdn_prefill": ("fla", "lmdeploy"),
    "kda_prefill": ("fla",),
    "causal_conv1d_prefill": ("lmdeploy",),
    "causal_conv1d_decode": ("lmdeploy",),
}
IN_MEMORY = {
    "gdn_prefill": ("flashinfer",),
    "kda_prefill": ("cudnn",),
    "kda_decode": ("flashinfer",),
    "kda_verify": ("flashinfer",),
}

Group = tuple[str, str]  # family, geometry with drafts
Unit = tuple[str, str, str]  # and peer
Cold = dict[Group, list[str]]  # peers that did not compile in time


def environment(folder: Path, family: str) -> dict[str, str]:
    """Variables that make peers keep what they compile and tune in `folder`; those that are set already stand."""
    wanted = {
        "TRITON_CACHE_DIR": folder / "triton",
        "TILELANG_CACHE_DIR": folder / "tilelang",
        "FLASHINFER_WORKSPACE_BASE": folder,
        "FLA_CONFIG_DIR": folder / "fla" / family,
        "FLA_CACHE_MODE": "fuzzy",
    }
    return {name: os.environ.get(name, str(value)) for name, value in wanted.items()}


def family_of(case: Case) -> str:
    """The family of cases that one process measures."""
    return "step" if case.file in ("decode", "verify") else case.file


def group_of(case: Case) -> Group:
    """What a case's peers are compiled with: its family and geometry (verify: and drafts, for which there are other kernels)."""
    drafts = f":T{case.workload.lengths[0]}" if case.op.endswith("_verify") else ""
    return family_of(case), case.geometry.id + drafts


def distinct(cases: Iterable[Case]) -> list[Case]:
    """Of the cases that have peers, one of those that differ in accepted counts and gates alone, which change no kernel."""
    found: dict[object, Case] = {}
    for case in cases:
        if not case.alone:
            found.setdefault((case.op, case.geometry.id, case.workload.name, case.state_dtype), case)
    return list(found.values())


def units(cases: Sequence[Case], peer_names: Sequence[str]) -> dict[Unit, list[Case]]:
    """What is to be warmed, the most urgent first: cases by peer that keeps kernels on disk."""
    found: dict[Unit, list[Case]] = {}
    for case in distinct(cases):
        for name in ON_DISK.get(case.op, ()):
            if name in peer_names:
                found.setdefault((*group_of(case), name), []).append(case)
    return dict(sorted(found.items(), key=_urgency))


def _urgency(item: tuple[Unit, list[Case]]) -> tuple[int, int]:
    """Order in which units are warmed: first geometries, for which others wait, those others, then what has most cases."""
    (family, geometry, _), cases = item
    if family.endswith("_prefill"):
        return (0 if geometry in FIRST else 1), 0
    return 2, -len(cases)


def _waits_for(unit: Unit, of: Sequence[Unit]) -> Unit | None:
    """The unit whose tuned configurations this one takes over: the same peer on the first geometry of the family.

    It is more urgent, so it runs already when this one starts and waits.
    """
    family, geometry, peer = unit
    if peer not in TUNING or not family.endswith("prefill") or geometry in FIRST:
        return None
    return next((other for other in of if other[::2] == (family, peer) and other[1] in FIRST), None)


def _file_name(unit: Unit) -> str:
    return re.sub(r"[/:]", "_", "-".join(unit))


def _mark(cache: Path, unit: Unit) -> Path:
    """File that holds what cases a unit was warmed on."""
    return cache / "warm" / f"{_file_name(unit)}.txt"


def _is_warm(cache: Path, unit: Unit, cases: Sequence[Case]) -> bool:
    mark = _mark(cache, unit)
    return mark.is_file() and mark.read_text() == pattern(cases)


def _is_tuned(cache: Path, family: str) -> bool:
    """Whether FLA's tuner has left its choices for a family."""
    return any((cache / "fla" / family).glob("*.json"))


def warm_group(cases: Sequence[Case], peer_names: str, after: Path | None = None) -> list[str]:
    """Call each peer once on every case, without a check or a clock, and say when one is done. Gives what failed.

    after: a file to wait for once everything is imported.
    """
    import torch

    from . import peers
    from .inputs import Workspace
    from .run import BENCHES, SHARED_ROWS

    if not TUNING.isdisjoint(peer_names.split(",")):
        _compile_configs_together()
    if "flashinfer" in peer_names.split(","):
        _compile_side_by_side()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ws = Workspace(device, POOL_BYTES, SHARED_ROWS if device.type == "cuda" else 0)
    failures: list[str] = []

    def attempt(what: str, action: Callable[[], Any]) -> Any:
        """The action's result; what fails is named by the run itself, per case."""
        try:
            return action()
        except Exception as error:
            failures.append(f"{what}: {type(error).__name__}: {str(error)[:160]}")
            return None

    adapters, status = peers.load(peer_names)
    parent = os.getppid()
    while after is not None and not after.exists() and os.getppid() == parent:
        time.sleep(0.1)
    failures += [f"{name}: {status[name]}" for name in peer_names.split(",") if name in status and name not in adapters]
    for name, adapter in adapters.items():
        before = len(failures)
        for case in cases:
            bench = importlib.import_module(f".{BENCHES[case.op]}", __package__)
            with torch.no_grad():
                prepared = attempt(case.name, functools.partial(bench.prepare, case, ws, {name: adapter}))
                if prepared is not None and not prepared.missing.get(name, "Unsupported").startswith("Unsupported"):
                    failures.append(f"{case.name}: {prepared.missing[name]}")
                for contender in prepared.contenders if prepared is not None else ():
                    if not contender.name.startswith(("ours", "slab_copy")):
                        attempt(f"{case.name} {contender.name}", contender.launches[0])
            if device.type == "cuda":
                torch.cuda.synchronize()
            if name in TUNING and os.environ.get("FLA_CONFIG_DIR"):
                attempt("tuned configurations", functools.partial(_keep_tuned, Path(os.environ["FLA_CONFIG_DIR"])))
        print(f"{DONE}{name}", flush=True)
        if len(failures) == before:
            print(f"{SOUND}{name}", flush=True)
    return failures


def _keep_tuned(folder: Path) -> None:
    from .peers.flash_linear_attention import keep_tuned

    if "fla" in sys.modules:
        keep_tuned(folder)


def installed(peer_names: Sequence[str]) -> list[str]:
    """Those of the peers whose packages are here; the others are named by the run itself, and there is nothing to warm."""

    def found(package: str) -> bool:
        with contextlib.suppress(ImportError, ValueError):
            return importlib.util.find_spec(package) is not None
        return False

    return [name for name in peer_names if all(map(found, PACKAGES[name]))]


def precompile(peer_names: Sequence[str], limit_s: float = 30.0) -> None:
    """Have Python's byte code of the peers on disk before many processes import them at once; does nothing where it is."""
    folders = []
    for package in dict.fromkeys(package for name in peer_names for package in PACKAGES[name]):
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(package)
            folders += list(spec.submodule_search_locations or ()) if spec is not None else []
    if folders:
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [sys.executable, "-m", "compileall", "-q", "-j", "0", *folders],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=limit_s,
                check=False,
            )


def _compile_configs_together() -> None:
    """Make Triton's tuner compile all of a kernel's configurations in threads before it times them one by one.

    What it times and chooses is the same; a configuration that does not compile here is left to the tuner to find out.
    """
    try:
        from triton.runtime.autotuner import Autotuner
    except ImportError:
        return
    prune = Autotuner.prune_configs

    def prune_and_compile(self: Any, kwargs: dict[str, Any]) -> Any:
        configs = prune(self, kwargs)
        arguments = list(self.nargs.values())

        def compile_one(config: Any) -> None:
            with contextlib.suppress(Exception):
                self.fn.run(*arguments, **{**kwargs, **config.all_kwargs(), "warmup": True})

        if len(configs) > 1:
            with concurrent.futures.ThreadPoolExecutor(COMPILE_THREADS) as pool:
                list(pool.map(compile_one, configs))
        return configs

    Autotuner.prune_configs = prune_and_compile


def _compile_side_by_side() -> None:
    """Have FlashInfer hold its lock of a family of kernels while it writes alone: processes compile at the same time."""
    try:
        from flashinfer.jit.cute_dsl_core import JitSpecCuteDsl
    except ImportError:
        return

    def build_and_load(self: Any) -> Any:
        kernel = self.try_load()
        if kernel is None:
            self.compile_and_persist()
            kernel = self.load()
        return kernel

    JitSpecCuteDsl.build_and_load = build_and_load


def warm(
    cases: Sequence[Case],
    peer_names: Sequence[str],
    jobs: int | None = None,
    say: Callable[[str], None] = print,
    logs: Path | None = None,
    limit_s: float = math.inf,
    cache: Path | None = None,
) -> Cold:
    """Warm all units in at most `jobs` processes; gives by group the peers that failed or were not done in time.

    Args:
        peer_names: peers to warm; those that keep kernels in memory are left to the process that times them.
        jobs: processes, one a core by default.
        logs: folder of one log a process.
        limit_s: seconds after which what still runs is ended.
        cache: folder for what peers keep on disk; by default wherever each of them does by itself. A unit that was warmed in it
            before is not warmed again: what its peers then do not find there they compile when they are timed.
    """
    began = time.monotonic()
    left = units(cases, peer_names)
    if cache is not None:
        left = {unit: chosen for unit, chosen in left.items() if not _is_warm(cache, unit, chosen)}
    waits = {unit: _waits_for(unit, list(left)) for unit in left if cache is None or not _is_tuned(cache, unit[0])}
    cold = set(left)
    running: dict[Unit, tuple[subprocess.Popen[str], float]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = logs or Path(temporary)

        def log(unit: Unit) -> Path:
            return folder / f"{_file_name(unit)}.log"

        def note(unit: Unit) -> str:
            text = log(unit).read_text()
            if re.search(rf"^{DONE}{unit[2]}$", text, re.MULTILINE):
                cold.discard(unit)
                if cache is not None and re.search(rf"^{SOUND}{unit[2]}$", text, re.MULTILINE):
                    _mark(cache, unit).parent.mkdir(parents=True, exist_ok=True)
                    _mark(cache, unit).write_text(pattern(left[unit]))
            return text

        def start(unit: Unit) -> subprocess.Popen[str]:
            command = [sys.executable, "-m", "compact_state.perf", "warm", "--here"]
            command += ["--case", pattern(left[unit]), "--peers", unit[2]]
            first = waits.get(unit)
            command += ["--after", str(log(first).with_suffix(".over"))] if first is not None else []
            more = environment(cache, unit[0]) if cache is not None else {}
            with log(unit).open("w") as out:
                return subprocess.Popen(
                    command,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    text=True,
                    env={**os.environ, **more, "OMP_NUM_THREADS": "1"},
                )

        for path in folder.glob("*.over"):
            path.unlink()
        waiting = list(left)
        while (waiting or running) and time.monotonic() - began < limit_s:
            while waiting and len(running) < (jobs or os.cpu_count() or 1):
                unit = waiting.pop(0)
                running[unit] = start(unit), time.monotonic()
            time.sleep(0.1)
            for unit, (process, started) in list(running.items()):
                if process.poll() is not None:
                    del running[unit]
                    log(unit).with_suffix(".over").touch()
                    text = note(unit)
                    took = (
                        f"{time.monotonic() - began:6.1f} s  {':'.join(unit)} took {time.monotonic() - started:.1f} s"
                    )
                    say(f"{took}, status {process.returncode}{'' if unit not in cold else ', cold: ' + text[-400:]}")
        for unit, (process, _) in running.items():
            process.kill()
            process.wait()
            note(unit)
    late: Cold = {}
    for family, geometry, peer in left:
        if (family, geometry, peer) in cold:
            late.setdefault((family, geometry), []).append(peer)
    return late


def pattern(cases: Sequence[Case]) -> str:
    """A `--case` that selects exactly these."""
    return f"^({'|'.join(re.escape(case.name) for case in cases)})$"
