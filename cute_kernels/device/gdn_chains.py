"""Which chunks the two kernels of GDN prefill from records work on, and when.

**Chains** of the recurrence. A row that is not cut, and the first segment of one that is, start from the pool: they run first,
beside the launch that finds what inner segments do to a state (from zero, N, and from the identity, A). When these are
composed, the other segments run (`prefill_schedule.find_work`).

**Order of need** of the records. Chunks go by the steps that are left to their row, the most first, across rows and within a
step across heads; where rows are cut, by the steps from their row's start. A *unit* is one chunk with some value heads.

**Which form.** Where shapes do not say whether half heads from records, whole ones or one launch end sooner, all that may are
launched; each finds from the lengths whether it works (`takes_halves`), and ends at once where it does not.

**Who makes them.** First chains take `width` blocks, and so multiprocessors, each. What the others cannot make while these run,
all make together before: the first `early` records. Then only the first `stay` blocks go on (`shares`, `deal`).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..configs.gdn_records import MOST_CHOSEN_ROWS
from ..configs.prefill import MULTIPROCESSORS
from .arith import divide
from .kda_layout import first_slot
from .prefill_layout import CHUNK
from .prefill_schedule import led_segment_bounds
from .warp_ops import load_shared, store_shared

ROWS = 32  # with chunks, at most: one a lane
# Who chooses the form of a call: shapes, or lengths between half heads and whole ones, or between these and one launch.
BY_SHAPES, OR_WHOLES, OR_ONE_LAUNCH = range(3)
# Words of a row's line in shared memory, OFFSET the steps before its first one; the end of its entries is behind ENTRY.
BEGIN, LENGTH, FIRST_SLOT, OFFSET, ENTRY = range(5)
PLAN_BYTES = 48  # what a worker's units follow from
LINE_BYTES = 32
TABLE_BYTES = ROWS * LINE_BYTES


@cute.jit
def takes_halves(mCu: cute.Tensor, min_tokens: Int32, heads: Int32, lane: Int32):
    """(1 where chains of half heads from records end soonest, rows with chunks); all lanes of a warp.

    What all rows take at full occupancy counts in heads of the longest one, which is a chain.
    """
    rows = cute.size(mCu) - 1
    bounds = [
        (mCu[cutlass.min(32 * j + lane, rows - 1)], mCu[cutlass.min(32 * j + lane, rows - 1) + 1])
        for j in range(MOST_CHOSEN_ROWS // 32)
    ]
    total, longest, count = Int32(0), Int32(0), Int32(0)
    for j in cutlass.range_constexpr(MOST_CHOSEN_ROWS // 32):
        length = bounds[j][1] - bounds[j][0]
        inside = (32 * j + lane < rows) & (length >= min_tokens)
        chunks = cutlass.max((length + CHUNK - 1) // CHUNK, Int32(1)) if inside else Int32(0)
        total, longest = total + chunks, cutlass.max(longest, chunks)
        count += Int32(1) if inside else Int32(0)
    total = heads * cute.arch.warp_redux_sync(total, "add")
    longest = cute.arch.warp_redux_sync(longest, "max")
    count = cute.arch.warp_redux_sync(count, "add")
    fits = (total <= MULTIPROCESSORS // 2 * longest) & (count <= ROWS)
    return (Int32(1) if fits else Int32(0)), count


@cute.jit
def row_of_lane(table: Int32, mCu: cute.Tensor, min_tokens: Int32, lane: Int32):
    """The row that a lane holds: of a call of more rows than lanes the lane-th one with chunks; not a row where there is none."""
    rows = cute.size(mCu) - 1
    row = lane
    if rows > ROWS:
        store_shared(table + lane * LINE_BYTES, rows)
        cute.arch.sync_warp()
        seen = Int32(0)
        for j in cutlass.range_constexpr(MOST_CHOSEN_ROWS // 32):
            row = 32 * j + lane
            has_chunks = row < rows
            if has_chunks:
                has_chunks = mCu[row + 1] - mCu[row] >= min_tokens
            mask = cute.arch.vote_ballot_sync(has_chunks)
            rank = seen + cute.arch.popc(mask & ((Int32(1) << lane) - 1))
            if has_chunks & (rank < ROWS):
                store_shared(table + rank * LINE_BYTES, row)
            seen += cute.arch.popc(mask)
        cute.arch.sync_warp()
        row = load_shared(table + lane * LINE_BYTES, 1, Int32)
        cute.arch.sync_warp()
    return row


@cute.jit
def may_have_cuts(mEnds: cute.Tensor, has_checkpoints: Int32, lane: Int32):
    """Whether kept states may end chunks off the grid; of more than 128 of them they are taken to. All lanes of a warp."""
    entries = cute.size(mEnds) if has_checkpoints != 0 else Int32(0)
    off_grid = entries > 128
    if entries > 0:
        for j in cutlass.range_constexpr(4):
            off_grid = off_grid | ((mEnds[cutlass.min(32 * j + lane, entries - 1)] & (CHUNK - 1)) != 0)
    return cute.arch.vote_ballot_sync(off_grid) != 0


@cute.jit
def write_rows(
    table: Int32,
    mCu: cute.Tensor,
    mKeptCu: cute.Tensor,
    mKeptEnds: cute.Tensor,
    has_checkpoints: Int32,
    min_tokens: Int32,
    long_length: Int32,
    parts: Int32,
    lead: Int32,
    lane: Int32,
):
    """A warp writes its table of rows; returns steps of the longest row, chunks of all, length in chunks of the longest first
    chain, how many are about that long (where rows are cut, all), and chunks of a segment behind the first one, 0 without."""
    rows = cute.size(mCu) - 1
    begin, length, slot, entry, entry_end, size, chain, inner = (Int32(0) for _ in range(8))
    is_long = lane < 0
    has_cuts = may_have_cuts(mKeptEnds, has_checkpoints, lane)
    row = row_of_lane(table, mCu, min_tokens, lane)
    if row < rows:
        begin = mCu[row]
        length = mCu[row + 1] - begin
        slot = first_slot(mCu, mKeptCu, row, has_checkpoints)
        if has_cuts:
            entry = mKeptCu[row]
            entry_end = mKeptCu[row + 1]
        if length >= min_tokens:
            chain = cutlass.max((length + CHUNK - 1) // CHUNK, Int32(1))
            size = chain + entry_end - entry
            is_long = length >= long_length
            _, first = led_segment_bounds(length, Int32(0), parts, lead)
            _, second = led_segment_bounds(length, Int32(1), parts, lead)
            inner = (second - first) // CHUNK if is_long else Int32(0)
            chain = first // CHUNK if is_long else chain
    steps = cute.arch.warp_redux_sync(size, "max")
    line = table + lane * LINE_BYTES
    store_shared(line, begin, length, slot, steps - size)
    store_shared(line + 4 * ENTRY, entry, entry_end)
    cute.arch.sync_warp()
    longest = cute.arch.warp_redux_sync(chain, "max")
    inner = cute.arch.warp_redux_sync(inner, "max")
    alike = cute.arch.popc(cute.arch.vote_ballot_sync((4 * chain > 3 * longest) | ((inner > 0) & (chain > 0))))
    return steps, cute.arch.warp_redux_sync(size, "add"), longest, alike, inner


@cute.jit
def write_row(table: Int32, begin: Int32, end: Int32, min_tokens: Int32):
    """The line of a call's only row of these bounds, without entries; all lanes of a warp. A row without chunks has length -1."""
    length = end - begin if end - begin >= min_tokens else Int32(-1)
    store_shared(table, begin, length, begin >> 6, Int32(0))
    store_shared(table + 4 * ENTRY, Int32(0), Int32(0))
    cute.arch.sync_warp()


@cute.jit
def shares(
    chunks: Int32,
    longest: Int32,
    alike: Int32,
    inner: Int32,
    heads: Int32,
    together: Int32,
    width: Int32,
    workers: cutlass.Constexpr,
    blocks: Int32,
):
    """(stay, early, single, total) for `deal`; those of one row without kept states are `configs/gdn_records.plan_of_row`.

    A multiprocessor makes a record in 1.4 us, a chain takes 1.2 us a chunk with half a head a block, 1.7 us with a whole one,
    0.7 us with an eighth.
    Where rows are cut, transitions start when all records are there, and are to end with the first chains. In 1/32 us a chunk
    of a transition takes 43, of a first chain 35, a record 45, or 38 where a key has three value heads or more. Of a row alone
    more records are made beside the first chains: nobody else's chain waits for them.
    """
    total = chunks * heads
    stay = blocks - alike * heads * width
    rate = Int32(7) if width == 2 else Int32(10)  # records of a multiprocessor in eight steps of a chain
    rate = Int32(4) if width >= 4 else rate
    ahead = (longest * rate) // 8
    if inner > 0:
        among = (35 * longest - 43 * inner) // (Int32(45) if together <= 2 else Int32(38))
        ahead = ahead - inner if alike == 1 else among
    early = cutlass.max(total - stay * ahead, 0)
    single = Int32(-1)
    if (width > 0) & (stay > blocks // 4) & (ahead > 0):
        round_of_all = workers * (blocks if early > 0 else stay)
        single = cutlass.min(chunks, divide(round_of_all + heads - 1, heads)) * heads
        total = single + divide(total - single, together)
        early = early if early <= single else single + divide(early - single, together)
    else:
        stay = Int32(0)
    return stay, early, single, total


@cute.jit
def places_of_chunks(table: Int32, chunk: Int32, steps: Int32, lane: Int32):
    """`place_of_chunk` of a chunk of each lane; all lanes of one warp."""
    offset = load_shared(table + lane * LINE_BYTES + 4 * OFFSET, 1, Int32)
    step, base, alive, rows = Int32(0), Int32(0), Int32(1), Int32(1)
    at, passed = Int32(0), Int32(0)
    while at < steps:
        mask = cute.arch.vote_ballot_sync(offset <= at)
        following = cute.arch.warp_redux_sync(offset if offset > at else steps, "min")
        count = cute.arch.popc(mask)
        reached = chunk >= passed
        step, base = (at if reached else step), (passed if reached else base)
        alive, rows = (mask if reached else alive), (count if reached else rows)
        passed, at = passed + (following - at) * count, following
    ahead = divide(chunk - base, rows)
    row = cute.arch.inline_ptx(
        "fns.b32 {$w0}, {$r0}, 0, {$r1};",
        write_only_types=[Int32],
        read_only_args=[alive, chunk - base - ahead * rows + 1],
    )
    return row, step + ahead - load_shared(table + row * LINE_BYTES + 4 * OFFSET, 1, Int32)


@cute.jit
def deal(
    own: Int32,
    stay: Int32,
    early: Int32,
    single: Int32,
    total: Int32,
    mirror: Int32,
    steps: Int32,
    worker: Int32,
    workers: cutlass.Constexpr,
    block: Int32,
    blocks: Int32,
):
    """Write to `own` which units the worker takes; all lanes of a warp, which reads them.

    Where blocks leave early, units go round: to one worker of each block before a second one, the first `early` to all, the
    others to blocks that stay; of the first chunks, one round, a unit is one head (`single` such units), so that no chain waits
    for its start, of the others `together` heads. Otherwise a worker has an equal run of all records (`total`), and a unit is
    what it makes of one chunk.
    """
    if stay == 0:
        number = block * workers + worker
        first, stop = divide(total * number, workers * blocks), divide(total * (number + 1), workers * blocks)
        store_shared(own, first, Int32(0), Int32(0), stop)
    else:
        late = early + worker * stay + block if block < stay else total
        first = worker * blocks + block
        store_shared(own, first if first < early else late, early, late, total)
    store_shared(own + 16, workers * blocks, workers * stay, steps, single)
    store_shared(own + 32, mirror)
    cute.arch.sync_warp()


@cute.jit
def place_of_chunk(table: Int32, chunk: Int32, steps: Int32, lane: Int32):
    """(row, chunk of the row) of a chunk in order of need; all lanes of one warp."""
    offset = load_shared(table + lane * LINE_BYTES + 4 * OFFSET, 1, Int32)
    step, base, alive, rows = Int32(0), Int32(0), Int32(0), Int32(1)
    searching = chunk >= 0
    while searching:
        alive = cute.arch.vote_ballot_sync(offset <= step)
        rows = cute.arch.popc(alive)
        following = cute.arch.warp_redux_sync(offset if offset > step else steps, "min")
        span = (following - step) * rows
        searching = (chunk - base >= span) & (following < steps)
        base = base + span if searching else base
        step = following if searching else step
    ahead = divide(chunk - base, rows)
    rank = chunk - base - ahead * rows
    before = cute.arch.popc(alive & ((Int32(1) << lane) - 1))
    hit = cute.arch.vote_ballot_sync((offset <= step) & (before == rank))
    row = cute.arch.make_warp_uniform(cute.arch.popc(hit - 1) & 31)
    return row, step + ahead - load_shared(table + row * LINE_BYTES + 4 * OFFSET, 1, Int32)


@cute.jit
def following_unit(own: Int32, unit: Int32, heads: Int32):
    """The worker's unit behind one of its own, the first one behind -1; not below `total` (returned too) where there is none."""
    first, early, late, total = load_shared(own, 4, Int32)
    stride, late_stride, _, single = load_shared(own + 16, 4, Int32)
    following = unit + (stride if unit < early else late_stride)
    following = late if (unit < early) & (following >= early) else following
    following = following if single >= 0 else (divide(unit, heads) + 1) * heads
    return cute.arch.make_warp_uniform(first if unit < 0 else following), cute.arch.make_warp_uniform(total)


@cute.jit
def records_of_unit(unit: Int32, single: Int32, together: Int32):
    """First record of a unit in the order of need, and how many it has, 1 of an equal run."""
    alone = (single < 0) | (unit < single)
    return (unit if alone else single + (unit - single) * together), (Int32(1) if alone else together)


@cute.jit
def unit_of_turn(own: Int32, turn: Int32):
    """The worker's `turn`-th unit, not below `total` (returned too) where there is none; of an equal run its records in turn."""
    first, early, late, total = load_shared(own, 4, Int32)
    stride, late_stride, _, single = load_shared(own + 16, 4, Int32)
    turns = divide(early - first + stride - 1, stride) if first < early else Int32(0)
    unit = first + turn * stride if turn < turns else late + (turn - turns) * late_stride
    return (first + turn if single < 0 else unit), total


@cute.jit
def span_of_unit(table: Int32, own: Int32, rows: Int32, unit: Int32, heads: Int32, together: Int32, lane: Int32):
    """(row, chunk of the row, first head, heads) of a unit of the worker; all lanes of one warp."""
    total = load_shared(own + 12, 1, Int32)
    steps, single = load_shared(own + 24, 2, Int32)
    record, count = records_of_unit(unit, single, together)
    chunk = divide(record, heads)
    head = record - chunk * heads
    count = cutlass.min(heads - head, total - unit) if single < 0 else count
    row, place = Int32(0), chunk
    if rows > 1:
        mirror = load_shared(own + 32, 1, Int32)
        row, place = place_of_chunk(table, mirror - 1 - chunk if mirror > 0 else chunk, steps, lane)
        size = steps - load_shared(table + row * LINE_BYTES + 4 * OFFSET, 1, Int32)
        place = size - 1 - place if mirror > 0 else place
    return row, place, head, count
