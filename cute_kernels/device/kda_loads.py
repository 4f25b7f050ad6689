"""The two warps of a KDA recurrence block that load records and V tiles into its rings.

`form` is the kernel's object: its key, whether it is a transition, its V columns, the bytes and stages of its rings, and which
pieces of a record come with KG, with which the words at its end come too, and which with the others.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from ..configs.kda_prefill import RECORD_BYTES
from .kda_layout import INFO_OFFSET, KG_OFFSET, RECORD_COPY_BYTES, TAIL_OFFSET
from .kda_stage import bulk_load
from .prefill_layout import CHUNK, OPERAND_BYTES
from .prefill_sync import advance
from .record_flags import published

TAIL_BYTES = RECORD_COPY_BYTES - TAIL_OFFSET
INFO_BYTES = RECORD_COPY_BYTES - INFO_OFFSET


@cute.jit
def load_early(
    form: cutlass.Constexpr,
    storage,
    ring,
    tma_v: cute.CopyAtom,
    gV: cute.Tensor,
    records: Int64,
    flags: Int64,
    pitch: Int64,
    mTable: cute.Tensor,
    value_layout: cute.ComposedLayout,
    begin: Int32,
    end: Int32,
    column: Int32,
    work: Int32,
    lane: Int32,
):
    """One warp: KG and the V tile of every chunk of the row, what the chain needs first."""
    # A transition from the identity (an odd place) has no values.
    values = (work & 1 == 0) if const_expr(form.transition) else True
    loaded = OPERAND_BYTES + (sum(size for _, _, size in form.early_pieces) + INFO_BYTES if form.early_pieces else 0)
    size = Int32(loaded + 2 * CHUNK * form.columns) if values else Int32(loaded)
    base = storage.early.data_ptr()
    stage, parity, known = Int32(0), Int32(0), begin
    for slot in cutlass.range(begin, end, unroll=1):
        token, count = Int32(mTable[slot, 0]), Int32(mTable[slot, 1])
        if count > 0:
            ring.wait_empty(stage, parity)
            ring.expect(stage, size)
            target = base + stage * (form.early_bytes // 4)
            if values:  # which come from further away than a record and need not wait for it
                load_values(form, ring, tma_v, gV, value_layout, target + OPERAND_BYTES // 4, token, column, stage)
            known = wait_record(form, flags, pitch, slot, end, known, lane)
            source = records + Int64(slot) * pitch
            bulk_load(target, source + KG_OFFSET, OPERAND_BYTES, ring.full + stage)
            for at, place, piece in form.early_pieces:
                bulk_load(target + place // 4, source + at, piece, ring.full + stage)
            if const_expr(len(form.early_pieces) > 0):
                info = storage.infos.data_ptr() + stage * (INFO_BYTES // 4)
                bulk_load(info, source + INFO_OFFSET, INFO_BYTES, ring.full + stage)
            stage, parity = advance(stage, parity, form.early_stages)


@cute.jit
def wait_record(
    form: cutlass.Constexpr, flags: Int64, pitch: Int64, slot: Int32, end: Int32, known: Int32, lane: Int32
) -> Int32:
    """One warp: until the record of `slot` is there; records before the slot that is returned are, too."""
    if const_expr(form.key.overlapped):
        if slot >= known:
            known = published(flags, Int32(pitch // (RECORD_BYTES // 4)), slot, end, lane)
    return known


@cute.jit
def load_values(
    form: cutlass.Constexpr,
    ring: cutlass.Constexpr,
    tma_v: cute.CopyAtom,
    gV: cute.Tensor,
    value_layout: cute.ComposedLayout,
    target: cute.Pointer,
    token: Int32,
    column: Int32,
    stage: Int32,
):
    """Start the load of a chunk's V tile."""
    value = cute.recast_ptr(target, value_layout.inner, BFloat16)
    sV = cute.make_tensor(value, value_layout.outer)
    gTile = cute.local_tile(cute.domain_offset((token, column), gV), (CHUNK, form.columns), (0, 0))
    tVsV, tVgV = cpasync.tma_partition(
        tma_v, 0, cute.make_layout(1), cute.group_modes(sV, 0, 2), cute.group_modes(gTile, 0, 2)
    )
    cute.copy(tma_v, tVgV, tVsV, tma_bar_ptr=ring.full + stage)


@cute.jit
def load_late(
    form: cutlass.Constexpr,
    storage,
    ring,
    records: Int64,
    flags: Int64,
    pitch: Int64,
    mTable: cute.Tensor,
    begin: Int32,
    end: Int32,
    lane: Int32,
):
    """One warp: everything else of every record."""
    base, tails = storage.late.data_ptr(), storage.tails.data_ptr()
    stage, parity, known = Int32(0), Int32(0), begin
    for slot in cutlass.range(begin, end, unroll=1):
        count = Int32(mTable[slot, 1])
        if count > 0:
            known = wait_record(form, flags, pitch, slot, end, known, lane)
            ring.wait_empty(stage, parity)
            source = records + Int64(slot) * pitch
            ring.expect(stage, sum(size for _, _, size in form.late_pieces) + TAIL_BYTES)
            target, tail = base + stage * (form.late_bytes // 4), tails + stage * (TAIL_BYTES // 4)
            for at, image, size in form.late_pieces:
                bulk_load(target + (image - form.late_first) // 4, source + at, size, ring.full + stage)
            bulk_load(tail, source + TAIL_OFFSET, TAIL_BYTES, ring.full + stage)
            stage, parity = advance(stage, parity, form.late_stages)
