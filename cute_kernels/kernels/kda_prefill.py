"""Second of the two KDA prefill kernels: the recurrence over chunks, from the records that `kernels/kda_records.py` made.

One block per (sequence, value head), or two that share a head's V rows where few sequences leave multiprocessors idle. A
state warpgroup holds 64 V rows of S^T [128 V x 128 K] in fp32 accumulators; two in one block never meet, so both forms give
the same bits. Two warps load records and V tiles into rings: what a chunk needs first (KG, V) is freed early and is three
stages deep, the rest two. Two warps write finished output rows.

    X  = V^T - S KG^T      V' = X T'^T      S <- S e^(G_C) + V' KU      O = S_old QG^T + V' P^T

X is found as its negative, and the records hold the negative of T': no sign is changed in the loop.

A slot id outside the pool reads a zero state and stores nothing; in place and copy-on-write are the same code, because a block
loads its part of the state before it stores it, and nobody else touches that part.

Long rows in parts, as in `kernels/gdn_prefill.py`: a segment maps its start state to S A + N. The transition launch runs each
segment but the last from a zero state (the first from the true one) for N, and from the identity without values for A, with
neither queries nor outputs; `kernels/segment_states.py` composes them; the main launch then runs all segments at once. Records
are made once and serve both launches. What decides how a row is cut is its own length.

Where few blocks leave multiprocessors idle, the launch directly behind that of the records runs beside it
(`device/record_flags.py`): the warps that load a record wait for its flag.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from ..compile.cache import cute_compile
from ..compile.fake import fake_ids, fake_matrix, fake_pool, fake_rows, fake_stream, fake_vector
from ..configs.kda_prefill import KdaPrefillKey
from ..device.kda_chains import chain_of_block
from ..device.kda_layout import (
    IMAGE_BYTES,
    KU_OFFSET,
    P_OFFSET,
    QG_OFFSET,
    RECORD_BYTES,
    T_OFFSET,
    image_pieces,
)
from ..device.kda_loads import TAIL_BYTES, load_early, load_late
from ..device.kda_stage import decay_columns, staged_operand
from ..device.memory import store_vector
from ..device.prefill_layout import CHUNK, HEAD, OPERAND_BYTES, OUT_PITCH, TILE_BYTES
from ..device.prefill_state import (
    as_left_operand,
    clear_tokens,
    contract,
    identity_state,
    load_state,
    load_tile,
    negative_values,
    state_mma,
    store_output,
    store_state,
)
from ..device.prefill_sync import Ring, advance
from ..device.record_flags import join, leave
from ..device.state_io import row_ptr
from ..device.warp_ops import fragment_words, load_shared, pack_f16, store_shared

EARLY_STAGES = {1: 3, 2: 2}  # what fits with three late ones
LATE_STAGES = 3
TRANSITION_STAGES = 3
HALF_OUT_PITCH = 144  # of an output row of 64 values
WORK_LIMIT = 1 << 30  # every slot of the workspace is a slot
STATE_REGISTERS = {1: 248, 2: 224}
SERVICE_REGISTERS = {1: 56, 2: 40}


class KdaPrefill:
    def __init__(self, key: KdaPrefillKey):
        self.key, self.transition, self.columns = key, key.transition, 64 * key.slabs
        self.threads = 128 * (key.slabs + 1)
        self.early_pieces = ()  # beside KG and V
        self.early_bytes = OPERAND_BYTES + key.slabs * TILE_BYTES
        # A transition has no queries and no outputs: of a record's late part it needs KU and T' alone.
        self.late_first, late_end = (KU_OFFSET, P_OFFSET) if key.transition else (QG_OFFSET, IMAGE_BYTES)
        self.late_bytes = late_end - self.late_first
        self.late_pieces = image_pieces(self.late_first, late_end)
        self.triangles = late_end - T_OFFSET  # bytes of T', and of P
        self.early_stages = TRANSITION_STAGES if key.transition else EARLY_STAGES[key.slabs]
        self.late_stages = TRANSITION_STAGES if key.transition else LATE_STAGES
        self.out_pitch = OUT_PITCH if key.slabs == 2 else HALF_OUT_PITCH
        self.out_words, self.ones = (4, HEAD) if key.transition else (CHUNK * self.out_pitch // 4, 4)

    @cute.jit
    def __call__(
        self,
        mV: cute.Tensor,  # (T, HV * V) bf16
        mRecords: cute.Tensor,  # (slots * heads, RECORD_BYTES / 4) int32
        mFlags: cute.Tensor,  # (slots * heads,) int32, beside the launch that makes the records: which are there
        mTable: cute.Tensor,  # (slots of this launch, 4) int32: first token, count, start in the row, first entry
        mState: cute.Tensor,  # (S, HV * V * K)
        mReadIds: cute.Tensor,  # (N,) int32
        mWriteIds: cute.Tensor,  # (N,) int32
        mCu: cute.Tensor,  # (N + 1,) int32
        mEntryCu: cute.Tensor,  # (N + 1,) int32
        mEnds: cute.Tensor,  # (M,) int32
        mSlots: cute.Tensor,  # (M,) int32
        mOut: cute.Tensor,  # (T, HV * V) bf16
        mWork: cute.Tensor,  # (slots, HV * V * K) fp32, states of segments or, two, of rows between launches
        has_entries: Int32,  # whether mEntryCu, mEnds and mSlots hold checkpoints
        min_tokens: Int32,  # rows of fewer tokens are left alone
        first_chunk: Int32,  # slot of the table's first line
        carried: Int32,  # workspace slot of the state that enters this launch; one that leaves it goes to the other
        first_head: Int32,
        heads: Int32,
        long_rows: Int32,  # at most so many rows have `long_length` tokens or more and are cut into `parts` segments
        long_length: Int32,
        parts: Int32,
        stream,
    ):
        slabs = self.key.slabs
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        value_layout = cute.tile_to_shape(atom, (CHUNK, 64 * slabs), order=(0, 1))
        tma_v, gV = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), mV, value_layout, (CHUNK, 64 * slabs)
        )

        @cute.struct
        class Storage:
            early: cute.struct.Align[cute.struct.MemRange[Int32, self.early_stages * self.early_bytes // 4], 1024]
            late: cute.struct.Align[cute.struct.MemRange[Int32, self.late_stages * self.late_bytes // 4], 1024]
            tails: cute.struct.Align[cute.struct.MemRange[Int32, self.late_stages * TAIL_BYTES // 4], 16]
            output: cute.struct.Align[cute.struct.MemRange[Int32, self.out_words], 16]
            ones: cute.struct.Align[cute.struct.MemRange[Float32, self.ones], 16]
            barriers: cute.struct.MemRange[cutlass.Int64, 2 * (self.early_stages + self.late_stages + 1)]

        self.storage = Storage
        state = [
            state_mma(Float16, CHUNK, OperandMajorMode.K, slabs),
            state_mma(Float16, HEAD // 2, OperandMajorMode.MN, slabs),
        ]
        self.kernel.set_name_prefix(self.key.symbol(), remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            tma_v, gV, mRecords, mFlags, mTable, mState, mReadIds, mWriteIds, mCu, mEntryCu, mEnds, mSlots, mOut, mWork,
            has_entries, min_tokens, first_chunk, carried, first_head, heads, long_rows, long_length, parts, state[0], state[1],
            value_layout,
        ).launch(
            grid=[heads * (2 // slabs), self.items(cute.size(mReadIds, mode=[0]), long_rows, parts), 1],
            block=[self.threads, 1, 1],
            max_number_threads=[self.threads, 1, 1],
            min_blocks_per_mp=1,
            # The halves of a head start at once: a later one would read its records from memory again.
            cluster=[2, 1, 1] if slabs == 1 else None,
            stream=stream,
            use_pdl=self.key.overlapped,
        )  # fmt: skip

    def items(self, rows, long_rows, parts):
        """Blocks a head: one for each segment of a long row (in a transition launch, one for each state to find), one a row."""
        if self.key.transition:
            return long_rows * (2 * parts - 3)
        return long_rows * parts + rows

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
        mma_update: cute.TiledMma,
        value_layout: cute.ComposedLayout,
    ):
        slabs = self.key.slabs
        tidx, _, _ = cute.arch.thread_idx()
        part, item, _ = cute.arch.block_idx()
        across, down, _ = cute.arch.grid_dim()
        last = (part == across - 1) & (item == down - 1)
        local_head, first_slab = (part, Int32(0)) if const_expr(slabs == 2) else (part >> 1, part & 1)
        storage = cutlass.utils.SmemAllocator().allocate(self.storage)
        barriers = storage.barriers.data_ptr()
        early = Ring(barriers, self.early_stages, 1, 4 * slabs)
        late = Ring(barriers + 2 * self.early_stages, self.late_stages, 1, 4 * slabs)
        outputs = Ring(barriers + 2 * (self.early_stages + self.late_stages), 1, 4 * slabs, 2)
        if tidx == 0:
            if const_expr(self.key.overlapped):
                join()
            early.initialise()
            late.initialise()
            outputs.initialise()
            cute.arch.mbarrier_init_fence()
        if tidx < self.ones:
            store_shared(storage.ones.data_ptr().toint() + tidx * 4, Float32(1.0))
        # No copy writes the rows above the diagonals of T' and P.
        for at in cutlass.range(tidx * 16, self.late_stages * self.triangles, self.threads * 16, unroll=1):
            place = at // self.triangles * self.late_bytes + at % self.triangles + (T_OFFSET - self.late_first)
            store_shared(storage.late.data_ptr().toint() + place, *[Uint32(0)] * 4)
        cute.arch.fence_view_async_shared()
        cute.arch.griddepcontrol_launch_dependents()  # short rows of the call may run beside these, composition waits itself
        cute.arch.sync_threads()
        warp = cute.arch.make_warp_uniform(tidx // 32)
        lane = tidx % 32
        head = first_head + local_head
        row, segment, place, begin, end, read, write, work, leaving = chain_of_block(
            mReadIds, mWriteIds, mCu, mEntryCu, mEnds, cute.size(mTable, mode=[0]), item, has_entries, min_tokens, first_chunk,
            carried, long_rows, long_length, parts, lane, self.key.transition,
        )  # fmt: skip
        if place >= 0:  # else nothing is to be done: there are fewer long rows than there may be
            if warp < 4 * slabs:
                cute.arch.setmaxregister_increase(STATE_REGISTERS[slabs])
                self.state_role(
                    storage, early, late, outputs, mTable, mState, mWork, read, write, work, leaving, segment, mEntryCu, mEnds,
                    mSlots, mma, mma_update, begin, end, row, head, first_slab, tidx,
                )  # fmt: skip
            else:
                cute.arch.setmaxregister_decrease(SERVICE_REGISTERS[slabs])
                records = mRecords.iterator.toint() + Int64(local_head) * RECORD_BYTES
                flags = mFlags.iterator.toint() + Int64(local_head) * 4
                pitch = Int64(heads) * RECORD_BYTES
                column = head * HEAD + first_slab * 64
                if warp == 4 * slabs:
                    load_early(
                        self,
                        storage,
                        early,
                        tma_v,
                        gV,
                        records,
                        flags,
                        pitch,
                        mTable,
                        value_layout,
                        begin,
                        end,
                        column,
                        work,
                        lane,
                    )
                if warp == 4 * slabs + 1:
                    load_late(self, storage, late, records, flags, pitch, mTable, begin, end, lane)
                if const_expr(not self.key.transition):
                    if warp >= 4 * slabs + 2:
                        half = warp - (4 * slabs + 2)
                        self.output_role(storage, outputs, mTable, mOut, begin, end, column, half, lane)
        if const_expr(self.key.overlapped):
            if last:  # the others, those without work too, need not wait for the records of all
                leave()

    @cute.jit
    def output_role(
        self,
        storage,
        outputs,
        mTable: cute.Tensor,
        mOut: cute.Tensor,
        begin: Int32,
        end: Int32,
        column: Int32,
        half: Int32,
        lane: Int32,
    ):
        """One of two warps: 32 finished output rows of every chunk to global memory, rows of the sequence alone.

        Ordinary 16-byte accesses: a bulk store a row would go out one lane after the other, which takes longer than a chunk.
        """
        pieces = const_expr(8 * self.key.slabs)
        first = half * 32 + lane // pieces
        address = storage.output.data_ptr().toint() + first * self.out_pitch + lane % pieces * 16
        parity = Int32(0)
        for slot in cutlass.range(begin, end, unroll=1):
            token, count = Int32(mTable[slot, 0]), Int32(mTable[slot, 1])
            if count > 0:
                outputs.wait_full(0, parity)
                for group in cutlass.range_constexpr(pieces // 4):
                    at = [(4 * group + i) * (32 // pieces) for i in range(4)]
                    words = [load_shared(address + i * self.out_pitch, 4, Uint32) for i in at]
                    if const_expr(group == pieces // 4 - 1):
                        outputs.release(0)
                    for i in cutlass.range_constexpr(4):
                        row = first + at[i]
                        if row < count:
                            rX = cute.make_rmem_tensor(cute.make_layout(4), Uint32)
                            for e in cutlass.range_constexpr(4):
                                rX[e] = words[i][e]
                            target = row_ptr(mOut, token + row, column + lane % pieces * 8, 16)
                            store_vector(rX, cute.recast_ptr(target, dtype=Uint32), 4)
                parity = parity ^ 1

    @cute.jit
    def state_role(
        self,
        storage,
        early,
        late,
        outputs,
        mTable: cute.Tensor,
        mState: cute.Tensor,
        mWork: cute.Tensor,
        read: Int32,
        write: Int32,
        work: Int32,
        leaving: Int32,
        segment: Int32,
        mEntryCu: cute.Tensor,
        mEnds: cute.Tensor,
        mSlots: cute.Tensor,
        mma: cute.TiledMma,
        mma_update: cute.TiledMma,
        begin: Int32,
        end: Int32,
        row: Int32,
        head: Int32,
        first_slab: Int32,
        tidx: Int32,
    ):
        """One warpgroup: its slab of the state through all chunks of the row.

        At the top of the loop S is decayed for the chunk, A holds S before that decay, Y is S KG^T, V the values and the late
        stage has come.
        The output's products run where the chain has nothing for the tensor cores: behind X T'^T and behind the update.
        """
        slabs = self.key.slabs
        lane = tidx % 32
        # Through a shuffle, or the compiler computes it again in every chunk, from a special register that comes late.
        quad = cute.arch.shuffle_sync(lane & 3, lane)
        warp = cute.arch.make_warp_uniform(tidx // 32 % 4)
        slab = cute.arch.make_warp_uniform(tidx // 128)
        v_row = (first_slab + slab) * 64 + warp * 16 + lane // 4
        column = (lane & 3) * 2
        num_slots = cute.size(mState, mode=[0])
        output, early_base, late_base = (
            storage.output.data_ptr().toint(),
            storage.early.data_ptr(),
            storage.late.data_ptr(),
        )
        early_address, tails = early_base.toint() + OPERAND_BYTES + slab * TILE_BYTES, storage.tails.data_ptr().toint()

        tf, tu = mma.get_slice(tidx), mma_update.get_slice(tidx)
        kg = staged_operand(early_base, (CHUNK, HEAD), self.early_stages, self.early_bytes)
        late_part = [(offset, (CHUNK, CHUNK)) for offset in (KU_OFFSET, KU_OFFSET + TILE_BYTES, T_OFFSET)]
        if const_expr(not self.key.transition):
            late_part += [(QG_OFFSET, (CHUNK, HEAD)), (P_OFFSET, (CHUNK, CHUNK))]
        low, high, t, *queries = (
            staged_operand(
                late_base + (offset - self.late_first) // 4,
                shape,
                self.late_stages,
                self.late_bytes,
                offset >= T_OFFSET,
            )
            for offset, shape in late_part
        )
        transposed = [cute.make_tensor(x.iterator, cute.select(x.layout, [1, 0, 2])) for x in (low, high)]
        bKG, bT, *bQueries = (tf.make_fragment_B(tf.partition_B(x)) for x in (kg, t, *queries))
        bKU = [tu.make_fragment_B(tu.partition_B(x)) for x in transposed]
        left_rows = tf.partition_shape_A((64 * slabs, CHUNK))
        square = tf.partition_shape_C((64 * slabs, CHUNK))

        S = cute.make_rmem_tensor(tu.partition_shape_C((64 * slabs, HEAD)), Float32)
        part = cute.make_layout(square)
        parts = [cute.make_tensor(S.iterator + half * cute.size(part), part) for half in range(2)]
        Y = cute.make_rmem_tensor(square, Float32)
        O = cute.make_rmem_tensor(square, Float32)
        A = cute.make_rmem_tensor(tf.partition_shape_A((64 * slabs, HEAD)), Float16)
        kept = None
        if const_expr(self.key.transition):
            identity = (work & 1 == 1) & (work >= 0)
            kept = Uint32(0) if identity else Uint32(0xFFFFFFFF)
            load_state(S, mState, read, num_slots, head, v_row, column)
            if segment == 0:
                store_state(S, mWork, work + 1, Int32(WORK_LIMIT), head, v_row, column)
            if identity:
                identity_state(S, v_row, column)
        elif work >= 0:
            load_state(S, mWork, work, Int32(WORK_LIMIT), head, v_row, column)
        else:
            load_state(S, mState, read, num_slots, head, v_row, column)

        chunks = Int32(0)
        for start in cutlass.range(begin, end, 32, unroll=1):
            slot = start + lane
            inside = slot < end
            at = slot if inside else begin
            live = inside & (Int32(mTable[at, 1]) > 0)
            chunks += cute.arch.popc(cute.arch.vote_ballot_sync(live))

        stage, parity, place, late_parity, out_parity = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
        tail = tails
        if chunks > 0:
            early.wait_full(0, parity)
        negative_values(Y, load_tile(early_address, warp, lane), kept)
        self.round_state(S, A, 0)
        self.round_state(S, A, 1)
        warpgroup.fence()
        contract(mma, Y, A, bKG, stage, HEAD // 16, True)
        warpgroup.commit_group()
        if const_expr(self.key.transition):  # without queries A is not used again: see below
            warpgroup.wait_group(0)
        if chunks > 0:
            late.wait_full(0, late_parity)
            decay_columns(S, tail, quad)
        _, count, _, entry = load_shared(tail + 512, 4, Int32)
        warpgroup.wait_group(0)
        here = early.is_full(1, parity)
        for chunk in cutlass.range(chunks, unroll=1):
            if count < CHUNK:
                clear_tokens(Y, count, lane)
            early.release(stage)
            stage, parity = advance(stage, parity, self.early_stages)
            more = chunk + 1 < chunks
            # No branch stands between the issue of a product and its wait unless the left operand is used again behind it:
            # the compiler would give the operand's registers away in the branch while the product still reads them.
            following, following_parity = advance(place, late_parity, self.late_stages)
            if more:
                if not here:
                    early.wait_full(stage, parity)
                if const_expr(self.key.transition):
                    late.wait_full(following, following_parity)
            # Behind the last chunk these are of no chunk, and nothing is made of them.
            values = load_tile(early_address + stage * self.early_bytes, warp, lane)
            X = as_left_operand(Y, left_rows, Float16)
            warpgroup.fence()
            contract(mma, Y, X, bT, place, CHUNK // 16, False)
            warpgroup.commit_group()
            if const_expr(self.key.transition):
                warpgroup.wait_group(0)
            else:
                contract(mma, O, A, bQueries[0], place, HEAD // 16, False)
                warpgroup.commit_group()
                come = late.is_full(following, following_parity)
                warpgroup.wait_group(1)
            U = as_left_operand(Y, left_rows, Float16)
            warpgroup.fence()
            for half in cutlass.range_constexpr(2):
                contract(mma_update, parts[half], U, bKU[half], place, CHUNK // 16, True)
                warpgroup.commit_group()
            if const_expr(not self.key.transition):
                contract(mma, O, U, bQueries[1], place, CHUNK // 16, True)
                warpgroup.commit_group()
            negative_values(Y, values, kept)
            for half in cutlass.range_constexpr(2):
                warpgroup.wait_group(1 if self.key.transition else 2)
                if const_expr(self.key.transition and half == 1):
                    late.release(place)
                if const_expr(not self.key.transition and half == 0):
                    free = outputs.is_empty(0, out_parity)
                self.round_state(S, A, half)
                warpgroup.fence()
                contract(mma, Y, A, bKG, stage, (half + 1) * HEAD // 32, True, half * HEAD // 32)
                warpgroup.commit_group()
            if const_expr(not self.key.transition):
                warpgroup.wait_group(2)
                late.release(place)
                if not free:
                    outputs.wait_empty(0, out_parity)
                store_output(O, output, slab, warp, lane, self.out_pitch)
                outputs.publish(0)
                out_parity = out_parity ^ 1
                if entry >= 0:
                    self.store_checkpoints(
                        S, mState, mEnds, mSlots, entry, Int32(mEntryCu[row + 1]), num_slots, head, v_row, column
                    )
            place, late_parity = following, following_parity
            tail = tails + place * TAIL_BYTES
            if const_expr(self.key.transition):
                # No branch: the last chunk is followed by a decay of one.
                decay_columns(S, tail if more else storage.ones.data_ptr().toint(), quad)
            else:
                if more:
                    if not come:
                        late.wait_full(place, late_parity)
                    decay_columns(S, tail, quad)
            _, count, _, entry = load_shared(tail + 512, 4, Int32)
            ahead, ahead_parity = advance(stage, parity, self.early_stages)
            here = early.is_full(ahead, ahead_parity)
            warpgroup.wait_group(0)
        if const_expr(self.key.transition):
            store_state(S, mWork, work, Int32(WORK_LIMIT), head, v_row, column)
        else:
            store_state(S, mState, write, num_slots, head, v_row, column)
            store_state(S, mWork, leaving, Int32(WORK_LIMIT), head, v_row, column)

    def round_state(self, S, A, half):
        """Half of the state's columns rounded to the left operand A, which lives through the loop."""
        words = fragment_words(A)
        count = cute.size(words) // 2
        for i in range(half * count, (half + 1) * count):
            words[i] = pack_f16(S[2 * i], S[2 * i + 1])

    @cute.jit
    def store_checkpoints(
        self,
        S,
        mState: cute.Tensor,
        mEnds: cute.Tensor,
        mSlots: cute.Tensor,
        entry: Int32,
        entries_end: Int32,
        num_slots: Int32,
        head: Int32,
        v_row: Int32,
        column: Int32,
    ):
        """The state at the end of this chunk to the slots of all checkpoint entries that end here."""
        end = Int32(mEnds[entry])
        here = entry < entries_end
        while here:
            store_state(S, mState, Int32(mSlots[entry]), num_slots, head, v_row, column)
            entry += 1
            here = entry < entries_end
            if here:
                here = Int32(mEnds[entry]) == end


def build(key: KdaPrefillKey):
    """Compile one specialisation for sm_90a from fake tensors."""
    tokens, rows, bounds = cute.sym_int(), cute.sym_int(), cute.sym_int()
    entries = cute.sym_int()
    dtype = {"float32": Float32, "bfloat16": BFloat16}[key.state]
    return cute_compile(
        KdaPrefill(key),
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
