"""Vector loads and stores from a base pointer and a 64-bit element offset.

Pools and packed rows exceed 2^31 elements, and a tensor coordinate is 32 bits wide, so every access of a slot or of
a row goes through `offset_ptr`: one 64-bit multiply-add a stream; further offsets are immediates of the access.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int64, Uint32
from cutlass._mlir.dialects import llvm

GMEM = cute.AddressSpace.gmem
SMEM = cute.AddressSpace.smem


def offset_ptr(base, offset, dtype, align):
    """Global pointer `base + offset` elements; `base` is a pointer of any type, `align` in bytes."""
    address = base.toint() + Int64(offset) * (dtype.width // 8)
    return cute.make_ptr(dtype, address, GMEM, assumed_align=align)


def made_here(ptr, align):
    """The pointer, computed before whatever follows: a wait, say, after which the address would cost time."""
    address = llvm.inline_asm(
        res=Int64.mlir_type,
        operands_=[ptr.toint().ir_value()],
        asm_string="mov.b64 $0, $1;",
        constraints="=l,l",
        has_side_effects=True,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return cute.make_ptr(ptr.value_type, Int64(address), GMEM, assumed_align=align)


def smem_ptr(base, offset, dtype, align):
    """Shared-memory pointer `base + offset` elements with a promised alignment in bytes."""
    return cute.make_ptr(dtype, (base + offset).toint(), SMEM, assumed_align=align)


def load_vector(ptr, n):
    """`n` consecutive elements into registers, in as few instructions as the pointer's alignment allows."""
    gX = cute.make_tensor(ptr, cute.make_layout(n))
    rX = cute.make_rmem_tensor(cute.make_layout(n), ptr.value_type)
    cute.autovec_copy(gX, rX)
    return rX


def store_vector(rX, ptr, n):
    """`n` consecutive elements from registers."""
    cute.autovec_copy(rX, cute.make_tensor(ptr, cute.make_layout(n)))


def zero_vector(dtype, n):
    """`n` zeros in registers."""
    rX = cute.make_rmem_tensor(cute.make_layout(n), dtype)
    for i in range(n):
        rX[i] = dtype(0.0)
    return rX


def widen(rX, n):
    """`n` bf16 or fp32 registers as fp32. bf16 by shift and mask: one instruction an element; converting takes 1.5."""
    if cutlass.const_expr(rX.element_type is cutlass.Float32):
        return rX
    if cutlass.const_expr(rX.element_type is not cutlass.BFloat16):
        rY = cute.make_rmem_tensor(cute.make_layout(n), cutlass.Float32)
        for i in range(n):
            rY[i] = cutlass.Float32(rX[i])
        return rY
    words = cute.recast_tensor(rX, Uint32)
    bits = cute.make_rmem_tensor(cute.make_layout(n), Uint32)
    for i in range(n // 2):
        bits[2 * i] = words[i] << 16
        bits[2 * i + 1] = words[i] & Uint32(0xFFFF0000)
    return cute.recast_tensor(bits, cutlass.Float32)


def narrow(rX, n, dtype):
    """`n` fp32 registers rounded to nearest into `dtype`."""
    if cutlass.const_expr(dtype is cutlass.Float32):
        return rX
    rY = cute.make_rmem_tensor(cute.make_layout(n), dtype)
    for i in range(n):
        rY[i] = dtype(rX[i])
    return rY
