"""Applies one module's patch, after proving that the module is the one the patch was written for."""

from __future__ import annotations

import importlib
from types import ModuleType

from .. import envs
from . import pins

MARK = "__compact_state__"
# Patches that make a decode step's host work shorter, and nothing else.
SHORT_STEPS = ("ranges", "replay", "steady", "tokens")


def patch_name(module_name: str) -> str:
    """The function that patches a module: `patch_` and the module's path below lmdeploy.pytorch."""
    return "patch_" + module_name.removeprefix("lmdeploy.pytorch.").replace(".", "_")


def apply(module: ModuleType, patch_module: str) -> None:
    """Check lmdeploy's version and the sources that the patch replaces or wraps, then patch the module once."""
    if getattr(module, MARK, False):
        return
    pins.check(module)
    package = __name__.rpartition(".")[0]
    short = envs.short_steps()
    if short:
        importlib.import_module(f"{package}.ranges").quiet(module)
    if short or patch_module not in SHORT_STEPS:
        patches = importlib.import_module(f"{package}.{patch_module}")
        getattr(patches, patch_name(module.__name__))(module)
    setattr(module, MARK, True)
