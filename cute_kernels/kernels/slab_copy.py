"""Move slots to other slots, no arithmetic: what the memory system allows a decode kernel.

    pool[write_ids[n]] = pool[read_ids[n]]

Grid (granules of 4 KiB a slot, N). A block reads one granule into registers, two 16-byte vectors a thread, and writes
it. An id outside the pool reads nothing (zeros) or writes nothing, as in every other kernel: the id rule's cost is in.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ..compile.cache import cute_compile
from ..compile.fake import fake_ids, fake_pool, fake_stream
from ..configs.slab_copy import THREADS, VECTORS, SlabCopyKey
from ..device.memory import load_vector, store_vector, zero_vector
from ..device.state_io import slot_is_valid, slot_ptr

WORDS = 4  # 32-bit words of a 16-byte vector
GRID_Y = 65535


class SlabCopy:
    def __init__(self, key: SlabCopyKey):
        self.key = key
        self.granule = THREADS * VECTORS * WORDS

    @cute.jit
    def __call__(
        self,
        mPool: cute.Tensor,  # (slots, words) 32-bit, any slot stride
        mReadIds: cute.Tensor,  # (N,) int32
        mWriteIds: cute.Tensor,  # (N,) int32
        stream,
    ):
        n = cute.size(mReadIds, mode=[0])
        granules = cute.size(mPool, mode=[1]) // self.granule
        self.kernel.set_name_prefix(self.key.symbol(), remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(mPool, mReadIds, mWriteIds, n).launch(
            grid=[granules, cutlass.min(n, Int32(GRID_Y)), (n + GRID_Y - 1) // GRID_Y],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=self.key.pdl,
        )

    @cute.kernel
    def kernel(self, mPool: cute.Tensor, mReadIds: cute.Tensor, mWriteIds: cute.Tensor, n: Int32):
        tidx, _, _ = cute.arch.thread_idx()
        granule, row, page = cute.arch.block_idx()
        seq = page * GRID_Y + row
        if seq < n:
            slots = cute.size(mPool, mode=[0])
            source, target = mReadIds[seq], mWriteIds[seq]
            inner = granule * self.granule + tidx * WORDS
            vectors = []
            for j in cutlass.range_constexpr(VECTORS):
                vectors.append(zero_vector(Float32, WORDS))
            if slot_is_valid(source, slots):
                for j in cutlass.range_constexpr(VECTORS):
                    rX = load_vector(slot_ptr(mPool, source, inner + j * THREADS * WORDS), WORDS)
                    for i in cutlass.range_constexpr(WORDS):
                        vectors[j][i] = rX[i]
            if const_expr(self.key.pdl):
                cute.arch.griddepcontrol_wait()
                cute.arch.griddepcontrol_launch_dependents()
            if slot_is_valid(target, slots):
                for j in cutlass.range_constexpr(VECTORS):
                    store_vector(vectors[j], slot_ptr(mPool, target, inner + j * THREADS * WORDS), WORDS)


def build(key: SlabCopyKey):
    """Compile one specialisation for sm_90a from fake tensors."""
    n = cute.sym_int()
    return cute_compile(SlabCopy(key), fake_pool(Float32), fake_ids(n, Int32), fake_ids(n, Int32), fake_stream())
