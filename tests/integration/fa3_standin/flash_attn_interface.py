"""Stands in for FlashAttention-3's `flash_attn_interface` where it is not installed: the three calls that lmdeploy makes.

Gathers the pages and attends in plain torch and fp32. Slow and large on purpose: it is for checking what drafts answer, in
small models. Put this folder on PYTHONPATH. The call over pages does not synchronise, so that CUDA graphs can hold it.
"""

from __future__ import annotations

from typing import Any

import torch


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """`q [B, T, H, D]`, `k, v [B, L, KV, D]`, `visible [B, T, L]` bool; returns `[B, T, H, D]`."""
    heads, group = q.shape[2], q.shape[2] // k.shape[2]
    # What no query sees may be anything, NaN too, and 0 * NaN is NaN.
    seen = visible.any(1)[:, :, None, None]
    wide_k, wide_v = (torch.where(seen, t, 0).float().repeat_interleave(group, 2) for t in (k, v))
    scores = torch.einsum("bthd,blhd->bhtl", q.float(), wide_k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~visible[:, None], float("-inf"))
    weights = scores.softmax(-1).nan_to_num(0.0)
    assert weights.shape[1] == heads
    return torch.einsum("bhtl,blhd->bthd", weights, wide_v).to(q.dtype)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    **kwargs: Any,
) -> torch.Tensor:
    """Packed sequences `q [T, H, D]`, `k, v [L, KV, D]`; the last query of each stands at its last key."""
    assert causal
    assert tuple(window_size) == (-1, -1)
    assert not softcap
    out = torch.empty((*q.shape[:2], v.shape[-1]), dtype=q.dtype, device=q.device)
    queries, keys = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for row in range(len(queries) - 1):
        new, known = slice(queries[row], queries[row + 1]), slice(keys[row], keys[row + 1])
        length, total = new.stop - new.start, known.stop - known.start
        ends = torch.arange(total - length, total, device=q.device)
        visible = torch.arange(total, device=q.device)[None, :] <= ends[:, None]
        out[new] = _attend(q[None, new], k[None, known], v[None, known], visible[None], softmax_scale)[0]
    return out


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    **kwargs: Any,
) -> torch.Tensor:
    """`q [B, T, H, D]` against pages `[blocks, block, KV, D]`; row b has `cache_seqlens[b]` keys, its queries at the end."""
    assert causal
    assert tuple(window_size) == (-1, -1)
    assert not softcap
    tokens, length = q.shape[1], page_table.shape[1] * k_cache.shape[1]
    k, v = (cache[page_table.long()].flatten(1, 2) for cache in (k_cache, v_cache))
    ends = cache_seqlens.long()[:, None] - tokens + torch.arange(tokens, device=q.device)
    visible = torch.arange(length, device=q.device) <= ends[:, :, None]
    return _attend(q, k, v, visible, softmax_scale)


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: torch.Tensor,
    **kwargs: Any,
) -> torch.Tensor:
    """Nothing to schedule."""
    return torch.zeros(1, dtype=torch.int32, device=cache_seqlens.device)
