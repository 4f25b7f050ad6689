"""Verify and commit kernels on the GPU: float64 recurrence, equality with single steps bit for bit, ids, log, graphs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from compact_state.cute_kernels import (
    DraftLog,
    advance_state_ids,
    gdn_commit,
    gdn_decode,
    gdn_prefill,
    gdn_verify,
    kda_commit,
    kda_decode,
    kda_prefill,
    kda_verify,
    reference,
    verify_launch,
)
from compact_state.cute_kernels.configs.verify import SMALL_BATCH_HEADS, choose_verify
from compact_state.cute_kernels.errors import InvalidArgumentError
from compact_state.cute_kernels.reference.datasets import DATASETS, cu_seqlens, delta_inputs, initial_states, make_pool
from compact_state.cute_kernels.reference.datasets import ids as make_ids
from compact_state.cute_kernels.reference.metrics import assert_close, tolerance

pytestmark = pytest.mark.gpu

DEVICE, BACKEND = "cuda", "kernels"
KINDS = (("gdn", None), ("kda", None), ("kda", -5.0))
DTYPES = (torch.float32, torch.bfloat16)
VERIFY = {"gdn": gdn_verify, "kda": kda_verify}
DECODE = {"gdn": gdn_decode, "kda": kda_decode}
PREFILL = {"gdn": gdn_prefill, "kda": kda_prefill}
REFERENCE = {"gdn": (reference.gdn_verify, reference.gdn_commit), "kda": (reference.kda_verify, reference.kda_commit)}


def ids(*values):
    return make_ids(*values, device=DEVICE)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def same(a, b):
    return torch.equal(bits(a), bits(b))


def make_log(kind, batch, hk, hv, **options):
    log = DraftLog.allocate(kind, batch, hk, hv, None, DEVICE, **options)
    for part in (log.k, log.u, log.g):
        part.fill_(math.nan)
    return log


def states(count, hv, dtype, dataset="randn"):
    pool = make_pool(count, (hv, 128, 128), dtype, device=DEVICE)
    pool.copy_(initial_states(count, hv, dataset=dataset))
    return pool


def inputs(kind, bound, tokens, hk, hv, dataset="randn", seed=0):
    return delta_inputs(kind, dataset, tokens, hk, hv, lower_bound=bound, device=DEVICE, seed=seed)


def of_same_layer(x, other):
    """`x` with the gate parameters of `other`: a log of KDA holds raw gates, which the layer that replays them must share."""
    return replace(x, A_log=other.A_log, dt_bias=other.dt_bias)


def verify(x, pool, read, write, cu, log, accepted, **options):
    out = torch.full(x.v.shape, math.nan, dtype=x.v.dtype, device=DEVICE)
    options = {**x.gate_options, "backend": BACKEND, **options}
    return VERIFY[x.kind](*x.tensors, pool, read, write, cu, log, accepted, out=out, **options)


def commit(x, pool, read, write, log, accepted, **options):
    if x.kind == "gdn":
        gdn_commit(pool, read, write, log, accepted, backend=BACKEND, **options)
    else:
        kda_commit(
            x.A_log, x.dt_bias, pool, read, write, log, accepted, lower_bound=x.lower_bound, backend=BACKEND, **options
        )


def single_steps(x, pool, slots, rows, tokens):
    """Decode tokens one by one in place; `x` holds `tokens` tokens a row, row after row."""
    out = torch.empty(x.v.shape, dtype=x.v.dtype, device=DEVICE)
    for t in range(tokens):
        at = torch.arange(rows, device=DEVICE) * tokens + t
        step = x.rows(at)
        out[at] = DECODE[x.kind](*step.tensors, pool, slots, slots, **x.gate_options, backend=BACKEND)
    return out


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


@pytest.mark.parametrize(("kind", "bound"), KINDS)
def test_every_tile_gives_the_same_bits(kind, bound):
    hk, hv, rows, tokens = 2, 4, 5, 6
    name = {"gdn": "gdn", "kda": "kda_softplus" if bound is None else "kda_bounded"}[kind]
    x = inputs(kind, bound, rows * tokens, hk, hv)
    start, cu = states(rows, hv, torch.float32), torch.arange(rows + 1, dtype=torch.int32, device=DEVICE) * tokens
    slots, accepted = torch.arange(rows, dtype=torch.int32, device=DEVICE), ids(0, 6, 3, 1, 5)
    filled = make_log(kind, rows, hk, hv)
    verify(x, start.clone(), slots, slots, cu, filled, accepted * 0)
    filled.half.bitwise_xor_(1)
    results = []
    for heads in (1, SMALL_BATCH_HEADS + 1):
        log = DraftLog(filled.k.clone(), filled.u.clone(), filled.g.clone(), None, filled.half)
        pool, out = start.clone(), torch.empty(x.v.shape, dtype=x.v.dtype, device=DEVICE)
        verify_launch.launch_verify(
            name, *x.tensors, pool, slots, slots, cu, log, accepted, out, lower_bound=bound,
            key=choose_verify(name, "float32", heads),
        )  # fmt: skip
        results.append((pool, out, log.u.nan_to_num()))
    for a, b in zip(*results):
        assert same(a, b)


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_settled_steps_in_a_graph_equal_eager_steps(kind, dtype, rounds):
    """Steps that follow each other directly, each with slots and logs of its own: nothing the kernel loads early changes."""
    hk, hv, rows, tokens, layers = 2, 4, 3, 3, 6
    name = "gdn" if kind == "gdn" else "kda_softplus"
    x, slots = inputs(kind, None, rows * tokens, hk, hv), torch.arange(rows, dtype=torch.int32, device=DEVICE)
    cu, accepted = torch.arange(rows + 1, dtype=torch.int32, device=DEVICE) * tokens, ids(3, 0, 2)
    logs = [make_log(kind, rows, hk, hv) for _ in range(layers)]
    pools = [states(rows, hv, dtype) for _ in range(layers)]
    for pool, log in zip(pools, logs):
        verify(x, pool, slots, slots, cu, log, accepted * 0)
        log.half.bitwise_xor_(1)

    def run(pools, logs, outs, **options):
        v = x.v
        for pool, log, out in zip(pools, logs, outs):
            verify_launch.launch_verify(
                name, x.q, x.k, v, *x.tensors[3:], pool, slots, slots, cu, log, accepted, out, round_every_token=rounds,
                **options,
            )  # fmt: skip
            v = out  # as in a model, a layer's input is what the layer before it wrote

    def copies():
        kept = [DraftLog(log.k.clone(), log.u.clone(), log.g.clone(), None, log.half) for log in logs]
        return [pool.clone() for pool in pools], kept, [torch.zeros_like(x.v).contiguous() for _ in pools]

    eager, captured = copies(), copies()
    run(*eager)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(*captured, settled=True)
    graph.replay()
    for mine, theirs in zip(captured[2], eager[2]):
        assert same(mine, theirs)
    for mine, theirs in zip(captured[0], eager[0]):
        assert same(mine, theirs)
    for mine, theirs in zip(captured[1], eager[1]):
        assert same(mine.u.nan_to_num(), theirs.u.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "bound"), KINDS)
def test_F3_accepted_counts_and_ids_out_of_range_touch_nothing(kind, bound, dtype):
    hk, hv = 2, 4
    pool, log = states(8, hv, dtype), make_log(kind, 8, hk, hv)
    x = inputs(kind, bound, 32, hk, hv)
    cu = cu_seqlens((3, 3, 3, 3, 3, 3, 2), DEVICE)
    slots = ids(0, 1, 2, 3, 4, 5, 6)
    verify(x, pool, slots, slots, cu, log, ids(0, 0, 0, 0, 0, 0, 0))
    log.half.bitwise_xor_(1)
    before, kept = pool.clone(), [part.clone() for part in (log.k, log.u, log.g)]
    log.rows = ids(0, 1, 2, 3, 4, 5, 99)
    read, write = ids(0, 1, -1, 3, 4, 5, 6), ids(0, 1, 8, 3, -1, 7, 6)
    out = verify(x, pool, read, write, cu, log, ids(-1, 9, 2, 1 << 30, 3, 1, 2))
    for row in range(4):
        assert bool((out[3 * row : 3 * row + 3] == 0).all()), "an unusable row gives zeros"
        assert all(same(part[row], old[row]) for part, old in zip((log.k, log.u, log.g), kept))
    assert same(pool[:6], before[:6]), "only slots 6 and 7 are written"
    assert not same(pool[7], before[7])
    assert same(pool[6], before[6]), "a row without a log row commits nothing"
    assert all(same(part[6:], old[6:]) for part, old in zip((log.k, log.u, log.g), kept))
    assert bool((out[18:20] != 0).any()), "and still runs its new tokens"
    assert bool((out[20:] == 0).all()), "rows beyond cu_seqlens are defined"


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
    assert bool(log.u[2, 1, 1:].isnan().all()), "C1: tokens a row does not have keep the log's marker"


def test_F6_a_log_smaller_than_the_batch_is_refused():
    x, pool = inputs("gdn", None, 5, 1, 2), states(10, 2, torch.float32)
    slots = ids(7, 2, 9, 0, 4)
    before = pool.clone()
    with pytest.raises(InvalidArgumentError, match="draft_log"):
        verify(x, pool, slots, slots, ids(0, 1, 2, 3, 4, 5), make_log("gdn", 4, 1, 2), ids(0, 0, 0, 0, 0))
    assert same(pool, before)


@pytest.mark.parametrize(("kind", "bound"), KINDS)
def test_F6_row_i_is_logged_in_row_i_whatever_its_slot(kind, bound):
    hk, hv = 1, 2
    x, pool = inputs(kind, bound, 5, hk, hv), states(10, hv, torch.float32)
    slots, log = ids(7, 2, 9, 0, 4), make_log(kind, 5, hk, hv)
    verify(x, pool, slots, slots, ids(0, 1, 2, 3, 4, 5), log, ids(0, 0, 0, 0, 0))
    for row in range(5):
        assert same(log.k[row, 1, 0], x.k[row])


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
    hk, hv, rows, tokens = 2, 4, 150, 4
    x = inputs(kind, None, rows * tokens, hk, hv)
    start = states(rows, hv, dtype)
    cu = torch.arange(rows + 1, dtype=torch.int32, device=DEVICE) * tokens
    none = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.int32)
    first = None
    for repeat in range(20):
        slots = order if repeat % 2 else torch.arange(rows, dtype=torch.int32, device=DEVICE)
        pool = start.clone()
        pool[slots.long()] = start
        log = make_log(kind, rows, hk, hv)
        out = verify(x, pool, slots, slots, cu, log, none)
        first = (out, log.u.nan_to_num()) if first is None else first
        assert same(out, first[0])
        assert same(log.u.nan_to_num(), first[1])
    part = x.rows(slice(7 * tokens, 9 * tokens))
    out = verify(part, start, ids(7, 8), ids(-1, -1), ids(0, tokens, 2 * tokens), make_log(kind, 2, hk, hv), ids(0, 0))
    assert same(out, first[0][7 * tokens : 9 * tokens])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_A13_a_captured_step_replays_with_new_inputs_counts_and_halves(kind, dtype):
    hk, hv, rows, tokens = 2, 4, 4, 4
    steps = [inputs(kind, None, rows * tokens, hk, hv, seed=i) for i in range(5)]
    counts = (ids(0, 0, 0, 0), ids(4, 1, 0, 2), ids(1, 4, 3, 0), ids(2, 2, 2, 2), ids(0, 1, 3, 4))
    cu = torch.arange(rows + 1, dtype=torch.int32, device=DEVICE) * tokens
    start = states(8, hv, dtype)

    eager, log, slots, positions, expected = (
        start.clone(),
        make_log(kind, rows, hk, hv),
        ids(0, 1, 2, 3),
        ids(0, 0, 0, 0),
        [],
    )
    for x, accepted in zip(steps, counts):
        expected.append(verify(x, eager, slots, slots, cu, log, accepted))
        advance_state_ids(slots, slots.clone(), positions, num_slots=8, num_accepted=accepted, log_half=log.half)

    pool, log, positions = start.clone(), make_log(kind, rows, hk, hv), ids(0, 0, 0, 0)
    x, accepted = inputs(kind, None, rows * tokens, hk, hv), counts[0].clone()
    read, write = slots.clone(), slots.clone()
    verify(x, start.clone(), read, write, cu, make_log(kind, rows, hk, hv), accepted)
    out = torch.empty(x.v.shape, dtype=x.v.dtype, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        VERIFY[kind](*x.tensors, pool, read, write, cu, log, accepted, out=out, **x.gate_options, backend=BACKEND)
        advance_state_ids(read, write, positions, num_slots=8, num_accepted=accepted, log_half=log.half)
    for step, (source, count) in enumerate(zip(steps, counts)):
        for destination, values in zip(x.tensors, source.tensors):
            destination.copy_(values)
        accepted.copy_(count)
        graph.replay()
        assert same(out, expected[step]), f"step {step}"
    assert same(pool, eager)
    assert positions.tolist() == sum(counts).tolist()


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


def test_no_rows_and_no_tokens():
    x, pool, log = inputs("gdn", None, 3, 1, 2), states(2, 2, torch.float32), make_log("gdn", 2, 1, 2)
    before = pool.clone()
    assert bool((verify(x, pool, ids(), ids(), ids(0), log, ids()) == 0).all())
    verify(x.rows(slice(0, 0)), pool, ids(0, 1), ids(0, 1), ids(0, 0, 0), log, ids(0, 0))
    assert same(pool, before)
