"""Reductions over the 8 or 16 lanes that share a state row, in one fixed order.

A transposing butterfly reduces several partial sums at once: each step halves the number of sums a lane carries. Lanes far
apart are added first, so the order is that of one tree over 16 parts, of which a lane of 8 has added two already. It never
depends on the tile: every kernel that uses it gets the same bits.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from .arith import add_rn


@cute.jit
def sum_over(x: Float32, lanes: cutlass.Constexpr) -> Float32:
    """Sum over aligned groups of `lanes` lanes (a power of two), to every lane of the group."""
    for step in cutlass.range_constexpr(lanes.bit_length() - 1):
        x = add_rn(x, cute.arch.shuffle_sync_bfly(x, offset=1 << step))
    return x


@cute.jit
def reduce_pairs(dots_k, dots_q, lane: Int32, rows: cutlass.Constexpr, lanes: cutlass.Constexpr = 8) -> Float32:
    """Reduce `rows` (1, 2 or 4) pairs of partial sums over the lanes of a row with one transposing butterfly.

    The lower half of the lanes ends with a row's S.k, the upper with its S.q; the row is `owned_row(lane, rows, lanes)`.
    """
    sums = [*dots_k, *dots_q]
    for bit in cutlass.range_constexpr(lanes.bit_length() - 1):
        step = lanes >> (bit + 1)
        half = len(sums) // 2
        if const_expr(half > 0):
            upper = (lane & step) != 0
            kept = []
            for r in cutlass.range_constexpr(half):
                sent = sums[r] if upper else sums[half + r]
                mine = sums[half + r] if upper else sums[r]
                kept.append(add_rn(mine, cute.arch.shuffle_sync_bfly(sent, offset=step)))
            sums = kept
        else:
            sums = [add_rn(sums[0], cute.arch.shuffle_sync_bfly(sums[0], offset=step))]
    return sums[0]


def owned_row(lane, rows, lanes=8):
    """Row, of the `rows` that the lanes of a row share, whose sums a lane holds after `reduce_pairs`."""
    return (lane & (lanes // 2 - 1)) // (lanes // 2 // rows)


def source_lane(row, rows, lanes=8):
    """Lane, of those of a row, that holds a row's S.k after `reduce_pairs`."""
    return row * (lanes // 2 // rows)
