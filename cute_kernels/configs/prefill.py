"""Chunkwise prefill: what changes a kernel's code, what is legal, and what ships.

Budget of one GDN block (one sequence and value head, 512 threads, one block a multiprocessor):

    registers   2 state warpgroups x 176, pairs 96, data 64: 512 a lane of four warps = the whole file
    shared      K 3 x 16 KiB, Q, V, K' 2 x 16 KiB, T', P 2 x 8 KiB, output 2 x 17 KiB, work matrix 9 KiB, vectors 4 KiB
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
        debug: "" in shipped kernels. "bounded": a wait that lasts too long ends its warp; "profile": cycles waited are added
            up. Both write to the tensor passed as checkpoint slots, which then holds 16 words for each of 16 warps.
    """

    state_dtype: StateDtype = "float32"
    debug: Literal["", "bounded", "profile"] = ""

    def symbol(self) -> str:
        """C identifier of this specialisation."""
        state = "f32" if self.state_dtype == "float32" else "bf16"
        return f"gdn_prefill_{state}{'_' if self.debug else ''}{self.debug}"

    def shared_bytes(self) -> int:
        """Shared memory of one block."""
        return 229_376


def shipped() -> list[Entry]:
    """The specialisations built ahead of time."""
    budget = ResourceBudget(max_registers=128)
    return [Entry("gdn_prefill", GdnPrefillKey(state), budget) for state in ("float32", "bfloat16")]
