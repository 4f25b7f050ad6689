"""Conv of draft tokens and their commit on the GPU: outputs to one bf16 ulp of float64, windows and logs bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from conv_case import (
    F32,
    FORM,
    FORMS,
    Case,
    bits,
    check_windows,
    commit,
    copy_of,
    float64_out,
    gpu_ids,
    log_of,
    make_log,
    same_windows,
    skip_unless_built,
)

from compact_state.cute_kernels import advance_state_ids
from compact_state.cute_kernels.configs.conv1d import choose_verify
from compact_state.cute_kernels.reference import conv1d as reference
from compact_state.cute_kernels.reference.datasets import cu_seqlens

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("settled", [False, True])
def test_verify_every_kind_of_row(form, settled):
    skip_unless_built("conv1d_verify", choose_verify(form[0], "float32" if form[1] is F32 else "bfloat16"))
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


@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_C8_output_may_be_the_input_row(tokens):
    case = Case()
    x, lengths = case.tokens(2 * tokens), [tokens, tokens]
    arguments = (gpu_ids(0, 1), gpu_ids(2, 3), gpu_ids(4, 5), lengths)
    log, other = make_log(case, 2), make_log(case, 2)
    marked, pool = x.clone(), case.pool.clone()
    separate = case.verify(x, pool, *arguments, log, gpu_ids(0, 0))
    assert torch.equal(x, marked)
    case.verify(x, case.pool, *arguments, other, gpu_ids(0, 0), out=x)
    assert torch.equal(x, separate)
    assert torch.equal(bits(case.pool), bits(pool))
    assert torch.equal(bits(other.x), bits(log.x))


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


def test_F1_rows_with_different_counts():
    """One batch, accepted counts 0 to 4: each row's next tokens equal those of a row that never speculated."""
    case = Case(slots=16)
    rows = 5
    log = make_log(case, rows)
    start, drafts, more = case.tokens(7 * rows), case.tokens(4 * rows), case.tokens(2 * rows)
    slots, plain = gpu_ids(*range(rows)), gpu_ids(*range(8, 8 + rows))
    none, zeros = gpu_ids(*[-1] * rows), gpu_ids(*[0] * rows)
    counts, positions = gpu_ids(0, 1, 2, 3, 4), gpu_ids(*[7] * rows)
    case.prefill(start, case.pool, none, slots, zeros, [7] * rows)
    case.verify(drafts, case.pool, slots, slots, positions, [4] * rows, log, zeros)
    log.half ^= 1
    out = case.verify(more, case.pool, slots, slots, positions, [2] * rows, log, counts)
    for n in range(rows):
        part = [start[7 * n : 7 * n + 7], drafts[4 * n : 4 * n + n], more[2 * n : 2 * n + 2]]
        straight = torch.cat(part)
        expected = case.prefill(straight, case.pool, none[:1], plain[n : n + 1], zeros[:1], [straight.shape[0]])
        assert torch.equal(out[2 * n : 2 * n + 2], expected[-2:]), f"row {n}"


@pytest.mark.parametrize("first", [1, 2])
def test_G1_drafts_from_slots_full_of_nan(first):
    case = Case()
    case.pool.fill_(math.nan)
    log = make_log(case, 1)
    x = case.tokens(first + 4)
    none, one, two = gpu_ids(-1), gpu_ids(1), gpu_ids(2)
    cold = case.prefill(x, case.pool, none, two, gpu_ids(0), [first + 4])
    begun = case.prefill(x[:first], case.pool, none, one, gpu_ids(0), [first])
    drafted = case.verify(x[first:], case.pool, one, one, gpu_ids(first), [4], log, gpu_ids(0))
    assert torch.equal(torch.cat([begun, drafted]), cold)
    log.half ^= 1
    commit(case.pool, one, one, gpu_ids(first), log, gpu_ids(4))
    assert same_windows(case.pool, 1, 2, first + 4)


def test_A7_a_parked_request_and_padded_rows():
    """A verify batch of 2 padded to 4: slots, log rows and halves of nobody in it stay as they are."""
    case = Case(slots=6)
    log = make_log(case, 5, rows=gpu_ids(4, 0, -1, -1))
    log.x.copy_(case.random(*log.x.shape))
    pool, logged = case.pool.clone(), log.x.clone()
    read = gpu_ids(1, 3, -1, -1)
    out = case.verify(
        case.tokens(8), case.pool, read, read, gpu_ids(5, 6, 0, 0), [2, 2, 2, 2], log, gpu_ids(2, 1, 0, 3)
    )
    commit(case.pool, gpu_ids(-1, -1), gpu_ids(-1, -1), gpu_ids(0, 0), log_of(log, gpu_ids(-1, -1)), gpu_ids(1, 1))
    assert bool((out[4:] == 0).all())
    for slot in (0, 2, 4, 5):
        assert torch.equal(bits(case.pool[slot]), bits(pool[slot])), f"slot {slot}"
    for row in (1, 2, 3):
        assert torch.equal(bits(log.x[row]), bits(logged[row])), f"log row {row}"


def test_F6_rows_of_the_log_are_found_by_batch_row():
    case = Case(slots=10)
    log = make_log(case, 5)
    ids_, positions = gpu_ids(7, 2, 9, 0, 4), gpu_ids(5, 6, 7, 8, 9)
    x = case.tokens(10)
    case.verify(x, case.pool, ids_, ids_, positions, [2] * 5, log, gpu_ids(0, 0, 0, 0, 0))
    assert torch.equal(log.x[:, 1, :2], x.unflatten(0, (5, 2)))
    assert bool(log.x[:, 0].isnan().all())
    assert bool(log.x[:, 1, 2:].isnan().all())


@pytest.mark.parametrize("form", [FORM, FORMS[3]], ids=str)
def test_D4_verify_repeats_are_bit_equal(form):
    case = Case(form)
    log = make_log(case, 3)
    log.x.copy_(case.random(*log.x.shape))
    x, slots, positions, counts = case.tokens(12), gpu_ids(0, 1, 2), gpu_ids(5, 6, 7), gpu_ids(0, 3, 5)
    original, logged = case.pool.clone(), log.x.clone()
    first = None
    for _ in range(1000):
        case.pool.copy_(original)
        log.x.copy_(logged)
        result = (case.verify(x, case.pool, slots, slots, positions, [4] * 3, log, counts), case.pool, log.x)
        if first is None:
            first = tuple(part.clone() for part in result)
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(first, result))


def test_A13_captured_verify_steps_track_themselves():
    """Verify and tracking in one graph: accepted counts, slots and the log's half change with no host in between."""
    case = Case(slots=12)
    log = make_log(case, 2)
    stream = case.tokens(60)
    x, read, write, positions = case.tokens(6), gpu_ids(-1, -1), gpu_ids(0, 1), gpu_ids(0, 0)
    counts, nxt, cu = gpu_ids(0, 0), gpu_ids(2, 3), gpu_ids(0, 3, 6)

    def step():
        out = case.verify(x, case.pool, read, write, positions, cu, log, counts)
        advance_state_ids(
            read, write, positions, num_accepted=counts, log_half=log.half, next_write_ids=nxt, num_slots=12,
            backend="kernels",
        )  # fmt: skip
        return out

    step()
    for tensor, start in ((read, (-1, -1)), (write, (0, 1)), (positions, (0, 0)), (log.half, (0, 0))):
        tensor.copy_(gpu_ids(*start))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    taken, accepted = [0, 0], (0, 0)
    for round_, following in enumerate(((2, 3), (0, 1), (3, 2), (1, 3))):
        taken = [t + a for t, a in zip(taken, accepted)]
        x.copy_(torch.cat([stream[30 * n + t : 30 * n + t + 3] for n, t in enumerate(taken)]))
        counts.copy_(gpu_ids(*accepted))
        nxt.copy_(gpu_ids(*((4, 5) if round_ % 2 else (2, 3))))
        graph.replay()
        for n, t in enumerate(taken):
            straight = stream[30 * n : 30 * n + t + 3]
            expected = case.prefill(straight, case.pool, gpu_ids(-1), gpu_ids(10), gpu_ids(0), [t + 3])
            assert torch.equal(out[3 * n : 3 * n + 3], expected[-3:]), f"round {round_}, row {n}"
        accepted = following
