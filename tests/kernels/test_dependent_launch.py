"""`pdl`: whether a launch is a programmatic dependent of the kernel before it, and that nothing else changes without it."""

from __future__ import annotations

import ctypes
from typing import ClassVar

import pytest
import torch
from layer_case import DTYPES, bits, make_pools, make_step

from compact_state import cute_kernels
from compact_state.cute_kernels import DraftLog
from compact_state.cute_kernels.reference.datasets import cu_seqlens, ids

pytestmark = pytest.mark.gpu

ROWS, HK, HV, SLOTS = 3, 1, 2, 8
OPERATORS = ("causal_conv1d_decode", "causal_conv1d_verify", "decode", "verify", "layer_decode", "layer_verify")
PROGRAMMATIC = 1  # CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC


class Edge(ctypes.Structure):
    """CUgraphEdgeData."""

    _fields_: ClassVar = [
        ("from_port", ctypes.c_ubyte),
        ("to_port", ctypes.c_ubyte),
        ("type", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 5),
    ]


def edges(launches):
    """Types of the dependencies between captured launches."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    query, handle = ctypes.CDLL("libcuda.so.1").cuGraphGetEdges_v2, ctypes.c_void_p(graph.raw_cuda_graph())
    count = ctypes.c_size_t()
    assert query(handle, None, None, None, ctypes.byref(count)) == 0
    nodes, data = [(ctypes.c_void_p * count.value)() for _ in range(2)], (Edge * count.value)()
    assert query(handle, *nodes, data, ctypes.byref(count)) == 0
    return [edge.type for edge in data]


def call(name, kind, bound, dtype):
    """A function that runs the operator on pools of its own and returns all that it wrote."""
    verify = name.endswith("verify")
    step = make_step(kind, bound, 2 * ROWS if verify else ROWS, HK, HV)
    pools = make_pools(SLOTS, step, dtype)
    q, k, v = (part.unflatten(1, (-1, 128)) for part in step.x.split([HK * 128, HK * 128, HV * 128], dim=1))
    log = DraftLog.allocate(kind, ROWS, HK, HV, step.x.shape[1], "cuda")
    for part in (log.k, log.u, log.g, log.x):
        part.zero_()
    at = (ids(0, 1, -1, device="cuda"), ids(4, 5, -1, device="cuda"))
    positions = ids(4, 9, 0, device="cuda")
    drafts = (cu_seqlens([2, 2, 2]).cuda(), log, torch.zeros(ROWS, dtype=torch.int32, device="cuda")) if verify else ()
    gate = {} if kind == "gdn" else {"lower_bound": bound}

    def run(**options):
        windows, state = pools
        if name.startswith("causal"):
            operator = getattr(cute_kernels, name)
            out = operator(step.x, step.weight, windows, *at, positions, *drafts, backend="kernels", **options)
        elif name.startswith("layer"):
            options |= dict(zip(("cu_seqlens", "draft_log", "num_accepted"), drafts))
            out = step.kernel(windows, state, *at, positions, **options)
        else:
            operator = getattr(cute_kernels, f"{kind}_{name}")
            parameters = (step.gate, step.b, step.A_log, step.dt_bias)
            out = operator(q, k, v, *parameters, state, *at, *drafts, backend="kernels", **gate, **options)
        return out, windows[4:6], state[4:6], log.k, log.u, log.g, log.x

    return run


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "bound"), [("gdn", None), ("kda", -5.0)])
@pytest.mark.parametrize("name", OPERATORS)
def test_a_launch_without_pdl_is_no_dependent_and_computes_the_same(name, kind, bound, dtype):
    run = call(name, kind, bound, dtype)
    expected = [part.clone() for part in run()]
    for settled in (False, True):
        found = run(settled=settled, pdl=False)
        assert all(torch.equal(bits(x), bits(y)) for x, y in zip(expected, found))
    launches = [run, lambda: run(pdl=False), run, lambda: run(settled=True), lambda: run(settled=True, pdl=False)]
    kinds = edges(launches[:2])
    assert kinds.count(PROGRAMMATIC) == 0, kinds
    kinds = edges(launches)
    assert kinds.count(PROGRAMMATIC) == 2, kinds
