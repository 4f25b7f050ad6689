"""The KDA recurrence with V in columns: another form of `kernels/kda_prefill.py`, with the same bits, for few chains.

A block walks the chunks of a row for 16 or 32 V columns of a head, so that a head has eight or four blocks. Its products have the
columns as N and 64 tokens or channels as M, and read both operands from shared memory. Three roles, of which A and B alternate:

    A, a warpgroup       X  = V - KG S                    rounded to shared memory
                         V' = T' X                        rounded to shared memory
    B, two warpgroups    S <- e^(G_C) S + KU^T V'         64 channels each, fp32 in accumulators, rounded to shared memory
    C, a warpgroup       O  = QG S_old                    behind X, while V' is made
                         O += P V'                        behind B's product, while S is rounded; then to global memory

X is found as its negative and the records hold the negative of T'. Rounding and the order of sums are those of the other form.
The roles meet at named barriers. A alone has proxy fences between ordinary stores and the products that read them: behind the
barriers of S and X, and before V' is passed on. They lie on the way to B and C as well, whose own fences would wait for what they
store to global memory. Two more warps load records and values into rings.

Slots, launches, rows in parts and flags of records are as in `kernels/kda_prefill.py`; this form has no transition launch.
"""

import enum

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from ..compile.cache import cute_compile
from ..compile.fake import fake_ids, fake_matrix, fake_pool, fake_rows, fake_stream, fake_vector
from ..configs.kda_prefill import KdaColumnsKey
from ..device.column_state import (
    column_mma,
    column_tiles,
    contract_tiles,
    keep_rows,
    load_columns,
    load_value_words,
    rounded_pairs,
    scale_channels,
    store_column_tile,
    store_columns,
    store_rows,
    value_layout,
)
from ..device.kda_chains import chain_of_block
from ..device.kda_layout import (
    KU_OFFSET,
    QG_OFFSET,
    RECORD_BYTES,
    T_OFFSET,
    TRIANGLE_BYTES,
    tail_place,
    triangle_pieces,
)
from ..device.kda_loads import INFO_BYTES, TAIL_BYTES, load_early, load_late
from ..device.kda_stage import staged_operand
from ..device.prefill_layout import CHUNK, HEAD, OPERAND_BYTES, TILE_BYTES
from ..device.prefill_state import negative_values
from ..device.prefill_sync import Ring, advance
from ..device.record_flags import join, leave
from ..device.warp_ops import load_shared, pack_bf16, pack_f16, store_shared

STAGES = 3  # of each ring
THREADS = 4 * 128 + 64
ROWS_BYTES = 512  # of a warp's 16 output rows of 16 columns
WORK_LIMIT = 1 << 30  # every slot of the workspace is a slot


class Barrier(enum.IntEnum):
    """Named barriers: who arrives, who waits."""

    STATE = 1  # S is in shared memory: B, A
    FOUND = 2  # X is found, so C's product takes nothing from A's: A, C
    TOKENS = 3  # X is in shared memory: A itself
    VALUES = 4  # V' is in shared memory: A, B
    MADE = 5  # the new S is made, so C's product takes nothing from B's: B, C
    STATE_READ = 6  # S in shared memory may be replaced: C, B
    VALUES_READ = 7  # V' may be replaced: C, A


TWO, THREE = 256, 384  # threads of two and of three warpgroups


def arrive(barrier, threads):
    """Arrive at a named barrier of so many threads."""
    cute.arch.barrier_arrive(barrier_id=int(barrier), number_of_threads=threads)


def meet(barrier, threads):
    """Arrive and wait."""
    cute.arch.barrier(barrier_id=int(barrier), number_of_threads=threads)


class KdaColumns:
    transition = False

    def __init__(self, key: KdaColumnsKey):
        self.key, self.columns = key, key.columns
        self.triangle = OPERAND_BYTES + 2 * CHUNK * self.columns  # where an early stage has T'
        self.early_bytes = self.triangle + TILE_BYTES
        self.early_stages = self.late_stages = STAGES
        self.late_first, self.late_bytes = QG_OFFSET, 2 * OPERAND_BYTES + TILE_BYTES
        self.early_pieces = triangle_pieces(T_OFFSET, self.triangle)
        # A waits for one ring alone: T' and where the chunk lies come with KG. Behind KU, in the place of T', comes P.
        self.late_pieces = [
            (QG_OFFSET, QG_OFFSET, 2 * OPERAND_BYTES),
            *triangle_pieces(T_OFFSET + TRIANGLE_BYTES, T_OFFSET),
        ]
        self.tile = 128 * self.columns  # bytes of 64 tokens or channels

    @cute.jit
    def __call__(
        self,
        mV: cute.Tensor,  # all arguments as in `kernels/kda_prefill.py`
        mRecords: cute.Tensor,
        mFlags: cute.Tensor,
        mTable: cute.Tensor,
        mState: cute.Tensor,
        mReadIds: cute.Tensor,
        mWriteIds: cute.Tensor,
        mCu: cute.Tensor,
        mEntryCu: cute.Tensor,
        mEnds: cute.Tensor,
        mSlots: cute.Tensor,
        mOut: cute.Tensor,
        mWork: cute.Tensor,
        has_entries: Int32,
        min_tokens: Int32,
        first_chunk: Int32,
        carried: Int32,
        first_head: Int32,
        heads: Int32,
        long_rows: Int32,
        long_length: Int32,
        parts: Int32,
        stream,
    ):
        layout = value_layout(self.columns)
        tma_v, gV = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), mV, layout, (CHUNK, self.columns))

        @cute.struct
        class Storage:
            early: cute.struct.Align[cute.struct.MemRange[Int32, self.early_stages * self.early_bytes // 4], 1024]
            late: cute.struct.Align[cute.struct.MemRange[Int32, self.late_stages * self.late_bytes // 4], 1024]
            state: cute.struct.Align[cute.struct.MemRange[Int32, 2 * self.tile // 4], 1024]
            residual: cute.struct.Align[cute.struct.MemRange[Int32, self.tile // 4], 1024]
            values: cute.struct.Align[cute.struct.MemRange[Int32, self.tile // 4], 1024]
            rows: cute.struct.Align[cute.struct.MemRange[Int32, 4 * ROWS_BYTES // 4], 128]
            infos: cute.struct.Align[cute.struct.MemRange[Int32, self.early_stages * INFO_BYTES // 4], 16]
            tails: cute.struct.Align[cute.struct.MemRange[Int32, self.late_stages * TAIL_BYTES // 4], 16]
            barriers: cute.struct.MemRange[cutlass.Int64, 2 * (self.early_stages + self.late_stages)]

        self.storage = Storage
        self.kernel.set_name_prefix(self.key.symbol(), remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            tma_v, gV, mRecords, mFlags, mTable, mState, mReadIds, mWriteIds, mCu, mEntryCu, mEnds, mSlots, mOut, mWork,
            has_entries, min_tokens, first_chunk, carried, first_head, heads, long_rows, long_length, parts,
            *(column_mma(Float16, self.columns) for _ in range(2)),
            column_mma(Float16, self.columns, OperandMajorMode.MN), layout,
        ).launch(
            grid=[heads * (HEAD // self.columns), long_rows * parts + cute.size(mReadIds, mode=[0]), 1],
            block=[THREADS, 1, 1],
            max_number_threads=[THREADS, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=self.key.overlapped,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        tma_v: cute.CopyAtom,
        gV: cute.Tensor,
        mRecords: cute.Tensor,
        mFlags: cute.Tensor,
        mTable: cute.Tensor,
        mState: cute.Tensor,
        mReadIds: cute.Tensor,
        mWriteIds: cute.Tensor,
        mCu: cute.Tensor,
        mEntryCu: cute.Tensor,
        mEnds: cute.Tensor,
        mSlots: cute.Tensor,
        mOut: cute.Tensor,
        mWork: cute.Tensor,
        has_entries: Int32,
        min_tokens: Int32,
        first_chunk: Int32,
        carried: Int32,
        first_head: Int32,
        heads: Int32,
        long_rows: Int32,
        long_length: Int32,
        parts: Int32,
        mma: cute.TiledMma,
        mma_output: cute.TiledMma,
        mma_update: cute.TiledMma,
        layout: cute.ComposedLayout,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        part, item, _ = cute.arch.block_idx()
        across, down, _ = cute.arch.grid_dim()
        last = (part == across - 1) & (item == down - 1)
        split = const_expr(HEAD // self.columns)
        local_head = part // split
        storage = cutlass.utils.SmemAllocator().allocate(self.storage)
        barriers = storage.barriers.data_ptr()
        early = Ring(barriers, self.early_stages, 1, 4)
        late = Ring(barriers + 2 * self.early_stages, self.late_stages, 1, 12)
        if tidx == 0:
            if const_expr(self.key.overlapped):
                join()
            early.initialise()
            late.initialise()
            cute.arch.mbarrier_init_fence()
        # No copy writes the rows above the diagonals of T' and P.
        for at in cutlass.range(tidx * 16, STAGES * TILE_BYTES, THREADS * 16, unroll=1):
            stage, place = at // TILE_BYTES, at % TILE_BYTES
            for ring, size, triangle in (
                (storage.early, self.early_bytes, self.triangle),
                (storage.late, self.late_bytes, T_OFFSET - self.late_first),
            ):
                store_shared(ring.data_ptr().toint() + stage * size + triangle + place, *[Uint32(0)] * 4)
        cute.arch.fence_view_async_shared()
        cute.arch.griddepcontrol_launch_dependents()  # short rows of the call may run beside these, composition waits itself
        cute.arch.sync_threads()
        warp = cute.arch.make_warp_uniform(tidx // 32)
        lane = tidx % 32
        head = first_head + local_head
        column = part % split * self.columns  # of the head
        row, _, place, begin, end, read, write, work, leaving = chain_of_block(
            mReadIds, mWriteIds, mCu, mEntryCu, mEnds, cute.size(mTable, mode=[0]), item, has_entries, min_tokens, first_chunk,
            carried, long_rows, long_length, parts, lane, False,
        )  # fmt: skip
        if place >= 0:  # else nothing is to be done: there are fewer long rows than there may be
            if warp < 16:
                chunks = Int32(0)
                for start in cutlass.range(begin, end, 32, unroll=1):
                    slot = start + lane
                    inside = slot < end
                    at = slot if inside else begin
                    live = inside & (Int32(mTable[at, 1]) > 0)
                    chunks += cute.arch.popc(cute.arch.vote_ballot_sync(live))
                if warp < 4:
                    self.token_role(storage, early, mma, chunks, warp, lane)
                elif warp < 8:
                    self.output_role(
                        storage, late, mOut, mma_output, chunks, Int32(mCu[row]), head * HEAD + column, warp - 4, lane
                    )
                else:
                    self.state_role(
                        storage, late, mState, mWork, read, write, work, leaving, mEntryCu, mEnds, mSlots, mma_update, chunks,
                        row, head, column, warp - 8, lane,
                    )  # fmt: skip
            else:
                records = mRecords.iterator.toint() + Int64(local_head) * RECORD_BYTES
                flags = mFlags.iterator.toint() + Int64(local_head) * 4
                pitch = Int64(heads) * RECORD_BYTES
                if warp == 16:
                    load_early(
                        self, storage, early, tma_v, gV, records, flags, pitch, mTable, layout, begin, end,
                        head * HEAD + column, work, lane,
                    )  # fmt: skip
                else:
                    load_late(self, storage, late, records, flags, pitch, mTable, begin, end, lane)
        if const_expr(self.key.overlapped):
            if last:  # the others, those without work too, need not wait for the records of all
                leave()

    def late_operand(self, storage, offset, shape, narrow=False):
        """Part of the late stages that begins at a byte of the record's image."""
        start = storage.late.data_ptr() + (offset - self.late_first) // 4
        return staged_operand(start, shape, self.late_stages, self.late_bytes, narrow)

    @cute.jit
    def token_role(self, storage, early, mma: cute.TiledMma, chunks: Int32, warp: Int32, lane: Int32):
        """A. At the top of the loop Y is -V and the chunk's early stage has come."""
        columns = self.columns
        early_base, infos = storage.early.data_ptr(), storage.infos.data_ptr().toint()
        values_at = early_base.toint() + OPERAND_BYTES
        residual, values = storage.residual.data_ptr().toint(), storage.values.data_ptr().toint()
        row = 16 * warp + lane // 4
        tf = mma.get_slice(0)
        kg = staged_operand(early_base, (CHUNK, HEAD), self.early_stages, self.early_bytes)
        t = staged_operand(
            early_base + self.triangle // 4, (CHUNK, CHUNK), self.early_stages, self.early_bytes, narrow=True
        )
        aKG, aT = (tf.make_fragment_A(tf.partition_A(x)) for x in (kg, t))
        bS, bX = (
            tf.make_fragment_B(tf.partition_B(column_tiles(base.data_ptr(), columns, width)))
            for base, width in ((storage.state, HEAD), (storage.residual, CHUNK))
        )
        Y, Z = (cute.make_rmem_tensor(tf.partition_shape_C((CHUNK, columns)), Float32) for _ in range(2))
        stage, parity = Int32(0), Int32(0)
        if chunks > 0:
            early.wait_full(0, parity)
        negative_values(Y, load_value_words(values_at, columns, warp, lane))
        for chunk in cutlass.range(chunks, unroll=1):
            count = load_shared(infos + stage * INFO_BYTES + 4, 1, Int32)
            following, following_parity = advance(stage, parity, self.early_stages)
            meet(Barrier.STATE, THREE)
            cute.arch.fence_view_async_shared()
            warpgroup.fence()
            contract_tiles(mma, Y, aKG, stage, bS, True)
            warpgroup.commit_group()
            here = early.is_full(following, following_parity)
            warpgroup.wait_group(0)
            arrive(Barrier.FOUND, TWO)
            store_column_tile(keep_rows(rounded_pairs(Y, pack_f16), row, count), residual, warp, lane)
            meet(Barrier.TOKENS, 128)
            cute.arch.fence_view_async_shared()
            warpgroup.fence()
            contract_tiles(mma, Z, aT, stage, bX, False)
            warpgroup.commit_group()
            # No branch while a product is in flight: values that have not come are loaded again behind it.
            negative_values(Y, load_value_words(values_at + following * self.early_bytes, columns, warp, lane))
            meet(Barrier.VALUES_READ, TWO)
            warpgroup.wait_group(0)
            store_column_tile(rounded_pairs(Z, pack_f16), values, warp, lane)
            cute.arch.fence_view_async_shared()
            arrive(Barrier.VALUES, THREE)
            early.release(stage)
            stage, parity = following, following_parity
            if chunk + 1 < chunks:
                if not here:
                    early.wait_full(stage, parity)
                    negative_values(Y, load_value_words(values_at + stage * self.early_bytes, columns, warp, lane))

    @cute.jit
    def output_role(
        self,
        storage,
        late,
        mOut: cute.Tensor,
        mma: cute.TiledMma,
        chunks: Int32,
        token: Int32,
        column: Int32,
        warp: Int32,
        lane: Int32,
    ):
        """C: outputs, from the products to global memory."""
        columns = self.columns
        tails = storage.tails.data_ptr().toint()
        rows = storage.rows.data_ptr().toint() + warp * ROWS_BYTES
        tf = mma.get_slice(0)
        aQG, aP = (
            tf.make_fragment_A(tf.partition_A(self.late_operand(storage, offset, (CHUNK, width), width == CHUNK)))
            for offset, width in ((QG_OFFSET, HEAD), (T_OFFSET, CHUNK))
        )
        bS, bV = (
            tf.make_fragment_B(tf.partition_B(column_tiles(base.data_ptr(), columns, width)))
            for base, width in ((storage.state, HEAD), (storage.values, CHUNK))
        )
        O = cute.make_rmem_tensor(tf.partition_shape_C((CHUNK, columns)), Float32)
        place, parity = Int32(0), Int32(0)
        if chunks > 0:
            arrive(Barrier.VALUES_READ, TWO)
        for chunk in cutlass.range(chunks, unroll=1):
            late.wait_full(place, parity)
            start, count = load_shared(tails + place * TAIL_BYTES + 512, 2, Int32)
            meet(Barrier.FOUND, TWO)
            warpgroup.fence()
            contract_tiles(mma, O, aQG, place, bS, False)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            arrive(Barrier.STATE_READ, THREE)
            meet(Barrier.MADE, THREE)
            warpgroup.fence()
            contract_tiles(mma, O, aP, place, bV, True)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            if chunk + 1 < chunks:
                arrive(Barrier.VALUES_READ, TWO)
            late.release(place)
            place, parity = advance(place, parity, self.late_stages)
            first = 16 * warp
            store_rows(rounded_pairs(O, pack_bf16), rows, mOut, token + start + first, count - first, column, lane)

    @cute.jit
    def state_role(
        self,
        storage,
        late,
        mState: cute.Tensor,
        mWork: cute.Tensor,
        read: Int32,
        write: Int32,
        work: Int32,
        leaving: Int32,
        mEntryCu: cute.Tensor,
        mEnds: cute.Tensor,
        mSlots: cute.Tensor,
        mma: cute.TiledMma,
        chunks: Int32,
        row: Int32,
        head: Int32,
        column: Int32,
        warp: Int32,
        lane: Int32,
    ):
        """B: one of two warpgroups, 64 channels of the state through all chunks. At the top of the loop S is to be decayed."""
        columns = self.columns
        half = warp // 4
        channel = 16 * warp + lane // 4  # of the head
        num_slots = cute.size(mState, mode=[0])
        first_column = column + (lane & 3) * 2
        entries_end = Int32(mEntryCu[row + 1])
        tails = storage.tails.data_ptr().toint()
        tile = storage.state.data_ptr().toint() + half * self.tile
        factors_at = tails + tail_place(channel >> 1) + (channel & 1) * 4
        tf = mma.get_slice(0)
        ku = self.late_operand(storage, KU_OFFSET + half * TILE_BYTES, (CHUNK, CHUNK))
        aKU = tf.make_fragment_A(tf.partition_A(cute.make_tensor(ku.iterator, cute.select(ku.layout, [1, 0, 2]))))
        bV = tf.make_fragment_B(tf.partition_B(column_tiles(storage.values.data_ptr(), columns, CHUNK)))
        S = cute.make_rmem_tensor(tf.partition_shape_C((CHUNK, columns)), Float32)
        if work >= 0:
            load_columns(S, mWork, work, Int32(WORK_LIMIT), head, channel, first_column, columns)
        else:
            load_columns(S, mState, read, num_slots, head, channel, first_column, columns)
        place, parity = Int32(0), Int32(0)
        if chunks > 0:
            self.publish_state(S, tile, warp % 4, lane)
        for chunk in cutlass.range(chunks, unroll=1):
            late.wait_full(place, parity)
            at = place * TAIL_BYTES
            # Channels 8 apart are 4 pairs apart, in the same 64 bytes.
            scale_channels(S, [load_shared(factors_at + at, 1), load_shared(factors_at + at + 8, 1)])
            entry = load_shared(tails + at + 524, 1, Int32)
            # Where the state at the chunk's end is kept, and whether once more: looked up here, out of the chain.
            slot, end, following = Int32(-1), Int32(0), Int32(-1)
            if entry >= 0:
                slot, end = Int32(mSlots[entry]), Int32(mEnds[entry])
                if entry + 1 < entries_end:
                    following = Int32(mEnds[entry + 1])
            meet(Barrier.VALUES, THREE)
            warpgroup.fence()
            contract_tiles(mma, S, aKU, place, bV, True)
            warpgroup.commit_group()
            meet(Barrier.STATE_READ, THREE)
            warpgroup.wait_group(0)
            arrive(Barrier.MADE, THREE)
            if chunk + 1 < chunks:
                self.publish_state(S, tile, warp % 4, lane)
            late.release(place)
            place, parity = advance(place, parity, self.late_stages)
            if entry >= 0:
                store_columns(S, mState, slot, num_slots, head, channel, first_column, columns)
                while following == end:
                    entry += 1
                    store_columns(S, mState, Int32(mSlots[entry]), num_slots, head, channel, first_column, columns)
                    following = Int32(-1)
                    if entry + 1 < entries_end:
                        following = Int32(mEnds[entry + 1])
        store_columns(S, mState, write, num_slots, head, channel, first_column, columns)
        store_columns(S, mWork, leaving, Int32(WORK_LIMIT), head, channel, first_column, columns)

    def publish_state(self, S, tile, warp, lane):
        """S, rounded, to shared memory for A and C."""
        store_column_tile(rounded_pairs(S, pack_f16), tile, warp, lane)
        arrive(Barrier.STATE, THREE)


def build(key: KdaColumnsKey):
    """Compile one specialisation for sm_90a from fake tensors."""
    tokens, rows, bounds = cute.sym_int(), cute.sym_int(), cute.sym_int()
    entries = cute.sym_int()
    dtype = {"float32": Float32, "bfloat16": BFloat16}[key.state]
    return cute_compile(
        KdaColumns(key),
        fake_rows(BFloat16, tokens),
        fake_matrix(Int32, columns=RECORD_BYTES // 4),
        fake_vector(Int32),
        fake_matrix(Int32, columns=4),
        fake_pool(dtype),
        fake_ids(rows, Int32),
        fake_ids(rows, Int32),
        fake_ids(bounds, Int32),
        fake_ids(bounds, Int32),
        fake_ids(entries, Int32),
        fake_ids(entries, Int32),
        fake_rows(BFloat16, tokens),
        fake_pool(Float32),
        *(Int32(1) for _ in range(9)),
        fake_stream(),
    )
