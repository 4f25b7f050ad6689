"""Requests and their clocks: prompts as token ids, sent to a running lmdeploy engine from its own event loop."""

from __future__ import annotations

import asyncio
import functools
import gc
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

# Below are the tokenizer's and the model's special ids, above is the end of the smallest vocabulary.
TOKENS = range(6, 480)
GROUPS = 4
TOP = 16


def draw(length: int, seed: int) -> list[int]:
    """Random token ids."""
    source = random.Random(seed)
    return [source.choice(TOKENS) for _ in range(length)]


def probes() -> list[list[int]]:
    """One token, less than a conv window, less than a block, beyond an export, shared beginnings, beyond one forward."""
    shared = draw(600, 1)
    alone = [draw(length, length) for length in (1, 3, 70, 700)]
    return [*alone, *(shared + draw(length, length) for length in (100, 41, 2)), draw(2500, 9)]


def asked(tag: str) -> list[list[int]]:
    """The prompts of a round of `rounds`."""
    grown = tag == "grown"
    return [ids + draw(30, 50 + i) if grown else ids for i, ids in enumerate(probes())]


def shared_prompts(requests: int, length: int, seed: int, groups: int = GROUPS) -> list[list[int]]:
    """Prompts whose first half is one of so many beginnings that all seeds share."""
    half = length // 2
    beginnings = [draw(half, 7000 + (length << 12) + group) for group in range(groups)]
    return [beginnings[i % groups] + draw(length - half, (seed << 20) + i) for i in range(requests)]


class StepClock:
    """When the engine's loop made tokens: lmdeploy hands them to consumers of the same process in bursts of many steps.

    `steps`: times of the forwards that made tokens; `first`, `last`: those of each session (seconds, performance counter).
    """

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.first: dict[int, float] = {}
        self.last: dict[int, float] = {}

    def install(self) -> None:
        """Note the time after each forward's outputs are made."""
        from lmdeploy.pytorch.engine.engine_loop import EngineLoop

        make = EngineLoop._make_infer_outputs

        @functools.wraps(make)
        def timed(loop: Any, *args: Any, **kwargs: Any) -> Any:
            outputs = make(loop, *args, **kwargs)
            now = time.perf_counter()
            if outputs:
                self.steps.append(now)
            for session in outputs:
                self.first.setdefault(session, now)
                self.last[session] = now
            return outputs

        EngineLoop._make_infer_outputs = timed

    def clear(self) -> None:
        """Forget what was noted."""
        self.steps.clear()
        self.first.clear()
        self.last.clear()


@dataclass
class Answer:
    """What came back for one request; `sent` in seconds of the performance counter."""

    session: int
    sent: float = 0.0
    ids: list[int] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    cached: int = 0
    status: str = ""


async def ask(engine: Any, session: int, ids: Sequence[int], new: int, top: int | None = None) -> Answer:
    """Send one request for `new` greedy tokens; `top` asks for that many raw logits a step."""
    from lmdeploy import GenerationConfig

    config = GenerationConfig(max_new_tokens=new, do_sample=False, top_k=1, ignore_eos=True, logprobs=top)
    answer = Answer(session, sent=time.perf_counter())
    async for out in engine.create_instance().async_stream_infer(session, list(ids), gen_config=config):
        answer.ids += out.token_ids
        if out.logprobs:
            answer.top += [
                sorted(((int(t), round(float(v), 4)) for t, v in step.items()), key=lambda pair: -pair[1])
                for step in out.logprobs
            ]
        if out.req_metrics is not None:
            answer.cached = int(out.req_metrics.cached_tokens)
        answer.status = out.status.name
    return answer


class Pauses:
    """Time that Python's garbage collector took while in the block."""

    def __enter__(self) -> Pauses:
        self.longest = self.total = self._began = 0.0
        gc.callbacks.append(self._note)
        return self

    def _note(self, phase: str, info: dict[str, int]) -> None:
        now = time.perf_counter()
        if phase == "start":
            self._began = now
        else:
            self.total += now - self._began
            self.longest = max(self.longest, now - self._began)

    def __exit__(self, *exception: object) -> None:
        gc.callbacks.remove(self._note)


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the sorted values lie; 0 for none."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] if values else 0.0


def figures(answers: Sequence[Answer], clock: StepClock, pauses: Pauses) -> dict[str, Any]:
    """One trial in numbers. Decode steps are timed from the last first token of the batch on."""
    began, ended = min(a.sent for a in answers), max(clock.last[a.session] for a in answers)
    first = [clock.first[a.session] - a.sent for a in answers]
    per_token = [(clock.last[a.session] - clock.first[a.session]) / (len(a.ids) - 1) for a in answers if len(a.ids) > 1]
    settled = max(clock.first[a.session] for a in answers)
    steps = [1e3 * (b - a) for a, b in itertools.pairwise(clock.steps) if a >= settled]
    tokens = sum(len(a.ids) for a in answers)
    return {
        "seconds": round(ended - began, 4),
        "output_tok_s": round(tokens / (ended - began), 1),
        "ttft_ms": round(1e3 * statistics.median(first), 2),
        "ttft_last_ms": round(1e3 * max(first), 2),
        "tpot_ms": round(1e3 * statistics.median(per_token), 4) if per_token else None,
        "step_ms": round(statistics.median(steps), 4) if steps else None,
        "step_p99_ms": round(quantile(steps, 0.99), 3) if steps else None,
        "step_max_ms": round(max(steps), 3) if steps else None,
        "gc_ms": round(1e3 * pauses.total, 2),
        "gc_longest_ms": round(1e3 * pauses.longest, 2),
        "cached_tokens": sum(a.cached for a in answers),
        "tokens": tokens,
    }


async def batch(
    engine: Any, clock: StepClock, session: int, prompts: Sequence[Sequence[int]], new: int, turns: int = 1
) -> dict[str, Any]:
    """All prompts at once; in each further turn all that was said, and as many new tokens as the first prompt has."""
    clock.clear()
    said, answers = [list(ids) for ids in prompts], []
    with Pauses() as pauses:
        for turn in range(turns):
            first = session + turn * len(said)
            some = await asyncio.gather(*(ask(engine, first + i, ids, new) for i, ids in enumerate(said)))
            answers += some
            said = [
                ids + answer.ids + draw(len(begun), first + i)
                for i, (ids, answer, begun) in enumerate(zip(said, some, prompts))
            ]
    return figures(answers, clock, pauses)


async def rounds(engine: Any, session: int, new: int) -> list[dict[str, Any]]:
    """Greedy answers to the probes with logits: alone, once more, all at once, and grown by 30 tokens."""

    async def together(prompts: Sequence[Sequence[int]], first: int) -> list[Answer]:
        return await asyncio.gather(*(ask(engine, first + i, ids, new, TOP) for i, ids in enumerate(prompts)))

    async def alone(first: int) -> list[Answer]:
        return [await ask(engine, first + i, ids, new, TOP) for i, ids in enumerate(asked("solo"))]

    answers = {
        "solo": await alone(session),
        "again": await alone(session + 100),
        "batch": await together(asked("batch"), session + 200),
        "grown": await together(asked("grown"), session + 300),
    }
    return [
        {"tag": tag, "ids": [a.ids for a in some], "top": [a.top for a in some], "cached": [a.cached for a in some]}
        for tag, some in answers.items()
    ]


async def mixed(engine: Any, session: int, count: int, new: int, seed: int) -> dict[str, Any]:
    """`count` requests of mixed lengths within a second, every third cancelled at a random moment.

    Half of the prompts are the probes: `answers` holds (probe, ids, logits) of each that was let finish.
    """
    source, known = random.Random(seed), probes()

    async def one(i: int) -> tuple[int, bool, Answer]:
        probe = i % len(known) if i % 2 else -1
        ids = known[probe] if probe >= 0 else draw(source.randrange(1, 2000), seed * 1000 + i)
        length = new if probe >= 0 else source.randrange(1, 2 * new)
        cancelled = i % 3 == 2
        await asyncio.sleep(source.random())
        task = asyncio.create_task(ask(engine, session + i, ids, length, TOP if probe >= 0 else None))
        if cancelled:
            await asyncio.sleep(0.3 * source.random())
            await engine.create_instance().async_cancel(session + i)
        answer = await task
        if not cancelled and len(answer.ids) != length:
            raise AssertionError(f"request {i}: {len(answer.ids)} of {length} tokens, {answer.status}")
        return probe, cancelled, answer

    done = await asyncio.gather(*(one(i) for i in range(count)))
    return {
        "requests": count,
        "cancelled": sum(cancelled for _, cancelled, _ in done),
        "cut_short": sum(cancelled and a.status == "CANCEL" for _, cancelled, a in done),
        "hits": sum(a.cached > 0 for _, _, a in done),
        "answers": [(probe, a.ids, a.top) for probe, cancelled, a in done if probe >= 0 and not cancelled],
    }
