"""The gated norm of a layer's output: the specialisation of `kernels/gated_norm.py`."""

from __future__ import annotations

from dataclasses import dataclass

from ..compile.manifest import Entry, ResourceBudget

# Run-time flags.
SILU = 1  # the gate is z sigmoid(z), not sigmoid(z)
WEIGHT_BF16 = 2  # the weight is words of two bf16


@dataclass(frozen=True)
class GatedNormKey:
    """Everything that changes the code.

    rows: that a group of 16 lanes has under way at once. blocks: of `threads` that a multiprocessor holds at least.
    """

    rows: int = 2
    threads: int = 256
    blocks: int = 6

    def symbol(self) -> str:
        """C identifier of the specialisation."""
        return f"gated_norm_r{self.rows}t{self.threads}b{self.blocks}"


def shipped() -> list[Entry]:
    """Entries of the manifest."""
    return [Entry("gated_norm", GatedNormKey(), ResourceBudget(42, 0))]
