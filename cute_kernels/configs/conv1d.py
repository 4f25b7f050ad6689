"""Causal conv: what the specialisations of its kernels are, which are legal, and which one a call gets."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from ..compile.manifest import Entry, ResourceBudget

Dtype = Literal["float32", "bfloat16"]
SHORT = {"float32": "f32", "bfloat16": "bf16"}
WIDTHS = (2, 3, 4)


def _pdl_suffix(pdl: bool, early: bool) -> str:
    """Same endings as the recurrent kernels: `_pdl` reads ids and windows early, `_pdlwait` does not."""
    return ("_pdl" if early else "_pdlwait") if pdl else ""


@dataclass(frozen=True)
class _ConvKey:
    """What all conv kernels with an output depend on.

    width: taps W. weight: dtype of taps and bias; inputs, windows and outputs are bf16.
    """

    width: int
    weight: Dtype
    bias: bool
    silu: bool

    def _suffix(self) -> str:
        return f"w{self.width}_{SHORT[self.weight]}{'_bias' if self.bias else ''}{'_silu' if self.silu else ''}"

    def rejection(self) -> str | None:
        """Why this key has no kernel, or None."""
        if self.width not in WIDTHS:
            return f"width={self.width}: the ring kernels serve widths {WIDTHS}"
        return None


@dataclass(frozen=True)
class ConvDecodeKey(_ConvKey):
    """Everything that changes the code of `kernels/conv1d_decode.py`.

    pdl: start while the previous kernel of the stream drains. early: with pdl, read ids, positions and window before
    that kernel is known to be complete; wrong directly behind a kernel that writes them. threads: threads a block, 8
    channels each.
    """

    pdl: bool
    early: bool
    threads: int = 64

    def symbol(self) -> str:
        """C identifier of the specialisation."""
        return f"conv1d_decode_{self._suffix()}_t{self.threads}{_pdl_suffix(self.pdl, self.early)}"

    def rejection(self) -> str | None:
        """Why this key has no kernel, or None."""
        if self.threads % 32 or not 32 <= self.threads <= 256:
            return f"threads={self.threads}: whole warps, at most 256 threads"
        return super().rejection()


@dataclass(frozen=True)
class ConvPrefillKey(_ConvKey):
    """Everything that changes the code of `kernels/conv1d_prefill.py`.

    checkpoints: keep windows on the way. vec: channels a thread. tokens: tokens a thread.
    """

    checkpoints: bool
    vec: int = 4
    tokens: int = 8

    def symbol(self) -> str:
        """C identifier of the specialisation."""
        return f"conv1d_prefill_{self._suffix()}_v{self.vec}t{self.tokens}{'_ckpt' if self.checkpoints else ''}"

    def rejection(self) -> str | None:
        """Why this key has no kernel, or None."""
        if self.vec not in (4, 8):
            return f"vec={self.vec}: 4 or 8 channels a thread"
        if self.tokens < self.width - 1:
            return f"tokens={self.tokens}: only a sequence's first tile may need history, so at least {self.width - 1}"
        return super().rejection()


@dataclass(frozen=True)
class ConvVerifyKey(_ConvKey):
    """Everything that changes the code of the verify form in `kernels/conv1d_verify.py`.

    pdl, early as for decode.
    """

    pdl: bool
    early: bool

    def symbol(self) -> str:
        """C identifier of the specialisation."""
        return f"conv1d_verify_{self._suffix()}{_pdl_suffix(self.pdl, self.early)}"


@dataclass(frozen=True)
class ConvCommitKey:
    """Everything that changes the code of the commit form in `kernels/conv1d_verify.py`."""

    width: int

    def symbol(self) -> str:
        """C identifier of the specialisation."""
        return f"conv1d_commit_w{self.width}"

    def rejection(self) -> str | None:
        """Why this key has no kernel, or None."""
        return None if self.width in WIDTHS else f"width={self.width}: the ring kernels serve widths {WIDTHS}"


# Above this many outputs a step is bound by memory, and a dependent launch only takes block slots from the running kernel.
PDL_MAX_OUTPUTS = 1 << 20


def _is_served(width: int, bias: bool, silu: bool) -> bool:
    """The form of every served model. Only it has all three kinds of launch; the others are there to be right, not fast."""
    return width == 4 and silu and not bias


def _launch(served: bool, outputs: int, early: bool) -> tuple[bool, bool]:
    """`(pdl, early)` of a step with `outputs` = tokens x channels."""
    if not served:
        return True, False
    pdl = outputs <= PDL_MAX_OUTPUTS
    return pdl, early or not pdl


@functools.lru_cache(maxsize=4096)
def choose_decode(
    width: int, weight: Dtype, bias: bool, silu: bool, outputs: int, early: bool = False
) -> ConvDecodeKey:
    """The specialisation for `outputs` = sequences x channels."""
    return ConvDecodeKey(width, weight, bias, silu, *_launch(_is_served(width, bias, silu), outputs, early))


@functools.lru_cache(maxsize=4096)
def choose_verify(
    width: int, weight: Dtype, bias: bool, silu: bool, outputs: int, early: bool = False
) -> ConvVerifyKey:
    """The specialisation for `outputs` = tokens x channels."""
    return ConvVerifyKey(width, weight, bias, silu, *_launch(_is_served(width, bias, silu), outputs, early))


@functools.lru_cache(maxsize=1024)
def choose_prefill(width: int, weight: Dtype, bias: bool, silu: bool, checkpoints: bool) -> ConvPrefillKey:
    """Four channels by eight tokens a thread: 64 registers, and occupancy beats vector width (docs/notes/conv1d.md)."""
    return ConvPrefillKey(width, weight, bias, silu, checkpoints)


def prefill_candidates(key: ConvPrefillKey) -> list[ConvPrefillKey]:
    """The space a sweep tries for one call."""
    fixed = (key.width, key.weight, key.bias, key.silu, key.checkpoints)
    keys = [ConvPrefillKey(*fixed, vec, tokens) for vec in (4, 8) for tokens in (4, 8, 16)]
    return [candidate for candidate in keys if candidate.rejection() is None]


def _forms() -> list[tuple[int, Dtype, bool, bool]]:
    """Operand forms that ship."""
    forms: list[tuple[int, Dtype, bool, bool]] = []
    weights: tuple[Dtype, Dtype] = ("bfloat16", "float32")
    for weight in weights:
        for bias in (False, True):
            forms.append((4, weight, bias, True))
    forms += [(4, "bfloat16", False, False), (3, "bfloat16", True, True), (2, "bfloat16", True, True)]
    return forms


def shipped() -> list[Entry]:
    """Entries of the manifest: what the choosers return for `_forms`."""
    steps = [
        (form, outputs, early) for form in _forms() for outputs in (1, PDL_MAX_OUTPUTS + 1) for early in (True, False)
    ]
    decodes = dict.fromkeys(choose_decode(*form, outputs, early) for form, outputs, early in steps)
    verifies = dict.fromkeys(choose_verify(*form, outputs, early) for form, outputs, early in steps)
    prefills = [choose_prefill(*form, checkpoints) for form in _forms() for checkpoints in (False, True)]
    commits = dict.fromkeys(ConvCommitKey(form[0]) for form in _forms())
    budget = ResourceBudget(max_registers=96, max_shared_bytes=0)
    return [
        *(Entry("conv1d_decode", key, budget) for key in decodes),
        *(Entry("conv1d_verify", key, budget) for key in (*verifies, *commits)),
        *(Entry("conv1d_prefill", key, budget) for key in prefills),
    ]
