"""gdn_layer_decode and kda_layer_decode, one token and verify: contenders and check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch

from .. import cute_kernels
from ..cute_kernels import reference
from ..cute_kernels.draft_log import DraftLog
from ..cute_kernels.reference.metrics import tolerance
from .bench import Prepared, ratio
from .bench_decode import CHECKED_ROWS, peer_contenders
from .bench_verify import draft_log, log_rows
from .cases import Case
from .geometries import CONV_WIDTH, HEAD_DIM
from .inputs import ConvProblem, DeltaProblem, Workspace, cu_seqlens, delta_problem
from .slab import slab_copies
from .timing import Contender, rotations
from .work import state_bytes

ACTIVATION = {"gdn": ("silu", 1e-6), "kda": ("sigmoid", 1e-5)}
LAYER_TOLERANCE = 0.006  # bf16 between the stages is not rounded by the fused kernel, but its output is, after a norm


@dataclass
class LayerProblem:
    """Inputs of one layer call: the packed projection row and the two pools."""

    delta: DeltaProblem
    conv: ConvProblem
    z: torch.Tensor
    norm_weight: torch.Tensor


def layer_problem(ws: Workspace, case: Case) -> LayerProblem:
    """Random inputs; x and z are views of one row, as the projection leaves them."""
    g, w = case.geometry, case.workload
    delta = delta_problem(ws, g, w, case.state_dtype)
    values = g.hv * HEAD_DIM
    row = ws.normal(w.tokens, g.channels + values)
    windows = torch.empty(delta.pool.shape[0], CONV_WIDTH, g.channels, dtype=torch.bfloat16, device=ws.device)
    windows.normal_(generator=ws.generator)
    positions = torch.randint(4, 4096, (w.rows,), generator=ws.generator, device=ws.device, dtype=torch.int32)
    conv = ConvProblem(g, w, row[:, : g.channels], ws.normal(g.channels, CONV_WIDTH).mul_(0.5), positions, windows)
    return LayerProblem(delta, conv, row[:, g.channels :], ws.normal(HEAD_DIM) * 0.1 + 1.0)


def prepare(case: Case, ws: Workspace, peers: dict[str, ModuleType]) -> Prepared:
    """Ours with separate slots and in place, the slab copy of the state slots, a peer's kernels for the same work."""
    p = layer_problem(ws, case)
    rows = case.workload.rows
    launches = rotations(2 * rows * state_bytes(case.geometry, case.state_dtype))
    ids = ws.slot_ids(p.delta.pool.shape[0], rows, launches)
    outs = [torch.empty_like(p.z, memory_format=torch.contiguous_format) for _ in range(min(launches, 16))]
    accepted: torch.Tensor | None = None
    logs: list[DraftLog | None] = [None]
    if case.accepted is not None:
        accepted = torch.tensor(case.accepted_counts, dtype=torch.int32, device=ws.device)
        logs = [*(draft_log(case, ws, conv=True) for _ in range(min(launches, 16)))]
    cu = cu_seqlens(case.workload, ws.device)

    def ours(i: int, read: torch.Tensor, write: torch.Tensor) -> Callable[[], torch.Tensor]:
        log, out = logs[i % len(logs)], outs[i % len(outs)]
        # As in a served step and in the bare recurrence's case: the kernel before wrote neither ids nor states of this one.
        options: dict[str, Any] = {"settled": True}
        if log is not None:
            options |= {"cu_seqlens": cu, "draft_log": log, "num_accepted": accepted}
        return _call(cute_kernels, case, p, p.delta.pool, p.conv.pool, read, write, out=out, **options)

    contenders = [
        Contender("ours", [ours(i, read, write) for i, (read, write) in enumerate(ids)]),
        Contender("ours_in_place", [ours(i, read, read) for i, (read, _) in enumerate(ids)], in_place=True),
        *slab_copies(p.delta.pool, ids),
    ]
    missing: dict[str, str] = {}
    if accepted is None:
        spread = [outs[i % len(outs)] for i in range(launches)]
        eps = ACTIVATION[case.geometry.kind][1]
        arguments = (p.delta, p.conv, p.z, p.norm_weight, eps)
        found, missing = peer_contenders(peers, "layer_decode", ids, spread, *arguments)
        contenders += found
    state = tolerance("decode", "randn", "state", p.delta.pool.dtype)
    allowed = {"output": LAYER_TOLERANCE, "state": max(state, LAYER_TOLERANCE), "window": 0.0}
    rotated = launches * 2 * rows * state_bytes(case.geometry, case.state_dtype)
    check = _checker(case, p, ids[0], logs[0], accepted)
    return Prepared(contenders, check, allowed, missing, rotated, {"ids": "separate"})


def _call(
    module: Any,
    case: Case,
    p: LayerProblem,
    state: torch.Tensor,
    windows: torch.Tensor,
    read: torch.Tensor,
    write: torch.Tensor,
    rows: torch.Tensor | None = None,
    tokens: torch.Tensor | None = None,
    **options: Any,
) -> Callable[[], Any]:
    """A call of the layer operator of `module` on all tokens, or on the tokens and rows picked. Nothing is left to prepare."""
    d, c = p.delta, p.conv
    x, gate, b, z = (t if tokens is None else t[tokens] for t in (c.x, d.gate, d.b, p.z))
    positions = c.positions if rows is None else c.positions[rows]
    activation, eps = ACTIVATION[case.geometry.kind]
    return partial(
        getattr(module, case.op), x, gate, b, z, c.weight, windows, d.A_log, d.dt_bias, p.norm_weight, state, read, write,
        positions, gate_activation=activation, eps=eps, **options, **d.options,
    )  # fmt: skip


def _checker(
    case: Case, p: LayerProblem, ids: list[torch.Tensor], log: Any, accepted: torch.Tensor | None
) -> Callable[[Contender], dict[str, float]]:
    """Compare a few rows of the first launch with the float64 layer: output, state and live window."""
    read, write = ids
    total, count = case.workload.rows, case.workload.lengths[0]
    rows = torch.linspace(0, total - 1, min(CHECKED_ROWS, total)).long().unique().to(read.device)
    tokens = (rows[:, None] * count + torch.arange(count, device=rows.device)).flatten()
    slots = read[rows].long()
    saved, saved_windows = p.delta.pool[slots].clone(), p.conv.pool[slots].clone()
    own = torch.arange(len(rows), dtype=torch.int32, device=read.device)
    states, windows = saved.clone(), saved_windows.clone()
    expected = torch.empty(len(tokens), p.z.shape[1], dtype=torch.float64, device=read.device)
    options: dict[str, Any] = {"out": expected, "compute_dtype": torch.float64}
    ends = p.conv.positions[rows] + 1
    if accepted is not None:
        cu = torch.arange(0, len(tokens) + 1, count, dtype=torch.int32, device=read.device)
        options |= {"cu_seqlens": cu, "draft_log": log_rows(log, rows), "num_accepted": accepted[rows]}
        ends = p.conv.positions[rows] + accepted[rows]
    _call(reference, case, p, states, windows, own, own, rows, tokens, **options)()
    live = reference.live_window(windows, own, ends)

    def check(contender: Contender) -> dict[str, float]:
        p.delta.pool[slots], p.conv.pool[slots] = saved, saved_windows
        if contender.load is not None:
            contender.load()
        result = contender.launches[0]()
        target = (read if contender.in_place else write)[rows].contiguous()
        if contender.name.startswith("slab_copy"):
            return {"state": ratio(p.delta.pool[target.long()], saved)}
        errors = {"output": ratio(result.reshape(case.workload.tokens, -1)[tokens], expected)}
        if contender.states:
            errors["state"] = ratio(p.delta.pool[target.long()], states)
            errors["window"] = ratio(reference.live_window(p.conv.pool, target, ends), live)
        return errors

    return check
