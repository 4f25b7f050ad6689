"""Launch chunkwise GDN prefill: one kernel, or records of all chunks and then the recurrence where few sequences and heads leave
multiprocessors idle; two launches more where rows may be long enough to be run in parts. Where shapes do not say which form
is faster both are launched, and the lengths, on the device, which one works."""

from __future__ import annotations

from typing import Literal

import torch

from .checkpoints import Checkpoints
from .compile.cache import jit_cache
from .configs.gdn_records import (
    CHUNK,
    COLUMNS,
    MOST_ROWS,
    NO_ROW,
    RECORD_BYTES,
    GdnColumnsKey,
    GdnRecordsKey,
    GdnRecurrenceKey,
    forms,
    parts_from_records,
    plan_of_row,
    recurrence_slabs,
    takes_columns,
)
from .configs.prefill import (
    LONG_LENGTH,
    GdnPrefillKey,
    SegmentStatesKey,
    lead_of_long_rows,
    parts_of_long_rows,
    slabs_per_block,
)

gdn_columns = jit_cache("gdn_columns")
gdn_prefill = jit_cache("gdn_prefill")
gdn_records = jit_cache("gdn_records")
gdn_recurrence = jit_cache("gdn_recurrence")
segment_states = jit_cache("segment_states")

FIRST_FORMS: tuple[tuple[Literal[1, 2], ...], ...] = ((), (1, 2), (1,))  # of the recurrence, by who chooses
NO_PLAN = (0, 0, 0, 0)  # of records: the kernel's to find
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
    records: bool | None = None,
    columns: bool | None = None,
) -> None:
    """Run packed sequences of any lengths, zero included, on the current stream.

    The arguments are those of `gdn.gdn_prefill`, already checked, with at least one sequence. Nothing of a sequence with
    fewer than `min_tokens` tokens is read or written, nor are rows of `out` beyond `cu_seqlens[N]`. Rows of `long_length`
    tokens or more run in parts (`kernels/gdn_prefill.py`), which takes a workspace of 128 KiB a head and inner segment; how
    many there may be follows from shapes alone. `slabs` is that of `GdnPrefillKey`, by default what ends soonest; `records` says
    whether records are made first, which takes a workspace of 17.6 KiB a chunk and head, for at most 32 sequences; `columns`
    whether their recurrence has blocks of some columns of a head. None of them changes a bit.
    """
    tokens, hk, width = q.shape
    hv, rows = v.shape[1], read_ids.shape[0]
    entries = 0 if checkpoints is None else checkpoints.ends.shape[0]
    plan = (checkpoints.cu, checkpoints.ends, checkpoints.slots) if checkpoints and entries else (cu_seqlens,) * 3
    chunk_slots = tokens // CHUNK + rows + entries
    if records is None:
        # A form asked for is not left to lengths.
        one, records, choose = forms(tokens, chunk_slots, hv, rows)
        one, choose = (not records, 0) if slabs and rows <= MOST_ROWS else (one, choose)
    else:
        records, choose = records and rows <= MOST_ROWS, 0
        one = not records
    # Of two parts a row is uncut from records.
    parts, recorded_parts = parts_of_long_rows(hv), parts_from_records(hv)
    long_rows = min(tokens // long_length, rows) if parts > 1 else 0
    recorded_rows = long_rows if recorded_parts > 1 else 0
    if columns is None:
        columns = takes_columns(hv * rows) and not (slabs or one or choose or recorded_rows)
    if tokens == 0:  # states still move between slots; the loads of a chunk without tokens need an address
        q, k, v, out = (x.new_zeros(1, *x.shape[1:]) for x in (q, k, v, out))
        a, b = (x.new_zeros(1, hv) for x in (a, b))
    states = 2 * long_rows * (parts - 1)
    work = torch.empty(max(states, 1), state[0].numel() if states else 4, dtype=torch.float32, device=q.device)
    name = STATE_NAMES[state.dtype]
    q, k, v, target = (_rows(x) for x in (q, k, v, out))
    places = (state.flatten(1), read_ids, write_ids, cu_seqlens, *plan, target, work)
    sizes, l2norm = (hk, hv, state.shape[0], int(entries > 0)), int(qk_l2norm)
    lead = lead_of_long_rows(hv)
    scale = width**-0.5 if scale is None else scale
    # Rows that may be long count where all may be, two as one: more is not known without reading lengths.
    heads = hv * -(-long_rows // 2) if long_rows == rows else hv

    def one_launch(transition: bool, items: int) -> None:
        chunk = GdnPrefillKey(name, transition, slabs or slabs_per_block(hv * items))
        cut = (min_tokens, long_rows, long_length, parts, lead)
        gdn_prefill(chunk)(q, k, v, a, b, A_log, dt_bias, *places, *sizes, l2norm, *cut, choose, scale)

    recorded_cut = (min_tokens, recorded_rows, long_length, recorded_parts, lead)

    def recur(transition: bool, half: Literal[1, 2], inner: int) -> None:
        key = GdnRecurrenceKey(name, transition, slabs or half)
        gdn_recurrence(key)(q, k, v, *places, made, *sizes, *recorded_cut, inner, choose)

    if records:
        made = torch.empty(chunk_slots * hv, RECORD_BYTES // 4, dtype=torch.int32, device=q.device)
        first = slabs or recurrence_slabs(hv * rows)
        blocks = width // COLUMNS if columns else 3 - first  # of a head
        plan_of_records = NO_PLAN
        if rows == 1 and not entries and not choose:
            cut = recorded_parts if recorded_rows else 1
            plan_of_records = plan_of_row(tokens, hv, hv // hk, blocks, cut, lead)
        gdn_records(GdnRecordsKey())(
            q, k, a, b, A_log, dt_bias, cu_seqlens, *plan, made, *sizes, l2norm, min_tokens,
            long_length if recorded_rows else NO_ROW, recorded_parts, lead, blocks, hv // hk, choose, *plan_of_records, scale,
        )  # fmt: skip
        if columns:
            gdn_columns(GdnColumnsKey(name))(q, k, v, *places, made, *sizes, *recorded_cut)
        else:
            for half in FIRST_FORMS[choose] or (first,):
                recur(False, half, 0)
        if recorded_rows:
            recur(True, recurrence_slabs(heads * (2 * parts - 4), hv * rows * blocks), 0)
    if one and long_rows:  # as if all rows were of one length: what is known without reading it
        one_launch(True, long_rows * (2 * parts - 3))
    if parts > 2 and long_rows:
        segment_states(SegmentStatesKey())(work, cu_seqlens, hv, parts, long_rows, long_length)
    if records and recorded_rows:
        if slabs or long_rows == 1:
            recur(False, recurrence_slabs(hv * (parts - 1)), 1)
        else:  # halves for one long row, wholes for more: the lengths say which launch works
            recur(False, 1, 2)
            recur(False, 2, 2)
    if one:
        one_launch(False, rows * (parts if long_rows == rows else 1))


def _rows(x: torch.Tensor) -> torch.Tensor:
    """`[T, H, D]` as rows; the stride of a single row means nothing and may not be a legal one."""
    return x.flatten(1) if x.shape[0] > 1 else x.reshape(1, -1).as_strided((1, x[0].numel()), (x[0].numel(), 1))
