"""Launch chunkwise KDA prefill: records of all chunks, then the recurrence over them."""

from __future__ import annotations

import torch

from .checkpoints import Checkpoints
from .compile.cache import jit_cache
from .configs.kda_prefill import (
    LONG_LENGTH,
    RECORD_BYTES,
    KdaPrefillKey,
    heads_per_launch,
    parts_of_long_rows,
    records_key,
    slabs_per_block,
    slots_per_launch,
)
from .configs.prefill import SegmentStatesKey

kda_records = jit_cache("kda_records")
kda_prefill = jit_cache("kda_prefill")
segment_states = jit_cache("segment_states")

STATE_ELEMENTS = 128 * 128
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
    long_length: int = LONG_LENGTH,
) -> None:
    """Run packed sequences on the current stream; the arguments are checked and there is at least one sequence.

    Rows of fewer than `min_tokens` tokens are left alone: nothing of theirs is written. Rows of `long_length` tokens or more run
    in parts; how many there may be follows from shapes alone. A workspace of 65 KiB a chunk and head is taken from the caching
    allocator and kept bounded: chunks go in several launches, between which a row's state is carried in fp32, or, where rows may
    run in parts, heads do. Rows in parts take 128 KiB more a head and inner segment.
    """
    tokens, hk, width = q.shape
    hv = v.shape[1]
    rows = read_ids.shape[0]
    entries = 0 if checkpoints is None else checkpoints.ends.shape[0]
    plan = (checkpoints.cu, checkpoints.ends, checkpoints.slots) if entries else (cu_seqlens,) * 3
    slots = tokens // 64 + rows + entries
    parts = parts_of_long_rows(hv)
    long_rows = min(tokens // long_length, rows) if parts > 1 else 0
    window = slots if long_rows else slots_per_launch(slots, hv)
    group = heads_per_launch(window, hv)
    table = torch.empty(slots, 4, dtype=torch.int32, device=q.device)
    records = torch.empty(window * group, RECORD_BYTES // 4, dtype=torch.int32, device=q.device)
    make_records = kda_records(records_key(lower_bound))
    name = STATE_NAMES[state.dtype]
    run_chunks = kda_prefill(KdaPrefillKey(name, slabs_per_block(max(rows, long_rows * parts), hv)))
    inner = 2 * long_rows * (parts - 1) if long_rows else 2 * (window < slots)
    work = torch.empty(max(inner, 1), state[0].numel() if inner else 4, dtype=torch.float32, device=q.device)
    if tokens == 0:  # states still move between slots; a tensor map needs an address
        q, k, v, g, out = (x.new_zeros(1, *x.shape[1:]) for x in (q, k, v, g, out))
        b = b.new_zeros(1, hv)
    q, k, v, g, result = (_rows(x) for x in (q, k, v, g, out))
    pool = state.flatten(1)
    scale = width**-0.5 if scale is None else scale
    bound = -1.0 if lower_bound is None else lower_bound
    for chunk in range(0, slots, window):
        lines = table[chunk : chunk + window]
        for first in range(0, hv, group):
            heads = min(group, hv - first)
            make_records(
                q, k, g, b, A_log, dt_bias.flatten(), cu_seqlens, plan[0], plan[1], lines, records, scale, bound, int(qk_l2norm),
                int(entries > 0), min_tokens, chunk, first, heads, hv // hk,
            )  # fmt: skip
            tensors = (v, records, lines, pool, read_ids, write_ids, cu_seqlens, *plan, result, work)
            sizes = (
                int(entries > 0),
                min_tokens,
                chunk,
                chunk // window & 1,
                first,
                heads,
                long_rows,
                long_length,
                parts,
            )
            if long_rows:
                states = long_rows * (2 * parts - 3)
                kda_prefill(KdaPrefillKey(name, slabs_per_block(states, hv), transition=True))(*tensors, *sizes)
                if parts > 2:
                    part = work[:, first * STATE_ELEMENTS : (first + heads) * STATE_ELEMENTS]
                    segment_states(SegmentStatesKey())(part, cu_seqlens, heads, parts, long_rows, long_length)
            run_chunks(*tensors, *sizes)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """`[T, H, D]` as rows; the stride of a single row means nothing and may not be a legal one."""
    return x.flatten(1) if x.shape[0] > 1 else x.reshape(1, -1).as_strided((1, x[0].numel()), (x[0].numel(), 1))
