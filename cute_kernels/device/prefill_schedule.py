"""The segments of a sequence and the chunk list of a segment.

A sequence of at least `long_length` tokens is cut into `parts` segments of equal length, a multiple of 64, the last ones shorter
or empty, of GDN the first one longer or shorter; others are one segment. All depends on this sequence's length alone.

Chunks end at every multiple of 64 tokens from the sequence's start, at every kept state and at the segment's end. The list
depends on this sequence alone, so a row's bits do not depend on the batch. A state kept off the grid costs one more chunk.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .prefill_layout import CHUNK, Flag
from .state_io import slot_is_valid

FIRST_CLASS = 8192
CLASSES = 8


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
def count_long_rows(mCu: cute.Tensor, row: Int32, long_length: Int32, lane: Int32):
    """How many sequences before `row` have at least `long_length` tokens; all lanes of one warp."""
    count, base = Int32(0), Int32(0)
    while base < row:
        i = base + lane
        is_long = i < row
        if is_long:
            is_long = mCu[i + 1] - mCu[i] >= long_length
        count += cute.arch.popc(cute.arch.vote_ballot_sync(is_long))
        base += 32
    return count


@cute.jit
def leave_idle(idle, block: Int32):
    """All threads of a block: end it where it has nothing to do, block 0 behind the launch in front of this one.

    So this launch ends behind that one, and what waits for it finds both complete. Other idle blocks wait for nothing.
    """
    if idle:
        cute.arch.griddepcontrol_launch_dependents()
        if block == 0:
            cute.arch.griddepcontrol_wait()
        cute.arch.inline_ptx("exit;")


@cute.jit
def leave_without_chunks(mCu: cute.Tensor, min_tokens: Int32, tokens: Int32, block: Int32):
    """All threads of a block: `leave_idle` where no sequence has `min_tokens` tokens, which `tokens` of the call leave open."""
    rows = cute.size(mCu) - 1
    if tokens < rows * min_tokens:
        tidx, _, _ = cute.arch.thread_idx()
        threads, _, _ = cute.arch.block_dim()
        found = Int32(0)
        for row in cutlass.range(tidx, rows, threads, unroll=1):
            found = Int32(1) if mCu[row + 1] - mCu[row] >= min_tokens else found
        found = cute.arch.inline_ptx(
            "{ .reg .pred own, any; setp.ne.s32 own, {$r0}, 0; barrier.cta.red.or.pred any, 0, own; selp.s32 {$w0}, 1, 0, any; }",
            write_only_types=[Int32],
            read_only_args=[found],
        )
        leave_idle(found == 0, block)


@cute.jit
def next_row(
    rank: Int32,
    mCu: cute.Tensor,
    rows: Int32,
    min_tokens: Int32,
    long_length: Int32,
    parts: Int32,
    length_class: Int32,
    base: Int32,
    seen: Int32,
    lane: Int32,
    each: Int32,
    others: cutlass.Constexpr | Int32,
):
    """The row of the item of a rank, or -1, and the item's place among the row's; all lanes of one warp.

    A row of `long_length` tokens or more is `each` items, another of at least `min_tokens` one (none where `others` is 0). Items
    come by classes of their own lengths, of a long row's segments the mean, longest first: a class is a range of lengths twice as
    long as it is short (`FIRST_CLASS` tokens and more, …, the rest); within one, rows keep their order. `length_class`, `base`,
    `seen` are where the search stands: before row `base` of the class there are `seen` ranks. Start from zeros, ask for ascending
    ranks, and hand back what is returned after the place.
    """
    found, place = Int32(-1), Int32(0)
    extra = each - 1
    while (found < 0) & (length_class < CLASSES):
        i = base + lane
        inside = i < rows
        is_long = inside
        if inside:
            length = mCu[i + 1] - mCu[i]
            is_long = length >= long_length
            pieces = parts if is_long else Int32(1)
            shortest = (Int32(FIRST_CLASS) >> length_class) * pieces
            inside = (length >= min_tokens) & ((length_class == 0) | (length < 2 * shortest))
            inside = inside & ((length_class == CLASSES - 1) | (length >= shortest))
            inside = inside & (is_long | (others != 0))
            is_long = inside & is_long
        mask = cute.arch.vote_ballot_sync(inside)
        long_mask = cute.arch.vote_ballot_sync(is_long)
        count = cute.arch.popc(mask) + extra * cute.arch.popc(long_mask)
        if seen + count > rank:
            below = (Int32(1) << lane) - 1
            place = rank - seen - cute.arch.popc(mask & below) - extra * cute.arch.popc(long_mask & below)
            hit = cute.arch.vote_ballot_sync(inside & (place >= 0) & (place <= (extra if is_long else Int32(0))))
            owner = cute.arch.popc(hit - 1)
            found = base + owner
            place = cute.arch.shuffle_sync(place, owner)
        else:
            seen += count
            base += 32
            if base >= rows:
                base = Int32(0)
                length_class += 1
    return cute.arch.make_warp_uniform(found), cute.arch.make_warp_uniform(place), length_class, base, seen


@cute.jit
def segment_bounds(length: Int32, segment: Int32, parts: Int32):
    """First and last-plus-one token of a segment of a long sequence whose segments are alike."""
    size = ((length + parts * CHUNK - 1) // (parts * CHUNK)) * CHUNK
    return cutlass.min(segment * size, length), cutlass.min((segment + 1) * size, length)


@cute.jit
def led_segment_bounds(length: Int32, segment: Int32, parts: Int32, lead: Int32):
    """The same where the first segment is `lead` halves of another."""
    halves = 2 * parts - 2 + lead
    chunks = (length + CHUNK - 1) // CHUNK
    size = (2 * chunks + halves - 1) // halves
    first = (lead * size + 1) // 2
    begin = first + (segment - 1) * size if segment > 0 else Int32(0)
    return cutlass.min(begin * CHUNK, length), cutlass.min((first + segment * size) * CHUNK, length)


@cute.jit
def find_work(
    row: Int32,
    place: Int32,
    lane: Int32,
    mReadIds: cute.Tensor,
    mWriteIds: cute.Tensor,
    mCuSeqlens: cute.Tensor,
    long_length: Int32,
    parts: Int32,
    lead: Int32,
    transition: cutlass.Constexpr,
    hands_on: cutlass.Constexpr,
):
    """First flags (STOP: nothing to do), bounds in the sequence, slots, and last chunk's flags of a row's item of a place.

    Places of a transition are the end of the first segment, then (state from zero, transition) of each inner one; others are
    segments. With `hands_on` a first segment starts from the pool and leaves its end to the next one; otherwise a transition has
    found that, and kept the start.
    """
    flags = Int32(int(Flag.FIRST))
    length = mCuSeqlens[row + 1] - mCuSeqlens[row]
    position, stop, last_flag = Int32(0), length, Int32(int(Flag.LAST))
    read, write = mReadIds[row], mWriteIds[row]
    if length >= long_length:
        base = 2 * count_long_rows(mCuSeqlens, row, long_length, lane) * (parts - 1)
        segment = (place + 1) // 2 if transition else place
        position, stop = led_segment_bounds(length, segment, parts, lead)
        if cutlass.const_expr(transition):
            write = base + 2 * segment
            if place == 0:
                flags = flags | Flag.KEEP_START
            else:
                read = Int32(-1)
                if place % 2 == 0:
                    write += 1
                    flags = flags | Flag.IDENTITY
        else:
            if (segment > 0) | (not hands_on):
                read = base + 2 * (segment - 1) if segment > 0 else base + 1
                flags = flags | Flag.WORKSPACE
            if stop < length:
                last_flag = Int32(0)
                if cutlass.const_expr(hands_on):
                    write = base
                    last_flag = Int32(int(Flag.LAST | Flag.HANDS_ON)) if segment == 0 else Int32(0)
        if position >= stop:
            flags = Int32(int(Flag.STOP))
    return flags, position, stop, read, write, last_flag
