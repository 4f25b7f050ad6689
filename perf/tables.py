"""Markdown tables and sentences from result rows. Nothing here measures or guesses: a missing figure is a dash."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
NAMED = 8  # cells named in a sentence; the others are folded away
EXTRA_PASSES = "_with_passes"  # a peer's time with the gate and norm passes it otherwise leaves to the caller


def comparable_peers(row: Row) -> dict[str, float]:
    """Peers of a row by name, without the slower variants of the same peer."""
    return {name: us for name, us in row["peers"].items() if not name.endswith(EXTRA_PASSES)}


def best_peer(row: Row) -> tuple[str, float] | None:
    """Fastest peer of a row, or None."""
    peers = comparable_peers(row)
    return min(peers.items(), key=lambda item: item[1]) if peers else None


def ours_against(row: Row, peer: str) -> float:
    """Our time for the work a peer did: in place where it can only write the slot it read."""
    in_place = row.get("ours_in_place_us")
    same = in_place is not None and peer in row.get("in_place_peers", ())
    return float(in_place if same else row["ours_us"])


def ratio_to_best(row: Row) -> float | None:
    """Our time over the fastest peer's, same kind of work; below 1 is faster."""
    best = best_peer(row)
    return None if best is None else ours_against(row, best[0]) / best[1]


def geometric_mean(values: Iterable[float]) -> float | None:
    """Geometric mean, None of nothing."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def number(value: float | None, digits: int = 2) -> str:
    """A figure for a cell."""
    return "-" if value is None else f"{value:.{digits}f}"


def over(value: float | None, base: float | None) -> str:
    """A ratio for a cell."""
    return "-" if value is None or not base else f"{value / base:.2f}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def _dtype(row: Row) -> str:
    return "fp32" if row["state_dtype"] == "float32" else "bf16"


def label(row: Row) -> str:
    """Short name of a row's case."""
    parts = [row["geometry"], row["workload"], _dtype(row)]
    parts += [row["gates"]] if row.get("gates") else []
    parts += [f"accepted {row['accepted']}"] if row.get("accepted") is not None else []
    return " ".join(parts)


def _peer_cell(row: Row, peer: str) -> str:
    """A peer's time, starred where it could not be captured in a graph, so that its launch cost is in it."""
    return number(row["peers"].get(peer)) + ("*" if peer in row.get("eager_peers", ()) else "")


def eager_note(rows: Sequence[Row]) -> str:
    """What the stars mean, if there are any."""
    names = sorted({peer for row in rows for peer in row.get("eager_peers", ())})
    return f"* {', '.join(names)} could not be captured in a graph: its host time is included." if names else ""


def clock_note(rows: Sequence[Row]) -> str:
    """The clock that the cells of an operator were timed at, where it was measured."""
    clocks = [row["clock_mhz"] for row in rows if "clock_mhz" in row]
    if not clocks:
        return ""
    low = sorted(
        (row["clock_mhz"], row["case"]) for row in rows if row.get("clock_mhz", max(clocks)) < 0.95 * max(clocks)
    )
    below = f", below 0.95 of it in {', '.join(f'{case} ({clock})' for clock, case in low)}" if low else ""
    return f"Clock between rounds, of each cell the lowest: {min(clocks)} to {max(clocks)} MHz{below}."


def rows_table(rows: Sequence[Row]) -> str:
    """All rows of one operator: times, floor, slab copy, peers and ratios."""
    peers = sorted({name for row in rows for name in row["peers"]})
    slab = any(row["slab_copy_us"] for row in rows)
    in_place = any("ours_in_place_us" in row for row in rows)
    accepted = any(row.get("accepted") is not None for row in rows)
    gates = any(row.get("gates") for row in rows)
    header = ["geometry", "workload", "state"]
    header += (["gates"] if gates else []) + (["accepted"] if accepted else [])
    header += ["ours us"] + (["in place us"] if in_place else []) + ["floor us"] + (["slab copy us"] if slab else [])
    header += [f"{peer} us" for peer in peers] + ["x floor"] + (["x slab copy"] if slab else [])
    header += ["x best peer", "host us", "spread"]
    lines = []
    for row in rows:
        cells = [f"{row['geometry']} ({row.get('heads', '')})", row["workload"], _dtype(row)]
        cells += ([row.get("gates") or "-"] if gates else []) + ([str(row.get("accepted", "-"))] if accepted else [])
        cells += [number(row["ours_us"])] + ([number(row.get("ours_in_place_us"))] if in_place else [])
        cells += [number(row["floor_us"])] + ([number(row["slab_copy_us"])] if slab else [])
        cells += [_peer_cell(row, peer) for peer in peers] + [over(row["ours_us"], row["floor_us"])]
        cells += [over(row["ours_us"], row["slab_copy_us"])] if slab else []
        cells += [number(ratio_to_best(row)), number(row.get("host_us"), 1), f"{100 * row['spread']:.1f} %"]
        lines.append(cells)
    return table(header, lines)


def summary(op: str, rows: Sequence[Row]) -> str:
    """One paragraph: means over floor and peers, and every cell where a peer is faster, by name."""
    floors = geometric_mean(row["ours_us"] / row["floor_us"] for row in rows if row["floor_us"])
    compared = [(row, ratio) for row in rows if (ratio := ratio_to_best(row)) is not None]
    text = f"`{op}`: {len(rows)} cells"
    if floors:
        text += f", geometric mean {floors:.2f} x floor"
    costs = [row["host_us"] for row in rows if row.get("host_us")]
    if costs:
        text += f", a call costs the host {statistics.median(costs):.1f} us (median)"
    if not compared:
        return text + "; no peer was measured."
    mean = geometric_mean(ratio for _, ratio in compared)
    text += f", {mean:.2f} of the best peer over the {len(compared)} cells that have one."
    slower = sorted((pair for pair in compared if pair[1] > 1.0), key=lambda pair: -pair[1])
    if not slower:
        return text + " No peer is faster on any of them."
    names = [f"{label(row)} ({best_peer(row)[0]}, {ratio:.3f})" for row, ratio in slower]  # type: ignore[index]
    text = f"{text} A peer is faster on {len(slower)}: {'; '.join(names[:NAMED])}"
    rest = names[NAMED:]
    return f"{text}.{folded(f'{len(rest)} more where a peer is faster', '; '.join(rest) + '.') if rest else ''}"


def folded(title: str, content: str) -> str:
    """A block that a reader opens."""
    return f"\n\n<details><summary>{title}</summary>\n\n{content}\n\n</details>"


def environment_line(file: str, environment: dict[str, Any]) -> str:
    """What was measured on, and from which file the figures come."""
    peers = ", ".join(f"{name} {version}" for name, version in environment.get("peers", {}).items())
    copy, rate = environment["copy_tb_s"], environment["matmul_tflop_s"]
    took = ""
    if "command_s" in environment:
        took = f", {environment['command_s']:.0f} s, of which peers compiled for {environment['compile_s']:.0f} s"
    host = environment.get("host")
    alone = f" Host times: {host['how']}, load {host['load']} on {host['cores']} cores" if host else ""
    alone += f", {host['disturbed']} cells never undisturbed." if "disturbed" in (host or {}) else "." if host else ""
    return (
        f"From `{file}`: {environment['device']}, driver {environment['driver']}, torch {environment['torch']}, "
        f"copy {number(copy)} TB/s, bf16 matrix product {number(rate, 0)} TFLOP/s, commit `{environment['commit']}`, "
        f"{environment['date']}. Peers: {peers or 'none'}. Command: `{environment['command']}`{took}.{alone}"
        f"{_resumed(environment)}"
    )


def _resumed(environment: dict[str, Any]) -> str:
    """How many cells were measured by runs that went on from the first, and in what these differ from it."""
    parts = []
    for entry in environment.get("resumed", ()):
        cases = entry["cases"]
        count = cases if isinstance(cases, int) else len(cases)
        text = f"{count} {'cell' if count == 1 else 'cells'} by a resumed run"
        beside = _present(entry)
        if beside != _present(environment):
            text += f" beside {', '.join(beside)}" if beside else " without peers"
        text += f" on {entry['device']}" if "device" in entry else ""
        text += f" at `{entry['commit']}`" if entry["commit"] != environment["commit"] else ""
        parts.append(text)
    return f" {'; '.join(parts)}." if parts else ""


def _present(environment: dict[str, Any]) -> list[str]:
    """Peers that a run was beside."""
    absent = ("missing", "not asked")
    return [name for name, what in environment.get("peers", {}).items() if not str(what).startswith(absent)]


def missing_peers(rows: Sequence[Row]) -> str:
    """Why peers have no figure, each reason once with how many cells it concerns."""
    reasons: dict[str, int] = {}
    for row in rows:
        for peer, reason in row.get("peers_missing", {}).items():
            key = f"{peer}: {re.split('[`(]', reason)[0].strip()}"  # without the shapes of this very cell
            reasons[key] = reasons.get(key, 0) + 1
    if not reasons:
        return ""
    return "Without a figure: " + "; ".join(f"{key} ({count} cells)" for key, count in sorted(reasons.items())) + "."


def failed_cells(failures: Mapping[str, str]) -> str:
    """Cells without a row, by the first sentence of the reason."""
    reasons: dict[str, list[str]] = {}
    for name, why in failures.items():
        reasons.setdefault(re.split(r"\.(?:\s|$)|, allowed", why)[0], []).append(f"`{name}`")
    if not reasons:
        return ""
    parts = "; ".join(f"{why} ({len(names)}): {', '.join(names)}" for why, names in reasons.items())
    return f"Not measured, {len(failures)} cells. {folded('Which, and why', f'{parts}.').strip()}"
