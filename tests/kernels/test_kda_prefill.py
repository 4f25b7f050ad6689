"""KDA prefill on the GPU against the float64 recurrence, through the public operator and through its chunked kernels alone."""

from __future__ import annotations

import math

import pytest
import torch
from prefill_case import (
    DTYPES,
    bits,
    check_equal_repeats,
    check_graph_replay,
    check_inputs,
    check_longer_token_buffer,
    check_neighbours,
    check_pieces,
    check_sequences_without_tokens,
    check_slots_full_of_nan,
    check_thousands_of_sequences,
    filled_pool,
)

from compact_state.cute_kernels import Checkpoints, kda_decode, kda_launch, kda_prefill
from compact_state.cute_kernels.reference.datasets import (
    DATASETS,
    RAGGED_LENGTHS,
    cu_seqlens,
    delta_inputs,
    ids,
    make_pool,
)
from compact_state.cute_kernels.reference.metrics import assert_close

pytestmark = pytest.mark.gpu

LENGTHS = (0, 1, 2, 3, 15, 16, 17, 31, 63, 64, 65, 127, 130, 1000)
BOUNDS = (None, -2.0, -3.0, -5.0, -5.9)
PATHS = ("public", "chunked")


def public(*arguments, out=None, **options):
    return kda_prefill(*arguments, out=out, backend="kernels", **options)


def chunked(q, k, v, *arguments, out=None, checkpoints=None, scale=None, qk_l2norm=True, lower_bound=None):
    """The chunked kernels whatever the lengths are."""
    out = torch.empty_like(v, memory_format=torch.contiguous_format) if out is None else out
    kda_launch.launch_chunked(
        q, k, v, *arguments, out, checkpoints=checkpoints, scale=scale, qk_l2norm=qk_l2norm, lower_bound=lower_bound
    )
    return out


RUN = {"public": public, "chunked": chunked}


def check(lengths, hk=2, hv=4, dataset="randn", lower_bound=None, path="chunked", **options):
    total = sum(lengths)
    inputs = delta_inputs("kda", dataset, total, hk, hv, lower_bound=lower_bound, device="cuda", seed=total + hv)
    check_inputs(RUN[path], inputs, lengths, dataset, **options)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_lengths(length, dtype, path):
    check([length], dtype=dtype, path=path)


@pytest.mark.parametrize("lower_bound", BOUNDS)
@pytest.mark.parametrize("dataset", DATASETS)
def test_E10_datasets_and_bounds(dataset, lower_bound):
    check([500, 200], dataset=dataset, lower_bound=lower_bound)


@pytest.mark.parametrize("dataset", DATASETS)
def test_datasets_in_a_bf16_pool(dataset):
    check([500, 200], dataset=dataset, dtype=torch.bfloat16)


@pytest.mark.parametrize("decay", [-8.0, -5.0, -4.0, -2.0, -1.0, -0.1, 0.0])
@pytest.mark.parametrize("dataset", ["randn", "trained"])
def test_E10_constant_decay(decay, dataset):
    """Every channel of every token decays by exp(`decay`), correlated keys included."""
    inputs = delta_inputs("kda", dataset, 400, 2, 4, device="cuda", packed=False)
    inputs.A_log.zero_()
    inputs.dt_bias.zero_()
    inputs.gate.fill_(math.log(math.expm1(-decay)) if decay else -1000.0)
    check_inputs(chunked, inputs, [400], dataset)


@pytest.mark.parametrize("tokens", [64, 300])
def test_E1_spikes_and_steep_gates_without_a_bound(tokens):
    """One channel drops by e^-2661 at token 10, all channels by e^-6 a token, or half by nothing and half by e^-50."""
    inputs = delta_inputs("kda", "zero", tokens, 2, 4, device="cuda", packed=False)
    quiet = math.log(math.expm1(0.01))
    for raw in (quiet, 6.0, -1000.0):
        inputs.gate.fill_(raw)
        if raw == quiet:
            inputs.gate[10, :, 3] = 2661.0
        if raw == -1000.0:
            inputs.gate[..., ::2] = 50.0
        check_inputs(chunked, inputs, [tokens], "zero")


def test_E3_the_same_first_tokens_through_every_form():
    """64 tokens alone (half a head a block) and at the head of 4,096 tokens with 32 heads: the same bits."""
    long = delta_inputs("kda", "trained", 4096, 32, 32, device="cuda", packed=False)
    none = ids(-1, device="cuda")
    pool = make_pool(1, (32, 128, 128), device="cuda")
    whole = chunked(*long.tensors, pool, none, none, cu_seqlens([4096], device="cuda"))
    part = long.rows(slice(0, 64))
    for head in (0, 31):
        one = [x[:, head : head + 1] for x in part.tensors[:5]]
        bias = long.dt_bias.view(32, 128)[head : head + 1].contiguous()
        alone = chunked(
            *one, long.A_log[head : head + 1], bias, pool[:, :1], none, none, cu_seqlens([64], device="cuda")
        )
        assert torch.equal(bits(alone[:, 0]), bits(whole[:64, head]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slabs", [1, 2])
def test_both_block_forms(slabs, dtype, monkeypatch):
    monkeypatch.setattr(kda_launch, "slabs_per_block", lambda *_, **__: slabs)
    check(RAGGED_LENGTHS, dtype=dtype, dataset="trained")
    check([300, 128, 40], dtype=dtype, kept=[[1, 50, 64, 300], [128], []])


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize(("hk", "hv"), [(1, 1), (1, 6), (3, 3), (2, 8), (16, 16), (32, 32), (64, 64), (256, 1024)])
def test_C4_head_geometries(hk, hv, lower_bound):
    check([130, 70, 1], hk=hk, hv=hv, lower_bound=lower_bound)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ragged_lengths(dtype, path):
    check(RAGGED_LENGTHS, dtype=dtype, path=path)


def test_B6_thousands_of_short_sequences():
    check_thousands_of_sequences(chunked, "kda", [1 + i % 5 for i in range(2050)], 4, 4)


def test_heads_in_several_launches(monkeypatch):
    """A workspace too small for all heads: they go in groups and give the same bits."""
    inputs = delta_inputs("kda", "trained", 300, 6, 6, device="cuda")
    read, write, cu = ids(0, device="cuda"), ids(1, device="cuda"), cu_seqlens([300], device="cuda")
    pool = filled_pool(2, 6, torch.float32, "trained", (0,))
    out = chunked(*inputs.tensors, pool, read, write, cu)
    expected = pool.clone()
    monkeypatch.setattr(kda_launch, "heads_per_launch", lambda slots, heads: 4)
    grouped = chunked(*inputs.tensors, pool, read, write, cu)
    assert torch.equal(bits(grouped), bits(out))
    assert torch.equal(bits(pool[1]), bits(expected[1]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [1, 2, 3, 7])
def test_chunks_in_several_launches(window, dtype, monkeypatch):
    """A workspace too small for all chunks: rows go on from launch to launch with their states in fp32, and keep their bits."""
    lengths = [300, 0, 17, 129, 1, 640]
    inputs = delta_inputs("kda", "trained", sum(lengths), 2, 2, device="cuda")
    n, cu = len(lengths), cu_seqlens(lengths, device="cuda")
    read = torch.arange(n, dtype=torch.int32, device="cuda")
    ends, first = [[100, 256], [], [17], [64], [], [64, 65, 600, 640]], 2 * n
    entries = [[(end, first + 4 * row + i) for i, end in enumerate(kept)] for row, kept in enumerate(ends)]
    plan = Checkpoints.from_lists(entries, device="cuda")
    start = filled_pool(first + 4 * n, 2, dtype, "trained", range(n))
    results = []
    for slots in (None, window):
        if slots is not None:
            monkeypatch.setattr(kda_launch, "slots_per_launch", lambda slots, heads: window)
        pool = start.clone()
        results.append((chunked(*inputs.tensors, pool, read, read + n, cu, checkpoints=plan), pool))
    assert torch.equal(bits(results[1][0]), bits(results[0][0]))
    assert torch.equal(bits(results[1][1]), bits(results[0][1]))


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_8192_tokens(lower_bound):
    check([8192], hk=2, hv=2, dataset="trained", lower_bound=lower_bound)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_checkpoints_on_and_off_the_grid(dtype, path):
    kept = [[1, 50, 64, 190, 192, 300], [64, 100, 128], [], [5]]
    check([300, 128, 40, 5], dtype=dtype, dataset="trained", kept=kept, path=path)


def test_a_checkpoint_equals_the_end_state_of_a_call_of_its_length():
    inputs = delta_inputs("kda", "trained", 300, 2, 4, device="cuda")
    pool = filled_pool(4, 4, torch.float32, "trained", (0,))
    read = ids(0, device="cuda")
    plan = Checkpoints.from_lists([[(101, 2)]], device="cuda")
    out = chunked(
        *inputs.tensors, pool, read, ids(1, device="cuda"), cu_seqlens([300], device="cuda"), checkpoints=plan
    )
    part = inputs.rows(slice(0, 101))
    short = chunked(*part.tensors, pool, read, ids(3, device="cuda"), cu_seqlens([101], device="cuda"))
    assert torch.equal(bits(short), bits(out[:101]))
    assert torch.equal(bits(pool[3]), bits(pool[2]))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 3, 70])
def test_A3_ids_out_of_range(length, dtype, path):
    read = ids(0, -1, 4, 1_000_000, -(2**31), device="cuda")
    write = ids(0, -1, 2, 3, -1, device="cuda")
    check([length] * 5, dtype=dtype, path=path, read=read, write=write)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hv", [1, 4])
def test_E12_sequences_without_tokens(hv, dtype, path):
    check_sequences_without_tokens(RUN[path], "kda", hv, dtype)


@pytest.mark.parametrize("path", PATHS)
def test_E15_a_token_buffer_longer_than_the_sequences(path):
    check_longer_token_buffer(RUN[path], "kda")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("length", [17, 300, 640])
def test_one_row_shorter_than_its_buffer(length, path):
    """A call's only row, whose chunks need no search, ends before the tokens do: chunks behind it are none."""
    inputs = delta_inputs("kda", "randn", 1000, 2, 4, device="cuda")
    read, write, cu = ids(0, device="cuda"), ids(1, device="cuda"), cu_seqlens([length], device="cuda")
    pool = filled_pool(2, 4, torch.float32, "randn", range(1))
    exact = pool.clone()
    out = RUN[path](*inputs.tensors, pool, read, write, cu)
    alone = RUN[path](*inputs.rows(slice(0, length)).tensors, exact, read, write, cu)
    assert torch.equal(bits(out[:length]), bits(alone))
    assert torch.equal(bits(pool), bits(exact))


@pytest.mark.parametrize("lengths", [[65, 64], [1, 63], [127, 1], [70, 130, 5]])
@pytest.mark.parametrize("value", [1e4, math.nan, math.inf])
def test_E8_neighbours_change_no_bit(lengths, value):
    check_neighbours(chunked, "kda", lengths, value)


@pytest.mark.parametrize("tokens", [64, 200, 1000])
@pytest.mark.parametrize("logit", [-3.0, -0.9, 0.9, 2.2, 3.0, math.log(0.99 / 0.01), 5.3, 8.5, 12.0])
def test_E7_equal_keys(tokens, logit):
    """All keys equal, no decay, beta up to 1: the triangular system at its worst still matches the recurrence."""
    inputs = delta_inputs("kda", "zero", tokens, 1, 2, device="cuda", packed=False)
    inputs.k[:] = inputs.k[:1]
    inputs.b[:] = logit
    check_inputs(chunked, inputs, [tokens], "correlated")


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("tokens", [64, 1000, 2048, 4096])
def test_E7_near_equal_keys_over_many_chunks(tokens, lower_bound):
    check([tokens], hk=1, hv=2, dataset="correlated", lower_bound=lower_bound)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("cut", [1, 15, 40, 64, 65, 100, 128, 191])
def test_causality_a_changed_suffix_changes_no_earlier_bit(cut, lower_bound):
    inputs = delta_inputs("kda", "trained", 200, 2, 4, lower_bound=lower_bound, device="cuda")
    read, write, cu = ids(0, device="cuda"), ids(1, device="cuda"), cu_seqlens([200], device="cuda")
    pool = filled_pool(2, 4, torch.float32, "trained", (0,))
    out = chunked(*inputs.tensors, pool, read, write, cu, lower_bound=lower_bound)
    other = delta_inputs("kda", "randn", 200, 2, 4, device="cuda")
    changed = [x.clone() for x in inputs.tensors[:5]]
    for tensor, source in zip(changed, other.tensors):
        tensor[cut:] = source[cut:]
    later = chunked(*changed, *inputs.tensors[5:], pool, read, write, cu, lower_bound=lower_bound)
    assert torch.equal(bits(out[:cut]), bits(later[:cut]))
    assert not torch.equal(out[cut:], later[cut:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_do_not_depend_on_batch_slots_or_place(dtype):
    """Bitwise: alone, among others, in place and copy-on-write."""
    lengths, hv = (130, 5, 64, 1, 200, 17), 4
    n = len(lengths)
    inputs = delta_inputs("kda", "trained", sum(lengths), 2, hv, device="cuda")
    cu = cu_seqlens(lengths, device="cuda")
    read = torch.arange(n, dtype=torch.int32, device="cuda")
    start = filled_pool(2 * n, hv, dtype, "trained", range(n))
    pool, in_place = start.clone(), start.clone()
    out = chunked(*inputs.tensors, pool, read, read + n, cu)
    again = chunked(*inputs.tensors, in_place, read, read, cu)
    assert torch.equal(bits(out), bits(again))
    assert torch.equal(bits(pool[n:]), bits(in_place[:n]))
    for row in range(n):
        begin, end = int(cu[row]), int(cu[row + 1])
        alone, target = start.clone(), 2 * n - 1
        part = inputs.rows(slice(begin, end))
        bounds = cu_seqlens([end - begin], device="cuda")
        one = chunked(*part.tensors, alone, ids(row, device="cuda"), ids(target, device="cuda"), bounds)
        assert torch.equal(bits(one), bits(out[begin:end]))
        assert torch.equal(bits(alone[target]), bits(pool[n + row]))


@pytest.mark.parametrize("lower_bound", [-2.0, -5.0])
def test_softplus_and_bounded_kernels_agree_on_equal_decays(lower_bound):
    """The same decays written as a bounded and as an unbounded gate, whose raw values are kept in bf16: within tolerance."""
    inputs = delta_inputs("kda", "trained", 300, 2, 4, lower_bound=lower_bound, device="cuda", packed=False)
    inputs.A_log.zero_()
    inputs.dt_bias.zero_()
    inputs.gate.fill_(0.0)  # g = L / 2
    pool = filled_pool(3, 4, torch.float32, "trained", (0,))
    read, cu = ids(0, device="cuda"), cu_seqlens([300], device="cuda")
    bounded = chunked(*inputs.tensors, pool, read, ids(1, device="cuda"), cu, lower_bound=lower_bound)
    inputs.A_log.fill_(math.log(-lower_bound / 2 / math.log(2.0)))  # g = -e^A log 2
    general = chunked(*inputs.tensors, pool, read, ids(2, device="cuda"), cu)
    assert_close(general, bounded.double(), 0.001, "out")
    assert_close(pool[2], pool[1].double(), 0.001, "state")


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("cut", [1, 15, 63, 64, 100, 128, 299])
def test_split_at_any_point_equals_unsplit_within_tolerance(cut, lower_bound):
    check_pieces(public, "kda", 300, [cut], lower_bound)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("first", [1, 2])
def test_G1_slots_full_of_nan_equal_the_cold_run(first, lower_bound, path):
    check_slots_full_of_nan(RUN[path], "kda", first, lower_bound)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_prefill_equals_decode_steps(lower_bound):
    def step(*arguments, **options):
        return kda_decode(*arguments[:-1], backend="kernels", **options)

    check_pieces(public, "kda", 100, range(1, 100), lower_bound, rest=step)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_D4_equal_repeats(dtype, path):
    check_equal_repeats(RUN[path], "kda", 16, 16, dtype)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("lengths", [[1500], [64] * 40, [300, 0, 700, 5]], ids=str)
def test_a_call_waits_for_the_one_before(lengths, path):
    """Launches start while those before them end: each call's values are outputs of the one before, its states are left by it.

    The bits of calls between which the device is idle, and of replays of a graph that holds all of them.
    """
    inputs = delta_inputs("kda", "trained", sum(lengths), 8, 8, device="cuda")
    q, k, v, *rest = inputs.tensors
    cu, rows = cu_seqlens(lengths, device="cuda"), torch.arange(len(lengths), dtype=torch.int32, device="cuda")
    start = filled_pool(len(lengths), 8, torch.float32, "trained", range(len(lengths)))
    pool, buffers = start.clone(), [v.clone(), torch.empty_like(v)]

    def calls(pause):
        pool.copy_(start)
        buffers[0].copy_(v)
        for i in range(12):
            RUN[path](q, k, buffers[i % 2], *rest, pool, rows, rows, cu, out=buffers[1 - i % 2])
            if pause:
                torch.cuda.synchronize()

    calls(pause=True)
    expected = [x.clone() for x in (buffers[0], pool)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls(pause=False)
    for again in (lambda: calls(pause=False), graph.replay):
        for _ in range(10):
            again()
            for x, y in zip((buffers[0], pool), expected, strict=True):
                assert torch.equal(bits(x), bits(y))


def test_graph_replay_follows_changed_ids_and_lengths():
    check_graph_replay(chunked, "kda")


@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("l2norm", [True, False])
def test_scale_and_l2norm_options(scale, l2norm):
    inputs = delta_inputs("kda", "randn", 200, 2, 4, device="cuda")
    if not l2norm:
        inputs.k.mul_(0.05)
    check_inputs(chunked, inputs, [130, 70], "randn", scale=scale, qk_l2norm=l2norm)
