"""gdn_prefill and kda_prefill: contenders and check."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from .. import cute_kernels
from ..cute_kernels import reference
from ..cute_kernels.reference.metrics import tolerance
from .bench import Prepared, ratio
from .bench_decode import peer_contenders
from .cases import Case
from .inputs import DeltaProblem, Workspace, checkpoints, cu_seqlens
from .prefill_inputs import PrefillInputs, shared_inputs
from .timing import COLD_BYTES, Contender

LATER_TOKENS = 1024  # checked of the longest and of the last sequence where they are not the first
MAX_SETS = 16


def prepare(case: Case, ws: Workspace, peers: dict[str, ModuleType]) -> Prepared:
    """Ours (separate slots, checkpoints into slots) and the peers. Inputs rotate when one set fits the L2 cache.

    Beside the first of a geometry's gate sets ours is timed on each of the others too, as `ours_<set>`: they are apart by a few
    percent, by which the chip changes from one case to another.
    """
    w, moved = case.workload, case.work.bytes
    sets = max(1, min(MAX_SETS, -(-COLD_BYTES // moved)))
    shared = shared_inputs(case, ws, sets)
    problems = [shared.problem(case, ws, number) for number in range(sets)]
    first = problems[0]
    launches = max(sets, 2)
    ids = ws.slot_ids(first.pool.shape[0], w.rows, launches)
    if w.lengths[0]:
        first.pool[ids[0][0][0].long(), shared.values] = shared.state.to(first.pool.dtype)
    # Apart from the slots of the launch that is checked: a checkpoint in its write slot would be overwritten by the final state.
    kept = ws.slots_apart(first.pool.shape[0], w.checkpoints, ids[0]) if w.checkpoints else None
    cu = cu_seqlens(w, ws.device)
    operator = getattr(cute_kernels, case.op)
    plan = None if kept is None else checkpoints(w, kept)

    def ours(p: DeltaProblem, read: torch.Tensor, write: torch.Tensor, out: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: operator(*p.arguments, p.pool, read, write, cu, checkpoints=plan, out=out, **p.options)

    outs = [p.output() for p in problems]
    made = [ours(problems[i % sets], read, write, outs[i % sets]) for i, (read, write) in enumerate(ids)]
    contenders = [Contender("ours", made)]
    names = list(shared.gates)
    twins = {f"ours_{name}": replace(case, gates=name) for name in names[1:] if case.gates == names[0]}
    for name, twin in twins.items():
        theirs = [shared.problem(twin, ws, number) for number in range(sets)]
        launches_of = [ours(theirs[i % sets], read, write, outs[i % sets]) for i, (read, write) in enumerate(ids)]
        contenders.append(Contender(name, launches_of))
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
    check = _checker(case, shared, first, ids[0], kept, outs[0])
    checked = lambda contender: {} if contender.name in twins else check(contender)  # those are in cases of their own
    return Prepared(contenders, checked, allowed, missing, sets * moved, notes)


def _checker(
    case: Case,
    shared: PrefillInputs,
    p: DeltaProblem,
    ids: list[torch.Tensor],
    kept: torch.Tensor | None,
    out: torch.Tensor,
) -> Callable[[Contender], dict[str, float]]:
    """Compare the value heads of the first and last key head with float64.

    The first sequence whole, with its checkpoints, against the geometry's oracle; of the longest and the last one
    LATER_TOKENS against the chunked form from their own states.
    """
    w, values = case.workload, shared.values
    read, write = ids
    saved = p.pool[read.long()].clone()
    starts = [sum(w.lengths[:i]) for i in range(w.rows)]
    longest = max(range(w.rows), key=lambda i: w.lengths[i])

    @functools.cache
    def later() -> list[tuple[int, slice, torch.Tensor, torch.Tensor]]:
        found = []
        for i in sorted({longest, w.rows - 1} - {0}):
            tokens = slice(starts[i], starts[i] + min(w.lengths[i], LATER_TOKENS))
            found.append((i, tokens, *_reference(case, shared, p, tokens, saved[i, values])))
        return found

    def check(contender: Contender) -> dict[str, float]:
        p.pool[read.long()] = saved
        out.fill_(float("nan"))
        actual = contender.launches[0]().reshape(w.tokens, p.geometry.hv, -1)
        target = (read if contender.in_place else write).long()
        oracle = shared.oracle(case)
        errors = {"output": ratio(actual[: w.lengths[0], values], oracle.out[: w.lengths[0]])}
        if contender.states:
            errors["state"] = ratio(p.pool[target[0], values], oracle.states[w.lengths[0]])
        if contender.name == "ours" and kept is not None and w.checkpoint_every:
            ends = range(w.checkpoint_every, w.lengths[0] + 1, w.checkpoint_every)
            marks = torch.stack([oracle.states[end] for end in ends])
            errors["checkpoint"] = ratio(p.pool[kept[: len(ends)].long()][:, values], marks)
        for i, tokens, expected, state in later():
            errors["output"] = max(errors["output"], ratio(actual[tokens][:, values], expected))
            if contender.states and tokens.stop - tokens.start == w.lengths[i]:
                errors["state"] = max(errors["state"], ratio(p.pool[target[i], values], state))
        return errors

    return check


def _reference(
    case: Case, shared: PrefillInputs, p: DeltaProblem, tokens: slice, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and final state of the checked heads of one sequence from `state`, float64."""
    keys, values, device = shared.keys, shared.values, p.q.device
    per_token = (p.q[tokens][:, keys], p.k[tokens][:, keys], p.v[tokens][:, values], p.gate[tokens][:, values])
    bias = p.dt_bias.view(p.geometry.hv, -1)[values].flatten()
    length = tokens.stop - tokens.start
    out = torch.empty(length, len(values), p.v.shape[2], dtype=torch.float64, device=device)
    states = state.double()[None]
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    cu = torch.tensor([0, length], dtype=torch.int32, device=device)
    getattr(reference, f"{case.op}_chunked")(
        *per_token, p.b[tokens][:, values], p.A_log[values], bias, states, zero, zero, cu, out=out,
        compute_dtype=torch.float64, **p.options,
    )  # fmt: skip
    return out, states[0]
