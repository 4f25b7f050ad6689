"""Readable torch references of every operator: the CPU backend, and in float64 the oracle of the tests."""

from .conv1d import (
    causal_conv1d_commit,
    causal_conv1d_decode,
    causal_conv1d_prefill,
    causal_conv1d_verify,
    live_window,
)
from .gdn import gdn_commit, gdn_decode, gdn_prefill, gdn_prefill_chunked, gdn_verify
from .kda import kda_commit, kda_decode, kda_prefill, kda_prefill_chunked, kda_verify
from .layer import gdn_layer_decode, kda_layer_decode
from .state_ids import advance_state_ids

__all__ = [
    "advance_state_ids",
    "causal_conv1d_commit",
    "causal_conv1d_decode",
    "causal_conv1d_prefill",
    "causal_conv1d_verify",
    "gdn_commit",
    "gdn_decode",
    "gdn_layer_decode",
    "gdn_prefill",
    "gdn_prefill_chunked",
    "gdn_verify",
    "kda_commit",
    "kda_decode",
    "kda_layer_decode",
    "kda_prefill",
    "kda_prefill_chunked",
    "kda_verify",
    "live_window",
]
