"""What the public GDN and KDA operators share: argument checks and the launch of T = 1 decode."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .checkpoints import Checkpoints
from .compile.cache import CompiledKernel, jit_cache
from .configs import recurrent, tables
from .draft_log import DraftLog
from .errors import InvalidArgumentError
from .validation import (
    FLOAT_DTYPES,
    HEAD_DIM,
    STATE_DTYPES,
    Backend,
    check_alignment,
    check_heads,
    check_ids,
    check_kernel_dtype,
    check_kernel_heads,
    check_lower_bound,
    check_pool,
    check_rows,
    check_tensor,
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
    cu_seqlens: torch.Tensor | None = None,
    kernels: bool,
) -> None:
    """Check everything about the arguments of a delta-rule operator that needs no look at values.

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
    parameters = PARAMETER_DTYPES if kernels else FLOAT_DTYPES
    check_tensor("A_log", A_log, (hv,), parameters, device)
    if kda and isinstance(dt_bias, torch.Tensor) and dt_bias.dim() == 2:
        check_tensor("dt_bias", dt_bias, (hv, key_size), parameters, device)
    else:
        check_tensor("dt_bias", dt_bias, (hv * key_size if kda else hv,), parameters, device)
    check_pool("state", state, (hv, value_size, key_size), STATE_DTYPES if kernels else FLOAT_DTYPES, device)
    sequences = read_ids.shape[0] if isinstance(read_ids, torch.Tensor) and read_ids.dim() == 1 else rows
    check_ids("read_ids", read_ids, sequences, device)
    check_ids("write_ids", write_ids, sequences, device)
    if cu_seqlens is not None:
        check_ids("cu_seqlens", cu_seqlens, sequences + 1, device)
    elif sequences != rows:
        raise InvalidArgumentError("read_ids", f"{sequences} ids", f"{rows} ids, one for each row of q")
    check_lower_bound(lower_bound)
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
        for name, tensor in (("A_log", A_log), ("dt_bias", dt_bias)):
            if not tensor.is_contiguous():
                raise InvalidArgumentError(name, f"strides {list(tensor.stride())}", "a contiguous tensor")


def check_log(
    log: DraftLog, num_accepted: torch.Tensor, sequences: int, hk: int | None, hv: int, *, kda: bool, kernels: bool
) -> None:
    """Check a draft log and the accepted counts against the operator's shapes."""
    if not isinstance(log, DraftLog):
        raise InvalidArgumentError("draft_log", type(log).__name__, "a DraftLog")
    device, batch, tokens, value_size = log.u.device, log.batch, log.max_tokens, log.u.shape[-1]
    key_size = log.k.shape[-1]
    floats: Sequence[torch.dtype] = (torch.bfloat16,) if kernels else FLOAT_DTYPES
    exact: Sequence[torch.dtype] = (torch.float32,) if kernels else FLOAT_DTYPES
    check_tensor("draft_log.k", log.k, (batch, 2, tokens, hk, key_size), floats, device)
    check_tensor("draft_log.u", log.u, (batch, 2, tokens, hv, value_size), exact, device)
    gate = (batch, 2, tokens, hv, key_size) if kda else (batch, 2, tokens, hv)
    check_tensor("draft_log.g", log.g, gate, floats if kda else exact, device)
    check_ids("draft_log.half", log.half, batch, device)
    if log.rows is not None:
        check_ids("draft_log.rows", log.rows, sequences, device)
    elif sequences > batch:
        raise InvalidArgumentError("draft_log", f"{batch} log rows", f"at least {sequences} (one a sequence), or rows")
    check_ids("num_accepted", num_accepted, sequences, device)


def check_checkpoints(checkpoints: Checkpoints, read_ids: torch.Tensor) -> None:
    """Check a checkpoint plan's tensors against the number of sequences."""
    if not isinstance(checkpoints, Checkpoints):
        raise InvalidArgumentError("checkpoints", type(checkpoints).__name__, "a Checkpoints or None")
    check_ids("checkpoints.cu", checkpoints.cu, read_ids.shape[0] + 1, read_ids.device)
    entries = checkpoints.ends.shape[0]
    check_ids("checkpoints.ends", checkpoints.ends, entries, read_ids.device)
    check_ids("checkpoints.slots", checkpoints.slots, entries, read_ids.device)


def check_commit_arguments(
    operator: str,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    state: torch.Tensor,
    read_ids: torch.Tensor,
    write_ids: torch.Tensor,
    *,
    lower_bound: float | None = None,
    kernels: bool,
) -> None:
    """Check the arguments of a commit; A_log and dt_bias are KDA's, which recomputes gates from logged raw ones."""
    if not isinstance(state, torch.Tensor) or state.dim() != 4:
        raise InvalidArgumentError("state", getattr(state, "shape", type(state).__name__), "a pool [S, HV, V, K]")
    _, hv, value_size, key_size = state.shape
    dtypes = STATE_DTYPES if kernels else FLOAT_DTYPES
    check_pool("state", state, (hv, value_size, key_size), dtypes, state.device)
    check_ids("read_ids", read_ids, read_ids.shape[0], state.device)
    check_ids("write_ids", write_ids, read_ids.shape[0], state.device)
    check_lower_bound(lower_bound)
    if A_log is not None and dt_bias is not None:
        parameters = PARAMETER_DTYPES if kernels else FLOAT_DTYPES
        check_tensor("A_log", A_log, (hv,), parameters, state.device)
        check_tensor("dt_bias", dt_bias.reshape(-1), (hv * key_size,), parameters, state.device)
    if kernels:
        check_kernel_heads(operator, key_size, value_size)


def launch_decode(
    kda: bool,
    lower_bound: float | None,
    scale: float | None,
    qk_l2norm: bool,
    settled: bool,
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
) -> torch.Tensor | None:
    """Check and run T = 1 decode on the current stream; None, and nothing done, where the reference is to run.

    A full check takes longer than the launch. The loaded function checks ranks, dtypes, sizes, strides, addresses and
    devices by itself before it launches, `decode_function` what no tensor shows alone; a refusal of either becomes the full
    check's named error.
    """
    try:
        (rows, hk, width), hv = q.shape, v.shape[1]
        bias = dt_bias.view(-1) if kda and dt_bias.dim() == 2 else dt_bias
        function = decode_function(
            backend, q.get_device(), kda, lower_bound, state.dtype, rows, hk, hv, bias.numel() if kda else hv
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
            bias,
            state,
            read_ids,
            write_ids,
            out,
            qk_l2norm,
            settled,
            width**-0.5 if scale is None else scale,
            lower_bound or 0.0,
        )
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RuntimeError):
        if not uses_kernels(backend, q.device):
            return None
        arguments = (q, k, v, gate, b, A_log, dt_bias, state, read_ids, write_ids)
        operator = "kda_decode" if kda else "gdn_decode"
        check_arguments(operator, *arguments, out, kda=kda, lower_bound=lower_bound, kernels=True)
        if q.shape[0]:
            raise
        out = torch.empty_like(v) if out is None else out
    return out


@tables.memoised
def decode_function(
    backend: Backend,
    device: int,
    kda: bool,
    lower_bound: float | None,
    dtype: torch.dtype,
    rows: int,
    hk: int,
    hv: int,
    bias: int,
) -> CompiledKernel:
    """The loaded function for these sizes, on CUDA device number `device` (-1: none); `bias` is the length of dt_bias.

    Raises ValueError or KeyError where there is nothing to launch: the reference is to run, there are no rows, or the sizes
    contradict each other.
    """
    if device < 0 or not uses_kernels(backend, torch.device("cuda", device)):
        raise ValueError
    sound = hv % hk == 0 and bias == (hv * HEAD_DIM if kda else hv)
    if rows == 0 or not sound or not (lower_bound is None or lower_bound < 0.0):
        raise ValueError
    return recurrent_decode(recurrent.choose(kind_of(kda, lower_bound), STATE_NAMES[dtype], rows * hv))
