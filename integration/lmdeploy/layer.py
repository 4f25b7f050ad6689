"""A Qwen3.5 linear layer around the operators: between its projections, lmdeploy's wrappers take longer than the launches."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch

from ... import cute_kernels
from .. import envs
from .ops import CompactMeta, in_piecewise_graph

# Key and value head size and conv width of the layers that are run here.
SIZES = (128, 128, 4)
PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_ba")


def join_projections(layer: Any) -> None:
    """Make the weights of the input projections neighbours in one tensor, with which a forward is projected at once.

    They stay the parameters that lmdeploy fills and updates in place. Projections that are not plain ones, such as quantised
    ones, are left as they are, and so are those whose joined row no kernel reads, because rows would not begin at a multiple
    of 16 bytes (two heads a rank).
    """
    projections = [getattr(layer, name) for name in PROJECTIONS]
    plain = all("compact_plain" in vars(type(p)) and p.bias is None for p in projections)
    layer.compact_joined = plain and sum(len(p.weight) for p in projections) % 8 == 0
    if layer.compact_joined and _joined_weight(layer) is None:
        weights = [projection.weight for projection in projections]
        joined = torch.cat([weight.data for weight in weights])
        for weight, part in zip(weights, torch.split(joined, [len(weight) for weight in weights])):
            weight.data = part


def _joined_weight(layer: Any) -> torch.Tensor | None:
    """The weight of all input projections, or None where they do not stand behind each other."""
    if not layer.compact_joined:
        return None
    weights: list[torch.Tensor] = [getattr(layer, name).weight.detach() for name in PROJECTIONS]
    first, address = weights[0], weights[0].data_ptr()
    for weight in weights:
        if weight.data_ptr() != address or weight.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        address += weight.nbytes
    return first.as_strided((sum(map(len, weights)), first.shape[1]), first.stride())


def _projected(layer: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The layer's projections x = q | k | v, z, b and a, one row a token, of one product where their weights are joined."""
    weight = _joined_weight(layer)
    if weight is None:
        x, z, ba = layer.in_proj_qkv(hidden_states), layer.in_proj_z(hidden_states), layer.in_proj_ba(hidden_states)
        return x[0], z[0], *layer.fix_ba_ordering(ba[0])
    row = layer.in_proj_qkv.impl.forward(hidden_states[0], weight)
    heads = len(layer.dt_bias)
    parts: tuple[torch.Tensor, ...] = row.split(
        (len(layer.in_proj_qkv.weight), len(layer.in_proj_z.weight), heads, heads), 1
    )
    return parts


def _decode(layer: Any, hidden_states: torch.Tensor, caches: Any, meta: CompactMeta) -> torch.Tensor:
    """A decode step: one projection, one launch, one projection."""
    x, z, b, a = _projected(layer, hidden_states)
    out: torch.Tensor = cute_kernels.gdn_layer_decode(
        x,
        a,
        b,
        z,
        layer.conv1d.weight.detach().flatten(1),
        caches[0],
        layer.get_A_log_exp(),
        layer.dt_bias.detach(),
        layer.norm.weight.detach(),
        caches[1],
        meta.read_ids,
        meta.write_ids,
        meta.positions,
        gate_activation=layer.activation,
        eps=layer.layer_norm_epsilon,
        pdl=False,  # the launch before it is a projection, beside which nothing starts
        backend=layer.compact_backend,
    )
    result: torch.Tensor = layer.out_proj(out[None])
    return result


def _prefill(layer: Any, hidden_states: torch.Tensor, caches: Any, meta: CompactMeta) -> torch.Tensor:
    """A prefill: one projection, conv, rule and norm, one projection."""
    x, z, b, a = _projected(layer, hidden_states)
    options: dict[str, Any] = {"checkpoints": meta.checkpoints, "backend": layer.compact_backend}
    ids = (meta.read_ids, meta.write_ids)
    taps = layer.conv1d.weight.detach().flatten(1)
    x = cute_kernels.causal_conv1d_prefill(
        x, taps, caches[0], *ids, meta.positions, meta.cu_seqlens, activation=layer.activation, **options
    )
    size, values = layer.head_v_dim, z.shape[1] // layer.head_v_dim
    heads = x.view(x.shape[0], -1, size)
    keys = (heads.shape[1] - values) // 2
    q, k, v = heads[:, :keys], heads[:, keys : 2 * keys], heads[:, 2 * keys :]
    parameters = (layer.get_A_log_exp(), layer.dt_bias.detach())
    out = cute_kernels.gdn_prefill(q, k, v, a, b, *parameters, caches[1], *ids, meta.cu_seqlens, **options)
    normed = layer.norm(out, z.view(-1, values, size))
    result: torch.Tensor = layer.out_proj(normed.view(1, x.shape[0], -1))
    return result


def patch_nn_linear_default(module: ModuleType) -> None:
    """Which linear modules are a product with their weight and nothing else; a subclass may be more."""
    for linear in (module.BaseLinear, module.MergedBaseLinear):
        linear.compact_plain = True


def patch_models_qwen3_5(module: ModuleType) -> None:
    """The linear layer: A_log where it stands, a decode step in two launches, a prefill without wrappers."""
    layer = module.Qwen3_5GatedDeltaNet
    init, move, forward = layer.__init__, layer._apply, layer.forward
    backend, fused = envs.backend(), envs.fused_decode()

    @functools.wraps(init)
    def init_compact(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        join_projections(self)

    @functools.wraps(move)
    def move_compact(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = self.dt_bias.device
        move(self, *args, **kwargs)
        # Asleep on the host, parameters need not be neighbours, and may still be on their way.
        if self.dt_bias.device.type == "cuda" or self.dt_bias.device == before:
            join_projections(self)
        return self

    def get_A_log(self: Any) -> torch.Tensor:
        # Not -exp(A_log): one rounding less, and no copy that outlives an update of weights.
        parameter: torch.Tensor = self.A_log.detach()
        return parameter if parameter.dtype == torch.float32 else parameter.float()

    @functools.wraps(forward)
    def forward_compact(self: Any, hidden_states: torch.Tensor, past_key_value: Any, gated_delta_meta: Any) -> Any:
        meta = gated_delta_meta
        fits = (self.head_k_dim, self.head_v_dim, self.conv_kernel_size) == SIZES and self.activation == "silu"
        if not fits or meta.drafts is not None or (meta.is_decoding and not fused) or in_piecewise_graph():
            return forward(self, hidden_states, past_key_value, meta)
        return (_decode if meta.is_decoding else _prefill)(self, hidden_states, past_key_value, meta)

    layer.compact_backend = backend
    layer.compact_joined = False
    layer.__init__ = init_compact
    layer._apply = move_compact
    layer.get_A_log_exp = get_A_log
    layer.forward = forward_compact
