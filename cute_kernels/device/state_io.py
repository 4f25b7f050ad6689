"""The slot rule, in one place: what an id means and where its bytes are.

An id outside [0, num_slots) means none. Reading none gives zeros and touches no memory; writing none stores nothing.
Offsets are 64-bit: a pool has more than 2^31 elements.
"""

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from .memory import offset_ptr


@cute.jit
def slot_is_valid(slot: Int32, num_slots: Int32) -> Boolean:
    """Whether a read or write id names a slot."""
    return (slot >= 0) & (slot < num_slots)


def slot_ptr(mPool, slot, inner, align=16):
    """Pointer to element `inner` of a slot in a pool view [slots, elements]."""
    offset = Int64(slot) * mPool.stride[0] + Int64(inner)
    return offset_ptr(mPool.iterator, offset, mPool.element_type, align)


def row_ptr(mRows, row, inner, align):
    """Pointer to element `inner` of a row in a strided matrix [rows, width]."""
    offset = Int64(row) * mRows.stride[0] + Int64(inner)
    return offset_ptr(mRows.iterator, offset, mRows.element_type, align)
