"""Adapters to public kernels. Each module has `version()` and builders that raise Unsupported where it has no kernel."""

from __future__ import annotations

import importlib
from types import ModuleType

NAMES = ("flashinfer", "fla", "cudnn", "lmdeploy", "flashkda")
MODULES = {
    "flashinfer": "flashinfer",
    "fla": "flash_linear_attention",
    "cudnn": "cudnn_frontend",
    "lmdeploy": "lmdeploy",
    "flashkda": "flash_kda",
}


def wanted(names: str) -> tuple[str, ...]:
    """Peers that "all", "none" or a comma-separated choice means. Raises ValueError for an unknown name."""
    chosen = NAMES if names == "all" else () if names == "none" else tuple(names.split(","))
    unknown = [name for name in chosen if name not in NAMES]
    if unknown:
        raise ValueError(f"--peers {','.join(unknown)}: allowed: all, none, {', '.join(NAMES)}")
    return chosen


def load(names: str = "all") -> tuple[dict[str, ModuleType], dict[str, str]]:
    """Adapters that work here, and for every name its version or why it is missing.

    `names`: "all", "none" or a comma-separated choice. Raises ValueError for an unknown name.
    """
    chosen = wanted(names)
    adapters: dict[str, ModuleType] = {}
    status: dict[str, str] = {}
    for name in NAMES:
        if name not in chosen:
            status[name] = "not asked for"
            continue
        try:
            adapter = importlib.import_module(f".{MODULES[name]}", __package__)
            status[name] = adapter.version()
        except Exception as error:  # a half-installed peer fails in many ways; each is reported, none is ours
            status[name] = f"missing: {type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
            continue
        adapters[name] = adapter
    return adapters, status
