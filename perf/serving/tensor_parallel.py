"""The ray executor on two GPUs: the switch reaches the workers, each rank has its pool, answers are those of one GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import equality
from .fleet import ENGINE, Fleet, Spec


def specs(model: str) -> list[Spec]:
    """Compact on one GPU in process, and on two through ray."""
    one = {**equality.SIZES, "enable_prefix_caching": True}
    two = {**one, "tp": 2, "distributed_executor_backend": "ray"}
    return [Spec("compact", model, one, name="compact-tp1"), Spec("compact", model, two, name="compact-tp2")]


def run(
    model: str,
    *,
    logs: Path,
    new: int,
    limit_s: float,
    save: Callable[[dict[str, Any]], None],
    engine: list[str] = ENGINE,
) -> dict[str, Any]:
    """Workers as they see themselves; answers of one GPU against two, hits against cold prompts."""
    result: dict[str, Any] = {}
    with Fleet(specs(model), logs, limit_s=limit_s, engine=engine) as fleet:
        one, two = fleet["compact-tp1"], fleet["compact-tp2"]
        result |= {"start": {"tp1": one.ready, "tp2": two.ready}, "workers": two.ask("workers")}
        save(result)
        alone, split = one.ask("rounds", new=new), two.ask("rounds", new=new)
        result["tp1 / tp2"] = equality.compare(alone, split)
        result["hits"] = equality.hits(split)
        result["repeats"] = equality.compare(split, two.ask("rounds", new=new))
        save(result)
    workers = result["workers"]
    half = one.ready["slot_bytes"] * one.ready["slots"] // 2
    result["passed"] = (
        len(workers) == 2
        and all(w["switch"] == "1" and w["pool"] == "CompactStateCacheEngine" for w in workers)
        and all(abs(w["state_bytes"] - half) * 100 < half for w in workers)
        and result["tp1 / tp2"]["passed"]
    )
    save(result)
    return result
