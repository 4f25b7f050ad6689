"""Chunkwise KDA prefill: its two kernels' specialisations and how a call is cut into launches."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from ..compile.manifest import Entry, ResourceBudget

Gate = Literal["softplus", "bounded"]
StateDtype = Literal["float32", "bfloat16"]
Columns = Literal[16, 32, 64, 128]
SHORT = {"float32": "f32", "bfloat16": "bf16"}
GATES: tuple[Gate, ...] = ("softplus", "bounded")
SLABS: tuple[Literal[1, 2], ...] = (1, 2)
COLUMNS: tuple[Literal[16, 32], ...] = (16, 32)  # of `KdaColumnsKey`
STATE_DTYPES: tuple[StateDtype, ...] = ("float32", "bfloat16")
CHUNK = 64  # tokens
RECORD_BYTES = 60_416  # what a chunk contributes to one head's recurrence, see device/kda_layout.py
MULTIPROCESSORS = 132
GENTLE_BOUND = -5.4  # log decay a token; 16 of it, and their inverse, are in fp32's range
BLOCKS_OF_RECORDS = 2 * MULTIPROCESSORS  # on the chip at once
ORDERED_ROWS = 32  # rows or segments that a warp puts in the order of need
RECORD_US = 4.05  # of a multiprocessor, where all of them make records
ROUND_US = {False: 8.7, True: 9.4}  # one record by each worker of the chip, by whether the gate is softplus
# By whether it is a transition, and V columns of a block.
CHUNK_US: dict[bool, dict[Columns, float]] = {
    False: {16: 0.70, 32: 0.87, 64: 0.93, 128: 1.75},
    True: {64: 1.05, 128: 1.6},
}
# How much longer a chunk of half a head and a round take beside one another with many blocks, and a round with few, by whether
# the gate is softplus.
SHARED = {False: (1.6, 1.0, 0.9), True: (1.5, 0.97, 0.95)}
# Rounds whose records halves of a head of several rows find in L2, and what of a round's time that gains them.
IN_L2 = (3, 0.15)
CROWDED = 1.5  # how much longer a chunk of half a head takes where all multiprocessors load records
WORKSPACE_BYTES = 1 << 30  # most that one launch may take for records


def heads_per_launch(slots: int, heads: int) -> int:
    """Value heads whose records of `slots` chunk slots fit the workspace: all of them, or an equal share, at least one."""
    limit = max(1, WORKSPACE_BYTES // (max(slots, 1) * RECORD_BYTES))
    launches = -(-heads // limit)
    return -(-heads // launches)


def slots_per_launch(slots: int, heads: int) -> int:
    """Chunk slots whose records of all heads fit the workspace: all of them, or an equal share, at least one."""
    limit = max(1, WORKSPACE_BYTES // (heads * RECORD_BYTES))
    launches = -(-slots // limit)
    return -(-slots // launches)


def slabs_per_block(chains: int, heads: int, equal: bool = False, tokens: float = math.inf) -> Literal[1, 2]:
    """Half a head a block where that ends sooner, which shapes alone decide; the bits are equal.

    chains: rows, or segments of rows, that a launch walks for each head. Halves load each record twice, but fill the chip better,
    more so where chains differ in length; `equal` says that they do not. tokens: of a chain on average; where these are less than
    a chunk most chains are short ones, and one may be long.
    """
    if tokens < CHUNK and heads <= 16:
        return 1
    halves, wholes = (-(-n * chains * heads // MULTIPROCESSORS) for n in (2, 1))
    few = 2 * chains * heads <= (1.0 if equal else 1.5) * MULTIPROCESSORS
    # Of few rows, which seldom are equal, a third wave of whole heads would begin late; of equal ones halves take 1 % longer.
    unequal = wholes == 3 and chains <= 8 and not equal
    return 1 if few or unequal or halves < 1.85 * wholes - 0.5 else 2


def rows_at_once(rows: int, heads: int, slabs: int) -> int:
    """How many rows, or segments of rows, blocks of `slabs` halves of a head walk at first where the chip is theirs."""
    return max(1, min(rows, MULTIPROCESSORS * slabs // (2 * heads)))


@dataclass(frozen=True)
class Overlap:
    """How the recurrence runs beside the launch of its records.

    columns: V columns of a recurrence block. stay: multiprocessors, an even number, that make records to the end. rounds: items
    that each worker of the whole chip makes first; 0 where the records have no more than `stay` multiprocessors from the start.
    early: multiprocessors that make their first item alone instead of two at a time, so that the recurrence can start sooner.
    """

    columns: Columns
    stay: int
    rounds: int
    early: int = 0

    @property
    def blocks(self) -> int:
        """Blocks of the launch of records, one a multiprocessor."""
        return MULTIPROCESSORS if self.rounds else self.stay


@functools.lru_cache(maxsize=1024)
def overlap(
    slots: int, heads: int, chains: int, steps: float, transition: bool, extra_us: float, softplus: bool = False
) -> Overlap | None:
    """How records and the launch that walks them run side by side, None where one follows the other; the bits are equal.

    chains: rows, or states of segments, that the launch walks for each head. steps: chunks of one, on average; of several rows
    one is longer. extra_us: what the side by side form costs besides. The form that ends soonest by measured times.
    """
    items, chunk_us, round_us = slots * heads, CHUNK_US[transition], ROUND_US[softplus]
    if not transition:
        steps *= 1.0 if chains == 1 else 1.75 if chains == 2 else 1.25 if chains <= 4 else 2.0
    crowded = not transition and 2 * chains * heads > 80
    slabs = slabs_per_block(chains, heads, transition)
    alone = chunk_us[64 if slabs == 1 else 128] * (CROWDED if crowded else 1.0)
    made = 6 + max(items * RECORD_US / MULTIPROCESSORS, 0.95 * round_us * min(-(-items // BLOCKS_OF_RECORDS), 3))
    sequence = made + 6 + steps * alone
    # Transitions are followed by launches that wait for all: less is sure to gain.
    best, least = None, (0.9 if transition and chains > 2 else 0.98) * sequence - extra_us - (6 if transition else 0)
    if steps * alone < 0.3 * sequence:
        return None
    for columns in chunk_us:
        blocks = chains * heads * 128 // columns
        if blocks > (96 if chains > 4 or columns == 16 else 64) or (columns < 64 and chains > 1):
            continue  # too many blocks, or narrow ones where they have not been timed
        stay = (MULTIPROCESSORS - blocks) // 2 * 2  # blocks of records are clusters of two
        early = 40 if chains * heads <= 12 else 0
        for rounds in range(items // BLOCKS_OF_RECORDS + 1):
            beside = chunk_us[columns] * (1.0 if transition else beside_records(columns, blocks, chains, softplus))
            left = (items - rounds * BLOCKS_OF_RECORDS) / (2 * stay)  # rounds of those that stay
            if columns < 64:  # they take less memory from the records than slabs do, and seldom wait for a round's end
                rest = left * round_us * 0.77
            else:
                slower = 1.38 if transition else SHARED[softplus][1 if blocks > 48 and rounds > 1 else 2]
                rest = math.ceil(left) * round_us * slower
            # Chunks that are walked while records are made take longer.
            walked = min(steps, rest / beside)
            chain = walked * beside + (steps - walked) * chunk_us[columns] * (
                CROWDED if crowded and columns == 64 else 1.0
            )
            if rounds:
                found = min(rounds, IN_L2[0]) * IN_L2[1] if columns == 64 and chains > 1 and left > 2 else 0.0
                start = (6 if columns < 64 else 10) + max(round_us * (rounds - found), 10.5)
            else:
                start = 12 if early or columns < 64 else 20.5
            time = start + max(chain, rest + 3)
            if time < least:
                best, least = Overlap(columns, stay, rounds, 0 if rounds else early), time
    return best


def beside_records(columns: int, blocks: int, chains: int, softplus: bool) -> float:
    """How much longer a chunk takes while other multiprocessors make records: with many blocks, memory is the limit.

    Of more than four rows with more than 64 blocks most are short: they end before the longest, and memory is free again.
    """
    if columns < 64:
        return 1.08 if columns == 16 else 1.12
    if columns == 64:
        return 1.15 if blocks <= 48 else SHARED[softplus][0]
    return 1.2 if blocks < 64 or (chains > 4 and blocks > 64) else 1.6


def shortest_long_row(heads: int) -> int:
    """Tokens from which on a row is run in parts.

    A call that may have such a row has three launches for it, 4 to 8 us where it has none. Of up to 16,384 tokens a row of eight
    heads or more gains less by its parts than batches of shorter rows lose by those launches.
    """
    return 8192 if heads < 8 else 16_384


def parts_of_long_rows(heads: int) -> int:
    """Segments of a row of `shortest_long_row` tokens or more; 1 where the heads alone occupy the chip.

    The number must not depend on the batch, or a row's bits would. More parts than these cost more in their composition than they
    gain: 3.8 us a part.
    """
    if heads <= 8:
        return 5
    return 4 if heads <= 12 else 1


@dataclass(frozen=True)
class KdaRecordsKey:
    """Everything that changes the code of `kernels/kda_records.py`.

    steep: whether the gate may leave a channel less than e^GENTLE_BOUND a token, so that 16 tokens may leave fp32's range.
    overlapped: the recurrence runs beside it.
    """

    gate: Gate
    steep: bool = True
    overlapped: bool = False

    def symbol(self) -> str:
        """C identifier of the specialisation."""
        return f"kda_records_{self.gate}{'' if self.steep else '_gentle'}{'_overlapped' if self.overlapped else ''}"


def records_key(lower_bound: float | None, overlapped: bool = False) -> KdaRecordsKey:
    """The records kernel for a gate: softplus without a bound."""
    if lower_bound is None:
        return KdaRecordsKey("softplus", overlapped=overlapped)
    return KdaRecordsKey("bounded", lower_bound < GENTLE_BOUND, overlapped)


@dataclass(frozen=True)
class KdaPrefillKey:
    """Everything that changes the code of `kernels/kda_prefill.py`.

    slabs: state warpgroups of a block, 64 V rows each: 2 is a whole head, 1 half of one. Both give the same bits.
    transition: the launch that finds what segments of long rows do to a state.
    overlapped: it runs beside the launch that makes its records.
    """

    state: StateDtype
    slabs: Literal[1, 2]
    transition: bool = False
    overlapped: bool = False

    def symbol(self) -> str:
        """C identifier of the specialisation."""
        form = f"{'transition' if self.transition else 'prefill'}{'_overlapped' if self.overlapped else ''}"
        return f"kda_{form}_{SHORT[self.state]}_{self.slabs}"


@dataclass(frozen=True)
class KdaColumnsKey:
    """Everything that changes the code of `kernels/kda_columns.py`, which runs beside the launch that makes its records.

    columns: V columns of a block.
    """

    state: StateDtype
    columns: Literal[16, 32]
    overlapped: ClassVar[bool] = True

    def symbol(self) -> str:
        """C identifier of the specialisation."""
        return f"kda_columns_{SHORT[self.state]}_{self.columns}"


RecurrenceKey = KdaPrefillKey | KdaColumnsKey


def recurrence_key(state: StateDtype, columns: Columns, transition: bool) -> RecurrenceKey:
    """The recurrence beside its records with so many V columns a block."""
    if columns == 16 or columns == 32:
        return KdaColumnsKey(state, columns)
    return KdaPrefillKey(state, 1 if columns == 64 else 2, transition, overlapped=True)


def shipped() -> list[Entry]:
    """Specialisations built ahead of time."""
    kinds: list[tuple[Gate, bool]] = [("softplus", True), ("bounded", True), ("bounded", False)]
    records = [KdaRecordsKey(*kind, overlapped) for overlapped in (False, True) for kind in kinds]
    entries = [Entry("kda_records", key, ResourceBudget(max_registers=128)) for key in records]
    entries += [
        Entry(
            "kda_prefill",
            KdaPrefillKey(state, slabs, transition, overlapped),
            ResourceBudget(max_registers=255 if slabs == 1 else 168),
        )
        for overlapped in (False, True)
        for transition in (False, True)
        for state in STATE_DTYPES
        for slabs in SLABS
    ]
    entries += [
        Entry("kda_columns", KdaColumnsKey(state, columns), ResourceBudget(max_registers=112))
        for state in STATE_DTYPES
        for columns in COLUMNS
    ]
    return entries
