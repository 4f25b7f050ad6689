"""State ids on the device: lmdeploy's `state_offsets` widens from one slot per row to `[B, 2]` int32, (read, write).

With drafts it is `[B, 5]`: (read, write, accepted, log row, log half). `accepted` tokens of the row's draft log stand
between the read slot and the row's history; `half` says which half of the log row holds them.

Everything lmdeploy does to it works on dimension 0 (index, concatenate, clone, copy into graph buffers). After a step the
read id becomes the write id, and with drafts the step's accepted count moves in and the half flips; that happens outside
the captured graph, so the double run of a capture advances nothing. The host sends ids only when a row's write id is not
its read id: after a prefill that published its state. It never knows what was accepted, so those columns stay.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from .. import envs

if TYPE_CHECKING:
    InputsDelta: Any = object
else:
    from lmdeploy.pytorch.model_inputs import ModelInputsDelta as InputsDelta

WIDTH = 2
DRAFT_WIDTH = 5


def id_rows(reads: list[int], writes: list[int], log_rows: list[int] | None = None) -> torch.Tensor:
    """`[B, 2]` int32 on the host; `[B, 5]` with log rows: nothing accepted, half 0."""
    columns = [reads, writes]
    if log_rows is not None:
        zeros = [0] * len(reads)
        columns += [zeros, log_rows, zeros]
    return torch.tensor(columns, dtype=torch.int32).t().contiguous()


def advance(state_offsets: torch.Tensor | None, accepted: torch.Tensor | None = None) -> torch.Tensor | None:
    """Ids for the next step, read := write; without drafts as a view without a kernel.

    `accepted [B]`: tokens that the step just run turned out to add, with drafts; None after a prefill, which adds none to
    the log. None and lmdeploy's narrow form pass through.
    """
    if state_offsets is None or state_offsets.dim() != 2:
        return state_offsets
    if state_offsets.shape[1] == WIDTH:
        return state_offsets[:, 1:].expand(-1, WIDTH)
    _, write, _, row, half = state_offsets.unbind(1)
    if accepted is None:
        zeros = torch.zeros_like(write)
        return torch.stack((write, write, zeros, row, zeros), 1)
    return torch.stack((write, write, accepted.to(torch.int32), row, half ^ 1), 1)


def _moved(inputs: Any, delta: Any) -> Any:
    """`inputs` with the slots that came with a delta; what is only known on the device stays."""
    slots = getattr(delta, "state_offsets", None)
    if slots is not None:
        inputs.state_offsets = torch.cat((slots, inputs.state_offsets[:, WIDTH:]), 1)
    return inputs


def _wide_dummy(dummy: Callable[..., Any], width: int) -> Callable[..., Any]:
    @functools.wraps(dummy)
    def wide_dummy(*args: Any, **kwargs: Any) -> Any:
        inputs = dummy(*args, **kwargs)
        narrow = inputs.state_offsets
        if narrow is not None:
            inputs.state_offsets = torch.full((narrow.shape[0], width), -1, dtype=torch.int32, device=narrow.device)
        return inputs

    return wide_dummy


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
        tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        return replace(self, **{name: t.to(device, non_blocking=non_blocking) for name, t in tensors.items()})


def patch_model_inputs(module: ModuleType) -> None:
    """A decode step reads next what it wrote."""
    step = module.ModelInputs.step

    @functools.wraps(step)
    def step_advancing(self: Any, input_ids: torch.Tensor, step_seqlens: torch.Tensor | None = None) -> Any:
        inputs = step(self, input_ids, step_seqlens)
        inputs.state_offsets = advance(inputs.state_offsets, self.seq_length if step_seqlens is None else step_seqlens)
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
        return _moved(reindex(inputs, delta), delta)

    module._reindex_model_inputs = reindex_with_ids  # type: ignore[attr-defined]
    if envs.short_steps():
        from . import steady  # it needs more of lmdeploy than this module may, which patches what all of it imports

        steady.patch_step_inputs(module)


def patch_strategies_ar_spec_step_inputs(module: ModuleType) -> None:
    """The same with drafts."""
    reindex = module._reindex_model_inputs_arspec

    @functools.wraps(reindex)
    def reindex_with_ids(inputs: Any, delta: Any, num_spec_tokens: int) -> Any:
        return _moved(reindex(inputs, delta, num_spec_tokens), delta)

    module._reindex_model_inputs_arspec = reindex_with_ids  # type: ignore[attr-defined]


def patch_strategies_base_model_inputs(module: ModuleType) -> None:
    """Dummy rows: read none, write none."""
    module.make_dummy_inputs = _wide_dummy(module.make_dummy_inputs, WIDTH)  # type: ignore[attr-defined]


def patch_strategies_ar_spec_model_inputs(module: ModuleType) -> None:
    """Dummy rows with drafts: no log either."""
    module.make_dummy_inputs = _wide_dummy(module.make_dummy_inputs, DRAFT_WIDTH)  # type: ignore[attr-defined]


def patch_models_utils_cudagraph(module: ModuleType) -> None:
    """The id buffer of a graph; lmdeploy refills it with -1 and the batch's rows before each replay."""
    make = module.CudaGraphMixin.make_buffers_cudagraph

    @functools.wraps(make)
    def wide_buffers(self: Any, graph_meta: Any, *args: Any, **kwargs: Any) -> Any:
        buffers = make(self, graph_meta, *args, **kwargs)
        narrow, ids = buffers.get("state_ids"), kwargs.get("state_ids")
        if narrow is not None:
            width = WIDTH if ids is None else ids.shape[1]
            buffers["state_ids"] = torch.full((narrow.shape[0], width), -1, dtype=torch.int32, device=narrow.device)
        return buffers

    module.CudaGraphMixin.make_buffers_cudagraph = wide_buffers
