"""Two linear-attention layers on table rows, a trace of requests for them, and the outputs of a run without cache."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

from compact_state.cute_kernels import Checkpoints, gdn_decode, gdn_prefill, kda_decode, kda_prefill
from compact_state.cute_kernels.conv1d import causal_conv1d_decode, causal_conv1d_prefill
from compact_state.pool import LayerSpec, StateLayout, StatePool

HK, HV, SIZE, WIDTH = 2, 4, 128, 4
CHANNELS = (2 * HK + HV) * SIZE
VOCAB, WEIGHTS = 128, 8


class Layer:
    """Conv and delta rule on rows that a table gives for (weights, token): no output feeds another token's input."""

    def __init__(self, kind: str, device: torch.device, backend: str, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.kind, self.backend = kind, backend
        gates = HV if kind == "gdn" else HV * SIZE
        self.parts = [CHANNELS, gates, HV, -(gates + HV) % 8]
        self.rows = torch.randn(WEIGHTS * VOCAB, sum(self.parts), generator=rng).to(device, torch.bfloat16)
        self.weight = (0.5 * torch.randn(CHANNELS, WIDTH, generator=rng)).to(device, torch.bfloat16)
        self.A_log = (0.3 * torch.rand(HV, generator=rng)).to(device)
        # Heads that remember a few tokens to hundreds: a wrong state anywhere shows in the outputs.
        decays = torch.linspace(-6.0, -2.0, HV)
        self.dt_bias = (decays if kind == "gdn" else decays[:, None].repeat(1, SIZE)).to(device).contiguous()

    def __call__(
        self,
        index: torch.Tensor,
        windows: torch.Tensor,
        states: torch.Tensor,
        ids: tuple[torch.Tensor, ...],
        cu: torch.Tensor | None = None,
        checkpoints: Checkpoints | None = None,
    ) -> torch.Tensor:
        """`[T, HV * SIZE]` for the rows of `index`; `ids`: read_ids, write_ids, positions. `cu` None: one token each."""
        read, write, positions = ids
        x, gate, b, _ = torch.split(self.rows[index], self.parts, dim=-1)
        conv = (x, self.weight, windows, read, write, positions)
        if cu is None:
            mixed = causal_conv1d_decode(*conv, backend=self.backend)
        else:
            mixed = causal_conv1d_prefill(*conv, cu, checkpoints=checkpoints, backend=self.backend)
        q, k, v = (part.unflatten(-1, (-1, SIZE)) for part in torch.split(mixed, [HK * SIZE, HK * SIZE, HV * SIZE], -1))
        gate = gate if self.kind == "gdn" else gate.unflatten(-1, (HV, SIZE))
        rule = (q, k, v, gate, b, self.A_log, self.dt_bias, states, read, write)
        if cu is None:
            out = (gdn_decode if self.kind == "gdn" else kda_decode)(*rule, backend=self.backend)
        else:
            prefill = gdn_prefill if self.kind == "gdn" else kda_prefill
            out = prefill(*rule, cu, checkpoints=checkpoints, backend=self.backend)
        return out.flatten(1)


class Model:
    def __init__(self, device: torch.device, backend: str) -> None:
        self.device = device
        self.layers = [Layer(kind, device, backend, seed) for seed, kind in enumerate(("gdn", "kda"))]
        self.layout = StateLayout.of([LayerSpec(CHANNELS, HV, SIZE, SIZE, WIDTH, kind=x.kind) for x in self.layers])

    def rows(self, values: list[int]) -> torch.Tensor:
        """Table rows as int64: a look-up by int32 makes torch convert them first, with a copy kernel of its own."""
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def column(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def recompute(self, sequences: list[list[int]], pool: StatePool | None = None) -> list[torch.Tensor]:
        """Outputs a layer of whole sequences of table rows, from no state; states go to slot i of `pool` if given."""
        outputs: list[list[torch.Tensor]] = [[] for _ in self.layers]
        empty = StatePool(self.layout, 1, device=self.device, poison_on_free=True) if pool is None else pool
        for first in range(0, len(sequences), 256):
            part = sequences[first : first + 256]
            bounds = [0]
            for sequence in part:
                bounds.append(bounds[-1] + len(sequence))
            none = self.column([-1] * len(part))
            write = none if pool is None else self.column(list(range(first, first + len(part))))
            ids = (none, write, self.column([0] * len(part)))
            index = self.rows([row for sequence in part for row in sequence])
            for number, layer in enumerate(self.layers):
                views = (empty.conv_view(number), empty.state_view(number))
                outputs[number].append(layer(index, *views, ids, self.column(bounds)))
        return [torch.cat(parts) for parts in outputs]


class LateFence:
    """A CPU step is done at once; its fence passes some polls later, as a device's would."""

    def __init__(self, polls: int) -> None:
        self.polls = polls

    def passed(self) -> bool:
        self.polls -= 1
        return self.polls < 0

    def wait(self) -> None:
        self.polls = 0


@dataclass
class Job:
    """A request of the trace: all its tokens, generated ones included."""

    number: int
    tokens: list[int]
    prompt: int


@dataclass
class Run:
    """What one admission of a request computed: weights of every token of its state, and where outputs lie."""

    job: Job
    weights: list[int]
    pieces: list[tuple[int, int, int]] = field(default_factory=list)

    def rows(self, count: int | None = None) -> list[int]:
        return [w * VOCAB + token for w, token in zip(self.weights[:count], self.job.tokens)]


def make_trace(count: int, rng: random.Random) -> list[Job]:
    def tokens(low: int, high: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(rng.randint(low, high))]

    jobs: list[Job] = []
    system = [tokens(8, 70) for _ in range(6)]
    for number in range(count):
        if number % 40 == 39:
            system[rng.randrange(6)] = tokens(8, 70)
        kind = rng.random()
        prefix = [] if kind < 0.15 else rng.choice(system)
        if kind > 0.75 and jobs:
            prefix = rng.choice(jobs[-16:]).tokens  # a follow-up, or the same prompt again
        prompt = (prefix + tokens(0, 30))[:96] or tokens(1, 1)
        jobs.append(Job(number, prompt + tokens(0, 8), len(prompt)))
    return jobs
