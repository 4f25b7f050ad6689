"""GDN prefill from records with V in the columns of each product, for calls of few heads.

As `kernels/gdn_recurrence.py`, bit for bit, but a block holds 16 V columns of a head, so that more multiprocessors share one,
and 64 tokens or channels are the rows of its products. One chunk, S [K, V] in accumulators (`device/column_state.py`):

    X = V - (K S) x a factor per token      fp16
    Z = T' X                                W in bf16, x a factor per token, and V' in fp16
    S <- decay S + K^T W
    O = (Q S) x a factor per token + P V'

    role      warps     work
    tokens    0-3       X, behind it half of Q S; Z, behind it the other half; P V' while the state takes W, and behind it the
                        next chunk's V and T' into registers; the output over the chunk's V tile
    state     4-11      64 channels of S each four: rounded to bf16 for the tokens, decayed, K^T W; states loaded and stored
    data      12-14     ends of short chunks, producer (`kernels/gdn_recurrence.py`), output rows

S, X, W and V' are right operands in shared memory; T' and K^T left ones in registers, loaded ahead of what they wait for. The
state and the tokens meet at two named barriers a chunk: S is there, which the tokens wait for, and W is there, with which S
has been read.

A chunk's inputs are one ring of stages, full by TMA and bulk loads for the warp of ends alone, which lets tokens and state at
them (*ready*). The state releases a stage behind its loads, the output warp when it has stored what the tokens have put over V.

Chains are rows that are not cut and first segments, so no state comes from the workspace. Arguments of the compiled function:
those of `kernels/gdn_recurrence.py` up to `lead`.
"""

import enum

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from ..compile.cache import cute_compile
from ..compile.fake import fake_ids, fake_matrix, fake_pool, fake_rows, fake_stream, fake_vector
from ..configs.gdn_records import COLUMNS, RECORD_BYTES
from ..configs.prefill import MULTIPROCESSORS
from ..device.column_state import (
    column_mma,
    column_tiles,
    contract_tiles,
    keep_rows,
    load_columns,
    load_value_words,
    rounded_pairs,
    store_column_tile,
    store_columns,
    value_layout,
)
from ..device.gdn_columns import contract_held, copy_rows, load_left_rows, load_left_turned, store_tile, store_values
from ..device.gdn_records import KEPT_BYTES, load_tile
from ..device.gdn_recurrence_state import WORK_LIMIT
from ..device.prefill_gdn_rows import DECAY, O_FACTOR, REST, VECTOR_BYTES, X_FACTOR, zero_rows
from ..device.prefill_layout import (
    CHUNK,
    HEAD,
    OPERAND_BYTES,
    RECORD_WORDS,
    TILE_BYTES,
    Field,
    Flag,
)
from ..device.prefill_state import scale_state, state_mma
from ..device.prefill_sync import Bundle, Ring, advance, read_record
from ..device.record_flags import join, leave
from ..device.warp_ops import load_shared, pack_bf16, pack_f16, pick, unpack_bf16
from .gdn_recurrence import GdnRecurrence

THREADS = 512
TOKENS, STATE = 4, 8  # warps
STAGES = 4  # of inputs
SHARES = HEAD // COLUMNS  # blocks of a head


class Meet(enum.IntEnum):
    """Named barriers; 0 is `sync_threads`."""

    S_THERE = 1
    STORED = 2  # X or V', of the tokens' warps alone
    W_THERE = 3


THREADS_AT = {
    Meet.S_THERE: 32 * (STATE + TOKENS),
    Meet.STORED: 32 * TOKENS,
    Meet.W_THERE: 32 * (STATE + TOKENS),
}


def meet(barrier):
    """Wait at a named barrier until all of its threads have come."""
    cute.arch.barrier(barrier_id=int(barrier), number_of_threads=THREADS_AT[barrier])


def pass_on(barrier):
    """Come to a named barrier without a wait."""
    cute.arch.barrier_arrive(barrier_id=int(barrier), number_of_threads=THREADS_AT[barrier])


def pass_state_on(S, tile, warp, lane):
    """Let the tokens at the rounded state. Theirs is the proxy fence: those of eight warps would wait for each other."""
    store_column_tile(rounded_pairs(S, pack_bf16), tile, warp, lane)
    pass_on(Meet.S_THERE)


class GdnColumns(GdnRecurrence):
    """The kernel of one key."""

    def __init__(self, key):
        self.key, self.transition = key, False
        self.stages, self.width, self.value_stages, self.pairs_with_inputs = STAGES, COLUMNS, STAGES, True
        self.value_bytes = CHUNK * COLUMNS * 2
        self.input_bytes = 2 * OPERAND_BYTES + self.value_bytes + KEPT_BYTES
        self.pair_bytes = 2 * TILE_BYTES
        self.notes_outputs, self.staged_words = False, 0

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
        stream,
    ):
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        input_layout = cute.tile_to_shape(atom, (CHUNK, HEAD, STAGES), order=(0, 1, 2))
        h_atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, Float16)
        pair_layout = cute.tile_to_shape(h_atom, (CHUNK, CHUNK, STAGES), order=(0, 1, 2))
        one_value = value_layout(COLUMNS)
        values = cute.make_composed_layout(
            one_value.inner, 0, cute.append(one_value.outer, cute.make_layout(STAGES, stride=CHUNK * COLUMNS))
        )
        box = cute.slice_(input_layout, (None, None, 0))
        load = cpasync.CopyBulkTensorTileG2SOp()
        tma_q, gQ = cpasync.make_tiled_tma_atom(load, mQ, box, (CHUNK, HEAD))
        tma_k, gK = cpasync.make_tiled_tma_atom(load, mK, box, (CHUNK, HEAD))
        tma_v, gV = cpasync.make_tiled_tma_atom(load, mV, one_value, (CHUNK, COLUMNS))
        tma_out, gOut = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), mOut, one_value, (CHUNK, COLUMNS)
        )

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[cutlass.Int64, 6 * STAGES]
            records: cute.struct.Align[cute.struct.MemRange[Int32, STAGES * RECORD_WORDS], 16]
            vectors: cute.struct.Align[cute.struct.MemRange[Float32, STAGES * VECTOR_BYTES // 4], 128]
            sK: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(input_layout)], 1024]
            sQ: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(input_layout)], 1024]
            sV: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(values)], 1024]
            sT: cute.struct.Align[cute.struct.MemRange[Float16, STAGES * CHUNK * CHUNK], 1024]
            sP: cute.struct.Align[cute.struct.MemRange[Float16, STAGES * CHUNK * CHUNK], 1024]
            sS: cute.struct.Align[cute.struct.MemRange[BFloat16, COLUMNS * HEAD], 1024]
            sX: cute.struct.Align[cute.struct.MemRange[Float16, COLUMNS * CHUNK], 1024]
            sW: cute.struct.Align[cute.struct.MemRange[BFloat16, COLUMNS * CHUNK], 1024]
            sZ: cute.struct.Align[cute.struct.MemRange[Float16, COLUMNS * CHUNK], 1024]

        self.storage = Storage
        self.kernel.set_name_prefix(self.key.symbol(), remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            tma_q, gQ, tma_k, gK, tma_v, gV, tma_out, gOut, mPool, mReadIds, mWriteIds, mCuSeqlens, mKeptCu, mKeptEnds,
            mKeptSlots, mOut, mWork, mRecords, hk, hv, num_slots, has_checkpoints, min_tokens, long_rows, long_length, parts,
            lead, input_layout, values, pair_layout,
        ).launch(
            grid=[SHARES * cutlass.min(hv * cute.size(mReadIds), Int32(MULTIPROCESSORS // SHARES)), 1, 1],
            block=[THREADS, 1, 1],
            max_number_threads=[THREADS, 1, 1],
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
        input_layout: cute.ComposedLayout,
        values: cute.ComposedLayout,
        pair_layout: cute.ComposedLayout,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        storage = cutlass.utils.SmemAllocator().allocate(self.storage)
        sK = storage.sK.get_tensor(input_layout.outer, swizzle=input_layout.inner)
        sQ = storage.sQ.get_tensor(input_layout.outer, swizzle=input_layout.inner)
        sV = storage.sV.get_tensor(values.outer, swizzle=values.inner)
        sP = storage.sP.get_tensor(pair_layout.outer, swizzle=pair_layout.inner)
        shared = self.bundle(storage)
        if tidx == 0:
            for ring in shared.rings:
                ring.initialise()
            cute.arch.mbarrier_init_fence()
            join()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_launch_dependents()
        warp = cute.arch.make_warp_uniform(tidx // 32)
        lane = tidx % 32
        first = COLUMNS * (block % SHARES)
        right_s = column_tiles(storage.sS.data_ptr(), COLUMNS, HEAD, BFloat16)
        right_x, right_z = (column_tiles(x.data_ptr(), COLUMNS, CHUNK) for x in (storage.sX, storage.sZ))
        right_w = column_tiles(storage.sW.data_ptr(), COLUMNS, CHUNK, BFloat16)
        if warp < TOKENS:
            self.run_tokens(shared, warp, lane, right_s, right_x, right_z, sK, sQ, sP)
        elif warp < TOKENS + STATE:
            self.run_state(shared, warp - TOKENS, lane, first, mPool, mWork, num_slots, right_w)
        elif warp == TOKENS + STATE:
            self.run_ends(shared, lane)
        elif warp == TOKENS + STATE + 1:
            self.run_producer(
                shared, block // SHARES, blocks // SHARES, first, lane, tma_q, gQ, tma_k, gK, tma_v, gV, sQ, sK, sV, mPool,
                mReadIds, mWriteIds, mCuSeqlens, mKeptCu, mKeptEnds, mKeptSlots, mRecords, hk, hv, num_slots,
                has_checkpoints, min_tokens, long_rows, long_length, parts, lead, Int32(0),
            )  # fmt: skip
        elif warp == TOKENS + STATE + 2:
            self.run_output(shared, lane, first, tma_out, gOut, sV, mOut)
        leave()

    def bundle(self, storage):
        """Barriers and shared addresses of the block. Arrivals are one per warp, or one for a bulk load."""
        barriers = storage.barriers.data_ptr()
        # K, Q, V, T', P, vectors, chunk record; the same with rows beyond the end zeroed; output over V. The latter two are full
        # only: what is behind them releases the inputs.
        inputs = Ring(barriers, STAGES, 1, STATE + 1)
        ready, output = (Ring(barriers + 2 * i * STAGES, STAGES, n, 1) for i, n in ((1, 1), (2, TOKENS)))
        parts = ("records", "vectors", "sK", "sV", "sT", "sP", "sS", "sX", "sW", "sZ")
        names = ("records", "vector_base", "k_base", "v_base", "t_base", "p_base", "s", "x", "w", "z")
        addresses = {name: getattr(storage, part).data_ptr().toint() for name, part in zip(names, parts)}
        rings = (inputs, ready, output)
        return Bundle(rings=rings, inputs=inputs, ready=ready, output=output, v=inputs, **addresses)

    def load_v(self, shared, tma_v, gV, sV, token, column, count, flags, stage, parity):
        """V comes with the other inputs."""
        load_tile(tma_v, gV, sV, token, column, stage, shared.inputs.full + stage, self.width)

    @cute.jit
    def run_ends(self, shared, lane):
        """Zero rows of a short chunk beyond its end in K, then let the others at the chunk; by one warp."""
        stage, parity = Int32(0), Int32(0)
        shared.inputs.wait_full(stage, parity)
        record = read_record(shared.records, stage)
        while (record[Field.FLAGS] & Flag.STOP) == 0:
            count = record[Field.COUNT]
            if count < CHUNK:
                for part in cutlass.range(4, unroll=1):
                    zero_rows(shared.k_base + stage * OPERAND_BYTES, 16 * part, 16, count, lane)
            shared.ready.publish(stage)
            stage, parity = advance(stage, parity, STAGES)
            shared.inputs.wait_full(stage, parity)
            record = read_record(shared.records, stage)
        shared.ready.publish(stage)

    def products(self):
        """Tiled products of bf16 and fp16, 64 rows from registers."""
        return [state_mma(dtype, COLUMNS, OperandMajorMode.K, 1) for dtype in (BFloat16, Float16)]

    @cute.jit
    def run_tokens(self, shared, warp, lane, right_s, right_x, right_z, sK, sQ, sP):
        """X, W and the output of every chunk."""
        octets = COLUMNS // 8
        by_bf16, by_f16 = self.products()
        own_bf16, own_f16 = by_bf16.get_slice(0), by_f16.get_slice(0)
        right_s = by_bf16.make_fragment_B(own_bf16.partition_B(right_s))
        right_x, right_z = (by_f16.make_fragment_B(own_f16.partition_B(x)) for x in (right_x, right_z))
        shared_bf16, shared_f16 = (column_mma(x, COLUMNS) for x in (BFloat16, Float16))
        left_k, left_q = (shared_bf16.make_fragment_A(shared_bf16.get_slice(0).partition_A(x)) for x in (sK, sQ))
        left_p = shared_f16.make_fragment_A(shared_f16.get_slice(0).partition_A(sP))
        T = cute.make_rmem_tensor(own_f16.partition_shape_A((CHUNK, CHUNK)), Float16)
        shape = own_bf16.partition_shape_C((CHUNK, COLUMNS))
        Y, Z, Q, O = (cute.make_rmem_tensor(shape, Float32) for _ in range(4))
        values = cute.make_rmem_tensor(cute.make_layout(2 * octets), Uint32)
        factors = cute.make_rmem_tensor(cute.make_layout(2), Float32)
        T.fill(0.0)
        values.fill(0)
        factors.fill(0.0)
        row = 16 * warp + (lane >> 2)  # the thread's first token; the other one is 8 behind
        stage, parity = Int32(0), Int32(0)
        shared.ready.wait_full(stage, parity)
        record = read_record(shared.records, stage)
        found = Int32(0)  # V and T' are in registers
        while (record[Field.FLAGS] & Flag.STOP) == 0:
            if found == 0:
                self.load_ahead(shared, values, factors, T, stage, record[Field.COUNT], row, warp, lane)
            meet(Meet.S_THERE)
            cute.arch.fence_view_async_shared()
            warpgroup.fence()
            contract_tiles(shared_bf16, Y, left_k, stage, right_s, False)
            warpgroup.commit_group()
            contract_tiles(shared_bf16, Q, left_q, stage, right_s, False, range(4))
            warpgroup.commit_group()
            vector = shared.vector_base + stage * VECTOR_BYTES + 4 * row
            rest = [load_shared(vector + REST + 32 * r, 1) for r in range(2)]
            o_factors = [load_shared(vector + O_FACTOR + 32 * r, 1) for r in range(2)]
            warpgroup.wait_group(1)
            words = []
            for i in cutlass.range_constexpr(2 * octets):
                v = unpack_bf16(values[i])
                words.append(pack_f16(v[0] - factors[i % 2] * Y[2 * i], v[1] - factors[i % 2] * Y[2 * i + 1]))
            store_column_tile(words, shared.x, warp, lane)
            cute.arch.fence_view_async_shared()
            meet(Meet.STORED)
            warpgroup.fence()
            contract_held(by_f16, Z, T, right_x, False)
            warpgroup.commit_group()
            contract_tiles(shared_bf16, Q, left_q, stage, right_s, True, range(4, 8))
            warpgroup.commit_group()
            warpgroup.wait_group(1)
            words = [pack_bf16(Z[2 * i] * rest[i % 2], Z[2 * i + 1] * rest[i % 2]) for i in range(2 * octets)]
            store_column_tile(words, shared.w, warp, lane)
            cute.arch.fence_view_async_shared()
            warpgroup.wait_group(0)  # S has been read
            pass_on(Meet.W_THERE)
            store_column_tile(rounded_pairs(Z, pack_f16), shared.z, warp, lane)
            cute.arch.fence_view_async_shared()
            for i in cutlass.range_constexpr(4 * octets):
                O[i] = Q[i] * o_factors[i // 2 % 2]
            meet(Meet.STORED)
            warpgroup.fence()
            contract_tiles(shared_f16, O, left_p, stage, right_z, True)
            warpgroup.commit_group()
            # The next chunk is looked for while the product runs, without a branch: where it is not there yet, this chunk's own
            # stage is read again.
            next_stage, next_parity = advance(stage, parity, STAGES)
            found = pick(shared.ready.test_full(next_stage, next_parity), Int32(1), Int32(0))
            seen = pick(found != 0, next_stage, stage)
            next_record = read_record(shared.records, seen)
            self.load_ahead(shared, values, factors, T, seen, next_record[Field.COUNT], row, warp, lane)
            warpgroup.wait_group(0)
            store_values(rounded_pairs(O, pack_bf16), shared.v_base + stage * self.value_bytes, warp, lane)
            shared.output.publish(stage)
            if found == 0:
                shared.ready.wait_full(next_stage, next_parity)
                next_record = read_record(shared.records, next_stage)
            stage, parity, record = next_stage, next_parity, next_record
        shared.output.publish(stage)

    def load_ahead(self, shared, values, factors, T, stage, count, row, warp, lane):
        """What X and Z take from registers: T', V, zero beyond the chunk's end, and the factors of the thread's tokens."""
        load_left_rows(T, shared.t_base + stage * TILE_BYTES, warp, lane)
        words = load_value_words(shared.v_base + stage * self.value_bytes, COLUMNS, warp, lane)
        for i, word in enumerate(keep_rows(words, row, count)):
            values[i] = word
        vector = shared.vector_base + stage * VECTOR_BYTES + X_FACTOR + 4 * row
        factors[0], factors[1] = load_shared(vector, 1), load_shared(vector + 32, 1)

    @cute.jit
    def run_state(self, shared, warp, lane, first, mPool, mWork, num_slots, right_w):
        """64 channels of S, the block's columns from `first` on, across all chunks of the block."""
        by_bf16, _ = self.products()
        own = by_bf16.get_slice(0)
        right_w = by_bf16.make_fragment_B(own.partition_B(right_w))
        K = cute.make_rmem_tensor(own.partition_shape_A((CHUNK, CHUNK)), BFloat16)
        S = cute.make_rmem_tensor(own.partition_shape_C((CHUNK, COLUMNS)), Float32)
        S.fill(0.0)
        group = cute.arch.make_warp_uniform(warp // 4)
        channel, column = 16 * warp + (lane >> 2), first + 2 * (lane & 3)
        tile, warp = shared.s + group * (COLUMNS * 128), warp % 4
        stage, parity = Int32(0), Int32(0)
        shared.ready.wait_full(stage, parity)
        record = read_record(shared.records, stage)
        while (record[Field.FLAGS] & Flag.STOP) == 0:
            flags, head = record[Field.FLAGS], record[Field.HEAD]
            if (flags & Flag.FIRST) != 0:
                load_columns(S, mPool, record[Field.READ], num_slots, head, channel, column, COLUMNS)
                pass_state_on(S, tile, warp, lane)
            load_left_turned(K, shared.k_base + stage * OPERAND_BYTES + group * TILE_BYTES, warp, lane)
            scale_state(S, load_shared(shared.vector_base + stage * VECTOR_BYTES + DECAY, 1))
            meet(Meet.W_THERE)
            warpgroup.fence()
            contract_held(by_bf16, S, K, right_w, True)
            warpgroup.commit_group()
            shared.inputs.release(stage)
            warpgroup.wait_group(0)
            ends = flags & Flag.LAST
            if ends == 0:
                pass_state_on(S, tile, warp, lane)
            if (record[Field.CHECKPOINT] >= 0) | (ends != 0):
                store_columns(S, mPool, record[Field.CHECKPOINT], num_slots, head, channel, column, COLUMNS)
                if (flags & Flag.HANDS_ON) != 0:
                    store_columns(S, mWork, record[Field.WRITE], Int32(WORK_LIMIT), head, channel, column, COLUMNS)
                elif ends != 0:
                    store_columns(S, mPool, record[Field.WRITE], num_slots, head, channel, column, COLUMNS)
            stage, parity = advance(stage, parity, STAGES)
            shared.ready.wait_full(stage, parity)
            record = read_record(shared.records, stage)

    @cute.jit
    def run_output(self, shared, lane, first, tma_out, gOut, sV, mOut):
        """Finished output rows of every chunk to global memory, by one warp."""
        stage, parity = Int32(0), Int32(0)
        shared.output.wait_full(stage, parity)
        record = read_record(shared.records, stage)
        while (record[Field.FLAGS] & Flag.STOP) == 0:
            token, count, column = record[Field.TOKEN], record[Field.COUNT], record[Field.HEAD] * HEAD + first
            cute.arch.fence_view_async_shared()
            if count == CHUNK:
                store_tile(tma_out, gOut, sV, token, column, stage)
            else:
                copy_rows(shared.v_base + stage * self.value_bytes, mOut, token, count, column, lane)
                cute.arch.fence_view_async_shared()
            shared.inputs.release(stage)
            stage, parity = advance(stage, parity, STAGES)
            shared.output.wait_full(stage, parity)
            record = read_record(shared.records, stage)


def build(key):
    """Compile one key."""
    state = Float32 if key.state_dtype == "float32" else BFloat16
    tokens, rows, entries = cute.sym_int(), cute.sym_int(), cute.sym_int()
    q, k, v, out = (fake_rows(BFloat16, tokens) for _ in range(4))
    cu, kept_cu = (fake_vector(Int32) for _ in range(2))
    return cute_compile(
        GdnColumns(key), q, k, v, fake_pool(state), fake_ids(rows, Int32), fake_ids(rows, Int32), cu, kept_cu,
        fake_vector(Int32, entries), fake_vector(Int32, entries), out, fake_pool(Float32),
        fake_matrix(Int32, columns=RECORD_BYTES // 4), *(Int32(1) for _ in range(9)), fake_stream(),
    )  # fmt: skip
