"""States between the segments of long rows: S <- S A + N, segment after segment, in fp32.

A row of the state [V, K] meets A [K, K] alone, so a block takes 16 V rows of one head through all segments. Products are those of
mma.sync over the first 10 bits of mantissas and the next ones, three of the four there are: 2^-21 of a product is lost. A warp
takes 32 columns of A and a quarter of the contraction. A lies in shared memory, two segments deep, as do the rows and the sums
that the quarters exchange; each warp finishes a row. The kernel may be launched while transitions run and waits for their end,
as what follows may for its own.

Arguments of the compiled function: work [slots, HV*128*128] fp32, cu_seqlens [N + 1] int32, hv, parts, long_rows, long_length
int32. Of long row i and segment s, slot 2 (i (parts - 1) + s) holds N and the next one A; N of segment 0 is already the state
after it. Afterwards the first slot of every segment holds the state after the segment. `long_rows` is what shapes allow; blocks
beyond the rows that the lengths bear out leave at once.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cute.nvgpu import cpasync, warpgroup

from ..compile.cache import cute_compile
from ..compile.fake import fake_pool, fake_stream, fake_vector
from ..configs.prefill import MULTIPROCESSORS
from ..device.gdn_records import load_tile
from ..device.memory import load_vector, store_vector
from ..device.prefill_layout import CHUNK, HEAD, STATE_ELEMENTS
from ..device.prefill_schedule import count_long_rows, leave_idle
from ..device.record_flags import join
from ..device.state_io import row_ptr
from ..device.warp_ops import load_shared, mma_1688_tf32, store_shared

ROWS = 16  # of the state, a block
QUARTERS = 4
BATCH = HEAD // QUARTERS
THREADS = 32 * ROWS
# Words between rows of the state and of sums in shared memory: the lanes of a vector access meet no bank twice.
STATE_PITCH, SUM_PITCH = HEAD + 8, HEAD + 4
STAGES = 2  # of A, in swizzled tiles of 64 rows and 32 columns
MATRIX_BYTES, TILE_BYTES = 4 * HEAD * HEAD, 4 * CHUNK * 32


def split(x):
    """x as two words whose first 10 bits of mantissa count: what is left of x behind the first one is the second."""
    pair = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    words = cute.recast_tensor(pair, Uint32)
    pair[0] = x
    words[0] = words[0] & Uint32(0xFFFFE000)
    pair[1] = x - pair[0]
    return words[0], words[1]


class SegmentStates:
    """The kernel of one key."""

    def __init__(self, key):
        self.key = key

    @cute.jit
    def __call__(
        self,
        mWork: cute.Tensor,
        mCu: cute.Tensor,
        hv: Int32,
        parts: Int32,
        long_rows: Int32,
        long_length: Int32,
        stream,
    ):
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, Float32)
        layout = cute.tile_to_shape(atom, (CHUNK, HEAD, 2 * STAGES), order=(0, 1, 2))
        shape, strides = (hv * HEAD, HEAD, cute.size(mWork, mode=[0])), (HEAD, 1, mWork.stride[0])
        matrices = cute.make_tensor(mWork.iterator, cute.make_layout(shape, stride=strides))
        box = cute.slice_(layout, (None, None, 0))
        tma_a, gA = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), matrices, box, (CHUNK, HEAD))

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[cutlass.Int64, STAGES]
            matrices: cute.struct.Align[cute.struct.MemRange[Float32, cute.cosize(layout)], 1024]
            state: cute.struct.Align[cute.struct.MemRange[Float32, ROWS * STATE_PITCH], 128]
            sums: cute.struct.Align[cute.struct.MemRange[Float32, QUARTERS * ROWS * SUM_PITCH], 128]

        self.storage = Storage
        # A block takes a multiprocessor; further rows follow in the same blocks.
        layers = cutlass.max(Int32(MULTIPROCESSORS) // (hv * (HEAD // ROWS)), Int32(1))
        self.kernel.set_name_prefix(self.key.symbol(), remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(tma_a, gA, mWork, mCu, parts, long_length, layout).launch(
            grid=[hv, HEAD // ROWS, cutlass.min(long_rows, layers)],
            block=[THREADS, 1, 1],
            max_number_threads=[THREADS, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        tma_a: cute.CopyAtom,
        gA: cute.Tensor,
        mWork: cute.Tensor,
        mCu: cute.Tensor,
        parts: Int32,
        long_length: Int32,
        layout: cute.ComposedLayout,
    ):
        thread, _, _ = cute.arch.thread_idx()
        head, block, index = cute.arch.block_idx()
        _, _, layers = cute.arch.grid_dim()
        join()
        found = count_long_rows(mCu, cute.size(mCu) - 1, long_length, thread % 32)
        leave_idle(index >= found, head + block + index)
        storage = cutlass.utils.SmemAllocator().allocate(self.storage)
        full = storage.full.data_ptr()
        if thread == 0:
            for stage in range(STAGES):
                cute.arch.mbarrier_init(full + stage, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        load = (tma_a, gA, storage.matrices.get_tensor(layout.outer, swizzle=layout.inner), full, head)
        step = Int32(0)
        while index < found:
            step = self.compose(mWork, parts, thread, head, block, index, storage, step, *load)
            index += layers

    @cute.jit
    def compose(self, mWork, parts, thread, head, block, index, storage, step, *load):
        """The segments of one long row; `step` counts those that the block has taken, whose stages of A come in turn."""
        buffer, exchange = storage.state.data_ptr().toint(), storage.sums.data_ptr().toint()
        full = storage.full.data_ptr()
        warp, lane = cute.arch.make_warp_uniform(thread // 32), thread % 32
        quarter, group, octet, place = warp // 4, warp % 4, lane >> 2, lane & 3
        first = 2 * index * (parts - 1)
        # Finished by the thread: four columns of a row. Of a product's left operand it holds rows `octet` and 8 further, of
        # the right one columns 4 octet .. + 3 of the warp's, of both two entries of eight of the contraction.
        row = head * STATE_ELEMENTS + (block * ROWS + warp) * HEAD + 4 * lane
        mine = buffer + (warp * STATE_PITCH + 4 * lane) * 4
        left = buffer + (octet * STATE_PITCH + quarter * BATCH + 2 * place) * 4
        tile = storage.matrices.data_ptr().toint() + quarter // 2 * (MATRIX_BYTES // 2) + group * TILE_BYTES
        right = [tile + (quarter % 2 * BATCH + k) * 128 + ((octet ^ k) << 4) for k in (2 * place, 2 * place + 1)]
        given = exchange + ((quarter * ROWS + octet) * SUM_PITCH + 32 * group + 8 * place) * 4
        taken = exchange + (warp * SUM_PITCH + 4 * lane) * 4
        if warp == 0:
            cute.arch.inline_ptx("fence.proxy.async.global;")
            for ahead in cutlass.range_constexpr(STAGES):
                self.load_matrix(first, 1 + ahead, parts, step + ahead, *load)
        state = load_vector(row_ptr(mWork, first, row, 16), 4)
        for segment in cutlass.range(1, parts - 1, unroll=1):
            slot = first + 2 * segment
            stage = step % STAGES
            store_shared(mine, *[state[e] for e in range(4)])
            added = load_vector(row_ptr(mWork, slot, row, 16), 4)
            cute.arch.sync_threads()
            cute.arch.mbarrier_wait(full + stage, step // STAGES % 2)
            sums = [[Float32(0.0)] * 4 for _ in range(4)]
            for k in cutlass.range_constexpr(0, BATCH, 8):
                pairs = [load_shared(left + (8 * r * STATE_PITCH + k) * 4, 2) for r in range(2)]
                entries = [load_shared(x + stage * MATRIX_BYTES + k * 128, 4) for x in right]
                a = [split(pairs[r][e]) for e in range(2) for r in range(2)]
                b = [[split(entries[e][i]) for e in range(2)] for i in range(4)]
                for m, n in ((1, 0), (0, 1), (0, 0)):
                    for i in cutlass.range_constexpr(4):
                        sums[i] = mma_1688_tf32([x[m] for x in a], [x[n] for x in b[i]], sums[i])
            # To the warp that finishes a row go the sums of all four quarters, in one fixed order.
            for r in cutlass.range_constexpr(2):
                for half in cutlass.range_constexpr(2):
                    four = [sums[i][2 * r + half] for i in range(4)]
                    store_shared(given + (8 * r * SUM_PITCH + 4 * half) * 4, *four)
            cute.arch.sync_threads()
            if warp == 0:
                self.load_matrix(first, segment + STAGES, parts, step + STAGES, *load)
            parts_of_sum = [load_shared(taken + q * ROWS * SUM_PITCH * 4, 4) for q in range(QUARTERS)]
            for e in cutlass.range_constexpr(4):
                total = (parts_of_sum[0][e] + parts_of_sum[1][e]) + (parts_of_sum[2][e] + parts_of_sum[3][e])
                state[e] = total + added[e]
            store_vector(state, row_ptr(mWork, slot, row, 16), 4)
            step += 1
        return step

    @cute.jit
    def load_matrix(self, first, segment, parts, step, tma_a, gA, sA, full, head):
        """One warp: start the load of A of a segment, where there is one, into the stage of a step."""
        if segment < parts - 1:
            stage = step % STAGES
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, MATRIX_BYTES)
            for half in cutlass.range_constexpr(2):
                matrix = gA[None, None, first + 2 * segment + 1]
                load_tile(tma_a, matrix, sA, head * HEAD + half * CHUNK, 0, 2 * stage + half, full + stage)


def build(key):
    """Compile one key."""
    return cute_compile(
        SegmentStates(key), fake_pool(Float32), fake_vector(Int32), *(Int32(1) for _ in range(4)), fake_stream()
    )
