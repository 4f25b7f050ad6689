"""The `compact-state` command: build kernels, look at the machine, serve the demo trace, plan capacity, tune."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ..autotune.cli import tune_command
from ..cute_kernels.errors import CompactStateError
from ..pool.errors import PoolError


class BackendName(str, Enum):
    """Choices of --backend."""

    auto = "auto"
    kernels = "kernels"
    reference = "reference"


app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)


@app.command()
def build(
    out: Annotated[Path | None, typer.Option(help="Folder for the objects, or the library with --shared.")] = None,
    shared: Annotated[bool, typer.Option(help="Link one library that loads without the compiler.")] = False,
    only: Annotated[str, typer.Option(help="Regular expression on kernel symbols.")] = "",
    jobs: Annotated[int | None, typer.Option(help="Worker processes; default: one a core.")] = None,
) -> None:
    """Compile every shipped kernel for sm_90a. Needs the compiler, but no GPU."""
    from ..cute_kernels.compile.build import build as build_manifest

    if not build_manifest(out, shared, only, jobs):
        raise typer.Exit(1)


@app.command()
def doctor() -> None:
    """Say what this machine has, and which operators run on what."""
    from .doctor import report

    typer.echo(report())


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the picture and the JSON.")] = Path("out/demo"),
    seed: Annotated[int, typer.Option(help="Seed of the trace and the weights.")] = 0,
    requests: Annotated[int, typer.Option(min=1, help="Requests in the trace.")] = 64,
    backend: Annotated[BackendName, typer.Option(help="What the operators run on.")] = BackendName.auto,
    store: Annotated[
        bool, typer.Option(help="Over a Mooncake Store on loopback, and again by an empty second engine.")
    ] = False,
) -> None:
    """Serve a trace over the pool and the operators, and check every output against a recomputation without sharing."""
    from .demo import DemoMismatchError, run_demo

    try:
        if store:
            from .demo.store import run_store_demo

            run_store_demo(out, seed, backend=backend.value, requests=min(requests, 24))
        else:
            run_demo(out, seed, backend=backend.value, requests=requests)
    except DemoMismatchError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


@app.command()
def capacity(
    model: Annotated[str, typer.Option(help="Model preset, e.g. glm-5.3-flash; 'list' names them.")],
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    max_batch: Annotated[int, typer.Option(min=1, help="Requests running at once.")] = 64,
    drafts: Annotated[int, typer.Option(min=0, help="Draft tokens per verify step.")] = 0,
    checkpoints: Annotated[
        int | None, typer.Option(min=0, help="Prefix-cache checkpoints to hold; default: max-batch.")
    ] = None,
    state_dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
) -> None:
    """Slots and bytes a pool needs, and what the copying design would take."""
    from ..pool import capacity as plan

    typer.echo(
        plan.main_text(
            model, tp=tp, max_batch=max_batch, drafts=drafts, checkpoint_slots=checkpoints, state_dtype=state_dtype
        )
    )


app.command("tune")(tune_command)


def main() -> None:
    """Entry point: an error that names its argument ends the command with its text, not with a traceback."""
    try:
        app()
    except (CompactStateError, PoolError) as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
