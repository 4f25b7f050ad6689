"""What the two kernels of GDN prefill from records agree on: the record of a chunk, and which chunk a slot holds.

A *record* is what a chunk contributes to one value head's recurrence beside K, Q and V, as images of shared memory:

    T', P    fp16 [64 x 64] each, swizzled tiles
    vectors  the stage's vectors from REST to DECAY (`device/prefill_gdn_rows.py`)
    flag     a word that is set when the rest is there (`device/record_flags.py`)

Records are addressed by chunk slots. A row's chunks are those of `device/prefill_schedule.next_chunk`: they end at every multiple
of 64 tokens, at every kept state (a *cut* where that is off the grid) and at the row's end, and lie in its slots in order. Rows
have at least as many slots as they can have chunks, by a closed form of their bounds.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from ..configs.gdn_records import RECORD_BYTES
from .kda_layout import first_slot
from .prefill_gdn_rows import DECAY, REST
from .prefill_layout import CHUNK, HEAD, TILE_BYTES
from .state_io import slot_is_valid

P_OFFSET = TILE_BYTES
VECTOR_OFFSET = 2 * TILE_BYTES
KEPT_VECTOR = REST  # first vector of a stage that the recurrence needs
KEPT_BYTES = DECAY + 16 - REST
FLAG_OFFSET = VECTOR_OFFSET + KEPT_BYTES
assert FLAG_OFFSET + 4 <= RECORD_BYTES


def record_address(mRecords, slot, heads, head):
    """Global address of the record of a chunk slot and value head."""
    return mRecords.iterator.toint() + (Int64(slot) * Int64(heads) + Int64(head)) * RECORD_BYTES


@cute.jit
def load_tile(tma, gX, sX, token, column, stage, full, width: cutlass.Constexpr = HEAD):
    """One warp: start the TMA load of a tile of gX, 64 rows from (token, column) on, into a stage with barrier `full`."""
    tile = cute.local_tile(cute.domain_offset((token, column), gX), (CHUNK, width), (0, 0))
    one = cute.make_layout(1)
    target, source = cpasync.tma_partition(tma, 0, one, cute.group_modes(sX, 0, 2), cute.group_modes(tile, 0, 2))
    cute.copy(tma, source, target[None, stage], tma_bar_ptr=full)


def bulk_load(target, source, size, full):
    """One warp: start a bulk copy of `size` bytes from a global to a shared address, counted by barrier `full`."""
    with cute.arch.elect_one():
        cute.arch.inline_ptx(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
            read_only_args=[target, source, Int32(size), full.toint()],
        )


@cute.jit
def cuts_of_batch(
    mEnds: cute.Tensor,
    mSlots: cute.Tensor,
    num_slots: Int32,
    entry: Int32,
    stop: Int32,
    length: Int32,
    highest: Int32,
    lane: Int32,
):
    """Of entries entry .. entry + 31 below `stop`: each lane's end, the lanes that hold a cut, and the highest end so far.

    An entry counts when it names a slot and a count in 1..length above all that counted before it.
    """
    at = entry + lane
    end, slot = Int32(0), Int32(-1)
    if at < stop:
        end = mEnds[at]
        slot = mSlots[at]
    sound = slot_is_valid(slot, num_slots) & (end > 0) & (end <= length)
    reached = end if sound else Int32(0)
    for step in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(reached, offset=1 << step, mask_and_clamp=0)
        reached = cutlass.max(reached, below) if lane >= (1 << step) else reached
    before = cute.arch.shuffle_sync_up(reached, offset=1, mask_and_clamp=0)
    before = cutlass.max(before, highest) if lane > 0 else highest
    is_cut = sound & (end > before) & ((end & (CHUNK - 1)) != 0) & (end < length)
    highest = cutlass.max(highest, cute.arch.shuffle_sync(reached, 31))
    return end, cute.arch.vote_ballot_sync(is_cut), highest


@cute.jit
def chunk_at(
    mEnds: cute.Tensor,
    mSlots: cute.Tensor,
    num_slots: Int32,
    entry: Int32,
    stop: Int32,
    length: Int32,
    place: Int32,
    lane: Int32,
):
    """(start, count) of chunk `place` of a row of `length` tokens with entries entry .. stop - 1; count -1 where there is none.

    A row of no tokens has one chunk of none, a row of negative length has no chunk.
    """
    passed, previous, cut, highest = Int32(0), Int32(0), Int32(-1), Int32(0)
    while entry < stop:
        end, cuts, highest = cuts_of_batch(mEnds, mSlots, num_slots, entry, stop, length, highest, lane)
        rank = cute.arch.popc(cuts & ((Int32(1) << lane) - 1))
        own = ((cuts >> lane) & 1) != 0
        own_place = (end >> 6) + passed + rank
        here = cute.arch.popc(cute.arch.vote_ballot_sync(own & (own_place < place)))
        last = cute.arch.vote_ballot_sync(own & (rank == here - 1))
        hit = cute.arch.vote_ballot_sync(own & (own_place == place))
        last_end = cute.arch.shuffle_sync(end, cute.arch.popc(last - 1) & 31)
        hit_end = cute.arch.shuffle_sync(end, cute.arch.popc(hit - 1) & 31)
        previous = last_end if here > 0 else previous
        cut = hit_end if hit != 0 else cut
        passed += here
        # Cuts ascend: those behind one that is not passed are not either.
        entry = entry + 32 if here == cute.arch.popc(cuts) else stop
    grid = place - passed
    start = cutlass.max(grid * CHUNK, previous)
    end = cut if cut >= 0 else cutlass.min((grid + 1) * CHUNK, length)
    exists = (end > start) | ((length == 0) & (place == 0))
    return start, (end - start if exists else Int32(-1))


@cute.jit
def place_of_position(
    mCu: cute.Tensor,
    mKeptCu: cute.Tensor,
    mEnds: cute.Tensor,
    mSlots: cute.Tensor,
    num_slots: Int32,
    has_checkpoints: Int32,
    row: Int32,
    position: Int32,
    lane: Int32,
):
    """Where a chain that starts at token `position` of a row begins, 0 or a multiple of 64; all lanes of one warp.

    Returns the slot of its first chunk, the first entry of kept states that may lie behind the position, and the end of entries.
    """
    entry, stop = Int32(0), Int32(0)
    if has_checkpoints != 0:
        entry = mKeptCu[row]
        stop = mKeptCu[row + 1]
    length = mCu[row + 1] - mCu[row]
    passed, highest, batch, last = position >> 6, Int32(0), entry, stop if position > 0 else entry
    while batch < last:
        end, cuts, highest = cuts_of_batch(mEnds, mSlots, num_slots, batch, stop, length, highest, lane)
        passed += cute.arch.popc(cute.arch.vote_ballot_sync((((cuts >> lane) & 1) != 0) & (end < position)))
        behind = cute.arch.vote_ballot_sync((end <= position) & (batch + lane < stop))
        entry += cute.arch.popc(behind & ((behind + 1) ^ -1)) if entry == batch else Int32(0)
        batch = batch + 32 if highest < position else last
    return first_slot(mCu, mKeptCu, row, has_checkpoints) + passed, entry, stop
