"""Device-side tracking of slot ids: one thread a row.

For a row whose write id names a slot: read := write; positions += counts[n] (or 1); half ^= 1; write := next id. Other rows stay
as they are. The counts are the step's token counts or its accepted drafts: no host ever reads them.
It writes what the next step's kernels read first, so a kernel directly behind it waits before it reads ids.
"""

import cutlass.cute as cute
from cutlass import Int32

from ..compile.cache import cute_compile
from ..compile.fake import fake_ids, fake_stream
from ..configs.state_ids import COUNTS, HALF, NEXT_IDS, StateIdsKey
from ..device.state_io import slot_is_valid


class AdvanceStateIds:
    def __init__(self, key: StateIdsKey):
        self.key = key

    @cute.jit
    def __call__(
        self,
        mReadIds: cute.Tensor,  # (N,) int32, updated
        mWriteIds: cute.Tensor,  # (N,) int32, updated with NEXT_IDS
        mPositions: cute.Tensor,  # (N,) int32, updated
        mCounts: cute.Tensor,  # (N,) int32; this and the next two: any ids where their flag is not set
        mHalf: cute.Tensor,  # (N,) int32, updated
        mNext: cute.Tensor,  # (N,) int32
        num_slots: Int32,
        flags: Int32,  # COUNTS | HALF | NEXT_IDS
        stream,
    ):
        n, threads = cute.size(mReadIds, mode=[0]), self.key.threads
        self.kernel.set_name_prefix(self.key.symbol(), remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(mReadIds, mWriteIds, mPositions, mCounts, mHalf, mNext, num_slots, flags, n).launch(
            grid=[(n + threads - 1) // threads, 1, 1], block=[threads, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        mReadIds: cute.Tensor,
        mWriteIds: cute.Tensor,
        mPositions: cute.Tensor,
        mCounts: cute.Tensor,
        mHalf: cute.Tensor,
        mNext: cute.Tensor,
        num_slots: Int32,
        flags: Int32,
        n: Int32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        row = bidx * self.key.threads + tidx
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if row < n:
            written = Int32(mWriteIds[row])
            if slot_is_valid(written, num_slots):
                count = Int32(1)
                if (flags & COUNTS) != 0:
                    count = Int32(mCounts[row])
                mReadIds[row] = written
                mPositions[row] = Int32(mPositions[row]) + count
                if (flags & HALF) != 0:
                    mHalf[row] = Int32(mHalf[row]) ^ 1
                if (flags & NEXT_IDS) != 0:
                    mWriteIds[row] = Int32(mNext[row])


def build(key: StateIdsKey):
    """Compile the specialisation."""
    n = cute.sym_int()
    ids = [fake_ids(n, Int32) for _ in range(6)]
    return cute_compile(AdvanceStateIds(key), *ids, Int32(0), Int32(0), fake_stream())
