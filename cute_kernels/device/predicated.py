"""Predicated global loads and stores: one instruction each, zeros where a load's condition does not hold, no branch.

A load inside a branch is merged with what its registers held before, 16-bit types half by half, so it is waited for where the
branch ends and the loads behind it are issued a latency later. A predicated load keeps its place among the others.
A warp of the tensor-core forms reads 32 bytes of each of eight rows: the second level fetches 128, which the other warps find.
"""

import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64, Uint32

from .memory import offset_ptr


def load_words_where(condition, ptr, n):
    """`n` (1, 2 or 4) words at a global pointer as a tuple."""
    names = [f"{{$w{i}}}" for i in range(n)]
    target, suffix = (names[0], "") if n == 1 else ("{" + ", ".join(names) + "}", f".v{n}")
    zeros = " ".join(f"mov.b32 {name}, 0;" for name in names)
    words = cute.arch.inline_ptx(
        f"{{ .reg .pred on; setp.ne.s32 on, {{$r0}}, 0; {zeros} @on ld.global.L2::128B{suffix}.b32 {target}, [{{$r1}}]; }}",
        write_only_types=[Uint32] * n,
        read_only_args=[Int32(condition), Int64(ptr.toint())],
    )
    return words if n > 1 else (words,)


def load_int_where(condition, vector, place):
    """An element of a vector of int32."""
    return load_words_where(condition, offset_ptr(vector.iterator, place, Int32, 4), 1)[0].to(Int32)


def load_half_where(condition, ptr):
    """A 16-bit element as the low half of a word."""
    return cute.arch.inline_ptx(
        "{ .reg .pred on; .reg .b16 half; setp.ne.s32 on, {$r0}, 0; mov.b16 half, 0; @on ld.global.b16 half, [{$r1}]; "
        "cvt.u32.u16 {$w0}, half; }",
        write_only_types=[Uint32],
        read_only_args=[Int32(condition), Int64(ptr.toint())],
    )


def load_into_where(condition, rX, ptr):
    """Registers of whole words, 1, 2 or a multiple of 4, from a global pointer aligned to 16 bytes or to all of them."""
    words = cute.recast_tensor(rX, Uint32)
    count = cute.size(words)
    step = min(count, 4)
    for first in range(0, count, step):
        part = load_words_where(condition, ptr + first * 32 // ptr.value_type.width, step)
        for i in range(step):
            words[first + i] = part[i]


def zero_words(n):
    """`n` bf16 zeros kept as words, which no merge takes apart."""
    rX = cute.make_rmem_tensor(cute.make_layout(n // 2, stride=1), Uint32)
    for i in range(n // 2):
        rX[i] = Uint32(0)
    return cute.recast_tensor(rX, BFloat16)


def store_half_where(condition, address, word):
    """The low half of a word to a global address."""
    cute.arch.inline_ptx(
        "{ .reg .pred on; .reg .b16 half; setp.ne.s32 on, {$r0}, 0; cvt.u16.u32 half, {$r2}; "
        "@on st.global.b16 [{$r1}], half; }",
        read_only_args=[Int32(condition), Int64(address), word],
    )


def store_word_where(condition, address, value):
    """A word or an fp32 to a global address of 64 bits, or to one in shared memory of 32."""
    space = "global" if isinstance(address, Int64) else "shared"
    cute.arch.inline_ptx(
        f"{{ .reg .pred on; setp.ne.s32 on, {{$r0}}, 0; @on st.{space}.b32 [{{$r1}}], {{$r2}}; }}",
        read_only_args=[Int32(condition), address, value],
    )
