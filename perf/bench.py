"""What a bench module makes of a case, and the correctness gate every contender passes before it is timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..cute_kernels.reference.metrics import rms_ratio
from .inputs import Workspace
from .timing import Contender

PEER_TOLERANCE = 0.02  # a peer above this does not compute the same function, and its time means nothing


class Unsupported(Exception):
    """A peer does not offer this case; the text says what it lacks."""


class WrongResultError(RuntimeError):
    """One of our operators failed its check: nothing is timed."""


@dataclass
class Prepared:
    """A case ready to be checked and timed.

    check: gives the named RMS ratios to the float64 reference of a contender's first launch. tolerance: ours, by name.
    missing: peers that do not serve the case, with the reason. notes: further fields of the row.
    """

    contenders: list[Contender]
    check: Callable[[Contender], dict[str, float]]
    tolerance: dict[str, float]
    missing: dict[str, str] = field(default_factory=dict)
    rotation_bytes: int = 0
    notes: dict[str, Any] = field(default_factory=dict)


def gate(prepared: Prepared, ws: Workspace) -> dict[str, dict[str, float]]:
    """Check every contender. Peers that fail move to `missing`; one of ours failing raises WrongResultError.

    What a peer that failed has written into the pools may be anything, and other cases read their states there: it is replaced.
    """
    errors: dict[str, dict[str, float]] = {}
    kept = []
    for contender in prepared.contenders:
        ours = contender.name.startswith("ours")
        try:
            ratios = prepared.check(contender)
        except Exception as error:
            if ours:
                raise
            prepared.missing[contender.name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            ws.fill()
            continue
        bad = {
            name: ratio
            for name, ratio in ratios.items()
            if not ratio <= (prepared.tolerance[name] if ours else PEER_TOLERANCE)
        }
        if bad and ours:
            raise WrongResultError(f"{contender.name}: RMS ratios {bad}, allowed {prepared.tolerance}")
        if bad:
            prepared.missing[contender.name] = f"wrong result: RMS ratios {bad}"
            ws.fill()
            continue
        errors[contender.name] = ratios
        kept.append(contender)
    prepared.contenders = kept
    return errors


def ratio(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """RMS ratio, computed on the device."""
    return rms_ratio(actual.reshape(reference.shape), reference)
