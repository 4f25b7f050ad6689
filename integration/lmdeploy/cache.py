"""One pool in place of lmdeploy's state cache engine, and how many slots it has."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from ...pool.layout import StateLayout, align_up

_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
# Beside one slot per running request and the checkpoint budget: one for a rolling prefill and one for a hand-over.
SPARE_SLOTS = 2

Shapes = Sequence[tuple[tuple[int, ...], torch.dtype]]


def pool_device() -> str:
    """Where pools live."""
    return "cuda"


def layout_of(shapes: Shapes) -> StateLayout:
    """The slot layout for lmdeploy's `states_shapes` of one rank: conv `(L, C, W + S)`, recurrent `(L, [1 + S,] HV, V, K)`.

    S drafts make lmdeploy's slots 1 + S states wide; a slot here is one state wide whatever S is.
    """
    (conv_shape, conv_dtype), (state_shape, state_dtype) = shapes
    drafts = state_shape[1] - 1 if len(state_shape) == 5 else 0
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
            self._slot_tensors = ((self.pool, 0),)
            self._named_state_caches = {"conv": views[0], "recurrent": views[1]}

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
        total: int = size(self, states_shapes, cache_config, model_config)
        slots = config.num_state_caches
        module.logger.info(
            "Enable unified compact state: %d slots of %d bytes, %d bytes per rank", slots, total // slots, total
        )
        return total

    module.ExecutorBase._get_state_cache_mem = sized
