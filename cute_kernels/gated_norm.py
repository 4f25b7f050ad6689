"""Public gated RMS norm: what follows the delta rule in a layer, for prefill, where it is a launch of its own."""

from __future__ import annotations

import math

import torch

from .compile.cache import jit_cache
from .configs.gated_norm import SILU, WEIGHT_BF16, GatedNormKey
from .errors import InvalidArgumentError, UnsupportedConfigError
from .opaque import operator
from .reference import layer as reference
from .reference.gdn import deliver
from .reference.layer import GateActivation
from .validation import (
    FLOAT_DTYPES,
    HEAD_DIM,
    REFUSALS,
    Backend,
    check_alignment,
    check_choice,
    check_dense,
    check_kernel_dtype,
    check_rows,
    check_tensor,
    is_finite,
    runs_kernels,
)

_norm = jit_cache("gated_norm")
KEY = GatedNormKey()
ACTIVATIONS = ("silu", "sigmoid")


@operator()
def gated_rms_norm(
    o: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    *,
    gate_activation: GateActivation = "silu",
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """`o / rms(o) * weight * act(z)` over the last dimension, in fp32, rounded once.

    Args:
        o: `[T, H, V]` or `[R, V]`, contiguous.
        z: of o's shape; its rows may be views of a wider packed row.
        weight: `[V]`, bf16 or fp32.
        gate_activation: of z, "silu" or "sigmoid".
        eps: added to the mean square.
        out: of o's shape, contiguous, allocated unless given; may be o or z.
        backend: "auto" (kernels on sm_90, references elsewhere), "kernels" or "reference".

    Returns:
        As o, in z's dtype.

    Raises:
        InvalidArgumentError, UnsupportedConfigError, BackendUnavailableError: before any launch, nothing changed.
    """
    kernels, target = runs_kernels(backend, "o", o), out
    try:
        fits = gate_activation in ACTIVATIONS and 0 <= eps < math.inf and weight.shape == (HEAD_DIM,)
        if not kernels or not fits or o.numel() == 0 or o.dim() > 3 or o.shape[-1] != HEAD_DIM or o.shape != z.shape:
            raise ValueError
        if out is None:
            target = torch.empty_like(z, memory_format=torch.contiguous_format)
        words, flags = weight, SILU if gate_activation == "silu" else 0
        if weight.dtype == torch.bfloat16:  # words of two each, which the kernel takes apart by the flag
            words, flags = weight.view(torch.float32), flags | WEIGHT_BF16
        if target.shape != o.shape:
            raise ValueError
        tokens = o.shape[0]
        _norm(KEY)(o.view(tokens, -1), z.view(tokens, -1), words, target.view(tokens, -1), flags, eps)
    except REFUSALS:
        _check(o, z, weight, gate_activation, eps, out, kernels)
        if kernels and o.numel():
            raise
        if not kernels:
            wide = torch.promote_types(o.dtype, torch.float32)
            given = (x.to(wide) for x in (o, z, weight))
            return deliver(reference.gated_rms_norm(*given, gate_activation, eps), z.dtype, out)
        target = torch.empty_like(z) if out is None else out
    return target


def _check(
    o: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    gate_activation: GateActivation,
    eps: float,
    out: torch.Tensor | None,
    kernels: bool,
) -> None:
    if o.dim() not in (2, 3):
        raise InvalidArgumentError("o", list(o.shape), "a tensor [T, H, V] or [R, V]")
    size = o.shape[-1]
    check_tensor("o", o, o.shape, FLOAT_DTYPES, o.device)
    check_tensor("z", z, o.shape, FLOAT_DTYPES, o.device)
    check_tensor("weight", weight, (size,), FLOAT_DTYPES, o.device)
    check_choice("gate_activation", gate_activation, ACTIVATIONS)
    if not is_finite(eps) or eps < 0:
        raise InvalidArgumentError("eps", repr(eps), "a number of at least 0")
    rows = {"o": o, "z": z}
    if out is not None:
        check_tensor("out", out, o.shape, (z.dtype,), o.device)
        rows["out"] = out
    for name, tensor in rows.items():
        check_rows(name, tensor)
    check_dense("weight", weight)
    if kernels:
        if size != HEAD_DIM:
            raise UnsupportedConfigError(
                f"gated_rms_norm: rows of {size} values; allowed with kernels: {HEAD_DIM} (backend='reference' serves others)"
            )
        for name, tensor in rows.items():
            check_kernel_dtype("gated_rms_norm", name, tensor.dtype, (torch.bfloat16,))
            (check_alignment if name == "z" else check_dense)(name, tensor)
        check_kernel_dtype("gated_rms_norm", "weight", weight.dtype, (torch.float32, torch.bfloat16))
