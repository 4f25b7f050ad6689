"""The pairs role of GDN prefill: L and P from K K^T and Q K^T, and the inverse, by one warpgroup.

    L_ij = beta_i r_i r_j 2^(G_i - G_j) k_i.k_j  (j < i)        P_ij = s rq_i r_j 2^(G_i - G_j) q_i.k_j  (j <= i)

A thread holds rows 16 warp + lane // 4 (+ 8) and columns 8 n + 2 (lane % 4), + 1 of both products. In 16 x 16 blocks below the
diagonal the decay is a row factor times a column factor, taken at the last token before the rows' block: both exponents are
<= 0. In the block on the diagonal every pair has its own exponential; what it gives above the diagonal, even infinity, is
not used.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cute.nvgpu import warpgroup

from .prefill_gdn_rows import BETA, COLUMN, L_ROW, LOG_DECAY, P_ROW, VECTOR_BYTES
from .prefill_inverse import merge_blocks, solve_diagonal
from .prefill_layout import (
    CHUNK,
    HEAD,
    INPUT_STAGES,
    LOWER_PITCH,
    TILE_BYTES,
    WORK_STAGES,
    Barrier,
    Field,
    Flag,
    tile_address,
)
from .prefill_sync import advance, read_record
from .warp_ops import load_shared, pack_f16, stmatrix4, store_shared


@cute.jit
def scale_pairs(kk, qk, vector: Int32, lower: Int32, diagonal: Int32, warp: Int32, lane: Int32):
    """L to shared memory (fp16 blocks below the diagonal to `lower`, the fp32 diagonal block to `diagonal`); P as fp16 words.

    Without `qk` P is not wanted and the words are zero.
    """
    weights = cute.make_rmem_tensor(cute.make_layout(16), Uint32)
    weights.fill(0)
    row = 16 * warp + (lane >> 2)
    at = vector + row * 4
    before = load_shared(vector + LOG_DECAY + cutlass.max(64 * warp - 4, Int32(0)), 1)
    g_row = [load_shared(at + LOG_DECAY + 32 * r, 1) for r in range(2)]
    l_row = [load_shared(at + L_ROW + 32 * r, 1) for r in range(2)]
    grown = [cute.math.exp2(g - before, fastmath=True) for g in g_row]
    l_far = [l_row[r] * grown[r] for r in range(2)]
    if cutlass.const_expr(qk is not None):
        p_row = [load_shared(at + P_ROW + 32 * r, 1) for r in range(2)]
        p_far = [p_row[r] * grown[r] for r in range(2)]
    for block in cutlass.range_constexpr(4):
        if block < warp:
            for half in cutlass.range_constexpr(2):
                n = 2 * block + half
                column = vector + 32 * n + 8 * (lane & 3)
                g = load_shared(column + LOG_DECAY, 2)
                factor = load_shared(column + COLUMN, 2)
                near = [factor[e] * cute.math.exp2(before - g[e], fastmath=True) for e in range(2)]
                for r in cutlass.range_constexpr(2):
                    i = 4 * n + 2 * r
                    entry = pack_f16(kk[i] * near[0] * l_far[r], kk[i + 1] * near[1] * l_far[r])
                    store_shared(lower + (row + 8 * r) * LOWER_PITCH + 16 * n + 4 * (lane & 3), entry)
                    if cutlass.const_expr(qk is not None):
                        weights[4 * block + 2 * half + r] = pack_f16(
                            qk[i] * near[0] * p_far[r], qk[i + 1] * near[1] * p_far[r]
                        )
        if block == warp:
            for half in cutlass.range_constexpr(2):
                n = 2 * block + half
                column = vector + 32 * n + 8 * (lane & 3)
                g = load_shared(column + LOG_DECAY, 2)
                factor = load_shared(column + COLUMN, 2)
                for r in cutlass.range_constexpr(2):
                    entries = cute.make_rmem_tensor(cute.make_layout(4), Float32)
                    inner = (lane >> 2) + 8 * r
                    for e in cutlass.range_constexpr(2):
                        i = 4 * n + 2 * r + e
                        j = 8 * half + 2 * (lane & 3) + e
                        pair = factor[e] * cute.math.exp2(g_row[r] - g[e], fastmath=True)
                        entries[e] = kk[i] * (l_row[r] * pair)
                        if cutlass.const_expr(qk is not None):
                            weight = qk[i] * (p_row[r] * pair)
                            entries[2 + e] = weight if j <= inner else Float32(0.0)
                    store_shared(diagonal + inner * 64 + half * 32 + (lane & 3) * 8, entries[0], entries[1])
                    if cutlass.const_expr(qk is not None):
                        weights[4 * block + 2 * half + r] = pack_f16(entries[2], entries[3])
    return weights


@cute.jit
def _invert(shared, kk, qk, vector, t_tile, p_tile, warp, lane):
    """P and T' of a chunk from its products."""
    diagonal = p_tile + warp * 2048
    weights = scale_pairs(kk, qk, vector, shared.lower, diagonal, warp, lane)
    first = solve_diagonal(diagonal, shared.lower, t_tile, vector + BETA, warp, lane)
    for block in cutlass.range_constexpr(4 if qk is not None else 0):
        row = 16 * warp + (lane & 15)
        stmatrix4(tile_address(p_tile, row, 2 * block + (lane >> 4)), *[weights[4 * block + i] for i in range(4)])
    cute.arch.barrier(barrier_id=int(Barrier.PAIRS_DIAGONAL), number_of_threads=128)
    merge_blocks(first, shared.lower, t_tile, vector + BETA, warp, lane)


@cute.jit
def run_pairs(shared, tidx, warp, lane, sK, sQ, pair_mma, transition: cutlass.Constexpr):
    """L, its inverse and P of every chunk."""
    thread = pair_mma.get_slice(tidx)
    left_k = pair_mma.make_fragment_A(thread.partition_A(sK))
    left_q = pair_mma.make_fragment_A(thread.partition_A(sQ))
    right_k = pair_mma.make_fragment_B(thread.partition_B(sK))
    kk = cute.make_rmem_tensor(thread.partition_shape_C((CHUNK, CHUNK)), Float32)
    qk = cute.make_rmem_tensor(thread.partition_shape_C((CHUNK, CHUNK)), Float32)
    stage, parity, work, work_parity = Int32(0), Int32(0), Int32(0), Int32(0)
    shared.k.wait_full(stage, parity)
    record = read_record(shared.records, stage)
    while (record[Field.FLAGS] & Flag.STOP) == 0:
        if record[Field.COUNT] < CHUNK:
            shared.vectors.wait_full(stage, parity)
        if cutlass.const_expr(not transition):
            shared.q.wait_full(stage, parity)
        warpgroup.fence()
        for k in cutlass.range_constexpr(HEAD // 16):
            pair_mma.set(warpgroup.Field.ACCUMULATE, k != 0)
            cute.gemm(pair_mma, kk, left_k[None, None, k, stage], right_k[None, None, k, stage], kk)
        for k in cutlass.range_constexpr(0 if transition else HEAD // 16):
            pair_mma.set(warpgroup.Field.ACCUMULATE, k != 0)
            cute.gemm(pair_mma, qk, left_q[None, None, k, stage], right_k[None, None, k, stage], qk)
        warpgroup.commit_group()
        shared.vectors.wait_full(stage, parity)
        shared.pairs.wait_empty(work, work_parity)
        warpgroup.wait_group(0)
        shared.k.release(stage)
        if cutlass.const_expr(not transition):
            shared.q.release(stage)
        vector = shared.vector_base + stage * VECTOR_BYTES
        t_tile = shared.t_base + work * TILE_BYTES
        p_tile = shared.p_base + work * TILE_BYTES
        _invert(shared, kk, None if transition else qk, vector, t_tile, p_tile, warp, lane)
        shared.gates.release(stage)
        shared.pairs.publish_to_async(work)
        stage, parity = advance(stage, parity, INPUT_STAGES)
        work, work_parity = advance(work, work_parity, WORK_STAGES)
        cute.arch.barrier(barrier_id=int(Barrier.PAIRS_DONE), number_of_threads=128)
        shared.k.wait_full(stage, parity)
        record = read_record(shared.records, stage)
