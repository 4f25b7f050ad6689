"""Reductions over the 8 lanes that share a state row, in one fixed order.

Eight lanes own one row of V (16 K values each). A transposing butterfly reduces several partial sums at once: each step
halves the number of sums a lane carries. The order of additions depends on the lane mapping alone, never on the tile, so
every kernel that uses it gets the same bits.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .arith import add_rn


@cute.jit
def sum_over(x: Float32, lanes: cutlass.Constexpr) -> Float32:
    """Sum over aligned groups of `lanes` lanes (a power of two), to every lane of the group."""
    for step in cutlass.range_constexpr(lanes.bit_length() - 1):
        x = add_rn(x, cute.arch.shuffle_sync_bfly(x, offset=1 << step))
    return x


@cute.jit
def reduce_pairs(dots_k, dots_q, lane: Int32, rows: cutlass.Constexpr) -> Float32:
    """Reduce `rows` (1, 2 or 4) pairs of partial sums over 8 lanes with one transposing butterfly.

    Lanes with bit 2 clear end with a row's S.k, lanes with it set with its S.q; the row is `owned_row(lane, rows)`.
    """
    upper = (lane & 4) != 0
    kept = []
    for r in cutlass.range_constexpr(rows):
        sent = dots_k[r] if upper else dots_q[r]
        mine = dots_q[r] if upper else dots_k[r]
        kept.append(add_rn(mine, cute.arch.shuffle_sync_bfly(sent, offset=4)))
    if cutlass.const_expr(rows == 4):
        high = (lane & 2) != 0
        halves = []
        for r in cutlass.range_constexpr(2):
            sent = kept[r] if high else kept[2 + r]
            mine = kept[2 + r] if high else kept[r]
            halves.append(add_rn(mine, cute.arch.shuffle_sync_bfly(sent, offset=2)))
        odd = (lane & 1) != 0
        sent = halves[0] if odd else halves[1]
        mine = halves[1] if odd else halves[0]
        return add_rn(mine, cute.arch.shuffle_sync_bfly(sent, offset=1))
    if cutlass.const_expr(rows == 2):
        high = (lane & 2) != 0
        sent = kept[0] if high else kept[1]
        mine = kept[1] if high else kept[0]
        total = add_rn(mine, cute.arch.shuffle_sync_bfly(sent, offset=2))
        return add_rn(total, cute.arch.shuffle_sync_bfly(total, offset=1))
    total = add_rn(kept[0], cute.arch.shuffle_sync_bfly(kept[0], offset=2))
    return add_rn(total, cute.arch.shuffle_sync_bfly(total, offset=1))


def owned_row(lane, rows):
    """Row, of the `rows` that 8 lanes share, whose sums a lane holds after `reduce_pairs`."""
    if rows == 4:
        return lane & 3
    if rows == 2:
        return (lane >> 1) & 1
    return lane * 0


def source_lane(row, rows):
    """Lane, of the 8, that holds a row's S.k after `reduce_pairs`."""
    return row * (4 // rows)
