"""The (chunk slot, head) items of the KDA records kernel: which a worker computes, in which order, and how others learn of it.

A worker is 256 threads. Alone on the chip, two blocks of one worker each share a multiprocessor. Items are dealt out one by one,
all heads of a slot together and slots from the one that the recurrence needs last to the one it needs first: it finds in L2
what was made last. Beside the recurrence a block has two workers and a multiprocessor of its own, because small blocks would
spread over all of them and leave none to the recurrence; two blocks are a cluster, so that neighbours are left to it, which the
two halves of a head need. Items are then dealt out in the order of need: some rounds to all workers, for the same reason the
last of them first, the rest to those that stay when the others have left their multiprocessors to the recurrence. Needed first
are chunks with the most chunks of their row behind them: rows are aligned at their ends, and a level of this order has one chunk
of every row that is long enough.

What a kernel needs of this: `place_worker`, `sync` instead of the block's barrier, `begin_info` and `begin` before its first
item, `next_item` to find items, `hand_over` behind the last store of an item, `finish` behind the loop. In `inputs.info` words 4
and 5 are slot and head of the next item, words 18 and 19 those of the one under way when the next is known, word 16 the end of
all items.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, Uint32, const_expr

from .kda_layout import chunk_of_row, chunk_of_slot, first_slot, row_of_slot
from .prefill_layout import CHUNK
from .record_flags import clear_flag, let_start, publish
from .warp_ops import load_shared, store_shared

THREADS, LANES = 256, 32
LOADER = 0  # warp that finds items, starts loads and stores, and sets flags
OTHERS = 7  # warps
KEPT_ITEMS = 528  # last ones, whose records stay in the second level: 31 MB
EVICT_FIRST, EVICT_LAST = (
    0x12F0000000000000,
    0x14F0000000000000,
)  # as `createpolicy` makes them for the whole of an access
BARRIERS = 8  # of a worker; two workers take all there are, the block's own is the first one's
MAIN, INVERSE, PAIRS, DECAYS, PUBLISH = 0, 1, 2, 6, 7
TURNS = 80  # byte of `inputs.info` where the order of items is, for which there are no registers
LAST = 72  # byte of `inputs.info` where slot and head of the item before are
RECORD = 96  # byte of `inputs.info` where the address of the record under way is
ROW = 104  # byte of `inputs.info` where the tokens of the call's only row are, -1 where chunks must be looked up
INFO_BYTES = 112


def workers_of_block(overlapped):
    """How many a block has."""
    return 2 if overlapped else 1


def storage_pitch(storage):
    """Bytes from one worker's storage to the next one's."""
    return (storage.__sizeof__() + 1023) // 1024 * 1024


def place_worker(storage, tidx, overlapped):
    """(worker, thread of it, its storage) of a block's thread."""
    if not overlapped:
        return Int32(0), tidx, cutlass.utils.SmemAllocator().allocate(storage)
    worker, pitch = cute.arch.make_warp_uniform(tidx // THREADS), storage_pitch(storage)
    memory = cutlass.utils.SmemAllocator().allocate(pitch * workers_of_block(True), 1024).toint() + worker * pitch
    return worker, tidx % THREADS, storage(cute.make_ptr(Uint8, memory, cute.AddressSpace.smem, assumed_align=1024))


def first_of_block(storage, loaded, worker):
    """The barrier behind the first worker's two."""
    return loaded + 2 - worker * (storage_pitch(storage) // 8)


def barrier_of(inputs, name):
    """Hardware barrier of a worker; 0 is the block's."""
    if not inputs.overlapped:
        return Int32(name)
    # Found anew each time: there is no register for it.
    return cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // THREADS) * BARRIERS + name


def sync(inputs):
    """All threads of the worker."""
    if inputs.overlapped:
        cute.arch.barrier(barrier_id=barrier_of(inputs, MAIN), number_of_threads=THREADS)
    else:
        cute.arch.sync_threads()


@cute.jit
def begin_info(inputs: cutlass.Constexpr):
    """One thread: where the items end; there is no item before the first. What the call's only row is, if it has one."""
    cu, _, _ = inputs.plan
    first, end = Int32(cu[0]), Int32(cu[1])
    alone = (inputs.rows * inputs.parts == 1) & (inputs.has_entries == 0) & (inputs.first_chunk == 0) & (first == 0)
    end = end if end >= inputs.min_tokens else Int32(0)
    store_shared(inputs.info + ROW, end if alone else Int32(-1))
    store_shared(inputs.info + 16, Int32(-1))
    store_shared(inputs.info + 64, inputs.stop)
    store_shared(inputs.info + LAST, Int32(-1))
    if const_expr(inputs.overlapped):
        shared = inputs.rounds * inputs.workers
        store_shared(inputs.info + TURNS, shared, inputs.workers, inputs.staying, inputs.first_staying)
    else:
        chunks, together = inputs.stop // inputs.heads, inputs.together
        steps = chunks // together
        store_shared(inputs.info + TURNS, chunks, steps, steps * together, together)


@cute.jit
def remember_last(inputs: cutlass.Constexpr):
    """One warp, before it describes the next item: which the item under way is."""
    last = load_shared(inputs.info + 16, 2, Int32)
    if cute.arch.lane_idx() == 0:
        store_shared(inputs.info + LAST, *last)


def is_first(inputs):
    """At an item's start: whether the worker had none before."""
    return load_shared(inputs.info + LAST, 1, Int32) < 0


@cute.jit
def keep_record(inputs: cutlass.Constexpr, record: Int64, tidx: Int32):
    """Start of an item: where its record is, for which there are no registers beside the recurrence.

    Thread 0 comes here when all warps have read the item before's: it passed barriers at which they arrive behind their reads.
    """
    if const_expr(inputs.overlapped):
        if tidx == 0:
            store_shared(inputs.info + RECORD, Uint32(record & 0xFFFFFFFF), Uint32(record >> 32))


def kept_record(inputs, record):
    """The address again, behind a barrier of the worker."""
    if not inputs.overlapped:
        return record
    low, high = load_shared(inputs.info + RECORD, 2, Uint32)
    return Int64(low) | (Int64(high) << 32)


@cute.jit
def hand_over(inputs: cutlass.Constexpr, warp: Int32):
    """A warp's stores of an item are done; when those of all warps are, the item's flag is set."""
    if const_expr(inputs.overlapped):
        published = barrier_of(inputs, PUBLISH)
        if warp != LOADER:
            cute.arch.barrier_arrive(barrier_id=published, number_of_threads=THREADS)
        else:
            cute.arch.barrier(barrier_id=published, number_of_threads=THREADS)
            # The part of the record that this warp stored in bulk.
            cute.arch.cp_async_bulk_wait_group(0)
            cute.arch.inline_ptx("fence.proxy.async.global;")
            cute.arch.sync_warp()
            slot, local_head = load_shared(inputs.info + LAST, 2, Int32)
            if cute.arch.lane_idx() == 0:
                publish(flag_address(inputs, slot, local_head))


@cute.jit
def finish(inputs: cutlass.Constexpr, tidx: Int32):
    """Behind the last item, or where there was none."""
    if const_expr(inputs.overlapped):
        if tidx == 0:
            store_shared(inputs.info + LAST, Int32(0))


@cute.jit
def deal(
    plan, slots: Int32, heads: Int32, block: Int32, blocks: Int32, worker: Int32, turns, overlapped: cutlass.Constexpr
):
    """A worker's part of the items: its turns among all workers, beside the recurrence also among those that stay.

    plan: what cuts rows into chunks: mCu, mEntryCu, has_entries, min_tokens, first_chunk.
    """
    if const_expr(not overlapped):
        return {"first": block, "stop": all_items(plan, slots, heads), "workers": blocks, "together": turns[0]}
    stay, rounds, early = turns
    items = Int64(slots) * Int64(heads)
    count = workers_of_block(overlapped)
    stay, rounds = cutlass.min(stay, blocks), cutlass.min(rounds, Int32(items // Int64(blocks * count)))
    first_staying = rounds * blocks * count + block + worker * stay
    return {
        "first": block + worker * blocks + (cutlass.max(rounds, 1) - 1) * blocks * count,
        "stop": Int32(items),
        "rounds": rounds,
        "early": early,
        "workers": blocks * count,
        "staying": stay * count,
        "first_staying": first_staying if block < stay else Int32(items),
    }


@cute.jit
def all_items(plan, slots: Int32, heads: Int32) -> Int32:
    """Items whose slot has a chunk, or, with more rows than lanes, all; all lanes of one warp."""
    mCu, mEntryCu, has_entries, min_tokens, first_chunk = plan
    count = slots
    if cute.size(mCu, mode=[0]) <= LANES + 1:
        _, _, reached = chunks_of_rows(mCu, mEntryCu, has_entries, min_tokens, first_chunk, slots)
        count = cute.arch.shuffle_sync(reached, LANES - 1)
    return count * heads


@cute.jit
def chunks_of_rows(mCu, mEntryCu, has_entries: Int32, min_tokens: Int32, first_chunk: Int32, slots: Int32):
    """(begin, end, reached) of a row a lane: the slots of its chunks and how many chunks there are up to there."""
    rows, lane = cute.size(mCu, mode=[0]) - 1, cute.arch.lane_idx()
    row = lane if lane < rows else rows - 1
    begin = first_slot(mCu, mEntryCu, row, has_entries)
    length = Int32(mCu[row + 1]) - Int32(mCu[row])
    end = begin + ((length + CHUNK - 1) >> 6)
    if has_entries != 0:
        end = first_slot(mCu, mEntryCu, row + 1, has_entries)
    end = end if (length >= min_tokens) & (lane < rows) else begin
    begin, end = clamp(begin - first_chunk, slots), clamp(end - first_chunk, slots)
    reached = end - begin
    for step in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(reached, offset=1 << step, mask_and_clamp=0)
        if lane >= 1 << step:
            reached += below
    return begin, end, reached


@cute.jit
def slot_of_rank(inputs: cutlass.Constexpr, rank: Int32):
    """(slot, row) of the chunk behind `rank` others; all lanes of one warp."""
    slot, row = rank, Int32(0)
    if load_shared(inputs.info + ROW, 1, Int32) < 0:
        cu, entry_cu, _ = inputs.plan
        if inputs.rows <= LANES:
            begin, end, reached = chunks_of_rows(
                cu, entry_cu, inputs.has_entries, inputs.min_tokens, inputs.first_chunk, inputs.slots
            )
            before = reached - (end - begin)
            here = (rank >= before) & (rank < reached)
            slot = cute.arch.warp_redux_sync(begin + rank - before if here else Int32(0), "max")
            row = cute.arch.warp_redux_sync(cute.arch.lane_idx() if here else Int32(0), "max")
        else:
            row = row_of_slot(
                cu, entry_cu, inputs.first_chunk + slot, inputs.rows, cute.arch.lane_idx(), inputs.has_entries
            )
    return slot, row


def flag_address(inputs, slot, local_head):
    """Global address of the flag of a slot and head."""
    return inputs.flags + Int64(slot * inputs.heads + local_head) * 4


@cute.jit
def begin(inputs: cutlass.Constexpr, block: Int32, warp: Int32):
    """All warps but the one that starts the first loads: the table's lines, and beside the recurrence flags to zero, so that it
    may start."""
    if warp != LOADER:
        line = (block * OTHERS + warp - 1) * workers_of_block(inputs.overlapped) + inputs.worker
        if const_expr(inputs.overlapped):
            clear_flags(inputs, inputs.first, warp - 1)
        write_lines(inputs, line, inputs.workers * OTHERS)
        if const_expr(inputs.overlapped):
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(inputs.cleared)
    if const_expr(inputs.overlapped):
        if (inputs.worker == 1) & (warp == OTHERS):
            cute.arch.mbarrier_wait(inputs.cleared, 0)
            let_start()


def comes_later(inputs, block):
    """Whether the worker's first loads leave the memory to those of the blocks whose first items must come soon."""
    if not inputs.overlapped:
        return None
    return (inputs.early > 0) & ((inputs.worker == 1) | (block >= inputs.early))


@cute.jit
def wait_for_first(inputs: cutlass.Constexpr, block: Int32):
    """In the first `early` blocks the second worker lets the first one have the multiprocessor to itself for its first item,
    which comes sooner that way, and with it the recurrence's start."""
    if const_expr(inputs.overlapped):
        if (inputs.worker == 1) & (block < inputs.early):
            while load_shared(inputs.info - inputs.pitch + LAST, 1, Int32) < 0:
                cute.arch.inline_ptx("nanosleep.u32 100;")


def add_up(value):
    """Sum of a warp's Int32 values, in every lane."""
    return cute.arch.warp_redux_sync(value, "add")


@cute.jit
def slot_in_turn(inputs: cutlass.Constexpr, turn: Int32):
    """(slot, row) of the `turn`-th chunk in the order of need, or -1 behind the last one; all lanes of one warp, a row each.

    Of rows that run in parts each segment counts as a row (where it begins within a chunk or two: only the order depends on it).
    What the transition launch does not walk, last segments and short rows, comes behind all that it does.
    """
    slot, row = turn if turn < inputs.slots else Int32(-1), Int32(0)
    if load_shared(inputs.info + ROW, 1, Int32) < 0:
        slot, row = slot_among_rows(inputs, turn)
    return slot, row


@cute.jit
def slot_among_rows(inputs: cutlass.Constexpr, turn: Int32):
    """The same where there are several rows, checkpoints or earlier launches."""
    cu, entry_cu, _ = inputs.plan
    lane, rows, parts = cute.arch.lane_idx(), inputs.rows, inputs.parts
    row, segment = lane // parts, lane % parts
    inside = row < rows
    row = row if inside else rows - 1
    begin = first_slot(cu, entry_cu, row, inputs.has_entries) - inputs.first_chunk
    end = first_slot(cu, entry_cu, row + 1, inputs.has_entries) - inputs.first_chunk
    begin = begin if begin > 0 else Int32(0)
    end = end if end < inputs.slots else inputs.slots
    end = end if inside & (end > begin) else begin
    last = parts < 0
    if parts > 1:
        length = Int32(cu[row + 1]) - Int32(cu[row])
        if length >= inputs.long_length:
            steps = (end - begin + parts - 1) // parts
            begin = cutlass.min(begin + segment * steps, end)
            end = cutlass.min(begin + steps, end)
            last = segment == parts - 1
        else:
            end = end if segment == 0 else begin
            last = parts > 1
    count = end - begin
    levels_before = cute.arch.warp_redux_sync(Int32(0) if last else count, "max")
    levels = levels_before + cute.arch.warp_redux_sync(count if last else Int32(0), "max")
    late = (levels if last else levels_before) - count  # the level of the row's first chunk
    level, stop = Int32(0), levels
    if rows * parts == 1:
        level = turn if turn < levels else levels
        stop = level
    while stop - level > 1:
        middle = (level + stop) >> 1
        before = add_up(clamp(middle - late, count))
        level = middle if before <= turn else level
        stop = stop if before <= turn else middle
    rank = turn - add_up(clamp(level - late, count))
    here = (level >= late) & (level < late + count)
    mask = cute.arch.vote_ballot_sync(here)
    own = cute.arch.popc(mask & ((Int32(1) << lane) - 1))
    chosen = here & (own == rank)
    slot = begin + level - late if chosen else Int32(-1)
    return cute.arch.warp_redux_sync(slot, "max"), cute.arch.warp_redux_sync(row if chosen else Int32(0), "max")


@cute.jit
def clamp(value: Int32, limit: Int32) -> Int32:
    """The value within 0 and a limit."""
    return cutlass.max(cutlass.min(value, limit), 0)


@cute.jit
def write_line(inputs: cutlass.Constexpr, slot: Int32, token: Int32, count: Int32, start: Int32, entry: Int32):
    """A chunk slot's line of the table; one lane."""
    table = inputs.table
    table[slot, 0] = token
    table[slot, 1] = count
    table[slot, 2] = start
    table[slot, 3] = entry


def next_item(inputs, item):
    """The worker's first item from `item` on whose slot has a chunk: (item, slot, head, token, start, count, entry).

    One warp. Count is 0 at the end.
    """
    return next_in_turn(inputs, item) if inputs.overlapped else next_from_end(inputs, item)


def behind(inputs, item):
    """The worker's item behind one of its items."""
    return following(inputs, item) if inputs.overlapped else item + inputs.workers


@cute.jit
def next_from_end(inputs: cutlass.Constexpr, item: Int32):
    """In the order in which the recurrence finds most in L2: what it needs first is made last.

    Of `together` rows, those that it walks first, the chunks go level by level, as if they had equal numbers of them.
    """
    heads, stop = inputs.heads, load_shared(inputs.info + 64, 1, Int32)
    chunks, steps, even, together = load_shared(inputs.info + TURNS, 4, Int32)
    slot, token, start, count, entry = Int32(0), Int32(0), Int32(0), Int32(0), Int32(-1)
    while (item < stop) & (count == 0):
        rank = chunks - 1 - item // heads
        if rank < even:
            step = rank // together
            rank = (rank - step * together) * steps + step
        slot, row = slot_of_rank(inputs, rank)
        token, start, count, entry = look_up(inputs, slot, row)
        item = item if count > 0 else item + inputs.workers
    return item, slot, item % heads, token, start, count, entry


@cute.jit
def next_in_turn(inputs: cutlass.Constexpr, item: Int32):
    """In the order of need."""
    heads, slot, stop = inputs.heads, Int32(0), load_shared(inputs.info + 64, 1, Int32)
    token, start, count, entry = Int32(0), Int32(0), Int32(0), Int32(-1)
    while (item < stop) & (count == 0):
        slot, row = slot_in_turn(inputs, item // heads)
        if slot >= 0:
            token, start, count, entry = look_up(inputs, slot, row)
        item = item if count > 0 else following(inputs, item)
    return item, slot, item % heads, token, start, count, entry


@cute.jit
def following(inputs: cutlass.Constexpr, item: Int32) -> Int32:
    """Rounds of all workers come from the last one back, so that what is needed first is in L2 when they end."""
    shared, workers, staying, first_staying = load_shared(inputs.info + TURNS, 4, Int32)
    after = item - workers if item < shared else item + staying
    return first_staying if after < 0 else after


@cute.jit
def look_up(inputs: cutlass.Constexpr, slot: Int32, row: Int32 | None = None):
    """(first token, start in the row, count, first entry) of a chunk slot, whose row may be known; all lanes of one warp."""
    length = load_shared(inputs.info + ROW, 1, Int32)
    token, start, count, entry = Int32(0), slot * CHUNK, clamp(length - slot * CHUNK, Int32(CHUNK)), Int32(-1)
    if length < 0:
        place, plan = inputs.first_chunk + slot, inputs.plan
        facts = (cute.arch.lane_idx(), inputs.has_entries, inputs.min_tokens)
        if const_expr(row is None):
            token, start, count, entry = chunk_of_slot(*plan, place, inputs.rows, *facts)
        else:
            token, start, count, entry = chunk_of_row(*plan, row, place, *facts)
    return token + start, start, count, entry


@cute.jit
def clear_flags(inputs: cutlass.Constexpr, item: Int32, warp: Int32):
    """One of seven warps: its share of the worker's flags, from the first `item` on, to zero."""
    number = Int32(0)
    while item < inputs.stop:
        if number % OTHERS == warp:
            slot, _ = slot_in_turn(inputs, item // inputs.heads)
            if (slot >= 0) & (cute.arch.lane_idx() == 0):
                clear_flag(flag_address(inputs, slot, item % inputs.heads))
        number += 1
        item = following(inputs, item)


@cute.jit
def write_lines(inputs: cutlass.Constexpr, line: Int32, lines: Int32):
    """One warp: its share of the table's lines."""
    for slot in cutlass.range(line, inputs.slots, lines, unroll=1):
        token, start, count, entry = look_up(inputs, slot)
        if cute.arch.lane_idx() == 0:
            write_line(inputs, slot, token, count, start, entry)


def policy_of_loads(inputs):
    """Keywords of a load of inputs: where memory is the limit, what is written leaves the second level before what is read, soon
    and in order, which memory takes faster."""
    return {} if inputs.overlapped else {"cache_policy": Int64(EVICT_LAST)}


def policy_of_stores(inputs):
    """There too, and what the recurrence finds stays in the second level."""
    return None if inputs.overlapped else kept_or_not(inputs)


@cute.jit
def kept_or_not(inputs: cutlass.Constexpr) -> Int64:
    """For the record of the item under way."""
    left = load_shared(inputs.info + 64, 1, Int32) - load_shared(inputs.info + 24, 1, Int32)
    return Int64(EVICT_FIRST) if left > KEPT_ITEMS else Int64(EVICT_LAST)
