"""The logits that engines answered with, beside an evaluation of the same model by transformers in fp32."""

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


def run(
    rounds: dict[str, list[dict[str, Any]]],
    evaluate: Callable[[Sequence[int]], torch.Tensor],
    *,
    save: Callable[[dict[str, Any]], None],
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """By engine and group of prompts: answers, rms and largest difference of the logits that the engine listed.

    `rounds`: engine -> what `traffic.rounds` returned. Tokens that several engines answered are evaluated once.
    """
    result: dict[str, Any] = {}
    known: dict[tuple[int, ...], torch.Tensor] = {}
    for engine, some in rounds.items():
        errors: dict[str, list[float]] = {group: [] for group in GROUPS}
        counts = dict.fromkeys(GROUPS, 0)
        for answered in some:
            for prompt, (ids, top) in enumerate(zip(answered["ids"], answered["top"])):
                asked = traffic.asked(answered["tag"])[prompt]
                key = (*asked, *ids[:-1])
                if key not in known:
                    known[key] = evaluate(key)[len(asked) - 1 :]
                group = GROUPS[len(asked) > 1]
                counts[group] += 1
                for step, listed in enumerate(top):
                    errors[group] += [abs(value - float(known[key][step, token])) for token, value in listed]
            result[engine] = {
                group: {
                    "answers": counts[group],
                    "rms": round(math.sqrt(sum(e * e for e in found) / len(found)), 4),
                    "largest": round(max(found), 4),
                }
                for group, found in errors.items()
                if found
            }
            save(result)
            say(f"{engine} {answered['tag']}: {result[engine]}")
    return result
