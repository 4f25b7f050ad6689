"""Launch chunkwise GDN prefill: one kernel, or three where rows may be long enough to be run in parts."""

from __future__ import annotations

from typing import Literal

import torch

from .checkpoints import Checkpoints
from .compile.cache import jit_cache
from .configs.prefill import LONG_LENGTH, GdnPrefillKey, SegmentStatesKey, parts_of_long_rows, slabs_per_block

gdn_prefill = jit_cache("gdn_prefill")
segment_states = jit_cache("segment_states")

STATE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def launch_chunked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    read_ids: torch.Tensor,
    write_ids: torch.Tensor,
    cu_seqlens: torch.Tensor,
    out: torch.Tensor,
    *,
    checkpoints: Checkpoints | None,
    scale: float | None,
    qk_l2norm: bool,
    min_tokens: int = 0,
    long_length: int = LONG_LENGTH,
    slabs: Literal[1, 2] | None = None,
) -> None:
    """Run packed sequences of any lengths, zero included, on the current stream.

    The arguments are those of `gdn.gdn_prefill`, already checked, with at least one sequence. Nothing of a sequence with
    fewer than `min_tokens` tokens is read or written, nor are rows of `out` beyond `cu_seqlens[N]`. Rows of `long_length`
    tokens or more run in parts (`kernels/gdn_prefill.py`), which takes a workspace of 128 KiB a head and inner segment; how
    many there may be follows from shapes alone. `slabs` is that of `GdnPrefillKey`, by default what ends soonest.
    """
    tokens, hk, width = q.shape
    hv = v.shape[1]
    if checkpoints is None or checkpoints.ends.shape[0] == 0:
        plan, has_plan = (cu_seqlens, cu_seqlens, cu_seqlens), 0
    else:
        plan, has_plan = (checkpoints.cu, checkpoints.ends, checkpoints.slots), 1
    if tokens == 0:  # states still move between slots; the loads of a chunk without tokens need an address
        q, k, v, out = (x.new_zeros(1, *x.shape[1:]) for x in (q, k, v, out))
        a, b = (x.new_zeros(1, hv) for x in (a, b))
    parts = parts_of_long_rows(hv)
    long_rows = min(tokens // long_length, read_ids.shape[0]) if parts > 1 else 0
    slots = 2 * long_rows * (parts - 1)
    work = torch.empty(max(slots, 1), state[0].numel() if slots else 4, dtype=torch.float32, device=q.device)
    name = STATE_NAMES[state.dtype]
    tensors = (*(_rows(x) for x in (q, k, v)), a, b, A_log, dt_bias, state.flatten(1), read_ids, write_ids, cu_seqlens)
    sizes = (hk, hv, state.shape[0])
    rest = (int(qk_l2norm), min_tokens, long_rows, long_length, parts, width**-0.5 if scale is None else scale)
    target = _rows(out)
    if long_rows:
        no_plan = (cu_seqlens, cu_seqlens, cu_seqlens)
        found = slabs or slabs_per_block(hv * long_rows * (2 * parts - 3))
        gdn_prefill(GdnPrefillKey(name, transition=True, slabs=found))(
            *tensors, *no_plan, target, work, *sizes, 0, *rest
        )
        if parts > 2:
            segment_states(SegmentStatesKey())(work, cu_seqlens, hv, parts, long_rows, long_length)
    rows = read_ids.shape[0]
    # As if all rows were of one length: what is known without reading it.
    chosen = slabs or slabs_per_block(hv * rows * (parts if long_rows == rows else 1))
    gdn_prefill(GdnPrefillKey(name, slabs=chosen))(*tensors, *plan, target, work, *sizes, has_plan, *rest)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """`[T, H, D]` as rows; the stride of a single row means nothing and may not be a legal one."""
    return x.flatten(1) if x.shape[0] > 1 else x.reshape(1, -1).as_strided((1, x[0].numel()), (x[0].numel(), 1))
