"""Chunkwise KDA prefill: its two kernels' specialisations and how a call is cut into launches."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from ..compile.manifest import Entry, ResourceBudget

Gate = Literal["softplus", "bounded"]
StateDtype = Literal["float32", "bfloat16"]
SHORT = {"float32": "f32", "bfloat16": "bf16"}
GATES: tuple[Gate, ...] = ("softplus", "bounded")
SLABS: tuple[Literal[1, 2], ...] = (1, 2)
STATE_DTYPES: tuple[StateDtype, ...] = ("float32", "bfloat16")
RECORD_BYTES = 60_416  # what a chunk contributes to one head's recurrence, see device/kda_layout.py
MULTIPROCESSORS = 132
GENTLE_BOUND = -5.4  # log decay a token; 16 of it, and their inverse, are in fp32's range
LONG_LENGTH = 8192  # tokens of a row that is run in parts
BLOCKS_OF_RECORDS = 2 * MULTIPROCESSORS  # on the chip at once
ORDERED_ROWS = 32  # rows or segments that a warp puts in the order of need
CHUNK_US = {False: {1: 0.95, 2: 1.8}, True: {1: 1.05, 2: 1.6}}  # by whether it is a transition, and slabs of a block
CROWDED = 1.45  # how much longer a chunk of half a head takes where all multiprocessors load records
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


def slabs_per_block(chains: int, heads: int, equal: bool = False) -> Literal[1, 2]:
    """Half a head a block where that ends sooner, which shapes alone decide; the bits are equal.

    chains: rows, or segments of rows, that a launch walks for each head. Halves load each record twice, but fill the chip better,
    more so where chains differ in length; `equal` says that they do not.
    """
    halves, wholes = (-(-n * chains * heads // MULTIPROCESSORS) for n in (2, 1))
    few = 2 * chains * heads <= (1.0 if equal else 1.5) * MULTIPROCESSORS
    return 1 if few or halves < 1.85 * wholes - 0.5 else 2


@dataclass(frozen=True)
class Overlap:
    """How the recurrence runs beside the launch of its records.

    slabs: of a recurrence block. stay: multiprocessors that make records to the end. rounds: items that each worker of the
    whole chip makes first; 0 where the records have no more than `stay` multiprocessors from the start. early: multiprocessors
    that make their first item alone instead of two at a time, so that the recurrence can start sooner.
    """

    slabs: Literal[1, 2]
    stay: int
    rounds: int
    early: int = 0

    @property
    def blocks(self) -> int:
        """Blocks of the launch of records, one a multiprocessor."""
        return MULTIPROCESSORS if self.rounds else self.stay


@functools.lru_cache(maxsize=1024)
def overlap(slots: int, heads: int, chains: int, steps: float, transition: bool, extra_us: float) -> Overlap | None:
    """How records and the launch that walks them run side by side, None where one follows the other; the bits are equal.

    chains: rows, or states of segments, that the launch walks for each head. steps: chunks of one, on average; of several rows
    one is longer. extra_us: what the side by side form costs besides. The form that ends soonest by measured times: a round of
    records takes 12.4 us, less where fewer share memory; a chunk `CHUNK_US`, more where many blocks walk.
    """
    items, chunk_us = slots * heads, CHUNK_US[transition]
    if not transition:
        steps *= 1.0 if chains == 1 else 1.75 if chains == 2 else 1.25 if chains <= 4 else 2.0
    crowded = not transition and 2 * chains * heads > 80
    alone = chunk_us[slabs_per_block(chains, heads, transition)] * (CROWDED if crowded else 1.0)
    made = max(items * 5.25 / MULTIPROCESSORS, 11 * min(-(-items // BLOCKS_OF_RECORDS), 3))
    sequence = made + 6 + steps * alone
    # Of several rows the longest is not known, and transitions are followed by launches that wait for all: less is sure to gain.
    best, least = None, (0.98 if chains <= 2 else 0.94) * sequence - extra_us - (6 if transition else 0)
    if steps * alone < 0.35 * sequence:
        return None
    for slabs in SLABS:
        blocks = chains * heads * 2 // slabs
        # Whole heads fall behind the records, which leave L2 before they are read where there are many.
        if blocks > (64 if chains <= 4 else 96) or (
            slabs == 2 and items > 2500 and not transition and chains * heads > 32
        ):
            continue
        stay = MULTIPROCESSORS - blocks
        round_us = 9.8 + 0.026 * stay if slabs == 1 else 12.4
        early = 40 if chains * heads <= 12 else 0
        for rounds in range(items // BLOCKS_OF_RECORDS + 1):
            beside = chunk_us[slabs] * (1.0 if transition else beside_records(slabs, blocks, chains, rounds))
            rest = -(-(items - rounds * BLOCKS_OF_RECORDS) // (2 * stay)) * round_us + 3
            time = 4 + max(12.4 * rounds, 8 if early else 11) + max(steps * beside, rest)
            if time < least:
                best, least = Overlap(slabs, stay, rounds, 0 if rounds else early), time
    return best


def beside_records(slabs: int, blocks: int, chains: int, rounds: int) -> float:
    """How much longer a chunk takes beside the records: its loads come late, later where many blocks load, and where the records
    made in `rounds` no longer are in L2; sooner where the first ones were made ahead."""
    if slabs == 1 and (rounds > 12 or (blocks > 48 and chains > 2)):
        return 1.5
    if slabs == 1 and blocks > 48:
        return 1.25
    return 1.14 if rounds else 1.2


def parts_of_long_rows(heads: int) -> int:
    """Segments of a row of `LONG_LENGTH` tokens or more; 1 where the heads alone occupy the chip.

    The number must not depend on the batch, or a row's bits would. More parts than these cost more in their composition than they
    gain: 3.8 us a part.
    """
    if heads <= 8:
        return 6
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
    return entries
