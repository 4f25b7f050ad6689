"""Diagonal blocks of T' = (I + L)^-1 diag(beta) for GDN prefill: 16 x 16, one a warp, from two of 8 x 8.

Both 8 x 8 blocks are inverted by substitution in fp32, a lane a row, at once; what joins them, X_21 = -X_22 L_21 X_11, is two
products of fp16 operands. -L_21 comes from the registers that hold it. `prefill_inverse.merge_column` does the rest, in data
warps, while the pairs role goes on to P.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from .arith import add_rn, mul_rn
from .prefill_inverse import block_address, merge_column
from .prefill_layout import LOWER_PITCH, tile_address
from .warp_ops import ldmatrix4, load_shared, mma_1688, pack_f16, pick, round_f16, stmatrix2, store_shared


def scratch_address(lower, warp):
    """Where the work matrix keeps a warp's two 8 x 8 blocks of -L in fp32, one above the other: a block that L leaves free."""
    block_row, block_column = pick(warp == 3, 1, 0), pick(warp == 3, 2, warp + 1)
    return lower + block_row * (16 * LOWER_PITCH) + block_column * 32


def keep_sum(x):
    """Eight entries of a row of T' <- the same, so that rounding to fp16 changes one of them alone in their sum.

    With equal keys and no decay every row of X^T has the same part S k, which a row of T' multiplies by its sum, nearly zero; an
    error of that sum, the same in each row, would add up over the chunk.
    """
    for step in (1, 2, 4):
        for j in range(0, 8, 2 * step):
            x[j] = add_rn(x[j], add_rn(x[j + step], -round_f16(x[j + step])))


def solve_halves(scratch, link, lower, tile, beta, warp, lane):
    """Invert the warp's diagonal block; write it to `lower` (fp16) and, times beta, to the T' tile.

    `scratch` holds rows of both 8 x 8 blocks of -L, `LOWER_PITCH` apart, written by this warp before, strictly lower parts used;
    `link` is the thread's two entries of -L_21 (row lane // 4, columns 2 (lane % 4), + 1) in fp16. `beta` is the address of the
    chunk's 64 fp32 betas. Lane i holds row i % 8 of block i // 8 of the inverse, found from its last column down: an entry is
    final before its products with a row of L are added to the entries to its left, so no two steps of a sum follow each other.
    Lanes 0-15 store to `lower`, lanes 16-31, which hold the same rows, to the tile; each also clears what lies beside its row.
    """
    cute.arch.sync_warp()
    row, half = lane & 7, (lane >> 3) & 1
    at = scratch + half * (8 * LOWER_PITCH)
    x = [pick(row == j, Float32(1.0), Float32(0.0)) for j in range(8)]
    for m in range(7, 0, -1):
        for piece in range((m + 3) // 4):
            entries = load_shared(at + m * LOWER_PITCH + piece * 16, 4)
            for j in range(4 * piece, min(4 * piece + 4, m)):
                x[j] = x[j] + entries[j - 4 * piece] * x[m]
    scaled = lane >= 16
    for piece in range(2):
        betas = load_shared(beta + warp * 64 + half * 32 + piece * 16, 4)
        x[4 * piece : 4 * piece + 4] = [
            mul_rn(x[4 * piece + e], pick(scaled, betas[e], Float32(1.0))) for e in range(4)
        ]
    keep_sum(x)
    own = 16 * warp + (lane & 15)
    zero = Uint32(0)
    for side, words in ((half, [pack_f16(x[2 * p], x[2 * p + 1]) for p in range(4)]), (1 - half, [zero] * 4)):
        at_lower = lower + own * LOWER_PITCH + warp * 32 + side * 16
        store_shared(pick(scaled, tile_address(tile, own, 2 * warp + side), at_lower), *words)
    cute.arch.sync_warp()
    address = block_address(lower, warp, warp, lane)
    left = ldmatrix4(address, transpose=True)
    right = ldmatrix4(address)
    first = mma_1688((left[0], zero), link, [Float32(0.0)] * 4)
    second = mma_1688((pack_f16(first[0], first[1]), zero), right[3], [Float32(0.0)] * 4)
    factor = load_shared(beta + warp * 64 + (lane >> 2) * 4, 1)
    below = 16 * warp + 8 + (lane & 7)
    target = pick((lane & 8) != 0, tile_address(tile, below, 2 * warp), lower + below * LOWER_PITCH + warp * 32)
    joined = pack_f16(second[0], second[1])
    stmatrix2(target, joined, pack_f16(second[0] * factor, second[1] * factor), transpose=True)


@cute.jit
def merge_halves(lower: Int32, tile: Int32, beta: Int32, column: Int32, columns: cutlass.Constexpr, lane: Int32):
    """Block column `column` of T' where it is in the range of `columns`, from what `solve_halves` left in `lower`."""
    for one in cutlass.range_constexpr(*columns):
        if column == one:
            first = ldmatrix4(block_address(lower, one, one, lane), transpose=True)
            merge_column(first, lower, tile, beta, one, lane, negated=True)


def solved_place(shared, work, work_parity):
    """Stage and parity in the ring of triangular work matrices of the chunk in a work stage: a whole head has one matrix."""
    return (Int32(0), work) if shared.slabs == 2 else (work, work_parity)
