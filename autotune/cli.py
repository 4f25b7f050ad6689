"""`compact-state tune`: the command function, added to the application by `integration.cli`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from ..cute_kernels.compile.manifest import Entry


def _split(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def tune_command(
    op: Annotated[str, typer.Option(help="Operators, comma-separated, e.g. gdn_decode,kda_decode, or all.")],
    geometry: Annotated[str, typer.Option(help="Geometries, e.g. Q1,G1; default: the primary ones.")] = "",
    workload: Annotated[str, typer.Option(help="Workloads, e.g. B8,B64; default: the benchmark matrix.")] = "",
    brief: Annotated[bool, typer.Option(help="Of the matrix only the workloads that stand for the others.")] = False,
    state_dtype: Annotated[str, typer.Option(help="float32, bfloat16 or both.")] = "float32,bfloat16",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of tables by device, default the package's; with --build-only: of the library it links."
        ),
    ] = None,
    journal: Annotated[Path | None, typer.Option(help="File of trials: an interrupted sweep goes on from it.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Build processes; default: one a core.")] = None,
    budget: Annotated[float | None, typer.Option(help="Seconds after which no further case starts.")] = None,
    threshold: Annotated[float, typer.Option(help="Gain over the heuristic that makes an entry.")] = 0.02,
    build_only: Annotated[bool, typer.Option(help="Compile and check resources only; needs no GPU.")] = False,
    near: Annotated[
        bool, typer.Option(help="Only candidates that differ from the heuristic's choice in one field.")
    ] = False,
    from_journal: Annotated[bool, typer.Option(help="Make tables from --journal alone; needs no GPU.")] = False,
    commit: Annotated[str | None, typer.Option(help="Commit to record where the tree has no history.")] = None,
    docs: Annotated[Path | None, typer.Option(help="Page whose tables are drawn again afterwards.")] = None,
) -> None:
    """Sweep the specialisations of operators on this GPU and write tuning tables that the operators then read.

    Where the compiler is not, sweep with a library built ahead: `--build-only --out DIR` elsewhere, then
    `COMPACT_STATE_KERNELS=DIR`.
    """
    from .builds import link_candidates
    from .report import describe, refresh
    from .runner import TuneError, assemble, tune
    from .space import SPACES

    began = time.monotonic()
    sound: list[Entry] = []
    for name in SPACES if op == "all" else _split(op):
        workloads = _split(workload) or (list(SPACES[name].brief) if brief and name in SPACES else [])
        left = None if budget is None else budget - (time.monotonic() - began)
        try:
            if from_journal:
                if journal is None:
                    raise ValueError("--from-journal: allowed: with --journal FILE")
                typer.echo(describe(assemble(name, journal, out=out, threshold=threshold)))
                continue
            sweep = tune(
                name, geometries=_split(geometry), workloads=workloads, state_dtypes=_split(state_dtype), out=out,
                journal=journal, jobs=jobs, budget_s=left, threshold=threshold, build_only=build_only, near=near, commit=commit,
                command=["compact-state", *sys.argv[1:]],
            )  # fmt: skip
        except (ValueError, KeyError, TuneError) as error:
            typer.echo(f"error: {error.args[0] if error.args else error}", err=True)
            raise typer.Exit(2) from error
        typer.echo(describe(sweep))
        sound += [entry for entry in sweep.candidates if entry.key.symbol() not in sweep.rejected]
    if build_only and out is not None:
        typer.echo(f"linked {link_candidates(sound, out, jobs or os.cpu_count() or 1)}")
    if docs is not None and not build_only:
        refresh(docs)


def main() -> None:
    """`python -m compact_state.autotune.cli`: the same command alone."""
    typer.run(tune_command)


if __name__ == "__main__":
    main()
