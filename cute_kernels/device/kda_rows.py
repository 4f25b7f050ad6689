"""Row and column work of a KDA chunk: a thread owns 2 channels of 16 consecutive tokens.

Warp w of 8 owns the 64 channels of half w & 1 and the token group w >> 1; lane l owns channels 2 l, 2 l + 1 of the half. A
warp's access of one token row is one 128-byte line, in global memory and in a swizzled tile.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from .prefill_layout import tile_address
from .warp_ops import ldmatrix4, load_shared, mma_16816, store_shared

GROUP = 16  # tokens a thread owns
GROUPS = 4


def swizzled(base, row):
    """Address of a thread's word in row `row` (Python int), from its address in a row that is a multiple of 8."""
    return (base ^ ((row & 7) * 16)) + row * 128


def load_words(base):
    """The thread's words (2 bf16 channels) of 16 rows of a swizzled tile; `base` is the address of its word in the first row."""
    words = cute.make_rmem_tensor(cute.make_layout(GROUP), Uint32)
    for i in range(GROUP):
        words[i] = load_shared(swizzled(base, i), 1, Uint32)
    return words


@cute.jit
def mask_words(words, count: Int32, value: Uint32):
    """Rows from `count` on are not of this chunk: `value` instead of whatever was loaded."""
    for i in cutlass.range_constexpr(GROUP):
        words[i] = words[i] if i < count else value


def row_products(k_tile, q_tile, row, lane):
    """Sums k.k, q.q and q.k of rows `row` .. `row + 15` over a tile's 64 channels, by one warp.

    Each is the diagonal of a matrix product: products of bf16 are exact in fp32, and a row that is not finite spoils its own
    sums alone. Lanes with `owns_norms(lane)` hold the pair for rows `row + lane // 4` and 8 behind it.
    """
    zero = [Float32(0.0)] * 4
    sums = [[zero, zero] for _ in range(3)]
    for step in range(4):
        k, q = (ldmatrix4(tile_address(x, row + (lane & 15), 2 * step + (lane >> 4))) for x in (k_tile, q_tile))
        for index, (a, b) in enumerate(((k, k), (q, q), (q, k))):
            first, second = sums[index]
            sums[index] = [mma_16816(a, (b[0], b[2]), first, "bf16"), mma_16816(a, (b[1], b[3]), second, "bf16")]
    odd = ((lane >> 2) & 1) != 0
    return [[pick(odd, first[1], first[0]), pick(odd, second[3], second[2])] for first, second in sums]


@cute.jit
def pick(condition, yes, no):
    """`yes` where the condition holds, else `no`; for helpers that run while the kernel is traced."""
    return yes if condition else no


def reread(word):
    """An integer again, opaque to the compiler: what was computed from it before need not stay in registers."""
    bits = type(word).width
    return cute.arch.inline_ptx(f"mov.b{bits} {{$w0}}, {{$r0}};", write_only_types=[type(word)], read_only_args=[word])


def tree_product(values):
    """Product by halves: none of its partial products is a prefix or suffix that the compiler would keep for the row loops."""
    while len(values) > 1:
        half = len(values) // 2
        values = [values[i] * values[half + i] for i in range(half)]
    return values[0]


def store_global_word(address, word):
    """One word to a global byte address (Int64)."""
    cute.make_ptr(Uint32, address, cute.AddressSpace.gmem, assumed_align=4).store(word)


@cute.jit
def copy_tile(tile: Int32, target: Int64, thread: Int32):
    """8 KiB from shared to global memory by 128 threads, 16 bytes at a time."""
    for i in cutlass.range_constexpr(4):
        offset = (i * 128 + thread) * 16
        words = load_shared(tile + offset, 4, Uint32)
        rX = cute.make_rmem_tensor(cute.make_layout(4), Uint32)
        for e in cutlass.range_constexpr(4):
            rX[e] = words[e]
        pointer = cute.make_ptr(Uint32, target + Int64(offset), cute.AddressSpace.gmem, assumed_align=16)
        cute.autovec_copy(rX, cute.make_tensor(pointer, cute.make_layout(4)))


class LevelTiles:
    """Operand tiles of three levels: rows fp16 [64 x 128] (32 of k above 32 of q) and columns fp16 [32 x 128].

    `word` is the byte offset of the thread's word in row 0 of a tile, without its half's offset.
    """

    ROW_BYTES = 64 * 256
    COLUMN_BYTES = 32 * 256

    def __init__(self, rows, columns, half, word):
        self.rows = rows + half * (self.ROW_BYTES // 2) + word
        self.columns = columns + half * (self.COLUMN_BYTES // 2) + word

    def row_base(self, slot, offset):
        """Base for `store_row` of level slot `slot`, `offset` bytes (whole rows of 8) into the tile."""
        return reread(self.rows + offset + slot * self.ROW_BYTES)

    def column_base(self, slot, offset):
        """The same for `store_column`."""
        return reread(self.columns + offset + slot * self.COLUMN_BYTES)


def store_row(base, row, k, q):
    """k and q words of a compressed row (Python int) behind `base`."""
    address = swizzled(base, row)
    store_shared(address, k)
    store_shared(address + 32 * 128, q)


def store_column(base, row, k):
    """The k word of a compressed column behind `base`."""
    store_shared(swizzled(base, row), k)


def store_float(address, value, predicate):
    """One fp32 to a shared byte address, where the predicate holds."""
    cute.arch.inline_ptx("st.shared.f32 [{$r0}], {$r1};", read_only_args=[address, value], predicate=predicate)


def multiply_f16(x, y):
    """Products of two words' fp16 pairs, rounded to fp16."""
    return cute.arch.inline_ptx("mul.rn.f16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[x, y])


def local_level(tiles, slot, h, group, k16, q16, decay16):
    """Operands of a level whose blocks of 2 h tokens lie inside the thread's 16 tokens, from fp16 pairs.

    The anchor is the last token of a block's lower half: rows decay from it, columns to it. At most 8 factors are multiplied
    in fp16, which changes no error of the whole in its second digit.
    """
    rows = tiles.row_base(slot, group * (8 * 128))
    columns = tiles.column_base(slot, group * (8 * 128))
    for block in range(GROUP // (2 * h)):
        middle = block * 2 * h + h
        factor = decay16[middle]
        for i in range(h):
            row = middle + i
            factor = multiply_f16(factor, decay16[row]) if i else factor
            store_row(rows, block * h + i, multiply_f16(k16[row], factor), multiply_f16(q16[row], factor))
        for i in range(h):
            row = middle - 1 - i
            store_column(columns, block * h + h - 1 - i, multiply_f16(k16[row], factor) if i else k16[row])
            factor = multiply_f16(factor, decay16[row]) if i else decay16[row]
