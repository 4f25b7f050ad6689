"""Chunkwise (WY) prefill: the form tensor-core kernels compute, in plain torch.

Within a chunk of C tokens that starts from state S (key-first here, ``[K, V]``), with decays d_ij = exp(sum of g over
j < m <= i):

    kk_ij = sum_c k_i[c] k_j[c] d_ij[c]  (i > j)         qk_ij likewise (i >= j)
    T  = (I + diag(beta) kk)^-1                          unit lower triangular
    Vn = T diag(beta) (V - (K . d_i0) S)                 the corrected values: u of the recurrence
    O  = (Q . d_i0) S + qk Vn
    S' = diag(d_C0) S + (K . d_Ci)^T Vn

where d_i0 decays from the chunk's start to i and d_Ci from i to its end. Every exponent is a sum of ``g <= 0`` over
the tokens it spans: never positive, and never a difference of two long cumulative sums, which costs a unit in the last
place of the larger one (2e-3 nats after 64 tokens of -320).

Source: arXiv 2412.06464 section 3, arXiv 2510.26692 section 3.
"""

from __future__ import annotations

import itertools

import torch

from ..checkpoints import Checkpoints
from .gates import Tokens
from .ids import load_slots, store_slots

SUB_CHUNK = 16


def prefill(
    tokens: Tokens,
    state: torch.Tensor,
    read_ids: torch.Tensor,
    write_ids: torch.Tensor,
    cu_seqlens: torch.Tensor,
    checkpoints: Checkpoints | None,
    dtype: torch.dtype,
    chunk: int,
) -> torch.Tensor:
    """As ``recurrence.prefill``, one sequence after another, ``chunk`` tokens at a time."""
    bounds = cu_seqlens.tolist()
    states = load_slots(state, read_ids, dtype)
    o = torch.zeros_like(tokens.v)
    for sequence, (start, end) in enumerate(itertools.pairwise(bounds)):
        S = states[sequence].mT.contiguous()
        wanted = _checkpoint_slots(checkpoints, sequence, end - start)
        position = 0
        while position < end - start:
            stop = min([position + chunk, end - start, *(count for count in wanted if count > position)])
            at = slice(start + position, start + stop)
            o[at], S = _chunk(tokens, at, S)
            position = stop
            for slot in wanted.get(stop, ()):
                store_slots(state, torch.tensor([slot], device=state.device), S.mT[None])
        states[sequence] = S.mT
    store_slots(state, write_ids, states)
    return o


def _checkpoint_slots(checkpoints: Checkpoints | None, sequence: int, length: int) -> dict[int, list[int]]:
    """Token count -> destination slots, for one sequence."""
    if checkpoints is None:
        return {}
    first, last = checkpoints.cu[sequence : sequence + 2].tolist()
    wanted: dict[int, list[int]] = {}
    for end, slot in zip(checkpoints.ends[first:last].tolist(), checkpoints.slots[first:last].tolist()):
        if 1 <= end <= length:
            wanted.setdefault(end, []).append(slot)
    return wanted


def _chunk(tokens: Tokens, at: slice, S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One chunk of all heads; ``S [HV, K, V]``. Returns ``(o [C, HV, V], S')``."""
    q, k, v, g = (x[at].transpose(0, 1) for x in (tokens.q, tokens.k, tokens.v, tokens.g))  # [HV, C, .]
    beta = tokens.beta[at].T[..., None]  # [HV, C, 1]
    from_start = torch.exp(g.cumsum(1))
    to_end = torch.exp(_sum_after(g))
    kk, qk = decayed_products(q, k, g)
    unit_lower = torch.eye(k.shape[1], dtype=k.dtype, device=k.device) + beta * kk.tril(-1)
    residual = beta * (v - (k * from_start) @ S)
    corrected = torch.linalg.solve_triangular(unit_lower, residual, upper=False, unitriangular=True)
    o = (q * from_start) @ S + qk @ corrected
    S = from_start[:, -1, :, None] * S + (k * to_end).mT @ corrected
    return o.transpose(0, 1), S


def decayed_products(q: torch.Tensor, k: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``kk`` and ``qk`` with the decays inside the channel sum, both ``[HV, C, C]`` and zero above the diagonal.

    A product under a decay that depends on the channel is a matrix product only after factoring
    ``d_ij = d_i,anchor d_anchor,j``. Blocks of 16 rows take their first row as anchor for all earlier columns: both
    factors are then ``<= 1``, for any gate, and the anchor does not depend on later tokens. The diagonal blocks, where
    no anchor is safe, are summed element by element.
    """
    heads, tokens = k.shape[:2]
    kk = k.new_zeros(heads, tokens, tokens)
    qk = torch.zeros_like(kk)
    for first in range(0, tokens, SUB_CHUNK):
        rows = slice(first, min(first + SUB_CHUNK, tokens))
        inside = _segment_decay(g[:, rows])  # [HV, r, r, G]
        weighted = k[:, None, rows] * inside
        kk[:, rows, rows] = (k[:, rows, None] * weighted).sum(-1)
        qk[:, rows, rows] = (q[:, rows, None] * weighted).sum(-1)
        if first:
            # Anchor: the decay of row `first` itself belongs to the columns' side.
            to_anchor = k[:, :first] * torch.exp(_sum_after(g[:, : first + 1])[:, :first])
            after_anchor = g[:, rows].clone()
            after_anchor[:, 0] = 0.0
            from_anchor = torch.exp(after_anchor.cumsum(1))
            kk[:, rows, :first] = (k[:, rows] * from_anchor) @ to_anchor.mT
            qk[:, rows, :first] = (q[:, rows] * from_anchor) @ to_anchor.mT
    return kk, qk


def _sum_after(g: torch.Tensor) -> torch.Tensor:
    """``sum over m > j of g_m`` along dimension 1, without subtracting cumulative sums."""
    later = torch.zeros_like(g)
    later[:, :-1] = g[:, 1:].flip(1).cumsum(1).flip(1)
    return later


def _segment_decay(g: torch.Tensor) -> torch.Tensor:
    """``d_ij = exp(sum over j < m <= i of g_m)`` for ``i >= j``, else 0. ``g [HV, C, G]`` -> ``[HV, C, C, G]``."""
    tokens = g.shape[1]
    lower = torch.ones(tokens, tokens, dtype=torch.bool, device=g.device).tril()
    # Column j sums g over its own rows only: zero out rows m <= j before the running sum over m.
    terms = g[:, :, None, :].masked_fill(~lower.tril(-1)[None, :, :, None], 0.0)
    return torch.exp(terms.cumsum(1)).masked_fill(~lower[None, :, :, None], 0.0)
