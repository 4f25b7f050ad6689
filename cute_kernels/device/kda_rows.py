"""What the warps of the records kernel exchange and store, in shared and in global memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from .kda_fragments import exp2
from .kda_layout import TAIL_OFFSET, narrow_address, tail_place, triangle_offset
from .prefill_layout import HEAD
from .warp_ops import load_shared, pack_f16, store_shared

TABLE_BYTES = 4 * HEAD * 2  # a factor of each block and channel, fp16


def partial_offset(block):
    """Where the two warps of a block exchange entries: 1 KiB and as much for each earlier block, twice."""
    return 1024 * block * (block + 1)


@cute.jit
def make_tables(totals: Int32, tables: Int32, record: Int64, tidx: Int32):
    """Decays from the chunk's start to each block, from the block to the chunk's end and through it, fp16, and e^(G_C).

    totals: a log decay of each block and channel; a thread has two channels of two blocks, the second two from thread 64 on. A
    warp's lane c finds the words of its channels side by side. What is no decay is exactly 1.
    """
    pair, second = tidx & 63, tidx >> 6
    logs = [load_shared(totals + g * (HEAD * 4) + pair * 8, 2) for g in range(4)]
    at = tables + (((pair >> 5) * 4 + (pair & 3)) * 8 + ((pair >> 2) & 7)) * 4
    if second == 0:
        last = [logs[2][e] + logs[3][e] for e in range(2)]
        behind = [logs[1][e] + logs[2][e] + logs[3][e] for e in range(2)]
        store_decays(at, (None, logs[0]), (behind, last), logs[:2])
        address = record + TAIL_OFFSET + Int64(tail_place(pair))
        pointer = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=8)
        gTail = cute.make_tensor(pointer, cute.make_layout(2))
        for e in cutlass.range_constexpr(2):
            gTail[e] = exp2(logs[0][e] + behind[e])
    else:
        first = [logs[0][e] + logs[1][e] for e in range(2)]
        before = [first[e] + logs[2][e] for e in range(2)]
        store_decays(at + TABLE_BYTES // 2, (first, before), (logs[3], None), logs[2:])


def store_decays(at, *tables):
    """Words of one pair of channels and two blocks: decays of the logarithms in each table, 1 for None."""
    for which, blocks in enumerate(tables):
        for block, x in enumerate(blocks):
            word = Uint32(0x3C003C00) if x is None else pack_f16(exp2(x[0]), exp2(x[1]))
            store_shared(at + which * TABLE_BYTES + block * (TABLE_BYTES // 4), word)


def store_global_word(address, word):
    """One word to a global byte address (Int64)."""
    cute.make_ptr(Uint32, address, cute.AddressSpace.gmem, assumed_align=4).store(word)


def store_float(address, value, predicate):
    """One fp32 to a shared byte address, where the predicate holds."""
    cute.arch.inline_ptx("st.shared.f32 [{$r0}], {$r1};", read_only_args=[address, value], predicate=predicate)


@cute.jit
def store_bulk(target: Int64, source: Int32, size: cutlass.Constexpr, piece: cutlass.Constexpr, policy=None):
    """Start the copy of shared memory to a global byte address, a group of its own, in pieces of so many bytes; one warp.

    policy: of the second level, the 64-bit word of `createpolicy`.
    """
    hint, more = (".L2::cache_hint", ", {$r3}") if const_expr(policy is not None) else ("", "")
    with cute.arch.elect_one():
        for at in cutlass.range(0, size, min(size, piece), unroll=1):
            words = [target + Int64(at), source + at, Int32(min(size, piece))]
            cute.arch.inline_ptx(
                f"cp.async.bulk.global.shared::cta.bulk_group{hint} [{{$r0}}], [{{$r1}}], {{$r2}}{more};",
                read_only_args=words if const_expr(policy is None) else [*words, policy],
            )
    cute.arch.cp_async_bulk_commit_group()


@cute.jit
def store_block(target: Int64, block: Int32, lane: Int32, sources):
    """16 rows of a record's T or P by a warp: lane 2 r + i has piece i of row r of each 16 columns, at the shared addresses
    `sources`, of which those behind column `block` are of no use."""
    target += Int64(block * 512 + narrow_address(lane >> 1, lane & 1))
    for column in cutlass.range_constexpr(len(sources)):
        if column <= block:
            words = load_shared(sources[column], 4, Uint32)
            offset = triangle_offset(column) - 512 * column
            pointer = cute.make_ptr(Uint32, target + offset, cute.AddressSpace.gmem, assumed_align=16)
            rX = cute.make_rmem_tensor(cute.make_layout(4), Uint32)
            for e in cutlass.range_constexpr(4):
                rX[e] = words[e]
            cute.autovec_copy(rX, cute.make_tensor(pointer, cute.make_layout(4)))
