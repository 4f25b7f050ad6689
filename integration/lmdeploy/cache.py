"""One pool in place of lmdeploy's state cache engine, how many slots it has, and the draft logs beside it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from ... import cute_kernels
from ...cute_kernels.draft_log import DraftLog
from ...pool.layout import StateLayout, align_up
from .. import envs

_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
# Beside one slot per running request and the checkpoint budget: one for a rolling prefill and one for a hand-over.
SPARE_SLOTS = 2

Shapes = Sequence[tuple[tuple[int, ...], torch.dtype]]


def pool_device() -> str:
    """Where pools live."""
    return "cuda"


def drafts_of(shapes: Shapes) -> int:
    """Drafts that lmdeploy's `states_shapes` make room for: recurrent `(L, [1 + S,] HV, V, K)`."""
    state_shape = shapes[1][0]
    return state_shape[1] - 1 if len(state_shape) == 5 else 0


def layout_of(shapes: Shapes) -> StateLayout:
    """The slot layout for lmdeploy's `states_shapes` of one rank: conv `(L, C, W + S)`, recurrent `(L, [1 + S,] HV, V, K)`.

    S drafts make lmdeploy's slots 1 + S states wide; a slot here is one state wide whatever S is.
    """
    (conv_shape, conv_dtype), (state_shape, state_dtype) = shapes
    drafts = drafts_of(shapes)
    layers, channels, columns = conv_shape
    value_heads, value_dim, key_dim = state_shape[-3:]
    return StateLayout.uniform(
        layers,
        channels=channels,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        conv_width=columns - drafts,
        conv_dtype=_DTYPE_NAMES[conv_dtype],
        state_dtype=_DTYPE_NAMES[state_dtype],
    )


class LayerViews(tuple[torch.Tensor, ...]):
    """The layers' parts of one kind of state, `[slots, ...]` each, cut once: every forward asks for all of them."""

    def transpose(self, dim0: int, dim1: int) -> LayerViews:
        """What the model calls on a tensor `[slots, layers, ...]` before it takes one layer after another."""
        return self


def slot_views(pool: torch.Tensor, layout: StateLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of `pool [slots, slot_bytes] uint8`: conv windows `[slots, L, W, C]`, states `[slots, L, HV, V, K]`."""
    layer = layout.layers[0]
    layer_bytes = align_up(layer.conv_bytes) + align_up(layer.state_bytes)

    def view(dtype_name: str, offset: int, shape: Sequence[int]) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, dtype_name)
        size = dtype.itemsize
        inner = [1]
        for extent in reversed(shape[1:]):
            inner.insert(0, inner[0] * extent)
        return pool.view(dtype).as_strided(
            (pool.shape[0], layout.num_layers, *shape),
            (layout.slot_bytes // size, layer_bytes // size, *inner),
            offset // size,
        )

    return (
        view(layer.conv_dtype, layout.conv_span(0).offset, layer.conv_shape),
        view(layer.state_dtype, layout.state_span(0).offset, layer.state_shape),
    )


def allocate_logs(layout: StateLayout, rows: int, drafts: int, device: torch.device | str) -> list[DraftLog]:
    """A draft log per layer for `rows` requests of `1 + drafts` tokens a step, outside the slots; none without drafts."""
    if not drafts:
        return []
    layer = layout.layers[0]
    key_heads = (layer.channels - layer.value_heads * layer.value_dim) // (2 * layer.key_dim)
    return [
        DraftLog.allocate(
            "gdn",
            rows,
            key_heads,
            layer.value_heads,
            layer.channels,
            device,
            1 + drafts,
            head_dim_k=layer.key_dim,
            head_dim_v=layer.value_dim,
            dtype=getattr(torch, layer.conv_dtype),
        )
        for _ in range(layout.num_layers)
    ]


def log_bytes(logs: Sequence[DraftLog]) -> int:
    """Bytes of draft logs."""
    return sum(t.nbytes for log in logs for t in (log.k, log.u, log.g, log.x) if t is not None)


def halves(half: torch.Tensor, log_rows: torch.Tensor, count: int) -> torch.Tensor:
    """`DraftLog.half [count]` from each batch row's half and log row; rows without a log are left out."""
    words = torch.zeros(count + 1, dtype=torch.int32, device=half.device)
    inside = (log_rows >= 0) & (log_rows < count)
    words.scatter_(0, torch.where(inside, log_rows, count).long(), half)
    return words[:count]


def num_slots(max_batches: int, checkpoint_budget: int) -> int:
    """Slots of the pool: lmdeploy's own count, so that the compact pool is never the larger one at equal settings."""
    return max_batches + SPARE_SLOTS + checkpoint_budget


def patch_engine_cache_engine_state(module: ModuleType) -> None:
    """Replace the state cache engine. Its surface stays: model-facing tensors, slot copies, the owning allocation."""
    from lmdeploy.pytorch.engine.cache_engine.layout import CacheAllocation, CachePool

    class CompactStateCacheEngine(module.StateCacheEngine):  # type: ignore[name-defined, misc]
        """Owns the pool of one rank. Slots are not zeroed: that a request has no state is said by its read id."""

        def __init__(self, cache_config: Any, model_config: Any) -> None:
            self.cache_config = cache_config
            self.layout = layout_of(cache_config.states_shapes)
            count = cache_config.num_state_caches
            self.pool = torch.empty((count, self.layout.slot_bytes), dtype=torch.uint8, device=pool_device())
            views = slot_views(self.pool, self.layout)
            self.allocation = CacheAllocation(pools=(CachePool(self.pool, entry_axis=0),), tensor_views=views)
            self._cache_tensors = list(views)
            self._layers = [LayerViews(view.unbind(1)) for view in views]
            self._slot_tensors = ((self.pool, 0),)
            self._named_state_caches = {"conv": views[0], "recurrent": views[1]}
            drafts = drafts_of(cache_config.states_shapes)
            logs = allocate_logs(self.layout, cache_config.max_batches if drafts else 0, drafts, self.pool.device)
            # A layer's operators find its log by the address of their part of the layer.
            self.draft_logs = {view.data_ptr(): log for layers in self._layers for view, log in zip(layers, logs)}

        @property
        def state_caches(self) -> list[LayerViews]:
            """What the model takes its layers' windows and states from."""
            return self._layers

        def commit(self, plan: torch.Tensor) -> None:
            """Fold accepted drafts into slots in place, in every layer.

            `plan [5, N]` int32 on the pool's device: slots, tokens in them, tokens to add, log rows, log halves.
            """
            slots, positions, accepted, rows, half = plan.contiguous().unbind(0)
            backend: Any = envs.backend()
            for windows, states in zip(*self._layers):
                log = self.draft_logs[windows.data_ptr()]
                log = dataclasses.replace(log, rows=rows, half=halves(half, rows, log.batch))
                ids = (slots, slots)
                cute_kernels.causal_conv1d_commit(windows, *ids, positions, log, accepted, backend=backend)
                cute_kernels.gdn_commit(states, *ids, log, accepted, backend=backend)

        @staticmethod
        def get_state_slot_nbytes(state_shapes: Shapes, state_specs: object = None) -> int:
            """Bytes of one slot."""
            return layout_of(state_shapes).slot_bytes

    module.StateCacheEngine = CompactStateCacheEngine  # type: ignore[attr-defined]


def patch_engine_executor_base(module: ModuleType) -> None:
    """Size the pool; the log says that it is in use, with its slots and bytes."""
    size = module.ExecutorBase._get_state_cache_mem

    @functools.wraps(size)
    def sized(self: Any, states_shapes: Any = None, cache_config: Any = None, model_config: Any = None) -> int:
        config = cache_config or self.cache_config
        if len(states_shapes if states_shapes is not None else config.states_shapes) == 0:
            return 0
        if config.num_state_caches is None:
            config.num_state_caches = num_slots(config.max_batches, config.prefix_cache_state_budget)
        pool: int = size(self, states_shapes, cache_config, model_config)
        slots = config.num_state_caches
        module.logger.info(
            "Enable unified compact state: %d slots of %d bytes, %d bytes per rank", slots, pool // slots, pool
        )
        shapes = config.states_shapes if states_shapes is None else states_shapes
        logs = log_bytes(allocate_logs(layout_of(shapes), config.max_batches, drafts_of(shapes), "meta"))
        if logs:
            module.logger.info("Draft logs: %d rows, %d bytes per rank", config.max_batches, logs)
        return pool + logs

    module.ExecutorBase._get_state_cache_mem = sized
