"""Peers compiled and tuned ahead of a run: one process a group of cases, several at once.

FlashInfer builds CUDA sources at first call, FLA and lmdeploy compile and tune Triton kernels; all keep what they made on disk,
so that a run which comes after finds it there. Tuning here shares the GPU among the processes.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from .cases import Case

POOL_BYTES = 2**29


def warm_group(cases: Sequence[Case], peer_names: str) -> list[str]:
    """Call every peer once on every case, without a check or a clock. Gives what failed."""
    import torch

    from . import peers
    from .inputs import Workspace
    from .run import BENCHES, SHARED_ROWS

    adapters, _ = peers.load(peer_names)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ws = Workspace(device, POOL_BYTES, SHARED_ROWS if device.type == "cuda" else 0)
    failures = []
    for case in cases:
        bench = importlib.import_module(f".{BENCHES[case.op]}", __package__)
        with torch.no_grad():
            prepared = bench.prepare(case, ws, adapters)
            for contender in prepared.contenders:
                if contender.name.startswith(("ours", "slab_copy")):
                    continue
                try:
                    contender.launches[0]()
                    if device.type == "cuda":
                        torch.cuda.synchronize()
                except Exception as error:  # what cannot run is named by the run itself, per case
                    failures.append(f"{case.name} {contender.name}: {type(error).__name__}: {str(error)[:160]}")
    return failures


def groups(cases: Sequence[Case]) -> dict[tuple[str, str], list[Case]]:
    """Cases that compile much the same: a family, and a geometry (verify: and a number of drafts, for which kernels are
    compiled anew); prefill first, whose peers take longest."""
    found: dict[tuple[str, str], list[Case]] = {}
    for case in sorted(cases, key=lambda case: "prefill" not in case.file):
        family = "step" if case.file in ("decode", "verify") else case.file
        drafts = f":T{case.workload.lengths[0]}" if case.op.endswith("_verify") else ""
        found.setdefault((family, case.geometry.id + drafts), []).append(case)
    return found


def warm(
    cases: Sequence[Case],
    peers_of: Callable[[str], Sequence[str]],
    jobs: int | None = None,
    say: Callable[[str], None] = print,
    logs: Path | None = None,
) -> int:
    """Warm all groups in at most `jobs` processes; gives how many ended badly.

    Args:
        peers_of: names of the peers to warm for a family ("step", "conv", "gdn_prefill", "kda_prefill"); none: it is left out.
        jobs: processes, one a core by default.
        logs: folder of one log a process.
    """
    by_group = groups(cases)
    waiting = [key for key in by_group if peers_of(key[0])]
    running: dict[tuple[str, str], tuple[subprocess.Popen[str], float]] = {}
    bad = 0
    began = time.monotonic()
    while waiting or running:
        while waiting and len(running) < (jobs or os.cpu_count() or 1):
            family, name = key = waiting.pop(0)
            names = "|".join(re.escape(case.name) for case in by_group[key])
            command = [sys.executable, "-m", "compact_state.perf", "warm", "--here", "--case", f"^({names})$"]
            out = (
                subprocess.DEVNULL if logs is None else (logs / f"{family}-{re.sub(r'[/:]', '_', name)}.log").open("w")
            )
            process = subprocess.Popen(
                [*command, "--peers", ",".join(peers_of(family))], stdout=out, stderr=subprocess.STDOUT, text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
            running[key] = process, time.monotonic()
        time.sleep(0.2)
        for key, (process, start) in list(running.items()):
            if process.poll() is None:
                continue
            del running[key]
            bad += process.returncode != 0
            took = time.monotonic() - start
            say(f"{time.monotonic() - began:6.1f} s  {key[0]}:{key[1]} took {took:.1f} s, status {process.returncode}")
    return bad
