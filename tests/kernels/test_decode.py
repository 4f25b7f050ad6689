"""T = 1 decode kernels on the GPU against the float64 recurrence."""

from __future__ import annotations

import math

import pytest
import torch

from compact_state.cute_kernels import advance_state_ids, gdn_decode, kda_decode, reference
from compact_state.cute_kernels.errors import InvalidArgumentError, UnsupportedConfigError
from compact_state.cute_kernels.reference.datasets import DATASETS, delta_inputs, ids, initial_states, make_pool
from compact_state.cute_kernels.reference.metrics import assert_close, tolerance

pytestmark = pytest.mark.gpu

GEOMETRIES = ((16, 16), (8, 8), (32, 32), (16, 32), (4, 8), (4, 16), (2, 8), (16, 48), (4, 12), (1, 1), (3, 3), (1, 6))
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


@pytest.mark.parametrize("bound", [-0.1, -1.0, -2.0, -4.0, -5.0, -8.0])
def test_E10_bounds(bound):
    check("kda", bound, torch.float32, 4, 4, 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 2, 63, 64, 129])
def test_batches_cross_both_tile_choices(dtype, n):
    check("gdn", None, dtype, n, 16, 32)


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_D4_a_thousand_equal_repeats(dtype):
    inputs = delta_inputs("gdn", "randn", 16, 4, 16, device="cuda")
    pool = filled_pool(32, 16, dtype, used=range(16))
    read = torch.arange(16, dtype=torch.int32, device="cuda")
    first = gdn_decode(*inputs.tensors, pool, read, read + 16, backend="kernels").clone()
    state = pool[16:].clone()
    for _ in range(1000):
        out = gdn_decode(*inputs.tensors, pool, read, read + 16, backend="kernels")
        assert torch.equal(out, first)
    assert torch.equal(bits(pool[16:]), bits(state))


@pytest.mark.parametrize(
    ("dtype", "stride", "slots"), [(torch.float32, 540_672, 4100), (torch.bfloat16, 524_288, 4100)], ids=str
)
def test_B1_B5_pools_larger_than_32_bit_offsets(dtype, stride, slots):
    hv = 32
    memory = torch.empty(slots * stride, dtype=dtype, device="cuda")
    pool = memory.as_strided((slots, hv, 128, 128), (stride, 128 * 128, 128, 1))
    near, far = 2, slots - 1
    state = initial_states(1, hv).to("cuda", dtype)[0]
    pool[near], pool[far] = state, state
    one = delta_inputs("gdn", "randn", 1, 16, hv, device="cuda")
    two = [torch.cat([x, x]) for x in (one.q, one.k, one.v, one.gate, one.b)]
    both = ids(near, far, device="cuda")
    out = gdn_decode(*two, one.A_log, one.dt_bias, pool, both, both, backend="kernels")
    assert torch.equal(out[0], out[1])
    assert torch.equal(pool[near], pool[far])
    assert not torch.equal(pool[near], state)


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


def test_no_rows_and_no_live_rows():
    inputs = delta_inputs("gdn", "randn", 3, 4, 8, device="cuda")
    pool = filled_pool(2, 8, torch.float32)
    before = pool.clone()
    none = ids(-1, 2, -5, device="cuda")
    assert not gdn_decode(*inputs.tensors, pool, none, none, backend="kernels").any()
    empty = inputs.rows(slice(0, 0))
    out = gdn_decode(*empty.tensors, pool, none[:0], none[:0], backend="kernels")
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
    inputs = delta_inputs("gdn", "randn", 2, 2, 4, device="cuda")
    pool = torch.zeros(2, 4, 128, 128, device="cuda")
    for bad in (both.long(), both.view(2, 1), ids(0, device="cuda"), both.cpu()):
        with pytest.raises(InvalidArgumentError, match="write_ids"):
            gdn_decode(*inputs.tensors, pool, both, bad, backend="kernels")
    assert not pool.any()


def test_C6_one_object_serves_other_sizes():
    for n, slots in ((1, 8), (17, 64)):
        check("kda", None, torch.float32, n, 4, 4, slots=slots)
