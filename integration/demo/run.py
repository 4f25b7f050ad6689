"""`run_demo`: serve, check, report."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ...cute_kernels.validation import Backend, uses_kernels
from .check import Checker
from .model import ModelConfig, ToyModel
from .report import DemoMismatchError, DemoReport
from .serve import Server, ServeSettings
from .trace import TraceRequest, make_trace

TIMELINE_FILE = "timeline.png"
REPORT_FILE = "demo.json"


def pick_device(backend: Backend) -> torch.device:
    """The GPU if kernels can run there (and are not ruled out by backend="reference"), else the CPU."""
    if backend != "reference" and torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def run_demo(
    out_dir: str | Path,
    seed: int = 0,
    backend: Backend = "auto",
    requests: int = 64,
    *,
    device: str | torch.device | None = None,
    settings: ServeSettings | None = None,
    trace: list[TraceRequest] | None = None,
    console: Console | None = None,
) -> DemoReport:
    """Serves a seeded trace, checks every output against an isolated recomputation, and writes picture and JSON.

    Args:
        out_dir: folder for timeline.png and demo.json; made if missing.
        seed: of the trace and the weights.
        backend: "auto", "kernels" or "reference", as in the operators.
        requests: requests in the trace.
        device: where to run; default the GPU if kernels can run there, else the CPU.
        settings: limits of the server.
        trace: what to serve instead of `requests` requests from the seed.
        console: where progress and table go; default stdout.

    Returns:
        The report of a run without differences.

    Raises:
        DemoMismatchError: an output or checkpoint differs; the files are written all the same.
        BackendUnavailableError: backend="kernels" where they cannot run.
    """
    console = console or Console()
    settings = settings or ServeSettings()
    place = pick_device(backend) if device is None else torch.device(device)
    kernels = uses_kernels(backend, place)
    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    config = ModelConfig.for_device(place)
    model = ToyModel(config, place, seed, backend)
    trace = make_trace(seed, requests, config.vocab) if trace is None else trace
    server, checker = Server(model, trace, settings), Checker(model)
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    ) as progress:
        serving = progress.add_task("serving requests", total=len(trace))
        begun = time.perf_counter()
        server.run(lambda count: progress.advance(serving, count))
        served_at = time.perf_counter()
        entries = len(server.checkpoints())
        checking = progress.add_task("checking outputs", total=len(server.served))
        checker.check_server(server, lambda count: progress.advance(checking, count))
        checked_at = time.perf_counter()
    outcomes = list(server.served.values())
    hits = sum(resumed > 0 for outcome in outcomes for resumed in outcome.resumed)
    payload = model.layout.payload_bytes
    report = DemoReport(
        seed=seed,
        device=torch.cuda.get_device_name(place) if place.type == "cuda" else "CPU",
        backend="kernels" if kernels else "reference operators",
        requests=len(outcomes),
        cancelled=sum(outcome.cancelled for outcome in outcomes),
        preemptions=sum(outcome.preempted for outcome in outcomes),
        admissions_delayed=server.waits,
        steps=server.steps,
        prompt_tokens=sum(outcome.prompt for outcome in outcomes),
        generated_tokens=sum(len(outcome.tokens) - outcome.prompt for outcome in outcomes),
        computed_tokens=sum(outcome.computed for outcome in outcomes),
        hits=hits,
        tokens_not_recomputed=sum(sum(outcome.resumed) for outcome in outcomes),
        checkpoints_published=server.published,
        checkpoints_skipped=server.life.skipped_checkpoints,
        evictions=server.index.removed.get("evicted", 0),
        steps_tracked_on_device=server.tracked_steps,
        slots=settings.num_slots,
        slot_bytes=model.layout.slot_bytes,
        copied_bytes=server.pool.copied_bytes,
        # It copies a checkpoint into the request's slot at a hit, and the request's slot into a checkpoint at a save.
        copying_design_bytes=(hits + server.published) * payload,
        peak_slots=server.timeline.peak_slots,
        peak_slots_separate_pools=server.timeline.peak_separate,
        peak_slots_without_sharing=server.timeline.peak_copies,
        compared_tokens=checker.compared_tokens,
        compared_checkpoints=entries,
        worst_rms_ratio=checker.worst,
        allowed_rms_ratio=checker.allowed,
        serve_seconds=served_at - begun,
        check_seconds=checked_at - served_at,
        mismatches=checker.mismatches,
    )
    server.timeline.draw(folder / TIMELINE_FILE)
    report.write_json(folder / REPORT_FILE)
    report.print_table(console)
    console.print(f"picture: {folder / TIMELINE_FILE}   numbers: {folder / REPORT_FILE}")
    if not report.passed:
        raise DemoMismatchError(report)
    return report
