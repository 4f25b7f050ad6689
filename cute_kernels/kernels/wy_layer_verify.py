"""A linear-attention layer between its projections, a verify step on a bf16 pool in one launch: `wy_verify` with conv and norm.

A block of 8 warps owns one (sequence n, value head h); grid (HV, N). Work, barriers and bits of the recurrence are those of
`wy_verify`; before and behind it
1  six warps convolve the new tokens, log their inputs and commit the window (`draft_conv`). Their k and q go to where the
   dots' operands will stand, so that the lane that prepares 4 channels of a token finds them in its own place and no
   other reads it; v to a place of its own, which the raw output gate takes over. The other two warps bring the
   norm's weight. One more barrier;
2  o stays in registers: a token's squares are summed over the quads, then over the warps through shared memory and one more
   barrier, and the lane that has two rows of V of two tokens scales and stores them.
Windows, their sharing among heads and why it is free of races: as in `layer_verify`, whose host
function and rules this class shares.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32, const_expr

from ..configs.layer import CONV_BIAS, NORM_BF16, SILU_GATE, LayerVerifyKey, wy_layer_regions
from ..configs.layer import WY_VALUE_STRIDE as VALUE_STRIDE
from ..configs.verify import MAX_TOKENS
from ..configs.verify import WY_OPERAND_STRIDE as OPERAND_STRIDE
from ..device.draft_conv import CONV_THREADS, DraftConv
from ..device.draft_layer import load_weight, output_gates, weight_values
from ..device.memory import load_vector, smem_ptr, store_vector
from ..device.predicated import load_words_where
from ..device.state_io import row_ptr
from ..device.token_step import HEAD_DIM
from ..device.warp_ops import pack_bf16
from ..device.wy_math import word_ptr
from .layer_verify import LayerVerify, compile_layer
from .wy_verify import WyVerify, own_row


class WyLayerVerify(LayerVerify, WyVerify):
    def __init__(self, key: LayerVerifyKey):
        super().__init__(key)
        for name, size in wy_layer_regions(self.warps).items():
            self.at[name] = self.words
            self.words += size

    @cute.jit
    def layer_row(
        self,
        tensors,
        row,
        position: Int32,
        early: Boolean,
        flags: Int32,
        scale: Float32,
        lower_bound: Float32,
        eps: Float32,
        tidx: Int32,
        head: Int32,
        hk: Int32,
    ):
        (
            mX, mGate, mBeta, mZ, mTaps, mConvBias, mConvState, mALog, mBias, mNormWeight, mState, _, _, _, _, mLogK, mLogU,
            mLogGate, mLogX, _, _, _, mOut,
        ) = tensors  # fmt: skip
        read, write, reads, writes, logged, log_in, log_out, start, length, replayed, key_head, first_of_key_head = row
        smem = self.allocate()
        states = mState, mLogK, mLogU, mLogGate
        old = self.load_early(smem, states, row, tidx, head, landing=self.key.late)
        base = smem[0]
        lane, warp = tidx % 32, tidx // 32
        quad, l4 = lane // 4, lane % 4
        row_v = head * HEAD_DIM + own_row(warp, quad)
        conv = DraftConv(self.weight_dtype, tidx, head, key_head, hk)
        conv.load_history(mTaps, mConvState, mLogX, (position, read, reads, replayed, log_in))
        if const_expr(self.key.late):
            self.land_rows(mState, smem[1], smem[2], read, reads, head * HEAD_DIM, tidx)  # last: it is needed last
        bf16, values = flags & NORM_BF16, 2 * cutlass.max(tidx - CONV_THREADS, 0)
        weight = load_weight(mNormWeight, values, bf16, 2)
        self.wait(early)

        conv.load_inputs(mX, start, length)
        rK, rQ, rGate, rV, rBeta = self.new_registers()
        new = (rK, rQ, rGate, rV, rBeta)
        self.load_gates(new, self.gate_places(mGate, mBeta, tidx, head, start), tidx, length)
        z = []
        for e in cutlass.range_constexpr(2):
            t = 2 * l4 + e
            z.append(load_words_where(t < length, row_ptr(mZ, start + t, row_v, 4), 1)[0])
        parameters = self.load_parameters(mALog, mBias, tidx, head)
        self.put_logged(base, old, (rGate,), parameters, lower_bound, tidx, replayed)
        # Operands' lines are those of k, then of q.
        line = cutlass.max(1 - conv.part, 0) * self.pieces * MAX_TOKENS * OPERAND_STRIDE // 2 + self.at["operands"]
        place = Int32((base + ((self.at["values"] if conv.part == 2 else line) + conv.place)).toint())
        step = Int32(4 * VALUE_STRIDE) if conv.part == 2 else Int32(2 * OPERAND_STRIDE)
        destination = (position, read, write, writes, replayed, logged, log_out)
        conv.run(mConvBias, mConvState, mLogX, destination, first_of_key_head, flags & CONV_BIAS, length, place, step)
        if cute.arch.make_warp_uniform(warp) >= CONV_THREADS // 32:
            rW = cute.make_rmem_tensor(cute.make_layout(2), Float32)
            rW[0], rW[1] = weight_values(weight, bf16)
            store_vector(rW, smem_ptr(base, self.at["weight"] + values, Float32, 8), 2)
        cute.arch.sync_threads()

        words = [cute.recast_tensor(rX, Uint32) for rX in (rK, rQ)]
        for i in cutlass.range_constexpr(2):
            pair = load_vector(self.operand(base, i * self.pieces, quad, warp, l4), 2)
            words[i][0], words[i][1] = pair[0], pair[1]
        for e in cutlass.range_constexpr(2):
            own = self.value_ptr(base, 2 * l4 + e, warp, quad)
            rV[e] = own.load()
            own.store(z[e])
        self.run_row(
            smem, old, new, parameters, states, (mOut, flags & SILU_GATE, eps), row, Boolean(True),
            scale, lower_bound, tidx, head,
        )  # fmt: skip

    def value_ptr(self, base, token, warp, quad):
        """Place of v, later of the raw output gate, of a token at a lane's two rows of V."""
        return smem_ptr(base, self.at["values"] + token * VALUE_STRIDE + own_row(warp, quad) // 2, Uint32, 4)

    @cute.jit
    def put_outputs(
        self, o, base: cute.Pointer, output, head: Int32, warp: Int32, lane: Int32, start: Int32, length: Int32
    ):
        """The gated norm of a lane's outputs, (token, row) in order. All warps of the block come here or none."""
        mOut, silu, eps = output
        quad, l4 = lane // 4, lane % 4
        for e in cutlass.range_constexpr(2):
            squares = o[e] * o[e] + o[2 + e] * o[2 + e]
            for step in cutlass.range_constexpr(3):
                squares += cute.arch.shuffle_sync_bfly(squares, offset=4 << step)
            if quad == 0:
                (base + (self.at["squares"] + (2 * l4 + e) * 8 + warp)).store(squares)
        rW = load_vector(smem_ptr(base, self.at["weight"] + own_row(warp, quad), Float32, 8), 2)
        gates = []
        for e in cutlass.range_constexpr(2):
            gates.append(output_gates([self.value_ptr(base, 2 * l4 + e, warp, quad).load()], rW, silu))
        cute.arch.sync_threads()
        for e in cutlass.range_constexpr(2):
            t = 2 * l4 + e
            shares = load_vector(smem_ptr(base, self.at["squares"] + t * 8, Float32, 16), 8)
            squares = Float32(0.0)
            for i in cutlass.range_constexpr(8):
                squares += shares[i]
            norm = cute.math.rsqrt(squares * Float32(1.0 / HEAD_DIM) + eps, fastmath=True)
            if t < length:
                word = pack_bf16(o[e] * norm * gates[e][0], o[2 + e] * norm * gates[e][1])
                row = head * HEAD_DIM + own_row(warp, quad)
                word_ptr(row_ptr(mOut, start + t, row, 4)).store(word)


def build(key: LayerVerifyKey):
    """Compile one specialisation for sm_90a from fake tensors."""
    return compile_layer(WyLayerVerify(key))
