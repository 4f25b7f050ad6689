"""What engines answered, beside an evaluation of the same model by transformers in fp32: their logits, and every token."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import traffic

# Prompts of one token are told apart: 0.18.0 gives them a wrong conv window.
GROUPS = ("one token", "longer")


def evaluation(model: str) -> Callable[[Sequence[int]], torch.Tensor]:
    """Logits `[T, V]` fp32 for tokens, on the GPU where there is one."""
    from transformers import Qwen3_5ForConditionalGeneration

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False
    network = Qwen3_5ForConditionalGeneration.from_pretrained(model, dtype=torch.float32).to(device).eval()

    @torch.inference_mode()
    def evaluate(tokens: Sequence[int]) -> torch.Tensor:
        logits: torch.Tensor = network(torch.tensor([list(tokens)], device=device)).logits[0]
        return logits.float().cpu()

    return evaluate


class _Group:
    """What was found of one engine's answers to some of its prompts."""

    def __init__(self) -> None:
        self.answers = self.tokens = self.others = 0
        self.behind, self.parted = 0.0, []  # type: float, list[float]
        self.errors: list[float] = []

    def take(self, logits: torch.Tensor, ids: Sequence[int], top: Sequence[Sequence[Any]]) -> None:
        """One answer: how far its tokens are behind the largest logits, and the logits that the engine listed."""
        behind = logits.max(-1).values - logits[torch.arange(len(ids)), torch.tensor(list(ids))]
        self.answers, self.tokens = self.answers + 1, self.tokens + len(ids)
        self.others += int((behind > 0).sum())
        self.behind = max(self.behind, float(behind.max()))
        for step, listed in enumerate(top):
            self.errors += [abs(value - float(logits[step, token])) for token, value in listed]

    def figures(self) -> dict[str, Any]:
        errors = self.errors
        found: dict[str, Any] = {"answers": self.answers, "tokens": self.tokens, "others": self.others}
        found["behind"] = round(self.behind, 4)
        if errors:
            found |= {"rms": round(math.sqrt(sum(e * e for e in errors) / len(errors)), 4)}
            found |= {"largest": round(max(errors), 4)}
        if self.parted:
            found |= {"parted": len(self.parted), "gap": round(max(self.parted), 4)}
        return found


def run(
    rounds: dict[str, list[dict[str, Any]]],
    evaluate: Callable[[Sequence[int]], torch.Tensor],
    *,
    mixed: dict[str, list[tuple[int, list[int], list[Any]]]] | None = None,
    save: Callable[[dict[str, Any]], None],
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """By engine and group of prompts: `answers`, their `tokens`, how many `others` than fp32 would answer, the furthest `behind`.

    `rounds`: engine -> what `traffic.rounds` returned; `rms` and `largest` are of the logits that it listed. `mixed`: engine ->
    `answers` of `traffic.mixed`, of which so many `parted` from the cold ones of `rounds`, at two tokens whose logits are `gap`
    apart at most. Tokens that several engines answered are evaluated once.
    """
    result: dict[str, Any] = {}
    known: dict[tuple[int, ...], torch.Tensor] = {}

    def logits(asked: Sequence[int], ids: Sequence[int]) -> torch.Tensor:
        key = (*asked, *ids[:-1])
        if key not in known:
            known[key] = evaluate(key)[len(asked) - 1 :]
        return known[key]

    for engine, some in rounds.items():
        groups: dict[str, _Group] = {}

        def group(name: str, asked: Sequence[int], groups: dict[str, _Group] = groups) -> _Group:
            return groups.setdefault(name + GROUPS[len(asked) > 1], _Group())

        for answered in some:
            for asked, ids, top in zip(traffic.asked(answered["tag"]), answered["ids"], answered["top"]):
                group("", asked).take(logits(asked, ids), ids, top)
        for probe, ids, top in (mixed or {}).get(engine, []):
            asked, cold = traffic.probes()[probe], some[0]["ids"][probe]
            found, judged = group("mixed load, ", asked), logits(asked, ids)
            found.take(judged, ids, top)
            step = next((n for n, (a, b) in enumerate(zip(ids, cold)) if a != b), None)
            if step is not None:
                found.parted.append(abs(float(judged[step, ids[step]] - judged[step, cold[step]])))
        result[engine] = {name: found.figures() for name, found in groups.items()}
        save(result)
        say(f"{engine}: {result[engine]}")
    return result
