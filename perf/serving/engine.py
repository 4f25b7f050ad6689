"""One lmdeploy engine in a process of its own: JSON commands on standard input, one JSON reply a line on standard output.

The compact pool is on when the process was started through `compact_state.integration`. Started by `fleet`.
"""

from __future__ import annotations

import asyncio
import cProfile
import io
import json
import os
import pstats
import sys
import time
import traceback
from collections.abc import Coroutine
from typing import Any

from . import traffic

SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "language_model_only": True,
    "session_len": 32768,
    "block_size": 64,
    "num_gpu_blocks": 8192,
    "max_batch_size": 64,
    "max_prefill_token_num": 8192,
    "prefix_cache_state_budget": 128,
    "logprobs_mode": "raw_logits",
}


def compiled() -> int | None:
    """How many kernels of ours this process has compiled, rather than loaded as they were built before; None without ours."""
    cache = sys.modules.get("compact_state.cute_kernels.compile.cache")
    return None if cache is None else int(cache.compile_count)


class Engine:
    """A started pipeline and what can be asked of it."""

    def __init__(self, model: str, settings: dict[str, Any]) -> None:
        began = time.monotonic()
        import torch
        from lmdeploy import PytorchEngineConfig, pipeline

        self.clock = traffic.StepClock()
        self.clock.install()
        self.pipe = pipeline(
            model, backend_config=PytorchEngineConfig(**{**SETTINGS, **settings}), log_level=os.environ["LOG_LEVEL"]
        )
        torch.cuda.synchronize()
        self.start_s = round(time.monotonic() - began, 2)
        self.torch = torch
        self.engine = self.pipe.async_engine.engine
        self.sessions = 1000

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run on the engine's event loop."""
        return self.pipe._run(coro=work).result()

    def next_sessions(self) -> int:
        self.sessions += 1000
        return self.sessions

    def ready(self) -> dict[str, Any]:
        """What was built."""
        agent = getattr(self.engine.executor, "model_agent", None)
        built: dict[str, Any] = {"start_s": self.start_s, "compiled": compiled()}
        if agent is not None:
            states = agent.state_cache_engine
            size = int(states.allocation.nbytes)
            count = int(self.engine.executor.cache_config.num_state_caches)
            built |= {"pool": type(states).__name__, "state_bytes": size, "slots": count, "slot_bytes": size // count}
        return built

    def load(
        self, requests: int, input: int, output: int, seed: int, groups: int = traffic.GROUPS, turns: int = 1
    ) -> dict[str, Any]:
        """One trial: a batch of prompts sharing halves, or as many chats of several turns that begin so."""
        prompts = traffic.shared_prompts(requests, input, seed, groups)
        self.torch.cuda.reset_peak_memory_stats()
        before = self.torch.cuda.memory_allocated()
        result: dict[str, Any] = self.run(
            traffic.batch(self.engine, self.clock, self.next_sessions(), prompts, output, turns)
        )
        transient = self.torch.cuda.max_memory_allocated() - before
        return {**result, "transient_mib": round(transient / 2**20, 1), "checkpoints": self._checkpoints()}

    def _checkpoints(self) -> int:
        return int(self.engine.scheduler.state_manager.get_num_allocated_checkpoint_states())

    def rounds(self, new: int) -> list[dict[str, Any]]:
        """Answers with logits."""
        result: list[dict[str, Any]] = self.run(traffic.rounds(self.engine, self.next_sessions(), new))
        return result

    def mixed(self, count: int, new: int, seed: int) -> dict[str, Any]:
        """A mixed load with cancels; afterwards nothing is held and the ledger is sound."""
        result: dict[str, Any] = self.run(traffic.mixed(self.engine, self.next_sessions(), count, new, seed))
        return {**result, "ledger": self.ledger(), "compiled": compiled()}

    def ledger(self) -> dict[str, int] | None:
        """The ledger's counters after its invariants were checked; None for lmdeploy's own manager."""
        manager = self.engine.scheduler.state_manager
        if not hasattr(manager, "ledger"):
            return None

        async def look() -> dict[str, int]:
            from compact_state.pool.invariants import check

            # The forward after the last answer is still on its way; nothing steps while this runs on the engine's loop.
            await asyncio.sleep(0.5)
            check(manager.ledger)
            counters = manager.ledger.counters
            held = {"holders": len(manager.ledger.holders), "demand": manager.ledger.demand}
            return held | {name: getattr(counters, name) for name in counters.__slots__}

        found: dict[str, int] = self.run(look())
        return found

    def sleep(self) -> dict[str, Any]:
        """Sleep and wake up again; seconds of both, bytes freed."""
        before, began = self.torch.cuda.memory_allocated(), time.monotonic()
        self.run(self.pipe.async_engine.sleep(1))
        asleep, between = self.torch.cuda.memory_allocated(), time.monotonic()

        async def wake() -> None:
            self.pipe.async_engine.wakeup()

        self.run(wake())
        times = {"sleep_s": round(between - began, 2), "wakeup_s": round(time.monotonic() - between, 2)}
        # The memory of ray workers is not this process's to ask for.
        return {**times, "freed_mib": (before - asleep) >> 20} if before else times

    def profile(self, requests: int, input: int, output: int, seed: int, host: bool) -> dict[str, Any]:
        """Where a batch's time goes: GPU kernels by name or, with `host`, Python functions of the engine's thread."""
        prompts = traffic.shared_prompts(requests, input, seed)

        async def by_function() -> tuple[dict[str, Any], str]:
            profiler = cProfile.Profile()
            profiler.enable()
            try:
                result = await traffic.batch(self.engine, self.clock, self.next_sessions(), prompts, output)
            finally:
                profiler.disable()
            text = io.StringIO()
            pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(45)
            return result, text.getvalue()

        if host:
            result, text = self.run(by_function())
            return {**result, "functions": text}
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            result = self.run(traffic.batch(self.engine, self.clock, self.next_sessions(), prompts, output))
        kernels = [
            (event.key[:110], int(event.count), round(event.self_device_time_total / 1e3, 3))
            for event in profiler.key_averages()
            if event.self_device_time_total > 0
        ]
        kernels.sort(key=lambda row: -row[2])
        return {**result, "device_ms": round(sum(row[2] for row in kernels), 2), "kernels": kernels[:40]}

    def workers(self) -> list[dict[str, Any]]:
        """What each ray worker sees: the switch, the pool's class and shape, the operators."""
        import ray

        def look(worker: Any) -> dict[str, Any]:
            import os

            states = worker.model_agent.state_cache_engine
            return {
                "switch": os.environ.get("LMDEPLOY_ENABLE_COMPACT_STATE"),
                "pool": type(states).__name__,
                "state_bytes": int(states.allocation.nbytes),
                "states": [list(cache.shape) for cache in states.named_state_caches.values()],
                "device": str(states.allocation.pools[0].tensor.device),
                "gpu": os.environ.get("CUDA_VISIBLE_DEVICES"),
            }

        found: list[dict[str, Any]] = ray.get([w.__ray_call__.remote(look) for w in self.engine.executor.workers])
        return found


def main() -> None:
    """`argv[1]` is the model, `argv[2]` a JSON object of settings of PytorchEngineConfig."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    # Whatever lmdeploy prints goes to the log.
    os.dup2(2, 1)

    def reply(kind: str, value: Any) -> None:
        replies.write(json.dumps({kind: value}) + "\n")

    try:
        engine = Engine(sys.argv[1], json.loads(sys.argv[2]))
        reply("ok", engine.ready())
        for line in sys.stdin:
            command = json.loads(line)
            try:
                reply("ok", getattr(engine, command.pop("do"))(**command))
            except Exception:
                reply("error", traceback.format_exc()[-4000:])
    except Exception:
        reply("error", traceback.format_exc()[-4000:])
    # The engine's threads are daemons of a pipeline that nobody asks any more.
    os._exit(0)


if __name__ == "__main__":
    main()
