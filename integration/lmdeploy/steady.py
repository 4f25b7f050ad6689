"""A decode step of the very sequences of the step before: what it would make again and send again stays where it is.

Which rows there are, how they are sampled and, but for every 64th token, their block tables are as they were; what moves on
does so on the device.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    InputsDelta: Any = object
    Sampling: Any = object
else:
    from lmdeploy.pytorch.engine.logits_process import SamplingInputs as Sampling
    from lmdeploy.pytorch.model_inputs import ModelInputsDelta as InputsDelta


@dataclass
class SameRows(InputsDelta):  # type: ignore[misc]
    """The delta of such a step. Nothing travels but block tables that changed; `block_offsets` None: none did."""

    @property
    def seq_length(self) -> torch.Tensor:
        """Tokens of each row in this step."""
        return torch.full((len(self.indice_cpu),), self.max_q_seqlen, dtype=torch.long)

    @torch.inference_mode()
    def to_device(self, device: str, non_blocking: bool = False) -> SameRows:
        """Move the block tables."""
        self.fill_tensors()
        tables = self.block_offsets
        moved = {} if tables is None else {"block_offsets": tables.to(device, non_blocking=non_blocking)}
        return replace(self, **moved)


class KeptSampling(Sampling):  # type: ignore[misc]
    """Sampling inputs that serve for every step of the same sequences, on the device once they have been moved."""

    _moved: KeptSampling | None = None
    _recorded = False

    @classmethod
    def of(cls, sampling: Any) -> KeptSampling:
        """The same inputs."""
        return cls(**{field.name: getattr(sampling, field.name) for field in fields(sampling)})

    def to_device(self, device: str, non_blocking: bool = False) -> KeptSampling:
        """Move the tensors the first time."""
        if self._moved is None:
            self._moved = KeptSampling.of(super().to_device(device, non_blocking))
        return self._moved

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """The forward's stream uses the tensors."""
        if not self._recorded:
            super().record_stream(stream)
            self._recorded = True


def serves_again(sampling: Any, seqs: Any) -> bool:
    """Whether sampling inputs made anew for the next step of the same sequences say the same.

    What moves on by itself, offsets and the tokens left before an end is allowed, is kept on the device. All ids are gathered for
    logits processors, generated ones for penalties: what reads them asks anew.
    """
    return bool(
        sampling.max_top_k == 1
        and not any(sampling.response_formats)
        and sampling.all_ids is None
        and sampling.generated_ids_cpu is None
        and not sampling.session_to_cleanup
        and all(s.sampling_param.ignore_eos or s.num_new_tokens >= s.sampling_param.min_new_tokens for s in seqs)
    )


@dataclass
class _Last:
    """The decode step before: its sequences, their block tables, its sampling inputs if they serve again."""

    running: list[Any]
    tables: torch.Tensor
    sampling: KeptSampling | None = None


def _are(seqs: Any, others: Any) -> bool:
    return len(seqs) == len(others) and all(seq is other for seq, other in zip(seqs, others))


def patch_inputs_maker(module: ModuleType) -> None:
    """Send what changed since the forward before, if that was a decode step of the same sequences."""
    task = module._ForwardInputsTask
    decode = task._try_decode

    @functools.wraps(decode)
    def decode_again(self: Any) -> None:
        decode(self)
        maker, running, delta = self.maker, self.result.running, self.result.delta
        strategy = maker.sampling_strategy
        last, strategy.compact_last = getattr(strategy, "compact_last", None), None
        if type(delta) is not InputsDelta or maker.spec_decoding or maker.config.window_size > 0:
            return
        tables = delta.block_offsets
        if last is None or maker._last_forward_kind != "decode" or not _are(last.running, running):
            strategy.compact_last = _Last(running, tables)
            return
        strategy.compact_last = _Last(running, tables, last.sampling)
        values = {field.name: getattr(delta, field.name) for field in fields(delta)}
        values["num_ignored_history"] = None
        if torch.equal(tables, last.tables):
            values["block_offsets"] = None
        self.result.delta = SameRows(**values)

    task._try_decode = decode_again


def patch_strategies_ar_sampling(module: ModuleType) -> None:
    """Sampling inputs of a decode step that serve again."""
    strategy = module.ARSamplingStrategy
    make = strategy.make_sampling_inputs

    @functools.wraps(make)
    def make_unless_kept(self: Any, seqs: Any) -> Any:
        last = getattr(self, "compact_last", None)
        if last is None or last.running is not seqs:
            return make(self, seqs)
        if last.sampling is None or self.session_to_cleanup:
            made = make(self, seqs)
            last.sampling = KeptSampling.of(made) if serves_again(made, seqs) else None
            return made
        # lmdeploy's draw for a batch: whoever seeds numpy gets the same seeds for requests that are sampled later.
        np.random.randint(0xFFFFFFFF)
        return last.sampling

    strategy.make_sampling_inputs = make_unless_kept


def patch_step_inputs(module: ModuleType) -> None:
    """Rows that stay need no indexing."""
    steps = module.ARStepInputs
    reindex = steps.reindex

    @functools.wraps(reindex)
    def reindex_unless_same(self: Any, delta: Any) -> None:
        inputs = self.model_inputs
        if type(delta) is not SameRows or inputs.dp_meta is not None or len(delta.indice_cpu) != len(inputs.seq_length):
            reindex(self, delta)
            return
        if delta.block_offsets is not None:
            inputs.block_offsets = delta.block_offsets
        inputs.max_q_seqlen = delta.max_q_seqlen
        inputs.max_kv_seqlen = delta.max_kv_seqlen
        inputs.sum_kv_seqlen = delta.sum_kv_seqlen

    steps.reindex = reindex_unless_same
