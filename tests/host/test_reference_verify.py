"""Verify with a draft log: replay equals single steps bit for bit, and the id rule with logs and counts."""

import math
from dataclasses import replace

import pytest
import torch

from compact_state.cute_kernels.draft_log import DraftLog
from compact_state.cute_kernels.errors import InvalidArgumentError
from compact_state.cute_kernels.reference import datasets as ds
from compact_state.cute_kernels.reference import gdn, kda

VARIANTS = [("gdn", None), ("kda", None), ("kda", -5.0)]
DECODE = {"gdn": gdn.gdn_decode, "kda": kda.kda_decode}
VERIFY = {"gdn": gdn.gdn_verify, "kda": kda.kda_verify}
HK, HV, K, V = 2, 4, 16, 24


def small(kind, tokens, bound=None, dataset="randn", seed=0):
    def draw(seed, count):
        return ds.delta_inputs(kind, dataset, count, HK, HV, head_dim_k=K, head_dim_v=V, lower_bound=bound, seed=seed)

    # The calls of one test are steps of one layer: they share A_log and dt_bias, which a KDA replay needs again.
    layer = draw(0, 1)
    return replace(draw(seed, tokens), A_log=layer.A_log, dt_bias=layer.dt_bias)


def new_log(kind, batch, rows=None):
    log = DraftLog.allocate(kind, batch, HK, HV, None, head_dim_k=K, head_dim_v=V, rows=rows)
    for part in (log.k, log.u, log.g):
        part.fill_(math.nan)
    return log


def live_pool(slots, dtype=torch.float32, seed=1):
    pool = ds.make_pool(slots, (HV, V, K), dtype)
    pool.copy_(ds.initial_states(slots, HV, V, K, seed=seed))
    return pool


def commit(inputs, pool, read, write, log, accepted, **options):
    if inputs.kind == "gdn":
        gdn.gdn_commit(pool, read, write, log, accepted, **options)
    else:
        kda.kda_commit(
            inputs.A_log, inputs.dt_bias, pool, read, write, log, accepted, lower_bound=inputs.lower_bound, **options
        )


def single_steps(inputs, pool, slot, order):
    """Decode the tokens of ``order`` one by one, in place."""
    outs = []
    for t in order:
        step = inputs.rows(slice(t, t + 1))
        outs.append(DECODE[inputs.kind](*step.tensors, pool, ds.ids(slot), ds.ids(slot), **step.gate_options))
    return torch.cat(outs) if outs else torch.zeros(0, HV, V, dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 2, 4])
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_C1_a_step_logs_its_tokens_and_leaves_the_rest_of_the_log(kind, tokens, dtype):
    """Also in a log that is a slice of a longer one."""
    whole, rows = new_log(kind, 3), ds.ids(0, 1, 2)
    log = replace(whole, **{name: getattr(whole, name)[:, :, :4] for name in ("k", "u", "g")})
    inputs, cu = small(kind, 3 * tokens), ds.cu_seqlens([tokens] * 3)
    VERIFY[kind](*inputs.tensors, live_pool(3, dtype), rows, rows, cu, log, ds.ids(0, 0, 0), **inputs.gate_options)
    assert torch.equal(whole.k[:, 1, :tokens].flatten(0, 1), inputs.k)
    for part in (whole.k, whole.u, whole.g):
        assert torch.isfinite(part[:, 1, :tokens]).all()
        assert part[:, 1, tokens:].isnan().all()
        assert part[:, 0].isnan().all()


@pytest.mark.parametrize(("kind", "bound"), VARIANTS)
@pytest.mark.parametrize(("dtype", "every"), [(torch.float32, False), (torch.bfloat16, True)])
def test_F1_verify_and_replay_equal_single_steps_bit_for_bit(kind, bound, dtype, every):
    """Three rows with their own accepted counts, three verify steps, then a commit."""
    lengths = (4, 3, 4)
    steps = [small(kind, sum(lengths), bound, seed=seed) for seed in range(3)]
    accepted = [(0, 0, 0), (4, 1, 0), (2, 3, 4), (1, 0, 3)]
    pool = live_pool(6, dtype)
    reference = pool.clone()
    log, rows, cu = new_log(kind, 3), ds.ids(5, 0, 3), ds.cu_seqlens(lengths)
    starts = (0, 4, 7)
    for number, inputs in enumerate(steps):
        counts = ds.ids(*accepted[number])
        out = VERIFY[kind](
            *inputs.tensors, pool, rows, rows, cu, log, counts, round_every_token=every, **inputs.gate_options
        )
        log.half ^= 1
        for n, slot in enumerate((5, 0, 3)):
            trial = reference.clone()
            expected = single_steps(inputs, trial, slot, range(starts[n], starts[n] + lengths[n]))
            assert torch.equal(out[starts[n] : starts[n] + lengths[n]], expected), (number, n)
            assert torch.equal(pool[slot], reference[slot])
            # What the next call will find accepted happens to the reference one token at a time.
            keep = accepted[number + 1][n]
            single_steps(inputs, reference, slot, range(starts[n], starts[n] + keep))
    commit(steps[-1], pool, rows, rows, log, ds.ids(*accepted[-1]), round_every_token=every)
    assert torch.equal(pool, reference)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_verify_equals_commit_then_verify_for_bf16(kind):
    """Without rounding every token: the drafts start from the committed state as it is stored."""
    first, second = small(kind, 4), small(kind, 4, seed=1)
    at_once, in_two = live_pool(2, torch.bfloat16), live_pool(2, torch.bfloat16)
    log, one, cu = new_log(kind, 1), ds.ids(0), ds.cu_seqlens([4])
    for pool in (at_once, in_two):
        log.half.zero_()
        VERIFY[kind](*first.tensors, pool, one, one, cu, log, ds.ids(0), **first.gate_options)
    log.half ^= 1
    commit(first, in_two, one, one, log, ds.ids(3))
    expected = VERIFY[kind](*second.tensors, in_two, one, one, cu, log, ds.ids(0), **second.gate_options)
    out = VERIFY[kind](*second.tensors, at_once, one, one, cu, log, ds.ids(3), **second.gate_options)
    assert torch.equal(out, expected)
    assert torch.equal(at_once, in_two)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_F3_counts_and_ids_out_of_range_touch_nothing(kind):
    """Counts 0, 1, 4 work; 9, -1 make the row void; PAD ids and PAD log rows never reach a slot or a log."""
    rows = 8
    drafts = small(kind, 2 * rows)
    pool = live_pool(10)
    log = new_log(kind, rows)
    ids, cu = ds.ids(*range(rows)), ds.cu_seqlens([2] * rows)
    VERIFY[kind](*drafts.tensors, pool, ids, ids, cu, log, ds.ids(*[0] * rows), **drafts.gate_options)
    log.half ^= 1
    before, log_before = pool.clone(), [x.clone() for x in (log.k, log.u, log.g)]
    read = ds.ids(0, 1, 2, 3, 4, -1, 10, 7)
    write = ds.ids(0, 8, 2, 3, -1, -1, 99, 7)
    counts = ds.ids(0, 2, 9, -1, 1, 1, 1, 1)
    log.rows = ds.ids(0, 1, 2, 3, 4, 5, 6, 8)
    new = small(kind, 2 * rows, seed=3)
    out = VERIFY[kind](*new.tensors, pool, read, write, cu, log, counts, **new.gate_options)
    void = [2, 3, 5, 6]
    for n in range(rows):
        assert bool((out[2 * n : 2 * n + 2] == 0).all()) == (n in void), n
    untouched = [0, 1, 2, 3, 4, 5, 6, 7, 9]
    assert torch.equal(pool[untouched], before[untouched])
    trial = before.clone()
    single_steps(drafts, trial, 1, (2, 3))
    assert torch.equal(pool[8], trial[1]), "two accepted drafts folded into another slot"
    expected = single_steps(new, before.clone(), 7, (14, 15))
    assert torch.equal(out[14:16], expected), "a row without a log replays nothing"
    for part, old in zip((log.k, log.u, log.g), log_before):
        assert torch.equal(part[:, 1].nan_to_num(7.0), old[:, 1].nan_to_num(7.0)), "the half being read stays"
        written = ~part[:, 0, :2].flatten(1).isnan().any(1)
        fresh = (part[:, 0, :2].flatten(1).nan_to_num(7.0) != old[:, 0, :2].flatten(1).nan_to_num(7.0)).any(1)
        assert written[[0, 1, 4]].all()
        assert fresh.tolist() == [True, True, False, False, True, False, False, False]


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_F6_row_i_logs_to_row_i_whatever_its_slot(kind):
    drafts = small(kind, 10)
    pool, log = live_pool(10), new_log(kind, 5)
    ids = ds.ids(7, 2, 9, 0, 4)
    VERIFY[kind](*drafts.tensors, pool, ids, ids, ds.cu_seqlens([2] * 5), log, ds.ids(*[0] * 5), **drafts.gate_options)
    assert torch.equal(log.k[:, 1, :2], drafts.k.view(5, 2, HK, K))
    assert bool(log.k[:, 0].isnan().all())
    assert bool(log.k[:, 1, 2:].isnan().all())


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_A3_void_rows_are_zero_for_every_width(kind):
    for width in (1, 2, 3, 4):
        drafts = small(kind, 3 * width)
        drafts.q[width : 2 * width] = math.nan
        for dtype in (torch.float32, torch.bfloat16):
            pool, alone = live_pool(5, dtype), live_pool(5, dtype)
            before = pool.clone()
            ids, log = ds.ids(0, -1, 4), new_log(kind, 3)
            out = VERIFY[kind](
                *drafts.tensors, pool, ids, ids, ds.cu_seqlens([width] * 3), log, ds.ids(0, 0, 0),
                **drafts.gate_options,
            )  # fmt: skip
            first = drafts.rows(slice(0, width))
            expected = VERIFY[kind](
                *first.tensors, alone, ds.ids(0), ds.ids(0), ds.cu_seqlens([width]), new_log(kind, 1), ds.ids(0),
                **first.gate_options,
            )  # fmt: skip
            assert torch.equal(out[:width], expected)
            assert bool((out[width : 2 * width] == 0).all())
            assert torch.equal(pool, before)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_a_row_longer_than_the_log_is_refused(kind):
    drafts = small(kind, 9)
    pool, before = live_pool(1), live_pool(1)
    with pytest.raises(InvalidArgumentError, match="at most the draft log's 8"):
        VERIFY[kind](
            *drafts.tensors, pool, ds.ids(0), ds.ids(0), ds.cu_seqlens([9]), new_log(kind, 1), ds.ids(0),
            **drafts.gate_options,
        )  # fmt: skip
    assert torch.equal(pool, before)


def test_A7_a_parked_request_keeps_its_state():
    """max_batch 4, one of three live requests outside the batch, a verify batch of 2 padded to 4."""
    drafts = small("gdn", 12)
    pool, log = live_pool(4), new_log("gdn", 4)
    parked = pool[2].clone()
    ids, cu = ds.ids(0, 1, -1, -1), ds.cu_seqlens([3] * 4)
    log.rows = ds.ids(3, 0, -1, -1)
    gdn.gdn_verify(*drafts.tensors, pool, ids, ids, cu, log, ds.ids(0, 0, 0, 0))
    log.half ^= 1
    gdn.gdn_commit(pool, ids, ids, log, ds.ids(3, 2, 3, 3))
    assert torch.equal(pool[2], parked)
    trial = live_pool(4)
    single_steps(drafts, trial, 0, (0, 1, 2))
    single_steps(drafts, trial, 1, (3, 4))
    assert torch.equal(pool, trial)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_F2_rows_of_different_lengths_equal_their_single_runs(kind):
    """Query lengths 2, 2, 1 and 0 in one call: drafts, drafts, a lone token, and a row that only commits."""
    lengths = (2, 2, 1, 0)
    drafts = small(kind, sum(lengths))
    pool, log, ids = live_pool(4), new_log(kind, 4), ds.ids(3, 1, 0, 2)
    out = VERIFY[kind](
        *drafts.tensors, pool, ids, ids, ds.cu_seqlens(lengths), log, ds.ids(0, 0, 0, 0), **drafts.gate_options
    )
    start = 0
    for slot, length in zip((3, 1, 0, 2), lengths):
        expected = single_steps(drafts, live_pool(4), slot, range(start, start + length))
        assert torch.equal(out[start : start + length], expected)
        start += length
    assert torch.equal(pool, live_pool(4))


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_F8_any_sequence_of_accepts_and_rejects_equals_a_straight_run(kind):
    """Verify 4, accept 2; verify 1, reject it; verify 4, accept 1; verify 8, accept all."""
    pool, straight, log, one = live_pool(1), live_pool(1), new_log(kind, 1), ds.ids(0)
    previous, accepted = None, 0
    for number, (drafts, keep) in enumerate([(4, 2), (1, 0), (4, 1), (8, 8), (1, 1)]):
        inputs = small(kind, drafts, seed=number)
        if previous is not None:
            single_steps(previous, straight, 0, range(accepted))
        out = VERIFY[kind](
            *inputs.tensors, pool, one, one, ds.cu_seqlens([drafts]), log, ds.ids(accepted), **inputs.gate_options
        )
        assert torch.equal(pool, straight)
        assert torch.equal(out, single_steps(inputs, straight.clone(), 0, range(drafts)))
        log.half ^= 1
        previous, accepted = inputs, keep
