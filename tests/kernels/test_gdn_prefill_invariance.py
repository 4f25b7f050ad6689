"""What must not change one bit of GDN prefill on the GPU: neighbours, batch, slots, later tokens, repeats, graphs, pool size."""

from __future__ import annotations

import math

import pytest
import torch
from gdn_prefill_case import COLUMNS, PATHS, RUN, chunked, equal_keys, public
from prefill_case import DTYPES, bits, check_equal_repeats, check_graph_replay, check_neighbours, filled_pool

from compact_state.cute_kernels import Checkpoints, gdn_launch
from compact_state.cute_kernels.configs import gdn_records
from compact_state.cute_kernels.reference.datasets import cu_seqlens, delta_inputs, ids

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("lengths", [[65, 64], [1, 63], [127, 1], [70, 130, 5]])
@pytest.mark.parametrize("value", [1e4, math.nan, math.inf])
def test_E8_neighbours_change_no_bit(lengths, value, path):
    check_neighbours(RUN[path], "gdn", lengths, value)


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


def test_what_follows_the_call_finds_short_and_long_rows_done():
    """Short rows run beside the others, and the next launch on the stream waits for both."""
    lengths, hv = (*[1] * 60, 2000, 48), 8
    n = len(lengths)
    inputs = delta_inputs("gdn", "trained", sum(lengths), 2, hv, device="cuda")
    start = filled_pool(2 * n, hv, torch.float32, "trained", range(n))
    read, cu = torch.arange(n, dtype=torch.int32, device="cuda"), cu_seqlens(lengths, device="cuda")
    found = []
    for _ in range(50):
        pool = start.clone()
        out = torch.full((sum(lengths), hv, 128), math.nan, dtype=torch.bfloat16, device="cuda")
        public(*inputs.tensors, pool, read, read + n, cu, out=out)
        found.append((out.clone(), pool[n:].clone()))
    assert all(x.isfinite().all() for x in found[0])
    for out, states in found[1:]:
        assert torch.equal(bits(out), bits(found[0][0]))
        assert torch.equal(bits(states), bits(found[0][1]))


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
@pytest.mark.parametrize("cut", [1, 15, 40, 64, 65, 100, 128, 191])
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


@pytest.mark.parametrize("path", [*PATHS, COLUMNS])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_D4_equal_repeats(dtype, path):
    check_equal_repeats(RUN[path], "gdn", 4, 16, dtype)


def test_graph_replay_follows_changed_ids_and_lengths():
    check_graph_replay(public, "gdn")


def bits_of(inputs, lengths, slots, dtype, read, write, kept, **options):
    """Output and pool of one call over `slots` states, as bytes; what no one writes holds the same on every call."""
    pool = filled_pool(slots, inputs.v.shape[1], dtype, "trained", range(slots))
    plan = Checkpoints.from_lists(kept, device="cuda") if kept else None
    out = torch.full(inputs.v.shape, math.nan, dtype=torch.bfloat16, device="cuda")
    chunked(
        *inputs.tensors, pool, read, write, cu_seqlens(lengths, device="cuda"), out=out, checkpoints=plan, **options
    )
    return bits(out), bits(pool)


FROM_RECORDS = [{"slabs": 1}, {"slabs": 2}, {"columns": True}, {}]


def check_equal_forms(lengths, dtype, kept=None, hk=2, hv=4, read=None, write=None, **options):
    """Records first or all in one launch, a whole head a block, half of one, some columns of one or what lengths choose: every
    bit is the same."""
    n = len(lengths)
    inputs = delta_inputs("gdn", "trained", sum(lengths), hk, hv, device="cuda", seed=sum(lengths))
    read = torch.arange(n, dtype=torch.int32, device="cuda") if read is None else read
    write = read + n if write is None else write
    slots = 2 * n + sum(len(row) for row in kept or ())
    arguments = (inputs, lengths, slots, dtype, read, write, kept)
    expected = bits_of(*arguments, records=False, slabs=2, **options)
    for form in FROM_RECORDS:
        for one, other in zip(bits_of(*arguments, records=True, **form, **options), expected):
            assert torch.equal(one, other)


@pytest.mark.parametrize("long_length", [128, 10**6])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [0, 1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 130, 1000, 8192])
def test_records_change_no_bit_of_one_row(length, dtype, long_length):
    check_equal_forms([length], dtype, long_length=long_length)


@pytest.mark.parametrize("min_tokens", [0, 17])
@pytest.mark.parametrize("long_length", [128, 640, 10**6])
@pytest.mark.parametrize(("hk", "hv"), [(1, 1), (2, 8), (3, 3), (4, 16), (16, 48)])
def test_records_change_no_bit_of_ragged_rows(hk, hv, long_length, min_tokens):
    lengths = [640, 64, 0, 1, 130, 3, 16, 17, 700, 0]
    check_equal_forms(lengths, torch.float32, hk=hk, hv=hv, long_length=long_length, min_tokens=min_tokens)


@pytest.mark.parametrize("long_length", [128, 10**6])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_records_change_no_bit_of_kept_states(dtype, long_length):
    """Checkpoints on and off the grid, at a row's end, twice at one token, out of range, without a slot, and many of them."""
    every = [(end, 10 + i) for i, end in enumerate(range(5, 700, 7))]
    kept = [
        every,
        [(1, 200), (64, 201), (64, 202), (100, 203), (128, 204)],
        [(-3, 205), (9, 10**6), (50, 206), (71, 207)],
    ]
    check_equal_forms([700, 128, 70, 0, 40], dtype, kept=[*kept, [(0, 208)], [(40, 209)]], long_length=long_length)


@pytest.mark.parametrize("long_length", [128, 10**6])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_records_change_no_bit_of_states_kept_on_the_grid(dtype, long_length):
    """After every chunk of one row, after some of others, one of which ends off the grid."""
    every = [(64 * (i + 1), 6 + i) for i in range(10)]
    kept = [every, [(64, 16), (128, 17), (192, 18)], [(64, 19), (128, 20)]]
    check_equal_forms([640, 200, 150], dtype, kept=kept, long_length=long_length)


@pytest.mark.parametrize("long_length", [128, 10**6])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_records_change_no_bit_in_place_and_without_slots(dtype, long_length):
    in_place = ids(0, 1, 2, 3, device="cuda")
    check_equal_forms([200, 70, 0, 5], dtype, read=in_place, write=in_place, long_length=long_length)
    read, write = ids(-1, 8, 2, -(2**31), device="cuda"), ids(1, 0, 10**6, -1, device="cuda")
    check_equal_forms([200, 70, 5, 300], dtype, read=read, write=write, long_length=long_length)


@pytest.mark.parametrize("lengths", [[2048], [1500, 70]])
@pytest.mark.parametrize(("hk", "hv"), [(16, 32), (16, 48)])
def test_records_change_no_bit_where_blocks_leave_before_others(lengths, hk, hv):
    """So many heads that few multiprocessors are left for records, or that all make a first share of them."""
    kept = [[(64, 2 * len(lengths)), (771, 2 * len(lengths) + 1)], *[[]] * (len(lengths) - 1)]
    check_equal_forms(lengths, torch.float32, kept=kept, hk=hk, hv=hv)


@pytest.mark.parametrize("form", FROM_RECORDS, ids=str)
@pytest.mark.parametrize(
    ("lengths", "hk", "hv", "long_length"),
    [
        ([2048], 2, 8, 10**6),
        ([2048], 16, 16, 10**6),
        ([2048], 16, 32, 10**6),
        ([1024], 16, 48, 10**6),
        ([1000, 130, 0, 64, 5], 2, 8, 10**6),
        ([1000, 130, 0, 64, 5], 2, 8, 1100),  # launches for long rows find none
        ([1300, 1290, 40], 4, 16, 640),
        ([1300, 640, 70], 2, 8, 640),
        ([1300, 40], 4, 16, 640),
    ],
)
def test_replays_find_no_flag_of_an_earlier_call(monkeypatch, lengths, hk, hv, long_length, form):
    """Whatever the workspace holds before a replay, flags of records that are not there among it, no bit changes."""
    n, total = len(lengths), sum(lengths)
    inputs = delta_inputs("gdn", "trained", total, hk, hv, device="cuda")
    read, cu = torch.arange(n, dtype=torch.int32, device="cuda"), cu_seqlens(lengths, device="cuda")
    plan = Checkpoints.from_lists([[(64, 2 * n), (333, 2 * n + 1)], *[[]] * (n - 1)], device="cuda")
    start = filled_pool(2 * n + 2, hv, torch.float32, "trained", range(n))
    options = {"checkpoints": plan, "long_length": long_length}
    out = torch.empty_like(inputs.v, memory_format=torch.contiguous_format)
    expected_pool = start.clone()
    expected = chunked(*inputs.tensors, expected_pool, read, read + n, cu, records=False, **options)
    pool = start.clone()
    arguments = (*inputs.tensors, pool, read, read + n, cu)
    chunked(*arguments, out=out, records=True, **form, **options)
    workspaces, empty = [], torch.empty

    def noted(*shape, **kind):
        workspaces.append(empty(*shape, **kind))
        return workspaces[-1]

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        monkeypatch.setattr(torch, "empty", noted)
        chunked(*arguments, out=out, records=True, **form, **options)
        monkeypatch.undo()
    assert len(workspaces) == 2
    for replay in range(120):
        for workspace in workspaces:
            workspace.view(torch.int32).fill_((1, -1, 0x7FC07FC0)[replay % 3])
        pool.copy_(start)
        out.fill_(math.nan)
        graph.replay()
        assert torch.equal(bits(out), bits(expected))
        assert torch.equal(bits(pool), bits(expected_pool))


def test_a_call_with_records_is_captured_and_replayed(monkeypatch):
    monkeypatch.setattr(gdn_launch, "forms", lambda *shapes: (False, True, 0))
    check_graph_replay(public, "gdn")


@pytest.mark.parametrize(
    ("lengths", "hk", "hv", "long_length"),
    [
        ([2000, 130], 16, 48, 10**6),  # halves
        ([700, 640], 16, 48, 10**6),  # wholes
        ([900, 100, 70], 16, 32, 10**6),
        ([300, 300, 300], 16, 32, 10**6),
        ([1] * 40 + [700, 20], 16, 32, 10**6),  # from records, few of many rows
        ([0] * 5 + [3, 500] + [1] * 5, 4, 16, 10**6),
        ([20] * 30 + [900], 2, 8, 10**6),  # as many rows with chunks as a warp has lanes, less one
        ([20] * 33 + [900], 2, 8, 10**6),  # one launch: more
        ([64] * 12, 4, 16, 10**6),  # one launch: chains are short
        ([1] * 30 + [1300, 640], 4, 16, 640),  # in parts
        ([1] * 30 + [1300] * 9, 4, 16, 640),
        ([1] * 12 + [1300], 16, 32, 640),
        ([0] * 11 + [1], 4, 16, 10**6),
    ],
)
@pytest.mark.parametrize("least", [0, 17])
def test_the_form_that_lengths_choose_changes_no_bit(monkeypatch, lengths, hk, hv, long_length, least):
    monkeypatch.setattr(gdn_records, "MIXED_TOKENS", 0)
    n, total = len(lengths), sum(lengths)
    inputs = delta_inputs("gdn", "trained", total, hk, hv, device="cuda")
    read, cu = torch.arange(n, dtype=torch.int32, device="cuda"), cu_seqlens(lengths, device="cuda")
    longest = lengths.index(max(lengths))
    kept = [[(64, 2 * n), (333, 2 * n + 1)] if row == longest else [] for row in range(n)]
    plan = Checkpoints.from_lists(kept, device="cuda")
    start = filled_pool(2 * n + 2, hv, torch.float32, "trained", range(n))
    results = []
    for records in (None, None, False):
        pool = start.clone()
        out = torch.full((total, hv, 128), math.nan, dtype=torch.bfloat16, device="cuda")
        options = {"checkpoints": plan, "long_length": long_length, "min_tokens": least, "records": records}
        results.append((chunked(*inputs.tensors, pool, read, read + n, cu, out=out, **options), pool))
    for out, pool in results[:2]:
        assert torch.equal(bits(out), bits(results[2][0]))
        assert torch.equal(bits(pool), bits(results[2][1]))


@pytest.mark.parametrize("long_length", [128, 10**6])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_half_a_head_a_block_gives_the_same_bits(dtype, long_length):
    """Outputs, states and checkpoints of blocks with half a head are those of blocks with a whole one."""
    lengths, hv = (640, 64, 0, 1, 130, 3), 4
    inputs = delta_inputs("gdn", "trained", sum(lengths), 2, hv, device="cuda")
    n = len(lengths)
    read = torch.arange(n, dtype=torch.int32, device="cuda")
    cu = cu_seqlens(lengths, device="cuda")
    plan = Checkpoints.from_lists([[(64, 2 * n), (331, 2 * n + 1)], [], [], [], [(100, 2 * n + 2)], []], device="cuda")
    results = []
    for slabs in (1, 2):
        pool = filled_pool(2 * n + 3, hv, dtype, "trained", range(n))
        options = {"checkpoints": plan, "long_length": long_length, "slabs": slabs, "records": False}
        results.append((chunked(*inputs.tensors, pool, read, read + n, cu, **options), pool))
    for one, other in zip(*results):
        assert torch.equal(bits(one), bits(other))
