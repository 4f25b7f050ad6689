"""Conv references: ring windows by position, ids, checkpoints, verify, against a plain loop over tokens and taps."""

import math

import pytest
import torch

from compact_state.cute_kernels.checkpoints import Checkpoints
from compact_state.cute_kernels.draft_log import DraftLog
from compact_state.cute_kernels.errors import InvalidArgumentError
from compact_state.cute_kernels.reference import conv1d, metrics
from compact_state.cute_kernels.reference import datasets as ds

D = torch.float64
C = 24


def plain_conv(x, weight, bias=None, history=None, silu=True):
    """One sequence: sum over taps, tokens before the first come from ``history`` (time order) or are zeros."""
    width = weight.shape[1]
    if history is None:
        history = torch.zeros(width - 1, x.shape[1])
    inputs = torch.cat([history, x]).to(D)
    rows = []
    for t in range(x.shape[0]):
        y = torch.zeros(x.shape[1], dtype=D) if bias is None else bias.to(D).clone()
        for tap in range(width):
            y = y + weight[:, tap].to(D) * inputs[t + tap]
        rows.append(y / (1 + torch.exp(-y)) if silu else y)
    return torch.stack(rows) if rows else torch.zeros(0, x.shape[1], dtype=D)


def parameters(width=4, dtype=torch.bfloat16):
    torch.manual_seed(width)
    return torch.randn(C, width, dtype=dtype), torch.randn(C, dtype=dtype)


def tokens(count, seed=0, dtype=torch.bfloat16):
    return torch.randn(count, C, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ring(*inputs, width=4, start=0):
    """A window in which token ``start + i`` is ``inputs[i]``; other columns are NaN."""
    window = torch.full((width, C), math.nan, dtype=torch.bfloat16)
    for i, value in enumerate(inputs):
        window[(start + i) % width] = value
    return window


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", None])
def test_prefill_matches_plain_loop(width, use_bias, activation):
    weight, bias = parameters(width)
    bias = bias if use_bias else None
    lengths = (1, 2, 0, 5, 33)
    x = tokens(sum(lengths))
    pool = ds.make_pool(8, (width, C), torch.bfloat16)
    out = conv1d.causal_conv1d_prefill(
        x, weight, pool, ds.ids(*[-1] * 5), ds.ids(0, 1, 2, 3, 4), ds.ids(*[0] * 5), ds.cu_seqlens(lengths),
        bias=bias, activation=activation,
    )  # fmt: skip
    expected = torch.cat([plain_conv(part, weight, bias, silu=activation == "silu") for part in x.split(lengths)])
    assert metrics.ulp_distance(out, expected) <= 1
    assert bool(pool[5:].isnan().all())


def test_D1_lengths_around_block_boundaries():
    weight, bias = parameters()
    for length in (1, 2, 3, 4, 5, 31, 33, 63, 65):
        memory = tokens(length)
        pool = ds.make_pool(1, (4, C), torch.bfloat16)
        out = conv1d.causal_conv1d_prefill(
            memory, weight, pool, ds.ids(-1), ds.ids(0), ds.ids(0), ds.cu_seqlens([length]), bias=bias
        )
        assert metrics.ulp_distance(out, plain_conv(memory, weight, bias)) <= 1
        live = conv1d.live_window(pool, ds.ids(0), ds.ids(length))[0]
        assert torch.equal(live, torch.cat([torch.zeros(3, C, dtype=torch.bfloat16), memory])[-3:])


@pytest.mark.parametrize("length", [1, 2, 3, 4])
@pytest.mark.parametrize("position", [3, 4, 5, 6, 7])
def test_D3_read_slot_is_untouched_and_the_new_window_is_complete(length, position):
    """The shared checkpoint stays byte-equal; slot 2 gets the last 3 of (old 3 ++ new); a second reader matches cold."""
    weight, _ = parameters()
    past, new, other = tokens(position, 1), tokens(length, 2), tokens(5, 3)
    pool = ds.make_pool(4, (4, C), torch.bfloat16)
    pool[1] = ring(*past[-3:], start=position - 3)
    before = pool.clone()
    out = conv1d.causal_conv1d_prefill(
        new, weight, pool, ds.ids(1), ds.ids(2), ds.ids(position), ds.cu_seqlens([length])
    )
    assert metrics.ulp_distance(out, plain_conv(new, weight, history=past[-3:])) <= 1
    assert torch.equal(pool[1].nan_to_num(7.0), before[1].nan_to_num(7.0))
    live = conv1d.live_window(pool, ds.ids(2), ds.ids(position + length))[0]
    assert torch.equal(live, torch.cat([past, new])[-3:])
    second = conv1d.causal_conv1d_prefill(
        other, weight, pool, ds.ids(1), ds.ids(3), ds.ids(position), ds.cu_seqlens([5])
    )
    cold = conv1d.causal_conv1d_prefill(
        torch.cat([past, other]), weight, ds.make_pool(1, (4, C), torch.bfloat16), ds.ids(-1), ds.ids(0), ds.ids(0),
        ds.cu_seqlens([position + 5]),
    )  # fmt: skip
    assert torch.equal(second, cold[position:])


@pytest.mark.parametrize("first", [1, 2, 3, 4, 7])
def test_G1_any_split_of_a_sequence_equals_the_cold_run(first):
    """NaN slots, first piece of 1 or 2 tokens, then prefill, then single steps: every output has the cold run's bits."""
    weight, bias = parameters()
    x = tokens(60)
    cold_pool = ds.make_pool(1, (4, C), torch.bfloat16)
    cold = conv1d.causal_conv1d_prefill(
        x, weight, cold_pool, ds.ids(-1), ds.ids(0), ds.ids(0), ds.cu_seqlens([60]), bias=bias
    )
    pool = ds.make_pool(2, (4, C), torch.bfloat16)
    pieces, position = [], 0
    for end in (first, 50):
        pieces.append(
            conv1d.causal_conv1d_prefill(
                x[position:end], weight, pool, ds.ids(1 if position else -1), ds.ids(1), ds.ids(position),
                ds.cu_seqlens([end - position]), bias=bias,
            )
        )  # fmt: skip
        position = end
    for t in range(50, 60):
        pieces.append(
            conv1d.causal_conv1d_decode(x[t : t + 1], weight, pool, ds.ids(1), ds.ids(1), ds.ids(t), bias=bias)
        )
    assert torch.equal(torch.cat(pieces), cold)
    at = ds.ids(60)
    assert torch.equal(conv1d.live_window(pool, ds.ids(1), at), conv1d.live_window(cold_pool, ds.ids(0), at))
    assert bool(pool[0].isnan().all())


def test_D7_packed_call_equals_separate_calls():
    weight, bias = parameters()
    lengths, has_state = (1, 1, 130, 2, 64), (1, 1, 0, 1, 0)
    x = tokens(sum(lengths))
    positions = ds.ids(*[9 if flag else 0 for flag in has_state])
    initial = ds.make_pool(5, (4, C), torch.bfloat16, fill=0.0)
    initial.copy_(tokens(20, 5).view(5, 4, C))
    read, write = ds.ids(*[n if flag else -1 for n, flag in enumerate(has_state)]), ds.ids(0, 1, 2, 3, 4)
    together, alone = initial.clone(), initial.clone()
    out = conv1d.causal_conv1d_prefill(x, weight, together, read, write, positions, ds.cu_seqlens(lengths), bias=bias)
    parts = [
        conv1d.causal_conv1d_prefill(
            part, weight, alone, read[n : n + 1], write[n : n + 1], positions[n : n + 1], ds.cu_seqlens([len(part)]),
            bias=bias,
        )
        for n, part in enumerate(x.split(lengths))
    ]  # fmt: skip
    assert torch.equal(out, torch.cat(parts))
    assert torch.equal(together, alone)


@pytest.mark.parametrize("out_is_x", [False, True])
def test_C8_decode_into_x_or_beside_it(out_is_x):
    weight, bias = parameters()
    x, pool = tokens(3), ds.make_pool(3, (4, C), torch.bfloat16, fill=0.5)
    expected = conv1d.causal_conv1d_decode(
        x.clone(), weight, pool.clone(), ds.ids(0, 1, 2), ds.ids(0, 1, 2), ds.ids(5, 6, 7), bias=bias
    )
    given, original = x.clone(), x.clone()
    out = given if out_is_x else torch.empty_like(x)
    result = conv1d.causal_conv1d_decode(
        given, weight, pool, ds.ids(0, 1, 2), ds.ids(0, 1, 2), ds.ids(5, 6, 7), bias=bias, out=out
    )
    assert result is out
    assert torch.equal(out, expected)
    assert torch.equal(given, original) != out_is_x
    live = conv1d.live_window(pool, ds.ids(0, 1, 2), ds.ids(6, 7, 8))
    assert torch.equal(live[:, -1], original), "the window keeps raw inputs, not outputs"


def test_A4_pad_rows_are_zero_and_live_rows_do_not_depend_on_them():
    weight, bias = parameters()
    x = tokens(8)
    x[3:] = math.nan
    initial = tokens(20, 4).view(5, 4, C)
    out = torch.full((8, C), math.nan, dtype=torch.bfloat16)
    pool, small_pool = initial.clone(), initial.clone()
    rows = ds.ids(4, 0, 2, -1, -1, 5, 1000000, -7)
    for step in range(2):
        positions = ds.ids(*[3 + step] * 8)
        conv1d.causal_conv1d_decode(x, weight, pool, rows, rows, positions, bias=bias, out=out)
        small = conv1d.causal_conv1d_decode(x[:3], weight, small_pool, rows[:3], rows[:3], positions[:3], bias=bias)
        assert torch.equal(out[:3], small)
        assert bool((out[3:] == 0).all())
    assert torch.equal(pool, small_pool)
    assert torch.equal(pool[[1, 3]], initial[[1, 3]])


def test_decode_in_place_writes_one_column_and_elsewhere_all_live_ones():
    weight, _ = parameters()
    pool = ds.make_pool(3, (4, C), torch.bfloat16, fill=0.25)
    pool[2] = math.nan
    before = pool.clone()
    x = tokens(2)
    conv1d.causal_conv1d_decode(x, weight, pool, ds.ids(0, 1), ds.ids(0, 2), ds.ids(6, 6))
    changed = (pool[0] != before[0]).any(1)
    assert changed.tolist() == [False, False, True, False]
    assert torch.equal(pool[1], before[1])
    assert not bool(pool[2].isnan().any())


def test_checkpoints_are_the_windows_after_that_many_tokens():
    weight, _ = parameters()
    x, position = tokens(12), 5
    pool = ds.make_pool(12, (4, C), torch.bfloat16)
    pool[0] = ring(*tokens(3, 9), start=2)
    entries = [(1, 2), (2, 3), (3, 4), (4, 5), (7, 6), (0, 9), (8, 9), (3, -1), (3, 12)]
    checkpoints = Checkpoints.from_lists([entries, [(5, 7)]])
    conv1d.causal_conv1d_prefill(
        x, weight, pool, ds.ids(0, -1), ds.ids(1, 8), ds.ids(position, 0), ds.cu_seqlens([7, 5]),
        checkpoints=checkpoints,
    )  # fmt: skip
    history = torch.cat([tokens(3, 9), x[:7]])
    for end, slot in entries[:5]:
        live = conv1d.live_window(pool, ds.ids(slot), ds.ids(position + end))[0]
        assert torch.equal(live, history[end : end + 3])
    assert torch.equal(conv1d.live_window(pool, ds.ids(7), ds.ids(5))[0], x[9:12])
    assert bool(pool[9].isnan().all())
    assert torch.equal(pool[6], pool[1])


@pytest.mark.parametrize("accepted", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("position", [3, 6, 9])
@pytest.mark.parametrize("in_place", [True, False])
def test_F1_verify_then_replay_equals_never_having_speculated(accepted, position, in_place):
    """A verify of 4 drafts, n of them accepted, followed by another verify; the window and outputs are the cold run's."""
    weight, bias = parameters()
    past, drafts, later = tokens(position, 1), tokens(4, 2), tokens(3, 3)
    log = DraftLog.allocate("gdn", 1, 1, 1, C, head_dim_k=8, head_dim_v=8)
    log.x.fill_(math.nan)
    pool = ds.make_pool(3, (4, C), torch.bfloat16)
    pool[0] = ring(*past[-3:], start=position - 3)
    before = pool[0].clone()
    target = ds.ids(0 if in_place else 1)
    out = conv1d.causal_conv1d_verify(
        drafts, weight, pool, ds.ids(0), target, ds.ids(position), ds.cu_seqlens([4]), log, ds.ids(0), bias=bias
    )
    cold = plain_conv(drafts, weight, bias, past[-3:])
    assert metrics.ulp_distance(out, cold) <= 1
    log.half ^= 1
    out = conv1d.causal_conv1d_verify(
        later, weight, pool, target, target, ds.ids(position), ds.cu_seqlens([3]), log, ds.ids(accepted), bias=bias
    )
    history = torch.cat([past, drafts[:accepted]])
    cold = conv1d.causal_conv1d_prefill(
        torch.cat([history, later]), weight, ds.make_pool(1, (4, C), torch.bfloat16), ds.ids(-1), ds.ids(0),
        ds.ids(0), ds.cu_seqlens([position + accepted + 3]), bias=bias,
    )  # fmt: skip
    assert torch.equal(out, cold[position + accepted :])
    live = conv1d.live_window(pool, target, ds.ids(position + accepted))[0]
    assert torch.equal(live, history[-3:])
    if not in_place:
        assert torch.equal(pool[0].nan_to_num(7.0), before.nan_to_num(7.0))
    assert bool(pool[2].isnan().all())
    log.half ^= 1
    conv1d.causal_conv1d_commit(pool, target, ds.ids(2), ds.ids(position + accepted), log, ds.ids(2))
    live = conv1d.live_window(pool, ds.ids(2), ds.ids(position + accepted + 2))[0]
    assert torch.equal(live, torch.cat([history, later[:2]])[-3:])


def test_verify_needs_logged_inputs():
    weight, _ = parameters()
    log = DraftLog.allocate("gdn", 1, 1, 1, None, head_dim_k=8, head_dim_v=8)
    pool = ds.make_pool(1, (4, C), torch.bfloat16)
    with pytest.raises(InvalidArgumentError, match="draft_log"):
        conv1d.causal_conv1d_verify(
            tokens(1), weight, pool, ds.ids(0), ds.ids(0), ds.ids(0), ds.cu_seqlens([1]), log, ds.ids(0)
        )
