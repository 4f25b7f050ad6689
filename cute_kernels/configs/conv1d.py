"""Causal conv: what the specialisations of its kernels are, which are legal, and which one a call gets."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar, Literal

from ..compile.manifest import Entry, ResourceBudget
from . import tables

Dtype = Literal["float32", "bfloat16"]
SHORT = {"float32": "f32", "bfloat16": "bf16"}
WIDTHS = (2, 3, 4)

# Run-time flags of the kernels.
SETTLED = 1  # the kernel before this one wrote neither ids, positions, windows nor logs
BIAS = 2
SILU = 4
MAPPED = 8  # the log row of a batch row comes from a tensor
CHECKPOINTS = 16
PLAIN = 32  # no dependent of the kernel before, which has ended when this one starts


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

    TUNED: ClassVar[tuple[str, ...]] = ("vec", "rows", "threads", "lanes", "blocks")

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

    TUNED: ClassVar[tuple[str, ...]] = ("vec", "tokens", "blocks", "pdl")

    vec: int = 4
    tokens: int = 8
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


# Measured on H200 (docs/notes/conv1d.md). The form that the models use, width 4 with bf16 weights, has shapes of its own.
SMALL_STEP = 1 << 20  # outputs of a decode step up to which one row a thread is faster than four


@functools.cache
def _decode_shapes(width: int, weight: Dtype) -> tuple[ConvDecodeKey, ConvDecodeKey]:
    """Small and large steps; the same key twice where there is one shape."""
    if (width, weight) != (4, "bfloat16"):
        return (ConvDecodeKey(width, weight),) * 2
    small = ConvDecodeKey(width, weight, rows=1, threads=128, lanes=2, blocks=4)
    return small, ConvDecodeKey(width, weight, rows=4, threads=128, lanes=1, blocks=8)


def decode_heuristic(width: int, weight: Dtype, outputs: int) -> ConvDecodeKey:
    """What `choose_decode` returns where nothing was measured."""
    return _decode_shapes(width, weight)[outputs > SMALL_STEP]


@tables.memoised
def choose_decode(width: int, weight: Dtype, outputs: int) -> ConvDecodeKey:
    """The specialisation for `outputs` = sequences x channels: a table's where it has one, else the heuristic's."""
    default = decode_heuristic(width, weight, outputs)
    return tables.tuned("conv1d_decode", default, width=width, weight=weight, outputs=outputs)


def prefill_heuristic(width: int, weight: Dtype, mean: int) -> ConvPrefillKey:
    """What `choose_mean` returns where nothing was measured: one shape, whatever the mean of tokens."""
    return ConvPrefillKey(width, weight, blocks=8 if (width, weight) == (4, "bfloat16") else 0)


@tables.memoised
def choose_mean(width: int, weight: Dtype, mean: int) -> ConvPrefillKey:
    """The specialisation for sequences of `mean` tokens, a power of two."""
    default = prefill_heuristic(width, weight, mean)
    return tables.tuned("conv1d_prefill", default, width=width, weight=weight, mean=mean)


def mean_tokens(tokens: int, sequences: int) -> int:
    """Mean tokens of a sequence, down to a power of two: few values, so that choices are remembered."""
    return 1 << max(tokens // max(sequences, 1), 1).bit_length() - 1


def choose_prefill(width: int, weight: Dtype, tokens: int, sequences: int) -> ConvPrefillKey:
    """The specialisation for a packed call."""
    return choose_mean(width, weight, mean_tokens(tokens, sequences))


@functools.cache
def choose_verify(width: int, weight: Dtype) -> ConvVerifyKey:
    """The specialisation of a call."""
    return ConvVerifyKey(width, weight)


def decode_candidates(width: int, weight: Dtype) -> list[ConvDecodeKey]:
    """The space a sweep tries; with four channels a thread also bounded to 64 registers."""
    keys = [
        ConvDecodeKey(width, weight, vec, rows, threads, lanes, blocks)
        for vec in (4, 8)
        for rows in (1, 2, 4)
        for threads, lanes in ((32, 2), (64, 1), (64, 2), (128, 1), (128, 2))
        for blocks in ((0, 1024 // (threads * lanes)) if vec == 4 else (0,))
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
    decodes = dict.fromkeys(key for form in forms for key in _decode_shapes(*form))
    prefills = dict.fromkeys(prefill_heuristic(*form, 1) for form in forms)
    for width, weight in forms:
        shape = {"width": width, "weight": weight}
        decodes |= dict.fromkeys(tables.shipped_keys("conv1d_decode", shape, decode_heuristic(width, weight, 1)))
        prefills |= dict.fromkeys(tables.shipped_keys("conv1d_prefill", shape, prefill_heuristic(width, weight, 1)))
    return [
        *(Entry("conv1d_decode", key, budget) for key in decodes),
        *(Entry("conv1d_prefill", key, budget) for key in prefills),
        *(Entry("conv1d_verify", choose_verify(*form), budget) for form in served),
        Entry("conv1d_verify", ConvCommitKey(4), budget),
    ]
