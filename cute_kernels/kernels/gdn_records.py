"""Records of GDN prefill: everything of a chunk that does not depend on the state, for all chunks, beside their recurrence.

A block stays on its multiprocessor. Each of three of its warpgroups, the *workers*, takes units of its own, one chunk with
`together` value heads, in the order in which the recurrence needs them (`device/gdn_chains.py`). Of an item, one head of a unit,
it computes T', P and the vectors of `device/gdn_records.py` by the functions, and so with the bits, of the roles of
`kernels/gdn_prefill.py`:

    of a key head   TMA of K and Q, squares of query rows, K K^T, Q K^T, norms; the products stay in registers for its value heads
    all             vectors, L, substitution, merges, P
    warp 3          gates of the next item while the others merge, from a and b loaded an item ahead
    warp 0          record to global memory by bulk stores; handed over while the next item is made to a warp without a worker,
                    which sets the flag (`device/record_flags.py`)

`kernels/gdn_recurrence.py` walks the records. It starts when the flags are cleared and finds the multiprocessors that it wants
left over: a block here is one multiprocessor's, where smaller blocks would be spread over all of them, and blocks that the
recurrence is to replace leave early. Rows of fewer than `min_tokens` tokens have no chunk; at most 32 rows have.

Arguments of the compiled function, in order: q, k, a, b, A_log, dt_bias, cu_seqlens, checkpoint_cu, checkpoint_ends,
checkpoint_slots as in `kernels/gdn_prefill.py`, and
    records [slots * HV, RECORD_BYTES / 4]   int32
    hk, hv, num_slots, has_checkpoints, l2norm, min_tokens, long_length, parts, lead   int32
    width, together                          int32: blocks of a first chain (0: they wait for all records), heads of a unit
    choose                                   int32: who chooses the form, and with it `width`
    stay, early, single, total               int32: of a call of one row how its records are dealt, `total` 0 of others
    scale                                    fp32
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.utils import hopper_helpers

from ..compile.cache import cute_compile
from ..compile.fake import fake_ids, fake_matrix, fake_rows, fake_stream, fake_vector
from ..configs.gdn_records import RECORD_BYTES, WORKERS
from ..device.arith import divide
from ..device.gdn_chains import (
    BY_SHAPES,
    ENTRY,
    FIRST_SLOT,
    LINE_BYTES,
    OFFSET,
    OR_ONE_LAUNCH,
    PLAN_BYTES,
    TABLE_BYTES,
    deal,
    following_unit,
    places_of_chunks,
    records_of_unit,
    shares,
    span_of_unit,
    takes_halves,
    unit_of_turn,
    write_row,
    write_rows,
)
from ..device.gdn_records import (
    FLAG_OFFSET,
    KEPT_BYTES,
    KEPT_VECTOR,
    P_OFFSET,
    VECTOR_OFFSET,
    chunk_at,
    load_tile,
    record_address,
)
from ..device.memory import SMEM
from ..device.prefill_gdn_inverse import merge_halves, scratch_address, solve_halves
from ..device.prefill_gdn_rows import (
    BETA,
    GROWN,
    O_FACTOR,
    P_ROW,
    VECTOR_BYTES,
    inverse_norm,
    load_scalars,
    write_gates,
    write_squares,
    zero_rows,
)
from ..device.prefill_layout import CHUNK, HEAD, LOWER_PITCH, OPERAND_BYTES, TILE_BYTES
from ..device.prefill_pairs import (
    diagonal_block,
    key_norms,
    pair_factors,
    write_key_vectors,
    write_lower,
    write_weights,
)
from ..device.prefill_schedule import leave_idle
from ..device.record_flags import LAST, NONE, clear_flag, hand_over, publish_handed
from ..device.warp_ops import load_shared, store_shared

THREADS = 128  # of a worker
WORKER_REGISTERS, OTHER_REGISTERS = 160, 32
# A worker's shared memory: K, Q, T', P, work matrix, vectors of two items, squares.
PAIR_TILES = 2 * OPERAND_BYTES
LOWER = PAIR_TILES + 2 * TILE_BYTES
VECTORS = LOWER + CHUNK * LOWER_PITCH
SQUARES = VECTORS + 2 * VECTOR_BYTES
WORKER_BYTES = -(-(SQUARES + 4 * CHUNK) // 1024) * 1024
BLOCKS = 132  # resident on the chip at once
WARPS, STORER, LOADER, GATES = 4, 0, 1, 3  # of a worker, and some of them
WARP_PLAN = TABLE_BYTES + PLAN_BYTES  # a warp finds items by itself: the first loads wait for no barrier


class Arguments(NamedTuple):
    """What the compiled function takes behind q and k, then the stream."""

    mA: cute.Tensor  # (T, HV) bf16
    mB: cute.Tensor  # (T, HV) bf16
    mALog: cute.Tensor  # (HV,) fp32
    mDtBias: cute.Tensor  # (HV,) fp32
    mCuSeqlens: cute.Tensor  # (N + 1,) int32
    mKeptCu: cute.Tensor  # (N + 1,) int32, prefix sums of kept states
    mKeptEnds: cute.Tensor  # (M,) int32, ascending in a row
    mKeptSlots: cute.Tensor  # (M,) int32
    mRecords: cute.Tensor
    hk: Int32
    hv: Int32
    num_slots: Int32
    has_checkpoints: Int32
    l2norm: Int32
    min_tokens: Int32
    long_length: Int32
    parts: Int32
    lead: Int32
    width: Int32
    together: Int32
    choose: Int32
    stay: Int32
    early: Int32
    single: Int32
    total: Int32
    scale: Float32


class GdnRecords:
    """The kernel; it has one specialisation."""

    def __init__(self, key):
        self.key = key

    @cute.jit
    def __call__(self, mQ: cute.Tensor, mK: cute.Tensor, *arguments):
        a, stream = Arguments(*arguments[:-1]), arguments[-1]
        k_atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        input_layout = cute.tile_to_shape(k_atom, (CHUNK, HEAD, 1), order=(0, 1, 2))
        box = cute.slice_(input_layout, (None, None, 0))
        load = cpasync.CopyBulkTensorTileG2SOp()
        tma_q, gQ = cpasync.make_tiled_tma_atom(load, mQ, box, (CHUNK, HEAD))
        tma_k, gK = cpasync.make_tiled_tma_atom(load, mK, box, (CHUNK, HEAD))
        k_major = OperandMajorMode.K
        pair_mma = hopper_helpers.make_trivial_tiled_mma(
            BFloat16, BFloat16, k_major, k_major, Float32, (1, 1, 1), (64, CHUNK)
        )

        @cute.struct
        class Storage:
            workers: cute.struct.Align[cute.struct.MemRange[Uint32, WORKERS * WORKER_BYTES // 4], 1024]
            plans: cute.struct.Align[cute.struct.MemRange[Int32, WORKERS * WARPS * WARP_PLAN // 4], 16]
            loaded: cute.struct.MemRange[cutlass.Int64, WORKERS]
            full: cute.struct.MemRange[cutlass.Int64, WORKERS]  # of what is handed over
            empty: cute.struct.MemRange[cutlass.Int64, WORKERS]
            handed: cute.struct.MemRange[Int32, WORKERS]

        self.storage = Storage
        items = cute.size(a.mRecords, mode=[0])
        self.kernel.set_name_prefix(self.key.symbol(), remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(tma_q, gQ, tma_k, gK, a, pair_mma, input_layout).launch(
            grid=[cutlass.min(items, Int32(BLOCKS)), 1, 1],
            block=[(WORKERS + 1) * THREADS, 1, 1],
            max_number_threads=[(WORKERS + 1) * THREADS, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        tma_q: cute.CopyAtom,
        gQ: cute.Tensor,
        tma_k: cute.CopyAtom,
        gK: cute.Tensor,
        a: Arguments,
        pair_mma: cute.TiledMma,
        input_layout: cute.ComposedLayout,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        worker = cute.arch.make_warp_uniform(tidx // THREADS)
        tidx = tidx % THREADS
        warp = cute.arch.make_warp_uniform(tidx // 32)
        lane = tidx % 32
        begin, end = a.mCuSeqlens[0], a.mCuSeqlens[1]  # on their way
        if warp == LOADER:
            cpasync.prefetch_descriptor(tma_k)
            cpasync.prefetch_descriptor(tma_q)
        width = a.width
        idle = Int32(0)  # multiprocessors that a launch without work holds while it waits
        if a.choose != BY_SHAPES:
            idle = Int32(1)
            halves, _ = takes_halves(a.mCuSeqlens, a.min_tokens, a.hv, lane)
            leave_idle((a.choose == OR_ONE_LAUNCH) & (halves == 0), block)
            width = halves + 1
        storage = cutlass.utils.SmemAllocator().allocate(self.storage)
        if worker == WORKERS:
            cute.arch.setmaxregister_decrease(OTHER_REGISTERS)
            if warp == 0:
                publish_handed(
                    storage.handed.data_ptr().toint(), storage.full.data_ptr(), storage.empty.data_ptr(), WORKERS,
                    self.flags(a.mRecords), RECORD_BYTES, lane,
                )  # fmt: skip
            else:
                cute.arch.sync_threads()
        else:
            where = (worker, tidx, warp, lane, block, blocks, idle, begin, end)
            loads = (tma_q, gQ, tma_k, gK)
            self.run_worker(storage, where, loads, a, width, pair_mma, input_layout)

    @cute.jit
    def run_worker(self, storage, where, loads, a, width, pair_mma, input_layout):
        """A worker's records. `where`: its place, and the first row's bounds."""
        worker, tidx, warp, lane, block, blocks, idle, begin, end = where
        hk, hv, together, stay, early, single, total = a.hk, a.hv, a.together, a.stay, a.early, a.single, a.total
        cute.arch.setmaxregister_increase(WORKER_REGISTERS)
        base = storage.workers.data_ptr().toint() + worker * WORKER_BYTES
        sK, sQ = (
            cute.make_tensor(
                cute.recast_ptr(
                    cute.make_ptr(BFloat16, address, SMEM, assumed_align=1024), input_layout.inner, BFloat16
                ),
                input_layout.outer,
            )
            for address in (base, base + OPERAND_BYTES)
        )
        loaded = storage.loaded.data_ptr() + worker
        handed = (
            storage.handed.data_ptr().toint() + 4 * worker,
            storage.full.data_ptr() + worker,
            storage.empty.data_ptr() + worker,
        )
        if (warp == LOADER) & (lane == 0):
            cute.arch.mbarrier_init(loaded, 1)
            cute.arch.mbarrier_init_fence()
        k_tile, q_tile, t_tile, p_tile = (
            base + offset for offset in (0, OPERAND_BYTES, PAIR_TILES, PAIR_TILES + TILE_BYTES)
        )
        lower, vector_base, squares = base + LOWER, base + VECTORS, base + SQUARES
        table = storage.plans.data_ptr().toint() + (worker * WARPS + warp) * WARP_PLAN
        own_plan = table + TABLE_BYTES
        all_rows = cute.size(a.mCuSeqlens) - 1
        mirror, steps, planned = Int32(0), Int32(0), total
        if planned == 0:
            steps, chunks, longest, alike, inner = write_rows(
                table, a.mCuSeqlens, a.mKeptCu, a.mKeptEnds, a.has_checkpoints, a.min_tokens, a.long_length, a.parts, a.lead,
                lane,
            )  # fmt: skip
            mirror = chunks if inner > 0 else mirror
            stay, early, single, total = shares(
                chunks, longest, alike, inner, hv, together, width, WORKERS, blocks - idle
            )
        deal(own_plan, stay, early, single, total, mirror, steps, worker, WORKERS, block, blocks)
        lists = (a.mKeptEnds, a.mKeptSlots, a.num_slots, table, own_plan, all_rows, hv, together, lane)
        gates = (a.mA, a.mB, a.mALog, a.mDtBias)
        group = divide(hv, hk)
        unit, left, slot, token, count, head = self.next_item(
            Int32(-1), *[Int32(0)] * 5, *lists, (planned, begin, end, a.min_tokens)
        )
        thread = pair_mma.get_slice(tidx)
        left_k = pair_mma.make_fragment_A(thread.partition_A(sK))
        left_q = pair_mma.make_fragment_A(thread.partition_A(sQ))
        right_k = pair_mma.make_fragment_B(thread.partition_B(sK))
        kk = cute.make_rmem_tensor(thread.partition_shape_C((CHUNK, CHUNK)), Float32)
        qk = cute.make_rmem_tensor(thread.partition_shape_C((CHUNK, CHUNK)), Float32)
        kk.fill(0.0)
        qk.fill(0.0)
        rows = 16 * warp
        raw, logit, bias, log_rate = [Float32(0.0)] * 2, [Float32(0.0)] * 2, Float32(0.0), Float32(0.0)
        if count >= 0:  # under way while flags are cleared
            if warp == LOADER:
                self.load_inputs(*loads, sQ, sK, token, divide(head, group), loaded)
            if warp == GATES:
                raw, logit, bias, log_rate = self.load_gates(*gates, token, count, head, lane)
        # Blocks of T' and P above the diagonal are zero and no one writes them.
        zero = Uint32(0)
        for i in cutlass.range_constexpr(2 * TILE_BYTES // 16 // THREADS):
            store_shared(t_tile + (i * THREADS + tidx) * 16, zero, zero, zero, zero)
        self.clear_flags(a.mRecords, *lists[3:], warp)
        cute.arch.sync_threads()
        alone = (planned > 0) & (stay > 0) & (width >= 4) & (block < hv)
        if alone & (worker > 0):  # the first chunks' records come sooner with a multiprocessor of their own
            cute.arch.barrier(barrier_id=WORKERS + 1, number_of_threads=WORKERS * THREADS)
        fresh, parity, place = Int32(1), Int32(0), Int32(0)
        factors = [Float32(0.0)] * 2
        query_factor = Float32(0.0)
        is_first, owed = Int32(1), Int32(-1)  # a record to hand over
        turn, closed = Int32(0), Int32(0)
        while count >= 0:
            unit, left, next_slot, next_token, next_count, next_head = self.next_item(
                unit, left, slot, token, count, head, *lists
            )
            vector = vector_base + place * VECTOR_BYTES
            other = vector_base + (place ^ 1) * VECTOR_BYTES
            if fresh != 0:
                cute.arch.mbarrier_wait(loaded, parity)
                parity = parity ^ 1
                if count < CHUNK:
                    zero_rows(k_tile, rows, 16, count, lane)
                    zero_rows(q_tile, rows, 16, count, lane)
                self.join_worker(worker)
                warpgroup.fence()
                for k in cutlass.range_constexpr(HEAD // 16):
                    pair_mma.set(warpgroup.Field.ACCUMULATE, k != 0)
                    cute.gemm(pair_mma, kk, left_k[None, None, k, 0], right_k[None, None, k, 0], kk)
                for k in cutlass.range_constexpr(HEAD // 16):
                    pair_mma.set(warpgroup.Field.ACCUMULATE, k != 0)
                    cute.gemm(pair_mma, qk, left_q[None, None, k, 0], right_k[None, None, k, 0], qk)
                warpgroup.commit_group()
                if (is_first != 0) & (warp == GATES):
                    rate = -cute.math.exp(log_rate, fastmath=True)
                    write_gates(raw, logit, bias, rate, count, vector, lane)
                write_squares(q_tile, squares, rows, 16, lane)
                query_factor = load_shared(squares + (rows + (lane & 15)) * 4, 1)
                query_factor = inverse_norm(query_factor, rows + (lane & 15) < count, a.l2norm) * a.scale
                warpgroup.wait_group(0)
                factors = key_norms(diagonal_block(kk, warp), warp, lane, count, a.l2norm)
                if is_first != 0:
                    self.join_worker(worker)
            if (warp == GATES) & (next_count >= 0):
                raw, logit, bias, log_rate = self.load_gates(*gates, next_token, next_count, next_head, lane)
            if (warp == STORER) & (lane == 0):
                # The record before has been read: its tiles and vectors may be written again.
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            diagonal = diagonal_block(kk, warp)
            write_key_vectors(factors, vector, warp, lane)
            if lane < 16:
                at = vector + (rows + lane) * 4
                store_shared(at + O_FACTOR, query_factor * load_shared(at + GROWN, 1))
                store_shared(at + P_ROW, query_factor)
            self.join_worker(worker)
            # K and Q have been read: the next key head's may come, a whole item ahead where heads share them.
            key_head, next_key_head = divide(head, group), divide(next_head, group)
            fresh = Int32(0) if (next_slot == slot) & (next_key_head == key_head) else Int32(1)
            if (warp == LOADER) & (fresh != 0) & (next_count >= 0):
                self.load_inputs(*loads, sQ, sK, next_token, next_key_head, loaded)
            row_factors, near_factors = pair_factors(vector, warp, lane)
            scratch = scratch_address(lower, warp)
            link = write_lower(kk, diagonal, vector, row_factors, near_factors, factors, lower, scratch, warp, lane)
            solve_halves(scratch, link, lower, t_tile, vector + BETA, warp, lane)
            if (warp == STORER) & (lane == 0) & (owed >= 0):
                hand_over(*handed, turn, owed)
                turn = turn ^ 1
            self.join_worker(worker)
            if warp == GATES:  # which has no block column to merge
                if next_count >= 0:
                    rate = -cute.math.exp(log_rate, fastmath=True)
                    write_gates(raw, logit, bias, rate, next_count, other, lane)
            else:
                merge_halves(lower, t_tile, vector + BETA, warp, (0, 3), lane)
            write_weights(qk, vector, row_factors, near_factors, p_tile, warp, lane)
            cute.arch.fence_view_async_shared()
            self.join_worker(worker)
            if (warp == STORER) & (lane == 0):
                owed = slot * hv + head
                self.store_record(record_address(a.mRecords, owed, 1, 0), t_tile, vector)
                if is_first != 0:  # chains wait for their start; later records until the next item is under way
                    closed = Int32(1) if next_count < 0 else Int32(0)
                    hand_over(*handed, Int32(0), owed | closed * LAST)
                    owed, turn = Int32(-1), Int32(1)
            slot, token, count, head = next_slot, next_token, next_count, next_head
            if alone & (worker == 0) & (is_first != 0):
                cute.arch.barrier_arrive(barrier_id=WORKERS + 1, number_of_threads=WORKERS * THREADS)
            place, is_first = place ^ 1, Int32(0)
        if alone & (worker == 0) & (is_first != 0):
            cute.arch.barrier_arrive(barrier_id=WORKERS + 1, number_of_threads=WORKERS * THREADS)
        if (warp == STORER) & (lane == 0):
            if closed == 0:
                hand_over(*handed, turn, owed | LAST if owed >= 0 else Int32(NONE))

    def flags(self, mRecords):
        """Global address of the first record's flag."""
        return record_address(mRecords, 0, 1, 0) + FLAG_OFFSET

    def join_worker(self, worker):
        """Barrier of the worker's four warps; 0 is that of the block."""
        cute.arch.barrier(barrier_id=1 + worker, number_of_threads=THREADS)

    def load_gates(self, mA, mB, mALog, mDtBias, token, count, head, lane):
        """What `write_gates` needs of a chunk of a head."""
        return (
            load_scalars(mA, token, count, head, lane),
            load_scalars(mB, token, count, head, lane),
            mDtBias[head],
            mALog[head],
        )

    @cute.jit
    def clear_flags(self, mRecords, table, plan, rows, hv, together, lane, warp):
        """Flags of this worker's records, a unit a lane."""
        steps, single = load_shared(plan + 24, 2, Int32)
        mirror = load_shared(plan + 32, 1, Int32)
        turn = warp * 32 + lane
        unit, total = unit_of_turn(plan, turn)
        while cute.arch.vote_ballot_sync(unit < total) != 0:
            record, count = records_of_unit(unit if unit < total else Int32(0), single, together)
            place, row = divide(record, hv), Int32(0)
            head = record - place * hv
            if rows > 1:
                row, place = places_of_chunks(table, mirror - 1 - place if mirror > 0 else place, steps, lane)
                size = steps - load_shared(table + row * LINE_BYTES + 4 * OFFSET, 1, Int32)
                place = size - 1 - place if mirror > 0 else place
            slot = load_shared(table + row * LINE_BYTES + 4 * FIRST_SLOT, 1, Int32) + place
            for inner in cutlass.range(count if unit < total else Int32(0), unroll=1):
                clear_flag(record_address(mRecords, slot, hv, head + inner) + FLAG_OFFSET)
            turn += THREADS
            unit, total = unit_of_turn(plan, turn)

    @cute.jit
    def next_item(
        self,
        unit: Int32,
        left: Int32,
        slot: Int32,
        token: Int32,
        count: Int32,
        head: Int32,
        mKeptEnds: cute.Tensor,
        mKeptSlots: cute.Tensor,
        num_slots: Int32,
        table: Int32,
        plan: Int32,
        rows: Int32,
        hv: Int32,
        together: Int32,
        lane: Int32,
        only_row=None,
    ):
        """The worker's item behind one of its own: unit and heads left in it, slot, first token, count (-1: no item) and head.

        The first one comes behind unit -1 with none left. Slots that hold no chunk are passed over.
        """
        left, head = left - 1, head + 1
        searching = left < 0
        while searching:
            unit, total = following_unit(plan, unit, hv)
            count = Int32(-1)
            if unit < total:
                row, place, head, heads = span_of_unit(table, plan, rows, unit, hv, together, lane)
                if cutlass.const_expr(only_row is not None):
                    planned, row_begin, row_end, min_tokens = only_row
                    if planned > 0:
                        write_row(table, row_begin, row_end, min_tokens)
                line = table + row * LINE_BYTES
                begin, length, first, _ = [cute.arch.make_warp_uniform(x) for x in load_shared(line, 4, Int32)]
                entry, entries = [cute.arch.make_warp_uniform(x) for x in load_shared(line + 4 * ENTRY, 2, Int32)]
                slot, left = first + place, heads - 1
                start, count = chunk_at(mKeptEnds, mKeptSlots, num_slots, entry, entries, length, place, lane)
                token = begin + start
            searching = (count < 0) & (unit < total)
        return unit, left, slot, token, count, head

    def load_inputs(self, tma_q, gQ, tma_k, gK, sQ, sK, token, head, loaded):
        """One warp: start the loads of 64 rows of K and Q of a key head."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(loaded, 2 * OPERAND_BYTES)
        load_tile(tma_k, gK, sK, token, head * HEAD, 0, loaded)
        load_tile(tma_q, gQ, sQ, token, head * HEAD, 0, loaded)

    def store_record(self, address, t_tile, vector):
        """One thread: start the bulk stores of a record."""
        for offset, source, size in ((0, t_tile, 2 * TILE_BYTES), (VECTOR_OFFSET, vector + KEPT_VECTOR, KEPT_BYTES)):
            cute.arch.inline_ptx(
                "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};",
                read_only_args=[address + offset, source, Int32(size)],
            )
        cute.arch.cp_async_bulk_commit_group()


assert P_OFFSET == TILE_BYTES  # T' and P leave as one piece


def build(key):
    """Compile the kernel."""
    tokens, heads, entries = cute.sym_int(), cute.sym_int(), cute.sym_int()
    q, k = (fake_rows(BFloat16, tokens) for _ in range(2))
    a, b = (fake_rows(BFloat16, tokens, divisibility=1, align=2) for _ in range(2))
    cu, kept_cu = (fake_vector(Int32) for _ in range(2))
    return cute_compile(
        GdnRecords(key), q, k, a, b, fake_vector(Float32, heads), fake_vector(Float32, heads), cu, kept_cu,
        fake_ids(entries, Int32), fake_ids(entries, Int32), fake_matrix(Int32, columns=RECORD_BYTES // 4),
        *(Int32(1) for _ in range(16)), Float32(1.0), fake_stream(),
    )  # fmt: skip
