"""KDA prefill whose recurrence runs beside the launch of its records: the bits of one launch after the other."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from prefill_case import DTYPES, bits, check_inputs, check_longer_token_buffer, filled_pool

from compact_state.cute_kernels import Checkpoints, kda_launch
from compact_state.cute_kernels.configs.kda_prefill import MULTIPROCESSORS, Overlap
from compact_state.cute_kernels.reference.datasets import cu_seqlens, delta_inputs, ids

pytestmark = pytest.mark.gpu

HEADS = 4
LONG = 256  # rows of so many tokens or more run in parts where a test says so
# Blocks that stay, rounds of all workers, blocks that are early: the chip shared from the start, few workers with many items, …
DEALT = ((MULTIPROCESSORS - 16, 0, 8), (4, 0, 3), (MULTIPROCESSORS - 32, 1, 0), (2, 2, 100))
COLUMNS = (16, 32, 64, 128)  # V columns of a block
LENGTHS = ([64], [1], [2048], [300, 17, 1000], [0, 130, 0, 64, 0], [640] * 8, [3, 2, 1, 900], [70] * 32)


class Workspace:
    """torch as the launch sees it: what `empty` gives is full of ones, flags included, and is kept."""

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty(self, *shape, **options):
        tensor = torch.empty(*shape, **options)
        tensor.view(torch.uint8).fill_(1)
        return tensor


def prefill(
    q, k, v, *arguments, out=None, long=1 << 30, checkpoints=None, scale=None, qk_l2norm=True, lower_bound=None
):
    out = torch.full_like(v, math.nan, memory_format=torch.contiguous_format) if out is None else out
    options = {"checkpoints": checkpoints, "scale": scale, "qk_l2norm": qk_l2norm, "lower_bound": lower_bound}
    kda_launch.launch_chunked(q, k, v, *arguments, out, **options, long_length=long)
    return out


def in_parts(*arguments, **options):
    return prefill(*arguments, long=LONG, **options)


def whole_rows(plan):
    """The choice of this form; where transitions run beside the records, with half a head a block at least."""

    def overlap(slots, heads, chains, steps, transition, *_):
        return replace(plan, columns=max(64, plan.columns)) if plan and transition else plan

    return overlap


def choose(monkeypatch, plan):
    """Make every launch take this form, None for one launch after the other."""
    monkeypatch.setattr(kda_launch, "overlap", whole_rows(plan))
    monkeypatch.setattr(kda_launch, "torch", Workspace())


def compare(
    monkeypatch, plan, run, lengths, hv=HEADS, dtype=torch.float32, kept=None, read=None, write=None, bound=None
):
    """Outputs, states and kept states of both forms are equal bit for bit, over two calls each."""
    n = len(lengths)
    inputs = delta_inputs(
        "kda", "trained", sum(lengths), hv // 2, hv, lower_bound=bound, device="cuda", seed=sum(lengths)
    )
    cu = cu_seqlens(lengths, device="cuda")
    read = torch.arange(n, dtype=torch.int32, device="cuda") if read is None else read
    write = read + n if write is None else write
    entries = sum(map(len, kept)) if kept else 0
    free = iter(range(2 * n, 2 * n + entries))
    checkpoints = None
    if kept:
        checkpoints = Checkpoints.from_lists([[(end, next(free)) for end in ends] for ends in kept], device="cuda")
    start = filled_pool(2 * n + entries, hv, dtype, "trained", range(n))
    results = []
    for form in (None, plan, plan):
        choose(monkeypatch, form)
        pool = start.clone()
        out = run(*inputs.tensors, pool, read, write, cu, checkpoints=checkpoints, **inputs.gate_options)
        results.append((out, pool))
    for out, pool in results[1:]:
        assert torch.equal(bits(out), bits(results[0][0]))
        assert torch.equal(bits(pool), bits(results[0][1]))


@pytest.mark.parametrize("dealt", DEALT)
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_lengths(lengths, columns, dealt, monkeypatch):
    compare(monkeypatch, Overlap(columns, *dealt), prefill, lengths)


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dealt", DEALT)
@pytest.mark.parametrize("columns", [16, 32, 64])
def test_checkpoints_on_and_off_the_grid(columns, dealt, dtype, bound, monkeypatch):
    kept = [[1, 50, 64, 190, 192, 300], [64, 100, 128], [], [5]]
    compare(monkeypatch, Overlap(columns, *dealt), prefill, [300, 128, 40, 5], dtype=dtype, kept=kept, bound=bound)


@pytest.mark.parametrize("dealt", DEALT)
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("parts", [2, 3, 5])
@pytest.mark.parametrize("lengths", [[1000], [300, 1000, 257], [100, 17, 300, 40, 1]], ids=str)
def test_rows_in_parts(lengths, parts, columns, dealt, monkeypatch):
    """Most rows long: beside the transitions. Most rows short: beside the recurrence of short rows, before the long ones."""
    monkeypatch.setattr(kda_launch, "parts_of_long_rows", lambda heads: parts)
    compare(monkeypatch, Overlap(columns, *dealt), in_parts, lengths, kept=[[64, 99]] + [[] for _ in lengths[1:]])


@pytest.mark.parametrize("columns", COLUMNS)
def test_A3_ids_out_of_range(columns, monkeypatch):
    read = ids(0, -1, 4, 1_000_000, -(2**31), device="cuda")
    write = ids(0, -1, 2, 3, -1, device="cuda")
    compare(monkeypatch, Overlap(columns, 92, 0), prefill, [70] * 5, read=read, write=write)


@pytest.mark.parametrize("window", [1, 3, 7])
@pytest.mark.parametrize("columns", COLUMNS)
def test_chunks_in_several_launches(columns, window, monkeypatch):
    monkeypatch.setattr(kda_launch, "slots_per_launch", lambda slots, heads: window)
    kept = [[100, 256], [], [17], [64], [], [64, 65, 600, 640]]
    compare(monkeypatch, Overlap(columns, 84, 1), prefill, [300, 0, 17, 129, 1, 640], kept=kept)


@pytest.mark.parametrize("columns", COLUMNS)
def test_heads_in_several_launches(columns, monkeypatch):
    monkeypatch.setattr(kda_launch, "heads_per_launch", lambda slots, heads: 4)
    compare(monkeypatch, Overlap(columns, 100, 0), prefill, [300, 70], hv=6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", COLUMNS)
def test_values(columns, dtype, monkeypatch):
    """Against the float64 recurrence, into outputs and slots of NaN."""
    choose(monkeypatch, Overlap(columns, 100, 0))
    inputs = delta_inputs("kda", "trained", 1500, 2, HEADS, device="cuda", seed=3)
    check_inputs(prefill, inputs, [1000, 0, 500], "trained", dtype=dtype, kept=[[512, 700], [], [1]])


@pytest.mark.parametrize("columns", COLUMNS)
def test_E15_a_token_buffer_longer_than_the_sequences(columns, monkeypatch):
    choose(monkeypatch, Overlap(columns, 100, 1))
    check_longer_token_buffer(prefill, "kda")


@pytest.mark.parametrize("lengths", [[2048], [512, 300, 512], [4096]], ids=str)
@pytest.mark.parametrize("poisoned", [False, True])
@pytest.mark.parametrize("columns", [16, 32, 64])
def test_graph_replays_find_stale_flags_and_records(columns, lengths, poisoned, monkeypatch):
    """150 replays over the same workspace with other inputs each: the outputs and states of eager calls in sequence."""
    monkeypatch.setattr(kda_launch, "parts_of_long_rows", lambda heads: 3)
    hv, n, long, plan = 8, len(lengths), 4096, Overlap(columns, 80, 0)
    sets = [delta_inputs("kda", "trained", sum(lengths), hv, hv, device="cuda", seed=seed) for seed in range(3)]
    cu, read = cu_seqlens(lengths, device="cuda"), torch.arange(n, dtype=torch.int32, device="cuda")
    start = filled_pool(2 * n, hv, torch.float32, "trained", range(n))
    monkeypatch.setattr(kda_launch, "overlap", lambda *_: None)
    expected = []
    for one in sets:
        pool = start.clone()
        expected.append((prefill(*one.tensors, pool, read, read + n, cu, long=long), pool))
    if poisoned:
        choose(monkeypatch, plan)
    else:
        monkeypatch.setattr(kda_launch, "overlap", whole_rows(plan))
    pool, live = start.clone(), [x.clone() for x in sets[0].tensors]
    out = torch.full_like(expected[0][0], math.nan)
    prefill(*live, pool, read, read + n, cu, out=out, long=long)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        for _ in range(2):  # the second call writes the workspace that the first one's recurrence reads
            prefill(*live, pool, read, read + n, cu, out=out, long=long)
    for turn in range(150):
        index = turn % len(sets)
        for target, source in zip(live, sets[index].tensors):
            target.copy_(source)
        out.fill_(math.nan)
        pool.copy_(start)
        graph.replay()
        assert torch.equal(bits(out), bits(expected[index][0]))
        assert torch.equal(bits(pool), bits(expected[index][1]))


@pytest.mark.parametrize("columns", COLUMNS)
def test_D4_equal_repeats(columns, monkeypatch):
    """1,000 calls over a workspace that the calls before left, with more blocks than multiprocessors: the same bits."""
    choose(monkeypatch, Overlap(columns, 80, 1))
    hv, lengths = 16, [700, 64, 1, 300, 130, 500, 90, 257]
    n = len(lengths)
    inputs = delta_inputs("kda", "trained", sum(lengths), hv, hv, device="cuda")
    pool = filled_pool(2 * n, hv, torch.float32, "trained", range(n))
    read, cu = torch.arange(n, dtype=torch.int32, device="cuda"), cu_seqlens(lengths, device="cuda")
    first, state = prefill(*inputs.tensors, pool, read, read + n, cu), pool.clone()
    for _ in range(1000):
        pool[n:].fill_(math.nan)
        assert torch.equal(bits(prefill(*inputs.tensors, pool, read, read + n, cu)), bits(first))
        assert torch.equal(bits(pool), bits(state))


def test_calls_on_two_streams_at_once(monkeypatch):
    """Each finds multiprocessors taken by the other's blocks, some of which wait for flags: both end, with their own bits."""
    hv, lengths = 16, [1500]
    cu = cu_seqlens(lengths, device="cuda")
    read, write, cases = ids(0, device="cuda"), ids(1, device="cuda"), []
    monkeypatch.setattr(kda_launch, "overlap", lambda *_: None)
    for seed in range(2):
        inputs = delta_inputs("kda", "trained", sum(lengths), hv, hv, device="cuda", seed=seed)
        pool = filled_pool(2, hv, torch.float32, "trained", (0,))
        expected = prefill(*inputs.tensors, pool, read, write, cu)
        cases.append((inputs, pool, expected, pool.clone(), torch.cuda.Stream()))
    choose(monkeypatch, Overlap(64, MULTIPROCESSORS - 2 * hv, 0))
    torch.cuda.synchronize()
    for _ in range(50):
        results = []
        for inputs, pool, _, _, stream in cases:
            with torch.cuda.stream(stream):
                results.append(prefill(*inputs.tensors, pool, read, write, cu))
        torch.cuda.synchronize()
        for (_, pool, expected, states, _), out in zip(cases, results):
            assert torch.equal(bits(out), bits(expected))
            assert torch.equal(bits(pool), bits(states))
