"""lmdeploy's own model agent, its queues, loops and step on a CPU, with decode steps by the stand-in graph."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytestmark = pytest.mark.lmdeploy
pytest.importorskip("lmdeploy", reason="lmdeploy is not installed")

import lmd_graph  # noqa: E402  after the skip: it imports lmdeploy
import lmd_model  # noqa: E402
import lmd_tiny  # noqa: E402
import torch  # noqa: E402

from compact_state.cute_kernels.checkpoints import Checkpoints  # noqa: E402
from compact_state.integration.lmdeploy import inputs, replay, steady  # noqa: E402


class Event:
    """Passes at its third look, as one on a GPU that is not done yet."""

    def __init__(self) -> None:
        self.looks = 0

    def record(self) -> None:
        """Nothing is behind it."""

    def wait(self) -> None:
        assert self.query()

    def query(self) -> bool:
        self.looks += 1
        return self.looks > 2


class AgentDevice(lmd_graph.GraphDevice):
    """Hands forwards to a `BaseModelAgent` and takes its outputs; its weights, pool and pages are ModelDevice's."""

    def load(self, checkpoint: Path, cache_config: Any) -> None:
        from lmdeploy.pytorch.config import DistConfig
        from lmdeploy.pytorch.devices import DeviceContext
        from lmdeploy.pytorch.distributed import DistContext
        from lmdeploy.pytorch.engine.model_agent.agent import BaseModelAgent
        from lmdeploy.pytorch.spec_decode.base import BaseSpecModelAgent

        super().load(checkpoint, cache_config)
        agent = self.agent = BaseModelAgent.__new__(BaseModelAgent)
        stream = SimpleNamespace(wait_event=lambda event: None)
        agent.stream = agent.out_stream = agent.cache_stream = stream
        agent.model_config, agent.cache_config = self.model_config, cache_config
        agent.cache_engine, agent.state_cache_engine = self.caches, self.states
        agent.patched_model, agent.strategy_factory = self.model, self.factory
        agent.agent_strategy = self.factory.build_model_agent_strategy()
        agent.inputs_strategy = self.factory.build_model_inputs_strategy()
        agent.dist_config, agent.device_ctx, agent.rank = DistConfig(), DeviceContext(), 0
        agent.dist_ctx = DistContext(dist_config=agent.dist_config)
        agent.misc_config = SimpleNamespace(logprobs_mode=None)
        agent.need_output, agent.guided_decoding_manager = True, None
        agent.memdecode_agent = agent.kv_connector = agent.profiler = None
        agent.spec_agent = BaseSpecModelAgent.__new__(BaseSpecModelAgent)
        agent.spec_agent._enabled = False
        agent._pending_h2d_transfers = deque()
        agent.tasks = set()
        agent._init_runtime_state()
        self.started = False

    async def forward_async(self, forward_inputs: dict[str, Any]) -> None:
        if not self.started:
            self.started = True
            with mock.patch("lmdeploy.pytorch.engine.model_agent.agent.AgentProfiler"):
                self.agent.start(None)
        self.agent.set_forward_inputs(dict(forward_inputs))
        await asyncio.sleep(0)

    async def get_output_async(self) -> Any:
        for task in self.agent.tasks:
            if task.done():
                task.result()
        return await self.agent.get_output_async()


@contextlib.contextmanager
def host_only() -> Iterator[None]:
    """What moves to the device stays where it is."""
    from lmdeploy.pytorch.engine.model_agent import agent

    def here(value: Any, non_blocking: bool = False) -> Any:
        return value if value is None or isinstance(value, torch.Tensor) else value.to_device("cpu", non_blocking)

    with mock.patch.object(torch.cuda, "Event", Event), mock.patch.object(agent, "_try_to_cuda", here):
        yield


def test_an_agents_answers_are_those_of_the_model_alone(tmp_path: Path) -> None:
    checkpoint = lmd_tiny.write_checkpoint(tmp_path)
    refill = mock.patch.object(replay, "refill", wraps=replay.refill)
    same = mock.patch.object(steady.SameRows, "to_device", autospec=True, side_effect=steady.SameRows.to_device)
    with lmd_graph.cpu_engine():
        with host_only(), refill as refilled, same as sent:
            flow = lmd_model.model_flow(checkpoint, device=AgentDevice, blocks=64)
            ours = lmd_graph.served(flow)
            for task in flow.device.agent.tasks:
                task.cancel()
            flow._events.run_until_complete(asyncio.sleep(0))
        assert ours == lmd_graph.served(lmd_model.model_flow(checkpoint, blocks=64))
    assert refilled.call_count > 10
    assert sent.call_count > 5


def test_all_that_a_forward_is_given_moves_to_its_device() -> None:
    plan, column = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    given = inputs.CompactCacheInputs(plan, plan, exports=Checkpoints(column, column, column), commits=plan)
    moved = given.to_device("meta")
    assert isinstance(moved, inputs.CompactCacheInputs)
    for tensor in (moved.kv_restore_plan, moved.kv_save_plan, moved.commits, *vars(moved.exports).values()):
        assert tensor.device.type == "meta"
    assert inputs.CompactCacheInputs().to_device("meta") == inputs.CompactCacheInputs()
