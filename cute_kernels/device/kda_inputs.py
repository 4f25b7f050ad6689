"""How a worker of the KDA records kernel comes to its next item: found ahead, k, q and the gate loaded by TMA, parameters read.

Bytes of `inputs.info`, 16 words: the next item (chunk's tokens, start in the row, end, first checkpoint entry; slot, head, item,
first token), then the same of the one behind it. `inputs.loaded` are two barriers: k and q have come; the gate has, and `info`.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from . import kda_items
from .kda_fragments import RAW_GATE
from .memory import load_vector
from .prefill_layout import CHUNK, HEAD, OPERAND_BYTES
from .warp_ops import load_shared, store_shared

AHEAD = 32  # byte of `info` where the item behind the next one is


def gate_parameters(inputs, local_head, tidx):
    """An item's bias of one channel and A_log, on their way before they are needed."""
    head = inputs.first_head + local_head
    return load_vector(inputs.bias.iterator + (head * HEAD + tidx % 128), 1)[0], inputs.a_log[head]


def store_parameters(inputs, bias, a_log, tidx):
    """Put them where the warps of the item's gate read them."""
    store_shared(inputs.at["bias"] + tidx % 128 * 4, bias)
    store_shared(inputs.at["bias"] + HEAD * 4, a_log)


@cute.jit
def load_first(inputs: cutlass.Constexpr, block: Int32):
    """One warp: find the worker's first item and start its loads."""
    look_ahead(inputs, inputs.first)
    if const_expr(inputs.overlapped):
        if kda_items.comes_later(inputs, block):
            cute.arch.inline_ptx("nanosleep.u32 400;")
    load_gate(inputs)
    start_next(inputs, kda_items.comes_later(inputs, block))


@cute.jit
def start_next(inputs: cutlass.Constexpr, later=None):
    """One warp: the item found ahead becomes the worker's next one, its k and q are loaded; `later`: when its gate has come."""
    info = inputs.info
    count, start, end, entry = load_shared(info + AHEAD, 4, Int32)
    slot, local_head, item, token = load_shared(info + AHEAD + 16, 4, Int32)
    kda_items.remember_last(inputs)
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        store_shared(info, count, start, end, entry)
        store_shared(info + 16, slot, local_head, item, token)
    cute.arch.sync_warp()
    # The record is read out of the tile of log decays, where the next item's are made, then out of those of k and q.
    cute.arch.cp_async_bulk_wait_group(1, read=True)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(inputs.loaded + 1)
    if count > 0:
        if const_expr(later is not None):
            if later:
                cute.arch.mbarrier_wait(inputs.loaded + 1, 0)
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(inputs.loaded, 2 * OPERAND_BYTES)
        head = (inputs.first_head + local_head) // inputs.group_size
        for place, (tma, gX) in enumerate((inputs.k, inputs.q)):
            tXsX, tXgX = input_tile(inputs, tma, gX, inputs.tile + place * (OPERAND_BYTES // 2), token, head)
            cute.copy(tma, tXgX, tXsX, tma_bar_ptr=inputs.loaded, **kda_items.policy_of_loads(inputs))
    else:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(inputs.loaded + 1)


@cute.jit
def find_next(inputs: cutlass.Constexpr):
    """One warp: find the item behind the worker's next one."""
    count, item = load_shared(inputs.info, 1, Int32), load_shared(inputs.info + 24, 1, Int32)
    if count > 0:
        look_ahead(inputs, kda_items.behind(inputs, item))


@cute.jit
def load_gate(inputs: cutlass.Constexpr):
    """One warp: start the load of the raw gate of the item found ahead."""
    count = load_shared(inputs.info + AHEAD, 1, Int32)
    _, local_head, _, token = load_shared(inputs.info + AHEAD + 16, 4, Int32)
    if count > 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(inputs.loaded + 1, OPERAND_BYTES)
        tma, gX = inputs.gate
        tile = inputs.tile + RAW_GATE // 2
        tXsX, tXgX = input_tile(inputs, tma, gX, tile, token, inputs.first_head + local_head)
        cute.copy(tma, tXgX, tXsX, tma_bar_ptr=inputs.loaded + 1, **kda_items.policy_of_loads(inputs))


@cute.jit
def look_ahead(inputs: cutlass.Constexpr, item: Int32):
    """One warp: the first item from `item` on that has a chunk."""
    found = kda_items.next_item(inputs, item)
    item, slot, local_head, token, start, count, entry = found
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        store_shared(inputs.info + AHEAD, count, start, start + count, entry)
        store_shared(inputs.info + AHEAD + 16, slot, local_head, item, token)
    cute.arch.sync_warp()


def input_tile(inputs, tma, gX, tile, token, head):
    """Rows token .. token + 63 of a head for TMA; rows behind the tensor are zeros, rows of a neighbour are masked later."""
    sX = cute.make_tensor(tile, inputs.layout.outer)
    gTile = cute.local_tile(cute.domain_offset((token, head * HEAD), gX), (CHUNK, HEAD), (0, 0))
    return cpasync.tma_partition(tma, 0, cute.make_layout(1), cute.group_modes(sX, 0, 2), cute.group_modes(gTile, 0, 2))
