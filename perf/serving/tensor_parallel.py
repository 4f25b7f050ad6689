"""The ray executor on two GPUs: the switch reaches the workers, each rank has its pool, answers are those of one GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import equality
from .fleet import ENGINE, EngineError, Fleet, Spec


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
    mixed: int,
    limit_s: float,
    save: Callable[[dict[str, Any]], None],
    engine: list[str] = ENGINE,
) -> dict[str, Any]:
    """Workers as they see themselves; one GPU against two, hits against cold prompts; two under a mixed load and asleep.

    `limit_s` is what an engine may take to start. Raises EngineError when an engine fails; what was found is saved by then.
    """
    result: dict[str, Any] = {"passed": False}
    with Fleet(specs(model), logs, limit_s=limit_s, engine=engine) as fleet:
        result |= {"start": {label: running.ready for label, running in fleet.engines.items()}, "failed": fleet.failed}
        save(result)
        if fleet.failed:
            raise EngineError("\n".join(fleet.failed.values()))
        one, two = fleet["compact-tp1"], fleet["compact-tp2"]
        half = one.ready["slot_bytes"] * one.ready["slots"] // 2
        workers = result["workers"] = two.ask("workers")
        save(result)
        alone, split = one.ask("rounds", new=new), two.ask("rounds", new=new)
        for name, answers in (("tp1", alone), ("tp2", split)):
            (logs / f"rounds-{name}.json").write_text(json.dumps(answers))
        result |= {"tp1 / tp2": equality.compare(alone, split), "hits": equality.hits(split)}
        save(result)
        result["mixed"] = equality.finished(two.ask("mixed", count=mixed, new=new, seed=5), split)
        save(result)
        result["sleep"] = equality.slept(two, split, new)
    result["passed"] = (
        len({w["gpu"] for w in workers}) == 2
        and all(w["switch"] == "1" and w["pool"] == "CompactStateCacheEngine" for w in workers)
        and all(abs(w["state_bytes"] - half) * 100 < half for w in workers)
        and all(result[name]["passed"] for name in ("tp1 / tp2", "hits", "mixed", "sleep"))
    )
    save(result)
    return result
