"""gdn_decode, kda_decode and advance_state_ids: contenders and check."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from .. import cute_kernels
from ..cute_kernels import reference
from ..cute_kernels.reference.metrics import tolerance
from .bench import Prepared, Unsupported, ratio
from .cases import Case
from .inputs import DeltaProblem, Workspace, delta_problem
from .slab import slab_copies
from .timing import Contender, rotations
from .work import state_bytes

CHECKED_ROWS = 4
UNSETTLED_MAX_HEADS = 2048  # above it the order of launches makes no measurable difference


def prepare(case: Case, ws: Workspace, peers: dict[str, ModuleType]) -> Prepared:
    """Ours with separate read and write slots and in place, the slab copy of the same slots, and the peers."""
    if case.op == "advance_state_ids":
        return _prepare_advance(case, ws)
    p = delta_problem(ws, case.geometry, case.workload, case.state_dtype)
    rows = case.workload.rows
    launches = rotations(2 * rows * state_bytes(case.geometry, case.state_dtype))
    ids = ws.slot_ids(p.pool.shape[0], rows, launches)
    outs = [p.output() for _ in range(launches)]
    operator = getattr(cute_kernels, case.op)

    def ours(
        read: torch.Tensor, write: torch.Tensor, out: torch.Tensor, settled: bool = True
    ) -> Callable[[], torch.Tensor]:
        return lambda: operator(*p.arguments, p.pool, read, write, settled=settled, out=out, **p.options)

    # As in a served step: the kernel before (a conv, or here the launch before with other slots) wrote neither ids nor
    # states of this one. "unsettled" is behind a kernel that did.
    contenders = [
        Contender("ours", [ours(read, write, out) for (read, write), out in zip(ids, outs)]),
        Contender("ours_in_place", [ours(read, read, out) for (read, _), out in zip(ids, outs)], in_place=True),
        *slab_copies(p.pool, ids),
    ]
    if rows * case.geometry.hv <= UNSETTLED_MAX_HEADS:
        made = [ours(read, write, out, settled=False) for (read, write), out in zip(ids, outs)]
        contenders.append(Contender("ours_unsettled", made))
    found, missing = peer_contenders(peers, "decode", ids, outs, p)
    contenders += found
    allowed = {what: tolerance("decode", "randn", what, p.pool.dtype) for what in ("output", "state")}
    notes: dict[str, Any] = {"ids": "separate"}
    return Prepared(contenders, _checker(case, p, ids[0]), allowed, missing, _rotation(case, launches), notes)


def peer_contenders(
    peers: dict[str, ModuleType], method: str, ids: list[list[torch.Tensor]], outs: list[torch.Tensor], *arguments: Any
) -> tuple[list[Contender], dict[str, str]]:
    """Contenders of the adapters that have `method`, called with `arguments`, and why the others have none."""
    contenders: list[Contender] = []
    missing: dict[str, str] = {}
    for name, adapter in peers.items():
        try:
            if not hasattr(adapter, method):
                raise Unsupported(f"no {method} kernel")
            built = getattr(adapter, method)(*arguments)
        except Exception as error:
            missing[name] = f"{type(error).__name__}: {str(error)[:200]}"
            continue
        for label, call in (built if isinstance(built, dict) else {name: built}).items():
            made = [call.make(read, read if call.in_place else write, out) for (read, write), out in zip(ids, outs)]
            contenders.append(Contender(label, made, call.in_place, call.states, call.load, keep=call))
    return contenders, missing


def _rotation(case: Case, launches: int) -> int:
    return launches * 2 * case.workload.rows * state_bytes(case.geometry, case.state_dtype)


def _checker(case: Case, p: DeltaProblem, ids: list[torch.Tensor]) -> Callable[[Contender], dict[str, float]]:
    """Compare a few rows of the first launch with the float64 recurrence."""
    read, write = ids
    last, count = case.workload.rows - 1, min(CHECKED_ROWS, case.workload.rows)
    rows = torch.linspace(0, last, count).long().unique().to(read.device)
    slots = read[rows].long()
    saved = p.pool[slots].clone()
    states = saved.double()
    own = torch.arange(len(rows), dtype=torch.int32, device=read.device)
    expected = torch.empty(len(rows), *p.v.shape[1:], dtype=torch.float64, device=read.device)
    per_row = [x[rows] for x in (p.q, p.k, p.v, p.gate, p.b)]
    getattr(reference, case.op)(
        *per_row, p.A_log, p.dt_bias, states, own, own, out=expected, compute_dtype=torch.float64, **p.options
    )

    def check(contender: Contender) -> dict[str, float]:
        p.pool[slots] = saved
        if contender.name.startswith("slab_copy"):
            contender.launches[0]()
            return {"state": ratio(p.pool[write[rows].long()], saved)}
        if contender.load is not None:
            contender.load()
        out = contender.launches[0]().reshape(case.workload.rows, *p.v.shape[1:])
        errors = {"output": ratio(out[rows], expected)}
        if contender.states:
            target = read if contender.in_place else write
            errors["state"] = ratio(p.pool[target[rows].long()], states)
        return errors

    return check


def _prepare_advance(case: Case, ws: Workspace) -> Prepared:
    """The tracking launch: its work is a few bytes a row, so it measures a kernel's fixed cost."""
    rows, slots = case.workload.rows, 4096
    (read, write, fresh), *_ = ws.slot_ids(slots, rows, 1, groups=3)
    positions = torch.zeros(rows, dtype=torch.int32, device=ws.device)

    def launch() -> None:
        cute_kernels.advance_state_ids(read, write, positions, num_slots=slots, next_write_ids=fresh)

    def check(contender: Contender) -> dict[str, float]:
        positions.zero_()
        before = write.clone()
        contender.launches[0]()
        wrong = (read != before).sum() + (write != fresh).sum() + (positions != 1).sum()
        return {"output": float(wrong)}

    return Prepared([Contender("ours", [launch] * 32)], check, {"output": 0.0})
