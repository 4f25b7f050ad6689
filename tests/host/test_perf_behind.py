"""What is timed behind a projection, on CPU tensors: figures are differences to the projection's own time."""

from __future__ import annotations

import pytest
import torch

from compact_state.perf import behind
from compact_state.perf.inputs import Workspace
from compact_state.perf.timing import Timing, Timings


class Counting:
    """A timer by which every launch of a graph that calls a projection takes 10 us more."""

    def __init__(self, problem):
        self.calls = []
        project = problem.project
        problem.project = lambda i: lambda: (self.calls.append(i), project(i)())

    def time(self, contenders):
        results = Timings()
        for contender in contenders:
            before = len(self.calls)
            for launch in contender.launches:
                launch()
            calls = len(self.calls) - before
            own = 0.0 if contender.name == "ours_gemm" else 3.0
            results.by_name[contender.name] = Timing(own + 10.0 * calls / len(contender.launches), 0.0)
        return results


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(behind, "PAIRS", 2)
    monkeypatch.setattr(behind, "LAYERS", 2)
    monkeypatch.setattr(behind, "HIDDEN", 32)
    monkeypatch.setattr(behind, "gaps", lambda whole: {})
    return lambda geometry: behind.Projected(Workspace(torch.device("cpu"), 1 << 22), geometry, 1, "float32")


@pytest.mark.parametrize("geometry", ["Q4", "G2"])
def test_a_pair_costs_its_launch_beside_the_projection(small, geometry):
    problem = small(geometry)
    found = behind.behind(problem, {}, Counting(problem))
    assert found.pop("gemm") == 10.0
    names = {"settled", "waiting", "plain", "layer settled", "layer waiting", "layer plain"}
    assert found == {f"{where} {name}": 3.0 for where in ("bare", "behind") for name in names}


def test_a_step_is_set_against_its_kernels(small):
    problem = small("Q4")
    found = behind.step(problem, Counting(problem))
    # Two layers with a projection each; alone a projection is 10 us, and each of the three kernels 3 us.
    assert found == {"a layer": (3.0 + 10.0 * 2) / 2, "sum of its kernels": 19.0}


def test_the_row_feeds_the_views_that_the_launches_read(small):
    problem = small("Q4")
    problem.row.zero_()
    problem.project(0)()
    delta = problem.layer.delta
    views = torch.cat([delta.q.flatten(1), delta.k.flatten(1), delta.v.flatten(1), problem.layer.z], dim=1)
    assert torch.equal(views, problem.hidden @ problem.weights[0])
    assert problem.layer.conv.x.data_ptr() == problem.row.data_ptr()
