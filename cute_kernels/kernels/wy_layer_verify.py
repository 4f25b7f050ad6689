"""A linear-attention layer between its projections, a verify step on a bf16 pool in one launch: `wy_verify` with conv and norm.

A block of 8 warps owns one (sequence n, value head h); grid (HV, N). Work, barriers and bits of the recurrence are those of
`wy_verify`; before and behind it
1  a lane that prepares 4 channels of token t's k and q loads their raw inputs and, in the lanes of tokens 5, 6 and 7, the inputs
   of three, two and one tokens before the first new one; what its conv needs of other tokens it gets by rotating over the quads,
   which brings the one set to tokens that have predecessors and the other to those that have none; v the same in pairs of
   tokens over the lanes of a quad. These lanes log the inputs and commit the window;
2  o stays in registers: a token's squares are summed over the quads, then over the warps through shared memory and one more
   barrier, and the lane that has two rows of V of two tokens scales and stores them.
Windows, their sharing among heads and why it is free of races: as in `layer_verify`, whose host
function and rules this class shares.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Uint32, const_expr

from ..configs.layer import CONV_BIAS, CONV_WIDTH, NORM_BF16, SETTLED, SILU_GATE, LayerVerifyKey
from ..configs.verify import MAX_TOKENS
from ..device.draft_layer import (
    HISTORY,
    commit_history,
    history_address,
    load_weight,
    log_x_ptr,
    output_gates,
)
from ..device.layer_parts import convolved, load_taps_into
from ..device.memory import load_vector, smem_ptr, store_vector
from ..device.predicated import load_into_where, load_words_where, zero_words
from ..device.state_io import row_ptr
from ..device.token_step import HEAD_DIM
from ..device.warp_ops import pack_bf16
from ..device.wy_math import OWN, word_ptr
from .layer_verify import LayerVerify, compile_layer
from .wy_verify import WyVerify


class WyLayerVerify(LayerVerify, WyVerify):
    def __init__(self, key: LayerVerifyKey):
        super().__init__(key)
        # In fp32, or beside the softplus gate's registers, they would spill.
        self.early_taps = self.weight_dtype is BFloat16 and key.kind != "kda_softplus"
        self.at["squares"] = self.words
        self.at["own"] = self.words + MAX_TOKENS * self.warps  # a thread's four output gates
        self.words = self.at["own"] + 4 * self.threads

    @cute.jit
    def layer_row(
        self,
        tensors,
        row,
        position: Int32,
        flags: Int32,
        scale: Float32,
        lower_bound: Float32,
        eps: Float32,
        tidx: Int32,
        head: Int32,
        hk: Int32,
    ):
        (
            mX, mGate, mBeta, mZ, mTaps, mConvBias, mConvState, mALog, mBias, mNormWeight, mState, mLogK, mLogU, mLogGate, mLogX,
            mOut,
        ) = tensors  # fmt: skip
        read, write, reads, writes, logged, log_in, log_out, start, length, replayed, key_head, first_of_key_head = row
        smem = self.allocate()
        early = self.load_early(
            smem, mState, mLogK, mLogU, mLogGate, tidx, head, key_head, read, reads, log_in, replayed
        )
        lane, warp = tidx % 32, tidx // 32
        quad, l4 = lane // 4, lane % 4
        channel_q = key_head * HEAD_DIM + warp * 16 + OWN * l4
        channels = (channel_q, hk * HEAD_DIM + channel_q)  # of q and k
        row_v = head * HEAD_DIM + warp * 16 + 2 * quad
        channel_v = 2 * hk * HEAD_DIM + row_v
        window = (position, read, reads, replayed, log_in)
        firsts = (*channels, channel_v)  # of this lane's channels of q, k and v
        rTaps = [cute.make_rmem_tensor(cute.make_layout(n * CONV_WIDTH), self.weight_dtype) for n in (OWN, OWN, 2)]
        if const_expr(self.early_taps):
            self.load_taps(mTaps, rTaps, firsts)
        before = [zero_words(OWN) for _ in range(2)]
        for i in cutlass.range_constexpr(2):
            self.load_before(before[i], mConvState, mLogX, window, channels[i], MAX_TOKENS - quad, OWN)
        before_v = [zero_words(2) for _ in range(2)]
        for e in cutlass.range_constexpr(2):
            self.load_before(before_v[e], mConvState, mLogX, window, channel_v, MAX_TOKENS - 2 * l4 - e, 2)
        self.wait((flags & SETTLED) != 0)

        raw = [zero_words(OWN) for _ in range(2)]
        raw_v = [zero_words(2) for _ in range(2)]
        for i in cutlass.range_constexpr(2):
            load_into_where(quad < length, raw[i], row_ptr(mX, start + quad, channels[i], 8))
        z = []
        for e in cutlass.range_constexpr(2):
            t = 2 * l4 + e
            load_into_where(t < length, raw_v[e], row_ptr(mX, start + t, channel_v, 4))
            z.append(load_words_where(t < length, row_ptr(mZ, start + t, row_v, 4), 1))
        rK, rQ, rGate, rV, rBeta = self.new_registers()
        new = (rK, rQ, rGate, rV, rBeta)
        self.load_gates(new, mGate, mBeta, tidx, head, start, length)

        bf16 = flags & NORM_BF16
        weight = load_weight(mNormWeight, row_v % HEAD_DIM, bf16, 2)
        parameters = self.load_parameters(mALog, mBias, tidx, head)
        destination = (mConvState, mLogX, position, read, write, writes, replayed, logged, log_out)
        for i in cutlass.range_constexpr(2):
            self.store_inputs_of(raw[i], before[i], destination, channels[i], quad, length, first_of_key_head, OWN)
        for e in cutlass.range_constexpr(2):
            self.store_inputs_of(raw_v[e], before_v[e], destination, channel_v, 2 * l4 + e, length, Boolean(True), 2)
        if const_expr(not self.early_taps):
            self.load_taps(mTaps, rTaps, firsts)
        biased = flags & CONV_BIAS
        rQ.store(convolved(mConvBias, self.rotated(raw[0], before[0], lane), rTaps[0], channels[0], biased, OWN).load())
        rK.store(convolved(mConvBias, self.rotated(raw[1], before[1], lane), rTaps[1], channels[1], biased, OWN).load())
        inputs_v = self.rotated_pairs(raw_v, before_v, lane)
        for e in cutlass.range_constexpr(2):
            rY = convolved(mConvBias, inputs_v[e : e + CONV_WIDTH], rTaps[2], channel_v, biased, 2)
            rV[e] = cute.recast_tensor(rY, Uint32)[0]
        rG = cute.make_rmem_tensor(cute.make_layout((2, 2)), Float32)  # (row of V, token)
        for e in cutlass.range_constexpr(2):
            rG[0, e], rG[1, e] = output_gates(z[e], weight, flags & SILU_GATE, bf16)
        store_vector(rG, self.own_vector(smem[0], 0, tidx), 4)
        # A conv with a bias gives tokens the row does not have a value: they must stay zero.
        wK, wQ = cute.recast_tensor(rK, Uint32), cute.recast_tensor(rQ, Uint32)
        for i in cutlass.range_constexpr(2):
            wK[i] = wK[i] if quad < length else Uint32(0)
            wQ[i] = wQ[i] if quad < length else Uint32(0)
        self.run_row(
            smem, early, new, parameters, (mState, mLogK, mLogU, mLogGate), (mOut, tidx, eps), tidx, head, key_head,
            Boolean(True), scale, lower_bound, write, reads, writes, logged, first_of_key_head, log_out, start, length, replayed,
        )  # fmt: skip

    @cute.jit
    def load_before(
        self, rX: cute.Tensor, mConvState, mLogX, window, channel: Int32, age: Int32, vec: cutlass.Constexpr
    ):
        """Issue the load of an input `age` tokens before the first new one, where a conv reaches that far back."""
        address, known = history_address(mConvState, mLogX, channel, age, window, vec)
        source = cute.make_ptr(BFloat16, address, cute.AddressSpace.gmem, assumed_align=2 * vec)
        load_into_where((age <= HISTORY) & known, rX, source)

    @cute.jit
    def store_inputs_of(
        self,
        rX: cute.Tensor,
        rBefore: cute.Tensor,
        destination,
        channel: Int32,
        token: Int32,
        length: Int32,
        owner: Boolean,
        vec: cutlass.Constexpr,
    ):
        """A token's own input to the log, and the input before the first token that its lane holds to the committed window."""
        mConvState, mLogX, position, read, write, writes, replayed, logged, log_out = destination
        if writes & owner & (token >= MAX_TOKENS - HISTORY):
            commit_history(rBefore, mConvState, channel, MAX_TOKENS - token, position, read, write, replayed, vec)
        if logged & owner & (token < length):
            store_vector(rX, log_x_ptr(mLogX, log_out + token, channel, vec), vec)

    def rotated(self, rX, rBefore, lane):
        """Inputs of a conv over the quads, oldest first: those 3, 2 and 1 tokens back, and the token's own."""
        rows = []
        for back in range(HISTORY, 0, -1):
            late = lane >= 4 * (MAX_TOKENS - back)  # their own input has no successor at this distance
            rows.append(self.moved(rX, rBefore, late, (lane - 4 * back) % 32))
        return [*rows, rX]

    def rotated_pairs(self, pair, before, lane):
        """Inputs of tokens 2 l4 - 3 .. 2 l4 + 1, oldest first, over the lanes of a quad that have two tokens each."""
        l4, first = lane % 4, lane - lane % 4
        far = self.moved(pair[1], before[1], l4 >= 2, first + (l4 + 2) % 4)
        near = [self.moved(pair[e], before[e], l4 == 3, first + (l4 + 3) % 4) for e in range(2)]
        return [far, *near, *pair]

    @cute.jit
    def moved(self, rX: cute.Tensor, rBefore: cute.Tensor, late: Boolean, source: Int32) -> cute.Tensor:
        """What lane `source` holds: `rX`, or `rBefore` where it is `late`."""
        rY = cute.make_rmem_tensor(rX.layout, BFloat16)
        own, old, new = (cute.recast_tensor(x, Uint32) for x in (rX, rBefore, rY))
        for i in cutlass.range_constexpr(cute.size(own)):
            sent = old[i] if late else own[i]
            new[i] = cute.arch.shuffle_sync(sent, source)
        return rY

    def own_vector(self, base, i, tidx):
        """Place of vector `i` of those that are a thread's own."""
        return smem_ptr(base, self.at["own"] + 4 * (i * self.threads + tidx), Float32, 16)

    def load_taps(self, mTaps, rTaps, firsts):
        """Issue the loads of the taps of a lane's channels of q, k and v."""
        for rX, first, count in zip(rTaps, firsts, (OWN, OWN, 2)):
            load_taps_into(mTaps, rX, first, count)

    @cute.jit
    def put_outputs(self, o, base: cute.Pointer, output, row: Int32, lane: Int32, start: Int32, length: Int32):
        """The gated norm of a lane's outputs, (token, row) in order. All warps of the block come here or none."""
        mOut, tidx, eps = output
        rG = load_vector(self.own_vector(base, 0, tidx), 4)  # (row of V, token)
        quad, l4 = lane // 4, lane % 4
        warp = row % HEAD_DIM // 16
        for e in cutlass.range_constexpr(2):
            squares = o[e] * o[e] + o[2 + e] * o[2 + e]
            for step in cutlass.range_constexpr(3):
                squares += cute.arch.shuffle_sync_bfly(squares, offset=4 << step)
            if quad == 0:
                (base + (self.at["squares"] + (2 * l4 + e) * 8 + warp)).store(squares)
        cute.arch.sync_threads()
        for e in cutlass.range_constexpr(2):
            t = 2 * l4 + e
            shares = load_vector(smem_ptr(base, self.at["squares"] + t * 8, Float32, 16), 8)
            squares = Float32(0.0)
            for i in cutlass.range_constexpr(8):
                squares += shares[i]
            norm = cute.math.rsqrt(squares * Float32(1.0 / HEAD_DIM) + eps, fastmath=True)
            if t < length:
                word = pack_bf16(o[e] * norm * rG[2 * e], o[2 + e] * norm * rG[2 * e + 1])
                word_ptr(row_ptr(mOut, start + t, row, 4)).store(word)


def build(key: LayerVerifyKey):
    """Compile one specialisation for sm_90a from fake tensors."""
    return compile_layer(WyLayerVerify(key))
