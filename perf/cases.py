"""The registry of cases: operator, geometry, workload. A new kernel joins by adding entries here and a bench module.

Workload names are a small grammar: `B64` (64 rows, one token each), `B64T6` (6 tokens each), and for packed prefill terms
joined by `+`: `1x8192`, `28672+4096`, `60x1+2000+48`, `4x2048+ckpt512` (a checkpoint every 512 tokens), `ragged64` (64
sequences of 1 to 128 tokens).
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from . import work
from .geometries import PRIMARY, Geometry, geometry

STATE_DTYPES = ("float32", "bfloat16")
BATCHES = (1, 4, 8, 16, 32, 64, 128, 256, 512)
GATES = ("fast", "slow", "trained", "bound")  # mean log-decay -2.5, near 0, a trained layer's, the bound everywhere
RANDOM = "random"

# Which file of perf/results/h200/ a row belongs to.
FILES = {
    "gdn_decode": "decode",
    "kda_decode": "decode",
    "gdn_layer_decode": "decode",
    "kda_layer_decode": "decode",
    "advance_state_ids": "decode",
    "gdn_verify": "verify",
    "kda_verify": "verify",
    "gdn_commit": "verify",
    "kda_commit": "verify",
    "gdn_prefill": "gdn_prefill",
    "kda_prefill": "kda_prefill",
    "causal_conv1d_prefill": "conv",
    "causal_conv1d_decode": "conv",
}
OPS = tuple(FILES)


@dataclass(frozen=True)
class Workload:
    """Token counts of the sequences of one call."""

    name: str
    lengths: tuple[int, ...]
    checkpoint_every: int | None = None

    @property
    def rows(self) -> int:
        """Sequences."""
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(self.lengths)

    @property
    def checkpoints(self) -> int:
        """States kept on the way."""
        every = self.checkpoint_every
        return sum(length // every for length in self.lengths) if every else 0


def _ragged(count: int) -> tuple[int, ...]:
    """Lengths 1 to 128 with the awkward ones first; the same list in every run."""
    fixed = [1, 15, 16, 17, 63, 64, 65, 127]
    rng = random.Random(count)
    return tuple((fixed + [rng.randint(1, 128) for _ in range(count)])[:count])


def workload(name: str) -> Workload:
    """Parse a workload's name. Raises ValueError for one outside the grammar."""
    batch = re.fullmatch(r"B(\d+)(?:T(\d+))?", name)
    if batch:
        return Workload(name, (int(batch[2] or 1),) * int(batch[1]))
    lengths: list[int] = []
    every = None
    for term in name.split("+"):
        parsed = re.fullmatch(r"(?:(\d+)x)?(\d+)|ckpt(\d+)|ragged(\d+)", term)
        if parsed is None:
            raise ValueError(f"workload {name!r}: term {term!r}; allowed: N, NxL, ckptN, raggedN, or B…T…")
        if parsed[3]:
            every = int(parsed[3])
        elif parsed[4]:
            lengths += _ragged(int(parsed[4]))
        else:
            lengths += [int(parsed[2])] * int(parsed[1] or 1)
    return Workload(name, tuple(lengths), every)


@dataclass(frozen=True)
class Case:
    """One row of a result file.

    gates: KDA prefill's gate set. accepted: verify's replayed tokens a row, or "random" (1 to T, drawn with a fixed seed).
    quick: part of the short matrix. late: measured after the others, so that a run that is cut short has what matters. alone:
    without peers, which would compile kernels of their own for it.
    """

    op: str
    geometry: Geometry
    workload: Workload
    state_dtype: str
    gates: str | None = None
    accepted: int | str | None = None
    quick: bool = False
    late: bool = False
    alone: bool = False

    @property
    def name(self) -> str:
        """What `--case` matches, unique in the registry."""
        parts = [self.op, self.geometry.id, self.workload.name, "f32" if self.state_dtype == "float32" else "bf16"]
        parts += [self.gates] if self.gates else []
        parts += [f"a{self.accepted}"] if self.accepted is not None else []
        return ":".join(parts)

    @property
    def file(self) -> str:
        """Stem of its result file."""
        stem = FILES[self.op]
        return "verify" if self.op.endswith("layer_decode") and self.accepted is not None else stem

    @property
    def accepted_counts(self) -> list[int]:
        """Replayed tokens of each row."""
        rows, tokens = self.workload.rows, self.workload.lengths[0]
        if self.accepted == RANDOM:
            rng = random.Random(rows * 100 + tokens)
            return [rng.randint(1, tokens) for _ in range(rows)]
        return [int(self.accepted or 0)] * rows

    @property
    def work(self) -> work.Work:
        """Bytes and operations of one call."""
        g, w, dtype = self.geometry, self.workload, self.state_dtype
        accepted = sum(self.accepted_counts)
        if self.op.endswith("layer_decode"):
            return work.layer(g, dtype, w.rows, w.lengths[0], None if self.accepted is None else accepted)
        if self.op.endswith("_verify"):
            return work.verify(g, dtype, w.rows, w.lengths[0], accepted)
        if self.op.endswith("_commit"):
            return work.commit(g, dtype, w.rows, accepted)
        if self.op == "causal_conv1d_decode":
            return work.conv_decode(g, w.rows)
        if self.op == "causal_conv1d_prefill":
            return work.conv_prefill(g, w.lengths, w.checkpoints)
        if self.op == "advance_state_ids":
            return work.Work(w.rows * 6 * 4, 0)
        if self.op.endswith("_prefill"):
            return work.prefill(g, dtype, w.lengths, w.checkpoints)
        return work.decode(g, dtype, w.rows)


def _decode() -> Iterator[Case]:
    for name in PRIMARY:
        g = geometry(name)
        for dtype in STATE_DTYPES:
            for batch in BATCHES:
                quick = name in ("G1", "Q1") and batch in (1, 64, 256)
                yield Case(f"{g.kind}_decode", g, workload(f"B{batch}"), dtype, quick=quick)
            for batch in (1, 8, 64, 256):
                quick = name == "Q1" and batch == 64
                yield Case(f"{g.kind}_layer_decode", g, workload(f"B{batch}"), dtype, quick=quick)
    yield Case("advance_state_ids", geometry("Q1"), workload("B64"), "float32", quick=True)
    yield Case("advance_state_ids", geometry("Q1"), workload("B512"), "float32")


def _verify() -> Iterator[Case]:
    for name in PRIMARY:
        g = geometry(name)
        for dtype in STATE_DTYPES:
            for accepted in (0, 3, 6):
                yield Case(f"{g.kind}_verify", g, workload("B64T6"), dtype, None, accepted, quick=name == "Q1")
            yield Case(f"{g.kind}_layer_decode", g, workload("B64T6"), dtype, None, 3, quick=name == "Q1")
            yield Case(f"{g.kind}_commit", g, workload("B64"), dtype, None, 3, quick=name == "Q1")
    for name in ("G1", "Q1"):
        g = geometry(name)
        for dtype in STATE_DTYPES:
            for batch in (1, 8, 32, 64, 128):
                for tokens in range(2, 9):
                    load, late = workload(f"B{batch}T{tokens}"), batch in (32, 128) or tokens in (3, 5, 7)
                    yield Case(f"{g.kind}_verify", g, load, dtype, None, RANDOM, late=late, alone=tokens == 7)
            for tokens in (1, 2, 4, 8):
                yield Case(f"{g.kind}_verify", g, workload(f"B64T{tokens}"), dtype, None, tokens)


FLASHKDA_LENGTHS = "1300+547+2048+963+271+3063"


def _prefill() -> Iterator[Case]:
    gdn: tuple[str, ...] = ("1x2048", "1x8192", "1x32768", "4x2048", "8x1024", "8x4096", "28672+4096", "ragged64")
    gdn += ("1x8192+ckpt512", "4x2048+ckpt512")
    for name in ("Q1", "Q3", "Q4", "Q5", "Q7"):
        for load in gdn:
            quick = name == "Q1" and load in ("1x2048", "1x8192", "4x2048", "ragged64", "1x8192+ckpt512")
            late = name in ("Q4", "Q7") and load not in ("1x8192", "1x32768", "4x2048", "8x4096")
            yield Case("gdn_prefill", geometry(name), workload(load), "float32", quick=quick, late=late)
    for name in ("Q1", "Q7"):
        for load in ("1x8192", "4x2048", "8x4096"):
            yield Case("gdn_prefill", geometry(name), workload(load), "bfloat16")
    for load in ("60x1+2000+48", "63x1+8192"):
        yield Case("gdn_prefill", geometry("Q1"), workload(load), "float32")
    kda: tuple[str, ...] = ("1x2048", "1x8192", "1x32768", "4x2048", "8x1024", "32x1024", FLASHKDA_LENGTHS)
    kda += ("1x8192+ckpt512", "4x2048+ckpt512")
    for name in ("G2", "G6", "G1", "32/32", "G3"):
        for load in kda:
            for gates in GATES:
                quick = name == "G1" and load in ("1x8192", "4x2048") and gates in ("fast", "slow")
                main = load in ("1x8192", "4x2048", "32x1024") if name != "G1" else gates in ("fast", "slow")
                late = not main or gates == "bound" or (name != "G1" and gates == "trained")
                yield Case("kda_prefill", geometry(name), workload(load), "float32", gates, quick=quick, late=late)
    for load in ("1x8192", "1x32768", "4x2048"):
        for gates in GATES[:-1]:  # the softplus gate has no bound
            yield Case("kda_prefill", geometry("G4"), workload(load), "float32", gates)
    for gates in GATES[:2]:
        yield Case("kda_prefill", geometry("G1"), workload("4x2048"), "bfloat16", gates)


def _conv() -> Iterator[Case]:
    for name in ("G1", "G4", "Q1", "Q5"):
        for load in ("1x2048", "1x8192", "1x32768", "8x1024", FLASHKDA_LENGTHS, "ragged64", "1x8192+ckpt512"):
            quick = name == "Q1" and load in ("1x8192", "ragged64")
            yield Case("causal_conv1d_prefill", geometry(name), workload(load), "bfloat16", quick=quick)
        for batch in BATCHES:
            quick = name == "Q1" and batch in (8, 256)
            yield Case("causal_conv1d_decode", geometry(name), workload(f"B{batch}"), "bfloat16", quick=quick)


def registry_order(case: Case) -> tuple[object, ...]:
    """Order of rows in a file: by operator, dtype and geometry."""
    return OPS.index(case.op), case.state_dtype, case.geometry.id, case.workload.rows, case.workload.tokens


def registry() -> list[Case]:
    """Every case once, by operator, dtype and geometry."""
    cases = [*_decode(), *_verify(), *_prefill(), *_conv()]
    unique = {case.name: case for case in cases}
    return sorted(unique.values(), key=lambda c: (OPS.index(c.op), c.state_dtype, c.geometry.id, c.workload.rows))


def select(ops: str = "", pattern: str = "", quick: bool = False) -> list[Case]:
    """Cases whose operator is in the comma-separated `ops` and whose name the regular expression finds. None: an error.

    Raises ValueError for an unknown operator or a pattern that selects nothing.
    """
    wanted = [op for op in ops.split(",") if op]
    unknown = [op for op in wanted if op not in FILES]
    if unknown:
        raise ValueError(f"--op {','.join(unknown)}: allowed: {', '.join(OPS)}")
    found = [
        case
        for case in registry()
        if (not wanted or case.op in wanted) and re.search(pattern, case.name) and (case.quick or not quick)
    ]
    if not found:
        raise ValueError(f"no case for --op {ops!r} --case {pattern!r}{' --quick' if quick else ''}")
    return found
