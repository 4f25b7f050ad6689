"""A state [128 K x columns of V] whose V columns are the N dimension of every product.

All operands lie in shared memory. Left ones [tokens or channels x contraction] come as a chunk's record has them. Right ones are
*column tiles*: a row for each V column, 128 bytes of tokens or channels, 128-byte swizzle. A thread of a warpgroup holds of an
accumulator the rows 16 warp + lane // 4 (+ 8) and the columns 8 n + 2 (lane % 4), + 1.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from .prefill_layout import CHUNK, HEAD, STATE_ELEMENTS, tile_address
from .state_io import row_ptr, slot_is_valid, slot_ptr
from .warp_ops import ldmatrix4, load_shared, pick, stmatrix4


def column_mma(dtype, columns, left_major=OperandMajorMode.K):
    """Tiled wgmma of one warpgroup, both operands in shared memory, fp32 sums."""
    op = warpgroup.MmaF16BF16Op(
        dtype, Float32, (64, columns, 16), warpgroup.OperandSource.SMEM, left_major, OperandMajorMode.K
    )
    return cute.make_tiled_mma(cute.make_mma_atom(op), cute.make_layout((1, 1, 1)))


def column_tiles(base, columns, width, dtype=Float16):
    """Column tiles of `width` tokens or channels, 64 a tile, as a right operand."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
    tile = cute.tile_to_shape(atom, (columns, width), order=(0, 1))
    return cute.make_tensor(cute.recast_ptr(base, tile.inner, dtype), tile.outer)


def contract_tiles(mma, acc, left, stage, right, accumulate, steps=None):
    """acc (+)= left of a stage x column tiles over `steps` of 16, all by default; the caller fences, commits and waits."""
    for k in range(cute.size(left, mode=[2])) if steps is None else steps:
        mma.set(warpgroup.Field.ACCUMULATE, accumulate or k != 0)
        cute.gemm(mma, acc, left[None, None, k, stage], right[None, None, k], acc)


def rounded_pairs(acc, pack):
    """An accumulator's pairs of columns, rounded to a word each."""
    return [pack(acc[2 * i], acc[2 * i + 1]) for i in range(cute.size(acc) // 2)]


def keep_rows(words, row, count):
    """The words of `rounded_pairs`, zero in rows from `count` on; `row` is the thread's first. Products may be in flight."""
    kept = [pick(row + 8 * r < count, Uint32(0xFFFFFFFF), Uint32(0)) for r in range(2)]
    return [word & kept[i % 2] for i, word in enumerate(words)]


def store_column_tile(words, tile: Int32, warp: Int32, lane: Int32):
    """A rounded accumulator of 64 rows to a column tile."""
    start = tile_address(tile, (lane & 7) + ((lane >> 4) << 3), 2 * warp + ((lane >> 3) & 1))
    for block in range(len(words) // 4):
        stmatrix4(start + block * 2048, *words[4 * block : 4 * block + 4], transpose=True)


def value_layout(columns):
    """A chunk's values [64 tokens x columns], rows as wide as the swizzle."""
    kinds = warpgroup.SmemLayoutAtomKind
    kind = {16: kinds.K_SW32, 32: kinds.K_SW64, 64: kinds.K_SW128}[columns]
    return cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, BFloat16), (CHUNK, columns), order=(0, 1))


def load_value_words(tile: Int32, columns, warp: Int32, lane: Int32):
    """The thread's pairs of the values, in the order of `rounded_pairs`."""
    row = 16 * warp + (lane & 15)
    swizzle = {16: (row >> 2) & 1, 32: (row >> 1) & 3, 64: row & 7}[columns]
    return [
        word
        for block in range(columns // 16)
        for word in ldmatrix4(tile + row * (2 * columns) + (((2 * block + (lane >> 4)) ^ swizzle) << 4))
    ]


@cute.jit
def store_rows(words, stage: Int32, mOut: cute.Tensor, token: Int32, left: Int32, column: Int32, lane: Int32):
    """A warp's rounded output rows from `token` on, of which `left` are there, to global memory.

    They pass through 512 bytes of shared memory, 16 columns at a time, so that a lane stores 16 bytes: a quarter of the stores.
    """
    for block in cutlass.range_constexpr(len(words) // 4):
        cute.arch.sync_warp()
        stmatrix4(_row_piece(stage, lane & 15, lane >> 4), *words[4 * block : 4 * block + 4])
        cute.arch.sync_warp()
        row, piece = lane >> 1, lane & 1
        if row < left:
            target = row_ptr(mOut, token + row, column + 16 * block + 8 * piece, 16).toint()
            cute.arch.inline_ptx(
                "st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                read_only_args=[target, *load_shared(_row_piece(stage, row, piece), 4, Uint32)],
            )


def _row_piece(stage, row, piece):
    """Address of a 16-byte piece of one of 16 rows of 32 bytes."""
    return stage + row * 32 + ((piece ^ ((row >> 2) & 1)) << 4)


def _column_view(mPool, slot, head, row, column, columns):
    """Of a slot's head what a thread holds of the state, in accumulator order: its first channel `row`, its first column."""
    pointer = slot_ptr(mPool, slot, head * STATE_ELEMENTS + column * HEAD + row, mPool.element_type.width // 8)
    return cute.make_tensor(pointer, cute.make_layout((2, 2, columns // 8), stride=(HEAD, 8, 8 * HEAD)))


@cute.jit
def load_columns(
    S,
    mPool: cute.Tensor,
    slot: Int32,
    num_slots: Int32,
    head: Int32,
    row: Int32,
    column: Int32,
    columns: cutlass.Constexpr,
):
    """S <- the thread's part of head `head` of a slot, or zero where the slot is none. Eight lanes fill a sector."""
    S.fill(0.0)
    if slot_is_valid(slot, num_slots):
        view = _column_view(mPool, slot, head, row, column, columns)
        raw = cute.make_rmem_tensor(view.layout.shape, mPool.element_type)
        cute.autovec_copy(view, raw)
        for i in cutlass.range_constexpr(cute.size(S)):
            S[i] = Float32(raw[i])


@cute.jit
def store_columns(
    S,
    mPool: cute.Tensor,
    slot: Int32,
    num_slots: Int32,
    head: Int32,
    row: Int32,
    column: Int32,
    columns: cutlass.Constexpr,
):
    """The thread's part of S, rounded once, to head `head` of a slot; nothing where the slot is none."""
    if slot_is_valid(slot, num_slots):
        view = _column_view(mPool, slot, head, row, column, columns)
        raw = cute.make_rmem_tensor(view.layout.shape, mPool.element_type)
        for i in cutlass.range_constexpr(cute.size(S)):
            raw[i] = mPool.element_type(S[i])
        cute.autovec_copy(raw, view)


@cute.jit
def scale_channels(S, factors):
    """S *= the factors of the thread's two channels."""
    for i in cutlass.range_constexpr(cute.size(S)):
        S[i] = S[i] * factors[i // 2 % 2]
