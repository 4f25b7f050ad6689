"""cuDNN frontend 1.32: KDA prefill, packed states, no ids. Its time depends on how fast the gates decay."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch

from ..bench import Unsupported
from ..inputs import DeltaProblem
from .common import PeerCall, log_decay


def version() -> str:
    """Installed version; raises where the package or its operator cannot be imported."""
    importlib.import_module("cudnn.linear_attention.ops.kda")
    try:
        return importlib.metadata.version("nvidia-cudnn-frontend")
    except importlib.metadata.PackageNotFoundError:
        return str(importlib.import_module("cudnn").__version__)


def prefill(p: DeltaProblem, cu: torch.Tensor) -> dict[str, PeerCall]:
    """Bounded gates go in raw; for the softplus gate its log decay is prepared beforehand, which favours it."""
    if not p.is_kda:
        raise Unsupported("no GDN prefill on this architecture")
    from cudnn.linear_attention.ops.kda import kimi_delta_attention as function

    q, k, v = (x.contiguous() for x in (p.q, p.k, p.v))
    beta = p.b.float().contiguous()
    options: dict[str, Any] = {
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
    }
    if p.lower_bound is None:
        gate = log_decay(p)
    else:
        gate = p.gate.contiguous()
        options |= {"safe_gate": True, "gate_lower_bound": p.lower_bound, "a_log": p.A_log, "dt_bias": p.dt_bias}
    if p.workload.checkpoint_every:
        options |= {"checkpoint_every_n_tokens": p.workload.checkpoint_every, "checkpoint_dtype": torch.float32}
    cu64 = cu.long()

    def make(read: torch.Tensor, write: torch.Tensor, out: torch.Tensor) -> Callable[[], torch.Tensor]:
        state = p.pool[read.long()].float()
        return lambda: function(q, k, v, gate, beta, cu64, initial_state=state, **options)[0]

    return {"cudnn": PeerCall(make, in_place=True, states=False)}
