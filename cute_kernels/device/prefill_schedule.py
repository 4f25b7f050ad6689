"""The segments of a sequence and the chunk list of a segment.

A sequence of at least `long_length` tokens is cut into `parts` segments of equal length, a multiple of 64, the last ones shorter
or empty; others are one segment. Both depend on this sequence's length alone.

Chunks end at every multiple of 64 tokens from the sequence's start, at every kept state and at the segment's end. The list
depends on this sequence alone, so a row's bits do not depend on the batch. A state kept off the grid costs one more chunk.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .prefill_layout import CHUNK
from .state_io import slot_is_valid


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
def segment_bounds(length: Int32, segment: Int32, parts: Int32):
    """First and last-plus-one token of a segment of a long sequence."""
    size = ((length + parts * CHUNK - 1) // (parts * CHUNK)) * CHUNK
    return cutlass.min(segment * size, length), cutlass.min((segment + 1) * size, length)
