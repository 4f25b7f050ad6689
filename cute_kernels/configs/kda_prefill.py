"""Chunkwise KDA prefill: its two kernels' specialisations and how a call is cut into launches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..compile.manifest import Entry, ResourceBudget

Gate = Literal["softplus", "bounded"]
StateDtype = Literal["float32", "bfloat16"]
SHORT = {"float32": "f32", "bfloat16": "bf16"}
GATES: tuple[Gate, ...] = ("softplus", "bounded")
SLABS: tuple[Literal[1, 2], ...] = (1, 2)
STATE_DTYPES: tuple[StateDtype, ...] = ("float32", "bfloat16")
RECORD_BYTES = 66_560  # what a chunk contributes to one head's recurrence, see device/kda_layout.py
MULTIPROCESSORS = 132
GENTLE_BOUND = -5.4  # log decay a token; 16 of it, and their inverse, are in fp32's range
LONG_LENGTH = 8192  # tokens of a row that is run in parts
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


def slabs_per_block(chains: int, heads: int) -> Literal[1, 2]:
    """Half a head a block where the chip has a multiprocessor for each half; a function of shapes alone, the bits are equal.

    chains: rows, or segments of rows, that a launch walks for each head.
    """
    return 1 if 2 * chains * heads <= MULTIPROCESSORS else 2


def parts_of_long_rows(heads: int) -> int:
    """Segments of a row of `LONG_LENGTH` tokens or more; 1 where the heads alone occupy the chip.

    The number must not depend on the batch, or a row's bits would. More parts than these cost more in their composition than they
    gain: 3.8 us a part.
    """
    if heads <= 8:
        return 6
    return 4 if heads <= 16 else 1


@dataclass(frozen=True)
class KdaRecordsKey:
    """Everything that changes the code of `kernels/kda_records.py`.

    steep: whether the gate may leave a channel less than e^GENTLE_BOUND a token, so that 16 tokens may leave fp32's range.
    """

    gate: Gate
    steep: bool = True

    def symbol(self) -> str:
        """C identifier of the specialisation."""
        return f"kda_records_{self.gate}{'' if self.steep else '_gentle'}"


def records_key(lower_bound: float | None) -> KdaRecordsKey:
    """The records kernel for a gate: softplus without a bound."""
    if lower_bound is None:
        return KdaRecordsKey("softplus")
    return KdaRecordsKey("bounded", steep=lower_bound < GENTLE_BOUND)


@dataclass(frozen=True)
class KdaPrefillKey:
    """Everything that changes the code of `kernels/kda_prefill.py`.

    slabs: state warpgroups of a block, 64 V rows each: 2 is a whole head, 1 half of one. Both give the same bits.
    transition: the launch that finds what segments of long rows do to a state.
    """

    state: StateDtype
    slabs: Literal[1, 2]
    transition: bool = False

    def symbol(self) -> str:
        """C identifier of the specialisation."""
        return f"kda_{'transition' if self.transition else 'prefill'}_{SHORT[self.state]}_{self.slabs}"


def shipped() -> list[Entry]:
    """Specialisations built ahead of time."""
    records = [KdaRecordsKey("softplus"), KdaRecordsKey("bounded"), KdaRecordsKey("bounded", steep=False)]
    entries = [Entry("kda_records", key, ResourceBudget(max_registers=128)) for key in records]
    entries += [
        Entry(
            "kda_prefill",
            KdaPrefillKey(state, slabs, transition),
            ResourceBudget(max_registers=255 if slabs == 1 else 168),
        )
        for transition in (False, True)
        for state in STATE_DTYPES
        for slabs in SLABS
    ]
    return entries
