"""Row work of the data role that GDN and KDA share: who holds a norm, and finished output rows to global memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .prefill_layout import OUT_PITCH
from .state_io import row_ptr


def owns_norms(lane):
    """Whether `squared_norms` left the sums of rows lane // 4 and lane // 4 + 8 of a block in this lane."""
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
