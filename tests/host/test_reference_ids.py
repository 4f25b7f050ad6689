"""The slot-id rule for every reference operator, device-side tracking, and the fused layer step."""

import math

import pytest
import torch

from compact_state.cute_kernels.draft_log import DraftLog
from compact_state.cute_kernels.reference import conv1d, gdn, kda, layer, state_ids
from compact_state.cute_kernels.reference import datasets as ds

VARIANTS = [("gdn", None), ("kda", None), ("kda", -5.0)]
DECODE = {"gdn": gdn.gdn_decode, "kda": kda.kda_decode}
PREFILL = {"gdn": gdn.gdn_prefill, "kda": kda.kda_prefill}
CHUNKED = {"gdn": gdn.gdn_prefill_chunked, "kda": kda.kda_prefill_chunked}
HK, HV, K, V, W = 2, 4, 16, 24, 4
C = 2 * HK * K + HV * V


def small(kind, tokens, bound=None, seed=0):
    return ds.delta_inputs(kind, "randn", tokens, HK, HV, head_dim_k=K, head_dim_v=V, lower_bound=bound, seed=seed)


def poisoned(slots, live, dtype=torch.float32):
    """NaN everywhere but in the live slots, with a padded slot stride."""
    pool = ds.make_pool(slots, (HV, V, K), dtype)
    pool[list(live)] = ds.initial_states(len(live), HV, V, K).to(dtype)
    return pool


def same(a, b):
    return torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


@pytest.mark.parametrize(("kind", "bound"), VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_A10_decode_ids(kind, bound, dtype):
    """In place, into another slot, from none, to none, both none; two rows read one slot; the rest is bit-identical."""
    read = ds.ids(1, 1, -1, 4, -1, 6, 2000000000)
    write = ds.ids(0, 1, 3, -1, -1, 2**31 - 1, 6)
    inputs = small(kind, 7, bound)
    inputs.q[4], inputs.k[4], inputs.v[4] = math.nan, math.nan, math.nan
    pool = poisoned(6, (1, 4), dtype)
    before = pool.clone()
    out = torch.full((7, HV, V), math.nan, dtype=torch.bfloat16)
    DECODE[kind](*inputs.tensors, pool, read, write, out=out, **inputs.gate_options)
    assert bool((out[4:] == 0).all())
    for n, (source, target) in enumerate([(1, 0), (1, 1), (None, 3), (4, None)]):
        alone = ds.make_pool(2, (HV, V, K), dtype)
        if source is not None:
            alone[0] = before[source]
        row = inputs.rows(slice(n, n + 1))
        expected = DECODE[kind](*row.tensors, alone, ds.ids(-1 if source is None else 0), ds.ids(1), **row.gate_options)
        assert torch.equal(out[n : n + 1], expected)
        if target is not None:
            assert torch.equal(pool[target], alone[1])
    assert same(pool[[2, 4, 5]], before[[2, 4, 5]])


@pytest.mark.parametrize("run", [PREFILL, CHUNKED])
@pytest.mark.parametrize(("kind", "bound"), VARIANTS)
def test_prefill_ids(run, kind, bound):
    """As decode, but both none still computes outputs from a zero state."""
    lengths = (5, 1, 0, 18, 3)
    read, write = ds.ids(1, 1, 4, -1, -5), ds.ids(0, 1, 2, -1, 9)
    inputs = small(kind, sum(lengths), bound)
    pool = poisoned(6, (1, 4))
    before = pool.clone()
    out = run[kind](*inputs.tensors, pool, read, write, ds.cu_seqlens(lengths), **inputs.gate_options)
    start = 0
    for n, length in enumerate(lengths):
        alone = ds.make_pool(2, (HV, V, K))
        valid = 0 <= read[n] < 6
        if valid:
            alone[0] = before[read[n]]
        row = inputs.rows(slice(start, start + length))
        expected = run[kind](
            *row.tensors, alone, ds.ids(0 if valid else -1), ds.ids(1), ds.cu_seqlens([length]), **row.gate_options
        )
        assert torch.equal(out[start : start + length], expected)
        if 0 <= write[n] < 6:
            assert torch.equal(pool[write[n]], alone[1])
        start += length
    assert bool(out[5:].isfinite().all())
    assert same(pool[3:], before[3:])


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_rows_do_not_depend_on_the_batch_or_on_slot_numbers(kind):
    inputs = small(kind, 33)
    initial = ds.initial_states(33, HV, V, K)
    straight = initial.clone()
    slots = torch.arange(33, dtype=torch.int32)
    out = DECODE[kind](*inputs.tensors, straight, slots, slots, **inputs.gate_options)
    order = torch.randperm(33, generator=torch.Generator().manual_seed(0))
    place = torch.randperm(33, generator=torch.Generator().manual_seed(1))
    scattered = torch.empty_like(initial)
    scattered[place] = initial
    some = order[:13]
    rows = inputs.rows(some)
    moved = place[some].to(torch.int32)
    part = DECODE[kind](*rows.tensors, scattered, moved, moved, **rows.gate_options)
    assert torch.equal(part, out[some])
    assert torch.equal(scattered[place[some]], straight[some])


def test_packed_views_equal_contiguous_inputs():
    for kind in ("gdn", "kda"):
        inputs = small(kind, 9)
        dense = [x.contiguous() for x in inputs.tensors]
        pools = [torch.zeros(9, HV, V, K), torch.zeros(9, HV, V, K)]
        slots = torch.arange(9, dtype=torch.int32)
        first = DECODE[kind](*inputs.tensors, pools[0], slots, slots, **inputs.gate_options)
        second = DECODE[kind](*dense, pools[1], slots, slots, **inputs.gate_options)
        assert torch.equal(first, second)
        assert torch.equal(pools[0], pools[1])


def test_advance_state_ids():
    read, write = ds.ids(5, -1, 7, 3), ds.ids(1, 2, -1, 8)
    positions, half, spare = ds.ids(10, 0, 4, 4), ds.ids(0, 1, 1, 0), ds.ids(6, 7, 8, 9)
    state_ids.advance_state_ids(
        read, write, positions, num_slots=8, num_accepted=ds.ids(3, 0, 2, 1), num_tokens=ds.ids(9, 9, 9, 9),
        log_half=half, next_write_ids=spare,
    )  # fmt: skip
    assert read.tolist() == [1, 2, 7, 3]
    assert positions.tolist() == [13, 0, 4, 4]
    assert half.tolist() == [1, 0, 1, 0]
    assert write.tolist() == [6, 7, -1, 8]
    state_ids.advance_state_ids(read, write, positions, num_slots=8, num_tokens=ds.ids(4, 5, 6, 7))
    assert positions.tolist() == [17, 5, 4, 4]
    state_ids.advance_state_ids(read, write, positions, num_slots=8)
    assert positions.tolist() == [18, 6, 4, 4]
    assert read.tolist() == [6, 7, 7, 3]
    assert write.tolist() == [6, 7, -1, 8]


def layer_inputs(kind, tokens, seed=0):
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=rng).bfloat16()

    gate = (HV,) if kind == "gdn" else (HV, K)
    weights = torch.Generator().manual_seed(99)
    parameters = (
        torch.randn(C, W, generator=weights).bfloat16(), torch.rand(HV, generator=weights),
        torch.randn(gate, generator=weights), torch.rand(V, generator=weights),
    )  # fmt: skip
    return normal(tokens, C), normal(tokens, *gate), normal(tokens, HV), normal(tokens, HV * V), parameters


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_layer_decode_composes_the_operators(kind):
    x, gate, b, z, (weight, A_log, dt_bias, norm) = layer_inputs(kind, 4)
    read, write, positions = ds.ids(1, -1, 0, -1), ds.ids(3, 2, 0, -1), ds.ids(7, 0, 2, 9)
    states, windows = poisoned(4, (0, 1)), torch.randn(4, W, C).bfloat16()
    states_apart, windows_apart = states.clone(), windows.clone()
    run = layer.gdn_layer_decode if kind == "gdn" else layer.kda_layer_decode
    out = run(x, gate, b, z, weight, windows, A_log, dt_bias, norm, states, read, write, positions)

    mixed = conv1d.causal_conv1d_decode(x, weight, windows_apart, read, write, positions)
    q, k, v = mixed.split([HK * K, HK * K, HV * V], dim=1)
    o = DECODE[kind](
        q.view(4, HK, K), k.view(4, HK, K), v.view(4, HV, V), gate, b, A_log, dt_bias, states_apart, read, write,
        out=torch.empty(4, HV, V),
    ).double()  # fmt: skip
    eps, gates = (1e-6, lambda y: y / (1 + torch.exp(-y))) if kind == "gdn" else (1e-5, torch.sigmoid)
    y = o / torch.sqrt(o.square().mean(-1, keepdim=True) + eps) * norm.double() * gates(z.double().view(4, HV, V))
    torch.testing.assert_close(out.double()[:3], y.flatten(1)[:3], rtol=4e-3, atol=1e-6)
    assert bool((out[3] == 0).all())
    assert same(states, states_apart)
    assert torch.equal(windows, windows_apart)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_layer_verify_equals_layer_steps(kind):
    """Two verify steps of a whole layer, conv log included, equal single steps; a void row stays zero."""
    run = layer.gdn_layer_decode if kind == "gdn" else layer.kda_layer_decode
    states, windows = torch.zeros(3, HV, V, K), torch.zeros(3, W, C).bfloat16()
    log = DraftLog.allocate(kind, 2, HK, HV, C, head_dim_k=K, head_dim_v=V)
    cu, position, committed = ds.cu_seqlens([3, 3]), 4, []
    reference_states, reference_windows = states.clone(), windows.clone()

    def steps(inputs, count, states, windows, position):
        x, gate, b, z, (weight, *parameters) = inputs
        outs = []
        for t in range(count):
            at = slice(t, t + 1)
            outs.append(
                run(
                    x[at], gate[at], b[at], z[at], weight, windows, *parameters, states, ds.ids(1), ds.ids(1),
                    ds.ids(position + t),
                )
            )  # fmt: skip
        return torch.cat(outs) if outs else torch.zeros(0, HV * V).bfloat16()

    for number, accepted in enumerate((0, 2, 3)):
        inputs = layer_inputs(kind, 6, seed=number)
        if committed:
            steps(committed[-1], accepted, reference_states, reference_windows, position)
        x, gate, b, z, (weight, *parameters) = inputs
        out = run(
            x, gate, b, z, weight, windows, *parameters, states, ds.ids(1, -1), ds.ids(1, -1),
            ds.ids(position, 0), cu_seqlens=cu, draft_log=log, num_accepted=ds.ids(accepted, 1),
        )  # fmt: skip
        position += accepted
        expected = steps(inputs, 3, reference_states.clone(), reference_windows.clone(), position)
        assert torch.equal(out[:3], expected)
        assert bool((out[3:] == 0).all())
        assert torch.equal(states, reference_states)
        log.half ^= 1
        committed.append(inputs)
