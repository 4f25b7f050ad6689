"""GDN prefill on the GPU against the float64 recurrence, through the public operator and through its chunked kernels alone, in
one piece and in parts."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from gdn_prefill_case import COLUMNS, PATHS, RUN, check, chunked, equal_keys, public
from prefill_case import (
    DTYPES,
    bits,
    check_inputs,
    check_large_state,
    check_longer_token_buffer,
    check_pieces,
    check_sequences_without_tokens,
    check_slots_full_of_nan,
    check_thousands_of_sequences,
    filled_pool,
)

from compact_state.cute_kernels import Checkpoints, gdn_decode, reference
from compact_state.cute_kernels.reference.datasets import (
    DATASETS,
    RAGGED_LENGTHS,
    cu_seqlens,
    delta_inputs,
    ids,
)
from compact_state.cute_kernels.reference.metrics import assert_close, tolerance

pytestmark = pytest.mark.gpu

LENGTHS = (0, 1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 130, 1000)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_lengths(length, dtype, path):
    check([length], dtype=dtype, path=path)


@pytest.mark.parametrize("path", [*PATHS, COLUMNS])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dataset", DATASETS)
def test_E10_datasets(dataset, dtype, path):
    check([1000, 200], dtype=dtype, dataset=dataset, path=path)


@pytest.mark.parametrize("hv", [4, 16, 32, 48])
def test_every_number_of_parts(hv):
    check([1000, 127, 128, 129, 640], hk=2, hv=hv, dataset="trained", path="parts")


@pytest.mark.parametrize(
    ("hk", "hv"), [(1, 1), (1, 6), (3, 3), (2, 8), (4, 16), (16, 16), (16, 32), (16, 48), (256, 1024)]
)
def test_head_geometries(hk, hv):
    check([130, 70], hk=hk, hv=hv)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ragged_lengths(dtype, path):
    check(RAGGED_LENGTHS, dtype=dtype, path=path)


@pytest.mark.parametrize("path", PATHS)
def test_more_sequences_than_the_chip_holds(path):
    """A block takes many items in turn, and passes over those that are another launch's."""
    check([70, 3, 64, 0, 1, 200] * 16, hk=4, hv=16, path=path)


@pytest.mark.parametrize("path", ["public", "wholes"])
def test_B6_thousands_of_short_sequences(path):
    """65,600 blocks of a sequence and a head."""
    check_thousands_of_sequences(RUN[path], "gdn", [17 + i % 5 for i in range(2050)], 16, 32)


@pytest.mark.parametrize("slabs", [1, 2])
@pytest.mark.parametrize("hv", [4, 16, 32])
def test_items_of_cut_and_uncut_rows_come_by_their_own_lengths(hv, slabs):
    """Rows not cut are longer than segments of cut ones, shorter, or another kernel's; more than a warp looks at once."""
    lengths = [1100, 1, 65, 700, *[1, 3, 17, 40] * 9, 1024, 300, 0, 1000, 90, 999]
    inputs = delta_inputs("gdn", "randn", sum(lengths), 2, hv, device="cuda", seed=hv)
    run = functools.partial(chunked, long_length=1000, slabs=slabs)
    check_inputs(run, inputs, lengths, "randn", kept=[[64, 1000]] + [[]] * 39 + [[500]] + [[]] * 5)


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
@pytest.mark.parametrize("hv", [1, 4])
def test_E12_sequences_without_tokens(hv, dtype, path):
    check_sequences_without_tokens(RUN[path], "gdn", hv, dtype)


@pytest.mark.parametrize("path", PATHS)
def test_E15_a_token_buffer_longer_than_the_sequences(path):
    check_longer_token_buffer(RUN[path], "gdn")


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


@pytest.mark.parametrize("tokens", [64, 200, 1000])
@pytest.mark.parametrize("logit", [-3.0, -0.9, 0.9, 2.2, 3.0, math.log(0.99 / 0.01), 5.3, 8.5, 12.0])
def test_E7_outputs_of_equal_keys_from_a_small_state(tokens, logit):
    """Every row of X^T is nearly the same, so rows of T' must keep their sums; what W's rounding does to S is in the note."""
    inputs = equal_keys(tokens)
    inputs.b[:] = logit
    pool = filled_pool(2, 2, torch.float32, "correlated", (0,))
    read, write, cu = ids(0, device="cuda"), ids(1, device="cuda"), cu_seqlens([tokens], device="cuda")
    expected = reference.gdn_prefill(
        *inputs.tensors, pool.double(), read, write, cu, compute_dtype=torch.float64,
        out=torch.empty(tokens, 2, 128, dtype=torch.float64, device="cuda"),
    )  # fmt: skip
    out = chunked(*inputs.tensors, pool, read, write, cu)
    assert_close(out, expected, 0.006, "out")
    assert bool(pool[1].isfinite().all())


@pytest.mark.parametrize("tokens", [64, 1000, 2048, 4096, 8192])
def test_E7_near_equal_keys_over_many_chunks(tokens):
    check([tokens], hk=1, hv=2, dataset="correlated")


@pytest.mark.parametrize("dataset", ["randn", "zero", "trained"])
def test_keys_of_unlike_lengths(dataset):
    """The update multiplies raw keys, so W is as much larger as a key is shorter; errors are those of keys of one length."""
    inputs = delta_inputs("gdn", dataset, 1000, 1, 2, device="cuda", packed=False)
    lengths = torch.randn(1000, 1, 1, generator=torch.Generator().manual_seed(7)).exp()
    inputs.k[:] = (inputs.k.float() * lengths.cuda()).bfloat16()
    check_inputs(chunked, inputs, [1000], dataset)


@pytest.mark.parametrize("path", [*PATHS, COLUMNS])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_E6_a_large_state_is_read_out_finite(dtype, path):
    """S k is beyond fp16: what is rounded to it saturates, and nothing becomes infinite."""
    check_large_state(RUN[path], dtype)


@pytest.mark.parametrize("path", [*PATHS, COLUMNS])
@pytest.mark.parametrize("first", [1, 2])
def test_G1_slots_full_of_nan_equal_the_cold_run(first, path):
    check_slots_full_of_nan(RUN[path], "gdn", first)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("cut", [1, 15, 63, 64, 100, 128, 299])
def test_split_at_any_point_equals_unsplit_within_tolerance(cut, path):
    check_pieces(RUN[path], "gdn", 300, [cut])


def test_prefill_equals_decode_steps():
    def step(*arguments, **options):
        return gdn_decode(*arguments[:-1], backend="kernels", **options)

    check_pieces(public, "gdn", 100, range(1, 100), rest=step)


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
