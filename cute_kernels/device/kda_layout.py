"""What the two KDA prefill kernels agree on: the chunk record in global memory and the walk over a sequence's chunks.

A *record* holds everything a chunk contributes to one value head's recurrence except V, as the shared-memory image the
state kernel computes from, so that bulk copies load it:

    KG   fp16 [64 x 128]   k r_k e^G           row side of S k
    QG   fp16 [64 x 128]   q r_q s e^G         row side of S q
    KU   fp16 [64 x 128]   k r_k e^(G_C - G)   state update
    T    fp16 [64 x 64]    -(I + L)^-1 diag(beta)
    P    fp16 [64 x 64]    tril(q k) with decay and scale
    tail fp32 e^(G_C) [128] in the order of `tail_place`, then 4 words: chunk start in the row, tokens, end in the row, first
         checkpoint entry or -1

T and P are lower triangular. In shared memory they are *narrow* tiles: four blocks of 16 columns, 64 rows of 32 bytes with the
32-byte swizzle. The record has of block m the rows from 16 m on alone; those above are zeros that stay in shared memory.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ..configs.kda_prefill import RECORD_BYTES
from .prefill_layout import CHUNK, OPERAND_BYTES, TILE_BYTES
from .prefill_schedule import find_long_row

KG_OFFSET = 0
QG_OFFSET = OPERAND_BYTES
KU_OFFSET = 2 * OPERAND_BYTES
T_OFFSET = 3 * OPERAND_BYTES
P_OFFSET = T_OFFSET + TILE_BYTES
IMAGE_BYTES = P_OFFSET + TILE_BYTES  # in shared memory
NARROW_BYTES = TILE_BYTES // 4  # of a block of 16 columns, 512 for each 16 rows
TRIANGLE_BYTES = 10 * 512
TAIL_OFFSET = T_OFFSET + 2 * TRIANGLE_BYTES
INFO_OFFSET = TAIL_OFFSET + 512
RECORD_COPY_BYTES = INFO_OFFSET + 16
assert RECORD_BYTES == TAIL_OFFSET + 1024


def triangle_offset(column):
    """Where a record's T or P has the first rows of its block of 16 columns, those on the diagonal."""
    return 512 * (4 * column - column * (column - 1) // 2)


def tail_place(pair):
    """Byte of a pair of channels in the tail: the pairs of a lane (of its quad) in two octets of channels follow each other."""
    return (pair >> 3) * 64 + (pair & 3) * 16 + ((pair >> 2) & 1) * 8


def triangle_pieces(record, image):
    """(offset in the record, in the image, bytes) of each copy that brings T or P from and to these offsets."""
    return [
        (record + triangle_offset(column), image + column * (NARROW_BYTES + 512), NARROW_BYTES - 512 * column)
        for column in range(4)
    ]


def image_pieces(first, end):
    """The same of the image from `first`, KU or before, to `end`."""
    pieces = [(first, first, T_OFFSET - first)]
    for matrix in range((end - T_OFFSET) // TILE_BYTES):
        for record, image, size in triangle_pieces(T_OFFSET + matrix * TRIANGLE_BYTES, T_OFFSET + matrix * TILE_BYTES):
            *before, (last_record, last_image, last_size) = pieces
            if last_image + last_size == image:
                pieces = [*before, (last_record, last_image, last_size + size)]
            else:
                pieces.append((record, image, size))
    return pieces


def narrow_address(row, piece):
    """Byte offset of 16-byte piece `piece` (0, 1) of row `row` in a block of 16 columns."""
    return row * 32 + ((piece ^ ((row >> 2) & 1)) << 4)


@cute.jit
def first_slot(mCu: cute.Tensor, mEntryCu: cute.Tensor, row: Int32, has_entries: Int32) -> Int32:
    """First chunk slot of a row: a closed form that leaves at least ceil(len / 64) + entries slots to each row."""
    entries = Int32(mEntryCu[row])
    return (Int32(mCu[row]) >> 6) + row + (entries if has_entries != 0 else Int32(0))


@cute.jit
def row_of_slot(
    mCu: cute.Tensor, mEntryCu: cute.Tensor, slot: Int32, rows: Int32, lane: Int32, has_entries: Int32
) -> Int32:
    """The row that owns a chunk slot: 32-way search, all lanes of a warp take part."""
    low = Int32(0)
    high = rows
    while high - low > 1:
        step = (high - low + 31) >> 5
        candidate = low + lane * step
        at = candidate if candidate < high else low
        below = (candidate < high) & (first_slot(mCu, mEntryCu, at, has_entries) <= slot)
        passed = cute.arch.popc(cute.arch.vote_ballot_sync(below))
        low = low + (passed - 1) * step
        high = low + step if low + step < high else high
    return low


@cute.jit
def segment_of_block(
    mCu: cute.Tensor,
    rows: Int32,
    item: Int32,
    long_rows: Int32,
    long_length: Int32,
    parts: Int32,
    lane: Int32,
    transition: cutlass.Constexpr,
):
    """(row, segment, place): segment is -1 for a whole row; place is the workspace slot of its start state, of what a
    transition block finds, or -1 where the block has nothing to do."""
    row, segment, place = item - long_rows * parts, Int32(-1), Int32(0)
    if const_expr(transition):
        # Of a long row: the end of its first segment, then (state from zero, transition) of each inner one.
        per_row = 2 * parts - 3
        index = item // per_row
        segment = (item % per_row + 1) // 2
        row = find_long_row(mCu, rows, index, long_length, lane)
        place = 2 * (index * (parts - 1) + segment) + (1 if (segment > 0) & (item % per_row % 2 == 0) else 0)
    elif row < 0:
        index = item // parts
        segment = item % parts
        row = find_long_row(mCu, rows, index, long_length, lane)
        base = 2 * index * (parts - 1)
        place = base + 1 if segment == 0 else base + 2 * (segment - 1)
    if row < 0:
        row, segment, place = Int32(0), Int32(-1), Int32(-1)
    return row, segment, place


@cute.jit
def slot_of_token(
    mCu: cute.Tensor,
    mEntryCu: cute.Tensor,
    mEnds: cute.Tensor,
    row: Int32,
    token: Int32,
    has_entries: Int32,
    lane: Int32,
) -> Int32:
    """The slot of the chunk that starts `token` tokens into a row, a multiple of 64: behind all entries up to there."""
    low = Int32(0)
    if has_entries != 0:
        first = Int32(mEntryCu[row])
        high = Int32(mEntryCu[row + 1]) - first
        while high > low:
            step = (high - low + 31) >> 5
            candidate = low + lane * step
            at = candidate if candidate < high else low
            passed = cute.arch.popc(
                cute.arch.vote_ballot_sync((candidate < high) & (Int32(mEnds[first + at]) <= token))
            )
            limit = low + passed * step
            low = low + (passed - 1) * step + 1 if passed > 0 else low
            high = (limit if limit < high else high) if passed > 0 else low
    return first_slot(mCu, mEntryCu, row, has_entries) + (token >> 6) + low


@cute.jit
def entry_rank(end: Int32, index: Int32, length: Int32, grid_ends: Int32) -> Int32:
    """Place of a checkpoint entry among all chunk ends of its row; a grid end at the same token comes behind it."""
    before = (end - 1) >> 6 if end > 0 else Int32(0)
    return index + (grid_ends if end > length else before)


@cute.jit
def entries_before(
    mEnds: cute.Tensor, first: Int32, count: Int32, place: Int32, length: Int32, grid_ends: Int32, lane: Int32
) -> Int32:
    """How many of a row's entries rank before `place`: 32-way search by a warp."""
    low = Int32(0)
    high = count
    while high > low:
        step = (high - low + 31) >> 5
        candidate = low + lane * step
        at = candidate if candidate < high else low
        rank = entry_rank(Int32(mEnds[first + at]), at, length, grid_ends)
        passed = cute.arch.popc(cute.arch.vote_ballot_sync((candidate < high) & (rank < place)))
        limit = low + passed * step
        low = low + (passed - 1) * step + 1 if passed > 0 else low
        high = (limit if limit < high else high) if passed > 0 else low
    return low


@cute.jit
def chunk_of_slot(
    mCu: cute.Tensor,
    mEntryCu: cute.Tensor,
    mEnds: cute.Tensor,
    slot: Int32,
    rows: Int32,
    lane: Int32,
    has_entries: Int32,
    min_tokens: Int32,
):
    """`chunk_of_row` of the row that owns a slot; all lanes of one warp."""
    row = row_of_slot(mCu, mEntryCu, slot, rows, lane, has_entries)
    return chunk_of_row(mCu, mEntryCu, mEnds, row, slot, lane, has_entries, min_tokens)


@cute.jit
def chunk_of_row(
    mCu: cute.Tensor,
    mEntryCu: cute.Tensor,
    mEnds: cute.Tensor,
    row: Int32,
    slot: Int32,
    lane: Int32,
    has_entries: Int32,
    min_tokens: Int32,
):
    """(row's first token, start, count, first entry or -1) of a row's chunk slot; start counts from the row's first token.

    A row's chunks end at every multiple of 64 tokens, at every checkpoint and at its length: they depend on this row alone.
    A slot without a chunk has count 0, as have all slots of rows with fewer than `min_tokens` tokens.
    """
    token = Int32(mCu[row])
    length = Int32(mCu[row + 1]) - token
    length = length if length >= min_tokens else Int32(0)
    place = slot - first_slot(mCu, mEntryCu, row, has_entries)
    grid_ends = (length + CHUNK - 1) >> 6
    passed = Int32(0)
    entry = Int32(-1)
    entry_end = Int32(0)
    previous = Int32(0)
    if has_entries != 0:
        first = Int32(mEntryCu[row])
        entries = Int32(mEntryCu[row + 1]) - first
        passed = entries_before(mEnds, first, entries, place, length, grid_ends, lane)
        if passed > 0:
            previous = Int32(mEnds[first + passed - 1])
            previous = previous if previous <= length else Int32(0)
        if passed < entries:
            end = Int32(mEnds[first + passed])
            if entry_rank(end, passed, length, grid_ends) == place:
                entry = first + passed
                entry_end = end if end <= length else Int32(0)
    grid = place - passed
    grid_end = (grid + 1) * CHUNK
    grid_end = grid_end if grid_end < length else length
    grid_end = grid_end if grid < grid_ends else Int32(0)
    end = entry_end if entry >= 0 else grid_end
    start = grid * CHUNK
    start = start if start > previous else previous
    count = end - start if end > start else Int32(0)
    return token, start, count, entry
