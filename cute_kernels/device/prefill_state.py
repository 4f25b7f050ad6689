"""The state role: one warpgroup owns 64 V rows (a slab) of one head's S^T [V, K] in fp32 accumulators, across chunks.

One chunk, with K, Q raw bf16 operands (GDN) or decayed ones (KDA), T' and P from the pairs role; for the update V' and K' (KDA),
or W, which has the decay, and K (GDN):

    X  = V^T - S^T K^T (x a factor per token)     fp16
    V' = X T'^T                                   fp16
    S^T <- decay S^T + V' K'
    O^T = S_old^T Q^T (x a factor per token) + V' P^T

The left operand of each product is the previous accumulator: for 16-bit operands an accumulator and a left-operand fragment
have the same linear order, (column parity, row half, column octet), so no data moves between lanes. A thread holds rows
v = 16 warp + lane // 4 (+ 8) of its slab and columns 8 n + 2 (lane % 4), + 1.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from .memory import narrow
from .prefill_layout import CHUNK, HEAD, STATE_ELEMENTS, TILE_BYTES, tile_address
from .state_io import slot_is_valid, slot_ptr
from .warp_ops import (
    fragment_words,
    ldmatrix4,
    load_shared,
    pack_bf16,
    pack_f16,
    pick,
    stmatrix4,
    stmatrix4_where,
    store_shared,
    unpack_bf16,
)


def state_mma(dtype, columns, right_major, slabs):
    """Tiled wgmma of the state role: left operand from registers, 64 rows a warpgroup, `columns` wide, fp32 sums."""
    op = warpgroup.MmaF16BF16Op(
        dtype, Float32, (64, columns, 16), warpgroup.OperandSource.RMEM, OperandMajorMode.K, right_major
    )
    return cute.make_tiled_mma(cute.make_mma_atom(op), cute.make_layout((slabs, 1, 1)))


def contract(mma, acc, left, right, stage, blocks, accumulate, first=0):
    """acc (+)= left x right over steps of 16 from `first` to `blocks`; issues wgmma, the caller fences, commits and waits."""
    for k in range(first, blocks):
        mma.set(warpgroup.Field.ACCUMULATE, accumulate or k != 0)
        cute.gemm(mma, acc, left[None, None, k], right[None, None, k, stage], acc)


def contract_half(mma, acc, left, right, stage, half):
    """64 of 128 columns of acc += left x right over a chunk's tokens, by a wgmma of 64 columns."""
    mma.set(warpgroup.Field.ACCUMULATE, True)
    part = cute.make_tensor(acc.iterator + 32 * half, cute.make_layout(((2, 2, 8), 1, 1)))
    for k in range(CHUNK // 16):
        columns = cute.append_ones(right[None, half, k, stage], up_to_rank=2)
        cute.gemm(mma, part, left[None, None, k], columns, part)


def token_halves():
    """Sums for 64 tokens, the columns, in two accumulators of 32. They take no registers over from one of 64 columns: ptxas
    would put each product behind the one before."""
    return [cute.make_rmem_tensor(cute.make_layout(((2, 2, 4), 1, 1)), Float32) for _ in range(2)]


def contract_triangle(mma, halves, left, right, stage, accumulate):
    """halves (+)= left x right for a lower triangular `right`, by a wgmma of 32 columns: the block that is zero is left out."""
    for n, half in enumerate(halves):
        for k in range(2 * n + 2):
            mma.set(warpgroup.Field.ACCUMULATE, accumulate or k != 0)
            columns = cute.append_ones(right[None, n, k, stage], up_to_rank=2)
            cute.gemm(mma, half, left[None, None, k], columns, half)


def packed_halves(halves, pack):
    """Entries of `token_halves`, two tokens a word, in the order of one accumulator."""
    return [pack(half[2 * i], half[2 * i + 1]) for half in halves for i in range(8)]


def halves_as_left_operand(halves, shape):
    """`token_halves` rounded to a left-operand fragment of fp16, saturating at 65504."""
    left = cute.make_rmem_tensor(shape, Float16)
    words = fragment_words(left)
    for i, word in enumerate(packed_halves(halves, pack_f16)):
        words[i] = word
    return left


def as_left_operand(acc, shape, dtype):
    """The accumulator rounded to a 16-bit left-operand fragment of `shape`. fp16 saturates at 65504."""
    left = cute.make_rmem_tensor(shape, dtype)
    words = fragment_words(left)
    pack = pack_bf16 if dtype is BFloat16 else pack_f16
    for i in range(cute.size(words)):
        words[i] = pack(acc[2 * i], acc[2 * i + 1])
    return left


def load_factors(vector, lane):
    """The thread's pairs of a chunk's 64 fp32 factors, a pair for each octet of an accumulator's columns."""
    return [load_shared(vector + (lane & 3) * 8 + n * 32, 2) for n in range(8)]


def scaled_left_operand(acc, vector, lane, shape):
    """An accumulator of 64 columns times the chunk's factors at `vector`, rounded to a left-operand fragment of bf16."""
    left = cute.make_rmem_tensor(shape, BFloat16)
    words = fragment_words(left)
    for n in range(8):
        pair = load_shared(vector + (lane & 3) * 8 + n * 32, 2)
        for r in range(2):
            i = 4 * n + 2 * r
            words[2 * n + r] = pack_bf16(acc[i] * pair[0], acc[i + 1] * pair[1])
    return left


def scaled_halves_as_left_operand(halves, factors, shape):
    """The same of `token_halves` and `load_factors`."""
    left = cute.make_rmem_tensor(shape, BFloat16)
    words = fragment_words(left)
    for n in range(8):
        for r in range(2):
            i = 4 * (n % 4) + 2 * r
            words[2 * n + r] = pack_bf16(halves[n // 4][i] * factors[n][0], halves[n // 4][i + 1] * factors[n][1])
    return left


def store_left_operand(left, tile, warp, lane):
    """A left-operand fragment to swizzled tiles of 64 columns, side by side, for wgmma to read."""
    words = fragment_words(left)
    row = 16 * warp + (lane & 15)
    start = tile_address(tile, row, lane >> 4)
    for k in range(cute.size(words) // 4):
        stmatrix4((start ^ (k % 4 * 32)) + k // 4 * TILE_BYTES, *[words[4 * k + i] for i in range(4)])


def _slab_view(mPool, slot, head, row, column):
    """Of a slot's head what the thread moves: of the K columns of a pair of lanes the even one's octets or the odd one's, four
    elements of each, in the order (element, row half, pair of octets)."""
    odd = (column >> 1) & 1
    inner = head * STATE_ELEMENTS + row * HEAD + 8 * odd + 4 * (column >> 2)
    pointer = slot_ptr(mPool, slot, inner, 4 * mPool.element_type.width // 8)
    return odd != 0, cute.make_tensor(pointer, cute.make_layout((4, 2, 8), stride=(1, 8 * HEAD, 16)))


def _trade(odd, even_octet, odd_octet):
    """Words of two column octets traded between the lanes of a pair: what the lane keeps, what it gets."""
    kept = [pick(odd, y, x) for x, y in zip(even_octet, odd_octet)]
    got = [cute.arch.shuffle_sync_bfly(pick(odd, x, y), 1) for x, y in zip(even_octet, odd_octet)]
    return kept, got


@cute.jit
def load_state(S, mPool: cute.Tensor, slot: Int32, num_slots: Int32, head: Int32, row: Int32, column: Int32):
    """S <- the thread's part of head `head` of a slot, or zero where the slot is none.

    `row` is the thread's first V row of the head, `column` its first K column, 2 (lane % 4). Lanes of a pair trade what they
    load, so that each loads four elements at once.
    """
    S.fill(0.0)
    if slot_is_valid(slot, num_slots):
        odd, view = _slab_view(mPool, slot, head, row, column)
        raw = cute.make_rmem_tensor(view.layout.shape, mPool.element_type)
        cute.autovec_copy(view, raw)
        for i in cutlass.range_constexpr(16):
            words = [Float32(raw[4 * i + e]) for e in range(4)]
            kept, got = _trade(odd, words[:2], words[2:])
            for e in cutlass.range_constexpr(2):
                at = 8 * (i // 2) + 2 * (i % 2) + e
                S[at], S[at + 4] = pick(odd, got[e], kept[e]), pick(odd, kept[e], got[e])


@cute.jit
def prefetch_state(mPool: cute.Tensor, slot: Int32, num_slots: Int32, head: Int32, row: Int32, rows: cutlass.Constexpr):
    """Rows `row .. row + rows - 1` of head `head` of a slot on their way to L2, by one warp; nothing where the slot is none."""
    if slot_is_valid(slot, num_slots):
        address = slot_ptr(mPool, slot, head * STATE_ELEMENTS + row * HEAD).toint()
        with cute.arch.elect_one():
            cute.arch.inline_ptx(
                "cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};",
                read_only_args=[address, Int32(rows * HEAD * mPool.element_type.width // 8)],
            )


@cute.jit
def store_state(S, mPool: cute.Tensor, slot: Int32, num_slots: Int32, head: Int32, row: Int32, column: Int32):
    """The thread's part of S, rounded once, to head `head` of a slot; nothing where the slot is none. As `load_state`."""
    if slot_is_valid(slot, num_slots):
        odd, view = _slab_view(mPool, slot, head, row, column)
        moved = cute.make_rmem_tensor(cute.make_layout(cute.size(S)), Float32)
        for i in cutlass.range_constexpr(16):
            at = 8 * (i // 2) + 2 * (i % 2)
            kept, got = _trade(odd, [S[at], S[at + 1]], [S[at + 4], S[at + 5]])
            for e in cutlass.range_constexpr(2):
                moved[4 * i + e], moved[4 * i + 2 + e] = pick(odd, got[e], kept[e]), pick(odd, kept[e], got[e])
        flat = narrow(moved, cute.size(moved), mPool.element_type)
        cute.autovec_copy(cute.make_tensor(flat.iterator, cute.make_layout((4, 2, 8))), view)


@cute.jit
def identity_state(S, row: Int32, column: Int32):
    """S <- the thread's part of the identity."""
    for i in cutlass.range_constexpr(cute.size(S)):
        v = row + 8 * ((i >> 1) & 1)
        S[i] = Float32(1.0) if column + 8 * (i >> 2) + (i & 1) == v else Float32(0.0)


@cute.jit
def clear_tile_columns(tile: Int32, warp: Int32, lane: Int32):
    """Zero the 16 columns of a swizzled tile that belong to the warp's V rows."""
    zero = Uint32(0)
    for step in cutlass.range_constexpr(4):
        row = 16 * step + (lane >> 1)
        store_shared(tile_address(tile, row, 2 * warp + (lane & 1)), zero, zero, zero, zero)
    cute.arch.sync_warp()


@cute.jit
def scale_columns(acc, vector: Int32, lane: Int32):
    """acc[v, i] *= vector[i]; `vector` is the shared address of the chunk's fp32 factors."""
    for n in cutlass.range_constexpr(cute.size(acc) // 4):
        pair = load_shared(vector + (lane & 3) * 8 + n * 32, 2)
        for e in cutlass.range_constexpr(4):
            acc[4 * n + e] = acc[4 * n + e] * pair[e % 2]


@cute.jit
def scale_into_halves(halves, acc, vector: Int32, lane: Int32):
    """`scale_columns` of an accumulator of 64 columns into `token_halves`."""
    for n in cutlass.range_constexpr(8):
        pair = load_shared(vector + (lane & 3) * 8 + n * 32, 2)
        for e in cutlass.range_constexpr(4):
            halves[n // 4][4 * (n % 4) + e] = acc[4 * n + e] * pair[e % 2]


@cute.jit
def scale_state(S, decay: Float32):
    """S *= decay."""
    for i in cutlass.range_constexpr(cute.size(S)):
        S[i] = S[i] * decay


@cute.jit
def residual(Y, value: Int32, vector: Int32, count: Int32, warp: Int32, lane: Int32, scaled: cutlass.Constexpr):
    """Y <- V^T - Y (times `vector` per token when `scaled`); zero for tokens from `count` on, whatever they hold.

    `value` is the address of the slab's V tile (64 tokens x 64 columns), `warp` the warp in its warpgroup.
    """
    row = (lane & 7) + ((lane >> 4) << 3)
    start = tile_address(value, row, 2 * warp + ((lane >> 3) & 1))
    for block in cutlass.range_constexpr(4):
        words = ldmatrix4(start + block * 2048, transpose=True)
        for half in cutlass.range_constexpr(2):
            n = 2 * block + half
            if cutlass.const_expr(scaled):
                factor = load_shared(vector + (lane & 3) * 8 + n * 32, 2)
            for r in cutlass.range_constexpr(2):
                v = unpack_bf16(words[2 * half + r])
                for e in cutlass.range_constexpr(2):
                    i = 4 * n + 2 * r + e
                    if cutlass.const_expr(scaled):
                        Y[i] = v[e] - factor[e] * Y[i]
                    else:
                        Y[i] = v[e] - Y[i]
    if count < CHUNK:
        for n in cutlass.range_constexpr(8):
            for e in cutlass.range_constexpr(4):
                inside = 8 * n + 2 * (lane & 3) + e % 2 < count
                Y[4 * n + e] = Y[4 * n + e] if inside else Float32(0.0)


def load_tile(tile: Int32, warp: Int32, lane: Int32):
    """The 16 words of a slab's transposed tile (64 tokens x 64 columns) in accumulator order; `warp` of the warpgroup."""
    row = (lane & 7) + ((lane >> 4) << 3)
    start = tile_address(tile, row, 2 * warp + ((lane >> 3) & 1))
    return [word for block in range(4) for word in ldmatrix4(start + block * 2048, transpose=True)]


def negative_values(V, words, kept=None):
    """V <- the negatives of what `load_tile` gave, as fp32; of their bits those alone that are set in the word `kept`."""
    sign = Uint32(0x80000000)
    bits = cute.recast_tensor(V, Uint32)
    for i, word in enumerate(words):
        word = word if kept is None else word & kept
        bits[2 * i], bits[2 * i + 1] = word * Uint32(1 << 16) + sign, (word & Uint32(0xFFFF0000)) ^ sign


@cute.jit
def clear_tokens(Y, count: Int32, lane: Int32):
    """Zero for tokens from `count` on, whatever they hold."""
    for n in cutlass.range_constexpr(8):
        for e in cutlass.range_constexpr(4):
            inside = 8 * n + 2 * (lane & 3) + e % 2 < count
            Y[4 * n + e] = Y[4 * n + e] if inside else Float32(0.0)


def load_values(value, vector, warp, lane):
    """What `subtract_from_values` needs of the slab's V tile and of the factors of a chunk, in registers."""
    row = (lane & 7) + ((lane >> 4) << 3)
    start = tile_address(value, row, 2 * warp + ((lane >> 3) & 1))
    words = [ldmatrix4(start + block * 2048, transpose=True) for block in range(4)]
    factors = [load_shared(vector + (lane & 3) * 8 + n * 32, 2) for n in range(8)]
    return words, factors


def find_values(words, factors, value, vector, warp, lane):
    """What `load_values` returns into tensors of 16 entries each, which a loop carries."""
    found, pairs = load_values(value, vector, warp, lane)
    for i in range(16):
        words[i], factors[i] = found[i // 4][i % 4], pairs[i // 2][i % 2]


@cute.jit
def subtract_from_values(Y, values, count: Int32, lane: Int32):
    """Y <- V^T - factor Y, from `load_values`; zero for tokens from `count` on, whatever they hold."""
    words, factors = values
    for n in cutlass.range_constexpr(8):
        for r in cutlass.range_constexpr(2):
            v = unpack_bf16(words[n // 2][2 * (n % 2) + r])
            for e in cutlass.range_constexpr(2):
                i = 4 * n + 2 * r + e
                Y[i] = v[e] - factors[n][e] * Y[i]
    if count < CHUNK:
        for n in cutlass.range_constexpr(8):
            for e in cutlass.range_constexpr(4):
                inside = 8 * n + 2 * (lane & 3) + e % 2 < count
                Y[4 * n + e] = Y[4 * n + e] if inside else Float32(0.0)


@cute.jit
def store_output(O, address: Int32, slab: Int32, warp: Int32, lane: Int32, pitch: cutlass.Constexpr):
    """O^T of a slab, rounded to bf16, as token rows of an output stage, `pitch` bytes apart."""
    row = (lane & 7) + ((lane >> 4) << 3)
    start = address + row * pitch + slab * 128 + warp * 32 + ((lane >> 3) & 1) * 16
    for block in cutlass.range_constexpr(4):
        words = [pack_bf16(O[8 * block + 2 * p], O[8 * block + 2 * p + 1]) for p in range(4)]
        stmatrix4(start + block * 16 * pitch, *words, transpose=True)


def output_words(O):
    """O^T rounded to bf16, two tokens a word."""
    return [pack_bf16(O[2 * i], O[2 * i + 1]) for i in range(16)]


@cute.jit
def store_output_tile(words, condition: Int32, tile: Int32, warp: Int32, lane: Int32):
    """O^T of a slab as token rows of a swizzled tile, where `condition` is not 0; each warp writes the columns of its V rows."""
    row = (lane & 7) + ((lane >> 4) << 3)
    start = tile_address(tile, row, 2 * warp + ((lane >> 3) & 1))
    for block in cutlass.range_constexpr(4):
        stmatrix4_where(condition, start + block * 2048, *[words[4 * block + p] for p in range(4)], transpose=True)
