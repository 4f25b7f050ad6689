"""causal_conv1d_prefill and causal_conv1d_decode: contenders and check."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from .. import cute_kernels
from ..cute_kernels import reference
from ..cute_kernels.reference.conv1d import live_window
from .bench import Prepared, ratio
from .bench_decode import peer_contenders
from .cases import Case
from .geometries import CONV_WIDTH
from .inputs import ConvProblem, Workspace, checkpoints, conv_problem, cu_seqlens
from .timing import COLD_BYTES, Contender, rotations

TOLERANCE = {"output": 0.003, "window": 0.0, "checkpoint": 0.0}  # bf16 output rounding; windows are copies
MAX_SETS = 16


def prepare(case: Case, ws: Workspace, peers: dict[str, ModuleType]) -> Prepared:
    """Ours and the peers, in place, as in a served step."""
    w, g = case.workload, case.geometry
    decode = case.op.endswith("_decode")
    first = conv_problem(ws, g, w)
    window = CONV_WIDTH * g.channels * 2
    if decode:
        sets, launches = 1, rotations(w.rows * window)
    else:
        sets = max(1, min(MAX_SETS, -(-COLD_BYTES // case.work.bytes)))
        launches = max(sets, 2)
    problems = [first, *(_again(ws, first) for _ in range(sets - 1))]
    ids = [[read, read] for (read,) in ws.slot_ids(first.pool.shape[0], w.rows, launches, groups=1)]
    kept = ws.slots_apart(first.pool.shape[0], w.checkpoints, ids[0]) if w.checkpoints else None
    cu = cu_seqlens(w, ws.device)
    outs = [p.output() for p in problems]
    operator = getattr(cute_kernels, case.op)
    options: dict[str, Any] = {"settled": True} if decode else {}
    if kept is not None:
        options["checkpoints"] = checkpoints(w, kept)
    packing = () if decode else (cu,)

    def ours(p: ConvProblem, read: torch.Tensor, out: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: operator(p.x, p.weight, p.pool, read, read, p.positions, *packing, out=out, **options)

    made = [ours(problems[i % sets], read, outs[i % sets]) for i, (read, _) in enumerate(ids)]
    contenders = [Contender("ours", made, in_place=True)]
    arguments = (first,) if decode else (first, cu)
    found, missing = peer_contenders(
        peers, "conv_decode" if decode else "conv_prefill", ids, [outs[0]] * launches, *arguments
    )
    moved = w.rows * window * launches if decode else case.work.bytes * sets
    notes = {"ids": "in place", "tokens": w.tokens, "channels": g.channels}
    check = _checker(case, first, ids[0][0], kept, outs[0])
    return Prepared(contenders + found, check, TOLERANCE, missing, moved, notes)


def _again(ws: Workspace, p: ConvProblem) -> ConvProblem:
    """Another input of the same shape."""
    row = ws.normal(p.x.shape[0], p.x.stride(0))
    return ConvProblem(p.geometry, p.workload, row[:, : p.x.shape[1]], p.weight, p.positions, p.pool)


def _checker(
    case: Case, p: ConvProblem, read: torch.Tensor, kept: torch.Tensor | None, out: torch.Tensor
) -> Callable[[Contender], dict[str, float]]:
    """Output against float64 on every 16th channel vector of 8, windows and checkpoints exactly."""
    w = case.workload
    rows = read.long()
    saved = p.pool[rows].clone()
    vectors = p.geometry.channels // 8
    picked = torch.arange(0, vectors, max(1, vectors // 64), device=p.x.device)
    channels = (picked[:, None] * 8 + torch.arange(8, device=p.x.device)).flatten()
    marks = kept.shape[0] if kept is not None else 0
    pool = saved[:, :, channels].clone()
    if marks:
        pool = torch.cat([pool, torch.zeros_like(pool[:1]).expand(marks, -1, -1)]).contiguous()
    own = torch.arange(w.rows, dtype=torch.int32, device=p.x.device)
    expected = torch.empty(w.tokens, len(channels), dtype=torch.float64, device=p.x.device)
    options: dict[str, Any] = {"out": expected, "compute_dtype": torch.float64}
    packing: tuple[torch.Tensor, ...] = ()
    ends = p.positions + torch.tensor(w.lengths, dtype=torch.int32, device=p.x.device)
    if case.op.endswith("_prefill"):
        packing = (cu_seqlens(w, p.x.device),)
        own_marks = torch.arange(w.rows, w.rows + marks, dtype=torch.int32, device=p.x.device)
        options["checkpoints"] = checkpoints(w, own_marks) if marks else None
    getattr(reference, case.op)(p.x[:, channels], p.weight[channels], pool, own, own, p.positions, *packing, **options)
    windows = live_window(pool, own, ends)

    def check(contender: Contender) -> dict[str, float]:
        p.pool[rows] = saved
        out.fill_(float("nan"))
        if contender.load is not None:
            contender.load()
        actual = contender.launches[0]()
        errors = {"output": ratio(actual[:, channels], expected)}
        if contender.name != "ours":
            return errors
        errors["window"] = ratio(live_window(p.pool, read, ends)[:, :, channels], windows)
        if kept is not None and marks:
            every = w.checkpoint_every or 1
            at = torch.cat([
                p.positions[i] + every * torch.arange(1, length // every + 1, dtype=torch.int32, device=p.x.device)
                for i, length in enumerate(w.lengths)
            ])  # fmt: skip
            own_marks = torch.arange(w.rows, w.rows + marks, dtype=torch.int32, device=p.x.device)
            errors["checkpoint"] = ratio(
                live_window(p.pool, kept, at)[:, :, channels], live_window(pool, own_marks, at)
            )
        return errors

    return check
