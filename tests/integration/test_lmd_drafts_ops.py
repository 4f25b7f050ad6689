"""Operators of a verify step behind lmdeploy's seams: whatever is accepted, they equal one token after the other."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.lmdeploy
pytest.importorskip("lmdeploy", reason="lmdeploy is not installed")

import lmd_flow  # noqa: E402, F401  turns the adapter on in this process
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from lmdeploy.pytorch.model_inputs import ModelInputs  # noqa: E402
from test_lmd_ops import HK, HV, SLOTS, C, D, Layer, W, close, metadata, tokens  # noqa: E402

from compact_state.integration.lmdeploy import cache, ids, ops  # noqa: E402

ROWS, LAYERS = 4, 2


@pytest.fixture(autouse=True)
def _cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "pool_device", lambda: "cpu")


def engine(drafts: int) -> Any:
    """The pool and logs of two layers of `Layer`'s sizes, NaN everywhere."""
    from lmdeploy.pytorch.engine.cache_engine import StateCacheEngine

    channels = 2 * HK * D + HV * D
    shapes = [((LAYERS, channels, W + drafts), torch.float32), ((LAYERS, 1 + drafts, HV, D, D), torch.float32)]
    states = StateCacheEngine(SimpleNamespace(states_shapes=shapes, num_state_caches=SLOTS, max_batches=ROWS), None)
    for tensor in states.named_state_caches.values():
        tensor.fill_(float("nan"))
    for log in states.draft_logs.values():
        for tensor in (log.k, log.u, log.g, log.x):
            tensor.fill_(float("nan"))
    return states


class DraftLayer(Layer):
    """`Layer` on layer 1 of an engine with logs; its conv has the channels of the packed q, k and v."""

    def __init__(self, drafts: int) -> None:
        super().__init__()
        self.drafts = drafts
        self.engine = engine(drafts)
        self.conv_state, self.state = (layers[1] for layers in self.engine.state_caches)
        width = 2 * HK * D + HV * D
        g = torch.Generator().manual_seed(1)
        self.weight = torch.randn(width, 1, W, generator=g)
        self.into, self.gates = torch.randn(C, width, generator=g) * 0.3, torch.randn(C, 2 * HV, generator=g)

    def run(self, x: torch.Tensor, lengths: list[int], history: list[int], offsets: Any, decoding: bool) -> Any:
        meta = ops.build_meta(offsets, metadata(lengths, history, decoding), None, self.engine.draft_logs)
        y = self.conv.forward((x @ self.into)[None], self.weight, None, self.conv_state, meta, "silu")
        heads = [t.unflatten(-1, (-1, D)) for t in y.split([HK * D, HK * D, HV * D], dim=-1)]
        b, a = (x[None] @ self.gates).split([HV, HV], dim=-1)
        return self.rule.forward(*heads, b, a, self.dt_bias, self.A_log, self.state, meta, HV // HK, True)[0]


def plain(layer: DraftLayer) -> DraftLayer:
    """A layer of the same weights that takes one token a step."""
    other = DraftLayer(layer.drafts)
    other.engine.draft_logs = {}
    return other


class Request:
    """A row: its true tokens, how many of them are history, and its slot and log row."""

    def __init__(self, number: int, prompt: int) -> None:
        self.tokens = tokens(prompt + 120, 70 + number)
        self.prompt = self.history = prompt
        self.outputs: list[torch.Tensor] = []


def decoded(layer: DraftLayer, request: Request, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs of `count` tokens after the prompt one by one, and the conv window and state after them."""
    single = plain(layer)
    start, outputs = request.prompt, []
    single.run(request.tokens[:start], [start], [0], ids.id_rows([-1], [0]), False)
    for t in range(start, start + count):
        outputs.append(single.run(request.tokens[t : t + 1], [1], [t], ids.id_rows([0], [0]), True))
    return torch.cat(outputs), single.conv_state[0], single.state[0]


@settings(max_examples=25, deadline=None)
@given(drafts=st.sampled_from([1, 3, 7]), seed=st.integers(0, 10_000))
def test_any_pattern_of_accepted_drafts_equals_step_by_step_decode(drafts: int, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "pool_device", lambda: "cpu")
        _any_pattern(drafts, random.Random(seed))


def _any_pattern(drafts: int, draw: random.Random) -> None:
    layer = DraftLayer(drafts)
    requests = [Request(n, draw.randint(1, 9)) for n in range(3)]
    prompts = [r.prompt for r in requests]
    # Each prompt ends in a checkpoint's slot; the first step reads it and writes another one.
    offsets = ids.id_rows([-1] * 3, [0, 1, 2], [2, 0, 3])
    layer.run(torch.cat([r.tokens[: r.prompt] for r in requests]), prompts, [0] * 3, offsets, False)
    offsets = ids.advance(offsets)
    assert offsets is not None
    offsets = torch.cat([torch.tensor([[0, 3], [1, 4], [2, 5]], dtype=torch.int32), offsets[:, 2:]], 1)
    kept = layer.state[:3].clone()
    rows = list(range(3))
    for _ in range(6):
        if draw.random() < 0.5:  # the batch is reindexed, as when requests come and go
            order = draw.sample(range(len(rows)), len(rows))
            rows, offsets = [rows[i] for i in order], offsets[order]
        accepted, pieces = [], []
        for row in rows:
            request = requests[row]
            count = draw.randint(1, 1 + drafts)
            true = request.tokens[request.history : request.history + count]
            pieces.append(torch.cat([true, torch.randn(1 + drafts - count, C)]))
            accepted.append(count)
        history = [requests[row].history for row in rows]
        out = layer.run(torch.cat(pieces), [1 + drafts] * len(rows), history, offsets, True)
        for at, (row, count) in enumerate(zip(rows, accepted)):
            start = at * (1 + drafts)
            requests[row].outputs.append(out[start : start + count])
            requests[row].history += count
        offsets = ids.advance(offsets, torch.tensor(accepted))
    assert torch.equal(layer.state[:3], kept), "a checkpoint changed"
    # What the last step accepted is still in the log: fold it in, as before a publish.
    read, _, accepted_now, log_rows, half = offsets.unbind(1)
    held = torch.tensor([requests[row].history for row in rows], dtype=torch.int32) - accepted_now
    # A layer that ran no step has nothing in its log; what is folded into it is its own affair.
    layer.engine.commit(torch.stack((read, held, accepted_now, log_rows, half)))
    for at, row in enumerate(rows):
        request, slot = requests[row], int(read[at])
        count = request.history - request.prompt
        outputs, window, state = decoded(layer, request, count)
        close(torch.cat(request.outputs), outputs)
        close(layer.state[slot], state)
        close(layer.conv_state[slot], window)


@pytest.mark.parametrize(("drafts", "length"), [(2, 2), (2, 3), (2, 4), (3, 3), (3, 4), (3, 5)])
@pytest.mark.parametrize("count", [1, 3])
def test_A11_a_prompt_as_long_as_a_verify_step_is_a_prefill(drafts: int, length: int, count: int) -> None:
    layer = DraftLayer(drafts)
    x = tokens(count * length, 8)
    rows = list(range(count))
    out = layer.run(x, [length] * count, [0] * count, ids.id_rows([-1] * count, rows, rows), False)
    for row in rows:
        single = plain(layer)
        piece = x[row * length : (row + 1) * length]
        close(out[row * length : (row + 1) * length], single.run(piece, [length], [0], ids.id_rows([-1], [0]), False))
        close(layer.state[row], single.state[0])
        close(layer.conv_state[row], single.conv_state[0])
    assert layer.engine.draft_logs[layer.state.data_ptr()].u.isnan().all()


@pytest.mark.parametrize("first", [1, 2])
def test_G1_nan_left_in_slots_and_logs_is_never_seen_with_drafts(first: int) -> None:
    layer, request = DraftLayer(3), Request(0, first)
    layer.run(request.tokens[:first], [first], [0], ids.id_rows([-1], [4], [2]), False)
    offsets, outputs = ids.advance(ids.id_rows([-1], [4], [2])), []
    for step in range(13):
        start = first + 4 * step
        outputs.append(layer.run(request.tokens[start : start + 4], [4], [start], offsets, True))
        offsets = ids.advance(offsets, torch.tensor([4]))
    wanted, _, _ = decoded(layer, request, 52)
    assert torch.isfinite(torch.cat(outputs)).all()
    close(torch.cat(outputs), wanted)


def test_F2_a_row_with_fewer_tokens_than_the_others_equals_its_single_run() -> None:
    """One draft: rows of 2, 2 and 1 tokens, the last one at the end of its length; all with a step of 2 accepted before."""
    layer, requests = DraftLayer(1), [Request(n, 5 + n) for n in range(3)]
    prompts, rows = [r.prompt for r in requests], [0, 1, 2]
    layer.run(
        torch.cat([r.tokens[: r.prompt] for r in requests]), prompts, [0] * 3, ids.id_rows([-1] * 3, rows, rows), False
    )
    offsets = ids.advance(ids.id_rows([-1] * 3, rows, rows))
    outputs: list[list[torch.Tensor]] = [[], [], []]
    for step, lengths in enumerate(([2, 2, 2], [2, 2, 1])):
        starts = [p + 2 * step for p in prompts]
        pieces = [r.tokens[at : at + n] for r, at, n in zip(requests, starts, lengths)]
        out = layer.run(torch.cat(pieces), lengths, starts, offsets, True)
        for kept, part in zip(outputs, out.split(lengths)):
            kept.append(part)
        offsets = ids.advance(offsets, torch.tensor(lengths))
    for request, kept, count in zip(requests, outputs, (4, 4, 3)):
        close(torch.cat(kept), decoded(layer, request, count)[0])


def test_a_padded_row_is_zeros_and_changes_no_slot_and_no_log() -> None:
    layer = DraftLayer(3)
    layer.run(tokens(9), [9], [0], ids.id_rows([-1], [2], [1]), False)
    states, logs = layer.state.clone(), layer.engine.draft_logs[layer.state.data_ptr()]
    offsets = torch.tensor([[2, 2, 0, 1, 0], [-1] * 5, [-1] * 5], dtype=torch.int32)
    x = tokens(12, 3)
    out = layer.run(x, [4, 4, 4], [9, 0, 0], offsets, True)
    assert (out[4:] == 0).all()
    assert torch.isfinite(out[:4]).all()
    others = [slot for slot in range(SLOTS) if slot != 2]
    assert torch.equal(layer.state[others].nan_to_num(9.0), states[others].nan_to_num(9.0))
    written = torch.isfinite(logs.u).flatten(3).all(-1).any(-1)
    assert written.tolist() == [[False, False], [False, True], [False, False], [False, False]]


def test_a_step_run_twice_with_the_same_ids_is_one_step() -> None:
    """As under graph capture: the run that warms up is real, and ids advance outside of it."""
    layer = DraftLayer(3)
    layer.run(tokens(9), [9], [0], ids.id_rows([-1], [2], [1]), False)
    offsets = torch.tensor([[2, 4, 0, 1, 0]], dtype=torch.int32)
    x = tokens(4, 3)
    first = layer.run(x, [4], [9], offsets, True)
    state = layer.state[4].clone()
    assert torch.equal(layer.run(x, [4], [9], offsets, True), first)
    assert torch.equal(layer.state[4], state)


def test_ids_advance_with_counts_and_flip_the_half() -> None:
    offsets = ids.id_rows([7], [3], [5])
    assert offsets.tolist() == [[7, 3, 0, 5, 0]]
    after_prefill = ids.advance(offsets)
    assert after_prefill is not None
    assert after_prefill.tolist() == [[3, 3, 0, 5, 0]]
    inputs = ModelInputs(
        input_ids=torch.tensor([[7, 8, 9, 10]]),
        seq_length=torch.tensor([4]),
        history_lengths=torch.tensor([30]),
        block_offsets=torch.zeros(1, 1, dtype=torch.int32),
        is_decoding=True,
        num_ignored_history=torch.zeros(1, dtype=torch.long),
        max_q_seqlen=4,
        max_kv_seqlen=34,
        sum_kv_seqlen=34,
        state_offsets=after_prefill,
    )
    stepped = inputs.step(torch.tensor([[1, 2, 3, 4]]), torch.tensor([2]))
    assert stepped.state_offsets.tolist() == [[3, 3, 2, 5, 1]]
    assert stepped.state_offsets.dtype == torch.int32
    assert stepped.step(torch.tensor([[1, 2, 3, 4]]), torch.tensor([4])).state_offsets.tolist() == [[3, 3, 4, 5, 0]]


def test_graph_buffers_take_the_width_of_the_ids_and_dummies_have_no_log() -> None:
    from lmdeploy.pytorch.models.utils.cudagraph import CudaGraphMeta, CudaGraphMixin
    from lmdeploy.pytorch.strategies.ar_spec.model_inputs import ARSpecModelInputsStrategy
    from lmdeploy.pytorch.strategies.base.model_inputs import MakeDummyMeta

    dummy = ARSpecModelInputsStrategy(3).make_dummy(2, True, meta=MakeDummyMeta(use_ssm=True, use_mrope=False))
    assert dummy.state_offsets.tolist() == [[-1] * 5] * 2
    assert dummy.max_q_seqlen == 4
    meta = CudaGraphMeta(
        max_batchs=4,
        max_tokens=16,
        num_blocks=4,
        is_decoding=True,
        device=torch.device("cpu"),
        input_buffers={},
        output_buffers={},
        vocab_size=10,
        is_ssm=True,
        decode_query_len=4,
    )
    buffers = CudaGraphMixin().make_buffers_cudagraph(
        meta, torch.zeros(1, 8), torch.zeros(1, 8), [], None, state_ids=dummy.state_offsets
    )
    assert buffers["state_ids"].tolist() == [[-1] * 5] * 4


def test_log_memory_is_that_of_the_capacity_plan() -> None:
    from compact_state.pool import capacity, models

    preset = models.preset("qwen3.5-0.8b")
    for drafts in (1, 5):
        logs = cache.allocate_logs(preset.layout(), 3, drafts, "meta")
        assert cache.log_bytes(logs) == 3 * capacity.draft_log_bytes(preset, 1, drafts)
    assert cache.allocate_logs(preset.layout(), 3, 0, "meta") == []
