"""State ids on the device: lmdeploy's `state_offsets` widens from one slot per row to `[B, 2]` int32, (read, write).

Everything lmdeploy does to it works on dimension 0 (index, concatenate, clone, copy into graph buffers). After a step the
read id becomes the write id; that happens outside the captured graph, so the double run of a capture advances nothing.
The host sends ids only when a row's write id is not its read id: after a prefill that published its state.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    InputsDelta: Any = object
else:
    from lmdeploy.pytorch.model_inputs import ModelInputsDelta as InputsDelta

WIDTH = 2


def id_rows(reads: list[int], writes: list[int]) -> torch.Tensor:
    """`[B, 2]` int32 on the host."""
    return torch.tensor([reads, writes], dtype=torch.int32).t().contiguous()


def advance(state_offsets: torch.Tensor | None) -> torch.Tensor | None:
    """Ids for the next step, read := write, as a view without a kernel. None and lmdeploy's narrow form pass through."""
    if state_offsets is None or state_offsets.dim() != 2:
        return state_offsets
    return state_offsets[:, 1:].expand(-1, WIDTH)


@dataclass
class CompactInputsDelta(InputsDelta):  # type: ignore[misc]
    """A decode step's delta with new ids for its rows."""

    state_offsets: torch.Tensor | None = None

    @classmethod
    def of(cls, delta: Any, state_offsets: torch.Tensor) -> CompactInputsDelta:
        """A copy of lmdeploy's delta with ids."""
        values = {field.name: getattr(delta, field.name) for field in fields(delta)}
        return cls(**values, state_offsets=state_offsets)

    @torch.inference_mode()
    def to_device(self, device: str, non_blocking: bool = False) -> CompactInputsDelta:
        """Move every tensor field."""
        self.fill_tensors()
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                values[name] = value.to(device, non_blocking=non_blocking)
        return type(self)(**values)


def patch_model_inputs(module: ModuleType) -> None:
    """A decode step reads next what it wrote."""
    step = module.ModelInputs.step

    @functools.wraps(step)
    def step_advancing(self: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = step(self, *args, **kwargs)
        inputs.state_offsets = advance(inputs.state_offsets)
        return inputs

    module.ModelInputs.step = step_advancing


def patch_strategies_ar_model_inputs(module: ModuleType) -> None:
    """The first decode step reads what the prefill wrote."""
    following = module.get_model_inputs_next_decoding

    @functools.wraps(following)
    def following_advancing(*args: Any, **kwargs: Any) -> Any:
        inputs = following(*args, **kwargs)
        inputs.state_offsets = advance(inputs.state_offsets)
        return inputs

    module.get_model_inputs_next_decoding = following_advancing  # type: ignore[attr-defined]


def patch_strategies_ar_step_inputs(module: ModuleType) -> None:
    """Ids that came with a delta replace the tracked ones."""
    reindex = module._reindex_model_inputs

    @functools.wraps(reindex)
    def reindex_with_ids(inputs: Any, delta: Any) -> Any:
        inputs = reindex(inputs, delta)
        ids = getattr(delta, "state_offsets", None)
        if ids is not None:
            inputs.state_offsets = ids
        return inputs

    module._reindex_model_inputs = reindex_with_ids  # type: ignore[attr-defined]


def patch_strategies_base_model_inputs(module: ModuleType) -> None:
    """Dummy rows: read none, write none."""
    dummy = module.make_dummy_inputs

    @functools.wraps(dummy)
    def wide_dummy(*args: Any, **kwargs: Any) -> Any:
        inputs = dummy(*args, **kwargs)
        narrow = inputs.state_offsets
        if narrow is not None:
            inputs.state_offsets = torch.full((narrow.shape[0], WIDTH), -1, dtype=torch.int32, device=narrow.device)
        return inputs

    module.make_dummy_inputs = wide_dummy  # type: ignore[attr-defined]


def patch_models_utils_cudagraph(module: ModuleType) -> None:
    """The id buffer of a graph; lmdeploy refills it with -1 and the batch's rows before each replay."""
    make = module.CudaGraphMixin.make_buffers_cudagraph

    @functools.wraps(make)
    def wide_buffers(self: Any, graph_meta: Any, *args: Any, **kwargs: Any) -> Any:
        buffers = make(self, graph_meta, *args, **kwargs)
        narrow = buffers.get("state_ids")
        if narrow is not None:
            buffers["state_ids"] = torch.full((narrow.shape[0], WIDTH), -1, dtype=torch.int32, device=narrow.device)
        return buffers

    module.CudaGraphMixin.make_buffers_cudagraph = wide_buffers
