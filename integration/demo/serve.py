"""The server: continuous batching over one state pool. Restores by reading ids, publishes by handing slots over."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ...cute_kernels import Checkpoints
from ...cute_kernels.state_ids import advance_state_ids
from ...pool import (
    CapacityError,
    CheckpointIndex,
    CudaFence,
    IndexEntry,
    Lifecycle,
    Phase,
    PrefixKey,
    StateIdTable,
    StatePool,
    StateRequest,
    StepPlan,
    StepRow,
)
from .model import Batch, ToyModel
from .timeline import Timeline
from .trace import TraceRequest


@dataclass(frozen=True)
class ServeSettings:
    """Limits of the server. The checkpoint interval is no multiple of a chunk: checkpoints end chunks early.

    A resumed request starts on a multiple of the interval or at the end of an answer, so chunks begin anywhere. Every
    `preempt_every` steps the youngest running request is preempted, as a server short of KV memory does.
    """

    num_slots: int = 20
    max_running: int = 24
    chunk: int = 88
    step_tokens: int = 280
    interval: int = 40
    preempt_every: int = 12


@dataclass
class Served:
    """What became of one request. `pieces`: (first position, hidden states) of every stretch it computed."""

    request: TraceRequest
    tokens: list[int]
    prompt: int = 0
    pieces: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    resumed: list[int] = field(default_factory=list)
    cancelled: bool = False
    preempted: int = 0

    @property
    def computed(self) -> int:
        """Tokens that went through the model for it."""
        return sum(len(hidden) for _, hidden in self.pieces)


class Server:
    """Serves a trace to its end. `served` has one entry a request that arrived."""

    def __init__(self, model: ToyModel, trace: list[TraceRequest], settings: ServeSettings) -> None:
        self.model, self.settings = model, settings
        self.pool = StatePool(model.layout, settings.num_slots, device=model.device, poison_on_free=True)
        self.index = CheckpointIndex(self.pool.ledger)
        self.life = Lifecycle(self.pool.ledger, self.index, self.pool)
        self.table = StateIdTable(settings.max_running, device=model.device)
        self.timeline = Timeline(self.pool.ledger, self.index)
        self.served: dict[int, Served] = {}
        self.waits = 0
        self.published = 0
        self.steps = 0
        self.tracked_steps = 0
        self._future = deque(trace)
        self._blocked: list[TraceRequest] = []
        self._waiting: deque[StateRequest] = deque()
        self._running: list[StateRequest] = []
        self._arrived: dict[int, int] = {}
        #: Request of each row of the last step; None once it gave its state up.
        self._last_rows: list[object] = []

    def run(self, advance: Callable[[int], None]) -> None:
        """Runs until every request has ended; `advance(n)` is called with the number of requests that just ended."""
        ended = 0
        while self._future or self._blocked or self._waiting or self._running:
            self._arrive()
            self._cancel()
            if self.steps % self.settings.preempt_every == self.settings.preempt_every - 1 and self._running:
                self._preempt()
            self._admit()
            rows = self._rows()
            if rows:
                self._step(rows)
            self.steps += 1
            now = sum(number in self._finished for number in self.served)
            advance(now - ended)
            ended = now

    @property
    def _finished(self) -> set[int]:
        live = {request.id for request in (*self._waiting, *self._running)}
        return {number for number in self.served if number not in live}

    def _arrive(self) -> None:
        while self._future and self._future[0].arrival <= self.steps:
            self._blocked.append(self._future.popleft())
        finished = self._finished
        for request in [r for r in self._blocked if r.parent is None or r.parent in finished]:
            self._blocked.remove(request)
            before = list(request.prefix) if request.parent is None else list(self.served[request.parent].tokens)
            tokens = before + list(request.tail)
            self.served[request.number] = Served(request, tokens, prompt=len(tokens))
            self._arrived[request.number] = self.steps
            self._waiting.append(self.life.add(request.number, PrefixKey(tokens)))

    def _cancel(self) -> None:
        for request in [*self._waiting, *self._running]:
            served = self._served(request)
            after = served.request.cancel_after
            if after is not None and self.steps - self._arrived[served.request.number] >= after:
                served.cancelled = True
                (self._running if request.phase is Phase.RUNNING else self._waiting).remove(request)
                self.life.cancel(request)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.settings.max_running:
            request = self._waiting[0]
            if not self._ready(request):
                return
            if not self.life.admit(request):
                self.waits += 1
                return
            self._running.append(self._waiting.popleft())
            self._served(request).resumed.append(request.resumed)

    def _ready(self, request: StateRequest) -> bool:
        """Whether an arrived request may be admitted; a server with a store waits for its answer here."""
        return True

    def _served(self, request: StateRequest) -> Served:
        assert isinstance(request.id, int)
        return self.served[request.id]

    def _step(self, rows: list[StepRow]) -> None:
        while True:
            try:
                plan = self.life.plan(rows)
                break
            except CapacityError:
                if self.life.fences.wait_oldest():
                    continue
                gone = self._preempt()
                rows = [row for row in rows if row.request is not gone]
                if not rows:
                    return
        self.published += len(plan.entries)
        self.timeline.record(len(self._running))
        hidden = self._launch(rows, plan)
        fence = CudaFence(self.model.device) if self.model.device.type == "cuda" else None
        self.life.launched(plan.step, fence)
        self._collect(rows, plan, hidden)
        self.table.step_done(self.life.poll())

    def _rows(self) -> list[StepRow]:
        """Rows with one token first, then pieces of prompts within the step's token budget."""
        settings, budget = self.settings, self.settings.step_tokens
        single: list[StepRow] = []
        pieces: list[StepRow] = []
        for request in self._running:
            left = len(request.key) - request.position
            count = min(left, settings.chunk, budget)
            if count <= 0:
                continue
            budget -= count
            first = request.position // settings.interval * settings.interval + settings.interval
            row = StepRow(request, count, positions=list(range(first, request.position + count + 1, settings.interval)))
            (single if count == 1 else pieces).append(row)
        return single + pieces

    def _preempt(self) -> StateRequest:
        """Gives up the youngest running request; it waits for admission again, in front."""
        request = self._running.pop()
        self._served(request).preempted += 1
        self.published += self.life.preempt(request) is not None
        self._waiting.appendleft(request)
        self._last_rows = [None if number == request.id else number for number in self._last_rows]
        return request

    def _launch(self, rows: list[StepRow], plan: StepPlan) -> list[torch.Tensor]:
        """Runs one-token rows through decode and the others through prefill; hidden states of each row."""
        table, device = self.table, self.model.device
        self._stage(rows, plan)
        counts = [row.tokens for row in rows]
        tokens = [self._next_tokens(row) for row in rows]
        singles = counts.count(1)
        results: list[torch.Tensor] = []
        for part in (slice(0, singles), slice(singles, len(rows))):
            if part.start == part.stop:
                continue
            packed = torch.tensor([token for row in tokens[part] for token in row], device=device)
            ids = (table.read_ids[part], table.write_ids[part], table.positions[part])
            batch = Batch(*ids) if part.start == 0 and singles else self._prefill_batch(ids, counts[part], plan, part)
            results += torch.split(self.model.forward(packed, self.pool, batch), counts[part])
        progress = torch.tensor(counts, dtype=torch.int32, device=device)
        used = slice(0, len(rows))
        advance_state_ids(
            table.read_ids[used],
            table.write_ids[used],
            table.positions[used],
            num_slots=self.pool.num_slots,
            num_tokens=progress,
            backend=self.model.backend,
        )
        return results

    def _stage(self, rows: list[StepRow], plan: StepPlan) -> None:
        """Ids to the device. Rows that all took part in the last step find their positions there already."""
        ids = [row.request.id for row in rows]
        tracked = bool(self._last_rows) and all(number in self._last_rows for number in ids)
        if tracked:
            sources = [self._last_rows.index(number) for number in ids]
            self.table.stage(plan.step, plan.read_ids, plan.write_ids, sources=sources)
            self.tracked_steps += 1
            found = self.table.positions[: len(ids)].tolist()
            if found != plan.positions:
                raise AssertionError(f"positions tracked on the device are {found}, the ledger's are {plan.positions}")
        else:
            self.table.stage(plan.step, plan.read_ids, plan.write_ids, plan.positions)
        self._last_rows = list(ids)

    def _next_tokens(self, row: StepRow) -> list[int]:
        # The plan has moved the request on: its position is the end of this row.
        end = row.request.position
        return self._served(row.request).tokens[end - row.tokens : end]

    def _prefill_batch(
        self, ids: tuple[torch.Tensor, torch.Tensor, torch.Tensor], counts: list[int], plan: StepPlan, part: slice
    ) -> Batch:
        def column(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.model.device)

        bounds = torch.tensor([0, *counts]).cumsum(0).to(self.model.device, torch.int32)
        first = plan.cu[part.start]
        if plan.cu[part.stop] == first:
            return Batch(*ids, cu_seqlens=bounds)
        cu = [entry - first for entry in plan.cu[part.start : part.stop + 1]]
        checkpoints = Checkpoints(cu=column(cu), ends=column(plan.ends[first:]), slots=column(plan.slots[first:]))
        return Batch(*ids, cu_seqlens=bounds, checkpoints=checkpoints)

    def _collect(self, rows: list[StepRow], plan: StepPlan, hidden: list[torch.Tensor]) -> None:
        last = torch.stack([row_hidden[-1] for row_hidden in hidden])
        sampled = self.model.logits(last).argmax(-1).tolist()
        for row, start, row_hidden, token in zip(rows, plan.positions, hidden, sampled):
            request, served = row.request, self._served(row.request)
            served.pieces.append((start, row_hidden))
            if request.position < len(request.key):
                continue
            served.tokens.append(token)
            self.life.extend(request, [token])
            if len(served.tokens) - served.prompt >= served.request.answer:
                self._running.remove(request)
                self.published += self.life.finish(request) is not None

    def checkpoints(self) -> list[IndexEntry]:
        """Checkpoints that are still cached."""
        return list(self.index.entries())
