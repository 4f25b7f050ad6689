"""Tokens on rows of V that are turned from lane to lane: the bits of `token_step` with 8 lanes a row, in fewer instructions.

Eight lanes share `rows` rows (1, 2 or 4). Register row r of lane l is row r ^ turn(l), turn(l) = l // (8 // rows). A reduction
over lanes at a distance then always sends the second half of a lane's sums and keeps the first: the registers that two
lanes exchange hold the same rows, and none is chosen at run time. At its end the lanes of a turn all have S.k and S.q of
row turn(l), so that u, which they form alike, reaches the other rows' lanes by one exchange each.
"""

import cutlass.cute as cute
from cutlass import Float32

from .arith import add_rn, fma_rn, mul_rn
from .token_step import CHAIN, HEAD_DIM, LANE_VALUES, ROW_LANES, load_rows, store_rows


def own_row(lane, rows):
    """Row, of those the 8 lanes share, that a lane's first register row is, and whose u and o it ends with."""
    return lane % ROW_LANES // (ROW_LANES // rows)


def share_of(lane, rows):
    """Number of a lane among those with the same own row."""
    return lane % (ROW_LANES // rows)


def load_turned(ptr, own, rows, dtype):
    """The vectors of `load_rows` in the lane's order; `ptr`: the lane's first vector of the first row, `own`: `own_row`."""
    return [vector for r in range(rows) for vector in load_rows(ptr + (own ^ r) * HEAD_DIM, 1, dtype)]


def store_turned(rS, ptr, own, rows, dtype):
    """Store a tile, rounded once to the pool's dtype. `ptr` and `own` as in `load_turned`."""
    for r in range(rows):
        store_rows(_row(rS, r), ptr + (own ^ r) * HEAD_DIM, 1, dtype)


def _row(rS, r):
    """Register row `r` of a tile as a tile of one row."""
    rX = cute.make_rmem_tensor(cute.make_layout((LANE_VALUES, 1)), Float32)
    for i in range(LANE_VALUES):
        rX[i, 0] = rS[i, r]
    return rX


def spread(u, rows):
    """u of the own row to the lanes that have that row as another one: u of each register row."""
    return [u, *(cute.arch.shuffle_sync_bfly(u, offset=r * (ROW_LANES // rows)) for r in range(1, rows))]


def _sums(dots_k, dots_q):
    """Sums over the 8 lanes of both dots of every row, to the lanes whose own row it is; lanes far apart come first."""
    step = ROW_LANES // 2
    while step:
        half = len(dots_k) // 2
        dots_k, dots_q = (
            [
                add_rn(x[r], cute.arch.shuffle_sync_bfly(x[half + r if half else r], offset=step))
                for r in range(max(half, 1))
            ]
            for x in (dots_k, dots_q)
        )
        step //= 2
    return dots_k[0], dots_q[0]


def _factors(decay):
    """Decays of a lane's values: one for all of them, or a register tensor."""
    return [decay] * LANE_VALUES if isinstance(decay, Float32) else [decay[i] for i in range(LANE_VALUES)]


def turned_step(rS, rK, rQ, decay, beta, v_own, kq, rows):
    """One token on a tile, in place. Returns `(o, u)` of the own row; arguments as in `token_step`."""
    factors = _factors(decay)
    dots_k, dots_q = [], []
    for r in range(rows):
        chains = []
        for start in range(0, LANE_VALUES, CHAIN):
            a, b = Float32(0.0), Float32(0.0)
            for i in range(start, start + CHAIN):
                s = mul_rn(rS[i, r], factors[i])
                a = fma_rn(s, rK[i], a)
                b = fma_rn(s, rQ[i], b)
                rS[i, r] = s
            chains.append((a, b))
        (a0, b0), (a1, b1) = chains
        dots_k.append(add_rn(a0, a1))
        dots_q.append(add_rn(b0, b1))
    of_k, of_q = _sums(dots_k, dots_q)
    u = mul_rn(beta, add_rn(v_own, -of_k))
    for r, u_row in enumerate(spread(u, rows)):
        for i in range(LANE_VALUES):
            rS[i, r] = fma_rn(rK[i], u_row, rS[i, r])
    return fma_rn(u, kq, of_q), u
