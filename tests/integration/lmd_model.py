"""The tiny Qwen3.5 in lmdeploy's own model code on a CPU: what `lmd_flow.Device` records, this computes.

lmdeploy's modules, step contexts, `model_forward`, pool and the patched operators (reference backend) are the real ones.
Stand-ins: paged attention (plain torch over the same pages), KV allocation, streams. Modules without a CUDA kernel of
their own come from lmdeploy's default backend.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lmd_flow
import torch

from compact_state.integration.lmdeploy import cache, ops


class PagedAttention:
    """Causal attention over KV pages `[blocks, block, heads, dim]`, one sequence at a time."""

    def __init__(self, spec: Any) -> None:
        from lmdeploy.pytorch.backends.cuda.step_metadata import register_step_metadata_impl

        self.spec = spec
        register_step_metadata_impl(self)

    def get_step_metadata_provider(self) -> Any:
        from lmdeploy.pytorch.backends.cuda.attention.default import TritonAttentionMetaBuilder

        return TritonAttentionMetaBuilder()

    def bind_step_meta_group(self, group_id: int) -> None:
        pass

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        attn_metadata: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        block = k_cache.shape[1]
        outputs, start = [], 0
        for row, (length, total) in enumerate(zip(attn_metadata.q_seqlens.tolist(), attn_metadata.kv_seqlens.tolist())):
            positions = torch.arange(total)
            pages, offsets = attn_metadata.block_offsets[row][positions // block].long(), positions % block
            new = slice(start, start + length)
            k_cache[pages[total - length :], offsets[total - length :]] = key[new]
            v_cache[pages[total - length :], offsets[total - length :]] = value[new]
            keys, values = (c[pages, offsets].transpose(0, 1) for c in (k_cache, v_cache))
            mask = positions[None, :] <= torch.arange(total - length, total)[:, None]
            outputs.append(
                torch.nn.functional.scaled_dot_product_attention(
                    query[new].transpose(0, 1), keys, values, attn_mask=mask, scale=self.spec.scale, enable_gqa=True
                ).transpose(0, 1)
            )
            start += length
        return torch.cat(outputs)


class PartialRotary:
    """Rotates the first `cos.shape[-1]` channels of each head; lmdeploy's default operator knows no partial rotation."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        inplace: bool = True,
        complex_mode: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        width = cos.shape[-1]
        for tensor in (query, key):
            turned = tensor[..., :width]
            left, right = turned.chunk(2, dim=-1)
            tensor[..., :width] = turned * cos[:, None] + torch.cat((-right, left), dim=-1) * sin[:, None]
        return query, key


class Experts:
    """Every expert over the tokens that chose it; lmdeploy's default backend has none."""

    def update_weights(self, gate_up: torch.Tensor, down: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gate_up, down

    def forward(
        self,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        chosen: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        *rest: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        output = torch.zeros_like(hidden)
        for expert, (first, second) in enumerate(zip(gate_up, down)):
            rows, column = (chosen == expert).nonzero(as_tuple=True)
            gate, up = torch.nn.functional.linear(hidden[rows], first).chunk(2, -1)
            part = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, second)
            output.index_add_(0, rows, (part * weights[rows, column, None]).to(output.dtype))
        return output


@contextlib.contextmanager
def cpu_engine() -> Iterator[None]:
    """lmdeploy believes that a CPU is its device."""
    from lmdeploy.pytorch.backends.apply_rotary_emb import ApplyRotaryEmbBuildSpec
    from lmdeploy.pytorch.backends.attention import PagedAttentionBuildSpec
    from lmdeploy.pytorch.backends.cuda.op_backend import CudaOpsBackend
    from lmdeploy.pytorch.backends.default import DefaultOpsBackend
    from lmdeploy.pytorch.backends.moe import FusedMoEBuildSpec

    patched = CudaOpsBackend.build_op.__func__

    def build_op(cls: type, spec: Any, *, enable_deterministic: bool = False) -> Any:
        if isinstance(spec, PagedAttentionBuildSpec):
            return PagedAttention(spec)
        if isinstance(spec, ApplyRotaryEmbBuildSpec):
            return PartialRotary()
        if isinstance(spec, FusedMoEBuildSpec):
            return Experts()
        if "conv1d" in type(spec).__module__ or "gated_delta" in type(spec).__module__:
            return patched(cls, spec, enable_deterministic=enable_deterministic)
        return DefaultOpsBackend.build_op(spec, enable_deterministic=enable_deterministic)

    with (
        mock.patch.object(CudaOpsBackend, "build_op", classmethod(build_op)),
        mock.patch("lmdeploy.pytorch.configurations.qwen3_5.is_bf16_supported", return_value=True),
        mock.patch("lmdeploy.pytorch.config.is_bf16_supported", return_value=True),
        # A bf16 pool rounds a state where it is kept: a hit is then close to a cold prompt, not equal to it.
        mock.patch("lmdeploy.pytorch.envs.fp32_mamba_ssm_dtype", True),
        mock.patch("lmdeploy.pytorch.nn.gated_delta.build_rmsnorm_gated", ops.GatedRMSNorm),
        mock.patch("lmdeploy.pytorch.models.qwen3_5.build_rmsnorm_gated", ops.GatedRMSNorm),
        mock.patch.object(cache, "pool_device", return_value="cpu"),
        mock.patch.object(torch.cuda, "current_stream", return_value=None),
        mock.patch.object(torch.cuda, "stream", return_value=contextlib.nullcontext()),
        mock.patch.object(torch.cuda, "synchronize", return_value=None),
    ):
        yield


class ModelDevice(lmd_flow.Device):
    """Runs forwards on the model; `logits` of the last forward `[rows, vocabulary]`."""

    records = False

    def load(self, checkpoint: Path, cache_config: Any) -> None:
        from lmdeploy.pytorch.config import ModelConfig
        from lmdeploy.pytorch.engine.cache_engine import StateCacheEngine
        from lmdeploy.pytorch.model_inputs import BuildModelContext
        from lmdeploy.pytorch.models.patch import build_patched_model
        from lmdeploy.pytorch.weight_loader.model_weight_loader import load_model_weights

        drafts = getattr(self, "drafts", 0)
        spec = {"spec_method": "qwen3_5_mtp", "num_spec_tokens": drafts} if drafts else {}
        self.model_config = ModelConfig.from_pretrained(str(checkpoint), dtype="bfloat16", **spec)
        context = BuildModelContext(language_model_only=True, strategy_factory=self.factory, num_spec_tokens=drafts)
        self.model = build_patched_model(self.model_config, device=torch.device("cpu"), build_model_ctx=context)
        load_model_weights(self.model, str(checkpoint), device=torch.device("cpu"))
        cache_config.states_shapes = self.model_config.states_shapes
        self.states = StateCacheEngine(cache_config, self.model_config)
        # NaN everywhere: nothing may depend on what a fresh or recycled slot holds.
        for tensor in self.states.named_state_caches.values():
            tensor.fill_(float("nan"))
        heads, dim = self.model_config.num_key_value_heads, self.model_config.head_dim
        shape = (cache_config.num_gpu_blocks, cache_config.block_size, heads, dim)
        self.pages = [
            (torch.zeros(shape, dtype=torch.bfloat16), torch.zeros(shape, dtype=torch.bfloat16))
            for _ in range(self.model_config.num_layers)
        ]
        self.caches = SimpleNamespace(
            cache_config=cache_config, gpu_cache=self.pages, block_caches={}, copy_logical_blocks=self.copy_pages
        )

    def copy_pages(self, plan: torch.Tensor) -> None:
        for pages in self.pages:
            for tensor in pages:
                tensor[plan[1]] = tensor[plan[0]]
        self.copies += plan.shape[1]

    def _hidden(self, inputs: Any, cache_inputs: Any) -> torch.Tensor:
        """Hidden states `[tokens, size]` of one forward."""
        from lmdeploy.pytorch.engine.model_agent.agent import model_forward

        output = model_forward(
            self.model, inputs, self.model_config, self.caches, self.states, stream=None, cache_inputs=cache_inputs
        )
        hidden: torch.Tensor = output["hidden_states"][0]
        return hidden

    def _forward(self, inputs: Any, cache_inputs: Any) -> torch.Tensor:
        hidden = self._hidden(inputs, cache_inputs)
        last = inputs.seq_length.cumsum(0) - 1
        self.logits = self.model.get_logits(hidden[None, last])[0].float()
        self.forwards.append({"ids": inputs.state_offsets.tolist(), "lengths": inputs.seq_length.tolist()})
        return self.logits.argmax(-1)


def model_flow(checkpoint: Path, device: type[ModelDevice] = ModelDevice, **kwargs: Any) -> lmd_flow.Flow:
    """A Flow over the model. Use it inside `cpu_engine()`."""
    flow = lmd_flow.Flow(device=device, **kwargs)
    flow.device.load(checkpoint, flow.scheduler.cache_config)
    return flow
