"""The demo's second part: what one engine computed, a second engine process with an empty pool serves from the store.

Both run the same trace over a real Mooncake Store on loopback (a master and a process that owns the memory). The second
engine's outputs and checkpoints, the loaded ones among them, are compared with an isolated recomputation and with what
the first engine answered.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table

from ...cute_kernels.validation import Backend, uses_kernels
from ...pool import MooncakeConfig, MooncakeStateStore, StateRequest, StepRow, StoreIdentity, StoreSettings
from ...pool.mooncake_loopback import LoopbackMooncake
from .check import Checker
from .model import ModelConfig, ToyModel
from .report import DemoMismatchError
from .run import pick_device
from .serve import Server, ServeSettings
from .trace import TraceRequest, make_trace

STORE_REPORT_FILE = "store.json"
SEGMENT_BYTES = 256 << 20
#: Room for the loads that arrive at once, and few requests at a time: most of them find their prefix computed.
SETTINGS = ServeSettings(num_slots=48, max_running=6)
#: Patient limits: the demo shares its machine with the store.
LIMITS = StoreSettings(put_deadline_s=30.0, get_deadline_s=30.0, find_deadline_s=10.0, backlog=1024)


@dataclass(frozen=True)
class EngineResult:
    """What one engine did. `tokens[n]`: all tokens of request n, prompt and answer."""

    tokens: dict[str, list[int]]
    generated: int
    computed_tokens: int
    tokens_not_recomputed: int
    states_stored: int
    states_loaded: int
    loaded_bytes: int
    compared_tokens: int
    compared_checkpoints: int
    worst_rms_ratio: float
    seconds: float
    mismatches: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class StoreDemoReport:
    """Both engines side by side."""

    seed: int
    device: str
    backend: str
    requests: int
    state_bytes: int
    prompt_tokens: int
    generated_tokens: int
    equal_generated_tokens: int
    first: EngineResult
    second: EngineResult
    mismatches: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether both engines answered the same and matched the recomputation."""
        return not self.mismatches

    def write_json(self, path: Path) -> None:
        """Writes all fields but the tokens themselves."""
        raw: dict[str, Any] = {**asdict(self), "passed": self.passed}
        for engine in ("first", "second"):
            del raw[engine]["tokens"]
        path.write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")

    def print_table(self, console: Console) -> None:
        """Prints the short table."""
        table = Table("", "first engine", "second engine", title="Served from Mooncake Store")
        for name, value in (
            ("tokens computed", "computed_tokens"),
            ("tokens not recomputed", "tokens_not_recomputed"),
            ("states stored", "states_stored"),
            ("states loaded", "states_loaded"),
            ("bytes loaded and verified", "loaded_bytes"),
            ("tokens compared with recomputation", "compared_tokens"),
            ("checkpoints compared with it", "compared_checkpoints"),
        ):
            table.add_row(name, f"{getattr(self.first, value):,}", f"{getattr(self.second, value):,}")
        same = f"{self.equal_generated_tokens:,} of {self.generated_tokens:,}"
        table.add_row("worst difference", f"{self.first.worst_rms_ratio:.1e}", f"{self.second.worst_rms_ratio:.1e}")
        table.add_row("generated tokens equal to the first engine's", "", same)
        console.print(table)


class StoreServer(Server):
    """The demo's server with a store behind its pool."""

    def __init__(
        self, model: ToyModel, trace: list[TraceRequest], settings: ServeSettings, config: MooncakeConfig, seed: int
    ) -> None:
        super().__init__(model, trace, settings)
        identity = StoreIdentity("demo", weights=f"seed {seed}, {model.config}")
        self.store = MooncakeStateStore.connect(self.life, self.pool, identity, config, LIMITS)
        self._asked: set[object] = set()

    def _arrive(self) -> None:
        super()._arrive()
        for request in self._waiting:
            if request.id not in self._asked:
                self._asked.add(request.id)
                interval = self.settings.interval
                self.store.find(request, range(interval, len(request.key), interval))

    def _ready(self, request: StateRequest) -> bool:
        self.store.poll()
        if not self.store.pending(request):
            return True
        if not self._running:
            time.sleep(0.0005)
        return False

    def _step(self, rows: list[StepRow]) -> None:
        super()._step(rows)
        for entry in self.checkpoints():
            if not entry.stored:
                self.store.put(entry)
        self.store.poll()


def run_store_demo(
    out_dir: str | Path,
    seed: int = 0,
    backend: Backend = "auto",
    requests: int = 24,
    *,
    console: Console | None = None,
) -> StoreDemoReport:
    """Serves one trace twice, by this process and by a second one that starts empty, over a Mooncake Store on loopback.

    Args:
        out_dir: folder for store.json; made if missing.
        seed: of the trace and the weights.
        backend: "auto", "kernels" or "reference", as in the operators.
        requests: requests in the trace.
        console: where the table goes; default stdout.

    Returns:
        The report of a run without differences.

    Raises:
        DemoMismatchError: an output, checkpoint or answer differs; the file is written all the same.
        ConfigError: the Mooncake wheel cannot load; says what to install.
        BackendUnavailableError: backend="kernels" where they cannot run.
    """
    console = console or Console()
    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    place = pick_device(backend)
    kernels = uses_kernels(backend, place)
    with (
        tempfile.TemporaryDirectory() as scratch,
        LoopbackMooncake(scratch, segment_bytes=SEGMENT_BYTES, lease_ttl_ms=10_000, client_ttl_s=10) as mooncake,
    ):
        console.print("first engine: serves the trace, stores its checkpoints")
        first = serve_with_store(mooncake.address, seed, backend, requests)
        console.print("second engine: another process with an empty pool, the same trace")
        second = _second_engine(Path(scratch), mooncake.address, seed, backend, requests)
    config = ModelConfig.for_device(place)
    mismatches = [
        f"{name} engine, {text}" for name, r in (("first", first), ("second", second)) for text in r.mismatches
    ]
    equal = sum(
        mine == theirs for number in first.tokens for mine, theirs in zip(first.tokens[number], second.tokens[number])
    )
    total = sum(len(tokens) for tokens in first.tokens.values())
    # In bf16 another split of the same tokens may choose another token of equal score; the recomputation decides there.
    if config.dtype is torch.float32 and first.tokens != second.tokens:
        mismatches.append("the engines' answers differ")
    if not second.states_loaded:
        mismatches.append("the second engine loaded nothing from the store")
    report = StoreDemoReport(
        seed=seed,
        device=torch.cuda.get_device_name(place) if place.type == "cuda" else "CPU",
        backend="kernels" if kernels else "reference operators",
        requests=requests,
        state_bytes=config.layout().slot_bytes,
        prompt_tokens=total - first.generated,
        generated_tokens=first.generated,
        equal_generated_tokens=first.generated - (total - equal),
        first=first,
        second=second,
        mismatches=mismatches,
    )
    report.write_json(folder / STORE_REPORT_FILE)
    report.print_table(console)
    console.print(f"numbers: {folder / STORE_REPORT_FILE}")
    if not report.passed:
        raise DemoMismatchError(report)
    return report


def serve_with_store(address: str, seed: int, backend: Backend, requests: int) -> EngineResult:
    """One engine: serves the trace over the store at `address`, checks everything, and closes its client."""
    place = pick_device(backend)
    config = ModelConfig.for_device(place)
    model = ToyModel(config, place, seed, backend)
    # Without cancellations, whose moment depends on how fast an engine is, both engines see the same prompts.
    trace = [replace(request, cancel_after=None) for request in make_trace(seed, requests, config.vocab)]
    server, checker = StoreServer(model, trace, SETTINGS, MooncakeConfig(address), seed), Checker(model)
    begun = time.perf_counter()
    server.run(lambda _: None)
    server.store.settle(60.0)
    seconds = time.perf_counter() - begun
    entries = len(server.checkpoints())
    checker.check_server(server, lambda _: None)
    counters = server.store.counters
    server.store.close()
    served = server.served.values()
    return EngineResult(
        tokens={str(number): outcome.tokens for number, outcome in server.served.items()},
        generated=sum(len(outcome.tokens) - outcome.prompt for outcome in served),
        computed_tokens=sum(outcome.computed for outcome in served),
        tokens_not_recomputed=sum(sum(outcome.resumed) for outcome in served),
        states_stored=counters.puts_stored,
        states_loaded=counters.gets_ok,
        loaded_bytes=counters.get_bytes,
        compared_tokens=checker.compared_tokens,
        compared_checkpoints=entries,
        worst_rms_ratio=checker.worst,
        seconds=seconds,
        mismatches=checker.mismatches,
    )


def _second_engine(scratch: Path, address: str, seed: int, backend: Backend, requests: int) -> EngineResult:
    result = scratch / "second.json"
    command = [sys.executable, "-m", __spec__.name, address, str(seed), backend, str(requests), str(result)]
    subprocess.run(command, check=True)
    return EngineResult(**json.loads(result.read_text(encoding="utf-8")))


def main() -> None:
    """The second engine's process."""
    parser = argparse.ArgumentParser(description=serve_with_store.__doc__)
    for name, kind in (("address", str), ("seed", int), ("backend", str), ("requests", int), ("result", Path)):
        parser.add_argument(name, type=kind)
    given = parser.parse_args()
    outcome = serve_with_store(given.address, given.seed, cast(Backend, given.backend), given.requests)
    given.result.write_text(json.dumps(asdict(outcome)), encoding="utf-8")


if __name__ == "__main__":
    main()
