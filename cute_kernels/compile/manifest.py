"""Every specialisation that ships: drives the ahead-of-time build, the compile gate and warm-up."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ResourceBudget:
    """What a specialisation may use; the compile gate fails above it. Spills and local memory are never allowed."""

    max_registers: int  # per thread at launch, as ptxas reports it
    max_shared_bytes: int = 232_448  # the most one block can have on sm_90


@dataclass(frozen=True)
class Entry:
    """One shipped specialisation: the kernel file, its key and its budget."""

    kernel_file: str
    key: Any
    budget: ResourceBudget


def manifest() -> list[Entry]:
    """What every module of `configs` lists in its `shipped()`; each symbol once."""
    from .. import configs

    entries: list[Entry] = []
    for family in sorted(module.name for module in pkgutil.iter_modules(configs.__path__)):
        module = importlib.import_module(f"..configs.{family}", __package__)
        entries += module.shipped() if hasattr(module, "shipped") else []
    symbols = [entry.key.symbol() for entry in entries]
    duplicates = {symbol for symbol in symbols if symbols.count(symbol) > 1}
    if duplicates:
        raise AssertionError(f"two keys share a symbol: {sorted(duplicates)}")
    return entries
