"""Rows of state by bulk copies: from the read slot into shared memory, and from there, as a warp left them, to the write slot.

A bulk store writes whole lines whatever the lanes hold, and rows that nothing changed need not be stored to shared memory first.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import cpasync

from .kept import land
from .memory import smem_ptr, store_vector, zero_vector
from .state_io import slot_ptr
from .token_step import HEAD_DIM, vector_width

# Elements by which the second half of a split landing is off: its rows hit the banks that the first half's leave free.
SHIFT = 32


class LandedRows:
    """Methods of a kernel class that has `dtype`, `tile` (rows of a block), `threads`, `warps` and `landings` (barriers).

    A landing that is `split` lies as two halves, each with its own copy: rows of one half fall on the same banks.
    """

    split = False

    def landed_at(self, part, size, half):
        """Element at which a half of landing `part` stands."""
        return part * (size + 2 * SHIFT) + half * (size // 2 + SHIFT) if self.split else part * size

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
        halves = 2 if self.split else 1
        part, place = tidx // group, tidx % group
        if place == 0:
            cute.arch.mbarrier_init(bars + part, 1)
            cute.arch.mbarrier_init_fence()
            if reads:
                cute.arch.mbarrier_arrive_and_expect_tx(bars + part, size * self.dtype.width // 8)
                for half in cutlass.range_constexpr(halves):
                    source = slot_ptr(mState, read, row * HEAD_DIM + part * size + half * (size // halves))
                    target = sLanding.iterator + self.landed_at(part, size, half)
                    land(source, target, size // halves, bars + part, True)
        if not reads:
            width = vector_width(self.dtype)
            for i in cutlass.range_constexpr(size // (group * width)):
                half, first = divmod(i * group * width, size // halves)
                at = self.landed_at(part, size, half) + first + place * width
                target = smem_ptr(sLanding.iterator, at, self.dtype, 16)
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
        halves = 2 if self.split else 1
        cute.arch.sync_warp()
        if (lane == 0) & writes:
            atom = cute.make_copy_atom(
                cpasync.CopyBulkS2GOp(), self.dtype, num_bits_per_copy=size // halves * self.dtype.width
            )
            for half in cutlass.range_constexpr(halves):
                source = sLanding.iterator + self.landed_at(warp, size, half)
                target = slot_ptr(mState, write, row * HEAD_DIM + warp * size + half * (size // halves))
                source, target = (cute.make_tensor(x, cute.make_layout(size // halves)) for x in (source, target))
                cute.copy(atom, source, target)
            cute.arch.cp_async_bulk_commit_group()
