"""GDN prefill from records: the serial chain over chunks, for sequences and heads that do not fill the chip.

`kernels/gdn_records.py` makes T', P and the vectors of every chunk, so a block spends its multiprocessor on the state alone.
Mathematics, segments of long rows and bits are those of `kernels/gdn_prefill.py`. A block of three or four warpgroups stays on
its multiprocessor and takes one chain (`device/gdn_chains.py`) of a value head, or half of one (`slabs` = 1), after another:

    state x slabs    64 V rows each (`device/prefill_state.py`): S K^T; half of S Q^T, behind which X is found; V'; the other
                     half, behind which W is rounded; half of the update, behind which O is scaled; V' P^T; the rest of the
                     update, behind which the output is stored over the chunk's V tile and the next chunk looked for
    data: ends       rows of a short chunk beyond its end are zeroed in K and V
    data: producer   items, chunk list, TMA of K, Q, V, bulk loads of records
    data: output     finished rows to global memory

Rings: *inputs* (K, Q, vectors; T', P of half a head; three deep) are full by TMA and seen by the warp of ends alone; it publishes
*ready* (two deep, with T', P of a whole head), after which everything of the chunk but V is there for the state. Both are
tested, not waited for, while the update runs. The state releases both. V stages carry a record of their own for the output
warp, which frees them.

**Launches.** First chains run beside the records kernel, each chunk behind its record's flag (`device/record_flags.py`), the
transition launch of inner segments beside the first chains. Before the launches in front of it have ended, a block reads ids,
bounds, kept states, K, Q, V and the pool, which these do not write (first chains hand states on to the workspace, which only the
later launches read), and writes outputs, the pool and the workspace, which they do not read: first chains and transitions write
other slots of it. Inner segments start from composed states, so their launch waits at once. All end behind what they overlap,
for which block 0 waits: others give their multiprocessors up, at once where lengths leave them without an item.

Arguments of the compiled function, in order: q, k, v, pool, read_ids, write_ids, cu_seqlens, checkpoint_cu, checkpoint_ends,
checkpoint_slots, out, work as in `kernels/gdn_prefill.py`, and
    records [slots * HV, RECORD_BYTES / 4]   int32
    hk, hv, num_slots, has_checkpoints, min_tokens, long_rows, long_length, parts, lead   int32
    inner, choose                            int32; inner: 1 behind composed states, 2 where lengths say whether halves or wholes
                                             work; choose: who chooses the form of the first chains (`device/gdn_chains.py`)
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from ..compile.cache import cute_compile
from ..compile.fake import fake_ids, fake_matrix, fake_pool, fake_rows, fake_stream, fake_vector
from ..configs.gdn_records import MOST_HEADS, RECORD_BYTES
from ..device.gdn_chains import BY_SHAPES, OR_ONE_LAUNCH, takes_halves
from ..device.gdn_records import (
    FLAG_OFFSET,
    KEPT_BYTES,
    KEPT_VECTOR,
    P_OFFSET,
    VECTOR_OFFSET,
    bulk_load,
    load_tile,
    place_of_position,
    record_address,
)
from ..device.gdn_recurrence_rows import run_ends, run_output
from ..device.gdn_recurrence_state import (
    KEEPERS,
    WORK_LIMIT,
    end_stage,
    run_keeper,
    stage_state,
    stage_words,
    start_state,
    subtract,
)
from ..device.prefill_gdn_rows import DECAY, O_FACTOR, REST, VECTOR_BYTES, X_FACTOR
from ..device.prefill_layout import (
    CHUNK,
    HEAD,
    INPUT_STAGES,
    OPERAND_BYTES,
    RECORD_WORDS,
    TILE_BYTES,
    WORK_STAGES,
    Field,
    Flag,
)
from ..device.prefill_schedule import count_long_rows, find_work, leave_idle, next_chunk, next_row
from ..device.prefill_state import (
    as_left_operand,
    contract,
    contract_half,
    contract_triangle,
    find_values,
    halves_as_left_operand,
    load_factors,
    packed_halves,
    prefetch_state,
    scale_into_halves,
    scale_state,
    scaled_halves_as_left_operand,
    state_mma,
    store_output_tile,
    store_state,
    token_halves,
)
from ..device.prefill_sync import Bundle, Ring, advance, read_record, write_record
from ..device.record_flags import join, leave, published
from ..device.warp_ops import load_shared, pack_bf16, pick, store_shared

REGISTERS = {2: (216, 40), 1: (248, 104)}  # a thread of state and data
VALUE_STAGES = {2: 3, 1: 4}
PAIR_STAGES = {2: WORK_STAGES, 1: INPUT_STAGES}  # T', P: in *ready* of a whole head, with K and Q of half a head
BLOCKS = {2: 132, 1: 66}  # heads at work at once
CHOSEN = 2  # `inner` of a launch that halves and wholes are both made of: lengths say which one works


class GdnRecurrence:
    """The kernel of one key."""

    def __init__(self, key):
        self.key, self.slabs, self.transition = key, key.slabs, key.transition
        self.width, self.value_stages = 64 * key.slabs, VALUE_STAGES[key.slabs]  # V columns of a block
        self.stages, self.pairs_with_inputs = INPUT_STAGES, key.slabs == 1
        self.notes_outputs = True
        self.staged_words = stage_words(key, Float32 if key.state_dtype == "float32" else BFloat16)
        self.threads = 128 * (key.slabs + 2)
        self.value_bytes = key.slabs * TILE_BYTES
        # Without queries the transition loads neither Q nor P.
        self.input_bytes = OPERAND_BYTES * (1 if key.transition else 2) + KEPT_BYTES
        self.pair_bytes = TILE_BYTES * (1 if key.transition else 2)

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mPool: cute.Tensor,
        mReadIds: cute.Tensor,
        mWriteIds: cute.Tensor,
        mCuSeqlens: cute.Tensor,
        mKeptCu: cute.Tensor,
        mKeptEnds: cute.Tensor,
        mKeptSlots: cute.Tensor,
        mOut: cute.Tensor,
        mWork: cute.Tensor,
        mRecords: cute.Tensor,
        hk: Int32,
        hv: Int32,
        num_slots: Int32,
        has_checkpoints: Int32,
        min_tokens: Int32,
        long_rows: Int32,
        long_length: Int32,
        parts: Int32,
        lead: Int32,
        inner: Int32,
        choose: Int32,
        stream,
    ):
        slabs = self.slabs
        k_atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        h_atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, Float16)
        input_layout = cute.tile_to_shape(k_atom, (CHUNK, HEAD, INPUT_STAGES), order=(0, 1, 2))
        pair_layout = cute.tile_to_shape(h_atom, (CHUNK, CHUNK, PAIR_STAGES[slabs]), order=(0, 1, 2))
        width = 64 * slabs
        value_layout = cute.tile_to_shape(k_atom, (CHUNK, width, VALUE_STAGES[slabs]), order=(0, 1, 2))
        box = cute.slice_(input_layout, (None, None, 0))
        value_box = cute.slice_(value_layout, (None, None, 0))
        load = cpasync.CopyBulkTensorTileG2SOp()
        tma_q, gQ = cpasync.make_tiled_tma_atom(load, mQ, box, (CHUNK, HEAD))
        tma_k, gK = cpasync.make_tiled_tma_atom(load, mK, box, (CHUNK, HEAD))
        tma_v, gV = cpasync.make_tiled_tma_atom(load, mV, value_box, (CHUNK, width))
        tma_out, gOut = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), mOut, value_box, (CHUNK, width))
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        read_mma = state_mma(BFloat16, CHUNK, k_major, slabs)
        token_mma = state_mma(Float16, CHUNK // 2, k_major, slabs)
        update_mma = state_mma(BFloat16, HEAD // 2, mn_major, slabs)
        ring_stages = INPUT_STAGES + WORK_STAGES + 2 * VALUE_STAGES[slabs] + 1

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[cutlass.Int64, 2 * ring_stages]
            records: cute.struct.Align[cute.struct.MemRange[Int32, INPUT_STAGES * RECORD_WORDS], 16]
            outputs: cute.struct.Align[cute.struct.MemRange[Int32, VALUE_STAGES[slabs] * 4], 16]
            vectors: cute.struct.Align[cute.struct.MemRange[Float32, INPUT_STAGES * VECTOR_BYTES // 4], 128]
            sK: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(input_layout)], 1024]
            sQ: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(input_layout)], 1024]
            sV: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(value_layout)], 1024]
            sT: cute.struct.Align[cute.struct.MemRange[Float16, cute.cosize(pair_layout)], 1024]
            sP: cute.struct.Align[cute.struct.MemRange[Float16, cute.cosize(pair_layout)], 1024]
            note: cute.struct.Align[cute.struct.MemRange[Int32, 4], 16]
            kept: cute.struct.Align[cute.struct.MemRange[Uint32, max(self.staged_words, 4)], 128]

        self.storage = Storage
        # Halves of a head are neighbours on the chip: what both load comes but once.
        # Chains keep their multiprocessors; beside first ones a transition is a block, which the chip takes as it gets free.
        if cutlass.const_expr(self.transition):
            items = hv * long_rows * (2 * parts - 4)
        else:
            chains = long_rows * (parts - 1) if inner != 0 else cute.size(mReadIds)
            # Where lengths chose, halves may be more than fit at once, the longest first: the hardware deals them.
            most = Int32(MOST_HEADS) if (choose != BY_SHAPES) & (inner == 0) else Int32(BLOCKS[slabs])
            items = cutlass.min(hv * chains, most)
        self.kernel.set_name_prefix(self.key.symbol(), remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            tma_q, gQ, tma_k, gK, tma_v, gV, tma_out, gOut, mPool, mReadIds, mWriteIds, mCuSeqlens, mKeptCu, mKeptEnds,
            mKeptSlots, mOut, mWork, mRecords, hk, hv, num_slots, has_checkpoints, min_tokens, long_rows, long_length, parts,
            lead, inner, choose, read_mma, token_mma, update_mma, input_layout, value_layout, pair_layout,
        ).launch(
            grid=[(3 - slabs) * items, 1, 1],
            block=[self.threads, 1, 1],
            cluster=[2, 1, 1] if slabs == 1 else None,
            max_number_threads=[self.threads, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        tma_q: cute.CopyAtom,
        gQ: cute.Tensor,
        tma_k: cute.CopyAtom,
        gK: cute.Tensor,
        tma_v: cute.CopyAtom,
        gV: cute.Tensor,
        tma_out: cute.CopyAtom,
        gOut: cute.Tensor,
        mPool: cute.Tensor,
        mReadIds: cute.Tensor,
        mWriteIds: cute.Tensor,
        mCuSeqlens: cute.Tensor,
        mKeptCu: cute.Tensor,
        mKeptEnds: cute.Tensor,
        mKeptSlots: cute.Tensor,
        mOut: cute.Tensor,
        mWork: cute.Tensor,
        mRecords: cute.Tensor,
        hk: Int32,
        hv: Int32,
        num_slots: Int32,
        has_checkpoints: Int32,
        min_tokens: Int32,
        long_rows: Int32,
        long_length: Int32,
        parts: Int32,
        lead: Int32,
        inner: Int32,
        choose: Int32,
        read_mma: cute.TiledMma,
        token_mma: cute.TiledMma,
        update_mma: cute.TiledMma,
        input_layout: cute.ComposedLayout,
        value_layout: cute.ComposedLayout,
        pair_layout: cute.ComposedLayout,
    ):
        slabs = self.slabs
        tidx, _, _ = cute.arch.thread_idx()
        item, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        if choose != BY_SHAPES:
            join()
            halves, chains = takes_halves(mCuSeqlens, min_tokens, hv, tidx % 32)
            idle = (choose == OR_ONE_LAUNCH) & (halves == 0)
            if cutlass.const_expr(not self.transition):
                other_form = (halves != 0) != (slabs == 1)
                idle = idle | ((inner == 0) & (other_form | (item // (3 - slabs) >= chains * hv)))
            leave_idle(idle, item)
        if (inner != 0) | self.transition:
            join()
            found = count_long_rows(mCuSeqlens, cute.size(mReadIds), long_length, tidx % 32)
            items = hv * found * (2 * parts - 4 if self.transition else parts - 1)
            other_form = (inner == CHOSEN) & ((items <= BLOCKS[1]) != (slabs == 1))
            leave_idle((item // (3 - slabs) >= items) | other_form, item)
            inner = cutlass.min(inner, 1)
        storage = cutlass.utils.SmemAllocator().allocate(self.storage)
        sK = storage.sK.get_tensor(input_layout.outer, swizzle=input_layout.inner)
        sQ = storage.sQ.get_tensor(input_layout.outer, swizzle=input_layout.inner)
        sV = storage.sV.get_tensor(value_layout.outer, swizzle=value_layout.inner)
        sT = storage.sT.get_tensor(pair_layout.outer, swizzle=pair_layout.inner)
        sP = storage.sP.get_tensor(pair_layout.outer, swizzle=pair_layout.inner)
        shared = self.bundle(storage)
        if tidx == 0:
            for ring in shared.rings:
                ring.initialise()
            cute.arch.mbarrier_init_fence()
            join()
        cute.arch.sync_threads()
        if inner != 0:  # start states are in the workspace
            cute.arch.griddepcontrol_wait()
        # Beside first chains it is found what inner segments do to a state, beside the last launch short rows run.
        cute.arch.griddepcontrol_launch_dependents()
        warp = cute.arch.make_warp_uniform(tidx // 32)
        lane = tidx % 32
        group = cute.arch.make_warp_uniform(tidx // 128)
        slab = Int32(0)  # of the block's first state warpgroup
        if cutlass.const_expr(slabs == 1):
            slab, item = item % 2, item // 2
        state, data = REGISTERS[slabs]
        if group < slabs:
            cute.arch.setmaxregister_increase(state)
            self.run_state(
                shared, tidx, warp % 4, lane, group if slabs == 2 else 0, slab, mPool, mWork, num_slots, sK, sQ, sT, sP,
                read_mma, token_mma, update_mma,
            )  # fmt: skip
        else:
            cute.arch.setmaxregister_decrease(data)
            place = warp - 4 * slabs
            if place == 0:
                run_ends(shared, lane)
            elif place == 1:
                self.run_producer(
                    shared, item, blocks // (3 - slabs), 64 * slab, lane, tma_q, gQ, tma_k, gK, tma_v, gV, sQ, sK, sV, mPool,
                    mReadIds, mWriteIds, mCuSeqlens, mKeptCu, mKeptEnds, mKeptSlots, mRecords, hk, hv, num_slots,
                    has_checkpoints, min_tokens, long_rows, long_length, parts, lead, inner,
                )  # fmt: skip
            elif place == 2:
                if cutlass.const_expr(not self.transition):
                    run_output(shared, lane, tma_out, gOut, sV, mOut)
            elif place >= 4:
                if cutlass.const_expr(self.staged_words > 0):
                    run_keeper(shared, mPool, num_slots, 64 * slab, 16 * (place - 4), lane)
        if (item == 0) & (slab == 0):  # the longest chain's; others give their multiprocessors up
            leave()

    def bundle(self, storage):
        """Barriers and shared addresses of the block. Arrivals are one per warp, or one for a bulk load."""
        barriers = storage.barriers.data_ptr()
        rings, used = [], 0
        state, value_stages = 4 * self.slabs, VALUE_STAGES[self.slabs]
        for stages, producers, consumers in (
            (INPUT_STAGES, 1, state),  # K, Q, vectors, chunk record; T', P of half a head
            (WORK_STAGES, self.slabs, state),  # rows beyond the end zeroed; T', P of a whole head
            (value_stages, 1, state if self.transition else 1),  # V, empty when its output has gone
            (value_stages, state, 1),  # output, full only
            (1, state, KEEPERS),  # a state to keep
        ):
            rings.append(Ring(barriers + used, stages, producers, consumers))
            used += 2 * stages
        inputs, ready, v, output, keep = rings
        return Bundle(
            slabs=self.slabs, value_bytes=self.value_bytes,
            rings=rings, inputs=inputs, ready=ready, v=v, output=output, keep=keep,
            records=storage.records.data_ptr().toint(),
            outputs=storage.outputs.data_ptr().toint(),
            vector_base=storage.vectors.data_ptr().toint(),
            k_base=storage.sK.data_ptr().toint(),
            v_base=storage.sV.data_ptr().toint(),
            t_base=storage.sT.data_ptr().toint(),
            p_base=storage.sP.data_ptr().toint(),
            kept=storage.kept.data_ptr().toint(), note=storage.note.data_ptr().toint(),
        )  # fmt: skip

    @cute.jit
    def run_producer(
        self, shared, item, step, first, lane, tma_q, gQ, tma_k, gK, tma_v, gV, sQ, sK, sV, mPool, mReadIds, mWriteIds,
        mCuSeqlens, mKeptCu, mKeptEnds, mKeptSlots, mRecords, hk, hv, num_slots, has_checkpoints, min_tokens, long_rows,
        long_length, parts, lead, inner,
    ):  # fmt: skip
        """Walk the block's items, one of every `step`, and the chunk list of each: chunk records and loads.

        `first` is the block's first V column of its head.
        """
        stage, parity, work, work_parity = Int32(0), Int32(0), Int32(0), Int32(0)
        stage_v, parity_v = Int32(0), Int32(0)
        length_class, base, seen = Int32(0), Int32(0), Int32(0)
        each, others, first_place = 2 * parts - 4, 0, 1
        if cutlass.const_expr(not self.transition):
            long_length = long_length if long_rows > 0 else Int32(WORK_LIMIT)
            each, others, first_place = (parts - 1 if inner != 0 else Int32(1)), 1 - inner, inner
        chunk_slots = cute.size(mRecords, mode=[0]) // hv
        # Items are dealt out as in `kernels/gdn_prefill.py`.
        turn, mirrored = Int32(0), step - 1 - item
        sequence = Int32(0)
        while sequence >= 0:
            dealt = turn * step + (item if turn % 2 == 0 else mirrored)
            sequence, place, length_class, base, seen = next_row(
                dealt // hv, mCuSeqlens, cute.size(mReadIds), min_tokens, long_length, parts, length_class, base, seen, lane,
                each, others,
            )  # fmt: skip
            flags, position, stop, read, write, last_flag = (Int32(int(Flag.STOP)), *(Int32(0) for _ in range(5)))
            if sequence >= 0:
                flags, position, stop, read, write, last_flag = find_work(
                    sequence, place + first_place, lane, mReadIds, mWriteIds, mCuSeqlens, long_length, parts,
                    lead, self.transition, True,
                )  # fmt: skip
            turn += 1
            head = dealt % hv
            entry, entry_end, start, slot = Int32(0), Int32(0), Int32(0), Int32(0)
            if (flags & Flag.STOP) == 0:
                if (flags & Flag.WORKSPACE) == 0:
                    prefetch_state(mPool, read, num_slots, head, first, self.width)
                start = mCuSeqlens[sequence]
                slot, entry, entry_end = place_of_position(
                    mCuSeqlens, mKeptCu, mKeptEnds, mKeptSlots, num_slots, has_checkpoints, sequence, position, lane
                )
            k_column = head // (hv // hk) * HEAD
            ready, known = record_address(mRecords, 0, hv, head) + FLAG_OFFSET, slot
            while (flags & Flag.STOP) == 0:
                end, kept, entry = next_chunk(position, stop, entry, entry_end, mKeptEnds, mKeptSlots, num_slots)
                token = start + position
                count = end - position
                last = end == stop
                flags = flags | last_flag if last else flags
                source = record_address(mRecords, slot, hv, head)
                shared.inputs.wait_empty(stage, parity)
                with cute.arch.elect_one():
                    write_record(shared.records, stage, [token, count, flags, head, read, write, kept, sequence])
                full = shared.inputs.full + stage
                shared.inputs.expect(stage, self.input_bytes + (self.pair_bytes if self.pairs_with_inputs else 0))
                load_tile(tma_k, gK, sK, token, k_column, stage, full)
                # Of a record that is waited for, the rest is on its way before.
                late = slot >= known
                if not late:
                    self.load_record(shared, source, stage, full)
                if cutlass.const_expr(not self.transition):
                    load_tile(tma_q, gQ, sQ, token, k_column, stage, full)
                self.load_v(shared, tma_v, gV, sV, token, head * HEAD + first, count, flags, stage_v, parity_v)
                if late:
                    known = published(ready, hv * RECORD_BYTES, slot, chunk_slots, lane)
                    self.load_record(shared, source, stage, full)
                stage_v, parity_v = advance(stage_v, parity_v, self.value_stages)
                # What is freed last is loaded last: T', P of a whole head have one stage less than K, Q and V.
                if cutlass.const_expr(not self.pairs_with_inputs):
                    shared.ready.wait_empty(work, work_parity)
                    shared.ready.expect(work, self.pair_bytes)
                    self.load_pairs(shared, source, work, shared.ready.full + work)
                    work, work_parity = advance(work, work_parity, WORK_STAGES)
                stage, parity = advance(stage, parity, self.stages)
                position = end
                slot += 1
                flags = Int32(int(Flag.STOP)) if last else flags & Flag.IDENTITY
        shared.v.wait_empty(stage_v, parity_v)
        shared.inputs.wait_empty(stage, parity)
        if cutlass.const_expr(not self.pairs_with_inputs):
            shared.ready.wait_empty(work, work_parity)
            shared.ready.publish(work)
        with cute.arch.elect_one():
            if cutlass.const_expr(self.notes_outputs):
                store_shared(shared.outputs + stage_v * 16, Int32(0), Int32(0), Int32(-1), Int32(0))
            write_record(shared.records, stage, [Int32(0), Int32(0), Int32(int(Flag.STOP)), *[Int32(-1)] * 5])
        shared.inputs.publish(stage)

    @cute.jit
    def load_v(self, shared, tma_v, gV, sV, token, column, count, flags, stage, parity):
        """Load a V tile, which chains from the identity do without, once its stage is free, and note where its output goes."""
        shared.v.wait_empty(stage, parity)
        with cute.arch.elect_one():
            store_shared(shared.outputs + stage * 16, token, column, count, Int32(0))
        if (flags & Flag.IDENTITY) != 0:
            shared.v.publish(stage)
        else:
            shared.v.expect(stage, self.value_bytes)
            load_tile(tma_v, gV, sV, token, column, stage, shared.v.full + stage, self.width)

    def load_record(self, shared, source, stage, full):
        """Start the loads of a record's vectors, and of T' and P where they come with K and Q, into a stage of inputs."""
        vector = shared.vector_base + stage * VECTOR_BYTES + KEPT_VECTOR
        bulk_load(vector, source + VECTOR_OFFSET, KEPT_BYTES, full)
        if self.pairs_with_inputs:
            self.load_pairs(shared, source, stage, full)

    def load_pairs(self, shared, source, stage, full):
        """Start the loads of T' and P of a record into a stage."""
        bulk_load(shared.t_base + stage * TILE_BYTES, source, TILE_BYTES, full)
        if not self.transition:
            bulk_load(shared.p_base + stage * TILE_BYTES, source + P_OFFSET, TILE_BYTES, full)

    @cute.jit
    def run_state(
        self, shared, tidx, warp, lane, group, slab, mPool, mWork, num_slots, sK, sQ, sT, sP, read_mma, token_mma, update_mma
    ):  # fmt: skip
        """The serial chain: one slab of S across all chunks of the block."""
        by_read, by_token, by_update = (mma.get_slice(tidx) for mma in (read_mma, token_mma, update_mma))
        swapped = cute.make_tensor(sK.iterator, cute.select(sK.layout, [1, 0, 2]))
        right_k = read_mma.make_fragment_B(by_read.partition_B(sK))
        right_q = read_mma.make_fragment_B(by_read.partition_B(sQ))
        right_t = token_mma.make_fragment_B(by_token.partition_B(sT))
        right_p = token_mma.make_fragment_B(by_token.partition_B(sP))
        right_u = update_mma.make_fragment_B(by_update.partition_B(swapped))
        read_shape = by_read.partition_shape_A((self.slabs * 64, HEAD))
        token_shape = by_token.partition_shape_A((self.slabs * 64, CHUNK))
        S = cute.make_rmem_tensor(by_update.partition_shape_C((self.slabs * 64, HEAD)), Float32)
        Y = cute.make_rmem_tensor(by_read.partition_shape_C((self.slabs * 64, CHUNK)), Float32)
        O = cute.make_rmem_tensor(by_read.partition_shape_C((self.slabs * 64, CHUNK)), Float32)
        row = (slab + group) * 64 + warp * 16 + (lane >> 2)
        own_values = shared.v_base + group * TILE_BYTES
        column = 2 * (lane & 3)
        stage, work, work_parity = Int32(0), Int32(0), Int32(0)
        stage_v, parity_v = Int32(0), Int32(0)
        S.fill(0.0)
        values, factors = (cute.make_rmem_tensor(cute.make_layout(16), dtype) for dtype in (Uint32, Float32))
        values.fill(0)
        factors.fill(0.0)
        shared.ready.wait_full(work, work_parity)
        record = read_record(shared.records, stage)
        found, kept_parity = Int32(0), Int32(0)  # V and its factors are in registers
        while (record[Field.FLAGS] & Flag.STOP) == 0:
            flags, head = record[Field.FLAGS], record[Field.HEAD]
            vector = shared.vector_base + stage * VECTOR_BYTES
            tile = own_values + stage_v * self.value_bytes
            pair = stage if cutlass.const_expr(self.slabs == 1) else work
            if ((flags & Flag.FIRST) != 0) | (found == 0):
                if (flags & Flag.FIRST) != 0:
                    start_state(S, mPool, mWork, record, num_slots, row, column, self.transition)
                if found == 0:
                    shared.v.wait_full(stage_v, parity_v)
                    find_values(values, factors, tile, vector + X_FACTOR, warp, lane)
            left_s = as_left_operand(S, read_shape, BFloat16)
            warpgroup.fence()
            contract(read_mma, Y, left_s, right_k, stage, HEAD // 16, False)
            warpgroup.commit_group()
            if cutlass.const_expr(not self.transition):
                contract(read_mma, O, left_s, right_q, stage, HEAD // 32, False)
                warpgroup.commit_group()
            warpgroup.wait_group(0 if self.transition else 1)
            subtract(Y, values, factors, (flags & Flag.IDENTITY) != 0, self.transition)
            left_x = as_left_operand(Y, token_shape, Float16)
            warpgroup.fence()
            V = token_halves()
            contract_triangle(token_mma, V, left_x, right_t, pair, False)
            warpgroup.commit_group()
            scale_state(S, load_shared(vector + DECAY, 1))
            rest = load_factors(vector + REST, lane)
            if cutlass.const_expr(not self.transition):
                contract(read_mma, O, left_s, right_q, stage, HEAD // 16, True, HEAD // 32)
                warpgroup.commit_group()
            warpgroup.wait_group(0 if self.transition else 1)
            left_w = scaled_halves_as_left_operand(V, rest, token_shape)
            warpgroup.fence()
            contract_half(update_mma, S, left_w, right_u, stage, 0)
            warpgroup.commit_group()
            if cutlass.const_expr(not self.transition):
                left_v = halves_as_left_operand(V, token_shape)
                warpgroup.wait_group(1)
                halves = token_halves()
                scale_into_halves(halves, O, vector + O_FACTOR, lane)
                warpgroup.fence()
                contract_triangle(token_mma, halves, left_v, right_p, pair, True)
                warpgroup.commit_group()
            contract_half(update_mma, S, left_w, right_u, stage, 1)
            warpgroup.commit_group()
            # The next chunk is looked for while the update runs, without a branch: where it is not there yet, this chunk's own
            # stages are read again.
            next_stage, _ = advance(stage, Int32(0), INPUT_STAGES)
            next_v, next_parity_v = advance(stage_v, parity_v, VALUE_STAGES[self.slabs])
            next_work, next_parity = advance(work, work_parity, WORK_STAGES)
            there = shared.ready.test_full(next_work, next_parity) & shared.v.test_full(next_v, next_parity_v)
            found = pick(there, Int32(1), Int32(0))
            seen, seen_v = pick(found != 0, next_stage, stage), pick(found != 0, next_v, stage_v)
            next_record = read_record(shared.records, seen)
            next_vector = shared.vector_base + seen * VECTOR_BYTES + X_FACTOR
            find_values(values, factors, own_values + seen_v * self.value_bytes, next_vector, warp, lane)
            if cutlass.const_expr(not self.transition):
                warpgroup.wait_group(1)
                store_output_tile(packed_halves(halves, pack_bf16), Int32(1), tile, warp, lane)
                shared.output.publish(stage_v)
            warpgroup.wait_group(0)
            shared.inputs.release(stage)
            shared.ready.release(work)
            if cutlass.const_expr(self.transition):
                shared.v.release(stage_v)
            ends = flags & (Flag.LAST | Flag.HANDS_ON)
            if (record[Field.CHECKPOINT] >= 0) | (ends != 0) | (found == 0):
                if cutlass.const_expr(self.transition):
                    if ends != 0:
                        store_state(S, mWork, record[Field.WRITE], Int32(WORK_LIMIT), head, row, column)
                else:
                    if (flags & Flag.HANDS_ON) != 0:
                        store_state(S, mWork, record[Field.WRITE], Int32(WORK_LIMIT), head, row, column)
                    kept, final = record[Field.CHECKPOINT], pick(ends == Flag.LAST, record[Field.WRITE], Int32(-1))
                    if cutlass.const_expr(self.staged_words > 0):
                        if kept >= 0:
                            kept_parity = stage_state(S, shared, kept_parity, mPool, kept, final, head, warp, lane)
                        else:
                            store_state(S, mPool, final, num_slots, head, row, column)
                    else:
                        store_state(S, mPool, final, num_slots, head, row, column)
                        store_state(S, mPool, kept, num_slots, head, row, column)
                if found == 0:
                    shared.ready.wait_full(next_work, next_parity)
                    next_record = read_record(shared.records, next_stage)
            stage, stage_v, parity_v = next_stage, next_v, next_parity_v
            work, work_parity, record = next_work, next_parity, next_record
        if cutlass.const_expr(not self.transition):
            shared.output.publish(stage_v)
        if cutlass.const_expr(self.staged_words > 0):
            end_stage(shared, kept_parity, warp, lane)


def build(key):
    """Compile one key."""
    state = Float32 if key.state_dtype == "float32" else BFloat16
    tokens, rows, entries = cute.sym_int(), cute.sym_int(), cute.sym_int()
    q, k, v, out = (fake_rows(BFloat16, tokens) for _ in range(4))
    cu, kept_cu = (fake_vector(Int32) for _ in range(2))
    return cute_compile(
        GdnRecurrence(key), q, k, v, fake_pool(state), fake_ids(rows, Int32), fake_ids(rows, Int32), cu, kept_cu,
        fake_vector(Int32, entries), fake_vector(Int32, entries), out, fake_pool(Float32),
        fake_matrix(Int32, columns=RECORD_BYTES // 4), *(Int32(1) for _ in range(11)), fake_stream(),
    )  # fmt: skip
