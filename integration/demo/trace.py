"""A seeded trace: requests that share system prompts, follow-up turns, arrivals over time, cancellations."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class TraceRequest:
    """One request.

    Attributes:
        number: its place in the trace.
        arrival: the step at which it arrives; a follow-up waits for its parent's end as well.
        parent: the request whose prompt and answer its prompt begins with, or None.
        prefix: the system prompt (empty for a follow-up).
        tail: the tokens of its own.
        answer: tokens to generate.
        cancel_after: steps from arrival to its cancellation, or None.
    """

    number: int
    arrival: int
    parent: int | None
    prefix: tuple[int, ...]
    tail: tuple[int, ...]
    answer: int
    cancel_after: int | None


def make_trace(seed: int, requests: int, vocab: int, *, scale: float = 1.0) -> list[TraceRequest]:
    """`requests` requests over a handful of system prompts; one in four follows up, one in seven may be cancelled.

    `scale` multiplies the lengths of prompts.
    """
    rng = random.Random(seed)

    def tokens(low: int, high: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocab) for _ in range(max(1, round(scale * rng.randint(low, high)))))

    # The later prompts begin like the first one: prefixes that part in the middle.
    system = [tokens(130, 200)]
    system += [system[0][: round(scale * (64 * i + 40))] + tokens(30, 90) for i in range(2)]
    system += [tokens(30, 150) for _ in range(3)]
    trace: list[TraceRequest] = []
    arrival = 0
    for number in range(requests):
        arrival += rng.choice((0, 0, 0, 1, 1, 2))
        parent = rng.randrange(max(0, number - 20), number) if number and rng.random() < 0.25 else None
        if parent is not None and trace[parent].parent is not None:
            parent = None
        trace.append(
            TraceRequest(
                number=number,
                arrival=arrival,
                parent=parent,
                prefix=() if parent is not None else rng.choices(system, weights=(6, 3, 3, 2, 1, 1))[0],
                tail=tokens(1, 60),
                answer=rng.randint(3, 20),
                cancel_after=rng.randint(0, 14) if rng.random() < 0.15 else None,
            )
        )
    return trace
