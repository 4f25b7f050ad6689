"""Prompts of the flow's tests, what the flow must answer, and whether it holds anything."""

from __future__ import annotations

from lmd_flow import Flow, next_token


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(i * 7 + seed * 13 + i // 50) % 40 + 3 for i in range(length)]


def answer(tokens: list[int], count: int, epoch: int = 0) -> list[int]:
    context = list(tokens)
    for _ in range(count):
        context.append(next_token(tuple(context), epoch))
    return context[len(tokens) :]


def is_empty(flow: Flow) -> bool:
    """No request holds anything: every slot is free or an evictable checkpoint."""
    ledger = flow.ledger
    return ledger.available == ledger.num_slots and ledger.demand == 0 and not ledger.holders
