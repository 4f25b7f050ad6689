"""What GDN has beside `device/column_state.py`: left operands in registers, and output over the chunk's V tile.

The V tile has a row of 32 bytes for each token, whose 16-byte pieces are permuted as TMA does for rows of that size.
"""

import cutlass.cute as cute
from cutlass import Int32, Uint32
from cutlass.cute.nvgpu import cpasync, warpgroup

from ..configs.gdn_records import COLUMNS
from .prefill_layout import CHUNK, TILE_BYTES, tile_address
from .state_io import row_ptr
from .warp_ops import fragment_words, ldmatrix4, load_shared, stmatrix4

PIECES = COLUMNS // 8  # of a row


def contract_held(mma, acc, left, right, accumulate):
    """acc (+)= left, in registers, x column tiles; the caller fences, commits and waits."""
    for k in range(cute.size(left) // 8):
        mma.set(warpgroup.Field.ACCUMULATE, accumulate or k != 0)
        cute.gemm(mma, acc, left[None, None, k], right[None, None, k], acc)


def _load_left(left, addresses, transpose=False):
    words = fragment_words(left)
    for k, address in enumerate(addresses):
        for i, word in enumerate(ldmatrix4(address, transpose)):
            words[4 * k + i] = word


def load_left_rows(left, tile, warp, lane):
    """A left operand of rows of swizzled tiles, 64 columns each; `warp` of the warpgroup."""
    start = tile_address(tile, 16 * warp + (lane & 15), lane >> 4)
    _load_left(left, [(start ^ (k % 4 * 32)) + k // 4 * TILE_BYTES for k in range(cute.size(left) // 8)])


def load_left_turned(left, tile, warp, lane):
    """A left operand whose rows are the columns of a swizzled tile."""
    start = tile_address(tile, (lane & 7) + ((lane >> 4) << 3), 2 * warp + ((lane >> 3) & 1))
    _load_left(left, [start + k * 2048 for k in range(4)], transpose=True)


def piece_address(tile, row, piece):
    """Byte address of a 16-byte piece of a token row of a V tile."""
    return tile + row * (2 * COLUMNS) + ((piece ^ ((row >> 2) & 1)) << 4)


def store_values(words, tile, warp, lane):
    """A rounded accumulator to the places that its V was read from."""
    stmatrix4(piece_address(tile, 16 * warp + (lane & 15), lane >> 4), *words)


def store_tile(tma_out, gOut, sV, token, column, stage):
    """The 64 rows of a stage to `out` from (token, column) on, until the stage has been read."""
    tile = cute.local_tile(cute.domain_offset((token, column), gOut), (CHUNK, COLUMNS), (0, 0))
    one = cute.make_layout(1)
    source, target = cpasync.tma_partition(tma_out, 0, one, cute.group_modes(sV, 0, 2), cute.group_modes(tile, 0, 2))
    cute.copy(tma_out, source[None, stage], target)
    cute.arch.cp_async_bulk_commit_group()
    cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def copy_rows(tile: Int32, mOut: cute.Tensor, token: Int32, count: Int32, column: Int32, lane: Int32):
    """Rows 0..count-1 of a tile to `mOut[token + i, column:]`, by one warp."""
    row, piece = lane // PIECES, lane % PIECES
    while row < count:
        words = load_shared(piece_address(tile, row, piece), 4, Uint32)
        target = row_ptr(mOut, token + row, column + 8 * piece, 16).toint()
        cute.arch.inline_ptx("st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[target, *words])
        row += 32 // PIECES
