"""Launch prefill: GDN in chunks, KDA token by token."""

from __future__ import annotations

import torch

from . import gdn_launch, verify_launch
from .checkpoints import Checkpoints
from .configs.recurrent import Kind


def launch_prefill(
    kind: Kind,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    read_ids: torch.Tensor,
    write_ids: torch.Tensor,
    cu_seqlens: torch.Tensor,
    out: torch.Tensor,
    *,
    checkpoints: Checkpoints | None,
    scale: float | None,
    qk_l2norm: bool,
    lower_bound: float | None,
) -> None:
    """Run packed sequences on the current stream; the arguments are checked."""
    if read_ids.shape[0] == 0:
        return
    if kind == "gdn":
        gdn_launch.launch_chunked(
            q,
            k,
            v,
            gate,
            b,
            A_log,
            dt_bias,
            state,
            read_ids,
            write_ids,
            cu_seqlens,
            out,
            checkpoints=checkpoints,
            scale=scale,
            qk_l2norm=qk_l2norm,
        )
        return
    verify_launch.launch_recurrent_prefill(
        kind,
        q,
        k,
        v,
        gate,
        b,
        A_log,
        dt_bias,
        state,
        read_ids,
        write_ids,
        cu_seqlens,
        out,
        checkpoints=checkpoints,
        scale=scale,
        qk_l2norm=qk_l2norm,
        lower_bound=lower_bound,
    )
