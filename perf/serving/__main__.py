"""Command line: `equality`, `load`, `server`, `ray` on a model of tests/integration/lmd_tiny.py; `judge`, `merge` of results."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..environment import describe
from ..report import replace_block
from . import equality, judge, load, result, server, tensor_parallel
from .fleet import ENGINE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m compact_state.perf.serving", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    merge = commands.add_parser("merge", help="one result file from parts; documents' blocks are drawn from it")
    merge.add_argument("parts", type=Path, nargs="*", help="none: draw the blocks only")
    merge.add_argument("--add", action="store_true", help="keep what the file has and the parts do not replace")
    merge.add_argument("--docs", type=Path, nargs="*", default=[], help="documents with <!-- perf:lmdeploy --> blocks")
    merge.add_argument("--file", type=Path, default=result.FILE)
    command = commands.add_parser("judge", help="logits of `equality` beside transformers in fp32")
    command.add_argument("model", help="checkpoint")
    command.add_argument("rounds", type=Path, nargs="+", help="rounds-*.json that `equality` left beside mixed-*.json")
    command.add_argument("--out", type=Path, required=True, help="JSON to write; rewritten as results come")
    for name in ("equality", "load", "server", "ray"):
        command = commands.add_parser(name)
        command.add_argument("model", help="checkpoint")
        command.add_argument("--out", type=Path, required=True, help="JSON to write; rewritten as results come")
        command.add_argument("--logs", type=Path, default=Path("/tmp/serving"), help="folder of the engines' logs")
        command.add_argument(
            "--budget", type=float, default=300.0, help="seconds: load, all; others, an engine's start"
        )
        command.add_argument("--engine", nargs="+", default=ENGINE, help=argparse.SUPPRESS)
        command.add_argument("--settings", type=json.loads, default={}, help="JSON on top of the engines' settings")
        if name in ("equality", "ray"):
            command.add_argument("--new", type=int, default=24, help="tokens of each answer")
            command.add_argument("--mixed", type=int, default=256, help="requests of the mixed load; 0 for none")
            command.add_argument("--only", default="", help="names of engines, comma-separated; all by default")
            command.add_argument(
                "--name", default=name, help="what the result is called, such as moe; the command's name"
            )
        if name == "load":
            command.add_argument("--case", type=load.Case.parse, action="append", help="such as 64x2048+256:5@on")
            command.add_argument("--variants", default="legacy,compact")
            command.add_argument("--caching", default="off,on")
            command.add_argument("--start", type=float, default=240.0, help="seconds that an engine may take to start")
            command.add_argument(
                "--profile", nargs="*", default=[], help="engines whose time is told apart, as compact-on"
            )
        if name == "server":
            command.add_argument("--variant", default="compact", choices=("compact", "installed", "legacy"))
            command.add_argument("--eager", action="store_true")
            command.add_argument("--port", type=int, default=server.PORT)
    return parser


def version(distribution: str) -> str:
    """Version of an installed distribution, or why there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _run(options: argparse.Namespace, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    if options.command == "judge":
        # transformers takes fla's kernels where they are installed: the judge is torch alone.
        sys.modules["fla"] = None  # type: ignore[assignment]
        rounds = {path.stem.removeprefix("rounds-"): json.loads(path.read_text()) for path in options.rounds}
        loads = {path.with_name(path.name.replace("rounds-", "mixed-", 1)) for path in options.rounds}
        mixed = {p.stem.removeprefix("mixed-"): json.loads(p.read_text()) for p in loads if p.exists()}
        return judge.run(rounds, judge.evaluation(options.model), mixed=mixed, save=save)
    if options.command in ("equality", "ray"):
        two = options.command == "ray"
        engines = (tensor_parallel if two else equality).specs(options.model, options.settings)

        def judged(found: dict[str, Any]) -> dict[str, Any]:
            return {"passed": tensor_parallel.passed(found), **found} if two else found

        return judged(
            equality.run(
                options.model,
                engines=[spec for spec in engines if not options.only or spec.name in options.only.split(",")],
                logs=options.logs,
                new=options.new,
                mixed=options.mixed,
                save=lambda found: save(judged(found)),
                limit_s=options.budget,
                engine=options.engine,
            )
        )
    if options.command == "load":
        caching = tuple(word == "on" for word in options.caching.split(","))
        engines = load.specs(options.model, tuple(options.variants.split(",")), caching, options.settings)
        cases = options.case or [load.Case.parse(text) for text in load.CASES]
        return load.run(
            options.model,
            cases,
            engines=engines,
            logs=options.logs,
            budget_s=options.budget,
            start_s=options.start,
            save=save,
            profile=options.profile,
            engine=options.engine,
        )
    options.logs.mkdir(parents=True, exist_ok=True)
    name = f"{options.variant}-{'eager' if options.eager else 'graph'}"
    found = server.run(
        options.model,
        log=options.logs / f"server-{name}.log",
        limit_s=options.budget,
        variant=options.variant,
        eager=options.eager,
        port=options.port,
    )
    return {name: found}


def _merge(options: argparse.Namespace) -> int:
    if options.parts:
        base = json.loads(options.file.read_text()) if options.add else None
        result.dump(result.merge([json.loads(path.read_text()) for path in options.parts], base), options.file)
    blocks = result.blocks(json.loads(options.file.read_text()))
    for document in options.docs:
        text = document.read_text()
        for name, block in blocks.items():
            text = replace_block(text, name, block)
        document.write_text(text)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry of `python -m compact_state.perf.serving`."""
    import torch

    options = _parser().parse_args(arguments)
    if options.command == "merge":
        return _merge(options)
    # Told to stop, it still ends the engines that it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    versions = {
        name: version(name) for name in ("lmdeploy", "tilelang", "transformers", "flash-linear-attention", "ray")
    }
    environment = describe(
        device, None, versions, ["python", "-m", "compact_state.perf.serving", options.command, "MODEL"]
    )
    if device.type == "cuda":
        torch.cuda.empty_cache()

    def save(found: dict[str, Any]) -> None:
        name = getattr(options, "name", options.command)
        options.out.write_text(json.dumps({"environment": environment, name: found}, indent=1) + "\n")

    save(_run(options, save))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
