"""Records of GDN prefill: everything of a chunk that does not depend on the state, for all chunks at once, on the whole chip.

A block is one warpgroup; three stay on a multiprocessor, each with an equal run of (chunk slot, value head) items, heads inside.
Of an item it computes T', P and the vectors of `device/gdn_records.py` by the functions, and so with the bits, of the roles of
`kernels/gdn_prefill.py`:

    of a key head   TMA of K and Q, squares of query rows, K K^T, Q K^T, norms; the products stay in registers for its value heads
    all             vectors, L, substitution, merges, P
    warp 3          gates of the next item while the others merge, from a and b loaded an item ahead
    warp 2          record to global memory by bulk stores

`kernels/gdn_recurrence.py` walks them. Rows of fewer than `min_tokens` tokens have no chunk.

Arguments of the compiled function, in order: q, k, a, b, A_log, dt_bias, cu_seqlens, checkpoint_cu, checkpoint_ends,
checkpoint_slots as in `kernels/gdn_prefill.py`, and
    records [slots * HV, RECORD_BYTES / 4]   int32
    hk, hv, num_slots, has_checkpoints, l2norm, min_tokens   int32
    scale                                    fp32
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.utils import hopper_helpers

from ..compile.cache import cute_compile
from ..compile.fake import fake_ids, fake_matrix, fake_rows, fake_stream, fake_vector
from ..configs.gdn_records import RECORD_BYTES
from ..device.gdn_records import KEPT_BYTES, KEPT_VECTOR, P_OFFSET, VECTOR_OFFSET, chunk_at, record_address
from ..device.kda_layout import first_slot, row_of_slot
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
from ..device.warp_ops import load_shared, store_shared

THREADS = 128
BLOCKS = 3 * 132  # resident on the chip at once
LOADER, STORER, GATES = 1, 2, 3  # warps


class GdnRecords:
    """The kernel; it has one specialisation."""

    def __init__(self, key):
        self.key = key

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mA: cute.Tensor,
        mB: cute.Tensor,
        mALog: cute.Tensor,
        mDtBias: cute.Tensor,
        mCuSeqlens: cute.Tensor,
        mKeptCu: cute.Tensor,
        mKeptEnds: cute.Tensor,
        mKeptSlots: cute.Tensor,
        mRecords: cute.Tensor,
        hk: Int32,
        hv: Int32,
        num_slots: Int32,
        has_checkpoints: Int32,
        l2norm: Int32,
        min_tokens: Int32,
        scale: Float32,
        stream,
    ):
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
            sK: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(input_layout)], 1024]
            sQ: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(input_layout)], 1024]
            pairs: cute.struct.Align[cute.struct.MemRange[Uint32, 2 * TILE_BYTES // 4], 1024]  # T', P
            vectors: cute.struct.Align[cute.struct.MemRange[Float32, 2 * VECTOR_BYTES // 4], 128]
            lower: cute.struct.Align[cute.struct.MemRange[Float16, CHUNK * LOWER_PITCH // 2], 128]
            squares: cute.struct.Align[cute.struct.MemRange[Float32, CHUNK], 128]
            loaded: cute.struct.MemRange[cutlass.Int64, 1]

        self.storage = Storage
        items = cute.size(mRecords, mode=[0])
        self.kernel.set_name_prefix(self.key.symbol(), remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            tma_q, gQ, tma_k, gK, mA, mB, mALog, mDtBias, mCuSeqlens, mKeptCu, mKeptEnds, mKeptSlots, mRecords, hk, hv, num_slots,
            has_checkpoints, l2norm, min_tokens, scale, pair_mma, input_layout,
        ).launch(
            grid=[cutlass.min(items, Int32(BLOCKS)), 1, 1],
            block=[THREADS, 1, 1],
            max_number_threads=[3 * THREADS, 1, 1],  # caps registers so that three blocks fit a multiprocessor
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        tma_q: cute.CopyAtom,
        gQ: cute.Tensor,
        tma_k: cute.CopyAtom,
        gK: cute.Tensor,
        mA: cute.Tensor,
        mB: cute.Tensor,
        mALog: cute.Tensor,
        mDtBias: cute.Tensor,
        mCuSeqlens: cute.Tensor,
        mKeptCu: cute.Tensor,
        mKeptEnds: cute.Tensor,
        mKeptSlots: cute.Tensor,
        mRecords: cute.Tensor,
        hk: Int32,
        hv: Int32,
        num_slots: Int32,
        has_checkpoints: Int32,
        l2norm: Int32,
        min_tokens: Int32,
        scale: Float32,
        pair_mma: cute.TiledMma,
        input_layout: cute.ComposedLayout,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(tidx // 32)
        lane = tidx % 32
        storage = cutlass.utils.SmemAllocator().allocate(self.storage)
        sK = storage.sK.get_tensor(input_layout.outer, swizzle=input_layout.inner)
        sQ = storage.sQ.get_tensor(input_layout.outer, swizzle=input_layout.inner)
        loaded = storage.loaded.data_ptr()
        if tidx == 0:
            cute.arch.mbarrier_init(loaded, 1)
            cute.arch.mbarrier_init_fence()
        k_tile, q_tile = storage.sK.data_ptr().toint(), storage.sQ.data_ptr().toint()
        t_tile = storage.pairs.data_ptr().toint()
        p_tile, lower = t_tile + TILE_BYTES, storage.lower.data_ptr().toint()
        vector_base, squares = storage.vectors.data_ptr().toint(), storage.squares.data_ptr().toint()
        # Blocks of T' and P above the diagonal are zero and no one writes them.
        zero = Uint32(0)
        for i in cutlass.range_constexpr(2 * TILE_BYTES // 16 // THREADS):
            store_shared(t_tile + (i * THREADS + tidx) * 16, zero, zero, zero, zero)
        cute.arch.sync_threads()

        items = Int64(cute.size(mRecords, mode=[0]))
        item, stop = Int32(items * Int64(block) // Int64(blocks)), Int32(items * Int64(block + 1) // Int64(blocks))
        lists = (mCuSeqlens, mKeptCu, mKeptEnds, mKeptSlots, hv, num_slots, has_checkpoints, min_tokens, lane)
        gates = (mA, mB, mALog, mDtBias)
        item, slot, token, count = self.next_chunk(item, stop, Int32(-1), Int32(0), Int32(0), *lists)
        head, group = item - slot * hv, hv // hk
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
        if item < stop:
            if warp == LOADER:
                self.load_inputs(tma_q, gQ, tma_k, gK, sQ, sK, token, head // group, loaded)
            if warp == GATES:
                raw, logit, bias, log_rate = self.load_gates(*gates, token, count, head, lane)
                rate = -cute.math.exp(log_rate, fastmath=True)
                write_gates(raw, logit, bias, rate, count, vector_base, lane)
        next_item, next_slot, next_token, next_count = self.next_chunk(item + 1, stop, slot, token, count, *lists)
        next_head = next_item - next_slot * hv
        if (warp == GATES) & (next_item < stop):
            raw, logit, bias, log_rate = self.load_gates(*gates, next_token, next_count, next_head, lane)
        fresh, parity, place = Int32(1), Int32(0), Int32(0)
        factors = [Float32(0.0)] * 2
        query_factor = Float32(0.0)
        while item < stop:
            vector = vector_base + place * VECTOR_BYTES
            other = vector_base + (place ^ 1) * VECTOR_BYTES
            if fresh != 0:
                cute.arch.mbarrier_wait(loaded, parity)
                parity = parity ^ 1
                if count < CHUNK:
                    zero_rows(k_tile, rows, 16, count, lane)
                    zero_rows(q_tile, rows, 16, count, lane)
                write_squares(q_tile, squares, rows, 16, lane)
                query_factor = load_shared(squares + (rows + (lane & 15)) * 4, 1)
                query_factor = inverse_norm(query_factor, rows + (lane & 15) < count, l2norm) * scale
                cute.arch.sync_threads()
                warpgroup.fence()
                for k in cutlass.range_constexpr(HEAD // 16):
                    pair_mma.set(warpgroup.Field.ACCUMULATE, k != 0)
                    cute.gemm(pair_mma, kk, left_k[None, None, k, 0], right_k[None, None, k, 0], kk)
                for k in cutlass.range_constexpr(HEAD // 16):
                    pair_mma.set(warpgroup.Field.ACCUMULATE, k != 0)
                    cute.gemm(pair_mma, qk, left_q[None, None, k, 0], right_k[None, None, k, 0], qk)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                factors = key_norms(diagonal_block(kk, warp), warp, lane, count, l2norm)
            if warp == STORER:
                # The record before has been read out: its tiles and vectors may be written again.
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            diagonal = diagonal_block(kk, warp)
            write_key_vectors(factors, vector, warp, lane)
            if lane < 16:
                at = vector + (rows + lane) * 4
                store_shared(at + O_FACTOR, query_factor * load_shared(at + GROWN, 1))
                store_shared(at + P_ROW, query_factor)
            cute.arch.sync_threads()
            # K and Q have been read: the next key head's may come, a whole item ahead where heads share them.
            key_head, next_key_head = head // group, next_head // group
            fresh = Int32(0) if (next_slot == slot) & (next_key_head == key_head) else Int32(1)
            if (warp == LOADER) & (fresh != 0) & (next_item < stop):
                self.load_inputs(tma_q, gQ, tma_k, gK, sQ, sK, next_token, next_key_head, loaded)
            row_factors, near_factors = pair_factors(vector, warp, lane)
            scratch = scratch_address(lower, warp)
            link = write_lower(kk, diagonal, vector, row_factors, near_factors, factors, lower, scratch, warp, lane)
            solve_halves(scratch, link, lower, t_tile, vector + BETA, warp, lane)
            cute.arch.sync_threads()
            if warp == GATES:  # which has no block column to merge
                if next_item < stop:
                    rate = -cute.math.exp(log_rate, fastmath=True)
                    write_gates(raw, logit, bias, rate, next_count, other, lane)
            else:
                merge_halves(lower, t_tile, vector + BETA, warp, (0, 3), lane)
            write_weights(qk, vector, row_factors, near_factors, p_tile, warp, lane)
            cute.arch.fence_view_async_shared()
            cute.arch.sync_threads()
            if warp == STORER:
                self.store_record(record_address(mRecords, slot, hv, head), t_tile, vector)
            item, slot, token, count, head = next_item, next_slot, next_token, next_count, next_head
            next_item, next_slot, next_token, next_count = self.next_chunk(item + 1, stop, slot, token, count, *lists)
            next_head = next_item - next_slot * hv
            if (warp == GATES) & (next_item < stop):
                raw, logit, bias, log_rate = self.load_gates(*gates, next_token, next_count, next_head, lane)
            place = place ^ 1
        if warp == STORER:
            cute.arch.cp_async_bulk_wait_group(0)

    def load_gates(self, mA, mB, mALog, mDtBias, token, count, head, lane):
        """What `write_gates` needs of a chunk of a head."""
        return (
            load_scalars(mA, token, count, head, lane),
            load_scalars(mB, token, count, head, lane),
            mDtBias[head],
            mALog[head],
        )

    @cute.jit
    def next_chunk(
        self,
        item: Int32,
        stop: Int32,
        slot: Int32,
        token: Int32,
        count: Int32,
        mCu: cute.Tensor,
        mKeptCu: cute.Tensor,
        mKeptEnds: cute.Tensor,
        mKeptSlots: cute.Tensor,
        hv: Int32,
        num_slots: Int32,
        has_checkpoints: Int32,
        min_tokens: Int32,
        lane: Int32,
    ):
        """The first item from `item` on whose slot has a chunk, with slot, first token and count; an item >= `stop` if none.

        `slot`, `token` and `count` are those of the item before: heads of one slot are not looked up again.
        """
        rows = cute.size(mCu) - 1
        searching = item < stop
        while searching:
            here = item // hv
            if here != slot:
                slot = here
                row = row_of_slot(mCu, mKeptCu, slot, rows, lane, has_checkpoints)
                begin = mCu[row]
                length = mCu[row + 1] - begin
                length = length if length >= min_tokens else Int32(-1)
                entry, entries = Int32(0), Int32(0)
                if has_checkpoints != 0:
                    entry = mKeptCu[row]
                    entries = mKeptCu[row + 1]
                place = slot - first_slot(mCu, mKeptCu, row, has_checkpoints)
                start, count = chunk_at(mKeptEnds, mKeptSlots, num_slots, entry, entries, length, place, lane)
                token = begin + start
            searching = count < 0
            item = (slot + 1) * hv if searching else item
            searching = searching & (item < stop)
        inside = item < stop
        return item, slot, token, (count if inside else Int32(0))

    @cute.jit
    def load_inputs(
        self,
        tma_q: cute.CopyAtom,
        gQ: cute.Tensor,
        tma_k: cute.CopyAtom,
        gK: cute.Tensor,
        sQ: cute.Tensor,
        sK: cute.Tensor,
        token: Int32,
        head: Int32,
        loaded: cute.Pointer,
    ):
        """One warp: start the loads of 64 rows of K and Q of a key head."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(loaded, 2 * OPERAND_BYTES)
        for tma, gX, sX in ((tma_k, gK, sK), (tma_q, gQ, sQ)):
            tile = cute.local_tile(cute.domain_offset((token, head * HEAD), gX), (CHUNK, HEAD), (0, 0))
            one = cute.make_layout(1)
            target, source = cpasync.tma_partition(
                tma, 0, one, cute.group_modes(sX, 0, 2), cute.group_modes(tile, 0, 2)
            )
            cute.copy(tma, source, target[None, 0], tma_bar_ptr=loaded)

    def store_record(self, address, t_tile, vector):
        """One warp: start the bulk stores of a record."""
        with cute.arch.elect_one():
            for offset, source, size in (
                (0, t_tile, 2 * TILE_BYTES),
                (VECTOR_OFFSET, vector + KEPT_VECTOR, KEPT_BYTES),
            ):
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
        *(Int32(1) for _ in range(6)), Float32(1.0), fake_stream(),
    )  # fmt: skip
