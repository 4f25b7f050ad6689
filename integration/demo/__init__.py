"""The main job on any machine: serve a seeded trace over the real pool and operators, and check every output.

`run_demo` is what `compact-state demo` runs. On a CPU the operators are the references, on an H200 the kernels.
"""

from __future__ import annotations

from .report import DemoMismatchError, DemoReport
from .run import run_demo

__all__ = ["DemoMismatchError", "DemoReport", "run_demo"]
