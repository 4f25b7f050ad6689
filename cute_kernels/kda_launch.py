"""Launch chunkwise KDA prefill: records of all chunks, then the recurrence over them."""

from __future__ import annotations

import torch

from .checkpoints import Checkpoints
from .compile.cache import CompiledKernel, jit_cache
from .configs.kda_prefill import (
    BLOCKS_OF_RECORDS,
    ORDERED_ROWS,
    RECORD_BYTES,
    KdaColumnsKey,
    KdaPrefillKey,
    RecurrenceKey,
    heads_per_launch,
    overlap,
    parts_of_long_rows,
    records_key,
    recurrence_key,
    rows_at_once,
    shortest_long_row,
    slabs_per_block,
    slots_per_launch,
)
from .configs.prefill import SegmentStatesKey

kda_records = jit_cache("kda_records")
kda_prefill = jit_cache("kda_prefill")
kda_columns = jit_cache("kda_columns")
segment_states = jit_cache("segment_states")

STATE_ELEMENTS = 128 * 128
NO_ROW = 2**31 - 1  # tokens: more than any row has
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
    long_length: int | None = None,
) -> None:
    """Run packed sequences on the current stream; the arguments are checked and there is at least one sequence.

    Rows of fewer than `min_tokens` tokens are left alone: nothing of theirs is written. Rows of `long_length` tokens or more, by
    default `shortest_long_row`, run in parts; how many there may be follows from shapes alone. A workspace of 59 KiB a chunk and
    head is taken from the caching allocator and kept bounded: chunks go in several launches, between which a row's state is
    carried in fp32, or, where rows may run in parts, heads do. Rows in parts take 128 KiB more a head and inner segment. Where
    shapes say that it ends sooner, the launch behind that of the records runs beside it; no bit depends on that.
    """
    tokens, hk, width = q.shape
    hv = v.shape[1]
    rows = read_ids.shape[0]
    entries = 0 if checkpoints is None else checkpoints.ends.shape[0]
    plan = (checkpoints.cu, checkpoints.ends, checkpoints.slots) if entries else (cu_seqlens,) * 3
    slots = tokens // 64 + rows + entries
    parts = parts_of_long_rows(hv)
    long_length = shortest_long_row(hv) if long_length is None else long_length
    long_rows = min(tokens // long_length, rows) if parts > 1 else 0
    window = slots if long_rows else slots_per_launch(slots, hv)
    group = heads_per_launch(window, hv)
    table = torch.empty(slots, 4, dtype=torch.int32, device=q.device)
    records = torch.empty(window * group, RECORD_BYTES // 4, dtype=torch.int32, device=q.device)
    name = STATE_NAMES[state.dtype]
    # What the launch behind the records walks: segments of long rows, or, where most rows must be short ones, whole rows.
    segments = long_rows > 0 and tokens >= rows * long_length
    states = long_rows * (2 * parts - 3)
    chains, pieces = (states, parts) if segments else (rows, 1)
    beside = None
    if rows * pieces <= ORDERED_ROWS:
        steps = window / (long_rows * parts if segments else rows)
        beside = overlap(
            window, hv, chains, steps, segments, 2.0 if long_rows and not segments else 0.0, lower_bound is None
        )
    flags = torch.empty(window * group, dtype=torch.int32, device=q.device) if beside else cu_seqlens
    make_records = kda_records(records_key(lower_bound, beside is not None))
    find_states: RecurrenceKey = KdaPrefillKey(name, slabs_per_block(max(states, 1), hv, equal=True), transition=True)
    run_chunks = KdaPrefillKey(name, slabs_per_block(max(rows, long_rows * parts), hv, tokens=tokens / rows))
    if beside and segments:
        find_states = recurrence_key(name, beside.columns, transition=True)
    elif beside:
        run_rows = recurrence_key(name, beside.columns, transition=False)
    together = rows_at_once(max(rows, long_rows * parts), group, run_chunks.slabs)
    dealt = (BLOCKS_OF_RECORDS, together, 0, 0)
    if beside:
        dealt = (beside.blocks, beside.stay, beside.rounds, beside.early)
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
                q, k, g, b, A_log, dt_bias.flatten(), cu_seqlens, plan[0], plan[1], lines, records, flags, scale, bound,
                int(qk_l2norm), int(entries > 0), min_tokens, chunk, first, heads, hv // hk, *dealt, long_length, pieces,
            )  # fmt: skip
            tensors = (v, records, flags, lines, pool, read_ids, write_ids, cu_seqlens, *plan, result, work)
            place = (chunk, chunk // window & 1, first, heads, long_rows, long_length)
            least = min_tokens
            if beside and not segments:  # whole rows alone, which no launch behind it walks again
                recurrence(run_rows)(*tensors, int(entries > 0), min_tokens, *place, 0)
                least = NO_ROW
            if long_rows:
                recurrence(find_states)(*tensors, int(entries > 0), least, *place, parts)
                if parts > 2:
                    part = work[:, first * STATE_ELEMENTS : (first + heads) * STATE_ELEMENTS]
                    segment_states(SegmentStatesKey())(part, cu_seqlens, heads, parts, long_rows, long_length)
            if long_rows or least == min_tokens:
                recurrence(run_chunks)(*tensors, int(entries > 0), least, *place, parts)


def recurrence(key: RecurrenceKey) -> CompiledKernel:
    """The kernel of either form."""
    return kda_columns(key) if isinstance(key, KdaColumnsKey) else kda_prefill(key)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """`[T, H, D]` as rows; the stride of a single row means nothing and may not be a legal one."""
    return x.flatten(1) if x.shape[0] > 1 else x.reshape(1, -1).as_strided((1, x[0].numel()), (x[0].numel(), 1))
