"""The chunk list of a sequence.

Chunks end at every multiple of 64 tokens from the sequence's start, at every kept state and at the sequence's end. The list
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
