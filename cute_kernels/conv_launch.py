"""Launch the causal-conv kernels: choose a specialisation, call the compiled function. Arguments are not checked here."""

from __future__ import annotations

from typing import Any

import torch

from .checkpoints import Checkpoints
from .compile.cache import jit_cache
from .configs.conv1d import ConvCommitKey, Dtype, choose_decode, choose_prefill, choose_verify
from .draft_log import DraftLog

_DTYPES: dict[torch.dtype, Dtype] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

_decode = jit_cache("conv1d_decode")
_prefill = jit_cache("conv1d_prefill")
_verify = jit_cache("conv1d_verify")


def _form(weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> Any:
    return weight.shape[1], _DTYPES[weight.dtype], bias is not None, activation == "silu"


def _rows(log: DraftLog, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Log rows of the batch and whether they are used; without a map any `[N]` tensor stands in."""
    return (ids, 0) if log.rows is None else (log.rows, 1)


def launch_decode(
    x: torch.Tensor,
    weight: torch.Tensor,
    conv_state: torch.Tensor,
    read_ids: torch.Tensor,
    write_ids: torch.Tensor,
    positions: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    out: torch.Tensor,
    *,
    early: bool = False,
) -> None:
    """One token ``x [N, C]`` a row into ``out [N, C]``.

    ``early`` promises that the kernel before this one in the stream writes neither ids, positions nor windows, so that
    they may be read while it still runs.
    """
    if x.shape[0] == 0:
        return
    key = choose_decode(*_form(weight, bias, activation), x.shape[0] * x.shape[1], early)
    _decode(key)(x, weight, bias, conv_state, read_ids, write_ids, positions, out)


def launch_prefill(
    x: torch.Tensor,
    weight: torch.Tensor,
    conv_state: torch.Tensor,
    read_ids: torch.Tensor,
    write_ids: torch.Tensor,
    positions: torch.Tensor,
    cu_seqlens: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    checkpoints: Checkpoints | None,
    out: torch.Tensor,
) -> None:
    """Packed sequences ``x [T, C]`` into ``out [T, C]``, which must not share memory with ``x``.

    Rows beyond ``cu_seqlens[N]`` become zeros.
    """
    key = choose_prefill(*_form(weight, bias, activation), checkpoints is not None)
    cu, ends, slots = (
        (None, None, None) if checkpoints is None else (checkpoints.cu, checkpoints.ends, checkpoints.slots)
    )
    _prefill(key)(x, weight, bias, conv_state, read_ids, write_ids, positions, cu_seqlens, cu, ends, slots, out)


def launch_verify(
    x: torch.Tensor,
    weight: torch.Tensor,
    conv_state: torch.Tensor,
    read_ids: torch.Tensor,
    write_ids: torch.Tensor,
    positions: torch.Tensor,
    cu_seqlens: torch.Tensor,
    draft_log: DraftLog,
    num_accepted: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    out: torch.Tensor,
    *,
    early: bool = False,
) -> None:
    """Commit the accepted drafts, then run and log the new tokens ``x [T, C]``. ``early`` as in ``launch_decode``."""
    if read_ids.shape[0] == 0:
        out.zero_()
        return
    key = choose_verify(*_form(weight, bias, activation), x.shape[0] * x.shape[1], early)
    _verify(key)(
        x, weight, bias, conv_state, read_ids, write_ids, positions, cu_seqlens, draft_log.x, draft_log.half,
        *_rows(draft_log, read_ids), num_accepted, out,
    )  # fmt: skip


def launch_commit(
    conv_state: torch.Tensor,
    read_ids: torch.Tensor,
    write_ids: torch.Tensor,
    positions: torch.Tensor,
    draft_log: DraftLog,
    num_accepted: torch.Tensor,
) -> None:
    """Advance the windows by the accepted drafts alone."""
    if read_ids.shape[0] == 0:
        return
    key = ConvCommitKey(conv_state.shape[1])
    _verify(key)(
        conv_state,
        read_ids,
        write_ids,
        positions,
        draft_log.x,
        draft_log.half,
        *_rows(draft_log, read_ids),
        num_accepted,
    )
