"""StateLayout: the bytes of one slot.

A slot is one contiguous record `[layer][conv window | recurrent state]` with everything that one sequence position
needs in all linear-attention layers of a rank; each part starts on a 256-byte boundary. Conv window: a ring `[W, C]`,
channel innermost, where the input of token t stands in column `t % W`. Recurrent state: `[HV, V, K]`, K innermost.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

from .errors import ConfigError, check_int

ALIGNMENT = 256
ITEM_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
LAYOUT_SCHEMA = 1


def align_up(size: int, alignment: int = ALIGNMENT) -> int:
    """The smallest multiple of `alignment` that is at least `size`."""
    return -(-size // alignment) * alignment


@dataclass(frozen=True)
class LayerSpec:
    """One linear-attention layer of one rank: sizes are the rank's own (after tensor parallelism)."""

    channels: int
    value_heads: int
    key_dim: int = 128
    value_dim: int = 128
    conv_width: int = 4
    conv_dtype: str = "bfloat16"
    state_dtype: str = "float32"
    kind: str = "gdn"

    def __post_init__(self) -> None:
        for name in ("channels", "value_heads", "key_dim", "value_dim", "conv_width"):
            check_int(name, getattr(self, name), 1)
        for name in ("conv_dtype", "state_dtype"):
            if getattr(self, name) not in ITEM_SIZES:
                raise ConfigError(name, getattr(self, name), ", ".join(ITEM_SIZES))
        if self.kind not in ("gdn", "kda"):
            raise ConfigError("kind", self.kind, "gdn, kda")

    @property
    def conv_shape(self) -> tuple[int, int]:
        return (self.conv_width, self.channels)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return (self.value_heads, self.value_dim, self.key_dim)

    @property
    def conv_bytes(self) -> int:
        return self.conv_width * self.channels * ITEM_SIZES[self.conv_dtype]

    @property
    def state_bytes(self) -> int:
        return self.value_heads * self.value_dim * self.key_dim * ITEM_SIZES[self.state_dtype]


@dataclass(frozen=True)
class PartSpan:
    """Where one part of one layer stands in a slot, in bytes."""

    layer: int
    part: str
    offset: int
    size: int


@dataclass(frozen=True)
class StateLayout:
    """The record of one slot: its layers in order, their byte offsets and a digest of all that fixes the bytes."""

    layers: tuple[LayerSpec, ...]

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError("layers", "none", "at least one linear-attention layer")
        for layer in self.layers:
            if not isinstance(layer, LayerSpec):
                raise ConfigError("layers", type(layer).__name__, "a LayerSpec for each layer")

    @classmethod
    def of(cls, layers: Sequence[LayerSpec]) -> StateLayout:
        """A layout of the given layers, in model order."""
        return cls(tuple(layers))

    @classmethod
    def uniform(
        cls,
        num_layers: int,
        *,
        channels: int,
        value_heads: int,
        key_dim: int = 128,
        value_dim: int = 128,
        conv_width: int = 4,
        conv_dtype: str = "bfloat16",
        state_dtype: str = "float32",
        kind: str = "gdn",
    ) -> StateLayout:
        """A layout of `num_layers` equal layers."""
        check_int("num_layers", num_layers, 1)
        spec = LayerSpec(channels, value_heads, key_dim, value_dim, conv_width, conv_dtype, state_dtype, kind)
        return cls((spec,) * num_layers)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def spans(self) -> tuple[PartSpan, ...]:
        """Every part in address order."""
        spans, offset = [], 0
        for number, layer in enumerate(self.layers):
            for part, size in (("conv", layer.conv_bytes), ("state", layer.state_bytes)):
                spans.append(PartSpan(number, part, offset, size))
                offset += align_up(size)
        return tuple(spans)

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of one slot, a multiple of 256: the slot stride of every view."""
        last = self.spans[-1]
        return last.offset + align_up(last.size)

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes of one slot that carry state, without alignment gaps."""
        return sum(span.size for span in self.spans)

    def conv_span(self, layer: int) -> PartSpan:
        """The conv window of a layer. Raises ConfigError for a layer that is not there."""
        return self._span(layer, 0)

    def state_span(self, layer: int) -> PartSpan:
        """The recurrent state of a layer. Raises ConfigError for a layer that is not there."""
        return self._span(layer, 1)

    def _span(self, layer: int, part: int) -> PartSpan:
        if not 0 <= layer < len(self.layers):
            raise ConfigError("layer", layer, f"0 .. {len(self.layers) - 1}")
        return self.spans[2 * layer + part]

    @cached_property
    def digest(self) -> str:
        """32 hex digits of BLAKE2b over the canonical description: equal digests mean equal bytes."""
        text = json.dumps(
            {"schema": LAYOUT_SCHEMA, "alignment": ALIGNMENT, "layers": [asdict(layer) for layer in self.layers]},
            sort_keys=True,
            separators=(",", ":"),
        )
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
