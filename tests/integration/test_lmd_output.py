"""How the engine waits for a forward's output: promptly for some milliseconds, then as lmdeploy does."""

from __future__ import annotations

import asyncio
import contextlib
import time
from types import SimpleNamespace
from typing import Any

import pytest

from compact_state.integration import envs

pytestmark = pytest.mark.lmdeploy
pytest.importorskip("lmdeploy", reason="lmdeploy is not installed")


class Output:
    def to_cpu(self) -> Output:
        return self


class Event:
    """Ready `seconds` from now."""

    def __init__(self, seconds: float) -> None:
        self.at, self.looks, self.waited = time.perf_counter() + seconds, 0, False

    def query(self) -> bool:
        self.looks += 1
        return time.perf_counter() >= self.at

    def wait(self) -> None:
        self.waited = True


def fetched(seconds: float, spin_s: float) -> tuple[Any, Event, int]:
    """The output, its event, and how often other work of the loop had its turn."""
    from compact_state.integration.lmdeploy.inputs import _prompt_output

    module: Any = SimpleNamespace(record_function=lambda name: contextlib.nullcontext())
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def run() -> tuple[Any, Event]:
        agent = SimpleNamespace(
            _out_que=asyncio.Queue(), out_stream=None, _release_completed_h2d_transfers=lambda: None
        )
        event = Event(seconds)
        agent._out_que.put_nowait((Output(), event))
        beside = asyncio.create_task(other())
        out = await _prompt_output(module, spin_s)(agent)
        beside.cancel()
        agent._out_que.put_nowait(None)
        assert await _prompt_output(module, spin_s)(agent) == {}
        return out, event

    out, event = asyncio.run(run())
    return out, event, turns


def test_an_output_is_looked_for_at_every_turn_of_the_loop() -> None:
    out, event, turns = fetched(0.02, spin_s=60.0)
    assert isinstance(out, Output)
    assert event.waited
    assert out.new_token_timestamp <= time.time()
    # A look every millisecond would be 20; the other task is not kept waiting.
    assert event.looks > 100
    assert turns >= event.looks - 2


def test_after_the_spin_it_is_looked_for_once_a_millisecond() -> None:
    _, event, turns = fetched(0.05, spin_s=0.0)
    assert event.looks <= 52
    assert turns > event.looks


@pytest.mark.parametrize(("text", "value"), [(None, 4), ("0", 0), ("10", 10)])
def test_the_spin_is_set_in_milliseconds(monkeypatch: pytest.MonkeyPatch, text: str | None, value: int) -> None:
    if text is None:
        monkeypatch.delenv(envs.SPIN_MS, raising=False)
    else:
        monkeypatch.setenv(envs.SPIN_MS, text)
    assert envs.spin_ms() == value


def test_a_spin_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(envs.SPIN_MS, "-1")
    with pytest.raises(ValueError, match="LMDEPLOY_COMPACT_SPIN_MS=-1"):
        envs.spin_ms()
