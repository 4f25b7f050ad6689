"""Chunkwise GDN prefill for SM90: raw q, k, v, a, b in; gates, beta and norms inside; states by slot id.

Per sequence and value head, in chunks of at most 64 tokens (mathematics: `reference/gdn.py`), with r = 1/|x|, G the running sum
of the log decay and every exponent <= 0:

    L_ij = beta_i r_i r_j 2^(G_i - G_j) (k_i.k_j), j < i        T' = (I + L)^-1 diag(beta)
    P_ij = s rq_i r_j 2^(G_i - G_j) (q_i.k_j), j <= i           K'_j = r_j 2^(G_C - G_j) k_j
    X_j = v_j - r_j 2^G_j S k_j     V' = T' X     O_i = s rq_i 2^G_i S q_i + sum_j P_ij V'_j     S <- 2^G_C S + sum_j K'_j V'_j

Norms and gates enter as factors of rows and columns of the products; only K' is rewritten. T', P, X, V', K' are fp16, the left
operand S is bf16, sums and the state are fp32.

One block of four warpgroups takes one sequence and value head:
    state x 2   64 V rows each, S in accumulators (`device/prefill_state.py`)
    pairs       K K^T, Q K^T, decay and masks, inverse (`device/prefill_inverse.py`)
    data        warp 0: chunk list, TMA; warps 1, 2: gates, norms, K'; warp 3: output rows
Invalid rows of a short chunk may hold a neighbour's tokens, even NaN: they are selected away, never multiplied by zero.

Arguments of the compiled function, in order:
    q [T, HK*128], k [T, HK*128], v [T, HV*128]   bf16 row views, row stride a multiple of 8 elements, T >= 1
    a, b [T, HV]                                  bf16, any row stride
    A_log [HV], dt_bias [HV]                      fp32
    pool [slots, elements]                        fp32 or bf16, slot stride a multiple of 16 bytes; [HV, V, K] of this layer at 0
    read_ids [N], write_ids [N], cu_seqlens [N+1]           int32
    checkpoint_cu [N+1], checkpoint_ends [M], checkpoint_slots [M]   int32; any int32 tensors when has_checkpoints is 0
    out [T, HV*128]                               bf16 rows, row stride a multiple of 8 elements
    hk, hv, num_slots, has_checkpoints, l2norm    int32
    scale                                         fp32
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.utils import hopper_helpers

from ..compile.cache import cute_compile
from ..compile.fake import fake_ids, fake_pool, fake_rows, fake_stream, fake_vector
from ..device.arith import log_decay_softplus, sigmoid
from ..device.prefill_inverse import merge_blocks, solve_diagonal
from ..device.prefill_layout import (
    CHUNK,
    HEAD,
    LOWER_PITCH,
    OPERAND_BYTES,
    OUT_PITCH,
    RECORD_WORDS,
    TILE_BYTES,
    Barrier,
    Field,
    Flag,
    Role,
    tile_address,
)
from ..device.prefill_rows import owns_norms, squared_norms, store_output_rows
from ..device.prefill_schedule import next_chunk
from ..device.prefill_state import (
    as_left_operand,
    contract,
    decay_state,
    load_state,
    residual,
    scale_columns,
    state_mma,
    store_output,
    store_state,
)
from ..device.prefill_sync import Ring, advance, read_record, write_record
from ..device.state_io import row_ptr
from ..device.warp_ops import (
    load_shared,
    pack_f16,
    stmatrix4,
    store_shared,
    sum_scan,
    unpack_bf16,
)

THREADS = 512
K_STAGES = 3
STAGES = 2
REGISTERS = {Role.STATE_0: 176, Role.PAIRS: 96, Role.DATA: 64}
LOG2_E = 1.4426950408889634
NORM_EPS = 1e-6

# fp32 vectors of a chunk, byte offsets in the stage that also holds K'
X_FACTOR, O_FACTOR, L_ROW, COLUMN, P_ROW, BETA, LOG_DECAY, DECAY = range(0, 2048, 256)
VECTOR_BYTES = 2048


class GdnPrefill:
    """The kernel of one key; see the module's text."""

    def __init__(self, key):
        self.key = key

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
        hk: Int32,
        hv: Int32,
        num_slots: Int32,
        has_checkpoints: Int32,
        l2norm: Int32,
        scale: Float32,
        stream,
    ):
        k_atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        h_atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, Float16)
        k_layout = cute.tile_to_shape(k_atom, (CHUNK, HEAD, K_STAGES), order=(0, 1, 2))
        q_layout = cute.tile_to_shape(k_atom, (CHUNK, HEAD, STAGES), order=(0, 1, 2))
        update_layout = cute.tile_to_shape(h_atom, (CHUNK, HEAD, STAGES), order=(0, 1, 2))
        pair_layout = cute.tile_to_shape(h_atom, (CHUNK, CHUNK, STAGES), order=(0, 1, 2))
        box = cute.slice_(q_layout, (None, None, 0))
        load = cpasync.CopyBulkTensorTileG2SOp()
        tma_q, gQ = cpasync.make_tiled_tma_atom(load, mQ, box, (CHUNK, HEAD))
        tma_k, gK = cpasync.make_tiled_tma_atom(load, mK, box, (CHUNK, HEAD))
        tma_v, gV = cpasync.make_tiled_tma_atom(load, mV, box, (CHUNK, HEAD))
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        read_mma = state_mma(BFloat16, CHUNK, k_major, 2)
        token_mma = state_mma(Float16, CHUNK, k_major, 2)
        update_mma = state_mma(Float16, HEAD, mn_major, 2)
        pair_mma = hopper_helpers.make_trivial_tiled_mma(
            BFloat16, BFloat16, k_major, k_major, Float32, (1, 1, 1), (64, CHUNK)
        )

        @cute.struct
        class SharedStorage:
            barriers: cute.struct.MemRange[cutlass.Int64, 2 * (K_STAGES + 5 * STAGES)]
            records: cute.struct.Align[cute.struct.MemRange[Int32, K_STAGES * RECORD_WORDS], 16]
            finished: cute.struct.Align[cute.struct.MemRange[Int32, STAGES * RECORD_WORDS], 16]
            vectors: cute.struct.Align[cute.struct.MemRange[Float32, STAGES * VECTOR_BYTES // 4], 128]
            lower: cute.struct.Align[cute.struct.MemRange[Float16, CHUNK * LOWER_PITCH // 2], 128]
            sOut: cute.struct.Align[cute.struct.MemRange[BFloat16, STAGES * CHUNK * OUT_PITCH // 2], 128]
            sK: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(k_layout)], 1024]
            sQ: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(q_layout)], 1024]
            sV: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(q_layout)], 1024]
            sU: cute.struct.Align[cute.struct.MemRange[Float16, cute.cosize(update_layout)], 1024]
            sT: cute.struct.Align[cute.struct.MemRange[Float16, cute.cosize(pair_layout)], 1024]
            sP: cute.struct.Align[cute.struct.MemRange[Float16, cute.cosize(pair_layout)], 1024]

        self.storage_type = SharedStorage
        self.kernel.set_name_prefix(self.key.symbol(), remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            tma_q, gQ, tma_k, gK, tma_v, gV, mA, mB, mALog, mDtBias, mPool, mReadIds, mWriteIds, mCuSeqlens,
            mKeptCu, mKeptEnds, mKeptSlots, mOut, hk, hv, num_slots, has_checkpoints, l2norm, scale,
            read_mma, token_mma, update_mma, pair_mma, k_layout, q_layout, update_layout, pair_layout,
        ).launch(
            grid=[hv * cute.size(mReadIds), 1, 1],
            block=[THREADS, 1, 1],
            max_number_threads=[THREADS, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
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
        hk: Int32,
        hv: Int32,
        num_slots: Int32,
        has_checkpoints: Int32,
        l2norm: Int32,
        scale: Float32,
        read_mma: cute.TiledMma,
        token_mma: cute.TiledMma,
        update_mma: cute.TiledMma,
        pair_mma: cute.TiledMma,
        k_layout: cute.ComposedLayout,
        q_layout: cute.ComposedLayout,
        update_layout: cute.ComposedLayout,
        pair_layout: cute.ComposedLayout,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        item, _, _ = cute.arch.block_idx()
        storage = cutlass.utils.SmemAllocator().allocate(self.storage_type)
        sK = storage.sK.get_tensor(k_layout.outer, swizzle=k_layout.inner)
        sQ = storage.sQ.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        sV = storage.sV.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        sU = storage.sU.get_tensor(update_layout.outer, swizzle=update_layout.inner)
        sT = storage.sT.get_tensor(pair_layout.outer, swizzle=pair_layout.inner)
        sP = storage.sP.get_tensor(pair_layout.outer, swizzle=pair_layout.inner)
        barriers = storage.barriers.data_ptr()
        log = mKeptSlots.iterator.toint()
        probes = [(self.key.debug, i, log) if self.key.debug else None for i in range(6)]
        # Arrivals a stage: the producers' warps (or the one that issues TMA) and the consumers' warps.
        k_ring = Ring(barriers, K_STAGES, producers=1, consumers=8 + 4 + 2, probe=probes[0])
        q_ring = Ring(barriers + 2 * K_STAGES, STAGES, producers=1, consumers=8 + 4 + 2, probe=probes[1])
        v_ring = Ring(barriers + 2 * (K_STAGES + STAGES), STAGES, producers=1, consumers=8, probe=probes[2])
        row_ring = Ring(barriers + 2 * (K_STAGES + 2 * STAGES), STAGES, producers=2, consumers=8 + 4, probe=probes[3])
        pair_ring = Ring(barriers + 2 * (K_STAGES + 3 * STAGES), STAGES, producers=4, consumers=8, probe=probes[4])
        out_ring = Ring(barriers + 2 * (K_STAGES + 4 * STAGES), STAGES, producers=8, consumers=1, probe=probes[5])
        if tidx == 0:
            for ring in (k_ring, q_ring, v_ring, row_ring, pair_ring, out_ring):
                ring.initialise()
            cute.arch.mbarrier_init_fence()
        # Blocks of T' above the diagonal are zero and no one writes them.
        zero_base = storage.sT.data_ptr().toint()
        for i in cutlass.range_constexpr(STAGES * TILE_BYTES // 16 // THREADS):
            zero = Uint32(0)
            store_shared(zero_base + (i * THREADS + tidx) * 16, zero, zero, zero, zero)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()

        records = storage.records.data_ptr().toint()
        finished = storage.finished.data_ptr().toint()
        vectors = storage.vectors.data_ptr().toint()
        outputs = storage.sOut.data_ptr().toint()
        k_base = storage.sK.data_ptr().toint()
        q_base = storage.sQ.data_ptr().toint()
        v_base = storage.sV.data_ptr().toint()
        u_base = storage.sU.data_ptr().toint()
        p_base = storage.sP.data_ptr().toint()
        lower = storage.lower.data_ptr().toint()
        warp = cute.arch.make_warp_uniform(tidx // 32)
        lane = tidx % 32
        role = cute.arch.make_warp_uniform(tidx // 128)
        if role < Role.PAIRS:
            cute.arch.setmaxregister_increase(REGISTERS[Role.STATE_0])
            self.run_state(
                tidx, warp % 4, lane, role, mPool, num_slots, sK, sQ, sU, sT, sP, v_base, vectors, outputs, records,
                finished, read_mma, token_mma, update_mma, k_ring, q_ring, v_ring, row_ring, pair_ring, out_ring,
            )  # fmt: skip
        elif role == Role.PAIRS:
            cute.arch.setmaxregister_decrease(REGISTERS[Role.PAIRS])
            self.run_pairs(
                tidx - 128 * Role.PAIRS, warp % 4, lane, sK, sQ, zero_base, p_base, lower, vectors, records, pair_mma,
                k_ring, q_ring, row_ring, pair_ring,
            )  # fmt: skip
        else:
            cute.arch.setmaxregister_decrease(REGISTERS[Role.DATA])
            if warp % 4 == 0:
                self.run_producer(
                    item, tma_q, gQ, tma_k, gK, tma_v, gV, sQ, sK, sV, mReadIds, mWriteIds, mCuSeqlens, mKeptCu,
                    mKeptEnds, mKeptSlots, hk, hv, num_slots, has_checkpoints, records, k_ring, q_ring, v_ring,
                )  # fmt: skip
            elif warp % 4 == 3:
                self.run_output(lane, mOut, outputs, finished, out_ring)
            else:
                self.run_rows(
                    warp % 4 - 1, lane, mA, mB, mALog, mDtBias, l2norm, scale, k_base, q_base, u_base, vectors, records,
                    k_ring, q_ring, row_ring,
                )  # fmt: skip

    @cute.jit
    def run_producer(
        self, item, tma_q, gQ, tma_k, gK, tma_v, gV, sQ, sK, sV, mReadIds, mWriteIds, mCuSeqlens, mKeptCu, mKeptEnds,
        mKeptSlots, hk, hv, num_slots, has_checkpoints, records, k_ring, q_ring, v_ring,
    ):  # fmt: skip
        """Walk the chunk list of the block's sequence and head; start the loads of each chunk and publish its record."""
        sequence = item // hv
        head = item % hv
        k_column = head // (hv // hk) * HEAD
        start = mCuSeqlens[sequence]
        length = mCuSeqlens[sequence + 1] - start
        read = mReadIds[sequence]
        write = mWriteIds[sequence]
        entry = Int32(0)
        entry_end = Int32(0)
        if has_checkpoints != 0:
            entry = mKeptCu[sequence]
            entry_end = mKeptCu[sequence + 1]
        k_stage, k_parity, stage, parity = Int32(0), Int32(0), Int32(0), Int32(0)
        position = Int32(0)
        flags = Int32(int(Flag.FIRST))
        while (flags & Flag.STOP) == 0:
            end, kept, entry = next_chunk(position, length, entry, entry_end, mKeptEnds, mKeptSlots, num_slots)
            token = start + position
            last = end == length
            flags = flags | Flag.LAST if last else flags
            k_ring.wait_empty(k_stage, k_parity)
            with cute.arch.elect_one():
                write_record(records, k_stage, [token, end - position, flags, head, read, write, kept, sequence])
            k_ring.expect(k_stage, OPERAND_BYTES)
            self.load_tile(tma_k, gK, sK, token, k_column, k_stage, k_ring)
            q_ring.wait_empty(stage, parity)
            q_ring.expect(stage, OPERAND_BYTES)
            self.load_tile(tma_q, gQ, sQ, token, k_column, stage, q_ring)
            v_ring.wait_empty(stage, parity)
            v_ring.expect(stage, OPERAND_BYTES)
            self.load_tile(tma_v, gV, sV, token, head * HEAD, stage, v_ring)
            k_stage, k_parity = advance(k_stage, k_parity, K_STAGES)
            stage, parity = advance(stage, parity, STAGES)
            position = end
            flags = Int32(int(Flag.STOP)) if last else Int32(0)
        k_ring.wait_empty(k_stage, k_parity)
        none = Int32(-1)
        with cute.arch.elect_one():
            write_record(records, k_stage, [Int32(0), Int32(0), flags, head, none, none, none, sequence])
        k_ring.publish(k_stage)

    @cute.jit
    def load_tile(self, tma, gX, sX, token, column, stage, ring: cutlass.Constexpr):
        """Start the TMA load of 64 rows and 128 columns of gX from (token, column) into a stage."""
        tile = cute.local_tile(cute.domain_offset((token, column), gX), (CHUNK, HEAD), (0, 0))
        one = cute.make_layout(1)
        target, source = cpasync.tma_partition(tma, 0, one, cute.group_modes(sX, 0, 2), cute.group_modes(tile, 0, 2))
        cute.copy(tma, source, target[None, stage], tma_bar_ptr=ring.full + stage)

    @cute.jit
    def run_rows(
        self, part, lane, mA, mB, mALog, mDtBias, l2norm, scale, k_base, q_base, u_base, vectors, records, k_ring, q_ring,
        row_ring,
    ):  # fmt: skip
        """Gates, norms, the chunk's vectors and K' for rows 32 part .. 32 part + 31 of every chunk."""
        k_stage, k_parity, stage, parity = Int32(0), Int32(0), Int32(0), Int32(0)
        k_ring.wait_full(k_stage, k_parity)
        record = read_record(records, k_stage)
        while (record[Field.FLAGS] & Flag.STOP) == 0:
            token, count, head = record[Field.TOKEN], record[Field.COUNT], record[Field.HEAD]
            k_tile = k_base + k_stage * OPERAND_BYTES
            q_tile = q_base + stage * OPERAND_BYTES
            vector = vectors + stage * VECTOR_BYTES
            raw = cute.make_rmem_tensor(cute.make_layout(2), Float32)
            logit = cute.make_rmem_tensor(cute.make_layout(1), Float32)
            raw.fill(0.0)
            logit.fill(0.0)
            for half in cutlass.range_constexpr(2):
                if lane + 32 * half < count:
                    raw[half] = Float32(self.element(mA, token + lane + 32 * half, head))
            own = 32 * part + lane
            if own < count:
                logit[0] = Float32(self.element(mB, token + own, head))
            a_log = mALog[head]
            bias = mDtBias[head]
            row_ring.wait_empty(stage, parity)
            q_ring.wait_full(stage, parity)
            for block in cutlass.range_constexpr(2):
                row = 32 * part + 16 * block
                k_low, k_high = squared_norms(k_tile, row, lane)
                q_low, q_high = squared_norms(q_tile, row, lane)
                if owns_norms(lane):
                    at = vector + (row + (lane >> 2)) * 4
                    store_shared(at + COLUMN, k_low)
                    store_shared(at + COLUMN + 32, k_high)
                    store_shared(at + P_ROW, q_low)
                    store_shared(at + P_ROW + 32, q_high)
            q_ring.release(stage)
            # The decay of both halves in every warp: the second half's sums start from the first half's total.
            g = cute.make_rmem_tensor(cute.make_layout(2), Float32)
            for half in cutlass.range_constexpr(2):
                value = log_decay_softplus(raw[half], bias, a_log) * Float32(LOG2_E)
                g[half] = sum_scan(value if lane + 32 * half < count else Float32(0.0), lane)
            total = cute.arch.shuffle_sync(g[0], 31)
            g[1] = g[1] + total
            end = cute.arch.shuffle_sync(g[1], 31)
            log_decay = g[1] if part == 1 else g[0]
            valid = own < count
            beta = sigmoid(logit[0]) if valid else Float32(0.0)
            at = vector + own * 4
            k_factor = self.inverse_norm(load_shared(at + COLUMN, 1), valid, l2norm)
            q_factor = self.inverse_norm(load_shared(at + P_ROW, 1), valid, l2norm) * scale
            decay = cute.math.exp2(log_decay, fastmath=True)
            store_shared(at + X_FACTOR, k_factor * decay)
            store_shared(at + O_FACTOR, q_factor * decay)
            store_shared(at + L_ROW, beta * k_factor)
            store_shared(at + COLUMN, k_factor)
            store_shared(at + P_ROW, q_factor)
            store_shared(at + BETA, beta)
            store_shared(at + LOG_DECAY, log_decay)
            if own == 0:
                store_shared(vector + DECAY, cute.math.exp2(end, fastmath=True))
            update = k_factor * cute.math.exp2(end - log_decay, fastmath=True)
            self.rewrite_update_operand(k_tile, u_base + stage * OPERAND_BYTES, part, lane, count, update)
            k_ring.release(k_stage)
            row_ring.publish_to_async(stage)
            k_stage, k_parity = advance(k_stage, k_parity, K_STAGES)
            stage, parity = advance(stage, parity, STAGES)
            k_ring.wait_full(k_stage, k_parity)
            record = read_record(records, k_stage)

    @cute.jit
    def element(self, mX, token, head):
        """One scalar of a packed row."""
        return cute.make_tensor(row_ptr(mX, token, head, mX.element_type.width // 8), cute.make_layout(1))[0]

    @cute.jit
    def inverse_norm(self, squares: Float32, valid, l2norm: Int32) -> Float32:
        """1 / sqrt(squares + eps), 1 where rows are taken as they are, 0 for an invalid row."""
        factor = cute.math.rsqrt(squares + Float32(NORM_EPS), fastmath=True) if l2norm != 0 else Float32(1.0)
        return factor if valid else Float32(0.0)

    @cute.jit
    def rewrite_update_operand(self, k_tile, u_tile, part, lane, count, factor):
        """K'_j = factor_j k_j in fp16 for the warp's 32 rows; lane l holds the factor of row 32 part + l."""
        for step in cutlass.range_constexpr(8):
            inner = 4 * step + (lane >> 3)
            row = 32 * part + inner
            f = cute.arch.shuffle_sync(factor, inner)
            valid = row < count
            for tile in cutlass.range_constexpr(2):
                offset = tile_address(tile * TILE_BYTES, row, lane & 7)
                words = load_shared(k_tile + offset, 4, Uint32)
                scaled = []
                for w in cutlass.range_constexpr(4):
                    low, high = unpack_bf16(words[w])
                    packed = pack_f16(low * f, high * f)
                    scaled.append(packed if valid else Uint32(0))
                store_shared(u_tile + offset, *scaled)

    @cute.jit
    def run_pairs(
        self, tidx, warp, lane, sK, sQ, t_base, p_base, lower, vectors, records, pair_mma, k_ring, q_ring, row_ring, pair_ring
    ):  # fmt: skip
        """L, its inverse and P of every chunk."""
        thread = pair_mma.get_slice(tidx)
        left_k = pair_mma.make_fragment_A(thread.partition_A(sK))
        left_q = pair_mma.make_fragment_A(thread.partition_A(sQ))
        right_k = pair_mma.make_fragment_B(thread.partition_B(sK))
        kk = cute.make_rmem_tensor(thread.partition_shape_C((CHUNK, CHUNK)), Float32)
        qk = cute.make_rmem_tensor(thread.partition_shape_C((CHUNK, CHUNK)), Float32)
        k_stage, k_parity, stage, parity = Int32(0), Int32(0), Int32(0), Int32(0)
        k_ring.wait_full(k_stage, k_parity)
        record = read_record(records, k_stage)
        while (record[Field.FLAGS] & Flag.STOP) == 0:
            count = record[Field.COUNT]
            q_ring.wait_full(stage, parity)
            warpgroup.fence()
            for k in cutlass.range_constexpr(HEAD // 16):
                pair_mma.set(warpgroup.Field.ACCUMULATE, k != 0)
                cute.gemm(pair_mma, kk, left_k[None, None, k, k_stage], right_k[None, None, k, k_stage], kk)
            for k in cutlass.range_constexpr(HEAD // 16):
                pair_mma.set(warpgroup.Field.ACCUMULATE, k != 0)
                cute.gemm(pair_mma, qk, left_q[None, None, k, stage], right_k[None, None, k, k_stage], qk)
            warpgroup.commit_group()
            row_ring.wait_full(stage, parity)
            pair_ring.wait_empty(stage, parity)
            warpgroup.wait_group(0)
            k_ring.release(k_stage)
            q_ring.release(stage)
            vector = vectors + stage * VECTOR_BYTES
            t_tile = t_base + stage * TILE_BYTES
            p_tile = p_base + stage * TILE_BYTES
            diagonal = p_tile + warp * 2048
            weights = self.pair_scalar(kk, qk, vector, lower, diagonal, warp, lane, count)
            first = solve_diagonal(diagonal, lower, t_tile, vector + BETA, warp, lane)
            for block in cutlass.range_constexpr(4):
                row = 16 * warp + (lane & 15)
                stmatrix4(
                    tile_address(p_tile, row, 2 * block + (lane >> 4)), *[weights[4 * block + i] for i in range(4)]
                )
            cute.arch.barrier(barrier_id=int(Barrier.PAIRS_DIAGONAL), number_of_threads=128)
            merge_blocks(first, lower, t_tile, vector + BETA, warp, lane)
            row_ring.release(stage)
            pair_ring.publish_to_async(stage)
            k_stage, k_parity = advance(k_stage, k_parity, K_STAGES)
            stage, parity = advance(stage, parity, STAGES)
            cute.arch.barrier(barrier_id=int(Barrier.PAIRS_DONE), number_of_threads=128)
            k_ring.wait_full(k_stage, k_parity)
            record = read_record(records, k_stage)

    @cute.jit
    def pair_scalar(self, kk, qk, vector, lower, diagonal, warp, lane, count):
        """L from K K^T (fp16 blocks below the diagonal to `lower`, the fp32 diagonal block to `diagonal`); P as fp16 words.

        A thread holds rows 16 warp + lane // 4 (+ 8) and columns 8 n + 2 (lane % 4), + 1.
        """
        weights = cute.make_rmem_tensor(cute.make_layout(16), Uint32)
        weights.fill(0)
        row = 16 * warp + (lane >> 2)
        g_row, l_row, p_row = [], [], []
        for r in cutlass.range_constexpr(2):
            at = vector + (row + 8 * r) * 4
            g_row.append(load_shared(at + LOG_DECAY, 1))
            l_row.append(load_shared(at + L_ROW, 1))
            p_row.append(load_shared(at + P_ROW, 1))
        for block in cutlass.range_constexpr(4):
            if block <= warp:
                for half in cutlass.range_constexpr(2):
                    n = 2 * block + half
                    column = 8 * n + 2 * (lane & 3)
                    g_column = load_shared(vector + LOG_DECAY + column * 4, 2)
                    factor = load_shared(vector + COLUMN + column * 4, 2)
                    for r in cutlass.range_constexpr(2):
                        i = row + 8 * r
                        low, high = Float32(0.0), Float32(0.0)
                        p_low, p_high = Float32(0.0), Float32(0.0)
                        for e in cutlass.range_constexpr(2):
                            j = column + e
                            pair = factor[e] * cute.math.exp2(
                                cutlass.min(g_row[r] - g_column[e], Float32(0.0)), fastmath=True
                            )
                            known = (j <= i) & (i < count)
                            entry = kk[4 * n + 2 * r + e] * (l_row[r] * pair)
                            weight = qk[4 * n + 2 * r + e] * (p_row[r] * pair)
                            weight = weight if known else Float32(0.0)
                            entry = entry if known & (j < i) else Float32(0.0)
                            if cutlass.const_expr(e == 0):
                                low, p_low = entry, weight
                            else:
                                high, p_high = entry, weight
                        weights[4 * block + 2 * half + r] = pack_f16(p_low, p_high)
                        if block == warp:
                            store_shared(diagonal + ((lane >> 2) + 8 * r) * 64 + half * 32 + (lane & 3) * 8, low, high)
                        else:
                            store_shared(lower + i * LOWER_PITCH + column * 2, pack_f16(low, high))
        return weights

    @cute.jit
    def run_state(
        self, tidx, warp, lane, slab, mPool, num_slots, sK, sQ, sU, sT, sP, v_base, vectors, outputs, records, finished, read_mma,
        token_mma, update_mma, k_ring, q_ring, v_ring, row_ring, pair_ring, out_ring,
    ):  # fmt: skip
        """The serial chain: one slab of S across all chunks of the block."""
        by_read, by_token, by_update = (mma.get_slice(tidx) for mma in (read_mma, token_mma, update_mma))
        swapped = cute.make_tensor(sU.iterator, cute.select(sU.layout, [1, 0, 2]))
        right_k = read_mma.make_fragment_B(by_read.partition_B(sK))
        right_q = read_mma.make_fragment_B(by_read.partition_B(sQ))
        right_t = token_mma.make_fragment_B(by_token.partition_B(sT))
        right_p = token_mma.make_fragment_B(by_token.partition_B(sP))
        right_u = update_mma.make_fragment_B(by_update.partition_B(swapped))
        read_shape = by_read.partition_shape_A((2 * 64, HEAD))
        token_shape = by_token.partition_shape_A((2 * 64, CHUNK))
        S = cute.make_rmem_tensor(by_update.partition_shape_C((2 * 64, HEAD)), Float32)
        Y = cute.make_rmem_tensor(by_read.partition_shape_C((2 * 64, CHUNK)), Float32)
        O = cute.make_rmem_tensor(by_read.partition_shape_C((2 * 64, CHUNK)), Float32)
        row = slab * 64 + warp * 16 + (lane >> 2)
        column = 2 * (lane & 3)
        k_stage, k_parity, stage, parity = Int32(0), Int32(0), Int32(0), Int32(0)
        k_ring.wait_full(k_stage, k_parity)
        record = read_record(records, k_stage)
        S.fill(0.0)
        while (record[Field.FLAGS] & Flag.STOP) == 0:
            count, flags, head = record[Field.COUNT], record[Field.FLAGS], record[Field.HEAD]
            vector = vectors + stage * VECTOR_BYTES
            if (flags & Flag.FIRST) != 0:
                load_state(S, mPool, record[Field.READ], num_slots, head, row, column)
            left_s = as_left_operand(S, read_shape, BFloat16)
            warpgroup.fence()
            contract(read_mma, Y, left_s, right_k, k_stage, HEAD // 16, False)
            warpgroup.commit_group()
            row_ring.wait_full(stage, parity)
            decay_state(S, vector + DECAY, lane, False)
            v_ring.wait_full(stage, parity)
            warpgroup.wait_group(0)
            k_ring.release(k_stage)
            residual(Y, v_base + stage * OPERAND_BYTES + slab * TILE_BYTES, vector + X_FACTOR, count, warp, lane, True)
            left_x = as_left_operand(Y, token_shape, Float16)
            v_ring.release(stage)
            pair_ring.wait_full(stage, parity)
            warpgroup.fence()
            contract(token_mma, Y, left_x, right_t, stage, CHUNK // 16, False)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            left_v = as_left_operand(Y, token_shape, Float16)
            q_ring.wait_full(stage, parity)
            warpgroup.fence()
            contract(update_mma, S, left_v, right_u, stage, CHUNK // 16, True)
            contract(read_mma, O, left_s, right_q, stage, HEAD // 16, False)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            q_ring.release(stage)
            scale_columns(O, vector + O_FACTOR, lane)
            warpgroup.fence()
            contract(token_mma, O, left_v, right_p, stage, CHUNK // 16, True)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            row_ring.release(stage)
            pair_ring.release(stage)
            out_ring.wait_empty(stage, parity)
            store_output(O, outputs + stage * CHUNK * OUT_PITCH, slab, warp, lane)
            if tidx == 0:
                write_record(finished, stage, record)
            out_ring.publish_to_async(stage)
            store_state(S, mPool, record[Field.CHECKPOINT], num_slots, head, row, column)
            if (flags & Flag.LAST) != 0:
                store_state(S, mPool, record[Field.WRITE], num_slots, head, row, column)
            k_stage, k_parity = advance(k_stage, k_parity, K_STAGES)
            stage, parity = advance(stage, parity, STAGES)
            k_ring.wait_full(k_stage, k_parity)
            record = read_record(records, k_stage)
        out_ring.wait_empty(stage, parity)
        if tidx == 0:
            write_record(finished, stage, record)
        out_ring.publish(stage)

    @cute.jit
    def run_output(self, lane, mOut, outputs, finished, out_ring):
        """Finished output stages to global memory."""
        stage, parity = Int32(0), Int32(0)
        out_ring.wait_full(stage, parity)
        record = read_record(finished, stage)
        while (record[Field.FLAGS] & Flag.STOP) == 0:
            store_output_rows(
                outputs + stage * CHUNK * OUT_PITCH,
                mOut,
                record[Field.TOKEN],
                record[Field.COUNT],
                record[Field.HEAD],
                lane,
            )
            out_ring.release(stage)
            stage, parity = advance(stage, parity, STAGES)
            out_ring.wait_full(stage, parity)
            record = read_record(finished, stage)


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
        out, Int32(1), Int32(1), Int32(1), Int32(0), Int32(1), Float32(1.0), fake_stream(),
    )  # fmt: skip
