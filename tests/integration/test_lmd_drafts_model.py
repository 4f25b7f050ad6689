"""The tiny Qwen3.5 with drafts: lmdeploy's host and model code on a CPU, states one wide, reference operators."""

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
from lmd_drafts import DraftDevice  # noqa: E402
from lmd_flow import Flow  # noqa: E402

DRAFTS, NEW = 3, 16
TIE = 0.3  # logits: what two bf16 evaluations may differ by, and products of 1 and of 4 rows are two where the CPU says so


class DraftModelDevice(DraftDevice, lmd_model.ModelDevice):
    """Verify steps on the model. Drafts come from known texts, each right with probability `chance`."""

    records = False
    texts: tuple[list[int], ...] = ()

    def load(self, checkpoint: Path, cache_config: Any) -> None:
        super().load(checkpoint, cache_config)
        for log in self.states.draft_logs.values():
            for tensor in (log.k, log.u, log.g, log.x):
                tensor.fill_(float("nan"))
        self.rows: list[torch.Tensor] = []

    def _forward(self, inputs: Any, cache_inputs: Any) -> torch.Tensor:
        if not inputs.is_decoding:
            answers = lmd_model.ModelDevice._forward(self, inputs, cache_inputs)
            logits = self.logits[:, None]
        else:
            logits = self.model.get_logits(self._hidden(inputs, cache_inputs)[None])[0].float()
            logits = logits.unflatten(0, (-1, 1 + self.drafts))
            answers = logits.argmax(-1)
            self.forwards.append({"ids": inputs.state_offsets.tolist(), "lengths": inputs.seq_length.tolist()})
        if getattr(cache_inputs, "commits", None) is not None:
            self.commits += 1
        self.step = logits
        pieces = torch.split(inputs.input_ids[0], inputs.seq_length.tolist())
        starts = inputs.history_lengths.tolist()
        self.contexts = [(*[-1] * start, *piece.tolist()) for start, piece in zip(starts, pieces)]
        return answers

    def _sampled(self, inputs: Any, extra: Any, answers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any, Any]:
        result = super()._sampled(inputs, extra, answers)
        taken = (result[1] > -1).sum(1).tolist()
        self.rows += [row[:count] for row, count in zip(self.step, taken)]
        return result

    def _proposals(self, contexts: list[tuple[int, ...]]) -> torch.Tensor:
        rows = []
        for context in contexts:
            end = len(context)
            fits = [t for t in self.texts if t[end - 2 : end] == list(context[-2:]) or t[:end] == list(context)]
            known = ((fits or [[]])[0][end : end + self.drafts] + [3] * self.drafts)[: self.drafts]
            rows.append([t if self.draw.random() < self.chance else t % 250 + 4 for t in known])
        return torch.tensor(rows)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lmd_tiny.write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def engine() -> Iterator[None]:
    with lmd_model.cpu_engine():
        yield


@pytest.fixture(autouse=True)
def _alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMDEPLOY_COMPACT_PREFILL_SAVE_ALIGNMENT", "64")


def flow_of(checkpoint: Path, drafts: int, **kwargs: Any) -> Flow:
    device = DraftModelDevice if drafts else lmd_model.ModelDevice
    return lmd_model.model_flow(checkpoint, device, drafts=drafts, blocks=64, prefill_tokens=1024, **kwargs)


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 260, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def served(flow: Flow, prompts: list[list[int]], new: int = NEW) -> list[list[int]]:
    seqs = [flow.add(tokens, new) for tokens in prompts]
    flow.run()
    answers = [[int(token) for token in seq.generated_ids] for seq in seqs]
    for seq in seqs:
        flow.end(seq)
    flow.run()
    return answers


@pytest.fixture(scope="module")
def judge(checkpoint: Path) -> Any:
    """An independent implementation of the model."""
    from transformers import Qwen3_5ForConditionalGeneration

    return Qwen3_5ForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.bfloat16)


def part_at_ties_only(judge: Any, asked: list[int], answer: list[int], wanted: list[int]) -> bool:
    """Whether two answers are equal, or part where the model itself is undecided between the two tokens."""
    for i, pair in enumerate(zip(answer, wanted, strict=True)):
        if pair[0] != pair[1]:
            with torch.no_grad():
                logits = judge(torch.tensor([asked + wanted[:i]])).logits[0, -1].float()
            return bool(logits.max() - logits[list(pair)].min() < TIE)
    return True


@pytest.mark.parametrize("caching", [False, True])
def test_greedy_ids_with_drafts_equal_those_without(checkpoint: Path, engine: None, judge: Any, caching: bool) -> None:
    prompts = [prompt(1, 1), prompt(90, 2), prompt(130, 3), prompt(90, 2) + prompt(7, 4)]
    plain = served(flow_of(checkpoint, 0, caching=caching), prompts)
    texts = tuple(p + a for p, a in zip(prompts, plain))
    for chance in (0.0, 0.6, 1.0):
        flow = flow_of(checkpoint, DRAFTS, caching=caching)
        flow.device.texts, flow.device.chance = texts, chance
        for _ in range(2):
            # Once more: with caching on, from checkpoints.
            answers = served(flow, prompts)
            assert all(part_at_ties_only(judge, *row) for row in zip(prompts, answers, plain))
            assert sum(answer == wanted for answer, wanted in zip(answers, plain)) >= len(plain) - 1
        assert (flow.ledger.counters.hits > 0) == caching
        wanted = {0.0: {1}, 0.6: {1, 2, 3, 4}, 1.0: {4}}[chance]
        assert wanted <= set(flow.device.accepted)


def test_logits_of_accepted_tokens_are_those_of_transformers(checkpoint: Path, engine: None, judge: Any) -> None:
    """Every accepted position against an independent implementation."""
    tokens = prompt(90, 7)
    [known] = served(flow_of(checkpoint, 0), [tokens])
    flow = flow_of(checkpoint, DRAFTS)
    flow.device.texts, flow.device.chance = (tokens + known,), 0.6
    [answer] = served(flow, [tokens])
    with torch.no_grad():
        want = judge(torch.tensor([tokens + answer])).logits[0, len(tokens) - 1 : -1].float()
    ours = torch.cat(flow.device.rows)[:NEW]
    assert len(flow.device.accepted) < NEW
    assert (ours - want).abs().max() < TIE


def test_the_next_turn_is_computed_from_the_slot_and_the_log(checkpoint: Path, engine: None) -> None:
    first, other, turn = prompt(70, 1), prompt(9, 5), prompt(20, 6)
    plain = flow_of(checkpoint, 0, caching=False)
    [known] = served(plain, [first])
    [wanted] = served(plain, [first + known + turn], 6)
    flow = flow_of(checkpoint, DRAFTS, caching=False)
    flow.device.texts, flow.device.chance = (first + known,), 1.0
    # 1 + 4 + 4 + 4 + 3 of 4: the stop is inside the accepted tokens, and a prefill follows instead of another step.
    seq = flow.add(first, NEW)
    while seq.num_new_tokens < NEW - 3:
        flow.step()
    flow.add(other, 1)
    flow.run()
    assert [int(token) for token in seq.generated_ids] == known
    flow.go_on(seq, turn, 6)
    count = len(flow.device.forwards)
    flow.run()
    assert flow.device.commits == 1
    assert flow.device.forwards[count]["lengths"] == [21]
    assert [int(token) for token in seq.generated_ids] == wanted
