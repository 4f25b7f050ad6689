"""The one schema of every file in perf/results/: checked when a file is written and when it is read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from .cases import FILES

ENVIRONMENT: tuple[str, ...] = (
    "device",
    "driver",
    "torch",
    "triton",
    "cutlass_dsl",
    "copy_tb_s",
    "matmul_tflop_s",
    "commit",
    "date",
)
ENVIRONMENT += ("command",)
ROW = ("op", "geometry", "workload", "state_dtype", "ours_us", "floor_us", "slab_copy_us", "spread", "peers")
NULLABLE = ("floor_us", "slab_copy_us")


class SchemaError(ValueError):
    """A result does not follow the schema; the text names the place."""


def _positive(where: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise SchemaError(f"{where}: got {value!r}; allowed: a positive number")


def validate(result: Any) -> None:
    """Raise SchemaError unless `result` is an environment and rows with all the fields, of the right kind."""
    if not isinstance(result, dict) or not isinstance(result.get("environment"), dict):
        raise SchemaError("result: allowed: an object with environment and rows")
    missing = [name for name in ENVIRONMENT if name not in result["environment"]]
    if missing:
        raise SchemaError(f"environment: lacks {', '.join(missing)}")
    rows = result.get("rows")
    if not isinstance(rows, list):
        raise SchemaError("rows: allowed: a list")
    seen: set[tuple[Any, ...]] = set()
    for number, row in enumerate(rows):
        where = f"rows[{number}]"
        if not isinstance(row, dict):
            raise SchemaError(f"{where}: allowed: an object")
        lacking = [name for name in ROW if name not in row]
        if lacking:
            raise SchemaError(f"{where}: lacks {', '.join(lacking)}")
        if row["op"] not in FILES:
            raise SchemaError(f"{where}.op: got {row['op']!r}; allowed: {', '.join(FILES)}")
        if row["state_dtype"] not in ("float32", "bfloat16"):
            raise SchemaError(f"{where}.state_dtype: got {row['state_dtype']!r}; allowed: float32, bfloat16")
        for name in ("ours_us", "floor_us", "slab_copy_us"):
            if not (name in NULLABLE and row[name] is None):
                _positive(f"{where}.{name}", row[name])
        if not isinstance(row["spread"], (int, float)) or row["spread"] < 0:
            raise SchemaError(f"{where}.spread: got {row['spread']!r}; allowed: a number from 0")
        if not isinstance(row["peers"], dict):
            raise SchemaError(f"{where}.peers: allowed: an object of microseconds by peer")
        for peer, value in row["peers"].items():
            _positive(f"{where}.peers.{peer}", value)
        key = identity(row)
        if key in seen:
            raise SchemaError(f"{where}: a second row of {key}")
        seen.add(key)


def identity(row: dict[str, Any]) -> tuple[Any, ...]:
    """What makes two rows the same case, across runs and commits."""
    return tuple(row.get(name) for name in ("op", "geometry", "workload", "state_dtype", "gates", "accepted"))


def load(path: Path) -> dict[str, Any]:
    """Read and validate a result file. Raises SchemaError naming the file."""
    try:
        result: dict[str, Any] = json.loads(path.read_text())
        validate(result)
    except ValueError as error:
        raise SchemaError(f"{path}: {error}") from error
    return result
