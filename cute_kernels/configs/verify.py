"""Verify, commit and token-by-token prefill: what their specialisations are, which are legal, which one a shape gets.

A thread block of verify owns `warps * 4 * rows` rows of V of one (sequence, value head): eight lanes share a row, a lane
holds `rows` rows of 16 K values. Token-by-token prefill divides the work the same way.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

from ..compile.manifest import Entry, ResourceBudget
from . import tables
from .recurrent import KINDS, SHORT, STATE_DTYPES, Kind, StateDtype

MAX_TOKENS = 8  # draft tokens a row can replay or run in one call
HEAD_DIM = 128


WY_OPERAND_STRIDE = 160  # bf16 of an operand row: 8 rows of 16-byte vectors hit all banks
WY_NORM_STRIDE = 12  # words of a vector's eight shares of its square: 8 rows of 16 bytes hit all banks
WY_OLD_STRIDE = 68  # words of a logged token's row: 8 rows of 16 bytes hit all banks


def wy_regions(kda: bool, warps: int) -> dict[str, int]:
    """Shared memory of the tensor-core form: fp32 words of each region, in order."""
    parts = 2 if kda else 1
    return {
        "beta": MAX_TOKENS,
        "between": 0 if kda else MAX_TOKENS * MAX_TOKENS,
        "upto": 0 if kda else MAX_TOKENS,
        "behind": 0 if kda else MAX_TOKENS,
        "total": HEAD_DIM if kda else 4,
        "norms": 3 * MAX_TOKENS * WY_NORM_STRIDE,
        "pairs": warps * 32 * 4,
        "operands": 2 * parts * MAX_TOKENS * WY_OPERAND_STRIDE // 2,
        "old": parts * MAX_TOKENS * WY_OLD_STRIDE,
    }


def _tile_rejection(rows: int, warps: int) -> str | None:
    if rows not in (1, 2, 4):
        return f"rows={rows}: the butterfly reduces 1, 2 or 4 rows"
    if warps not in (4, 8):
        return f"warps={warps}: the prologue spreads 8 tokens over 128 threads or their 16 vectors over 256"
    if HEAD_DIM % (warps * 4 * rows):
        return f"warps={warps}, rows={rows}: a tile of {warps * 4 * rows} rows does not divide {HEAD_DIM}"
    return None


@dataclass(frozen=True)
class VerifyKey:
    """Everything that changes the code of `kernels/recurrent_verify.py`.

    rows: V rows a lane holds. warps: warps a block. blocks: thread blocks an SM must hold at once, which caps registers.
    commit: replay and store only, no new tokens. wy: the tensor-core form (`kernels/wy_verify.py`). pdl: start while the
    previous kernel of the stream drains. late: the tensor-core form starts the state's copies behind the loads of what is
    logged (the fused step's also behind the window's).
    """

    TUNED: ClassVar[tuple[str, ...]] = ("rows", "warps", "blocks", "pdl", "late")

    kind: Kind
    state: StateDtype
    rows: int
    warps: int
    blocks: int = 1
    commit: bool = False
    wy: bool = False
    pdl: bool = False
    late: bool = False

    def symbol(self) -> str:
        """C identifier of the specialisation."""
        blocks = f"_b{self.blocks}" if self.blocks > 1 else ""
        flags = blocks + "_pdl" * self.pdl + "_late" * self.late
        if self.wy:
            return f"wy_verify_{self.kind}_{SHORT[self.state]}{flags}" + "_commit" * self.commit  # never in a legal key
        name = "recurrent_commit" if self.commit else "recurrent_verify"
        return f"{name}_{self.kind}_{SHORT[self.state]}_r{self.rows}w{self.warps}{flags}"

    @property
    def tile(self) -> int:
        """Rows of V a block owns."""
        return self.warps * 4 * self.rows

    @property
    def early(self) -> int:
        """Blocks of a settled launch that load while the kernel before drains: five eighths of what an H200 holds at once.

        With all of them nobody would read between the end of that kernel and the first stores of this one.
        """
        held = self.blocks if self.blocks > 1 else 4  # fp32's tile of 64 rows: by its shared memory
        return 132 * held * 5 // 8

    def shared_bytes(self) -> int:
        """Shared memory of a block: old and new k, new q, u and v, KDA's decays, scalars, and the landing buffer."""
        kda = self.kind != "gdn"
        if self.wy:
            landings = 2 * (HEAD_DIM + self.warps // 2) * HEAD_DIM + 8 * self.warps
            return 4 * sum(wy_regions(kda, self.warps).values()) + landings + 64
        old_words = MAX_TOKENS * (HEAD_DIM * (2 if kda else 1) + self.tile + (0 if kda else 4))
        new_words = 0 if self.commit else MAX_TOKENS * (HEAD_DIM * (3 if kda else 2) + self.tile // 2 + 4)
        landing = self.tile * HEAD_DIM * (4 if self.state == "float32" else 2)
        return 4 * (old_words + new_words) + landing + 64

    def rejection(self) -> str | None:
        """Why this key has no kernel, or None."""
        whole = self.warps == 8 and self.tile == HEAD_DIM
        if self.late and not self.wy:
            return "late: an order of the tensor-core form's loads"
        if self.wy and (self.state != "bfloat16" or self.commit or not whole):
            return "wy: it verifies on bf16 pools, a whole head landed in a block of 8 warps"
        if self.blocks * (self.shared_bytes() + 1024) > 233_472:
            return f"blocks={self.blocks}: {self.shared_bytes()} B of shared memory each do not fit an SM"
        return _tile_rejection(self.rows, self.warps)


@dataclass(frozen=True)
class RecurrentPrefillKey:
    """Everything that changes the code of `kernels/recurrent_prefill.py`; fields as in `VerifyKey`."""

    kind: Kind
    state: StateDtype
    rows: int
    warps: int

    def symbol(self) -> str:
        """C identifier of the specialisation."""
        return f"recurrent_prefill_{self.kind}_{SHORT[self.state]}_r{self.rows}w{self.warps}"

    @property
    def tile(self) -> int:
        """Rows of V a block owns."""
        return self.warps * 4 * self.rows

    def rejection(self) -> str | None:
        """Why this key has no kernel, or None."""
        return _tile_rejection(self.rows, self.warps)


MULTIPROCESSORS = 132
# Measured on H200 (docs/notes/verify.md), in (row, head) pairs. fp32: tiles of 32 rows, 2 a lane, as long as each has an SM.
SMALL_BATCH_HEADS = MULTIPROCESSORS // 4
# The tensor-core form with registers for two blocks an SM, a gain with bounded KDA, and with fewer early blocks, one with GDN.
LOW_OCCUPANCY = {"gdn": range(161, 449), "kda_bounded": range(1, 65), "kda_softplus": range(0)}
# KDA's tensor-core form with late copies of the state beyond this, where four blocks an SM make more than one wave. GDN loses.
LATE_HEADS = 4 * MULTIPROCESSORS
# One number of pairs of each range that a choice has.
SIZES = (
    1,
    SMALL_BATCH_HEADS + 1,
    LATE_HEADS + 1,
    *(end for sizes in LOW_OCCUPANCY.values() if sizes for end in (sizes.start, sizes.stop)),
)


@tables.memoised
def choose_verify(kind: Kind, state: StateDtype, heads: int, *, round_tokens: bool = False) -> VerifyKey:
    """The specialisation for `heads` = sequences x value heads: a table's where it has one, else the heuristic's."""
    default = heuristic(kind, state, heads, round_tokens=round_tokens)
    return tables.tuned(kernel_file(default), default, kind=kind, state=state, heads=heads)


def wy_candidates(kind: Kind) -> list[VerifyKey]:
    """The space a sweep tries of the tensor-core form: registers against blocks of an SM, the order of the first loads."""
    keys = [
        VerifyKey(kind, "bfloat16", 4, 8, blocks=blocks, wy=True, pdl=True, late=late)
        for blocks in (2, 3, 4)
        for late in (False, True)
    ]
    return [key for key in keys if key.rejection() is None]


def candidates(kind: Kind, state: StateDtype) -> list[VerifyKey]:
    """The space a sweep tries of the form that rounds where step-by-step decode does."""
    keys = [
        VerifyKey(kind, state, rows, warps, blocks=blocks, pdl=True)
        for rows in (2, 4)
        for warps in (4, 8)
        for blocks in (1, 2)
    ]
    return [key for key in keys if key.rejection() is None]


def heuristic(kind: Kind, state: StateDtype, heads: int, *, round_tokens: bool = False) -> VerifyKey:
    """What `choose_verify` returns where nothing was measured. Legal for every shape.

    The form follows from the pool and `round_tokens` alone, so that a row's bits do not depend on its batch. What a size changes
    was measured on H200 (docs/notes/verify.md).
    """
    if state == "bfloat16" and not round_tokens:
        blocks = 2 if heads in LOW_OCCUPANCY[kind] else 4
        late = kind != "gdn" and heads > LATE_HEADS
        return VerifyKey(kind, state, 4, 8, blocks=blocks, wy=True, pdl=True, late=late)
    small = heads <= SMALL_BATCH_HEADS and state == "float32"
    return VerifyKey(kind, state, 2 if small else 4, 4, pdl=True)


@functools.lru_cache(maxsize=64)
def choose_commit(kind: Kind, state: StateDtype) -> VerifyKey:
    """The specialisation of a commit. Legal for every shape."""
    return VerifyKey(kind, state, 4, 4, blocks=5, commit=True)


@functools.lru_cache(maxsize=64)
def choose_prefill(kind: Kind, state: StateDtype) -> RecurrentPrefillKey:
    """The specialisation of token-by-token prefill: 2 rows a lane measured best from 1 to 64 sequences."""
    return RecurrentPrefillKey(kind, state, 2, 4)


def kernel_file(key: VerifyKey) -> str:
    """Name of the kernel file a key belongs to."""
    return "wy_verify" if key.wy else "recurrent_verify"


def shipped() -> list[Entry]:
    """Entries of the manifest: everything the functions above can return."""
    verify: set[VerifyKey] = set()
    prefill: set[RecurrentPrefillKey] = set()
    for kind in KINDS:
        for state in STATE_DTYPES:
            verify.add(choose_commit(kind, state))
            for heads in SIZES:
                verify |= {heuristic(kind, state, heads, round_tokens=rounds) for rounds in (False, True)}
            shape = {"kind": kind, "state": state}
            for default in (heuristic(kind, state, 1), heuristic(kind, state, 1, round_tokens=True)):
                verify |= tables.shipped_keys(kernel_file(default), shape, default)
            prefill.add(choose_prefill(kind, state))
    budget = ResourceBudget(max_registers=168)
    return [
        *(Entry(kernel_file(key), key, budget) for key in sorted(verify, key=repr)),
        *(Entry("recurrent_prefill", key, budget) for key in sorted(prefill, key=repr)),
    ]
