"""First of the two KDA prefill kernels: everything of a chunk that does not depend on the state, for all chunks at once.

Two blocks of 256 threads stay on each multiprocessor, each with as many (chunk slot, head) items. Of an item a block
computes the record (`device/kda_layout.py`). Warps 0 to 3 have 16 tokens each and the first half of the channels, warps 7 to 4
the same tokens and the second half, as matrix fragments in registers (`device/kda_fragments.py`).

1  log decays, fp16, by warps 4 to 7 alone, of both halves (of a worker's first item by all warps); from what they sum to over
   16 tokens: decays before, behind and through each 16 tokens, and e^(G_C);
2  row sums k.k, q.q, q.k; one barrier, behind which the next item's gate is loaded;
3  KG, QG and KU over k, q and the log decays, column operands, and pair products within 16 tokens; one barrier, behind which
   warp 0 sends KG, QG and KU to the record in bulk and, when they are read, loads the next item's k and q there;
4  pair products with earlier tokens, k_i.k_j and q_i.k_j (j < i); each warp sums one of the two kinds over both halves. Warps
   4 to 7 have P, send it to the record and go on to the next item; warps 0 to 3 have L and compute T' = (I + L)^-1 diag(beta).

Every factor is a product of decays of tokens between column and row, or one of a pair of factors whose product is: right for
any gate, causal bit by bit. 113 KiB of shared memory and 128 registers a thread.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from ..compile.cache import cute_compile
from ..compile.fake import fake_ids, fake_matrix, fake_rows, fake_stream, fake_vector
from ..configs.kda_prefill import KdaRecordsKey
from ..device import kda_items
from ..device.arith import sigmoid
from ..device.kda_fragments import (
    COLUMN_BYTES,
    PAIR_BYTES,
    PAIR_WORDS,
    RAW_GATE,
    STEPS,
    BlockPairs,
    Patterns,
    block_below,
    fragment_address,
    log_decays,
    mask_rows,
    place_lower,
    place_products,
    range_sums,
    receive_entries,
    right_address,
    row_sums,
    send_half,
    step_operands,
    summed,
)
from ..device.kda_gate import gate_constants, log_decay_bounded, softplus_gate
from ..device.kda_inputs import find_next, gate_parameters, load_first, load_gate, start_next, store_parameters
from ..device.kda_layout import (
    INFO_OFFSET,
    KG_OFFSET,
    KU_OFFSET,
    RECORD_BYTES,
    T_OFFSET,
    TRIANGLE_BYTES,
)
from ..device.kda_rows import (
    TABLE_BYTES,
    make_tables,
    partial_offset,
    store_block,
    store_bulk,
    store_float,
    store_global_word,
)
from ..device.memory import load_vector
from ..device.prefill_inverse import merge_any_column, solve_diagonal
from ..device.prefill_layout import CHUNK, HEAD, LOWER_PITCH, OPERAND_BYTES, TILE_BYTES, tile_address
from ..device.prefill_rows import owns_norms
from ..device.prefill_sync import Bundle
from ..device.state_io import row_ptr
from ..device.warp_ops import load_shared, reread, store_shared

THREADS, LOADER = kda_items.THREADS, kda_items.LOADER
IDLE = 3  # warp that has no part in merging the inverse's blocks
PIECE_BYTES = 4096  # of bulk stores where memory is the limit; beside the recurrence a first record comes sooner in two
NORM_EPS = 1e-6
MINUS_INFINITY_PAIR = 0xFF80FF80  # bf16 raw gates whose decay is exactly 1
SUMS_PITCH = 32  # bytes of a row's sums: k.k, q.q and q.k, each of two halves of the channels


class KdaRecords:
    def __init__(self, key: KdaRecordsKey):
        self.key = key
        self.bounded = key.gate == "bounded"
        self.steep = key.steep

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
        mFlags: cute.Tensor,  # (slots * heads,) int32, beside the recurrence: which records are there
        scale: Float32,
        lower_bound: Float32,
        l2norm: Int32,  # whether q and k arrive un-normalised
        has_entries: Int32,  # whether mEntryCu and mEnds hold checkpoints
        min_tokens: Int32,  # rows of fewer tokens are left alone
        first_chunk: Int32,  # slot of the table's first line
        first_head: Int32,
        heads: Int32,
        group_size: Int32,  # value heads per key head
        blocks: Int32,  # at most so many
        stay: Int32,  # of them make records to the end, the others as many as in `rounds` rounds of all workers; without a
        # recurrence beside it: how many rows that behind it walks at once
        rounds: Int32,
        early: Int32,  # blocks whose first item must come soon
        long_length: Int32,  # rows of so many tokens or more run in `parts` segments
        parts: Int32,
        stream,
    ):
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        input_layout = cute.tile_to_shape(atom, (CHUNK, HEAD), order=(0, 1))
        load = cpasync.CopyBulkTensorTileG2SOp()
        inputs = [cpasync.make_tiled_tma_atom(load, mX, input_layout, (CHUNK, HEAD)) for mX in (mK, mQ, mG)]

        def words(count):
            return cute.struct.MemRange[Uint32, count // 4]

        @cute.struct
        class Storage:
            inputs: cute.struct.Align[
                words(4 * OPERAND_BYTES), 1024
            ]  # k, q and log decays, then KG, QG and KU; raw gate
            columns: cute.struct.Align[words(2 * COLUMN_BYTES), 1024]  # later T'
            lower: cute.struct.Align[words(CHUNK * LOWER_PITCH), 128]
            partial: cute.struct.Align[words(partial_offset(4)), 128]
            totals: cute.struct.Align[words(4 * HEAD * 4), 128]
            tables: cute.struct.Align[words(3 * TABLE_BYTES), 128]
            sums: cute.struct.Align[words(CHUNK * SUMS_PITCH), 128]
            beta: cute.struct.Align[words(CHUNK * 4), 128]
            bias: cute.struct.Align[words(HEAD * 4 + 16), 128]
            info: cute.struct.Align[
                words(kda_items.INFO_BYTES), 16
            ]  # of the next item, of the one behind it; see `kda_items`
            loaded: cute.struct.MemRange[
                cutlass.Int64, 3
            ]  # k and q; gate and info; the first worker's: flags are cleared

        self.storage = Storage
        self.kernel.set_name_prefix(self.key.symbol(), remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            inputs[0][0], inputs[0][1], inputs[1][0], inputs[1][1], inputs[2][0], inputs[2][1], mB, mALog, mBias, mCu, mEntryCu,
            mEnds, mTable, mRecords, mFlags, scale, lower_bound, l2norm, has_entries, min_tokens, first_chunk, first_head, heads,
            group_size, stay, rounds, early, long_length, parts, input_layout,
        ).launch(
            grid=[cutlass.min((cute.size(mTable, mode=[0]) * heads + 1) // 2 * 2, blocks), 1, 1],
            block=[kda_items.workers_of_block(self.key.overlapped) * THREADS, 1, 1],
            max_number_threads=[2 * THREADS, 1, 1],  # caps registers so that two blocks fit an SM
            # Multiprocessors are left to the recurrence in pairs of neighbours, as the halves of a head need them.
            cluster=[2, 1, 1] if self.key.overlapped else None,
            stream=stream,
            use_pdl=True,
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
        mFlags: cute.Tensor,
        scale: Float32,
        lower_bound: Float32,
        l2norm: Int32,
        has_entries: Int32,
        min_tokens: Int32,
        first_chunk: Int32,
        first_head: Int32,
        heads: Int32,
        group_size: Int32,
        stay: Int32,
        rounds: Int32,
        early: Int32,
        long_length: Int32,
        parts: Int32,
        input_layout: cute.ComposedLayout,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        worker, tidx, storage = kda_items.place_worker(self.storage, tidx, self.key.overlapped)
        warp = cute.arch.make_warp_uniform(tidx // 32)
        lane = tidx % 32
        loaded = storage.loaded.data_ptr()
        if tidx == 0:
            cute.arch.mbarrier_init(loaded, 1)
            cute.arch.mbarrier_init(loaded + 1, 2)
            cute.arch.mbarrier_init(loaded + 2, 2 * kda_items.OTHERS)
            cute.arch.mbarrier_init_fence()
        if warp == LOADER:
            for tma in (tma_g, tma_k, tma_q):
                cpasync.prefetch_descriptor(tma)
        # Everything before this launch has ended; here it touches global memory for the first time.
        cute.arch.griddepcontrol_wait()
        names = ("columns", "lower", "partial", "totals", "tables", "sums", "beta", "bias", "info")
        at = {name: getattr(storage, name).data_ptr().toint() for name in names}
        slots, turns = cute.size(mTable, mode=[0]), (stay, rounds, early)
        plan = (mCu, mEntryCu, has_entries, min_tokens, first_chunk)
        dealt = kda_items.deal(plan, slots, heads, block, blocks, worker, turns, self.key.overlapped)
        start = storage.inputs.data_ptr()
        inputs = Bundle(
            plan=(mCu, mEntryCu, mEnds), table=mTable, k=(tma_k, gK), q=(tma_q, gQ), gate=(tma_g, gG),
            tile=cute.recast_ptr(start, input_layout.inner, BFloat16), layout=input_layout, first_chunk=first_chunk,
            heads=heads, first_head=first_head, group_size=group_size, rows=cute.size(mCu, mode=[0]) - 1,
            has_entries=has_entries, min_tokens=min_tokens, loaded=loaded, info=at["info"], b=mB, a_log=mALog, bias=mBias,
            scale=scale, lower_bound=lower_bound, l2norm=l2norm, start=start.toint(), at=at, slots=slots, worker=worker,
            overlapped=self.key.overlapped, flags=mFlags.iterator.toint(), long_length=long_length, parts=parts,
            pitch=kda_items.storage_pitch(self.storage), cleared=kda_items.first_of_block(self.storage, loaded, worker), **dealt,
        )  # fmt: skip
        likely = inputs.first % heads  # the first item's head, unless its slot has no chunk
        bias, a_log = gate_parameters(inputs, likely, tidx)
        if tidx == 0:
            kda_items.begin_info(inputs)
        cute.arch.sync_threads()
        if warp == LOADER:
            load_first(inputs, block)
        kda_items.begin(inputs, block, warp)
        kda_items.sync(inputs)
        local_head = load_shared(at["info"] + 20, 1, Int32)
        if local_head != likely:
            bias, a_log = gate_parameters(inputs, local_head, tidx)
        if warp == LOADER:
            find_next(inputs)
        kda_items.wait_for_first(inputs, block)
        parity = Int32(0)
        info = at["info"]
        cute.arch.mbarrier_wait(loaded + 1, parity)
        count = load_shared(info, 1, Int32)
        store_parameters(inputs, bias, a_log, tidx)
        kda_items.sync(inputs)
        while count > 0:
            # Zero, which the compiler cannot know: it would compute all addresses before the loop, and has no registers for it.
            zero = count >> 8
            slot, local_head = load_shared(info + 16, 2, Int32)
            record = mRecords.iterator.toint() + (Int64(slot) * Int64(heads) + Int64(local_head)) * RECORD_BYTES
            self.chunk(inputs, parity, record, count, first_head + local_head, tidx + zero)
            kda_items.hand_over(inputs, warp)
            parity = parity ^ 1
            cute.arch.mbarrier_wait(loaded + 1, parity)
            count = load_shared(info, 1, Int32)
        kda_items.finish(inputs, tidx)
        cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def chunk(
        self,
        inputs: cutlass.Constexpr,
        parity: Int32,
        record: Int64,
        count: Int32,
        head: Int32,
        tidx: Int32,
    ):
        """One item: its record."""
        at, info = inputs.at, inputs.info
        lane = tidx % 32
        warp = cute.arch.make_warp_uniform(tidx // 32)
        half = warp >> 2
        kda_items.keep_record(inputs, record, tidx)
        block = warp if warp < 4 else 7 - warp  # the schedulers' pairs of warps have equal numbers of products
        if tidx < 4:
            word = load_shared(info + (tidx ^ (1 if tidx < 2 else 0)) * 4, 1, Uint32)
            store_global_word(record + INFO_OFFSET + Int64(tidx * 4), word)
        at_row = block * 16 + (lane & 15)
        token = load_shared(info + 28, 1, Int32) + (at_row if at_row < count else count - 1)
        logit = load_vector(row_ptr(inputs.b, token, head, 2), 1)[0]

        # 1  log decays and what follows from their sums, while the other warps are at the last item's inverse
        alone = kda_items.is_first(inputs)  # nobody is at an inverse: all warps take part, each with its own half
        if (half == 1) | alone:
            part, stop = Int32(0), Int32(2)
            if alone:
                part, stop = half, half + 1
            while part < stop:
                self.decays_of_block(inputs, count, block, lane, part)
                part += 1
            decays = kda_items.barrier_of(inputs, kda_items.DECAYS)
            if half == 1:
                cute.arch.barrier(barrier_id=decays, number_of_threads=THREADS if alone else THREADS // 2)
                make_tables(at["totals"], at["tables"], record, tidx - 128)
            else:
                cute.arch.barrier_arrive(barrier_id=decays, number_of_threads=THREADS)

        # 2  row sums
        cute.arch.mbarrier_wait(inputs.loaded, parity)
        self.sums_of_block(inputs, count, block, half, lane)
        if (half == 0) & (lane < 16):
            # Negative, and with it T', as the recurrence's X is.
            store_shared(at["beta"] + at_row * 4, -sigmoid(Float32(logit)) if at_row < count else Float32(0.0))
        kda_items.sync(inputs)
        if warp == LOADER:
            load_gate(inputs)

        # Always true, which the compiler cannot know: it would start what follows before the barrier, without registers for it.
        if record != 0:
            self.products_of_chunk(inputs, record, block, half, tidx)
        lane = reread(tidx) % 32
        if warp == LOADER:
            start_next(inputs)
        if half == 0:
            # T' comes where column operands were, which all warps have used.
            cute.arch.barrier(barrier_id=kda_items.barrier_of(inputs, kda_items.INVERSE), number_of_threads=128)
            diagonal, inverse = at["partial"] + partial_offset(warp), at["columns"]
            record = kda_items.kept_record(inputs, record)
            solve_diagonal(diagonal, at["lower"], inverse, at["beta"], warp, lane)
            cute.arch.barrier(barrier_id=kda_items.barrier_of(inputs, kda_items.INVERSE), number_of_threads=128)
            if warp == IDLE:
                find_next(inputs)
            else:
                merge_any_column(at["lower"], inverse, at["beta"], warp, lane)
            cute.arch.barrier(barrier_id=kda_items.barrier_of(inputs, kda_items.INVERSE), number_of_threads=128)
            piece = [tile_address(inverse, warp * 16 + (lane >> 1), 2 * i + (lane & 1)) for i in range(4)]
            store_block(record + T_OFFSET, warp, lane, piece)

    @cute.jit
    def decays_of_block(self, inputs: cutlass.Constexpr, count: Int32, block: Int32, lane: Int32, half: Int32):
        """Log decays of 16 tokens and half of the channels, and what each channel's sum to."""
        parameters = inputs.at["bias"]
        slope, rate = gate_constants(load_shared(parameters + HEAD * 4, 1), inputs.lower_bound, self.bounded)
        start = fragment_address(inputs.start + half * TILE_BYTES, block, lane)
        if count < CHUNK:
            mask_rows(RAW_GATE, start, block * 16 + (lane >> 2), count, MINUS_INFINITY_PAIR)
            cute.arch.fence_view_async_shared()  # before the next gate comes there
            cute.arch.sync_warp()
        bias = parameters + (half * 64 + (lane >> 2)) * 4
        offsets = [reread(slope * load_shared(bias + 32 * p, 1)) for p in range(8)]
        decays = log_decays(start, offsets, self.gate(slope, rate))
        everything = Patterns(lane).all
        totals = [range_sums(everything, decays, piece) for piece in range(8)]
        if lane < 4:
            target = inputs.at["totals"] + block * (HEAD * 4) + half * 256 + lane * 8
            for piece in cutlass.range_constexpr(8):
                store_shared(target + piece * 32, totals[piece][0], totals[piece][1])

    @cute.jit
    def sums_of_block(self, inputs: cutlass.Constexpr, count: Int32, block: Int32, half: Int32, lane: Int32):
        """Sums k.k, q.q and q.k of 16 rows over half of the channels; rows behind the chunk become zeros first."""
        row = block * 16 + (lane >> 2)
        tile = inputs.start + half * TILE_BYTES
        start = fragment_address(tile, block, lane)
        if count < CHUNK:
            mask_rows(0, start, row, count, 0)
            mask_rows(OPERAND_BYTES, start, row, count, 0)
            cute.arch.sync_warp()
        for index, pair in enumerate(row_sums(start, lane)):
            target = inputs.at["sums"] + row * SUMS_PITCH + index * 8 + half * 4
            for j in cutlass.range_constexpr(2):
                store_float(target + 8 * j * SUMS_PITCH, pair[j], owns_norms(lane))

    @cute.jit
    def products_of_chunk(
        self,
        inputs: cutlass.Constexpr,
        record: Int64,
        block: Int32,
        half: Int32,
        tidx: Int32,
    ):
        """KG, QG, KU and P to the record, L to shared memory; there also the next item's bias."""
        at = inputs.at
        tidx = reread(tidx)
        lane = tidx % 32
        r, c = lane >> 2, lane & 3
        # 3  operands, and the pairs of the block
        norms = [[], []]
        buffer = at["partial"] + partial_offset(block)
        own = (
            buffer + 1024 * (block + 1) + 768 + lane * 8
        )  # behind the first entries that the block's second warp receives
        for j in cutlass.range_constexpr(2):
            source = at["sums"] + (block * 16 + r + 8 * j) * SUMS_PITCH
            k0, k1, q0, q1 = load_shared(source, 4)
            m0, m1 = load_shared(source + 16, 2)
            rk, rq = (cute.math.rsqrt(x + NORM_EPS, fastmath=True) for x in (k0 + k1, q0 + q1))
            rk = rk if inputs.l2norm != 0 else Float32(1.0)
            rq = (rq if inputs.l2norm != 0 else Float32(1.0)) * inputs.scale
            norms[0].append(rk)
            norms[1].append(rq)
            if half != 0:
                store_shared(own + 4 * j, (m0 + m1) * rk * rq)
        pairs = BlockPairs(self.steep, Patterns(lane))
        start = fragment_address(inputs.start + half * TILE_BYTES, block, lane)
        column_start = fragment_address(at["columns"] + half * COLUMN_BYTES, block, lane)
        has_columns = Int32(1) if block < 3 else Int32(0)
        table = at["tables"] + ((block * 2 + half) * 4 + c) * 32
        operands = (start, column_start, has_columns, norms)
        self.steps_from(0, inputs, record, operands, table, pairs, ([], []), block, half, tidx)

    @cute.jit
    def steps_from(
        self,
        step: cutlass.Constexpr,
        inputs: cutlass.Constexpr,
        record: Int64,
        operands,
        table: Int32,
        pairs,
        found,
        block: Int32,
        half: Int32,
        tidx: Int32,
    ):
        """Operands of the steps from `step` on, and what follows them."""
        at = inputs.at
        if const_expr(step == STEPS - 1):
            parameters = gate_parameters(inputs, load_shared(inputs.info + 52, 1, Int32), tidx)
        tables = [load_shared(table + which * TABLE_BYTES + 8 * step, 2, Uint32) for which in (0, 1)]
        x, y = step_operands(step, *operands, *tables, pairs)
        rows, queries = [*found[0], *x], [*found[1], *y]
        if const_expr(step < STEPS - 1):
            if const_expr(step != 1):
                self.steps_from(step + 1, inputs, record, operands, table, pairs, (rows, queries), block, half, tidx)
            # Always true, which the compiler cannot know: it would mix the steps, and spill.
            elif cute.arch.block_idx()[1] == 0:
                self.steps_from(step + 1, inputs, record, operands, table, pairs, (rows, queries), block, half, tidx)
        else:
            entries = pairs.entries()
            record = kda_items.kept_record(inputs, record)
            store_parameters(inputs, *parameters, tidx)
            cute.arch.fence_view_async_shared()
            kda_items.sync(inputs)
            if cute.arch.make_warp_uniform(tidx // 32) == LOADER:
                piece = const_expr(2 * OPERAND_BYTES if self.key.overlapped else PIECE_BYTES)
                policy = kda_items.policy_of_stores(inputs)
                store_bulk(record + KU_OFFSET, inputs.start + 2 * OPERAND_BYTES, OPERAND_BYTES, piece, policy)
                store_bulk(record + KG_OFFSET, inputs.start, 2 * OPERAND_BYTES, piece, policy)

            # 4  pairs with earlier blocks, their sums over both halves, L and P
            for b in cutlass.range_constexpr(4):
                if block == b:
                    self.finish_pairs(inputs, record, b, half, entries, rows, queries, reread(tidx) % 32)

    def gate(self, slope, rate):
        """Log decay of a raw value and its channel's offset."""
        if self.bounded:
            return lambda raw, offset: log_decay_bounded(raw, slope, offset, rate)
        return softplus_gate(slope, rate)

    @cute.jit
    def finish_pairs(
        self,
        inputs: cutlass.Constexpr,
        record: Int64,
        block: cutlass.Constexpr,
        half: Int32,
        entries,
        rows,
        queries,
        lane: Int32,
    ):
        """Products of a block's rows with earlier blocks; L by the warp of the first half of the channels, P by the other."""
        at, rows, queries = inputs.at, [*rows], [*queries]  # changed below
        size = 1024 * (block + 1)
        buffer = at["partial"] + partial_offset(block)
        away, home = buffer + (1 - half) * size, buffer + half * size
        parts = [entries]
        send_half(away, entries, half, lane)
        for distance in cutlass.range_constexpr(block):
            column = block - 1 - distance
            scale = None
            if const_expr(distance > 0):
                scale = at["tables"] + 2 * TABLE_BYTES + (((column + 1) * 2 + half) * 4 + (lane & 3)) * 32
            source = right_address(at["columns"] + half * COLUMN_BYTES, column, lane)
            found = block_below(rows, queries, scale, source)
            send_half(away + PAIR_BYTES * (1 + column), found, half, lane)
            parts.insert(1, found)
        cute.arch.barrier(barrier_id=kda_items.barrier_of(inputs, kda_items.PAIRS + block), number_of_threads=64)
        received = receive_entries(home, PAIR_WORDS, lane)
        for column in cutlass.range_constexpr(block):
            received += receive_entries(home + PAIR_BYTES * (1 + column), 8, lane)
        cute.arch.sync_warp()  # the block on the diagonal of L comes where the partner's entries were
        if half == 0:
            place_lower(summed(parts, 0, received), block, at["lower"], LOWER_PITCH, buffer, at["beta"], lane)
        else:
            own = load_shared(home + 768 + lane * 8, 2)
            place_products(summed(parts, 1, received), block, home, own, lane)
            cute.arch.sync_warp()
            store_block(
                record + (T_OFFSET + TRIANGLE_BYTES),
                block,
                lane,
                [home + i * 512 + lane * 16 for i in range(block + 1)],
            )


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
        fake_vector(Int32),
        Float32(1.0),
        Float32(-1.0),
        *(Int32(1) for _ in range(13)),
        fake_stream(),
    )
