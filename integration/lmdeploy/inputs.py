"""Patches of the input maker and the model agent: a forward's plan becomes ids and an export list on the device."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from ...cute_kernels.checkpoints import Checkpoints
from .. import envs
from . import ids, replay, steady

if TYPE_CHECKING:
    CacheInputs: Any = object
else:
    from lmdeploy.pytorch.engine.cache_inputs import CacheCheckpointInputs as CacheInputs


@dataclass(frozen=True)
class CompactCacheInputs(CacheInputs):  # type: ignore[misc]
    """One forward's KV block copies, the states that it keeps on the way, and the drafts to commit before it.

    `commits [5, n]` int32: see `CompactStateCacheEngine.commit`.
    """

    exports: Checkpoints | None = None
    commits: torch.Tensor | None = None

    @torch.inference_mode()
    def to_device(self, device: str, non_blocking: bool = False) -> CompactCacheInputs:
        """Move the copy plans, the export list and the commits."""

        def moved(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=non_blocking)

        exports = self.exports
        if exports is not None:
            columns = (exports.cu, exports.ends, exports.slots)
            exports = Checkpoints(*(tensor.to(device, non_blocking=non_blocking) for tensor in columns))
        return CompactCacheInputs(
            kv_restore_plan=moved(self.kv_restore_plan),
            kv_save_plan=moved(self.kv_save_plan),
            exports=exports,
            commits=moved(self.commits),
        )

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """The forward's stream uses these tensors."""
        super().record_stream(stream)
        exports = self.exports
        columns = () if exports is None else (exports.cu, exports.ends, exports.slots)
        for tensor in (*columns, self.commits):
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(stream)


class _Left:
    """In the decode batch, the place of a sequence that has left it: a stopped one, of which nothing is held."""

    seq_id = -1

    def __init__(self, status: Any) -> None:
        self.status = status
        self.state = self

    def evict(self) -> None:
        """There is nothing to give back."""


def leave_decode_batch(maker: Any, running: Any) -> None:
    """A sequence prefilled in chunks has no place in the decode batch yet; one that its turn before left there is dropped.

    lmdeploy 0.18.0 drops the places of stopped sequences at the next prefill or decode. A turn in chunks does not, and makes the
    sequence run again: its old place would decode between its chunks, and twice behind them.
    """
    from lmdeploy.pytorch.messages import MessageStatus

    maker.running_seqs = [
        _Left(MessageStatus.STOPPED) if any(seq is other for other in running) else seq for seq in maker.running_seqs
    ]


def patch_engine_inputs_maker(module: ModuleType) -> None:
    """Plan each forward where its inputs are made."""
    maker, task = module.InputsMakerAsync, module._ForwardInputsTask

    def prepare(self: Any, messages: Any, save_steps: tuple[int, ...] | None = None) -> CompactCacheInputs | None:
        ends = [seq.num_valid_ids for seq in messages] if save_steps is None else list(save_steps)
        plan = self.state_checkpoints.plan_prefill(messages, ends)
        self._compact_ids = ids.id_rows(plan.reads, plan.writes, plan.log_rows)
        restores = self._make_kv_prefix_cache_copy_plan(plan.kv_restores) if plan.kv_restores else None
        saves = self._make_kv_prefix_cache_copy_plan(plan.kv_saves) if plan.kv_saves else None
        exports = Checkpoints.from_lists(plan.exports) if any(plan.exports) else None
        commits = torch.tensor(plan.commits, dtype=torch.int32).t().contiguous() if plan.commits else None
        if restores is None and saves is None and exports is None and commits is None:
            return None
        return CompactCacheInputs(kv_restore_plan=restores, kv_save_plan=saves, exports=exports, commits=commits)

    maker._prepare_prefill_cache_inputs = prepare

    def with_ids(name: str) -> None:
        build = getattr(task, name)

        @functools.wraps(build)
        def build_with_ids(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = build(self, *args, **kwargs)
            result[0].state_offsets = self.maker._compact_ids
            return result

        setattr(task, name, build_with_ids)

    with_ids("_build_prefill_inputs")
    with_ids("_build_chunk_inputs")
    chunk = task._build_chunk_inputs

    @functools.wraps(chunk)
    def chunk_alone(self: Any, running: Any, *args: Any, **kwargs: Any) -> Any:
        leave_decode_batch(self.maker, running)
        return chunk(self, running, *args, **kwargs)

    task._build_chunk_inputs = chunk_alone

    decode = task._try_decode

    @functools.wraps(decode)
    def decode_with_ids(self: Any) -> None:
        decode(self)
        result = self.result
        if result.delta is None or not result.running:
            return
        moved = self.maker.state_checkpoints.plan_decode(result.running)
        if moved is not None:
            result.delta = ids.CompactInputsDelta.of(result.delta, ids.id_rows(*moved))

    task._try_decode = decode_with_ids
    if envs.short_steps():
        steady.patch_inputs_maker(module)


def patch_engine_model_agent_agent(module: ModuleType) -> None:
    """The operators find a forward's export list and the draft logs in its step context."""
    restore = module._restore_cache_checkpoint

    @functools.wraps(restore)
    def restore_and_bind(inputs: Any, cache_inputs: Any, cache_engine: Any, state_cache_engine: Any) -> None:
        from lmdeploy.pytorch.model_inputs import get_step_ctx_manager

        restore(inputs, cache_inputs, cache_engine, state_cache_engine)
        context = get_step_ctx_manager().current_context()
        context.compact_logs = state_cache_engine.draft_logs
        # Dummy forwards and decode steps have no cache inputs.
        context.compact_exports = getattr(cache_inputs, "exports", None)
        commits = getattr(cache_inputs, "commits", None)
        if commits is not None:
            state_cache_engine.commit(commits)

    module._restore_cache_checkpoint = restore_and_bind  # type: ignore[attr-defined]
    if envs.short_steps():
        replay.patch_agent(module)
