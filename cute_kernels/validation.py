"""Argument checks of the public operators: shapes, dtypes, strides and devices, never values (those stay on the device)."""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from collections.abc import Sequence
from typing import Any, Literal

import torch

from .checkpoints import Checkpoints
from .configs.verify import MAX_TOKENS
from .draft_log import DraftLog
from .errors import BackendUnavailableError, InvalidArgumentError, UnsupportedConfigError

Backend = Literal["auto", "kernels", "reference"]
BACKENDS = ("auto", "kernels", "reference")
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
STATE_DTYPES = (torch.float32, torch.bfloat16)
HEAD_DIM = 128  # key and value head size the kernels serve
ALIGNMENT = 16  # bytes; pools, slot strides and packed rows
MAX_SOUND = 8192  # signatures remembered
#: What arguments of a wrong kind raise on the way to a launch and in a loaded function: then the full check names one.
REFUSALS = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, BufferError, RuntimeError)
_sound: set[tuple[Any, ...]] = set()


def _describe(tensor: object) -> str:
    if not isinstance(tensor, torch.Tensor):
        return f"{type(tensor).__name__}"
    return f"{tensor.dtype} {list(tensor.shape)}, strides {list(tensor.stride())}, on {tensor.device}"


def check_tensor(
    name: str,
    tensor: torch.Tensor | None,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> None:
    """Raise InvalidArgumentError unless `tensor` has this rank, these sizes (None: any), a dtype of `dtypes` and the device."""
    if (
        not isinstance(tensor, torch.Tensor)
        or tensor.dim() != len(shape)
        or any(want is not None and want != got for want, got in zip(shape, tensor.shape))
        or tensor.dtype not in dtypes
        or tensor.device != device
    ):
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        kinds = " or ".join(str(dtype) for dtype in dtypes)
        raise InvalidArgumentError(name, _describe(tensor), f"{kinds} [{sizes}] on {device}")


def check_ids(name: str, ids: torch.Tensor | None, n: int | None, device: torch.device) -> None:
    """Raise unless `ids` is a contiguous int32 [n] tensor (None: any length) on `device`; values outside the pool mean none."""
    check_tensor(name, ids, (n,), (torch.int32,), device)
    if ids is not None and not ids.is_contiguous():
        raise InvalidArgumentError(name, _describe(ids), f"contiguous int32 {list(ids.shape)}")


def check_rows(name: str, rows: torch.Tensor) -> None:
    """Raise unless the trailing dimensions of each row are dense (row stride arbitrary): a view of a wider row."""
    dense = 1
    for size, stride in zip(reversed(rows.shape[1:]), reversed(rows.stride()[1:])):
        if size != 1 and stride != dense:
            raise InvalidArgumentError(name, _describe(rows), "rows whose trailing dimensions are contiguous")
        dense *= size


def check_alignment(name: str, tensor: torch.Tensor, bytes_: int = ALIGNMENT) -> None:
    """Raise unless address and row stride are multiples of `bytes_` (the vector width of the kernels)."""
    size = tensor.element_size()
    if tensor.data_ptr() % bytes_ or (tensor.shape[0] > 1 and tensor.stride(0) * size % bytes_):
        raise InvalidArgumentError(
            name,
            f"address {tensor.data_ptr():#x}, row stride {tensor.stride(0) * size} B",
            f"address and row stride that are multiples of {bytes_} B",
        )


def check_dense(name: str, tensor: torch.Tensor) -> None:
    """Raise unless the tensor is contiguous and its address a multiple of 16 bytes."""
    if not is_dense(tensor):
        raise InvalidArgumentError(
            name,
            f"address {tensor.data_ptr():#x}, strides {list(tensor.stride())}",
            f"a contiguous tensor at a multiple of {ALIGNMENT} B",
        )


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor is contiguous and its address a multiple of 16 bytes."""
    return tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0


def check_pool(
    name: str, pool: torch.Tensor, inner: Sequence[int], dtypes: Sequence[torch.dtype], device: torch.device
) -> None:
    """Raise unless `pool` is [slots, *inner] with dense slots and a slot stride that is a multiple of 16 bytes."""
    check_tensor(name, pool, (None, *inner), dtypes, device)
    check_rows(name, pool)
    check_alignment(name, pool)


def check_heads(hk: int, hv: int, k: int, v: int) -> None:
    """Raise unless value heads divide over key heads."""
    if hk < 1 or hv < 1 or hv % hk:
        raise InvalidArgumentError(
            "q, v", f"{hk} key heads, {hv} value heads", "value heads a positive multiple of key heads"
        )
    if k < 1 or v < 1:
        raise InvalidArgumentError("q, v", f"head sizes {k}, {v}", "positive head sizes")


def is_finite(value: object) -> bool:
    """Whether the value is a finite number."""
    return isinstance(value, numbers.Real) and math.isfinite(value)


def check_gate(lower_bound: float | None, scale: float | None) -> None:
    """Raise unless the gate's bound is None (softplus) or negative, and the scale of the output None or a finite number."""
    if lower_bound is not None and not (is_finite(lower_bound) and lower_bound < 0.0):
        raise InvalidArgumentError("lower_bound", repr(lower_bound), "None (softplus gate) or a negative number")
    if scale is not None and not is_finite(scale):
        raise InvalidArgumentError("scale", repr(scale), "None (K ** -0.5) or a finite number")


def check_checkpoints(plan: Checkpoints, sequences: int, device: torch.device) -> None:
    """Check a checkpoint plan's tensors against the number of sequences."""
    if not isinstance(plan, Checkpoints):
        raise InvalidArgumentError("checkpoints", type(plan).__name__, "a Checkpoints or None")
    check_ids("checkpoints.cu", plan.cu, sequences + 1, device)
    check_ids("checkpoints.ends", plan.ends, None, device)
    check_ids("checkpoints.slots", plan.slots, plan.ends.shape[0], device)


def check_log(
    log: DraftLog,
    num_accepted: torch.Tensor,
    sequences: int,
    device: torch.device,
    *,
    heads: tuple[int | None, int, int, int] | None = None,
    inputs: tuple[int, torch.dtype] | None = None,
    kda: bool = False,
    kernels: bool,
) -> None:
    """Check a draft log and the accepted counts against the operator's shapes.

    `heads`: HK (None: any), HV, K and V of the keys, updates and gates to be there. `inputs`: channels and dtype of conv inputs.
    """
    if not isinstance(log, DraftLog):
        raise InvalidArgumentError("draft_log", type(log).__name__, "a DraftLog")
    if not isinstance(log.k, torch.Tensor) or log.k.dim() != 5:
        raise InvalidArgumentError("draft_log.k", _describe(log.k), "a tensor [B, 2, Tmax, HK, K]")
    parts: list[tuple[str, Any, tuple[int | None, ...], Sequence[torch.dtype]]] = []
    if heads is not None:
        hk, hv, key_size, value_size = heads
        raw: Sequence[torch.dtype] = (torch.bfloat16,) if kernels else FLOAT_DTYPES
        exact: Sequence[torch.dtype] = (torch.float32,) if kernels else FLOAT_DTYPES
        if kernels and log.max_tokens > MAX_TOKENS:
            raise UnsupportedConfigError(
                f"draft_log: {log.max_tokens} tokens a row; allowed with kernels: at most {MAX_TOKENS} "
                "(backend='reference' serves others)"
            )
        parts.append(("draft_log.k", log.k, (hk, key_size), raw))
        parts.append(("draft_log.u", log.u, (hv, value_size), exact))
        parts.append(("draft_log.g", log.g, (hv, key_size) if kda else (hv,), raw if kda else exact))
    if inputs is not None:
        parts.append(("draft_log.x", log.x, inputs[:1], inputs[1:]))
    for name, part, inner, dtypes in parts:
        check_tensor(name, part, (log.batch, 2, log.max_tokens, *inner), dtypes, device)
        if kernels:
            check_dense(name, part)
    check_ids("draft_log.half", log.half, log.batch, device)
    check_ids("num_accepted", num_accepted, sequences, device)
    if log.rows is not None:
        check_ids("draft_log.rows", log.rows, sequences, device)
    elif sequences > log.batch:
        raise InvalidArgumentError(
            "draft_log", f"{log.batch} log rows", f"at least {sequences} (one a sequence), or rows"
        )


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Raise unless `value` is one of `choices`."""
    if value not in choices:
        raise InvalidArgumentError(name, repr(value), " or ".join(repr(choice) for choice in choices))


@functools.lru_cache(maxsize=64)
def uses_kernels(backend: Backend, device: torch.device) -> bool:
    """Whether this call runs kernels. "kernels" off an sm_90 device is a BackendUnavailableError; "auto" falls back."""
    if backend == "reference":
        return False
    check_choice("backend", backend, BACKENDS)
    fits = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    if not fits and backend == "kernels":
        raise BackendUnavailableError(
            f"backend='kernels': tensors are on {device}; allowed: a CUDA device of compute capability 9.0 (H100, H200)"
        )
    return fits


def runs_kernels(backend: Backend, name: str, tensor: torch.Tensor) -> bool:
    """`uses_kernels` of a call whose first tensor is this; raises InvalidArgumentError for one that is none."""
    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgumentError(name, _describe(tensor), "a tensor")
    try:
        return uses_kernels(backend, tensor.device)
    except TypeError:  # a backend that has no hash
        check_choice("backend", backend, BACKENDS)
        raise


def check_kernel_heads(operator: str, k: int, v: int) -> None:
    """Raise UnsupportedConfigError for head sizes the kernels do not serve."""
    if (k, v) != (HEAD_DIM, HEAD_DIM):
        raise UnsupportedConfigError(
            f"{operator}: head sizes K={k}, V={v}; allowed with kernels: K=V={HEAD_DIM} (backend='reference' serves others)"
        )


def check_kernel_dtype(operator: str, name: str, dtype: torch.dtype, allowed: Sequence[torch.dtype]) -> None:
    """Raise UnsupportedConfigError for a dtype the references take but the kernels do not."""
    if dtype not in allowed:
        kinds = " or ".join(str(item) for item in allowed)
        raise UnsupportedConfigError(
            f"{operator}: {name} is {dtype}; allowed with kernels: {kinds} (backend='reference' serves others)"
        )


def signature(*parts: Any) -> tuple[Any, ...] | None:
    """Everything of a call's arguments that a check looks at: of tensors the shape, strides, dtype, device and alignment.

    None where a tensor has no address or a part cannot be hashed: such a call is always checked.
    """
    try:
        facts = tuple(
            [
                (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % ALIGNMENT) if isinstance(t, torch.Tensor) else t
                for t in parts
            ]
        )
        hash(facts)
    except (TypeError, RuntimeError):
        return None
    return facts


def parts_of(value: Any) -> tuple[Any, ...]:
    """Class and fields of a dataclass argument, for its signature; anything else stands for itself."""
    return (type(value), *vars(value).values()) if dataclasses.is_dataclass(value) else (value,)


def is_sound(facts: tuple[Any, ...] | None) -> bool:
    """Whether a call with this signature has passed its checks before."""
    return facts in _sound


def remember(facts: tuple[Any, ...] | None) -> None:
    """Note that a call with this signature has passed its checks; the memory is bounded."""
    if facts is not None:
        if len(_sound) >= MAX_SOUND:
            _sound.clear()
        _sound.add(facts)
