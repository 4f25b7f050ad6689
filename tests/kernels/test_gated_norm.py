"""`gated_rms_norm` on the GPU against float64: any number of rows and heads, both gates, both dtypes of the weight, in place or
not, gates in a wider row."""

from __future__ import annotations

import pytest
import torch

from compact_state.cute_kernels import gated_rms_norm
from compact_state.cute_kernels.reference.layer import gated_rms_norm as oracle

pytestmark = pytest.mark.gpu

V = 128


def rounded_once(out: torch.Tensor, exact: torch.Tensor) -> bool:
    """Within half a bf16 step of the exact values and what fp32 with fast exp and rsqrt may add before the rounding."""
    half = torch.exp2(torch.frexp(exact).exponent.double() - 9)
    return bool(((out.double() - exact).abs() <= half + exact.abs() * 2**-18).all())


def rows(count: int, scale: float = 1.0, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    o, z = torch.randn(2, count, V, device="cuda", generator=generator)
    return (scale * o).bfloat16(), (3 * z).bfloat16()


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 31, 32, 33, 1000, 65536 + 7])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_every_row_is_that_of_float64_rounded_once(count: int, weight_dtype: torch.dtype, activation: str) -> None:
    o, z = rows(count, seed=count)
    weight = torch.randn(V, device="cuda").to(weight_dtype)
    out = torch.full((count + 1, V), float("nan"), device="cuda", dtype=torch.bfloat16)
    gated_rms_norm(o, z, weight, gate_activation=activation, eps=1e-6, out=out[:count], backend="kernels")
    exact = oracle(o.double(), z.double(), weight.double(), activation, 1e-6)
    assert rounded_once(out[:count], exact)
    assert out[count].isnan().all()


@pytest.mark.parametrize("tokens", [1, 2, 3, 63, 1025])
@pytest.mark.parametrize("heads", [1, 3, 6, 32])
def test_gates_may_be_part_of_a_wider_row(tokens: int, heads: int) -> None:
    wide = torch.full((tokens, (heads + 2) * V + 24), float("nan"), device="cuda", dtype=torch.bfloat16)
    o, gates = (x.view(tokens, heads, V) for x in rows(tokens * heads, seed=tokens))
    z = wide[:, V : (heads + 1) * V].unflatten(1, (heads, V))
    z.copy_(gates)
    weight = torch.randn(V, device="cuda")
    out = torch.full((tokens + 1, heads, V), float("nan"), device="cuda", dtype=torch.bfloat16)
    assert gated_rms_norm(o, z, weight, out=out[:tokens], backend="kernels").shape == o.shape
    assert rounded_once(out[:tokens], oracle(o.double(), gates.double(), weight.double(), "silu", 1e-6))
    assert out[tokens].isnan().all()
    assert torch.equal(gated_rms_norm(o, z, weight, backend="kernels"), out[:tokens])


@pytest.mark.parametrize("scale", [0.0, 1e-6, 1e3])
def test_small_and_large_rows_keep_to_float64(scale: float) -> None:
    o, z = rows(64, scale)
    weight = torch.ones(V, device="cuda")
    out = gated_rms_norm(o, z, weight, eps=1e-6, backend="kernels")
    exact = oracle(o.double(), z.double(), weight.double(), "silu", 1e-6)
    assert rounded_once(out, exact)


def test_the_output_may_be_an_input_and_repeats_are_equal() -> None:
    o, z = rows(4099)
    weight = torch.randn(V, device="cuda").bfloat16()
    first = gated_rms_norm(o, z, weight, backend="kernels")
    for _ in range(100):
        assert torch.equal(gated_rms_norm(o, z, weight, backend="kernels"), first)
    for target in (o.clone(), z.clone()):
        given = (target, z) if torch.equal(target, o) else (o, target)
        assert torch.equal(gated_rms_norm(*given, weight, out=target, backend="kernels"), first)


def test_no_rows_are_no_launch() -> None:
    o, z = rows(0)
    assert gated_rms_norm(o, z, torch.ones(V, device="cuda"), backend="kernels").shape == (0, V)
