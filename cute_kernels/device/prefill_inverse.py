"""T' = (I + L)^-1 diag(beta) for one 64-token chunk, by one warpgroup.

Diagonal blocks of 16 by forward substitution in fp32, one per warp, a lane per column. Below the diagonal, warp w computes
block column w, transposed, so that each result is in registers what the next product takes as its left operand:

    Y_ww = X_ww^T,   Y_wi = -(sum_{m=w}^{i-1} Y_wm L_im^T) X_ii^T      (X = (I + L)^-1, Y_wi = X_iw^T)

with fp16 operands and fp32 sums. Neumann series are not used: powers of L reach 1e16 on trained-like keys.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from .prefill_layout import LOWER_PITCH, tile_address
from .warp_ops import ldmatrix4, load_shared, mma_16816, pack_f16, stmatrix4, store_shared_half

DIAGONAL_BYTES = 1024  # fp32 16 x 16 of one warp


def block_address(lower, block_row, block_column, lane):
    """A lane's row address for `ldmatrix4` of a 16 x 16 block of the triangular work matrix.

    Plain: words 0, 1 are the right operand (two k halves) for output columns 0-7 of a product with the block's transpose, words
    2, 3 for columns 8-15. Transposed: the left-operand words of the block's transpose.
    """
    row = (lane & 7) + ((lane >> 4) << 3)
    return lower + (block_row * 16 + row) * LOWER_PITCH + block_column * 32 + ((lane >> 3) & 1) * 16


@cute.jit
def solve_diagonal(diagonal: Int32, lower: Int32, tile: Int32, beta: Int32, warp: Int32, lane: Int32):
    """Invert the warp's diagonal block; write it to `lower` (fp16) and, times beta, to the T' tile. Left-operand words of Y_ww.

    `diagonal` is the address of the warp's L_ww, fp32, row-major 16 x 16, strictly lower part used, written by this warp before.
    `beta` is the address of the chunk's 64 fp32 betas.
    """
    cute.arch.sync_warp()
    column = lane & 15
    x = cute.make_rmem_tensor(cute.make_layout(16), Float32)
    x[0] = Float32(1.0) if column == 0 else Float32(0.0)
    for i in cutlass.range_constexpr(1, 16):
        value = Float32(1.0) if column == i else Float32(0.0)
        for piece in cutlass.range_constexpr((i + 3) // 4):
            row = load_shared(diagonal + (i * 64 + piece * 16), 4)
            for e in cutlass.range_constexpr(4):
                j = 4 * piece + e
                if cutlass.const_expr(j < i):
                    value = value - row[e] * x[j]
        x[i] = value
    upper = lane >= 16
    scale = load_shared(beta + (warp * 16 + column) * 4, 1)
    for i in cutlass.range_constexpr(8):
        value = x[8 + i] if upper else x[i]
        row = i + ((lane >> 4) << 3)
        words = pack_f16(value, value * scale)
        store_shared_half(lower + (warp * 16 + row) * LOWER_PITCH + (warp * 16 + column) * 2, words)
        target = tile_address(tile, warp * 16 + row, warp * 2 + (column >> 3)) + (column & 7) * 2
        store_shared_half(target, words >> Uint32(16))
    cute.arch.sync_warp()
    return ldmatrix4(block_address(lower, warp, warp, lane), transpose=True)


@cute.jit
def _product(a, address: Int32, total):
    """total + a B^T for a 16 x 16 block B at the lane address; `total` is 8 fp32."""
    b = ldmatrix4(address)
    left = mma_16816(a, (b[0], b[1]), total[:4], "f16")
    right = mma_16816(a, (b[2], b[3]), total[4:], "f16")
    return [*left, *right]


def merge_column(first, lower, tile, beta, column, lane):
    """Blocks below the diagonal of block column `column` (Python int), to the T' tile. `first` is `solve_diagonal`'s result."""
    blocks = {column: first}
    low = load_shared(beta + column * 64 + (lane >> 2) * 4, 1)
    high = load_shared(beta + column * 64 + (lane >> 2) * 4 + 32, 1)
    for i in range(column + 1, 4):
        total = [Float32(0.0)] * 8
        for m in range(column, i):
            total = _product(blocks[m], block_address(lower, i, m, lane), total)
        z = [pack_f16(-total[2 * p], -total[2 * p + 1]) for p in range(4)]
        y = _product(z, block_address(lower, i, i, lane), [Float32(0.0)] * 8)
        blocks[i] = [pack_f16(y[2 * p], y[2 * p + 1]) for p in range(4)]
        scaled = [pack_f16(y[2 * p] * s, y[2 * p + 1] * s) for p, s in enumerate((low, high, low, high))]
        row = i * 16 + (lane & 7) + ((lane >> 4) << 3)
        stmatrix4(tile_address(tile, row, column * 2 + ((lane >> 3) & 1)), *scaled, transpose=True)


@cute.jit
def merge_blocks(first, lower: Int32, tile: Int32, beta: Int32, warp: Int32, lane: Int32):
    """All blocks below the diagonal: warp w takes block column w (warp 3 has none). Call after a barrier of the warpgroup."""
    for column in cutlass.range_constexpr(3):
        if warp == column:
            merge_column(first, lower, tile, beta, column, lane)
