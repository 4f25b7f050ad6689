"""Profiler ranges are opened while a profiler records, and only then."""

from __future__ import annotations

import asyncio
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
from torch.profiler import ProfilerActivity, profile, record_function

from compact_state.integration.lmdeploy.ranges import quiet

SOURCE = """
import torch
from torch.profiler import record_function

@record_function("a function")
def function(value):
    return value + 1

@record_function("a coroutine")
async def coroutine(value):
    return value + 1

@torch.inference_mode()
@record_function("nested")
def nested(value):
    return value + torch.is_inference_mode_enabled()

@torch.inference_mode()
def bare(value):
    return value + 1

def block(value):
    with record_function("a block"):
        return value + 1

class Some:
    @record_function("a method")
    def method(self, value):
        return value + 1
"""
NAMES = ["a block", "a coroutine", "a function", "a method", "nested"]


@pytest.fixture
def module() -> ModuleType:
    made = ModuleType("some_module")
    exec(SOURCE, made.__dict__)
    return made


def call(module: Any) -> list[int]:
    functions = [module.function, module.nested, module.bare, module.block, module.Some().method]
    return [int(function(1)) for function in functions] + [asyncio.run(module.coroutine(1))]


def entered(module: Any) -> int:
    leave = mock.patch.object(record_function, "__exit__", autospec=True, return_value=None)
    with leave, mock.patch.object(record_function, "__enter__", autospec=True) as enter:
        assert call(module) == [2] * 6
    return enter.call_count


def test_ranges_are_opened_only_while_a_profiler_records(module: ModuleType) -> None:
    bare = module.bare
    assert entered(module) == 5
    quiet(module)
    assert entered(module) == 0
    assert module.bare is bare
    assert module.function.__name__ == "function"
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        assert call(module) == [2] * 6
    assert sorted({event.key for event in profiler.key_averages()} & set(NAMES)) == NAMES
    assert entered(module) == 0


@pytest.mark.lmdeploy
def test_a_decode_step_of_lmdeploy_opens_no_range() -> None:
    pytest.importorskip("lmdeploy", reason="lmdeploy is not installed")
    import lmd_flow

    flow = lmd_flow.Flow()
    flow.add(list(range(3, 90)), 20)
    with mock.patch.object(record_function, "__enter__", autospec=True) as enter:
        for _ in range(12):
            assert flow.step()
    assert enter.call_count == 0
