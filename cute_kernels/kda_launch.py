"""Launch chunkwise KDA prefill: records of all chunks, then the recurrence over them."""

from __future__ import annotations

import torch

from .checkpoints import Checkpoints
from .compile.cache import jit_cache
from .configs.kda_prefill import RECORD_BYTES, KdaPrefillKey, KdaRecordsKey, heads_per_launch, slabs_per_block

kda_records = jit_cache("kda_records")
kda_prefill = jit_cache("kda_prefill")

STATE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def launch_chunked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
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
    lower_bound: float | None,
    min_tokens: int = 0,
) -> None:
    """Run packed sequences on the current stream; the arguments are checked and there is at least one sequence.

    Rows of fewer than `min_tokens` tokens are left alone: nothing of theirs is written.
    A workspace of 65 KiB a chunk and head is taken from the caching allocator; heads go in groups that keep it bounded.
    """
    tokens, hk, width = q.shape
    hv = v.shape[1]
    rows = read_ids.shape[0]
    entries = 0 if checkpoints is None else checkpoints.ends.shape[0]
    plan = (checkpoints.cu, checkpoints.ends, checkpoints.slots) if entries else (cu_seqlens,) * 3
    slots = tokens // 64 + rows + entries
    group = heads_per_launch(slots, hv)
    table = torch.empty(slots, 4, dtype=torch.int32, device=q.device)
    records = torch.empty(slots * group, RECORD_BYTES // 4, dtype=torch.int32, device=q.device)
    gate = "softplus" if lower_bound is None else "bounded"
    make_records = kda_records(KdaRecordsKey(gate))
    run_chunks = kda_prefill(KdaPrefillKey(STATE_NAMES[state.dtype], slabs_per_block(rows, hv)))
    if tokens == 0:  # states still move between slots; a tensor map needs an address
        q, k, v, g, out = (x.new_zeros(1, *x.shape[1:]) for x in (q, k, v, g, out))
        b = b.new_zeros(1, hv)
    q, k, v, g, result = (_rows(x) for x in (q, k, v, g, out))
    pool = state.flatten(1)
    scale = width**-0.5 if scale is None else scale
    bound = -1.0 if lower_bound is None else lower_bound
    for first in range(0, hv, group):
        heads = min(group, hv - first)
        make_records(
            q, k, g, b, A_log, dt_bias.flatten(), cu_seqlens, plan[0], plan[1], table, records, scale, bound, int(qk_l2norm),
            int(entries > 0), min_tokens, first, heads, hv // hk,
        )  # fmt: skip
        run_chunks(
            v, records, table, pool, read_ids, write_ids, cu_seqlens, *plan, result, int(entries > 0), min_tokens, first,
            heads,
        )  # fmt: skip


def _rows(x: torch.Tensor) -> torch.Tensor:
    """`[T, H, D]` as rows; the stride of a single row means nothing and may not be a legal one."""
    return x.flatten(1) if x.shape[0] > 1 else x.reshape(1, -1).as_strided((1, x[0].numel()), (x[0].numel(), 1))
