"""Markers: what a machine cannot run is skipped with the reason, everything else runs."""

from __future__ import annotations

import importlib.util
import os

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")

import pytest


def _gpu_reason() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.cuda.get_device_capability() != (9, 0):
        return f"compute capability {torch.cuda.get_device_capability()}, kernels are for (9, 0)"
    return None


def _missing(package: str) -> str | None:
    return None if importlib.util.find_spec(package) else f"{package} is not installed"


REASONS = {
    "gpu": _gpu_reason,
    "compile": lambda: _missing("cutlass"),
    "lmdeploy": lambda: _missing("lmdeploy"),
    "mooncake": lambda: _missing("mooncake"),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reasons = {name: check() for name, check in REASONS.items()}
    for item in items:
        for name, reason in reasons.items():
            if reason and item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))
