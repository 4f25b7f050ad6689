"""The fixed geometries: head counts of served models under tensor parallelism. K = V = 128, conv width 4, no bias, SiLU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

HEAD_DIM = 128
CONV_WIDTH = 4


@dataclass(frozen=True)
class Geometry:
    """One rank's heads of one model.

    gate: "scalar" (GDN), "softplus" or a negative bound (KDA). state_dtypes: what its pools hold in service.
    """

    id: str
    model: str
    tp: int
    kind: Literal["gdn", "kda"]
    hk: int
    hv: int
    state_dtypes: tuple[str, ...]
    lower_bound: float | None = None

    @property
    def channels(self) -> int:
        """Conv channels of the packed q | k | v row."""
        return (2 * self.hk + self.hv) * HEAD_DIM

    @property
    def heads(self) -> str:
        """`HK/HV`."""
        return f"{self.hk}/{self.hv}"


_FP32: tuple[str, ...] = ("float32",)
_BOTH: tuple[str, ...] = ("float32", "bfloat16")

GEOMETRIES: tuple[Geometry, ...] = (
    Geometry("G1", "GLM-5.3-Flash", 4, "kda", 16, 16, _FP32, -5.0),
    Geometry("G2", "GLM-5.3-Flash", 8, "kda", 8, 8, _FP32, -5.0),
    Geometry("G3", "GLM-5.3-Flash", 1, "kda", 64, 64, _FP32, -5.0),
    Geometry("G4", "Kimi-Linear-48B", 1, "kda", 32, 32, _FP32),
    Geometry("G5", "Kimi-Linear-48B", 4, "kda", 8, 8, _FP32),
    Geometry("G6", "Kimi-K3", 8, "kda", 12, 12, _BOTH, -5.0),
    Geometry("Q1", "Qwen3.5-35B-A3B / Qwen3-Next", 1, "gdn", 16, 32, _BOTH),
    Geometry("Q2", "Qwen3.5-35B-A3B / Qwen3-Next", 4, "gdn", 4, 8, _BOTH),
    Geometry("Q3", "Qwen3.5-397B / 122B", 4, "gdn", 4, 16, _BOTH),
    Geometry("Q4", "Qwen3.5-397B / 122B", 8, "gdn", 2, 8, _BOTH),
    Geometry("Q5", "Qwen3.5-27B", 1, "gdn", 16, 48, _BOTH),
    Geometry("Q6", "Qwen3.5-27B / Qwen3.8-Flash-Next", 4, "gdn", 4, 12, _BOTH),
    Geometry("Q7", "Qwen3.5-0.8B / 2B", 1, "gdn", 16, 16, ("bfloat16",)),
    # 32 heads with a bounded gate: two ranks of GLM-5.3-Flash, needed for the KDA prefill matrix.
    Geometry("32/32", "GLM-5.3-Flash", 2, "kda", 32, 32, _FP32, -5.0),
)
BY_ID = {geometry.id: geometry for geometry in GEOMETRIES}
PRIMARY = ("G1", "G2", "G4", "Q1", "Q3", "Q5")


def geometry(name: str) -> Geometry:
    """A geometry by its id. Raises KeyError naming the known ones."""
    if name not in BY_ID:
        raise KeyError(f"geometry {name!r}: allowed: {', '.join(BY_ID)}")
    return BY_ID[name]
