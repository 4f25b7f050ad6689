"""One token more for each sequence of a decode step: lmdeploy's update of a sequence, without what only prompts bring."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any


def _append(history: Any, value: Any) -> None:
    end = history._num_real
    if end >= len(history._data):
        history.reserve(end + 1)
    history._data[end] = value
    history._num_real = end + 1


def one_more(seq: Any, token: int) -> None:
    """What `update_token_ids` of one decoded token does to a sequence of text or of text after images."""
    seq._num_history_images += seq._num_images
    seq._num_images = 0
    seq._num_history_ids += seq._num_token_ids
    seq._num_token_ids = 1
    seq.num_new_tokens += 1
    _append(seq.history_cache, token)
    if seq._seq_meta.use_mrope:
        positions, known = seq.history_mrope_pos_ids, seq.num_all_ids - 1
        if len(positions) == known > 0:
            _append(positions, max(positions._data[known - 1].tolist()) + 1)
        else:
            seq._update_mrope_pos_ids()


def patch_strategies_ar_sequence(module: ModuleType) -> None:
    """The update of a decode step that brings tokens and nothing else."""
    from lmdeploy.pytorch.messages import MessageStatus

    strategy = module.ARSequenceStrategy
    update = strategy.update_running

    @functools.wraps(update)
    def update_by_one(self: Any, running: Any, batched_outputs: Any, model_inputs: Any, delta: Any) -> None:
        brings = (batched_outputs.model_metas, batched_outputs.all_routed_experts)
        if model_inputs is not None or not delta.is_decoding or any(value is not None for value in brings):
            update(self, running, batched_outputs, model_inputs, delta)
            return
        tokens, stopped = batched_outputs.next_token_ids.tolist(), batched_outputs.stopped.tolist()
        for seq, token, stop in zip(running, tokens, stopped):
            if seq.status == MessageStatus.RUNNING:
                one_more(seq, token)
                if stop:
                    seq.finish()

    strategy.update_running = update_by_one
