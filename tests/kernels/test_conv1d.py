"""Causal conv kernels on the GPU: outputs within one bf16 ulp of float64, windows bit for bit."""

from __future__ import annotations

import math

import pytest
import torch

from compact_state.cute_kernels import (
    causal_conv1d_commit,
    causal_conv1d_decode,
    causal_conv1d_prefill,
    causal_conv1d_verify,
)
from compact_state.cute_kernels.checkpoints import Checkpoints
from compact_state.cute_kernels.draft_log import DraftLog
from compact_state.cute_kernels.reference import conv1d as reference
from compact_state.cute_kernels.reference.datasets import cu_seqlens, ids
from compact_state.cute_kernels.reference.metrics import ulp_distance

pytestmark = pytest.mark.gpu

BF16, F32 = torch.bfloat16, torch.float32
# width, weight, bias, activation: the forms that ship
FORMS = (
    (4, BF16, False, "silu"),
    (4, BF16, True, "silu"),
    (4, F32, False, "silu"),
    (4, F32, True, "silu"),
    (4, BF16, False, None),
    (3, BF16, True, "silu"),
    (2, BF16, True, "silu"),
)
FORM = FORMS[0]
CHANNELS = 328  # neither a multiple of a block's channels nor of a warp's


def gpu_ids(*values):
    return ids(*values, device="cuda")


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


class Case:
    """Random operands of one form; every slot, gap and output starts as NaN or garbage that must not be read."""

    def __init__(self, form=FORM, channels=CHANNELS, slots=12, seed=0, pad=24):
        width, w_dtype, use_bias, self.activation = form
        self.width, self.channels, self.pad = width, channels, pad
        self.generator = torch.Generator("cuda").manual_seed(seed)
        self.weight = self.random(channels, width).to(w_dtype)
        self.bias = self.random(channels).to(w_dtype) if use_bias else None
        record = torch.full((slots, width * channels + 64), math.nan, dtype=BF16, device="cuda")
        self.pool = record[:, : width * channels].unflatten(1, (width, channels))
        self.pool.copy_(self.random(slots, width, channels))

    def random(self, *shape):
        return torch.randn(*shape, generator=self.generator, device="cuda")

    def tokens(self, count):
        """x [count, C], a view of wider rows whose other columns are NaN."""
        rows = torch.full((count, self.channels + 2 * self.pad), math.nan, dtype=BF16, device="cuda")
        rows[:, self.pad : self.pad + self.channels] = self.random(count, self.channels)
        return rows[:, self.pad : self.pad + self.channels]

    def output(self, count):
        rows = torch.full((count, self.channels + self.pad), math.nan, dtype=BF16, device="cuda")
        return rows[:, : self.channels]

    def decode(self, x, pool, read, write, positions, out=None, settled=False):
        out = self.output(x.shape[0]) if out is None else out
        return causal_conv1d_decode(
            x, self.weight, pool, read, write, positions, bias=self.bias, activation=self.activation, settled=settled,
            out=out, backend="kernels",
        )  # fmt: skip

    def prefill(self, x, pool, read, write, positions, lengths, checkpoints=None):
        return causal_conv1d_prefill(
            x, self.weight, pool, read, write, positions, cu_seqlens(lengths).cuda(), bias=self.bias,
            activation=self.activation, checkpoints=checkpoints, out=self.output(x.shape[0]), backend="kernels",
        )  # fmt: skip

    def verify(self, x, pool, read, write, positions, lengths, log, accepted, settled=False):
        return causal_conv1d_verify(
            x, self.weight, pool, read, write, positions, cu_seqlens(lengths).cuda(), log, accepted, bias=self.bias,
            activation=self.activation, settled=settled, out=self.output(x.shape[0]), backend="kernels",
        )  # fmt: skip

    def options(self):
        return {"bias": self.bias, "activation": self.activation, "compute_dtype": torch.float64}

    def check_output(self, out, expected, what="out"):
        bad = ~torch.isfinite(out)
        assert not bool(bad.any()), f"{what}: not finite at {bad.nonzero()[:4].tolist()}, {int(bad.sum())} in all"
        # A sum that cancels leaves fp32 rounding of its terms, which no ulp of the result measures.
        near = (out.double() - expected).abs() <= 1e-5
        worst = ulp_distance(torch.where(near, 0, out), torch.where(near, 0, expected))
        assert worst <= 1, f"{what}: {worst} ulp"


def commit(*arguments):
    causal_conv1d_commit(*arguments, backend="kernels")


def float64_out(case, count):
    return torch.empty(count, case.channels, dtype=torch.float64, device="cuda")


def check_windows(pool, before, write, positions):
    """`before`: the reference's pool after its call, and the pool before. Live columns of written slots equal the one's,
    all other slots the other's, bit for bit."""
    reference_pool, original = before
    named = {slot for slot in write.tolist() if 0 <= slot < pool.shape[0]}
    got = reference.live_window(pool, write, positions)
    want = reference.live_window(reference_pool, write, positions)
    wrong = (bits(got) != bits(want)).flatten(1)
    assert torch.equal(bits(got), bits(want)), f"windows of rows {wrong.any(1).nonzero().flatten().tolist()} differ"
    for slot in range(pool.shape[0]):
        if slot not in named:
            assert torch.equal(bits(pool[slot]), bits(original[slot])), f"slot {slot} changed"


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("settled", [False, True])
def test_decode_every_kind_of_row(form, settled):
    case = Case(form)
    read = gpu_ids(0, 1, -1, 3, -1, 4, 12, 5)
    write = gpu_ids(0, 6, 7, -1, -1, 2_000_000_000, 8, 9)
    positions = gpu_ids(0, 5, 0, 7, 3, 1000, 6, 2**30)
    x = case.tokens(8)
    original, oracle = case.pool.clone(), case.pool.clone()
    expected = reference.causal_conv1d_decode(
        x, case.weight, oracle, read, write, positions, out=float64_out(case, 8), **case.options()
    )
    out = case.decode(x, case.pool, read, write, positions, settled=settled)
    case.check_output(out, expected)
    assert bool((out[4] == 0).all())
    check_windows(case.pool, (oracle, original), write, positions + 1)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_decode_steps_equal_prefill_bit_for_bit(form):
    case = Case(form)
    x = case.tokens(21)
    prefilled = case.prefill(x, case.pool, gpu_ids(1), gpu_ids(2), gpu_ids(5), [21])
    position = gpu_ids(5)
    read, write = gpu_ids(1), gpu_ids(3)
    for t in range(21):
        out = case.decode(x[t : t + 1], case.pool, read, write, position)
        assert torch.equal(out, prefilled[t : t + 1]), f"token {t}"
        read, write = write, (write if t % 2 else gpu_ids(4 if int(write) == 3 else 3))
        position += 1
    assert torch.equal(
        reference.live_window(case.pool, read, position), reference.live_window(case.pool, gpu_ids(2), position)
    )


def test_decode_in_place_equals_copy():
    case = Case()
    x = case.tokens(5)
    position = gpu_ids(*range(9, 14))
    copied = case.decode(x, case.pool, gpu_ids(0, 1, 2, 3, 4), gpu_ids(5, 6, 7, 8, 9), position)
    placed = case.decode(x, case.pool, gpu_ids(0, 1, 2, 3, 4), gpu_ids(0, 1, 2, 3, 4), position)
    assert torch.equal(copied, placed)
    assert torch.equal(
        reference.live_window(case.pool, gpu_ids(0, 1, 2, 3, 4), position + 1),
        reference.live_window(case.pool, gpu_ids(5, 6, 7, 8, 9), position + 1),
    )


def test_A4_padded_rows_are_zero_and_live_rows_equal_a_smaller_batch():
    case = Case()
    x = case.tokens(8)
    pool = case.pool.clone()
    read, write, position = gpu_ids(0, 1, 2, *[-1] * 5), gpu_ids(0, 1, 2, *[-1] * 5), gpu_ids(*[6] * 8)
    for step in range(2):
        out = case.decode(x, case.pool, read, write, position)
        alone = case.decode(x[:3], pool, read[:3], write[:3], position[:3])
        assert torch.equal(out[:3], alone)
        assert bool((out[3:] == 0).all())
        assert torch.equal(bits(case.pool), bits(pool)), f"step {step}"
        position += 1


def test_C8_output_may_be_the_input_row():
    case = Case()
    x = case.tokens(3)
    marked = x.clone()
    separate = case.decode(x, case.pool.clone(), gpu_ids(0, 1, 2), gpu_ids(3, 4, 5), gpu_ids(4, 5, 6))
    assert torch.equal(x, marked)
    case.decode(x, case.pool, gpu_ids(0, 1, 2), gpu_ids(3, 4, 5), gpu_ids(4, 5, 6), out=x)
    assert torch.equal(x, separate)


def test_decode_more_rows_than_a_grid_dimension():
    case = Case(channels=64, slots=4)
    rows = 65_600
    x = case.tokens(1).expand(rows, -1).clone()
    none, zero = torch.full((rows,), -1, dtype=torch.int32, device="cuda"), gpu_ids(0).expand(rows).clone()
    out = case.decode(x, case.pool, zero, none, gpu_ids(7).expand(rows).clone())
    assert torch.equal(out, out[:1].expand_as(out))
    assert bool(torch.isfinite(out).all())


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_prefill_mixed_lengths(form):
    case = Case(form, slots=24)
    lengths = (1, 2, 3, 4, 5, 0, 130, 64, 8, 7, 9, 16)
    count = sum(lengths)
    x = case.tokens(count)
    read = gpu_ids(0, 1, -1, 3, 4, 5, 6, 7, -1, 9, 10, 99)
    write = gpu_ids(0, 12, 13, 3, -1, 14, 6, 15, -1, 16, 10, 17)
    positions = gpu_ids(3, 9, 0, 6, 100, 2, 0, 77, 0, 1, 2, 5)
    original, oracle = case.pool.clone(), case.pool.clone()
    expected = reference.causal_conv1d_prefill(
        x, case.weight, oracle, read, write, positions, cu_seqlens(lengths).cuda(), out=float64_out(case, count),
        **case.options(),
    )  # fmt: skip
    out = case.prefill(x, case.pool, read, write, positions, lengths)
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    for i, length in enumerate(lengths):
        part = slice(starts[i], starts[i + 1])
        case.check_output(out[part], expected[part], f"sequence {i} of length {length}")
    check_windows(case.pool, (oracle, original), write, positions + torch.tensor(lengths, device="cuda").int())


@pytest.mark.parametrize("form", [FORM, FORMS[5], FORMS[6]], ids=str)
@pytest.mark.parametrize("in_place", [True, False])
def test_prefill_checkpoints_at_any_position(form, in_place):
    case = Case(form, slots=64)
    lengths = (1, 2, 3, 70, 0, 33)
    entries = [
        [(1, 20)],
        [(1, 21), (2, 22), (3, 23)],
        [(0, 24), (2, 25), (3, -1)],
        [(1, 26), (2, 27), (3, 28), (4, 29), (64, 30), (65, 31), (69, 32), (70, 33), (71, 34)],
        [(1, 35)],
        [(31, 36), (32, 64), (33, 37)],
    ]
    marks = Checkpoints.from_lists(entries, device="cuda")
    read = gpu_ids(0, 1, 2, -1, 4, 5)
    write = gpu_ids(0, 1, 2, 3, 4, 5) if in_place else gpu_ids(10, 11, 12, 13, 14, 15)
    positions = gpu_ids(5, 9, 2, 0, 7, 4)
    x = case.tokens(sum(lengths))
    oracle = case.pool.clone()
    expected = reference.causal_conv1d_prefill(
        x, case.weight, oracle, read, write, positions, cu_seqlens(lengths).cuda(), checkpoints=marks,
        out=float64_out(case, sum(lengths)), **case.options(),
    )  # fmt: skip
    original = case.pool.clone()
    out = case.prefill(x, case.pool, read, write, positions, lengths, marks)
    case.check_output(out, expected)
    written = []
    for n, pairs in enumerate(entries):
        written += [(slot, int(positions[n]) + end) for end, slot in pairs if 1 <= end <= lengths[n] and 0 <= slot < 64]
    written += [(int(slot), int(p) + length) for slot, p, length in zip(write, positions, lengths)]
    for slot, count in written:
        at, end = gpu_ids(slot), gpu_ids(count)
        assert torch.equal(reference.live_window(case.pool, at, end), reference.live_window(oracle, at, end)), (
            f"slot {slot} after {count} tokens"
        )
    for slot in set(range(64)) - {slot for slot, _ in written}:
        assert torch.equal(bits(case.pool[slot]), bits(original[slot])), f"slot {slot} changed"


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_D3_short_chunk_merges_the_old_window_into_the_write_slot(length):
    case = Case()
    case.pool[2] = math.nan
    shared = case.pool[1].clone()
    before = reference.live_window(case.pool, gpu_ids(1), gpu_ids(6))[0]
    x = case.tokens(length)
    case.prefill(x, case.pool, gpu_ids(1), gpu_ids(2), gpu_ids(6), [length])
    assert torch.equal(bits(case.pool[1]), bits(shared))
    after = reference.live_window(case.pool, gpu_ids(2), gpu_ids(6 + length))[0]
    assert torch.equal(after, torch.cat([before, x])[-3:])
    other = case.tokens(5)
    first = case.prefill(other, case.pool, gpu_ids(1), gpu_ids(3), gpu_ids(6), [5])
    cold = case.prefill(other, torch.cat([shared[None], shared[None]]), gpu_ids(0), gpu_ids(1), gpu_ids(6), [5])
    assert torch.equal(first, cold)


def test_D7_packed_call_equals_separate_calls():
    case = Case()
    lengths, read = (1, 1, 130, 2, 64), (0, 1, -1, 3, -1)
    x = case.tokens(sum(lengths))
    pool = case.pool.clone()
    positions = (9, 4, 0, 8, 0)
    packed = case.prefill(x, case.pool, gpu_ids(*read), gpu_ids(5, 6, 7, 8, 9), gpu_ids(*positions), lengths)
    start = 0
    for i, length in enumerate(lengths):
        part = x[start : start + length]
        alone = case.prefill(part, pool, gpu_ids(read[i]), gpu_ids(5 + i), gpu_ids(positions[i]), [length])
        assert torch.equal(packed[start : start + length], alone), f"sequence {i}"
        start += length
    assert torch.equal(bits(case.pool[:10]), bits(pool[:10]))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 31, 33, 63, 65, 4095, 4096, 4097, 4099])
def test_D1_lengths_around_tile_boundaries(length):
    case = Case(pad=0)
    x = case.tokens(length)
    oracle = case.pool.clone()
    cu = cu_seqlens([length]).cuda()
    arguments = (gpu_ids(2), gpu_ids(2), gpu_ids(3))
    expected = reference.causal_conv1d_prefill(
        x, case.weight, oracle, *arguments, cu, out=float64_out(case, length), **case.options()
    )
    case.check_output(case.prefill(x, case.pool, *arguments, [length]), expected)
    assert torch.equal(
        reference.live_window(case.pool, gpu_ids(2), gpu_ids(3 + length)),
        reference.live_window(oracle, gpu_ids(2), gpu_ids(3 + length)),
    )


def test_split_anywhere_equals_unsplit_bit_for_bit():
    case = Case()
    x = case.tokens(40)
    whole = case.prefill(x, case.pool, gpu_ids(0), gpu_ids(1), gpu_ids(5), [40])
    for cut in (1, 2, 3, 4, 7, 8, 9, 39):
        first = case.prefill(x[:cut], case.pool, gpu_ids(0), gpu_ids(2), gpu_ids(5), [cut])
        second = case.prefill(x[cut:], case.pool, gpu_ids(2), gpu_ids(2), gpu_ids(5 + cut), [40 - cut])
        assert torch.equal(torch.cat([first, second]), whole), f"cut at {cut}"
        assert torch.equal(
            reference.live_window(case.pool, gpu_ids(2), gpu_ids(45)),
            reference.live_window(case.pool, gpu_ids(1), gpu_ids(45)),
        )


def test_E12_sequences_without_tokens_copy_their_window():
    case = Case()
    out = case.prefill(case.tokens(0), case.pool, gpu_ids(0, -1), gpu_ids(5, 6), gpu_ids(7, 0), [0, 0])
    assert out.shape == (0, CHANNELS)
    at = gpu_ids(7)
    assert torch.equal(
        reference.live_window(case.pool, gpu_ids(5), at), reference.live_window(case.pool, gpu_ids(0), at)
    )
    assert bool((reference.live_window(case.pool, gpu_ids(6), gpu_ids(0)) == 0).all())


def test_E15_rows_behind_the_last_sequence_are_zero():
    case = Case()
    x = case.tokens(256)
    x[201:] = math.nan
    out = case.prefill(x, case.pool, gpu_ids(0, 1, 2), gpu_ids(3, 4, 5), gpu_ids(4, 5, 6), [100, 0, 101])
    assert bool((out[201:] == 0).all())
    assert bool(torch.isfinite(out).all())


def test_D4_repeats_are_bit_equal():
    case = Case()
    lengths = (1, 2, 3, 40, 130)
    x, y = case.tokens(sum(lengths)), case.tokens(5)
    original = case.pool.clone()
    slots, positions = gpu_ids(0, 1, 2, 3, 4), gpu_ids(5, 6, 7, 8, 9)
    ended = positions + torch.tensor(lengths, device="cuda").int()
    results = []
    for _ in range(1000):
        case.pool.copy_(original)
        first = case.prefill(x, case.pool, slots, slots, positions, lengths)
        second = case.decode(y, case.pool, slots, slots, ended)
        results.append((first, second, case.pool.clone()))
        if len(results) > 1:
            assert all(torch.equal(bits(a), bits(b)) for a, b in zip(results[0], results.pop()))


def test_many_ragged_sequences():
    case = Case(channels=64, slots=2400)
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(0, 20, (1100,), generator=generator).tolist()
    x = case.tokens(sum(lengths))
    order = torch.randperm(2400, generator=generator).int().cuda()
    read, write = order[:1100].contiguous(), order[1100:2200].contiguous()
    positions = torch.randint(0, 50, (1100,), generator=generator).int().cuda()
    original, oracle = case.pool.clone(), case.pool.clone()
    expected = reference.causal_conv1d_prefill(
        x, case.weight, oracle, read, write, positions, cu_seqlens(lengths).cuda(),
        out=float64_out(case, sum(lengths)), **case.options(),
    )  # fmt: skip
    case.check_output(case.prefill(x, case.pool, read, write, positions, lengths), expected)
    check_windows(case.pool, (oracle, original), write, positions + torch.tensor(lengths, device="cuda").int())


@pytest.mark.parametrize("width", [4, 2])
@pytest.mark.parametrize("channels", [65_528, 65_536, 65_544])
def test_B8_many_channels_equal_two_halves(width, channels):
    case = Case(FORMS[0] if width == 4 else FORMS[6], channels=channels, slots=4)
    half = channels // 16 * 8
    x = case.tokens(4)
    whole = case.prefill(x, case.pool, gpu_ids(0), gpu_ids(1), gpu_ids(9), [4])
    step = case.decode(x[:1], case.pool, gpu_ids(1), gpu_ids(2), gpu_ids(13))
    for part in (slice(0, half), slice(half, channels)):
        weight, bias = case.weight[part].contiguous(), None if case.bias is None else case.bias[part].contiguous()
        pool = case.pool[:, :, part].contiguous()
        xs = x[:, part].contiguous()
        options = {"bias": bias, "activation": case.activation, "backend": "kernels"}
        cu = cu_seqlens([4]).cuda()
        out = causal_conv1d_prefill(xs, weight, pool, gpu_ids(0), gpu_ids(3), gpu_ids(9), cu, **options)
        one = causal_conv1d_decode(xs[:1], weight, pool, gpu_ids(3), gpu_ids(3), gpu_ids(13), **options)
        assert torch.equal(whole[:, part], out)
        assert torch.equal(step[:, part], one)


@pytest.mark.parametrize("count", [58_254, 58_300])
def test_B3_rows_beyond_two_to_the_31_elements(count):
    case = Case(channels=64, slots=4)
    rows = torch.empty(count, 36_864, dtype=BF16, device="cuda")
    x = rows[:, 36_000 : 36_000 + 64]
    x.copy_(case.random(count, 64))
    out = case.prefill(x, case.pool, gpu_ids(0), gpu_ids(1), gpu_ids(3), [count])
    tail = x[-67:].contiguous()
    case.prefill(tail[:3], case.pool, gpu_ids(-1), gpu_ids(2), gpu_ids(count - 64), [3])
    last = case.prefill(tail[3:], case.pool, gpu_ids(2), gpu_ids(2), gpu_ids(count - 61), [64])
    assert torch.equal(out[-64:], last)
    at = gpu_ids(count + 3)
    assert torch.equal(
        reference.live_window(case.pool, gpu_ids(1), at), reference.live_window(case.pool, gpu_ids(2), at)
    )


def test_A13_graph_replay_follows_its_buffers():
    case = Case()
    x, out = case.tokens(3), case.output(3)
    read, write, positions = gpu_ids(0, 1, 2), gpu_ids(0, 1, 2), gpu_ids(4, 5, 6)
    case.decode(x, case.pool, read, write, positions, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.decode(x, case.pool, read, write, positions, out=out)
    for step in range(3):
        x.copy_(case.random(3, CHANNELS))
        read.copy_(gpu_ids(step, 5 + step, -1))
        write.copy_(gpu_ids(8, 5 + step, -1))
        positions.copy_(gpu_ids(step, 9, 12))
        pool = case.pool.clone()
        eager = case.decode(x, pool, read, write, positions)
        graph.replay()
        assert torch.equal(out, eager), f"replay {step}"
        assert torch.equal(bits(case.pool), bits(pool))


def test_side_stream_waits_for_its_producer():
    case = Case()
    source, x = case.tokens(4), case.tokens(4)
    arguments = (gpu_ids(0, 1, 2, 3), gpu_ids(4, 5, 6, 7), gpu_ids(4, 5, 6, 7))
    expected = case.decode(source, case.pool, *arguments)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x.copy_(source)
        out = case.decode(x, case.pool, *arguments, settled=True)
    stream.synchronize()
    assert torch.equal(out, expected)


# --- draft tokens ----------------------------------------------------------------------------------------------------


def make_log(case, batch, rows=None):
    log = DraftLog.allocate("gdn", batch, 1, 1, case.channels, "cuda", dtype=BF16, rows=rows)
    log.x.fill_(math.nan)
    return log


def copy_of(log):
    return DraftLog(k=log.k, u=log.u, g=log.g, x=log.x.clone(), half=log.half.clone(), rows=log.rows)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("settled", [False, True])
def test_verify_every_kind_of_row(form, settled):
    case = Case(form, slots=32)
    rows = gpu_ids(3, 9, 0, 12, 5, 1, 2, 4, 6, 7)
    log = make_log(case, 12, rows=rows)
    log.x.copy_(case.random(*log.x.shape))
    log.half.copy_(torch.arange(12) % 2)
    lengths = (1, 6, 8, 4, 3, 0, 2, 5, 4, 1)
    accepted = gpu_ids(0, 3, 8, 2, 1, 4, -1, 9, 2, 1)
    read = gpu_ids(0, 1, 2, 3, -1, 5, 6, 7, 8, -1)
    write = gpu_ids(0, 1, 12, 13, 14, 5, 16, 17, -1, -1)
    positions = gpu_ids(6, 3, 0, 9, 4, 11, 5, 7, 10, 3)
    x = case.tokens(sum(lengths))
    original, oracle, oracle_log = case.pool.clone(), case.pool.clone(), copy_of(log)
    expected = reference.causal_conv1d_verify(
        x, case.weight, oracle, read, write, positions, cu_seqlens(lengths).cuda(), oracle_log, accepted,
        out=float64_out(case, sum(lengths)), **case.options(),
    )  # fmt: skip
    out = case.verify(x, case.pool, read, write, positions, lengths, log, accepted, settled=settled)
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    for i in range(len(lengths)):
        part = slice(starts[i], starts[i + 1])
        case.check_output(out[part], expected[part], f"row {i}")
    for row in range(12):
        assert torch.equal(bits(log.x[row]), bits(oracle_log.x[row])), f"log row {row}"
    valid = (accepted >= 0) & (accepted <= 8)
    logged = torch.where((rows < 12) & valid, accepted, 0)
    check_windows(case.pool, (oracle, original), torch.where(valid, write, -1), positions + logged)


@pytest.mark.parametrize("accepted", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("then", ["decode", "verify", "prefill"])
def test_F1_verify_then_anything_equals_never_having_speculated(accepted, then):
    case = Case()
    log = make_log(case, 1)
    start, drafts, more = case.tokens(7), case.tokens(4), case.tokens(2)
    none, one, two = gpu_ids(-1), gpu_ids(1), gpu_ids(2)
    case.prefill(start, case.pool, none, one, gpu_ids(0), [7])
    case.verify(drafts, case.pool, one, one, gpu_ids(7), [4], log, gpu_ids(0))
    log.half ^= 1
    plain = torch.cat([start, drafts[:accepted], more])
    expected = case.prefill(plain, case.pool, none, two, gpu_ids(0), [plain.shape[0]])[-2:]
    count, position = gpu_ids(accepted), gpu_ids(7)
    if then == "verify":
        out = case.verify(more, case.pool, one, one, position, [2], log, count)
        log.half ^= 1
        commit(case.pool, one, one, position + count, log, two)
    else:
        commit(case.pool, one, one, position, log, count)
        position += count
        if then == "prefill":
            out = case.prefill(more, case.pool, one, one, position, [2])
        else:
            first = case.decode(more[:1], case.pool, one, one, position)
            out = torch.cat([first, case.decode(more[1:], case.pool, one, one, position + 1)])
    assert torch.equal(out, expected)
    at = gpu_ids(9 + accepted)
    assert torch.equal(reference.live_window(case.pool, one, at), reference.live_window(case.pool, two, at))


def test_F3_counts_out_of_range_touch_nothing():
    case = Case()
    log = make_log(case, 3)
    pool, logged = case.pool.clone(), log.x.clone()
    out = case.verify(
        case.tokens(6), case.pool, gpu_ids(0, 1, 2), gpu_ids(0, 5, 2), gpu_ids(4, 4, 4), [2, 2, 2], log,
        gpu_ids(-1, 9, 2**31 - 1),
    )  # fmt: skip
    commit(case.pool, gpu_ids(0, 1, 2), gpu_ids(0, 5, 2), gpu_ids(4, 4, 4), log, gpu_ids(-1, 9, 2**31 - 1))
    assert bool((out == 0).all())
    assert torch.equal(bits(case.pool), bits(pool))
    assert torch.equal(bits(log.x), bits(logged))


def test_commit_equals_the_first_half_of_verify():
    case = Case(slots=16)
    log = make_log(case, 4)
    log.x.copy_(case.random(*log.x.shape))
    counts = gpu_ids(0, 1, 5, 8)
    read, write, positions = gpu_ids(0, 1, 2, -1), gpu_ids(0, 5, 6, 7), gpu_ids(3, 4, 5, 6)
    committed = case.pool.clone()
    commit(committed, read, write, positions, log, counts)
    x = case.tokens(4)
    first = case.verify(x, case.pool, read, write, positions, [1, 1, 1, 1], log, counts)
    assert torch.equal(bits(case.pool), bits(committed))
    # From the committed window with nothing accepted the same tokens give the same outputs.
    again = case.verify(x, committed, write, write, positions + counts, [1, 1, 1, 1], log, gpu_ids(0, 0, 0, 0))
    assert torch.equal(first, again)
