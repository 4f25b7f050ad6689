"""One token of the gated delta rule on registers: the arithmetic that every recurrent kernel shares.

    S~ = S diag(decay)        a = S~ k        b = S~ q
    u  = beta (v - a)         S = S~ + u k^T  o = b + u (k.q)

Decode, verify, replay and token-by-token prefill promise equal bits. They get them from this file: every multiply and
add is pinned, norms have one lane mapping (16 lanes x 8 channels), dot products another (8 lanes x 16 channels), and
each is reduced in one order. Rows a lane, warps, tile and batch change nothing. The order of K in a lane follows the
pool's dtype, so equal bits are promised within one pool dtype.

State tile: 8 lanes share a row of V. A lane owns 16 of the 128 K values of each of its rows, as 16-byte vectors at
K = 32c + 4l (fp32, c < 4) or K = 64c + 8l (bf16, c < 2), l the lane's place among the 8. In registers a tile is
(16, rows): value i of a row is K `channel_of(i, l, dtype)`.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, const_expr

from .arith import add_rn, decay_of, fma_rn, log_decay_bounded, log_decay_softplus, mul_rn
from .memory import load_vector, narrow, smem_ptr, store_vector, widen, zero_vector
from .reduce import reduce_pairs, source_lane, sum_over

HEAD_DIM = 128
ROW_LANES = 8  # lanes that share a row of V
LANE_VALUES = HEAD_DIM // ROW_LANES  # K values of a row a lane owns
NORM_LANES = 16  # lanes that share a q or k vector while it is normalised
NORM_VALUES = HEAD_DIM // NORM_LANES
L2NORM_EPS = 1e-6


def vector_width(dtype):
    """Elements of one 16-byte vector of the pool's dtype."""
    return 128 // dtype.width


def channel_of(i, l8, dtype):
    """K index of value `i` (static) of lane `l8` of the 8."""
    width = vector_width(dtype)
    return (i // width) * ROW_LANES * width + l8 * width + i % width


@cute.jit
def normalize(rX: cute.Tensor, scale: Float32, l2norm: Boolean, scaled: cutlass.Constexpr) -> cute.Tensor:
    """8 raw channels a lane to `x / sqrt(sum x^2 + 1e-6)` in fp32, times `scale` if `scaled`. Zero rows stay zero.

    All 16 lanes of the vector take part. With `l2norm` false only the scale is applied.
    """
    rX = widen(rX, NORM_VALUES)
    rY = cute.make_rmem_tensor(cute.make_layout(NORM_VALUES), Float32)
    squares = Float32(0.0)
    for i in cutlass.range_constexpr(NORM_VALUES):
        squares = fma_rn(rX[i], rX[i], squares)
    squares = sum_over(squares, NORM_LANES)
    norm = cute.math.rsqrt(add_rn(squares, Float32(L2NORM_EPS)), fastmath=True)
    factor = norm if l2norm else Float32(1.0)
    if const_expr(scaled):
        factor = mul_rn(factor, scale)
    for i in cutlass.range_constexpr(NORM_VALUES):
        rY[i] = mul_rn(rX[i], factor)
    return rY


@cute.jit
def dot_channels(rK: cute.Tensor, rQ: cute.Tensor) -> Float32:
    """k.q of two normalised vectors spread over the same 16 lanes; every lane gets the sum."""
    total = Float32(0.0)
    for i in cutlass.range_constexpr(NORM_VALUES):
        total = fma_rn(rK[i], rQ[i], total)
    return sum_over(total, NORM_LANES)


def load_channels(base, offset, l8, dtype):
    """The 16 values of a 128-value fp32 vector in shared memory that lane `l8` needs, in the order of its state row."""
    width = vector_width(dtype)
    rX = cute.make_rmem_tensor(cute.make_layout(LANE_VALUES), Float32)
    for vector in range(LANE_VALUES // 4):
        part = load_vector(smem_ptr(base, offset + channel_of(4 * vector, l8, dtype), Float32, 16), 4)
        for i in range(4):
            rX[4 * vector + i] = part[i]
    return rX


def put_channels(rX, base, offset, lane16, dtype):
    """Store a lane's 8 of 128 fp32 channels so that `take_channels` reads whole rows of banks for either pool dtype."""
    for half in range(2):
        if vector_width(dtype) == 4:
            place = lane16 * NORM_VALUES + half * 4
        else:
            place = lane16 // 8 * 64 + half * 32 + lane16 % 8 * 4
        part = cute.make_rmem_tensor(cute.make_layout(4), Float32)
        for i in range(4):
            part[i] = rX[half * 4 + i]
        store_vector(part, smem_ptr(base, offset + place, Float32, 16), 4)


def take_channels(base, offset, l8):
    """The 16 values of a vector stored by `put_channels` that lane `l8` needs, in the order of its state row."""
    rX = cute.make_rmem_tensor(cute.make_layout(LANE_VALUES), Float32)
    for vector in range(LANE_VALUES // 4):
        part = load_vector(smem_ptr(base, offset + vector * 32 + l8 * 4, Float32, 16), 4)
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


def tile_layout(rows):
    """Register layout of a state tile: 16 K values of each of `rows` rows of V."""
    return cute.make_layout((LANE_VALUES, rows))


def load_rows(ptr, rows, dtype):
    """`rows` consecutive V rows as stored, as 16-byte vectors; `ptr` is the lane's first vector of the first."""
    stride = ROW_LANES * vector_width(dtype)
    vectors = []
    for r in range(rows):
        for c in range(LANE_VALUES // vector_width(dtype)):
            vectors.append(load_vector(ptr + r * HEAD_DIM + c * stride, vector_width(dtype)))
    return vectors


@cute.jit
def load_rows_if(valid: Boolean, ptr: cute.Pointer, rows: cutlass.Constexpr, dtype: cutlass.Constexpr):
    """`load_rows`, or zeros without touching memory where `valid` is false."""
    width = vector_width(dtype)
    stride = ROW_LANES * width
    vectors = []
    for i in cutlass.range_constexpr(rows * LANE_VALUES // width):
        vectors.append(zero_vector(dtype, width))
    if valid:
        for r in cutlass.range_constexpr(rows):
            for c in cutlass.range_constexpr(LANE_VALUES // width):
                source = cute.make_tensor(ptr + r * HEAD_DIM + c * stride, cute.make_layout(width))
                cute.autovec_copy(source, vectors[r * (LANE_VALUES // width) + c])
    return vectors


def widen_rows(vectors, rows, dtype):
    """Vectors of `load_rows` as an fp32 tile (16, rows)."""
    width = vector_width(dtype)
    count = LANE_VALUES // width
    rS = cute.make_rmem_tensor(tile_layout(rows), Float32)
    for r in range(rows):
        for c in range(count):
            values = widen(vectors[r * count + c], width)
            for i in range(width):
                rS[c * width + i, r] = values[i]
    return rS


def store_rows(rS, ptr, rows, dtype):
    """Store an fp32 tile (16, rows), rounded once to the pool's dtype. `ptr` as in `load_rows`."""
    width = vector_width(dtype)
    stride = ROW_LANES * width
    rX = cute.make_rmem_tensor(cute.make_layout(width), Float32)
    for r in range(rows):
        for c in range(LANE_VALUES // width):
            for i in range(width):
                rX[i] = rS[c * width + i, r]
            store_vector(narrow(rX, width, dtype), ptr + r * HEAD_DIM + c * stride, width)


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


def token_step(rS, rK, rQ, decay, beta, v_own, kq, lane, rows):
    """One token on a tile (16, rows), in place. Returns `(o, u)` of row `owned_row(lane, rows)` of the 8 lanes' rows.

    `o` is valid in lanes with bit 2 set, `u` in lanes with it clear. `rK`, `rQ`: the lane's 16 normalised
    values, q scaled. `decay`: Float32 (GDN), or the lane's 16 factors (KDA). `v_own`: v of the owned row. `kq`: k.q.
    """
    dots_k = []
    dots_q = []
    for r in range(rows):
        a = Float32(0.0)
        b = Float32(0.0)
        for i in range(LANE_VALUES):
            s = mul_rn(rS[i, r], _decay_at(decay, i))
            a = fma_rn(s, rK[i], a)
            b = fma_rn(s, rQ[i], b)
            rS[i, r] = s
        dots_k.append(a)
        dots_q.append(b)
    total = reduce_pairs(dots_k, dots_q, lane, rows)
    u = mul_rn(beta, add_rn(v_own, -total))
    first = lane & (32 - ROW_LANES)
    for r in range(rows):
        u_row = cute.arch.shuffle_sync(u, first + source_lane(r, rows))
        for i in range(LANE_VALUES):
            rS[i, r] = fma_rn(rK[i], u_row, rS[i, r])
    u_of_row = cute.arch.shuffle_sync(u, lane & (31 - ROW_LANES // 2))
    return fma_rn(u_of_row, kq, total), u


def replay_step(rS, rK, u_rows, decay, rows):
    """Fold one logged token whose u is known into a tile, in place: the same bits as `token_step` leaves in S."""
    for r in range(rows):
        for i in range(LANE_VALUES):
            rS[i, r] = fma_rn(rK[i], u_rows[r], mul_rn(rS[i, r], _decay_at(decay, i)))


def holds_output(lane, rows):
    """Whether this lane is the one of its row that stores `o`."""
    duplicates = ROW_LANES // 2 // rows  # lanes of one half that hold the same row's sum
    return ((lane & 4) != 0) & ((lane & (duplicates - 1)) == 0)


def holds_u(lane, rows):
    """Whether this lane is the one of its row that stores `u`."""
    duplicates = ROW_LANES // 2 // rows
    return ((lane & 4) == 0) & ((lane & (duplicates - 1)) == 0)


def lane_in_row(lane: Int32) -> Int32:
    """Place of a lane among the 8 that share a row."""
    return lane & (ROW_LANES - 1)
