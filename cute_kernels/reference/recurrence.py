"""The gated delta rule, token by token: the definition that kernels and chunkwise forms are held against.

    S~ = S diag(decay)            decay first
    u  = beta (v - S~ k)          delta against the decayed state
    S  = S~ + u k^T
    o  = S q                      output uses the updated state

The state is stored value-first, ``[HV, V, K]``. GDN has one decay a head, KDA one a key channel; nothing else differs,
so both share these functions. Every reduction runs over one row's last dimension: a row's bits do not depend on the
batch.

Source: Gated Delta Networks (arXiv 2412.06464), Kimi Linear (arXiv 2510.26692).
"""

from __future__ import annotations

from collections import defaultdict

import torch

from ..checkpoints import Checkpoints
from ..draft_log import DraftLog
from .gates import Tokens
from .ids import LogAccess, draft_lengths, load_slots, record_log, store_slots, void_rows


def fold(S: torch.Tensor, k: torch.Tensor, u: torch.Tensor, decay: torch.Tensor) -> None:
    """Replay one token whose u is known, in place: ``S <- S diag(decay) + u k^T``. ``S [R, HV, V, K]``."""
    S.mul_(decay[..., None, :])
    S.add_(u[..., :, None] * k[..., None, :])


def step(
    S: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of R rows, in place on ``S [R, HV, V, K]``; returns ``(o, u)``, both ``[R, HV, V]``.

    It performs the same multiplies and adds on S as ``fold``: replaying a logged token gives the same bits.
    """
    S.mul_(decay[..., None, :])
    u = beta[..., None] * (v - (S * k[..., None, :]).sum(-1))
    S.add_(u[..., :, None] * k[..., None, :])
    return (S * q[..., None, :]).sum(-1), u


def decode(
    tokens: Tokens, state: torch.Tensor, read_ids: torch.Tensor, write_ids: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """One token for each of N rows; returns ``o [N, HV, V]`` in the arithmetic dtype."""
    S = load_slots(state, read_ids, dtype)
    o, _ = step(S, tokens.q, tokens.k, tokens.v, tokens.decay(), tokens.beta)
    store_slots(state, write_ids, S)
    return o.masked_fill(void_rows(read_ids, write_ids, state.shape[0])[:, None, None], 0.0)


def prefill(
    tokens: Tokens,
    state: torch.Tensor,
    read_ids: torch.Tensor,
    write_ids: torch.Tensor,
    cu_seqlens: torch.Tensor,
    checkpoints: Checkpoints | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """N packed sequences; returns ``o [T, HV, V]``, zeros beyond ``cu_seqlens[N]``."""
    lengths = cu_seqlens.long().diff()
    order, by_time, active = _running_order(cu_seqlens.long(), lengths)
    wanted = _wanted_states(checkpoints, lengths, order)
    q, k, v, decay, beta = (x[by_time] for x in (tokens.q, tokens.k, tokens.v, tokens.decay(), tokens.beta))
    outputs = torch.empty_like(v)
    S = load_slots(state, read_ids[order], dtype)
    start = 0
    for t, rows in enumerate(active):
        at = slice(start, start + rows)
        outputs[at], _ = step(S[:rows], q[at], k[at], v[at], decay[at], beta[at])
        for row, slot in wanted.get(t + 1, ()):
            store_slots(state, torch.tensor([slot], device=state.device), S[row : row + 1])
        start += rows
    store_slots(state, write_ids[order], S)
    o = torch.zeros_like(tokens.v)
    o[by_time] = outputs
    return o


def _running_order(cu_seqlens: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Sequences longest first, tokens by time, and how many sequences run at each time.

    The sequences still running at token t are then the first rows, and their tokens stand side by side.
    """
    order = torch.argsort(lengths, descending=True, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(order.numel(), device=order.device)
    total = int(lengths.sum())
    time = torch.arange(total, device=order.device) - cu_seqlens[:-1].repeat_interleave(lengths, output_size=total)
    by_time = torch.argsort(time * max(order.numel(), 1) + rank.repeat_interleave(lengths, output_size=total))
    return order, by_time, torch.bincount(time).tolist()


def _wanted_states(
    checkpoints: Checkpoints | None, lengths: torch.Tensor, order: torch.Tensor
) -> dict[int, list[tuple[int, int]]]:
    """Token count -> (row in running order, slot) of every checkpoint inside its sequence."""
    wanted: dict[int, list[tuple[int, int]]] = defaultdict(list)
    if checkpoints is None:
        return wanted
    cu, ends, slots = checkpoints.cu.tolist(), checkpoints.ends.tolist(), checkpoints.slots.tolist()
    sizes = lengths.tolist()
    for row, sequence in enumerate(order.tolist()):
        for entry in range(cu[sequence], cu[sequence + 1]):
            if 1 <= ends[entry] <= sizes[sequence]:
                wanted[ends[entry]].append((row, slots[entry]))
    return wanted


def commit(
    state: torch.Tensor,
    access: LogAccess,
    log: DraftLog,
    log_keys: torch.Tensor,
    log_decay: torch.Tensor,
    round_every_token: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Read, replay the accepted tokens, write; returns the committed states ``[N, HV, V, K]`` as the pool stores them.

    ``log_keys [N, Tmax, HV, K]`` and ``log_decay [N, Tmax, HV, G]`` are the half being read, prepared for arithmetic.
    """
    S = load_slots(state, access.read_ids, dtype)
    u = log.u[access.rows, access.half].to(dtype)
    for j in range(int(access.accepted.max()) if access.accepted.numel() else 0):
        rows = (access.accepted > j).nonzero()[:, 0]
        replayed = S[rows]
        fold(replayed, log_keys[rows, j], u[rows, j], log_decay[rows, j])
        S[rows] = replayed.to(state.dtype).to(dtype) if round_every_token else replayed
    store_slots(state, access.write_ids, S)
    return S.to(state.dtype).to(dtype)


def verify(
    tokens: Tokens,
    state: torch.Tensor,
    access: LogAccess,
    cu_seqlens: torch.Tensor,
    log: DraftLog,
    log_keys: torch.Tensor,
    log_decay: torch.Tensor,
    raw_k: torch.Tensor,
    raw_gate: torch.Tensor,
    round_every_token: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Commit the accepted drafts, then run and log the new tokens; returns ``o [T, HV, V]``, zeros for void rows.

    The new tokens start from the committed state as the pool stores it: a verify equals a commit followed by a verify
    with nothing accepted, for every pool dtype.
    """
    S = commit(state, access, log, log_keys, log_decay, round_every_token, dtype)
    lengths = draft_lengths(cu_seqlens, log)
    lengths = torch.where(access.void, 0, lengths)
    starts = cu_seqlens.long()[:-1]
    decay = tokens.decay()
    o = torch.zeros_like(tokens.v)
    for t in range(int(lengths.max()) if lengths.numel() else 0):
        rows = (lengths > t).nonzero()[:, 0]
        at = starts[rows] + t
        running = S[rows]
        o[at], u = step(running, tokens.q[at], tokens.k[at], tokens.v[at], decay[at], tokens.beta[at])
        S[rows] = running.to(state.dtype).to(dtype) if round_every_token else running
        record_log(log.k, access, rows, t, raw_k[at])
        record_log(log.u, access, rows, t, u)
        record_log(log.g, access, rows, t, raw_gate[at])
    return o
