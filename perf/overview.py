"""The first page of the report: by operator what was asked for and what is, and plainly where a peer is faster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .cases import OPS
from .lines import WORDS, Verdict, unmeasured, verdicts
from .tables import Row, best_peer, geometric_mean, label, number, ratio_to_best, table

Results = Mapping[str, Mapping[str, Any]]
WORST = 2  # cells named a row


def _rows(results: Results, op: str) -> list[Row]:
    """Rows of an operator in all files."""
    return [row for result in results.values() for row in result["rows"] if row["op"] == op]


def _compared(rows: Sequence[Row]) -> list[tuple[Row, float]]:
    """Rows that a peer has a figure for, with our time over the best one's, slowest first."""
    found = [(row, ratio) for row in rows if (ratio := ratio_to_best(row)) is not None]
    return sorted(found, key=lambda pair: -pair[1])


def _operator(op: str, rows: Sequence[Row]) -> list[str]:
    """One line of the table."""
    compared = _compared(rows)
    floors = sorted(((row["ours_us"] / row["floor_us"], row) for row in rows if row["floor_us"]), key=lambda p: -p[0])
    slower = [pair for pair in compared if pair[1] > 1.0]
    against = [f"{label(row)} ({best_peer(row)[0]}) {ratio:.3f}" for row, ratio in compared[:WORST]]  # type: ignore[index]
    mean = geometric_mean(ratio for _, ratio in compared)
    return [
        f"`{op}`",
        str(len(rows)),
        number(geometric_mean(ratio for ratio, _ in floors)),
        f"{label(floors[0][1])} {floors[0][0]:.2f}" if floors else "-",
        f"{mean:.2f} ({len(compared)} cells)" if mean else "no peer measured",
        f"{len(slower)} of {len(compared)}" if compared else "-",
        "; ".join(against) or "-",
    ]


def _where_slower(results: Results) -> str:
    """A sentence for every operator on which a peer is faster anywhere, and one for those on which none is."""
    slower, faster, alone = [], [], []
    for op in OPS:
        rows = _rows(results, op)
        compared = _compared(rows)
        behind = [pair for pair in compared if pair[1] > 1.0]
        if behind:
            peers = sorted({best_peer(row)[0] for row, _ in behind})  # type: ignore[index]
            slower.append(
                f"`{op}`: {' or '.join(peers)} on {len(behind)} of {len(compared)} cells, where ours takes up to "
                f"{100 * (behind[0][1] - 1):.1f} % longer"
            )
        elif compared:
            faster.append(f"`{op}` ({len(compared)})")
        elif rows:
            alone.append(f"`{op}`")
    parts = [f"**A peer is faster**: {'; '.join(slower)}."] if slower else ["No peer is faster on any cell."]
    parts += [f"Ours is faster on every cell that a peer has a figure for: {', '.join(faster)}."] if faster else []
    parts += [f"Without any peer's figure: {', '.join(alone)}."] if alone else []
    return " ".join(parts)


def _families(judged: Sequence[Verdict]) -> str:
    """Lines by verdict and family; the missed ones by their text."""
    rows = []
    for family in dict.fromkeys(verdict.line.family for verdict in judged):
        of = [verdict for verdict in judged if verdict.line.family == family]
        # Three decimals: a line missed by a thousandth shall not read as one that is met.
        missed = [f"{v.line.text}: {v.value:.3f}, limit {v.line.limit:.3g}" for v in of if v.word == "missed"]
        rows.append([family, *(str(sum(v.word == word for v in of)) for word in WORDS), "; ".join(missed) or "-"])
    return table(["family", *WORDS, "missed lines"], rows)


def overview_block(results: Results) -> str:
    """Two tables and the sentences that say where a peer is faster."""
    operators = []
    for op in OPS:
        rows = _rows(results, op)
        if rows:
            operators.append(_operator(op, rows))
    header = ["operator", "cells", "x floor, mean", "farthest from its floor", "ours / best peer, mean", "peer faster"]
    header += ["worst against a peer"]
    judged = [verdict for verdict in verdicts(results) if verdict.line.limit is not None]
    met = sum(verdict.word == "met" for verdict in judged)
    left = unmeasured(results)
    parts = [
        f"{met} of {len(judged)} speed lines are met. {_where_slower(results)}",
        table(header, operators),
        _families(judged),
    ]
    if left:
        parts.append(
            f"{len(left)} cells of the matrix were not measured, such as {', '.join(f'`{name}`' for name in left[:4])}."
        )
    return "\n\n".join(parts)
