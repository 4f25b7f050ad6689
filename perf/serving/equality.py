"""Whether two engines answer alike: ids where logits are not near-tied, logits within the error of bf16."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .fleet import ENGINE, Fleet, Running, Spec

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


def longer(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`rounds` without the prompt of one token and what grew from it, to which 0.18.0 gives a wrong conv window."""
    return [{"tag": a["tag"], **{name: a[name][1:] for name in ("ids", "top", "cached")}} for a in rounds]


def hits(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The second round of an engine, which hits, against its first, which is cold."""
    cold, warm = rounds[0], rounds[1]
    return {"cached": warm["cached"], **compare([cold], [warm])}


def finished(mixed: dict[str, Any], rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The answers of a mixed load to the probes, against the same engine's cold ones."""
    cold = rounds[0]
    found = [parting(cold["ids"][probe], ids, cold["top"][probe]) for probe, ids, _ in mixed["answers"]]
    margins = [where["margin"] for where in found if where is not None]
    widest = max(margins, default=0.0)
    return {
        **{name: value for name, value in mixed.items() if name != "answers"},
        "answers": len(found),
        "equal": len(found) - len(margins),
        "widest_margin": widest,
        "passed": widest <= LOGIT_TOLERANCE and not (mixed["ledger"] or {}).get("holders"),
    }


def slept(running: Running, first: list[dict[str, Any]], new: int) -> dict[str, Any]:
    """An engine sleeps and wakes up, and is asked its first rounds once more."""
    times, again = running.ask("sleep"), running.ask("rounds", new=new)
    # Nothing may be found that the memory before held: the first round is cold again.
    forgotten = again[0]["cached"] == first[0]["cached"]
    found = compare(first, again)
    return {**times, "forgotten": forgotten, **found, "passed": found["passed"] and forgotten}


def specs(model: str, extra: dict[str, Any] | None = None) -> list[Spec]:
    """Legacy and compact, with CUDA graphs and eager; compact with piecewise graphs, and with whole decode steps."""
    settings = {**SIZES, "enable_prefix_caching": True, **(extra or {})}
    engines = [
        Spec(variant, model, {**settings, "eager_mode": eager}, name=f"{variant}-{'eager' if eager else 'graph'}")
        for variant in ("compact", "legacy")
        for eager in (False, True)
    ]
    graphs = {**settings, "eager_mode": False}
    piecewise = {**graphs, "piecewise_cudagraph_max_tokens": SIZES["max_prefill_token_num"]}
    return [
        *engines,
        Spec("compact", model, graphs, {"LMDEPLOY_COMPACT_SHORT_STEPS": "0"}, name="compact-whole-steps"),
        Spec("compact", model, piecewise, name="compact-piecewise"),
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
    """Rounds on every engine, compared with the others'; a mixed load; compact sleeps, and answers the rounds once more.

    Each engine is asked as soon as it serves, by a thread of its own, ray's about their workers too. `limit_s` is what an
    engine may take to start. `logs/rounds-*.json` and `logs/mixed-*.json` keep the answers, for `judge`.
    """
    result: dict[str, Any] = {
        "start": {},
        "failed": {},
        "pairs": {},
        "longer": {},
        "hits": {},
        "mixed": {},
        "sleep": {},
        "workers": {},
    }
    rounds: dict[str, list[dict[str, Any]]] = {}
    order = [spec.label for spec in engines]
    variants = {spec.label: spec.variant for spec in engines}
    lock = threading.Lock()

    def tell(kind: str, name: str, found: Any) -> None:
        result[kind][name] = found
        save(result)
        shown = {k: v for k, v in found.items() if k != "partings"} if isinstance(found, dict) else found
        say(f"{kind} {name}: {shown}")

    def examine(running: Running) -> None:
        label = running.spec.label
        with lock:
            tell("start", label, running.ready)
        if running.spec.settings.get("distributed_executor_backend") == "ray":
            seen = running.ask("workers")
            with lock:
                tell("workers", label, seen)
        first = running.ask("rounds", new=new)
        (logs / f"rounds-{label}.json").write_text(json.dumps(first))
        with lock:
            rounds[label] = first
            tell("hits", label, hits(first))
            for other in rounds.keys() - {label}:
                mine, theirs = sorted((label, other), key=order.index)
                tell("pairs", f"{mine} / {theirs}", compare(rounds[mine], rounds[theirs]))
                if "legacy" in (variants[mine], variants[theirs]):
                    tell("longer", f"{mine} / {theirs}", compare(longer(rounds[mine]), longer(rounds[theirs])))
        if mixed:
            loaded = running.ask("mixed", count=mixed, new=new, seed=5)
            (logs / f"mixed-{label}.json").write_text(json.dumps(loaded["answers"]))
            with lock:
                tell("mixed", label, finished(loaded, first))
        if mixed and running.spec.variant == "compact":
            found = slept(running, first, new)
            with lock:
                tell("sleep", label, found)

    with Fleet(engines, logs, limit_s=limit_s, engine=engine, wait=False) as fleet:
        fleet.each(examine)
        result["failed"] = fleet.failed
    for label, why in result["failed"].items():
        say(f"failed {label}: {why}")
    save(result)
    return result
