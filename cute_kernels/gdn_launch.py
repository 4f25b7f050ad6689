"""Launch chunkwise GDN prefill."""

from __future__ import annotations

import torch

from .checkpoints import Checkpoints
from .compile.cache import jit_cache
from .configs.prefill import GdnPrefillKey

gdn_prefill = jit_cache("gdn_prefill")

STATE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def launch_chunked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
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
) -> None:
    """Run packed sequences of any lengths, zero included, on the current stream.

    The arguments are those of `gdn.gdn_prefill`, already checked, with at least one sequence. Rows of `out` beyond
    `cu_seqlens[N]` are not written.
    """
    tokens, hk, width = q.shape
    hv = v.shape[1]
    if checkpoints is None or checkpoints.ends.shape[0] == 0:
        plan, has_plan = (cu_seqlens, cu_seqlens, cu_seqlens), 0
    else:
        plan, has_plan = (checkpoints.cu, checkpoints.ends, checkpoints.slots), 1
    if tokens == 0:  # states still move between slots; the loads of a chunk without tokens need an address
        q, k, v, out = (x.new_zeros(1, *x.shape[1:]) for x in (q, k, v, out))
        a, b = (x.new_zeros(1, hv) for x in (a, b))
    run = gdn_prefill(GdnPrefillKey(STATE_NAMES[state.dtype]))
    run(
        *(_rows(x) for x in (q, k, v)), a, b, A_log, dt_bias, state.flatten(1), read_ids, write_ids, cu_seqlens, *plan,
        _rows(out), hk, hv, state.shape[0], has_plan, int(qk_l2norm), width**-0.5 if scale is None else scale,
    )  # fmt: skip


def _rows(x: torch.Tensor) -> torch.Tensor:
    """`[T, H, D]` as rows; the stride of a single row means nothing and may not be a legal one."""
    return x.flatten(1) if x.shape[0] > 1 else x.reshape(1, -1).as_strided((1, x[0].numel()), (x[0].numel(), 1))
