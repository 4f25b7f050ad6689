"""Row work of GDN prefill: gates, norms, the vectors of a chunk, the update operand K', and finished output rows.

A chunk's vectors are fp32 at fixed byte offsets of a stage (r = 1 / |x|, G the inclusive sum of the log decay in base 2, C the
chunk's last token):

    gates       LOG_DECAY G_j       BETA            GROWN 2^G_j     REST 2^(G_C - G_j)      DECAY 2^G_C
    key rows    X_FACTOR r_j 2^G_j  L_ROW beta_j r_j                COLUMN r_j
    query rows  O_FACTOR s rq_i 2^G_i               P_ROW s rq_i

Rows from `count` on may hold a neighbour's tokens, even NaN: their operand rows are zeroed and their factors are 0.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from .arith import log_decay_softplus, sigmoid
from .prefill_layout import CHUNK, INPUT_STAGES, OPERAND_BYTES, TILE_BYTES, WORK_STAGES, Field, Flag, tile_address
from .prefill_rows import owns_norms
from .prefill_sync import advance, read_record
from .state_io import row_ptr
from .warp_ops import ldmatrix4, load_shared, mma_16816, pack_f16, pick, store_shared, sum_scan, unpack_bf16

LOG2_E = 1.4426950408889634
NORM_EPS = 1e-6
LOG_DECAY, BETA, GROWN, REST, X_FACTOR, L_ROW, COLUMN, O_FACTOR, P_ROW, DECAY = range(0, 2560, 256)
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
    return values


@cute.jit
def write_gates(raw, logit, bias: Float32, a_log: Float32, count: Int32, vector: Int32, lane: Int32):
    """The gate vectors of a chunk, by one warp; lane l has the raw gates and logits of tokens l and l + 32."""
    g = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    for half in cutlass.range_constexpr(2):
        value = log_decay_softplus(raw[half], bias, a_log) * Float32(LOG2_E)
        g[half] = sum_scan(value if lane + 32 * half < count else Float32(0.0), lane)
    g[1] = g[1] + cute.arch.shuffle_sync(g[0], 31)
    end = cute.arch.shuffle_sync(g[1], 31)
    for half in cutlass.range_constexpr(2):
        at = vector + (lane + 32 * half) * 4
        store_shared(at + LOG_DECAY, g[half])
        store_shared(at + BETA, sigmoid(logit[half]) if lane + 32 * half < count else Float32(0.0))
        store_shared(at + GROWN, cute.math.exp2(g[half], fastmath=True))
        store_shared(at + REST, cute.math.exp2(end - g[half], fastmath=True))
    if lane == 0:
        store_shared(vector + DECAY, cute.math.exp2(end, fastmath=True))


@cute.jit
def zero_rows(base: Int32, first: Int32, rows: cutlass.Constexpr, count: Int32, lane: Int32):
    """Zero the operand rows of `first .. first + rows - 1` that are `count` or beyond, by one warp, for wgmma to read."""
    zero = Uint32(0)
    for step in cutlass.range_constexpr(rows // 2):
        row = first + 2 * step + (lane >> 4)
        if row >= count:
            store_shared(base + ((lane >> 3) & 1) * TILE_BYTES + row * 128 + (lane & 7) * 16, zero, zero, zero, zero)
    cute.arch.fence_view_async_shared()
    cute.arch.sync_warp()


def squared_norms(base, row, blocks, lane):
    """Sums of squares of 16 x `blocks` bf16 operand rows from `row` on, by one warp: a (low, high) pair for each 16 rows.

    The diagonal of X X^T: products of bf16 are exact in fp32 and one matrix instruction replaces 128 multiply-adds of a lane.
    Lanes with `owns_norms(lane)` hold rows `lane // 4` and `lane // 4 + 8` of each block. A row that is not finite spoils its
    own sum alone.
    """
    sums = [[Float32(0.0)] * 8 for _ in range(blocks)]

    def fragment(k, block):
        return ldmatrix4(
            tile_address(base + (k // 4) * TILE_BYTES, row + 16 * block + (lane & 15), 2 * (k % 4) + (lane >> 4))
        )

    pending = [fragment(0, block) for block in range(blocks)]
    for k in range(8):
        current = pending
        if k < 7:
            pending = [fragment(k + 1, block) for block in range(blocks)]
        for block, a in enumerate(current):
            total = sums[block]
            sums[block] = [
                *mma_16816(a, (a[0], a[2]), total[:4], "bf16"),
                *mma_16816(a, (a[1], a[3]), total[4:], "bf16"),
            ]
    odd = ((lane >> 2) & 1) != 0
    return [(pick(odd, s[1], s[0]), pick(odd, s[7], s[6])) for s in sums]


@cute.jit
def write_norms(squares, at: Int32, lane: Int32):
    """Squared norms of consecutive blocks to an fp32 vector, for every lane of the warp to read."""
    if owns_norms(lane):
        for block in cutlass.range_constexpr(len(squares)):
            store_shared(at + block * 64 + (lane >> 2) * 4, squares[block][0])
            store_shared(at + block * 64 + (lane >> 2) * 4 + 32, squares[block][1])
    cute.arch.sync_warp()


@cute.jit
def inverse_norm(squares: Float32, valid, l2norm: Int32) -> Float32:
    """1 / sqrt(squares + eps), 1 where rows are taken as they are, 0 for an invalid row."""
    factor = cute.math.rsqrt(squares + Float32(NORM_EPS), fastmath=True) if l2norm != 0 else Float32(1.0)
    return factor if valid else Float32(0.0)


@cute.jit
def write_key_vectors(squares, vector: Int32, part: Int32, count: Int32, l2norm: Int32, lane: Int32):
    """Vectors of key rows 32 part + lane; returns the lane's factor of K'."""
    write_norms(squares, vector + COLUMN + part * 128, lane)
    own = 32 * part + lane
    at = vector + own * 4
    factor = inverse_norm(load_shared(at + COLUMN, 1), own < count, l2norm)
    store_shared(at + X_FACTOR, factor * load_shared(at + GROWN, 1))
    store_shared(at + L_ROW, factor * load_shared(at + BETA, 1))
    store_shared(at + COLUMN, factor)
    return factor * load_shared(at + REST, 1)


@cute.jit
def write_query_vectors(squares, vector: Int32, count: Int32, l2norm: Int32, scale: Float32, lane: Int32):
    """Vectors of all 64 query rows, by one warp."""
    write_norms(squares, vector + P_ROW, lane)
    for half in cutlass.range_constexpr(2):
        own = 32 * half + lane
        at = vector + own * 4
        factor = inverse_norm(load_shared(at + P_ROW, 1), own < count, l2norm) * scale
        store_shared(at + O_FACTOR, factor * load_shared(at + GROWN, 1))
        store_shared(at + P_ROW, factor)


@cute.jit
def rewrite_update_operand(k_tile: Int32, u_tile: Int32, part: Int32, lane: Int32, factor: Float32):
    """K'_j = factor_j k_j in fp16 for the warp's 32 rows; lane l holds the factor of row 32 part + l.

    Loops stay loops here and below: four roles run at once, and what they fetch of instructions is a limit of its own.
    """
    inner = lane >> 3
    start = (32 * part + inner) * 128 + (((lane & 7) ^ inner) << 4)
    for batch in cutlass.range(4, unroll=1):
        at = start + batch * 1024
        # Rows 8 batch + inner and + 4: the second one's pieces are swizzled by 4 more.
        offsets = [at, at + TILE_BYTES, (at ^ 64) + 512, (at ^ 64) + 512 + TILE_BYTES]
        loaded = [load_shared(k_tile + offset, 4, Uint32) for offset in offsets]
        factors = [cute.arch.shuffle_sync(factor, 8 * batch + 4 * i + inner) for i in range(2)]
        for i in cutlass.range_constexpr(4):
            scaled = []
            for w in cutlass.range_constexpr(4):
                low, high = unpack_bf16(loaded[i][w])
                scaled.append(pack_f16(low * factors[i // 2], high * factors[i // 2]))
            store_shared(u_tile + offsets[i], *scaled)


@cute.jit
def copy_output_rows(tile: Int32, mOut: cute.Tensor, token: Int32, count: Int32, head: Int32, lane: Int32):
    """Rows 0..count-1 of two swizzled bf16 tiles side by side to `mOut[token + i, head * 128:]`, by one warp."""
    half = lane >> 4
    start = tile + ((lane >> 3) & 1) * TILE_BYTES + half * 128 + (((lane & 7) ^ half) << 4)
    target = row_ptr(mOut, token + half, head * 128 + (lane & 15) * 8, 16).toint()
    stride = mOut.stride[0] * 4  # bytes of two rows
    for batch in cutlass.range((count + 7) // 8, unroll=1):
        at = start + batch * 1024
        loaded = [load_shared((at ^ (i << 5)) + i * 256, 4, Uint32) for i in range(4)]
        for i in cutlass.range_constexpr(4):
            cute.arch.inline_ptx(
                "{ .reg .pred inside; setp.lt.s32 inside, {$r1}, {$r2}; "
                "@inside st.global.v4.b32 [{$r0}], {{$r3}, {$r4}, {$r5}, {$r6}}; }",
                read_only_args=[target + i * stride, 8 * batch + 2 * i + half, count, *loaded[i]],
            )
        target = target + 4 * stride


@cute.jit
def run_keys(shared, part, lane, l2norm):
    """Norms, vectors and K' of key rows 32 part .. 32 part + 31 of every chunk."""
    stage, parity, work, work_parity = Int32(0), Int32(0), Int32(0), Int32(0)
    shared.k.wait_full(stage, parity)
    record = read_record(shared.records, stage)
    while (record[Field.FLAGS] & Flag.STOP) == 0:
        count = record[Field.COUNT]
        tile = shared.k_base + stage * OPERAND_BYTES
        vector = shared.vector_base + stage * VECTOR_BYTES
        if count < CHUNK:
            zero_rows(tile, 32 * part, 32, count, lane)
        squares = squared_norms(tile, 32 * part, 2, lane)
        shared.gates.wait_full(stage, parity)
        factor = write_key_vectors(squares, vector, part, count, l2norm, lane)
        shared.vectors.publish(stage)
        shared.update.wait_empty(work, work_parity)
        rewrite_update_operand(tile, shared.u_base + work * OPERAND_BYTES, part, lane, factor)
        shared.k.release(stage)
        shared.update.publish_to_async(work)
        stage, parity = advance(stage, parity, INPUT_STAGES)
        work, work_parity = advance(work, work_parity, WORK_STAGES)
        shared.k.wait_full(stage, parity)
        record = read_record(shared.records, stage)


@cute.jit
def run_queries(shared, lane, mOut, l2norm, scale):
    """Norms and vectors of a chunk's query rows; then the output of the chunk two before it, which the state has left."""
    stage, parity, done, done_parity = Int32(0), Int32(0), Int32(0), Int32(0)
    token, count, head = [Int32(0), Int32(0)], [Int32(-1), Int32(-1)], [Int32(0), Int32(0)]
    shared.k.wait_full(stage, parity)
    record = read_record(shared.records, stage)
    shared.k.release(stage)
    while ((record[Field.FLAGS] & Flag.STOP) == 0) | (count[0] >= 0) | (count[1] >= 0):
        following = Int32(-1)
        if (record[Field.FLAGS] & Flag.STOP) == 0:
            following = record[Field.COUNT]
            shared.q.wait_full(stage, parity)
            tile = shared.q_base + stage * OPERAND_BYTES
            if following < CHUNK:
                zero_rows(tile, 0, 64, following, lane)
            squares = squared_norms(tile, 0, 4, lane)
            shared.gates.wait_full(stage, parity)
            write_query_vectors(squares, shared.vector_base + stage * VECTOR_BYTES, following, l2norm, scale, lane)
            shared.q.release(stage)
            shared.vectors.publish(stage)
        if count[0] >= 0:
            shared.output.wait_full(done, done_parity)
            copy_output_rows(shared.v_base + done * OPERAND_BYTES, mOut, token[0], count[0], head[0], lane)
            cute.arch.fence_view_async_shared()
            shared.v.release(done)
            done, done_parity = advance(done, done_parity, INPUT_STAGES)
        token, count, head = [token[1], record[Field.TOKEN]], [count[1], following], [head[1], record[Field.HEAD]]
        if following >= 0:
            stage, parity = advance(stage, parity, INPUT_STAGES)
            shared.k.wait_full(stage, parity)
            record = read_record(shared.records, stage)
            shared.k.release(stage)
