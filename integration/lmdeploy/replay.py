"""A decode step whose CUDA graph exists: its tensors go into the graph's buffers, and the graph is replayed.

lmdeploy builds a step context and the model's arguments for every step, and copies of them only what the graph reads. Where
the graph reads nothing but the common buffers, the step's own inputs hold all of it already.
"""

from __future__ import annotations

import asyncio
import functools
import time
from types import ModuleType
from typing import Any

import torch

# Buffers of a graph that `refill` writes, and the one of adapters, which such a step has none of.
COMMON = {
    "input_ids",
    "position_ids",
    "block_offsets",
    "qkv_lens",
    "q_start_loc",
    "q_seqlens",
    "kv_seqlens",
    "qkv_seqlens",
    "cu_seqlens",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "mrope_position_ids",
    "state_ids",
    "local_adapter_ids",
}
# What makes a forward more than one token for each row of a batch of text.
ABSENT = (
    "local_adapter_ids",
    "vision_inputs",
    "dp_meta",
    "target_hidden_states",
    "target_position_ids",
    "target_inputs_embeds",
    "logits_indices",
)
# How long a step's outputs are looked for at every turn of the event loop; a prefill takes longer.
PATIENCE_S = 0.004
_OWN = ("support_cuda_graph", "fill_buffers_cudagraph", "update_context_cudagraph", "get_cudagraph_extra_key")


def is_plain(inputs: Any) -> bool:
    """Whether a forward is one token for each row of a batch of text."""
    return bool(
        inputs.is_decoding
        and inputs.max_q_seqlen == 1
        and not (inputs.is_dummy or inputs.enable_microbatch or inputs.is_chunk)
        and inputs.state_offsets is not None
        and all(getattr(inputs, name) is None for name in ABSENT)
    )


def reads_common_buffers(single: Any) -> bool:
    """Whether the graph of a `CUDASingleGraphRunner` reads nothing but what `refill` writes."""
    from lmdeploy.pytorch.backends.cuda.attention.default import TritonAttentionMetaBuilder
    from lmdeploy.pytorch.backends.deepep_state import get_deepep_state
    from lmdeploy.pytorch.models.utils.cudagraph import CudaGraphMixin
    from lmdeploy.pytorch.models.utils.model import DeployModelMixin

    meta, model = single.meta, type(single.model)
    plan = meta.step_meta_plan
    builders = () if plan is None else plan.attention_builders
    return (
        single._use_graph
        and meta.is_ssm
        and meta.decode_query_len == 1
        and not (meta.use_flash_mla or meta.use_fa3_decoding)
        and all(type(builder) is TritonAttentionMetaBuilder for builder in builders)
        and set(meta.input_buffers) <= COMMON
        and all(getattr(model, name) is getattr(CudaGraphMixin, name) for name in _OWN)
        and model.update_model_metas is DeployModelMixin.update_model_metas
        and not get_deepep_state().enabled()
    )


def refill(meta: Any, inputs: Any, starts: torch.Tensor) -> None:
    """Write a step into a graph's buffers: what lmdeploy writes, but for random tokens in the rows that are padding.

    Those keep the tokens of the graph's making or of a row that has left; nothing of theirs is read. `starts`: 0, 1, 2, ….
    """
    from lmdeploy.pytorch.kernels.cuda.step_metadata.fill_graph_common_inputs import fill_graph_common_inputs

    buffers, lengths, history = meta.input_buffers, inputs.seq_length, inputs.history_lengths
    count = lengths.shape[0]
    fill_graph_common_inputs(
        inputs.input_ids,
        history[None],
        inputs.block_offsets,
        starts[:count],
        lengths,
        history + lengths,
        *(buffers[name] for name in ("input_ids", "position_ids", "block_offsets", "qkv_lens", "cu_seqlens")),
        1,
    )
    ids = buffers["state_ids"]
    ids[:count].copy_(inputs.state_offsets)
    if count < ids.shape[0]:
        ids[count:].fill_(-1)
    if meta.use_mrope:
        buffers["mrope_position_ids"][:, :count].copy_(inputs.mrope_pos_ids)


def replay(runner: Any, inputs: Any) -> dict[str, Any] | None:
    """The model's outputs of one decode step by a graph that `runner` has; None: lmdeploy's own way has to be taken."""
    if not is_plain(inputs) or runner.get_meta().padding_batch_size is not None:
        return None
    count = inputs.seq_length.shape[0]
    single = runner._full_graph_runners.get((runner._get_capture_tokens(count), True, False, 1))
    if single is None:
        return None
    meta = single.meta
    if not hasattr(single, "compact_starts"):
        common = reads_common_buffers(single)
        single.compact_starts = torch.arange(meta.max_batchs, device=meta.device) if common else None
    if single.compact_starts is None:
        return None
    refill(meta, inputs, single.compact_starts)
    single._graph.replay()
    outputs: dict[str, Any] = single.model.get_outputs_cudagraph(meta.output_buffers, input_ids=inputs.input_ids)
    outputs["model_metas"] = None
    outputs["seq_length"] = meta.input_buffers["q_seqlens"][:count]
    outputs["position_ids"] = inputs.history_lengths[None]
    return outputs


def patch_backends_cuda_graph_runner_runner(module: ModuleType) -> None:
    """Graph runners can replay a step from its inputs."""
    module.CUDAGraphRunner.compact_replay = replay


def patch_agent(module: ModuleType) -> None:
    """`model_forward` asks the runner first; outputs leave for the host behind the step and are taken when they are there."""
    agent = module.BaseModelAgent
    forward, push, get = module.model_forward, agent._push_output, agent.get_output_async

    @functools.wraps(forward)
    def forward_replaying(
        model: Any,
        inputs: Any,
        model_config: Any,
        cache_engine: Any,
        state_cache_engine: Any,
        stream: Any = None,
        cache_inputs: Any = None,
    ) -> Any:
        ask = getattr(model, "compact_replay", None)
        if ask is not None and cache_inputs is None and cache_engine.cache_config.window_size <= 0:
            with torch.inference_mode(), torch.cuda.stream(stream):
                outputs = ask(inputs)
            if outputs is not None:
                return outputs
        return forward(model, inputs, model_config, cache_engine, state_cache_engine, stream, cache_inputs)

    @functools.wraps(push)
    def push_leaving(self: Any, output: Any) -> None:
        for name in ("next_token_ids", "stopped", "stop_pos"):
            value = getattr(output, name)
            if value is not None and value.is_cuda:
                # Pinned memory; the event that `push` records is behind the copy.
                setattr(output, name, value.to("cpu", non_blocking=True))
        push(self, output)

    @functools.wraps(get)
    async def get_output_soon(self: Any) -> Any:
        got = await self._out_que.get()
        if got is None:
            return {}
        output, event = got
        patience = time.perf_counter() + PATIENCE_S
        while not event.query():
            # A nap takes a millisecond at least, which is most of a step.
            await asyncio.sleep(0 if time.perf_counter() < patience else 0.001)
        with torch.cuda.stream(self.out_stream), torch.inference_mode(), module.record_function("outputs_D2H"):
            event.wait()
            output = output.to_cpu()
            output.new_token_timestamp = time.time()
        self._release_completed_h2d_transfers()
        return output

    module.model_forward = forward_replaying  # type: ignore[attr-defined]
    agent._push_output, agent.get_output_async = push_leaving, get_output_soon
