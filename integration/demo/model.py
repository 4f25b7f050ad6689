"""A toy model of linear-attention layers: conv + GDN and conv + KDA, random weights, states in the slots of a pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F

from ...cute_kernels import Checkpoints, gdn, kda
from ...cute_kernels import conv1d as conv
from ...cute_kernels.validation import Backend
from ...pool import LayerSpec, StateLayout, StatePool

Kind = Literal["gdn", "kda"]
CONV_WIDTH = 4
NORM_EPS = 1e-6
DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True)
class LayerShape:
    """One layer: its recurrence, heads and (KDA) gate bound."""

    kind: Kind
    key_heads: int
    value_heads: int
    lower_bound: float | None = None


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the toy model. `head_dim` is K = V."""

    hidden: int
    vocab: int
    head_dim: int
    dtype: torch.dtype
    layers: tuple[LayerShape, ...] = (
        LayerShape("gdn", 2, 4),
        LayerShape("kda", 2, 2),
        LayerShape("gdn", 1, 3),
        LayerShape("kda", 3, 3, lower_bound=-5.0),
    )

    @classmethod
    def for_device(cls, device: torch.device) -> ModelConfig:
        """The real head size and bf16 where kernels may run, small fp32 heads on a CPU."""
        if device.type == "cuda":
            return cls(hidden=256, vocab=512, head_dim=128, dtype=torch.bfloat16)
        return cls(hidden=64, vocab=256, head_dim=32, dtype=torch.float32)

    def channels(self, shape: LayerShape) -> int:
        """Conv channels of a layer: q, k and v side by side."""
        return (2 * shape.key_heads + shape.value_heads) * self.head_dim

    def layout(self) -> StateLayout:
        """The slot that holds one sequence's states of all layers."""
        return StateLayout.of(
            [
                LayerSpec(
                    channels=self.channels(shape),
                    value_heads=shape.value_heads,
                    key_dim=self.head_dim,
                    value_dim=self.head_dim,
                    conv_width=CONV_WIDTH,
                    conv_dtype=DTYPE_NAMES[self.dtype],
                    kind=shape.kind,
                )
                for shape in self.layers
            ]
        )


@dataclass(frozen=True)
class Batch:
    """Which slots the rows of one call read and write. `cu_seqlens` None: one token a row (decode)."""

    read_ids: torch.Tensor
    write_ids: torch.Tensor
    positions: torch.Tensor
    cu_seqlens: torch.Tensor | None = None
    checkpoints: Checkpoints | None = None


def rms_norm(x: torch.Tensor) -> torch.Tensor:
    """RMS norm without weight, in fp32, back to x's dtype."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + NORM_EPS)).to(x.dtype)


class ToyLayer:
    """One layer's weights and step: projections, causal conv, delta rule, gated norm, projection back."""

    def __init__(self, config: ModelConfig, shape: LayerShape, device: torch.device, rng: torch.Generator) -> None:
        self.config, self.shape = config, shape
        heads, size, channels = shape.value_heads, config.head_dim, config.channels(shape)
        gates = heads if shape.kind == "gdn" else heads * size
        self.parts = [channels, heads * size, gates, heads]
        self.parts.append(-sum(self.parts) % 8)  # rows stay 16-byte aligned

        def weight(*dims: int, spread: float) -> torch.Tensor:
            return (torch.randn(*dims, generator=rng) * spread).to(device, config.dtype)

        self.project_in = weight(sum(self.parts), config.hidden, spread=config.hidden**-0.5)
        self.project_out = weight(config.hidden, heads * size, spread=(heads * size) ** -0.5)
        self.conv_weight = weight(channels, CONV_WIDTH, spread=0.5)
        # Heads from a few tokens of memory to hundreds: a wrong state anywhere in a sequence shows in its outputs.
        decays = torch.linspace(-6.0, -2.0, heads)
        bias = decays if shape.kind == "gdn" else decays[:, None] + 0.5 * torch.randn(heads, size, generator=rng)
        self.dt_bias = bias.to(device).contiguous()
        self.A_log = (0.3 * torch.rand(heads, generator=rng)).to(device)

    def __call__(
        self, x: torch.Tensor, batch: Batch, windows: torch.Tensor, states: torch.Tensor, backend: Backend
    ) -> torch.Tensor:
        """`x [T, hidden]` to `[T, hidden]`, updating the layer's windows and states in place."""
        shape, size = self.shape, self.config.head_dim
        mixed, z, gate, b, _ = torch.split(F.linear(rms_norm(x), self.project_in), self.parts, dim=-1)
        if batch.cu_seqlens is None:
            mixed = conv.causal_conv1d_decode(
                mixed, self.conv_weight, windows, batch.read_ids, batch.write_ids, batch.positions, backend=backend
            )
        else:
            mixed = conv.causal_conv1d_prefill(
                mixed, self.conv_weight, windows, batch.read_ids, batch.write_ids, batch.positions, batch.cu_seqlens,
                checkpoints=batch.checkpoints, backend=backend,
            )  # fmt: skip
        keys = shape.key_heads * size
        q, k, v = torch.split(mixed, [keys, keys, shape.value_heads * size], dim=-1)
        heads = [torch.unflatten(part, -1, (-1, size)) for part in (q, k, v)]
        o = self._recurrence(heads, gate, b, states, batch, backend)
        o = rms_norm(o).flatten(-2) * F.silu(z)
        return F.linear(o, self.project_out)

    def _recurrence(
        self, heads: list[torch.Tensor], gate: torch.Tensor, b: torch.Tensor, states: torch.Tensor, batch: Batch,
        backend: Backend,
    ) -> torch.Tensor:  # fmt: skip
        options: dict[str, Any] = {"backend": backend}
        if self.shape.kind == "kda":
            gate = torch.unflatten(gate, -1, (-1, self.config.head_dim))
            options["lower_bound"] = self.shape.lower_bound
        arguments = (*heads, gate, b, self.A_log, self.dt_bias, states, batch.read_ids, batch.write_ids)
        module: Any = gdn if self.shape.kind == "gdn" else kda
        if batch.cu_seqlens is None:
            decode = getattr(module, f"{self.shape.kind}_decode")
            return decode(*arguments, **options)  # type: ignore[no-any-return]
        prefill = getattr(module, f"{self.shape.kind}_prefill")
        result: torch.Tensor = prefill(*arguments, batch.cu_seqlens, checkpoints=batch.checkpoints, **options)
        return result


class ToyModel:
    """Embedding, layers with residuals, and logits. `forward` works on the slots of whatever pool it is given."""

    def __init__(self, config: ModelConfig, device: torch.device, seed: int, backend: Backend) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.config, self.device, self.backend = config, device, backend
        self.embedding = torch.randn(config.vocab, config.hidden, generator=rng).to(device, config.dtype)
        self.layers = [ToyLayer(config, shape, device, rng) for shape in config.layers]
        self.layout = config.layout()

    def forward(self, tokens: torch.Tensor, pool: StatePool, batch: Batch) -> torch.Tensor:
        """Final hidden states `[T, hidden]` of the packed tokens."""
        x = self.embedding[tokens]
        for number, layer in enumerate(self.layers):
            x = x + layer(x, batch, pool.conv_view(number), pool.state_view(number), self.backend)
        return rms_norm(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores `[T, vocab]` in fp32."""
        return F.linear(hidden.float(), self.embedding.float())
