"""The speed lines the library is held to, as data, and what committed results say of each: met, missed or not measured.

A line is a ratio that must not exceed its limit, taken on the worst cell or as a geometric mean; one without a limit is only
reported. Where a peer has a kernel for a cell but no figure the line is not met but "incomplete"; a line none of whose cells
was measured is "not measured".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from . import work
from .cases import GATES, registry, workload
from .geometries import geometry
from .tables import EXTRA_PASSES, Row, best_peer, geometric_mean, label, number, ours_against, table

Cell = tuple[str, float | None]  # None: it should have a figure and has none
Cells = Iterator[Cell]
GDN_MATRIX = ("Q1", "Q3", "Q4", "Q5", "Q7")
KDA_MATRIX = ("G2", "G6", "G1", "32/32", "G3")
DECODES = ("gdn_decode", "kda_decode")
LAYERS = ("gdn_layer_decode", "kda_layer_decode")
STEPS = (*DECODES, *LAYERS, "gdn_verify", "kda_verify", "gdn_commit", "kda_commit", "causal_conv1d_decode")
NO_KERNEL = ("Unsupported", "cudnnGraphNotSupportedError: no engine")  # begin why a peer offers nothing for a cell


class Results:
    """Rows of all result files, by what identifies them."""

    def __init__(self, results: Mapping[str, Mapping[str, Any]]) -> None:
        self.rows: list[Row] = []
        self.copy: dict[int, float] = {}
        self.seconds: dict[str, float] = {}
        for result in results.values():
            for env in (result["environment"], *result["environment"].get("resumed", ())):
                host = env.get("host", {})
                self.seconds[str(env.get("date"))] = env.get("seconds", 0.0)
                self.seconds[f"host {host.get('date')}"] = host.get("seconds", 0.0)
        seen: set[tuple[Any, ...]] = set()
        for result in results.values():
            for row in result["rows"]:
                if _key(row) not in seen:
                    seen.add(_key(row))
                    self.rows.append(row)
                    self.copy[id(row)] = result["environment"]["copy_tb_s"] or 0.0
        self._by_key = {_key(row): row for row in self.rows}

    def of(self, *ops: str, **fields: Any) -> list[Row]:
        """Rows of operators whose fields have these values."""
        return [row for row in self.rows if row["op"] in ops and all(row.get(k) == v for k, v in fields.items())]

    def like(self, row: Row, **changed: Any) -> Row | None:
        """The row that differs from `row` in these fields alone, if it was measured."""
        wanted = {name: row.get(name) for name in ("op", "geometry", "workload", "state_dtype", "gates", "accepted")}
        return self._by_key.get(_key(wanted | changed))


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in ("op", "geometry", "workload", "state_dtype", "gates", "accepted"))


def _batch(row: Row) -> int:
    return workload(row["workload"]).rows


def _heads(row: Row) -> int:
    return _batch(row) * geometry(row["geometry"]).hv


def _against_peer(results: Results, ops: Sequence[str], peers: Sequence[str] = (), **fields: Any) -> Cells:
    """Ours over the fastest of `peers` (any, if none is named)."""
    for row in results.of(*ops, **fields):
        times = {name: us for name, us in row["peers"].items() if not peers or name in peers}
        best = best_peer(row | {"peers": times})
        if best is not None:
            yield f"{row['op']} {label(row)}, {best[0]}", ours_against(row, best[0]) / best[1]
        for name, why in row.get("peers_missing", {}).items():
            if (not peers or name in peers) and not why.startswith(NO_KERNEL):
                yield f"{row['op']} {label(row)}, {name}", None


def _with_passes(r: Results) -> Cells:
    """Ours over FlashInfer with its gate and norm passes, the work that ours does in its one call."""
    name = f"flashinfer{EXTRA_PASSES}"
    for row in r.of("gdn_prefill", state_dtype="float32"):
        if name in row["peers"] and row["geometry"] in GDN_MATRIX:
            yield f"{row['op']} {label(row)}", ours_against(row, name) / row["peers"][name]


def _bandwidth(r: Results) -> Cells:
    for row in r.of(*DECODES, state_dtype="float32"):
        if _batch(row) >= 64 and row["floor_us"]:
            yield f"{row['op']} {label(row)}", row["ours_us"] / row["floor_us"]


def _slab(dtype: str) -> Callable[[Results], Cells]:
    def cells(r: Results) -> Cells:
        for row in r.of(*DECODES, state_dtype=dtype):
            if _heads(row) >= 1024 and row["slab_copy_us"]:
                yield f"{row['op']} {label(row)}", row["ours_us"] / row["slab_copy_us"]

    return cells


def _verify_over_decode(r: Results, dtype: str, wanted: Callable[[Row], bool]) -> Cells:
    for row in r.of("gdn_verify", "kda_verify", state_dtype=dtype):
        op = row["op"].replace("verify", "decode")
        one = r.like(row, op=op, workload=f"B{_batch(row)}", accepted=None)
        if one is not None and wanted(row):
            yield f"{row['op']} {label(row)}", row["ours_us"] / one["ours_us"]


def _six_drafts(accepted: int) -> Callable[[Results], Cells]:
    def wanted(row: Row) -> bool:
        return row["workload"] == "B64T6" and row["accepted"] == accepted and geometry(row["geometry"]).hv == 32

    return lambda r: _verify_over_decode(r, "float32", wanted)


def _bf16_drafts(r: Results) -> Cells:
    return _verify_over_decode(r, "bfloat16", lambda row: _batch(row) == 64 and geometry(row["geometry"]).hv == 32)


def _layer_over_decode(r: Results) -> Cells:
    for row in r.of(*LAYERS, accepted=None):
        bare = r.like(row, op=row["op"].replace("_layer", ""))
        if bare is not None and _batch(row) >= 64:
            yield f"{row['op']} {label(row)}", row["ours_us"] / bare["ours_us"]


def _layer_verify(r: Results) -> Cells:
    for row in r.of(*LAYERS):
        bare = r.like(row, op=row["op"].replace("layer_decode", "verify"))
        if row.get("accepted") is not None and bare is not None:
            yield f"{row['op']} {label(row)}", row["ours_us"] / bare["ours_us"]


def _host(r: Results) -> Cells:
    """Calls of a decode step: decode, layer, verify, commit and conv decode; prefill, whose kernels last longer, is not one."""
    for row in r.of(*STEPS):
        if row.get("host_us"):
            yield f"{row['op']} {label(row)}", row["host_us"]


def _gates(r: Results) -> Cells:
    """Of the times taken beside the first set's; of rows of their own where it was measured alone."""
    for row in r.of("kda_prefill", gates=GATES[0]):
        others = [other for gates in GATES if (other := r.like(row, gates=gates))]
        beside = [row[f"ours_{gates}_us"] for gates in GATES if f"ours_{gates}_us" in row]
        times = [row["ours_us"], *beside] if beside else [other["ours_us"] for other in others]
        if len(times) > 1:
            yield f"{row['geometry']} {row['workload']} {row['state_dtype']}", max(times) / min(times)


def _checkpoints(r: Results, *, added: bool) -> Cells:
    """What checkpoints cost, by the time in which the bytes they write move at the copy bandwidth.

    added: the time they add over that time alone, the stricter reading; else the whole time over the time without them plus
    that time.
    """
    for row in r.of("gdn_prefill"):
        plain = r.like(row, workload=row["workload"].replace("+ckpt512", ""))
        if "+ckpt512" in row["workload"] and plain is not None and r.copy[id(row)]:
            writing = (row["bytes"] - plain["bytes"]) / r.copy[id(row)] / 1e6
            ours, base = row["ours_us"], plain["ours_us"]
            yield f"gdn_prefill {label(row)}", (ours - base) / writing if added else ours / (base + writing)


def _mixes(r: Results) -> Cells:
    """A long sequence beside others, over what its parts cost where the chip is full.

    Tokens of sequences longer than one cost what they cost in 8x4096 of the same heads. A row of one token costs the bytes of
    a decode step at the copy bandwidth: its state moves once for that one token, which the cost of a token in 8x4096, where
    512 times as many share a state, leaves out. Taking 63 such rows for 63 tokens would count 0.2 us for 62 us of traffic.
    """
    for row in r.of("gdn_prefill", state_dtype="float32"):
        full = r.like(row, workload="8x4096")
        if row["workload"] in ("28672+4096", "63x1+8192") and full is not None and r.copy[id(row)]:
            lengths = workload(row["workload"]).lengths
            single = work.decode(geometry(row["geometry"]), "float32", lengths.count(1)).bytes / r.copy[id(row)] / 1e6
            tokens = sum(length for length in lengths if length > 1)
            yield label(row), row["ours_us"] / (full["ours_us"] * tokens / workload("8x4096").tokens + single)


def _floor(op: str, load: str, *geometries: str) -> Callable[[Results], Cells]:
    def cells(r: Results) -> Cells:
        for row in r.of(op, workload=load):
            if row["floor_us"] and (not geometries or row["geometry"] in geometries):
                yield f"{op} {label(row)}", row["ours_us"] / row["floor_us"]

    return cells


def _matrix(op: str, geometries: Sequence[str], *peers: str, **fields: Any) -> Callable[[Results], Cells]:
    def cells(r: Results) -> Cells:
        for name in geometries:
            yield from _against_peer(r, (op,), peers, geometry=name, state_dtype="float32", **fields)

    return cells


def _peers(*ops: str, peers: Sequence[str] = ()) -> Callable[[Results], Cells]:
    return lambda r: _against_peer(r, ops, peers)


def _whole(r: Results) -> Cells:
    """Seconds of measuring, when every case of the registry has a row; files of one process share its date."""
    have = {row.get("case") for row in r.rows}
    if all(case.name in have for case in registry()):
        yield f"{len(have)} cases", sum(r.seconds.values())


@dataclass(frozen=True)
class Line:
    """One line: what is divided by what, its limit, and over which cells.

    limit: None where a figure is only reported. mean: geometric mean, else the worst cell.
    """

    family: str
    text: str
    limit: float | None
    cells: Callable[[Results], Cells]
    mean: bool = False


LINES: tuple[Line, ...] = (
    Line("decode", "fp32 state, 64 rows and more: at least 80 % of the copy bandwidth (time over floor)", 1.25, _bandwidth),
    Line("decode", "fp32, 1,024 heads and more: time over slab copy", 1 / 0.97, _slab("float32")),
    Line("decode", "bf16, 1,024 heads and more: time over slab copy", 1 / 0.95, _slab("bfloat16")),
    Line("decode", "every cell not slower than the best peer", 1.0, _peers(*DECODES)),
    Line("decode", "geometric mean over the best peer", 0.9, _peers(*DECODES), mean=True),
    Line("decode", "layer step over the bare recurrence, 64 rows and more", 1.05, _layer_over_decode),
    Line("decode", "layer step over lmdeploy's kernels for the same work", 0.6, _peers(*LAYERS, peers=("lmdeploy",))),
    Line("decode", "host time of a public call of decode, layer, verify, commit or conv decode, us", 10.0, _host),
    Line("verify", "64 rows, 32 heads, fp32, 6 drafts, none accepted: over our one-token time", 1.2, _six_drafts(0)),
    Line("verify", "the same, 3 accepted", 1.3, _six_drafts(3)),
    Line("verify", "the same, 6 accepted", 1.4, _six_drafts(6)),
    Line("verify", "64 rows, 32 heads, bf16, up to 8 drafts, any accepted: over our one-token time", 1.35, _bf16_drafts),
    Line("verify", "fused layer verify over bare verify", 1.1, _layer_verify),
    Line("gdn_prefill", "every cell not slower than FlashInfer without its passes", 1.0,
         _matrix("gdn_prefill", GDN_MATRIX, "flashinfer")),
    Line("gdn_prefill", "geometric mean over FlashInfer without its passes", 0.7,
         _matrix("gdn_prefill", GDN_MATRIX, "flashinfer"), mean=True),
    Line("gdn_prefill", "geometric mean over FlashInfer with its gate and norm passes", None, _with_passes, mean=True),
    Line("gdn_prefill", "every cell over lmdeploy's chain", 0.25, _matrix("gdn_prefill", GDN_MATRIX, "lmdeploy")),
    Line("gdn_prefill", "checkpoints every 512 tokens: added time over the time of the bytes they write", 1.1,
         partial(_checkpoints, added=True)),
    Line("gdn_prefill", "the same read as time with checkpoints over time without plus that of the bytes (10 % is 1.1)", None,
         partial(_checkpoints, added=False)),
    Line("gdn_prefill", "a long sequence in a mix: over its work at full occupancy (tokens at the cost of 8x4096, single "
         "tokens at the copy bandwidth)", 1.15, _mixes),
    Line("kda_prefill", "slowest gate set over the fastest, every cell", 1.05, _gates),
    Line("kda_prefill", "every cell faster than the best peer", 1.0, _matrix("kda_prefill", KDA_MATRIX)),
    Line("kda_prefill", "geometric mean over cuDNN, fast gates", 0.6,
         _matrix("kda_prefill", KDA_MATRIX, "cudnn", gates="fast"), mean=True),
    Line("kda_prefill", "geometric mean over FLA", 0.25, _matrix("kda_prefill", KDA_MATRIX, "fla"), mean=True),
    Line("harness", "the whole matrix measured, s, compile time apart", 480.0, _whole),
    Line("conv", "prefill, 8,192 tokens, 8,192 channels: time over floor", 1.15,
         _floor("causal_conv1d_prefill", "1x8192", "Q1")),
    Line("conv", "decode, 256 rows: time over floor", 1.3, _floor("causal_conv1d_decode", "B256")),
)  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """What the results say of a line. worst: the cell farthest over, of `count`; over: cells above the limit.

    lacking: cells that should have a figure and have none. floor: the value, and how many cells were over, if each of our calls
    took its floor, the bytes that must move at the copy bandwidth; None where that changes nothing.
    """

    line: Line
    value: float | None
    worst: str
    count: int
    over: int
    lacking: int = 0
    floor: tuple[float, int] | None = None

    @property
    def word(self) -> str:
        """met, missed, incomplete, not measured, or reported where there is no limit."""
        if self.value is None:
            return "not measured"
        if self.line.limit is None:
            return "reported"
        if self.value > self.line.limit:
            return "missed"
        return "incomplete" if self.lacking else "met"


WORDS = ("met", "missed", "incomplete", "not measured")


def _at_floor(results: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The results if each of our calls took its floor."""

    def of(row: Row) -> Row:
        floor = row.get("floor_us")
        ours = [name for name in row if name.startswith("ours_")]
        return row | dict.fromkeys(ours, floor) if floor else row

    return {name: {**result, "rows": [of(row) for row in result["rows"]]} for name, result in results.items()}


def _value(line: Line, cells: Sequence[tuple[str, float]]) -> float:
    if line.mean:
        return geometric_mean(max(ratio, 1e-9) for _, ratio in cells) or 0.0
    return max(ratio for _, ratio in cells)


def verdicts(results: Mapping[str, Mapping[str, Any]]) -> list[Verdict]:
    """Every line judged by result files as `report.load_results` gives them."""
    rows, ideal = Results(results), Results(_at_floor(results))
    judged = []
    for line in LINES:
        every = list(line.cells(rows))
        cells = [(name, ratio) for name, ratio in every if ratio is not None]
        lacking = len(every) - len(cells)
        if not cells:
            judged.append(Verdict(line, None, "", 0, 0, lacking))
            continue

        def over(cells: Sequence[tuple[str, float]], limit: float | None = line.limit) -> int:
            return sum(limit is not None and ratio > limit for _, ratio in cells)

        bare = [(name, ratio) for name, ratio in line.cells(ideal) if ratio is not None]
        floor = None if bare == cells else (_value(line, bare), over(bare))
        worst, _ = max(cells, key=lambda cell: cell[1])
        judged.append(Verdict(line, _value(line, cells), worst, len(cells), over(cells), lacking, floor))
    return judged


def unmeasured(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Cases of the registry without a row."""
    have = {row.get("case") for result in results.values() for row in result["rows"]}
    return [case.name for case in registry() if case.name not in have]


def lines_table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: every line with its limit, what was measured and the verdict."""
    judged = verdicts(results)
    made = []
    for v in judged:
        where = "" if v.value is None else f"{v.worst}" if not v.line.mean else f"worst cell {v.worst}"
        if v.lacking:
            where += f" ({v.lacking} without a peer's figure)"
        over = f"mean of {v.count}" if v.line.mean else f"{v.over} of {v.count}"
        limit = "-" if v.line.limit is None else f"<= {v.line.limit:.4g}"
        word = f"**{v.word}**" if v.word in ("missed", "incomplete") else v.word
        over = "-" if v.value is None or (v.line.limit is None and not v.line.mean) else over
        floor = "-" if v.floor is None else number(v.floor[0], 3)
        floor += f" ({v.floor[1]} over)" if v.floor is not None and v.floor[1] and not v.line.mean else ""
        made.append([v.line.family, v.line.text, limit, number(v.value, 3), word, over, floor, where.strip()])
    words = [v.word for v in judged if v.line.limit is not None]
    counts = ", ".join(f"{words.count(word)} {word}" for word in WORDS if word in words)
    header = ["family", "line", "limit", "measured", "", "cells over", "at the floor", "worst cell"]
    left = unmeasured(results)
    text = f"{len(words)} lines: {counts}."
    if left:
        text += f" {len(left)} cells of the matrix have no row."
    return f"{text}\n\n{table(header, made)}"
