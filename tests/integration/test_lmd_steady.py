"""What a decode step of the same sequences leaves out changes nothing: every forward of a schedule gets the same inputs."""

from __future__ import annotations

import functools
import pickle
from typing import Any
from unittest import mock

import pytest

pytestmark = pytest.mark.lmdeploy
pytest.importorskip("lmdeploy", reason="lmdeploy is not installed")

import lmd_flow  # noqa: E402  after the skip: it imports lmdeploy
import numpy as np  # noqa: E402
import torch  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from lmd_flow import Flow, MessageStatus, SamplingParam  # noqa: E402
from lmdeploy.pytorch.engine.inputs_maker import _ForwardInputsTask  # noqa: E402

from compact_state.integration.lmdeploy import steady  # noqa: E402

LISTED = ("temperature", "bad_words", "bad_mask", "stop_words", "stop_mask", "repetition_penalty", "top_k", "top_p")
LISTED += (
    "random_seeds",
    "random_offsets",
    "max_top_k",
    "num_ignore_eos",
    "all_ids",
    "session_to_cleanup",
    "batch_size",
)
READ = ("input_ids", "seq_length", "history_lengths", "block_offsets", "state_offsets", "mrope_pos_ids")
READ += ("max_q_seqlen", "max_kv_seqlen", "sum_kv_seqlen", "num_ignored_history", "model_metas", "is_decoding")


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


class Recorder(lmd_flow.Device):
    """Notes what each forward is given and what comes of it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.notes: list[Any] = []
        self.same = 0

    def run(self, work: dict[str, Any]) -> Any:
        self.same += isinstance(work["delta"], steady.SameRows)
        # On a GPU the engine moves them so before each forward.
        work["sampling_inputs"] = work["sampling_inputs"].to_device("cpu")
        outputs = super().run(work)
        sampling = work["sampling_inputs"]
        self.notes.append([plain(getattr(sampling, name)) for name in LISTED])
        self.notes.append([plain(getattr(outputs, name)) for name in ("next_token_ids", "stopped", "stop_pos")])
        return outputs

    def _forward(self, inputs: Any, cache_inputs: Any) -> torch.Tensor:
        self.notes.append([plain(getattr(inputs, name)) for name in READ])
        return super()._forward(inputs, cache_inputs)


SAMPLING = (
    {},
    {"ignore_eos": True, "min_new_tokens": 5},
    {"min_new_tokens": 4, "stop_words": [7, 11]},
    {"stop_words": list(range(2, 20))},
    {"bad_words": [9]},
    {"temperature": 0.5},
    {"top_k": 5},
    {"repetition_penalty": 1.2},
    {"logits_processors": [lambda ids, scores: scores]},
    {"response_format": {"type": "json_object"}},
)
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 200), st.integers(1, 80), st.integers(0, len(SAMPLING) - 1)),
        st.tuples(st.just("step"), st.integers(1, 70)),
        st.tuples(st.just("cancel"), st.integers(0, 5)),
        st.tuples(st.just("turn"), st.integers(1, 60)),
        st.tuples(st.just("sleep")),
    ),
    min_size=3,
    max_size=14,
)


def follow(moves: list[Any], **sizes: Any) -> tuple[list[Any], list[list[int]], int]:
    """Every note of a schedule, the tokens of every sequence, and how many steps said that their rows are the same."""
    np.random.seed(7)
    flow = Flow(device=Recorder, **sizes)
    seqs: list[Any] = []
    for name, *values in moves:
        opened = [seq for seq in seqs if seq.session.session_id in flow.scheduler.sessions]
        if name == "add" and len(opened) < 6:
            length, new, kind = values
            seq = flow.add([(i * 3 + length) % 40 + 3 for i in range(length)], new)
            seq.sampling_param = SamplingParam(max_new_tokens=new, **{"top_k": 1, **SAMPLING[kind]})
            seqs.append(seq)
        elif name == "step":
            for _ in range(values[0]):
                flow.step()
        elif name == "cancel" and opened:
            flow.cancel(opened[values[0] % len(opened)])
        elif name == "turn":
            for seq in [seq for seq in opened if seq.status == MessageStatus.STOPPED][:1]:
                flow.go_on(seq, range(4, 4 + values[0]), 9)
        elif name == "sleep":
            flow.sleep()
            flow.wake()
    for _ in range(300):
        if not flow.step():
            break
    return flow.device.notes, [seq.history_cache.get_real().tolist() for seq in seqs], flow.device.same


def both(moves: list[Any], **sizes: Any) -> int:
    """Follow a schedule with and without; steps with the same rows."""
    meta = functools.partial(lmd_flow.SequenceMeta, use_mrope=True)
    config = functools.partial(lmd_flow.InputsMakerConfig, use_mrope=True)
    with mock.patch.object(lmd_flow, "SequenceMeta", meta), mock.patch.object(lmd_flow, "InputsMakerConfig", config):
        notes, tokens, same = follow(moves, **sizes)
        with mock.patch.object(_ForwardInputsTask, "_try_decode", _ForwardInputsTask._try_decode.__wrapped__):
            assert follow(moves, **sizes) == (notes, tokens, 0)
    return same


def test_most_steps_of_a_batch_are_the_same_rows() -> None:
    moves = [("add", 100, 80, 0), ("add", 30, 80, 2), ("add", 64, 40, 1), ("step", 100)]
    assert both(moves) > 60


@pytest.mark.parametrize("kind", [kind for kind, words in enumerate(SAMPLING) if len(words.get("stop_words", ())) < 10])
def test_sampling_inputs_serve_again_only_where_new_ones_say_the_same(kind: int) -> None:
    with mock.patch.object(steady, "serves_again", wraps=steady.serves_again) as asked:
        steps = both([("add", 70, 9, kind), ("add", 20, 9, kind), ("step", 30)])
    assert steps > 5
    # Greedy without penalties: from the first step on, or once an end is allowed. The others are asked again in every step.
    never = {"top_k", "repetition_penalty", "logits_processors", "response_format"}
    assert (asked.call_count > steps) == bool(never & set(SAMPLING[kind]))
    assert (asked.call_count == 1) == (
        set(SAMPLING[kind]) <= {"ignore_eos", "min_new_tokens", "bad_words", "temperature"}
    )


def test_a_session_that_ends_is_named_once_and_once_only() -> None:
    """What logits processors keep of it goes with the next step, also where nothing else of that step is new."""
    flow = Flow(device=Recorder)
    strategy = flow.maker.sampling_strategy
    flow.add(list(range(3, 40)), 20)
    for step in range(16):
        if step in (1, 8):  # as the first inputs that could serve again are made, and while some do
            strategy.on_session_end(40 + step)
        flow.step()
    at = LISTED.index("session_to_cleanup")
    named = [note[at] for note in flow.device.notes if len(note) == len(LISTED)]
    assert sorted(session for note in named for session in note) == [41, 48]
    assert flow.device.same > 8


@pytest.mark.parametrize(("spec", "window"), [(True, -1), (False, 128)])
def test_drafts_and_sliding_windows_keep_lmdeploys_delta(spec: bool, window: int) -> None:
    flow = Flow(device=Recorder)
    flow.add(list(range(3, 40)), 9)
    for _ in range(2):
        flow.step()
    flow.maker.spec_decoding, flow.maker.config.window_size = spec, window
    with mock.patch.object(flow.maker.sampling_strategy, "compact_last", None, create=True):
        flow.step()
        assert flow.maker.sampling_strategy.compact_last is None
    assert flow.device.same == 0


def test_what_travels_to_a_worker_of_another_process_arrives_as_it_left() -> None:
    """Ray pickles a forward's inputs; what the driver keeps stays there."""
    flow = Flow(device=Recorder)
    flow.add(list(range(3, 90)), 30)
    for _ in range(6):
        flow.step()
    [work] = flow.device.queue
    delta, sampling = pickle.loads(pickle.dumps((work["delta"], work["sampling_inputs"])))
    assert (type(delta), type(sampling)) == (steady.SameRows, steady.KeptSampling)
    assert delta.block_offsets is None
    assert delta.indice_cpu.tolist() == [0]
    assert sampling.to_device("cpu") is sampling.to_device("cpu")
    assert [plain(getattr(sampling, name)) for name in LISTED] == [
        plain(getattr(work["sampling_inputs"], name)) for name in LISTED
    ]


@settings(max_examples=60, deadline=None)
@given(moves=MOVES, blocks=st.sampled_from([14, 40, 200]), prefill=st.sampled_from([128, 1024]), caching=st.booleans())
def test_every_forward_of_a_schedule_gets_the_same(moves: list[Any], blocks: int, prefill: int, caching: bool) -> None:
    both(moves, blocks=blocks, prefill_tokens=prefill, caching=caching)
