"""Device-side tracking of slot ids: one thread a row.

For a row whose write id names a slot: read := write; positions += counts[n] (or 1); half ^= 1; write := next id. Other rows stay
as they are. The counts are the step's token counts or its accepted drafts: no host ever reads them.
It writes what the next step's kernels read first, so a kernel directly behind it waits before it reads ids.
"""

import cutlass.cute as cute
from cutlass import Int32, const_expr

from ..compile.cache import cute_compile
from ..compile.fake import fake_ids, fake_stream
from ..configs.state_ids import StateIdsKey
from ..device.state_io import slot_is_valid

THREADS = 128


class AdvanceStateIds:
    def __init__(self, key: StateIdsKey):
        self.key = key

    @cute.jit
    def __call__(
        self,
        mReadIds: cute.Tensor,  # (N,) int32, updated
        mWriteIds: cute.Tensor,  # (N,) int32, updated if mNext is given
        mPositions: cute.Tensor,  # (N,) int32, updated
        mCounts: cute.Tensor | None,  # (N,) int32
        mHalf: cute.Tensor | None,  # (N,) int32, updated
        mNext: cute.Tensor | None,  # (N,) int32
        num_slots: Int32,
        stream,
    ):
        n = cute.size(mReadIds, mode=[0])
        self.kernel.set_name_prefix(self.key.symbol(), remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(mReadIds, mWriteIds, mPositions, mCounts, mHalf, mNext, num_slots, n).launch(
            grid=[(n + THREADS - 1) // THREADS, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        mReadIds: cute.Tensor,
        mWriteIds: cute.Tensor,
        mPositions: cute.Tensor,
        mCounts: cute.Tensor | None,
        mHalf: cute.Tensor | None,
        mNext: cute.Tensor | None,
        num_slots: Int32,
        n: Int32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        row = bidx * THREADS + tidx
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if row < n:
            written = Int32(mWriteIds[row])
            if slot_is_valid(written, num_slots):
                count = Int32(mCounts[row]) if const_expr(mCounts is not None) else Int32(1)
                mReadIds[row] = written
                mPositions[row] = Int32(mPositions[row]) + count
                if const_expr(mHalf is not None):
                    mHalf[row] = Int32(mHalf[row]) ^ 1
                if const_expr(mNext is not None):
                    mWriteIds[row] = Int32(mNext[row])


def build(key: StateIdsKey):
    """Compile one specialisation."""
    n = cute.sym_int()
    ids = lambda given: fake_ids(n, Int32) if given else None
    return cute_compile(
        AdvanceStateIds(key), ids(True), ids(True), ids(True), ids(key.counts), ids(key.half), ids(key.next_ids), Int32(0),
        fake_stream(),
    )  # fmt: skip
