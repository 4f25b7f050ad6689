"""Gated DeltaNet reference operators: one scalar decay per value head.

Shapes and ids are those of the public operators; ``compute_dtype`` is the arithmetic dtype (float64 makes an oracle).
They update ``state`` in place, return ``out`` in v's dtype unless given one, and run on any device.
"""

from __future__ import annotations

import torch

from ..checkpoints import Checkpoints
from ..draft_log import DraftLog
from . import chunkwise, recurrence
from .gates import Tokens, gdn_log_decay, prepare_keys, prepare_tokens
from .ids import LogAccess, resolve_log


def gdn_tokens(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    scale: float | None,
    qk_l2norm: bool,
    dtype: torch.dtype,
) -> Tokens:
    """Raw inputs to ``Tokens`` with G = 1."""
    g = gdn_log_decay(a.to(dtype).contiguous(), A_log.to(dtype), dt_bias.to(dtype))
    return prepare_tokens(q, k, v, g[..., None], b, scale, qk_l2norm, dtype)


def deliver(o: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None) -> torch.Tensor:
    """Round the output once, into ``out`` if given."""
    return o.to(dtype) if out is None else out.copy_(o)


@torch.no_grad()
def gdn_prefill(
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
    *,
    checkpoints: Checkpoints | None = None,
    scale: float | None = None,
    qk_l2norm: bool = True,
    out: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """N packed sequences, token by token.

    Args:
        q, k: ``[T, HK, K]``.
        v: ``[T, HV, V]``; value head h uses key head ``h // (HV // HK)``.
        a, b: ``[T, HV]`` raw gate and beta logit.
        A_log, dt_bias: ``[HV]``.
        state: ``[S, HV, V, K]`` pool, updated in place.
        read_ids, write_ids: ``[N]`` slots. A sequence without tokens copies its read state to its write slot.
        cu_seqlens: ``[N + 1]``.
        checkpoints: states to keep on the way; they are rounded to the pool dtype, the running state is not.
        scale: of the output, default ``K ** -0.5``.
        qk_l2norm: normalise q and k.
        out: ``[T, HV, V]``; rows beyond ``cu_seqlens[N]`` become zeros.
        compute_dtype: arithmetic dtype.
    """
    tokens = gdn_tokens(q, k, v, a, b, A_log, dt_bias, scale, qk_l2norm, compute_dtype)
    o = recurrence.prefill(tokens, state, read_ids, write_ids, cu_seqlens, checkpoints, compute_dtype)
    return deliver(o, v.dtype, out)


@torch.no_grad()
def gdn_prefill_chunked(
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
    *,
    checkpoints: Checkpoints | None = None,
    scale: float | None = None,
    qk_l2norm: bool = True,
    out: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
    chunk: int = 64,
) -> torch.Tensor:
    """``gdn_prefill`` in chunks of ``chunk`` tokens (WY form); a checkpoint off the grid ends a chunk early."""
    tokens = gdn_tokens(q, k, v, a, b, A_log, dt_bias, scale, qk_l2norm, compute_dtype)
    o = chunkwise.prefill(tokens, state, read_ids, write_ids, cu_seqlens, checkpoints, compute_dtype, chunk)
    return deliver(o, v.dtype, out)


@torch.no_grad()
def gdn_decode(
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
    *,
    scale: float | None = None,
    qk_l2norm: bool = True,
    out: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """One token for each of N rows; arguments as ``gdn_prefill`` with T = N. Void rows give zeros."""
    tokens = gdn_tokens(q, k, v, a, b, A_log, dt_bias, scale, qk_l2norm, compute_dtype)
    return deliver(recurrence.decode(tokens, state, read_ids, write_ids, compute_dtype), v.dtype, out)


@torch.no_grad()
def gdn_verify(
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
    draft_log: DraftLog,
    num_accepted: torch.Tensor,
    *,
    round_every_token: bool = False,
    scale: float | None = None,
    qk_l2norm: bool = True,
    out: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Commit ``num_accepted`` logged drafts of each row, then run and log its new drafts.

    Arguments as ``gdn_prefill``, and:

    Args:
        cu_seqlens: ``[N + 1]``, at most ``draft_log.max_tokens`` tokens a row (more raise ``InvalidArgumentError``).
        draft_log: read half ``half``, written half ``half ^ 1``; ``half`` itself is left alone.
        num_accepted: ``[N]`` int32 in ``0..Tmax``; a count outside makes the row void.
        round_every_token: round the state to the pool dtype after every token, replayed ones included, so that a bf16
            pool matches single decode steps bit for bit.
    """
    o = verify_unrounded(
        gdn_tokens(q, k, v, a, b, A_log, dt_bias, scale, qk_l2norm, compute_dtype), k, state, read_ids, write_ids,
        cu_seqlens, draft_log, num_accepted, round_every_token, qk_l2norm, compute_dtype,
    )  # fmt: skip
    return deliver(o, v.dtype, out)


def verify_unrounded(
    tokens: Tokens,
    k: torch.Tensor,
    state: torch.Tensor,
    read_ids: torch.Tensor,
    write_ids: torch.Tensor,
    cu_seqlens: torch.Tensor,
    draft_log: DraftLog,
    num_accepted: torch.Tensor,
    round_every_token: bool,
    qk_l2norm: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """``gdn_verify`` on prepared tokens, output in the arithmetic dtype."""
    access = resolve_log(draft_log, read_ids, write_ids, num_accepted, state.shape[0])
    keys, decay = _logged(draft_log, access, state.shape[1], qk_l2norm, dtype)
    return recurrence.verify(
        tokens, state, access, cu_seqlens, draft_log, keys, decay, k, tokens.decay()[..., 0], round_every_token, dtype
    )


@torch.no_grad()
def gdn_commit(
    state: torch.Tensor,
    read_ids: torch.Tensor,
    write_ids: torch.Tensor,
    draft_log: DraftLog,
    num_accepted: torch.Tensor,
    *,
    round_every_token: bool = False,
    qk_l2norm: bool = True,
    compute_dtype: torch.dtype = torch.float32,
) -> None:
    """The first half of ``gdn_verify`` alone: fold the accepted drafts into the written slot, before a publish."""
    access = resolve_log(draft_log, read_ids, write_ids, num_accepted, state.shape[0])
    keys, decay = _logged(draft_log, access, state.shape[1], qk_l2norm, compute_dtype)
    recurrence.commit(state, access, draft_log, keys, decay, round_every_token, compute_dtype)


def _logged(
    log: DraftLog, access: LogAccess, value_heads: int, qk_l2norm: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys ``[N, Tmax, HV, K]`` and decay ``[N, Tmax, HV, 1]`` of the half being read."""
    keys = prepare_keys(log.k[access.rows, access.half], value_heads, qk_l2norm, dtype)
    return keys, log.g[access.rows, access.half].to(dtype)[..., None]
