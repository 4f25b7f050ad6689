"""States between the segments of long rows: S <- S A + N, segment after segment, in fp32.

A row of the state [V, K] meets A [K, K] alone, so a block takes one head's 8 V rows through all segments: thread k holds column k
of the 8 rows, A comes from L2 in half matrices, the next half under way while the present one is used.

Arguments of the compiled function: work [slots, HV*128*128] fp32, hv, parts, long_rows int32. Of long row i and segment s, slot
2 (i (parts - 1) + s) holds N and the next one A; N of segment 0 is already the state after it. Afterwards the first slot of every
segment holds the state after the segment.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..compile.cache import cute_compile
from ..compile.fake import fake_pool, fake_stream
from ..device.prefill_layout import HEAD, STATE_ELEMENTS
from ..device.state_io import row_ptr
from ..device.warp_ops import load_shared, store_shared

ROWS = 8
BATCH = HEAD // 2


class SegmentStates:
    """The kernel; it has one specialisation."""

    def __init__(self, key):
        self.key = key

    @cute.jit
    def __call__(self, mWork: cute.Tensor, hv: Int32, parts: Int32, long_rows: Int32, stream):
        @cute.struct
        class Storage:
            state: cute.struct.Align[cute.struct.MemRange[Float32, 2 * ROWS * HEAD], 128]

        self.storage = Storage
        self.kernel.set_name_prefix(self.key.symbol(), remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(mWork, parts).launch(
            grid=[hv, HEAD // ROWS, long_rows],
            block=[HEAD, 1, 1],
            max_number_threads=[HEAD, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mWork: cute.Tensor, parts: Int32):
        column, _, _ = cute.arch.thread_idx()
        head, block, index = cute.arch.block_idx()
        storage = cutlass.utils.SmemAllocator().allocate(self.storage)
        buffer = storage.state.data_ptr().toint()
        first = 2 * index * (parts - 1)
        rows = head * STATE_ELEMENTS + block * ROWS * HEAD + column
        values = self.column_of(mWork, first, rows, ROWS)
        state = cute.make_rmem_tensor(cute.make_layout(ROWS), Float32)
        for v in cutlass.range_constexpr(ROWS):
            state[v] = values[v]
        for segment in cutlass.range(1, parts - 1, unroll=1):
            slot = first + 2 * segment
            # Two buffers in turn: one barrier a segment keeps readers of one from writers of the next.
            shared = buffer + (segment & 1) * (ROWS * HEAD * 4)
            for v in cutlass.range_constexpr(ROWS):
                store_shared(shared + (v * HEAD + column) * 4, state[v])
            matrix = head * STATE_ELEMENTS + column
            low = self.column_of(mWork, slot + 1, matrix, BATCH)
            high = self.column_of(mWork, slot + 1, matrix + BATCH * HEAD, BATCH)
            added = self.column_of(mWork, slot, rows, ROWS)
            cute.arch.sync_threads()
            sums = [Float32(0.0)] * ROWS
            for half in cutlass.range_constexpr(2):
                for m in cutlass.range_constexpr(0, BATCH, 4):
                    for v in cutlass.range_constexpr(ROWS):
                        old = load_shared(shared + (v * HEAD + half * BATCH + m) * 4, 4)
                        for e in cutlass.range_constexpr(4):
                            entry = low[m + e] if half == 0 else high[m + e]
                            sums[v] = sums[v] + old[e] * entry
            for v in cutlass.range_constexpr(ROWS):
                state[v] = sums[v] + added[v]
                cute.make_tensor(row_ptr(mWork, slot, rows + v * HEAD, 4), cute.make_layout(1))[0] = state[v]

    def column_of(self, mWork, slot, start, count):
        """`count` values of the thread's column, a state row apart."""
        pointer = row_ptr(mWork, slot, start, 4)
        values = cute.make_rmem_tensor(cute.make_layout(count), Float32)
        cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(count, stride=HEAD)), values)
        return values


def build(key):
    """Compile the kernel."""
    return cute_compile(SegmentStates(key), fake_pool(Float32), Int32(1), Int32(1), Int32(1), fake_stream())
