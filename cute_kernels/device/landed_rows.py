"""Rows of state by bulk copies: from the read slot into shared memory, and from there, as a warp left them, to the write slot.

A bulk store writes whole lines whatever the lanes hold, and rows that nothing changed need not be stored to shared memory first.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import cpasync

from .memory import smem_ptr, store_vector, zero_vector
from .state_io import slot_ptr
from .token_step import HEAD_DIM, vector_width


class LandedRows:
    """Methods of a kernel class that has `dtype`, `tile` (rows of a block), `threads`, `warps` and `landings` (copies in)."""

    @cute.jit
    def land_rows(
        self,
        mState: cute.Tensor,
        sLanding: cute.Tensor,
        bars: cute.Pointer,
        read: Int32,
        reads: Boolean,
        row: Int32,  # the block's first within the slot
        tidx: Int32,
    ):
        """Start the block's copies, or write zeros; a block barrier must stand before anyone reads the rows."""
        group, size = self.threads // self.landings, self.tile * HEAD_DIM // self.landings
        part, place = tidx // group, tidx % group
        if place == 0:
            cute.arch.mbarrier_init(bars + part, 1)
            cute.arch.mbarrier_init_fence()
            if reads:
                atom = cute.make_copy_atom(
                    cpasync.CopyBulkG2SOp(), self.dtype, num_bits_per_copy=size * self.dtype.width
                )
                cute.arch.mbarrier_arrive_and_expect_tx(bars + part, size * self.dtype.width // 8)
                source = slot_ptr(mState, read, row * HEAD_DIM + part * size)
                target = cute.make_tensor(sLanding.iterator + part * size, cute.make_layout(size))
                cute.copy(atom, cute.make_tensor(source, cute.make_layout(size)), target, mbar_ptr=bars + part)
        if not reads:
            width = vector_width(self.dtype)
            for i in cutlass.range_constexpr(size // (group * width)):
                target = smem_ptr(sLanding.iterator, part * size + (i * group + place) * width, self.dtype, 16)
                store_vector(zero_vector(self.dtype, width), target, width)
            cute.arch.fence_view_async_shared()

    @cute.jit
    def send_rows(
        self,
        mState: cute.Tensor,
        sLanding: cute.Tensor,
        write: Int32,
        writes: Boolean,
        row: Int32,
        warp: Int32,
        lane: Int32,
    ):
        """A warp starts the copy of its rows from shared memory to the write slot; whoever stored them there has fenced."""
        size = self.tile * HEAD_DIM // self.warps
        cute.arch.sync_warp()
        if (lane == 0) & writes:
            atom = cute.make_copy_atom(cpasync.CopyBulkS2GOp(), self.dtype, num_bits_per_copy=size * self.dtype.width)
            part = cute.make_tensor(sLanding.iterator + warp * size, cute.make_layout(size))
            target = slot_ptr(mState, write, row * HEAD_DIM + warp * size)
            cute.copy(atom, part, cute.make_tensor(target, cute.make_layout(size)))
            cute.arch.cp_async_bulk_commit_group()
