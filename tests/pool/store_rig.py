"""A pool, a lifecycle and a store connector over simulated requests: a state is a pattern of its exact prefix and rank."""

import hashlib
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from compact_state.pool import (
    CheckpointIndex,
    IndexEntry,
    Lifecycle,
    PrefixKey,
    StateLayout,
    StatePool,
    StateRequest,
    StepRow,
)
from compact_state.pool.invariants import check
from compact_state.pool.mooncake import StoreClient
from compact_state.pool.store import MooncakeStateStore
from compact_state.pool.store_keys import StoreIdentity
from compact_state.pool.store_transfer import StateTransfer
from compact_state.pool.store_types import StoreSettings

IDENTITY = StoreIdentity("toy model", "weights-1")
#: Limits for tests: quick to give up, quick to try again.
QUICK = StoreSettings(
    workers=2, put_deadline_s=5.0, get_deadline_s=5.0, find_deadline_s=5.0, breaker_cooldown_s=0.05, retry_after_s=0.05,
    remove_after_s=0.02,
)  # fmt: skip


def layout(value_heads: int = 2) -> StateLayout:
    """8,704 bytes a slot with two heads, about 4 KiB more per head."""
    return StateLayout.uniform(1, channels=64, value_heads=value_heads, key_dim=32, value_dim=32)


class Rig:
    """One engine. `memory` of all ranks holds patterns; `verified` counts the bytes that were compared."""

    def __init__(
        self,
        clients: Sequence[Any],
        *,
        slots: int = 6,
        settings: StoreSettings = QUICK,
        identity: StoreIdentity = IDENTITY,
        mode: str = "auto",
        heads: int = 2,
        device: str = "cpu",
        clock: Callable[[], float] = time.monotonic,
        wait_step: Callable[[int], None] | None = None,
        **ledger: Any,
    ) -> None:
        # One device fence stands for all ranks of this process.
        ledger.setdefault("fence_ranks", 1)
        options = {"device": device, "poison_on_free": True}
        first = StatePool(layout(heads), slots, ranks=len(clients), **options, **ledger)
        self.ledger = first.ledger
        self.pools = [first]
        for _ in clients[1:]:
            self.pools.append(StatePool(layout(heads), slots, ledger=first.ledger, **options))
        self.index = CheckpointIndex(self.ledger)
        self.life = Lifecycle(self.ledger, self.index, first)
        self.clients = [client if isinstance(client, StoreClient) else StoreClient(client) for client in clients]
        self.ports = [
            StateTransfer(pool, client, settings, mode=mode, clock=clock, wait_step=wait_step)
            for pool, client in zip(self.pools, self.clients)
        ]
        self.store = MooncakeStateStore(self.life, identity, self.ports, settings, clock=clock)
        self.weights = identity.weights
        self.verified = 0
        self._ids = itertools.count()

    # States

    def pattern(self, key: PrefixKey, position: int, rank: int) -> torch.Tensor:
        """What the state after `position` tokens looks like on a rank."""
        seed = f"{self.weights} {key.digest(position)} {position} {rank}".encode()
        size = self.pools[rank].slot_bytes
        return torch.frombuffer(bytearray(hashlib.shake_128(seed).digest(size)), dtype=torch.uint8)

    def fill(self, slot: int, key: PrefixKey, position: int) -> None:
        for rank, pool in enumerate(self.pools):
            assert pool.memory is not None
            pool.memory[slot] = self.pattern(key, position, rank)

    def verify(self, slot: int, key: PrefixKey, position: int) -> None:
        """Fails unless the slot holds exactly the state after `position` tokens of `key`, on every rank."""
        for rank, pool in enumerate(self.pools):
            assert pool.memory is not None
            assert torch.equal(pool.memory[slot].cpu(), self.pattern(key, position, rank)), f"wrong state, rank {rank}"
            self.verified += pool.slot_bytes

    # Requests

    def request(self, tokens: Sequence[int], **key: Any) -> StateRequest:
        return self.life.add(next(self._ids), PrefixKey(tokens, **key))

    def run(
        self, request: StateRequest, tokens: int, positions: Sequence[int] = (), *, fence: Any = None
    ) -> list[IndexEntry]:
        """One step of an admitted request: what it reads is verified, what it writes is the right pattern."""
        plan = self.life.plan([StepRow(request, tokens, positions)])
        start = plan.positions[0]
        if start:
            self.verify(plan.read_ids[0], request.key, start)
        self.fill(plan.write_ids[0], request.key, start + tokens)
        for end, slot in zip(plan.ends, plan.slots):
            self.fill(slot, request.key, start + end)
        self.life.launched(plan.step, fence or self.fence())
        self.life.poll()
        return plan.entries

    def fence(self) -> Any:
        """Comes after a step's writes; None: they are done when `run` queues it."""
        return None

    def checkpoint(self, tokens: Sequence[int], **key: Any) -> IndexEntry:
        """A finished request whose last state is a checkpoint."""
        request = self.request(tokens, **key)
        assert self.life.admit(request)
        self.run(request, len(request.key) - request.position)
        entry = self.life.finish(request)
        assert entry is not None
        return entry

    def resume(self, tokens: Sequence[int], positions: Sequence[int], **key: Any) -> int:
        """A request that asks the store first, then runs one step and ends. Returns the tokens it did not compute."""
        request = self.request(tokens, **key)
        self.store.find(request, positions)
        self.settle(lambda: not self.store.pending(request))
        assert self.life.admit(request)
        resumed = request.resumed
        self.run(request, len(request.key) - resumed)
        self.life.finish(request, publish=False)
        return resumed

    # The store

    def put(self, entry: IndexEntry) -> bool:
        """Puts a checkpoint and waits for the end. Whether it counts as stored."""
        self.store.put(entry)
        assert self.store.settle(20.0)
        return entry.stored

    def put_half_way(self, entry: IndexEntry) -> None:
        """Starts a put that stops in the middle until the gate of the fake store opens."""
        self.raw[0].gate.clear()
        self.store.put(entry)
        self.settle(self.raw[0].half_way.is_set)

    def find_half_way(self, tokens: Sequence[int], positions: Sequence[int]) -> StateRequest:
        """A request whose load stops in the middle until the gate of the fake store opens."""
        self.raw[0].gate.clear()
        request = self.request(tokens)
        self.store.find(request, positions)
        self.settle(self.raw[0].half_way.is_set)
        return request

    def settle(self, done: Callable[[], bool], timeout_s: float = 20.0) -> None:
        """Polls until `done()`."""
        limit = time.monotonic() + timeout_s
        while not done():
            assert time.monotonic() < limit, "the store connector does not settle"
            self.life.poll()
            self.store.poll()
            time.sleep(0.0005)

    def evict_all(self) -> None:
        """Un-indexes every checkpoint that nothing holds."""
        while self.ledger.evict_oldest():
            pass

    def check_idle(self) -> None:
        """Nothing in flight: every slot is free or a checkpoint, and every checkpoint holds its own state."""
        check(self.ledger, self.index)
        assert not self.ledger.leases
        assert not self.ledger.stuck
        held = self.ledger.num_slots - self.ledger.reserved - len(self.ledger.free) - self.ledger.quarantined
        assert held == self.index.size + len([h for h in self.ledger.holders.values() if h.owns])
        for entry in self.index.entries():
            self.verify(entry.handle.slot, entry.key, entry.position)

    def close(self) -> None:
        self.store.close(10.0)


PROMPT = list(range(20))


class Fence:
    def __init__(self):
        self.open = False

    def passed(self):
        return self.open

    def wait(self):
        self.open = True


def stored_by_another(make, ranks=1, positions=(10,), **options):
    """Puts states of PROMPT at `positions` into the store by an engine of its own."""
    rig = make(ranks, **options)
    for position in positions:
        assert rig.put(rig.checkpoint(PROMPT[:position]))
    return rig


def source_of_a_put_stays(store, prompt, heads):
    """The owner stands still in the middle of a put while the pool evicts the source and fills up."""
    rig = store.rig(slots=3, heads=heads)
    entry = rig.checkpoint(prompt[:10])
    store.mooncake.pause_owner(True)
    try:
        rig.store.put(entry)
        time.sleep(0.3)
        rig.store.poll()
        assert rig.ledger.puts_in_flight == 1
        rig.index.remove(entry)
        slot = entry.handle.slot
        for number in range(6):
            assert rig.checkpoint([number]).handle.slot != slot
    finally:
        store.mooncake.pause_owner(False)
    assert rig.store.settle(20)
    assert entry.stored
    rig.evict_all()
    assert len(rig.ledger.free) == 3
    assert store.rig(slots=3, heads=heads).resume(prompt, [10]) == 10
