"""A decode step by its graph alone: the same buffers and answers as by lmdeploy's step context, on a CPU."""

from __future__ import annotations

import asyncio
import functools
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
from lmd_flow import Flow  # noqa: E402

from compact_state.integration.lmdeploy import replay  # noqa: E402


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lmd_tiny.write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def engine() -> Iterator[None]:
    with lmd_graph.cpu_engine():
        yield


def test_answers_are_those_of_lmdeploys_own_way(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flow = lmd_model.model_flow(checkpoint, device=lmd_graph.GraphDevice, blocks=64)
    with mock.patch.object(replay, "refill", wraps=replay.refill) as refill:
        ours = lmd_graph.served(flow)
    replays = [single._graph.replays for single in flow.device.graphs]
    monkeypatch.setattr(replay, "is_plain", lambda inputs: False)
    theirs = lmd_model.model_flow(checkpoint, device=lmd_graph.GraphDevice, blocks=64)
    assert ours == lmd_graph.served(theirs)
    assert replays == [single._graph.replays for single in theirs.device.graphs]
    assert refill.call_count == sum(replays) > 10
    assert ours == lmd_graph.served(lmd_model.model_flow(checkpoint, blocks=64))


def step_inputs(count: int, seed: int) -> Any:
    """A decode step of `count` rows."""
    from lmdeploy.pytorch.model_inputs import ModelInputs

    draw = functools.partial(torch.randint, generator=torch.Generator().manual_seed(seed))
    history = draw(1, 900, (count,))
    return ModelInputs(
        input_ids=draw(3, 260, (1, count)),
        seq_length=torch.ones(count, dtype=torch.long),
        history_lengths=history,
        block_offsets=draw(1, 64, (count, 15), dtype=torch.int32),
        is_decoding=True,
        num_ignored_history=torch.zeros(count, dtype=torch.long),
        max_q_seqlen=1,
        max_kv_seqlen=int(history.max()) + 1,
        sum_kv_seqlen=int(history.sum()) + count,
        # A view with strides, as the ids of every step but the first are.
        state_offsets=draw(0, 9, (count, 2), dtype=torch.int32)[:, 1:].expand(-1, 2),
        mrope_pos_ids=draw(1, 900, (3, count)),
    )


def run(flow: Flow, inputs: Any, buffers: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The outputs of one step, over buffers that hold something else."""
    from lmdeploy.pytorch.engine.model_agent.agent import model_forward

    for name, value in buffers.items():
        value.fill_(77 + len(name))
    device = flow.device
    arguments = (device.model_config, device.caches, device.states)
    outputs = model_forward(device.model, inputs, *arguments, stream=None, cache_inputs=None)
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in outputs.items()}


@pytest.fixture
def warm(checkpoint: Path) -> Flow:
    """An engine with a graph for 1, 2 and 4 rows, that replay nothing."""
    flow = lmd_model.model_flow(checkpoint, device=lmd_graph.GraphDevice, blocks=64)
    lmd_graph.served(flow)
    assert sorted(single.meta.max_batchs for single in flow.device.graphs) == [1, 2, 4]
    for single in flow.device.graphs:
        single._graph = mock.Mock()
    return flow


@torch.inference_mode()
def test_buffers_and_outputs_are_those_of_lmdeploys_own_way(warm: Flow) -> None:
    singles = {single.meta.max_batchs: single for single in warm.device.graphs}
    for seed, count in enumerate((1, 2, 3, 4, 3)):
        inputs = step_inputs(count, seed)
        single = singles[{3: 4}.get(count, count)]
        buffers = single.meta.input_buffers
        with mock.patch.object(replay, "is_plain", return_value=False):
            theirs = run(warm, inputs, buffers)
        filled = {name: value.clone() for name, value in buffers.items()}
        ours = run(warm, inputs, buffers)
        assert single._graph.replay.call_count == 2
        single._graph.reset_mock()
        for name, value in buffers.items():
            rows = slice(None) if name != "input_ids" else slice(count)
            assert torch.equal(value[..., rows], filled[name][..., rows]), name
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            assert value is theirs[name] is None or torch.equal(value, theirs[name]), name
            assert value is None or value.dtype == theirs[name].dtype, name


OTHER = [
    ("is_decoding", False),
    ("max_q_seqlen", 2),
    ("is_dummy", True),
    ("enable_microbatch", True),
    ("is_chunk", True),
]
OTHER += [("state_offsets", None), *((name, torch.zeros(1)) for name in replay.ABSENT)]


@pytest.mark.parametrize(("name", "value"), OTHER, ids=lambda value: value if isinstance(value, str) else "")
def test_every_other_forward_goes_lmdeploys_way(name: str, value: Any) -> None:
    inputs = step_inputs(3, 1)
    assert replay.is_plain(inputs)
    setattr(inputs, name, value)
    assert not replay.is_plain(inputs)


def test_a_graph_that_reads_more_goes_lmdeploys_way(warm: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    single = warm.device.graphs[0]
    meta, model = single.meta, type(single.model)
    assert replay.reads_common_buffers(single)
    for name, value in (
        ("is_ssm", False),
        ("decode_query_len", 4),
        ("use_flash_mla", True),
        ("use_fa3_decoding", True),
        ("step_meta_plan", SimpleNamespace(attention_builders=[object()])),
        ("input_buffers", {**meta.input_buffers, "scheduler_metadata": torch.zeros(1)}),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(meta, name, value)
            assert not replay.reads_common_buffers(single), name
    for name in ("support_cuda_graph", "fill_buffers_cudagraph", "get_cudagraph_extra_key", "update_model_metas"):
        with monkeypatch.context() as patch:
            patch.setattr(model, name, lambda self: None, raising=False)
            assert not replay.reads_common_buffers(single), name
    assert replay.reads_common_buffers(single)


@torch.inference_mode()
def test_without_its_graph_or_with_rows_padded_for_others_a_step_goes_lmdeploys_way(warm: Flow) -> None:
    runner, inputs = warm.device.model, step_inputs(2, 3)
    assert replay.replay(runner, inputs) is not None
    runner.get_meta().padding_batch_size = 4
    assert replay.replay(runner, inputs) is None
    runner.get_meta().padding_batch_size = None
    runner._full_graph_runners.clear()
    assert replay.replay(runner, inputs) is None


@pytest.mark.parametrize(("window", "cache_inputs"), [(-1, None), (128, None), (-1, object())])
def test_sliding_windows_and_copies_of_blocks_go_lmdeploys_way(window: int, cache_inputs: Any) -> None:
    from lmdeploy.pytorch.engine.model_agent import agent

    model = SimpleNamespace(compact_replay=mock.Mock(return_value={"outputs": 1}))
    caches = SimpleNamespace(cache_config=SimpleNamespace(window_size=window))
    arguments = {"model_config": None, "cache_engine": caches, "state_cache_engine": None, "cache_inputs": cache_inputs}
    if window > 0 or cache_inputs is not None:
        with pytest.raises(
            AttributeError
        ):  # lmdeploy's own function, which a stand-in for a model does not get through
            agent.model_forward(model, step_inputs(3, 1), **arguments)
        model.compact_replay.assert_not_called()
    else:
        assert agent.model_forward(model, step_inputs(3, 1), **arguments) == {"outputs": 1}


def test_outputs_leave_for_the_host_before_the_event_that_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from lmdeploy.pytorch.engine.model_agent.agent import BaseModelAgent, BatchedOutputs

    order: list[str] = []

    class OnDevice:
        is_cuda = True

        def to(self, device: str, non_blocking: bool) -> str:
            order.append("copy")
            return f"{device}, {'later' if non_blocking else 'now'}"

    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: order.append("event")))
    agent = SimpleNamespace(_out_que=mock.Mock())
    here = torch.zeros(2)
    BaseModelAgent._push_output(agent, BatchedOutputs(next_token_ids=OnDevice(), stopped=OnDevice(), stop_pos=here))
    [[output, _]] = agent._out_que.put_nowait.call_args.args
    assert order == ["copy", "copy", "event"]
    assert (output.next_token_ids, output.stopped) == ("cpu, later", "cpu, later")
    assert output.stop_pos is here
    BaseModelAgent._push_output(agent, BatchedOutputs.connector_only(None))
    assert order == ["copy", "copy", "event", "event"]


@pytest.mark.parametrize(
    ("queries", "patience", "naps"), [(1, 1.0, []), (4, 1.0, [0, 0, 0]), (3, -1.0, [0.001, 0.001])]
)
def test_outputs_are_looked_for_at_every_turn_and_after_a_while_every_millisecond(
    queries: int, patience: float, naps: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmdeploy.pytorch.engine.model_agent.agent import BaseModelAgent, BatchedOutputs

    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(replay.asyncio, "sleep", sleep)
    monkeypatch.setattr(replay, "PATIENCE_S", patience)
    event = mock.Mock()
    event.query.side_effect = [False] * (queries - 1) + [True]
    output = BatchedOutputs(next_token_ids=torch.tensor([5]), stopped=torch.tensor([True]))

    async def get() -> Any:
        return output, event

    agent = mock.Mock(_out_que=SimpleNamespace(get=get))
    got = asyncio.run(BaseModelAgent.get_output_async(agent))
    assert (got.next_token_ids.tolist(), got.stopped.tolist(), slept) == ([5], [True], naps)
    assert got.new_token_timestamp > 0
    agent._release_completed_h2d_transfers.assert_called_once_with()
