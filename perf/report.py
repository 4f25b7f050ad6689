"""Documents from committed results: tables, sentences and charts. Runs on any machine, reads JSON only.

A document carries marked blocks, `<!-- perf:NAME -->` to `<!-- /perf:NAME -->`; what is between is replaced, the rest is
left alone. NAME is `overview` (the first page), a result file's stem, `lines` (each speed line, met or missed), `headline`, or
`charts`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from . import schema
from .cases import OPS
from .lines import lines_table
from .overview import overview_block
from .tables import (
    best_peer,
    clock_note,
    eager_note,
    environment_line,
    failed_cells,
    folded,
    missing_peers,
    number,
    over,
    ratio_to_best,
    rows_table,
    summary,
    table,
)

FILES = ("decode", "verify", "gdn_prefill", "kda_prefill", "conv")
TITLES = {
    "decode": "Decode, one token",
    "verify": "Draft verify and commit",
    "gdn_prefill": "GDN prefill",
    "kda_prefill": "KDA prefill",
    "conv": "Causal conv",
}
HEADLINE = (  # operator, geometry, workload, state dtype, gates, accepted
    ("gdn_decode", "Q1", "B64", "float32", None, None),
    ("gdn_decode", "Q1", "B64", "bfloat16", None, None),
    ("kda_decode", "G1", "B64", "float32", None, None),
    ("kda_decode", "G1", "B64", "bfloat16", None, None),
    ("gdn_layer_decode", "Q1", "B64", "float32", None, None),
    ("gdn_verify", "Q1", "B64T6", "float32", None, 3),
    ("gdn_prefill", "Q1", "1x8192", "float32", None, None),
    ("gdn_prefill", "Q1", "4x2048", "float32", None, None),
    ("kda_prefill", "G1", "1x8192", "float32", "fast", None),
    ("kda_prefill", "G1", "1x8192", "float32", "slow", None),
    ("causal_conv1d_prefill", "Q1", "1x8192", "bfloat16", None, None),
    ("causal_conv1d_decode", "Q1", "B256", "bfloat16", None, None),
)
UNMEASURED = "Not measured under this harness yet; figures from development stand in `docs/notes/`."
SKELETON = """# Performance

Every figure below is drawn from the JSON files in `perf/results/h200/` by `python -m perf report`; none is typed by hand.

{blocks}
"""


def load_results(folder: Path) -> dict[str, dict[str, Any]]:
    """Result files of a folder by stem, in the documents' order. Raises SchemaError for an invalid one."""
    return {stem: schema.load(folder / f"{stem}.json") for stem in FILES if (folder / f"{stem}.json").is_file()}


def family_block(stem: str, result: dict[str, Any], images: list[str]) -> str:
    """Everything about one result file."""
    file = f"perf/results/h200/{stem}.json"
    parts = [f"## {TITLES[stem]}", environment_line(file, result["environment"])]
    parts += [f"![{Path(image).stem.replace('_', ' ')}]({image})" for image in images]
    for op in OPS:
        rows = [row for row in result["rows"] if row["op"] == op]
        if not rows:
            continue
        parts += [summary(op, rows), clock_note(rows), eager_note(rows), missing_peers(rows)]
        parts += [folded(f"{op}: all {len(rows)} cells", rows_table(rows)).strip()]
    parts.append(failed_cells(result.get("failures", {})))
    return "\n\n".join(part for part in parts if part)


def headline_block(results: dict[str, dict[str, Any]]) -> str:
    """The few cells a reader looks for first."""
    found = {schema.identity(row): (stem, row) for stem, result in results.items() for row in result["rows"]}
    lines = []
    for key in HEADLINE:
        if key not in found:
            continue
        stem, row = found[key]
        best = best_peer(row)
        detail = " ".join(str(part) for part in key[2:] if part is not None)
        lines.append([
            f"`{row['op']}`", f"{row['geometry']} ({row.get('heads', '')}) {detail}", number(row["ours_us"], 1),
            over(row["ours_us"], row["floor_us"]), "-" if best is None else f"{best[0]} {best[1]:.1f}",
            number(ratio_to_best(row)), f"`{stem}.json`",
        ])  # fmt: skip
    if not lines:
        return "No results are committed yet."
    header = ["operator", "case", "ours us", "x floor", "best peer us", "ours / best peer", "file"]
    return table(header, lines)


def replace_block(text: str, name: str, content: str) -> str:
    """Put `content` between the markers of `name`; text without such markers is returned as it is."""
    pattern = re.compile(rf"(<!-- perf:{re.escape(name)} -->).*?(<!-- /perf:{re.escape(name)} -->)", re.DOTALL)
    return pattern.sub(lambda match: f"{match[1]}\n{content}\n{match[2]}", text)


def write_report(results: Path, docs: Path, readme: Path | None = None, *, charts: bool = True) -> list[Path]:
    """Draw charts, refresh the blocks of `docs/performance.md` and of `readme`. Gives the files written.

    Raises ValueError when `results` holds no result file.
    """
    loaded = load_results(results)
    if not loaded:
        raise ValueError(f"{results}: no result file; allowed: a folder with {', '.join(FILES)} .json")
    written: list[Path] = []
    images: dict[str, list[str]] = {}
    if charts:
        from .charts import draw

        for stem, path in draw(loaded, docs / "images"):
            images.setdefault(stem, []).append(f"images/{path.name}")
            written.append(path)
    page = docs / "performance.md"
    if page.is_file():
        text = page.read_text()
    else:
        blocks = "\n\n".join(
            f"<!-- perf:{name} -->\n<!-- /perf:{name} -->"
            for name in ("overview", "lines", "headline", "charts", *FILES)
        )
        text = SKELETON.format(blocks=blocks)
    text = replace_block(text, "overview", overview_block(loaded))
    text = replace_block(text, "headline", headline_block(loaded))
    text = replace_block(text, "lines", lines_table(loaded))
    overall = "\n\n".join(f"![{Path(image).stem}]({image})" for image in images.get("all", []))
    text = replace_block(text, "charts", overall)
    for stem in FILES:
        if stem in loaded:
            text = replace_block(text, stem, family_block(stem, loaded[stem], images.get(stem, [])))
        else:
            text = replace_block(text, stem, f"## {TITLES[stem]}\n\n{UNMEASURED}")
    docs.mkdir(parents=True, exist_ok=True)
    page.write_text(text)
    written.append(page)
    if readme is not None and readme.is_file():
        readme.write_text(replace_block(readme.read_text(), "headline", headline_block(loaded)))
        written.append(readme)
    return written
