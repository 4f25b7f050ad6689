"""Causal conv decode on the GPU: outputs within one bf16 ulp of float64, windows bit for bit."""

from __future__ import annotations

import pytest
import torch
from conv_case import BF16, CHANNELS, FORMS, Case, bits, gpu_ids

from compact_state.cute_kernels import advance_state_ids
from compact_state.cute_kernels.configs import conv1d as configs
from compact_state.cute_kernels.errors import InvalidArgumentError
from compact_state.cute_kernels.reference import conv1d as reference

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("settled", [False, True])
def test_decode_every_kind_of_row(form, settled):
    case = Case(form)
    read = gpu_ids(0, 1, -1, 3, -1, 4, 12, 5)
    write = gpu_ids(0, 6, 7, -1, -1, 2_000_000_000, 8, 9)
    positions = gpu_ids(0, 5, 0, 7, 3, 1000, 6, 2**30)
    x = case.tokens(8)
    out, _ = case.check_decode(x, read, write, positions, settled=settled)
    assert bool((out[4] == 0).all())


def test_decode_in_place_equals_copy():
    case = Case()
    x = case.tokens(5)
    position = gpu_ids(*range(9, 14))
    copied = case.decode(x, case.pool, gpu_ids(0, 1, 2, 3, 4), gpu_ids(5, 6, 7, 8, 9), position)
    placed = case.decode(x, case.pool, gpu_ids(0, 1, 2, 3, 4), gpu_ids(0, 1, 2, 3, 4), position)
    assert torch.equal(copied, placed)
    assert torch.equal(
        reference.live_window(case.pool, gpu_ids(0, 1, 2, 3, 4), position + 1),
        reference.live_window(case.pool, gpu_ids(5, 6, 7, 8, 9), position + 1),
    )


def test_A4_padded_rows_are_zero_and_live_rows_equal_a_smaller_batch():
    case = Case()
    x = case.tokens(8)
    pool = case.pool.clone()
    read, write, position = gpu_ids(0, 1, 2, *[-1] * 5), gpu_ids(0, 1, 2, *[-1] * 5), gpu_ids(*[6] * 8)
    for step in range(2):
        out = case.decode(x, case.pool, read, write, position)
        alone = case.decode(x[:3], pool, read[:3], write[:3], position[:3])
        assert torch.equal(out[:3], alone)
        assert bool((out[3:] == 0).all())
        assert torch.equal(bits(case.pool), bits(pool)), f"step {step}"
        position += 1


def test_C8_output_may_be_the_input_row():
    case = Case()
    x = case.tokens(3)
    marked = x.clone()
    separate = case.decode(x, case.pool.clone(), gpu_ids(0, 1, 2), gpu_ids(3, 4, 5), gpu_ids(4, 5, 6))
    assert torch.equal(x, marked)
    case.decode(x, case.pool, gpu_ids(0, 1, 2), gpu_ids(3, 4, 5), gpu_ids(4, 5, 6), out=x)
    assert torch.equal(x, separate)


def test_decode_more_rows_than_a_grid_dimension():
    case = Case(channels=64, slots=4)
    rows = 65_600
    x = case.tokens(1).expand(rows, -1).clone()
    none, zero = torch.full((rows,), -1, dtype=torch.int32, device="cuda"), gpu_ids(0).expand(rows).clone()
    out = case.decode(x, case.pool, zero, none, gpu_ids(7).expand(rows).clone())
    assert torch.equal(out, out[:1].expand_as(out))
    assert bool(torch.isfinite(out).all())


def test_A13_graph_replay_follows_its_buffers():
    case = Case()
    x, out = case.tokens(3), case.output(3)
    read, write, positions = gpu_ids(0, 1, 2), gpu_ids(0, 1, 2), gpu_ids(4, 5, 6)
    case.decode(x, case.pool, read, write, positions, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.decode(x, case.pool, read, write, positions, out=out)
    for step in range(3):
        x.copy_(case.random(3, CHANNELS))
        read.copy_(gpu_ids(step, 5 + step, -1))
        write.copy_(gpu_ids(8, 5 + step, -1))
        positions.copy_(gpu_ids(step, 9, 12))
        pool = case.pool.clone()
        eager = case.decode(x, pool, read, write, positions)
        graph.replay()
        assert torch.equal(out, eager), f"replay {step}"
        assert torch.equal(bits(case.pool), bits(pool))


def test_side_stream_waits_for_its_producer():
    case = Case()
    source, x = case.tokens(4), case.tokens(4)
    arguments = (gpu_ids(0, 1, 2, 3), gpu_ids(4, 5, 6, 7), gpu_ids(4, 5, 6, 7))
    expected = case.decode(source, case.pool, *arguments)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x.copy_(source)
        out = case.decode(x, case.pool, *arguments, settled=True)
    stream.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("rows", [1, 2, 3, 64, 65])
def test_row_counts_around_a_threads_rows(rows):
    """A thread serves several rows: the last one's group may be short."""
    case = Case(slots=2 * rows)
    order = torch.randperm(2 * rows, generator=torch.Generator().manual_seed(rows)).int().cuda()
    read, write = order[:rows].contiguous(), order[rows:].contiguous()
    positions = torch.arange(5, 5 + rows, dtype=torch.int32, device="cuda")
    x = case.tokens(rows)
    out, original = case.check_decode(x, read, write, positions)
    for n in range(0, rows, 13):
        part = slice(n, n + 1)
        alone = case.decode(x[part], original, read[part], write[part], positions[part])
        assert torch.equal(out[part], alone), f"row {n} depends on the others"


def test_large_steps():
    """Enough outputs for the other shape of the kernel: the same bits as rows of a small step, and float64's values."""
    rows, channels = 303, 4096
    assert configs.choose_decode(4, "bfloat16", rows * channels) != configs.choose_decode(4, "bfloat16", channels)
    case = Case(channels=channels, slots=2 * rows)
    read = torch.arange(0, 2 * rows, 2, dtype=torch.int32, device="cuda")
    positions = torch.arange(rows, dtype=torch.int32, device="cuda") + 3
    write = torch.where(positions % 3 == 0, read, read + 1)
    x = case.tokens(rows)
    out, original = case.check_decode(x, read, write, positions)
    part = slice(100, 110)
    assert torch.equal(out[part], case.decode(x[part], original, read[part], write[part], positions[part]))


def test_A1_padded_rows_leave_every_slot_alone():
    case = Case()
    read = gpu_ids(1, 2, -1, -1, 12, -(2**31), 2**31 - 1, -7)
    before = case.pool.clone()
    out = case.decode(case.tokens(8), case.pool, read, read, gpu_ids(*[4] * 8))
    assert bool((out[2:] == 0).all())
    for slot in range(12):
        same = torch.equal(bits(case.pool[slot]), bits(before[slot]))
        assert same == (slot not in (1, 2)), f"slot {slot}"


def test_G17_each_step_has_its_own_dummy_rows():
    """Graph replays with [real, dummy, real], then [real, real, dummy]; no slot is free, and dummies need none."""
    case = Case(slots=3)
    x, out, ids_, positions = case.tokens(3), case.output(3), gpu_ids(0, -1, 2), gpu_ids(5, 6, 7)
    scratch = case.pool.clone()
    case.decode(x, scratch, ids_, ids_, positions, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.decode(x, case.pool, ids_, ids_, positions, out=out)
    for mask in ((0, -1, 2), (0, 1, -1), (-1, -1, -1)):
        ids_.copy_(gpu_ids(*mask))
        before = case.pool.clone()
        graph.replay()
        for row, slot in enumerate(mask):
            assert bool((out[row] == 0).all()) == (slot < 0), f"row {row} of {mask}"
        for slot in range(3):
            assert torch.equal(bits(case.pool[slot]), bits(before[slot])) == (slot not in mask), (
                f"slot {slot} of {mask}"
            )
        positions += 1


def test_C6_one_object_serves_every_batch_pool_and_stride():
    for rows, slots, pad in ((1, 8, 0), (17, 4096, 24), (17, 40, 0), (1, 8, 8)):
        case = Case(slots=slots, pad=pad)
        x, write = case.tokens(rows), torch.arange(slots - rows, slots, dtype=torch.int32, device="cuda")
        read, positions = torch.arange(rows, dtype=torch.int32, device="cuda"), gpu_ids(*range(rows))
        if slots < 2 * rows:
            read = torch.full_like(read, -1)
        case.check_decode(x, read, write, positions)


def test_C3_a_row_off_16_bytes_is_refused_before_anything_happens():
    case = Case()
    projection = torch.zeros(2, CHANNELS + 12, dtype=BF16, device="cuda")
    before = case.pool.clone()
    for x in (projection[:, 4 : 4 + CHANNELS], projection[:, :CHANNELS]):
        with pytest.raises(InvalidArgumentError, match=r"x: got address .* multiples of 16 B"):
            case.decode(x, case.pool, gpu_ids(0, 1), gpu_ids(0, 1), gpu_ids(4, 4))
    assert torch.equal(bits(case.pool), bits(before))


def test_layers_launched_early_equal_layers_launched_apart():
    """A step of six layers, each on the one before's output, then the tracking kernel; only layer 0 follows the latter."""
    rows, channels, layers, steps = 300, 2048, 6, 5
    case = Case(channels=channels, slots=2)
    pools = [case.random(rows + 1, 4, channels).to(BF16) for _ in range(layers)]
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(3)).int().cuda()
    x = case.random(rows, channels).to(BF16)

    def run(pools, early):
        ids_, positions = order.clone(), torch.full((rows,), 9, dtype=torch.int32, device="cuda")
        buffers = [torch.empty_like(x) for _ in range(layers)]
        outs = []

        def step():
            row = x
            for layer, pool in enumerate(pools):
                row = case.decode(row, pool, ids_, ids_, positions, out=buffers[layer], settled=early and layer > 0)
                if not early:
                    torch.cuda.synchronize()
            advance_state_ids(ids_, ids_, positions, num_slots=rows + 1, backend="kernels")

        if early:
            step()
            ids_.copy_(order)
            positions.fill_(9)
            for pool, fresh in zip(pools, originals):
                pool.copy_(fresh)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
        for _ in range(steps):
            graph.replay() if early else step()
            outs.append(buffers[-1].clone())
        return torch.stack(outs)

    originals = [pool.clone() for pool in pools]
    expected = run([pool.clone() for pool in originals], early=False)
    assert torch.equal(run(pools, early=True), expected)
