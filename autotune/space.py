"""What a sweep may vary: for each operator its kernel, the shape its chooser sees and the keys that are legal for it.

Legality is the key's own `rejection`, the one the kernels and the tables use. A new kernel joins by one entry in `SPACES`,
once its chooser asks `tables.tuned` and its key class names its `TUNED` fields.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from ..cute_kernels.compile.manifest import Entry, ResourceBudget
from ..cute_kernels.configs import layer, recurrent, tables
from ..perf.cases import Case


class Key(Protocol):
    """A specialisation's frozen dataclass."""

    TUNED: ClassVar[tuple[str, ...]]

    def symbol(self) -> str:
        """C identifier of the specialisation."""
        ...

    def rejection(self) -> str | None:
        """Why this key has no kernel, or None."""
        ...


Shape = dict[str, Any]
Settings = dict[str, Any]


@dataclass(frozen=True)
class Space:
    """One operator's part of one kernel's table.

    size: the field of a shape that is a size, which tables give as a range; the others match exactly. shape: of a case.
    heuristic, choose: what the operator would call for a shape, without and with tables. candidates: keys to try.
    """

    kernel: str
    size: str
    shape: Callable[[Case], Shape]
    heuristic: Callable[..., Key]
    choose: Callable[..., Key]
    candidates: Callable[[Shape], list[Key]]
    budget: ResourceBudget

    def entry(self, key: Key) -> Entry:
        """What the build takes."""
        return Entry(self.kernel, key, self.budget)

    def is_wired(self, shape: Shape) -> bool:
        """Whether the operator's chooser returns what a sweep asks for, without which every trial would run one kernel."""
        for key in self.candidates(shape):
            with tables.forced(self.kernel, settings(key)):
                if self.choose(**shape) != key:
                    return False
        return True


def settings(key: Key) -> Settings:
    """The fields of a key that a table can set."""
    return {name: getattr(key, name) for name in type(key).TUNED}


def match(space: Space, shape: Shape) -> Shape:
    """The fields of a shape that match exactly."""
    return {name: value for name, value in shape.items() if name != space.size}


# Every block of a head prepares the head's q, k and gates for itself; below this many rows of V it does little else.
MIN_TILE = 16


def _recurrent_shape(case: Case) -> Shape:
    geometry = case.geometry
    kind = "gdn" if geometry.kind == "gdn" else "kda_softplus" if geometry.lower_bound is None else "kda_bounded"
    return {"kind": kind, "state": case.state_dtype, "heads": case.workload.rows * geometry.hv}


def _recurrent_candidates(shape: Shape) -> list[Key]:
    return [key for key in recurrent.candidates(shape["kind"], shape["state"]) if key.tile >= MIN_TILE]


_DECODE = Space(
    kernel="recurrent_decode",
    size="heads",
    shape=_recurrent_shape,
    heuristic=recurrent.heuristic,
    choose=recurrent.choose,
    candidates=_recurrent_candidates,
    budget=ResourceBudget(max_registers=128),
)


def _layer_shape(case: Case) -> Shape:
    return {**_recurrent_shape(case), "weight": "bfloat16"}  # what the benchmark's layers hold


def _layer_candidates(shape: Shape) -> list[Key]:
    return list(layer.candidates(shape["kind"], shape["state"], shape["weight"]))


_LAYER = Space(
    kernel="layer_decode",
    size="heads",
    shape=_layer_shape,
    heuristic=layer.heuristic,
    choose=layer.choose,
    candidates=_layer_candidates,
    budget=ResourceBudget(max_registers=128, max_shared_bytes=76 * 1024),
)

SPACES: dict[str, Space] = {
    "gdn_decode": _DECODE,
    "kda_decode": _DECODE,
    "gdn_layer_decode": _LAYER,
    "kda_layer_decode": _LAYER,
}


def space_of(operator: str) -> Space:
    """The space of an operator. Raises ValueError naming those that have one."""
    if operator not in SPACES:
        raise ValueError(f"op {operator!r}: nothing to tune; allowed: {', '.join(SPACES)}")
    return SPACES[operator]
