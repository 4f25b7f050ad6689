"""Launch prefill: rows of at most `SHORT_TOKENS` tokens go token by token, the others in chunks.

Both kernels read the lengths on the device and leave the other's rows alone, so what a row computes depends on its own length
and never on its batch. A chunk costs the same however few of its 64 tokens there are; a token step costs what decode does.
"""

from __future__ import annotations

import functools

import torch

from . import gdn_launch, kda_launch, verify_launch
from .checkpoints import Checkpoints
from .configs.recurrent import Kind

SHORT_TOKENS = 16


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
    arguments = (q, k, v, gate, b, A_log, dt_bias, state, read_ids, write_ids, cu_seqlens, out)
    options = {"checkpoints": checkpoints, "scale": scale, "qk_l2norm": qk_l2norm}
    short = functools.partial(
        verify_launch.launch_recurrent_prefill,
        kind,
        *arguments,
        **options,
        lower_bound=lower_bound,
        max_tokens=SHORT_TOKENS,
    )
    if q.shape[0] <= SHORT_TOKENS:
        short()
        return
    # Short rows behind the others and beside them: their blocks take what multiprocessors long chains leave idle.
    if kind == "gdn":
        gdn_launch.launch_chunked(*arguments, **options, min_tokens=SHORT_TOKENS + 1)
    else:
        kda_launch.launch_chunked(*arguments, **options, lower_bound=lower_bound, min_tokens=SHORT_TOKENS + 1)
    short(overlaps=True)
