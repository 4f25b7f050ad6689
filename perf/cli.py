"""Command line: `warm` compiles the peers, `run` and `all` measure, `host` times calls, `lines` judges, `report` draws."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results" / "h200"
LOST = 3  # status of a run that could not go on: the device failed


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m perf", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="check, then time ours and every installed peer")
    run.add_argument("--device", default="cuda", help="cuda, or cpu to exercise the harness only")
    run.add_argument("--out", type=Path, help="a .json file for all rows, or a folder for one file a family")
    run.add_argument("--commit", help="commit to record where the tree has no history")
    run.add_argument("--budget", type=float, help="seconds after which remaining cases are skipped")
    run.add_argument("--list", action="store_true", help="print the cases and stop")
    run.add_argument("--base", type=Path, help="results of another commit to compare with afterwards")
    run.add_argument("--turn", type=Path, help="for `all`: say ready at this path, measure when told to")
    run.add_argument("--warm-here", default="", help="for `all`: peers to compile in this process before it is ready")
    run.add_argument("--resume", action="store_true", help="keep what --out holds of these cases, run the others")
    run.add_argument("--record", help="for `all`: the command to record")
    whole = commands.add_parser(
        "all", help="the whole matrix: peers compile in parallel, then every family is measured"
    )
    whole.add_argument("--out", type=Path, required=True, help="a folder: one file a family")
    whole.add_argument("--device", default="cuda", help="cuda, or cpu to exercise the harness only")
    whole.add_argument("--commit", help="commit to record where the tree has no history")
    whole.add_argument("--total", type=float, default=480.0, help="seconds for everything; what does not fit is named")
    whole.add_argument("--compile-limit", type=float, default=150.0, help="seconds for peers to compile and tune in")
    whole.add_argument("--jobs", type=int, help="processes that compile; one a core by default")
    whole.add_argument("--peer-cache", type=Path, help="folder for what peers compile and tune: a second run finds it")
    whole.add_argument("--logs", type=Path, help="folder of one log a process that compiles")
    whole.add_argument("--host", type=float, help="of these, seconds for host times; 0 leaves them to a later `host`")
    host = commands.add_parser("host", help="host time of a public call into result files; nothing else should run")
    host.add_argument("--out", type=Path, required=True, help="the folder of result files")
    host.add_argument("--device", default="cuda", help="cuda, or cpu to exercise the harness only")
    host.add_argument("--limit", type=float, default=math.inf, help="seconds; what is not taken by then has no figure")
    warm = commands.add_parser("warm", help="compile and tune the peers ahead of a run, in parallel processes")
    warm.add_argument("--jobs", type=int, help="processes; one a core by default")
    warm.add_argument("--here", action="store_true", help="in this process")
    warm.add_argument("--logs", type=Path, help="folder of one log a process")
    warm.add_argument("--after", type=Path, help="with --here: a file to wait for once everything is imported")
    warm.add_argument("--peer-cache", type=Path, help="folder for what peers compile and tune, for `all` to find")
    warm.add_argument(
        "--compile-limit", type=float, default=math.inf, help="seconds after which what still runs is ended"
    )
    for parts in (run, whole, host, warm):
        parts.add_argument("--op", default="", help="operators, comma-separated; all by default")
        parts.add_argument("--case", default="", help="regular expression on case names, such as gdn_decode:Q1:B64:f32")
        parts.add_argument("--quick", action="store_true", help="the short matrix")
    for parts in (run, whole, warm):
        parts.add_argument("--peers", default="all", help="all, none, or flashinfer,fla,cudnn,lmdeploy,flashkda")
    report = commands.add_parser("report", help="tables and charts from committed results")
    report.add_argument("--results", type=Path, default=RESULTS)
    report.add_argument("--docs", type=Path, default=RESULTS.parents[2] / "docs")
    report.add_argument("--readme", type=Path, help="README whose generated block is replaced too")
    report.add_argument("--no-charts", action="store_true")
    lines = commands.add_parser(
        "lines", help="every speed line beside what committed results say: met, missed, not measured"
    )
    lines.add_argument("--results", type=Path, default=RESULTS)
    report.add_argument("--base", metavar="REV", help="compare with the results of another commit or folder instead")
    return parser


def _run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    import torch

    from . import host
    from . import run as runner
    from .cases import select
    from .compare import compare, load_set
    from .matrix import Turn

    cases = select(options.op, options.case, options.quick)
    if options.budget is not None:
        cases.sort(key=lambda case: case.late)
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0
    if _no_device(options):
        return 2
    command = [options.record] if options.record else ["python", "-m", "perf", *arguments]
    before: dict[str, Any] | None = None
    by_name = {case.name: case for case in cases}
    turn = Turn(options.turn) if options.turn else None
    if options.resume and options.out:
        before, cases = runner.unfinished(options.out, cases)
        lost = turn.case.read_text() if turn and turn.case.is_file() else ""
        if any(case.name == lost for case in cases):
            before["failures"][lost] = "the process was lost in this case"
            cases = [case for case in cases if case.name != lost]
    if options.warm_here:
        from .warm import IN_MEMORY, distinct, warm_group

        for name in options.warm_here.split(","):
            warm_group(distinct(case for case in cases if name in IN_MEMORY.get(case.op, ())), name)
        if options.device == "cuda":
            torch.cuda.empty_cache()
    cold: dict[tuple[str, str], list[str]] = {}
    if turn:
        from . import peers

        peers.load(options.peers)  # imports take seconds that belong to no turn
        if options.device == "cuda":
            torch.cuda.synchronize()
        options.budget, cold = turn.wait()
        cases.sort(key=lambda case: (case.late, _compiles(case, cold)))

    def save(result: dict[str, Any]) -> list[Path]:
        return runner.write(result, options.out, by_name) if options.out else []

    result = runner.run(
        cases,
        device=torch.device(options.device),
        peer_names=options.peers,
        commit=options.commit,
        command=command,
        budget_s=options.budget,
        say=lambda text: print(text, flush=True),
        save=save,
        without=lambda case: _cold_peers(case, cold),
        before=before,
        begin=lambda case: turn.case.write_text(case.name) if turn else None,
    )
    if not turn:  # the one who gives turns takes host times when all of them are over
        host.add([result], cases, runner.workspace(torch.device(options.device)), lambda text: print(text, flush=True))
    for path in save(result):
        print(f"wrote {path}")
    if options.base:
        print(compare(load_set(str(options.base)), [result]))
    slowest = sorted(result["rows"], key=lambda row: -row["seconds"])[:8]
    print("slowest cases, s:", ", ".join(f"{row['case']} {row['seconds']:.1f}" for row in slowest))
    print("seconds by phase:", result["environment"]["seconds_by_phase"])
    if options.out and options.out.suffix != ".json" and not turn:
        from .lines import lines_table
        from .report import load_results

        print(lines_table(load_results(options.out)))
    print(f"{len(result['rows'])} rows, {len(result['failures'])} failures, {result['environment']['seconds']} s")
    if any(why.endswith(runner.DEVICE_LOST) for why in result["failures"].values()):
        return LOST
    return 1 if result["failures"] else 0


def _no_device(options: argparse.Namespace) -> bool:
    """Whether the device that was asked for is not here, which is said."""
    import torch

    if options.device != "cuda" or torch.cuda.is_available():
        return False
    allowed = "allowed: --device cpu, which exercises the harness only"
    print(f"perf {options.command}: no CUDA device; {allowed}", file=sys.stderr)
    return True


def _compiles(case: Any, cold: dict[tuple[str, str], list[str]]) -> bool:
    """Whether a peer that is timed here still has to compile for a case: such cases are run after the others."""
    from .warm import ON_DISK, TUNING, group_of

    late = set(cold.get(group_of(case), ())) - TUNING
    return not late.isdisjoint(ON_DISK.get(case.op, ()))


def _cold_peers(case: Any, cold: dict[tuple[str, str], list[str]]) -> dict[str, str]:
    """Peers that tune for long and were not done in time for a case, and why they are left out."""
    from .warm import TUNING, group_of

    names = [name for name in cold.get(group_of(case), ()) if name in TUNING]
    return dict.fromkeys(names, "not compiled and tuned within the limit of this run")


def _host(options: argparse.Namespace) -> int:
    import torch

    from . import host
    from .cases import select

    cases = select(options.op, options.case, options.quick)
    if _no_device(options):
        return 2
    device = torch.device(options.device)
    count = host.update(options.out, cases, device, lambda text: print(text, flush=True), options.limit)
    return 0 if count else 1


def _warm(options: argparse.Namespace) -> int:
    from . import peers
    from .cases import select
    from .warm import installed, precompile, warm, warm_group

    cases = select(options.op, options.case, options.quick)
    if options.here:
        print("\n".join(warm_group(cases, options.peers, options.after)))
        return 0
    if options.logs:
        options.logs.mkdir(parents=True, exist_ok=True)
    names = installed(peers.wanted(options.peers))
    cache = options.peer_cache.absolute() if options.peer_cache else None
    precompile(names)
    cold = warm(
        cases, names, options.jobs, lambda text: print(text, flush=True), options.logs, options.compile_limit, cache
    )
    return 1 if cold else 0


def _all(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    from .cases import select
    from .lines import lines_table
    from .matrix import CACHE, HOST_S, measure
    from .report import load_results

    cases = select(options.op, options.case, options.quick)
    if _no_device(options):
        return 2
    failed = measure(
        cases,
        options.out,
        peer_names=options.peers,
        device=options.device,
        commit=options.commit,
        total_s=options.total,
        compile_limit_s=options.compile_limit,
        jobs=options.jobs,
        command=" ".join(["python", "-m", "perf", *arguments]),
        cache=(options.peer_cache or CACHE).absolute(),
        logs=options.logs,
        host_s=HOST_S if options.host is None else options.host,
        say=lambda text: print(text, flush=True),
    )
    print(lines_table(load_results(options.out)))
    return 1 if failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry of `python -m perf`."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    try:
        if options.command == "run":
            return _run(options, given)
        if options.command == "all":
            return _all(options, given)
        if options.command == "warm":
            return _warm(options)
        if options.command == "host":
            return _host(options)
        if options.command == "lines":
            from .lines import lines_table
            from .report import load_results

            print(lines_table(load_results(options.results)))
            return 0
        if options.base:
            from .compare import compare, load_set

            print(compare(load_set(options.base), load_set(str(options.results))))
            return 0
        from .report import write_report

        for path in write_report(options.results, options.docs, options.readme, charts=not options.no_charts):
            print(f"wrote {path}")
        return 0
    except (ValueError, OSError) as error:
        print(f"perf: {error}", file=sys.stderr)
        return 2
