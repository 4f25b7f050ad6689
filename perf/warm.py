"""Peers compiled and tuned ahead of a run: one process a group of cases, several at once.

FlashInfer builds CUDA sources at first call, FLA and lmdeploy compile and tune Triton kernels; all keep what they made on disk,
so that a run which comes after finds it there. Tuning here shares the GPU among the processes.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import importlib
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .cases import Case

POOL_BYTES = 2**29
FIRST = ("Q1", "G1")
TUNING = {
    "fla",
    "lmdeploy",
}  # peers that tune Triton kernels for long; without them in time a case is measured without them
COMPILE_THREADS = 4
DONE = "warm: "  # begins the line by which a process says that a peer is done


def warm_group(cases: Sequence[Case], peer_names: str) -> list[str]:
    """Call each peer once on every case, without a check or a clock, and say when one is done. Gives what failed."""
    import torch

    from . import peers
    from .inputs import Workspace
    from .run import BENCHES, SHARED_ROWS

    if not TUNING.isdisjoint(peer_names.split(",")):
        _compile_configs_together()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ws = Workspace(device, POOL_BYTES, SHARED_ROWS if device.type == "cuda" else 0)
    failures = []

    def attempt(what: str, action: Callable[[], Any]) -> Any:
        """The action's result; what fails is named by the run itself, per case."""
        try:
            return action()
        except Exception as error:
            failures.append(f"{what}: {type(error).__name__}: {str(error)[:160]}")
            return None

    adapters, _ = peers.load(peer_names)
    for name, adapter in adapters.items():
        for case in cases:
            bench = importlib.import_module(f".{BENCHES[case.op]}", __package__)
            with torch.no_grad():
                prepared = attempt(case.name, functools.partial(bench.prepare, case, ws, {name: adapter}))
                for contender in prepared.contenders if prepared is not None else ():
                    if not contender.name.startswith(("ours", "slab_copy")):
                        attempt(f"{case.name} {contender.name}", contender.launches[0])
            if device.type == "cuda":
                torch.cuda.synchronize()
        print(f"{DONE}{name}", flush=True)
    return failures


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


def group_of(case: Case) -> tuple[str, str]:
    """What a case's peers are compiled with: its family and geometry (verify: and drafts, for which there are other kernels)."""
    drafts = f":T{case.workload.lengths[0]}" if case.op.endswith("_verify") else ""
    return "step" if case.file in ("decode", "verify") else case.file, case.geometry.id + drafts


def _urgency(case: Case) -> int:
    """Order in which groups are warmed: what is compared most first, other geometries of prefill, which take longest, last."""
    if case.geometry.id in FIRST:
        return 0 if "prefill" in case.file else 1
    return 3 if "prefill" in case.file else 2


def groups(cases: Sequence[Case]) -> dict[tuple[str, str], list[Case]]:
    """Cases by `group_of`, the most urgent first."""
    found: dict[tuple[str, str], list[Case]] = {}
    for case in sorted(cases, key=_urgency):
        found.setdefault(group_of(case), []).append(case)
    return found


def warm(
    cases: Sequence[Case],
    peers_of: Callable[[str], Sequence[str]],
    jobs: int | None = None,
    say: Callable[[str], None] = print,
    logs: Path | None = None,
    limit_s: float = math.inf,
) -> dict[tuple[str, str], list[str]]:
    """Warm all groups in at most `jobs` processes; gives by group the peers that failed or were not done in time.

    Args:
        peers_of: names of the peers to warm for a family ("step", "conv", "gdn_prefill", "kda_prefill"); none: it is left out.
        jobs: processes, one a core by default.
        logs: folder of one log a process.
        limit_s: seconds after which what still runs is ended.
    """
    by_group = groups(cases)
    waiting = [key for key in by_group if peers_of(key[0])]
    cold = {key: list(peers_of(key[0])) for key in waiting}
    running: dict[tuple[str, str], tuple[subprocess.Popen[str], float]] = {}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = logs or Path(temporary)

        def log(key: tuple[str, str]) -> Path:
            return folder / f"{key[0]}-{re.sub(r'[/:]', '_', key[1])}.log"

        def note(key: tuple[str, str]) -> None:
            done = set(re.findall(rf"^{DONE}(\w+)$", log(key).read_text(), re.MULTILINE))
            cold[key] = [name for name in cold[key] if name not in done]

        while (waiting or running) and time.monotonic() - began < limit_s:
            while waiting and len(running) < (jobs or os.cpu_count() or 1):
                key = waiting.pop(0)
                command = [
                    "nice",
                    "-n",
                    str(5 * _urgency(by_group[key][0])),
                    sys.executable,
                    "-m",
                    "compact_state.perf",
                ]
                command += ["warm", "--here", "--case", pattern(by_group[key]), "--peers", ",".join(peers_of(key[0]))]
                with log(key).open("w") as out:
                    process = subprocess.Popen(
                        command,
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        text=True,
                        env={**os.environ, "OMP_NUM_THREADS": "1"},
                    )
                running[key] = process, time.monotonic()
            time.sleep(0.1)
            for key, (process, start) in list(running.items()):
                if process.poll() is not None:
                    del running[key]
                    note(key)
                    took = time.monotonic() - start
                    status = f"status {process.returncode}, cold: {', '.join(cold[key]) or 'none'}"
                    say(f"{time.monotonic() - began:6.1f} s  {':'.join(key)} took {took:.1f} s, {status}")
        for key, (process, _) in running.items():
            process.kill()
            process.wait()
            note(key)
    return {key: names for key, names in cold.items() if names}


def pattern(cases: Sequence[Case]) -> str:
    """A `--case` that selects exactly these."""
    return f"^({'|'.join(re.escape(case.name) for case in cases)})$"
