"""Chunkwise prefill: what changes a kernel's code, what is legal, and what ships.

Budget of one GDN block (one sequence and value head, or half of one; one block a multiprocessor):

    registers   whole head, 512 threads: 2 state warpgroups x 176, pairs 112, data 48 = 512, the whole file
                half of one, 640 threads: state 176, 2 pairs x 96, 2 data x 56 = 480, 96 a thread at the start
    shared      K, Q 3 x 16 KiB, V 3 x 16 KiB (8 for half a head), V', T', P 2 x 8 KiB, work matrix 9 KiB a pairs
                warpgroup, vectors 3 x 2.4 KiB; output over V
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..compile.manifest import Entry, ResourceBudget

StateDtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class GdnPrefillKey:
    """Everything that changes the code of the GDN prefill kernel.

    Attributes:
        state_dtype: element type of the pool.
        transition: the launch that finds what segments of long rows do to a state.
        slabs: state warpgroups of a block, 64 V rows each: 2 is a whole head, 1 half of one. Both give the same bits.
        debug: "" in shipped kernels. "bounded": a wait that lasts too long ends its warp; "profile": cycles waited are added
            up. Both write to the tensor passed as checkpoint slots, which then holds 18 words a warp.
    """

    state_dtype: StateDtype = "float32"
    transition: bool = False
    slabs: Literal[1, 2] = 2
    debug: Literal["", "bounded", "profile"] = ""

    def symbol(self) -> str:
        """C identifier of this specialisation."""
        state = "f32" if self.state_dtype == "float32" else "bf16"
        kind = "transition" if self.transition else "prefill"
        half = "_half" if self.slabs == 1 else ""
        return f"gdn_{kind}_{state}{half}{'_' if self.debug else ''}{self.debug}"

    def shared_bytes(self) -> int:
        """Shared memory of one block."""
        return 231_424


@dataclass(frozen=True)
class SegmentStatesKey:
    """The kernel that composes segments; one specialisation."""

    def symbol(self) -> str:
        """C identifier of this specialisation."""
        return "segment_states"


LONG_LENGTH = 8192
MULTIPROCESSORS = 132
CHUNK_US = {1: 2.2, 2: 3.0}  # of a block with half a head, with a whole one


def slabs_per_block(heads: int) -> Literal[1, 2]:
    """Half a head a block where that ends sooner for so many heads of all rows; a function of shapes alone."""
    halves, wholes = (-(-heads * n // MULTIPROCESSORS) * CHUNK_US[3 - n] for n in (2, 1))
    return 1 if halves < wholes else 2


def parts_of_long_rows(hv: int) -> int:
    """Segments of a row of `LONG_LENGTH` tokens or more; 1 where the heads alone occupy the chip.

    The number must not depend on the batch, or a row's bits would: it is the one measured fastest for one such row, from records.
    """
    if hv <= 8:
        return 8
    if hv <= 16:
        return 5
    return 2 if hv <= 32 else 1


def lead_of_long_rows(hv: int) -> int:
    """Halves of another segment's length that the first segment of a long row has; a function of `hv` alone, as the parts are.

    From records its chain runs beside everything that is done before the others can start.
    """
    return 5 if parts_of_long_rows(hv) == 5 else 2


def shipped() -> list[Entry]:
    """The specialisations built ahead of time."""
    budget = ResourceBudget(max_registers=128)
    chunks = [
        Entry("gdn_prefill", GdnPrefillKey(state, transition, slabs), budget)
        for state in ("float32", "bfloat16")
        for transition in (False, True)
        for slabs in (1, 2)
    ]
    return [*chunks, Entry("segment_states", SegmentStatesKey(), ResourceBudget(max_registers=128))]
