"""Verify and commit kernels on the GPU, rows and steps: ids, counts, logs, dependent launches, graphs."""

from __future__ import annotations

import pytest
import torch
from verify_case import BACKEND, DEVICE, DTYPES, KINDS, VERIFY, commit, ids, inputs, make_log, same, states, verify

from compact_state.cute_kernels import DraftLog, advance_state_ids, verify_launch
from compact_state.cute_kernels.errors import InvalidArgumentError
from compact_state.cute_kernels.reference.datasets import cu_seqlens

pytestmark = pytest.mark.gpu


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_B6_more_rows_than_a_grid_dimension_few_of_them_live(kind, dtype):
    """Verify, replay and commit: live rows have the bits they have alone, no other row touches a slot or the log."""
    n, tokens, live = 65_600, 2, torch.tensor([0, 65_534, 65_535, 65_599], device=DEVICE)
    few = torch.arange(len(live), dtype=torch.int32, device=DEVICE)
    x = inputs(kind, None, n * tokens, 1, 1)
    alone = x.rows((live[:, None] * tokens + torch.arange(tokens, device=DEVICE)).flatten())
    every = torch.full((n,), -1, dtype=torch.int32, device=DEVICE)
    every[live] = few
    cu = torch.arange(n + 1, dtype=torch.int32, device=DEVICE) * tokens
    counts = torch.zeros(n, dtype=torch.int32, device=DEVICE)
    found = []
    for steps, slots, bounds, accepted in (
        (x, every, cu, counts),
        (alone, few, cu[: len(few) + 1].clone(), counts[: len(few)].clone()),
    ):
        pool, log = states(len(few), 1, dtype), make_log(kind, len(few), 1, 1)
        log.rows = slots
        first = verify(steps, pool, slots, slots, bounds, log, accepted)
        log.half.bitwise_xor_(1)
        accepted[slots >= 0] = ids(0, 1, 2, 2)
        second = verify(steps, pool, slots, slots, bounds, log, accepted)
        log.half.bitwise_xor_(1)
        commit(steps, pool, slots, slots, log, accepted)
        if steps is x:
            dead = torch.ones(n, dtype=torch.bool, device=DEVICE)
            dead[live] = False
            assert not any(out.view(n, tokens, -1)[dead].any() for out in (first, second))
            first, second = (out.view(n, tokens, 1, 128)[live].flatten(0, 1) for out in (first, second))
        found.append((first, second, pool, log.k, log.u, log.g))
    assert all(same(a, b) for a, b in zip(*found))


def test_no_rows_and_no_tokens():
    x, pool, log = inputs("gdn", None, 3, 1, 2), states(2, 2, torch.float32), make_log("gdn", 2, 1, 2)
    before = pool.clone()
    assert bool((verify(x, pool, ids(), ids(), ids(0), log, ids()) == 0).all())
    verify(x.rows(slice(0, 0)), pool, ids(0, 1), ids(0, 1), ids(0, 0, 0), log, ids(0, 0))
    assert same(pool, before)
