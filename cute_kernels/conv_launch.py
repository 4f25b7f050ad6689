"""Launch the causal-conv kernels: choose a specialisation, call the compiled function. Arguments are not checked here."""

from __future__ import annotations

import torch

from .checkpoints import Checkpoints
from .compile.cache import jit_cache
from .configs.conv1d import (
    BIAS,
    CHECKPOINTS,
    MAPPED,
    SETTLED,
    SILU,
    ConvCommitKey,
    Dtype,
    choose_decode,
    choose_prefill,
    choose_verify,
)
from .draft_log import DraftLog

_DTYPES: dict[torch.dtype, Dtype] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

_decode = jit_cache("conv1d_decode")
_prefill = jit_cache("conv1d_prefill")
_verify = jit_cache("conv1d_verify")


def _form(weight: torch.Tensor) -> tuple[int, Dtype]:
    return weight.shape[1], _DTYPES[weight.dtype]


def _options(
    weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None, settled: bool = False
) -> tuple[torch.Tensor, int]:
    """The bias as a matrix (the taps stand in for an absent one) and the flags."""
    flags = (SETTLED if settled else 0) | (SILU if activation == "silu" else 0)
    return (weight, flags) if bias is None else (bias[None], flags | BIAS)


def _rows(log: DraftLog, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Log rows of the batch and their flag; without a map any `[N]` tensor stands in."""
    return (ids, 0) if log.rows is None else (log.rows, MAPPED)


def fits_log(log: DraftLog, ids: torch.Tensor) -> bool:
    """Whether there are sequences, and the log is of one size and has a row for each; the loaded function checks a map."""
    rows = ids if log.rows is not None else log.half
    return 0 < ids.numel() <= rows.numel() and log.x is not None and log.x.shape[:3] == log.k.shape[:3]


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
    settled: bool = False,
) -> None:
    """One token ``x [N, C]`` a row into ``out [N, C]``.

    ``settled`` promises that the kernel before this one in the stream writes neither ids, positions, windows nor parameters,
    so that they may be read while it still runs.
    """
    matrix, flags = _options(weight, bias, activation, settled)
    _decode(choose_decode(*_form(weight), x.shape[0] * x.shape[1]))(
        x, weight, matrix, conv_state, read_ids, write_ids, positions, out, flags
    )


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
    matrix, flags = _options(weight, bias, activation)
    cu, ends, slots = cu_seqlens, read_ids, read_ids
    if checkpoints is not None:
        cu, ends, slots, flags = checkpoints.cu, checkpoints.ends, checkpoints.slots, flags | CHECKPOINTS
    _prefill(choose_prefill(*_form(weight), x.shape[0], read_ids.shape[0]))(
        x, weight, matrix, conv_state, read_ids, write_ids, positions, cu_seqlens, cu, ends, slots, out, flags
    )


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
    settled: bool = False,
) -> None:
    """Commit the accepted drafts, then run and log the new tokens ``x [T, C]``. ``settled`` as in ``launch_decode``."""
    matrix, flags = _options(weight, bias, activation, settled)
    rows, mapped = _rows(draft_log, read_ids)
    _verify(choose_verify(*_form(weight)))(
        x, weight, matrix, conv_state, read_ids, write_ids, positions, cu_seqlens, draft_log.x, draft_log.half, rows,
        num_accepted, out, flags | mapped,
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
    rows, mapped = _rows(draft_log, read_ids)
    _verify(ConvCommitKey(conv_state.shape[1]))(
        conv_state, read_ids, write_ids, positions, draft_log.x, draft_log.half, rows, num_accepted, mapped
    )
