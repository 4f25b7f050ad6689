"""T = 1 decode kernels on the GPU against the float64 recurrence."""

from __future__ import annotations

import math

import pytest
import torch

from compact_state.cute_kernels import advance_state_ids, gdn_decode, kda_decode, reference
from compact_state.cute_kernels.configs import tables
from compact_state.cute_kernels.errors import UnsupportedConfigError
from compact_state.cute_kernels.reference.datasets import DATASETS, delta_inputs, ids, initial_states, make_pool
from compact_state.cute_kernels.reference.metrics import assert_close, tolerance

pytestmark = pytest.mark.gpu

GEOMETRIES = (
    (16, 16), (8, 8), (32, 32), (16, 32), (4, 8), (4, 16), (2, 8), (16, 48), (4, 12), (1, 1), (1, 2), (3, 3), (1, 6), (8, 24),
    (32, 96),
)  # fmt: skip
KINDS = (("gdn", None), ("kda", None), ("kda", -5.0))
DTYPES = (torch.float32, torch.bfloat16)


def operator(kind):
    return {"gdn": gdn_decode, "kda": kda_decode}[kind]


def oracle(kind):
    return {"gdn": reference.gdn_decode, "kda": reference.kda_decode}[kind]


def filled_pool(slots, hv, dtype, dataset="randn", used=None):
    """A NaN-filled pool on the GPU whose `used` slots (default all) hold states."""
    pool = make_pool(slots, (hv, 128, 128), dtype, device="cuda")
    used = range(slots) if used is None else used
    states = initial_states(len(used), hv, dataset=dataset).to("cuda", dtype)
    for slot, state in zip(used, states):
        pool[slot] = state
    return pool


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def check(kind, bound, dtype, n, hk, hv, dataset="randn", read=None, write=None, slots=None):
    slots = slots or 2 * n
    inputs = delta_inputs(kind, dataset, n, hk, hv, lower_bound=bound, device="cuda", seed=n + hv)
    order = torch.randperm(slots, generator=torch.Generator().manual_seed(n)).tolist()
    read = ids(*order[:n], device="cuda") if read is None else read
    write = ids(*order[n : 2 * n], device="cuda") if write is None else write
    pool = filled_pool(slots, hv, dtype, dataset, used=sorted({i for i in read.tolist() if 0 <= i < slots}))
    expected_pool = pool.double()
    before = pool.clone()
    out = torch.full((n, hv, 128), math.nan, dtype=torch.bfloat16, device="cuda")
    arguments = (*inputs.tensors,)
    operator(kind)(*arguments, pool, read, write, out=out, **inputs.gate_options, backend="kernels")
    expected = oracle(kind)(
        *arguments, expected_pool, read, write, out=torch.empty(n, hv, 128, dtype=torch.float64, device="cuda"),
        **inputs.gate_options, compute_dtype=torch.float64,
    )  # fmt: skip
    assert_close(out, expected, tolerance("decode", dataset, "output", dtype), "out")
    written = sorted({i for i in write.tolist() if 0 <= i < slots})
    for slot in written:
        assert_close(pool[slot], expected_pool[slot], tolerance("decode", dataset, "state", dtype), f"slot {slot}")
    others = [slot for slot in range(slots) if slot not in written]
    assert torch.equal(bits(pool[others]), bits(before[others]))
    return out, pool


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "bound"), KINDS)
@pytest.mark.parametrize(("hk", "hv"), GEOMETRIES)
def test_geometries(kind, bound, dtype, hk, hv):
    if kind == "kda" or hv % hk == 0:
        check(kind, bound, dtype, 5, hk, hv)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "bound"), KINDS)
@pytest.mark.parametrize("dataset", DATASETS)
def test_datasets(kind, bound, dtype, dataset):
    check(kind, bound, dtype, 4, 4, 8, dataset)


def test_E6_a_large_state_is_read_out_finite():
    q = torch.ones(1, 1, 128, dtype=torch.bfloat16, device="cuda")
    closed = torch.full((1, 1), -1000.0, dtype=torch.bfloat16, device="cuda")
    pool = torch.full((1, 1, 128, 128), 1e5, device="cuda")
    zero, slot = torch.zeros(4, device="cuda")[:1], ids(0, device="cuda")
    out = gdn_decode(q, q, torch.zeros_like(q), closed, closed, zero, zero, pool, slot, slot, backend="kernels")
    torch.testing.assert_close(out.float(), torch.full((1, 1, 128), 1e5, device="cuda"), rtol=2**-8, atol=0)
    assert bool((pool == 1e5).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "bound"), KINDS)
def test_J1_a_first_call_is_one_application_in_bounded_memory(kind, bound, dtype, monkeypatch):
    """Nothing is tuned, and nothing chosen before is remembered; another batch chooses again."""
    monkeypatch.setenv(tables.ENVIRONMENT, "off")
    for n in (1, 33, 300):
        inputs = delta_inputs(kind, "randn", n, 1, 2, lower_bound=bound, device="cuda")
        slots = torch.arange(n, dtype=torch.int32, device="cuda")
        first = filled_pool(n, 2, dtype)
        second = first.clone()
        tables.forget()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        out = operator(kind)(*inputs.tensors, first, slots, slots, **inputs.gate_options, backend="kernels")
        assert torch.cuda.max_memory_allocated() - held <= out.numel() * out.element_size() + 1024
        operator(kind)(*inputs.tensors, second, slots, slots, **inputs.gate_options, backend="kernels")
        assert torch.equal(bits(first), bits(second))
    tables.forget()


@pytest.mark.parametrize("bound", [-0.1, -1.0, -2.0, -4.0, -5.0, -8.0])
def test_E10_bounds(bound):
    check("kda", bound, torch.float32, 4, 4, 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("kind", "bound", "n", "hk", "hv"),
    [
        *(("gdn", None, n, 16, 32) for n in (1, 2, 63, 64, 129)),
        ("gdn", None, 2048, 1, 2),
        ("kda", None, 65, 16, 16),
        ("kda", -5.0, 2048, 1, 1),
    ],
)
def test_one_to_2048_rows_cross_every_choice(kind, bound, dtype, n, hk, hv):
    check(kind, bound, dtype, n, hk, hv)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "bound"), KINDS)
def test_A3_A10_ids_out_of_range(kind, bound, dtype):
    read = ids(0, -1, 4, 6, 1_000_000, -1, 3, device="cuda")
    write = ids(0, -1, 5, 7, -1, 2, -(2**31), device="cuda")
    out, _ = check(kind, bound, dtype, 7, 2, 4, read=read, write=write, slots=6)
    assert not out[1].any()
    assert not out[3].any()
    assert not out[4].any()
    assert out[5].any()
    assert out[6].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_place_duplicate_readers_and_copy_on_write(dtype):
    same = ids(3, 1, 0, device="cuda")
    check("gdn", None, dtype, 3, 2, 4, read=same, write=same, slots=5)
    check("gdn", None, dtype, 3, 2, 4, read=ids(2, 2, 2, device="cuda"), write=ids(0, 1, 4, device="cuda"), slots=5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_A1_padded_rows_leave_every_slot_alone(dtype):
    check(
        "gdn",
        None,
        dtype,
        4,
        4,
        8,
        read=ids(1, 2, -1, -1, device="cuda"),
        write=ids(1, 2, -1, -1, device="cuda"),
        slots=5,
    )


@pytest.mark.parametrize(("kind", "bound"), KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_do_not_depend_on_the_batch_or_the_slot(kind, bound, dtype):
    """Bitwise, across tile choices: 3 heads of rows alone, and among 200."""
    hk, hv, n = 8, 16, 200
    inputs = delta_inputs(kind, "trained", n, hk, hv, lower_bound=bound, device="cuda")
    pool = filled_pool(2 * n, hv, dtype, "trained", used=range(n))
    all_ids = torch.arange(n, dtype=torch.int32, device="cuda")
    out = operator(kind)(*inputs.tensors, pool, all_ids, all_ids + n, **inputs.gate_options, backend="kernels")
    for rows in (slice(7, 8), slice(100, 103)):
        alone = inputs.rows(rows)
        chosen = all_ids[rows]
        moved = torch.flip(chosen, (0,)).contiguous()
        small = pool[:n].clone()
        small[moved.long()] = pool[chosen.long()]
        single = operator(kind)(*alone.tensors, small, moved, moved, **alone.gate_options, backend="kernels")
        assert torch.equal(bits(single), bits(out[rows]))
        assert torch.equal(bits(small[moved.long()]), bits(pool[chosen.long() + n]))


@pytest.mark.parametrize(
    ("kind", "bound", "n"), [("gdn", None, 16), ("gdn", None, 130), ("kda", None, 16), ("kda", -5.0, 130)]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_D4_a_thousand_equal_repeats(dtype, kind, bound, n):
    inputs = delta_inputs(kind, "randn", n, 4 if kind == "gdn" else 16, 16, lower_bound=bound, device="cuda")
    pool = filled_pool(2 * n, 16, dtype, used=range(n))
    read = torch.arange(n, dtype=torch.int32, device="cuda")
    write = read + n
    out = torch.empty(n, 16, 128, dtype=torch.bfloat16, device="cuda")
    options = {"out": out, "backend": "kernels", **inputs.gate_options}
    first = operator(kind)(*inputs.tensors, pool, read, write, **options).clone()
    state = pool[n:].clone()
    different = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(1000):
        out.fill_(math.nan)
        pool[n:].fill_(math.nan)
        operator(kind)(*inputs.tensors, pool, read, write, **options)
        different |= (out != first).any() | (pool[n:] != state).any()
    assert not different


def test_more_rows_than_a_grid_dimension_few_of_them_live():
    n, hv = 65_537, 1
    inputs = delta_inputs("gdn", "randn", n, 1, hv, device="cuda")
    live = (0, 1, 30_000, 65_534, 65_535, 65_536)
    pool = filled_pool(2 * len(live), hv, torch.float32, used=range(len(live)))
    read = torch.full((n,), -1, dtype=torch.int32, device="cuda")
    rows = torch.tensor(live, device="cuda")
    few = torch.arange(len(live), dtype=torch.int32, device="cuda")
    read[rows] = few
    write = torch.where(read >= 0, read + len(live), read)
    other = pool.clone()
    out = torch.full((n, hv, 128), math.nan, dtype=torch.bfloat16, device="cuda")
    gdn_decode(*inputs.tensors, pool, read, write, out=out, backend="kernels")
    alone = gdn_decode(*inputs.rows(rows).tensors, other, few, few + len(live), backend="kernels")
    assert torch.equal(out[rows], alone)
    assert torch.equal(bits(pool), bits(other))
    assert int((out != 0).any(dim=(1, 2)).sum()) == len(live)


def test_B6_more_work_items_than_one_grid_dimension_holds():
    n, hv = 2050, 32
    inputs = delta_inputs("gdn", "randn", n, 16, hv, device="cuda")
    pool = torch.empty(n, hv, 128, 128, dtype=torch.bfloat16, device="cuda").normal_()
    start = pool.clone()
    every = torch.arange(n, dtype=torch.int32, device="cuda")
    out = gdn_decode(*inputs.tensors, pool, every, every, backend="kernels")
    for half in (slice(0, 1025), slice(1025, n)):
        part = start[half].clone()
        local = every[: half.stop - half.start].contiguous()
        assert torch.equal(gdn_decode(*inputs.rows(half).tensors, part, local, local, backend="kernels"), out[half])
        assert torch.equal(part, pool[half])


@pytest.mark.parametrize(("kind", "bound"), KINDS)
def test_A13_G17_graph_replays_with_changing_ids_and_inputs(kind, bound):
    """A captured step (decode, tracking) on a side stream equals eager steps, whatever the ids hold at replay."""
    n, hk, hv, slots = 4, 4, 8, 12
    steps = [delta_inputs(kind, "randn", n, hk, hv, lower_bound=bound, device="cuda", seed=s) for s in range(5)]
    static = [x.clone() for x in steps[0].tensors[:5]]
    read, write = ids(0, 1, 2, 3, device="cuda"), ids(4, 5, 6, 7, device="cuda")
    position = ids(0, 0, 0, 0, device="cuda")
    pool = filled_pool(slots, hv, torch.float32)
    eager_pool = pool.clone()
    out = torch.empty(n, hv, 128, dtype=torch.bfloat16, device="cuda")
    parameters = steps[0].tensors[5:]

    def step(pool, read, write, position, tensors, out):
        operator(kind)(*tensors, *parameters, pool, read, write, out=out, **steps[0].gate_options, backend="kernels")
        advance_state_ids(read, write, position, num_slots=slots, backend="kernels")

    warm = pool.clone()
    step(warm, read.clone(), write.clone(), position.clone(), static, out)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        step(pool, read, write, position, static, out)
    eager = [x.clone() for x in (read, write, position)]
    plans = [
        ((0, 1, 2, 3), (4, 5, 6, 7)),
        ((4, -1, 6, 7), (4, -1, 8, 7)),
        ((-1, -1, -1, -1), (-1, -1, -1, -1)),
        ((8, 1, -1, 7), (9, 1, 2, 7)),
    ]
    for inputs, (reads, writes) in zip(steps, plans):
        for target, source in zip(static, inputs.tensors[:5]):
            target.copy_(source)
        for ids_, values in ((read, reads), (eager[0], reads), (write, writes), (eager[1], writes)):
            ids_.copy_(ids(*values))
        graph.replay()
        expected = torch.empty_like(out)
        step(eager_pool, *eager, inputs.tensors[:5], expected)
        assert torch.equal(bits(out), bits(expected))
        assert torch.equal(bits(pool), bits(eager_pool))
        assert torch.equal(read, eager[0])
        assert torch.equal(position, eager[2])


def test_settled_steps_equal_waiting_steps():
    """Launching early changes nothing when neither ids nor slots come from the kernel directly before."""
    n, hv = 2, 16
    inputs = [delta_inputs("gdn", "randn", n, 16, hv, device="cuda", seed=s) for s in range(2)]
    read, write = ids(0, 1, device="cuda"), ids(2, 3, device="cuda")
    pools = [filled_pool(4, hv, torch.float32) for _ in range(2)]
    waited = [pool.clone() for pool in pools]
    for _ in range(20):
        for pool, other, step in zip(pools, waited, inputs):
            early = gdn_decode(*step.tensors, pool, read, write, settled=True, backend="kernels")
            late = gdn_decode(*step.tensors, other, read, write, backend="kernels")
            assert torch.equal(early, late)
            assert torch.equal(bits(pool), bits(other))


@pytest.mark.parametrize("n", [3, 300])
@pytest.mark.parametrize(("kind", "bound"), KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_rows_and_no_live_rows(dtype, kind, bound, n):
    inputs = delta_inputs(kind, "randn", n, 4 if kind == "gdn" else 8, 8, lower_bound=bound, device="cuda")
    pool = filled_pool(2, 8, dtype)
    before = pool.clone()
    none = ids(-1, 2, -5, device="cuda").repeat(n // 3)
    out = torch.full((n, 8, 128), math.nan, dtype=torch.bfloat16, device="cuda")
    options = {**inputs.gate_options, "backend": "kernels"}
    assert not operator(kind)(*inputs.tensors, pool, none, none, out=out, **options).any()
    empty = inputs.rows(slice(0, 0))
    out = operator(kind)(*empty.tensors, pool, none[:0], none[:0], **options)
    assert out.shape == (0, 8, 128)
    assert torch.equal(bits(pool), bits(before))


@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("l2norm", [True, False])
def test_scale_and_l2norm_options(scale, l2norm):
    inputs = delta_inputs("gdn", "trained", 3, 2, 4, device="cuda")
    pool = filled_pool(3, 4, torch.float32, "trained")
    other, every = pool.double(), ids(0, 1, 2, device="cuda")
    options = {"scale": scale, "qk_l2norm": l2norm}
    out = gdn_decode(*inputs.tensors, pool, every, every, **options, backend="kernels")
    double = torch.empty(out.shape, dtype=torch.float64, device="cuda")
    reference.gdn_decode(*inputs.tensors, other, every, every, **options, out=double, compute_dtype=torch.float64)
    assert_close(out, double, 0.002, "out")
    assert_close(pool, other, 0.002, "state")


def test_unserved_combinations_are_refused_before_launch():
    inputs = delta_inputs("gdn", "randn", 2, 2, 4, head_dim_k=64, head_dim_v=64, device="cuda")
    pool = torch.zeros(2, 4, 64, 64, device="cuda")
    both = ids(0, 1, device="cuda")
    with pytest.raises(UnsupportedConfigError, match="K=64, V=64"):
        gdn_decode(*inputs.tensors, pool, both, both, backend="kernels")
    assert not pool.any()


def test_C6_one_object_serves_other_sizes():
    for n, slots in ((1, 8), (17, 64)):
        check("kda", None, torch.float32, n, 4, 4, slots=slots)
