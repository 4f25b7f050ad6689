"""Shared-memory stages that hold parts of chunk records: how they are filled, and how wgmma reads them."""

import cutlass.cute as cute
from cutlass import Float16, Int32
from cutlass.cute.nvgpu import warpgroup

from .warp_ops import load_shared


def bulk_load(target, source, size, barrier):
    """Start a bulk copy of `size` bytes from a global address (Int64) to shared memory; one lane."""
    with cute.arch.elect_one():
        cute.arch.inline_ptx(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
            read_only_args=[target.toint(), source, Int32(size), barrier.toint()],
        )


def staged_operand(base, shape, stages, pitch, narrow=False):
    """A swizzled fp16 operand of a ring's stages, `pitch` bytes apart, as a staged tensor (rows, columns, stage).

    narrow: in blocks of 16 columns instead of 64.
    """
    kind = warpgroup.SmemLayoutAtomKind.K_SW32 if narrow else warpgroup.SmemLayoutAtomKind.K_SW128
    atom = warpgroup.make_smem_layout_atom(kind, Float16)
    tile = cute.tile_to_shape(atom, shape, order=(0, 1))
    layout = cute.append(tile.outer, cute.make_layout(stages, stride=pitch // 2))
    return cute.make_tensor(cute.recast_ptr(base, tile.inner, Float16), layout)


def decay_columns(S, tail, quad):
    """S *= e^(G_C) of each K column, from a record's tail; `quad` is lane % 4."""
    for n in range(0, cute.size(S) // 4, 2):
        factors = load_shared(tail + quad * 16 + n * 32, 4)
        for e in range(8):
            S[4 * n + e] = S[4 * n + e] * factors[e // 4 * 2 + e % 2]
