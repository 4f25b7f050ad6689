"""The figures of a serving trial: from when each token was made to rates and times."""

from __future__ import annotations

import gc
import sys
from types import SimpleNamespace

import pytest

from compact_state.perf.serving import traffic
from compact_state.perf.serving.traffic import Answer, Pauses, StepClock, figures


def trial() -> tuple[list[Answer], StepClock, Pauses]:
    clock, pauses = StepClock(), Pauses()
    clock.steps = [10.5, 11.0, 11.4, 12.5, 13.0]
    clock.first, clock.last = {1: 10.5, 2: 11.0}, {1: 12.5, 2: 13.0}
    pauses.total, pauses.longest = 0.01, 0.007
    return [Answer(1, 10.0, [7] * 5, cached=3), Answer(2, 10.2, [7] * 3, cached=4)], clock, pauses


def test_a_trial_in_numbers() -> None:
    assert figures(*trial()) == {
        "seconds": 3.0,
        "output_tok_s": 2.7,
        "ttft_ms": 650.0,
        "ttft_last_ms": 800.0,
        "tpot_ms": 750.0,
        "step_ms": 500.0,
        "step_p99_ms": 1100.0,
        "step_max_ms": 1100.0,
        "gc_ms": 10.0,
        "gc_longest_ms": 7.0,
        "cached_tokens": 7,
        "tokens": 8,
    }


def test_answers_of_one_token_have_no_time_a_token() -> None:
    answers, clock, pauses = trial()
    for answer in answers:
        answer.ids = [7]
    clock.steps, clock.last = [10.5, 11.0], clock.first
    found = figures(answers, clock, pauses)
    assert (found["tpot_ms"], found["step_ms"], found["step_p99_ms"], found["step_max_ms"]) == (None,) * 4
    assert (found["seconds"], found["tokens"]) == (1.0, 2)


def test_the_clock_notes_forwards_that_made_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    class EngineLoop:
        def _make_infer_outputs(self, outputs: dict[int, str]) -> dict[int, str]:
            return outputs

    monkeypatch.setitem(sys.modules, "lmdeploy.pytorch.engine.engine_loop", SimpleNamespace(EngineLoop=EngineLoop))
    times = iter((1.0, 2.0, 3.0))
    monkeypatch.setattr(traffic.time, "perf_counter", lambda: next(times))
    clock, loop = StepClock(), EngineLoop()
    clock.install()
    assert loop._make_infer_outputs({4: "a", 5: "b"}) == {4: "a", 5: "b"}
    assert loop._make_infer_outputs({}) == {}
    loop._make_infer_outputs({5: "c"})
    assert (clock.steps, clock.first, clock.last) == ([1.0, 3.0], {4: 1.0, 5: 1.0}, {4: 1.0, 5: 3.0})
    clock.clear()
    assert (clock.steps, clock.first, clock.last) == ([], {}, {})


def test_collections_are_timed_in_the_block_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(gc.callbacks)
    with Pauses() as pauses:
        assert len(gc.callbacks) == before + 1
        times = iter((5.0, 5.5, 8.0, 8.25))
        monkeypatch.setattr(traffic.time, "perf_counter", lambda: next(times))
        gc.disable()
        for phase in ("start", "stop", "start", "stop"):
            pauses._note(phase, {})
        gc.enable()
        monkeypatch.undo()
    assert len(gc.callbacks) == before
    assert (pauses.total, pauses.longest) == (0.75, 0.5)


def test_quantiles_of_few_values() -> None:
    assert traffic.quantile([], 0.99) == 0.0
    assert traffic.quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert traffic.quantile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert traffic.quantile([3.0, 1.0], 1.0) == 3.0
