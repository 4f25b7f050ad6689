"""Kimi Delta Attention reference operators: one decay per key channel.

As ``gdn``, with the raw gate ``g [.., HV, K]`` in place of a, and ``lower_bound``: None selects the softplus gate, a
negative number L the bounded gate ``L sigmoid(exp(A_log) (g + dt_bias))``.
"""

from __future__ import annotations

import torch

from ..checkpoints import Checkpoints
from ..draft_log import DraftLog
from . import chunkwise, recurrence
from .gates import Tokens, exactly, kda_log_decay, prepare_keys, prepare_tokens
from .gdn import deliver
from .ids import LogAccess, resolve_log


def kda_tokens(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None,
    scale: float | None,
    qk_l2norm: bool,
    dtype: torch.dtype,
) -> Tokens:
    """Raw inputs to ``Tokens`` with G = K."""
    log_decay = kda_log_decay(g.to(dtype).contiguous(), A_log.to(dtype), dt_bias.to(dtype), lower_bound)
    return prepare_tokens(q, k, v, log_decay, b, scale, qk_l2norm, dtype)


@torch.no_grad()
def kda_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    read_ids: torch.Tensor,
    write_ids: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    lower_bound: float | None = None,
    checkpoints: Checkpoints | None = None,
    scale: float | None = None,
    qk_l2norm: bool = True,
    out: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """N packed sequences, token by token.

    Arguments as ``gdn.gdn_prefill``, with ``g [T, HV, K]`` the raw gate and ``dt_bias`` ``[HV * K]`` or ``[HV, K]``.
    """
    tokens = kda_tokens(q, k, v, g, b, A_log, dt_bias, lower_bound, scale, qk_l2norm, compute_dtype)
    o = recurrence.prefill(tokens, state, read_ids, write_ids, cu_seqlens, checkpoints, compute_dtype)
    return deliver(o, v.dtype, out)


@torch.no_grad()
def kda_prefill_chunked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    read_ids: torch.Tensor,
    write_ids: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    lower_bound: float | None = None,
    checkpoints: Checkpoints | None = None,
    scale: float | None = None,
    qk_l2norm: bool = True,
    out: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
    chunk: int = 64,
) -> torch.Tensor:
    """``kda_prefill`` in chunks of ``chunk`` tokens (WY form), right for any gate: no exponent is positive."""
    tokens = kda_tokens(q, k, v, g, b, A_log, dt_bias, lower_bound, scale, qk_l2norm, compute_dtype)
    o = chunkwise.prefill(tokens, state, read_ids, write_ids, cu_seqlens, checkpoints, compute_dtype, chunk)
    return deliver(o, v.dtype, out)


@torch.no_grad()
def kda_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    read_ids: torch.Tensor,
    write_ids: torch.Tensor,
    *,
    lower_bound: float | None = None,
    scale: float | None = None,
    qk_l2norm: bool = True,
    out: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """One token for each of N rows; arguments as ``kda_prefill`` with T = N. Void rows give zeros."""
    tokens = kda_tokens(q, k, v, g, b, A_log, dt_bias, lower_bound, scale, qk_l2norm, compute_dtype)
    return deliver(recurrence.decode(tokens, state, read_ids, write_ids, compute_dtype), v.dtype, out)


@torch.no_grad()
def kda_verify(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    read_ids: torch.Tensor,
    write_ids: torch.Tensor,
    cu_seqlens: torch.Tensor,
    draft_log: DraftLog,
    num_accepted: torch.Tensor,
    *,
    lower_bound: float | None = None,
    round_every_token: bool = False,
    scale: float | None = None,
    qk_l2norm: bool = True,
    out: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Commit the accepted drafts, then run and log the new ones; see ``gdn.gdn_verify``. The raw gate is logged."""
    o = verify_unrounded(
        kda_tokens(q, k, v, g, b, A_log, dt_bias, lower_bound, scale, qk_l2norm, compute_dtype), k, g, A_log, dt_bias,
        state, read_ids, write_ids, cu_seqlens, draft_log, num_accepted, lower_bound, round_every_token, qk_l2norm,
        compute_dtype,
    )  # fmt: skip
    return deliver(o, v.dtype, out)


def verify_unrounded(
    tokens: Tokens,
    k: torch.Tensor,
    g: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    read_ids: torch.Tensor,
    write_ids: torch.Tensor,
    cu_seqlens: torch.Tensor,
    draft_log: DraftLog,
    num_accepted: torch.Tensor,
    lower_bound: float | None,
    round_every_token: bool,
    qk_l2norm: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """``kda_verify`` on prepared tokens, output in the arithmetic dtype."""
    access = resolve_log(draft_log, read_ids, write_ids, num_accepted, state.shape[0])
    keys, decay = _logged(draft_log, access, A_log, dt_bias, lower_bound, state.shape[1], qk_l2norm, dtype)
    return recurrence.verify(tokens, state, access, cu_seqlens, draft_log, keys, decay, k, g, round_every_token, dtype)


@torch.no_grad()
def kda_commit(
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    read_ids: torch.Tensor,
    write_ids: torch.Tensor,
    draft_log: DraftLog,
    num_accepted: torch.Tensor,
    *,
    lower_bound: float | None = None,
    round_every_token: bool = False,
    qk_l2norm: bool = True,
    compute_dtype: torch.dtype = torch.float32,
) -> None:
    """Fold the accepted drafts into the written slot; the gates are recomputed from the log's raw ones."""
    access = resolve_log(draft_log, read_ids, write_ids, num_accepted, state.shape[0])
    keys, decay = _logged(draft_log, access, A_log, dt_bias, lower_bound, state.shape[1], qk_l2norm, compute_dtype)
    recurrence.commit(state, access, draft_log, keys, decay, round_every_token, compute_dtype)


def _logged(
    log: DraftLog,
    access: LogAccess,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None,
    value_heads: int,
    qk_l2norm: bool,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and decay ``[N, Tmax, HV, K]`` of the half being read."""
    keys = prepare_keys(log.k[access.rows, access.half], value_heads, qk_l2norm, dtype)
    gate = log.g[access.rows, access.half].to(dtype)
    return keys, exactly(torch.exp, kda_log_decay(gate, A_log.to(dtype), dt_bias.to(dtype), lower_bound))
