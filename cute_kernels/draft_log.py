"""Per-request record of the draft tokens of the last verify step.

A verify step leaves the stored state where the accepted tokens end, not where the drafts end. The next step therefore
replays the accepted drafts: ``S <- diag(decay) S + u k^T`` needs only k, u and the gate of each token, and no dot
product. The log keeps these, so one read and one write of the state serve any number of drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from .errors import InvalidArgumentError


@dataclass
class DraftLog:
    """Draft log of one layer for ``B`` requests, private to them and never part of a slot.

    It is double-buffered: several thread blocks read the half that one of them would otherwise overwrite in the same
    launch. A call reads half ``half[r]`` of log row ``r`` and writes half ``half[r] ^ 1``; ``advance_state_ids`` flips
    the word afterwards, on the device. Contents start undefined: only tokens counted by ``num_accepted`` are ever read.

    Attributes:
        k: ``[B, 2, Tmax, HK, K]`` bf16, keys as the operator received them (after conv, before l2norm).
        u: ``[B, 2, Tmax, HV, V]`` fp32, ``beta * (v - S k)``.
        g: GDN ``[B, 2, Tmax, HV]`` fp32, the decay factor ``exp(g)``; KDA ``[B, 2, Tmax, HV, K]`` bf16, the raw gate.
        x: ``[B, 2, Tmax, C]`` bf16 raw conv inputs, or None if the conv of this layer is not logged.
        half: ``[B]`` int32, 0 or 1, the half the next call reads. Layers of one request may share the tensor.
        rows: None (batch row n uses log row n), or ``[N]`` int32, the log row of each batch row. A row outside
            ``[0, B)`` has no log: nothing is replayed and nothing is recorded for it.
    """

    k: torch.Tensor
    u: torch.Tensor
    g: torch.Tensor
    x: torch.Tensor | None
    half: torch.Tensor
    rows: torch.Tensor | None = None

    @property
    def batch(self) -> int:
        """Log rows."""
        return self.k.shape[0]

    @property
    def max_tokens(self) -> int:
        """Draft tokens a row can hold, ``Tmax``."""
        return self.k.shape[2]

    @classmethod
    def allocate(
        cls,
        kind: Literal["gdn", "kda"],
        batch: int,
        hk: int,
        hv: int,
        channels: int | None,
        device: torch.device | str | None = None,
        max_tokens: int = 8,
        *,
        head_dim_k: int = 128,
        head_dim_v: int = 128,
        dtype: torch.dtype = torch.bfloat16,
        u_dtype: torch.dtype = torch.float32,
        half: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
    ) -> DraftLog:
        """Uninitialised log memory; ``half`` starts at 0 unless a shared tensor is given.

        Args:
            kind: "gdn" (scalar decay) or "kda" (raw gate per channel).
            batch: log rows B.
            hk: key heads.
            hv: value heads.
            channels: conv channels C, or None to log no conv inputs.
            device: where the log lives.
            max_tokens: drafts per row, Tmax. Kernels of the delta rules take at most 8.
            head_dim_k: K.
            head_dim_v: V.
            dtype: dtype of the operator's inputs (k, raw gate, x). Kernels take bf16 only.
            u_dtype: dtype of u and of the GDN decay. Kernels take fp32 only.
            half: ``[batch]`` int32 to share between layers.
            rows: as the attribute.

        Raises InvalidArgumentError for another kind.
        """
        if kind not in ("gdn", "kda"):
            raise InvalidArgumentError("kind", repr(kind), "'gdn' or 'kda'")

        def empty(*shape: int, of: torch.dtype) -> torch.Tensor:
            return torch.empty(batch, 2, max_tokens, *shape, dtype=of, device=device)

        gate = empty(hv, of=u_dtype) if kind == "gdn" else empty(hv, head_dim_k, of=dtype)
        return cls(
            k=empty(hk, head_dim_k, of=dtype),
            u=empty(hv, head_dim_v, of=u_dtype),
            g=gate,
            x=None if channels is None else empty(channels, of=dtype),
            half=torch.zeros(batch, dtype=torch.int32, device=device) if half is None else half,
            rows=rows,
        )
