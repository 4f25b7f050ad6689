"""Causal conv: what the specialisations of its kernels are, which are legal, and which one a call gets."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from ..compile.manifest import Entry, ResourceBudget

Dtype = Literal["float32", "bfloat16"]
SHORT = {"float32": "f32", "bfloat16": "bf16"}
WIDTHS = (2, 3, 4)

# Run-time flags of the kernels.
SETTLED = 1  # the kernel before this one wrote neither ids, positions, windows nor logs
BIAS = 2
SILU = 4
MAPPED = 8  # the log row of a batch row comes from a tensor
CHECKPOINTS = 16


@dataclass(frozen=True)
class _ConvKey:
    """What all conv kernels with an output depend on.

    width: taps W. weight: dtype of taps and bias; inputs, windows and outputs are bf16.
    """

    width: int
    weight: Dtype

    def _suffix(self) -> str:
        return f"w{self.width}_{SHORT[self.weight]}"

    def rejection(self) -> str | None:
        """Why this key has no kernel, or None."""
        return _reject_width(self.width)


def _reject_width(width: int) -> str | None:
    return None if width in WIDTHS else f"width={width}: the ring kernels serve widths {WIDTHS}"


@dataclass(frozen=True)
class ConvDecodeKey(_ConvKey):
    """Everything that changes the code of `kernels/conv1d_decode.py`.

    vec: channels a thread, 4 or 8. rows: sequences a thread. threads: threads a block along the channels. lanes: groups of
    `rows` sequences a block. blocks: blocks an SM must hold, which bounds the registers (0: no bound).
    """

    vec: int = 4
    rows: int = 4
    threads: int = 64
    lanes: int = 1
    blocks: int = 16

    def symbol(self) -> str:
        """C identifier of the specialisation."""
        return f"conv1d_decode_{self._suffix()}_v{self.vec}r{self.rows}_t{self.threads}x{self.lanes}b{self.blocks}"

    def rejection(self) -> str | None:
        """Why this key has no kernel, or None."""
        if self.vec not in (4, 8) or not 1 <= self.rows <= 4:
            return f"vec={self.vec}, rows={self.rows}: 4 or 8 channels, at most 4 sequences a thread"
        if self.threads % 32 or self.lanes < 1 or not 32 <= self.threads * self.lanes <= 256:
            return f"threads={self.threads}, lanes={self.lanes}: whole warps, at most 256 threads"
        return super().rejection()


@dataclass(frozen=True)
class ConvPrefillKey(_ConvKey):
    """Everything that changes the code of `kernels/conv1d_prefill.py`.

    vec: channels a thread. tokens: tokens a thread. blocks: blocks an SM must hold, which bounds the registers (0: none). pdl:
    programmatic dependent launch.
    """

    vec: int = 4
    tokens: int = 16
    blocks: int = 0
    pdl: bool = True

    def symbol(self) -> str:
        """C identifier of the specialisation."""
        return f"conv1d_prefill_{self._suffix()}_v{self.vec}t{self.tokens}b{self.blocks}{'_pdl' if self.pdl else ''}"

    def rejection(self) -> str | None:
        """Why this key has no kernel, or None."""
        if self.vec not in (4, 8):
            return f"vec={self.vec}: 4 or 8 channels a thread"
        if self.tokens < self.width - 1:
            return f"tokens={self.tokens}: only a sequence's first tile may need history, so at least {self.width - 1}"
        return super().rejection()


@dataclass(frozen=True)
class ConvVerifyKey(_ConvKey):
    """Everything that changes the code of the verify form in `kernels/conv1d_verify.py`."""

    def symbol(self) -> str:
        """C identifier of the specialisation."""
        return f"conv1d_verify_{self._suffix()}"


@dataclass(frozen=True)
class ConvCommitKey:
    """Everything that changes the code of the commit form in `kernels/conv1d_verify.py`."""

    width: int

    def symbol(self) -> str:
        """C identifier of the specialisation."""
        return f"conv1d_commit_w{self.width}"

    def rejection(self) -> str | None:
        """Why this key has no kernel, or None."""
        return _reject_width(self.width)


@functools.cache
def choose_decode(width: int, weight: Dtype) -> ConvDecodeKey:
    """The specialisation of a call; the same for every batch (docs/notes/conv1d.md)."""
    return ConvDecodeKey(width, weight)


@functools.cache
def choose_prefill(width: int, weight: Dtype) -> ConvPrefillKey:
    """The specialisation of a call; the same for every batch and length (docs/notes/conv1d.md)."""
    return ConvPrefillKey(width, weight)


@functools.cache
def choose_verify(width: int, weight: Dtype) -> ConvVerifyKey:
    """The specialisation of a call."""
    return ConvVerifyKey(width, weight)


def decode_candidates(width: int, weight: Dtype) -> list[ConvDecodeKey]:
    """The space a sweep tries."""
    keys = [
        ConvDecodeKey(width, weight, vec, rows, threads, lanes)
        for vec in (4, 8)
        for rows in (1, 2, 4)
        for threads in (32, 64, 128)
        for lanes in (1, 2, 4)
    ]
    return [key for key in keys if key.rejection() is None]


def prefill_candidates(width: int, weight: Dtype) -> list[ConvPrefillKey]:
    """The space a sweep tries. The bounds are the tightest that do not spill."""
    keys = [
        ConvPrefillKey(width, weight, vec, tokens, blocks, pdl)
        for vec, tokens, bound in ((4, 4, 0), (4, 8, 8), (4, 16, 5), (8, 4, 0), (8, 8, 0))
        for blocks in {0, bound}
        for pdl in (False, True)
    ]
    return [key for key in keys if key.rejection() is None]


def shipped() -> list[Entry]:
    """Entries of the manifest. Decode and prefill in every width; drafts only in the width of the models that have them."""
    budget = ResourceBudget(max_registers=96, max_shared_bytes=0)
    weights: tuple[Dtype, Dtype] = ("bfloat16", "float32")
    served = [(4, weight) for weight in weights]
    forms: list[tuple[int, Dtype]] = [*served, (3, "bfloat16"), (2, "bfloat16")]
    return [
        *(Entry("conv1d_decode", choose_decode(*form), budget) for form in forms),
        *(Entry("conv1d_prefill", choose_prefill(*form), budget) for form in forms),
        *(Entry("conv1d_verify", choose_verify(*form), budget) for form in served),
        Entry("conv1d_verify", ConvCommitKey(4), budget),
    ]
