"""What the kernels do inside, from hardware counters: one launch of each case under Nsight Compute, one table.

`collect --out DIR` starts `ncu` on `launches` (its own clocks are left alone, caches are flushed before every launch) and writes
`raw.csv` and `inside.txt` into DIR; `table RAW` draws the table of such a file again, on any machine. A spin kernel
before every case tells the cases apart in ncu's output.
"""

from __future__ import annotations

import argparse
import csv
import importlib
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
    "gdn_commit:Q1:B64:bf16:a3",
    "kda_commit:G1:B64:f32:a3",
    "causal_conv1d_decode:Q1:B8:bf16",
    "causal_conv1d_decode:Q1:B256:bf16",
    "causal_conv1d_prefill:Q1:1x8192:bf16",
    "causal_conv1d_prefill:Q1:ragged64:bf16",
    "gdn_prefill:Q1:1x8192:f32",
    "gdn_prefill:Q1:4x2048:f32",
    "gdn_prefill:Q1:8x4096:f32",
    "gdn_prefill:Q4:1x8192:f32",
    "gdn_prefill:Q7:28672+4096:f32",
    "gdn_prefill:Q1:63x1+8192:f32",
    "gdn_prefill:Q1:ragged64:f32",
    "kda_prefill:G1:1x8192:f32:fast",
    "kda_prefill:G2:1x2048:f32:fast",
    "kda_prefill:G1:4x2048:f32:fast",
    "kda_prefill:G1:32x1024:f32:fast",
    "kda_prefill:G3:1x8192:f32:slow",
)
DRAM = "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed"
WARPS = "sm__warps_active.avg.pct_of_peak_sustained_active"
ISSUE = "smsp__issue_active.avg.pct_of_peak_sustained_active"
TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
SAMPLES = "Warp Stall Sampling (All Samples)"
STALLS = (
    *("barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle", "long_scoreboard"),
    *("math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instruction", "not_selected", "selected"),
    *("short_scoreboard", "sleeping", "tex_throttle", "wait"),
)
METRICS = (
    "gpu__time_duration.sum",
    "dram__bytes.sum.per_second",
    DRAM,
    "launch__registers_per_thread",
    "launch__block_size",
    "launch__grid_size",
    "launch__shared_mem_per_block_dynamic",
    WARPS,
    ISSUE,
    TENSOR,
    *(f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio" for reason in STALLS),
)
KERNELS = "regex:recurrent|layer_decode|conv1d|gdn_|kda_|segment|wy_verify|state_ids|spin_kernel"  # not torch's own
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


def collect(out: Path, names: Sequence[str], budget_s: float, hot: bool) -> Path:
    """Profile `names`; writes into `out` and gives the path of the table. Raises OSError where ncu cannot run.

    hot: sample warps too, for the instructions on which they wait; takes several more passes.
    """
    out.mkdir(parents=True, exist_ok=True)
    report = out / "inside.ncu-rep"
    target = [sys.executable, "-m", "compact_state.perf.inside", "launches", "--budget", str(budget_s), *names]
    what = ["--kernel-name", KERNELS, "--metrics", ",".join(METRICS)]
    what += ["--section", "SourceCounters"] if hot else []
    quiet = ["--profile-from-start", "off", "--clock-control", "none", "--force-overwrite", "-o", str(report)]
    done = subprocess.run(
        ["ncu", *quiet, *what, *target],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    print(done.stdout)
    cases = re.findall(r"^case (\S+)$", done.stdout, re.MULTILINE)
    (out / "cases.txt").write_text("\n".join(cases) + "\n")
    for page, name in (("raw", "raw.csv"), ("source", "hot.csv"))[: 1 + hot]:
        with (out / name).open("w") as file:
            subprocess.run(
                ["ncu", "--import", str(report), "--page", page, "--csv", "--print-units", "base"],
                stdout=file,
                check=False,
            )
    text = table((out / "raw.csv").read_text(), cases)
    text += "\n\n" + hot_lines((out / "hot.csv").read_text()) if hot else ""
    (out / "inside.txt").write_text(text + "\n")
    return out / "inside.txt"


def _rows(text: str) -> list[dict[str, str]]:
    """Rows of ncu's raw page; the line of units is dropped."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    return [row for row in csv.DictReader(lines) if row.get("ID")]


def _value(row: dict[str, str], name: str) -> float:
    """A metric's value, 0 where ncu has none."""
    text = (row.get(name) or "").replace(",", "")
    return float(text) if re.fullmatch(r"-?[\d.]+(?:e[+-]?\d+)?", text) else 0.0


def _stalls(row: dict[str, str]) -> str:
    """Why warps wait, in parts of all warp time, most first."""
    found: dict[str, float] = {}
    for name in row:
        reason = re.fullmatch(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio", name or "")
        if reason:
            found[reason[1]] = _value(row, name)
    total = sum(found.values())
    top = sorted(found.items(), key=lambda item: -item[1])[:STALLS_SHOWN]
    return ", ".join(f"{name.replace('_', ' ')} {100 * part / total:.0f} %" for name, part in top if total)


def _kernel(name: str) -> str:
    """A kernel's name without its arguments."""
    while "<" in name:
        name, before = re.sub(r"<[^<>]*>", "", name), name
        if name == before:
            break
    return name.split("(")[0].split("::")[-1].split(" ")[-1]


def table(text: str, cases: Sequence[str]) -> str:
    """One line a kernel launch: time, memory, occupancy, issue slots, tensor pipe, stall reasons."""
    lines = [
        "us: duration under the profiler, cold caches. TB/s, dram %: device memory. warps %: achieved occupancy. issue %:",
        "issue slots used. tensor %: cycles of the tensor pipe. stalls: parts of all warp time; selected is issuing.",
        "",
        f"{'case / kernel':<42} {'us':>8} {'TB/s':>6} {'dram%':>6} {'regs':>5} {'threads':>7} {'grid':>7} {'smem K':>6} "
        f"{'warps%':>6} {'issue%':>6} {'tensor%':>7}  stalls",
    ]
    number = -1
    for row in _rows(text):
        if MARK in row["Kernel Name"]:
            number += 1
            lines.append(cases[number] if number < len(cases) else "?")
            continue
        lines.append(
            f"  {_kernel(row['Kernel Name'])[:40]:<40} {_value(row, 'gpu__time_duration.sum') / 1e3:8.2f} "
            f"{_value(row, 'dram__bytes.sum.per_second') / 1e12:6.2f} {_value(row, DRAM):6.1f} "
            f"{_value(row, 'launch__registers_per_thread'):5.0f} {_value(row, 'launch__block_size'):7.0f} "
            f"{_value(row, 'launch__grid_size'):7.0f} {_value(row, 'launch__shared_mem_per_block_dynamic') / 1024:6.1f} "
            f"{_value(row, WARPS):6.1f} {_value(row, ISSUE):6.1f} {_value(row, TENSOR):7.1f}  {_stalls(row)}"
        )
    return "\n".join(lines)


def hot_lines(text: str) -> str:
    """For each kernel of ncu's source page the instructions on which most warp samples fall, with their stall reasons."""
    parts: list[str] = []
    title, header, block = "", [], []

    def close() -> None:
        if not block or MARK in title:
            return
        total = sum(_value(row, SAMPLES) for row in block) or 1.0
        parts.append(f"{title}: {total:.0f} samples of {len(block)} instructions")
        numbered = sorted(enumerate(block), key=lambda pair: -_value(pair[1], SAMPLES))
        for number, row in numbered[:HOT_LINES]:
            why = sorted(((_value(row, name), name[6:]) for name in row if name.startswith("stall_")), reverse=True)
            shown = [(value, name) for value, name in why if value and "Not Issued" not in name]
            reasons = ", ".join(f"{name} {value:.0f}" for value, name in shown[:3])
            share = 100 * _value(row, SAMPLES) / total
            parts.append(f"  {share:5.1f} %  #{number:<6} {row['Source'].strip()[:56]:<56} {reasons}")
        parts.append("")

    for cells in csv.reader(text.splitlines()):
        if len(cells) >= 2 and cells[0] == "Kernel Name":
            close()
            title, header, block = _kernel(cells[1]), [], []
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
    gather.add_argument("--hot", action="store_true", help="also the instructions on which warps wait")
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
        print(collect(options.out, options.names or CASES, options.budget, options.hot).read_text())
    else:
        folder = options.folder
        print(table((folder / "raw.csv").read_text(), (folder / "cases.txt").read_text().split()))
        if (folder / "hot.csv").is_file():
            print(hot_lines((folder / "hot.csv").read_text()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
