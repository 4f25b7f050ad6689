"""Decode steps by lmdeploy's graph runner on a CPU, over the model of `lmd_model`.

A graph is a stand-in: the model's own forward over the buffers that the graph was made with, run again by `replay`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lmd_flow
import lmd_model
import torch


class Graph:
    """What a captured graph is to its runner."""

    def __init__(self, single: Any, kwargs: dict[str, Any]) -> None:
        self.single, self.kwargs, self.context = single, kwargs, single._ctx_mgr.current_context()
        self.replays = 0

    def replay(self) -> None:
        from lmdeploy.pytorch.model_inputs import step_ctx_manager

        self.replays += 1
        manager = self.single._ctx_mgr
        with step_ctx_manager(manager), manager.context(self.context):
            output = self.single.model(**self.kwargs)
        self.single.meta.output_buffers["hidden_states"].copy_(output["hidden_states"])


def capture(single: Any, kwargs: dict[str, Any], stream: Any) -> dict[str, torch.Tensor]:
    single._graph = Graph(single, kwargs)
    tokens = single.meta.input_buffers["input_ids"].shape[1]
    return {"hidden_states": torch.zeros(1, tokens, single.model.config.text_config.hidden_size, dtype=torch.bfloat16)}


class GraphDevice(lmd_model.ModelDevice):
    """Decodes by lmdeploy's graph runner; a graph is made when it is needed first."""

    def load(self, checkpoint: Path, cache_config: Any) -> None:
        from lmdeploy.pytorch.backends.cuda.graph_runner.runner import CUDAGraphRunner

        super().load(checkpoint, cache_config)
        backend = SimpleNamespace(eager_mode=False, device_type="cuda", piecewise_cudagraph_max_tokens=None)
        arguments = (self.model, self.model_config, cache_config, backend, torch.device("cpu"))
        with mock.patch.object(torch.cuda, "graph_pool_handle", return_value=(0, 0)):
            self.model = CUDAGraphRunner(*arguments)

    @property
    def graphs(self) -> list[Any]:
        return list(self.model._full_graph_runners.values())


@contextlib.contextmanager
def cpu_engine() -> Iterator[None]:
    """`lmd_model.cpu_engine` with graphs: rows that are padding write KV block 0, and positions have three axes."""
    from lmdeploy.pytorch.backends.cuda.graph_runner.full_graph import CUDASingleGraphRunner

    with contextlib.ExitStack() as stack:
        stack.enter_context(lmd_model.cpu_engine())
        stack.enter_context(mock.patch.object(torch.cuda, "current_stream", return_value=object()))
        stack.enter_context(mock.patch.object(CUDASingleGraphRunner, "_capture_model", capture))
        for name, options in (
            ("CacheConfig", {"num_reserved_gpu_blocks": 1}),
            ("SequenceMeta", {"use_mrope": True}),
            ("InputsMakerConfig", {"use_mrope": True}),
        ):
            made = functools.partial(getattr(lmd_flow, name), **options)
            stack.enter_context(mock.patch.object(lmd_flow, name, made))
        yield


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 260, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def served(flow: lmd_flow.Flow) -> list[list[int]]:
    """Requests that come, stop and leave at different times: batches of 1 to 4 rows, with and without padding."""
    seqs = [flow.add(prompt(length, length), new) for length, new in ((70, 9), (130, 4), (3, 12))]
    for _ in range(6):
        flow.step()
    seqs.append(flow.add(prompt(64, 5), 7))
    flow.run()
    return [[int(token) for token in seq.generated_ids] for seq in seqs]
