"""Operators, ids and pool views behind lmdeploy's seams, and the faults of 0.18.0 that do not come along."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.lmdeploy
pytest.importorskip("lmdeploy", reason="lmdeploy is not installed")

import lmd_flow  # noqa: E402  turns the adapter on in this process
from lmdeploy.pytorch.model_inputs import ModelInputs  # noqa: E402

from compact_state import cute_kernels  # noqa: E402
from compact_state.cute_kernels.checkpoints import Checkpoints  # noqa: E402
from compact_state.integration.lmdeploy import cache, ids, ops  # noqa: E402
from compact_state.integration.lmdeploy import layer as layers  # noqa: E402

W, C, HK, HV, D = 4, 24, 2, 4, 8
SLOTS = 6


def pools(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """conv_state, state: full of NaN, as a recycled slot may be."""
    nan = float("nan")
    return torch.full((SLOTS, W, C), nan), torch.full((SLOTS, HV, D, D), nan)


def metadata(lengths: list[int], history: list[int], decoding: bool = False) -> Any:
    q = torch.tensor(lengths)
    return SimpleNamespace(
        is_decoding=decoding,
        q_seqlens=q,
        kv_seqlens=q + torch.tensor(history),
        cu_seqlens_q=torch.nn.functional.pad(q.cumsum(0), (1, 0)).to(torch.int32),
    )


class Layer:
    """One linear layer as lmdeploy drives it: metadata, conv, rule."""

    def __init__(self, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.weight = torch.randn(C, 1, W, generator=g)
        self.A_log, self.dt_bias = torch.rand(HV, generator=g) - 3, torch.rand(HV, generator=g) - 1
        self.q_weight = torch.randn(C, 2 * HK * D + HV * D, generator=g) * 0.3
        self.gates = torch.randn(C, 2 * HV, generator=g)
        self.conv, self.rule, self.meta = ops.CompactConv1dImpl(), ops.CompactRuleImpl(), ops.CompactMetaImpl()
        self.conv_state, self.state = pools()

    def __call__(
        self, x: torch.Tensor, lengths: list[int], history: list[int], rows: list[tuple[int, int]], exports: Any = None
    ) -> torch.Tensor:
        decoding = lengths == [1] * len(lengths) and all(history)
        meta = ops.build_meta(torch.tensor(rows, dtype=torch.int32), metadata(lengths, history, decoding), exports)
        y = self.conv.forward(x[None], self.weight, None, self.conv_state, meta, "silu")
        q, k, v = (y @ self.q_weight).split([HK * D, HK * D, HV * D], dim=-1)
        b, a = (x[None] @ self.gates).split([HV, HV], dim=-1)
        heads = [t.unflatten(-1, (-1, D)) for t in (q, k, v)]
        out = self.rule.forward(*heads, b, a, self.dt_bias, self.A_log, self.state, meta, HV // HK, True)
        return out[0]


def tokens(count: int, seed: int = 5) -> torch.Tensor:
    return torch.randn(count, C, generator=torch.Generator().manual_seed(seed))


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)


def test_a_split_prefill_and_decode_equal_one_prefill() -> None:
    x = tokens(40)
    whole = Layer()(x, [40], [0], [(-1, 0)])
    layer = Layer()
    parts = [layer(x[:25], [25], [0], [(-1, 2)]), layer(x[25:38], [13], [25], [(2, 3)])]
    parts += [layer(x[t : t + 1], [1], [t], [(3, 3)]) for t in (38, 39)]
    close(torch.cat(parts), whole)


def test_steps_behind_a_projection_are_plain_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing starts beside a projection of cuBLAS, where a dependent launch takes longer than a plain one."""
    asked: dict[str, Any] = {}

    def ask(name: str) -> None:
        monkeypatch.setattr(cute_kernels, name, lambda x, *_, **options: asked.update({name: options["pdl"]}) or x)

    ask("causal_conv1d_decode")
    ask("gdn_layer_decode")
    Layer()(tokens(1), [1], [5], [(2, 2)])
    same = SimpleNamespace(detach=lambda: torch.ones(1, 1))
    projected = dict.fromkeys(("in_proj_qkv", "in_proj_z", "in_proj_ba", "out_proj"), lambda x: x)
    layer = SimpleNamespace(
        **projected, fix_ba_ordering=lambda x: (x, x), conv1d=SimpleNamespace(weight=same), dt_bias=same, activation="silu",
        norm=SimpleNamespace(weight=same), get_A_log_exp=lambda: None, layer_norm_epsilon=1e-6, compact_backend="auto",
        compact_joined=False,
    )  # fmt: skip
    layers._decode(layer, torch.ones(1, 1, 1), (None, None), SimpleNamespace(read_ids=0, write_ids=0, positions=0))
    assert asked == {"causal_conv1d_decode": False, "gdn_layer_decode": False}


@pytest.mark.parametrize("suffix", [1, 2])
def test_a_continuation_shorter_than_the_window_reads_its_own_past(suffix: int) -> None:
    """0.18.0 takes the last W inputs of the packed batch, which are another request's (`backends/gated_delta_rule.py`)."""
    x, other = tokens(20 + suffix + 10), tokens(5, 9)
    whole = Layer()(x, [len(x)], [0], [(-1, 0)])
    layer = Layer()
    layer(x[:20], [20], [0], [(-1, 1)])
    packed = torch.cat([other, x[20 : 20 + suffix]])
    out = layer(packed, [5, suffix], [0, 20], [(-1, 2), (1, 3)])
    close(out[5:], whole[20 : 20 + suffix])
    rest = layer(x[20 + suffix :], [10], [20 + suffix], [(3, 3)])
    close(rest, whole[20 + suffix :])


@pytest.mark.parametrize("first", [1, 2, 5])
def test_G1_nan_left_in_a_recycled_slot_is_never_seen(first: int) -> None:
    """0.18.0 multiplies the old state by exp(-1e6) = 0, and 0 * NaN is NaN."""
    x = tokens(51)
    clean = Layer()
    clean.conv_state.zero_()
    clean.state.zero_()
    cold = clean(x, [51], [0], [(-1, 0)])
    layer = Layer()
    out = torch.cat([layer(x[:first], [first], [0], [(-1, 4)]), layer(x[first:], [51 - first], [first], [(4, 4)])])
    assert torch.isfinite(out).all()
    close(out, cold)


def test_D7_one_packed_call_equals_five_calls() -> None:
    lengths, known = [1, 1, 130, 2, 64], [1, 1, 0, 1, 0]
    histories = [7 * flag for flag in known]
    past = [tokens(7, 30 + i) for i in range(5)]
    new = [tokens(n, 40 + i) for i, n in enumerate(lengths)]

    def start() -> Layer:
        layer = Layer()
        for i, flag in enumerate(known):
            if flag:
                layer(past[i], [7], [0], [(-1, i)])
        return layer

    packed, single = start(), start()
    rows = [(i if flag else -1, i) for i, flag in enumerate(known)]
    out = packed(torch.cat(new), lengths, histories, rows)
    alone = [single(new[i], [lengths[i]], [histories[i]], [rows[i]]) for i in range(5)]
    close(out, torch.cat(alone))
    close(packed.state[:5], single.state[:5])


def test_exports_are_the_states_at_their_boundaries() -> None:
    x = tokens(64)
    layer = Layer()
    exports = Checkpoints.from_lists([[(16, 4), (40, 5)]])
    whole = layer(x, [64], [0], [(-1, 0)], exports)
    for end, slot in ((16, 4), (40, 5)):
        resumed = layer(x[end:], [64 - end], [end], [(slot, 1)])
        close(resumed, whole[end:])


def test_A10_rows_that_name_no_slot_are_zero_and_write_nothing() -> None:
    layer = Layer()
    layer(tokens(9), [9], [0], [(-1, 2)])
    before = layer.state.clone()
    x = tokens(5, 3)
    out = layer(x, [1] * 5, [9] * 5, [(2, 2), (-1, -1), (6, 6), (1_000_000, 1_000_000), (-1, -1)])
    assert (out[1:] == 0).all()
    assert (out[0] != 0).any()
    untouched = [0, 1, 3, 4, 5]
    assert torch.equal(layer.state[untouched].nan_to_num(9.0), before[untouched].nan_to_num(9.0))


def test_C7_a_value_head_uses_the_key_head_of_its_group() -> None:
    layer = Layer()
    q = torch.zeros(1, 1, HK, D)
    k = torch.zeros(1, 1, HK, D)
    q[0, 0, 1, 0] = k[0, 0, 1, 0] = 1.0  # key head 1 alone
    v = torch.ones(1, 1, HV, D)
    ones = torch.ones(1, 1, HV)
    meta = ops.build_meta(torch.tensor([[-1, 0]], dtype=torch.int32), metadata([1], [0]), None)
    out = layer.rule.forward(q, k, v, ones, ones, layer.dt_bias, layer.A_log, layer.state, meta, HV // HK, True)[0, 0]
    assert (out[:2] == 0).all()
    assert (out[2:] != 0).all()


def test_ids_advance_by_a_view_and_only_in_the_wide_form() -> None:
    wide = torch.tensor([[3, 5], [4, 4], [-1, -1]], dtype=torch.int32)
    following = ids.advance(wide)
    assert following.tolist() == [[5, 5], [4, 4], [-1, -1]]
    assert following.data_ptr() == wide[:, 1:].data_ptr()
    assert ids.advance(None) is None
    narrow = torch.tensor([1, 2])
    assert ids.advance(narrow) is narrow


def test_a_decode_step_of_lmdeploy_reads_next_what_it_wrote() -> None:
    inputs = ModelInputs(
        input_ids=torch.tensor([[7, 8]]),
        seq_length=torch.tensor([1, 1]),
        history_lengths=torch.tensor([4, 9]),
        block_offsets=torch.zeros(2, 1, dtype=torch.int32),
        is_decoding=True,
        num_ignored_history=torch.zeros(2, dtype=torch.long),
        max_q_seqlen=1,
        max_kv_seqlen=10,
        sum_kv_seqlen=15,
        state_offsets=torch.tensor([[2, 6], [3, 3]], dtype=torch.int32),
    )
    assert inputs.step(torch.tensor([1, 2])).state_offsets.tolist() == [[6, 6], [3, 3]]


def test_graph_buffers_and_dummy_rows_are_wide_and_name_no_slot() -> None:
    from lmdeploy.pytorch.models.utils.cudagraph import CudaGraphMeta, CudaGraphMixin
    from lmdeploy.pytorch.strategies.base.model_inputs import MakeDummyMeta, make_dummy_inputs

    dummy = make_dummy_inputs(3, 1, True, "cpu", 0, 10, MakeDummyMeta(use_ssm=True, use_mrope=False))
    assert dummy.state_offsets.tolist() == [[-1, -1]] * 3
    assert dummy.state_offsets.dtype == torch.int32
    meta = CudaGraphMeta(
        max_batchs=8,
        max_tokens=8,
        num_blocks=4,
        is_decoding=True,
        device=torch.device("cpu"),
        input_buffers={},
        output_buffers={},
        vocab_size=10,
        is_ssm=True,
    )
    buffers = CudaGraphMixin().make_buffers_cudagraph(meta, torch.zeros(1, 8), torch.zeros(1, 8), [], None)
    assert buffers["state_ids"].tolist() == [[-1, -1]] * 8
    assert buffers["state_ids"].dtype == torch.int32


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_slot_is_one_state_wide_whatever_the_draft_width(drafts: int) -> None:
    conv = ((3, 1024, 4 + drafts), torch.bfloat16)
    state = (3, 4, 128, 128) if drafts == 0 else (3, 1 + drafts, 4, 128, 128)
    layout = cache.layout_of([conv, (state, torch.float32)])
    assert layout.slot_bytes == 3 * (1024 * 4 * 2 + 4 * 128 * 128 * 4)
    pool = torch.zeros(5, layout.slot_bytes, dtype=torch.uint8)
    windows, states = cache.slot_views(pool, layout)
    assert windows.shape == (5, 3, 4, 1024)
    assert states.shape == (5, 3, 4, 128, 128)
    # Every layer's view covers bytes of its own, in one slot's record.
    for layer in range(3):
        for view in (windows, states):
            per_layer = view.transpose(0, 1)[layer]
            assert per_layer.stride(0) * per_layer.element_size() == layout.slot_bytes
            per_layer[2].fill_(1)
    assert (pool[2] != 0).sum() > 0
    assert (pool[[0, 1, 3, 4]] == 0).all()
    assert int((windows[2] == 1).sum() + (states[2] == 1).sum()) == windows[2].numel() + states[2].numel()


def test_the_pool_has_the_surface_of_the_engine_it_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    from lmdeploy.pytorch.engine.cache_engine import StateCacheEngine

    monkeypatch.setattr(cache, "pool_device", lambda: "cpu")
    config = SimpleNamespace(states_shapes=lmd_flow.SHAPES, num_state_caches=4)
    engine = StateCacheEngine(config, None)
    assert StateCacheEngine.get_state_slot_nbytes(lmd_flow.SHAPES) * 4 == engine.allocation.nbytes
    assert set(engine.named_state_caches) == {"conv", "recurrent"}
    tensors = list(engine.named_state_caches.values())
    for tensor in tensors:
        tensor[1].fill_(3)
    engine.copy_slots([1], [3])
    assert all(torch.equal(tensor[3], tensor[1]) for tensor in tensors)
    # What the model makes of the caches in every forward is there already: each layer's part of the same memory.
    for tensor, caches in zip(tensors, engine.state_caches):
        layers = list(caches.transpose(0, 1))
        assert all(layer.data_ptr() == part.data_ptr() for layer, part in zip(layers, tensor.unbind(1), strict=True))
        assert all(layer.stride() == part.stride() for layer, part in zip(layers, tensor.unbind(1)))


def test_our_norm_is_the_gated_norm() -> None:
    norm = ops.GatedRMSNorm(16, eps=1e-6, activation="silu", dtype=torch.float32)
    torch.nn.init.uniform_(norm.weight)
    x, gate = torch.randn(3, 16), torch.randn(3, 16)
    want = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight * gate * torch.sigmoid(gate)
    torch.testing.assert_close(norm(x, gate), want)
    heads = torch.cat((gate, torch.full_like(gate, torch.nan)), 1)[:, :16].view(3, 1, 16)
    assert torch.equal(norm(x.view(3, 1, 16), heads)[:, 0], norm(x, gate))


def test_operators_are_built_at_the_seam_without_fla_or_tilelang() -> None:
    from lmdeploy.pytorch.backends.causal_conv1d import CausalConv1dBuildSpec
    from lmdeploy.pytorch.backends.cuda.op_backend import CudaOpsBackend
    from lmdeploy.pytorch.backends.gated_delta_rule import GatedDeltaMetaBuildSpec, GatedDeltaRuleBuildSpec
    from lmdeploy.pytorch.nn.gated_delta import build_rmsnorm_gated

    assert isinstance(CudaOpsBackend.build_op(CausalConv1dBuildSpec()), ops.CompactConv1dImpl)
    assert isinstance(CudaOpsBackend.build_op(GatedDeltaMetaBuildSpec()), ops.CompactMetaImpl)
    assert isinstance(CudaOpsBackend.build_op(GatedDeltaRuleBuildSpec()), ops.CompactRuleImpl)
    assert isinstance(build_rmsnorm_gated(8, eps=1e-6, activation="silu"), ops.GatedRMSNorm)


def test_piecewise_graphs_run_the_operators_eagerly_on_the_tokens_that_are_there() -> None:
    from lmdeploy.pytorch.backends.cuda.graph_runner.piecewise import piecewise_graph_execution
    from lmdeploy.pytorch.backends.cuda.step_metadata import CudaPiecewiseGraphImpl

    for impl in (ops.CompactConv1dImpl(), ops.CompactRuleImpl(), ops.CompactMetaImpl()):
        assert isinstance(impl, CudaPiecewiseGraphImpl)
        assert impl.supports_piecewise_cuda_graph()
        impl.enable_piecewise_cuda_graph()
        impl.enable_piecewise_cuda_graph()
    # Outside a piecewise execution the installed boundary is transparent.
    layer, plain = Layer(), Layer()
    for impl in (layer.conv, layer.rule):
        impl.enable_piecewise_cuda_graph()
    x = tokens(12)
    expected = plain(x, [12], [0], [(-1, 0)])
    assert torch.equal(layer(x, [12], [0], [(-1, 0)]), expected)
    # Inside one, rows up to the size of the graph are no tokens: they are left out, here of the inputs of both operators.
    with piecewise_graph_execution(raw_tokens=12, token_bucket=16):
        assert torch.equal(layer(torch.cat((x, tokens(4, 6))), [12], [0], [(-1, 0)]), expected)
