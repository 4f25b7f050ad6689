"""Every output and checkpoint of the served trace against an isolated recomputation that shares nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate

import torch

from ...cute_kernels.reference import live_window
from ...cute_kernels.reference.metrics import rms_ratio
from ...pool import IndexEntry, StatePool
from ...pool.prefix import TOKEN_BYTES
from .model import Batch, ToyModel
from .serve import Served, Server

#: Allowed RMS ratio. A wrong or stale state is off by tenths, another split of the same tokens by rounding alone.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


class Checker:
    """Recomputes sequences in a fresh pool, each in one piece, from no state. Requests run one by one."""

    def __init__(self, model: ToyModel) -> None:
        self.model = model
        self.allowed = TOLERANCE[model.config.dtype]
        self.worst = 0.0
        self.compared_tokens = 0
        self.mismatches: list[str] = []

    def recompute(self, *sequences: list[int]) -> tuple[torch.Tensor, StatePool]:
        """Hidden states of all tokens, packed, and the pool whose slot i holds the state after sequence i."""
        device, count = self.model.device, len(sequences)
        pool = StatePool(self.model.layout, count, device=device)

        def column(values: Iterable[int]) -> torch.Tensor:
            return torch.tensor(list(values), dtype=torch.int32, device=device)

        bounds = accumulate((len(tokens) for tokens in sequences), initial=0)
        batch = Batch(column([-1] * count), column(range(count)), column([0] * count), cu_seqlens=column(bounds))
        packed = torch.tensor([token for tokens in sequences for token in tokens], device=device)
        return self.model.forward(packed, pool, batch), pool

    def check_server(self, server: Server, advance: Callable[[int], None]) -> None:
        """Every request that computed anything, then every checkpoint still cached."""
        for served in server.served.values():
            self.check_request(served)
            advance(1)
        self.check_checkpoints(server.checkpoints(), server.pool)

    def check_request(self, served: Served) -> None:
        """Compares each stretch that was computed, and each generated token with the recomputed scores."""
        if not served.pieces:
            return
        number = served.request.number
        expected, _ = self.recompute(served.tokens)
        for start, hidden in served.pieces:
            end = start + len(hidden)
            self._compare(hidden, expected[start:end], f"request {number}, tokens {start} to {end - 1}")
            self.compared_tokens += len(hidden)
        if len(served.tokens) == served.prompt:
            return
        scores = self.model.logits(expected[served.prompt - 1 : -1])
        chosen = torch.tensor(served.tokens[served.prompt :], device=scores.device)
        shortfall = scores.max(-1).values - scores.gather(1, chosen[:, None])[:, 0]
        # A tie may fall either way: the chosen token's score may miss the maximum by what the hidden states may differ.
        if float(shortfall.max()) > 4 * self.allowed * float(scores.square().mean().sqrt()):
            self.mismatches.append(f"request {number}: a generated token is not the recomputed choice")

    def check_checkpoints(self, entries: list[IndexEntry], pool: StatePool) -> None:
        """The slot of each checkpoint holds exactly the state after the tokens that its key names."""
        if not entries:
            return
        _, expected = self.recompute(*(_tokens(entry) for entry in entries))
        device, slots = self.model.device, [pool.ledger.granted(entry.handle).slot for entry in entries]
        here = torch.tensor(slots, device=device)
        there = torch.arange(len(entries), device=device)
        positions = torch.tensor([entry.position for entry in entries], device=device)
        for layer in range(self.model.layout.num_layers):
            states = (pool.state_view(layer)[here], expected.state_view(layer))
            windows = (
                live_window(pool.conv_view(layer), here, positions),
                live_window(expected.conv_view(layer), there, positions),
            )
            for number, entry in enumerate(entries):
                name = f"checkpoint at {entry.position} in slot {slots[number]}, layer {layer}"
                self._compare(states[0][number], states[1][number], f"{name}, state")
                self._compare(windows[0][number], windows[1][number], f"{name}, window")

    def _compare(self, actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        ratio = rms_ratio(actual, expected)
        self.worst = max(self.worst, ratio)
        if not ratio <= self.allowed:
            self.mismatches.append(f"{what}: RMS ratio {ratio:.2e}, allowed {self.allowed:.0e}")


def _tokens(entry: IndexEntry) -> list[int]:
    """The tokens whose state a checkpoint holds."""
    text = entry.key.slice(0, entry.position)
    return [
        int.from_bytes(text[at : at + TOKEN_BYTES], "little", signed=True) for at in range(0, len(text), TOKEN_BYTES)
    ]
