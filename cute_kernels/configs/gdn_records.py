"""GDN prefill from records: its two kernels' specialisations, and which calls take it.

Budget of one block of the recurrence, shared memory: K, Q 3 x 32 KiB, vectors 3 x 2.4 KiB; half a head:
V 4 x 8 KiB, T', P 3 x 16 KiB; a whole one: V 3 x 16 KiB, T', P 2 x 16 KiB; some columns of one: four of each, V 2 KiB.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..compile.manifest import Entry, ResourceBudget
from .prefill import LONG_LENGTH, MULTIPROCESSORS, StateDtype, lead_of_long_rows, parts_of_long_rows

RECORD_BYTES = 18_048  # T', P and the vectors of one chunk and value head, see device/gdn_records.py
MOST_ROWS = 32  # of a call that makes records: a lane of a warp holds one, see device/gdn_chains.py
MOST_PROMPTS = 8  # of a call of more rows, most are taken to be single tokens beside a few long rows
MIXED_TOKENS = 6144  # of such a call, or what it costs to let lengths choose is more than 2 % of the longest chain
MOST_CHOSEN_ROWS = 256  # of a call that lengths choose a form for, see device/gdn_chains.py
MOST_HEADS = 96  # of all rows of such a call
NO_ROW = 2**31 - 1  # tokens that no row has
WORKSPACE_BYTES = 1 << 29  # most that a call may take for records
CHUNK = 64  # tokens
WORKERS = 3  # of a block that makes records
COLUMNS = 16  # of V, of a block of `kernels/gdn_columns.py`
CHUNK_US = {1: 1.1, 2: 1.6}  # of the recurrence, of a block with half a head and with a whole one


@dataclass(frozen=True)
class GdnRecordsKey:
    """The kernel that makes records; one specialisation."""

    def symbol(self) -> str:
        """C identifier of this specialisation."""
        return "gdn_records"


@dataclass(frozen=True)
class GdnRecurrenceKey:
    """Everything that changes the code of `kernels/gdn_recurrence.py`; attributes as in `GdnPrefillKey`."""

    state_dtype: StateDtype = "float32"
    transition: bool = False
    slabs: Literal[1, 2] = 2

    def symbol(self) -> str:
        """C identifier of this specialisation."""
        state = "f32" if self.state_dtype == "float32" else "bf16"
        kind = "recurrence_transition" if self.transition else "recurrence"
        return f"gdn_{kind}_{state}{'_half' if self.slabs == 1 else ''}"


@dataclass(frozen=True)
class GdnColumnsKey:
    """Everything that changes the code of `kernels/gdn_columns.py`: the pool's element type."""

    state_dtype: StateDtype = "float32"

    def symbol(self) -> str:
        """C identifier of this specialisation."""
        return f"gdn_columns_{'f32' if self.state_dtype == 'float32' else 'bf16'}"


def takes_records(slots: int, heads: int, rows: int) -> bool:
    """Whether a call of so many rows makes records; a function of shapes alone, both forms give the same bits.

    64 heads of all rows end in 0.75 of the time of one launch, 96 of two rows of unlike lengths in 0.66, 128 in 1.0 to 1.1 of
    it. Rows in parts count once: their records serve the transitions too.

    slots: chunk slots of a head. heads: value heads.
    """
    fits = slots * heads * RECORD_BYTES <= WORKSPACE_BYTES and rows <= MOST_ROWS
    return fits and rows * heads <= MOST_HEADS


def forms(tokens: int, slots: int, heads: int, rows: int) -> tuple[bool, bool, int]:
    """(one launch, records, who chooses) of a call of so many rows: which launches are made, see `device/gdn_chains.py`.

    A launch that lengths leave without work costs 2 us, the choice between one launch and records 5 us: lengths choose where
    these are little beside a chain of all tokens, and the rows many enough for most to be single tokens, or one so long that
    one launch would wait for its first segment.

    slots: chunk slots of a head. heads: value heads.
    """
    if takes_records(slots, heads, rows):
        return False, True, 1 if rows * heads > MULTIPROCESSORS // 2 and rows > 1 else 0
    mixed = rows > MOST_PROMPTS and tokens >= MIXED_TOKENS
    leads = lead_of_long_rows(heads) > 2 and LONG_LENGTH + rows <= tokens < 4 * LONG_LENGTH
    fits = slots * heads * RECORD_BYTES <= WORKSPACE_BYTES and rows <= MOST_CHOSEN_ROWS
    both = fits and (mixed or leads)
    return True, both, 2 if both else 0


def parts_from_records(hv: int) -> int:
    """Segments of a long row where records are made; bits are those of `parts_of_long_rows`.

    Of two segments the first one's end state is handed on unrounded, which the chain of an uncut row does as well, and its
    second half would not end sooner.
    """
    parts = parts_of_long_rows(hv)
    return parts if parts > 2 else 1


def plan_of_row(tokens: int, heads: int, together: int, width: int, parts: int, lead: int) -> tuple[int, int, int, int]:
    """(stay, early, single, total) of a call of one row without kept states, which may have all its tokens.

    See `device/gdn_chains.py`, `shares` and `deal`: of other calls the kernel finds it, while nothing else is under way. Of a cut
    row more records are made beside the first chains than there, where those of rows of other lengths would wait.
    together: value heads of a key head. width: blocks of a head's chain. parts, lead: of the row, 1 where it is not cut.
    """
    chunks = max(-(-tokens // CHUNK), 1)
    blocks = min((tokens // CHUNK + 1) * heads, MULTIPROCESSORS)
    longest, inner, total = chunks, 0, chunks * heads
    if parts > 1:
        inner = -(-2 * chunks // (2 * parts - 2 + lead))
        longest = (lead * inner + 1) // 2
    stay = blocks - heads * width
    ahead = longest * (4 if width >= 4 else 7 if width == 2 else 10) // 8 - inner
    if stay <= blocks // 4 or ahead <= 0:
        return 0, 0, -1, total
    early = max(total - stay * ahead, 0)
    single = min(chunks, -(-WORKERS * (blocks if early else stay) // heads)) * heads
    total = single + (total - single) // together
    return stay, min(early, single + max(early - single, 0) // together), single, total


def recurrence_slabs(items: int, taken: int = 0) -> Literal[1, 2]:
    """Half a head a block where that ends sooner for so many items of whole heads; a function of shapes alone.

    `taken` multiprocessors have other work.
    """
    left = max(MULTIPROCESSORS - taken, 1)
    halves, wholes = (-(-items * n // left) * CHUNK_US[3 - n] for n in (2, 1))
    return 1 if halves < wholes else 2


def takes_columns(heads: int) -> bool:
    """Whether blocks of some columns of a head end sooner for so many heads of all rows; a function of shapes alone.

    They do where all are on the chip at once, beside the records of few heads or behind those of more. Rows in parts do without:
    their transitions take the multiprocessors.
    """
    return heads * (128 // COLUMNS) <= MULTIPROCESSORS


def shipped() -> list[Entry]:
    """The specialisations built ahead of time."""
    chunks = [
        Entry(
            "gdn_recurrence",
            GdnRecurrenceKey(state, transition, slabs),
            ResourceBudget(max_registers=255 if slabs == 1 else 168),
        )
        for state in ("float32", "bfloat16")
        for transition in (False, True)
        for slabs in (1, 2)
    ]
    columns = [
        Entry("gdn_columns", GdnColumnsKey(state), ResourceBudget(max_registers=128))
        for state in ("float32", "bfloat16")
    ]
    return [*columns, Entry("gdn_records", GdnRecordsKey(), ResourceBudget(max_registers=128)), *chunks]
