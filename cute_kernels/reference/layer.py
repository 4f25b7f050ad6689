"""Whole linear-attention layer between the projections, one step: conv, recurrence, gated norm.

The references compose the single operators: q, k, v are rounded to x's dtype after the conv, as the separate operators
would pass them (and as the draft log keeps k); the recurrence output enters the norm unrounded.
"""

from __future__ import annotations

from typing import Literal

import torch

from ..draft_log import DraftLog
from . import gdn, kda, recurrence
from .conv1d import causal_conv1d_decode, causal_conv1d_verify
from .gates import sigmoid, silu
from .gdn import deliver, gdn_tokens
from .ids import resolve_log, void_rows
from .kda import kda_tokens

GateActivation = Literal["silu", "sigmoid"]


def split_heads(
    x: torch.Tensor, value_heads: int, head_dim_v: int, head_dim_k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Packed channels ``[T, 2 HK K + HV V]`` to q, k ``[T, HK, K]`` and v ``[T, HV, V]`` (views)."""
    values = value_heads * head_dim_v
    keys = (x.shape[-1] - values) // 2
    q, k, v = x.split([keys, keys, values], dim=-1)
    return q.unflatten(-1, (-1, head_dim_k)), k.unflatten(-1, (-1, head_dim_k)), v.unflatten(-1, (-1, head_dim_v))


def gated_rms_norm(
    o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, activation: GateActivation, eps: float
) -> torch.Tensor:
    """``o / rms(o) * weight * act(z)`` over the last dimension; norm first, gate second. ``o``, ``z`` ``[T, HV,
    V]``."""
    normed = o / torch.sqrt((o * o).mean(-1, keepdim=True) + eps) * weight
    return normed * (silu(z) if activation == "silu" else sigmoid(z))


def _finish(
    o: torch.Tensor,
    void: torch.Tensor,
    z: torch.Tensor,
    norm_weight: torch.Tensor,
    activation: GateActivation,
    eps: float,
    out: torch.Tensor | None,
) -> torch.Tensor:
    gates = z.to(o.dtype).contiguous().view_as(o)
    y = gated_rms_norm(o, gates, norm_weight.to(o.dtype), activation, eps)
    return deliver(y.masked_fill(void[:, None, None], 0.0).flatten(-2), z.dtype, out)


def _void_tokens(
    log: DraftLog, read_ids: torch.Tensor, write_ids: torch.Tensor, num_accepted: torch.Tensor,
    cu_seqlens: torch.Tensor, tokens: int, num_slots: int,
) -> torch.Tensor:  # fmt: skip
    """``[T]`` bool: tokens of void rows, and tokens of no row at all."""
    void = resolve_log(log, read_ids, write_ids, num_accepted, num_slots).void
    lengths = cu_seqlens.long().diff()
    result = torch.ones(tokens, dtype=torch.bool, device=void.device)
    result[: int(lengths.sum())] = void.repeat_interleave(lengths)
    return result


@torch.no_grad()
def gdn_layer_decode(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    z: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_state: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    state: torch.Tensor,
    read_ids: torch.Tensor,
    write_ids: torch.Tensor,
    positions: torch.Tensor,
    *,
    conv_bias: torch.Tensor | None = None,
    gate_activation: GateActivation = "silu",
    eps: float = 1e-6,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    draft_log: DraftLog | None = None,
    num_accepted: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """One GDN layer step from the packed projection row.

    Args:
        x: ``[T, C]`` raw conv inputs ``[q | k | v]``, C = 2 HK K + HV V.
        a, b: ``[T, HV]``.
        z: ``[T, HV * V]`` output gate.
        conv_weight: ``[C, W]``.
        conv_state: ``[S, W, C]``.
        A_log, dt_bias: ``[HV]``.
        norm_weight: ``[V]``.
        state: ``[S, HV, V, K]``.
        read_ids, write_ids, positions: ``[N]``.
        conv_bias: ``[C]``.
        gate_activation: of z.
        eps: of the norm.
        scale: of the recurrence output, default ``K ** -0.5``.
        cu_seqlens, draft_log, num_accepted: all three for a verify step, none for a single token (T = N).
        out: ``[T, HV * V]``.
        compute_dtype: arithmetic dtype.
    """
    _, heads, head_v, head_k = state.shape
    if draft_log is None:
        mixed = causal_conv1d_decode(
            x, conv_weight, conv_state, read_ids, write_ids, positions, bias=conv_bias, compute_dtype=compute_dtype
        )
        q, k, v = split_heads(mixed, heads, head_v, head_k)
        tokens = gdn_tokens(q, k, v, a, b, A_log, dt_bias, scale, True, compute_dtype)
        o = recurrence.decode(tokens, state, read_ids, write_ids, compute_dtype)
        void = void_rows(read_ids, write_ids, state.shape[0])
    else:
        mixed = causal_conv1d_verify(
            x, conv_weight, conv_state, read_ids, write_ids, positions, cu_seqlens, draft_log, num_accepted,
            bias=conv_bias, compute_dtype=compute_dtype,
        )  # fmt: skip
        q, k, v = split_heads(mixed, heads, head_v, head_k)
        tokens = gdn_tokens(q, k, v, a, b, A_log, dt_bias, scale, True, compute_dtype)
        o = gdn.verify_unrounded(
            tokens, k, state, read_ids, write_ids, cu_seqlens, draft_log, num_accepted, False, True, compute_dtype
        )
        void = _void_tokens(draft_log, read_ids, write_ids, num_accepted, cu_seqlens, x.shape[0], state.shape[0])
    return _finish(o, void, z, norm_weight, gate_activation, eps, out)


@torch.no_grad()
def kda_layer_decode(
    x: torch.Tensor,
    g: torch.Tensor,
    b: torch.Tensor,
    z: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_state: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    state: torch.Tensor,
    read_ids: torch.Tensor,
    write_ids: torch.Tensor,
    positions: torch.Tensor,
    *,
    lower_bound: float | None = None,
    conv_bias: torch.Tensor | None = None,
    gate_activation: GateActivation = "sigmoid",
    eps: float = 1e-5,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    draft_log: DraftLog | None = None,
    num_accepted: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """One KDA layer step; as ``gdn_layer_decode`` with the raw gate ``g [T, HV, K]`` in place of a."""
    _, heads, head_v, head_k = state.shape
    if draft_log is None:
        mixed = causal_conv1d_decode(
            x, conv_weight, conv_state, read_ids, write_ids, positions, bias=conv_bias, compute_dtype=compute_dtype
        )
        q, k, v = split_heads(mixed, heads, head_v, head_k)
        tokens = kda_tokens(q, k, v, g, b, A_log, dt_bias, lower_bound, scale, True, compute_dtype)
        o = recurrence.decode(tokens, state, read_ids, write_ids, compute_dtype)
        void = void_rows(read_ids, write_ids, state.shape[0])
    else:
        mixed = causal_conv1d_verify(
            x, conv_weight, conv_state, read_ids, write_ids, positions, cu_seqlens, draft_log, num_accepted,
            bias=conv_bias, compute_dtype=compute_dtype,
        )  # fmt: skip
        q, k, v = split_heads(mixed, heads, head_v, head_k)
        tokens = kda_tokens(q, k, v, g, b, A_log, dt_bias, lower_bound, scale, True, compute_dtype)
        o = kda.verify_unrounded(
            tokens, k, g, A_log, dt_bias, state, read_ids, write_ids, cu_seqlens, draft_log, num_accepted, lower_bound,
            False, True, compute_dtype,
        )  # fmt: skip
        void = _void_tokens(draft_log, read_ids, write_ids, num_accepted, cu_seqlens, x.shape[0], state.shape[0])
    return _finish(o, void, z, norm_weight, gate_activation, eps, out)
