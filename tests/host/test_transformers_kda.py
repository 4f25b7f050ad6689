"""The reference operators put together are the linear-attention layers of transformers: conv, gates, recurrence and norm.

Random weights, fp32 on both sides, one sequence of several chunks.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import SimpleNamespace

import pytest
import torch

from compact_state.cute_kernels.reference.conv1d import causal_conv1d_prefill
from compact_state.cute_kernels.reference.datasets import cu_seqlens, ids
from compact_state.cute_kernels.reference.kda import kda_prefill
from compact_state.cute_kernels.reference.layer import gated_rms_norm, split_heads
from compact_state.cute_kernels.reference.metrics import assert_close

HEADS, D, HIDDEN, WIDTH, EPS = 2, 128, 64, 4, 1e-5


def layer_of(module: str, name: str, lower_bound: float | None) -> torch.nn.Module:
    """A layer with random weights, its gates in the range of trained ones."""
    models = pytest.importorskip("transformers.models")
    if importlib.util.find_spec(f"{models.__name__}.{module}") is None:
        pytest.skip(f"this version of transformers has no {module}")
    modeling = importlib.import_module(f"{models.__name__}.{module}.modeling_{module}")
    config = SimpleNamespace(
        hidden_size=HIDDEN,
        linear_num_heads=HEADS,
        linear_head_dim=D,
        linear_conv_kernel_dim=WIDTH,
        hidden_act="silu",
        rms_norm_eps=EPS,
        layer_types=["linear_attention"],
        linear_lower_bound=lower_bound,
    )
    torch.manual_seed(7)
    layer = getattr(modeling, name)(config, 0).float()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.3)
        layer.forget_gate.A_log.uniform_(-0.5, 0.7)
        layer.forget_gate.dt_bias.uniform_(-7.0, -1.0)
        layer.o_norm.weight.uniform_(0.5, 1.5)
    return layer


@torch.no_grad()
def composed(layer: torch.nn.Module, hidden: torch.Tensor, lower_bound: float | None) -> torch.Tensor:
    """The same layer from the projections on, by the reference operators."""
    tokens = hidden.shape[0]
    x = torch.cat([projection(hidden) for projection in (layer.q_proj, layer.k_proj, layer.v_proj)], dim=-1)
    none, bounds, start = ids(-1), cu_seqlens([tokens]), torch.zeros(1, dtype=torch.int32)
    window = torch.zeros(1, WIDTH, x.shape[1])
    mixed = causal_conv1d_prefill(
        x, layer.conv1d.weight.squeeze(1), window, none, none, start, bounds, activation="silu"
    )
    q, k, v = split_heads(mixed, HEADS, D, D)
    gate = layer.forget_gate
    raw = gate.f_b_proj(gate.f_a_proj(hidden)).unflatten(-1, (HEADS, D))
    b = layer.b_proj(hidden)
    state = torch.zeros(1, HEADS, D, D)
    o = kda_prefill(
        q, k, v, raw, b, gate.A_log.flatten(), gate.dt_bias, state, none, none, bounds, lower_bound=lower_bound
    )
    z = layer.g_b_proj(layer.g_a_proj(hidden)).unflatten(-1, (HEADS, D))
    return layer.o_proj(gated_rms_norm(o, z, layer.o_norm.weight, "sigmoid", EPS).flatten(-2))


@pytest.mark.parametrize(
    ("module", "name", "lower_bound"),
    [
        ("kimi_linear", "KimiLinearDeltaAttention", None),
        ("glm5_next", "Glm5NextTextLinearAttention", -5.0),
    ],
)
@pytest.mark.parametrize("tokens", [1, 3, 150])
def test_reference_operators_equal_the_layer(tokens: int, module: str, name: str, lower_bound: float | None) -> None:
    layer = layer_of(module, name, lower_bound)
    hidden = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens))
    with torch.no_grad():
        expected = layer(hidden[None])[0]
    assert_close(composed(layer, hidden, lower_bound), expected.double(), 1e-4, "layer output")
