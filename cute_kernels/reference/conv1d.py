"""Causal conv reference operators: depthwise, width W, state a ring of raw inputs.

    y[t, c] = act(bias[c] + sum_j weight[c, j] x[t - W + 1 + j, c])

The pool is ``[S, W, C]``; the input of token t of its sequence stands in column ``t mod W``, and ``positions[n]``
counts the tokens before this call. With no read slot the tokens before the call are zeros, and a written window holds
zeros in their columns, so a valid read id never needs a check against the sequence's start. After token p the columns
of the last ``W - 1`` tokens are live; the remaining column holds the next token's place and its content is unspecified.
"""

from __future__ import annotations

import itertools
from typing import Literal

import torch

from ..checkpoints import Checkpoints
from ..draft_log import DraftLog
from ..errors import InvalidArgumentError
from .gates import silu
from .gdn import deliver
from .ids import LogAccess, draft_lengths, load_slots, record_log, resolve_log, store_slots, void_rows

Activation = Literal["silu"] | None


def _columns(positions: torch.Tensor, width: int) -> torch.Tensor:
    """``[N, W]`` ring columns of tokens ``p - W .. p - 1``, oldest first."""
    return (positions.long()[:, None] + torch.arange(-width, 0, device=positions.device)) % width


def load_window(conv_state: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The last W raw inputs in time order, ``[N, W, C]``, zeros for none. Entry 0 is the one that is no longer live."""
    ring = load_slots(conv_state, ids, conv_state.dtype)
    columns = _columns(positions, conv_state.shape[1])
    return ring.gather(1, columns[..., None].expand(-1, -1, ring.shape[2]))


def live_window(conv_state: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The ``W - 1`` raw inputs the next token needs, ``[N, W - 1, C]`` in time order: what two pools must agree on."""
    return load_window(conv_state, ids, positions)[:, 1:]


def store_window(conv_state: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor, window: torch.Tensor) -> None:
    """Write ``window [N, W, C]`` (time order, ending just before ``positions``) into the rings of ``ids``."""
    columns = _columns(positions, conv_state.shape[1])
    ring = torch.empty_like(window).scatter_(1, columns[..., None].expand_as(window), window)
    store_slots(conv_state, ids, ring)


def _convolve(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation,
    dtype: torch.dtype,
) -> torch.Tensor:
    """``inputs [..., W - 1 + T, C]`` in time order to outputs ``[..., T, C]``; taps are added oldest first."""
    width = weight.shape[1]
    count = inputs.shape[-2] - width + 1
    inputs, weight = inputs.to(dtype).contiguous(), weight.to(dtype).T.contiguous()
    y = torch.zeros_like(inputs[..., :count, :]) if bias is None else bias.to(dtype).expand_as(inputs[..., :count, :])
    for tap in range(width):
        y = y + weight[tap] * inputs[..., tap : tap + count, :]
    return silu(y) if activation == "silu" else y


@torch.no_grad()
def causal_conv1d_prefill(
    x: torch.Tensor,
    weight: torch.Tensor,
    conv_state: torch.Tensor,
    read_ids: torch.Tensor,
    write_ids: torch.Tensor,
    positions: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    activation: Activation = "silu",
    checkpoints: Checkpoints | None = None,
    out: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """N packed sequences.

    Args:
        x: ``[T, C]`` raw inputs.
        weight: ``[C, W]``, tap ``W - 1`` on the current token.
        conv_state: ``[S, W, C]`` pool of rings, updated in place.
        read_ids, write_ids: ``[N]`` slots. A sequence without tokens copies its window.
        positions: ``[N]`` tokens of the sequence before this call.
        cu_seqlens: ``[N + 1]``.
        bias: ``[C]``.
        activation: "silu" or None.
        checkpoints: windows to keep on the way.
        out: ``[T, C]``; rows beyond ``cu_seqlens[N]`` become zeros.
        compute_dtype: arithmetic dtype.
    """
    width = weight.shape[1]
    windows = load_window(conv_state, read_ids, positions)
    bounds = cu_seqlens.tolist()
    y = torch.zeros(x.shape, dtype=compute_dtype, device=x.device)
    final = windows.clone()
    for n, (start, end) in enumerate(itertools.pairwise(bounds)):
        history = torch.cat([windows[n], x[start:end].to(windows.dtype)])
        y[start:end] = _convolve(history[1:], weight, bias, activation, compute_dtype)
        final[n] = history[end - start :]
        for count, slot in _checkpoint_entries(checkpoints, n, end - start):
            at = torch.tensor([slot], device=x.device)
            store_window(conv_state, at, positions[n : n + 1] + count, history[None, count : count + width])
    store_window(conv_state, write_ids, positions + cu_seqlens.diff(), final)
    return deliver(y, x.dtype, out)


def _checkpoint_entries(checkpoints: Checkpoints | None, sequence: int, length: int) -> list[tuple[int, int]]:
    """``(end, slot)`` pairs of one sequence that lie inside it."""
    if checkpoints is None:
        return []
    first, last = checkpoints.cu[sequence : sequence + 2].tolist()
    pairs = zip(checkpoints.ends[first:last].tolist(), checkpoints.slots[first:last].tolist())
    return [(end, slot) for end, slot in pairs if 1 <= end <= length]


@torch.no_grad()
def causal_conv1d_decode(
    x: torch.Tensor,
    weight: torch.Tensor,
    conv_state: torch.Tensor,
    read_ids: torch.Tensor,
    write_ids: torch.Tensor,
    positions: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    activation: Activation = "silu",
    out: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """One token ``x [N, C]`` for each row; arguments as ``causal_conv1d_prefill``. Void rows give zeros."""
    window = load_window(conv_state, read_ids, positions)
    window = torch.cat([window[:, 1:], x[:, None].to(window.dtype)], dim=1)
    y = _convolve(window, weight, bias, activation, compute_dtype)[:, 0]
    store_window(conv_state, write_ids, positions + 1, window)
    y = y.masked_fill(void_rows(read_ids, write_ids, conv_state.shape[0])[:, None], 0.0)
    return deliver(y, x.dtype, out)


@torch.no_grad()
def causal_conv1d_verify(
    x: torch.Tensor,
    weight: torch.Tensor,
    conv_state: torch.Tensor,
    read_ids: torch.Tensor,
    write_ids: torch.Tensor,
    positions: torch.Tensor,
    cu_seqlens: torch.Tensor,
    draft_log: DraftLog,
    num_accepted: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    activation: Activation = "silu",
    out: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Commit the accepted drafts' inputs to the written window, then run and log the new tokens ``x [T, C]``.

    ``positions[n]`` counts the tokens committed in the *read* window; the written one then holds ``positions +
    num_accepted``. At most ``draft_log.max_tokens`` tokens a row. Void rows give zeros.
    """
    log_x = _logged_inputs(draft_log)
    access = resolve_log(draft_log, read_ids, write_ids, num_accepted, conv_state.shape[0])
    window = _commit(conv_state, access, positions, log_x)
    lengths = draft_lengths(cu_seqlens, draft_log).tolist()
    y = torch.zeros(x.shape, dtype=compute_dtype, device=x.device)
    start = 0
    for n, length in enumerate(lengths):
        if not access.void[n]:
            new = x[start : start + length]
            inputs = torch.cat([window[n, 1:], new.to(window.dtype)])
            y[start : start + length] = _convolve(inputs, weight, bias, activation, compute_dtype)
            for t in range(length):
                record_log(log_x, access, torch.tensor([n], device=x.device), t, new[t : t + 1])
        start += length
    return deliver(y, x.dtype, out)


@torch.no_grad()
def causal_conv1d_commit(
    conv_state: torch.Tensor,
    read_ids: torch.Tensor,
    write_ids: torch.Tensor,
    positions: torch.Tensor,
    draft_log: DraftLog,
    num_accepted: torch.Tensor,
) -> None:
    """Write each row's window advanced by its accepted drafts; the first half of ``causal_conv1d_verify`` alone."""
    log_x = _logged_inputs(draft_log)
    access = resolve_log(draft_log, read_ids, write_ids, num_accepted, conv_state.shape[0])
    _commit(conv_state, access, positions, log_x)


def _logged_inputs(log: DraftLog) -> torch.Tensor:
    if log.x is None:
        raise InvalidArgumentError(
            "draft_log", "a log without conv inputs (x is None)", "a log allocated with channels"
        )
    return log.x


def _commit(conv_state: torch.Tensor, access: LogAccess, positions: torch.Tensor, log_x: torch.Tensor) -> torch.Tensor:
    """Store and return the windows ``[N, W, C]`` that end with the accepted drafts, in time order."""
    width = conv_state.shape[1]
    window = load_window(conv_state, access.read_ids, positions)
    drafts = log_x[access.rows, access.half].to(window.dtype)
    inputs = torch.cat([window, drafts], dim=1)
    picked = access.accepted[:, None] + torch.arange(width, device=positions.device)
    window = inputs.gather(1, picked[..., None].expand(-1, -1, inputs.shape[2]))
    store_window(conv_state, access.write_ids, positions + access.accepted, window)
    return window
