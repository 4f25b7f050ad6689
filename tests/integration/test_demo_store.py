"""The demo over a Mooncake Store: real processes once, and what it says when the engines differ."""

import json
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from compact_state.integration.demo import DemoMismatchError
from compact_state.integration.demo import store as module
from compact_state.pool.mooncake import unavailable_reason

QUIET = Console(quiet=True)
RESULT = module.EngineResult(
    tokens={"0": [1, 2, 3, 4], "1": [5, 6, 7]}, generated=3, computed_tokens=7, tokens_not_recomputed=0, states_stored=2,
    states_loaded=1, loaded_bytes=10, compared_tokens=7, compared_checkpoints=1, worst_rms_ratio=0.0, seconds=1.0,
)  # fmt: skip


@pytest.mark.mooncake
def test_a_second_process_serves_from_the_store(tmp_path):
    if unavailable_reason() is not None:
        pytest.skip(unavailable_reason())
    report = module.run_store_demo(tmp_path, seed=1, backend="reference", requests=6, console=QUIET)
    assert report.passed
    assert report.first.states_stored > 5
    assert report.second.states_loaded > 2
    assert report.second.computed_tokens < report.first.computed_tokens / 2
    assert report.second.tokens == report.first.tokens
    assert report.equal_generated_tokens == report.generated_tokens > 10
    assert report.second.loaded_bytes == report.second.states_loaded * report.state_bytes
    stored = json.loads((tmp_path / "store.json").read_text())
    assert stored["passed"] is True
    assert "tokens" not in stored["second"]


@pytest.mark.parametrize(
    ("second", "text"),
    [
        (replace(RESULT, tokens={"0": [1, 2, 3, 4], "1": [5, 6, 8]}), "answers differ"),
        (replace(RESULT, states_loaded=0), "loaded nothing"),
        (replace(RESULT, mismatches=["request 1 is wrong"]), "second engine, request 1 is wrong"),
    ],
)
def test_differences_are_an_error(tmp_path, monkeypatch, second, text):
    monkeypatch.setattr(module, "LoopbackMooncake", lambda *_, **__: nullcontext(SimpleNamespace(address="")))
    monkeypatch.setattr(module, "serve_with_store", lambda *_: RESULT)
    monkeypatch.setattr(module, "_second_engine", lambda *_: second)
    with pytest.raises(DemoMismatchError, match=text):
        module.run_store_demo(tmp_path, backend="reference", requests=2, console=QUIET)
    assert json.loads((tmp_path / "store.json").read_text())["passed"] is False


def test_equal_engines_pass(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LoopbackMooncake", lambda *_, **__: nullcontext(SimpleNamespace(address="")))
    monkeypatch.setattr(module, "serve_with_store", lambda *_: RESULT)
    monkeypatch.setattr(module, "_second_engine", lambda *_: RESULT)
    report = module.run_store_demo(tmp_path, backend="reference", requests=2, console=QUIET)
    assert (report.generated_tokens, report.equal_generated_tokens, report.prompt_tokens) == (3, 3, 4)
