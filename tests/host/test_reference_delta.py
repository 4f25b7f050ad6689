"""GDN and KDA references against a plain float64 loop written here from the definition, and chunkwise against them."""

import math

import pytest
import torch

from compact_state.cute_kernels.checkpoints import Checkpoints
from compact_state.cute_kernels.reference import datasets as ds
from compact_state.cute_kernels.reference import gdn, kda, metrics
from compact_state.cute_kernels.reference.gates import kda_log_decay

DECODE = {"gdn": gdn.gdn_decode, "kda": kda.kda_decode}
PREFILL = {"gdn": gdn.gdn_prefill, "kda": kda.kda_prefill}
CHUNKED = {"gdn": gdn.gdn_prefill_chunked, "kda": kda.kda_prefill_chunked}
VARIANTS = [("gdn", None), ("kda", None), ("kda", -5.0)]
D = torch.float64


def log_decay(inputs, t, h):
    """Scalar Python float or list of floats, from the definition of the gates."""
    rate = math.exp(float(inputs.A_log[h]))

    def softplus(x):
        return x if x > 20 else math.log1p(math.exp(x))

    if inputs.kind == "gdn":
        return [-rate * softplus(float(inputs.gate[t, h]) + float(inputs.dt_bias[h]))]
    biased = [float(f) + float(d) for f, d in zip(inputs.gate[t, h], inputs.dt_bias[h])]
    if inputs.lower_bound is None:
        return [-rate * softplus(x) for x in biased]
    return [inputs.lower_bound / (1 + math.exp(-rate * x)) if -rate * x < 700 else 0.0 for x in biased]


def plain_loop(inputs, lengths, initial, wanted=()):
    """The recurrence of one head at a time: outputs [T, HV, V], final states, states after wanted tokens."""
    hk, k_dim = inputs.k.shape[1:]
    hv, v_dim = inputs.v.shape[1:]
    out = torch.zeros(sum(lengths), hv, v_dim, dtype=D)
    final, kept, start = initial.to(D).clone(), {}, 0
    for n, length in enumerate(lengths):
        for h in range(hv):
            S = final[n, h].clone()
            for t in range(start, start + length):
                head = h // (hv // hk)
                q, k, v = inputs.q[t, head].to(D), inputs.k[t, head].to(D), inputs.v[t, h].to(D)
                q, k = q / math.sqrt(float(q @ q) + 1e-6), k / math.sqrt(float(k @ k) + 1e-6)
                S = S * torch.tensor([math.exp(g) for g in log_decay(inputs, t, h)], dtype=D)
                beta = 1 / (1 + math.exp(-float(inputs.b[t, h])))
                S = S + torch.outer(beta * (v - S @ k), k)
                out[t, h] = (S @ q) / math.sqrt(k_dim)
                if (n, t - start + 1) in wanted:
                    kept[n, t - start + 1, h] = S.clone()
            final[n, h] = S
        start += length
    return out, final, kept


def small(kind, dataset, tokens, bound=None, hk=2, hv=4, seed=0, dtype=torch.bfloat16):
    return ds.delta_inputs(
        kind, dataset, tokens, hk, hv, head_dim_k=16, head_dim_v=24, lower_bound=bound, seed=seed, dtype=dtype
    )


@pytest.mark.parametrize(("kind", "bound"), VARIANTS)
@pytest.mark.parametrize("dataset", ds.DATASETS)
def test_prefill_matches_plain_loop(kind, bound, dataset):
    lengths = (1, 19, 0, 16, 4)
    inputs = small(kind, dataset, sum(lengths), bound)
    initial = ds.initial_states(5, 4, 24, 16, dataset=dataset).to(D)
    pool = ds.make_pool(8, (4, 24, 16), D)
    pool[1], pool[2], pool[6], pool[4] = initial[0], initial[1], initial[3], initial[4]
    initial[2] = 0
    read, write = ds.ids(1, 2, -1, 6, 4), ds.ids(3, 2, 5, 0, 99)
    out = PREFILL[kind](
        *inputs.tensors, pool, read, write, ds.cu_seqlens(lengths), compute_dtype=D, **inputs.gate_options
    )
    expected, final, _ = plain_loop(inputs, lengths, initial)
    assert out.dtype == torch.bfloat16
    assert metrics.ulp_distance(out, expected) <= 1
    for slot, n in ((3, 0), (2, 1), (5, 2), (0, 3)):
        torch.testing.assert_close(pool[slot], final[n], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("kind", "bound"), VARIANTS)
def test_decode_matches_plain_loop_and_prefill(kind, bound):
    """A step per token gives the prefill's states, and the same bits as a prefill of one token."""
    inputs = small(kind, "randn", 6, bound)
    initial = ds.initial_states(1, 4, 24, 16)
    pool = ds.make_pool(3, (4, 24, 16))
    pool[0] = initial[0]
    outs = []
    for t in range(6):
        step = inputs.rows(slice(t, t + 1))
        read = ds.ids(0 if t == 0 else 1)
        outs.append(DECODE[kind](*step.tensors, pool, read, ds.ids(1), **inputs.gate_options))
    packed = ds.make_pool(2, (4, 24, 16))
    packed[0] = initial[0]
    out = PREFILL[kind](*inputs.tensors, packed, ds.ids(0), ds.ids(1), ds.cu_seqlens([6]), **inputs.gate_options)
    expected, final, _ = plain_loop(inputs, [6], initial)
    assert metrics.ulp_distance(torch.cat(outs), expected) <= 2
    assert metrics.rms_ratio(pool[1], final[0]) < 1e-6
    assert torch.equal(torch.cat(outs), out)
    assert torch.equal(pool[1], packed[1])
    assert torch.equal(pool[0], initial[0])


@pytest.mark.parametrize(("kind", "bound"), VARIANTS)
@pytest.mark.parametrize("dataset", ds.DATASETS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_chunked_matches_recurrence_on_hard_data(kind, bound, dataset, dtype):
    """E1, E7: any gate, correlated keys, ragged lengths. fp32 arithmetic stays far inside the tolerances."""
    tokens = sum(ds.RAGGED_LENGTHS)
    inputs = ds.delta_inputs(kind, dataset, tokens, 1, 2, head_dim_k=32, head_dim_v=16, lower_bound=bound, dtype=D)
    count = len(ds.RAGGED_LENGTHS)
    initial = ds.initial_states(count, 2, 16, 32, dataset=dataset).to(D)
    slots, cu = torch.arange(count, dtype=torch.int32), ds.cu_seqlens(ds.RAGGED_LENGTHS)
    by_token, by_chunk = initial.clone(), initial.clone()
    expected = PREFILL[kind](*inputs.tensors, by_token, slots, slots, cu, compute_dtype=D, **inputs.gate_options)
    out = CHUNKED[kind](*inputs.tensors, by_chunk, slots, slots, cu, compute_dtype=dtype, **inputs.gate_options)
    limit = 1e-12 if dtype == D else 2e-5
    assert bool(torch.isfinite(out).all())
    assert float((out - expected).norm() / expected.norm()) < limit
    assert float((by_chunk - by_token).norm() / by_token.norm()) < limit


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 63, 64, 65, 200])
@pytest.mark.parametrize("chunk", [16, 64])
def test_C4_chunk_boundaries_with_a_non_symmetric_state(tokens, chunk):
    inputs = ds.delta_inputs("kda", "trained_fast", tokens, 1, 1, head_dim_k=32, head_dim_v=16, dtype=D)
    initial = ds.initial_states(1, 1, 16, 32).to(D)
    by_token, by_chunk = initial.clone(), initial.clone()
    one, cu = ds.ids(0), ds.cu_seqlens([tokens])
    expected = kda.kda_prefill(*inputs.tensors, by_token, one, one, cu, compute_dtype=D)
    out = kda.kda_prefill_chunked(*inputs.tensors, by_chunk, one, one, cu, compute_dtype=D, chunk=chunk)
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(by_chunk, by_token, rtol=1e-11, atol=1e-13)


def test_E7_equal_keys_keep_the_inverse_bounded():
    """64 equal keys, beta 1, no decay: each token replaces the value of the one key."""
    tokens = 64
    key = torch.nn.functional.normalize(torch.ones(1, 1, 16, dtype=D), dim=-1).expand(tokens, 1, 16)
    v = torch.arange(tokens, dtype=D)[:, None, None].expand(tokens, 1, 4).contiguous()
    closed, open_ = torch.full((tokens, 1), -1000.0, dtype=D), torch.full((tokens, 1), 1000.0, dtype=D)
    pool = torch.zeros(1, 1, 4, 16, dtype=D)
    zero = torch.zeros(1)
    out = gdn.gdn_prefill_chunked(
        key, key, v, closed, open_, zero, zero, pool, ds.ids(-1), ds.ids(0), ds.cu_seqlens([tokens]),
        scale=1.0, qk_l2norm=False, compute_dtype=D,
    )  # fmt: skip
    torch.testing.assert_close(out, v, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(("kind", "bound"), VARIANTS)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_checkpoints_equal_the_state_after_that_many_tokens(kind, bound, state_dtype, chunked):
    """On and off the chunk grid; ends outside the sequence and ids out of range are ignored."""
    lengths = (37, 3, 70)
    ends = [[1, 16, 36, 37], [2], [5, 64, 65, 70]]
    inputs = small(kind, "trained_fast", sum(lengths), bound)
    pool = ds.make_pool(16, (4, 24, 16), state_dtype)
    pool[0] = ds.initial_states(1, 4, 24, 16)[0].to(state_dtype)
    slots = iter(range(4, 16))
    entries = [[(end, next(slots)) for end in per] for per in ends]
    bad = [(0, 13), (38, 13), (9, 99), (9, -1)]
    checkpoints = Checkpoints.from_lists([entries[0] + bad, entries[1], entries[2]])
    initial = torch.zeros(3, 4, 24, 16, dtype=D)
    initial[0] = pool[0].to(D)
    run = CHUNKED[kind] if chunked else PREFILL[kind]
    run(
        *inputs.tensors, pool, ds.ids(0, -1, -1), ds.ids(1, 2, 3), ds.cu_seqlens(lengths),
        checkpoints=checkpoints, **inputs.gate_options,
    )  # fmt: skip
    wanted = {(n, end) for n, per in enumerate(ends) for end in per}
    _, final, kept = plain_loop(inputs, lengths, initial, wanted)
    for n, per in enumerate(entries):
        for end, slot in per:
            expected = torch.stack([kept[n, end, h] for h in range(4)])
            assert metrics.rms_ratio(pool[slot], expected) < (3e-3 if state_dtype == torch.bfloat16 else 3e-6)
    last = [entries[0][-1][1], entries[2][-1][1]]
    assert torch.equal(pool[last[0]], pool[1]), "a checkpoint at the end is the final state"
    assert torch.equal(pool[last[1]], pool[3])
    assert bool(pool[13].isnan().all()), "ends outside the sequence write nothing"
    assert metrics.rms_ratio(pool[2], final[1]) < 4e-3


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_C7_value_head_uses_key_head_of_its_group(kind):
    """Grouped, not tiled: of 32 value heads over 16 key heads, head 16 reads key head 8."""
    inputs = ds.delta_inputs(kind, "zero", 1, 16, 32, head_dim_k=16, head_dim_v=4, dtype=D, packed=False)
    inputs.q.zero_()
    inputs.k.zero_()
    heads = torch.arange(16)
    inputs.q[0, heads, heads] = 1
    inputs.k[0, heads, heads] = 1
    pool = torch.zeros(1, 32, 4, 16, dtype=D)
    DECODE[kind](*inputs.tensors, pool, ds.ids(-1), ds.ids(0), compute_dtype=D, **inputs.gate_options)
    touched = pool[0].abs().sum(1).argmax(-1)
    assert touched.tolist() == [h // 2 for h in range(32)]
    assert touched[16] == 8


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_E4_beta_is_not_rounded_to_the_input_dtype(kind):
    """beta(0.5) is 0.6224593 although b is bf16, so the fp32 state error stays flat over 400 steps."""
    inputs = ds.delta_inputs(kind, "trained", 8, 1, 1, head_dim_k=16, head_dim_v=16)
    inputs.b.fill_(0.5)
    single, double = torch.zeros(1, 1, 16, 16), torch.zeros(1, 1, 16, 16, dtype=D)
    one = ds.ids(0)
    for t in range(400):
        step = inputs.rows(slice(t % 8, t % 8 + 1))
        DECODE[kind](*step.tensors, single, one, one, **inputs.gate_options)
        DECODE[kind](*step.tensors, double, one, one, compute_dtype=D, **inputs.gate_options)
        if t == 0:
            _, k, v, *_ = step.tensors
            key = k[0, 0].double() / (k[0, 0].double().square().sum() + 1e-6).sqrt()
            effective = double[0, 0] @ key / (v[0, 0].double() * key.square().sum())
            torch.testing.assert_close(effective, torch.full((16,), 0.6224593312018546, dtype=D), rtol=1e-9, atol=0)
    assert metrics.rms_ratio(single, double) < 1e-5


def test_E6_fp16_inputs_and_a_large_state_stay_finite():
    q = torch.ones(1, 1, 128, dtype=torch.float16)
    v = torch.zeros(1, 1, 128, dtype=torch.float16)
    closed = torch.full((1, 1), -1000.0, dtype=torch.float16)
    pool = torch.full((1, 1, 128, 128), 1e5)
    out = torch.empty(1, 1, 128)
    zero = torch.zeros(1)
    gdn.gdn_decode(q, q, v, closed, closed, zero, zero, pool, ds.ids(0), ds.ids(0), out=out)
    torch.testing.assert_close(out, torch.full((1, 1, 128), 1e5), rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("lengths", [(65, 64), (1, 63), (127, 1)])
@pytest.mark.parametrize("neighbour", [1e4, math.nan])
def test_E8_a_sequence_is_unaffected_by_its_neighbour(kind, lengths, neighbour):
    inputs = small(kind, "randn", sum(lengths))
    spoiled = small(kind, "randn", sum(lengths))
    first = lengths[0]
    for x in (spoiled.q, spoiled.k, spoiled.v, spoiled.gate, spoiled.b):
        x[first:] = neighbour
    for run in (PREFILL[kind], CHUNKED[kind]):
        results = []
        for data in (inputs, spoiled):
            pool = torch.zeros(2, 4, 24, 16)
            out = run(*data.tensors, pool, ds.ids(-1, -1), ds.ids(0, 1), ds.cu_seqlens(lengths), **data.gate_options)
            results.append((out[:first], pool[0]))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("chunked", [False, True])
def test_E12_empty_sequences_keep_their_state(kind, chunked):
    inputs = small(kind, "randn", 0)
    pool = ds.make_pool(4, (4, 24, 16))
    pool[0] = 7.0
    run = CHUNKED[kind] if chunked else PREFILL[kind]
    out = run(*inputs.tensors, pool, ds.ids(0, -1), ds.ids(1, 2), ds.cu_seqlens([0, 0]), **inputs.gate_options)
    assert out.shape == (0, 4, 24)
    assert bool((pool[1] == 7.0).all())
    assert bool((pool[2] == 0.0).all())
    assert bool(pool[3].isnan().all())


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("chunked", [False, True])
def test_E15_rows_beyond_the_last_sequence_are_zero(kind, chunked):
    inputs = small(kind, "randn", 20)
    out = torch.full((20, 4, 24), math.nan, dtype=torch.bfloat16)
    pool = torch.zeros(1, 4, 24, 16)
    run = CHUNKED[kind] if chunked else PREFILL[kind]
    result = run(*inputs.tensors, pool, ds.ids(0), ds.ids(0), ds.cu_seqlens([13]), out=out, **inputs.gate_options)
    assert result is out
    assert bool((out[13:] == 0).all())
    assert bool(out[:13].isfinite().all())


def test_E11_gate_modes_differ_and_match_their_formulas():
    raw, A_log, bias = torch.full((1, 1, 16), 0.7, dtype=D), torch.zeros(1, dtype=D), torch.zeros(16, dtype=D)
    unbounded = kda_log_decay(raw, A_log, bias, None)
    bounded = kda_log_decay(raw, A_log, bias, -5.0)
    torch.testing.assert_close(unbounded, torch.full_like(unbounded, -math.log1p(math.exp(0.7))), rtol=1e-12, atol=0)
    torch.testing.assert_close(bounded, torch.full_like(bounded, -5 / (1 + math.exp(-0.7))), rtol=1e-12, atol=0)
    assert float(unbounded[0, 0, 0]) != float(bounded[0, 0, 0])


@pytest.mark.parametrize("g", [-8.0, -5.0, -4.0, -2.0, -1.0, -0.1, 0.0])
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_E10_constant_gates(kind, g):
    """Both forms against the plain loop; a single pair decays by exp(g), not by 2 ** g (E3)."""
    inputs = small(kind, "zero", 70, hk=1, hv=1)
    inputs.gate.fill_(math.log(math.expm1(-g)) if g else -1000.0)
    expected, final, _ = plain_loop(inputs, [70], torch.zeros(1, 1, 24, 16))
    for run in (PREFILL[kind], CHUNKED[kind]):
        pool = torch.zeros(1, 1, 24, 16)
        out = run(*inputs.tensors, pool, ds.ids(-1), ds.ids(0), ds.cu_seqlens([70]), **inputs.gate_options)
        metrics.assert_close(out, expected, 0.002, "output")
        metrics.assert_close(pool, final, 1e-5, "state")
    if g == -1.0:
        pool = torch.ones(1, 1, 24, 16, dtype=D)
        q, k, v, gate, b, *parameters = inputs.rows(slice(0, 1)).tensors
        DECODE[kind](q, k * 0, v, gate, b, *parameters, pool, ds.ids(0), ds.ids(0), compute_dtype=D)
        torch.testing.assert_close(float(pool[0, 0, 0, 0]), 0.36788, rtol=2e-2, atol=0)


@pytest.mark.parametrize("case", ["one spike", "fast everywhere", "half kept, half dropped"])
def test_E1_unbounded_gates(case):
    """One channel at -2661, all at -6 (span 384), a mix of 0 and -50: finite and equal to the plain loop."""
    inputs = small("kda", "zero", 64, hk=1, hv=1)

    def raw(g):
        return -g if g < -20 else math.log(math.expm1(-g))

    if case == "one spike":
        inputs.gate.fill_(raw(-0.01))
        inputs.gate[10, 0, 3] = raw(-2661.0)
    elif case == "fast everywhere":
        inputs.gate.fill_(raw(-6.0))
    else:
        inputs.gate[..., 1::2] = raw(-50.0)
    initial = ds.initial_states(1, 1, 24, 16)
    expected, final, _ = plain_loop(inputs, [64], initial)
    for run in (kda.kda_prefill, kda.kda_prefill_chunked):
        pool = initial.clone()
        out = run(*inputs.tensors, pool, ds.ids(0), ds.ids(0), ds.cu_seqlens([64]))
        metrics.assert_close(out, expected, 0.002, "output")
        metrics.assert_close(pool, final, 1e-5, "state")


def test_datasets_have_the_statistics_they_promise():
    inputs = ds.delta_inputs("kda", "trained", 256, 1, 12)
    keys = torch.nn.functional.normalize(inputs.k[:, 0].float(), dim=-1)
    cosine = (keys @ keys.T).mean()
    assert 0.9 < float(cosine) < 0.96
    again = ds.delta_inputs("kda", "trained", 256, 1, 12)
    assert torch.equal(inputs.q, again.q)
    assert inputs.q.stride(0) > inputs.q.shape[1] * inputs.q.shape[2], "packed inputs are views of a wider row"
    with pytest.raises(ValueError, match="randn, trained"):
        ds.delta_inputs("kda", "nonsense", 1, 1, 1)


def test_metrics_can_fail():
    reference = torch.randn(64)
    with pytest.raises(AssertionError, match="worst at"):
        metrics.assert_close(reference * 1.01, reference, 0.002)
    with pytest.raises(AssertionError, match="1 of 64 not finite"):
        metrics.assert_close(reference.index_fill(0, torch.tensor([3]), math.nan), reference, 0.002)
    assert metrics.ulp_distance(torch.tensor([1.0]).bfloat16(), torch.tensor([1.0078125])) == 1
    assert metrics.tolerance("prefill", "trained", "state", torch.float32) == 0.01
    assert metrics.tolerance("decode", "trained", "state", torch.bfloat16) == 0.004
