"""Verify and commit kernels on the GPU, their values: float64 recurrence, and equality with single steps bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from verify_case import (
    BACKEND,
    DEVICE,
    DTYPES,
    KINDS,
    PREFILL,
    REFERENCE,
    bits,
    commit,
    ids,
    inputs,
    make_log,
    of_same_layer,
    same,
    single_steps,
    states,
    verify,
)

from compact_state.cute_kernels import DraftLog, verify_launch
from compact_state.cute_kernels.configs.verify import SIZES, choose_verify
from compact_state.cute_kernels.reference.datasets import DATASETS, cu_seqlens
from compact_state.cute_kernels.reference.metrics import assert_close, tolerance

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dataset", DATASETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "bound"), KINDS)
def test_steps_follow_the_float64_recurrence(kind, bound, dtype, dataset):
    hk, hv, rows = 2, 6, 6
    pool = states(12, hv, dtype, dataset)
    oracle = pool.double() if dtype == torch.float32 else pool.clone()
    log, oracle_log = make_log(kind, rows, hk, hv), make_log(kind, rows, hk, hv, u_dtype=torch.float64)
    read, write = ids(0, 1, -1, 3, 4, 99), ids(0, 7, 8, -1, 9, -5)
    lengths, accepted = (8, 1, 6, 3, 0, 4), ids(0, 0, 0, 0, 0, 0)
    x = None
    for step in range(3):
        cu = cu_seqlens(lengths, DEVICE)
        fresh = inputs(kind, bound, sum(lengths) + 3, hk, hv, dataset, seed=step)
        x = fresh if x is None else of_same_layer(fresh, x)
        out = verify(x, pool, read, write, cu, log, accepted)
        expected = torch.empty(x.v.shape, dtype=torch.float64, device=DEVICE)
        REFERENCE[kind][0](
            *x.tensors, oracle, read, write, cu, oracle_log, accepted, out=expected, compute_dtype=torch.float64,
            **x.gate_options,
        )  # fmt: skip
        assert_close(out, expected, 2 * tolerance("verify", dataset, "output", dtype), f"out of step {step}")
        assert_close(pool, oracle, 2 * tolerance("verify", dataset, "state", dtype), f"pool after step {step}")
        for row in range(5):
            logged, n = 1 - step % 2, lengths[row]
            assert same(log.k[row, logged, :n], oracle_log.k[row, logged, :n])
            assert_close(log.g[row, logged, :n], oracle_log.g[row, logged, :n], 1e-5, f"gates of row {row}")
        assert bool(log.k[5].isnan().all()), "a row with neither id is not logged"
        log.half.bitwise_xor_(1)
        oracle_log.half.bitwise_xor_(1)
        accepted = ids(*[(3 * step + 2 * row + 1) % (n + 1) for row, n in enumerate(lengths)])
        lengths = tuple((n + 3 + 2 * row) % 9 for row, n in enumerate(lengths))
        read, write = (ids(0, 7, 8, 3, 9, 99), ids(0, 1, 8, 2, 9, -5)) if step == 0 else (write, write)


@pytest.mark.parametrize("rows", [1, 3, 150])
@pytest.mark.parametrize(("hk", "hv", "tokens"), [(2, 4, 6), (1, 4, 8), (1, 3, 2), (2, 4, 1)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "bound"), KINDS)
def test_verify_and_replay_equal_single_steps_bit_for_bit(kind, bound, dtype, hk, hv, tokens, rows):
    x = inputs(kind, bound, rows * tokens, hk, hv, "trained", seed=rows)
    slots = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    start = states(rows, hv, dtype)
    stepped = start.clone()
    expected = single_steps(x, stepped, slots, rows, tokens)
    pool, log = start.clone(), make_log(kind, rows, hk, hv)
    cu = torch.arange(rows + 1, dtype=torch.int32, device=DEVICE) * tokens
    none = torch.zeros_like(slots)
    out = verify(x, pool, slots, slots, cu, log, none, round_every_token=True)
    assert same(out, expected)
    assert same(pool, start), "new tokens are not in the stored state"
    log.half.bitwise_xor_(1)
    committed = pool.clone()
    commit(x, committed, slots, slots, log, none + tokens, round_every_token=True)
    assert same(committed, stepped)
    verify(x.rows(slice(0, rows)), pool, slots, slots, torch.arange(rows + 1, dtype=torch.int32, device=DEVICE), log,
           none + tokens, round_every_token=True)  # fmt: skip
    assert same(pool, stepped)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "bound"), KINDS)
def test_every_size_of_batch_gives_the_same_bits(kind, bound, dtype):
    hk, hv, rows, tokens = 2, 4, 5, 6
    name = {"gdn": "gdn", "kda": "kda_softplus" if bound is None else "kda_bounded"}[kind]
    x = inputs(kind, bound, rows * tokens, hk, hv)
    start, cu = states(rows, hv, dtype), torch.arange(rows + 1, dtype=torch.int32, device=DEVICE) * tokens
    slots, accepted = torch.arange(rows, dtype=torch.int32, device=DEVICE), ids(0, 6, 3, 1, 5)
    filled = make_log(kind, rows, hk, hv)
    verify(x, start.clone(), slots, slots, cu, filled, accepted * 0)
    filled.half.bitwise_xor_(1)
    first, state = None, str(dtype).removeprefix("torch.")
    keys = {choose_verify(name, state, heads) for heads in SIZES}
    assert len(keys) > 1
    for key in [*keys] * 50:
        log = DraftLog(filled.k.clone(), filled.u.clone(), filled.g.clone(), None, filled.half)
        pool, out = start.clone(), torch.full(x.v.shape, math.nan, dtype=x.v.dtype, device=DEVICE)
        verify_launch.launch_verify(
            name, *x.tensors, pool, slots, slots, cu, log, accepted, out, lower_bound=bound, key=key
        )
        found = (pool, out, log.u.nan_to_num())
        first = first or found
        assert all(same(x, y) for x, y in zip(found, first)), key


@pytest.mark.parametrize("accepted", [1, 2, 3, 4])
@pytest.mark.parametrize(("kind", "bound"), KINDS)
def test_F1_after_verify_everything_equals_never_having_speculated(kind, bound, accepted):
    hk, hv, drafts = 1, 2, 4
    start = states(2, hv, torch.float32)
    x = inputs(kind, bound, drafts, hk, hv)
    after = of_same_layer(inputs(kind, bound, 4, hk, hv, seed=9), x)
    slot, one = ids(0), ids(accepted)
    plain = start.clone()
    single_steps(x.rows(slice(0, accepted)), plain, slot, 1, accepted)
    verified, log = start.clone(), make_log(kind, 1, hk, hv)
    verify(x, verified, slot, slot, ids(0, drafts), log, ids(0))
    log.half.bitwise_xor_(1)
    committed = verified.clone()
    commit(x, committed, slot, slot, log, one)
    assert same(committed[0], plain[0])

    expected = single_steps(after, plain.clone(), slot, 1, 4)
    out = single_steps(after, committed.clone(), slot, 1, 4)
    assert same(out, expected)
    out = verify(after, verified.clone(), slot, slot, ids(0, 4), log, one)
    assert same(out, expected)
    piece = after.rows(slice(0, 2))
    pool = committed.clone()
    out = PREFILL[kind](*piece.tensors, pool, slot, slot, ids(0, 2), **x.gate_options, backend=BACKEND)
    assert_close(out, expected[:2], 0.004, "prefill after a verify")


@pytest.mark.parametrize(("kind", "bound"), KINDS)
def test_F2_rows_of_different_lengths_equal_single_runs(kind, bound):
    hk, hv, lengths = 2, 4, (2, 2, 1)
    pool, x = states(3, hv, torch.float32), inputs(kind, bound, 5, hk, hv)
    cu, slots = cu_seqlens(lengths, DEVICE), ids(0, 1, 2)
    log = make_log(kind, 3, hk, hv)
    out = verify(x, pool.clone(), slots, slots, cu, log, ids(0, 0, 0))
    for row, first in enumerate((0, 2, 4)):
        alone = x.rows(slice(first, first + lengths[row]))
        single = verify(
            alone, pool.clone(), ids(row), ids(row), ids(0, lengths[row]), make_log(kind, 1, hk, hv), ids(0)
        )
        assert same(out[first : first + lengths[row]], single)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 4])
@pytest.mark.parametrize(("kind", "bound"), KINDS)
def test_C1_a_step_logs_its_tokens_and_leaves_the_rest_of_the_log(kind, bound, tokens, dtype):
    rows, slots = 3, ids(0, 1, 2)
    x, log = inputs(kind, bound, rows * tokens, 1, 2), make_log(kind, rows, 1, 2, max_tokens=8)
    cu = torch.arange(rows + 1, dtype=torch.int32, device=DEVICE) * tokens
    verify(x, states(rows, 2, dtype), slots, slots, cu, log, ids(0, 0, 0))
    assert same(log.k[:, 1, :tokens].flatten(0, 1), x.k)
    for part in (log.k, log.u, log.g):
        assert torch.isfinite(part[:, 1, :tokens]).all()
        assert part[:, 1, tokens:].isnan().all()
        assert part[:, 0].isnan().all()


@pytest.mark.parametrize(("kind", "bound"), KINDS)
def test_F8_verify_accept_and_undo_moves_equal_a_straight_run(kind, bound):
    hk, hv = 2, 2
    pool, slot, log = states(2, hv, torch.float32), ids(0), make_log(kind, 1, hk, hv)
    straight = pool.clone()
    x = inputs(kind, bound, 9, hk, hv)
    accepted = 0
    # (drafts, accepted of them): 4 with 2 kept, 1 undone, 4 with 1 kept.
    for first, drafts, kept in ((0, 4, 2), (4, 1, 0), (5, 4, 1)):
        verify(x.rows(slice(first, first + drafts)), pool, slot, slot, ids(0, drafts), log, ids(accepted))
        assert same(pool[0], straight[0]), f"before draft {first}"
        single_steps(x.rows(slice(first, first + kept)), straight, slot, 1, kept)
        log.half.bitwise_xor_(1)
        accepted = kept
    commit(x, pool, slot, slot, log, ids(accepted))
    assert same(pool[0], straight[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_rows_do_not_depend_on_batch_or_slots_and_repeat_exactly(kind, dtype):
    """1,000 steps that replay logged tokens: in place, by turns in slots of another order, and some rows alone."""
    hk, hv, rows, tokens = 2, 4, 150, 4
    x = inputs(kind, None, rows * tokens, hk, hv)
    start = states(rows, hv, dtype)
    cu = torch.arange(rows + 1, dtype=torch.int32, device=DEVICE) * tokens
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.int32)
    plain = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    filled, accepted = make_log(kind, rows, hk, hv), plain % (tokens + 1)
    verify(x, start.clone(), plain, plain, cu, filled, accepted * 0)
    filled.half.bitwise_xor_(1)
    pool, log = start.clone(), DraftLog(filled.k.clone(), filled.u.clone(), filled.g.clone(), None, filled.half)
    first, different = None, torch.zeros((), dtype=torch.bool, device=DEVICE)
    for repeat in range(1000):
        slots = order if repeat % 2 else plain
        pool[slots.long()] = start
        for target, source in ((log.k, filled.k), (log.u, filled.u), (log.g, filled.g)):
            target.copy_(source)
        found = verify(x, pool, slots, slots, cu, log, accepted), pool[slots.long()], log.k, log.u, log.g
        first = first or [bits(part).clone() for part in found]
        for part, expected in zip(found, first):
            different |= (bits(part) != expected).any()
    assert not different
    for row in (7, 8, 148):
        here, part = slice(row, row + 1), slice(row * tokens, (row + 1) * tokens)
        k, u, g, half, count = (each[here].clone() for each in (filled.k, filled.u, filled.g, filled.half, accepted))
        alone = DraftLog(k, u, g, None, half)
        out = verify(x.rows(part), start, ids(row), ids(-1), ids(0, tokens), alone, count)
        assert same(out, first[0].view(torch.bfloat16)[part])


@pytest.mark.parametrize("hv", [1, 2, 3, 6, 12, 24, 48, 96])
def test_head_counts(hv):
    hk = 1 if hv % 2 else hv // 2
    x, start = inputs("gdn", None, 6, hk, hv), states(2, hv, torch.float32)
    slots, stepped, pool, log = ids(0, 1), start.clone(), start.clone(), make_log("gdn", 2, hk, hv)
    expected = single_steps(x, stepped, slots, 2, 3)
    assert same(verify(x, pool, slots, slots, ids(0, 3, 6), log, ids(0, 0)), expected)
    log.half.bitwise_xor_(1)
    commit(x, pool, slots, slots, log, ids(3, 3))
    assert same(pool, stepped)
