"""A KDA chunk on matrix fragments in registers: decays, row sums, operands and pair products of one warp.

A warp owns a block of 16 tokens and half of the channels. Lane 4 r + c holds tokens r and r + 8 of the block and, of each piece
of 8 channels, channels 2 c and 2 c + 1: the left operand of a 16 x 16 x 16 product, and the right one of the block's
transpose. So the operands of the block's own pair products never leave registers.

Decays are in base 2. What a channel's logarithms sum to over a range of tokens is a product with a matrix of zeros and ones, in
fp32, and every factor is the exponential of such a sum, at most 1: right for any gate, and of no token behind its row.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from .prefill_layout import OPERAND_BYTES, tile_address
from .warp_ops import (
    ldmatrix4,
    load_shared,
    maximum_f16,
    mma_1688_tf32,
    mma_16816,
    multiply_f16,
    pack_f16,
    pick,
    reread,
    stmatrix4,
    stmatrix4_where,
    store_shared,
    unpack_bf16,
)

RAW_GATE = 3 * OPERAND_BYTES  # behind k, q and the log decays
STEPS = 4  # of 16 channels, two pieces of 8
ONES = 0x3C003C00  # two fp16 ones
COLUMN_BYTES = 48 * 128  # column operands of three blocks, half of the channels
FLOOR_PAIR = 0xCB00CB00  # two fp16 of -14: 16 tokens of it are 224 bits
SHIFT = 112.0
PAIR_WORDS = 6  # entries of the block on the diagonal that a lane holds, without the quarter above it
PAIR_BYTES = 1024  # room for them, and for the 8 entries of a block below the diagonal, of all lanes


def exp2(x):
    """2^x; below 2^-126 zero."""
    return cute.math.exp2(x, fastmath=True)


def fragment_address(tile, block, lane):
    """A lane's row address of step 0 in a swizzled tile of 64 channels; that of step s is `^ 32 s`."""
    return tile_address(tile, block * 16 + (lane & 15), lane >> 4)


def right_address(tile, block, lane):
    """The same for `ldmatrix4` of right operands: words 0, 1 are those of tokens 0 to 7, words 2, 3 of tokens 8 to 15."""
    return tile_address(tile, block * 16 + (lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1)


class Patterns:
    """Matrices of zeros and ones [token, token] as left operands: their products with log decays sum ranges of tokens."""

    def __init__(self, lane):
        r, c = lane >> 2, lane & 3
        zero, ones = Uint32(0), reread(Uint32(ONES))  # the assembler takes no left operand of constants alone
        upto = pick(r > 2 * c, ones, pick(r == 2 * c, Uint32(0x3C00), zero))
        behind = upto ^ ones
        self.all = (ones, ones, ones, ones)
        self.upto = (upto, ones, zero, upto)  # tokens up to the row's own
        self.behind = (behind, zero, ones, behind)  # tokens behind it


def log_decays(start, offsets, gate):
    """Log decays of a warp's raw gates, fp16, to a tile of their own.

    Returns them as right operands [token, channel]: words 2 p, 2 p + 1 of piece p. `gate` is a function of the raw value and
    the channel's offset; a lane has channel lane // 4 of each piece.
    """
    found = []
    for step in range(STEPS):
        at = start ^ (32 * step)
        words = []
        for index, word in enumerate(ldmatrix4(at + RAW_GATE, transpose=True)):
            offset = offsets[2 * step + index // 2]
            low, high = unpack_bf16(word)
            words.append(pack_f16(gate(low, offset), gate(high, offset)))
        stmatrix4(at + 2 * OPERAND_BYTES, *words, transpose=True)
        found += words
    return found


def range_sums(pattern, decays, piece):
    """Sums over ranges of tokens for one piece: (token r: two channels, token r + 8: two channels)."""
    return mma_16816(pattern, (decays[2 * piece], decays[2 * piece + 1]), [Float32(0.0)] * 4, "f16")


def row_sums(start, lane):
    """Sums k.k, q.q and q.k over the warp's channels, as diagonals of products, for rows lane // 4 and 8 behind it, in lanes
    with `owns_norms(lane)`. Products of bf16 are exact in fp32; a row that is not finite spoils its own sums alone. The words
    of a left operand are those of the right one, too: 0 and 2 of tokens 0 to 7, 1 and 3 of the others.
    """
    both, queries = ([[Float32(0.0)] * 4] * 2 for _ in range(2))
    for step in range(STEPS):
        k, q = (ldmatrix4((start ^ (32 * step)) + place * OPERAND_BYTES) for place in range(2))
        # Eight rows of k above the same rows of q.
        both = [mma_16816((k[n], q[n], k[n + 2], q[n + 2]), k[n::2], both[n], "bf16") for n in range(2)]
        queries = [mma_16816(q, q[n::2], queries[n], "bf16") for n in range(2)]
    odd = ((lane >> 2) & 1) != 0
    found = [(x[0], x[1]) for x in both], [queries[0][:2], queries[1][2:]], [(x[2], x[3]) for x in both]
    return [[pick(odd, x[1], x[0]) for x in pair] for pair in found]


def words_of(values):
    """Four fp16 pairs in the order of a left operand from the values of two pieces."""
    return [pack_f16(piece[2 * row], piece[2 * row + 1]) for piece in values for row in range(2)]


def from_last_row(x):
    """The value of the lane with rows 7 and 15 and the same channels."""
    return cute.arch.shuffle_sync(x, 28 + cute.arch.lane_idx() % 4)


def scaled(x, factors):
    """fp32 pairs in the order of a left operand's words times factors [piece], two for each row."""
    return [[x[e][c] * factors[e >> 1][2 * (e & 1) + c] for c in range(2)] for e in range(4)]


def packed(x):
    """fp32 pairs as fp16 words."""
    return [pack_f16(*pair) for pair in x]


class BlockPairs:
    """Pair products k_i.k_j and q_i.k_j of one block of 16 tokens over the warp's channels, step by step.

    Factors are relative to the block's start: rows e^G, columns e^-G, in tf32, which has fp32's exponents. Steep gates leave
    that range: there a token that keeps less than 2^-14 of a channel counts as one that keeps 2^-14, in these products alone,
    and the exponents are shifted by SHIFT, so that 16 tokens and a normalised k stay in it.
    """

    def __init__(self, steep, patterns):
        self.steep, self.patterns = steep, patterns
        zero = [Float32(0.0)] * 4
        # Of rows r + 8 and columns 0 to 7, and of the two eights on the diagonal: two entries of k, two of q.
        self.between, self.within = zero, [zero, zero]

    def add(self, k, q, columns):
        """One step from k and q decayed from the block's start and the keys' columns, fp32 pairs."""
        for piece in range(2):
            rows = [[x[e][c] for c in range(2) for x in (k, q)] for e in (2 * piece, 2 * piece + 1)]
            for n in range(2):
                self.within[n] = mma_1688_tf32(rows[n], columns[2 * piece + n], self.within[n])
            self.between = mma_1688_tf32(rows[1], columns[2 * piece], self.between)

    def add_floored(self, decays, k, q):
        """The same from the log decays, k and q."""
        floor = reread(Uint32(FLOOR_PAIR))
        bounded = [maximum_f16(word, floor) for word in decays]
        sums = [[x + Float32(SHIFT) for x in range_sums(self.patterns.upto, bounded, p)] for p in range(2)]
        upto = [[exp2(x) for x in piece] for piece in sums]
        self.add(scaled(k, upto), scaled(q, upto), scaled(k, [[exp2(-x) for x in piece] for piece in sums]))

    def entries(self):
        """(keys, queries): of rows r and r + 8, columns 2 c, 2 c + 1, then of row r + 8 columns 2 c + 8, 2 c + 9."""
        parts = (self.within[0], self.between, self.within[1])
        return tuple([x for part in parts for x in part[first : first + 2]] for first in (0, 2))


def step_operands(step, start, column_start, has_columns, norms, before, after, pairs):
    """16 channels: KG, QG and KU over the raw k, q and log decays, the column operand, and the block's own pair products.

    norms: factors of k and of q for the lane's two rows; before, after: words of the decay from the chunk's start to the block
    and from the block to the chunk's end. Returns k and q decayed from the block's start, fp16.
    """
    patterns = pairs.patterns
    target = start ^ (32 * step)

    def normalised(side):
        words = ldmatrix4(target + side * OPERAND_BYTES)
        return [[x * norms[side][e & 1] for x in unpack_bf16(words[e])] for e in range(4)]

    def decayed(words, factors):
        return [multiply_f16(words[e], factors[e]) for e in range(4)]

    def store(place, words, factor):
        """Behind the decay over other blocks, which a channel has in common."""
        stmatrix4(target + place * OPERAND_BYTES, *[multiply_f16(words[e], factor[e >> 1]) for e in range(4)])

    decays = ldmatrix4(target + 2 * OPERAND_BYTES, transpose=True)
    k = normalised(0)
    sums = [range_sums(patterns.upto, decays, p) for p in range(2)]
    upto = [[exp2(x) for x in piece] for piece in sums]
    to_row = words_of(upto) if pairs.steep else None
    if pairs.steep:
        k16 = packed(k)
        columns = decayed(k16, words_of([[exp2(x) for x in range_sums(patterns.behind, decays, p)] for p in range(2)]))
        rows = decayed(k16, to_row)
    else:
        right = scaled(k, [[exp2(-x) for x in piece] for piece in sums])
        whole = [[from_last_row(x) for x in piece[2:]] * 2 for piece in upto]
        columns = packed(scaled(right, whole))
        left = scaled(k, upto)
        rows = packed(left)
    stmatrix4_where(has_columns, column_start ^ (32 * step), *columns)
    store(2, columns, after)
    store(0, rows, before)
    q = normalised(1)
    if pairs.steep:
        queries = decayed(packed(q), to_row)
        pairs.add_floored(decays, k, q)
    else:
        q = scaled(q, upto)
        queries = packed(q)
        pairs.add(left, q, right)
    store(1, queries, before)
    return rows, queries


def block_below(rows, queries, scale_table, column_start):
    """Products of the warp's rows with the columns of an earlier block: (keys, queries), 8 entries each.

    column_start: `right_address` of its column operands; rows, queries: words of all steps; scale_table: shared address of the
    decays through the block behind it, which multiply `rows` and `queries` in place, or None.
    """
    zero = [Float32(0.0)] * 4
    keys, products = [zero, zero], [zero, zero]
    for step in range(STEPS):
        at = slice(4 * step, 4 * step + 4)
        if scale_table is not None:
            scale = load_shared(scale_table + 8 * step, 2, Uint32)
            for x in (rows, queries):
                x[at] = [multiply_f16(x[4 * step + e], scale[e >> 1]) for e in range(4)]
        b = ldmatrix4(column_start ^ (32 * step))
        for n in range(2):
            right = b[2 * n : 2 * n + 2]
            keys[n] = mma_16816(rows[at], right, keys[n], "f16")
            products[n] = mma_16816(queries[at], right, products[n], "f16")
    return [*keys[0], *keys[1]], [*products[0], *products[1]]


def mask_rows(tile, start, row, count, value):
    """Words of token rows from `count` on become `value`; `row` is the lane's first row of the chunk."""
    for step in range(STEPS):
        at = (start ^ (32 * step)) + tile
        words = ldmatrix4(at)
        stmatrix4(at, *[pick(row + 8 * (e & 1) < count, words[e], Uint32(value)) for e in range(4)])


@cute.jit
def send_half(buffer: Int32, entries, half: Int32, lane: Int32):
    """Put what the partner sums where it reads it: the products of q for it in the second half, of k in the first."""
    if half == 0:
        send_entries(buffer, entries[1], lane)
    else:
        send_entries(buffer, entries[0], lane)


def send_entries(buffer, entries, lane):
    """Four entries of all lanes behind the four before them, then the last two."""
    for i in range(0, len(entries), 4):
        part = entries[i : i + 4]
        store_shared(buffer + i * 128 + lane * 4 * len(part), *part)


def receive_entries(buffer, count, lane):
    """What the partner sent."""
    found = []
    for i in range(0, count, 4):
        size = min(4, count - i)
        found += load_shared(buffer + i * 128 + lane * 4 * size, size)
    return found


def summed(parts, side, received):
    """Entries of k (side 0) or q of all parts, the partner's added."""
    return [own + other for own, other in zip((x for part in parts for x in part[side]), received)]


def place_lower(entries, block, lower, pitch, diagonal, beta, lane):
    """L: entries times beta of their row, whose negative is at `beta`, fp32 on the diagonal block; to its left -L, fp16."""
    row = lane >> 2
    scale = [-load_shared(beta + (block * 16 + row + 8 * i) * 4, 1) for i in range(2)]
    at = diagonal + row * 64 + (lane & 3) * 8
    store_shared(at, entries[0] * scale[0], entries[1] * scale[0])
    store_shared(at + 512, entries[2] * scale[1], entries[3] * scale[1])
    store_shared(at + 544, entries[4] * scale[1], entries[5] * scale[1])
    target = lower + (block * 16 + (lane & 15)) * pitch + (lane >> 4) * 16
    for column in range(block):
        x = entries[PAIR_WORDS + 8 * column :][:8]
        stmatrix4(
            target + column * 32, *[pack_f16(x[2 * p] * -scale[p & 1], x[2 * p + 1] * -scale[p & 1]) for p in range(4)]
        )


def place_products(entries, block, buffer, own, lane):
    """P: entries below the diagonal, `own` of the lane's two rows on it, zero above; blocks of 16 rows of 32 bytes."""
    row, column = lane >> 2, (lane & 3) * 2
    zero = Float32(0.0)
    corner = [
        [pick(row > column + c, entries[first + c], pick(row == column + c, own[i], zero)) for c in range(2)]
        for i, first in ((0, 0), (1, 4))
    ]
    words = [pack_f16(*corner[0]), pack_f16(entries[2], entries[3]), Uint32(0), pack_f16(*corner[1])]
    at = buffer + (lane & 15) * 32 + (lane >> 4) * 16
    stmatrix4(at + block * 512, *words)
    for column in range(block):
        x = entries[PAIR_WORDS + 8 * column :][:8]
        stmatrix4(at + column * 512, *[pack_f16(x[2 * p], x[2 * p + 1]) for p in range(4)])
