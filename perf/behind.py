"""What a decode launch adds behind the projection that feeds it, and whether a captured step has gaps.

`python -m compact_state.perf.behind --out DIR` writes `behind.txt`, three tables.
1. A graph of pairs: a projection (cuBLAS; each its own weights, so that they come from memory) and a launch on the row it wrote.
   The figure is a pair's time less that of the projection alone.
2. The same behind a projection that lets the next kernel start beside it (`projection.py`).
3. A step of layers (projection, layer step, output projection; then the ids) in one graph: its time a layer, against the sum of
   what its kernels take launched back to back, and the time between kernels as the profiler sees it.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .. import cute_kernels
from . import peers
from .bench_decode import peer_contenders
from .bench_layer import ACTIVATION, LayerProblem, layer_problem
from .cases import Case, Workload
from .geometries import BY_ID, HEAD_DIM
from .inputs import Workspace
from .timing import Contender, GraphTimer

HIDDEN = 2048
PAIRS = 24  # of a graph
WEIGHTS = 6  # sets of them: together several times the L2 cache
LAYERS = 12  # of the captured step
CASES = (("Q1", 1), ("Q1", 8), ("Q3", 8), ("G1", 1), ("G1", 8))  # one wave of blocks or less
STEPS = (("Q1", 8), ("Q1", 64), ("G1", 8))
HOW = {"settled": {"settled": True}, "waiting": {}, "plain": {"pdl": False}}
Launch = Callable[[], Any]


class Projected:
    """A layer's inputs as views of rows that a projection writes. mm: what projects, called like `torch.mm`."""

    def __init__(self, ws: Workspace, geometry: str, rows: int, state: str) -> None:
        g = BY_ID[geometry]
        case = Case(f"{g.kind}_layer_decode", g, Workload(f"B{rows}", (1,) * rows), state)
        made = layer_problem(ws, case)
        self.case, self.width = case, g.channels + g.hv * HEAD_DIM
        self.mm: Callable[..., Any] = torch.mm
        self.hidden = ws.normal(rows, HIDDEN)
        self.weights = [ws.normal(HIDDEN, self.width).mul_(HIDDEN**-0.5) for _ in range(WEIGHTS)]
        self.back = [ws.normal(g.hv * HEAD_DIM, HIDDEN).mul_(HIDDEN**-0.5) for _ in range(WEIGHTS)]
        self.row = torch.empty(rows, self.width, dtype=torch.bfloat16, device=ws.device)
        self.project(0)()
        x, z = self.row[:, : g.channels], self.row[:, g.channels :]
        q, k, v = x.split([g.hk * HEAD_DIM, g.hk * HEAD_DIM, g.hv * HEAD_DIM], dim=1)
        heads = {"q": q.unflatten(1, (g.hk, HEAD_DIM)), "k": k.unflatten(1, (g.hk, HEAD_DIM))}
        delta = replace(made.delta, **heads, v=v.unflatten(1, (g.hv, HEAD_DIM)))
        self.layer = LayerProblem(delta, replace(made.conv, x=x), z, made.norm_weight)
        self.ids = ws.slot_ids(delta.pool.shape[0], rows, PAIRS)
        self.outs = [torch.empty(rows, g.hv * HEAD_DIM, dtype=torch.bfloat16, device=ws.device) for _ in range(PAIRS)]
        self.heads = [out.unflatten(1, (g.hv, HEAD_DIM)) for out in self.outs]

    def project(self, i: int) -> Launch:
        """The projection into the packed row."""
        return lambda: self.mm(self.hidden, self.weights[i % WEIGHTS], out=self.row)

    def project_back(self, i: int) -> Launch:
        """The output projection of a layer."""
        return lambda: torch.mm(self.outs[i], self.back[i % WEIGHTS], out=self.hidden)

    def decode(self, i: int, **how: bool) -> Launch:
        """The bare recurrence on the row's q, k and v."""
        p, (read, write) = self.layer.delta, self.ids[i]
        operator = getattr(cute_kernels, f"{p.geometry.kind}_decode")
        return lambda: operator(*p.arguments, p.pool, read, write, out=self.heads[i], **how, **p.options)

    def layer_step(self, i: int, **how: bool) -> Launch:
        """The fused layer on the row."""
        p, c, (read, write) = self.layer.delta, self.layer.conv, self.ids[i]
        operator, (activation, eps) = getattr(cute_kernels, self.case.op), ACTIVATION[p.geometry.kind]
        tensors = (c.x, p.gate, p.b, self.layer.z, c.weight, c.pool, p.A_log, p.dt_bias, self.layer.norm_weight, p.pool)
        options = {"gate_activation": activation, "eps": eps, "out": self.outs[i], **how, **p.options}
        return lambda: operator(*tensors, read, write, c.positions, **options)


def early(p: Projected) -> Callable[..., Any]:
    """A product that lets the next kernel start beside it. Raises AssertionError where it differs from cuBLAS'."""
    product = importlib.import_module(".projection", __package__).mm
    expected = p.row.clone()
    torch.testing.assert_close(product(p.hidden, p.weights[0], out=torch.empty_like(expected)), expected)
    return product  # type: ignore[no-any-return]


def pair(first: Launch, second: Launch) -> Launch:
    """Two launches as one."""

    def both() -> None:
        first()
        second()

    return both


def behind(p: Projected, adapters: dict[str, Any], timer: GraphTimer) -> dict[str, float]:
    """Microseconds by contender: alone (`bare`, back to back) and, less the projection, behind it."""
    every = range(PAIRS)
    found, _ = peer_contenders(adapters, "decode", p.ids, p.heads, p.layer.delta)
    launches: dict[str, Sequence[Launch]] = {
        **{name: [p.decode(i, **how) for i in every] for name, how in HOW.items()},
        **{f"layer {name}": [p.layer_step(i, **how) for i in every] for name, how in HOW.items()},
        **{contender.name: contender.launches for contender in found},
    }
    contenders = [Contender("ours_gemm", [p.project(i) for i in every])]
    for name, made in launches.items():
        contenders.append(Contender(f"bare {name}", made))
        contenders.append(Contender(f"behind {name}", [pair(p.project(i), made[i]) for i in every]))
    timings = timer.time(contenders)
    for name, why in timings.failures.items():
        print(f"{name}: {why}", file=sys.stderr)
    us = {name: timing.us for name, timing in timings.by_name.items()}
    gemm = us.pop("ours_gemm")
    return {"gemm": gemm} | {name: t - gemm if name.startswith("behind") else t for name, t in us.items()}


def step(p: Projected, timer: GraphTimer) -> dict[str, float]:
    """Microseconds a layer of a captured step, the sum of its kernels' own, and the profiler's time between kernels."""
    positions, slots = p.layer.conv.positions, p.layer.delta.pool.shape[0]
    read, write = p.ids[0]
    advance = lambda: cute_kernels.advance_state_ids(read, write, positions, num_slots=slots)
    layers = [
        launch
        for i in range(LAYERS)
        for launch in (p.project(i), p.layer_step(i, pdl=False), p.project_back(i))  # cuBLAS lets none start beside it
    ]

    def whole() -> None:
        for launch in (*layers, advance):
            launch()

    contenders = [
        Contender("ours", [whole] * 2),
        Contender("ours_in", [p.project(i) for i in range(PAIRS)]),
        Contender("ours_layer", [p.layer_step(i, settled=True) for i in range(PAIRS)]),
        Contender("ours_back", [p.project_back(i) for i in range(PAIRS)]),
    ]
    us = {name: timing.us for name, timing in timer.time(contenders).by_name.items()}
    total = us["ours"] / LAYERS
    parts = us["ours_in"] + us["ours_layer"] + us["ours_back"]
    return {"a layer": total, "sum of its kernels": parts, **gaps(whole)}


def gaps(whole: Launch) -> dict[str, float]:
    """Between one kernel's end and the next one's start, over a replay: the largest and the mean (negative: they overlap)."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        whole()
    graph.replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        graph.replay()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiled.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    between = [after[0] - before[1] for before, after in itertools.pairwise(spans)]
    if not between:
        return {}
    return {"largest gap": max(between), "mean gap": sum(between) / len(between)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write both tables. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="compact_state.perf.behind")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--peers", default="flashinfer,lmdeploy")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    adapters, status = peers.load(options.peers)
    timer = GraphTimer()
    with (options.out / "behind.txt").open("w") as file, torch.no_grad():

        def say(text: str) -> None:
            print(text, flush=True)
            print(text, file=file, flush=True)

        say(f"{torch.cuda.get_device_name()}; {', '.join(f'{name} {version}' for name, version in status.items())}")
        ws = Workspace(torch.device("cuda"), 1 << 30)
        for what, cases in (
            ("behind cuBLAS", CASES),
            ("behind a projection beside which it may start", CASES),
            ("step", STEPS),
        ):
            say(f"{what}, us")
            for (geometry, rows), state in itertools.product(cases, ("float32", "bfloat16")):
                p = Projected(ws, geometry, rows, state)
                p.mm = early(p) if "beside" in what else torch.mm
                figures = step(p, timer) if what == "step" else behind(p, adapters, timer)
                say(f"   {geometry} B{rows} {state}: " + ", ".join(f"{name} {us:.2f}" for name, us in figures.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
