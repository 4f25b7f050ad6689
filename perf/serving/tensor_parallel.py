"""The ray executor on two GPUs: the switch reaches the workers, each rank has its pool, answers are those of one GPU."""

from __future__ import annotations

from typing import Any

from . import equality
from .fleet import Spec

ONE, TWO, LEGACY = "compact-tp1", "compact-tp2", "legacy-tp2"


def specs(model: str, extra: dict[str, Any] | None = None) -> list[Spec]:
    """Compact on one GPU in process; compact and lmdeploy's own engine on two through ray."""
    one = {**equality.SIZES, "enable_prefix_caching": True, **(extra or {})}
    two = {**one, "tp": 2, "distributed_executor_backend": "ray"}
    return [
        Spec("compact", model, one, name=ONE),
        Spec("compact", model, two, name=TWO),
        Spec("legacy", model, two, name=LEGACY),
    ]


def passed(found: dict[str, Any]) -> bool:
    """Whether what `equality.run` found of these engines says that compact on two GPUs is as it should be.

    The unpatched engine is there to compare with: how it answers a prompt of one token, or that it did not start in time,
    is no fault of ours.
    """
    needed = [found["workers"], found["hits"], found["mixed"], found["sleep"]]
    pair = found["pairs"].get(f"{ONE} / {TWO}")
    if pair is None or any(TWO not in some for some in needed):
        return False
    start, workers = found["start"][ONE], found["workers"][TWO]
    half = start["slot_bytes"] * start["slots"] // 2
    return (
        len({w["gpu"] for w in workers}) == 2
        and all(w["switch"] == "1" and w["pool"] == "CompactStateCacheEngine" for w in workers)
        and all(abs(w["state_bytes"] - half) * 100 < half for w in workers)
        and pair["passed"]
        and all(some["passed"] for name, some in found["longer"].items() if TWO in name)
        and all(some[TWO]["passed"] for some in needed[1:])
    )
