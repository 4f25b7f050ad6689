"""Fused layer steps, one token and verify: what their specialisations are, which are legal, and which one a shape gets.

One thread block owns a whole (sequence, value head), so that the norm over V needs no second block. A single-token block works
through its 128 rows of V in passes of `pass_rows`, each of which lands in shared memory by one bulk copy.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from ..compile.manifest import Entry, ResourceBudget
from . import tables
from .recurrent import KINDS, SHORT, STATE_DTYPES, Kind, StateDtype
from .verify import VerifyKey

WeightDtype = Literal["float32", "bfloat16"]
WEIGHT_DTYPES: tuple[WeightDtype, ...] = ("float32", "bfloat16")
CONV_WIDTH = 4
SMS = 132  # of an H200
STREAMED_HEADS = 768  # sequences x value heads from which passes land by turns with fp32 weights too
ONE_WAVE = (448, 528)  # with fp32 weights: blocks of eight warps, four of which an SM holds
# bf16 pools and weights, by the most blocks that one SM gets: rows a lane, warps, passes on their way at once. Eight warps of
# 2 rows a lane fit an SM four times, of 1 row five times, four warps with 8, 7, 6 passes (KDA: 5) six, seven, eight times: the
# tile whose whole waves leave few places empty. KDA's tile of 6 passes has 5.
WAVES = (
    (1, (2, 4, 0)), (3, (2, 4, 7)), (4, (2, 8, 2)), (5, (1, 8, 4)), (6, (2, 4, 8)), (7, (2, 4, 7)), (8, (2, 4, 6)),
    (10, (1, 8, 4)), (14, (2, 4, 7)), (16, (2, 4, 6)), (21, (2, 4, 7)), (31, (2, 4, 6)), (2**31, (2, 4, 7)),
)  # fmt: skip
LATE_VERIFY_HEADS = 396  # more than three blocks an SM: verify on bf16 pools starts the state's copies last
SM_SHARED_BYTES = 233_472  # of one SM; each block takes 1 KiB besides its own

# Bits of the kernel's `flags` argument: what changes between calls without changing the code.
SETTLED = 1  # the kernel before this one wrote neither ids, positions, slots nor windows
SILU_GATE = 2  # the output gate is z sigmoid(z), else sigmoid(z)
CONV_BIAS = 4  # the conv has a bias
NORM_BF16 = 8  # the norm's weight is bf16, else fp32
MAPPED = 16  # verify: the draft log names the log row of each batch row
PLAIN = 32  # no dependent of the kernel before, which has ended when this one starts


WY_VALUE_STRIDE = (
    68  # words of a token's v in the tensor-core form: lanes of a warp, two rows of V of a token each, hit all banks
)


def wy_layer_regions(warps: int) -> dict[str, int]:
    """Shared memory of a layer's tensor-core form behind that of the recurrence: fp32 words of each region, in order."""
    return {"squares": 8 * warps, "values": 8 * WY_VALUE_STRIDE, "weight": 128}


@dataclass(frozen=True)
class LayerDecodeKey:
    """Everything that changes the code of `kernels/layer_decode.py`.

    weight: dtype of the conv's taps and bias. rows: V rows a lane holds at a time, 1, 2 or 4. warps: warps a block.
    blocks: the most blocks an SM may hold at once, kept by shared memory that is asked for and not used; 0 is no limit.
    early: blocks of a settled launch that load while the previous kernel drains, the others wait first; 0 is all.
    landed: passes whose rows are on their way at once; 0 is all.
    """

    TUNED: ClassVar[tuple[str, ...]] = ("rows", "warps", "blocks", "early", "landed")

    kind: Kind
    state: StateDtype
    weight: WeightDtype
    rows: int
    warps: int
    blocks: int = 0
    early: int = 0
    landed: int = 0

    def symbol(self) -> str:
        """C identifier of the specialisation."""
        limits = f"b{self.blocks}" if self.blocks else ""
        limits += f"e{self.early}" if self.early else ""
        limits += f"a{self.landed}" if self.landed else ""
        tile = f"r{self.rows}w{self.warps}{limits}"
        return f"layer_decode_{self.kind}_{SHORT[self.state]}_w{SHORT[self.weight]}_{tile}"

    @property
    def lanes(self) -> int:
        """Lanes that share a row of V: 16 on an fp32 pool or where passes land by turns (docs/notes/layer_decode.md), else 8."""
        return 16 if self.state == "float32" or self.landed else 8

    @property
    def pass_rows(self) -> int:
        """Rows of V the block updates at a time."""
        return self.warps * 32 // self.lanes * self.rows

    @property
    def kept(self) -> bool:
        """Whether states are read as device/kept.py says: on fp32 pools and where passes land by turns."""
        return self.state == "float32" or self.landed > 0

    @property
    def resident(self) -> int:
        """Blocks an SM must hold, which caps registers: of eight warps whose passes land by turns; 0 is no cap."""
        return (5 if self.rows == 1 else 4) if self.state == "bfloat16" and self.landed and self.warps == 8 else 0

    def shared_bytes(self) -> int:
        """Shared memory of a block: the landed state, a barrier a pass, six vectors of a head, two scalars, the unused part."""
        landed = self.landed * self.pass_rows if self.landed else 128
        state = landed * 128 * (4 if self.state == "float32" else 2)
        return state + 8 * (128 // self.pass_rows) + 6 * 128 * 4 + 2 * 4 + 128 + self.unused_bytes()

    def unused_bytes(self) -> int:
        """Shared memory that a block takes so that one more than `blocks` does not fit an SM."""
        if not self.blocks:
            return 0
        used = replace(self, blocks=0).shared_bytes()
        return max(0, SM_SHARED_BYTES // (self.blocks + 1) - used)

    def rejection(self) -> str | None:
        """Why this key has no kernel, or None."""
        if self.rows not in (1, 2, 4):
            return f"rows={self.rows}: the butterfly reduces 1, 2 or 4 rows"
        if not 4 <= self.warps <= 16:
            return f"warps={self.warps}: two warps convolve and two prepare the gates, at most 16"
        if 128 % self.pass_rows:
            return f"warps={self.warps}, rows={self.rows}: a pass of {self.pass_rows} rows does not divide 128"
        if not 0 <= self.landed <= 128 // self.pass_rows:
            return f"landed={self.landed}: a head has {128 // self.pass_rows} passes"
        return None


@dataclass(frozen=True)
class LayerVerifyKey:
    """Everything that changes the code of `kernels/layer_verify.py` and `kernels/wy_layer_verify.py`.

    weight: dtype of the conv's taps and bias. blocks: thread blocks an SM must hold at once, which caps registers. late: as in
    `VerifyKey`.
    """

    kind: Kind
    state: StateDtype
    weight: WeightDtype
    blocks: int
    late: bool = False

    def symbol(self) -> str:
        """C identifier of the specialisation."""
        form, late = "" if self.state == "float32" else "wy_", "_late" * self.late
        return f"{form}layer_verify_{self.kind}_{SHORT[self.state]}_w{SHORT[self.weight]}_b{self.blocks}{late}"

    @property
    def verify(self) -> VerifyKey:
        """The recurrence inside: a whole head a block, on tensor cores for a bf16 pool as the bare verify is."""
        wy = self.state == "bfloat16"
        return VerifyKey(self.kind, self.state, 4, 8, blocks=self.blocks, wy=wy, pdl=True, late=self.late)

    def shared_bytes(self) -> int:
        """Shared memory of a block: that of the recurrence, and of conv and norm."""
        words = 2 * 8 * 128 if self.state == "float32" else sum(wy_layer_regions(self.verify.warps).values())
        return self.verify.shared_bytes() + 4 * words

    def rejection(self) -> str | None:
        """Why this key has no kernel, or None."""
        if self.blocks * (self.shared_bytes() + 1024) > 233_472:
            return f"blocks={self.blocks}: {self.shared_bytes()} B of shared memory each do not fit an SM"
        return self.verify.rejection()


@functools.lru_cache(maxsize=64)
def choose_verify_layer(kind: Kind, state: StateDtype, weight: WeightDtype, heads: int) -> LayerVerifyKey:
    """The verify specialisation for `heads` = sequences x value heads."""
    if state == "float32":
        return LayerVerifyKey(kind, state, weight, 2)
    return LayerVerifyKey(kind, state, weight, 4, late=heads > LATE_VERIFY_HEADS)


def verify_file(key: LayerVerifyKey) -> str:
    """Name of the kernel file a verify key belongs to."""
    return "layer_verify" if key.state == "float32" else "wy_layer_verify"


@tables.memoised
def choose(kind: Kind, state: StateDtype, weight: WeightDtype, heads: int = 0) -> LayerDecodeKey:
    """The specialisation for `heads` = sequences x value heads (0: unknown): a table's where it has one, else the heuristic's."""
    default = heuristic(kind, state, weight, heads)
    return tables.tuned("layer_decode", default, kind=kind, state=state, weight=weight, heads=heads)


def heuristic(kind: Kind, state: StateDtype, weight: WeightDtype, heads: int = 0) -> LayerDecodeKey:
    """16 KiB (bf16: 8 KiB) a bulk copy and whole heads on their way; in fp32 two blocks an SM are faster than three, and three
    quarters of them early faster than all. bf16 passes land by turns where an SM gets more than one block, by `WAVES`.
    """
    if state == "float32":
        return LayerDecodeKey(kind, state, weight, 2, 8, 2, 198)
    if weight == "bfloat16":
        rows, warps, landed = next(tile for most, tile in WAVES if heads <= most * SMS)
        return LayerDecodeKey(kind, state, weight, rows, warps, landed=5 if landed == 6 and kind != "gdn" else landed)
    if ONE_WAVE[0] <= heads <= ONE_WAVE[1]:
        return LayerDecodeKey(kind, state, weight, 2, 8, landed=2)
    return LayerDecodeKey(kind, state, weight, 2, 4, landed=4 if heads >= STREAMED_HEADS else 0)


def candidates(kind: Kind, state: StateDtype, weight: WeightDtype) -> list[LayerDecodeKey]:
    """The space a sweep tries."""
    keys = [
        LayerDecodeKey(kind, state, weight, rows, warps, blocks, early, landed)
        for rows in (1, 2, 4)
        for warps in (4, 8, 16)
        for blocks in (0, 2, 3)
        for early in (0, 198)
        for landed in (0, 2, 4, 5, 6, 7, 8)
    ]
    return [key for key in keys if key.rejection() is None]


def shipped() -> list[Entry]:
    """Entries of the manifest: what `choose` can return."""
    keys: set[LayerDecodeKey] = set()
    for kind in KINDS:
        for state in STATE_DTYPES:
            for weight in WEIGHT_DTYPES:
                shape = {"kind": kind, "state": state, "weight": weight}
                keys |= {
                    heuristic(kind, state, weight, heads)
                    for heads in (0, ONE_WAVE[0], STREAMED_HEADS, *(most * SMS for most, _ in WAVES))
                }
                keys |= tables.shipped_keys("layer_decode", shape, heuristic(kind, state, weight))
    verify = dict.fromkeys(
        choose_verify_layer(kind, state, weight, heads)
        for kind in KINDS
        for state in STATE_DTYPES
        for weight in WEIGHT_DTYPES
        for heads in (1, LATE_VERIFY_HEADS + 1)
    )
    budget = ResourceBudget(max_registers=128, max_shared_bytes=76 * 1024)
    verify_budget = ResourceBudget(max_registers=128, max_shared_bytes=112 * 1024)
    return [
        *(Entry("layer_decode", key, budget) for key in sorted(keys, key=repr)),
        *(Entry(verify_file(key), key, verify_budget) for key in verify),
    ]
