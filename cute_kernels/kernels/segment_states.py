"""States between the segments of long rows: S <- S A + N, segment after segment, in fp32.

A row of the state [V, K] meets A [K, K] alone, so a block takes some V rows of one head, 16 or 8, through all segments. Thread
(column k, quarter of the contraction) holds 32 entries of column k of A in registers, and loads the next segment's as they are
used up; the rows are broadcast from shared memory; the quarters exchange their sums there, and each finishes a quarter of the
rows. The kernel may be launched while transitions run and waits for their end, as what follows may for its own.

Arguments of the compiled function: work [slots, HV*128*128] fp32, cu_seqlens [N + 1] int32, hv, parts, long_rows, long_length
int32. Of long row i and segment s, slot 2 (i (parts - 1) + s) holds N and the next one A; N of segment 0 is already the state
after it. Afterwards the first slot of every segment holds the state after the segment. `long_rows` is what shapes allow; blocks
beyond the rows that the lengths bear out leave at once.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..compile.cache import cute_compile
from ..compile.fake import fake_pool, fake_stream, fake_vector
from ..configs.prefill import MULTIPROCESSORS
from ..device.prefill_layout import HEAD, STATE_ELEMENTS
from ..device.prefill_schedule import count_long_rows, leave_idle
from ..device.record_flags import join
from ..device.state_io import row_ptr
from ..device.warp_ops import load_shared, store_shared

QUARTERS = 4
BATCH = HEAD // QUARTERS
THREADS = QUARTERS * HEAD
RELOADED = 16  # entries that the next segment's replace together, once they are used up


class SegmentStates:
    """The kernel of one key."""

    def __init__(self, key):
        self.key, self.rows = key, key.rows

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
        @cute.struct
        class Storage:
            state: cute.struct.Align[
                cute.struct.MemRange[Float32, (1 + QUARTERS) * self.rows * HEAD], 128
            ]  # rows, then sums exchanged

        self.storage = Storage
        # A block takes a multiprocessor; further rows follow in the same blocks.
        layers = cutlass.max(Int32(MULTIPROCESSORS) // (hv * (HEAD // self.rows)), Int32(1))
        self.kernel.set_name_prefix(self.key.symbol(), remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(mWork, mCu, parts, long_length).launch(
            grid=[hv, HEAD // self.rows, cutlass.min(long_rows, layers)],
            block=[THREADS, 1, 1],
            max_number_threads=[THREADS, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, mWork: cute.Tensor, mCu: cute.Tensor, parts: Int32, long_length: Int32):
        thread, _, _ = cute.arch.thread_idx()
        head, block, index = cute.arch.block_idx()
        _, _, layers = cute.arch.grid_dim()
        join()
        found = count_long_rows(mCu, cute.size(mCu) - 1, long_length, thread % 32)
        leave_idle(index >= found, head + block + index)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        storage = cutlass.utils.SmemAllocator().allocate(self.storage)
        while index < found:
            self.compose(mWork, parts, thread, head, block, index, storage.state.data_ptr().toint())
            index += layers

    @cute.jit
    def compose(self, mWork, parts, thread, head, block, index, buffer):
        column, quarter = thread % HEAD, thread // HEAD
        own = self.rows // QUARTERS
        exchange = buffer + self.rows * HEAD * 4
        first = 2 * index * (parts - 1)
        rows = head * STATE_ELEMENTS + (block * self.rows + quarter * own) * HEAD + column
        matrix = head * STATE_ELEMENTS + quarter * BATCH * HEAD + column
        mine = buffer + (quarter * own * HEAD + column) * 4
        given = exchange + (quarter * own * HEAD + column) * 4
        taken = exchange + (quarter * self.rows * HEAD + column) * 4
        state = self.column_of(mWork, first, rows, own)
        entries = self.column_of(mWork, first + 3, matrix, BATCH)
        for segment in cutlass.range(1, parts - 1, unroll=1):
            slot = first + 2 * segment
            for v in cutlass.range_constexpr(own):
                store_shared(mine + v * HEAD * 4, state[v])
            cute.arch.sync_threads()
            following = cutlass.min(slot + 3, first + 2 * parts - 3)
            sums = [Float32(0.0)] * self.rows
            for m in cutlass.range_constexpr(0, BATCH, 4):
                for v in cutlass.range_constexpr(self.rows):
                    old = load_shared(buffer + (v * HEAD + quarter * BATCH + m) * 4, 4)
                    for e in cutlass.range_constexpr(4):
                        sums[v] = sums[v] + old[e] * entries[m + e]
                used = m + 4
                if cutlass.const_expr(used % RELOADED == 0):
                    later = self.column_of(mWork, following, matrix + (used - RELOADED) * HEAD, RELOADED)
                    for e in cutlass.range_constexpr(RELOADED):
                        entries[used - RELOADED + e] = later[e]
            added = self.column_of(mWork, slot, rows, own)
            # To the quarter that finishes a row go the sums of all four, in one fixed order.
            for v in cutlass.range_constexpr(self.rows):
                store_shared(given + (v // own * self.rows + v % own) * HEAD * 4, sums[v])
            cute.arch.sync_threads()
            for v in cutlass.range_constexpr(own):
                parts_of_sum = [load_shared(taken + (q * own + v) * HEAD * 4, 1) for q in range(QUARTERS)]
                total = (parts_of_sum[0] + parts_of_sum[1]) + (parts_of_sum[2] + parts_of_sum[3])
                state[v] = total + added[v]
                cute.make_tensor(row_ptr(mWork, slot, rows + v * HEAD, 4), cute.make_layout(1))[0] = state[v]

    def column_of(self, mWork, slot, start, count):
        """`count` values of the thread's column, a state row apart."""
        pointer = row_ptr(mWork, slot, start, 4)
        values = cute.make_rmem_tensor(cute.make_layout(count), Float32)
        cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(count, stride=HEAD)), values)
        return values


def build(key):
    """Compile one key."""
    return cute_compile(
        SegmentStates(key), fake_pool(Float32), fake_vector(Int32), *(Int32(1) for _ in range(4)), fake_stream()
    )
