"""What every adapter shares: the shape of a peer's call and contiguous copies of packed inputs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..geometries import HEAD_DIM
from ..inputs import DeltaProblem


def without_fla_models() -> None:
    """Keep FLA from importing its layers and models, and with them transformers: kernels need neither, and it takes seconds.

    FLA takes them as not installed.
    """
    if "fla" not in sys.modules:
        sys.modules |= {"fla.layers": None, "fla.models": None}  # type: ignore[dict-item]


@dataclass
class PeerCall:
    """A peer's call of one case.

    make: `(read_ids, write_ids, out)` to a launch that returns its output `[tokens, HV, V]`. in_place: it can only write
    the slot it read. states: the launch leaves its final states in the pool (else only outputs are checked). load: called
    before the first launch made is checked, where the peer keeps its states elsewhere: copies them from the pool.
    """

    make: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Callable[[], torch.Tensor]]
    in_place: bool
    states: bool = True
    load: Callable[[], None] | None = None
    keep: Any = None


@functools.lru_cache(maxsize=1)
def as_int64(cu: torch.Tensor) -> torch.Tensor:
    """`cu` in int64, one tensor for all input sets of a case and for every peer that runs FLA's kernels.

    FLA remembers what it derives from the last few tensors of lengths, by identity. More of them than it remembers make it derive
    inside a graph capture, which fails and leaves results that were never computed.
    """
    return cu.long()


def log_decay(p: DeltaProblem) -> torch.Tensor:
    """fp32 natural log of the decay, GDN `[tokens, HV]`, KDA `[tokens, HV, K]`."""
    raw = p.gate.float()
    if not p.is_kda:
        return -p.A_log.exp() * torch.nn.functional.softplus(raw + p.dt_bias)
    rate = p.A_log.exp()[:, None]
    shifted = raw + p.dt_bias.view(-1, HEAD_DIM)
    if p.lower_bound is None:
        return -rate * torch.nn.functional.softplus(shifted)
    return p.lower_bound * torch.sigmoid(rate * shifted)


def normalized(x: torch.Tensor) -> torch.Tensor:
    """l2-normalised over the last dimension, contiguous, in x's dtype."""
    y = x.float()
    return (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype).contiguous()
