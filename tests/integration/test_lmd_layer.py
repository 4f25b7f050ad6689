"""The linear layer's input projections: one product, of weights that stay lmdeploy's parameters."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytestmark = pytest.mark.lmdeploy
pytest.importorskip("lmdeploy", reason="lmdeploy is not installed")

import lmd_model  # noqa: E402  after the skip: it imports lmdeploy
import lmd_tiny  # noqa: E402
import torch  # noqa: E402
from lmd_flow import Flow  # noqa: E402

from compact_state.integration.lmdeploy import layer as compact_layer  # noqa: E402


@pytest.fixture(scope="module")
def flow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flow]:
    with lmd_model.cpu_engine():
        yield lmd_model.model_flow(lmd_tiny.write_checkpoint(tmp_path_factory.mktemp("tiny")), caching=False)


def linear_layers(flow: Flow) -> list[Any]:
    return [
        layer.linear_attn for layer in flow.device.model.model.language_model.layers if hasattr(layer, "linear_attn")
    ]


def parameters(layer: Any) -> list[torch.nn.Parameter]:
    return [getattr(layer, name).weight for name in compact_layer.PROJECTIONS]


def joined(layer: Any) -> torch.Tensor:
    """The weight of the product, which has to be that of the parameters in their order."""
    weight = compact_layer._joined_weight(layer)
    assert weight is not None
    assert torch.equal(weight, torch.cat([parameter.data for parameter in parameters(layer)]))
    return weight


def answer(flow: Flow, tokens: int = 30) -> list[int]:
    seq = flow.serve(torch.randint(3, 260, (tokens,), generator=torch.Generator().manual_seed(1)).tolist(), 12)
    flow.end(seq)
    flow.run()
    return [int(token) for token in seq.generated_ids]


def test_a_forward_is_projected_by_one_product_and_answers_as_with_three(flow: Flow) -> None:
    layer, products = linear_layers(flow)[0], []

    def product(x: torch.Tensor, weight: torch.Tensor, *rest: Any, **kwargs: Any) -> torch.Tensor:
        products.append(len(weight))
        return torch.nn.functional.linear(x, weight)

    with contextlib.ExitStack() as stack:
        for name in compact_layer.PROJECTIONS:
            stack.enter_context(mock.patch.object(getattr(layer, name).impl, "forward", product))
        once = answer(flow)
    rows = [len(parameter) for parameter in parameters(layer)]
    assert len(products) > 10
    assert set(products) == {sum(rows)}, "the prefill and the decode steps"
    with mock.patch.object(compact_layer, "_joined_weight", return_value=None):
        assert answer(flow) == once


def test_the_operator_is_given_the_same_rows(flow: Flow) -> None:
    layer, given = linear_layers(flow)[0], []

    def record(
        x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, z: torch.Tensor, *rest: Any, **options: Any
    ) -> torch.Tensor:
        given.append((x, a, b, z))
        return z.contiguous()

    hidden = torch.randn(1, 3, layer.hidden_size, dtype=torch.bfloat16)
    meta = SimpleNamespace(read_ids=None, write_ids=None, positions=None)
    with torch.inference_mode(), mock.patch.object(compact_layer.cute_kernels, "gdn_layer_decode", record):
        compact_layer._decode(layer, hidden, (None, None), meta)
        with mock.patch.object(compact_layer, "_joined_weight", return_value=None):
            compact_layer._decode(layer, hidden, (None, None), meta)
    for name, joint, apart in zip("xabz", *given):
        torch.testing.assert_close(joint, apart, rtol=0.01, atol=0.01, msg=name)
        assert apart.std() > 0.1, f"{name} tells nothing"


def test_an_update_in_place_is_one_of_the_product(flow: Flow) -> None:
    before = answer(flow)
    for layer in linear_layers(flow):
        layer.in_proj_z.weight.data.neg_()
        joined(layer)
    changed = answer(flow)
    with mock.patch.object(compact_layer, "_joined_weight", return_value=None):
        assert answer(flow) == changed
    assert changed != before
    for layer in linear_layers(flow):
        layer.in_proj_z.weight.data.neg_()
    assert answer(flow) == before


def test_a_layer_that_was_moved_is_joined_where_it_stands_then(flow: Flow) -> None:
    layer = copy.deepcopy(linear_layers(flow)[0])
    wide = layer.to(torch.float64)
    assert joined(wide).dtype == torch.float64
    address = joined(wide).data_ptr()
    assert joined(wide.to("cpu")).data_ptr() == address, "nothing moved, and captured graphs know the address"
    # As in a sleep, whose copies to the host nothing has waited for yet.
    with mock.patch.object(torch, "cat", side_effect=AssertionError("parameters were read")):
        wide.to("meta")


def test_a_parameter_that_stands_elsewhere_is_projected_apart(flow: Flow) -> None:
    before = answer(flow)
    layer = linear_layers(flow)[0]
    kept = layer.in_proj_ba.weight.data
    with torch.inference_mode():
        layer.in_proj_ba.weight.data = kept.clone()
    assert compact_layer._joined_weight(layer) is None
    assert answer(flow) == before
    with torch.inference_mode():
        layer.in_proj_ba.weight.data = kept
    joined(layer)


@pytest.mark.parametrize("what", ["quantised", "with a bias"])
def test_projections_that_are_not_plain_ones_are_left_alone(flow: Flow, what: str) -> None:
    layer = copy.deepcopy(linear_layers(flow)[0])

    class Quantised(type(layer.in_proj_z)):  # type: ignore[misc]
        pass

    if what == "quantised":
        layer.in_proj_z.__class__ = Quantised
    else:
        layer.in_proj_z.bias = torch.nn.Parameter(torch.zeros(len(layer.in_proj_z.weight)), requires_grad=False)
    for parameter in parameters(layer):
        parameter.data = parameter.data.clone()
    addresses = [parameter.data_ptr() for parameter in parameters(layer)]
    compact_layer.join_projections(layer)
    assert compact_layer._joined_weight(layer) is None
    assert [parameter.data_ptr() for parameter in parameters(layer)] == addresses


def test_a_joined_row_that_kernels_could_not_read_is_not_made(flow: Flow) -> None:
    layer = copy.deepcopy(linear_layers(flow)[0])
    for parameter in parameters(layer):
        parameter.data = parameter.data.clone()
    addresses = [parameter.data_ptr() for parameter in parameters(layer)]
    # b and a of two heads, as of a model of 16 on eight GPUs: rows of 8 bytes more than a multiple of 16.
    layer.in_proj_ba.weight = torch.nn.Parameter(layer.in_proj_ba.weight.data[:4], requires_grad=False)
    compact_layer.join_projections(layer)
    assert compact_layer._joined_weight(layer) is None
    assert [parameter.data_ptr() for parameter in parameters(layer)] == addresses
