"""T = 1 decode of GDN and KDA: what its specialisations are, which are legal, and which one a shape gets.

One thread block owns `warps * 2 * rows` rows of V of one (sequence, value head): 16 lanes share a row, a lane holds `rows`
rows of 8 K values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from ..compile.manifest import Entry, ResourceBudget
from . import tables

Kind = Literal["gdn", "kda_softplus", "kda_bounded"]
StateDtype = Literal["float32", "bfloat16"]
SHORT = {"float32": "f32", "bfloat16": "bf16"}
KINDS: tuple[Kind, ...] = ("gdn", "kda_softplus", "kda_bounded")
STATE_DTYPES: tuple[StateDtype, ...] = ("float32", "bfloat16")
#: Blocks that load their state while the previous kernel drains: half of what an H200 holds. With all of them nobody reads
#: between the end of that kernel and the first stores of this one.
EARLY_BLOCKS = 8 * 132
MANY_HEADS = 768  # sequences x value heads
PLAIN = 2  # in place of `settled`, 0 or 1: no dependent of the kernel before, which has ended when this one starts


@dataclass(frozen=True)
class RecurrentDecodeKey:
    """Everything that changes the code of `kernels/recurrent_decode.py`.

    rows: V rows a lane holds, 1, 2 or 4. warps: warps a block. pdl: start while the previous kernel of the stream drains.
    early: blocks of a settled launch that load while it does; the others wait first. kept: states are read as
    device/kept.py says.
    """

    TUNED: ClassVar[tuple[str, ...]] = ("rows", "warps", "pdl")

    kind: Kind
    state: StateDtype
    rows: int
    warps: int
    pdl: bool
    early: int = EARLY_BLOCKS
    kept: bool = False

    def symbol(self) -> str:
        """C identifier of the specialisation."""
        early = "" if self.early == EARLY_BLOCKS else f"e{self.early}"
        tile = f"r{self.rows}w{self.warps}{early}{'k' if self.kept else ''}{'_pdl' if self.pdl else ''}"
        return f"recurrent_decode_{self.kind}_{SHORT[self.state]}_{tile}"

    @property
    def tile(self) -> int:
        """Rows of V a block owns."""
        return self.warps * 2 * self.rows

    def rejection(self) -> str | None:
        """Why this key has no kernel, or None."""
        if self.rows not in (1, 2, 4):
            return f"rows={self.rows}: the butterfly reduces 1, 2 or 4 rows"
        if not 2 <= self.warps <= 16 or 128 % self.tile:
            return f"warps={self.warps}, rows={self.rows}: a tile of {self.tile} rows does not divide 128"
        return None


@tables.memoised
def choose(kind: Kind, state: StateDtype, heads: int) -> RecurrentDecodeKey:
    """The specialisation for `heads` = sequences x value heads: a measured one where a table has it, else the heuristic's."""
    return tables.tuned("recurrent_decode", heuristic(kind, state, heads), kind=kind, state=state, heads=heads)


def heuristic(kind: Kind, state: StateDtype, heads: int) -> RecurrentDecodeKey:
    """What `choose` returns where nothing was measured: one tile for every batch.

    A block of two warps moves 4 KiB, the size that a plain copy of slots does best with: with more bytes a block loses 4 %, with
    less the rate of block launches bounds it. 16 lanes a row leave registers for 16 blocks on an SM. Large batches keep what
    they read (device/kept.py), those of fp32 have half as many more blocks load early.
    """
    many = heads >= MANY_HEADS
    if state == "float32":
        return RecurrentDecodeKey(kind, state, 2, 2, True, EARLY_BLOCKS * 3 // 2 if many else EARLY_BLOCKS, many)
    return RecurrentDecodeKey(kind, state, 4, 2, True, kept=many)


def candidates(kind: Kind, state: StateDtype, heads: int = 1) -> list[RecurrentDecodeKey]:
    """The space a sweep tries: tiles, with the heuristic's early blocks."""
    default = heuristic(kind, state, heads)
    keys = [
        replace(default, rows=rows, warps=warps, pdl=pdl)
        for rows in (1, 2, 4)
        for warps in (2, 4, 8)
        for pdl in (False, True)
    ]
    return [key for key in keys if key.rejection() is None]


def shipped() -> list[Entry]:
    """Entries of the manifest: what `choose` can return on any device that has a table, and without one."""
    keys: set[RecurrentDecodeKey] = set()
    for kind in KINDS:
        for state in STATE_DTYPES:
            default = heuristic(kind, state, 1)
            keys |= {default, heuristic(kind, state, MANY_HEADS)} | tables.shipped_keys(
                "recurrent_decode", {"kind": kind, "state": state}, default
            )
    return [Entry("recurrent_decode", key, ResourceBudget(max_registers=64)) for key in sorted(keys, key=repr)]
