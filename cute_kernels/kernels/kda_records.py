"""First of the two KDA prefill kernels: everything of a chunk that does not depend on the state, for all chunks at once.

Two blocks of 256 threads stay on each multiprocessor, each with an equal run of (chunk slot, head) items. Of an item a block
computes the record (`device/kda_layout.py`):

1  inputs: TMA brought k, q and the raw gate; a thread owns 2 channels of 16 tokens;
2  decay alpha = exp(g); row sums k.k, q.q, q.k as diagonals of matrix products; one barrier, behind which the next item's gate
   is loaded; norms, beta and the diagonal of P; one barrier;
3  running products of alpha inside the 16 tokens, joined across the four groups by their totals, give KG, QG and KU, which go
   from registers to the record, and the operands of level 32 and 16; level 8 and below lie inside a thread's tokens;
4  pair products k_i.k_j and q_i.k_j (j < i) with their decay between: row i and column j meet at the level of the highest bit
   in which i and j differ, one wgmma [64 x 32 x 128] a level, three levels at a time;
5  L and P are gathered from the levels; T' = (I + L)^-1 diag(beta) by warps 0-3; P and T' go to the record. Warp 7 starts
   the loads of the next item's k and q and has those of the one behind it brought to L2; warps 4-7 go on to stage 2 meanwhile.

Every factor is a product of decays, at most 1, of tokens between column and row: right for any gate, causal bit by bit.
112 KiB of shared memory (k and q lie where the row operands of the levels are written) and 128 registers a thread.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from ..compile.cache import cute_compile
from ..compile.fake import fake_ids, fake_matrix, fake_rows, fake_stream, fake_vector
from ..configs.kda_prefill import KdaRecordsKey
from ..device.arith import sigmoid
from ..device.kda_gate import decay_bounded, decay_softplus, gate_constants
from ..device.kda_layout import (
    INFO_OFFSET,
    KG_OFFSET,
    KU_OFFSET,
    P_OFFSET,
    QG_OFFSET,
    RECORD_BYTES,
    T_OFFSET,
    TAIL_OFFSET,
    chunk_of_slot,
)
from ..device.kda_levels import level_products
from ..device.kda_rows import (
    GROUP,
    LevelTiles,
    copy_tile,
    load_words,
    local_level,
    mask_words,
    multiply_f16,
    reread,
    row_products,
    store_column,
    store_float,
    store_global_word,
    store_row,
    swizzled,
    tree_product,
)
from ..device.memory import load_vector
from ..device.prefill_inverse import DIAGONAL_BYTES, merge_blocks, solve_diagonal
from ..device.prefill_layout import CHUNK, HEAD, LOWER_PITCH, OPERAND_BYTES, TILE_BYTES, tile_address
from ..device.prefill_rows import owns_norms
from ..device.prefill_sync import Bundle
from ..device.state_io import row_ptr
from ..device.warp_ops import load_shared, pack_f16, store_shared, store_shared_half, unpack_bf16

THREADS = 256
BLOCKS = 2 * 132  # resident on the chip at once; each takes an equal run of (chunk slot, head) items
LOADER = 7  # warp that starts the loads, one without part in the inverse
LEVELS = ((32, 16, 8), (4, 2, 1))
NORM_EPS = 1e-6
MINUS_INFINITY_PAIR = 0xFF80FF80  # bf16 raw gates whose decay is exactly 1


class KdaRecords:
    def __init__(self, key: KdaRecordsKey):
        self.key = key
        self.bounded = key.gate == "bounded"

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (T, HK * K) bf16
        mK: cute.Tensor,  # (T, HK * K) bf16
        mG: cute.Tensor,  # (T, HV * K) bf16, raw gate
        mB: cute.Tensor,  # (T, HV) bf16 logits
        mALog: cute.Tensor,  # (HV,) fp32
        mBias: cute.Tensor,  # (HV * K,) fp32
        mCu: cute.Tensor,  # (N + 1,) int32
        mEntryCu: cute.Tensor,  # (N + 1,) int32, checkpoint entries per row
        mEnds: cute.Tensor,  # (M,) int32
        mTable: cute.Tensor,  # (slots of this launch, 4) int32: first token, count, start in the row, first entry
        mRecords: cute.Tensor,  # (slots * heads, RECORD_BYTES / 4) int32
        scale: Float32,
        lower_bound: Float32,
        l2norm: Int32,  # whether q and k arrive un-normalised
        has_entries: Int32,  # whether mEntryCu and mEnds hold checkpoints
        min_tokens: Int32,  # rows of fewer tokens are left alone
        first_chunk: Int32,  # slot of the table's first line
        first_head: Int32,
        heads: Int32,
        group_size: Int32,  # value heads per key head
        stream,
    ):
        def swizzled(rows):
            atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, Float16)
            return cute.tile_to_shape(atom, (rows, HEAD, 3), order=(0, 1, 2))

        row_layout, column_layout = swizzled(64), swizzled(32)
        k_major = OperandMajorMode.K
        op = warpgroup.MmaF16BF16Op(Float16, Float32, (64, 16, 16), warpgroup.OperandSource.SMEM, k_major, k_major)
        mma = cute.make_tiled_mma(cute.make_mma_atom(op), cute.make_layout((1, 2, 1)))

        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        input_layout = cute.tile_to_shape(atom, (CHUNK, HEAD), order=(0, 1))
        load = cpasync.CopyBulkTensorTileG2SOp()
        inputs = [cpasync.make_tiled_tma_atom(load, mX, input_layout, (CHUNK, HEAD)) for mX in (mK, mQ, mG)]

        @cute.struct
        class Storage:
            rows: cute.struct.Align[cute.struct.MemRange[Float16, cute.cosize(row_layout)], 1024]
            columns: cute.struct.Align[cute.struct.MemRange[Float16, cute.cosize(column_layout)], 1024]
            gate: cute.struct.Align[cute.struct.MemRange[Uint32, OPERAND_BYTES // 4], 1024]
            products: cute.struct.Align[cute.struct.MemRange[Uint32, TILE_BYTES // 4], 1024]
            lower: cute.struct.Align[cute.struct.MemRange[Uint32, CHUNK * LOWER_PITCH // 4], 128]
            diagonal: cute.struct.Align[cute.struct.MemRange[Float32, DIAGONAL_BYTES], 128]
            totals: cute.struct.Align[cute.struct.MemRange[Float32, 4 * HEAD], 128]
            norms: cute.struct.Align[cute.struct.MemRange[Float32, 2 * CHUNK], 128]
            beta: cute.struct.Align[cute.struct.MemRange[Float32, CHUNK], 128]
            info: cute.struct.Align[cute.struct.MemRange[Int32, 16], 16]  # of the next item, then of the one behind it
            loaded: cute.struct.MemRange[cutlass.Int64, 2]  # k and q; gate

        self.storage = Storage
        self.kernel.set_name_prefix(self.key.symbol(), remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            inputs[0][0], inputs[0][1], inputs[1][0], inputs[1][1], inputs[2][0], inputs[2][1], mB, mALog, mBias, mCu, mEntryCu,
            mEnds, mTable, mRecords, scale, lower_bound, l2norm, has_entries, min_tokens, first_chunk, first_head, heads,
            group_size, mma, row_layout, column_layout, input_layout,
        ).launch(
            grid=[cutlass.min(cute.size(mTable, mode=[0]) * heads, BLOCKS), 1, 1],
            block=[THREADS, 1, 1],
            max_number_threads=[2 * THREADS, 1, 1],  # caps registers so that two blocks fit an SM
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        tma_k: cute.CopyAtom,
        gK: cute.Tensor,
        tma_q: cute.CopyAtom,
        gQ: cute.Tensor,
        tma_g: cute.CopyAtom,
        gG: cute.Tensor,
        mB: cute.Tensor,
        mALog: cute.Tensor,
        mBias: cute.Tensor,
        mCu: cute.Tensor,
        mEntryCu: cute.Tensor,
        mEnds: cute.Tensor,
        mTable: cute.Tensor,
        mRecords: cute.Tensor,
        scale: Float32,
        lower_bound: Float32,
        l2norm: Int32,
        has_entries: Int32,
        min_tokens: Int32,
        first_chunk: Int32,
        first_head: Int32,
        heads: Int32,
        group_size: Int32,
        mma: cute.TiledMma,
        row_layout: cute.ComposedLayout,
        column_layout: cute.ComposedLayout,
        input_layout: cute.ComposedLayout,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(tidx // 32)
        lane = tidx % 32
        storage = cutlass.utils.SmemAllocator().allocate(self.storage)
        sR = storage.rows.get_tensor(row_layout.outer, swizzle=row_layout.inner)
        sC = storage.columns.get_tensor(column_layout.outer, swizzle=column_layout.inner)
        loaded = storage.loaded.data_ptr()
        if tidx == 0:
            cute.arch.mbarrier_init(loaded, 1)
            cute.arch.mbarrier_init(loaded + 1, 2)
            cute.arch.mbarrier_init_fence()
        # k and q come where the levels' row operands are written later; T' and the row sums lie where their columns are.
        rows, columns = sR.iterator.toint(), sC.iterator.toint()
        named = ("products", "lower", "diagonal", "totals", "norms", "beta")
        products, lower, diagonal, totals, norms, beta = (getattr(storage, name).data_ptr().toint() for name in named)
        gate = storage.gate.data_ptr()
        addresses = [
            rows, columns, gate.toint(), products, columns, lower, diagonal, totals, columns + TILE_BYTES, norms, beta
        ]  # fmt: skip
        # Above its diagonal P is zero and no one writes it.
        for i in cutlass.range_constexpr(TILE_BYTES // 16 // THREADS):
            store_shared(products + (i * THREADS + tidx) * 16, *[Uint32(0)] * 4)
        cute.arch.sync_threads()
        items = Int64(cute.size(mTable, mode=[0])) * Int64(heads)
        first, stop = Int32(items * Int64(block) // Int64(blocks)), Int32(items * Int64(block + 1) // Int64(blocks))
        info = storage.info.data_ptr().toint()
        tile, gate_tile = (
            cute.recast_ptr(start, input_layout.inner, BFloat16) for start in (storage.rows.data_ptr(), gate)
        )
        inputs = Bundle(
            plan=(mCu, mEntryCu, mEnds), table=mTable, k=(tma_k, gK), q=(tma_q, gQ), gate=(tma_g, gG), tile=tile,
            gate_tile=gate_tile, layout=input_layout, stop=stop, first_chunk=first_chunk, heads=heads, first_head=first_head,
            group_size=group_size, rows=cute.size(mCu, mode=[0]) - 1, lane=lane, has_entries=has_entries, min_tokens=min_tokens,
            loaded=loaded, info=info, b=mB, a_log=mALog, bias=mBias, scale=scale, lower_bound=lower_bound, l2norm=l2norm,
        )  # fmt: skip
        if warp == LOADER:
            self.look_ahead(inputs, first, Int32(-1), Int32(0), Int32(0), Int32(0), Int32(-1))
            self.load_gate(inputs)
            self.start_next(inputs)
        parity = Int32(0)
        cute.arch.mbarrier_wait(loaded + 1, parity)
        count = load_shared(info, 1, Int32)
        bias0, bias1, a_log = self.gate_parameters(inputs, info, tidx)
        while count > 0:
            # Zero, which the compiler cannot know: it would compute all addresses before the loop, and has no registers for it.
            zero = count >> 8
            slot, local_head = load_shared(info + 16, 2, Int32)
            record = mRecords.iterator.toint() + (Int64(slot) * Int64(heads) + Int64(local_head)) * RECORD_BYTES
            self.products_of_chunk(
                inputs, parity, sR, sC, mma, addresses, record, count, first_head + local_head, (bias0, bias1, a_log),
                tidx + zero,
            )  # fmt: skip
            bias0, bias1, a_log = self.gate_parameters(inputs, info + 32, tidx + zero)
            cute.arch.sync_threads()
            # The operands are not needed any more: the next chunk's inputs come while this one's inverse is computed.
            if warp == LOADER:
                self.start_next(inputs)
            self.finish_chunk(addresses, record, tidx + zero)
            parity = parity ^ 1
            cute.arch.mbarrier_wait(loaded + 1, parity)
            count = load_shared(info, 1, Int32)

    def gate_parameters(self, inputs, info, tidx):
        """bias of the thread's two channels and A_log of the item that `info` describes, on their way before they are needed."""
        head = inputs.first_head + load_shared(info + 20, 1, Int32)
        bias = load_vector(inputs.bias.iterator + (head * HEAD + tidx % 64 * 2), 2)
        return bias[0], bias[1], inputs.a_log[head]

    @cute.jit
    def start_next(self, inputs: cutlass.Constexpr):
        """One warp: the item found ahead becomes the block's next one, its k and q are loaded, and the one behind it is found."""
        info = inputs.info
        count, start, end, entry = load_shared(info + 32, 4, Int32)
        slot, local_head, item, token = load_shared(info + 48, 4, Int32)
        cute.arch.sync_warp()
        if inputs.lane == 0:
            store_shared(info, count, start, end, entry)
            store_shared(info + 16, slot, local_head, item, token)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(inputs.loaded + 1)
        if count > 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(inputs.loaded, 2 * OPERAND_BYTES)
            head = (inputs.first_head + local_head) // inputs.group_size
            for place, (tma, gX) in enumerate((inputs.k, inputs.q)):
                tXsX, tXgX = self.input_tile(inputs, tma, gX, inputs.tile + place * (OPERAND_BYTES // 2), token, head)
                cute.copy(tma, tXgX, tXsX, tma_bar_ptr=inputs.loaded)
            self.look_ahead(inputs, item + 1, slot, token, start, count, entry)
        else:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(inputs.loaded + 1)

    @cute.jit
    def load_gate(self, inputs: cutlass.Constexpr):
        """One warp: start the load of the raw gate of the item found ahead."""
        count = load_shared(inputs.info + 32, 1, Int32)
        _, local_head, _, token = load_shared(inputs.info + 48, 4, Int32)
        if count > 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(inputs.loaded + 1, OPERAND_BYTES)
            tma, gX = inputs.gate
            tXsX, tXgX = self.input_tile(inputs, tma, gX, inputs.gate_tile, token, inputs.first_head + local_head)
            cute.copy(tma, tXgX, tXsX, tma_bar_ptr=inputs.loaded + 1)

    @cute.jit
    def look_ahead(
        self,
        inputs: cutlass.Constexpr,
        item: Int32,
        slot: Int32,
        token: Int32,
        start: Int32,
        count: Int32,
        entry: Int32,
    ):
        """One warp: the first item from `item` on whose slot has a chunk, its inputs on their way to L2; count 0 at the end.

        `slot` and what follows are those of the item before it, whose slot is not looked up again. A slot's line of the table is
        written by whoever has the slot's first head.
        """
        heads, lane, table = inputs.heads, inputs.lane, inputs.table
        count = count if (item < inputs.stop) & (item < (slot + 1) * heads) else Int32(0)
        while (item < inputs.stop) & (count == 0):
            slot = item // heads
            found = chunk_of_slot(
                *inputs.plan, inputs.first_chunk + slot, inputs.rows, lane, inputs.has_entries, inputs.min_tokens
            )
            token, start, count, entry = found[0] + found[1], found[1], found[2], found[3]
            if (item == slot * heads) & (lane == 0):
                table[slot, 0] = token
                table[slot, 1] = count
                table[slot, 2] = start
                table[slot, 3] = entry
            item = item if count > 0 else (slot + 1) * heads
        slot = item // heads
        local_head = item - slot * heads
        cute.arch.sync_warp()
        if lane == 0:
            store_shared(inputs.info + 32, count, start, start + count, entry)
            store_shared(inputs.info + 48, slot, local_head, item, token)
        cute.arch.sync_warp()
        if count > 0:
            head = inputs.first_head + local_head
            key_head = head // inputs.group_size
            for (tma, gX), column in ((inputs.k, key_head), (inputs.q, key_head), (inputs.gate, head)):
                _, tXgX = self.input_tile(inputs, tma, gX, inputs.tile, token, column)
                cute.prefetch(tma, tXgX)

    def input_tile(self, inputs, tma, gX, tile, token, head):
        """Rows token .. token + 63 of a head for TMA; rows behind the tensor are zeros, rows of a neighbour are masked later."""
        sX = cute.make_tensor(tile, inputs.layout.outer)
        gTile = cute.local_tile(cute.domain_offset((token, head * HEAD), gX), (CHUNK, HEAD), (0, 0))
        return cpasync.tma_partition(
            tma, 0, cute.make_layout(1), cute.group_modes(sX, 0, 2), cute.group_modes(gTile, 0, 2)
        )

    @cute.jit
    def products_of_chunk(
        self,
        inputs: cutlass.Constexpr,
        parity: Int32,
        sR: cute.Tensor,
        sC: cute.Tensor,
        mma: cute.TiledMma,
        addresses,
        record: Int64,
        count: Int32,
        head: Int32,
        gate_of_head,
        tidx: Int32,
    ):
        """Stages 1 to 4: everything but T' and P goes to the record."""
        row_tiles, column_tiles, gate, products, _, lower, diagonal, totals, sums, norms, beta = addresses
        lane = tidx % 32
        warp = cute.arch.make_warp_uniform(tidx // 32)
        half, group = warp & 1, warp >> 1
        channel = half * 64 + lane * 2
        last = count - 1

        info = inputs.info
        if tidx < 4:
            word = load_shared(info + (tidx ^ (1 if tidx < 2 else 0)) * 4, 1, Uint32)
            store_global_word(record + INFO_OFFSET + Int64(tidx * 4), word)

        # 1  loads
        slope, rate = gate_constants(gate_of_head[2], inputs.lower_bound, self.bounded)
        offset = [slope * gate_of_head[0], slope * gate_of_head[1]]
        logit = Float32(0.0)
        if tidx < CHUNK:
            at = tidx if tidx < count else last
            token = load_shared(info + 28, 1, Int32)
            logit = Float32(load_vector(row_ptr(inputs.b, token + at, head, 2), 1)[0])

        # 2  row sums and decays
        word = lane * 4  # of a tile's row of 64 channels
        tiles = LevelTiles(row_tiles, column_tiles, half, word)
        keys = row_tiles + half * TILE_BYTES
        place = half * TILE_BYTES + group * (GROUP * 128) + word
        raw = load_words(gate + place)
        if count < CHUNK:
            mask_words(raw, count - group * GROUP, Uint32(MINUS_INFINITY_PAIR))
        alpha = []
        for i in cutlass.range_constexpr(GROUP):
            pair = []
            gate = unpack_bf16(raw[i])
            for c in cutlass.range_constexpr(2):
                if const_expr(self.bounded):
                    value = decay_bounded(gate[c], slope, offset[c], rate)
                else:
                    value = decay_softplus(gate[c], slope, offset[c], rate)
                pair.append(value)
            alpha.append(pair)
        store_shared(totals + group * 512 + channel * 4, *(tree_product([pair[c] for pair in alpha]) for c in range(2)))
        cute.arch.mbarrier_wait(inputs.loaded, parity)
        for index, pair in enumerate(row_products(keys, keys + OPERAND_BYTES, group * GROUP, lane)):
            at = sums + index * 512 + half * 256 + (group * GROUP + (lane >> 2)) * 4
            store_float(at, pair[0], owns_norms(lane))
            store_float(at + 32, pair[1], owns_norms(lane))
        cute.arch.sync_threads()
        if warp == LOADER:
            self.load_gate(inputs)
        k_words = load_words(row_tiles + place)
        q_words = load_words(row_tiles + OPERAND_BYTES + place)
        if count < CHUNK:
            mask_words(k_words, count - group * GROUP, Uint32(0))
            mask_words(q_words, count - group * GROUP, Uint32(0))
        if tidx < CHUNK:
            at = sums + tidx * 4
            rk = cute.math.rsqrt(load_shared(at, 1) + load_shared(at + 256, 1) + NORM_EPS, fastmath=True)
            rq = cute.math.rsqrt(load_shared(at + 512, 1) + load_shared(at + 768, 1) + NORM_EPS, fastmath=True)
            rk = rk if inputs.l2norm != 0 else Float32(1.0)
            rq = (rq if inputs.l2norm != 0 else Float32(1.0)) * inputs.scale
            own = (load_shared(at + 1024, 1) + load_shared(at + 1280, 1)) * rk * rq
            store_shared(norms + tidx * 4, rk if tidx < count else Float32(0.0))
            store_shared(norms + 256 + tidx * 4, rq if tidx < count else Float32(0.0))
            own = own if tidx < count else Float32(0.0)
            store_shared_half(tile_address(products, tidx, tidx >> 3) + (tidx & 7) * 2, pack_f16(own, own))
            # Behind the barrier: the last chunk's inverse has read its own.
            store_shared(beta + tidx * 4, sigmoid(logit) if tidx < count else Float32(0.0))
        cute.arch.sync_threads()

        # 3  running products
        norms += group * (GROUP * 4)
        k16, q16, to_row = self.products_from_start(
            alpha, k_words, q_words, norms, totals, record, half, group, channel, word
        )
        # Always true, which the compiler cannot know: it would start the products from the end beside those from the start,
        # for which there are no registers. Nothing computed inside is used behind it, or it would be kept from chunk to chunk.
        if record != 0:
            self.products_from_end(
                sR, sC, mma, tiles, alpha, k16, q16, to_row, addresses, record, half, group, channel, word, tidx
            )

    @cute.jit
    def finish_chunk(self, addresses, record: Int64, tidx: Int32):
        """Stage 5: the inverse by one warpgroup, P to the record by the other."""
        _, _, _, products, inverse, lower, diagonal, _, _, _, beta = addresses
        lane = tidx % 32
        warp = cute.arch.make_warp_uniform(tidx // 32)
        if warp < 4:
            # T' is zero above its diagonal blocks, where column operands were.
            for block in cutlass.range_constexpr(1, 4):
                if warp < block:
                    at = tile_address(inverse, warp * 16 + (lane >> 1), block * 2 + (lane & 1))
                    store_shared(at, *[Uint32(0)] * 4)
            first = solve_diagonal(diagonal + warp * DIAGONAL_BYTES, lower, inverse, beta, warp, lane)
            cute.arch.barrier(barrier_id=1, number_of_threads=128)
            merge_blocks(first, lower, inverse, beta, warp, lane)
            cute.arch.barrier(barrier_id=1, number_of_threads=128)
            copy_tile(inverse, record + T_OFFSET, tidx)
        else:
            copy_tile(products, record + P_OFFSET, tidx - 128)

    @cute.jit
    def products_from_start(
        self,
        alpha,
        k_words,
        q_words,
        norms: Int32,
        totals: Int32,
        record: Int64,
        half: Int32,
        group: Int32,
        channel: Int32,
        word: Int32,
    ):
        """KG and QG to the record. Returns the thread's normalised k and q and its decays from the first row, as fp16 pairs."""
        one = Float32(1.0)
        each = [load_shared(totals + g * 512 + channel * 4, 2) for g in range(4)]
        before = []
        for c in cutlass.range_constexpr(2):
            t0, t1, t2, _ = (each[g][c] for g in range(4))
            before.append(one if group == 0 else (t0 if group == 1 else (t0 * t1 if group == 2 else t0 * t1 * t2)))
        before16 = pack_f16(before[0], before[1])
        place = record + Int64(half * TILE_BYTES + group * (GROUP * 128) + word)
        k16, q16, to_row = [], [], []
        factor = [one, one]
        for i in cutlass.range_constexpr(GROUP):
            if const_expr(i % 2 == 0):
                rk = load_shared(norms + i * 4, 2)
                rq = load_shared(norms + 256 + i * 4, 2)
            if const_expr(i % 8 == 0):
                place = reread(place)
            k = [x * rk[i % 2] for x in unpack_bf16(reread(k_words[i]))]
            q = [x * rq[i % 2] for x in unpack_bf16(reread(q_words[i]))]
            k16.append(pack_f16(k[0], k[1]))
            q16.append(pack_f16(q[0], q[1]))
            factor = [factor[c] * alpha[i][c] for c in range(2)]
            to_row.append(pack_f16(factor[0], factor[1]))
            from_start = multiply_f16(to_row[i], before16)
            target = swizzled(place, i)
            store_global_word(target + KG_OFFSET, multiply_f16(k16[i], from_start))
            store_global_word(target + QG_OFFSET, multiply_f16(q16[i], from_start))
        return k16, q16, to_row

    @cute.jit
    def products_from_end(
        self,
        sR: cute.Tensor,
        sC: cute.Tensor,
        mma: cute.TiledMma,
        tiles,
        alpha,
        k16,
        q16,
        to_row,
        addresses,
        record: Int64,
        half: Int32,
        group: Int32,
        channel: Int32,
        word: Int32,
        tidx: Int32,
    ):
        """KU and e^(G_C) to the record; all operands of the levels and, three levels at a time, their products."""
        _, _, _, products, _, lower, diagonal, totals, _, _, beta = addresses
        one = Float32(1.0)
        place = record + Int64(half * TILE_BYTES + group * (GROUP * 128) + word)
        each = [load_shared(totals + g * 512 + channel * 4, 2) for g in range(4)]
        after, whole, across = [], [], []
        for c in cutlass.range_constexpr(2):
            t0, t1, t2, t3 = (each[g][c] for g in range(4))
            t23 = t2 * t3
            after.append(one if group == 3 else (t3 if group == 2 else (t23 if group == 1 else t1 * t23)))
            whole.append(t0 * t1 * t23)
            # Level 32 joins two groups of its half: the outer one decays through all of the inner one.
            across.append(t1 if group == 0 else (t2 if group == 3 else one))
        across, after = pack_f16(across[0], across[1]), pack_f16(after[0], after[1])
        if group == 0:
            pointer = cute.make_ptr(
                Float32, record + TAIL_OFFSET + Int64(channel * 4), cute.AddressSpace.gmem, assumed_align=8
            )
            gTail = cute.make_tensor(pointer, cute.make_layout(2))
            gTail[0] = whole[0]
            gTail[1] = whole[1]
        to_last, decay16 = [None] * GROUP, [None] * GROUP
        factor = [one, one]
        for step in cutlass.range_constexpr(GROUP):
            i = GROUP - 1 - step
            if const_expr(i % 8 == 7):
                place = reread(place)
            to_last[i] = pack_f16(factor[0], factor[1])
            to_end = multiply_f16(to_last[i], after)
            store_global_word(swizzled(place, i) + KU_OFFSET, multiply_f16(k16[i], to_end))
            factor = [factor[c] * alpha[i][c] for c in range(2)]
            decay16[i] = pack_f16(alpha[i][0], alpha[i][1])
        at16, at32 = (group >> 1) * 2048, (group & 1) * 2048
        rows16, columns16 = tiles.row_base(1, at16), tiles.column_base(1, at16)
        rows32, columns32 = tiles.row_base(0, at32), tiles.column_base(0, at32)
        if group & 1 == 1:
            for i in cutlass.range_constexpr(GROUP):
                store_row(rows16, i, multiply_f16(k16[i], to_row[i]), multiply_f16(q16[i], to_row[i]))
        else:
            for i in cutlass.range_constexpr(GROUP):
                store_column(columns16, i, multiply_f16(k16[i], to_last[i]))
        if group >= 2:
            for i in cutlass.range_constexpr(GROUP):
                far = multiply_f16(to_row[i], across)
                store_row(rows32, i, multiply_f16(k16[i], far), multiply_f16(q16[i], far))
        else:
            for i in cutlass.range_constexpr(GROUP):
                store_column(columns32, i, multiply_f16(k16[i], multiply_f16(to_last[i], across)))
        local_level(tiles, 2, 8, group, k16, q16, decay16)

        # 4  pair products, three levels at a time
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()
        level_products(sR, sC, mma, LEVELS[0], products, lower, diagonal, beta, tidx)
        cute.arch.sync_threads()
        k16, q16, decay16 = ([reread(words[i]) for i in range(GROUP)] for words in (k16, q16, decay16))
        for slot in cutlass.range_constexpr(3):
            local_level(tiles, slot, LEVELS[1][slot], group, k16, q16, decay16)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()
        level_products(sR, sC, mma, LEVELS[1], products, lower, diagonal, beta, tidx)


def build(key: KdaRecordsKey):
    """Compile one specialisation for sm_90a from fake tensors."""
    tokens, rows = cute.sym_int(), cute.sym_int()
    return cute_compile(
        KdaRecords(key),
        fake_rows(BFloat16, tokens),
        fake_rows(BFloat16, tokens),
        fake_rows(BFloat16, tokens),
        fake_rows(BFloat16, tokens, divisibility=1, align=2),
        fake_vector(Float32),
        fake_vector(Float32, align=8),
        fake_ids(rows, Int32),
        fake_ids(rows, Int32),
        fake_ids(cute.sym_int(), Int32),
        fake_matrix(Int32, columns=4),
        fake_matrix(Int32, columns=RECORD_BYTES // 4),
        Float32(1.0),
        Float32(-1.0),
        *(Int32(1) for _ in range(7)),
        fake_stream(),
    )
