"""Engines side by side on one machine, started at once and asked one at a time, so that trials can alternate."""

from __future__ import annotations

import concurrent.futures
import json
import math
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

ENABLE = "LMDEPLOY_ENABLE_COMPACT_STATE"
ENGINE = ["-m", "compact_state.perf.serving.engine"]


class EngineError(RuntimeError):
    """An engine could not do what it was asked, or ended; the text has its traceback or the end of its log."""


@dataclass(frozen=True)
class Spec:
    """One engine: `variant` is legacy or compact, `settings` go to PytorchEngineConfig, `environment` on top of ours."""

    variant: str
    model: str
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    name: str = ""

    @property
    def label(self) -> str:
        """What names it in logs and results."""
        return self.name or f"{self.variant}-{Path(self.model).name}"


class Running:
    """One engine process."""

    def __init__(self, spec: Spec, logs: Path, engine: list[str]) -> None:
        compact = spec.variant == "compact"
        launcher = ["-m", "compact_state.integration"] if compact else []
        environment = {**os.environ, "LMDEPLOY_ENABLE_CHECK_ENV": "0", "LOG_LEVEL": "WARNING", **spec.environment}
        environment[ENABLE] = "1" if compact else "0"
        self.spec = spec
        self.log = logs / f"{spec.label}.log"
        self._process = subprocess.Popen(
            [sys.executable, *launcher, *engine, spec.model, json.dumps(spec.settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            env=environment,
            text=True,
        )
        self.ready: dict[str, Any] = {}

    def _reply(self, deadline: float = math.inf) -> Any:
        assert self._process.stdout is not None
        # Nothing is buffered between replies, so the descriptor says whether one is coming.
        if (
            deadline < math.inf
            and not select.select([self._process.stdout], [], [], max(0, deadline - time.monotonic()))[0]
        ):
            raise EngineError(f"{self.spec.label} is not ready in time:\n{self.log.read_text()[-2000:]}")
        line = self._process.stdout.readline()
        if not line:
            raise EngineError(f"{self.spec.label} ended:\n{self.log.read_text()[-3000:]}")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(f"{self.spec.label}:\n{answer['error']}")
        return answer["ok"]

    def wait(self, deadline: float) -> Running:
        """Until it serves. Raises EngineError when it does not by `deadline`, a time of the monotonic clock."""
        self.ready = self._reply(deadline)
        return self

    def ask(self, do: str, **arguments: Any) -> Any:
        """Run one command to its end. Raises EngineError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; reading says why
        return self._reply()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


class Fleet:
    """Starts engines together; `with Fleet(...) as fleet: fleet["name"].ask(...)`.

    An engine that fails, or does not serve after `limit_s`, is left out and named in `failed` with its error. With
    `wait=False` nobody waits for the slowest: `each` then asks every engine as soon as it serves.
    """

    def __init__(
        self,
        specs: Iterable[Spec],
        logs: Path,
        *,
        limit_s: float = 300.0,
        engine: list[str] = ENGINE,
        wait: bool = True,
    ) -> None:
        self._specs, self._logs, self._limit, self._engine, self._wait = list(specs), logs, limit_s, engine, wait
        self.engines: dict[str, Running] = {}
        self.failed: dict[str, str] = {}
        self.start_s = self._began = 0.0

    def __enter__(self) -> Fleet:
        self._logs.mkdir(parents=True, exist_ok=True)
        self._began = time.monotonic()
        for running in [Running(spec, self._logs, self._engine) for spec in self._specs]:
            self.engines[running.spec.label] = running
        if not self._wait:
            return self
        try:
            for label, running in list(self.engines.items()):
                try:
                    running.wait(self._began + self._limit)
                except EngineError as error:
                    self.drop(label, error)
        except BaseException:
            self.close()
            raise
        self.start_s = round(time.monotonic() - self._began, 1)
        if not self.engines:
            raise EngineError("\n".join(self.failed.values()))
        return self

    def __getitem__(self, label: str) -> Running:
        return self.engines[label]

    def drop(self, label: str, why: object) -> None:
        """Go on without an engine that failed."""
        self.engines.pop(label).close()
        self.failed[label] = str(why)

    def each(self, work: Callable[[Running], None]) -> None:
        """Wait for every engine and do `work` with it, side by side; one that fails is dropped and ends nobody else."""

        def serve(label: str, running: Running) -> None:
            try:
                work(running.wait(self._began + self._limit))
            except EngineError as error:
                self.drop(label, error)

        pool = concurrent.futures.ThreadPoolExecutor(len(self.engines))
        try:
            for done in [pool.submit(serve, *item) for item in self.engines.items()]:
                done.result()
        except BaseException:
            # Engines that end let the threads that read from them end.
            self.close()
            raise
        finally:
            pool.shutdown()

    def close(self) -> None:
        """End every engine."""
        for engine in list(self.engines.values()):
            engine.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
