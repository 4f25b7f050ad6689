"""The state of a chain of the GDN recurrence: where it starts, what it leaves of V, and how it is kept on the way.

A state kept from registers holds its chain up for 0.85 us, half a head of fp32. A block with half a head has room for one in
shared memory, from where bulk copies of a warp of its own take it while the chain goes on.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from .prefill_layout import HEAD, STATE_ELEMENTS, Field, Flag
from .prefill_state import identity_state, load_state
from .state_io import slot_is_valid, slot_ptr
from .warp_ops import load_shared, pack_bf16, pick, store_shared, unpack_bf16

WORK_LIMIT = 1 << 30  # every slot of the workspace is a slot
ROWS = 16  # of V, of a warp
KEEPERS = 4  # warps that start copies: one does it at 40 cycles each


def row_bytes(dtype):
    """Bytes of a row [128 K] in global memory, and in shared memory: a sixteenth more, so that eight rows meet no bank twice."""
    size = HEAD * dtype.width // 8
    return size, size + size // 16


@cute.jit
def start_state(S, mPool, mWork, record, num_slots, row, column, transition: cutlass.Constexpr):
    """The state before a block's first chunk: from the pool, from the workspace, or of a transition zero or the identity."""
    head, slot, flags = record[Field.HEAD], record[Field.READ], record[Field.FLAGS]
    if cutlass.const_expr(transition):
        S.fill(0.0)
        if (flags & Flag.IDENTITY) != 0:
            identity_state(S, row, column)
    elif (flags & Flag.WORKSPACE) != 0:
        load_state(S, mWork, slot, Int32(WORK_LIMIT), head, row, column)
    else:
        load_state(S, mPool, slot, num_slots, head, row, column)


def subtract(Y, values, factors, identity, transition):
    """Y <- V^T - factor Y; without V where the state starts as the identity. V is zero beyond a short chunk's end."""
    for i in range(16):
        word = values[i]
        if transition:
            word = pick(identity, Uint32(0), word)
        v = unpack_bf16(word)
        for e in range(2):
            Y[2 * i + e] = v[e] - factors[2 * (i // 2) + e] * Y[2 * i + e]


def stage_words(key, dtype):
    """Words of a block's stage for a state to keep, of a kernel of `GdnRecurrenceKey`; none in blocks that do without."""
    return ROWS * row_bytes(dtype)[1] if key.slabs == 1 and not key.transition else 0


def stage_places(dtype, shared, warp, lane):
    """Shared addresses of the thread's pairs of a state of `dtype` in the stage, in the order of the accumulator."""
    size, pitch = row_bytes(dtype)
    start = shared.kept + (ROWS * warp + (lane >> 2)) * pitch + (lane & 3) * (size // 64)
    return [start + i // 2 * (size // 16) + i % 2 * (8 * pitch) for i in range(32)]


@cute.jit
def stage_state(
    S, shared, parity: Int32, mPool: cute.Tensor, slot: Int32, final: Int32, head: Int32, warp: Int32, lane: Int32
):
    """S, rounded once, to the stage, from where `run_keeper` takes it to head `head` of two slots, the second one if it is one.

    Returns the parity of the next one.
    """
    shared.keep.wait_empty(0, parity)
    for i, place in enumerate(stage_places(mPool.element_type, shared, warp, lane)):
        if cutlass.const_expr(mPool.element_type is Float32):
            store_shared(place, S[2 * i], S[2 * i + 1])
        else:
            store_shared(place, pack_bf16(S[2 * i], S[2 * i + 1]))
    if (warp == 0) & (lane == 0):
        store_shared(shared.note, slot, final, head, Int32(0))
    shared.keep.publish_to_async(0)
    return parity ^ 1


@cute.jit
def end_stage(shared, parity: Int32, warp: Int32, lane: Int32):
    """No more states come to the stage."""
    shared.keep.wait_empty(0, parity)
    if (warp == 0) & (lane == 0):
        store_shared(shared.note, Int32(-1), Int32(-1), Int32(0), Int32(0))
    shared.keep.publish(0)


@cute.jit
def run_keeper(shared, mPool: cute.Tensor, num_slots: Int32, first: Int32, rows: Int32, lane: Int32):
    """Of states in the stage V rows `first + rows` .. + 15 to global memory; by one warp, half of it for each of two slots."""
    size, pitch = row_bytes(mPool.element_type)
    row = rows + (lane & (ROWS - 1))
    parity = Int32(0)
    shared.keep.wait_full(0, parity)
    slot, final, head, _ = load_shared(shared.note, 4, Int32)
    while slot >= 0:
        taker = slot if lane < ROWS else final
        if slot_is_valid(taker, num_slots):
            target = slot_ptr(mPool, taker, head * STATE_ELEMENTS + (first + row) * HEAD).toint()
            cute.arch.inline_ptx(
                "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};",
                read_only_args=[target, shared.kept + row * pitch, Int32(size)],
            )
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0)
        shared.keep.release(0)
        parity = parity ^ 1
        shared.keep.wait_full(0, parity)
        slot, final, head, _ = load_shared(shared.note, 4, Int32)
