"""`advance_state_ids` on the GPU against its reference, exactly."""

from __future__ import annotations

import itertools

import pytest
import torch

from compact_state.cute_kernels import advance_state_ids
from compact_state.cute_kernels.reference import advance_state_ids as reference

pytestmark = pytest.mark.gpu

NUM_SLOTS = 9


def tensors(n, seed):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda low, high: torch.randint(low, high, (n,), generator=generator).int().cuda()
    ids = {"read_ids": draw(-2, 12), "write_ids": draw(-2, 12), "positions": draw(0, 1000)}
    optional = {
        "num_tokens": draw(0, 9),
        "num_accepted": draw(0, 9),
        "log_half": draw(0, 2),
        "next_write_ids": draw(-2, 12),
    }
    return ids, optional


@pytest.mark.parametrize("given", list(itertools.product([False, True], repeat=4)), ids=str)
@pytest.mark.parametrize("n", [1, 5, 128, 1000])
def test_matches_reference(given, n):
    ids, optional = tensors(n, n)
    optional = {name: value for (name, value), use in zip(optional.items(), given) if use}
    expected = {name: value.clone() for name, value in (ids | optional).items()}
    reference(**expected, num_slots=NUM_SLOTS)
    advance_state_ids(**ids, **optional, num_slots=NUM_SLOTS, backend="kernels")
    for name, value in (ids | optional).items():
        assert torch.equal(value, expected[name]), name


def test_A1_rows_that_write_nothing_stay():
    read, write = (
        torch.tensor(values, dtype=torch.int32, device="cuda") for values in ([1, 2, 3, 4], [5, -1, 9, 2**31 - 1])
    )
    positions = torch.full((4,), 7, dtype=torch.int32, device="cuda")
    advance_state_ids(read, write, positions, num_slots=NUM_SLOTS, backend="kernels")
    assert read.tolist() == [5, 2, 3, 4]
    assert write.tolist() == [5, -1, 9, 2**31 - 1]
    assert positions.tolist() == [8, 7, 7, 7]


def test_graph_replay_tracks_steps_without_the_host():
    read, write = (torch.tensor(values, dtype=torch.int32, device="cuda") for values in ([0, -1], [1, 2]))
    positions, half = torch.zeros(2, dtype=torch.int32, device="cuda"), torch.zeros(2, dtype=torch.int32, device="cuda")
    counts = torch.tensor([2, 3], dtype=torch.int32, device="cuda")
    call = lambda: advance_state_ids(
        read, write, positions, num_accepted=counts, log_half=half, num_slots=NUM_SLOTS, backend="kernels"
    )
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for _ in range(4):
        graph.replay()
    assert read.tolist() == [1, 2]
    assert positions.tolist() == [10, 15]
    assert half.tolist() == [1, 1]
