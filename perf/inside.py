"""What the kernels do inside, from hardware counters: one launch of each case under Nsight Compute, one table.

`collect --out DIR` starts `ncu` on `launches` (its own clocks are left alone, caches are flushed before every launch) and writes
`raw.csv`, `hot.csv` and `inside.txt` into DIR; `table RAW` draws the table of such a file again, on any machine. A spin kernel
before every case tells the cases apart in ncu's output.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import io
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CASES = (
    "gdn_decode:Q1:B64:f32",
    "gdn_decode:Q1:B64:bf16",
    "gdn_decode:Q1:B8:f32",
    "gdn_decode:Q1:B256:f32",
    "kda_decode:G1:B64:f32",
    "kda_decode:G1:B64:bf16",
    "gdn_layer_decode:Q1:B64:f32",
    "gdn_layer_decode:Q1:B64:bf16",
    "kda_layer_decode:G1:B64:f32",
    "gdn_layer_decode:Q1:B64T6:f32:a3",
    "gdn_verify:Q1:B64T6:f32:a3",
    "gdn_verify:Q1:B64T6:bf16:a3",
    "kda_verify:G1:B64T6:f32:a3",
    "kda_verify:G1:B64T6:bf16:a3",
    "gdn_commit:Q1:B64:f32:a3",
    "causal_conv1d_decode:Q1:B256:bf16",
    "causal_conv1d_prefill:Q1:1x8192:bf16",
    "causal_conv1d_prefill:Q1:ragged64:bf16",
    "gdn_prefill:Q1:1x8192:f32",
    "gdn_prefill:Q1:4x2048:f32",
    "gdn_prefill:Q1:8x4096:f32",
    "gdn_prefill:Q4:1x8192:f32",
    "gdn_prefill:Q1:ragged64:f32",
    "kda_prefill:G1:1x8192:f32:fast",
    "kda_prefill:G1:4x2048:f32:fast",
    "kda_prefill:G1:32x1024:f32:fast",
    "kda_prefill:G3:1x8192:f32:slow",
)
SECTIONS = (
    "SpeedOfLight",
    "SchedulerStats",
    "WarpStateStats",
    "Occupancy",
    "LaunchStats",
    "ComputeWorkloadAnalysis",
    "MemoryWorkloadAnalysis",
    "SourceCounters",
)
MARK = "spin_kernel"  # torch.cuda._sleep
POOL_BYTES = 2**30
STALLS_SHOWN = 4
HOT_LINES = 14  # instructions of a kernel with the most samples


def launch_cases(names: Sequence[str], budget_s: float) -> None:
    """Launch each case once between profiler marks; what cannot run is named and left out, mark included.

    After `budget_s` seconds no further case starts.
    """
    import torch

    from .cases import registry
    from .inputs import Workspace
    from .run import BENCHES

    known = {case.name: case for case in registry()}
    ws = Workspace(torch.device("cuda"), POOL_BYTES)
    began = time.monotonic()
    for name in names:
        if time.monotonic() - began > budget_s:
            print(f"skipped {name}: no time left", flush=True)
            continue
        try:
            bench = importlib.import_module(f".{BENCHES[known[name].op]}", __package__)
            with torch.no_grad():
                ours = bench.prepare(known[name], ws, {}).contenders[0].launches
                ours[0]()
                torch.cuda.synchronize()
        except Exception as error:  # one operator that cannot launch leaves the others to be looked into
            print(f"skipped {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            continue
        torch.cuda.profiler.start()
        torch.cuda._sleep(1)
        ours[1]()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        print(f"case {name}", flush=True)


def collect(out: Path, names: Sequence[str], budget_s: float) -> Path:
    """Profile `names`; writes into `out` and gives the path of the table. Raises OSError where ncu cannot run."""
    out.mkdir(parents=True, exist_ok=True)
    report = out / "inside.ncu-rep"
    sections = [part for name in SECTIONS for part in ("--section", name)]
    target = [sys.executable, "-m", "compact_state.perf.inside", "launches", "--budget", str(budget_s), *names]
    quiet = ["--profile-from-start", "off", "--clock-control", "none", "--force-overwrite", "-o", str(report)]
    done = subprocess.run(
        ["ncu", *quiet, *sections, *target],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    print(done.stdout)
    cases = re.findall(r"^case (\S+)$", done.stdout, re.MULTILINE)
    (out / "cases.txt").write_text("\n".join(cases) + "\n")
    for page, name in (("raw", "raw.csv"), ("source", "hot.csv")):
        with (out / name).open("w") as file:
            subprocess.run(
                ["ncu", "--import", str(report), "--page", page, "--csv", "--print-units", "base"],
                stdout=file,
                check=False,
            )
    text = table((out / "raw.csv").read_text(), cases)
    (out / "inside.txt").write_text(text + "\n\n" + hot_lines((out / "hot.csv").read_text()) + "\n")
    return out / "inside.txt"


def _rows(text: str) -> list[dict[str, str]]:
    """Rows of ncu's raw page; the line of units is dropped."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    return [row for row in csv.DictReader(io.StringIO("\n".join(lines))) if row.get("ID")]


def _value(row: dict[str, str], *patterns: str) -> float | None:
    """The first metric whose name a pattern matches whole."""
    for pattern in patterns:
        for name, text in row.items():
            if name and re.fullmatch(pattern, name) and text:
                try:
                    return float(text.replace(",", ""))
                except ValueError:
                    continue
    return None


def _stalls(row: dict[str, str]) -> str:
    """Why warps wait, in parts of all warp time, most first."""
    found: dict[str, float] = {}
    for name, text in row.items():
        reason = re.fullmatch(r"smsp__average_warps?_(?:latency_)?issue_stalled_(\w+?)(?:_per_\w+)?\.ratio", name or "")
        if reason and text and "not_issued" not in reason[1]:
            found[reason[1]] = float(text.replace(",", ""))
    total = sum(found.values())
    top = sorted(found.items(), key=lambda item: -item[1])[:STALLS_SHOWN]
    return ", ".join(f"{name.replace('_', ' ')} {100 * part / total:.0f} %" for name, part in top if total)


def _kernel(name: str) -> str:
    """The kernel's file-like name out of a mangled one."""
    short = re.sub(r"^kernel_cutlass_", "", name.split("(")[0].split("<")[0])
    return re.split(r"_(?:compact_state|tensorptr|object_at)", short)[0][:40]


def table(text: str, cases: Sequence[str]) -> str:
    """One line a kernel launch: time, memory, occupancy, issue slots, tensor pipe, stall reasons."""
    lines = [
        "us: duration under the profiler, cold caches. dram: TB/s and % of the peak. warps: achieved occupancy. issue: % of "
        "issue slots used.",
        "tensor: % of the tensor pipe's cycles. stalls: parts of all warp time (selected = issuing).",
        "",
        f"{'case / kernel':<46} {'us':>8} {'TB/s':>6} {'dram%':>6} {'regs':>5} {'threads':>7} {'grid':>7} {'smem K':>6} "
        f"{'warps%':>6} {'issue%':>6} {'tensor%':>7}  stalls",
    ]
    number = -1
    for row in _rows(text):
        name = row.get("Kernel Name", "")
        if MARK in name:
            number += 1
            lines.append(f"{cases[number] if number < len(cases) else '?'}")
            continue
        duration = _value(row, r"gpu__time_duration\.sum") or 0.0
        speed = _value(row, r"dram__bytes\.sum\.per_second") or 0.0
        cells = [
            f"  {_kernel(name):<44}",
            f"{duration / 1e3:8.2f}",
            f"{speed / 1e12:6.2f}",
            _cell(
                row,
                6,
                r"(?:gpu__)?dram__throughput\.avg\.pct_of_peak_sustained_elapsed",
                r"gpu__dram_throughput\..*pct.*",
            ),
            _cell(row, 5, r"launch__registers_per_thread", digits=0),
            f"{(_value(row, r'launch__block_size') or 0):7.0f}",
            f"{(_value(row, r'launch__grid_size') or 0):7.0f}",
            f"{((_value(row, r'launch__shared_mem_per_block_dynamic') or 0) / 1024):6.1f}",
            _cell(row, 6, r"sm__warps_active\.avg\.pct_of_peak_sustained_active"),
            _cell(
                row,
                6,
                r"smsp?__issue_active\.avg\.pct.*",
                r"smsp?__inst_issued\.avg\.pct.*",
                r"sm__instruction_throughput.*",
            ),
            _cell(
                row, 7, r"sm__(?:inst_executed_)?pipe_tensor.*cycles_active\.avg\.pct.*", r"sm__.*pipe_tensor.*pct.*"
            ),
        ]
        lines.append(" ".join(cells) + "  " + _stalls(row))
    return "\n".join(lines)


def _cell(row: dict[str, str], width: int, *patterns: str, digits: int = 1) -> str:
    value = _value(row, *patterns)
    return f"{'-':>{width}}" if value is None else f"{value:{width}.{digits}f}"


def hot_lines(text: str) -> str:
    """For each kernel of ncu's source page the instructions on which most warp samples fall."""
    parts: list[str] = []
    block: list[dict[str, str]] = []
    title = ""

    def close() -> None:
        samples = next(
            (name for name in (block[0] if block else {}) if re.search(r"# ?Samples|Sampl", name or "")), None
        )
        if samples is None:
            return

        def count(row: dict[str, str]) -> float:
            try:
                return float((row.get(samples) or "0").replace(",", ""))
            except ValueError:
                return 0.0

        total = sum(map(count, block)) or 1.0
        parts.append(f"{title}: {total:.0f} samples, {len(block)} instructions")
        for row in sorted(block, key=count, reverse=True)[:HOT_LINES]:
            why: list[tuple[float, str]] = []
            for name, value in row.items():
                if name and name.startswith("stall_") and value:
                    try:
                        why.append((float(value.replace(",", "")), name[6:].split(" ")[0]))
                    except ValueError:
                        continue
            reasons = ", ".join(f"{name} {value:.0f}" for value, name in sorted(why, reverse=True)[:3] if value)
            parts.append(
                f"  {100 * count(row) / total:5.1f} %  #{row.get('#', '?'):<6} {row.get('Source', '')[:64]:<64} {reasons}"
            )
        parts.append("")

    header: list[str] = []
    for cells in csv.reader(io.StringIO(text)):
        if len(cells) >= 2 and cells[0] == "Kernel Name":
            close()
            block, header, title = [], [], _kernel(cells[1])
        elif not header and "Source" in cells:
            header = cells
        elif header and len(cells) == len(header):
            block.append(dict(zip(header, cells)))
    close()
    return "\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m compact_state.perf.inside …`."""
    parser = argparse.ArgumentParser(prog="python -m compact_state.perf.inside", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    gather = commands.add_parser("collect", help="profile with ncu and write the table")
    gather.add_argument("--out", type=Path, required=True)
    target = commands.add_parser("launches", help="what ncu runs")
    for parts in (gather, target):
        parts.add_argument("names", nargs="*", default=list(CASES))
        parts.add_argument("--budget", type=float, default=45.0, help="seconds after which no further case starts")
    redraw = commands.add_parser("table", help="the table of a folder that collect wrote")
    redraw.add_argument("folder", type=Path)
    options: Any = parser.parse_args(arguments)
    if options.command == "launches":
        launch_cases(options.names or CASES, options.budget)
    elif options.command == "collect":
        print(collect(options.out, options.names or CASES, options.budget).read_text())
    else:
        folder = options.folder
        print(table((folder / "raw.csv").read_text(), (folder / "cases.txt").read_text().split()))
        print(hot_lines((folder / "hot.csv").read_text()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
