"""One pool under two streams: 2,000 requests whose outputs equal a run without cache, bugs planted to be noticed, and a
profiler trace of a publish and a restore that holds no copy.

COMPACT_STATE_STREAM_REQUESTS: requests of a run on the GPU (2,000).
"""

from __future__ import annotations

import json
import os
import random
import time

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from compact_state.cute_kernels import Checkpoints
from compact_state.pool import CheckpointIndex, CudaFence, Lifecycle, PrefixKey, StateIdTable, StatePool, StepRow
from tests.kernels.pool_traffic import Traffic
from tests.kernels.pool_traffic_model import VOCAB, WEIGHTS, Model
from tests.kernels.pool_traffic_store import HostStore

REQUESTS = int(os.environ.get("COMPACT_STATE_STREAM_REQUESTS", "2000"))


def check(traffic: Traffic) -> None:
    counters, counts, requests = traffic.ledger.counters, traffic.counts, traffic.requests
    print({**counts, "runs": len(traffic.runs), "phases": sorted(traffic.phases), "counters": counters})
    assert not traffic.faults, "\n".join(traffic.faults[:20])
    assert counts["finished"] + counts["cancelled"] == requests
    assert counts["finished"] > 0.6 * requests
    named = ["publishes", "exports", "hits", "evictions", "puts_ok", "rows_moved"]
    if requests >= 1000:
        named.append("gets_ok")
        assert all(counts[name] for name in ("failed", "weights", "sleeps", "preempted"))
        assert traffic.phases >= {"waiting", "loading", "running", "running with state"}
    assert all(getattr(counters, name) for name in named)


POLICIES = pytest.mark.parametrize("queued", [False, True], ids=["late", "early"])


@pytest.mark.gpu
@POLICIES
def test_two_streams_give_what_a_run_without_cache_gives(queued):
    began = time.monotonic()
    check(Traffic("cuda", REQUESTS, seed=4, queued=queued).run())
    print(f"{time.monotonic() - began:.1f} s")


@POLICIES
def test_the_same_traffic_on_a_cpu(queued):
    check(Traffic("cpu", 40, seed=5, queued=queued).run())


class ReadsTheWrongSlot(Traffic):
    """Now and then two rows read each other's slots."""

    noticed = ("outputs",)

    def _launch(self, rows, plan):
        if plan.step % 4 == 0:
            plan.read_ids.reverse()
        super()._launch(rows, plan)


class ForgetsNewWeights(Traffic):
    """Checkpoints of the old weights stay in the cache: a request resumes from one, or they are there at the end."""

    noticed = ("outputs", "states")

    def _new_weights(self):
        self.weights = (self.weights + 1) % WEIGHTS


class EndsLeasesAtTheirStart(Traffic):
    """A stored slot may be written while the transfer still reads it."""

    noticed = ("stored payloads",)

    class store_type(HostStore):
        def begin_puts(self):
            before = len(self.io)
            super().begin_puts()
            for io in self.io[before:]:
                self.traffic.ledger.put_end(io.lease.op, ok=True)


class StartsBeforeTheFence(Traffic):
    """Transfers look at a slot before the kernels that fill it have run."""

    noticed = ("stored payloads",)

    class store_type(HostStore):
        def begin_puts(self):
            super().begin_puts()
            self.progress()

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.ledger.may_start = lambda lease: True

    def _launch(self, rows, plan):
        torch.cuda._sleep(40_000_000)  # 20 ms: a busy host still queues the transfer while the kernels wait
        super()._launch(rows, plan)


def planted(device: str, bug: type[Traffic], requests: int) -> None:
    faults = bug(device, requests, seed=7, queued=True).run().faults
    assert any(word in fault for word in bug.noticed for fault in faults), faults


@pytest.mark.gpu
@pytest.mark.parametrize(
    "bug",
    [ReadsTheWrongSlot, ForgetsNewWeights, EndsLeasesAtTheirStart, StartsBeforeTheFence],
    ids=lambda c: c.__name__,
)
def test_planted_bugs_are_noticed(bug):
    planted("cuda", bug, 300)


@pytest.mark.parametrize(
    "bug", [ReadsTheWrongSlot, ForgetsNewWeights, EndsLeasesAtTheirStart], ids=lambda c: c.__name__
)
def test_planted_bugs_are_noticed_on_a_cpu(bug):
    planted("cpu", bug, 30)


class Prefix:
    """One request after another over a pool: each computes its prompt in one call and leaves its states cached."""

    def __init__(self, device: str) -> None:
        self.model = Model(torch.device(device), "kernels" if device == "cuda" else "reference")
        self.pool = StatePool(self.model.layout, 8, device=device)
        self.life = Lifecycle(self.pool.ledger, CheckpointIndex(self.pool.ledger), self.pool)
        self.table = StateIdTable(1, device=device, depth=1)

    def serve(self, name: int, tokens: list[int]) -> int:
        """Publishes a checkpoint inside the prompt and one at its end; returns the tokens that were restored."""
        model, life, table = self.model, self.life, self.table
        request = life.add(name, PrefixKey(tokens))
        assert life.admit(request)
        resumed = request.resumed
        count = len(tokens) - resumed
        plan = life.plan([StepRow(request, count, positions=[resumed + count // 2, len(tokens)])])
        assert len(plan.entries) == 2
        table.stage(plan.step, plan.read_ids, plan.write_ids, plan.positions, num_accepted=[0], log_half=[0])
        index, bounds = model.rows(tokens[resumed:]), model.column([0, count])
        checkpoints = Checkpoints(model.column(plan.cu), model.column(plan.ends), model.column(plan.slots))
        for number, layer in enumerate(model.layers):
            views = (self.pool.conv_view(number), self.pool.state_view(number))
            layer(index, *views, (table.read_ids, table.write_ids, table.positions), bounds, checkpoints)
        life.launched(plan.step, CudaFence("cuda") if self.pool.device.type == "cuda" else None)
        life.fences.wait_all()
        table.step_done(life.poll())
        life.finish(request)
        return resumed

    def publish_and_restore(self, seed: int) -> None:
        """A prompt whose states are published, then one that resumes from the last of them."""
        counters = self.pool.ledger.counters
        before = (counters.publishes, counters.exports, counters.hits)
        rng = random.Random(seed)
        tokens = [rng.randrange(VOCAB) for _ in range(61)]
        assert self.serve(2 * seed, tokens) == 0
        assert self.serve(2 * seed + 1, [*tokens, 1, 2, 3, 4, 5]) == len(tokens)
        after = (counters.publishes, counters.exports, counters.hits)
        assert [b - a for a, b in zip(before, after)] == [2, 2, 1]
        assert self.pool.copied_bytes == 0


def on_the_device(prof: profile, path: str) -> list[tuple[str, str, int]]:
    """(category, name, bytes) of everything in a trace that ran on the device."""
    prof.export_chrome_trace(path)
    with open(path) as file:
        events = json.load(file)["traceEvents"]
    return [
        (event["cat"], event["name"], int(event["args"].get("bytes", 0)))
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]


def payload_copies(events: list[tuple[str, str, int]]) -> list[str]:
    """Copies between places on the device, by the copy engine or by a kernel of torch."""
    return [
        name
        for category, name, _ in events
        if "DtoD" in name or (category == "kernel" and "cutlass" not in name and "copy" in name.lower())
    ]


def test_publish_and_restore_count_no_copied_byte():
    Prefix("cpu").publish_and_restore(1)


@pytest.mark.gpu
def test_publish_and_restore_leave_no_copy_in_a_trace(tmp_path):
    prefix = Prefix("cuda")
    prefix.publish_and_restore(1)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with profile(activities=activities) as prof:
        prefix.publish_and_restore(2)
        torch.cuda.synchronize()
    events = on_the_device(prof, str(tmp_path / "trace.json"))
    print(sorted({(category, name[:80]) for category, name, _ in events}))
    assert sum(category == "kernel" for category, _, _ in events) >= 8, "the profiler saw no kernels"
    assert payload_copies(events) == []
    # Ids and token numbers come from the host: together nothing like a slot.
    assert sum(size for category, _, size in events if category == "gpu_memcpy") < prefix.pool.slot_bytes // 100
    # The same look at a trace with one copied slot finds it.
    with profile(activities=activities) as prof:
        prefix.pool.memory[0].copy_(prefix.pool.memory[1])
        torch.cuda.synchronize()
    assert payload_copies(on_the_device(prof, str(tmp_path / "control.json")))
