"""One decoded token more changes a sequence as lmdeploy's own update does."""

from __future__ import annotations

import functools
from types import SimpleNamespace
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
from lmd_flow import BatchedOutputs, MessageStatus, MultiModalData, SamplingParam, UpdateTokenMode  # noqa: E402
from lmdeploy.pytorch.messages import InputEmbeddings  # noqa: E402

from compact_state.integration.lmdeploy import tokens  # noqa: E402


def sequence(length: int, mrope: bool, media: str) -> Any:
    """A sequence of text, or of text with an image or with embeddings in it."""
    with mock.patch.object(lmd_flow, "SequenceMeta", functools.partial(lmd_flow.SequenceMeta, use_mrope=mrope)):
        session = lmd_flow.Flow().scheduler.add_session(1)
    images, embeddings = None, None
    if media == "image":
        positions = np.arange(12, dtype=np.int64)[:, None].repeat(3, axis=1)
        images = {"image": [MultiModalData(torch.zeros(1), 0, 12, content_hash="a", mrope_pos_ids=positions)]}
    elif media == "embeddings":
        embeddings = [InputEmbeddings(np.zeros((2, 8)), 1, 3)]
    ids = [3 + i % 40 for i in range(length)]
    return session.add_sequence(ids, sampling_param=SamplingParam(), multimodals=images, input_embeddings=embeddings)


def known(seq: Any) -> dict[str, Any]:
    """All that a sequence says of itself but for its place in the engine."""
    real = {"history_cache", "history_mrope_pos_ids"}
    values = {name: getattr(seq, name).get_real().tolist() for name in real}
    names = (
        "_num_history_images _num_images _num_history_ids _num_token_ids num_new_tokens input_start_pos input_end_pos"
    )
    names += " output_start_pos model_meta cached_tokens num_all_ids num_valid_ids num_ignored_history"
    values |= {name: getattr(seq, name) for name in names.split()}
    return values | {name: getattr(seq, name).tolist() for name in ("generated_ids", "token_ids", "mrope_pos_ids")}


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(12, 700),
    mrope=st.booleans(),
    media=st.sampled_from(["", "image", "embeddings"]),
    answer=st.lists(st.integers(0, 99), min_size=1, max_size=140),
)
def test_a_sequence_becomes_what_lmdeploy_makes_of_it(length: int, mrope: bool, media: str, answer: list[int]) -> None:
    mine, theirs = sequence(length, mrope, media), sequence(length, mrope, media)
    assert known(mine) == known(theirs)
    for token in answer:
        tokens.one_more(mine, token)
        theirs.update_token_ids(np.int64(token), model_meta=None, mode=UpdateTokenMode.DECODE, routed_experts=None)
        assert known(mine) == known(theirs)


def outputs(**more: Any) -> BatchedOutputs:
    return BatchedOutputs(next_token_ids=torch.tensor([5, 6]), stopped=torch.tensor([False, True]), **more)


def test_only_running_sequences_get_their_tokens_and_stopped_ones_end() -> None:
    flow = lmd_flow.Flow()
    seqs = [flow.add([3, 4], 9), flow.add([3, 4, 5], 9), flow.add([7], 9)]
    while any(seq.status != MessageStatus.RUNNING for seq in seqs):
        flow.step()
    strategy, delta = flow.loop.seq_strategy, SimpleNamespace(is_decoding=True)
    before = [seq.num_new_tokens for seq in seqs]
    strategy.update_running(seqs[:2], outputs(), None, delta)
    assert [int(seq.generated_ids[-1]) for seq in seqs[:2]] == [5, 6]
    assert [seq.status for seq in seqs] == [MessageStatus.RUNNING, MessageStatus.STOPPED, MessageStatus.RUNNING]
    strategy.update_running(seqs[:2], outputs(), None, delta)
    assert [seq.num_new_tokens - old for seq, old in zip(seqs, before)] == [2, 1, 0]


@pytest.mark.parametrize("more", [{"model_metas": [{"a": 1}, None]}, {"all_routed_experts": torch.zeros(2, 1, 1)}])
def test_what_brings_more_than_tokens_is_left_to_lmdeploy(more: dict[str, Any]) -> None:
    flow = lmd_flow.Flow()
    seqs = [flow.add([3, 4], 9), flow.add([3, 4, 5], 9)]
    while any(seq.status != MessageStatus.RUNNING for seq in seqs):
        flow.step()
    delta = SimpleNamespace(is_decoding=True, seq_length=torch.ones(2, dtype=torch.long))
    with mock.patch.object(tokens, "one_more") as one_more:
        flow.loop.seq_strategy.update_running(seqs, outputs(**more), None, delta)
    assert not one_more.called
    assert [int(seq.generated_ids[-1]) for seq in seqs] == [5, 6]
