"""Loads of states with the second level's policy `evict_last`: these lines leave it after all others.

For a state that is read once this sounds wrong. But with it what leaves is what the kernel has written, soon and in order,
instead of what it has read, and memory takes writes that come so 2 to 4 % faster (docs/notes/decode.md).
"""

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync

EVICT_LAST = "0x14F0000000000000"  # as `createpolicy` makes it for the whole of an access


def load_kept(condition, ptr):
    """A 16-byte vector at a global pointer as four words, zeros where the condition does not hold."""
    return cute.arch.inline_ptx(
        "{ .reg .pred on; setp.ne.s32 on, {$r0}, 0; mov.b32 {$w0}, 0; mov.b32 {$w1}, 0; mov.b32 {$w2}, 0; mov.b32 {$w3}, 0; "
        f"@on ld.global.L2::cache_hint.v4.b32 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r1}}], {EVICT_LAST}; }}",
        write_only_types=[Uint32] * 4,
        read_only_args=[Int32(condition), Int64(ptr.toint())],
    )


def land(source, target, n, bar, kept):
    """Start a bulk copy of `n` elements from global to shared memory, counted by `bar`; with the policy where `kept`."""
    dtype = source.value_type
    if not kept:
        atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), dtype, num_bits_per_copy=n * dtype.width)
        source, target = (cute.make_tensor(x, cute.make_layout(n)) for x in (source, target))
        cute.copy(atom, source, target, mbar_ptr=bar)
        return
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        f"[{{$r0}}], [{{$r1}}], {{$r2}}, [{{$r3}}], {EVICT_LAST};",
        read_only_args=[Int32(target.toint()), source.toint(), Int32(n * dtype.width // 8), Int32(bar.toint())],
    )
