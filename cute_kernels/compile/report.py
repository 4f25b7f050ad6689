"""Resources of one compile, read from what ptxas says: registers, spills, local memory, serialised wgmma."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import CompileError

REMARKS = "COMPACT_STATE_COMPILE_REMARKS"  # set in build workers: makes `cute_compile` ask ptxas for its report


@dataclass(frozen=True)
class ResourceReport:
    """Per thread: registers, stack and spill bytes; per kernel: whether ptxas serialised its wgmma (remark C7512)."""

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    wgmma_serialized: bool

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


@contextmanager
def _captured_output() -> Iterator[Callable[[], str]]:
    """Collect what the compiler's native code writes to file descriptors 1 and 2. Use in single-threaded workers only."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(1), os.dup(2)]
    with tempfile.TemporaryFile(mode="w+", errors="replace") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)

        def text() -> str:
            sys.stdout.flush()
            sys.stderr.flush()
            file.seek(0)
            return file.read()

        try:
            yield text
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, descriptor in zip((1, 2), saved):
                os.dup2(descriptor, number)
                os.close(descriptor)


def parse_remarks(text: str) -> ResourceReport:
    """Read ptxas' remarks. Raises CompileError where they are missing: silence is not a pass."""
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", text)]
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text)
    if not registers or len(registers) != len(frames):
        raise CompileError(f"no resource remarks in the compiler's output: {text[-500:]!r}")
    return ResourceReport(
        registers=max(registers),
        stack_bytes=max(int(frame[0]) for frame in frames),
        spill_store_bytes=max(int(frame[1]) for frame in frames),
        spill_load_bytes=max(int(frame[2]) for frame in frames),
        wgmma_serialized="C7512" in text or "C7510" in text or "wgmma.mma_async instructions are serialized" in text,
    )


def compile_with_report(action: Callable[[], Any]) -> tuple[Any, ResourceReport, str]:
    """Run a compile with ptx remarks on; give its result, the report and the raw text."""
    os.environ[REMARKS] = "1"
    try:
        with _captured_output() as text:
            result = action()
            output = text()
    finally:
        del os.environ[REMARKS]
    return result, parse_remarks(output), output
