"""gdn_prefill and kda_prefill: contenders and check."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from .. import cute_kernels
from ..cute_kernels import reference
from ..cute_kernels.reference.metrics import tolerance
from .bench import Prepared, ratio
from .bench_decode import peer_contenders
from .cases import Case
from .inputs import DeltaProblem, Workspace, checkpoints, cu_seqlens, delta_problem
from .timing import COLD_BYTES, Contender

CHECKED_TOKENS = 8192  # of a sequence; later tokens run the same code
CHECKED_HEADS = 2  # first and last key head's value heads
MAX_SETS = 16


def prepare(case: Case, ws: Workspace, peers: dict[str, ModuleType]) -> Prepared:
    """Ours (separate slots, checkpoints into slots) and the peers. Inputs rotate when one set fits the L2 cache."""
    w = case.workload
    first = delta_problem(ws, case.geometry, w, case.state_dtype, case.gates)
    moved = case.work.bytes
    sets = max(1, min(MAX_SETS, -(-COLD_BYTES // moved)))
    problems = [first, *(_again(ws, first) for _ in range(sets - 1))]
    launches = max(sets, 2)
    ids = ws.slot_ids(first.pool.shape[0], w.rows, launches)
    kept = ws.slot_ids(first.pool.shape[0], w.checkpoints, 1, groups=1)[0][0] if w.checkpoints else None
    cu = cu_seqlens(w, ws.device)
    operator = getattr(cute_kernels, case.op)
    plan = None if kept is None else checkpoints(w, kept)

    def ours(p: DeltaProblem, read: torch.Tensor, write: torch.Tensor, out: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: operator(*p.arguments, p.pool, read, write, cu, checkpoints=plan, out=out, **p.options)

    outs = [p.output() for p in problems]
    made = [ours(problems[i % sets], read, write, outs[i % sets]) for i, (read, write) in enumerate(ids)]
    contenders = [Contender("ours", made)]
    missing: dict[str, str] = {}
    per_set: dict[str, list[Contender]] = {}
    for i, p in enumerate(problems):
        found, why = peer_contenders(peers, "prefill", ids[i::sets], [outs[i]] * len(ids[i::sets]), p, cu)
        missing |= why
        for contender in found:
            per_set.setdefault(contender.name, []).append(contender)
    for name, parts in per_set.items():
        launches_of = [launch for part in parts for launch in part.launches]
        contenders.append(Contender(name, launches_of, parts[0].in_place, parts[0].states, keep=parts))
    dataset = "trained" if case.gates == "trained" else "randn"
    allowed = {what: tolerance("prefill", dataset, what, first.pool.dtype) for what in ("output", "state")}
    allowed["checkpoint"] = allowed["state"]
    notes: dict[str, Any] = {"ids": "separate", "tokens": w.tokens, "input_sets": sets}
    check = _checker(case, first, ids[0], kept, outs[0])
    return Prepared(contenders, check, allowed, missing, sets * moved, notes)


def _again(ws: Workspace, p: DeltaProblem) -> DeltaProblem:
    """Another set of inputs of the same distribution over the same pool and gate parameters."""
    q = delta_problem(ws, p.geometry, p.workload, "float32" if p.pool.dtype == torch.float32 else "bfloat16", None)
    # Shuffling tokens keeps the gate set's distribution, which a fresh default set would not.
    order = torch.randperm(p.workload.tokens, generator=ws.generator, device=ws.device)
    return DeltaProblem(
        p.geometry, p.workload, q.q, q.k, q.v, p.gate[order], p.b[order], p.A_log, p.dt_bias, p.lower_bound, p.pool
    )


def _checker(
    case: Case, p: DeltaProblem, ids: list[torch.Tensor], kept: torch.Tensor | None, out: torch.Tensor
) -> Callable[[Contender], dict[str, float]]:
    """Compare the value heads of two key heads, up to CHECKED_TOKENS of three sequences, with the float64 chunked form."""
    g, w = p.geometry, p.workload
    read, write = ids
    group = g.hv // g.hk
    keys = sorted({0, g.hk - 1})[:CHECKED_HEADS]
    values = [key * group + j for key in keys for j in range(group)]
    starts = [sum(w.lengths[:i]) for i in range(w.rows)]
    longest = max(range(w.rows), key=lambda i: w.lengths[i])
    sequences = sorted({0, longest, w.rows - 1})
    saved = p.pool[read.long()].clone()
    every = w.checkpoint_every
    expected = []
    for i in sequences:
        length = min(w.lengths[i], CHECKED_TOKENS)
        tokens = slice(starts[i], starts[i] + length)
        states = saved[i : i + 1][:, values].double()
        expected.append((i, tokens, *_reference(case, p, tokens, keys, values, states, every)))

    def check(contender: Contender) -> dict[str, float]:
        p.pool[read.long()] = saved
        out.fill_(float("nan"))
        actual = contender.launches[0]().reshape(w.tokens, g.hv, -1)
        target = (read if contender.in_place else write).long()
        errors = {"output": 0.0}
        for i, tokens, o, states, marks in expected:
            errors["output"] = max(errors["output"], ratio(actual[tokens][:, values], o))
            if contender.states and tokens.stop - tokens.start == w.lengths[i]:
                errors["state"] = max(errors.get("state", 0.0), ratio(p.pool[target[i]][values], states[0]))
            if contender.name == "ours" and marks is not None and kept is not None and every:
                first = sum(length // every for length in w.lengths[:i])
                slots = kept[first : first + len(marks)].long()
                errors["checkpoint"] = max(errors.get("checkpoint", 0.0), ratio(p.pool[slots][:, values], marks))
        return errors

    return check


def _reference(
    case: Case,
    p: DeltaProblem,
    tokens: slice,
    keys: list[int],
    values: list[int],
    states: torch.Tensor,
    every: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Output, final state and checkpoints of some heads of one sequence, float64. `states` is updated in place."""
    length = tokens.stop - tokens.start
    device = p.q.device
    per_token = (p.q[tokens][:, keys], p.k[tokens][:, keys], p.v[tokens][:, values], p.gate[tokens][:, values])
    bias = p.dt_bias.view(p.geometry.hv, -1)[values]
    bias = bias.flatten()
    out = torch.empty(length, len(values), p.v.shape[2], dtype=torch.float64, device=device)
    marks = length // every if every else 0
    pool = torch.cat([states, states.new_zeros(marks, *states.shape[1:])]) if marks else states
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    cu = torch.tensor([0, length], dtype=torch.int32, device=device)
    plan = None
    if marks and every:
        plan = cute_kernels.Checkpoints(
            torch.tensor([0, marks], dtype=torch.int32, device=device),
            torch.arange(every, every * marks + 1, every, dtype=torch.int32, device=device),
            torch.arange(1, marks + 1, dtype=torch.int32, device=device),
        )
    getattr(reference, f"{case.op}_chunked")(
        *per_token, p.b[tokens][:, values], p.A_log[values], bias, pool, zero, zero, cu, checkpoints=plan, out=out,
        compute_dtype=torch.float64, **p.options,
    )  # fmt: skip
    return out, pool[:1], pool[1:] if marks else None
