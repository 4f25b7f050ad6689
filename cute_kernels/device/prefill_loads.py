"""Loads of GDN prefill that go ahead of their use: tiles by TMA, and what a block's first loads ask for."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from .prefill_layout import CHUNK, HEAD, TILE_BYTES
from .prefill_sync import advance


@cute.jit
def load_tile(tma, gX, sX, token, column, stage, ring: cutlass.Constexpr, width: cutlass.Constexpr = HEAD):
    """Start the TMA load of a tile of gX, 64 rows from (token, column) on, into a stage."""
    tile = cute.local_tile(cute.domain_offset((token, column), gX), (CHUNK, width), (0, 0))
    one = cute.make_layout(1)
    target, source = cpasync.tma_partition(tma, 0, one, cute.group_modes(sX, 0, 2), cute.group_modes(tile, 0, 2))
    cute.copy(tma, source, target[None, stage], tma_bar_ptr=ring.full + stage)


@cute.jit
def load_when_free(tma, gX, sX, token, column, stage, parity, ring: cutlass.Constexpr):
    """`load_tile` of all columns of a stage once it is free; the stage after it."""
    width = cute.size(sX, mode=[1])
    ring.wait_empty(stage, parity)
    ring.expect(stage, width // 64 * TILE_BYTES)
    load_tile(tma, gX, sX, token, column, stage, ring, width)
    return advance(stage, parity, ring.stages)


@cute.jit
def prefetch_first(descriptors: cutlass.Constexpr, vectors: cutlass.Constexpr, lane: Int32):
    """TMA descriptors, and 32 lines of each vector of 4-byte elements, on their way to L2 at once, by one warp.

    A block's first item needs them one after the other, each after a load from memory otherwise.
    """
    if lane == 0:
        for atom in descriptors:
            cpasync.prefetch_descriptor(atom)
    for vector in vectors:
        if 32 * lane < cute.size(vector):
            address = (vector.iterator + 32 * lane).toint()
            cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[address])
