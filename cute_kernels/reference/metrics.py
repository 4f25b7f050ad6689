"""Error measures against the float64 oracle, and what each operator is allowed.

Source: the proposals that follow from the suites of fla, flashinfer and lmdeploy; fla's RMS ratio is the measure.
"""

from __future__ import annotations

from typing import Literal

import torch

from .datasets import TRAINED

Op = Literal["decode", "verify", "prefill"]

# RMS ratio to the float64 recurrence on the values the operator sees: output, fp32 state, bf16 state.
_TOLERANCE: dict[str, tuple[float, float, float]] = {
    "decode": (0.002, 0.002, 0.004),
    "verify": (0.002, 0.002, 0.004),
    "prefill": (0.004, 0.004, 0.004),
}
_TRAINED_TOLERANCE = (0.006, 0.01, 0.01)  # prefill only: keys so alike amplify the rounding of any chunkwise form
ABSOLUTE_FLOOR = 1e-6  # below this absolute error a ratio says nothing


def tolerance(op: Op, dataset: str, what: Literal["output", "state"], state_dtype: torch.dtype) -> float:
    """Allowed RMS ratio of ``what`` for ``op`` on ``dataset``."""
    row = _TRAINED_TOLERANCE if op == "prefill" and dataset in TRAINED else _TOLERANCE[op]
    if what == "output":
        return row[0]
    return row[2] if state_dtype == torch.bfloat16 else row[1]


def rms_ratio(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """``rms(actual - reference) / rms(reference)`` in float64; inf if anything in ``actual`` is not finite."""
    actual, reference = actual.double(), reference.double().to(actual.device)
    if actual.numel() == 0:
        return 0.0
    if not bool(torch.isfinite(actual).all()):
        return float("inf")
    difference = actual - reference
    if float(difference.abs().max()) <= ABSOLUTE_FLOOR:
        return 0.0
    return float(difference.square().mean().sqrt() / reference.square().mean().sqrt().clamp_min(1e-30))


def assert_close(actual: torch.Tensor, reference: torch.Tensor, allowed: float, what: str = "tensor") -> None:
    """Raise AssertionError with the RMS ratio and the worst place unless the ratio is at most ``allowed``."""
    if actual.shape != reference.shape:
        raise AssertionError(f"{what}: shape {tuple(actual.shape)}, reference {tuple(reference.shape)}")
    ratio = rms_ratio(actual, reference)
    if ratio <= allowed:
        return
    difference = (actual.double() - reference.double().to(actual.device)).abs()
    not_finite = int((~torch.isfinite(actual)).sum())
    worst = torch.unravel_index(torch.nan_to_num(difference, nan=float("inf")).argmax(), difference.shape)
    place = tuple(int(i) for i in worst)
    raise AssertionError(
        f"{what}: RMS ratio {ratio:.3e}, allowed {allowed:.1e}; {not_finite} of {actual.numel()} not finite; "
        f"worst at {place}: {float(actual[place]):.6g}, reference {float(reference[place]):.6g}"
    )


def ulp_distance(actual: torch.Tensor, reference: torch.Tensor) -> int:
    """Largest distance in representable bf16 numbers between ``actual`` (bf16) and ``reference`` rounded to bf16."""

    def ordered(x: torch.Tensor) -> torch.Tensor:
        bits = x.to(torch.bfloat16).view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    if actual.numel() == 0:
        return 0
    return int((ordered(actual) - ordered(reference.to(actual.device))).abs().max())
