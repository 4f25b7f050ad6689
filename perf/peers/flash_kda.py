"""FlashKDA: KDA prefill of equal heads with a bounded gate, packed states, no ids."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable

import torch

from ..bench import Unsupported
from ..geometries import HEAD_DIM
from ..inputs import DeltaProblem
from .common import PeerCall

LEAST_BOUND = -5.0


def version() -> str:
    """Installed version; raises where the package cannot be imported."""
    module = importlib.import_module("flash_kda")
    try:
        return importlib.metadata.version("flash_kda")
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(module, "__version__", "unknown"))


def prefill(p: DeltaProblem, cu: torch.Tensor) -> dict[str, PeerCall]:
    """Everything goes in raw, as into ours."""
    if not p.is_kda:
        raise Unsupported("no GDN prefill")
    if p.lower_bound is None or p.lower_bound < LEAST_BOUND:
        raise Unsupported("no gates without a bound of -5 or above")
    if p.workload.checkpoint_every:
        raise Unsupported("no checkpoints inside a call")
    if p.geometry.hk != p.geometry.hv:
        raise Unsupported("as many value heads as key heads only")
    from flash_kda import fwd

    q, k, v, gate, b = (x.contiguous().unsqueeze(0) for x in (p.q, p.k, p.v, p.gate, p.b))
    bias, cu64, bound = p.dt_bias.view(-1, HEAD_DIM), cu.long(), p.lower_bound

    def make(read: torch.Tensor, write: torch.Tensor, out: torch.Tensor) -> Callable[[], torch.Tensor]:
        state = p.pool[read.long()].float()
        final, target = torch.empty_like(state), out.view_as(v)

        def launch() -> torch.Tensor:
            fwd(q, k, v, gate, b, HEAD_DIM**-0.5, target, p.A_log, bias, bound, state, final, cu64)
            return out

        return launch

    return {"flashkda": PeerCall(make, in_place=True, states=False)}
