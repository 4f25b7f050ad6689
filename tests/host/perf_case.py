"""Small cases, small pools and peers of our own, for tests of the harness."""

from __future__ import annotations

import types

import pytest
import torch

from compact_state import cute_kernels
from compact_state.perf import run, timing
from compact_state.perf.bench import Unsupported
from compact_state.perf.cases import Case, workload
from compact_state.perf.geometries import Geometry
from compact_state.perf.peers.common import PeerCall

CPU = torch.device("cpu")
SMALL_GDN = Geometry("Q4", "two heads", 8, "gdn", 1, 2, ("float32",))
SMALL_KDA = Geometry("G2", "two heads", 8, "kda", 2, 2, ("float32",), -5.0)
SMALL_SOFTPLUS = Geometry("G5", "two heads", 4, "kda", 2, 2, ("float32",))


def small(op: str, load: str, dtype: str = "float32", gates: str | None = None, accepted: int | None = None) -> Case:
    g = SMALL_KDA if op.startswith("kda") else SMALL_GDN
    return Case(op, g, workload(load), dtype, gates, accepted)


def small_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools, cold buffers and graphs that a CPU fills in no time."""
    monkeypatch.setattr(run, "CPU_POOL_BYTES", 16 * 2**20)
    monkeypatch.setattr(timing, "COLD_BYTES", 2**20)
    monkeypatch.setattr(timing, "WORK_US", 0.0)


def fake_peer(scale: float) -> types.SimpleNamespace:
    """A peer that runs our own operator in place and scales its output."""

    def decode(p):  # type: ignore[no-untyped-def]
        def make(read, write, out):  # type: ignore[no-untyped-def]
            return lambda: cute_kernels.gdn_decode(*p.arguments, p.pool, read, read, out=out).mul_(scale)

        return PeerCall(make, in_place=True)

    return types.SimpleNamespace(decode=decode)


def refusing_peer() -> types.SimpleNamespace:
    def decode(p):  # type: ignore[no-untyped-def]
        raise Unsupported("bf16 pools only")

    return types.SimpleNamespace(decode=decode)
