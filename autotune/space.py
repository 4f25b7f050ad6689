"""What a sweep may vary: for each operator its kernel, the shape its chooser sees and the keys that are legal for it.

Legality is the key's own `rejection`, the one the kernels and the tables use. A new kernel joins by one entry in `SPACES`,
once its chooser asks `tables.tuned` and its key class names its `TUNED` fields.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from ..cute_kernels.compile.manifest import Entry, ResourceBudget
from ..cute_kernels.configs import conv1d, layer, recurrent, tables, verify
from ..perf.cases import STATE_DTYPES, Case


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
    heuristic, choose: what the operator would call for a shape, without and with tables. candidates: keys to try. states:
    pool dtypes whose operator runs this kernel. brief: workloads that stand for the others in a short sweep.
    """

    kernel: str
    size: str
    shape: Callable[[Case], Shape]
    heuristic: Callable[..., Key]
    choose: Callable[..., Key]
    candidates: Callable[[Shape], list[Key]]
    budget: ResourceBudget
    states: tuple[str, ...] = STATE_DTYPES
    brief: tuple[str, ...] = ("B1", "B8", "B64", "B256")

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


# A block of fewer rows holds less than 4 KiB of fp32 state, and the device starts blocks no faster than one in 1.2 ns.
MIN_TILE = 8


def _recurrent_shape(case: Case) -> Shape:
    geometry = case.geometry
    kind = "gdn" if geometry.kind == "gdn" else "kda_softplus" if geometry.lower_bound is None else "kda_bounded"
    return {"kind": kind, "state": case.state_dtype, "heads": case.workload.rows * geometry.hv}


def _recurrent_candidates(shape: Shape) -> list[Key]:
    return [key for key in recurrent.candidates(shape["kind"], shape["state"], shape["heads"]) if key.tile >= MIN_TILE]


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


_VERIFY = Space(
    kernel="recurrent_verify",
    size="heads",
    shape=_recurrent_shape,
    heuristic=verify.heuristic,
    choose=verify.choose_verify,
    candidates=lambda shape: list(verify.candidates(shape["kind"], shape["state"])),
    budget=ResourceBudget(max_registers=168),
    states=("float32",),
    brief=("B1T4", "B8T4", "B64T4", "B64T6"),
)

# On bf16 pools the operator runs the tensor-core form unless it is asked to round every token.
_WY_VERIFY = replace(
    _VERIFY,
    kernel="wy_verify",
    candidates=lambda shape: list(verify.wy_candidates(shape["kind"])),
    states=("bfloat16",),
)

_CONV_BUDGET = ResourceBudget(max_registers=96, max_shared_bytes=0)
_CONV_FORM: Shape = {"width": 4, "weight": "bfloat16"}  # what the benchmark's layers hold

_CONV_DECODE = Space(
    kernel="conv1d_decode",
    size="outputs",
    shape=lambda case: {**_CONV_FORM, "outputs": case.workload.rows * case.geometry.channels},
    heuristic=conv1d.decode_heuristic,
    choose=conv1d.choose_decode,
    candidates=lambda shape: list(conv1d.decode_candidates(shape["width"], shape["weight"])),
    budget=_CONV_BUDGET,
    states=("bfloat16",),
    brief=("B8", "B64", "B256"),
)

_CONV_PREFILL = Space(
    kernel="conv1d_prefill",
    size="mean",
    shape=lambda case: {**_CONV_FORM, "mean": conv1d.mean_tokens(case.workload.tokens, case.workload.rows)},
    heuristic=conv1d.prefill_heuristic,
    choose=conv1d.choose_mean,
    candidates=lambda shape: list(conv1d.prefill_candidates(shape["width"], shape["weight"])),
    budget=_CONV_BUDGET,
    states=("bfloat16",),
    brief=("1x2048", "1x8192", "8x1024", "ragged64"),
)

# By operator; what follows a colon is a form of it that another kernel runs.
SPACES: dict[str, Space] = {
    "gdn_decode": _DECODE,
    "kda_decode": _DECODE,
    "gdn_layer_decode": _LAYER,
    "kda_layer_decode": _LAYER,
    "gdn_verify": _VERIFY,
    "kda_verify": _VERIFY,
    "gdn_verify:wy": _WY_VERIFY,
    "kda_verify:wy": _WY_VERIFY,
    "causal_conv1d_decode": _CONV_DECODE,
    "causal_conv1d_prefill": _CONV_PREFILL,
}


def space_of(operator: str) -> Space:
    """The space of an operator. Raises ValueError naming those that have one."""
    if operator not in SPACES:
        raise ValueError(f"op {operator!r}: nothing to tune; allowed: {', '.join(SPACES)}")
    return SPACES[operator]
