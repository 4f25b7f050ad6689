"""Whether two engines answer alike: ids where logits are not near-tied, logits within the error of bf16."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .fleet import ENGINE, Fleet, Spec

# One bf16 evaluation of the four-layer shapes (deviation of a logit 4) by transformers was measured against fp32 over 2200
# positions: rms error 0.044, largest 0.25. Two evaluations may differ by twice that.
LOGIT_TOLERANCE = 0.5
RMS_TOLERANCE = 0.09
SIZES = {"num_gpu_blocks": 1024, "max_batch_size": 32, "max_prefill_token_num": 2048, "prefix_cache_state_budget": 24}


def margin(step: list[tuple[int, float]]) -> float:
    """How far the likeliest token of a step is ahead of the second."""
    return step[0][1] - step[1][1]


def parting(ids: list[int], other: list[int], top: list[list[tuple[int, float]]]) -> dict[str, Any] | None:
    """Where two answers to one prompt part, and by what margin there; None if they do not."""
    for step, (mine, theirs) in enumerate(zip(ids, other)):
        if mine != theirs:
            return {"step": step, "margin": round(margin(top[step]), 4)}
    return None


def compare(mine: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, Any]:
    """Every answer of two `rounds`, up to and with the step where they part: logits of the tokens that both list."""
    squares, count, largest, equal, answers = 0.0, 0, 0.0, 0, 0
    partings = []
    for a, b in zip(mine, theirs):
        for prompt, (ids, other) in enumerate(zip(a["ids"], b["ids"])):
            answers += 1
            found = parting(ids, other, a["top"][prompt])
            equal += found is None
            if found is not None:
                partings.append({"round": a["tag"], "prompt": prompt, **found})
            shared = len(ids) if found is None else found["step"] + 1
            for left, right in zip(a["top"][prompt][:shared], b["top"][prompt][:shared]):
                known = dict(map(tuple, right))
                for token, logit in left:
                    if token in known:
                        difference = abs(logit - known[token])
                        squares, count, largest = squares + difference**2, count + 1, max(largest, difference)
    rms = math.sqrt(squares / count) if count else 0.0
    widest = max((p["margin"] for p in partings), default=0.0)
    return {
        "equal": equal,
        "answers": answers,
        "rms": round(rms, 4),
        "largest": round(largest, 4),
        "widest_margin": widest,
        "partings": partings,
        "passed": rms <= RMS_TOLERANCE and largest <= LOGIT_TOLERANCE and widest <= LOGIT_TOLERANCE,
    }


def hits(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The second round of an engine, which hits, against its first, which is cold."""
    cold, warm = rounds[0], rounds[1]
    return {"cached": warm["cached"], **compare([cold], [warm])}


def finished(mixed: dict[str, Any], rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The answers of a mixed load to the probes, against the same engine's cold ones."""
    cold = rounds[0]
    found = [(ids, parting(cold["ids"][probe], ids, cold["top"][probe])) for probe, ids in mixed["answers"]]
    margins = [where["margin"] for _, where in found if where is not None]
    widest = max(margins, default=0.0)
    return {
        **{name: value for name, value in mixed.items() if name != "answers"},
        "answers": len(found),
        "equal": len(found) - len(margins),
        "widest_margin": widest,
        "passed": widest <= LOGIT_TOLERANCE and not (mixed["ledger"] or {}).get("holders"),
    }


def specs(model: str, extra: dict[str, Any] | None = None) -> list[Spec]:
    """Legacy and compact, with CUDA graphs and eager."""
    settings = {**SIZES, "enable_prefix_caching": True, **(extra or {})}
    return [
        Spec(variant, model, {**settings, "eager_mode": eager}, name=f"{variant}-{'eager' if eager else 'graph'}")
        for variant in ("compact", "legacy")
        for eager in (False, True)
    ]


def run(
    model: str,
    *,
    engines: list[Spec],
    logs: Path,
    new: int,
    mixed: int,
    save: Callable[[dict[str, Any]], None],
    limit_s: float = 300.0,
    say: Callable[[str], None] = print,
    engine: list[str] = ENGINE,
) -> dict[str, Any]:
    """Rounds on every engine and each pair compared; then a mixed load, sleep and the rounds once more."""
    result: dict[str, Any] = {"start": {}, "failed": {}, "pairs": {}, "hits": {}, "mixed": {}, "sleep": {}}
    with Fleet(engines, logs, limit_s=limit_s, engine=engine) as fleet:
        result["start"] = {label: running.ready for label, running in fleet.engines.items()}
        result["failed"] = fleet.failed
        say(f"{fleet.start_s} s: {result['start']} {result['failed']}")
        rounds = fleet.ask_all("rounds", new=new)
        labels = list(rounds)
        for i, mine in enumerate(labels):
            result["hits"][mine] = hits(rounds[mine])
            for theirs in labels[i + 1 :]:
                result["pairs"][f"{mine} / {theirs}"] = compare(rounds[mine], rounds[theirs])
        _tell(result, ("pairs", "hits"), save, say)
        if not mixed:
            return result
        seen = fleet.ask_all("mixed", count=mixed, new=new, seed=5)
        result["mixed"] = {label: finished(some, rounds[label]) for label, some in seen.items()}
        _tell(result, ("mixed",), save, say)
        for label in [label for label in fleet.engines if fleet[label].spec.variant != "compact"]:
            fleet.drop(label, "only compact is put to sleep")
        slept, after = fleet.ask_all("sleep"), fleet.ask_all("rounds", new=new)
        for label, again in after.items():
            # Nothing may be found that the memory before held: the first round is cold again.
            forgotten = again[0]["cached"] == rounds[label][0]["cached"]
            result["sleep"][label] = {**slept[label], "forgotten": forgotten, **compare(rounds[label], again)}
        _tell(result, ("sleep",), save, say)
    return result


def _tell(
    result: dict[str, Any],
    what: tuple[str, ...],
    save: Callable[[dict[str, Any]], None],
    say: Callable[[str], None],
) -> None:
    save(result)
    for kind in what:
        for name, found in result[kind].items():
            say(f"{kind} {name}: { ({k: v for k, v in found.items() if k != 'partings'}) }")
