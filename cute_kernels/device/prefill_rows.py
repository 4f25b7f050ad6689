"""Row work of the data role: squared norms of operand rows, and finished output rows to global memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .prefill_layout import OUT_PITCH, TILE_BYTES, tile_address
from .state_io import row_ptr
from .warp_ops import ldmatrix4, mma_16816


@cute.jit
def squared_norms(base: Int32, row: Int32, lane: Int32):
    """Sum of squares of 16 bf16 operand rows from `row` on, 128 columns, by one warp.

    The diagonal of X X^T: products of bf16 are exact in fp32 and one matrix instruction replaces 128 multiply-adds of a lane.
    Lanes with `owns_norms(lane)` hold the result: rows `row + lane // 4` and `row + 8 + lane // 4`. A row that is not finite
    spoils its own sum alone.
    """
    first = [Float32(0.0)] * 4
    second = [Float32(0.0)] * 4
    for k in cutlass.range_constexpr(8):
        a = ldmatrix4(tile_address(base + (k // 4) * TILE_BYTES, row + (lane & 15), 2 * (k % 4) + (lane >> 4)))
        first = mma_16816(a, (a[0], a[2]), first, "bf16")
        second = mma_16816(a, (a[1], a[3]), second, "bf16")
    odd = ((lane >> 2) & 1) != 0
    return (first[1] if odd else first[0]), (second[3] if odd else second[2])


def owns_norms(lane):
    """Whether `squared_norms` left the diagonal of rows lane // 4 and lane // 4 + 8 in this lane."""
    return (lane & 3) == (lane >> 3)


@cute.jit
def store_output_rows(address: Int32, mOut: cute.Tensor, token: Int32, count: Int32, head: Int32, lane: Int32):
    """Rows 0..count-1 of an output stage (128 bf16 each, pitch OUT_PITCH) to `mOut[token + i, head * 128:]`, by one warp.

    One bulk store a row: any row stride, no tensor map, and rows of other sequences are never touched. Returns when the stage
    may be overwritten.
    """
    for half in cutlass.range_constexpr(2):
        i = lane + 32 * half
        if i < count:
            target = row_ptr(mOut, token + i, head * 128, 16)
            cute.arch.inline_ptx(
                "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], 256;",
                read_only_args=[target.toint(), address + i * OUT_PITCH],
            )
    cute.arch.cp_async_bulk_commit_group()
    cute.arch.cp_async_bulk_wait_group(0, read=True)
