"""Token-by-token prefill on the GPU: float64 recurrence, equality with single steps, checkpoints, ids, packing."""

from __future__ import annotations

import math

import pytest
import torch

from compact_state.cute_kernels import Checkpoints, gdn_decode, kda_decode, reference, verify_launch
from compact_state.cute_kernels.reference.datasets import (
    DATASETS,
    RAGGED_LENGTHS,
    cu_seqlens,
    delta_inputs,
    initial_states,
    make_pool,
)
from compact_state.cute_kernels.reference.datasets import ids as make_ids
from compact_state.cute_kernels.reference.metrics import assert_close, tolerance

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
KINDS = (("gdn", None), ("kda", None), ("kda", -5.0))
DTYPES = (torch.float32, torch.bfloat16)
DECODE = {"gdn": gdn_decode, "kda": kda_decode}


def ids(*values):
    return make_ids(*values, device=DEVICE)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def same(a, b):
    return torch.equal(bits(a), bits(b))


def inputs(kind, bound, tokens, hk, hv, dataset="randn", seed=0):
    return delta_inputs(kind, dataset, tokens, hk, hv, lower_bound=bound, device=DEVICE, seed=seed)


def states(count, hv, dtype, dataset="randn"):
    pool = make_pool(count, (hv, 128, 128), dtype, device=DEVICE)
    pool.copy_(initial_states(count, hv, dataset=dataset))
    return pool


def prefill(x, pool, read, write, cu, **options):
    name = "gdn" if x.kind == "gdn" else "kda_softplus" if x.lower_bound is None else "kda_bounded"
    out = torch.full(x.v.shape, math.nan, dtype=x.v.dtype, device=DEVICE)
    verify_launch.launch_recurrent_prefill(
        name, *x.tensors, pool, read, write, cu, out, lower_bound=x.lower_bound, **options
    )
    return out


@pytest.mark.parametrize("dataset", DATASETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "bound"), KINDS)
def test_ragged_lengths_and_checkpoints_follow_the_float64_recurrence(kind, bound, dtype, dataset):
    hk, hv, n, tokens = 1, 3, len(RAGGED_LENGTHS), sum(RAGGED_LENGTHS)
    x = inputs(kind, bound, tokens + 5, hk, hv, dataset)
    pool = states(5 * n, hv, dtype, dataset)
    entries = [
        [(end, 2 * n + 3 * row + i) for i, end in enumerate(sorted({1, max(1, length // 2), length}))]
        for row, length in enumerate(RAGGED_LENGTHS)
    ]
    entries[1] = [
        (0, 2 * n),
        (1, 2 * n + 3),
        (64, 2 * n + 4),
        (66, 2 * n + 5),
    ]  # 0 and 66 are no states of this sequence
    entries[4] = [(5, -1), (8, 2 * n + 12), (16, 999)]
    checkpoints = Checkpoints.from_lists(entries, DEVICE)
    read = ids(*[row if row % 3 else -1 for row in range(n)])
    write = ids(*[row if row % 2 else n + row for row in range(n)])
    oracle = pool.double() if dtype == torch.float32 else pool.clone()
    cu = cu_seqlens(RAGGED_LENGTHS, DEVICE)
    before = pool.clone()
    out = prefill(x, pool, read, write, cu, checkpoints=checkpoints)
    expected = torch.empty(x.v.shape, dtype=torch.float64, device=DEVICE)
    operator = reference.gdn_prefill if kind == "gdn" else reference.kda_prefill
    operator(
        *x.tensors, oracle, read, write, cu, checkpoints=checkpoints, out=expected, compute_dtype=torch.float64,
        **x.gate_options,
    )  # fmt: skip
    assert_close(out, expected, tolerance("decode", dataset, "output", dtype), "out")
    assert_close(pool, oracle, tolerance("decode", dataset, "state", dtype), "pool")
    untouched = [slot for slot in range(5 * n) if same(oracle[slot].to(dtype), before[slot])]
    assert all(same(pool[slot], before[slot]) for slot in untouched)
    assert bool((out[tokens:] == 0).all())


@pytest.mark.parametrize(("kind", "bound"), KINDS)
def test_E3_equals_single_steps_bit_for_bit(kind, bound):
    hk, hv, tokens = 2, 4, 21
    x, start = inputs(kind, bound, 2 * tokens, hk, hv, "trained"), states(2, hv, torch.float32)
    stepped, slots, expected = start.clone(), ids(0, 1), torch.empty(x.v.shape, dtype=x.v.dtype, device=DEVICE)
    for t in range(tokens):
        at = torch.tensor([t, tokens + t], device=DEVICE)
        expected[at] = DECODE[kind](*x.rows(at).tensors, stepped, slots, slots, **x.gate_options, backend="kernels")
    pool = start.clone()
    out = prefill(x, pool, slots, slots, ids(0, tokens, 2 * tokens))
    assert same(out, expected)
    assert same(pool, stepped)


@pytest.mark.parametrize("cut", [1, 7, 8, 9, 64])
def test_pieces_and_checkpoints_equal_the_whole(cut):
    x, start = inputs("kda", None, 65, 2, 2), states(4, 2, torch.float32)
    whole, pieces = start.clone(), start.clone()
    checkpoints = Checkpoints.from_lists([[(cut, 3)]], DEVICE)
    expected = prefill(x, whole, ids(0), ids(1), ids(0, 65), checkpoints=checkpoints)
    out = [
        prefill(x.rows(slice(0, cut)), pieces, ids(0), ids(2), ids(0, cut)),
        prefill(x.rows(slice(cut, 65)), pieces, ids(2), ids(2), ids(0, 65 - cut)),
    ]
    assert same(torch.cat(out), expected)
    assert same(pieces[2], whole[1])
    assert same(pieces[0], start[0])
    halfway = start.clone()
    prefill(x.rows(slice(0, cut)), halfway, ids(0), ids(2), ids(0, cut))
    assert same(whole[3], halfway[2])


@pytest.mark.parametrize("bounds", [(0, 16), (17, None), (0, 0), (1, 1)])
@pytest.mark.parametrize(("kind", "bound"), KINDS)
def test_sequences_outside_the_length_bounds_are_left_alone(kind, bound, bounds):
    """What is left alone may be nonsense: its ids, tokens and checkpoints are not looked at."""
    hk, hv, n, tokens = 1, 2, len(RAGGED_LENGTHS), sum(RAGGED_LENGTHS)
    low, high = bounds[0], math.inf if bounds[1] is None else bounds[1]
    x, start = inputs(kind, bound, tokens + 5, hk, hv), states(2 * n + 1, hv, torch.float32)
    cu, rows = cu_seqlens(RAGGED_LENGTHS, DEVICE), torch.arange(n, dtype=torch.int32, device=DEVICE)
    checkpoints = Checkpoints.from_lists([[(1, 2 * n)] if row == 2 else [] for row in range(n)], DEVICE)
    whole, pool = start.clone(), start.clone()
    expected = prefill(x, whole, rows, rows + n, cu, checkpoints=checkpoints)
    first, inside = 0, []
    for row, length in enumerate(RAGGED_LENGTHS):
        inside.append(low <= length <= high)
        if not inside[row]:
            x.v[first : first + length] = math.nan
        first += length
    out = prefill(x, pool, rows, rows + n, cu, checkpoints=checkpoints, min_tokens=bounds[0], max_tokens=bounds[1])
    first = 0
    for row, length in enumerate(RAGGED_LENGTHS):
        piece, slot = slice(first, first + length), n + row
        if inside[row]:
            assert same(out[piece], expected[piece])
        else:
            assert bool(out[piece].isnan().all())
        assert same(pool[slot], whole[slot] if inside[row] else start[slot])
        first += length
    assert same(pool[2 * n], whole[2 * n] if inside[2] else start[2 * n])
    assert bool((out[tokens:] == 0).all())


@pytest.mark.parametrize("poison", [1e4, math.nan])
@pytest.mark.parametrize("lengths", [(65, 64), (1, 63), (127, 1)])
def test_E8_a_neighbour_in_the_pack_changes_nothing(lengths, poison):
    x, start = inputs("gdn", None, sum(lengths), 1, 2), states(2, 2, torch.float32)
    alone = prefill(x.rows(slice(0, lengths[0])), start.clone(), ids(0), ids(0), ids(0, lengths[0]))
    for part in (x.q, x.k, x.v):
        part[lengths[0] :] = poison
    out = prefill(x, start.clone(), ids(0, 1), ids(0, 1), cu_seqlens(lengths, DEVICE))
    assert same(out[: lengths[0]], alone)


def test_E12_sequences_without_tokens_copy_their_state():
    x, pool = inputs("gdn", None, 3, 1, 4), states(4, 4, torch.float32)
    before = pool.clone()
    out = prefill(x, pool, ids(0, -1), ids(2, 3), ids(0, 0, 0))
    assert bool((out == 0).all())
    assert same(pool[2], before[0])
    assert bool((pool[3] == 0).all())
    assert same(pool[:2], before[:2])


def test_B6_more_than_65535_blocks():
    n, hv = 2050, 32
    x, pool = inputs("gdn", None, n, 16, hv), torch.zeros(1, hv, 128, 128, device=DEVICE)
    none = torch.full((n,), -1, dtype=torch.int32, device=DEVICE)
    cu = torch.arange(n + 1, dtype=torch.int32, device=DEVICE)
    out = prefill(x, pool, none, none, cu)
    halves = [
        prefill(x.rows(slice(first, first + 1025)), pool, none[:1025], none[:1025], cu[:1026]) for first in (0, 1025)
    ]
    assert same(out, torch.cat(halves))
