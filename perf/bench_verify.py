"""gdn_verify, kda_verify and the commits: contenders and check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

from .. import cute_kernels
from ..cute_kernels import reference
from ..cute_kernels.draft_log import DraftLog
from ..cute_kernels.reference.metrics import tolerance
from .bench import Prepared, ratio
from .bench_decode import CHECKED_ROWS, peer_contenders
from .cases import Case
from .inputs import DeltaProblem, Workspace, cu_seqlens, delta_problem
from .slab import slab_copies
from .timing import Contender, rotations
from .work import state_bytes

MAX_TOKENS = 8


@dataclass
class VerifyInputs:
    """One rotation: slots of the batch, its log, and where outputs go."""

    read: torch.Tensor
    write: torch.Tensor
    log: DraftLog
    out: torch.Tensor


def draft_log(case: Case, ws: Workspace, conv: bool) -> DraftLog:
    """A log whose entries look like those of a previous step; accepted counts say how many of them are read."""
    g = case.geometry
    channels = g.channels if conv else None
    log = DraftLog.allocate(g.kind, case.workload.rows, g.hk, g.hv, channels, ws.device, MAX_TOKENS)
    log.k.normal_(generator=ws.generator)
    log.u.normal_(0.0, 0.1, generator=ws.generator)
    if g.kind == "gdn":
        log.g.uniform_(0.8, 1.0, generator=ws.generator)
    else:
        log.g.normal_(generator=ws.generator)
    if log.x is not None:
        log.x.normal_(generator=ws.generator)
    return log


def prepare(case: Case, ws: Workspace, peers: dict[str, ModuleType]) -> Prepared:
    """Ours, the slab copy of the same slots, and peers that store a state for every draft."""
    p = delta_problem(ws, case.geometry, case.workload, case.state_dtype)
    rows = case.workload.rows
    launches = rotations(2 * rows * state_bytes(case.geometry, case.state_dtype))
    ids = ws.slot_ids(p.pool.shape[0], rows, launches)
    # Logs rotate with the slots; one out of 16 is enough to make them cold at small batch.
    logs = [draft_log(case, ws, conv=False) for _ in range(min(launches, 16))]
    inputs = [VerifyInputs(read, write, logs[i % len(logs)], p.output()) for i, (read, write) in enumerate(ids)]
    accepted = torch.tensor(case.accepted_counts, dtype=torch.int32, device=ws.device)
    call = _call(case, p, accepted)
    contenders = [
        Contender("ours", [call(x, x.read, x.write) for x in inputs]),
        Contender("ours_in_place", [call(x, x.read, x.read) for x in inputs], in_place=True),
        *slab_copies(p.pool, ids),
    ]
    missing: dict[str, str] = {}
    if case.op.endswith("_verify"):
        if case.state_dtype == "bfloat16":
            rounded = _call(case, p, accepted, round_every_token=True)
            contenders.append(Contender("ours_rounding_every_token", [rounded(x, x.read, x.write) for x in inputs]))
        found, missing = peer_contenders(peers, "verify", ids, [x.out for x in inputs], p, ws)
        contenders += found
    allowed = {what: tolerance("verify", "randn", what, p.pool.dtype) for what in ("output", "state")}
    rotated = launches * 2 * rows * state_bytes(case.geometry, case.state_dtype)
    notes: dict[str, Any] = {"ids": "separate", "accepted_sum": int(accepted.sum())}
    return Prepared(contenders, _checker(case, p, inputs[0], accepted), allowed, missing, rotated, notes)


def _call(case: Case, p: DeltaProblem, accepted: torch.Tensor, **extra: Any) -> Callable[..., Callable[[], Any]]:
    """`(inputs, read, write)` to a launch of the operator."""
    operator = getattr(cute_kernels, case.op)
    cu = cu_seqlens(case.workload, p.q.device)
    parameters = (p.A_log, p.dt_bias) if p.is_kda else ()

    def verify(x: VerifyInputs, read: torch.Tensor, write: torch.Tensor) -> Callable[[], torch.Tensor]:
        # As in a served step, the kernel before (here the launch before, with other slots and logs) wrote nothing of this one's.
        options = {"settled": True, **p.options, **extra}
        return lambda: operator(*p.arguments, p.pool, read, write, cu, x.log, accepted, out=x.out, **options)

    def commit(x: VerifyInputs, read: torch.Tensor, write: torch.Tensor) -> Callable[[], None]:
        return lambda: operator(*parameters, p.pool, read, write, x.log, accepted, **p.options, **extra)

    return verify if case.op.endswith("_verify") else commit


def _checker(
    case: Case, p: DeltaProblem, first: VerifyInputs, accepted: torch.Tensor
) -> Callable[[Contender], dict[str, float]]:
    """Compare a few rows of the first launch with the float64 operator: output and committed state.

    A peer keeps no log: it starts from the state that the pool holds, so its reference accepts nothing.
    """
    tokens, total = case.workload.lengths[0], case.workload.rows
    rows = torch.linspace(0, total - 1, min(CHECKED_ROWS, total)).long().unique().to(first.read.device)
    slots = first.read[rows].long()
    saved = p.pool[slots].clone()

    def expect(counts: torch.Tensor, rounding: bool) -> tuple[torch.Tensor | None, torch.Tensor]:
        states = saved.clone()  # in the pool's dtype: where a bf16 pool rounds is part of what is checked
        own = torch.arange(len(rows), dtype=torch.int32, device=slots.device)
        log = log_rows(first.log, rows)
        extra = {"round_every_token": rounding, "compute_dtype": torch.float64}
        if case.op.endswith("_commit"):
            parameters = (p.A_log, p.dt_bias) if p.is_kda else ()
            getattr(reference, case.op)(*parameters, states, own, own, log, counts, **extra, **p.options)
            return None, states
        place = (rows[:, None] * tokens + torch.arange(tokens, device=rows.device)).flatten()
        per_token = [x[place] for x in (p.q, p.k, p.v, p.gate, p.b)]
        out = torch.empty(len(place), *p.v.shape[1:], dtype=torch.float64, device=rows.device)
        cu = torch.arange(0, len(place) + 1, tokens, dtype=torch.int32, device=rows.device)
        getattr(reference, case.op)(
            *per_token, p.A_log, p.dt_bias, states, own, own, cu, log, counts, out=out, **extra, **p.options
        )
        return out, states

    expected = {rounding: expect(accepted[rows], rounding) for rounding in (False, True)}
    fresh = expect(torch.zeros_like(accepted[rows]), False)

    def check(contender: Contender) -> dict[str, float]:
        p.pool[slots] = saved
        ours = contender.name.startswith("ours")
        if contender.load is not None:
            contender.load()
        result = contender.launches[0]()
        target = first.read if contender.in_place else first.write
        if contender.name.startswith("slab_copy"):
            return {"state": ratio(p.pool[target[rows].long()], saved)}
        outputs, states = expected[contender.name == "ours_rounding_every_token"] if ours else fresh
        errors = {}
        if outputs is not None:
            actual = result.reshape(total, tokens, *p.v.shape[1:])[rows].flatten(0, 1)
            errors["output"] = ratio(actual, outputs)
        if ours:
            errors["state"] = ratio(p.pool[target[rows].long()], states)
        return errors

    return check


def log_rows(log: DraftLog, rows: torch.Tensor) -> DraftLog:
    """A copy of some rows of a log, so that the reference does not write into the one being timed."""
    x = None if log.x is None else log.x[rows].clone()
    return replace(
        log, k=log.k[rows].clone(), u=log.u[rows].clone(), g=log.g[rows].clone(), x=x, half=log.half[rows].clone()
    )
