"""One token of the gated delta rule on registers: the arithmetic that every recurrent kernel shares.

    S~ = S diag(decay)        a = S~ k        b = S~ q
    u  = beta (v - a)         S = S~ + u k^T  o = b + u (k.q)

Decode, verify, replay and token-by-token prefill promise equal bits. They get them from this file: every multiply and
add is pinned, norms have one lane mapping (16 lanes x 8 channels), and each sum has one order. Dot products over K are 16
chains of 8 values, then a tree; 16 lanes a row carry a chain each, 8 lanes two. So lanes and rows a lane, warps, tile and batch
change nothing. The order of K in a chain follows the pool's dtype: equal bits are promised within one pool dtype.

State tile: 8 or 16 lanes share a row of V. A lane owns 16 or 8 of the 128 K values of each of its rows, as 16-byte vectors of w
values. Vector c of lane l starts at K = wl + `vector_start(c)`. In registers a tile is (16, rows) or (8, rows).
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Uint32, const_expr

from .arith import add_rn, decay_of, fma_rn, log_decay_bounded, log_decay_softplus, mul_rn
from .kept import load_kept
from .memory import load_vector, narrow, smem_ptr, store_vector, widen, zero_vector
from .reduce import reduce_pairs, source_lane, sum_over

HEAD_DIM = 128
ROW_LANES = 8  # lanes that share a row of V, where a kernel does not say 16
LANE_VALUES = HEAD_DIM // ROW_LANES  # K values of a row a lane owns
CHAIN = 8  # values of K that are summed one after the other
NORM_LANES = 16  # lanes that share a q or k vector while it is normalised
NORM_VALUES = HEAD_DIM // NORM_LANES
L2NORM_EPS = 1e-6


def vector_width(dtype):
    """Elements of one 16-byte vector of the pool's dtype."""
    return 128 // dtype.width


def vector_start(c, dtype, lanes=ROW_LANES):
    """K of vector `c` (static) of a lane's row, beside that of its first. Both vectors of an fp32 chain come together."""
    stride = lanes * vector_width(dtype)
    return (c % 2 * 2 + c // 2 if HEAD_DIM // stride == 4 else c) * stride


def place_of(channel, dtype):
    """Where a channel of a vector of 128 stands in shared memory, so that `take_channels` reads whole rows of banks."""
    if vector_width(dtype) == 4:
        return channel // 32 % 2 * 64 + channel // 64 * 32 + channel % 32
    return channel // 64 * 64 + channel // 4 % 2 * 32 + channel // 8 % 8 * 4 + channel % 4


@cute.jit
def normalize(rX: cute.Tensor, scale: Float32, l2norm: Boolean, scaled: cutlass.Constexpr) -> cute.Tensor:
    """8 raw channels a lane to `x / sqrt(sum x^2 + 1e-6)` in fp32, times `scale` if `scaled`. Zero rows stay zero.

    All 16 lanes of the vector take part. With `l2norm` false only the scale is applied.
    """
    rX = widen(rX, NORM_VALUES)
    rY = cute.make_rmem_tensor(cute.make_layout(NORM_VALUES), Float32)
    factor = norm_factor(sum_over(dot_channels(rX, rX), NORM_LANES), l2norm)
    if const_expr(scaled):
        factor = mul_rn(factor, scale)
    for i in cutlass.range_constexpr(NORM_VALUES):
        rY[i] = mul_rn(rX[i], factor)
    return rY


@cute.jit
def normalize_pair(raw_k: cute.Tensor, raw_q: cute.Tensor, scale: Float32, l2norm: Boolean):
    """Normalised k, normalised and scaled q, and their product k.q; 8 raw channels of each a lane, over the same 16 lanes.

    The three sums are taken side by side: k.q is that of the raw vectors times both factors.
    """
    wide_k, wide_q = widen(raw_k, NORM_VALUES), widen(raw_q, NORM_VALUES)
    kk, qq, kq = dot_channels(wide_k, wide_k), dot_channels(wide_q, wide_q), dot_channels(wide_k, wide_q)
    for step in cutlass.range_constexpr(NORM_LANES.bit_length() - 1):
        kk = add_rn(kk, cute.arch.shuffle_sync_bfly(kk, offset=1 << step))
        qq = add_rn(qq, cute.arch.shuffle_sync_bfly(qq, offset=1 << step))
        kq = add_rn(kq, cute.arch.shuffle_sync_bfly(kq, offset=1 << step))
    factor_k, factor_q = norm_factor(kk, l2norm), mul_rn(norm_factor(qq, l2norm), scale)
    rK = cute.make_rmem_tensor(cute.make_layout(NORM_VALUES), Float32)
    rQ = cute.make_rmem_tensor(cute.make_layout(NORM_VALUES), Float32)
    for i in cutlass.range_constexpr(NORM_VALUES):
        rK[i] = mul_rn(wide_k[i], factor_k)
        rQ[i] = mul_rn(wide_q[i], factor_q)
    return rK, rQ, mul_rn(mul_rn(kq, factor_k), factor_q)


@cute.jit
def normalize_halves(raw_k: cute.Tensor, raw_q: cute.Tensor, is_q: Boolean, scale: Float32, l2norm: Boolean):
    """`normalize_pair` by the two halves of a warp, both given both vectors: k or q (`is_q`) normalised, and in lane 0 k.q.

    A scale of one leaves k's bits alone.
    """
    raw = cute.make_rmem_tensor(cute.make_layout(NORM_VALUES), BFloat16)
    words, words_k, words_q = (cute.recast_tensor(rX, Int32) for rX in (raw, raw_k, raw_q))
    for i in cutlass.range_constexpr(NORM_VALUES // 2):
        words[i] = words_q[i] if is_q else words_k[i]
    wide_k, wide_q, rX = (widen(rX, NORM_VALUES) for rX in (raw_k, raw_q, raw))
    squares, kq = dot_channels(rX, rX), dot_channels(wide_k, wide_q)
    for step in cutlass.range_constexpr(NORM_LANES.bit_length() - 1):
        squares = add_rn(squares, cute.arch.shuffle_sync_bfly(squares, offset=1 << step))
        kq = add_rn(kq, cute.arch.shuffle_sync_bfly(kq, offset=1 << step))
    factor = mul_rn(norm_factor(squares, l2norm), scale if is_q else Float32(1.0))
    rY = cute.make_rmem_tensor(cute.make_layout(NORM_VALUES), Float32)
    for i in cutlass.range_constexpr(NORM_VALUES):
        rY[i] = mul_rn(rX[i], factor)
    return rY, mul_rn(mul_rn(kq, factor), cute.arch.shuffle_sync_bfly(factor, offset=NORM_LANES))


@cute.jit
def norm_factor(squares: Float32, l2norm: Boolean) -> Float32:
    """1 / sqrt(squares + 1e-6), or 1 without `l2norm`."""
    norm = cute.math.rsqrt(add_rn(squares, Float32(L2NORM_EPS)), fastmath=True)
    return norm if l2norm else Float32(1.0)


def dot_channels(rX, rY):
    """A lane's part of the product of two vectors: 8 channels, fp32, in one chain."""
    total = Float32(0.0)
    for i in range(NORM_VALUES):
        total = fma_rn(rX[i], rY[i], total)
    return total


def put_channels(rX, base, offset, lane16, dtype):
    """Store a lane's 8 of 128 fp32 channels as `place_of` says."""
    for half in range(2):
        part = cute.make_rmem_tensor(cute.make_layout(4), Float32)
        for i in range(4):
            part[i] = rX[half * 4 + i]
        place = place_of(lane16 * NORM_VALUES + half * 4, dtype)
        store_vector(part, smem_ptr(base, offset + place, Float32, 16), 4)


def take_channels(base, offset, place, lanes=ROW_LANES):
    """The values of a vector stored as `place_of` says that lane `place` of a row needs, in the order of its state row."""
    rX = cute.make_rmem_tensor(cute.make_layout(HEAD_DIM // lanes), Float32)
    first = place * 4 if lanes == ROW_LANES else place // ROW_LANES * 64 + place % ROW_LANES * 4
    for vector in range(HEAD_DIM // lanes // 4):
        part = load_vector(smem_ptr(base, offset + first + vector * 32, Float32, 16), 4)
        for i in range(4):
            rX[4 * vector + i] = part[i]
    return rX


@cute.jit
def decay_factor(
    bounded: cutlass.Constexpr, raw: Float32, bias: Float32, a_log: Float32, lower_bound: Float32
) -> Float32:
    """exp(g) of one head (GDN) or one channel (KDA): softplus gate, or bounded by `lower_bound` < 0."""
    if const_expr(bounded):
        return decay_of(log_decay_bounded(raw, bias, a_log, lower_bound))
    return decay_of(log_decay_softplus(raw, bias, a_log))


def tile_layout(rows, lanes=ROW_LANES):
    """Register layout of a state tile: a lane's K values of each of `rows` rows of V."""
    return cute.make_layout((HEAD_DIM // lanes, rows))


def load_rows(ptr, rows, dtype, lanes=ROW_LANES):
    """`rows` consecutive V rows as stored, as 16-byte vectors; `ptr` is the lane's first vector of the first."""
    width = vector_width(dtype)
    vectors = []
    for r in range(rows):
        for c in range(HEAD_DIM // lanes // width):
            vectors.append(load_vector(ptr + r * HEAD_DIM + vector_start(c, dtype, lanes), width))
    return vectors


@cute.jit
def load_rows_if(
    valid: Boolean,
    ptr: cute.Pointer,
    rows: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
    lanes: cutlass.Constexpr = ROW_LANES,
    kept: cutlass.Constexpr = False,
):
    """`load_rows`, or zeros without touching memory where `valid` is false; `kept`: as in `kept.py`."""
    width = vector_width(dtype)
    count = HEAD_DIM // lanes // width
    vectors = []
    for i in cutlass.range_constexpr(rows * count):
        vectors.append(zero_vector(dtype, width))
    if const_expr(kept):
        for i in cutlass.range_constexpr(rows * count):
            words = cute.recast_tensor(vectors[i], Uint32)
            source = ptr + i // count * HEAD_DIM + vector_start(i % count, dtype, lanes)
            words[0], words[1], words[2], words[3] = load_kept(valid, source)
    elif valid:
        for r in cutlass.range_constexpr(rows):
            for c in cutlass.range_constexpr(count):
                source = cute.make_tensor(ptr + r * HEAD_DIM + vector_start(c, dtype, lanes), cute.make_layout(width))
                cute.autovec_copy(source, vectors[r * count + c])
    return vectors


def widen_rows(vectors, rows, dtype, lanes=ROW_LANES):
    """Vectors of `load_rows` as an fp32 tile."""
    width = vector_width(dtype)
    count = HEAD_DIM // lanes // width
    rS = cute.make_rmem_tensor(tile_layout(rows, lanes), Float32)
    for r in range(rows):
        for c in range(count):
            values = widen(vectors[r * count + c], width)
            for i in range(width):
                rS[c * width + i, r] = values[i]
    return rS


def store_rows(rS, ptr, rows, dtype, lanes=ROW_LANES):
    """Store an fp32 tile, rounded once to the pool's dtype. `ptr` as in `load_rows`."""
    width = vector_width(dtype)
    rX = cute.make_rmem_tensor(cute.make_layout(width), Float32)
    for r in range(rows):
        for c in range(HEAD_DIM // lanes // width):
            for i in range(width):
                rX[i] = rS[c * width + i, r]
            store_vector(narrow(rX, width, dtype), ptr + r * HEAD_DIM + vector_start(c, dtype, lanes), width)


def round_rows(rS, rows, dtype):
    """Round a tile to the pool's dtype in place, as a store followed by a load would. Nothing for fp32."""
    if dtype is not BFloat16:
        return
    rX = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    for r in range(rows):
        for i in range(0, LANE_VALUES, 2):
            rX[0] = rS[i, r]
            rX[1] = rS[i + 1, r]
            rY = widen(narrow(rX, 2, dtype), 2)
            rS[i, r] = rY[0]
            rS[i + 1, r] = rY[1]


def _decay_at(decay, i):
    """Decay of value `i`: a scalar serves all of them, a register tensor has one for each."""
    return decay if isinstance(decay, Float32) else decay[i]


def token_step(rS, rK, rQ, decay, beta, v_own, kq, lane, rows, lanes=ROW_LANES):
    """One token on a tile, in place. Returns `(o, u)` of row `owned_row(lane, rows, lanes)` of the lanes' rows.

    `o` is valid in the upper half of a row's lanes, `u` in the lower. `rK`, `rQ`: the lane's normalised values, q
    scaled. `decay`: Float32 (GDN), or the lane's factors (KDA). `v_own`: v of the owned row. `kq`: k.q.
    """
    values = HEAD_DIM // lanes
    dots_k = []
    dots_q = []
    for r in range(rows):
        chains = []
        for start in range(0, values, CHAIN):
            a = Float32(0.0)
            b = Float32(0.0)
            for i in range(start, start + CHAIN):
                s = mul_rn(rS[i, r], _decay_at(decay, i))
                a = fma_rn(s, rK[i], a)
                b = fma_rn(s, rQ[i], b)
                rS[i, r] = s
            chains.append((a, b))
        if len(chains) == 2:
            chains = [(add_rn(chains[0][0], chains[1][0]), add_rn(chains[0][1], chains[1][1]))]
        dots_k.append(chains[0][0])
        dots_q.append(chains[0][1])
    total = reduce_pairs(dots_k, dots_q, lane, rows, lanes)
    u = mul_rn(beta, add_rn(v_own, -total))
    first = lane & (32 - lanes)
    for r in range(rows):
        u_row = cute.arch.shuffle_sync(u, first + source_lane(r, rows, lanes))
        for i in range(values):
            rS[i, r] = fma_rn(rK[i], u_row, rS[i, r])
    u_of_row = cute.arch.shuffle_sync(u, lane & (31 - lanes // 2))
    return fma_rn(u_of_row, kq, total), u


def replay_step(rS, rK, u_rows, decay, rows):
    """Fold one logged token whose u is known into a tile, in place: the same bits as `token_step` leaves in S."""
    for r in range(rows):
        for i in range(LANE_VALUES):
            rS[i, r] = fma_rn(rK[i], u_rows[r], mul_rn(rS[i, r], _decay_at(decay, i)))


def holds_output(lane, rows, lanes=ROW_LANES):
    """Whether this lane is the one of its row that stores `o`."""
    duplicates = lanes // 2 // rows  # lanes of one half that hold the same row's sum
    return ((lane & (lanes // 2)) != 0) & ((lane & (duplicates - 1)) == 0)


def lane_in_row(lane: Int32, lanes=ROW_LANES) -> Int32:
    """Place of a lane among those that share a row."""
    return lane & (lanes - 1)
