"""What the prefill tests of both rules share: pools, the float64 oracle, and the comparison of one call with it."""

from __future__ import annotations

import math

import torch

from compact_state.cute_kernels import Checkpoints, reference
from compact_state.cute_kernels.reference.datasets import cu_seqlens, ids, initial_states, make_pool
from compact_state.cute_kernels.reference.metrics import assert_close, tolerance

DTYPES = (torch.float32, torch.bfloat16)
REFERENCE = {"gdn": reference.gdn_prefill, "kda": reference.kda_prefill}


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def filled_pool(slots, hv, dtype, dataset, used):
    """A NaN-filled pool on the GPU whose `used` slots hold states."""
    pool = make_pool(slots, (hv, 128, 128), dtype, device="cuda")
    for slot, state in zip(used, initial_states(len(used), hv, dataset=dataset).to("cuda", dtype)):
        pool[slot] = state
    return pool


def oracle(inputs, pool, read, write, cu, **options):
    """Outputs of the float64 recurrence; `pool` (float64) is advanced."""
    out = torch.empty(*inputs.v.shape, dtype=torch.float64, device="cuda")
    REFERENCE[inputs.kind](
        *inputs.tensors, pool, read, write, cu, out=out, compute_dtype=torch.float64, **inputs.gate_options, **options
    )
    return out


def check_inputs(run, inputs, lengths, dataset, dtype=torch.float32, kept=None, read=None, write=None, **options):
    """Calls `run`, the operator: compares outputs, written slots and checkpoints, and the bits of every other slot.

    `kept` is one list of token counts a sequence; each gets a slot of its own.
    """
    n, total, hv = len(lengths), sum(lengths), inputs.v.shape[1]
    entries = sum(len(ends) for ends in kept) if kept else 0
    slots = 2 * n + entries + 1
    order = torch.randperm(slots, generator=torch.Generator().manual_seed(total)).tolist()
    read = ids(*order[:n], device="cuda") if read is None else read
    write = ids(*order[n : 2 * n], device="cuda") if write is None else write
    pool = filled_pool(slots, hv, dtype, dataset, sorted({i for i in read.tolist() if 0 <= i < slots}))
    plan, targets = None, []
    if kept:
        free = iter(order[2 * n :])
        pairs = [[(end, next(free)) for end in ends] for ends in kept]
        targets = [slot for row in pairs for _, slot in row]
        plan = Checkpoints.from_lists(pairs, device="cuda")
    expected_pool, before = pool.double(), pool.clone()
    out = torch.full((total, hv, 128), math.nan, dtype=torch.bfloat16, device="cuda")
    cu = cu_seqlens(list(lengths), device="cuda")
    run(*inputs.tensors, pool, read, write, cu, out=out, checkpoints=plan, **inputs.gate_options, **options)
    expected = oracle(inputs, expected_pool, read, write, cu, checkpoints=plan, **options)
    assert_close(out, expected, tolerance("prefill", dataset, "output", dtype), "out")
    written = sorted({i for i in write.tolist() if 0 <= i < slots} | set(targets))
    for slot in written:
        assert_close(pool[slot], expected_pool[slot], tolerance("prefill", dataset, "state", dtype), f"slot {slot}")
    others = [slot for slot in range(slots) if slot not in written]
    assert torch.equal(bits(pool[others]), bits(before[others]))
