"""Public causal depthwise convolutions over the token axis: validate, choose a backend, launch.

    y[t, c] = act(bias[c] + sum_j weight[c, j] x[t - W + 1 + j, c])

The window of a sequence is a ring of W raw inputs `[W, C]`: the input of its token t stands in column `t mod W`. Inputs before
a sequence's first token are zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from . import conv_launch, reference
from .checkpoints import Checkpoints
from .configs.conv1d import WIDTHS
from .conv_launch import ACTIVATIONS
from .draft_log import DraftLog
from .errors import InvalidArgumentError, UnsupportedConfigError
from .opaque import operator
from .validation import (
    FLOAT_DTYPES,
    REFUSALS,
    Backend,
    check_alignment,
    check_checkpoints,
    check_choice,
    check_dense,
    check_ids,
    check_kernel_dtype,
    check_log,
    check_pool,
    check_rows,
    check_tensor,
    runs_kernels,
)

Activation = Literal["silu"] | None
CHANNEL_VECTOR = 8  # channels a thread; C is a multiple of it


def _check(
    operator: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    conv_state: torch.Tensor,
    read_ids: torch.Tensor,
    write_ids: torch.Tensor,
    positions: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation,
    out: torch.Tensor | None,
    *,
    packed: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    kernels: bool,
) -> None:
    if x.dim() != 2:
        raise InvalidArgumentError("x", x.shape, "a tensor [rows, C]")
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        raise InvalidArgumentError("weight", getattr(weight, "shape", type(weight).__name__), "a tensor [C, W]")
    device, (rows, channels), width = x.device, x.shape, weight.shape[1]
    check_tensor("x", x, (rows, channels), FLOAT_DTYPES, device)
    check_rows("x", x)
    check_tensor("weight", weight, (channels, width), FLOAT_DTYPES, device)
    check_rows("weight", weight)
    check_pool("conv_state", conv_state, (width, channels), (x.dtype,), device)
    check_choice("activation", activation, ACTIVATIONS)
    if bias is not None:
        check_tensor("bias", bias, (channels,), FLOAT_DTYPES, device)
    check_ids("read_ids", read_ids, None if packed else rows, device)
    check_ids("write_ids", write_ids, read_ids.shape[0], device)
    check_ids("positions", positions, read_ids.shape[0], device)
    if packed:
        check_ids("cu_seqlens", cu_seqlens, read_ids.shape[0] + 1, device)
    if out is not None:
        check_tensor("out", out, (rows, channels), (x.dtype,), device)
        check_rows("out", out)
    if kernels:
        _check_kernel(operator, x, weight, bias, out)


def _check_kernel(
    operator: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None
) -> None:
    exact: Sequence[torch.dtype] = (torch.bfloat16, torch.float32)
    check_kernel_dtype(operator, "x", x.dtype, (torch.bfloat16,))
    check_kernel_dtype(operator, "weight", weight.dtype, exact)
    if bias is not None and bias.dtype != weight.dtype:
        raise UnsupportedConfigError(f"{operator}: bias is {bias.dtype}; allowed with kernels: weight's {weight.dtype}")
    _check_kernel_shape(operator, weight.shape[1], x.shape[1])
    check_alignment("x", x)
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            check_dense(name, parameter)
    if out is not None:
        check_alignment("out", out)


def _check_kernel_shape(operator: str, width: int, channels: int) -> None:
    if width not in WIDTHS or channels % CHANNEL_VECTOR:
        raise UnsupportedConfigError(
            f"{operator}: width {width}, {channels} channels; allowed with kernels: width 2, 3 or 4 and a "
            f"multiple of {CHANNEL_VECTOR} channels (backend='reference' serves others)"
        )


@operator("conv_state")
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
    backend: Backend = "auto",
) -> torch.Tensor:
    """N packed sequences; window in by read id, out by write id, windows at checkpoints written by the same launch.

    Args:
        x: `[T, C]`, rows may be views of a wider packed row.
        weight: `[C, W]`, bf16 or fp32.
        conv_state: `[S, W, C]` pool view in x's dtype, slot stride any multiple of 16 bytes; updated in place.
        read_ids, write_ids: `[N]` int32 slots; out of `[0, S)` means none (a zero window, nothing stored).
        positions: `[N]` int32, tokens of each sequence before this call.
        cu_seqlens: `[N + 1]` int32 bounds of the sequences.
        bias: `[C]` in weight's dtype.
        activation: "silu" or None.
        checkpoints: windows to keep at any token counts within this call.
        out: `[T, C]`, allocated unless given; must not share memory with x. Rows beyond `cu_seqlens[N]` become zeros.
        backend: "auto" (kernels on sm_90, references elsewhere), "kernels" or "reference".

    Raises:
        InvalidArgumentError, UnsupportedConfigError, BackendUnavailableError: before any launch, nothing changed.
    """
    arguments = (x, weight, conv_state, read_ids, write_ids, positions)
    kernels, target = runs_kernels(backend, "x", x), out
    try:
        if not kernels or _in_place(x, out):
            raise ValueError
        if out is None:
            target = torch.empty_like(x, memory_format=torch.contiguous_format)
        conv_launch.launch_prefill(*arguments, cu_seqlens, bias, activation, checkpoints, target)
    except REFUSALS:
        name = "causal_conv1d_prefill"
        _check(name, *arguments, bias, activation, out, packed=True, cu_seqlens=cu_seqlens, kernels=kernels)
        if checkpoints is not None:
            check_checkpoints(checkpoints, read_ids.shape[0], x.device)
        if not kernels:
            options = {"bias": bias, "activation": activation, "checkpoints": checkpoints, "out": out}
            return reference.causal_conv1d_prefill(*arguments, cu_seqlens, **options)
        if _in_place(x, out):
            raise InvalidArgumentError(
                "out", "x itself", "memory apart from x: tiles read rows that other tiles write"
            ) from None
        raise
    return target


def _in_place(x: torch.Tensor, out: torch.Tensor | None) -> bool:
    """Whether `out` begins where x does; without tokens neither has memory."""
    return out is not None and x.shape[0] > 0 and out.data_ptr() == x.data_ptr()


@operator("conv_state")
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
    settled: bool = False,
    pdl: bool = True,
    out: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """One token for each of N sequences. In place only column `positions mod W` is written.

    Args: as `causal_conv1d_prefill` with `x [N, C]`; `out` may be x itself. settled: the kernel launched directly before
    this one wrote neither ids, positions nor these windows, which are then loaded while it drains. pdl: as in `gdn_decode`.

    Returns:
        `[N, C]`; zeros in rows with neither id.

    Raises:
        InvalidArgumentError, UnsupportedConfigError, BackendUnavailableError: before any launch, nothing changed.
    """
    kernels = runs_kernels(backend, "x", x)
    arguments = (x, weight, conv_state, read_ids, write_ids, positions)
    if kernels:
        return _decode(*arguments, bias, activation, settled, pdl, out)
    _check("causal_conv1d_decode", *arguments, bias, activation, out, kernels=False)
    return reference.causal_conv1d_decode(*arguments, bias=bias, activation=activation, out=out)


def _decode(
    x: torch.Tensor,
    weight: torch.Tensor,
    conv_state: torch.Tensor,
    read_ids: torch.Tensor,
    write_ids: torch.Tensor,
    positions: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation,
    settled: bool,
    pdl: bool,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Check and run one token on the current stream.

    A full check takes longer than the launch. The loaded function checks ranks, dtypes, sizes, strides and devices by
    itself before it launches, so only what it cannot see is checked here; its refusal becomes the full check's named error.
    """
    arguments = (x, weight, conv_state, read_ids, write_ids, positions)
    target = out
    try:
        if out is None:
            target = torch.empty_like(x, memory_format=torch.contiguous_format)
        conv_launch.launch_decode(*arguments, bias, activation, target, settled=settled, pdl=pdl)
    except REFUSALS:
        _check("causal_conv1d_decode", *arguments, bias, activation, out, kernels=True)
        if x.shape[0] != 0:
            raise
    return target


@operator("conv_state", "draft_log.x")
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
    settled: bool = False,
    pdl: bool = True,
    out: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Commit the inputs of accepted drafts to the window, then run up to 8 new tokens a row and log their inputs.

    Args: as `causal_conv1d_decode`, with T packed tokens, and
        positions: `[N]`, tokens committed in the read slot before this call.
        draft_log: a log with `x`; num_accepted: `[N]` int32, as `gdn_verify`.

    Returns:
        `[T, C]`.

    Raises:
        InvalidArgumentError, UnsupportedConfigError, BackendUnavailableError: before any launch, nothing changed.
    """
    arguments = (x, weight, conv_state, read_ids, write_ids, positions)
    step = (cu_seqlens, draft_log, num_accepted)
    kernels, target = runs_kernels(backend, "x", x), out
    try:
        if not kernels:
            raise ValueError
        if out is None:
            target = torch.empty_like(x, memory_format=torch.contiguous_format)
        conv_launch.launch_verify(*arguments, *step, bias, activation, target, settled=settled, pdl=pdl)
    except REFUSALS:
        name = "causal_conv1d_verify"
        _check(name, *arguments, bias, activation, out, packed=True, cu_seqlens=cu_seqlens, kernels=kernels)
        check_log(draft_log, num_accepted, read_ids.shape[0], x.device, inputs=(x.shape[1], x.dtype), kernels=kernels)
        if not kernels:
            return reference.causal_conv1d_verify(*arguments, *step, bias=bias, activation=activation, out=out)
        if read_ids.shape[0]:
            raise
        target.zero_()
    return target


@operator("conv_state")
def causal_conv1d_commit(
    conv_state: torch.Tensor,
    read_ids: torch.Tensor,
    write_ids: torch.Tensor,
    positions: torch.Tensor,
    draft_log: DraftLog,
    num_accepted: torch.Tensor,
    *,
    backend: Backend = "auto",
) -> None:
    """Commit the inputs of accepted drafts to the windows alone; the log is only read. Args: as `causal_conv1d_verify`.

    Raises:
        InvalidArgumentError, UnsupportedConfigError, BackendUnavailableError: before any launch, nothing changed.
    """
    kernels = runs_kernels(backend, "conv_state", conv_state)
    arguments = (conv_state, read_ids, write_ids, positions, draft_log, num_accepted)
    try:
        if not kernels:
            raise ValueError
        conv_launch.launch_commit(*arguments)
    except REFUSALS:
        if conv_state.dim() != 3:
            raise InvalidArgumentError("conv_state", conv_state.shape, "a pool [S, W, C]") from None
        device = conv_state.device
        width, channels = conv_state.shape[1:]
        check_pool("conv_state", conv_state, (width, channels), FLOAT_DTYPES, device)
        check_ids("read_ids", read_ids, None, device)
        check_ids("write_ids", write_ids, read_ids.shape[0], device)
        check_ids("positions", positions, read_ids.shape[0], device)
        inputs = (channels, conv_state.dtype)
        check_log(draft_log, num_accepted, read_ids.shape[0], device, inputs=inputs, kernels=kernels)
        if not kernels:
            return reference.causal_conv1d_commit(*arguments)
        check_kernel_dtype("causal_conv1d_commit", "conv_state", conv_state.dtype, (torch.bfloat16,))
        _check_kernel_shape("causal_conv1d_commit", width, channels)
        if read_ids.shape[0]:
            raise
