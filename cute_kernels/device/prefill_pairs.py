"""The pairs role of GDN prefill: L and P from K K^T and Q K^T, key norms, and the inverse, by one warpgroup.

    L_ij = beta_i r_i r_j 2^(G_i - G_j) k_i.k_j  (j < i)        P_ij = s rq_i r_j 2^(G_i - G_j) q_i.k_j  (j <= i)

Key norms are the diagonal of K K^T. A thread holds rows 16 warp + lane // 4 (+ 8) and columns 8 n + 2 (lane % 4), + 1 of both
products. In 16 x 16 blocks below the diagonal the decay is a row factor times a column factor, taken at the last token of the
columns' block: both exponents are <= 0. In the block on the diagonal every pair has its own exponential. All warps run the
same code but for blocks that a warp has none of; what it gives right of the diagonal, even infinity, is not used.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from .prefill_gdn_inverse import scratch_address, solve_halves, solved_place
from .prefill_gdn_rows import (
    BETA,
    COLUMN,
    GROWN,
    LOG_DECAY,
    NEAR,
    P_ROW,
    VECTOR_BYTES,
    inverse_norm,
    zero_rows,
)
from .prefill_layout import (
    CHUNK,
    HEAD,
    INPUT_STAGES,
    LOWER_PITCH,
    OPERAND_BYTES,
    TILE_BYTES,
    WORK_STAGES,
    Barrier,
    Field,
    Flag,
    tile_address,
)
from .prefill_sync import advance, read_record
from .warp_ops import load_shared, pack_f16, pick, stmatrix4, store_shared


def diagonal_block(acc, warp):
    """The thread's entries of the warp's 16 x 16 block on the diagonal, as [half of the columns][half of the rows][column]."""
    high, odd = (warp & 2) != 0, (warp & 1) != 0

    def entry(i):
        return pick(high, pick(odd, acc[24 + i], acc[16 + i]), pick(odd, acc[8 + i], acc[i]))

    return [[[entry(4 * half + 2 * r + e) for e in range(2)] for r in range(2)] for half in range(2)]


def key_norms(block, warp, lane, count, l2norm):
    """Factors r of the thread's two key rows; lanes of a quad hold the same rows, one of them the diagonal's entry."""
    odd = ((lane >> 2) & 1) != 0
    owner = (lane & 28) + (lane >> 3)
    factors = []
    for r in range(2):
        squares = cute.arch.shuffle_sync(pick(odd, block[r][r][1], block[r][r][0]), owner)
        factors.append(inverse_norm(squares, 16 * warp + (lane >> 2) + 8 * r < count, l2norm))
    return factors


def write_key_vectors(factors, vector, warp, lane):
    """X_FACTOR, COLUMN, and REST and NEAR times r, of the warp's 16 rows: one vector a lane of each quad."""
    which = lane & 3
    for r in range(2):
        source = vector + GROWN + which * 256 + (16 * warp + (lane >> 2) + 8 * r) * 4
        target = source + pick(which < 2, Int32(COLUMN - BETA), Int32(0))
        store_shared(target, factors[r] * pick(which == 1, Float32(1.0), load_shared(source, 1)))


def pair_factors(vector, warp, lane):
    """Decay and norm factors common to L and P: ([block][r] of rows, [block][half] of columns, [half][r][e] of the diagonal)."""
    row = vector + LOG_DECAY + (16 * warp + (lane >> 2)) * 4
    g_row = [load_shared(row + 32 * r, 1) for r in range(2)]
    ends = [load_shared(vector + LOG_DECAY + 64 * block + 60, 1) for block in range(3)]
    rows = [[cute.math.exp2(g - end, fastmath=True) for g in g_row] for end in ends]
    own = vector + 64 * warp + 8 * (lane & 3)
    diagonal = []
    for half in range(2):
        g = load_shared(own + LOG_DECAY + 32 * half, 2)
        factor = load_shared(own + COLUMN + 32 * half, 2)
        diagonal.append(
            [[factor[e] * cute.math.exp2(g_row[r] - g[e], fastmath=True) for e in range(2)] for r in range(2)]
        )
    return rows, diagonal


def far_words(acc, block, row_factors, vector, lane):
    """fp16 words [half][r] of a 16 x 16 block below the diagonal."""
    words = []
    for half in range(2):
        n = 2 * block + half
        column = load_shared(vector + NEAR + 32 * n + 8 * (lane & 3), 2)
        for r in range(2):
            i = 4 * n + 2 * r
            words.append(pack_f16(acc[i] * column[0] * row_factors[r], acc[i + 1] * column[1] * row_factors[r]))
    return words


@cute.jit
def write_lower(
    kk, block, vector: Int32, rows, diagonal, factors, lower: Int32, scratch: Int32, warp: Int32, lane: Int32
):
    """-L: fp16 blocks below the diagonal to `lower`; of that on it fp32 halves to `scratch`, what joins them is returned."""
    beta = vector + BETA + (16 * warp + (lane >> 2)) * 4
    l_row = [-(load_shared(beta + 32 * r, 1) * factors[r]) for r in range(2)]
    near = [[[block[h][r][e] * (l_row[r] * diagonal[h][r][e]) for e in range(2)] for r in range(2)] for h in range(2)]
    for half in cutlass.range_constexpr(2):
        store_shared(scratch + ((lane >> 2) + 8 * half) * LOWER_PITCH + (lane & 3) * 8, *near[half][half])
    target = lower + (16 * warp + (lane & 15)) * LOWER_PITCH + (lane >> 4) * 16
    for b in cutlass.range_constexpr(3):
        if b < warp:
            words = far_words(kk, b, [rows[b][0] * l_row[0], rows[b][1] * l_row[1]], vector, lane)
            stmatrix4(target + 32 * b, *words)
    return pack_f16(*near[0][1])


@cute.jit
def write_weights(qk, vector: Int32, rows, diagonal, tile: Int32, warp: Int32, lane: Int32):
    """P of the warp's 16 rows, up to its block on the diagonal, to the P tile."""
    at = vector + P_ROW + (16 * warp + (lane >> 2)) * 4
    p_row = [load_shared(at + 32 * r, 1) for r in range(2)]
    block = diagonal_block(qk, warp)
    near = []
    for half in cutlass.range_constexpr(2):
        for r in cutlass.range_constexpr(2):
            entries = []
            for e in cutlass.range_constexpr(2):
                entry = Float32(0.0)
                if cutlass.const_expr(r >= half):
                    entry = block[half][r][e] * (p_row[r] * diagonal[half][r][e])
                if cutlass.const_expr(r == half):
                    entry = pick(2 * (lane & 3) + e <= (lane >> 2), entry, Float32(0.0))
                entries.append(entry)
            near.append(pack_f16(entries[0], entries[1]))
    own = tile_address(tile, 16 * warp + (lane & 15), 2 * warp + (lane >> 4))
    stmatrix4(own, *near)
    for b in cutlass.range_constexpr(3):
        if b < warp:
            at = tile_address(tile, 16 * warp + (lane & 15), 2 * b + (lane >> 4))
            words = far_words(qk, b, [rows[b][0] * p_row[0], rows[b][1] * p_row[1]], vector, lane)
            stmatrix4(at, *words)


@cute.jit
def zero_beyond(
    shared,
    stage: Int32,
    count: Int32,
    barrier: cutlass.Constexpr,
    warp: Int32,
    lane: Int32,
    transition: cutlass.Constexpr,
):
    """Zero the rows of K and Q beyond a short chunk's end, by a warpgroup."""
    if count < CHUNK:
        zero_rows(shared.k_base + stage * OPERAND_BYTES, 16 * warp, 16, count, lane)
        if cutlass.const_expr(not transition):
            zero_rows(shared.q_base + stage * OPERAND_BYTES, 16 * warp, 16, count, lane)
        cute.arch.barrier(barrier_id=barrier, number_of_threads=128)


def multiply(mma, acc, left, right, stage):
    """acc = left x right^T of a stage, issued and committed; the caller waits."""
    warpgroup.fence()
    for k in range(HEAD // 16):
        mma.set(warpgroup.Field.ACCUMULATE, k != 0)
        cute.gemm(mma, acc, left[None, None, k, stage], right[None, None, k, stage], acc)
    warpgroup.commit_group()


@cute.jit
def run_pairs(shared, tidx, index, warp, lane, l2norm, sK, sQ, pair_mma, transition: cutlass.Constexpr):
    """Key vectors, T' and P of every chunk; of two warpgroups, each takes every other chunk and has a work stage.
    Data warps finish T'.

    A short chunk's rows beyond its end are zeroed before any product reads them.
    """
    thread = pair_mma.get_slice(tidx)
    left_k = pair_mma.make_fragment_A(thread.partition_A(sK))
    left_q = pair_mma.make_fragment_A(thread.partition_A(sQ))
    right_k = pair_mma.make_fragment_B(thread.partition_B(sK))
    kk = cute.make_rmem_tensor(thread.partition_shape_C((CHUNK, CHUNK)), Float32)
    qk = cute.make_rmem_tensor(thread.partition_shape_C((CHUNK, CHUNK)), Float32)
    groups = 3 - shared.slabs
    lower = shared.lower + index * (CHUNK * LOWER_PITCH)
    barrier = int(Barrier.PAIRS) + 3 * index
    stage, parity, work, work_parity = index, Int32(0), index, Int32(0)
    ahead = groups == 1
    shared.inputs.wait_full(stage, parity)
    record = read_record(shared.records, stage)
    if cutlass.const_expr(ahead):
        zero_beyond(shared, stage, record[Field.COUNT], barrier + 2, warp, lane, transition)
        multiply(pair_mma, kk, left_k, right_k, stage)
        warpgroup.wait_group(0)
    while (record[Field.FLAGS] & Flag.STOP) == 0:
        count = record[Field.COUNT]
        vector = shared.vector_base + stage * VECTOR_BYTES
        t_tile = shared.t_base + work * TILE_BYTES
        p_tile = shared.p_base + work * TILE_BYTES
        if cutlass.const_expr(not ahead):
            zero_beyond(shared, stage, count, barrier + 2, warp, lane, transition)
            multiply(pair_mma, kk, left_k, right_k, stage)
            warpgroup.wait_group(0)
        block = diagonal_block(kk, warp)
        factors = key_norms(block, warp, lane, count, l2norm)
        write_key_vectors(factors, vector, warp, lane)
        shared.keys.publish(stage)
        shared.pairs.wait_empty(work, work_parity)
        cute.arch.barrier(barrier_id=barrier, number_of_threads=128)
        rows, diagonal = pair_factors(vector, warp, lane)
        shared.solved.wait_empty(*solved_place(shared, work, work_parity))
        scratch = scratch_address(lower, warp)
        link = write_lower(kk, block, vector, rows, diagonal, factors, lower, scratch, warp, lane)
        # Q K^T runs behind the substitution, and its sums take the registers of K K^T.
        if cutlass.const_expr(not transition):
            multiply(pair_mma, qk, left_q, right_k, stage)
        solve_halves(scratch, link, lower, t_tile, vector + BETA, warp, lane)
        shared.solved.publish(index)
        next_stage, next_parity = stage, parity
        for _ in cutlass.range_constexpr(groups):
            next_stage, next_parity = advance(next_stage, next_parity, INPUT_STAGES)
        warpgroup.wait_group(0)
        if cutlass.const_expr(not transition):
            shared.queries.wait_full(stage, parity)
        if cutlass.const_expr(ahead):
            # K K^T of the next chunk, or of what a stage without one holds, runs behind P.
            shared.inputs.wait_full(next_stage, next_parity)
            record = read_record(shared.records, next_stage)
            zero_beyond(shared, next_stage, record[Field.COUNT], barrier + 2, warp, lane, transition)
            multiply(pair_mma, kk, left_k, right_k, next_stage)
        if cutlass.const_expr(not transition):
            if cutlass.const_expr(not ahead):  # found again: there are no registers to keep them in
                rows, diagonal = pair_factors(vector, warp, lane)
            write_weights(qk, vector, rows, diagonal, p_tile, warp, lane)
        shared.inputs.release(stage)
        shared.pairs.publish_to_async(work)
        for _ in cutlass.range_constexpr(groups):
            work, work_parity = advance(work, work_parity, WORK_STAGES)
        stage, parity = next_stage, next_parity
        if cutlass.const_expr(ahead):
            warpgroup.wait_group(0)
        else:
            shared.inputs.wait_full(stage, parity)
            record = read_record(shared.records, stage)
