"""What the public GDN and KDA operators do: check the arguments, choose a backend, launch."""

from __future__ import annotations

import math
from typing import Any

import torch

from . import prefill_launch, reference, verify_launch
from .checkpoints import Checkpoints
from .compile.cache import CompiledKernel, jit_cache
from .configs import recurrent, tables
from .draft_log import DraftLog
from .errors import InvalidArgumentError
from .validation import (
    FLOAT_DTYPES,
    HEAD_DIM,
    REFUSALS,
    STATE_DTYPES,
    Backend,
    check_alignment,
    check_checkpoints,
    check_dense,
    check_gate,
    check_heads,
    check_ids,
    check_kernel_dtype,
    check_kernel_heads,
    check_log,
    check_pool,
    check_rows,
    check_tensor,
    is_sound,
    parts_of,
    remember,
    runs_kernels,
    signature,
    uses_kernels,
)

recurrent_decode = jit_cache("recurrent_decode")

STATE_NAMES: dict[torch.dtype, recurrent.StateDtype] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
PARAMETER_DTYPES = (torch.float32,)


def kind_of(kda: bool, lower_bound: float | None) -> recurrent.Kind:
    """Which gate a kernel computes."""
    if not kda:
        return "gdn"
    return "kda_softplus" if lower_bound is None else "kda_bounded"


def check_arguments(
    operator: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    read_ids: torch.Tensor,
    write_ids: torch.Tensor,
    out: torch.Tensor | None,
    *,
    kda: bool,
    lower_bound: float | None = None,
    scale: float | None = None,
    packed: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    kernels: bool,
) -> None:
    """Check everything about the arguments of a delta-rule operator that needs no look at values. `packed`: of sequences.

    Raises InvalidArgumentError for arguments that contradict each other and UnsupportedConfigError for a combination
    that only the references serve (when `kernels`).
    """
    if not isinstance(q, torch.Tensor) or q.dim() != 3:
        raise InvalidArgumentError("q", getattr(q, "shape", type(q).__name__), "a tensor [rows, HK, K]")
    if not isinstance(v, torch.Tensor) or v.dim() != 3:
        raise InvalidArgumentError("v", getattr(v, "shape", type(v).__name__), "a tensor [rows, HV, V]")
    device, rows, hk, key_size = q.device, q.shape[0], q.shape[1], q.shape[2]
    hv, value_size = v.shape[1], v.shape[2]
    check_heads(hk, hv, key_size, value_size)
    inputs = (q.dtype,) if q.dtype in FLOAT_DTYPES else FLOAT_DTYPES
    check_tensor("q", q, (rows, hk, key_size), FLOAT_DTYPES, device)
    check_tensor("k", k, (rows, hk, key_size), inputs, device)
    check_tensor("v", v, (rows, hv, value_size), inputs, device)
    check_tensor("g" if kda else "a", gate, (rows, hv, key_size) if kda else (rows, hv), FLOAT_DTYPES, device)
    check_tensor("b", b, (rows, hv), FLOAT_DTYPES, device)
    check_parameters(A_log, dt_bias, hv, (hv, key_size) if kda else (hv,), device, kernels=kernels)
    check_pool("state", state, (hv, value_size, key_size), STATE_DTYPES if kernels else FLOAT_DTYPES, device)
    check_ids("read_ids", read_ids, None if packed else rows, device)
    check_ids("write_ids", write_ids, read_ids.shape[0], device)
    if packed:
        check_ids("cu_seqlens", cu_seqlens, read_ids.shape[0] + 1, device)
    check_gate(lower_bound, scale)
    if out is not None:
        check_tensor("out", out, v.shape, (v.dtype,), device)
        check_rows("out", out)
    for name, tensor in (("q", q), ("k", k), ("v", v), ("g" if kda else "a", gate), ("b", b)):
        check_rows(name, tensor)
    if kernels:
        check_kernel_heads(operator, key_size, value_size)
        for name, tensor in (("q", q), ("k", k), ("v", v), ("g" if kda else "a", gate), ("b", b)):
            check_kernel_dtype(operator, name, tensor.dtype, (torch.bfloat16,))
        for name, tensor in (("q", q), ("k", k), ("v", v)) + ((("g", gate),) if kda else ()):
            check_alignment(name, tensor)
        if packed and out is not None:
            check_alignment("out", out)


def check_parameters(
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    hv: int,
    bias: tuple[int, ...],
    device: torch.device,
    *,
    kernels: bool,
    aligned: bool = True,
) -> None:
    """Check the gate's parameters: A_log `[HV]`, dt_bias of the shape `bias` or flat, read in vectors if `aligned`."""
    dtypes = PARAMETER_DTYPES if kernels else FLOAT_DTYPES
    check_tensor("A_log", A_log, (hv,), dtypes, device)
    flat = not isinstance(dt_bias, torch.Tensor) or dt_bias.dim() == 1
    check_tensor("dt_bias", dt_bias, (math.prod(bias),) if flat else bias, dtypes, device)
    if kernels:
        for name, parameter in (("A_log", A_log), ("dt_bias", dt_bias)):
            if not parameter.is_contiguous():
                raise InvalidArgumentError(name, f"strides {list(parameter.stride())}", "a contiguous tensor")
        if aligned:
            check_dense("dt_bias", dt_bias)


def check_commit_arguments(
    operator: str,
    parameters: tuple[torch.Tensor, torch.Tensor] | None,
    state: torch.Tensor,
    read_ids: torch.Tensor,
    write_ids: torch.Tensor,
    log: DraftLog,
    num_accepted: torch.Tensor,
    *,
    lower_bound: float | None = None,
    kernels: bool,
) -> None:
    """Check the arguments of a commit. `parameters`: A_log and dt_bias of KDA, which recomputes gates from logged raw ones."""
    if not isinstance(state, torch.Tensor) or state.dim() != 4:
        raise InvalidArgumentError("state", getattr(state, "shape", type(state).__name__), "a pool [S, HV, V, K]")
    _, hv, value_size, key_size = state.shape
    dtypes = STATE_DTYPES if kernels else FLOAT_DTYPES
    check_pool("state", state, (hv, value_size, key_size), dtypes, state.device)
    check_ids("read_ids", read_ids, None, state.device)
    check_ids("write_ids", write_ids, read_ids.shape[0], state.device)
    check_gate(lower_bound, None)
    if kernels:
        check_kernel_heads(operator, key_size, value_size)
    kda, heads = parameters is not None, (None, hv, key_size, value_size)
    if parameters is not None:
        check_parameters(*parameters, hv, (hv, key_size), state.device, kernels=kernels)
    check_log(log, num_accepted, read_ids.shape[0], state.device, heads=heads, kda=kda, kernels=kernels)


def decode(
    kda: bool,
    lower_bound: float | None,
    scale: float | None,
    qk_l2norm: bool,
    settled: int,
    backend: Backend,
    out: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    read_ids: torch.Tensor,
    write_ids: torch.Tensor,
) -> torch.Tensor:
    """Check and run T = 1 decode.

    A full check takes longer than the launch. The loaded function checks ranks, dtypes, sizes, strides, addresses and
    devices by itself before it launches, `decode_function` what no tensor shows alone; a refusal of either becomes the full
    check's named error.
    """
    try:
        function, factor = decode_function(
            backend, q.get_device(), kda, lower_bound, scale, state.dtype, q.shape, A_log.numel(), dt_bias.numel()
        )
        if out is None:
            out = torch.empty_like(v)
        function(
            q,
            k,
            v,
            gate,
            b,
            A_log,
            dt_bias.view(-1) if kda and dt_bias.dim() == 2 else dt_bias,
            state,
            read_ids,
            write_ids,
            out,
            qk_l2norm,
            settled,
            factor,
            lower_bound or 0.0,
        )
    except REFUSALS:
        operator, kernels = "kda_decode" if kda else "gdn_decode", runs_kernels(backend, "q", q)
        arguments = (q, k, v, gate, b, A_log, dt_bias, state, read_ids, write_ids)
        check_arguments(operator, *arguments, out, kda=kda, lower_bound=lower_bound, scale=scale, kernels=kernels)
        options: dict[str, Any] = {"scale": scale, "qk_l2norm": qk_l2norm, "out": out}
        if not kernels:
            if kda:
                return reference.kda_decode(*arguments, lower_bound=lower_bound, **options)
            return reference.gdn_decode(*arguments, **options)
        if q.shape[0]:
            raise
        out = torch.empty_like(v) if out is None else out
    return out


def prefill(
    kda: bool,
    lower_bound: float | None,
    scale: float | None,
    qk_l2norm: bool,
    backend: Backend,
    out: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    checkpoints: Checkpoints | None,
    *arguments: Any,
) -> torch.Tensor:
    """Check and run packed sequences; `arguments` are q, k, v, gate, b, A_log, dt_bias, state, read_ids and write_ids."""
    q, v, read_ids = arguments[0], arguments[2], arguments[8]
    operator, kernels = "kda_prefill" if kda else "gdn_prefill", runs_kernels(backend, "q", q)
    facts = signature(operator, kernels, lower_bound, scale, *arguments, out, cu_seqlens, *parts_of(checkpoints))
    if not is_sound(facts):
        gate: dict[str, Any] = {"kda": kda, "lower_bound": lower_bound, "scale": scale}
        check_arguments(operator, *arguments, out, **gate, packed=True, cu_seqlens=cu_seqlens, kernels=kernels)
        if checkpoints is not None:
            check_checkpoints(checkpoints, read_ids.shape[0], q.device)
        remember(facts)
    options: dict[str, Any] = {"checkpoints": checkpoints, "scale": scale, "qk_l2norm": qk_l2norm}
    if not kernels:
        if kda:
            return reference.kda_prefill(*arguments, cu_seqlens, lower_bound=lower_bound, **options, out=out)
        return reference.gdn_prefill(*arguments, cu_seqlens, **options, out=out)
    if out is None:
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
    kind = kind_of(kda, lower_bound)
    prefill_launch.launch_prefill(kind, *arguments, cu_seqlens, out, **options, lower_bound=lower_bound)
    return out


def verify(
    kda: bool,
    lower_bound: float | None,
    round_every_token: bool,
    scale: float | None,
    qk_l2norm: bool,
    settled: int,
    backend: Backend,
    out: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    draft_log: DraftLog,
    num_accepted: torch.Tensor,
    arguments: tuple[Any, ...],
) -> torch.Tensor:
    """Check and run a verify step; `arguments` as in `prefill`, checks as in `decode`."""
    q, v, read_ids = arguments[0], arguments[2], arguments[8]
    target = out
    try:
        if out is None:
            target = torch.empty_like(v, memory_format=torch.contiguous_format)
        kind = kind_of(kda, lower_bound)
        verify_launch.launch_verify(
            kind, *arguments, cu_seqlens, draft_log, num_accepted, target, round_every_token, scale, qk_l2norm, lower_bound,
            settled, None, backend,
        )  # fmt: skip
    except REFUSALS:
        operator, kernels = "kda_verify" if kda else "gdn_verify", runs_kernels(backend, "q", q)
        gate: dict[str, Any] = {"kda": kda, "lower_bound": lower_bound, "scale": scale}
        check_arguments(operator, *arguments, out, **gate, packed=True, cu_seqlens=cu_seqlens, kernels=kernels)
        heads = (q.shape[1], v.shape[1], q.shape[2], v.shape[2])
        check_log(draft_log, num_accepted, read_ids.shape[0], q.device, heads=heads, kda=kda, kernels=kernels)
        if not kernels:
            step = (cu_seqlens, draft_log, num_accepted)
            options: dict[str, Any] = {"round_every_token": round_every_token, "scale": scale, "qk_l2norm": qk_l2norm}
            if kda:
                return reference.kda_verify(*arguments, *step, lower_bound=lower_bound, **options, out=out)
            return reference.gdn_verify(*arguments, *step, **options, out=out)
        if read_ids.shape[0]:
            raise
        target.zero_()
    return target


def commit(
    parameters: tuple[torch.Tensor, torch.Tensor] | None,
    lower_bound: float | None,
    round_every_token: bool,
    backend: Backend,
    state: torch.Tensor,
    *rest: Any,
) -> None:
    """Check and run a commit. `parameters`: A_log and dt_bias of KDA; `rest`: read_ids, write_ids, draft_log, num_accepted."""
    try:
        kind, (A_log, dt_bias) = kind_of(parameters is not None, lower_bound), parameters or (None, None)
        verify_launch.launch_commit(
            kind, A_log, dt_bias, state, *rest, round_every_token, True, lower_bound, None, backend
        )
    except REFUSALS:
        operator, kernels = "kda_commit" if parameters else "gdn_commit", runs_kernels(backend, "state", state)
        check_commit_arguments(operator, parameters, state, *rest, lower_bound=lower_bound, kernels=kernels)
        if kernels and rest[0].shape[0]:
            raise
        if kernels:
            return
        if parameters:
            reference.kda_commit(
                *parameters, state, *rest, round_every_token=round_every_token, lower_bound=lower_bound
            )
        else:
            reference.gdn_commit(state, *rest, round_every_token=round_every_token)


@tables.memoised
def decode_function(
    backend: Backend,
    device: int,
    kda: bool,
    lower_bound: float | None,
    scale: float | None,
    dtype: torch.dtype,
    q: torch.Size,
    hv: int,
    bias: int,
) -> tuple[CompiledKernel, float]:
    """The loaded function for these sizes and the scale, on CUDA device number `device` (-1: none).

    q: its shape. hv, bias: lengths of A_log, which the function compares with v and the pool, and of dt_bias. Raises ValueError
    or KeyError where there is nothing to launch: the reference is to run, there are no rows, or the sizes contradict each other.
    """
    if device < 0 or not uses_kernels(backend, torch.device("cuda", device)):
        raise ValueError
    rows, hk, width = q
    if rows == 0 or hv % hk or bias != (hv * HEAD_DIM if kda else hv):
        raise ValueError
    check_gate(lower_bound, scale)
    function = recurrent_decode(recurrent.choose(kind_of(kda, lower_bound), STATE_NAMES[dtype], rows * hv))
    return function, width**-0.5 if scale is None else scale
