"""The fused verify step of a layer on the GPU: bit for bit against the single operators, and against the reference layer."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from layer_case import DTYPES, KINDS, ORACLE, bits, make_pools, make_step

from compact_state.cute_kernels import (
    DraftLog,
    advance_state_ids,
    causal_conv1d_verify,
    gdn_verify,
    kda_verify,
)
from compact_state.cute_kernels.configs.layer import LATE_VERIFY_HEADS
from compact_state.cute_kernels.errors import InvalidArgumentError
from compact_state.cute_kernels.reference.datasets import cu_seqlens, ids
from compact_state.cute_kernels.reference.layer import gated_rms_norm, split_heads
from compact_state.cute_kernels.reference.metrics import assert_close, tolerance

pytestmark = pytest.mark.gpu

VERIFY = {"gdn": gdn_verify, "kda": kda_verify}


def same(a, b):
    return torch.equal(bits(a), bits(b))


def make_log(step, batch, **options):
    """A log full of NaN for the heads of `step`."""
    hv, channels = step.b.shape[1], step.x.shape[1]
    log = DraftLog.allocate(step.kind, batch, (channels // 128 - hv) // 2, hv, channels, "cuda", **options)
    for part in (log.k, log.u, log.g, log.x):
        part.fill_(math.nan)
    return log


def copied(log):
    return DraftLog(*(part.clone() for part in (log.k, log.u, log.g, log.x)), log.half, log.rows)


def same_logs(a, b):
    return all(same(p, q) for p, q in zip((a.k, a.u, a.g, a.x), (b.k, b.u, b.g, b.x)))


def fused(step, windows, state, read, write, positions, cu, log, accepted, **extra):
    """The layer step on a poisoned output."""
    out = torch.full(step.z.shape, math.nan, dtype=torch.bfloat16, device="cuda")
    verify = {"cu_seqlens": cu, "draft_log": log, "num_accepted": accepted}
    return step.kernel(windows, state, read, write, positions, out=out, **verify, **extra)


def apart(step, windows, state, read, write, positions, cu, log, accepted):
    """The same by the single operators; the norm in float64 on their bf16 outputs."""
    hv = step.b.shape[1]
    verify = (cu, log, accepted)
    mixed = causal_conv1d_verify(
        step.x,
        step.weight,
        windows,
        read,
        write,
        positions,
        *verify,
        bias=step.options.get("conv_bias"),
        backend="kernels",
    )
    q, k, v = split_heads(mixed, hv, 128, 128)
    options = {} if step.kind == "gdn" else {"lower_bound": step.bound}
    o = VERIFY[step.kind](
        q, k, v, step.gate, step.b, step.A_log, step.dt_bias, state, read, write, *verify, **options, backend="kernels"
    )
    z = step.z.unflatten(1, (hv, 128)).double()
    activation, eps = ("silu", 1e-6) if step.kind == "gdn" else ("sigmoid", 1e-5)
    return gated_rms_norm(o.double(), z, step.norm_weight.double(), activation, eps).flatten(1)


def of_layer(step, other):
    """`step` with the parameters of `other`'s layer."""
    return replace(
        step,
        weight=other.weight,
        A_log=other.A_log,
        dt_bias=other.dt_bias,
        norm_weight=other.norm_weight,
        options=other.options,
    )


@pytest.mark.parametrize("rows", [9, LATE_VERIFY_HEADS // 3 + 1])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("weight", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "bound", "hk", "hv"), [("gdn", None, 2, 6), ("kda", None, 3, 3), ("kda", -5.0, 4, 4)])
def test_states_windows_and_logs_equal_the_single_operators(kind, bound, hk, hv, dtype, weight, bias, rows):
    """Bitwise over six steps of every length and accepted count, in place and into other slots, with ids that mean none."""
    layer = make_step(kind, bound, 1, hk, hv, weight=weight, bias=bias)
    windows, state = make_pools(2 * rows, layer, dtype)
    log = make_log(layer, rows)
    other = windows.clone(), state.clone(), copied(log)
    positions = torch.arange(rows, dtype=torch.int32, device="cuda") * 3
    read, accepted = torch.randperm(2 * rows, device="cuda")[:rows].to(torch.int32), ids(*[0] * rows, device="cuda")
    lengths = [row % 9 for row in range(rows)]
    for t in range(6):
        write = read.clone()
        if t % 2:
            write = torch.tensor([i for i in range(2 * rows) if i not in read.tolist()], dtype=torch.int32)[
                :rows
            ].cuda()
        if t == 3:
            write[4] = -1
            read[5] = 10**6
            read[6] = write[6] = -7
        cu, extra = cu_seqlens(lengths, "cuda"), 3
        step = of_layer(make_step(kind, bound, sum(lengths) + extra, hk, hv, seed=t), layer)
        arguments = (read, write, positions, cu)
        out = fused(step, windows, state, *arguments, log, accepted)
        expected = apart(step, *other[:2], *arguments, other[2], accepted)
        assert same(state, other[1]), t
        assert same(windows, other[0]), t
        assert same_logs(log, other[2]), t
        assert_close(out, expected, 0.004, f"out of step {t}")
        assert not out[sum(lengths) :].any()
        log.half.bitwise_xor_(1)
        positions += accepted
        accepted = ids(*[(2 * t + 3 * row + 1) % (n + 1) for row, n in enumerate(lengths)], device="cuda")
        lengths = [(n + 2 + row) % 9 for row, n in enumerate(lengths)]
        read = torch.where(write < 0, read, write)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "bound"), KINDS)
def test_rows_do_not_depend_on_the_batch_and_repeat_exactly(kind, bound, dtype):
    """More blocks than fit at once and shared windows: a race over a ring or a log would show as a difference."""
    rows, tokens, hk, hv = 70, 6, 2, 4 if kind == "gdn" else 2
    step = make_step(kind, bound, rows * tokens, hk, hv)
    windows, state = make_pools(rows, step, dtype)
    slots, positions = torch.randperm(rows, device="cuda").to(torch.int32), torch.arange(rows, dtype=torch.int32).cuda()
    cu = positions.new_tensor(range(0, rows * tokens + 1, tokens))
    filled = make_log(step, rows)
    fused(step, windows.clone(), state.clone(), slots, slots, positions, cu, filled, positions * 0)
    filled.half.bitwise_xor_(1)
    accepted = positions % (tokens + 1)
    now, log = (windows.clone(), state.clone()), copied(filled)
    first, different = None, torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(1000):
        for target, start in zip(
            (*now, log.k, log.u, log.g, log.x), (windows, state, filled.k, filled.u, filled.g, filled.x)
        ):
            target.copy_(start)
        out = fused(step, *now, slots, slots, positions, cu, log, accepted)
        found = (out, *now, log.k, log.u, log.g, log.x)
        first = first or [x.clone() for x in found]
        for x, y in zip(found, first):
            different |= (bits(x) != bits(y)).any()
    assert not different
    for row in (0, 33, 69):
        part, one, log = step.rows(slice(row * tokens, (row + 1) * tokens)), slice(row, row + 1), copied(filled)
        log.rows = ids(row, device="cuda")
        alone = fused(
            part, windows, state, slots[one].clone(), ids(-1, device="cuda"), positions[one].clone(), cu[:2].contiguous(), log,
            accepted[one].clone(),
        )  # fmt: skip
        assert same(alone, first[0][row * tokens : (row + 1) * tokens])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_settled_layers_in_a_graph_with_tracking_equal_eager_steps(kind, dtype):
    """Two layers and the tracking of a step, captured once and replayed with new inputs and accepted counts."""
    rows, tokens, layers, hk, hv = 4, 3, 2, 2, 2
    steps = [[make_step(kind, None, rows * tokens, hk, hv, seed=7 * t + n) for n in range(layers)] for t in range(5)]
    steps = [[of_layer(step, steps[0][n]) for n, step in enumerate(row)] for row in steps]
    counts = [ids(*[(t + row) % (tokens + 1) if t else 0 for row in range(rows)], device="cuda") for t in range(5)]
    cu = cu_seqlens([tokens] * rows, "cuda")
    pools = [make_pools(2 * rows, steps[0][n], dtype, seed=n) for n in range(layers)]

    def world():
        logs = [make_log(steps[0][n], rows) for n in range(layers)]
        for log in logs[1:]:
            log.half = logs[0].half
        slots = torch.arange(rows, dtype=torch.int32, device="cuda") * 2
        return [tuple(x.clone() for x in pair) for pair in pools], logs, slots, slots.clone(), slots * 5

    def run(parts, inputs, accepted, settled):
        pairs, logs, read, write, positions = parts
        outs = []
        for n, step in enumerate(inputs):
            verify = {"cu_seqlens": cu, "draft_log": logs[n], "num_accepted": accepted}
            outs.append(step.kernel(*pairs[n], read, write, positions, settled=settled and n > 0, **verify))
        advance_state_ids(read, write, positions, num_slots=2 * rows, num_accepted=accepted, log_half=logs[0].half)
        return outs

    eager, captured, warm = world(), world(), world()
    accepted = counts[0].clone()
    static = [
        replace(step, **{name: getattr(step, name).clone() for name in ("x", "z", "gate", "b")}) for step in steps[0]
    ]
    run(warm, static, accepted, True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = run(captured, static, accepted, True)
    for t, inputs in enumerate(steps):
        expected = run(eager, inputs, counts[t], False)
        for mine, theirs in zip(static, inputs):
            for name in ("x", "z", "gate", "b"):
                getattr(mine, name).copy_(getattr(theirs, name))
        accepted.copy_(counts[t])
        graph.replay()
        assert all(same(a, b) for a, b in zip(outs, expected)), t
    for a, b in zip(eager[0], captured[0]):
        assert all(same(p, q) for p, q in zip(a, b))
    assert torch.equal(eager[4], captured[4])


def test_F3_counts_out_of_range_touch_nothing():
    step = make_step("gdn", None, 9, 1, 2)
    windows, state = make_pools(4, step, torch.float32)
    log = make_log(step, 3)
    before = windows.clone(), state.clone(), copied(log)
    slots = ids(0, 1, 2, device="cuda")
    out = fused(
        step,
        windows,
        state,
        slots,
        slots,
        slots,
        cu_seqlens([3, 3, 3], "cuda"),
        log,
        ids(-1, 9, 1 << 30, device="cuda"),
    )
    assert not out.any()
    assert same(windows, before[0])
    assert same(state, before[1])
    assert same_logs(log, before[2])


def test_no_rows():
    step = make_step("gdn", None, 2, 1, 2)
    windows, state = make_pools(2, step, torch.float32)
    none = torch.empty(0, dtype=torch.int32, device="cuda")
    out = fused(step, windows, state, none, none, none, ids(0, device="cuda"), make_log(step, 1), none)
    assert not out.any()


def test_logs_that_do_not_fit_are_named():
    step = make_step("gdn", None, 2, 1, 2)
    windows, state = make_pools(2, step, torch.float32)
    slots = ids(0, 1, device="cuda")
    log = make_log(step, 2)
    log.x = None
    with pytest.raises(InvalidArgumentError, match="draft_log"):
        fused(step, windows, state, slots, slots, slots, cu_seqlens([1, 1], "cuda"), log, slots)
    with pytest.raises(InvalidArgumentError, match="draft_log"):
        fused(step, windows, state, slots, slots, slots, cu_seqlens([1, 1], "cuda"), make_log(step, 1), slots)


@pytest.mark.parametrize(("kind", "bound"), KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_verify_against_the_reference(kind, bound, dtype):
    hk = hv = 4
    step = make_step(kind, bound, 8, hk, hv)
    channels = step.x.shape[1]
    read, write, positions = ids(0, 1, -1, device="cuda"), ids(0, 3, -1, device="cuda"), ids(5, 2, 0, device="cuda")
    accepted = ids(0, 2, 1, device="cuda")
    cu = cu_seqlens([3, 4, 1], device="cuda")
    windows, state = make_pools(4, step, dtype, used=(0, 1))
    log = DraftLog.allocate(kind, 3, hk, hv, channels, "cuda")
    for tensor in (log.k, log.u, log.g, log.x):
        tensor.normal_(std=0.1)
    if kind == "gdn":
        log.g.abs_().clamp_(max=1.0)
    apart = DraftLog(*(t.clone() for t in (log.k, log.u, log.g, log.x, log.half)))
    pools = windows.clone(), state.clone()
    out = step.kernel(windows, state, read, write, positions, cu_seqlens=cu, draft_log=log, num_accepted=accepted)
    expected = step.run(
        ORACLE[kind], *pools, read, write, positions, cu_seqlens=cu, draft_log=apart, num_accepted=accepted
    )  # fmt: skip
    assert_close(out, expected, 0.006, "out")
    assert not out[7].any()
    for slot in (0, 3):
        assert_close(state[slot], pools[1][slot], tolerance("verify", "randn", "state", dtype), f"state {slot}")
