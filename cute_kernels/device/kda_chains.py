"""Which chunks a block of a KDA recurrence walks, and where its state comes from and goes to."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from .kda_layout import first_slot, segment_of_block, slot_of_token
from .prefill_schedule import segment_bounds


@cute.jit
def chain_of_block(
    mReadIds: cute.Tensor,
    mWriteIds: cute.Tensor,
    mCu: cute.Tensor,
    mEntryCu: cute.Tensor,
    mEnds: cute.Tensor,
    chunks: Int32,
    item: Int32,
    has_entries: Int32,
    min_tokens: Int32,
    first_chunk: Int32,
    carried: Int32,
    long_rows: Int32,
    long_length: Int32,
    parts: Int32,
    lane: Int32,
    transition: cutlass.Constexpr,
):
    """(row, segment, place, begin, end, read, write, work, leaving): place as of `segment_of_block`, the slots of its chunks
    among the launch's `chunks`, pool slots of the state, workspace slots of one that another block found and of one that goes on.
    """
    row, segment, place = segment_of_block(
        mCu, cute.size(mReadIds, mode=[0]), item, long_rows, long_length, parts, lane, transition
    )
    length = Int32(mCu[row + 1]) - Int32(mCu[row])
    read, write, work, leaving = Int32(-1), Int32(-1), Int32(-1), Int32(-1)
    begin = first_slot(mCu, mEntryCu, row, has_entries) - first_chunk
    end = first_slot(mCu, mEntryCu, row + 1, has_entries) - first_chunk
    if segment >= 0:
        position, stop = segment_bounds(length, segment, parts)
        begin = slot_of_token(mCu, mEntryCu, mEnds, row, position, has_entries, lane)
        if stop < length:
            end = slot_of_token(mCu, mEntryCu, mEnds, row, stop, has_entries, lane)
        if position >= stop:
            end = begin
        if const_expr(transition):
            work = place if position < stop else Int32(-1)
            read = Int32(mReadIds[row]) if segment == 0 else Int32(-1)
        else:
            work = place
            write = Int32(mWriteIds[row]) if (position < stop) & (stop == length) else Int32(-1)
    elif (
        (place >= 0)
        & (length >= min_tokens)
        & ((long_rows == 0) | (length < long_length))
        & (begin < chunks)
        & (end > 0)
    ):
        # A row that began in an earlier launch has its state in the workspace, one that goes on in a later leaves it there.
        if begin >= 0:
            read = Int32(mReadIds[row])
        else:
            work, begin = carried, Int32(0)
        if end <= chunks:
            write = Int32(mWriteIds[row])
        else:
            leaving, end = carried ^ 1, chunks
    else:
        end = begin
    return row, segment, place, begin, end, read, write, work, leaving
