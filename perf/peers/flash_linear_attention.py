"""FLA 0.6.0 (Triton): GDN and KDA chunkwise prefill, states gathered and returned packed, no ids."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch

from ..bench import Unsupported
from ..inputs import DeltaProblem
from .common import PeerCall


def version() -> str:
    """Installed version; raises where the package cannot be imported."""
    package = importlib.import_module("fla")
    importlib.import_module("fla.ops.gated_delta_rule")
    return str(package.__version__)


def prefill(p: DeltaProblem, cu: torch.Tensor) -> dict[str, PeerCall]:
    """Raw gates, beta logits and un-normalised q and k in, one packed state a sequence in and out."""
    if p.workload.checkpoint_every:
        raise Unsupported("no checkpoints inside a call")
    if p.is_kda:
        from fla.ops.kda import chunk_kda as function
    else:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as function
    q, k, v, g, b = (x.contiguous().unsqueeze(0) for x in (p.q, p.k, p.v, p.gate, p.b))
    cu64 = cu.long()
    beta = torch.sigmoid(b.float())
    options = {
        "output_final_state": True,
        "cu_seqlens": cu64,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "A_log": p.A_log,
        "dt_bias": p.dt_bias,
        "state_v_first": True,
    }
    if p.is_kda and p.lower_bound is not None:
        options |= {"safe_gate": True, "lower_bound": p.lower_bound}

    def make(read: torch.Tensor, write: torch.Tensor, out: torch.Tensor) -> Callable[[], torch.Tensor]:
        state = p.pool[read.long()].float()

        def launch() -> torch.Tensor:
            with torch.no_grad():
                return function(q, k, v, g, beta, initial_state=state, **options)[0][0]

        return launch

    return {"fla": PeerCall(make, in_place=True, states=False)}
