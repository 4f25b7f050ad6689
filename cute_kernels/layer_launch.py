"""What the fused layer steps do, one token or a verify step: launch; where that is refused, check the arguments in full."""

from __future__ import annotations

from typing import Any

import torch

from . import reference
from .compile.cache import CompiledKernel, jit_cache
from .compile.shared_library import family
from .configs import layer as configs
from .configs import tables
from .configs.recurrent import Kind, StateDtype
from .configs.verify import MAX_TOKENS
from .delta_rule import check_parameters, kind_of
from .draft_log import DraftLog
from .errors import InvalidArgumentError, UnsupportedConfigError
from .reference.layer import GateActivation
from .validation import (
    FLOAT_DTYPES,
    HEAD_DIM,
    REFUSALS,
    STATE_DTYPES,
    Backend,
    check_alignment,
    check_choice,
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
    is_finite,
    runs_kernels,
)

layer_decode = jit_cache("layer_decode")
layer_verify = {file: jit_cache(file) for file in ("layer_verify", "wy_layer_verify")}

STATE_NAMES: dict[torch.dtype, StateDtype] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
WEIGHT_DTYPES = (torch.float32, torch.bfloat16)
ACTIVATIONS = {"silu": configs.SILU_GATE, "sigmoid": 0}
Verify = tuple[torch.Tensor, DraftLog, torch.Tensor]
Arguments = tuple[
    torch.Tensor, ...
]  # x, gate, b, z, conv_weight, conv_state, A_log, dt_bias, norm_weight, state, ids, positions


def verify_arguments(
    cu_seqlens: torch.Tensor | None, draft_log: DraftLog | None, num_accepted: torch.Tensor | None
) -> Verify | None:
    """The three arguments of a verify step, or None for a single token. Raises unless all or none are given."""
    if cu_seqlens is None and draft_log is None and num_accepted is None:
        return None
    if cu_seqlens is None or draft_log is None or num_accepted is None:
        names = {"cu_seqlens": cu_seqlens, "draft_log": draft_log, "num_accepted": num_accepted}
        given = ", ".join(name for name, value in names.items() if value is not None)
        raise InvalidArgumentError(
            "cu_seqlens, draft_log, num_accepted", f"{given} alone", "all three (verify) or none"
        )
    return cu_seqlens, draft_log, num_accepted


def check_arguments(
    operator: str,
    arguments: Arguments,
    conv_bias: torch.Tensor | None,
    gate_activation: GateActivation,
    lower_bound: float | None,
    scale: float | None,
    eps: float,
    verify: Verify | None,
    out: torch.Tensor | None,
    *,
    kda: bool,
    kernels: bool,
) -> None:
    """Check everything about a layer step's arguments that needs no look at values.

    Raises InvalidArgumentError for arguments that contradict each other and UnsupportedConfigError for a combination that
    only the references serve (when `kernels`).
    """
    x, gate, b, z, conv_weight, conv_state, A_log, dt_bias, norm_weight, state, read_ids, write_ids, positions = (
        arguments
    )
    if not isinstance(x, torch.Tensor) or x.dim() != 2:
        raise InvalidArgumentError("x", getattr(x, "shape", type(x).__name__), "a tensor [rows, C]")
    if not isinstance(state, torch.Tensor) or state.dim() != 4:
        raise InvalidArgumentError("state", getattr(state, "shape", type(state).__name__), "a pool [S, HV, V, K]")
    if not isinstance(conv_weight, torch.Tensor) or conv_weight.dim() != 2:
        given = getattr(conv_weight, "shape", type(conv_weight).__name__)
        raise InvalidArgumentError("conv_weight", given, "a tensor [C, W]")
    device, (rows, channels), width = x.device, x.shape, conv_weight.shape[1]
    slots, hv, value_size, key_size = state.shape
    keys = channels - hv * value_size
    if keys <= 0 or keys % (2 * key_size):
        raise InvalidArgumentError("x", f"{channels} channels", f"2 HK * {key_size} + {hv} * {value_size} (q | k | v)")
    hk = keys // (2 * key_size)
    check_heads(hk, hv, key_size, value_size)
    gate_name = "g" if kda else "a"
    check_tensor("x", x, (rows, channels), FLOAT_DTYPES, device)
    check_tensor(gate_name, gate, (rows, hv, key_size) if kda else (rows, hv), FLOAT_DTYPES, device)
    check_tensor("b", b, (rows, hv), FLOAT_DTYPES, device)
    check_tensor("z", z, (rows, hv * value_size), FLOAT_DTYPES, device)
    check_tensor("conv_weight", conv_weight, (channels, width), FLOAT_DTYPES, device)
    check_parameters(A_log, dt_bias, hv, (hv, key_size) if kda else (hv,), device, kernels=kernels, aligned=kda)
    check_tensor("norm_weight", norm_weight, (value_size,), FLOAT_DTYPES, device)
    check_pool("state", state, (hv, value_size, key_size), STATE_DTYPES if kernels else FLOAT_DTYPES, device)
    check_pool("conv_state", conv_state, (width, channels), (x.dtype,), device)
    if conv_state.shape[0] != slots:
        raise InvalidArgumentError("conv_state", f"{conv_state.shape[0]} slots", f"{slots}, those of state")
    if conv_bias is not None:
        check_tensor("conv_bias", conv_bias, (channels,), FLOAT_DTYPES, device)
    check_ids("read_ids", read_ids, rows if verify is None else None, device)
    sequences = read_ids.shape[0]
    check_ids("write_ids", write_ids, sequences, device)
    check_ids("positions", positions, sequences, device)
    if verify is not None:
        cu_seqlens, log, num_accepted = verify
        check_ids("cu_seqlens", cu_seqlens, sequences + 1, device)
        sizes: dict[str, Any] = {"heads": (hk, hv, key_size, value_size), "inputs": (channels, x.dtype)}
        check_log(log, num_accepted, sequences, device, **sizes, kda=kda, kernels=kernels)
    check_gate(lower_bound, scale)
    if not is_finite(eps) or eps < 0.0:
        raise InvalidArgumentError("eps", repr(eps), "a finite number, not negative")
    check_choice("gate_activation", gate_activation, ("silu", "sigmoid"))
    inputs = (("x", x), (gate_name, gate), ("b", b), ("z", z), ("conv_weight", conv_weight))
    for name, tensor in inputs:
        check_rows(name, tensor)
    if out is not None:
        check_tensor("out", out, z.shape, (z.dtype,), device)
        check_rows("out", out)
    if kernels:
        _check_kernel(operator, arguments, conv_bias, out, kda)


def _check_kernel(
    operator: str, arguments: Arguments, conv_bias: torch.Tensor | None, out: torch.Tensor | None, kda: bool
) -> None:
    x, gate, b, z, conv_weight, _, _, _, norm_weight, state = arguments[:10]
    check_kernel_heads(operator, state.shape[3], state.shape[2])
    for name, tensor in (("x", x), ("g" if kda else "a", gate), ("b", b), ("z", z)):
        check_kernel_dtype(operator, name, tensor.dtype, (torch.bfloat16,))
    check_kernel_dtype(operator, "conv_weight", conv_weight.dtype, WEIGHT_DTYPES)
    check_kernel_dtype(operator, "norm_weight", norm_weight.dtype, WEIGHT_DTYPES)
    if conv_bias is not None:
        check_kernel_dtype(operator, "conv_bias", conv_bias.dtype, (conv_weight.dtype,))
    if conv_weight.shape[1] != configs.CONV_WIDTH:
        raise UnsupportedConfigError(
            f"{operator}: conv width {conv_weight.shape[1]}; allowed with kernels: {configs.CONV_WIDTH} "
            "(backend='reference' serves others)"
        )
    vectors = (("x", x), ("z", z), *((("g", gate),) if kda else ()), *((("out", out),) if out is not None else ()))
    for name, tensor in vectors:
        check_alignment(name, tensor)
    for name, parameter in (("conv_weight", conv_weight), ("norm_weight", norm_weight), ("conv_bias", conv_bias)):
        if parameter is not None:
            check_dense(name, parameter)


def step(
    kda: bool,
    lower_bound: float | None,
    conv_bias: torch.Tensor | None,
    gate_activation: GateActivation,
    eps: float,
    scale: float | None,
    verify: Verify | None,
    settled: bool,
    pdl: bool,
    out: torch.Tensor | None,
    backend: Backend,
    arguments: Arguments,
) -> torch.Tensor:
    """Check and run one token a row, or a verify step.

    As in the single operators, the loaded function checks each tensor and the sizes they share by itself, `layer_function`
    the backend and how the sizes hang together; a refusal of either becomes the named error of the full check.
    """
    x, gate, b, z, conv_weight, conv_state, A_log, dt_bias, norm_weight, state, read_ids, write_ids, positions = (
        arguments
    )
    target = out
    try:
        flags, rest = ACTIVATIONS[gate_activation] | (configs.SETTLED if settled else 0), conv_weight
        if not pdl:
            flags |= configs.PLAIN
        tokens: tuple[Any, ...] = ()
        if verify is not None:
            cu_seqlens, log, num_accepted = verify
            half, rows = log.half, log.rows
            if rows is not None:
                flags |= configs.MAPPED
            tokens = (cu_seqlens, log.k, log.u, log.g, log.x, half, half if rows is None else rows, num_accepted)
        if conv_bias is not None:
            if conv_bias.shape != conv_weight.shape[:1] or not conv_bias.is_contiguous():
                raise ValueError
            flags, rest = flags | configs.CONV_BIAS, conv_bias.unsqueeze(1)
        if norm_weight.dtype == torch.bfloat16:
            flags |= configs.NORM_BF16
        elif norm_weight.dtype == torch.float32:
            norm_weight = norm_weight.view(torch.bfloat16)  # two a value; the kernel reads them by the flag
        else:
            raise ValueError
        if out is None:
            target = torch.empty_like(z, memory_format=torch.contiguous_format)
        layer_family(kda, lower_bound, verify is not None, backend)(
            x,
            gate,
            b,
            z,
            conv_weight,
            rest,
            conv_state,
            A_log,
            dt_bias.view(-1) if kda and dt_bias.dim() == 2 else dt_bias,
            norm_weight,
            state,
            read_ids,
            write_ids,
            positions,
            *tokens,
            target,
            flags,
            HEAD_DIM**-0.5 if scale is None else scale,
            lower_bound or 0.0,
            eps,
        )
    except REFUSALS:
        name, kernels = "kda_layer_decode" if kda else "gdn_layer_decode", runs_kernels(backend, "x", x)
        check_arguments(
            name, arguments, conv_bias, gate_activation, lower_bound, scale, eps, verify, out, kda=kda, kernels=kernels
        )
        if not kernels:
            names = ("cu_seqlens", "draft_log", "num_accepted")
            options: dict[str, Any] = {"lower_bound": lower_bound} if kda else {}
            options |= dict(zip(names, verify or (None,) * 3)) | {"conv_bias": conv_bias, "eps": eps, "scale": scale}
            run = reference.kda_layer_decode if kda else reference.gdn_layer_decode
            return run(*arguments, gate_activation=gate_activation, out=out, **options)
        if read_ids.shape[0]:
            raise
        target = torch.zeros_like(z, memory_format=torch.contiguous_format) if out is None else out.zero_()
    return target


@tables.memoised
def layer_family(kda: bool, lower_bound: float | None, verify: bool, backend: Backend) -> CompiledKernel:
    """What launches the steps of this kind: a kernel is chosen once for each set of sizes, dtypes and flags."""
    check_gate(lower_bound, None)
    kind = kind_of(kda, lower_bound)
    return family(lambda *given: layer_function(kind, verify, backend, *given))


def layer_function(kind: Kind, verify: bool, backend: Backend, *given: Any) -> CompiledKernel:
    """The loaded function for such arguments. ValueError or KeyError where their sizes contradict each other or none fits."""
    if not runs_kernels(backend, "x", given[0]):
        raise ValueError
    x, _, _, z, conv_weight, _, _, A_log, dt_bias, norm_weight, state, read_ids = given[:12]
    flags, scale, _, eps = given[-4:]
    (tokens, channels), hv, rows = x.shape, A_log.numel(), read_ids.numel()
    hk, rest = divmod(channels - hv * HEAD_DIM, 2 * HEAD_DIM)
    fits = hk > 0 and not rest and hv % hk == 0 and z.numel() == tokens * hv * HEAD_DIM
    fits &= norm_weight.numel() == HEAD_DIM * (1 if flags & configs.NORM_BF16 else 2)
    fits &= dt_bias.numel() == (hv if kind == "gdn" else hv * HEAD_DIM) and is_finite(eps) and eps >= 0.0
    if verify:
        cu_seqlens, log_keys, _, _, _, half, log_rows = given[14:21]
        held = rows == log_rows.numel() if flags & configs.MAPPED else rows <= half.numel()
        fits &= cu_seqlens.numel() == rows + 1 and log_keys.shape[3] == hk and held
        fits &= log_keys.shape[2] <= MAX_TOKENS
    if not fits or rows == 0:
        raise ValueError
    check_gate(None, scale)
    state_name, weight = STATE_NAMES[state.dtype], STATE_NAMES[conv_weight.dtype]
    if not verify:
        return layer_decode(configs.choose(kind, state_name, weight, rows * hv))
    key = configs.choose_verify_layer(kind, state_name, weight, rows * hv)
    return layer_verify[configs.verify_file(key)](key)
