"""Tensors of one case: pools shared by all cases, slot ids that rotate, packed projection rows."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ..cute_kernels.checkpoints import Checkpoints
from .cases import Workload
from .geometries import CONV_WIDTH, HEAD_DIM, Geometry

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
STATE_SCALE = 0.1
SEED = 20_240_611
KEPT = 8  # shared inputs of one geometry take up to a few gigabytes
Made = TypeVar("Made")


class Workspace:
    """Device memory that outlives a case: one buffer of random states a dtype, and the last few inputs that cases share.

    shared_rows: token rows that a geometry's prefill inputs have at least, so that its workloads can share them. gate_sets:
    by geometry the KDA gate sets to make together.
    """

    def __init__(
        self,
        device: torch.device,
        pool_bytes: int,
        shared_rows: int = 0,
        gate_sets: Mapping[str, Sequence[str | None]] | None = None,
    ) -> None:
        self.device = device
        self.pool_bytes = pool_bytes
        self.shared_rows = shared_rows
        self.gate_sets = gate_sets or {}
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()
        self.generator = torch.Generator(device=device).manual_seed(SEED)
        self._buffers: dict[torch.dtype, torch.Tensor] = {}

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Standard normal values on the device."""
        return torch.empty(*shape, dtype=dtype, device=self.device).normal_(generator=self.generator)

    def pool(self, dtype: torch.dtype, *inner: int, least: int = 0) -> torch.Tensor:
        """`[slots, *inner]` view of the dtype's buffer, as many slots as fit, at least `least`."""
        elements = math.prod(inner)
        size = torch.empty(0, dtype=dtype).element_size()
        needed = max(self.pool_bytes, least * elements * size) // size
        buffer = self._buffers.get(dtype)
        if buffer is None or buffer.numel() < needed:
            self._buffers.pop(dtype, None)
            self._buffers[dtype] = torch.empty(needed, dtype=dtype, device=self.device)
            self.fill(dtype)
            buffer = self._buffers[dtype]
        slots = buffer.numel() // elements
        return buffer[: slots * elements].view(slots, *inner)

    def fill(self, *dtypes: torch.dtype) -> None:
        """Draw new states for the buffers of these dtypes, all by default."""
        for dtype in dtypes or tuple(self._buffers):
            self._buffers[dtype].normal_(0.0, STATE_SCALE, generator=self.generator)

    def kept(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What `make` gave for `key`, if it is among the last KEPT asked for."""
        if key not in self._kept:
            while len(self._kept) >= KEPT:
                self._kept.popitem(last=False)
            self._kept[key] = make()
        self._kept.move_to_end(key)
        made: Made = self._kept[key]
        return made

    def save(self) -> Callable[[], None]:
        """Copy all pools; calling what is returned puts the copies back, on the current stream."""
        copies = [(buffer, buffer.clone()) for buffer in self._buffers.values()]

        def restore() -> None:
            for buffer, copy in copies:
                buffer.copy_(copy)

        return restore

    def slot_ids(self, slots: int, rows: int, launches: int, *, groups: int = 2) -> list[list[torch.Tensor]]:
        """For each launch `groups` int32 id tensors `[rows]`, all distinct within a launch, random over the pool.

        Launches take successive pieces of random permutations, so that a slot returns as late as possible. Each tensor is an
        allocation of its own: some peers ask for aligned ids.
        """
        need = rows * groups
        if slots < need:
            raise ValueError(f"pool of {slots} slots, {need} needed")
        pieces: list[torch.Tensor] = []
        while len(pieces) < launches:
            order = torch.randperm(slots, generator=self.generator, device=self.device).to(torch.int32)
            pieces += list(order[: slots // need * need].split(need))
        return [[ids.clone() for ids in piece.split(rows)] for piece in pieces[:launches]]

    def slots_apart(self, slots: int, count: int, used: Sequence[torch.Tensor]) -> torch.Tensor:
        """`count` random slots, int32, none of them among `used`."""
        order = torch.randperm(slots, generator=self.generator, device=self.device).to(torch.int32)
        free = order[~torch.isin(order, torch.cat(list(used)))]
        if free.numel() < count:
            raise ValueError(f"pool of {slots} slots, {slots - free.numel()} used, {count} more needed")
        return free[:count].clone()


@dataclass
class DeltaProblem:
    """Inputs of a delta-rule call. q, k, v are views of one packed row `[tokens, C]`, as the conv leaves it.

    gate: GDN a `[tokens, HV]`, KDA raw gate `[tokens, HV, K]`. pool: `[slots, HV, V, K]`.
    """

    geometry: Geometry
    workload: Workload
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    gate: torch.Tensor
    b: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    lower_bound: float | None
    pool: torch.Tensor

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        """Leading positional arguments of decode, verify and prefill."""
        return self.q, self.k, self.v, self.gate, self.b, self.A_log, self.dt_bias

    @property
    def options(self) -> dict[str, float | None]:
        """Keyword arguments that KDA alone has."""
        return {"lower_bound": self.lower_bound} if self.geometry.kind == "kda" else {}

    @property
    def is_kda(self) -> bool:
        """KDA, else GDN."""
        return self.geometry.kind == "kda"

    @property
    def input_bytes(self) -> int:
        """Bytes of q, k, v, gate and beta."""
        return sum(x.numel() * x.element_size() for x in (self.q, self.k, self.v, self.gate, self.b))

    def output(self) -> torch.Tensor:
        """An output tensor `[tokens, HV, V]`."""
        return torch.empty(*self.v.shape, dtype=self.v.dtype, device=self.v.device)


def gate_parameters(ws: Workspace, g: Geometry, gates: str) -> tuple[torch.Tensor, torch.Tensor, float, float]:
    """A_log, dt_bias and mean and deviation of the raw KDA gate, so that the log-decay has the set's distribution."""
    heads, channels = g.hv, g.hv * HEAD_DIM
    zeros = torch.zeros(heads, device=ws.device)
    bias = torch.zeros(channels, device=ws.device)
    if gates == "trained":  # raw N(-0.62, 0.88), bias about -4.7 with a spread of 1.4: models.md section 3, item 6
        A_log = torch.empty(heads, device=ws.device).uniform_(-0.04, 0.74, generator=ws.generator)
        return A_log, -4.69 + 1.4 * ws.normal(channels, dtype=torch.float32), -0.62, 0.88
    if gates == "slow":
        return zeros, bias, -8.0, 1.0
    if gates == "bound":
        return zeros, bias, 20.0, 0.0
    # "fast": -5 sigmoid(0) and -softplus(2.4) are both about -2.5.
    return zeros, bias, 0.0 if g.lower_bound is not None else 2.4, 1.0


def delta_problem(ws: Workspace, g: Geometry, w: Workload, state_dtype: str, gates: str | None = None) -> DeltaProblem:
    """Random inputs of one call and the pool of its geometry."""
    row = ws.normal(w.tokens, g.channels)
    keys = g.hk * HEAD_DIM
    q, k, v = row.split([keys, keys, g.hv * HEAD_DIM], dim=1)
    if g.kind == "kda":
        A_log, dt_bias, mean, deviation = gate_parameters(ws, g, gates or "trained")
        gate = ws.normal(w.tokens, g.hv, HEAD_DIM).mul_(deviation).add_(mean)
    else:
        A_log = torch.empty(g.hv, device=ws.device).uniform_(0.0, 1.0, generator=ws.generator)
        dt_bias = ws.normal(g.hv, dtype=torch.float32) - 2.0
        gate = ws.normal(w.tokens, g.hv)
    return DeltaProblem(
        g,
        w,
        q.unflatten(1, (g.hk, HEAD_DIM)),
        k.unflatten(1, (g.hk, HEAD_DIM)),
        v.unflatten(1, (g.hv, HEAD_DIM)),
        gate,
        ws.normal(w.tokens, g.hv),
        A_log,
        dt_bias,
        g.lower_bound,
        ws.pool(DTYPES[state_dtype], g.hv, HEAD_DIM, HEAD_DIM, least=2 * w.rows + w.checkpoints),
    )


def cu_seqlens(w: Workload, device: torch.device) -> torch.Tensor:
    """Prefix sums of a workload, int32 `[N + 1]`."""
    return torch.tensor([0, *w.lengths], device=device).cumsum(0).to(torch.int32)


def checkpoints(w: Workload, slots: torch.Tensor) -> Checkpoints | None:
    """A checkpoint every `checkpoint_every` tokens of every sequence into `slots` `[w.checkpoints]`."""
    every = w.checkpoint_every
    if not every:
        return None
    counts = [length // every for length in w.lengths]
    ends = [every * (i + 1) for count in counts for i in range(count)]
    cu = torch.tensor([0, *counts], device=slots.device).cumsum(0).to(torch.int32)
    return Checkpoints(cu, torch.tensor(ends, dtype=torch.int32, device=slots.device), slots)


@dataclass
class ConvProblem:
    """Inputs of a conv call: x is the leading C columns of a wider projection row, positions int32 `[N]`."""

    geometry: Geometry
    workload: Workload
    x: torch.Tensor
    weight: torch.Tensor
    positions: torch.Tensor
    pool: torch.Tensor

    def output(self) -> torch.Tensor:
        """An output tensor `[tokens, C]`."""
        return torch.empty(*self.x.shape, dtype=self.x.dtype, device=self.x.device)


def conv_problem(ws: Workspace, g: Geometry, w: Workload) -> ConvProblem:
    """Random inputs of one conv call; the projection row also carries the output gate."""
    row = ws.normal(w.tokens, g.channels + g.hv * HEAD_DIM)
    pool = ws.pool(torch.bfloat16, CONV_WIDTH, g.channels, least=2 * w.rows + w.checkpoints)
    weight = ws.normal(g.channels, CONV_WIDTH).mul_(0.5)
    positions = torch.randint(4, 4096, (w.rows,), generator=ws.generator, device=ws.device, dtype=torch.int32)
    return ConvProblem(g, w, row[:, : g.channels], weight, positions, pool)
