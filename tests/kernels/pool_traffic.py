"""Random traffic over one pool by a compute stream and a transfer stream, and its comparison with a run without cache.

A compute stream runs conv + GDN and conv + KDA over the slots of a pool that is too small, with random delays. A second
stream stores checkpoints to pinned host memory and loads them back while the first goes on. Requests are cancelled in
every phase and preempted, steps fail, weights change, the pool sleeps and wakes. Freed slots are NaN. On a CPU the
same traffic runs with the reference operators; there fences pass late and transfers move their bytes at their end.
"""

from __future__ import annotations

import random
import time
from collections import deque

import torch

from compact_state.cute_kernels import Checkpoints
from compact_state.cute_kernels.reference import live_window
from compact_state.pool import (
    CapacityError,
    CheckpointIndex,
    CudaFence,
    Lifecycle,
    Phase,
    PrefixKey,
    StateIdTable,
    StatePool,
    StateRequest,
    StepPlan,
    StepRow,
)
from compact_state.pool.invariants import violations
from compact_state.pool.pool import POISON_BYTE
from tests.kernels.pool_traffic_model import HV, SIZE, VOCAB, WEIGHTS, Job, LateFence, Model, Run, make_trace
from tests.kernels.pool_traffic_store import INTERVAL, HostStore

CHUNK, DEPTH = 44, 3
TIME_LIMIT = 300.0
#: Error of a token's head relative to the larger of its own and the head's RMS. A wrong state is off by tenths.
ALLOWED = 0.1
#: RMS of all errors: two ways of running the same tokens, each within the tolerance of prefill (0.006).
ALLOWED_RMS = 0.012


class Traffic:
    """A scheduler and a store over one pool, driven by one seeded generator. `queued`: freed slots are filled with NaN
    in stream order without a wait, and slots are handed on at launch ("early"); else at the fence."""

    store_type = HostStore

    def __init__(self, device: str, requests: int, *, seed: int, queued: bool) -> None:
        self.rng = random.Random(seed)
        self.cuda, self.queued, self.requests = device == "cuda", queued, requests
        self.model = Model(torch.device(device), "kernels" if self.cuda else "reference")
        # Slots for less than the running requests and their checkpoints. A CPU works in smaller bites.
        self.slots, self.max_running, self.step_tokens = (18, 12, 240) if self.cuda else (10, 6, 100)
        self.storms = 1 if self.cuda else 4
        policy = "early" if queued else "late"
        self.pool = StatePool(
            self.model.layout, self.slots, device=device, poison_on_free=True, policy=policy, max_publishes_per_step=6
        )
        self.ledger = self.pool.ledger
        if queued:
            self.ledger.on_free = lambda slot: self.pool.memory[slot].fill_(POISON_BYTE)
        self.index = CheckpointIndex(self.ledger, max_ghosts=64)
        self.life = Lifecycle(self.ledger, self.index, self.pool)
        self.table = StateIdTable(self.max_running, device=device, depth=DEPTH)
        self.staging = torch.zeros(DEPTH, 4 * self.step_tokens, dtype=torch.int32, pin_memory=self.cuda)
        self.store = self.store_type(self)
        self.jobs = deque(make_trace(requests, self.rng))
        self.job_of: dict[int, Job] = {}
        self.waiting: deque[StateRequest] = deque()
        self.running: list[StateRequest] = []
        self.live: dict[int, Run] = {}
        self.runs: list[Run] = []
        self.outputs: list[list[torch.Tensor]] = [[] for _ in self.model.layers]
        self.rows_out = 0
        self.weights = 0
        self.faults: list[str] = []
        self.counts = dict.fromkeys(
            ("steps", "finished", "cancelled", "preempted", "failed", "weights", "sleeps", "puts", "loads"), 0
        )
        self.phases: set[str] = set()
        if self.cuda:
            self.compute = torch.cuda.Stream()
            torch.cuda.synchronize()

    # The loop

    def run(self) -> Traffic:
        if not self.cuda:
            self._run()
            return self
        with torch.cuda.stream(self.compute):
            self._run()
            torch.cuda.synchronize()
        return self

    def _run(self) -> None:
        began, turn = time.monotonic(), 0
        while self.jobs or self.waiting or self.running:
            assert time.monotonic() - began < TIME_LIMIT, f"no end after {turn} turns: {self.ledger.dump()}"
            self._turn(turn)
            turn += 1
        self._settle()
        self._end()

    def _turn(self, turn: int) -> None:
        rng = self.rng
        while self.jobs and len(self.waiting) < 12:
            job = self.jobs.popleft()
            self.job_of[job.number] = job
            self.waiting.append(self.life.add(job.number, PrefixKey(job.tokens[: job.prompt])))
        self.table.step_done(self.life.poll())
        self.store.progress()
        if rng.random() < 0.15:
            self._cancel(rng.choice([*self.waiting, *self.running]))
        if self.running and rng.random() < 0.1:
            self._preempt(rng.choice(self.running), publish=rng.random() < 0.7)
        if rng.random() < self.storms / 90:
            self._sleep()
        if rng.random() < self.storms / 60:
            self._new_weights()
        self.store.begin_loads()
        for request in [r for r in self.waiting if r.phase is Phase.LOADING and r.id % 11 == 3]:
            self._cancel(request)  # its state is on its way: chance alone may not meet one
        self._admit()
        if not self._step() and self.cuda:
            time.sleep(5e-5)
        self.store.begin_puts()
        if turn % 16 == 0:
            self.faults += violations(self.ledger, self.index)
        if turn % 32 == 0 and all(io.lease.kind == "put" for io in self.store.io):
            self._canaries()

    def _cancel(self, request: StateRequest) -> None:
        self.phases.add(request.phase.value if request.position == 0 else f"{request.phase.value} with state")
        self.life.cancel(request)
        self._forget(request)
        (self.running if request in self.running else self.waiting).remove(request)
        self.counts["cancelled"] += 1

    def _preempt(self, request: StateRequest, *, publish: bool) -> None:
        self.life.preempt(request, publish=publish)
        self.running.remove(request)
        self.waiting.appendleft(request)
        self._forget(request)
        self.counts["preempted"] += 1

    def _forget(self, request: StateRequest) -> None:
        self.live.pop(request.id, None)

    def _new_weights(self) -> None:
        self.life.new_weights()
        self.weights = (self.weights + 1) % WEIGHTS
        self.counts["weights"] += 1

    def _sleep(self) -> None:
        self.life.sleep(deadline_s=20.0, progress=self.store.progress)
        for request in self.running:
            self._forget(request)
        self.waiting.extendleft(self.running)
        self.running = []
        self.life.wake()
        self.counts["sleeps"] += 1

    def _admit(self) -> None:
        for request in list(self.waiting):
            if len(self.running) == self.max_running:
                return
            if request.phase is not Phase.WAITING:
                continue
            if not self.life.admit(request):
                return
            self.waiting.remove(request)
            self.running.append(request)
            run = self.live[request.id] = Run(self.job_of[request.id], [self.weights] * request.resumed)
            self.runs.append(run)
            if request.id % 61 == 7 and request.position == 0:  # between admission and the first step
                self._cancel(request)

    # Steps

    def _step(self) -> bool:
        rows = self._rows()
        while True:
            if not rows:
                return False
            try:
                plan = self.life.plan(rows)
                break
            except CapacityError:
                if not self.life.fences.wait_oldest():
                    gone = self.running[-1]
                    self._preempt(gone, publish=False)
                    rows = [row for row in rows if row.request is not gone]
        self.counts["steps"] += 1
        while len(self.life.fences) >= DEPTH:
            self.life.fences.wait_oldest()
        self.table.step_done(self.life.poll())
        if self.cuda and self.rng.random() < 0.3:
            torch.cuda._sleep(self.rng.randrange(4_000_000))  # up to 2 ms: several turns of the host
        failed = self.rng.random() < 0.02
        if failed:
            for slot in {*plan.write_ids, *plan.slots}:
                self.pool.memory[slot].fill_(POISON_BYTE)
        else:
            self._launch(rows, plan)
        fence = CudaFence("cuda") if self.cuda else LateFence(self.rng.randint(0, 3))
        self.life.launched(plan.step, fence)
        if failed:
            self._fail(plan.step)
        else:
            self._collect(rows)
        return True

    def _rows(self) -> list[StepRow]:
        """One-token rows first. Checkpoints are asked for at a grid that is no multiple of a chunk."""
        single: list[StepRow] = []
        pieces: list[StepRow] = []
        budget = self.step_tokens
        for request in self.running:
            count = min(len(request.key) - request.position, self.rng.randint(CHUNK // 3, CHUNK), budget)
            if count <= 0:
                continue
            budget -= count
            start = request.position
            first = start // INTERVAL * INTERVAL + INTERVAL
            row = StepRow(request, count, positions=list(range(first, start + count + 1, INTERVAL)))
            (single if count == 1 else pieces).append(row)
        return single + pieces

    def _launch(self, rows: list[StepRow], plan: StepPlan) -> None:
        zeros = [0] * len(rows)
        self.table.stage(plan.step, plan.read_ids, plan.write_ids, plan.positions, num_accepted=zeros, log_half=zeros)
        counts = [row.tokens for row in rows]
        index: list[int] = []
        for row, start in zip(rows, plan.positions):
            run = self.live[row.request.id]
            if len(run.weights) != start:
                self.faults.append(f"request {row.request.id} resumes at {start}, its state holds {len(run.weights)}")
            run.weights += [self.weights] * row.tokens
            run.pieces.append((start, row.tokens, self.rows_out))
            index += [self.weights * VOCAB + token for token in run.job.tokens[start : start + row.tokens]]
            self.rows_out += row.tokens
        singles = counts.count(1)
        bounds = [0]
        for count in counts[singles:]:
            bounds.append(bounds[-1] + count)
        first = plan.cu[singles]
        columns = self._columns(
            plan.step, index, bounds, [n - first for n in plan.cu[singles:]], plan.ends[first:], plan.slots[first:]
        )
        checkpoints = Checkpoints(*columns[2:]) if len(plan.ends) > first else None
        for number, layer in enumerate(self.model.layers):
            views = (self.pool.conv_view(number), self.pool.state_view(number))
            if singles:
                self.outputs[number].append(layer(columns[0][:singles], *views, self._ids(0, singles)))
            if singles < len(rows):
                ids = self._ids(singles, len(rows))
                self.outputs[number].append(layer(columns[0][singles:], *views, ids, columns[1], checkpoints))

    def _ids(self, first: int, last: int) -> tuple[torch.Tensor, ...]:
        table = self.table
        return tuple(ids[first:last] for ids in (table.read_ids, table.write_ids, table.positions))

    def _columns(self, step: int, *lists: list[int]) -> list[torch.Tensor]:
        """Lists to the device in one copy from this step's row of pinned memory."""
        flat: list[int] = []
        places = []
        for values in lists:
            places.append((len(flat), len(values)))
            flat += values + [0] * (-len(values) % 4)
        staging = self.staging[step % DEPTH, : len(flat)]
        staging.copy_(torch.tensor(flat, dtype=torch.int32))
        device = torch.empty(len(flat), dtype=torch.int32, device=self.model.device)
        device.copy_(staging, non_blocking=True)
        return [device[start : start + count] for start, count in places]

    def _collect(self, rows: list[StepRow]) -> None:
        rng = self.rng
        for row in rows:
            request, job = row.request, self.job_of[row.request.id]
            if request.position < len(request.key):
                continue
            if len(request.key) < len(job.tokens):
                self.life.extend(request, [job.tokens[len(request.key)]])
                if rng.random() < 0.1:
                    self.life.publish(request)
                continue
            self.running.remove(request)
            self._forget(request)
            self.life.finish(request, publish=rng.random() < 0.8)
            self.counts["finished"] += 1

    def _fail(self, step: int) -> None:
        self.counts["failed"] += 1
        for request in self.life.failed(step):
            self.running.remove(request)
            self.waiting.appendleft(request)
            self._forget(request)

    # Checks

    def _canaries(self) -> None:
        """Free slots are NaN from end to end. Waits for the compute stream."""
        slots = torch.tensor([rec.slot for rec in self.ledger.free], dtype=torch.int64, device=self.model.device)
        if bool((self.pool.memory[slots] != POISON_BYTE).any()):
            bad = [int(s) for s in slots if bool((self.pool.memory[s] != POISON_BYTE).any())]
            self.faults.append(f"free slots {bad} were written")

    def _settle(self) -> None:
        """Everything outstanding ends; then every slot is free or a checkpoint, and no lease is open."""
        self.life.fences.wait_all()
        while self.store.io:
            self.store.progress()
        ledger = self.ledger
        self.faults += violations(ledger, self.index)
        held = self.slots - len(ledger.free) - len(ledger.evictable)
        left = {"slots": held, "requests": len(ledger.holders), "leases": len(ledger.leases) + len(ledger.stuck)}
        if any(left.values()) or ledger.demand or self.life.requests:
            self.faults.append(f"held at the end: {left}\n{ledger.dump()}")

    def _end(self) -> None:
        self._check_records()
        self._canaries()
        self._check_outputs()
        changed = sum(found != int(expected) for found, expected in self.store.digests)
        if changed:
            self.faults.append(f"{changed} of {len(self.store.digests)} stored payloads are not what was published")
        self._new_weights()
        if len(self.ledger.free) != self.slots:
            self.faults.append(f"{self.slots - len(self.ledger.free)} slots leaked")
        self._canaries()
        if self.pool.copied_bytes:
            self.faults.append(f"{self.pool.copied_bytes} bytes were copied")

    def _check_records(self) -> None:
        """Stored payloads and cached slots hold the state after the tokens that their keys name."""
        records = list(self.store.kept)
        for entry in self.index.entries():
            records.append((self.pool.slot_bytes_of(entry.handle), self.store.rows_of(entry)))
        if not records:
            return
        actual, expected = (StatePool(self.model.layout, len(records), device=self.model.device) for _ in range(2))
        for number, (record, _) in enumerate(records):
            actual.memory[number].copy_(record)
        self.model.recompute([rows for _, rows in records], expected)
        here = self.model.column(list(range(len(records))))
        positions = self.model.column([len(rows) for _, rows in records])
        for layer in range(2):
            windows = [live_window(pool.conv_view(layer), here, positions) for pool in (actual, expected)]
            if not torch.equal(*windows):
                self.faults.append(f"layer {layer}: windows of checkpoints differ")
            self._compare(
                actual.state_view(layer).flatten(2), expected.state_view(layer).flatten(2), f"layer {layer}, states"
            )

    def _check_outputs(self) -> None:
        runs = [run for run in self.runs if run.pieces]
        base, took, wanted = 0, [], []
        for run in runs:
            for start, count, at in run.pieces:
                took += range(at, at + count)
                wanted += range(base + start, base + start + count)
            base += len(run.weights)
        expected = self.model.recompute([run.rows() for run in runs])
        for number in range(2):
            actual = torch.cat(self.outputs[number])[self.model.column(took)]
            compared = expected[number][self.model.column(wanted)]
            self._compare(
                actual.unflatten(1, (HV, SIZE)), compared.unflatten(1, (HV, SIZE)), f"layer {number}, outputs"
            )
        self.counts["compared"] = len(took)

    def _compare(self, actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        """`[N, HV, numbers]`, each head of each row by itself."""
        actual, expected = actual.float(), expected.float()
        size = expected.square().mean(-1).sqrt()
        head = size.square().mean(0, keepdim=True).sqrt()
        error = (actual - expected).square().mean(-1).sqrt()
        ratio = torch.nan_to_num(error / torch.maximum(size, head), nan=float("inf"))
        overall = float((error.square().mean(0) / head[0].square()).mean().sqrt())
        bad = int((ratio > ALLOWED).any(1).sum())
        if bad or not overall <= ALLOWED_RMS:
            self.faults.append(
                f"{what}: {bad} of {len(ratio)} wrong, worst {float(ratio.max()):.3g}, RMS {overall:.2e}"
            )
        self.counts[f"{what}: worst"] = float(ratio.max())
        self.counts[f"{what}: RMS"] = overall
