"""Row work of GDN prefill: gates, norms, the vectors of a chunk, and finished output rows.

A chunk's vectors are fp32 at fixed byte offsets of a stage (r = 1 / |x|, G the inclusive sum of the log decay in base 2, C the
chunk's last token):

    gates       LOG_DECAY G_j   GROWN 2^G_j   BETA   REST 2^(G_C - G_j)   NEAR 2^(G_E - G_j)   DECAY 2^G_C
    key rows    X_FACTOR r_j 2^G_j   COLUMN r_j; REST and NEAR times r_j        (E: the last token of j's block of 16)
    query rows  O_FACTOR s rq_i 2^G_i   P_ROW s rq_i

Rows from `count` on may hold a neighbour's tokens, even NaN: their operand rows are zeroed and their factors are 0.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync

from .arith import sigmoid
from .prefill_gdn_inverse import solved_place
from .prefill_inverse import merge_any_column
from .prefill_layout import CHUNK, HEAD, INPUT_STAGES, LOWER_PITCH, OPERAND_BYTES, TILE_BYTES, WORK_STAGES, Field, Flag
from .prefill_sync import advance, read_record
from .state_io import row_ptr
from .warp_ops import load_shared, pick, store_shared, sum_scan, unpack_bf16

LOG2_E = 1.4426950408889634
NORM_EPS = 1e-6
LOG_DECAY, GROWN, BETA, REST, NEAR, X_FACTOR, COLUMN, O_FACTOR, P_ROW, DECAY = range(0, 2560, 256)
VECTOR_BYTES = DECAY + 128


@cute.jit
def load_scalars(mX: cute.Tensor, token: Int32, count: Int32, head: Int32, lane: Int32):
    """Column `head` of tokens `token + lane` and `token + 32 + lane`, 0 from `count` on, as fp32."""
    values = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    values.fill(0.0)
    for half in cutlass.range_constexpr(2):
        i = lane + 32 * half
        if i < count:
            one = cute.make_tensor(row_ptr(mX, token + i, head, mX.element_type.width // 8), cute.make_layout(1))
            values[half] = Float32(one[0])
    return [values[0], values[1]]


def scalar_rows(mX: cute.Tensor, row: Int32, head: Int32):
    """Address of column `head` of a row of bf16, and the bytes from row to row, for `load_bits`."""
    return row_ptr(mX, row, head, 2).toint(), Int32(mX.stride[0] * 2)


def load_bits(address, stride, row: Int32, count: Int32, lane: Int32):
    """The bits of a column's bf16 `row` and `row + 32` rows behind `address`, 0 where `lane`, `lane + 32` are not below `count`.

    They stay bits until they are used, behind whatever hides the load: converted at once they would be waited for at once.
    """
    at = address + Int64(row) * Int64(stride)
    words = []
    for half in range(2):
        words.append(
            cute.arch.inline_ptx(
                "{ .reg .pred inside; .reg .b16 value; mov.b16 value, 0; setp.lt.s32 inside, {$r1}, {$r2}; "
                "@inside ld.global.b16 value, [{$r0}]; cvt.u32.u16 {$w0}, value; }",
                write_only_types=[Uint32],
                read_only_args=[at, lane + 32 * half, count],
            )
        )
        at = at + Int64(32) * Int64(stride)
    return words


@cute.jit
def log2_decay(x: Float32, rate: Float32) -> Float32:
    """rate log2(1 + e^x) with rate = -e^A_log: the log decay in base 2. What rounding takes from 1 + e is put back."""
    e = cute.math.exp2(x * Float32(LOG2_E), fastmath=True)
    w = Float32(1.0) + e
    lost = e - (w - Float32(1.0))
    y = cute.math.log2(w, fastmath=True) + lost * cute.arch.rcp_approx(w) * Float32(LOG2_E)
    return rate * (x * Float32(LOG2_E) if x > Float32(20.0) else y)


@cute.jit
def write_gates(raw, logit, bias: Float32, rate: Float32, count: Int32, vector: Int32, lane: Int32):
    """The gate vectors of a chunk, by one warp; lane l has the raw gates and logits of tokens l and l + 32."""
    g = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    for half in cutlass.range_constexpr(2):
        value = log2_decay(raw[half] + bias, rate)
        g[half] = sum_scan(value if lane + 32 * half < count else Float32(0.0), lane)
    g[1] = g[1] + cute.arch.shuffle_sync(g[0], 31)
    end = cute.arch.shuffle_sync(g[1], 31)
    for half in cutlass.range_constexpr(2):
        at = vector + (lane + 32 * half) * 4
        store_shared(at + LOG_DECAY, g[half])
        store_shared(at + BETA, sigmoid(logit[half]) if lane + 32 * half < count else Float32(0.0))
        store_shared(at + GROWN, cute.math.exp2(g[half], fastmath=True))
        store_shared(at + REST, cute.math.exp2(end - g[half], fastmath=True))
        near = cute.arch.shuffle_sync(g[half], lane | 15)
        store_shared(at + NEAR, cute.math.exp2(near - g[half], fastmath=True))
    if lane == 0:
        store_shared(vector + DECAY, cute.math.exp2(end, fastmath=True))


@cute.jit
def zero_rows(
    base: Int32, first: Int32, rows: cutlass.Constexpr, count: Int32, lane: Int32, tiles: cutlass.Constexpr = 2
):
    """Zero rows `first .. first + rows - 1` that are `count` or beyond, in 1 or 2 tiles, by one warp, for wgmma to read."""
    zero = Uint32(0)
    together = 4 // tiles
    for step in cutlass.range_constexpr(rows // together):
        row = first + together * step + lane // (8 * tiles)
        if row >= count:
            store_shared(base + (lane // 8) % tiles * TILE_BYTES + row * 128 + (lane & 7) * 16, zero, zero, zero, zero)
    cute.arch.fence_view_async_shared()
    cute.arch.sync_warp()


@cute.jit
def write_squares(tile: Int32, at: Int32, first: Int32, rows, lane: Int32):
    """Sums of squares of operand rows `first .. first + rows - 1` to the fp32 vector `at`, by one warp, visible to all its lanes.

    Eight lanes share a row and sum it in one fixed order. A row that is not finite spoils its own sum alone.
    """
    inner = lane >> 3
    start = tile + (first + inner) * 128 + (((lane & 7) ^ inner) << 4)
    odd = (lane & 1) != 0
    for batch in cutlass.range(rows // 8, unroll=1):
        piece = start + batch * 1024
        # Rows 8 batch + inner and + 4: the second one's pieces are swizzled by 4 more.
        offsets = [piece, piece + TILE_BYTES, (piece ^ 64) + 512, (piece ^ 64) + 512 + TILE_BYTES]
        loaded = [load_shared(offset, 4, Uint32) for offset in offsets]
        sums = []
        for row in cutlass.range_constexpr(2):
            parts = []
            for half in cutlass.range_constexpr(2):
                even_part, odd_part = Float32(0.0), Float32(0.0)
                for w in cutlass.range_constexpr(4):
                    low, high = unpack_bf16(loaded[2 * row + half][w])
                    even_part = even_part + low * low
                    odd_part = odd_part + high * high
                parts.append(even_part + odd_part)
            sums.append(parts[0] + parts[1])
        total = pick(odd, sums[1], sums[0]) + cute.arch.shuffle_sync_bfly(pick(odd, sums[0], sums[1]), 1)
        total = total + cute.arch.shuffle_sync_bfly(total, 2)
        total = total + cute.arch.shuffle_sync_bfly(total, 4)
        if (lane & 6) == 0:
            store_shared(at + (first + 8 * batch + inner + 4 * (lane & 1)) * 4, total)
    cute.arch.sync_warp()


@cute.jit
def inverse_norm(squares: Float32, valid, l2norm: Int32) -> Float32:
    """1 / sqrt(squares + eps), 1 where rows are taken as they are, 0 for an invalid row."""
    factor = cute.math.rsqrt(squares + Float32(NORM_EPS), fastmath=True) if l2norm != 0 else Float32(1.0)
    return factor if valid else Float32(0.0)


@cute.jit
def write_query_vectors(
    tile: Int32,
    vector: Int32,
    first: Int32,
    rows,
    count: Int32,
    l2norm: Int32,
    scale: Float32,
    lane: Int32,
):
    """Norms and vectors of query rows `first .. first + rows - 1` (at most 32), by one warp."""
    write_squares(tile, vector + P_ROW, first, rows, lane)
    own = first + lane
    at = vector + own * 4
    if lane < rows:
        factor = inverse_norm(load_shared(at + P_ROW, 1), own < count, l2norm) * scale
        store_shared(at + O_FACTOR, factor * load_shared(at + GROWN, 1))
        store_shared(at + P_ROW, factor)


@cute.jit
def copy_output_rows(
    tile: Int32, slabs: cutlass.Constexpr, mOut: cute.Tensor, token: Int32, count: Int32, column: Int32, lane: Int32
):
    """Rows 0..count-1 of `slabs` swizzled bf16 tiles side by side to `mOut[token + i, column:]`, by one warp."""
    together = 4 // slabs  # rows
    pieces = 8 * slabs  # 16-byte pieces of a row, one a lane
    first = lane // pieces
    start = tile + ((lane // 8) % slabs) * TILE_BYTES + first * 128 + (((lane & 7) ^ first) << 4)
    target = row_ptr(mOut, token + first, column + (lane % pieces) * 8, 16).toint()
    stride = mOut.stride[0] * (2 * together)  # bytes of the rows that go together
    for batch in cutlass.range((count + 7) // 8, unroll=1):
        at = start + batch * 1024
        loaded = [load_shared((at ^ (i * together * 16)) + i * together * 128, 4, Uint32) for i in range(8 // together)]
        for i in cutlass.range_constexpr(8 // together):
            cute.arch.inline_ptx(
                "{ .reg .pred inside; setp.lt.s32 inside, {$r1}, {$r2}; "
                "@inside st.global.v4.b32 [{$r0}], {{$r3}, {$r4}, {$r5}, {$r6}}; }",
                read_only_args=[target + i * stride, 8 * batch + together * i + first, count, *loaded[i]],
            )
        target = target + (8 // together) * stride


@cute.jit
def run_gates(shared, mA: cute.Tensor, mB: cute.Tensor, mALog: cute.Tensor, mDtBias: cute.Tensor, lane):
    """Gates of every chunk, from its record on."""
    stage, parity = Int32(0), Int32(0)
    shared.begun.wait_full(stage, parity)
    record = read_record(shared.records, stage)
    while (record[Field.FLAGS] & Flag.STOP) == 0:
        token, count, head = record[Field.TOKEN], record[Field.COUNT], record[Field.HEAD]
        raw = load_scalars(mA, token, count, head, lane)
        logit = load_scalars(mB, token, count, head, lane)
        rate = -cute.math.exp(mALog[head], fastmath=True)
        write_gates(raw, logit, mDtBias[head], rate, count, shared.vector_base + stage * VECTOR_BYTES, lane)
        shared.inputs.publish(stage)
        stage, parity = advance(stage, parity, INPUT_STAGES)
        shared.begun.wait_full(stage, parity)
        record = read_record(shared.records, stage)


@cute.jit
def merge_solved(shared, column, vector: Int32, work: Int32, work_parity: Int32, lane: Int32):
    """Block column `column` of T', by one data warp, from what the pairs role has solved; publishes it.

    `vector` is the address of the chunk's vectors.
    """
    solved, parity = solved_place(shared, work, work_parity)
    shared.solved.wait_full(solved, parity)
    lower = shared.lower + solved * (CHUNK * LOWER_PITCH)
    merge_any_column(lower, shared.t_base + work * TILE_BYTES, vector + BETA, column, lane)
    shared.solved.release(solved)
    shared.pairs.publish_to_async(work)


@cute.jit
def run_merges(shared, column, lane):
    """Block column `column` of T' of every chunk."""
    stage, parity, work, work_parity = Int32(0), Int32(0), Int32(0), Int32(0)
    shared.inputs.wait_full(stage, parity)
    record = read_record(shared.records, stage)
    while (record[Field.FLAGS] & Flag.STOP) == 0:
        merge_solved(shared, column, shared.vector_base + stage * VECTOR_BYTES, work, work_parity, lane)
        work, work_parity = advance(work, work_parity, WORK_STAGES)
        shared.inputs.release(stage)
        stage, parity = advance(stage, parity, INPUT_STAGES)
        shared.inputs.wait_full(stage, parity)
        record = read_record(shared.records, stage)


@cute.jit
def run_queries(shared, query, stores: cutlass.Constexpr, slab, lane, tma_out, gOut, sV, mOut, l2norm, scale):
    """Vectors of 32 query rows from `query` on; where it `stores`, output of the chunk two before, which the state has left."""
    stage, parity, done, done_parity = (Int32(0) for _ in range(4))
    token, count, head = [Int32(0), Int32(0)], [Int32(-1), Int32(-1)], [Int32(0), Int32(0)]
    shared.inputs.wait_full(stage, parity)
    record = read_record(shared.records, stage)
    while ((record[Field.FLAGS] & Flag.STOP) == 0) | (count[0] >= 0) | (count[1] >= 0):
        following = Int32(-1)
        if (record[Field.FLAGS] & Flag.STOP) == 0:
            following = record[Field.COUNT]
            vector = shared.vector_base + stage * VECTOR_BYTES
            write_query_vectors(
                shared.q_base + stage * OPERAND_BYTES, vector, query, 32, following, l2norm, scale, lane
            )
            shared.queries.publish(stage)
        following_token, following_head = record[Field.TOKEN], record[Field.HEAD]
        stored = Int32(-1)
        if cutlass.const_expr(stores):
            if count[0] >= 0:
                shared.output.wait_full(done, done_parity)
                start_finished(shared, tma_out, gOut, sV, mOut, token[0], count[0], head[0], slab, done, lane)
                stored = done
                done, done_parity = advance(done, done_parity, INPUT_STAGES)
            token, count, head = [token[1], following_token], [count[1], following], [head[1], following_head]
        if stored >= 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            shared.v.release(stored)
        if following >= 0:
            shared.inputs.release(stage)
            stage, parity = advance(stage, parity, INPUT_STAGES)
            shared.inputs.wait_full(stage, parity)
            record = read_record(shared.records, stage)


@cute.jit
def start_output_rows(
    tma_out: cute.CopyAtom,
    gOut: cute.Tensor,
    sV: cute.Tensor,
    slabs: cutlass.Constexpr,
    token: Int32,
    column: Int32,
    stage: Int32,
):
    """Start the bulk store of all 64 rows of a stage to `out` from (token, column) on."""
    tile = cute.local_tile(cute.domain_offset((token, column), gOut), (CHUNK, 64 * slabs), (0, 0))
    one = cute.make_layout(1)
    source, target = cpasync.tma_partition(tma_out, 0, one, cute.group_modes(sV, 0, 2), cute.group_modes(tile, 0, 2))
    cute.copy(tma_out, source[None, stage], target)
    cute.arch.cp_async_bulk_commit_group()


@cute.jit
def start_finished(shared, tma_out, gOut, sV, mOut, token, count, head, slab, stage: Int32, lane):
    """Start the bulk store of a stage's finished rows; rows of a short chunk are stored by the lanes instead."""
    column = head * HEAD + slab * 64
    cute.arch.fence_view_async_shared()
    if count == CHUNK:
        start_output_rows(tma_out, gOut, sV, shared.slabs, token, column, stage)
    else:
        copy_output_rows(shared.v_base + stage * shared.value_bytes, shared.slabs, mOut, token, count, column, lane)
        cute.arch.fence_view_async_shared()


def store_output_rows(tma_out, gOut, sV, slabs, token, column, stage):
    """`start_output_rows`, until the stage has been read."""
    start_output_rows(tma_out, gOut, sV, slabs, token, column, stage)
    cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def run_rows(shared, place, slab, lane, tma_out, gOut, sV, mOut, l2norm, scale, queried: cutlass.Constexpr):
    """Row work of a whole head, by warps of `place` 0, 1 and 2: query vectors of 16, 24 and 24 rows; the first one's output of
    the chunk two before; block column `place` of T'."""
    stage, parity, done, done_parity, work, work_parity = (Int32(0) for _ in range(6))
    token, count, head = [Int32(0), Int32(0)], [Int32(-1), Int32(-1)], [Int32(0), Int32(0)]
    first = place == 0
    query, query_rows = (Int32(0) if first else 24 * place - 8), (Int32(16) if first else Int32(24))
    shared.inputs.wait_full(stage, parity)
    record = read_record(shared.records, stage)
    while ((record[Field.FLAGS] & Flag.STOP) == 0) | (count[0] >= 0) | (count[1] >= 0):
        following = Int32(-1)
        vector = shared.vector_base + stage * VECTOR_BYTES
        if (record[Field.FLAGS] & Flag.STOP) == 0:
            following = record[Field.COUNT]
            if cutlass.const_expr(queried):
                tile = shared.q_base + stage * OPERAND_BYTES
                write_query_vectors(tile, vector, query, query_rows, following, l2norm, scale, lane)
                shared.queries.publish(stage)
        stored = Int32(-1)
        if first:
            if cutlass.const_expr(queried):
                if count[0] >= 0:
                    shared.output.wait_full(done, done_parity)
                    start_finished(shared, tma_out, gOut, sV, mOut, token[0], count[0], head[0], slab, done, lane)
                    stored = done
                    done, done_parity = advance(done, done_parity, INPUT_STAGES)
                token, count = [token[1], record[Field.TOKEN]], [count[1], following]
                head = [head[1], record[Field.HEAD]]
        if following >= 0:
            merge_solved(shared, place, vector, work, work_parity, lane)
            work, work_parity = advance(work, work_parity, WORK_STAGES)
        if stored >= 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            shared.v.release(stored)
        if following >= 0:
            shared.inputs.release(stage)
            stage, parity = advance(stage, parity, INPUT_STAGES)
            shared.inputs.wait_full(stage, parity)
            record = read_record(shared.records, stage)
