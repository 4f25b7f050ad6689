"""Conv of a verify step's new tokens, in which a thread has two neighbouring channels of q, k or v and all tokens of the row.

Taps are widened once for all tokens, inputs once for the four that need them, and a warp loads and stores whole lines. The
inputs before the first new token are those of accepted drafts in the log, older ones in the ring of the read slot.
Whether a thread stores inputs and window is its caller's choice: a channel has one writer.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from ..configs.layer import CONV_WIDTH
from ..configs.verify import MAX_TOKENS
from .conv import SILU_EXPONENT, convolve, load_bias, ring_column
from .memory import offset_ptr, widen
from .predicated import load_into_where, load_words_where, store_word_where, zero_words
from .state_io import row_ptr
from .token_step import HEAD_DIM
from .warp_ops import pack_bf16, unpack_bf16

HISTORY = CONV_WIDTH - 1
PAIR = 2  # channels of a thread
PART = HEAD_DIM // PAIR  # threads of each of q, k and v
CONV_THREADS = 3 * PART


@cute.jit
def channel_of(thread: Int32, head: Int32, key_head: Int32, hk: Int32) -> Int32:
    """First channel of a thread: 64 have q, 64 k, the others v; those beyond CONV_THREADS have channels of v again."""
    part = thread // PART
    return (key_head + part * hk if part < 2 else 2 * hk + head) * HEAD_DIM + thread % PART * PAIR


class DraftConv:
    """A thread's share: its channels, their taps, the words before the first new token, oldest first, and the new tokens'.

    Of the threads 64 have q, 64 k and 64 v, in this order. Those beyond have none, and their warps skip the work.
    """

    def __init__(self, weight_dtype, thread, head, key_head, hk):
        self.part, self.place = thread // PART, thread % PART  # of q, k and v; which pair of its channels
        self.channel = channel_of(thread, head, key_head, hk)
        self.works = cute.arch.make_warp_uniform(thread // 32) < CONV_THREADS // 32
        rTaps = zero_words(PAIR * CONV_WIDTH * weight_dtype.width // 16)
        self.before, self.inputs = (cute.make_rmem_tensor(cute.make_layout(n), Uint32) for n in (HISTORY, MAX_TOKENS))
        for rX in (self.before, self.inputs):
            for i in range(cute.size(rX)):
                rX[i] = Uint32(0)
        self.taps = cute.recast_tensor(rTaps, weight_dtype)

    @cute.jit
    def load_history(self, mTaps: cute.Tensor, mConvState: cute.Tensor, mLogX: cute.Tensor, window):
        """Issue the loads of the taps and of the words before the first new token."""
        position, read, reads, replayed, log_in = window
        rTaps, before = self.taps, self.before
        if self.works:
            taps = offset_ptr(mTaps.iterator, self.channel * CONV_WIDTH, mTaps.element_type, 16)
            load_into_where(Boolean(True), rTaps, taps)
            row_bytes = 2 * cute.size(mLogX, mode=[3])
            log = mLogX.iterator.toint() + log_in * row_bytes + 2 * self.channel
            ring = mConvState.iterator.toint() + Int64(read) * (mConvState.stride[0] * 2) + 2 * self.channel
            for i in cutlass.range_constexpr(HISTORY):
                draft = replayed - (HISTORY - i)
                in_log = draft >= 0
                row = draft if in_log else ring_column(position + draft, CONV_WIDTH)
                address = (log if in_log else ring) + Int64(row * row_bytes)
                before[i] = load_words_where(in_log | reads, word_at(address), 1)[0]

    @cute.jit
    def load_inputs(self, mX: cute.Tensor, start: Int32, length: Int32):
        """Issue the loads of the new tokens' words."""
        inputs = self.inputs
        if self.works:
            address = row_ptr(mX, start, self.channel, 4).toint()
            step = Int64(mX.stride[0]) * 2
            for t in cutlass.range_constexpr(MAX_TOKENS):
                inputs[t] = load_words_where(t < length, word_at(address), 1)[0]
                address += step

    @cute.jit
    def run(
        self,
        mConvBias: cute.Tensor,
        mConvState: cute.Tensor,
        mLogX: cute.Tensor,
        destination,
        owns_key: Boolean,
        biased: Int32,
        length: Int32,
        place: Int32,
        step: Int32,
    ):
        """Store window and inputs, those of q and k if the thread `owns_key`, and convolve into shared memory."""
        if self.works:
            if owns_key | (self.part == 2):
                self.store_inputs(mConvState, mLogX, destination, length)
            self.convolve_into(mConvBias, biased, length, place, step)

    @cute.jit
    def store_inputs(self, mConvState: cute.Tensor, mLogX: cute.Tensor, destination, length: Int32):
        """The committed window, of which in place only the accepted drafts' columns change, and the new inputs to the log."""
        position, read, write, writes, replayed, logged, log_out = destination
        row_bytes = 2 * cute.size(mLogX, mode=[3])
        ring = mConvState.iterator.toint() + Int64(write) * (mConvState.stride[0] * 2) + 2 * self.channel
        for i in cutlass.range_constexpr(HISTORY):
            draft = replayed - (HISTORY - i)
            column = ring_column(position + draft, CONV_WIDTH)
            changes = (draft >= 0) | (read != write)
            store_word_where(writes & changes, ring + Int64(column * row_bytes), self.before[i])
        address = mLogX.iterator.toint() + log_out * row_bytes + 2 * self.channel
        count = length if logged else Int32(0)
        for t in cutlass.range_constexpr(MAX_TOKENS):
            store_word_where(t < count, address, self.inputs[t])
            address += Int64(row_bytes)

    @cute.jit
    def convolve_into(self, mConvBias: cute.Tensor, biased: Int32, length: Int32, place: Int32, step: Int32):
        """silu(conv), rounded to bf16, of all tokens into shared memory, a word each from `place` on; zeros for no token."""
        taps = widen(self.taps, PAIR * CONV_WIDTH)
        rBias = load_bias(mConvBias, self.channel, PAIR, biased)
        wide = [unpack_bf16(self.before[i]) for i in range(HISTORY)]
        wide += [unpack_bf16(self.inputs[t]) for t in range(MAX_TOKENS)]
        for first in cutlass.range_constexpr(
            0, MAX_TOKENS, 2
        ):  # two tokens at a time wait for each other's special functions
            words = [Uint32(0), Uint32(0)]
            if first < length:
                for e in cutlass.range_constexpr(2):
                    rows = wide[first + e : first + e + CONV_WIDTH]
                    rY = convolve(rows, taps, rBias, PAIR, CONV_WIDTH, SILU_EXPONENT)
                    words[e] = pack_bf16(rY[0], rY[1])
            for e in cutlass.range_constexpr(2):
                store_word_where(Boolean(True), place, words[e] if first + e < length else Uint32(0))
                place += step


def word_at(address):
    """A pointer to one word at a global address."""
    return cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4)
