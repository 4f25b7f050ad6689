"""Gated RMS norm of heads of 128 values: y = o / rms(o) * w * act(z), in fp32, rounded once.

A row is one head of one token; 16 lanes hold 8 values of it each, and have `rows` rows under way at once. The heads of a token
stand together, its z in a row of any width. Launched dependently, and it lets the kernel behind it, a projection, be set up
while it runs.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_tensor

from ..compile.cache import cute_compile
from ..compile.fake import fake_matrix, fake_stream, fake_vector
from ..configs.gated_norm import SILU, WEIGHT_BF16, GatedNormKey
from ..device.layer_parts import gated, output_gate
from ..device.memory import load_vector, offset_ptr, store_vector, widen
from ..device.reduce import sum_over
from ..device.token_step import dot_channels

HEAD_DIM = 128
LANES = 16
VALUES = HEAD_DIM // LANES


class GatedNorm:
    def __init__(self, key: GatedNormKey):
        self.key = key
        self.groups = key.threads // LANES

    @cute.jit
    def __call__(
        self,
        mO: cute.Tensor,  # (T, H 128) bf16
        mZ: cute.Tensor,  # (T, H 128) bf16, any row stride
        mWeight: cute.Tensor,  # (128,) fp32, or (64,) words of two bf16
        mOut: cute.Tensor,  # (T, H 128) bf16
        flags: Int32,  # SILU | WEIGHT_BF16
        eps: Float32,
        stream,
    ):
        heads = cute.size(mO, mode=[1]) // HEAD_DIM
        n, height = cute.size(mO, mode=[0]) * heads, self.groups * self.key.rows
        self.kernel.set_name_prefix(self.key.symbol(), remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(mO, mZ, mWeight, mOut, flags, eps, n).launch(
            grid=[(n + height - 1) // height, 1, 1], block=[self.key.threads, 1, 1],
            max_number_threads=[self.key.threads, 1, 1], min_blocks_per_mp=self.key.blocks, preferred_smem_carveout=0,
            stream=stream, use_pdl=True,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        mO: cute.Tensor,
        mZ: cute.Tensor,
        mWeight: cute.Tensor,
        mOut: cute.Tensor,
        flags: Int32,
        eps: Float32,
        n: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        group, channel = thread // LANES, thread % LANES * VALUES
        first = block * (self.groups * self.key.rows) + group
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        inputs, gates = [], []
        heads = cute.size(mZ, mode=[1]) // HEAD_DIM
        for r in cutlass.range_constexpr(self.key.rows):
            # A row beyond the last loads what the last one does: only the stores need a branch, and all lanes meet in the sum.
            row = cutlass.min(first + r * self.groups, n - 1)
            token = row // heads
            at = Int64(token) * mZ.stride[0] + (row - token * heads) * HEAD_DIM + channel
            source = offset_ptr(mO.iterator, Int64(row) * HEAD_DIM + channel, BFloat16, 2 * VALUES)
            inputs.append(load_vector(source, VALUES))
            gates.append(load_vector(offset_ptr(mZ.iterator, at, BFloat16, 2 * VALUES), VALUES))
        # Before any store, which the loads of the weights could not be moved across: they are then the same for all rows.
        silu, weight_bf16 = (flags & SILU) != 0, (flags & WEIGHT_BF16) != 0
        gates = [output_gate(mWeight, rZ, channel, silu, weight_bf16, VALUES) for rZ in gates]
        for r in cutlass.range_constexpr(self.key.rows):
            values = widen(inputs[r], VALUES)
            squares = sum_over(dot_channels(values, values), LANES)
            norm = cute.math.rsqrt(squares * Float32(1.0 / HEAD_DIM) + eps, fastmath=True)
            row = first + r * self.groups
            if row < n:
                target = offset_ptr(mOut.iterator, Int64(row) * HEAD_DIM + channel, BFloat16, 2 * VALUES)
                store_vector(gated(values, norm, gates[r], VALUES), target, VALUES)


def build(key: GatedNormKey):
    """Compile the specialisation."""
    tokens, width = cute.sym_int(), cute.sym_int(divisibility=HEAD_DIM)
    o, out = (fake_matrix(BFloat16, tokens, width) for _ in range(2))
    z = make_fake_tensor(BFloat16, (tokens, width), stride=(cute.sym_int64(divisibility=VALUES), 1), assumed_align=16)
    weight = fake_vector(Float32, align=16)
    return cute_compile(GatedNorm(key), o, z, weight, out, Int32(0), Float32(0.0), fake_stream())
