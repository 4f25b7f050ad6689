"""Warp-level shared-memory and matrix instructions on 32-bit shared addresses.

Where a role builds a tile by hand (inverse, pair products, row scaling) it works with byte addresses in the shared window
(`pointer.toint()`, Int32) and packed 16-bit pairs (Uint32), so that the address of every 16-byte piece is plain arithmetic.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32


def load_shared(address, count, dtype=Float32):
    """`count` (1, 2 or 4) consecutive 32-bit words at a shared byte address; a tuple for more than one."""
    suffix = {1: "", 2: ".v2", 4: ".v4"}[count]
    names = ", ".join(f"{{$w{i}}}" for i in range(count))
    kind = "f32" if dtype is Float32 else "b32"
    target = names if count == 1 else "{" + names + "}"
    return cute.arch.inline_ptx(
        f"ld.shared{suffix}.{kind} {target}, [{{$r0}}];", write_only_types=[dtype] * count, read_only_args=[address]
    )


def store_shared(address, *words):
    """1, 2 or 4 32-bit words (Float32, Int32 or Uint32) to a shared byte address."""
    count = len(words)
    suffix = {1: "", 2: ".v2", 4: ".v4"}[count]
    names = ", ".join(f"{{$r{i + 1}}}" for i in range(count))
    kind = "f32" if isinstance(words[0], Float32) else "b32"
    source = names if count == 1 else "{" + names + "}"
    cute.arch.inline_ptx(f"st.shared{suffix}.{kind} [{{$r0}}], {source};", read_only_args=[address, *words])


def store_shared_half(address, word):
    """The low 16 bits of a word to a shared byte address."""
    cute.arch.inline_ptx(
        "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, {$r1}; st.shared.b16 [{$r0}], lo; }", read_only_args=[address, word]
    )


def ldmatrix4(address, transpose=False):
    """Four 8x8 16-bit matrices; lanes 8m..8m+7 give the row addresses of matrix m.

    A lane receives row lane/4, columns 2(lane%4), +1 of each matrix; transposed: column lane/4, rows 2(lane%4), +1.
    """
    trans = ".trans" if transpose else ""
    return cute.arch.inline_ptx(
        f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )


def stmatrix4(address, m0, m1, m2, m3, transpose=False):
    """Store four 8x8 16-bit matrices; the mirror of `ldmatrix4`."""
    trans = ".trans" if transpose else ""
    cute.arch.inline_ptx(
        f"stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [{{$r0}}], {{{{$r1}}, {{$r2}}, {{$r3}}, {{$r4}}}};",
        read_only_args=[address, m0, m1, m2, m3],
    )


def stmatrix2(address, m0, m1, transpose=False):
    """Store two 8x8 16-bit matrices, row addresses in lanes 0..7 and 8..15."""
    trans = ".trans" if transpose else ""
    cute.arch.inline_ptx(
        f"stmatrix.sync.aligned.m8n8.x2{trans}.shared.b16 [{{$r0}}], {{{{$r1}}, {{$r2}}}};",
        read_only_args=[address, m0, m1],
    )


def stmatrix4_where(condition, address, m0, m1, m2, m3, transpose=False):
    """`stmatrix4` where a warp-uniform condition is not 0: no branch, products may be in flight."""
    trans = ".trans" if transpose else ""
    cute.arch.inline_ptx(
        "{ .reg .pred on; setp.ne.s32 on, {$r0}, 0; "
        f"@on stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [{{$r1}}], {{{{$r2}}, {{$r3}}, {{$r4}}, {{$r5}}}}; }}",
        read_only_args=[condition, address, m0, m1, m2, m3],
    )


def mma_16816(a, b, c, kind):
    """D = A B + C for one m16n8k16 tile; a: 4 words, b: 2 words, c: 4 Float32; `kind` is "f16" or "bf16"."""
    return cute.arch.inline_ptx(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{{$w0}, {$w1}, {$w2}, {$w3}}, {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, *b, *c],
    )


def mma_1688(a, b, c):
    """D = A B + C for one m16n8k8 tile of fp16 in registers; a: 2 words, b: 1 word, c: 4 Float32."""
    return cute.arch.inline_ptx(
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
        "{{$w0}, {$w1}, {$w2}, {$w3}}, {{$r0}, {$r1}}, {{$r2}}, {{$r3}, {$r4}, {$r5}, {$r6}};",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, b, *c],
    )


def mma_1688_tf32(a, b, c):
    """D = A B + C for one m16n8k8 tile of fp32 in registers, of whose mantissas the unit reads 10 bits; a: 4, b: 2, c: 4."""
    return cute.arch.inline_ptx(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{{$w0}, {$w1}, {$w2}, {$w3}}, {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, *b, *c],
    )


def round_tf32(x):
    """fp32 bits, as a word, whose first 10 bits of mantissa are those of x rounded to nearest."""
    bits = cute.make_rmem_tensor(cute.make_layout(1), Float32)
    bits[0] = x
    return cute.recast_tensor(bits, Uint32)[0] + Uint32(0x1000)


def pack_f16(low, high):
    """Two fp32 rounded to fp16 in one word; a magnitude above 65504 saturates instead of becoming infinite."""
    return cute.arch.inline_ptx(
        "cvt.rn.satfinite.f16x2.f32 {$w0}, {$r1}, {$r0};", write_only_types=[Uint32], read_only_args=[low, high]
    )


def multiply_f16(x, y):
    """Products of two words' fp16 pairs, rounded to fp16."""
    return cute.arch.inline_ptx("mul.rn.f16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[x, y])


def maximum_f16(x, y):
    """The larger ones of two words' fp16 pairs."""
    return cute.arch.inline_ptx("max.f16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[x, y])


def reread(word):
    """A value again, opaque to the compiler: what was computed from it before need not stay in registers."""
    bits = type(word).width
    return cute.arch.inline_ptx(f"mov.b{bits} {{$w0}}, {{$r0}};", write_only_types=[type(word)], read_only_args=[word])


def round_f16(x):
    """An fp32 rounded to fp16 and back, saturating at 65504."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 h; cvt.rn.satfinite.f16.f32 h, {$r0}; cvt.f32.f16 {$w0}, h; }",
        write_only_types=[Float32],
        read_only_args=[x],
    )


def pack_bf16(low, high):
    """Two fp32 rounded to bf16 in one word."""
    return cute.arch.inline_ptx(
        "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};", write_only_types=[Uint32], read_only_args=[low, high]
    )


def unpack_bf16(word):
    """The two bf16 of a word as fp32, low half first."""
    bits = cute.make_rmem_tensor(cute.make_layout(2), Uint32)
    bits[0] = word << 16
    bits[1] = word & Uint32(0xFFFF0000)
    values = cute.recast_tensor(bits, Float32)
    return values[0], values[1]


def fragment_words(rX):
    """A 16-bit register fragment as its 32-bit words, in linear order."""
    return cute.recast_tensor(rX, Uint32)


@cute.jit
def sum_scan(x: Float32, lane: Int32) -> Float32:
    """Inclusive sum over the lanes of a warp, in one fixed order."""
    for step in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(x, offset=1 << step, mask_and_clamp=0)
        x = x + below if lane >= (1 << step) else x
    return x


@cute.jit
def pick(condition, yes, no):
    """`yes` where the condition holds, else `no`; for helpers that run while the kernel is traced."""
    return yes if condition else no
