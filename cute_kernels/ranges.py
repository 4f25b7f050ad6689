"""NVTX ranges around public operators and pool steps; free when no profiler is attached."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

try:
    import nvtx
except ImportError:  # a serving process without the package runs the same code, unannotated
    nvtx = None


def annotated(function: F) -> F:
    """Decorate an operator so that it shows under its own name in a trace."""
    if nvtx is None:
        return function
    decorated: F = nvtx.annotate(function.__name__, domain="compact_state")(function)
    return decorated
