"""Causal conv prefill on the GPU: outputs within one bf16 ulp of float64, windows and checkpoints bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from conv_case import (
    BF16,
    CHANNELS,
    FORM,
    FORMS,
    Case,
    bits,
    check_windows,
    float64_out,
    gpu_ids,
    same_windows,
)

from compact_state.cute_kernels import causal_conv1d_decode, causal_conv1d_prefill
from compact_state.cute_kernels.checkpoints import Checkpoints
from compact_state.cute_kernels.reference import conv1d as reference
from compact_state.cute_kernels.reference.datasets import cu_seqlens

pytestmark = pytest.mark.gpu


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


@pytest.mark.parametrize("form", [FORMS[0], FORMS[3]], ids=str)
def test_D4_repeats_are_bit_equal(form):
    case = Case(form)
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


@pytest.mark.parametrize("first", [1, 2])
def test_G1_slots_full_of_nan_equal_the_cold_run(first):
    case = Case()
    case.pool.fill_(math.nan)
    x = case.tokens(first + 50)
    none = gpu_ids(-1)
    cold = case.prefill(x, case.pool, none, gpu_ids(1), gpu_ids(0), [first + 50])
    begun = case.prefill(x[:first], case.pool, none, gpu_ids(2), gpu_ids(0), [first])
    rest = case.prefill(x[first:], case.pool, gpu_ids(2), gpu_ids(2), gpu_ids(first), [50])
    assert torch.equal(torch.cat([begun, rest]), cold)
    assert same_windows(case.pool, 1, 2, first + 50)


@pytest.mark.parametrize("form", [FORM, FORMS[3]], ids=str)
def test_lengths_from_one_token_to_two_tiles(form):
    """Every length of a short last tile, packed: it runs in groups with a check for each token."""
    case = Case(form, channels=64, slots=80)
    lengths = tuple(range(1, 37))
    x = case.tokens(sum(lengths))
    slots = torch.arange(36, dtype=torch.int32, device="cuda")
    positions = slots + 3
    original, oracle = case.pool.clone(), case.pool.clone()
    expected = reference.causal_conv1d_prefill(
        x, case.weight, oracle, slots, slots, positions, cu_seqlens(lengths).cuda(),
        out=float64_out(case, sum(lengths)), **case.options(),
    )  # fmt: skip
    case.check_output(case.prefill(x, case.pool, slots, slots, positions, lengths), expected)
    check_windows(case.pool, (oracle, original), slots, positions + torch.tensor(lengths, device="cuda").int())


def test_a_neighbour_full_of_nan_changes_nothing():
    case = Case()
    x = case.tokens(40)
    alone = case.prefill(x[:17], case.pool, gpu_ids(0), gpu_ids(1), gpu_ids(5), [17])
    x[17:] = math.nan
    case.pool[2] = math.nan
    beside = case.prefill(x, case.pool, gpu_ids(0, 2), gpu_ids(3, 4), gpu_ids(5, 6), [17, 23])
    assert torch.equal(beside[:17], alone)
    assert same_windows(case.pool, 1, 3, 22)


def test_A13_captured_prefill_follows_its_buffers():
    """Lengths, ids, positions and checkpoints are read on the device: one graph serves every split of its tokens."""
    case = Case(slots=20)
    x, out = case.tokens(64), case.output(64)
    cu, read, write, positions = cu_seqlens([64, 0, 0]).cuda(), gpu_ids(0, 1, 2), gpu_ids(3, 4, 5), gpu_ids(7, 8, 9)
    marks = Checkpoints(cu=gpu_ids(0, 1, 2, 3), ends=gpu_ids(5, 5, 5), slots=gpu_ids(-1, -1, -1))

    def call(pool, out):
        causal_conv1d_prefill(
            x, case.weight, pool, read, write, positions, cu, activation="silu", checkpoints=marks, out=out,
            backend="kernels",
        )  # fmt: skip

    call(case.pool, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(case.pool, out)
    for step, lengths in enumerate(((10, 30, 24), (1, 0, 60), (0, 64, 0))):
        x.copy_(case.random(64, CHANNELS))
        cu.copy_(cu_seqlens(lengths).cuda())
        read.copy_(gpu_ids(step, 6 + step, -1))
        positions.copy_(gpu_ids(step + 3, 9, 0))
        marks.slots.copy_(gpu_ids(10 + step, 14, 15 + step))
        marks.ends.copy_(gpu_ids(1, 7 + step, 2))
        pool = case.pool.clone()
        eager = case.output(64)
        call(pool, eager)
        graph.replay()
        assert torch.equal(out, eager), f"replay {step}"
        assert torch.equal(bits(case.pool), bits(pool))
