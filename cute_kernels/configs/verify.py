"""Verify, commit and token-by-token prefill: what their specialisations are, which are legal, which one a shape gets.

A thread block of verify owns `warps * 4 * rows` rows of V of one (sequence, value head): eight lanes share a row, a lane
holds `rows` rows of 16 K values. Token-by-token prefill divides the work the same way.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ..compile.manifest import Entry, ResourceBudget
from .recurrent import KINDS, SHORT, STATE_DTYPES, Kind, StateDtype

MAX_TOKENS = 8  # draft tokens a row can replay or run in one call
HEAD_DIM = 128


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

    rows: V rows a lane holds. warps: warps a block. landing: state comes by bulk copy into shared memory, else straight
    into registers. blocks: thread blocks an SM must hold at once, which caps registers. commit: replay and store only, no
    new tokens. wy: the tensor-core form (`kernels/wy_verify.py`), bf16 pools. round_tokens: round the state to the pool's dtype after every token, replayed ones included.
    """

    kind: Kind
    state: StateDtype
    rows: int
    warps: int
    landing: bool = True
    blocks: int = 1
    commit: bool = False
    wy: bool = False
    round_tokens: bool = False

    def symbol(self) -> str:
        """C identifier of the specialisation."""
        if self.wy:
            return f"wy_verify_{self.kind}_{SHORT[self.state]}{('', f'_b{self.blocks}')[self.blocks > 1]}"
        name = "recurrent_commit" if self.commit else "recurrent_verify"
        flags = [
            ("", f"b{self.blocks}")[self.blocks > 1],
            ("_reg", "")[self.landing],
            ("", "_round")[self.round_tokens],
        ]
        return f"{name}_{self.kind}_{SHORT[self.state]}_r{self.rows}w{self.warps}{''.join(flags)}"

    @property
    def tile(self) -> int:
        """Rows of V a block owns."""
        return self.warps * 4 * self.rows

    def shared_bytes(self) -> int:
        """Shared memory of a block: old and new k, new q, u and v, KDA's decays, scalars, and the landing buffer."""
        kda = self.kind != "gdn"
        old_words = MAX_TOKENS * (HEAD_DIM * (2 if kda else 1) + self.tile + (0 if kda else 4))
        new_words = 0 if self.commit else MAX_TOKENS * (HEAD_DIM * (3 if kda else 2) + self.tile // 2 + 4)
        landing = self.tile * HEAD_DIM * (4 if self.state == "float32" else 2) if self.landing else 0
        return 4 * (old_words + new_words) + landing + 64

    def rejection(self) -> str | None:
        """Why this key has no kernel, or None."""
        if self.round_tokens and self.state == "float32":
            return "round_tokens: an fp32 pool rounds nothing"
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


# A tile of 64 rows with 4 rows a lane has the fewest instructions an element; below this many (row, head) pairs there are
# too few blocks to fill 132 SMs with it, and tiles of 32 rows finish sooner.
SMALL_BATCH_HEADS = 512
# Token-by-token prefill is bound by the latency of a token when it has few heads and by issue slots above: 1 row a lane
# halves the former and doubles the latter.
SMALL_PREFILL_HEADS = 32


@functools.lru_cache(maxsize=4096)
def choose_verify(kind: Kind, state: StateDtype, heads: int, *, round_tokens: bool = False) -> VerifyKey:
    """The specialisation for `heads` = sequences x value heads. Legal for every shape."""
    rows = 2 if heads <= SMALL_BATCH_HEADS else 4
    return VerifyKey(kind, state, rows, 4, round_tokens=round_tokens and state != "float32")


@functools.lru_cache(maxsize=64)
def choose_commit(kind: Kind, state: StateDtype, *, round_tokens: bool = False) -> VerifyKey:
    """The specialisation of a commit. Legal for every shape."""
    return VerifyKey(kind, state, 4, 4, commit=True, round_tokens=round_tokens and state != "float32")


@functools.lru_cache(maxsize=4096)
def choose_prefill(kind: Kind, state: StateDtype, heads: int) -> RecurrentPrefillKey:
    """The specialisation for `heads` = sequences x value heads. Legal for every shape."""
    return RecurrentPrefillKey(kind, state, 1 if heads <= SMALL_PREFILL_HEADS else 4, 4)


def shipped() -> list[Entry]:
    """Entries of the manifest: everything the functions above can return."""
    verify: set[VerifyKey] = set()
    prefill: set[RecurrentPrefillKey] = set()
    for kind in KINDS:
        for state in STATE_DTYPES:
            for round_tokens in (False, True):
                verify.add(choose_commit(kind, state, round_tokens=round_tokens))
                for heads in (1, SMALL_BATCH_HEADS + 1):
                    verify.add(choose_verify(kind, state, heads, round_tokens=round_tokens))
            for heads in (1, SMALL_PREFILL_HEADS + 1):
                prefill.add(choose_prefill(kind, state, heads))
    budget = ResourceBudget(max_registers=168)
    return [
        *(Entry("recurrent_verify", key, budget) for key in sorted(verify, key=repr)),
        *(Entry("recurrent_prefill", key, budget) for key in sorted(prefill, key=repr)),
    ]
