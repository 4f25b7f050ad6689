"""The store of the random traffic: checkpoints go to host memory, and come back, on a second stream."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from compact_state.pool import IndexEntry, IoLease, Phase
from compact_state.pool.prefix import TOKEN_BYTES
from tests.kernels.pool_traffic_model import VOCAB

if TYPE_CHECKING:
    from tests.kernels.pool_traffic import Traffic

INTERVAL = 20  # checkpoints are asked for at this grid, which is no multiple of a chunk
PINNED = 24  # host buffers
KEPT = 24  # stored payloads that are compared with a recomputation


class Transfer:
    """One copy between a slot and a host buffer on the transfer stream; on a CPU it happens at its end."""

    def __init__(self, store: HostStore, target: torch.Tensor, source: torch.Tensor, after: object = None) -> None:
        self.polls, self.target, self.source = store.traffic.rng.randint(1, 6), target, source
        self.event = None
        if store.traffic.cuda:
            with torch.cuda.stream(store.stream):
                if after is not None:
                    store.stream.wait_event(after)
                if store.traffic.rng.random() < 0.7:
                    torch.cuda._sleep(store.traffic.rng.randrange(3_000_000))
                target.copy_(source, non_blocking=True)
                self.event = torch.cuda.Event()
                self.event.record(store.stream)

    def done(self) -> bool:
        if self.event is not None:
            return self.event.query()
        self.polls -= 1
        if self.polls == 0:
            self.target.copy_(self.source)
        return self.polls <= 0


@dataclass
class Io:
    lease: IoLease
    buffer: int
    transfer: Transfer | None = None
    name: tuple[int, str] | None = None
    rows: list[int] = field(default_factory=list)
    digest: torch.Tensor | None = None
    event: object = None
    ok: bool = True


class HostStore:
    """Host buffers by weights and prefix, and the transfers between them and the slots of `traffic`'s pool."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        size = traffic.pool.slot_bytes
        self.host = torch.zeros(PINNED, size, dtype=torch.uint8, pin_memory=traffic.cuda)
        numbers = torch.randint(-(2**62), 2**62, (size // 8,), generator=torch.Generator())
        self.factors = (numbers | 1, (numbers | 1).to(traffic.model.device))
        self.io: list[Io] = []
        self.free_buffers = list(range(PINNED))
        self.stored: dict[tuple[int, str], tuple[int, list[int]]] = {}
        self.digests: list[tuple[int, torch.Tensor]] = []
        self.kept: list[tuple[torch.Tensor, list[int]]] = []
        if traffic.cuda:
            self.stream = torch.cuda.Stream()

    def begin_puts(self) -> None:
        if self.traffic.rng.random() > 0.5 or self.traffic.ledger.mode != "run":
            return
        fresh = [entry for entry in self.traffic.index.entries() if not entry.stored]
        if not fresh or not (self.free_buffers or self._drop_stored()):
            return
        entry = self.traffic.rng.choice(fresh)
        lease = self.traffic.life.begin_put(entry)
        if lease is None:
            return
        entry.stored = True
        # Queued behind the kernels that made the checkpoint: what the transfer has to find, whenever it looks.
        digest = self._digest(self.traffic.pool.memory[lease.handle.slot], self.factors[1])
        io = Io(lease, self.free_buffers.pop(), name=(self.traffic.ledger.epoch, entry.digest()), digest=digest)
        io.ok = self.traffic.rng.random() < 0.95
        io.rows = self.rows_of(entry)
        self.io.append(io)

    def rows_of(self, entry: IndexEntry) -> list[int]:
        text = entry.key.slice(0, entry.position)
        tokens = (int.from_bytes(text[at : at + TOKEN_BYTES], "little") for at in range(0, len(text), TOKEN_BYTES))
        return [self.traffic.weights * VOCAB + token for token in tokens]

    def _drop_stored(self) -> bool:
        used = {io.buffer for io in self.io}
        for name, (buffer, _) in self.stored.items():
            if buffer not in used:
                del self.stored[name]
                self.free_buffers.append(buffer)
                return True
        return False

    def begin_loads(self) -> None:
        if self.traffic.rng.random() > 0.5:
            return
        for request in self.traffic.waiting:
            if request.phase is not Phase.WAITING:
                continue
            near = self.traffic.index.lookup(request.key).position
            for position in range((len(request.key) - 1) // INTERVAL * INTERVAL, near, -INTERVAL):
                found = self.stored.get((self.traffic.ledger.epoch, request.key.digest(position)))
                if found is None:
                    continue
                lease = self.traffic.life.begin_load(request, position)
                if lease is not None and all(io.lease is not lease for io in self.io):
                    io = Io(lease, found[0], ok=self.traffic.rng.random() < 0.9)
                    if self.traffic.cuda and self.traffic.queued:
                        # The slot's fill with NaN may still be queued on the compute stream.
                        io.event = torch.cuda.Event()
                        io.event.record(self.traffic.compute)
                    self.io.append(io)
                break

    def progress(self) -> None:
        """Starts transfers whose fence has passed and takes in those that are done."""
        self.traffic.life.poll()
        for io in list(self.io):
            lease = io.lease
            put = lease.kind == "put"
            if io.transfer is None:
                if lease.revoked:
                    self.io.remove(io)
                    self.free_buffers.append(io.buffer)
                    self.traffic.ledger.put_end(lease.op, ok=False)
                elif self.traffic.ledger.may_start(lease):
                    slot, host = self.traffic.pool.memory[lease.handle.slot], self.host[io.buffer]
                    io.transfer = Transfer(self, host if put else slot, slot if put else host, io.event)
            elif io.transfer.done():
                self.io.remove(io)
                self._end_put(io) if put else self._end_load(io)

    def _end_put(self, io: Io) -> None:
        found = int(self._digest(self.host[io.buffer], self.factors[0]))
        if not io.lease.revoked:
            self.digests.append((found, io.digest))
        outcome = self.traffic.ledger.put_end(io.lease.op, ok=io.ok)
        if outcome is None or not outcome.ok:
            self.free_buffers.append(io.buffer)
            return
        self.traffic.counts["puts"] += 1
        if len(self.kept) < KEPT:
            self.kept.append((self.host[io.buffer].clone(), io.rows))
        if io.name in self.stored:
            self.free_buffers.append(io.buffer)
        else:
            self.stored[io.name] = (io.buffer, io.rows)

    def _end_load(self, io: Io) -> None:
        outcome = self.traffic.life.end_load(io.lease.op, ok=io.ok)
        self.traffic.counts["loads"] += outcome is not None and outcome.ok

    @staticmethod
    def _digest(record: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """A number that any change of the record's bytes changes, all but surely; the same on every device."""
        return (record.view(torch.int64) * factors).sum()
