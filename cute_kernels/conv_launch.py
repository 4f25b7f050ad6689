"""Launch the causal-conv kernels: choose a specialisation, call the compiled function.

The function checks each tensor and the sizes they share by itself; how the rest hangs together is remembered by shapes.
"""

from __future__ import annotations

from typing import Any

import torch

from .checkpoints import Checkpoints
from .compile.cache import CompiledKernel, jit_cache
from .configs import tables
from .configs.conv1d import (
    BIAS,
    CHECKPOINTS,
    MAPPED,
    PLAIN,
    SETTLED,
    SILU,
    WIDTHS,
    ConvCommitKey,
    Dtype,
    choose_decode,
    choose_prefill,
    choose_verify,
)
from .draft_log import DraftLog

ACTIVATIONS = ("silu", None)
Form = tuple[int, Dtype, int]
_DTYPES: dict[torch.dtype, Dtype] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

_decode = jit_cache("conv1d_decode")
_prefill = jit_cache("conv1d_prefill")
_verify = jit_cache("conv1d_verify")


def _form(weight: torch.Size, dtype: torch.dtype, bias: torch.Size | None, activation: str | None) -> Form:
    """Width, dtype of the taps and flags of a call. ValueError or KeyError where no kernel serves it."""
    if weight[1] not in WIDTHS or activation not in ACTIVATIONS or bias not in (None, weight[:1]):
        raise ValueError
    return weight[1], _DTYPES[dtype], (SILU if activation else 0) | (0 if bias is None else BIAS)


def _facts(
    weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> tuple[torch.Size, torch.dtype, torch.Size | None, str | None]:
    return weight.shape, weight.dtype, None if bias is None else bias.shape, activation


def _matrix(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The bias as a matrix; the taps stand in for an absent one."""
    return weight if bias is None else bias[None]


def _lengths(log: DraftLog, ids: torch.Tensor) -> tuple[int, int, torch.Size, torch.Size, bool]:
    """Rows, log rows, the sizes of the log's keys and inputs, and whether it has a map, whose length the kernel checks."""
    mapped = log.rows is not None
    return ids.numel(), log.half.numel(), log.k.shape[:3], log.x.shape[:3], mapped  # type: ignore[union-attr]


@tables.memoised
def decode_function(x: torch.Size, *facts: Any) -> tuple[CompiledKernel, int]:
    """The loaded function for these shapes and its flags. Raises ValueError or KeyError where there is nothing to launch."""
    width, dtype, flags = _form(*facts)
    if x[0] == 0:
        raise ValueError
    return _decode(choose_decode(width, dtype, x[0] * x[1])), flags


@tables.memoised
def prefill_function(x: torch.Size, rows: int, bounds: int, *facts: Any) -> tuple[CompiledKernel, int]:
    """As `decode_function`, for packed sequences; `bounds`: the length of cu_seqlens."""
    width, dtype, flags = _form(*facts)
    if bounds != rows + 1:
        raise ValueError
    return _prefill(choose_prefill(width, dtype, x[0], rows)), flags


@tables.memoised
def verify_function(lengths: tuple[Any, ...], bounds: int, *facts: Any) -> tuple[CompiledKernel, int]:
    """As `decode_function`, for a verify step."""
    width, dtype, flags = _form(*facts)
    if bounds != lengths[0] + 1 or not _fits_log(*lengths):
        raise ValueError
    return _verify(choose_verify(width, dtype)), flags | (MAPPED if lengths[-1] else 0)


@tables.memoised
def commit_function(lengths: tuple[Any, ...], width: int) -> tuple[CompiledKernel, int]:
    """As `decode_function`, for a commit."""
    if width not in WIDTHS or not _fits_log(*lengths):
        raise ValueError
    return _verify(ConvCommitKey(width)), MAPPED if lengths[-1] else 0


def _fits_log(rows: int, log_rows: int, keys: torch.Size, inputs: torch.Size, mapped: bool) -> bool:
    return rows > 0 and keys == inputs and (mapped or rows <= log_rows)


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
    pdl: bool = True,
) -> None:
    """One token ``x [N, C]`` a row into ``out [N, C]``.

    ``settled`` promises that the kernel before this one in the stream writes neither ids, positions, windows nor parameters,
    so that they may be read while it still runs. Without ``pdl`` the launch is no dependent of that kernel.
    """
    function, flags = decode_function(x.shape, *_facts(weight, bias, activation))
    flags |= (SETTLED if settled else 0) if pdl else PLAIN
    function(x, weight, _matrix(weight, bias), conv_state, read_ids, write_ids, positions, out, flags)


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
    facts = _facts(weight, bias, activation)
    function, flags = prefill_function(x.shape, read_ids.numel(), cu_seqlens.numel(), *facts)
    cu, ends, slots = cu_seqlens, read_ids, read_ids
    if checkpoints is not None:
        cu, ends, slots, flags = checkpoints.cu, checkpoints.ends, checkpoints.slots, flags | CHECKPOINTS
    matrix = _matrix(weight, bias)
    function(x, weight, matrix, conv_state, read_ids, write_ids, positions, cu_seqlens, cu, ends, slots, out, flags)


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
    pdl: bool = True,
) -> None:
    """Commit the accepted drafts, then run and log the new tokens ``x [T, C]``. Options as in ``launch_decode``."""
    facts = _facts(weight, bias, activation)
    function, flags = verify_function(_lengths(draft_log, read_ids), cu_seqlens.numel(), *facts)
    flags |= (SETTLED if settled else 0) if pdl else PLAIN
    function(
        x,
        weight,
        _matrix(weight, bias),
        conv_state,
        read_ids,
        write_ids,
        positions,
        cu_seqlens,
        draft_log.x,
        draft_log.half,
        read_ids if draft_log.rows is None else draft_log.rows,  # without a map any `[N]` tensor stands in
        num_accepted,
        out,
        flags,
    )


def launch_commit(
    conv_state: torch.Tensor,
    read_ids: torch.Tensor,
    write_ids: torch.Tensor,
    positions: torch.Tensor,
    draft_log: DraftLog,
    num_accepted: torch.Tensor,
) -> None:
    """Advance the windows by the accepted drafts alone."""
    function, flags = commit_function(_lengths(draft_log, read_ids), conv_state.shape[1])
    rows = read_ids if draft_log.rows is None else draft_log.rows
    function(conv_state, read_ids, write_ids, positions, draft_log.x, draft_log.half, rows, num_accepted, flags)
