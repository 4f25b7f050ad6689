"""lmdeploy's profiler ranges are opened only while a profiler records: each takes 7 us, and a decode step has 15."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.autograd import profiler


def _of_closure(function: Any, kind: type) -> bool:
    """Whether a wrapper made by a decorator holds an object of this kind, or a method of one."""
    cells = (function.__closure__ or ()) if isinstance(function, FunctionType) else ()
    held = [cell.cell_contents for cell in cells]
    return any(isinstance(value, kind) or isinstance(getattr(value, "__self__", None), kind) for value in held)


def _recording() -> bool:
    # A torch that does not say so gets every range.
    return getattr(profiler, "_is_profiler_enabled", True)


def _unless_recorded(ranged: Any) -> Callable[..., Any]:
    bare = ranged.__wrapped__

    @functools.wraps(bare)
    def unrecorded(*args: Any, **kwargs: Any) -> Any:
        return (ranged if _recording() else bare)(*args, **kwargs)

    return unrecorded


def _record_function(name: str, args: str | None = None) -> Any:
    return profiler.record_function(name, args) if _recording() else contextlib.nullcontext()


def quiet(module: ModuleType) -> None:
    """Functions and methods of `module` under `record_function` open their range only while a profiler records."""
    classes = [
        value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__
    ]
    for owner in (module, *classes):
        for name, function in list(vars(owner).items()):
            inner = getattr(function, "__wrapped__", None)
            if _of_closure(function, profiler.record_function):
                setattr(owner, name, _unless_recorded(function))
            elif _of_closure(function, torch.inference_mode) and _of_closure(inner, profiler.record_function):
                setattr(owner, name, torch.inference_mode()(_unless_recorded(inner)))
    if getattr(module, "record_function", None) is profiler.record_function:
        module.record_function = _record_function  # type: ignore[attr-defined]


def _nothing_else(module: ModuleType) -> None:
    """The ranges are all that is patched here."""


patch_engine_engine_loop = patch_strategies_ar_model_agent = _nothing_else
