"""E4, E19: how the error of a state grows over 32,768 decode steps, in fp32 and bf16, against the float64 recurrence."""

from __future__ import annotations

import pytest
import torch
from verify_case import DECODE, DTYPES, KINDS, ids

from compact_state.cute_kernels.reference import recurrence
from compact_state.cute_kernels.reference.datasets import delta_inputs
from compact_state.cute_kernels.reference.gdn import gdn_tokens
from compact_state.cute_kernels.reference.kda import kda_tokens

pytestmark = pytest.mark.gpu

HK, HV, TOKENS = 1, 2, 256
STEPS = (1024, 8192, 32_768)


def exact_tokens(inputs):
    """The tokens as float64: what a kernel sees, before any arithmetic."""
    options = (None, True, torch.float64)
    if inputs.kind == "gdn":
        return gdn_tokens(*inputs.tensors, *options)
    return kda_tokens(*inputs.tensors, inputs.lower_bound, *options)


def error(state, exact):
    return float((state.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


@pytest.mark.parametrize(("kind", "bound"), KINDS)
def test_E4_E19_the_error_of_a_state_over_thousands_of_steps(kind, bound):
    """In fp32 it stays small and far from linear; in bf16 it is that of the stores, which exact arithmetic has as well."""
    inputs = delta_inputs(kind, "trained", TOKENS, HK, HV, lower_bound=bound, device="cuda")
    inputs.b.fill_(0.5)
    tokens, slot = exact_tokens(inputs), ids(0)
    decay = tokens.decay()
    exact = torch.zeros(1, HV, 128, 128, dtype=torch.float64, device="cuda")
    pools = {dtype: torch.zeros_like(exact, dtype=dtype) for dtype in DTYPES}
    stored = torch.zeros_like(exact, dtype=torch.bfloat16)

    def pass_once():
        for t in range(TOKENS):
            at = slice(t, t + 1)
            rounded = stored.double()
            for state in (exact, rounded):
                recurrence.step(state, tokens.q[at], tokens.k[at], tokens.v[at], decay[at], tokens.beta[at])
            stored.copy_(rounded)
            for pool in pools.values():
                DECODE[kind](*inputs.rows(at).tensors, pool, slot, slot, **inputs.gate_options, backend="kernels")

    pass_once()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        pass_once()
    curves = {name: [] for name in ("fp32", "bf16", "bf16, exact arithmetic")}
    for done in range(2 * TOKENS, STEPS[-1] + 1, TOKENS):
        graph.replay()
        if done in STEPS:
            for curve, state in zip(curves.values(), (*pools.values(), stored), strict=True):
                curve.append(error(state, exact))
    print(kind, bound, STEPS, {name: [f"{value:.1e}" for value in curve] for name, curve in curves.items()})
    fp32, bf16, storing = curves.values()
    assert max(fp32) < 1e-4
    assert fp32[-1] < 8 * fp32[0]
    assert all(ours < 1.1 * theirs for ours, theirs in zip(bf16, storing))
