"""T' = (I + L)^-1 diag(beta) for one 64-token chunk, by one warpgroup.

Diagonal blocks of 16 by substitution in fp32, one per warp, a lane per row. Below the diagonal, warp w computes
block column w, transposed, so that each result is in registers what the next product takes as its left operand:

    Y_ww = X_ww^T,   Y_wi = -(sum_{m=w}^{i-1} Y_wm L_im^T) X_ii^T      (X = (I + L)^-1, Y_wi = X_iw^T)

with fp16 operands and fp32 sums. Neumann series are not used: powers of L reach 1e16 on trained-like keys.

Rows of a diagonal block are rounded so that their sums stay right: what is lost goes to the next entry. With
equal keys and no decay every row of X^T has the same part S k, which a row of T' multiplies by its sum, nearly zero; an
error of that sum, the same in each row, would add up over the chunk.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .prefill_layout import LOWER_PITCH, tile_address
from .warp_ops import ldmatrix4, load_shared, mma_16816, pack_f16, pick, round_f16, stmatrix4, store_shared

DIAGONAL_BYTES = 1024  # fp32 16 x 16 of one warp


def block_address(lower, block_row, block_column, lane):
    """A lane's row address for `ldmatrix4` of a 16 x 16 block of the triangular work matrix.

    Plain: words 0, 1 are the right operand (two k halves) for output columns 0-7 of a product with the block's transpose, words
    2, 3 for columns 8-15. Transposed: the left-operand words of the block's transpose.
    """
    row = (lane & 7) + ((lane >> 4) << 3)
    return lower + (block_row * 16 + row) * LOWER_PITCH + block_column * 32 + ((lane >> 3) & 1) * 16


def solve_diagonal(diagonal, lower, tile, beta, warp, lane):
    """Invert the warp's diagonal block; write it to `lower` (fp16) and, times beta, to the T' tile.

    `diagonal` is the address of the warp's L_ww, fp32, row-major 16 x 16, strictly lower part used, written by this warp before.
    `beta` is the address of the chunk's 64 fp32 betas. Lane i holds row i of X, the solution of x (I + L) = e_i found from its
    last column down: an entry is final before its products with a row of L are subtracted from the entries to its left, so
    no two steps of a sum follow each other. Lanes 0-15 store to `lower`, lanes 16-31, which hold the same rows, to the tile.
    """
    cute.arch.sync_warp()
    row = lane & 15
    x = [pick(row == j, Float32(1.0), Float32(0.0)) for j in range(16)]
    for m in range(15, 0, -1):
        for piece in range((m + 3) // 4):
            entries = load_shared(diagonal + (m * 64 + piece * 16), 4)
            for j in range(4 * piece, min(4 * piece + 4, m)):
                x[j] = x[j] - entries[j - 4 * piece] * x[m]
    scaled = lane >= 16
    for piece in range(4):
        betas = load_shared(beta + warp * 64 + piece * 16, 4)
        x[4 * piece : 4 * piece + 4] = [x[4 * piece + e] * pick(scaled, betas[e], Float32(1.0)) for e in range(4)]
    remainder = Float32(0.0)
    for half in (1, 0):  # the chains run side by side; what the first leaves goes to the last entry
        left = Float32(0.0)
        for j in range(8 * half + 7, 8 * half - 1, -1):
            wanted = x[j] + (left + remainder if j == 0 else left)
            x[j] = round_f16(wanted)
            left = wanted - x[j]
        remainder = left
    words = [pack_f16(x[2 * p], x[2 * p + 1]) for p in range(8)]
    at_lower = lower + (warp * 16 + row) * LOWER_PITCH + warp * 32
    for half in range(2):
        at_tile = tile_address(tile, warp * 16 + row, warp * 2 + half)
        store_shared(pick(scaled, at_tile, at_lower + 16 * half), *words[4 * half : 4 * half + 4])


def _product(a, b, total):
    """total + a B^T; `b` are the words of a 16 x 16 block B, `total` is 8 fp32."""
    left = mma_16816(a, (b[0], b[1]), total[:4], "f16")
    right = mma_16816(a, (b[2], b[3]), total[4:], "f16")
    return [*left, *right]


def merge_column(first, lower, tile, beta, column, lane, negated=False):
    """Blocks below the diagonal of block column `column` (Python int), to the T' tile.

    `first` is the column's block on the diagonal, inverted and transposed, as left-operand words; `negated`: `lower` has -L.
    """
    blocks = {column: first}
    low = load_shared(beta + column * 64 + (lane >> 2) * 4, 1)
    high = load_shared(beta + column * 64 + (lane >> 2) * 4 + 32, 1)
    for i in range(column + 1, 4):
        operands = [ldmatrix4(block_address(lower, i, m, lane)) for m in range(column, i + 1)]
        total = [Float32(0.0)] * 8
        for m in range(column, i):
            total = _product(blocks[m], operands[m - column], total)
        z = total if negated else [-entry for entry in total]
        z = [pack_f16(z[2 * p], z[2 * p + 1]) for p in range(4)]
        y = _product(z, operands[-1], [Float32(0.0)] * 8)
        blocks[i] = [pack_f16(y[2 * p], y[2 * p + 1]) for p in range(4)]
        scaled = [pack_f16(y[2 * p] * s, y[2 * p + 1] * s) for p, s in enumerate((low, high, low, high))]
        row = i * 16 + (lane & 7) + ((lane >> 4) << 3)
        stmatrix4(tile_address(tile, row, column * 2 + ((lane >> 3) & 1)), *scaled, transpose=True)


def _merge_next(blocks, lower, tile, low, high, shift, lane):
    """The block below `blocks`, to the T' tile; its words."""
    i = len(blocks)
    operands = [ldmatrix4(block_address(lower, i, m, lane)) for m in range(i + 1)]
    total = [Float32(0.0)] * 8
    for m in range(i):
        total = _product(blocks[m], operands[m], total)
    z = [pack_f16(total[2 * p], total[2 * p + 1]) for p in range(4)]
    y = _product(z, operands[-1], [Float32(0.0)] * 8)
    scaled = [pack_f16(y[2 * p] * s, y[2 * p + 1] * s) for p, s in enumerate((low, high, low, high))]
    row = i * 16 + (lane & 7) + ((lane >> 4) << 3)
    stmatrix4(tile + row * 128 + shift, *scaled, transpose=True)
    return [pack_f16(y[2 * p], y[2 * p + 1]) for p in range(4)]


@cute.jit
def merge_from(
    blocks, lower: Int32, tile: Int32, low: Float32, high: Float32, shift: Int32, column: Int32, lane: Int32
):
    """Blocks below the first ones of block column `column`, from the next one on, to the T' tile; `lower` and `tile` are shifted
    along the diagonal. The code is that of the first column; others leave it early."""
    block = _merge_next(blocks, lower, tile, low, high, shift, lane)
    if cutlass.const_expr(len(blocks) < 3):
        if column < 3 - len(blocks):
            merge_from([*blocks, block], lower, tile, low, high, shift, column, lane)


@cute.jit
def merge_any_column(lower: Int32, tile: Int32, beta: Int32, column: Int32, lane: Int32):
    """Blocks below the diagonal of block column `column` (0, 1 or 2), to the T' tile; `lower` has -L."""
    shifted = lower + column * (16 * LOWER_PITCH + 32)
    first = ldmatrix4(block_address(shifted, 0, 0, lane), transpose=True)
    low = load_shared(beta + column * 64 + (lane >> 2) * 4, 1)
    high = load_shared(beta + column * 64 + (lane >> 2) * 4 + 32, 1)
    shift = ((column * 2 + ((lane >> 3) & 1)) ^ (lane & 7)) << 4
    merge_from([first], shifted, tile + column * 2048, low, high, shift, column, lane)
