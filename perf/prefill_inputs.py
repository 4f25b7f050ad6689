"""Inputs and float64 oracle of prefill, made once a geometry: its workloads and gate sets share rows, states and reference.

A workload of T tokens takes the first T of the shared rows, its further input sets the next ones. Its first sequence therefore
starts at row 0, from one state for all, and since prefill is causal one reference over the shared rows serves every workload:
outputs are a prefix of the reference's, final states and checkpoints stand among its checkpoints.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..cute_kernels import Checkpoints, reference
from .cases import Case, registry
from .geometries import HEAD_DIM, Geometry
from .inputs import DTYPES, STATE_SCALE, DeltaProblem, Workspace, gate_parameters
from .timing import COLD_BYTES
from .work import token_bytes

MARK_EVERY = 512  # tokens between the oracle's states


@dataclass
class GateSet:
    """Raw gates of all rows and the parameters that give them a set's distribution."""

    gate: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor


@dataclass
class PrefillInputs:
    """Shared rows of one geometry. packed: `[rows, C]`; heads: checked key and value heads; state: `[values, V, K]`, what
    the first sequence's checked heads start from, exact in bf16."""

    geometry: Geometry
    packed: torch.Tensor
    b: torch.Tensor
    gates: dict[str | None, GateSet]
    keys: list[int]
    values: list[int]
    state: torch.Tensor
    oracles: dict[str | None, Oracle] = field(default_factory=dict)

    def problem(self, case: Case, ws: Workspace, number: int = 0) -> DeltaProblem:
        """Input set `number` of a case."""
        g, w = self.geometry, case.workload
        rows = slice(number * w.tokens, (number + 1) * w.tokens)
        keys, gates = g.hk * HEAD_DIM, self.gates[case.gates]
        q, k, v = self.packed[rows].split([keys, keys, g.hv * HEAD_DIM], dim=1)
        pool = ws.pool(DTYPES[case.state_dtype], g.hv, HEAD_DIM, HEAD_DIM, least=2 * w.rows + w.checkpoints)
        return DeltaProblem(
            g,
            w,
            *(x.unflatten(1, (-1, HEAD_DIM)) for x in (q, k, v)),
            gates.gate[rows],
            self.b[rows],
            gates.A_log,
            gates.dt_bias,
            g.lower_bound,
            pool,
        )

    def oracle(self, case: Case) -> Oracle:
        """The reference for a case's gate set over all shared rows; made for all sets at once."""
        length = case.workload.lengths[0]
        known = self.oracles.get(case.gates)
        if known is None or not known.covers(case):
            marks = {*range(MARK_EVERY, self.rows + 1, MARK_EVERY), length, *_first_lengths(self.rows)}
            every = case.workload.checkpoint_every
            marks |= set(range(every, length + 1, every)) if every else set()
            marks |= {end for oracle in self.oracles.values() for end in oracle.states}
            self.oracles = _oracles(self, case.op, sorted(mark for mark in marks if mark))
        return self.oracles[case.gates]

    @property
    def rows(self) -> int:
        """Shared rows that the oracle covers."""
        return min(self.packed.shape[0], ORACLE_ROWS)


ORACLE_ROWS = 32768


@functools.cache
def _first_lengths(rows: int) -> frozenset[int]:
    """Lengths of the first sequences of the registry's prefill cases, so that one pass has all their states."""
    return frozenset(length for case in registry() if (length := case.workload.lengths[0]) <= rows)


@dataclass
class Oracle:
    """Float64 outputs of the checked heads `[rows, values, V]` and states `[values, V, K]` by tokens before them."""

    out: torch.Tensor
    states: dict[int, torch.Tensor]

    def covers(self, case: Case) -> bool:
        """Whether the states of a case's first sequence are here."""
        length, every = case.workload.lengths[0], case.workload.checkpoint_every
        wanted = {length, *(range(every, length + 1, every) if every else ())}
        return all(end in self.states for end in wanted if end)


def shared_inputs(case: Case, ws: Workspace, sets: int) -> PrefillInputs:
    """Inputs of a case's geometry with room for `sets` input sets, from the workspace when they are there."""
    g = case.geometry
    rows = max(case.workload.tokens * sets, ws.shared_rows, -(-COLD_BYTES // token_bytes(g)) if ws.shared_rows else 0)
    gates = tuple(ws.gate_sets.get(g.id, (case.gates,)))
    if case.gates not in gates:
        gates = (case.gates,)

    def make() -> PrefillInputs:
        group = g.hv // g.hk
        keys = sorted({0, g.hk - 1})
        values = [key * group + j for key in keys for j in range(group)]
        state = ws.normal(len(values), HEAD_DIM, HEAD_DIM).mul_(STATE_SCALE)
        made = {name: _gate_set(ws, g, rows, name) for name in gates}
        return PrefillInputs(g, ws.normal(rows, g.channels), ws.normal(rows, g.hv), made, keys, values, state.double())

    return ws.kept(("prefill", g, rows, gates), make)


def _gate_set(ws: Workspace, g: Geometry, rows: int, name: str | None) -> GateSet:
    if g.kind == "kda":
        A_log, dt_bias, mean, deviation = gate_parameters(ws, g, name or "trained")
        return GateSet(ws.normal(rows, g.hv, HEAD_DIM).mul_(deviation).add_(mean), A_log, dt_bias)
    A_log = torch.empty(g.hv, device=ws.device).uniform_(0.0, 1.0, generator=ws.generator)
    return GateSet(ws.normal(rows, g.hv), A_log, ws.normal(g.hv, dtype=torch.float32) - 2.0)


def _oracles(p: PrefillInputs, op: str, marks: Sequence[int]) -> dict[str | None, Oracle]:
    """All gate sets in one pass of the chunked form, side by side as heads: its cost is its many small launches."""
    rows, names, count = slice(0, p.rows), list(p.gates), len(p.values)
    device = p.packed.device
    keys = p.geometry.hk * HEAD_DIM
    q, k, v = p.packed[rows].split([keys, keys, p.geometry.hv * HEAD_DIM], dim=1)
    q, k, v = (x.unflatten(1, (-1, HEAD_DIM)) for x in (q, k, v))
    q, k, v, b = (
        x[:, heads].repeat(1, len(names), *[1] * (x.ndim - 2))
        for x, heads in ((q, p.keys), (k, p.keys), (v, p.values), (p.b[rows], p.values))
    )
    gate = torch.cat([p.gates[name].gate[rows][:, p.values] for name in names], 1)
    A_log = torch.cat([p.gates[name].A_log[p.values] for name in names])
    bias = torch.cat([p.gates[name].dt_bias.view(p.geometry.hv, -1)[p.values].flatten() for name in names])
    states = torch.zeros(len(marks) + 1, len(names) * count, HEAD_DIM, HEAD_DIM, dtype=torch.float64, device=device)
    states[0] = p.state.repeat(len(names), 1, 1)
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    plan = Checkpoints(
        torch.tensor([0, len(marks)], dtype=torch.int32, device=device),
        torch.tensor(marks, dtype=torch.int32, device=device),
        torch.arange(1, len(marks) + 1, dtype=torch.int32, device=device),
    )
    out = torch.empty(p.rows, len(names) * count, HEAD_DIM, dtype=torch.float64, device=device)
    options: dict[str, Any] = {"lower_bound": p.geometry.lower_bound} if p.geometry.kind == "kda" else {}
    getattr(reference, f"{op}_chunked")(
        q, k, v, gate, b, A_log, bias, states, zero, zero - 1, torch.tensor([0, p.rows], dtype=torch.int32, device=device),
        checkpoints=plan, out=out, compute_dtype=torch.float64, **options,
    )  # fmt: skip
    return {
        name: Oracle(
            out[:, i * count : (i + 1) * count],
            {mark: states[n + 1, i * count : (i + 1) * count] for n, mark in enumerate(marks)},
        )
        for i, name in enumerate(names)
    }
