"""Start-up hook: standard library only, and returns at once unless LMDEPLOY_ENABLE_COMPACT_STATE is true.

When on, a finder at the head of `sys.meta_path` waits for the modules named in TARGETS and hands each one, freshly
executed, to its patch. It imports neither lmdeploy nor torch: a process that never imports lmdeploy pays nothing more.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from . import envs

_ENGINE = "lmdeploy.pytorch"
# Module to patch -> the module of `integration.lmdeploy` that holds its patch.
TARGETS = {
    f"{_ENGINE}.envs": "process",
    f"{_ENGINE}.engine.engine": "engine",
    f"{_ENGINE}.engine.executor": "engine",
    f"{_ENGINE}.engine.executor.base": "cache",
    f"{_ENGINE}.engine.cache_engine.state": "cache",
    f"{_ENGINE}.engine.inputs_maker": "inputs",
    f"{_ENGINE}.engine.engine_loop": "ranges",
    f"{_ENGINE}.engine.model_agent.agent": "inputs",
    f"{_ENGINE}.paging.scheduler": "paging",
    f"{_ENGINE}.paging.prefill_scheduler": "paging",
    f"{_ENGINE}.paging.state_manager": "paging",
    f"{_ENGINE}.paging.block_trie.checkpoint_lifecycle": "paging",
    f"{_ENGINE}.paging.block_trie.trie": "paging",
    f"{_ENGINE}.model_inputs": "ids",
    f"{_ENGINE}.strategies.base.model_inputs": "ids",
    f"{_ENGINE}.strategies.ar.model_inputs": "ids",
    f"{_ENGINE}.strategies.ar.model_agent": "ranges",
    f"{_ENGINE}.strategies.ar.sampling": "steady",
    f"{_ENGINE}.strategies.ar.sequence": "tokens",
    f"{_ENGINE}.strategies.ar.step_inputs": "ids",
    f"{_ENGINE}.strategies.ar_spec.model_inputs": "ids",
    f"{_ENGINE}.strategies.ar_spec.step_inputs": "ids",
    f"{_ENGINE}.strategies.ar_spec.sequence": "drafts",
    f"{_ENGINE}.models.utils.cudagraph": "ids",
    f"{_ENGINE}.models.qwen3_5": "layer",
    f"{_ENGINE}.backends.cuda.op_backend": "ops",
    f"{_ENGINE}.backends.cuda.graph_runner.runner": "replay",
    f"{_ENGINE}.nn.gated_delta": "ops",
    f"{_ENGINE}.nn.linear.default": "layer",
    f"{_ENGINE}.configurations.qwen3_next": "ops",
}


class _PatchingLoader(Loader):
    """Runs the real loader, then the module's patch."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None:
            # The module keeps its real loader: nothing but the patch tells that this one was here.
            spec.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        package = __name__.rpartition(".")[0]
        apply = importlib.import_module(f"{package}.lmdeploy.apply")
        apply.apply(module, TARGETS[module.__name__])


class _Finder(MetaPathFinder):
    """Finds the target modules through the finders that stand behind it."""

    def __init__(self, refusal: Exception | None) -> None:
        self._refusal = refusal

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in TARGETS:
            return None
        if self._refusal is not None:
            raise self._refusal
        for finder in sys.meta_path:
            if isinstance(finder, _Finder):
                continue
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _PatchingLoader(spec.loader)
                return spec
        return None


def installed() -> bool:
    """Whether the finder stands in this process."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def _install(refusal: Exception | None = None) -> None:
    if not installed():
        sys.meta_path.insert(0, _Finder(refusal))


def install() -> None:
    """Turn the compact state pool on in this process and in its children, before lmdeploy is imported.

    For programs that cannot set the environment beforehand. Raises RuntimeError when a module that must be patched has
    been imported already: its names are in other modules' hands by then.
    """
    if installed():
        return
    early = sorted(name for name in TARGETS if name in sys.modules)
    if early:
        raise RuntimeError(
            f"compact-state must be installed before lmdeploy is imported; already imported: {', '.join(early)}. "
            f"Call compact_state.integration.install() first, or set {envs.ENABLE}=1 before Python starts."
        )
    os.environ[envs.ENABLE] = "1"
    _install()


def boot() -> None:
    """What the start-up hook runs. A misspelt switch fails where lmdeploy is imported, not in every Python process."""
    try:
        if not envs.enabled():
            return
    except ValueError as refusal:
        _install(refusal)
        return
    _install()
