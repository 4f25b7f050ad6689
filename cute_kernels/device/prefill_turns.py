"""Turns of the two state warpgroups of a block: in step they would ask for the tensor cores together and leave them together.

The first turn is warpgroup 0's. With one warpgroup nothing happens.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

FIRST_TURN = 7  # named barriers, one for each warpgroup, above those of `prefill_layout.Barrier`
THREADS = 256


@cute.jit
def begin_turns(group: Int32, groups: cutlass.Constexpr):
    """Before the first turn."""
    if cutlass.const_expr(groups == 2):
        if group == 1:
            cute.arch.barrier_arrive(barrier_id=FIRST_TURN, number_of_threads=THREADS)


@cute.jit
def take_turn(group: Int32, groups: cutlass.Constexpr):
    """Until it is the turn of warpgroup `group`."""
    if cutlass.const_expr(groups == 2):
        cute.arch.barrier(barrier_id=FIRST_TURN + group, number_of_threads=THREADS)


@cute.jit
def pass_turn(group: Int32, groups: cutlass.Constexpr):
    """The other warpgroup's turn."""
    if cutlass.const_expr(groups == 2):
        cute.arch.barrier_arrive(barrier_id=FIRST_TURN + 1 - group, number_of_threads=THREADS)


@cute.jit
def end_turns(group: Int32, groups: cutlass.Constexpr):
    """After the last turn: the pass that nobody has waited for."""
    if cutlass.const_expr(groups == 2):
        if group == 0:
            cute.arch.barrier(barrier_id=FIRST_TURN, number_of_threads=THREADS)
