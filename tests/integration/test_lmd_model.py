"""The tiny Qwen3.5, served by lmdeploy's own host and model code on a CPU with the reference operators."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.lmdeploy
pytest.importorskip("lmdeploy", reason="lmdeploy is not installed")

import lmd_model  # noqa: E402  after the skip: it imports lmdeploy
import lmd_tiny  # noqa: E402
import torch  # noqa: E402
from lmd_flow import Flow  # noqa: E402

NEW = 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lmd_tiny.write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def engine() -> Iterator[None]:
    with lmd_model.cpu_engine():
        yield


@pytest.fixture
def flow(checkpoint: Path, engine: None, monkeypatch: pytest.MonkeyPatch) -> Flow:
    monkeypatch.setenv("LMDEPLOY_COMPACT_PREFILL_SAVE_ALIGNMENT", "64")
    return lmd_model.model_flow(checkpoint, blocks=64, prefill_tokens=1024)


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 260, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def ask(flow: Flow, tokens: list[int], new: int = NEW) -> tuple[list[int], int]:
    seq = flow.serve(tokens, new)
    answer, cached = [int(token) for token in seq.generated_ids], seq.cached_tokens
    flow.end(seq)
    flow.run()
    return answer, cached


def test_answers_vary_with_the_prompt_and_within_themselves(flow: Flow) -> None:
    answers = [ask(flow, prompt(40, seed))[0] for seed in range(4)]
    assert len({tuple(answer) for answer in answers}) == 4
    assert all(len(set(answer)) >= NEW // 2 for answer in answers)
    changed = prompt(40, 0)
    changed[0] += 1
    assert ask(flow, changed)[0] != answers[0]


@pytest.mark.parametrize("shape", ["tiny", "moe"])
def test_ids_and_logits_equal_transformers(shape: str, engine: None, tmp_path: Path) -> None:
    """An independent implementation of the whole model: close logits, and the same ids where no two are near-tied.

    Two bf16 evaluations of this model differ by up to 0.2 in a logit (standard deviation 4): that is a near-tie here.
    """
    checkpoint = lmd_tiny.write_checkpoint(tmp_path, shape)
    flow = lmd_model.model_flow(checkpoint, blocks=64, prefill_tokens=1024)
    model = lmd_tiny.model_class(shape).from_pretrained(checkpoint, dtype=torch.bfloat16)
    rows: list[torch.Tensor] = []
    forward = flow.device._forward

    def recorded(*args: Any) -> torch.Tensor:
        result = forward(*args)
        rows.append(flow.device.logits[0])
        return result

    flow.device._forward = recorded
    for length in (1, 90):
        tokens = prompt(length, 7)
        rows.clear()
        answer = ask(flow, tokens, 2 * NEW)[0]
        with torch.no_grad():
            want = model(torch.tensor([tokens + answer])).logits[0, length - 1 : -1].float()
        ours = torch.stack(rows[: 2 * NEW])
        assert (ours - want).abs().max() < 0.3
        best = want.topk(2).values
        clear = best[:, 0] - best[:, 1] > 0.3
        assert clear.sum() >= NEW
        assert torch.equal(want.argmax(-1)[clear], torch.tensor(answer)[clear])


def test_a_hit_answers_as_a_cold_prompt_does(flow: Flow) -> None:
    base = prompt(150, 1)
    cold = ask(flow, base)
    assert cold[1] == 0
    assert ask(flow, base) == (cold[0], 128)
    fork = base[:140] + prompt(20, 2)
    hot = ask(flow, fork)
    assert hot[1] == 128
    while flow.ledger.evict_oldest():
        pass
    assert ask(flow, fork) == (hot[0], 0)


def test_turns_that_go_on_inside_a_kv_block_answer_as_cold_prompts_do(
    checkpoint: Path, engine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMDEPLOY_COMPACT_PREFILL_SAVE_ALIGNMENT", "128")
    flow = lmd_model.model_flow(checkpoint, blocks=64, prefill_tokens=1024)
    said: list[int] = []
    found = []
    for turn, more in enumerate((195, 145, 120, 140)):
        said = said + prompt(more, 8 + turn)
        hot = ask(flow, said)
        found.append(hot[1])
        cold = ask(lmd_model.model_flow(checkpoint, blocks=64, caching=False), said)
        assert cold == (hot[0], 0)
    assert found == [0, 195, 340, 460]


def test_chunks_a_batch_and_a_short_suffix_answer_as_alone(checkpoint: Path, engine: None, flow: Flow) -> None:
    prompts = [prompt(200, 3), prompt(2, 4), prompt(1, 5), [*prompt(128, 6), 9]]
    alone = [ask(flow, tokens)[0] for tokens in prompts]
    chunked = lmd_model.model_flow(checkpoint, blocks=64, prefill_tokens=64)
    for _ in range(2):  # the second round hits, [128 cached, 1 token left] among them
        seqs = [chunked.add(tokens, NEW) for tokens in prompts]
        chunked.run()
        assert [[int(t) for t in seq.generated_ids] for seq in seqs] == alone
        cached = [seq.cached_tokens for seq in seqs]
        for seq in seqs:
            chunked.end(seq)
        chunked.run()
    assert cached == [192, 0, 0, 128]


@pytest.mark.parametrize("part", ["conv", "recurrent"])
def test_a_corrupted_state_changes_the_answer(flow: Flow, part: str) -> None:
    tokens = prompt(130, 8)
    ask(flow, tokens)
    hot = ask(flow, tokens)
    assert hot[1] == 128
    [record] = [r for r in flow.ledger.records if r.entry is not None and r.position == 128]
    view: Any = flow.device.states.named_state_caches[part]
    kept = view[record.slot].clone()
    view[record.slot] = -kept
    spoiled, cached = ask(flow, tokens)
    assert cached == 128
    assert spoiled != hot[0]
    view[record.slot] = kept
    assert ask(flow, tokens) == hot


def test_weights_are_read_where_they_stand_not_from_a_copy(flow: Flow) -> None:
    """0.18.0 keeps -exp(A_log) of the first weights after an update."""
    tokens = prompt(60, 9)
    before = ask(flow, tokens)[0]
    layers = [
        layer.linear_attn for layer in flow.device.model.model.language_model.layers if hasattr(layer, "linear_attn")
    ]
    for layer in layers:
        layer.A_log.data += 4.0
    flow.update_weights()
    assert ask(flow, tokens) != (before, 0)
    for layer in layers:
        layer.A_log.data -= 4.0
    flow.update_weights()
    assert ask(flow, tokens) == (before, 0)
