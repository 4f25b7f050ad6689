"""What a result depends on besides the code: device, driver, versions, clocks, and the two ceilings of this very run."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

COPY_BYTES = 4 * 2**30
MATRIX = 8192
COMMIT_VARIABLE = "COMPACT_STATE_COMMIT"


def _events(action: Any, repeats: int) -> list[float]:
    """Milliseconds of each of `repeats` eager calls."""
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in pairs:
        start.record()
        action()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs]


def copy_tb_s(bytes_: int = COPY_BYTES) -> float:
    """Device copy bandwidth, read plus written. Eager: a large copy captured in a graph runs slower."""
    source = torch.empty(bytes_, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    _events(lambda: target.copy_(source), 3)
    milliseconds = statistics.median(_events(lambda: target.copy_(source), 11))
    return 2 * bytes_ / milliseconds / 1e9


def matmul_tflop_s(size: int = MATRIX) -> float:
    """bf16 matrix rate of torch's library on random data."""
    a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    _events(lambda: torch.matmul(a, b, out=out), 3)
    milliseconds = statistics.median(_events(lambda: torch.matmul(a, b, out=out), 15))
    return 2 * size**3 / milliseconds / 1e9


def _number() -> str:
    """What nvidia-smi calls the device in use, which the variable may have chosen."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"


def clocks() -> dict[str, float] | None:
    """SM and memory clock (MHz), temperature (C) and power (W) now; None where nvidia-smi cannot say."""
    fields = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", "-i", _number()]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
        return {name: float(value) for name, value in zip(fields, text.split("\n")[0].split(","))}
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def driver() -> str | None:
    """Driver version, or None."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", _number()]
    try:
        return (
            subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
            .stdout.split("\n")[0]
            .strip()
        )
    except (OSError, subprocess.SubprocessError):
        return None


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str:
    """The measured commit: the variable where the tree has no history, else git's word, "+dirty" if files differ."""
    given = os.environ.get(COMMIT_VARIABLE)
    if given:
        return given
    root = Path(__file__).resolve().parents[1]
    try:
        revision = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=root, capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain", "-uno"], cwd=root, capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return revision + ("+dirty" if changed else "")


def describe(
    device: torch.device, commit_given: str | None, peers: dict[str, str], command: Sequence[str]
) -> dict[str, Any]:
    """The environment block of a result file. `peers`: name to version, or to why it is missing."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "driver": driver() if cuda else None,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "cutlass_dsl": _version("nvidia-cutlass-dsl") or _version("nvidia-cutlass-dsl-libs-cu13"),
        "tvm_ffi": _version("apache-tvm-ffi"),
        "peers": peers,
        "copy_tb_s": round(copy_tb_s(), 4) if cuda else None,
        "matmul_tflop_s": round(matmul_tflop_s(), 1) if cuda else None,
        "clocks": {"start": clocks()} if cuda else {},
        "commit": commit_given or commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": " ".join(command),
    }
