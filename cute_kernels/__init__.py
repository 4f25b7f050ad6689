"""Recurrent-state operators addressed by device-side slot ids.

Every operator takes torch tensors, runs on the current stream of their device, and follows one id rule: an id outside
`[0, num_slots)` means none. Importing this package imports neither the compiler nor CUDA.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoints import Checkpoints as Checkpoints
    from .conv1d import causal_conv1d_commit as causal_conv1d_commit
    from .conv1d import causal_conv1d_decode as causal_conv1d_decode
    from .conv1d import causal_conv1d_prefill as causal_conv1d_prefill
    from .conv1d import causal_conv1d_verify as causal_conv1d_verify
    from .draft_log import DraftLog as DraftLog
    from .gated_norm import gated_rms_norm as gated_rms_norm
    from .gdn import gdn_commit as gdn_commit
    from .gdn import gdn_decode as gdn_decode
    from .gdn import gdn_prefill as gdn_prefill
    from .gdn import gdn_verify as gdn_verify
    from .kda import kda_commit as kda_commit
    from .kda import kda_decode as kda_decode
    from .kda import kda_prefill as kda_prefill
    from .kda import kda_verify as kda_verify
    from .layer import gdn_layer_decode as gdn_layer_decode
    from .layer import kda_layer_decode as kda_layer_decode
    from .state_ids import advance_state_ids as advance_state_ids

_EXPORTS = {
    "Checkpoints": "checkpoints",
    "DraftLog": "draft_log",
    "advance_state_ids": "state_ids",
    "causal_conv1d_commit": "conv1d",
    "causal_conv1d_decode": "conv1d",
    "causal_conv1d_prefill": "conv1d",
    "causal_conv1d_verify": "conv1d",
    "gated_rms_norm": "gated_norm",
    "gdn_commit": "gdn",
    "gdn_decode": "gdn",
    "gdn_layer_decode": "layer",
    "gdn_prefill": "gdn",
    "gdn_verify": "gdn",
    "kda_commit": "kda",
    "kda_decode": "kda",
    "kda_layer_decode": "layer",
    "kda_prefill": "kda",
    "kda_verify": "kda",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
