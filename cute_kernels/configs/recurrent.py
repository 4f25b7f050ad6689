"""T = 1 decode of GDN and KDA: what its specialisations are, which are legal, and which one a shape gets.

One thread block owns `warps * 4 * rows` rows of V of one (sequence, value head): eight lanes share a row, a lane holds
`rows` rows of 16 K values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..compile.manifest import Entry, ResourceBudget
from . import tables

Kind = Literal["gdn", "kda_softplus", "kda_bounded"]
StateDtype = Literal["float32", "bfloat16"]
SHORT = {"float32": "f32", "bfloat16": "bf16"}
KINDS: tuple[Kind, ...] = ("gdn", "kda_softplus", "kda_bounded")
STATE_DTYPES: tuple[StateDtype, ...] = ("float32", "bfloat16")


@dataclass(frozen=True)
class RecurrentDecodeKey:
    """Everything that changes the code of `kernels/recurrent_decode.py`.

    rows: V rows a lane holds, 1, 2 or 4. warps: warps a block. pdl: start while the previous kernel of the stream drains.
    """

    TUNED: ClassVar[tuple[str, ...]] = ("rows", "warps", "pdl")

    kind: Kind
    state: StateDtype
    rows: int
    warps: int
    pdl: bool

    def symbol(self) -> str:
        """C identifier of the specialisation."""
        return f"recurrent_decode_{self.kind}_{SHORT[self.state]}_r{self.rows}w{self.warps}{'_pdl' if self.pdl else ''}"

    @property
    def tile(self) -> int:
        """Rows of V a block owns."""
        return self.warps * 4 * self.rows

    def rejection(self) -> str | None:
        """Why this key has no kernel, or None."""
        if self.rows not in (1, 2, 4):
            return f"rows={self.rows}: the butterfly reduces 1, 2 or 4 rows"
        if not 1 <= self.warps <= 16 or 128 % self.tile:
            return f"warps={self.warps}, rows={self.rows}: a tile of {self.tile} rows does not divide 128"
        if self.rows * 16 > 64:
            return f"rows={self.rows}: more than 64 state registers a thread spill"
        return None


# `heads` is sequences x value heads. Above these counts a block takes 4 KiB: with more bytes a block even a plain copy loses 4 %
# of the bandwidth. Below, fewer and larger blocks prepare k, q and the gates less often.
SMALL_BLOCK_HEADS = {("gdn", "float32"): 512, ("gdn", "bfloat16"): 2048, ("kda", "float32"): 2048}
GDN_BF16_FEW_HEADS = 64  # up to here the shorter rows finish sooner
# One wave of blocks that fills the device: whole heads (GDN), two warps that share the gates (KDA).
ONE_WAVE_HEADS = {("gdn", "float32"): (182, 313), ("kda", "bfloat16"): (46, 181)}
# Starting while the launch before drains gains at every size but one: KDA on a bf16 pool, where above this many heads the
# running blocks need the slots it takes.
KDA_BF16_PDL_MAX_HEADS = 1536


@tables.memoised
def choose(kind: Kind, state: StateDtype, heads: int) -> RecurrentDecodeKey:
    """The specialisation for `heads` = sequences x value heads: a measured one where a table has it, else the heuristic's."""
    return tables.tuned("recurrent_decode", heuristic(kind, state, heads), kind=kind, state=state, heads=heads)


def heuristic(kind: Kind, state: StateDtype, heads: int) -> RecurrentDecodeKey:
    """What `choose` returns where nothing was measured. Legal for every shape."""
    small = heads > SMALL_BLOCK_HEADS.get((kind[:3], state), heads)
    if state == "float32" and small:
        return RecurrentDecodeKey(kind, state, 1, 2, True)
    low, high = ONE_WAVE_HEADS.get((kind[:3], state), (1, 0))
    if low <= heads <= high:
        return RecurrentDecodeKey(kind, state, 4, 8 if kind == "gdn" else 2, True)
    if kind == "gdn":
        rows = 2 if state == "float32" or small or heads <= GDN_BF16_FEW_HEADS else 4
        return RecurrentDecodeKey(kind, state, rows, 2, True)
    # KDA prepares a gate for every channel: one warp with the longest rows does it for the most of V.
    return RecurrentDecodeKey(kind, state, 4, 1, state == "float32" or heads <= KDA_BF16_PDL_MAX_HEADS)


def candidates(kind: Kind, state: StateDtype) -> list[RecurrentDecodeKey]:
    """The space a sweep tries."""
    keys = [
        RecurrentDecodeKey(kind, state, rows, warps, pdl)
        for rows in (1, 2, 4)
        for warps in (1, 2, 4, 8)
        for pdl in (False, True)
    ]
    return [key for key in keys if key.rejection() is None]


def shipped() -> list[Entry]:
    """Entries of the manifest: what `choose` can return on any device that has a table, and without one."""
    keys: set[RecurrentDecodeKey] = set()
    for kind in KINDS:
        for state in STATE_DTYPES:
            bounds = (GDN_BF16_FEW_HEADS, KDA_BF16_PDL_MAX_HEADS, *SMALL_BLOCK_HEADS.values())
            bounds += tuple(low for low, _ in ONE_WAVE_HEADS.values())
            keys |= {heuristic(kind, state, heads) for heads in (1, *(bound + 1 for bound in bounds))}
            keys |= tables.shipped_keys("recurrent_decode", {"kind": kind, "state": state}, heuristic(kind, state, 1))
    return [Entry("recurrent_decode", key, ResourceBudget(max_registers=128)) for key in sorted(keys, key=repr)]
