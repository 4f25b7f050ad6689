"""The ways to run GDN prefill, and operands, that its tests share."""

from __future__ import annotations

import functools

import torch
from prefill_case import check_inputs

from compact_state.cute_kernels import gdn_launch, gdn_prefill
from compact_state.cute_kernels.reference.datasets import delta_inputs

PATHS = (
    "public",
    "wholes",
    "halves",
    "parts",
    "parts of halves",
    "records",
    "records, halves",
    "records, parts",
    "records, parts of halves",
)


def public(*arguments, out=None, **options):
    return gdn_prefill(*arguments, out=out, backend="kernels", **options)


def chunked(q, k, v, *arguments, out=None, checkpoints=None, scale=None, qk_l2norm=True, **options):
    """The chunked kernels whatever the lengths are."""
    out = torch.empty_like(v, memory_format=torch.contiguous_format) if out is None else out
    gdn_launch.launch_chunked(
        q, k, v, *arguments, out, checkpoints=checkpoints, scale=scale, qk_l2norm=qk_l2norm, **options
    )
    return out


RUN = {
    "public": public,
    **{
        prefix + name: functools.partial(chunked, records=records, **options)
        for prefix, records in (("", False), ("records, ", True))
        for name, options in (
            ("wholes", {"slabs": 2}),
            ("halves", {"slabs": 1}),
            ("parts", {"long_length": 128, "slabs": 2}),
            ("parts of halves", {"long_length": 128, "slabs": 1}),
        )
    },
}
RUN["records"] = RUN.pop("records, wholes")
COLUMNS = "records, columns"  # a call of few heads, which `public` makes for the small ones of these tests
RUN[COLUMNS] = functools.partial(chunked, records=True, columns=True)


def check(lengths, hk=2, hv=4, dataset="randn", path="wholes", **options):
    total = sum(lengths)
    inputs = delta_inputs("gdn", dataset, total, hk, hv, device="cuda", seed=total + hv)
    check_inputs(RUN[path], inputs, lengths, dataset, **options)


def equal_keys(tokens, size=1.0):
    inputs = delta_inputs("gdn", "zero", tokens, 1, 2, device="cuda", packed=False)
    inputs.k[:] = size * inputs.k[:1]
    return inputs
