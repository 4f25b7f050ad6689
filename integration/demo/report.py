"""The demo's result: numbers for people, a JSON file, and the error that a difference raises."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class DemoReport:
    """What one run did. Byte counts are of state payload, without alignment gaps."""

    seed: int
    device: str
    backend: str
    requests: int
    cancelled: int
    preemptions: int
    admissions_delayed: int
    steps: int
    prompt_tokens: int
    generated_tokens: int
    computed_tokens: int
    hits: int
    tokens_not_recomputed: int
    checkpoints_published: int
    checkpoints_skipped: int
    evictions: int
    steps_tracked_on_device: int
    slots: int
    slot_bytes: int
    copied_bytes: int
    copying_design_bytes: int
    peak_slots: int
    peak_slots_separate_pools: int
    peak_slots_without_sharing: int
    compared_tokens: int
    compared_checkpoints: int
    worst_rms_ratio: float
    allowed_rms_ratio: float
    serve_seconds: float
    check_seconds: float
    mismatches: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every output and checkpoint matched its recomputation."""
        return not self.mismatches

    def write_json(self, path: Path) -> None:
        """Writes all fields."""
        path.write_text(json.dumps({**asdict(self), "passed": self.passed}, indent=2) + "\n", encoding="utf-8")

    def print_table(self, console: Console) -> None:
        """Prints the short table."""
        table = Table(title="Served trace", show_header=False)
        table.add_column(style="bold")
        table.add_column(justify="right")
        rows = [
            ("device, backend", f"{self.device}, {self.backend}"),
            ("requests", f"{self.requests} ({self.cancelled} cancelled, {self.preemptions} preempted)"),
            ("tokens", f"{self.prompt_tokens:,} prompt + {self.generated_tokens:,} generated"),
            ("requests restored from a checkpoint", f"{self.hits}"),
            ("tokens not recomputed", f"{self.tokens_not_recomputed:,}"),
            ("checkpoints", f"{self.checkpoints_published} published, {self.evictions} evicted"),
            ("state bytes copied by this pool", f"{self.copied_bytes:,}"),
            ("state bytes the copying design would move", f"{self.copying_design_bytes:,}"),
            ("peak slots", f"{self.peak_slots} (separate pools: {self.peak_slots_separate_pools})"),
            ("compared with isolated recomputation", f"{self.compared_tokens:,} tokens"),
            ("checkpoints compared with it", f"{self.compared_checkpoints}"),
            ("worst difference", f"{self.worst_rms_ratio:.1e} (allowed {self.allowed_rms_ratio:.0e})"),
            ("time", f"{self.serve_seconds:.1f} s serving, {self.check_seconds:.1f} s checking"),
        ]
        for name, value in rows:
            table.add_row(name, value)
        console.print(table)


class Compared(Protocol):
    """A report that lists differences."""

    @property
    def mismatches(self) -> list[str]: ...


class DemoMismatchError(Exception):
    """Served outputs differ from the isolated recomputation. `report` has the numbers."""

    def __init__(self, report: Compared) -> None:
        self.report = report
        shown = "\n  ".join(report.mismatches[:8])
        super().__init__(f"{len(report.mismatches)} differences from the isolated recomputation:\n  {shown}")
