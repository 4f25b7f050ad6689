"""KDA prefill of long rows in parts: values against the recurrence, and what may not change a bit."""

from __future__ import annotations

import pytest
import torch
from prefill_case import DTYPES, bits, check_inputs, filled_pool

from compact_state.cute_kernels import Checkpoints, kda_launch, kda_prefill
from compact_state.cute_kernels.reference.datasets import DATASETS, cu_seqlens, delta_inputs, ids

pytestmark = pytest.mark.gpu

LONG = 256  # rows of so many tokens or more run in parts here


def in_parts(q, k, v, *arguments, out=None, checkpoints=None, scale=None, qk_l2norm=True, lower_bound=None, long=LONG):
    out = torch.empty_like(v, memory_format=torch.contiguous_format) if out is None else out
    options = {"checkpoints": checkpoints, "scale": scale, "qk_l2norm": qk_l2norm, "lower_bound": lower_bound}
    kda_launch.launch_chunked(q, k, v, *arguments, out, **options, long_length=long)
    return out


@pytest.fixture(params=[2, 3, 5, 16])
def parts(request, monkeypatch):
    monkeypatch.setattr(kda_launch, "parts_of_long_rows", lambda heads: request.param)
    return request.param


def inputs_of(lengths, hv=4, dataset="trained", lower_bound=None):
    return delta_inputs("kda", dataset, sum(lengths), 2, hv, lower_bound=lower_bound, device="cuda", seed=sum(lengths))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [[256], [300, 17, 1000], [1, 2000, 255, 0, 257]])
def test_lengths(lengths, dtype, parts):
    check_inputs(in_parts, inputs_of(lengths), lengths, "trained", dtype=dtype)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("dataset", DATASETS)
def test_E10_datasets(dataset, lower_bound, monkeypatch):
    monkeypatch.setattr(kda_launch, "parts_of_long_rows", lambda heads: 4)
    check_inputs(in_parts, inputs_of([1000, 300], dataset=dataset, lower_bound=lower_bound), [1000, 300], dataset)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_checkpoints_on_and_off_segment_bounds(dtype, parts):
    kept = [[1, 64, 128, 129, 192, 320, 640, 999, 1000], [], [1, 255, 256, 300]]
    check_inputs(in_parts, inputs_of([1000, 40, 300]), [1000, 40, 300], "trained", dtype=dtype, kept=kept)


def test_checkpoints_out_of_range_and_repeated(parts):
    lengths = [700]
    inputs = inputs_of(lengths)
    cu, read, write = cu_seqlens(lengths, device="cuda"), ids(0, device="cuda"), ids(1, device="cuda")
    pool = filled_pool(6, 4, torch.float32, "trained", (0,))
    plain = pool.clone()
    plan = Checkpoints.from_lists([[(-5, 2), (0, 3), (128, 4), (128, 5), (701, 2), (9000, 3)]], device="cuda")
    out = in_parts(*inputs.tensors, pool, read, write, cu, checkpoints=plan)
    assert torch.equal(bits(out), bits(in_parts(*inputs.tensors, plain, read, write, cu)))
    assert torch.equal(bits(pool[:2]), bits(plain[:2]))
    assert torch.equal(bits(pool[4]), bits(pool[5]))
    assert torch.isfinite(pool[4]).all()
    assert pool[2:4].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_do_not_depend_on_the_batch_nor_on_in_place_ids(dtype, parts):
    """Bitwise: a long row alone, among short and long ones, in place and copy-on-write."""
    lengths, n = [300, 17, 1000, 64, 256], 5
    inputs = inputs_of(lengths)
    cu = cu_seqlens(lengths, device="cuda")
    read = torch.arange(n, dtype=torch.int32, device="cuda")
    start = filled_pool(2 * n, 4, dtype, "trained", range(n))
    pool, in_place = start.clone(), start.clone()
    out = in_parts(*inputs.tensors, pool, read, read + n, cu)
    assert torch.equal(bits(in_parts(*inputs.tensors, in_place, read, read, cu)), bits(out))
    assert torch.equal(bits(in_place[:n]), bits(pool[n:]))
    for row in range(n):
        begin, end = sum(lengths[:row]), sum(lengths[: row + 1])
        alone = start.clone()
        part = inputs.rows(slice(begin, end)).tensors
        one = in_parts(
            *part, alone, ids(row, device="cuda"), ids(n + row, device="cuda"), cu_seqlens([end - begin], device="cuda")
        )
        assert torch.equal(bits(one), bits(out[begin:end]))
        assert torch.equal(bits(alone[n + row]), bits(pool[n + row]))


def test_A3_ids_out_of_range(parts):
    lengths = [300, 700, 256]
    read, write = ids(0, -1, 1_000_000, device="cuda"), ids(-1, 2, 3, device="cuda")
    check_inputs(in_parts, inputs_of(lengths), lengths, "trained", read=read, write=write)


def test_both_block_forms_and_groups_of_heads_give_the_same_bits(monkeypatch):
    inputs = inputs_of([1000], hv=6)
    read, write, cu = ids(0, device="cuda"), ids(1, device="cuda"), cu_seqlens([1000], device="cuda")
    start = filled_pool(2, 6, torch.float32, "trained", (0,))
    monkeypatch.setattr(kda_launch, "parts_of_long_rows", lambda heads: 4)
    results = []
    for slabs, group in ((1, 6), (2, 6), (1, 4), (2, 1)):
        monkeypatch.setattr(kda_launch, "slabs_per_block", lambda *_, slabs=slabs, **__: slabs)
        monkeypatch.setattr(kda_launch, "heads_per_launch", lambda slots, heads, group=group: group)
        pool = start.clone()
        results.append((in_parts(*inputs.tensors, pool, read, write, cu), pool[1].clone()))
    for out, state in results[1:]:
        assert torch.equal(bits(out), bits(results[0][0]))
        assert torch.equal(bits(state), bits(results[0][1]))


@pytest.mark.parametrize("lengths", [[8192], [8191, 9000], [12_345]])
def test_public_operator(lengths):
    def run(*arguments, **options):
        return kda_prefill(*arguments, backend="kernels", **options)

    check_inputs(run, inputs_of(lengths, hv=2), lengths, "trained", kept=[[4097]] + [[] for _ in lengths[1:]])


def test_D4_equal_repeats(monkeypatch):
    monkeypatch.setattr(kda_launch, "parts_of_long_rows", lambda heads: 8)
    lengths = [1000, 130, 512]
    inputs = delta_inputs("kda", "trained", sum(lengths), 16, 16, device="cuda")
    pool = filled_pool(6, 16, torch.float32, "trained", range(3))
    read, cu = torch.arange(3, dtype=torch.int32, device="cuda"), cu_seqlens(lengths, device="cuda")
    first = in_parts(*inputs.tensors, pool, read, read + 3, cu)
    state = pool.clone()
    for _ in range(1000):
        assert torch.equal(bits(in_parts(*inputs.tensors, pool, read, read + 3, cu)), bits(first))
    assert torch.equal(bits(pool), bits(state))
