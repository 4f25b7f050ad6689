"""Chunkwise GDN prefill for SM90: raw q, k, v, a, b in; gates, beta and norms inside; states by slot id.

Per sequence and value head, in chunks of at most 64 tokens (mathematics: `reference/gdn.py`), with r = 1/|x|, G the running sum
of the log decay and every exponent <= 0:

    L_ij = beta_i r_i r_j 2^(G_i - G_j) (k_i.k_j), j < i        T' = (I + L)^-1 diag(beta)
    P_ij = s rq_i r_j 2^(G_i - G_j) (q_i.k_j), j <= i           W_j = r_j 2^(G_C - G_j) V'_j
    X_j = v_j - r_j 2^G_j S k_j     V' = T' X     O_i = s rq_i 2^G_i S q_i + sum_j P_ij V'_j     S <- 2^G_C S + sum_j W_j k_j

Norms and gates enter as factors of rows and columns of the products: no operand is rewritten. T', P, X, V' are fp16, the left
operands S and W are bf16 as the keys, sums and the state are fp32.

A block stays on its multiprocessor and takes one (sequence, value head) after another, longest first. `slabs` = 2: all V rows of
the head; 1: half of them (slab `block % 2`), with the same bits:
    state x slabs        64 V rows each, S in accumulators (`device/prefill_state.py`)
    pairs x (3 - slabs)  K K^T, key norms, Q K^T, decay and masks (`device/prefill_pairs.py`), diagonal blocks of the inverse
    data                 items (`device/prefill_schedule.py`), chunk list, TMA, gates, query norms, output rows
                         (`device/prefill_gdn_rows.py`), the rest of the inverse (`prefill_gdn_inverse.py`); 4 warps, of half
                         a head 8
The producer fills *inputs* (K, Q, record, gates), pairs publish *keys* (key vectors), *solved* (diagonal blocks) and *pairs*
(these and P), data warps *queries* and *pairs* (the rest of T'); state waits for these and for V. Its slabs take turns at the
products behind V' (`prefill_turns.py`). It stores a chunk's output over the chunk's V tile while the next chunk's first product
runs; V' lies in shared memory for the last product, as W takes its registers. Rows of a short chunk beyond its end may hold a
neighbour's tokens, even NaN: the pairs role zeroes q and k there before a product reads them, v is selected away.

Long rows in parts (exact for every gate): a segment maps its start state to S A + N. The transition launch finds, for each
segment but the last, N (the segment run from a zero state; the first from the true one) and A (run from the identity with
v = 0), and puts them in workspace slots 2 (i (parts - 1) + segment) and the next one, i counting long rows; the second slot of
the first segment keeps the row's start state. `kernels/segment_states.py` turns each N into the state after its segment. This
launch, with transition off, then runs all segments at once. The rounding of a row in parts differs from that of one chain, so
what decides it is its own length.

Arguments of the compiled function, in order:
    q [T, HK*128], k [T, HK*128], v [T, HV*128]   bf16 row views, row stride a multiple of 8 elements, T >= 1
    a, b [T, HV]                                  bf16, any row stride
    A_log [HV], dt_bias [HV]                      fp32
    pool [slots, elements]                        fp32 or bf16, slot stride a multiple of 16 bytes; [HV, V, K] of this layer at 0
    read_ids [N], write_ids [N], cu_seqlens [N+1]           int32
    checkpoint_cu [N+1], checkpoint_ends [M], checkpoint_slots [M]   int32; any int32 tensors when has_checkpoints is 0
    out [T, HV*128]                               bf16 rows, row stride a multiple of 8 elements
    work [slots, HV*128*128]                      fp32; states of segments, see below
    hk, hv, num_slots, has_checkpoints, l2norm    int32
    min_tokens                                    int32; rows with fewer are left alone: no state, no output
    long_rows, long_length, parts, lead           int32; at most `long_rows` rows have `long_length` tokens or more and are cut
    choose                                        int32; who chooses between this launch and records (`device/gdn_chains.py`)
    scale                                         fp32
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.utils import hopper_helpers

from ..compile.cache import cute_compile
from ..compile.fake import fake_ids, fake_pool, fake_rows, fake_stream, fake_vector
from ..device.gdn_chains import BY_SHAPES, OR_ONE_LAUNCH, takes_halves
from ..device.prefill_gdn_rows import (
    DECAY,
    O_FACTOR,
    REST,
    VECTOR_BYTES,
    X_FACTOR,
    load_bits,
    run_gates,
    run_merges,
    run_queries,
    run_rows,
    scalar_rows,
    write_gates,
)
from ..device.prefill_layout import (
    CHUNK,
    HEAD,
    INPUT_STAGES,
    LOWER_PITCH,
    OPERAND_BYTES,
    RECORD_WORDS,
    TILE_BYTES,
    WORK_STAGES,
    Field,
    Flag,
)
from ..device.prefill_loads import load_tile, load_when_free, prefetch_first
from ..device.prefill_pairs import run_pairs
from ..device.prefill_schedule import count_long_rows, find_work, leave_idle, leave_without_chunks, next_chunk, next_row
from ..device.prefill_state import (
    as_left_operand,
    clear_tile_columns,
    contract,
    identity_state,
    load_state,
    load_values,
    output_words,
    prefetch_state,
    residual,
    scale_columns,
    scale_state,
    scaled_left_operand,
    state_mma,
    store_left_operand,
    store_output_tile,
    store_state,
    subtract_from_values,
)
from ..device.prefill_sync import Bundle, Ring, advance, read_record, write_record
from ..device.prefill_turns import begin_turns, end_turns, pass_turn, take_turn
from ..device.warp_ops import load_shared, store_shared, unpack_bf16

THREADS = {2: 512, 1: 640}
# Registers a thread of state, pairs and data: 512 in all for four warpgroups, 480 for the five of half a head.
REGISTERS = {2: (176, 112, 48), 1: (176, 96, 56)}
BLOCKS = {2: 132, 1: 66}  # heads at work at once: a block stays on its multiprocessor and takes item after item
LEFT_WRITTEN = 9  # named barriers, one for each state warpgroup
WORK_LIMIT = 1 << 30  # every slot of the workspace is a slot


class GdnPrefill:
    """The kernel of one key."""

    def __init__(self, key):
        self.key, self.slabs = key, key.slabs

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mA: cute.Tensor,
        mB: cute.Tensor,
        mALog: cute.Tensor,
        mDtBias: cute.Tensor,
        mPool: cute.Tensor,
        mReadIds: cute.Tensor,
        mWriteIds: cute.Tensor,
        mCuSeqlens: cute.Tensor,
        mKeptCu: cute.Tensor,
        mKeptEnds: cute.Tensor,
        mKeptSlots: cute.Tensor,
        mOut: cute.Tensor,
        mWork: cute.Tensor,
        hk: Int32,
        hv: Int32,
        num_slots: Int32,
        has_checkpoints: Int32,
        l2norm: Int32,
        min_tokens: Int32,
        long_rows: Int32,
        long_length: Int32,
        parts: Int32,
        lead: Int32,
        choose: Int32,
        scale: Float32,
        stream,
    ):
        k_atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        h_atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, Float16)
        input_layout = cute.tile_to_shape(k_atom, (CHUNK, HEAD, INPUT_STAGES), order=(0, 1, 2))
        left_layout = cute.tile_to_shape(h_atom, (CHUNK, CHUNK, 2), order=(0, 1, 2))
        pair_layout = cute.tile_to_shape(h_atom, (CHUNK, CHUNK, WORK_STAGES), order=(0, 1, 2))
        width = 64 * self.slabs
        value_layout = cute.tile_to_shape(k_atom, (CHUNK, width, INPUT_STAGES), order=(0, 1, 2))
        box = cute.slice_(input_layout, (None, None, 0))
        value_box = cute.slice_(value_layout, (None, None, 0))
        load = cpasync.CopyBulkTensorTileG2SOp()
        tma_q, gQ = cpasync.make_tiled_tma_atom(load, mQ, box, (CHUNK, HEAD))
        tma_k, gK = cpasync.make_tiled_tma_atom(load, mK, box, (CHUNK, HEAD))
        tma_v, gV = cpasync.make_tiled_tma_atom(load, mV, value_box, (CHUNK, width))
        tma_out, gOut = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), mOut, value_box, (CHUNK, width))
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        read_mma = state_mma(BFloat16, CHUNK, k_major, self.slabs)
        token_mma = state_mma(Float16, CHUNK, k_major, self.slabs)
        update_mma = state_mma(BFloat16, HEAD, mn_major, self.slabs)
        make = hopper_helpers.make_trivial_tiled_mma
        pair_mma, left_mma = (
            make(x, x, k_major, k_major, Float32, (1, 1, 1), (64, CHUNK)) for x in (BFloat16, Float16)
        )

        @cute.struct
        class SharedStorage:
            barriers: cute.struct.MemRange[cutlass.Int64, 2 * (6 * INPUT_STAGES + WORK_STAGES + 3 - self.slabs)]
            records: cute.struct.Align[cute.struct.MemRange[Int32, INPUT_STAGES * RECORD_WORDS], 16]
            vectors: cute.struct.Align[cute.struct.MemRange[Float32, INPUT_STAGES * VECTOR_BYTES // 4], 128]
            lower: cute.struct.Align[cute.struct.MemRange[Float16, (3 - self.slabs) * CHUNK * LOWER_PITCH // 2], 128]
            sK: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(input_layout)], 1024]
            sQ: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(input_layout)], 1024]
            sV: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(value_layout)], 1024]
            sX: cute.struct.Align[cute.struct.MemRange[Float16, cute.cosize(left_layout)], 1024]
            sT: cute.struct.Align[cute.struct.MemRange[Float16, cute.cosize(pair_layout)], 1024]
            sP: cute.struct.Align[cute.struct.MemRange[Float16, cute.cosize(pair_layout)], 1024]

        self.storage_type = SharedStorage
        # Of a long row one for each segment, in a transition launch one for each state to find.
        items = hv * (long_rows * (2 * parts - 3) if self.key.transition else long_rows * parts + cute.size(mReadIds))
        self.kernel.set_name_prefix(self.key.symbol(), remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            tma_q, gQ, tma_k, gK, tma_v, gV, tma_out, gOut, mA, mB, mALog, mDtBias, mPool, mReadIds, mWriteIds, mCuSeqlens,
            mKeptCu, mKeptEnds, mKeptSlots, mOut, mWork, hk, hv, num_slots, has_checkpoints, l2norm, min_tokens, long_rows,
            long_length, parts, lead, choose, scale,
            read_mma, token_mma, update_mma, pair_mma, left_mma, input_layout, value_layout, left_layout, pair_layout,
        ).launch(
            grid=[(3 - self.slabs) * cutlass.min(items, Int32(BLOCKS[self.slabs])), 1, 1],
            block=[THREADS[self.slabs], 1, 1],
            max_number_threads=[THREADS[self.slabs], 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=choose // OR_ONE_LAUNCH,
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
        mA: cute.Tensor,
        mB: cute.Tensor,
        mALog: cute.Tensor,
        mDtBias: cute.Tensor,
        mPool: cute.Tensor,
        mReadIds: cute.Tensor,
        mWriteIds: cute.Tensor,
        mCuSeqlens: cute.Tensor,
        mKeptCu: cute.Tensor,
        mKeptEnds: cute.Tensor,
        mKeptSlots: cute.Tensor,
        mOut: cute.Tensor,
        mWork: cute.Tensor,
        hk: Int32,
        hv: Int32,
        num_slots: Int32,
        has_checkpoints: Int32,
        l2norm: Int32,
        min_tokens: Int32,
        long_rows: Int32,
        long_length: Int32,
        parts: Int32,
        lead: Int32,
        choose: Int32,
        scale: Float32,
        read_mma: cute.TiledMma,
        token_mma: cute.TiledMma,
        update_mma: cute.TiledMma,
        pair_mma: cute.TiledMma,
        left_mma: cute.TiledMma,
        input_layout: cute.ComposedLayout,
        value_layout: cute.ComposedLayout,
        left_layout: cute.ComposedLayout,
        pair_layout: cute.ComposedLayout,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        item, _, _ = cute.arch.block_idx()
        if choose != BY_SHAPES:
            halves, _ = takes_halves(mCuSeqlens, min_tokens, hv, tidx % 32)
            leave_idle(halves != 0, item)
            cute.arch.griddepcontrol_wait()  # idle blocks alone start early
        if cutlass.const_expr(self.key.transition):
            found = count_long_rows(mCuSeqlens, cute.size(mReadIds), long_length, tidx % 32)
            leave_idle(item // (3 - self.slabs) >= found * (2 * parts - 3) * hv, item)
        cute.arch.griddepcontrol_launch_dependents()  # short rows of the same call may run beside these
        leave_without_chunks(mCuSeqlens, min_tokens, cute.size(mA, mode=[0]), item)
        blocks, _, _ = cute.arch.grid_dim()
        storage = cutlass.utils.SmemAllocator().allocate(self.storage_type)
        sK = storage.sK.get_tensor(input_layout.outer, swizzle=input_layout.inner)
        sQ = storage.sQ.get_tensor(input_layout.outer, swizzle=input_layout.inner)
        sV = storage.sV.get_tensor(value_layout.outer, swizzle=value_layout.inner)
        sX = storage.sX.get_tensor(left_layout.outer, swizzle=left_layout.inner)
        sT = storage.sT.get_tensor(pair_layout.outer, swizzle=pair_layout.inner)
        sP = storage.sP.get_tensor(pair_layout.outer, swizzle=pair_layout.inner)
        shared = self.bundle(storage, mKeptSlots)
        if tidx // 32 == 12:
            prefetch_first((tma_k, tma_q, tma_v, tma_out), (mALog, mDtBias, mReadIds, mWriteIds), tidx % 32)
        if tidx == 0:
            for ring in shared.rings:
                ring.initialise()
            cute.arch.mbarrier_init_fence()
        # Blocks of T' and P above the diagonal are zero and no one writes them; the tiles of both lie side by side.
        zero = Uint32(0)
        if tidx < 512:
            for i in cutlass.range_constexpr(2 * WORK_STAGES * TILE_BYTES // 16 // 512):
                store_shared(shared.t_base + (i * 512 + tidx) * 16, zero, zero, zero, zero)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()

        warp = cute.arch.make_warp_uniform(tidx // 32)
        lane = tidx % 32
        group = cute.arch.make_warp_uniform(tidx // 128)
        slab = Int32(0)  # of the block's first state warpgroup
        state, pairs, data = REGISTERS[self.slabs]
        if cutlass.const_expr(self.slabs == 1):
            slab, item = item % 2, item // 2
        if group < self.slabs:
            cute.arch.setmaxregister_increase(state)
            self.run_state(
                shared, tidx, warp % 4, lane, group, slab, mPool, mWork, num_slots, sK, sQ, sX, sT, sP, read_mma, token_mma,
                update_mma, left_mma,
            )  # fmt: skip
        elif group < 3:
            cute.arch.setmaxregister_decrease(pairs)
            run_pairs(
                shared, tidx % 128, group - self.slabs, warp % 4, lane, l2norm, sK, sQ, pair_mma, self.key.transition
            )
        else:
            cute.arch.setmaxregister_decrease(data)
            if warp == 12:
                self.run_producer(
                    shared, item, blocks // (3 - self.slabs), slab, lane, tma_q, gQ, tma_k, gK, tma_v, gV, sQ, sK, sV, mA, mB,
                    mALog, mDtBias, mPool, mReadIds, mWriteIds, mCuSeqlens, mKeptCu, mKeptEnds, mKeptSlots, hk, hv, num_slots,
                    has_checkpoints, min_tokens, long_rows, long_length, parts, lead,
                )  # fmt: skip
            else:
                output = (slab, lane, tma_out, gOut, sV, mOut, l2norm, scale)
                if cutlass.const_expr(self.slabs == 2):
                    run_rows(shared, (warp - 12) % 3, *output, not self.key.transition)
                elif warp == 13:
                    run_gates(shared, mA, mB, mALog, mDtBias, lane)
                elif warp < 17:
                    run_merges(shared, warp - 14, lane)
                elif cutlass.const_expr(not self.key.transition):
                    if warp == 18:
                        run_queries(shared, 32, False, *output)
                    elif warp == 19:
                        run_queries(shared, 0, True, *output)

    def bundle(self, storage, mLog):
        """Barriers and shared addresses of the block. Arrivals are one per warp, or one for a TMA load."""
        barriers = storage.barriers.data_ptr()
        log = mLog.iterator.toint()
        rings, used = [], 0
        # Warps that read or write the ring's stages; of a whole head data warps do two things.
        state, queries = (8, 3) if self.slabs == 2 else (4, 2)
        data = 3 if self.slabs == 2 or self.key.transition else 5
        stores = not self.key.transition
        for stages, producers, consumers in (
            # K, Q, chunk record, gates: full by TMA and by the gates' warp
            (INPUT_STAGES, 2, state + 4 + data),
            (INPUT_STAGES, 1, 1 if stores else state),  # V: full by TMA, empty when its output has gone
            (INPUT_STAGES, 4, 1),  # key vectors, full only; empty with the inputs, as are the next
            (INPUT_STAGES, queries, 1),  # query vectors
            (WORK_STAGES, 4 + 3, state),  # P, diagonal blocks of T' and its columns
            (INPUT_STAGES, state, 1),  # output, full only
            (INPUT_STAGES, 1, 1),  # chunk record for the gates' warp of half a head, full only
            # triangular work matrix: diagonal blocks inverted, T' finished
            (3 - self.slabs, 4, 3),
        ):
            probe = (self.key.debug, len(rings), log) if self.key.debug else None
            rings.append(Ring(barriers + used, stages, producers, consumers, probe))
            used += 2 * stages
        inputs, v, keys, queries, pairs, output, begun, solved = rings
        return Bundle(
            slabs=self.slabs, value_bytes=self.slabs * TILE_BYTES,
            rings=rings, inputs=inputs, v=v, keys=keys, queries=queries, pairs=pairs, output=output,
            begun=begun, solved=solved,
            records=storage.records.data_ptr().toint(),
            vector_base=storage.vectors.data_ptr().toint(),
            lower=storage.lower.data_ptr().toint(),
            k_base=storage.sK.data_ptr().toint(),
            q_base=storage.sQ.data_ptr().toint(),
            v_base=storage.sV.data_ptr().toint(),
            x_base=storage.sX.data_ptr().toint(),
            t_base=storage.sT.data_ptr().toint(),
            p_base=storage.sP.data_ptr().toint(),
        )  # fmt: skip

    @cute.jit
    def run_producer(
        self, shared, item, step, slab, lane, tma_q, gQ, tma_k, gK, tma_v, gV, sQ, sK, sV, mA, mB, mALog, mDtBias,
        mPool, mReadIds, mWriteIds, mCuSeqlens, mKeptCu, mKeptEnds, mKeptSlots, hk, hv, num_slots, has_checkpoints,
        min_tokens, long_rows, long_length, parts, lead,
    ):  # fmt: skip
        """Walk the block's items, one of every `step`, and the chunk list of each: records, loads and gates of each chunk."""
        stage, parity, stage_v, parity_v = Int32(0), Int32(0), Int32(0), Int32(0)
        token_v, column_v = Int32(-1), Int32(0)
        length_class, base, seen = Int32(0), Int32(0), Int32(0)
        if cutlass.const_expr(not self.key.transition):
            long_length = long_length if long_rows > 0 else Int32(WORK_LIMIT)
        # Items are dealt out in turn, there and back, longest first: who got a long one gets a short one next.
        turn, mirrored = Int32(0), step - 1 - item
        sequence = Int32(0)
        while sequence >= 0:
            dealt = turn * step + (item if turn % 2 == 0 else mirrored)
            sequence, place, length_class, base, seen = next_row(
                dealt // hv, mCuSeqlens, cute.size(mReadIds), min_tokens, long_length, parts, length_class, base, seen, lane,
                2 * parts - 3 if self.key.transition else parts, 0 if self.key.transition else 1,
            )  # fmt: skip
            flags, position, stop, read, write, last_flag = (Int32(int(Flag.STOP)), *(Int32(0) for _ in range(5)))
            if sequence >= 0:
                flags, position, stop, read, write, last_flag = find_work(
                    sequence, place, lane, mReadIds, mWriteIds, mCuSeqlens, long_length, parts, lead, self.key.transition,
                    False,
                )  # fmt: skip
            turn += 1
            head = dealt % hv
            entry, entry_end, start = Int32(0), Int32(0), Int32(0)
            if (flags & Flag.STOP) == 0:
                if (flags & Flag.WORKSPACE) == 0:
                    prefetch_state(mPool, read, num_slots, head, 64 * slab, 64 * self.slabs)
                start = mCuSeqlens[sequence]
                if has_checkpoints != 0:
                    entry = mKeptCu[sequence]
                    entry_end = mKeptCu[sequence + 1]
            end, kept, entry = next_chunk(position, stop, entry, entry_end, mKeptEnds, mKeptSlots, num_slots)
            raw, logit, bias, rate = [Uint32(0)] * 2, [Uint32(0)] * 2, Float32(0.0), Float32(0.0)
            at_a, stride_a = scalar_rows(mA, start + lane, head)
            at_b, stride_b = scalar_rows(mB, start + lane, head)
            if cutlass.const_expr(self.slabs == 2):
                bias = mDtBias[head]
                rate = -cute.math.exp(mALog[head], fastmath=True)
                raw = load_bits(at_a, stride_a, position, end - position, lane)
                logit = load_bits(at_b, stride_b, position, end - position, lane)
            while (flags & Flag.STOP) == 0:
                token = start + position
                count = end - position
                last = end == stop
                flags = flags | last_flag if last else flags
                # Behind the last chunk there is an empty one.
                next_end, next_kept, entry = next_chunk(end, stop, entry, entry_end, mKeptEnds, mKeptSlots, num_slots)
                shared.inputs.wait_empty(stage, parity)
                with cute.arch.elect_one():
                    write_record(shared.records, stage, [token, count, flags, head, read, write, kept, sequence])
                shared.inputs.expect(stage, OPERAND_BYTES * (1 if self.key.transition else 2))
                if cutlass.const_expr(self.slabs == 1):
                    shared.begun.publish(stage)
                k_column = head // (hv // hk) * HEAD
                load_tile(tma_k, gK, sK, token, k_column, stage, shared.inputs)
                if cutlass.const_expr(not self.key.transition):
                    load_tile(tma_q, gQ, sQ, token, k_column, stage, shared.inputs)
                if cutlass.const_expr(self.slabs == 2):
                    gates = ([unpack_bf16(word)[0] for word in words] for words in (raw, logit))
                    write_gates(*gates, bias, rate, count, shared.vector_base + stage * VECTOR_BYTES, lane)
                    shared.inputs.publish(stage)
                    # The next chunk's are under way while its stage is waited for.
                    raw = load_bits(at_a, stride_a, end, next_end - end, lane)
                    logit = load_bits(at_b, stride_b, end, next_end - end, lane)
                # V waits for the output that lies over an older V: one chunk behind K and Q it does not hold them up.
                if token_v >= 0:
                    stage_v, parity_v = load_when_free(tma_v, gV, sV, token_v, column_v, stage_v, parity_v, shared.v)
                token_v, column_v = token, head * HEAD + slab * 64
                stage, parity = advance(stage, parity, INPUT_STAGES)
                position, end, kept = end, next_end, next_kept
                flags = Int32(int(Flag.STOP)) if last else flags & Flag.IDENTITY
        if token_v >= 0:
            load_when_free(tma_v, gV, sV, token_v, column_v, stage_v, parity_v, shared.v)
        for _ in cutlass.range_constexpr(3 - self.slabs):  # every pairs warpgroup finds one
            shared.inputs.wait_empty(stage, parity)
            with cute.arch.elect_one():
                write_record(shared.records, stage, [Int32(0), Int32(0), Int32(int(Flag.STOP)), *[Int32(-1)] * 5])
            shared.begun.publish(stage)
            for _ in cutlass.range_constexpr(2):
                shared.inputs.publish(stage)
            stage, parity = advance(stage, parity, INPUT_STAGES)

    @cute.jit
    def run_state(
        self, shared, tidx, warp, lane, group, slab, mPool, mWork, num_slots, sK, sQ, sX, sT, sP, read_mma, token_mma, update_mma,
        left_mma,
    ):  # fmt: skip
        """The serial chain: one slab of S across all chunks of the block."""
        by_read, by_token, by_update = (mma.get_slice(tidx) for mma in (read_mma, token_mma, update_mma))
        swapped = cute.make_tensor(sK.iterator, cute.select(sK.layout, [1, 0, 2]))
        right_k = read_mma.make_fragment_B(by_read.partition_B(sK))
        right_q = read_mma.make_fragment_B(by_read.partition_B(sQ))
        by_tile = left_mma.get_slice(tidx % 128)
        left_tiles = left_mma.make_fragment_A(by_tile.partition_A(sX))
        right_t = token_mma.make_fragment_B(by_token.partition_B(sT))
        right_p = left_mma.make_fragment_B(by_tile.partition_B(sP))
        right_u = update_mma.make_fragment_B(by_update.partition_B(swapped))
        read_shape = by_read.partition_shape_A((self.slabs * 64, HEAD))
        token_shape = by_token.partition_shape_A((self.slabs * 64, CHUNK))
        S = cute.make_rmem_tensor(by_update.partition_shape_C((self.slabs * 64, HEAD)), Float32)
        Y = cute.make_rmem_tensor(by_read.partition_shape_C((self.slabs * 64, CHUNK)), Float32)
        O = cute.make_rmem_tensor(by_read.partition_shape_C((self.slabs * 64, CHUNK)), Float32)
        row = (slab + group) * 64 + warp * 16 + (lane >> 2)
        own_values = shared.v_base + group * TILE_BYTES
        column = 2 * (lane & 3)
        stage, parity, work, work_parity = Int32(0), Int32(0), Int32(0), Int32(0)
        shared.inputs.wait_full(stage, parity)
        record = read_record(shared.records, stage)
        S.fill(0.0)
        # Output of the chunk before, stored while this chunk's first product runs.
        words = cute.make_rmem_tensor(cute.make_layout(16), Uint32)
        words.fill(0)
        done_stage, done = Int32(0), Int32(0)
        begin_turns(group, self.slabs)
        while (record[Field.FLAGS] & Flag.STOP) == 0:
            count, flags, head = record[Field.COUNT], record[Field.FLAGS], record[Field.HEAD]
            vector = shared.vector_base + stage * VECTOR_BYTES
            tile = own_values + stage * shared.value_bytes
            if (flags & Flag.FIRST) != 0:
                self.start_state(S, mPool, mWork, record, num_slots, row, column)
            shared.keys.wait_full(stage, parity)
            left_s = as_left_operand(S, read_shape, BFloat16)
            shared.v.wait_full(stage, parity)
            warpgroup.fence()
            contract(read_mma, Y, left_s, right_k, stage, HEAD // 16, False)
            warpgroup.commit_group()
            if cutlass.const_expr(not self.key.transition):
                store_output_tile(words, done, own_values + done_stage * shared.value_bytes, warp, lane)
                shared.output.publish(done_stage, done)
                values = load_values(tile, vector + X_FACTOR, warp, lane)
            decay = load_shared(vector + DECAY, 1)
            warpgroup.wait_group(0)
            if cutlass.const_expr(self.key.transition):
                if (flags & Flag.IDENTITY) != 0:
                    clear_tile_columns(tile, warp, lane)
                residual(Y, tile, vector + X_FACTOR, count, warp, lane, True)
            else:
                subtract_from_values(Y, values, count, lane)
            left_x = as_left_operand(Y, token_shape, Float16)
            if cutlass.const_expr(self.key.transition):
                cute.arch.fence_view_async_shared()
                shared.v.release(stage)
            shared.pairs.wait_full(work, work_parity)
            warpgroup.fence()
            contract(token_mma, Y, left_x, right_t, work, CHUNK // 16, False)
            warpgroup.commit_group()
            scale_state(S, decay)
            warpgroup.wait_group(0)
            left_w = scaled_left_operand(Y, vector + REST, lane, token_shape)
            take_turn(group, self.slabs)
            if cutlass.const_expr(not self.key.transition):
                # Of half a head two chunks' in turn: no warp writes over what another one's product may still read.
                own = group if cutlass.const_expr(self.slabs == 2) else work
                left_v = as_left_operand(Y, token_shape, Float16)
                store_left_operand(left_v, shared.x_base + own * TILE_BYTES, warp, lane)
            warpgroup.fence()
            if cutlass.const_expr(not self.key.transition):
                contract(read_mma, O, left_s, right_q, stage, HEAD // 16, False)
                warpgroup.commit_group()
            contract(update_mma, S, left_w, right_u, stage, CHUNK // 16, True)
            warpgroup.commit_group()
            if cutlass.const_expr(not self.key.transition):
                cute.arch.fence_view_async_shared()
                cute.arch.barrier(barrier_id=LEFT_WRITTEN + group, number_of_threads=128)
                warpgroup.wait_group(1)
                scale_columns(O, vector + O_FACTOR, lane)
                warpgroup.fence()
                contract(left_mma, O, left_tiles[None, None, None, own], right_p, work, CHUNK // 16, True)
                warpgroup.commit_group()
            pass_turn(group, self.slabs)
            warpgroup.wait_group(0)
            shared.inputs.release(stage)
            shared.pairs.release(work)
            if cutlass.const_expr(self.key.transition):
                if (flags & Flag.LAST) != 0:
                    store_state(S, mWork, record[Field.WRITE], Int32(WORK_LIMIT), head, row, column)
            else:
                for i, word in enumerate(output_words(O)):
                    words[i] = word
                done_stage, done = stage, Int32(1)
                store_state(S, mPool, record[Field.CHECKPOINT], num_slots, head, row, column)
                if (flags & Flag.LAST) != 0:
                    store_state(S, mPool, record[Field.WRITE], num_slots, head, row, column)
            stage, parity = advance(stage, parity, INPUT_STAGES)
            work, work_parity = advance(work, work_parity, WORK_STAGES)
            shared.inputs.wait_full(stage, parity)
            record = read_record(shared.records, stage)
        end_turns(group, self.slabs)
        if cutlass.const_expr(not self.key.transition):
            store_output_tile(words, done, own_values + done_stage * shared.value_bytes, warp, lane)
            shared.output.publish(done_stage, done)

    @cute.jit
    def start_state(self, S, mPool, mWork, record, num_slots, row, column):
        """The state before a block's first chunk: from the pool, from the workspace, or the identity."""
        head, slot, flags = record[Field.HEAD], record[Field.READ], record[Field.FLAGS]
        if cutlass.const_expr(self.key.transition):
            load_state(S, mPool, slot, num_slots, head, row, column)
            if (flags & Flag.KEEP_START) != 0:
                store_state(S, mWork, record[Field.WRITE] + 1, Int32(WORK_LIMIT), head, row, column)
            if (flags & Flag.IDENTITY) != 0:
                identity_state(S, row, column)
        elif (flags & Flag.WORKSPACE) != 0:
            load_state(S, mWork, slot, Int32(WORK_LIMIT), head, row, column)
        else:
            load_state(S, mPool, slot, num_slots, head, row, column)


def build(key):
    """Compile one key."""
    state = Float32 if key.state_dtype == "float32" else BFloat16
    tokens, rows, entries = cute.sym_int(), cute.sym_int(), cute.sym_int()
    q, k, v, out = (fake_rows(BFloat16, tokens) for _ in range(4))
    a, b = (fake_rows(BFloat16, tokens, divisibility=1, align=2) for _ in range(2))
    heads = cute.sym_int()
    cu, kept_cu = (fake_vector(Int32) for _ in range(2))
    return cute_compile(
        GdnPrefill(key), q, k, v, a, b, fake_vector(Float32, heads), fake_vector(Float32, heads), fake_pool(state),
        fake_ids(rows, Int32), fake_ids(rows, Int32), cu, kept_cu, fake_vector(Int32, entries), fake_vector(Int32, entries),
        out, fake_pool(Float32), *(Int32(1) for _ in range(11)), Float32(1.0), fake_stream(),
    )  # fmt: skip
