"""GDN prefill on the GPU against the float64 recurrence, through the public operator and through its chunked kernels alone, in
one piece and in parts."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from compact_state.cute_kernels import Checkpoints, gdn_decode, gdn_launch, gdn_prefill, reference
from compact_state.cute_kernels.reference.datasets import (
    DATASETS,
    RAGGED_LENGTHS,
    cu_seqlens,
    delta_inputs,
    ids,
    initial_states,
    make_pool,
)
from compact_state.cute_kernels.reference.metrics import assert_close, tolerance

pytestmark = pytest.mark.gpu

LENGTHS = (0, 1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 130, 1000)
DTYPES = (torch.float32, torch.bfloat16)
PATHS = ("public", "chunked", "parts")


def public(*arguments, out=None, **options):
    return gdn_prefill(*arguments, out=out, backend="kernels", **options)


def chunked(q, k, v, *arguments, out=None, checkpoints=None, scale=None, qk_l2norm=True, **options):
    """The chunked kernels whatever the lengths are."""
    out = torch.empty_like(v, memory_format=torch.contiguous_format) if out is None else out
    gdn_launch.launch_chunked(
        q, k, v, *arguments, out, checkpoints=checkpoints, scale=scale, qk_l2norm=qk_l2norm, **options
    )
    return out


RUN = {"public": public, "chunked": chunked, "parts": functools.partial(chunked, long_length=128)}


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def filled_pool(slots, hv, dtype, dataset, used):
    """A NaN-filled pool on the GPU whose `used` slots hold states."""
    pool = make_pool(slots, (hv, 128, 128), dtype, device="cuda")
    for slot, state in zip(used, initial_states(len(used), hv, dataset=dataset).to("cuda", dtype)):
        pool[slot] = state
    return pool


def check(
    lengths,
    hk=2,
    hv=4,
    dtype=torch.float32,
    dataset="randn",
    path="chunked",
    kept=None,
    read=None,
    write=None,
    **options,
):
    """Run, compare outputs, written slots and checkpoints, and that every other slot keeps its bits.

    `kept` is one list of token counts a sequence; each gets a slot of its own.
    """
    n, total = len(lengths), sum(lengths)
    entries = sum(len(ends) for ends in kept) if kept else 0
    slots = 2 * n + entries + 1
    inputs = delta_inputs("gdn", dataset, total, hk, hv, device="cuda", seed=total + hv)
    order = torch.randperm(slots, generator=torch.Generator().manual_seed(total)).tolist()
    read = ids(*order[:n], device="cuda") if read is None else read
    write = ids(*order[n : 2 * n], device="cuda") if write is None else write
    pool = filled_pool(slots, hv, dtype, dataset, sorted({i for i in read.tolist() if 0 <= i < slots}))
    plan, targets = None, []
    if kept:
        free = iter(order[2 * n :])
        pairs = [[(end, next(free)) for end in ends] for ends in kept]
        targets = [slot for row in pairs for _, slot in row]
        plan = Checkpoints.from_lists(pairs, device="cuda")
    expected_pool, before = pool.double(), pool.clone()
    out = torch.full((total, hv, 128), math.nan, dtype=torch.bfloat16, device="cuda")
    cu = cu_seqlens(list(lengths), device="cuda")
    RUN[path](*inputs.tensors, pool, read, write, cu, out=out, checkpoints=plan, **options)
    expected = reference.gdn_prefill(
        *inputs.tensors, expected_pool, read, write, cu, checkpoints=plan, compute_dtype=torch.float64,
        out=torch.empty(total, hv, 128, dtype=torch.float64, device="cuda"), **options,
    )  # fmt: skip
    assert_close(out, expected, tolerance("prefill", dataset, "output", dtype), "out")
    written = sorted({i for i in write.tolist() if 0 <= i < slots} | set(targets))
    for slot in written:
        assert_close(pool[slot], expected_pool[slot], tolerance("prefill", dataset, "state", dtype), f"slot {slot}")
    others = [slot for slot in range(slots) if slot not in written]
    assert torch.equal(bits(pool[others]), bits(before[others]))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_lengths(length, dtype, path):
    check([length], dtype=dtype, path=path)


@pytest.mark.parametrize("path", ["chunked", "parts"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dataset", DATASETS)
def test_E10_datasets(dataset, dtype, path):
    check([1000, 200], dtype=dtype, dataset=dataset, path=path)


@pytest.mark.parametrize("hv", [4, 16, 32, 48])
def test_every_number_of_parts(hv):
    check([1000, 127, 128, 129, 640], hk=2, hv=hv, dataset="trained", path="parts")


@pytest.mark.parametrize(("hk", "hv"), [(1, 1), (1, 6), (3, 3), (2, 8), (4, 16), (16, 16), (16, 32), (16, 48)])
def test_head_geometries(hk, hv):
    check([130, 70], hk=hk, hv=hv)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ragged_lengths(dtype, path):
    check(RAGGED_LENGTHS, dtype=dtype, path=path)


def test_more_sequences_than_the_chip_holds():
    check([70, 3, 64, 1] * 20, hk=4, hv=16)


@pytest.mark.parametrize("path", PATHS)
def test_8192_tokens(path):
    check([8192], hk=1, hv=2, dataset="trained", path=path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_checkpoints_on_and_off_the_grid(dtype, path):
    kept = [[1, 50, 64, 190, 192, 300], [64, 100, 128], [], [5]]
    check([300, 128, 40, 5], dtype=dtype, dataset="trained", kept=kept, path=path)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_checkpoints_that_name_nothing_change_no_bit(dtype):
    """Entries with a slot or an end out of range neither store nor move a chunk boundary."""
    hv, slots = 4, 6
    inputs = delta_inputs("gdn", "trained", 200, 2, hv, device="cuda")
    pool = filled_pool(slots, hv, dtype, "trained", range(slots))
    read, write, cu = ids(0, 1, device="cuda"), ids(2, 3, device="cuda"), cu_seqlens([130, 70], device="cuda")
    plain = pool.clone()
    out = chunked(*inputs.tensors, plain, read, write, cu)
    plan = Checkpoints.from_lists(
        [[(0, 4), (33, -1), (65, slots), (131, 5)], [(-3, 4), (71, 4), (9, 10**6)]], device="cuda"
    )
    other = chunked(*inputs.tensors, pool, read, write, cu, checkpoints=plan)
    assert torch.equal(bits(out), bits(other))
    assert torch.equal(bits(pool), bits(plain))


def test_H1_pieces_resumed_at_any_count_hold_what_their_count_says():
    """Block 1600, pieces 364 + 1236 + 402, and resumes at 331, 1599, 1601, 2531, 3011: every kept state is that of its count."""
    total, hk, hv = 3020, 1, 2
    counts = (331, 364, 1599, 1600, 1601, 2002, 2531, 3011)
    slots = len(counts) + 2
    inputs = delta_inputs("gdn", "trained", total, hk, hv, device="cuda")
    oracle = filled_pool(slots, hv, torch.float32, "trained", range(slots)).double()
    pool = oracle.float()
    none, first = ids(-1, device="cuda"), ids(slots - 1, device="cuda")
    every = Checkpoints.from_lists([[(count, i) for i, count in enumerate(counts)]], device="cuda")
    options = {"out": torch.empty(total, hv, 128, dtype=torch.float64, device="cuda"), "compute_dtype": torch.float64}
    whole = cu_seqlens([total], device="cuda")
    expected = reference.gdn_prefill(*inputs.tensors, oracle, first, none, whole, checkpoints=every, **options)
    allowed = tolerance("prefill", "trained", "state", torch.float32)
    for begin, end, kept in (
        (0, 364, (331,)),
        (364, 1600, (1599,)),
        (1600, 2002, (1601,)),
        (2002, total, (2531, 3011)),
    ):
        source = slots - 1 if begin == 0 else counts.index(begin)
        target = counts.index(end) if end in counts else -1
        plan = Checkpoints.from_lists([[(count - begin, counts.index(count)) for count in kept]], device="cuda")
        part = inputs.rows(slice(begin, end))
        read, write = ids(source, device="cuda"), ids(target, device="cuda")
        out = public(*part.tensors, pool, read, write, cu_seqlens([end - begin], device="cuda"), checkpoints=plan)
        assert_close(
            out, expected[begin:end], tolerance("prefill", "trained", "output", torch.float32), f"{begin}..{end}"
        )
    for slot, count in enumerate(counts):
        assert_close(pool[slot], oracle[slot], allowed, f"state after {count}")
    for count in (331, 1599, 1601, 2531, 3011):
        part = inputs.rows(slice(count, min(count + 70, total)))
        read, cu = ids(counts.index(count), device="cuda"), cu_seqlens([part.q.shape[0]], device="cuda")
        out = public(*part.tensors, pool, read, none, cu)
        assert_close(
            out,
            expected[count : count + 70],
            tolerance("prefill", "trained", "output", torch.float32),
            f"resumed {count}",
        )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 2, 3, 4, 70])
def test_A3_ids_out_of_range(length, dtype, path):
    read = ids(0, -1, 4, 1_000_000, -(2**31), device="cuda")
    write = ids(0, -1, 2, 3, -1, device="cuda")
    check([length] * 5, dtype=dtype, path=path, read=read, write=write)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_E12_sequences_without_tokens(dtype, path):
    """Their state moves from the read to the write slot, and is zero without one."""
    for hv in (1, 4):
        pool = filled_pool(4, hv, dtype, "randn", (0,))
        start = pool[0].clone()
        inputs = delta_inputs("gdn", "randn", 0, 1, hv, device="cuda")
        arguments = (
            *inputs.tensors,
            pool,
            ids(0, -1, device="cuda"),
            ids(1, 2, device="cuda"),
            ids(0, 0, 0, device="cuda"),
        )
        out = RUN[path](*arguments)
        assert out.shape == (0, hv, 128)
        assert torch.equal(pool[1], start)
        assert torch.equal(pool[0], start)
        assert not pool[2].any()
        assert pool[3].isnan().all()


@pytest.mark.parametrize("path", PATHS)
def test_E15_a_token_buffer_longer_than_the_sequences(path):
    """Tokens beyond the last sequence are NaN, and so may their outputs be; the rest is what it is without them."""
    lengths, buffer = [65, 1, 135], 256
    inputs = delta_inputs("gdn", "randn", buffer, 2, 4, device="cuda")
    for tensor in inputs.tensors[:5]:
        tensor[201:] = math.nan
    read, write, cu = ids(0, 1, 2, device="cuda"), ids(3, 4, 5, device="cuda"), cu_seqlens(lengths, device="cuda")
    pool = filled_pool(6, 4, torch.float32, "randn", range(3))
    exact = pool.clone()
    out = torch.full((buffer, 4, 128), math.nan, dtype=torch.bfloat16, device="cuda")
    RUN[path](*inputs.tensors, pool, read, write, cu, out=out)
    alone = RUN[path](*inputs.rows(slice(0, 201)).tensors, exact, read, write, cu)
    assert torch.equal(bits(out[:201]), bits(alone))
    assert torch.equal(bits(pool), bits(exact))
    assert torch.isfinite(out[:201]).all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("lengths", [[65, 64], [1, 63], [127, 1], [70, 130, 5]])
@pytest.mark.parametrize("value", [1e4, math.nan, math.inf])
def test_E8_neighbours_change_no_bit(lengths, value, path):
    hv = 4
    inputs = delta_inputs("gdn", "trained", sum(lengths), 2, hv, device="cuda")
    cu = cu_seqlens(lengths, device="cuda")
    n = len(lengths)
    read = torch.arange(n, dtype=torch.int32, device="cuda")
    pool = filled_pool(2 * n, hv, torch.float32, "trained", range(n))
    spoiled_pool = pool.clone()
    out = RUN[path](*inputs.tensors, pool, read, read + n, cu)
    row = n // 2 if n > 2 else 0
    begin, end = int(cu[row]), int(cu[row + 1])
    spoiled = [x.clone() for x in inputs.tensors[:5]]
    for tensor in spoiled:
        tensor[:begin] = value
        tensor[end:] = value
    other = RUN[path](*spoiled, *inputs.tensors[5:], spoiled_pool, read, read + n, cu)
    assert torch.equal(bits(out[begin:end]), bits(other[begin:end]))
    assert torch.equal(bits(pool[n + row]), bits(spoiled_pool[n + row]))


def equal_keys(tokens, size=1.0):
    inputs = delta_inputs("gdn", "zero", tokens, 1, 2, device="cuda", packed=False)
    inputs.k[:] = size * inputs.k[:1]
    return inputs


@pytest.mark.parametrize("tokens", [64, 200])
def test_E7_equal_keys(tokens):
    """All keys equal, beta nearly 1, no decay: the triangular system at its worst still matches the recurrence."""
    inputs = equal_keys(tokens)
    inputs.b[:] = 12.0
    pool = filled_pool(2, 2, torch.float32, "randn", (0,))
    oracle = pool.double()
    read, write, cu = ids(0, device="cuda"), ids(1, device="cuda"), cu_seqlens([tokens], device="cuda")
    out = chunked(*inputs.tensors, pool, read, write, cu)
    expected = reference.gdn_prefill(
        *inputs.tensors, oracle, read, write, cu, compute_dtype=torch.float64,
        out=torch.empty(tokens, 2, 128, dtype=torch.float64, device="cuda"),
    )  # fmt: skip
    assert_close(out, expected, 0.006, "out")
    assert_close(pool[1], oracle[1], 0.01, "state")


def test_E7_unnormalised_keys_that_diverge_spoil_no_other_sequence():
    inputs = equal_keys(200, size=0.2)
    inputs.k[100:] *= 0.2
    inputs.b[:] = 12.0
    pool = filled_pool(4, 2, torch.float32, "randn", (0, 1))
    exact = pool.clone()
    read, write = ids(0, 1, device="cuda"), ids(2, 3, device="cuda")
    out = chunked(*inputs.tensors, pool, read, write, cu_seqlens([100, 100], device="cuda"), qk_l2norm=False)
    assert torch.isfinite(out[100:]).all()
    inputs.k[:100] *= 0.2
    calm = chunked(*inputs.tensors, exact, read, write, cu_seqlens([100, 100], device="cuda"), qk_l2norm=False)
    assert torch.equal(bits(out[100:]), bits(calm[100:]))
    assert torch.equal(bits(pool[3]), bits(exact[3]))


@pytest.mark.parametrize("long_length", [128, 10**6])
def test_short_rows_are_left_to_another_kernel(long_length):
    """Rows below `min_tokens`: neither state nor output is touched, and the others keep their bits."""
    lengths, hv = (16, 17, 200, 1, 0), 4
    inputs = delta_inputs("gdn", "trained", sum(lengths), 2, hv, device="cuda")
    start = filled_pool(10, hv, torch.float32, "trained", range(10))
    read, cu = torch.arange(5, dtype=torch.int32, device="cuda"), cu_seqlens(lengths, device="cuda")
    results = []
    for least in (0, 17):
        pool = start.clone()
        out = torch.full((sum(lengths), hv, 128), math.nan, dtype=torch.bfloat16, device="cuda")
        chunked(*inputs.tensors, pool, read, read + 5, cu, out=out, min_tokens=least, long_length=long_length)
        results.append((out, pool))
    (whole, all_states), (out, pool) = results
    assert torch.equal(bits(out[16:233]), bits(whole[16:233]))
    assert out[:16].isnan().all()
    assert out[233:].isnan().all()
    assert torch.equal(bits(pool[6:8]), bits(all_states[6:8]))
    others = [0, 1, 2, 3, 4, 5, 8, 9]
    assert torch.equal(bits(pool[others]), bits(start[others]))


def test_near_equal_keys_over_many_chunks():
    check([2048], hk=1, hv=2, dataset="correlated")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_do_not_depend_on_batch_slots_or_place(dtype, path):
    """Bitwise: alone, among others in another order, in place and copy-on-write."""
    lengths = (130, 5, 64, 1, 200, 17)
    n, hv = len(lengths), 4
    inputs = delta_inputs("gdn", "trained", sum(lengths), 2, hv, device="cuda")
    cu = cu_seqlens(lengths, device="cuda")
    read = torch.arange(n, dtype=torch.int32, device="cuda")
    start = filled_pool(2 * n, hv, dtype, "trained", range(n))
    pool, in_place = start.clone(), start.clone()
    out = RUN[path](*inputs.tensors, pool, read, read + n, cu)
    again = RUN[path](*inputs.tensors, in_place, read, read, cu)
    assert torch.equal(bits(out), bits(again))
    assert torch.equal(bits(pool[n:]), bits(in_place[:n]))
    for row in range(n):
        begin, end = int(cu[row]), int(cu[row + 1])
        part = inputs.rows(slice(begin, end))
        alone = start.clone()
        one = RUN[path](
            *part.tensors,
            alone,
            ids(row, device="cuda"),
            ids(2 * n - 1, device="cuda"),
            cu_seqlens([end - begin], device="cuda"),
        )
        assert torch.equal(bits(one), bits(out[begin:end]))
        assert torch.equal(bits(alone[2 * n - 1]), bits(pool[n + row]))
    order = [4, 2, 0, 5, 3, 1]
    index = torch.cat([torch.arange(int(cu[row]), int(cu[row + 1])) for row in order]).cuda()
    moved = inputs.rows(index)
    shuffled = start.clone()
    chosen = read[order].contiguous()
    mixed = RUN[path](
        *moved.tensors, shuffled, chosen, chosen + n, cu_seqlens([lengths[row] for row in order], device="cuda")
    )
    assert torch.equal(bits(mixed), bits(out[index]))
    assert torch.equal(bits(shuffled), bits(pool))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("cut", [64, 65, 100, 128, 191])
def test_causality_a_changed_suffix_changes_no_earlier_bit(cut, path):
    inputs = delta_inputs("gdn", "trained", 200, 2, 4, device="cuda")
    read, write, cu = ids(0, device="cuda"), ids(1, device="cuda"), cu_seqlens([200], device="cuda")
    pool = filled_pool(2, 4, torch.float32, "trained", (0,))
    out = RUN[path](*inputs.tensors, pool, read, write, cu)
    other = delta_inputs("gdn", "randn", 200, 2, 4, device="cuda")
    changed = [x.clone() for x in inputs.tensors[:5]]
    for tensor, source in zip(changed, other.tensors):
        tensor[cut:] = source[cut:]
    later = RUN[path](*changed, *inputs.tensors[5:], pool, read, write, cu)
    assert torch.equal(bits(out[:cut]), bits(later[:cut]))
    assert not torch.equal(out[cut:], later[cut:])


@pytest.mark.parametrize("cut", [1, 15, 63, 64, 100, 128, 299])
def test_split_at_any_point_equals_unsplit_within_tolerance(cut):
    tokens, hv = 300, 4
    inputs = delta_inputs("gdn", "trained", tokens, 2, hv, device="cuda")
    pool = filled_pool(3, hv, torch.float32, "trained", (0,))
    out = public(
        *inputs.tensors, pool, ids(0, device="cuda"), ids(1, device="cuda"), cu_seqlens([tokens], device="cuda")
    )
    last = ids(2, device="cuda")
    head, tail = inputs.rows(slice(0, cut)), inputs.rows(slice(cut, tokens))
    first = public(*head.tensors, pool, ids(0, device="cuda"), last, cu_seqlens([cut], device="cuda"))
    second = public(*tail.tensors, pool, last, last, cu_seqlens([tokens - cut], device="cuda"))
    assert_close(torch.cat([first, second]), out.double(), 0.006, "out")
    assert_close(pool[2], pool[1].double(), 0.01, "state")


def test_prefill_equals_decode_steps():
    tokens, hv = 100, 4
    inputs = delta_inputs("gdn", "trained", tokens, 2, hv, device="cuda")
    pool = filled_pool(3, hv, torch.float32, "trained", (0,))
    out = public(
        *inputs.tensors, pool, ids(0, device="cuda"), ids(1, device="cuda"), cu_seqlens([tokens], device="cuda")
    )
    read, write = ids(0, device="cuda"), ids(2, device="cuda")
    steps = []
    for t in range(tokens):
        steps.append(gdn_decode(*inputs.rows(slice(t, t + 1)).tensors, pool, read, write, backend="kernels"))
        read = write
    assert_close(out, torch.cat(steps).double(), 0.006, "out")
    assert_close(pool[1], pool[2].double(), 0.01, "state")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_D4_equal_repeats(dtype):
    lengths = [1000, 130, 64, 5]
    inputs = delta_inputs("gdn", "trained", sum(lengths), 4, 16, device="cuda")
    pool = filled_pool(8, 16, dtype, "trained", range(4))
    read, cu = torch.arange(4, dtype=torch.int32, device="cuda"), cu_seqlens(lengths, device="cuda")
    first = chunked(*inputs.tensors, pool, read, read + 4, cu)
    state = pool.clone()
    for _ in range(1000):
        out = chunked(*inputs.tensors, pool, read, read + 4, cu)
        assert torch.equal(bits(out), bits(first))
    assert torch.equal(bits(pool), bits(state))


def test_graph_replay_follows_changed_ids_and_lengths():
    hv, slots = 4, 5
    inputs = delta_inputs("gdn", "randn", 200, 2, hv, device="cuda")
    start = filled_pool(slots, hv, torch.float32, "randn", range(slots))
    pool = start.clone()
    read, write, cu = ids(0, 1, device="cuda"), ids(2, 3, device="cuda"), ids(0, 130, 200, device="cuda")
    out = torch.zeros(200, hv, 128, dtype=torch.bfloat16, device="cuda")
    public(*inputs.tensors, pool, read, write, cu, out=out)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        public(*inputs.tensors, pool, read, write, cu, out=out)
    for reads, writes, bounds in (
        ((4, -1), (4, 0), (0, 3, 200)),
        ((1, 2), (-1, 2), (0, 0, 64)),
        ((0, 1), (2, 3), (0, 199, 200)),
    ):
        for target, values in ((read, reads), (write, writes), (cu, bounds)):
            target.copy_(ids(*values))
        pool.copy_(start)
        eager = start.clone()
        graph.replay()
        expected = public(*inputs.tensors, eager, read, write, cu)
        assert torch.equal(bits(out[: bounds[-1]]), bits(expected[: bounds[-1]]))
        assert torch.equal(bits(pool), bits(eager))


@pytest.mark.parametrize(
    ("dtype", "stride", "slots"), [(torch.float32, 540_672, 4100), (torch.bfloat16, 524_288, 4100)], ids=str
)
def test_B1_pools_larger_than_32_bit_offsets(dtype, stride, slots):
    hv, tokens = 32, 70
    memory = torch.empty(slots * stride, dtype=dtype, device="cuda")
    pool = memory.as_strided((slots, hv, 128, 128), (stride, 128 * 128, 128, 1))
    near, far, kept_near, kept_far = 2, slots - 1, 3, slots - 2
    state = initial_states(1, hv).to("cuda", dtype)[0]
    pool[near], pool[far] = state, state
    one = delta_inputs("gdn", "randn", tokens, 16, hv, device="cuda")
    two = [torch.cat([x, x]) for x in one.tensors[:5]]
    both = ids(near, far, device="cuda")
    plan = Checkpoints.from_lists([[(30, kept_near)], [(30, kept_far)]], device="cuda")
    cu = cu_seqlens([tokens, tokens], device="cuda")
    out = chunked(*two, *one.tensors[5:], pool, both, both, cu, checkpoints=plan)
    assert torch.equal(out[:tokens], out[tokens:])
    assert torch.equal(pool[near], pool[far])
    assert torch.equal(pool[kept_near], pool[kept_far])
    assert not torch.equal(pool[near], state)


@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("l2norm", [True, False])
def test_scale_and_l2norm_options(scale, l2norm):
    inputs = delta_inputs("gdn", "randn", 200, 2, 4, device="cuda")
    if not l2norm:
        inputs.k.mul_(0.05)
    pool = filled_pool(2, 4, torch.float32, "randn", (0,))
    oracle = pool.double()
    read, write, cu = ids(0, device="cuda"), ids(1, device="cuda"), cu_seqlens([200], device="cuda")
    out = chunked(*inputs.tensors, pool, read, write, cu, scale=scale, qk_l2norm=l2norm)
    expected = reference.gdn_prefill(
        *inputs.tensors, oracle, read, write, cu, scale=scale, qk_l2norm=l2norm, compute_dtype=torch.float64,
        out=torch.empty(200, 4, 128, dtype=torch.float64, device="cuda"),
    )  # fmt: skip
    assert_close(out, expected, 0.004, "out")
    assert_close(pool[1], oracle[1], 0.004, "state")
