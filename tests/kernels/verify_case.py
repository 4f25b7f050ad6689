"""Inputs, logs and calls that the tests of verify and commit share."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from compact_state.cute_kernels import (
    DraftLog,
    gdn_commit,
    gdn_decode,
    gdn_prefill,
    gdn_verify,
    kda_commit,
    kda_decode,
    kda_prefill,
    kda_verify,
    reference,
)
from compact_state.cute_kernels.reference.datasets import delta_inputs, initial_states, make_pool
from compact_state.cute_kernels.reference.datasets import ids as make_ids

DEVICE, BACKEND = "cuda", "kernels"
KINDS = (("gdn", None), ("kda", None), ("kda", -5.0))
DTYPES = (torch.float32, torch.bfloat16)
VERIFY = {"gdn": gdn_verify, "kda": kda_verify}
DECODE = {"gdn": gdn_decode, "kda": kda_decode}
PREFILL = {"gdn": gdn_prefill, "kda": kda_prefill}
REFERENCE = {"gdn": (reference.gdn_verify, reference.gdn_commit), "kda": (reference.kda_verify, reference.kda_commit)}


def ids(*values):
    return make_ids(*values, device=DEVICE)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def same(a, b):
    return torch.equal(bits(a), bits(b))


def make_log(kind, batch, hk, hv, **options):
    log = DraftLog.allocate(kind, batch, hk, hv, None, DEVICE, **options)
    for part in (log.k, log.u, log.g):
        part.fill_(math.nan)
    return log


def states(count, hv, dtype, dataset="randn"):
    pool = make_pool(count, (hv, 128, 128), dtype, device=DEVICE)
    pool.copy_(initial_states(count, hv, dataset=dataset))
    return pool


def inputs(kind, bound, tokens, hk, hv, dataset="randn", seed=0):
    return delta_inputs(kind, dataset, tokens, hk, hv, lower_bound=bound, device=DEVICE, seed=seed)


def of_same_layer(x, other):
    """`x` with the gate parameters of `other`: a log of KDA holds raw gates, which the layer that replays them must share."""
    return replace(x, A_log=other.A_log, dt_bias=other.dt_bias)


def verify(x, pool, read, write, cu, log, accepted, **options):
    out = torch.full(x.v.shape, math.nan, dtype=x.v.dtype, device=DEVICE)
    options = {**x.gate_options, "backend": BACKEND, **options}
    return VERIFY[x.kind](*x.tensors, pool, read, write, cu, log, accepted, out=out, **options)


def commit(x, pool, read, write, log, accepted, **options):
    if x.kind == "gdn":
        gdn_commit(pool, read, write, log, accepted, backend=BACKEND, **options)
    else:
        kda_commit(
            x.A_log, x.dt_bias, pool, read, write, log, accepted, lower_bound=x.lower_bound, backend=BACKEND, **options
        )


def single_steps(x, pool, slots, rows, tokens):
    """Decode tokens one by one in place; `x` holds `tokens` tokens a row, row after row."""
    out = torch.empty(x.v.shape, dtype=x.v.dtype, device=DEVICE)
    for t in range(tokens):
        at = torch.arange(rows, device=DEVICE) * tokens + t
        step = x.rows(at)
        out[at] = DECODE[x.kind](*step.tensors, pool, slots, slots, **x.gate_options, backend=BACKEND)
    return out
