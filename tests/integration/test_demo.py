"""The demo serves, shares and checks; and it fails when a state is wrong."""

import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from compact_state.cute_kernels import Checkpoints
from compact_state.cute_kernels.errors import BackendUnavailableError
from compact_state.integration.demo import DemoMismatchError, run_demo
from compact_state.integration.demo import serve as serve_module
from compact_state.integration.demo.model import ModelConfig
from compact_state.integration.demo.serve import ServeSettings
from compact_state.integration.demo.trace import make_trace
from compact_state.pool import StateIdTable

SMALL = ServeSettings(num_slots=7, max_running=6, chunk=24, step_tokens=60, interval=10, preempt_every=6)
QUIET = Console(quiet=True)


def run_small(folder, seed=3, requests=12, settings=SMALL):
    trace = make_trace(seed, requests, 256, scale=0.25)
    return run_demo(folder, seed=seed, backend="reference", trace=trace, settings=settings, console=QUIET)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    return folder, run_small(folder)


def test_small_trace_shares_states_without_copying(demo):
    folder, report = demo
    assert report.passed
    assert report.requests == 12
    assert report.hits > 3
    assert report.tokens_not_recomputed > 50
    assert report.preemptions > 0
    assert report.evictions > 0
    assert report.copied_bytes == 0
    assert report.copying_design_bytes > 0
    assert report.peak_slots <= 7 < report.peak_slots_separate_pools
    assert report.compared_tokens == report.computed_tokens
    assert report.compared_checkpoints > 0
    assert report.steps_tracked_on_device > 0
    assert 0 < report.worst_rms_ratio < report.allowed_rms_ratio
    stored = json.loads((folder / "demo.json").read_text())
    assert stored["passed"] is True
    assert stored["hits"] == report.hits
    assert (folder / "timeline.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_same_seed_same_run(demo, tmp_path):
    again = run_small(tmp_path)
    assert replace(again, serve_seconds=0.0, check_seconds=0.0) == replace(
        demo[1], serve_seconds=0.0, check_seconds=0.0
    )


def test_a_slot_that_holds_another_state_fails_the_demo(tmp_path, monkeypatch):
    """Rows that read one slot and write another read a neighbour's instead: the bug that zero-copy restore invites."""
    stage = StateIdTable.stage

    def shifted(self, step, read_ids, write_ids, positions=None, **options):
        wrong = [(r + 1) % 7 if r not in (w, -1) else r for r, w in zip(read_ids, write_ids)]
        stage(self, step, wrong, write_ids, positions, **options)

    monkeypatch.setattr(StateIdTable, "stage", shifted)
    with pytest.raises(DemoMismatchError, match="differences from the isolated recomputation"):
        run_small(tmp_path)
    assert json.loads((tmp_path / "demo.json").read_text())["passed"] is False


def test_a_checkpoint_one_token_late_fails_the_demo(tmp_path, monkeypatch):
    """The boundary that the key names must be the boundary that the bytes hold."""

    def late(cu, ends, slots):
        return Checkpoints(cu=cu, ends=ends + 1, slots=slots)

    monkeypatch.setattr(serve_module, "Checkpoints", late)
    with pytest.raises(DemoMismatchError):
        run_small(tmp_path)


def test_more_requests_than_slots_wait_and_all_end(tmp_path):
    settings = replace(SMALL, num_slots=3, max_running=8)
    report = run_small(tmp_path, requests=8, settings=settings)
    assert report.requests == 8
    assert report.admissions_delayed > 0
    assert report.peak_slots == 3


def test_trace_is_seeded_and_has_what_the_demo_needs():
    trace = make_trace(0, 64, 256)
    assert trace == make_trace(0, 64, 256)
    assert trace != make_trace(1, 64, 256)
    assert any(request.cancel_after is not None for request in trace)
    assert any(request.parent is not None for request in trace)
    assert all(request.parent is None or request.parent < request.number for request in trace)
    prefixes = [request.prefix for request in trace if request.prefix]
    assert len(set(prefixes)) < len(prefixes) / 4
    assert all(0 <= token < 256 for request in trace for token in (*request.prefix, *request.tail))


def test_kernels_where_they_cannot_run_is_a_named_error(tmp_path):
    with pytest.raises(BackendUnavailableError, match="kernels"):
        run_demo(tmp_path, backend="kernels", device="cpu", requests=2, console=QUIET)


def test_real_geometry_on_a_gpu_is_what_kernels_take():
    config = ModelConfig.for_device(torch.device("cuda", 0))
    assert (config.head_dim, config.dtype) == (128, torch.bfloat16)
    assert config.layout().slot_bytes % 256 == 0
    assert {shape.kind for shape in config.layers} == {"gdn", "kda"}
