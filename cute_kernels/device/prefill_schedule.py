"""The segments of a sequence and the chunk list of a segment.

A sequence of at least `long_length` tokens is cut into `parts` segments of equal length, a multiple of 64, the last ones shorter
or empty; others are one segment. Both depend on this sequence's length alone.

Chunks end at every multiple of 64 tokens from the sequence's start, at every kept state and at the segment's end. The list
depends on this sequence alone, so a row's bits do not depend on the batch. A state kept off the grid costs one more chunk.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .prefill_layout import CHUNK, Flag
from .state_io import slot_is_valid

FIRST_CLASS = 8192
CLASSES = 5


@cute.jit
def next_chunk(
    position: Int32,
    length: Int32,
    entry: Int32,
    entry_end: Int32,
    mEnds: cute.Tensor,
    mSlots: cute.Tensor,
    num_slots: Int32,
):
    """End of the chunk that starts at `position`, the slot that keeps its end state (or -1), and the next entry to look at.

    Entries `entry:entry_end` of `mEnds` / `mSlots` are the states to keep. An entry whose slot is none, or whose end is not in
    (position, length], is passed over: it moves no boundary.
    """
    kept_end = length + 1
    kept_slot = Int32(-1)
    searching = entry < entry_end
    while searching:
        end = mEnds[entry]
        slot = mSlots[entry]
        if slot_is_valid(slot, num_slots) & (end > position) & (end <= length):
            kept_end = end
            kept_slot = slot
            searching = False
        else:
            entry += 1
            searching = entry < entry_end
    end = cutlass.min((position & Int32(-CHUNK)) + CHUNK, length)
    keeps = kept_end <= end
    end = kept_end if keeps else end
    kept_slot = kept_slot if keeps else Int32(-1)
    entry = entry + 1 if keeps else entry
    return end, kept_slot, entry


@cute.jit
def find_long_row(mCu: cute.Tensor, rows: Int32, index: Int32, long_length: Int32, lane: Int32):
    """The `index`-th sequence of at least `long_length` tokens, or -1; all lanes of one warp."""
    found, base, seen = Int32(-1), Int32(0), Int32(0)
    while (base < rows) & (found < 0):
        i = base + lane
        length = Int32(0)
        if i < rows:
            length = mCu[i + 1] - mCu[i]
        is_long = length >= long_length
        mask = cute.arch.vote_ballot_sync(is_long)
        rank = seen + cute.arch.popc(mask & ((Int32(1) << lane) - 1))
        hit = cute.arch.vote_ballot_sync(is_long & (rank == index))
        if hit != 0:
            found = base + cute.arch.popc(hit - 1)
        seen += cute.arch.popc(mask)
        base += 32
    return cute.arch.make_warp_uniform(found)


@cute.jit
def next_row(
    rank: Int32,
    mCu: cute.Tensor,
    rows: Int32,
    min_tokens: Int32,
    max_tokens: Int32,
    length_class: Int32,
    base: Int32,
    seen: Int32,
    lane: Int32,
):
    """The row of a rank among those with min_tokens <= length < max_tokens, longest class first, or -1; all lanes of one warp.

    A class is a range of lengths four times as long as it is short (`FIRST_CLASS` tokens and more, …, the rest); within one, rows
    keep their order. `length_class`, `base`, `seen` are where the search stands: before row `base` of the class there are `seen`
    ranks. Start from zeros, ask for ascending ranks, and hand back what is returned after the row.
    """
    found = Int32(-1)
    while (found < 0) & (length_class < CLASSES):
        i = base + lane
        shortest = Int32(FIRST_CLASS) >> (2 * length_class)
        beyond = shortest << 2 if length_class > 0 else max_tokens
        shortest = shortest if length_class < CLASSES - 1 else Int32(0)
        inside = i < rows
        if inside:
            length = mCu[i + 1] - mCu[i]
            inside = (length >= cutlass.max(shortest, min_tokens)) & (length < cutlass.min(beyond, max_tokens))
        mask = cute.arch.vote_ballot_sync(inside)
        count = cute.arch.popc(mask)
        if seen + count > rank:
            place = seen + cute.arch.popc(mask & ((Int32(1) << lane) - 1))
            hit = cute.arch.vote_ballot_sync(inside & (place == rank))
            found = base + cute.arch.popc(hit - 1)
        else:
            seen += count
            base += 32
            if base >= rows:
                base = Int32(0)
                length_class += 1
    return cute.arch.make_warp_uniform(found), length_class, base, seen


@cute.jit
def segment_bounds(length: Int32, segment: Int32, parts: Int32):
    """First and last-plus-one token of a segment of a long sequence."""
    size = ((length + parts * CHUNK - 1) // (parts * CHUNK)) * CHUNK
    return cutlass.min(segment * size, length), cutlass.min((segment + 1) * size, length)


@cute.jit
def find_work(
    group: Int32,
    row: Int32,
    lane: Int32,
    mReadIds: cute.Tensor,
    mWriteIds: cute.Tensor,
    mCuSeqlens: cute.Tensor,
    long_length: Int32,
    parts: Int32,
    transition: cutlass.Constexpr,
):
    """Sequence, first flags (STOP: nothing to do), bounds in the sequence, slots, and last chunk's flag of a group of items.

    `row` is the group's sequence, or -1 where the group is a segment of a long row.
    """
    rows = cute.size(mReadIds)
    flags = Int32(int(Flag.FIRST))
    sequence = row
    position, stop = Int32(0), Int32(0)
    read, write, last_flag = Int32(-1), Int32(-1), Int32(int(Flag.LAST))
    if cutlass.const_expr(transition):
        # Items of a long row: the end of its first segment, then (state from zero, transition) of each inner one.
        per_row = 2 * parts - 3
        index = group // per_row
        place = group % per_row
        segment = (place + 1) // 2
        sequence = find_long_row(mCuSeqlens, rows, index, long_length, lane)
        if sequence >= 0:
            position, stop = segment_bounds(mCuSeqlens[sequence + 1] - mCuSeqlens[sequence], segment, parts)
            write = 2 * (index * (parts - 1) + segment)
            if place == 0:
                read = mReadIds[sequence]
                flags = flags | Flag.KEEP_START
            elif place % 2 == 0:
                write += 1
                flags = flags | Flag.IDENTITY
        if position >= stop:
            flags = Int32(int(Flag.STOP))
    elif sequence < 0:
        index = group // parts
        segment = group % parts
        sequence = find_long_row(mCuSeqlens, rows, index, long_length, lane)
        if sequence >= 0:
            length = mCuSeqlens[sequence + 1] - mCuSeqlens[sequence]
            position, stop = segment_bounds(length, segment, parts)
            base = 2 * index * (parts - 1)
            read = base + 1 if segment == 0 else base + 2 * (segment - 1)
            flags = flags | Flag.WORKSPACE
            write = mWriteIds[sequence]
            if stop < length:
                last_flag = Int32(0)
        if position >= stop:
            flags = Int32(int(Flag.STOP))
    else:
        stop = mCuSeqlens[sequence + 1] - mCuSeqlens[sequence]
        read = mReadIds[sequence]
        write = mWriteIds[sequence]
    return flags, sequence, position, stop, read, write, last_flag
