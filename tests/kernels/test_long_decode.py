"""E4, E19: how the error of a state grows over 32,768 decode steps, in fp32 and bf16, against the float64 recurrence; and that
a thousand verify steps leave what single steps leave."""

from __future__ import annotations

import pytest
import torch
from verify_case import DECODE, DTYPES, KINDS, commit, ids, make_log, same, single_steps, states, verify

from compact_state.cute_kernels.reference import recurrence
from compact_state.cute_kernels.reference.datasets import cu_seqlens, delta_inputs
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


@pytest.mark.parametrize(("kind", "bound"), KINDS)
def test_a_thousand_verify_steps_leave_what_single_steps_leave(kind, bound):
    """Of six drafts a step 0 to 6 are accepted, the others come again changed. fp32, and bf16 rounded every token: the bits of
    decode; bf16 rounded where it is stored is not farther from fp32 than decode is."""
    rows, drafts, steps, rng = 3, 6, 1000, torch.Generator().manual_seed(0)
    counts = torch.randint(0, drafts + 1, (steps,), generator=rng)
    counts = torch.stack([counts[torch.randperm(steps, generator=rng)] for _ in range(rows)], 1).int()
    tokens = int(counts[:, 0].sum())
    x = delta_inputs(kind, "trained", rows * (tokens + drafts), HK, HV, lower_bound=bound, device="cuda")
    begins = torch.arange(rows) * (tokens + drafts) + torch.cat([torch.zeros(1, rows), counts]).cumsum(0)[:-1].long()
    first = (begins[0][:, None] + torch.arange(tokens)).flatten().cuda()
    cu, slots = cu_seqlens([drafts] * rows, "cuda"), torch.arange(rows, dtype=torch.int32, device="cuda")
    accepted = torch.cat([torch.zeros(1, rows, dtype=torch.int32), counts]).cuda()
    found = {}
    for dtype in DTYPES:
        found[dtype] = states(rows, HV, dtype, "trained")
        single_steps(x.rows(first), found[dtype], slots, rows, tokens)
    for dtype, rounds in ((torch.float32, False), (torch.bfloat16, True), (torch.bfloat16, False)):
        pool, log = states(rows, HV, dtype, "trained"), make_log(kind, rows, HK, HV)
        for step, begin in enumerate(begins):
            drafted = x.rows((begin[:, None] + torch.arange(drafts)).flatten().cuda())
            drafted.v.masked_fill_((torch.arange(drafts) >= counts[step][:, None]).flatten()[:, None, None].cuda(), 9.0)
            verify(drafted, pool, slots, slots, cu, log, accepted[step], round_every_token=rounds)
            log.half.bitwise_xor_(1)
        commit(x, pool, slots, slots, log, accepted[steps], round_every_token=rounds)
        if dtype == torch.float32 or rounds:
            assert same(pool, found[dtype])
        else:
            assert error(pool, found[torch.float32].double()) <= error(found[dtype], found[torch.float32].double())
