"""`lmd_flow` with drafts: a device whose slots stand one verify step behind, and whose draft logs hold the rest.

Verification is lmdeploy's own (its portable greedy rejection), and so are step inputs, stopping and sequences; what is made
up are the proposals: each draft is right with a probability that the test sets.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from lmd_flow import VOCABULARY, Device, Flow, next_token
from lmdeploy.pytorch.backends.default.rejection_sampling import torch_greedy_rejection_sample
from lmdeploy.pytorch.strategies.ar_spec.model_agent import ARSpecExtraOutputs


class DraftDevice(Device):
    """Records with draft logs: `logs[row][half]` = tokens of a verify step."""

    width = 5

    def __init__(self, num_slots: int, factory: Any) -> None:
        super().__init__(num_slots, factory)
        self.drafts = factory.specdecode_config.num_speculative_tokens
        self.logs: dict[int, list[tuple[int, ...] | None]] = {}
        self.chance = 0.5
        self.draw = random.Random(0)
        self.accepted: list[int] = []
        self.commits = 0
        self.proposed: torch.Tensor | None = None

    def lose_memory(self) -> None:
        super().lose_memory()
        self.logs.clear()

    def _forward(self, inputs: Any, cache_inputs: Any) -> torch.Tensor:
        commits = getattr(cache_inputs, "commits", None)
        for slot, held, count, row, half in [] if commits is None else commits.t().tolist():
            tokens, logged = self.slots[slot], self.logs[row][half]
            assert tokens is not None, "a commit into garbage"
            assert logged is not None, "a commit of nothing"
            assert (len(tokens), 0 < count <= len(logged)) == (held, True)
            self.slots[slot] = tokens + logged[:count]
            self.commits += 1
        return super()._forward(inputs, cache_inputs)

    def _history(self, ids: list[int], held: tuple[int, ...]) -> tuple[int, ...]:
        _, _, accepted, row, half = ids
        if not accepted:
            return held
        logged = self.logs[row][half]
        assert logged is not None, "the log was not written"
        assert accepted <= len(logged)
        return held + logged[:accepted]

    def _kept(self, inputs: Any, ids: list[int], before: tuple[int, ...], piece: tuple[int, ...]) -> tuple[int, ...]:
        if not inputs.is_decoding:
            return before + piece
        _, _, _, row, half = ids
        assert len(piece) == 1 + self.drafts
        self.logs.setdefault(row, [None, None])[half ^ 1] = piece
        self.logs[row][half] = None  # what was read is of no use any more
        return before

    def _answers(self, inputs: Any, contexts: list[tuple[int, ...]]) -> torch.Tensor:
        if not inputs.is_decoding:
            self.contexts = contexts
            return super()._answers(inputs, contexts)
        rows = [ids[3] for ids in inputs.state_offsets.tolist()]
        assert len(set(rows)) == len(rows), "two requests share a log"
        width = 1 + self.drafts
        self.contexts = contexts
        ends = [[context[: len(context) - self.drafts + i] for i in range(width)] for context in contexts]
        return torch.tensor([[next_token(end, self.epoch) for end in row] for row in ends])

    def _proposals(self, contexts: list[tuple[int, ...]]) -> torch.Tensor:
        """Drafts after each context: right with probability `chance`, in which case the next may be right too."""
        rows = []
        for start in contexts:
            context, drafts = start, []
            for _ in range(self.drafts):
                right = next_token(context, self.epoch)
                drafts.append(right if self.draw.random() < self.chance else (right - 1) % VOCABULARY + 2)
                context = (*context, drafts[-1])
            rows.append(drafts)
        return torch.tensor(rows)

    def _sampled(self, inputs: Any, extra: Any, answers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any, Any]:
        if inputs.is_decoding:
            shown, rejected, last = torch_greedy_rejection_sample(answers, extra.output_draft_token_ids)
            taken = (1 + self.drafts - rejected).tolist()
            self.accepted += taken
            known = [context[: len(context) - int(r)] for context, r in zip(self.contexts, rejected)]
        else:
            last, shown, rejected = answers, answers[:, None], torch.zeros_like(answers)
            known = self.contexts
        drafts = self._proposals([(*context, int(token)) for context, token in zip(known, last)])
        extra = extra.clone(
            next_token_ids=last, num_rejected_tokens=rejected, output_token_ids=shown, output_draft_token_ids=drafts
        )
        return last, shown, extra, ARSpecExtraOutputs(draft_token_ids=drafts)


def draft_flow(drafts: int, *, chance: float = 0.5, seed: int = 0, **kwargs: Any) -> Flow:
    """A Flow with `drafts` drafts a step, each right with probability `chance`."""
    flow = Flow(drafts=drafts, device=kwargs.pop("device", DraftDevice), **kwargs)
    flow.device.chance, flow.device.draw = chance, random.Random(seed)
    return flow
