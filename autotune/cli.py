"""`compact-state tune`: the command function, added to the application by `integration.cli`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer


def _split(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def tune_command(
    op: Annotated[str, typer.Option(help="Operators, comma-separated, e.g. gdn_decode,kda_decode.")],
    geometry: Annotated[str, typer.Option(help="Geometries, e.g. Q1,G1; default: the primary ones.")] = "",
    workload: Annotated[str, typer.Option(help="Workloads, e.g. B8,B64; default: the benchmark matrix.")] = "",
    state_dtype: Annotated[str, typer.Option(help="float32, bfloat16 or both.")] = "float32,bfloat16",
    out: Annotated[Path | None, typer.Option(help="Folder of tables by device; default: the package's.")] = None,
    journal: Annotated[Path | None, typer.Option(help="File of trials: an interrupted sweep goes on from it.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Build processes; default: one a core.")] = None,
    budget: Annotated[float | None, typer.Option(help="Seconds after which no further case starts.")] = None,
    threshold: Annotated[float, typer.Option(help="Gain over the heuristic that makes an entry.")] = 0.02,
    build_only: Annotated[bool, typer.Option(help="Compile and check resources only; needs no GPU.")] = False,
    from_journal: Annotated[bool, typer.Option(help="Make tables from --journal alone; needs no GPU.")] = False,
    commit: Annotated[str | None, typer.Option(help="Commit to record where the tree has no history.")] = None,
    docs: Annotated[Path | None, typer.Option(help="Page whose tables are drawn again afterwards.")] = None,
) -> None:
    """Sweep the specialisations of operators on this GPU and write tuning tables that the operators then read."""
    from .report import describe, refresh
    from .runner import TuneError, assemble, tune

    began = time.monotonic()
    for name in _split(op):
        left = None if budget is None else budget - (time.monotonic() - began)
        try:
            if from_journal:
                if journal is None:
                    raise ValueError("--from-journal: allowed: with --journal FILE")
                typer.echo(describe(assemble(name, journal, out=out, threshold=threshold)))
                continue
            sweep = tune(
                name, geometries=_split(geometry), workloads=_split(workload), state_dtypes=_split(state_dtype), out=out,
                journal=journal, jobs=jobs, budget_s=left, threshold=threshold, build_only=build_only, commit=commit,
                command=["compact-state", *sys.argv[1:]],
            )  # fmt: skip
        except (ValueError, KeyError, TuneError) as error:
            typer.echo(f"error: {error.args[0] if error.args else error}", err=True)
            raise typer.Exit(2) from error
        typer.echo(describe(sweep))
    if docs is not None and not build_only:
        refresh(docs)


def main() -> None:
    """`python -m compact_state.autotune.cli`: the same command alone."""
    typer.run(tune_command)


if __name__ == "__main__":
    main()
