"""PNG charts of committed results: over the floor, against the best peer, by batch and length, and the roofline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

from .cases import RANDOM, workload
from .tables import Row, best_peer, ratio_to_best

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SIZE = (11.0, 4.2)
Results = dict[str, dict[str, Any]]


def _save(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})  # no version in the file: same data, same bytes
    plt.close(figure)
    return path


def _source(axes: Any, stem: str, result: dict[str, Any]) -> None:
    note = f"perf/results/h200/{stem}.json, commit {result['environment']['commit']}"
    axes.figure.text(0.995, 0.005, note, ha="right", va="bottom", fontsize=6, color="0.4")


def _lines(
    axes: Any,
    rows: Sequence[Row],
    x: Callable[[Row], float],
    y: Callable[[Row], float | None],
    group: Callable[[Row], str],
) -> bool:
    """One line a group; whether anything was drawn."""
    names = sorted({group(row) for row in rows})
    drawn = False
    for number, name in enumerate(names):
        points = sorted((x(row), value) for row in rows if group(row) == name and (value := y(row)) is not None)
        if points:
            style = {"color": f"C{number % 10}", "linestyle": "-" if number < 10 else "--"}  # ten colours there are
            axes.plot(*zip(*points), marker="o", markersize=3, linewidth=1.2, label=name, **style)
            drawn = True
    return drawn


def _over_floor(row: Row) -> float | None:
    return row["ours_us"] / row["floor_us"] if row["floor_us"] else None


def _batches(result: dict[str, Any], ops: Sequence[str]) -> list[Row]:
    return [row for row in result["rows"] if row["op"] in ops and row.get("accepted") is None]


def _two_panels(
    stem: str,
    result: dict[str, Any],
    rows: Sequence[Row],
    y: Callable[[Row], float | None],
    label: str,
    path: Path,
    title: str,
    x: Callable[[Row], float] = lambda row: workload(row["workload"]).rows,
    axis: str = "batch",
    group: Callable[[Row], str] = lambda row: f"{row['op']} {row['geometry']}",
) -> Path | None:
    """fp32 and bf16 beside each other, by batch or what `x` says."""
    figure, panels = plt.subplots(1, 2, figsize=SIZE, sharey=True)
    drawn = False
    for axes, dtype in zip(panels, ("float32", "bfloat16")):
        chosen = [row for row in rows if row["state_dtype"] == dtype]
        drawn |= _lines(axes, chosen, x, y, group)
        axes.set_xscale("log", base=2)
        axes.set_xlabel(axis)
        axes.set_title(f"{title}, {dtype} state", fontsize=9)
        axes.axhline(1.0, color="0.6", linewidth=0.8)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel(label)
    if not drawn:
        plt.close(figure)
        return None
    panels[1].legend(fontsize=6, ncol=2)
    _source(panels[0], stem, result)
    return _save(figure, path)


def _prefill(stem: str, result: dict[str, Any], op: str, folder: Path) -> list[Path]:
    """Time over floor by tokens, and the ratio to the best peer as bars."""
    rows = [row for row in result["rows"] if row["op"] == op]
    if not rows:
        return []

    def group(row: Row) -> str:
        return f"{row['geometry']} {row.get('gates', '')}".strip()

    figure, (left, right) = plt.subplots(1, 2, figsize=SIZE)
    shown = [row for row in rows if row.get("gates") in (None, "fast", "slow")]  # two of four sets: legible
    single = [row for row in shown if row["workload"].startswith("1x") and "+" not in row["workload"]]
    _lines(left, single, lambda r: workload(r["workload"]).tokens, _over_floor, group)
    left.set(xlabel="tokens of one sequence", ylabel="time over floor")
    left.set_xscale("log", base=2)
    left.grid(alpha=0.3)
    left.legend(fontsize=5, ncol=2)
    compared = [(row, value) for row in rows if (value := ratio_to_best(row)) is not None]
    if compared:
        compared.sort(key=lambda pair: pair[1])
        peers = sorted({best[0] for row, _ in compared if (best := best_peer(row))})
        colours = {peer: f"C{i}" for i, peer in enumerate(peers)}
        for peer in peers:
            places = [i for i, (row, _) in enumerate(compared) if (best := best_peer(row)) and best[0] == peer]
            right.bar(places, [compared[i][1] for i in places], color=colours[peer], label=f"best peer {peer}")
        right.axhline(1.0, color="0.4", linewidth=0.8)
        right.legend(fontsize=6)
    right.set(xlabel=f"{len(compared)} cells, sorted", ylabel="ours / best peer")
    figure.suptitle(op, fontsize=10)
    _source(left, stem, result)
    return [_save(figure, folder / f"{op}.png")]


def _verify(result: dict[str, Any], folder: Path) -> Path | None:
    """Time over the slab copy by draft tokens, one line a batch."""
    rows = [row for row in result["rows"] if row["op"].endswith("_verify") and row.get("accepted") == RANDOM]

    def over_slab(row: Row) -> float | None:
        return row["ours_us"] / row["slab_copy_us"] if row["slab_copy_us"] else None

    path = folder / "verify_over_slab.png"
    return _two_panels(
        "verify", result, rows, over_slab, "time over slab copy", path, "verify", lambda r: workload(r["workload"]).lengths[0],
        "draft tokens", lambda r: f"{r['op'][:3]} {r['geometry']} {workload(r['workload']).rows} rows",
    )  # fmt: skip


def _roofline(results: Results, folder: Path) -> Path:
    """Every row at its intensity against the two ceilings of its run."""
    figure, axes = plt.subplots(figsize=(7.0, 4.6))
    first = next(iter(results.values()))["environment"]
    for i, (stem, result) in enumerate(results.items()):
        rows = [row for row in result["rows"] if row.get("flops") and row.get("bytes")]
        x = [row["flops"] / row["bytes"] for row in rows]
        y = [row["flops"] / row["ours_us"] / 1e6 for row in rows]
        axes.scatter(x, y, s=7, alpha=0.6, color=f"C{i}", label=stem)
    copy, rate = first["copy_tb_s"], first["matmul_tflop_s"]
    if copy and rate:
        ridge = rate / copy
        axes.plot([0.1, ridge, 1000], [0.1 * copy, rate, rate], color="0.3", linewidth=1.0, label="ceilings of the run")
    axes.set(xscale="log", yscale="log", xlabel="FLOP a byte that must move", ylabel="TFLOP/s")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=7)
    return _save(figure, folder / "roofline.png")


def draw(results: Results, folder: Path) -> list[tuple[str, Path]]:
    """All charts that the results allow, as (result stem or "all", path)."""
    charts: list[tuple[str, Path | None]] = [("all", _roofline(results, folder))]
    for stem, ops, name in (
        ("decode", ("gdn_decode", "kda_decode"), "decode"),
        ("decode", ("gdn_layer_decode", "kda_layer_decode"), "layer_decode"),
        ("conv", ("causal_conv1d_decode",), "conv_decode"),
    ):
        if stem in results:
            result = results[stem]
            rows = _batches(result, ops)
            floor, peer = folder / f"{name}_over_floor.png", folder / f"{name}_over_peer.png"
            charts.append((stem, _two_panels(stem, result, rows, _over_floor, "time over floor", floor, name)))
            charts.append((stem, _two_panels(stem, result, rows, ratio_to_best, "ours / best peer", peer, name)))
    if "verify" in results:
        charts.append(("verify", _verify(results["verify"], folder)))
    for stem, op in (("gdn_prefill",) * 2, ("kda_prefill",) * 2, ("conv", "causal_conv1d_prefill")):
        if stem in results:
            charts += [(stem, path) for path in _prefill(stem, results[stem], op, folder)]
    return [(stem, path) for stem, path in charts if path is not None]
