"""The three ways to run GDN prefill and the comparison with the float64 recurrence that its tests share."""

from __future__ import annotations

import functools
import math

import torch

from compact_state.cute_kernels import Checkpoints, gdn_launch, gdn_prefill, reference
from compact_state.cute_kernels.reference.datasets import cu_seqlens, delta_inputs, ids, initial_states, make_pool
from compact_state.cute_kernels.reference.metrics import assert_close, tolerance

DTYPES = (torch.float32, torch.bfloat16)
PATHS = ("public", "chunked", "parts")


def public(*arguments, out=None, **options):
    return gdn_prefill(*arguments, out=out, backend="kernels", **options)


def chunked(q, k, v, *arguments, out=None, checkpoints=None, scale=None, qk_l2norm=True, **options):
    """The chunked kernels whatever the lengths are."""
    out = torch.empty_like(v, memory_format=torch.contiguous_format) if out is None else out
    gdn_launch.launch_chunked(
        q, k, v, *arguments, out, checkpoints=checkpoints, scale=scale, qk_l2norm=qk_l2norm, **options
    )
    return out


RUN = {"public": public, "chunked": chunked, "parts": functools.partial(chunked, long_length=128)}


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def filled_pool(slots, hv, dtype, dataset, used):
    """A NaN-filled pool on the GPU whose `used` slots hold states."""
    pool = make_pool(slots, (hv, 128, 128), dtype, device="cuda")
    for slot, state in zip(used, initial_states(len(used), hv, dataset=dataset).to("cuda", dtype)):
        pool[slot] = state
    return pool


def check(
    lengths,
    hk=2,
    hv=4,
    dtype=torch.float32,
    dataset="randn",
    path="chunked",
    kept=None,
    read=None,
    write=None,
    **options,
):
    """Run, compare outputs, written slots and checkpoints, and that every other slot keeps its bits.

    `kept` is one list of token counts a sequence; each gets a slot of its own.
    """
    n, total = len(lengths), sum(lengths)
    entries = sum(len(ends) for ends in kept) if kept else 0
    slots = 2 * n + entries + 1
    inputs = delta_inputs("gdn", dataset, total, hk, hv, device="cuda", seed=total + hv)
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
    RUN[path](*inputs.tensors, pool, read, write, cu, out=out, checkpoints=plan, **options)
    expected = reference.gdn_prefill(
        *inputs.tensors, expected_pool, read, write, cu, checkpoints=plan, compute_dtype=torch.float64,
        out=torch.empty(total, hv, 128, dtype=torch.float64, device="cuda"), **options,
    )  # fmt: skip
    assert_close(out, expected, tolerance("prefill", dataset, "output", dtype), "out")
    written = sorted({i for i in write.tolist() if 0 <= i < slots} | set(targets))
    for slot in written:
        assert_close(pool[slot], expected_pool[slot], tolerance("prefill", dataset, "state", dtype), f"slot {slot}")
    others = [slot for slot in range(slots) if slot not in written]
    assert torch.equal(bits(pool[others]), bits(before[others]))


def equal_keys(tokens, size=1.0):
    inputs = delta_inputs("gdn", "zero", tokens, 1, 2, device="cuda", packed=False)
    inputs.k[:] = size * inputs.k[:1]
    return inputs
