"""Pair products of a KDA chunk, three levels at a time, and their places in L and P."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from .prefill_inverse import DIAGONAL_BYTES
from .prefill_layout import HEAD, LOWER_PITCH, tile_address
from .warp_ops import load_shared, pack_f16, store_shared, store_shared_half


@cute.jit
def level_products(
    sR: cute.Tensor,
    sC: cute.Tensor,
    mma: cute.TiledMma,
    levels: cutlass.Constexpr,
    products: Int32,
    lower: Int32,
    diagonal: Int32,
    beta: Int32,
    tidx: Int32,
):
    """One wgmma [64 x 32 x 128] a level; entries of one block go to L (rows of k) or P (rows of q), others are dropped.

    Warpgroup g has columns 16 g .. 16 g + 15; warps 0, 1 have the rows of k, warps 2, 3 those of q.
    """
    thread = mma.get_slice(cute.arch.make_warp_uniform(tidx // 128) * 128)  # uniform: descriptors need no registers
    tR = mma.make_fragment_A(thread.partition_A(sR))
    tC = mma.make_fragment_B(thread.partition_B(sC))
    shape = mma.partition_shape_C((64, 32))
    lane = tidx % 32
    warp = cute.arch.make_warp_uniform(tidx // 32)
    column = (warp >> 2) * 16 + (lane & 3) * 2
    row = (warp & 1) * 16 + lane // 4
    sums = [cute.make_rmem_tensor(shape, Float32) for _ in levels]
    warpgroup.fence()
    for slot in cutlass.range_constexpr(3):
        for block in cutlass.range_constexpr(HEAD // 16):
            mma.set(warpgroup.Field.ACCUMULATE, block != 0)
            cute.gemm(mma, sums[slot], tR[None, None, block, slot], tC[None, None, block, slot], sums[slot])
        warpgroup.commit_group()
    for slot in cutlass.range_constexpr(3):
        warpgroup.wait_group(2 - slot)
        h, acc = levels[slot], sums[slot]
        # Below 16 tokens only 16 x 16 blocks on the diagonal hold pairs of one block, below 8 only their diagonal quarters.
        if const_expr(h == 32) or (warp & 1) == (warp >> 2):
            for n in cutlass.range_constexpr(2):
                for r in cutlass.range_constexpr(2):
                    if const_expr(h > 8 or n == r):
                        low, high = acc[4 * n + 2 * r], acc[4 * n + 2 * r + 1]
                        if warp & 2 == 0:
                            place_lower(h, row + 8 * r, column + 8 * n, low, high, lower, diagonal, beta)
                        else:
                            place_product(h, row + 8 * r, column + 8 * n, low, high, products)


@cute.jit
def place_lower(
    h: cutlass.Constexpr,
    m: Int32,
    n: Int32,
    low: Float32,
    high: Float32,
    lower: Int32,
    diagonal: Int32,
    beta: Int32,
):
    """L_ij = beta_i k_i.k_j of compressed row m, columns n and n + 1: fp16 below the 16 x 16 diagonals, fp32 in them."""
    i, j = m + (m & -h) + h, n + (n & -h)
    b = load_shared(beta + i * 4, 1)
    if const_expr(h >= 16):
        store_shared(lower + i * LOWER_PITCH + j * 2, pack_f16(low * b, high * b))
    else:
        address = diagonal + (i >> 4) * DIAGONAL_BYTES + (i & 15) * 64
        if const_expr(h > 1):
            if const_expr(h == 8) or (m ^ n) < h:
                store_shared(address + (j & 15) * 4, low * b, high * b)
        elif (m ^ n) < 2:
            value = low if m == n else high
            store_shared(address + ((i - 1) & 15) * 4, value * b)


@cute.jit
def place_product(h: cutlass.Constexpr, m: Int32, n: Int32, low: Float32, high: Float32, products: Int32):
    """P_ij of compressed row m, columns n and n + 1, fp16."""
    i, j = m + (m & -h) + h, n + (n & -h)
    if const_expr(h > 1):
        if const_expr(h >= 8) or (m ^ n) < h:
            store_shared(tile_address(products, i, j >> 3) + (j & 7) * 2, pack_f16(low, high))
    elif (m ^ n) < 2:
        value = low if m == n else high
        j = i - 1
        store_shared_half(tile_address(products, i, j >> 3) + (j & 7) * 2, pack_f16(value, value))
