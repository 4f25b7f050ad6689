"""Random traffic of two engines over one real Mooncake Store: 10,000 operations, with a fault every so often.

COMPACT_STATE_STORE_FAULTS sets the operations between two faults (default 300: every kind of fault three times). Every state
that a request resumes from is compared with the pattern of its exact prefix; at the end every slot is accounted for.
"""

import contextlib
import os
import random
import time
from collections import Counter
from dataclasses import replace

import pytest

from compact_state.pool import CapacityError, Phase, StateRequest
from compact_state.pool.invariants import check
from tests.pool.mooncake_fixture import DEVICES, LIVE, Cluster, cluster
from tests.pool.store_rig import Rig

pytestmark = pytest.mark.mooncake
OPS = 10_000
FAULT_EVERY = int(os.environ.get("COMPACT_STATE_STORE_FAULTS", "300"))
INTERVAL = 4
SETTINGS = replace(
    LIVE, put_deadline_s=1.0, get_deadline_s=1.0, find_deadline_s=0.5, retry_after_s=0.3, breaker_failures=3
)


class Engine:
    """One rig under random traffic."""

    def __init__(self, store: Cluster, rng: random.Random) -> None:
        self.rig: Rig = store.rig(slots=8, heads=63, settings=SETTINGS)
        self.rng, self.done = rng, Counter()
        self.waiting: list[StateRequest] = []
        self.running: list[StateRequest] = []

    def prompt(self) -> list[int]:
        """One of six families; prompts of a family share a prefix."""
        family, length = self.rng.randrange(6), self.rng.randrange(5, 30)
        return [family, *range(length)]

    def arrive(self) -> None:
        if len(self.waiting) < 6:
            request = self.rig.request(self.prompt())
            self.waiting.append(request)
            if self.rng.random() < 0.9:
                asked = self.rig.store.find(request, range(INTERVAL, len(request.key), INTERVAL))
                self.done["finds"] += asked

    def admit(self) -> None:
        for request in list(self.waiting):
            if len(self.running) == 4:
                return
            if request.phase is Phase.WAITING and not (self.rig.store.pending(request) and self.rng.random() < 0.95):
                if not self.rig.life.admit(request):
                    return
                self.waiting.remove(request)
                self.running.append(request)
                self.done["resumed"] += request.resumed > 0

    def step(self) -> None:
        if not self.running:
            return
        request = self.rng.choice(self.running)
        tokens = min(self.rng.randrange(1, 9), len(request.key) - request.position)
        if tokens <= 0:
            self.end(request)
            return
        start = request.position
        inside = [p for p in range(start + 1, start + tokens + 1) if p % INTERVAL == 0]
        try:
            entries = self.rig.run(request, tokens, inside)
        except CapacityError:
            self.end(request)
            return
        for entry in entries:
            self.done["puts"] += self.rig.store.put(entry)

    def end(self, request: StateRequest) -> None:
        self.running.remove(request)
        fate = self.rng.randrange(4)
        if fate == 0:
            self.rig.life.preempt(request)
            self.waiting.append(request)
        elif fate == 1:
            self.rig.life.cancel(request)
        else:
            entry = self.rig.life.finish(request)
            if entry is not None:
                self.rig.store.put(entry)

    def cancel(self) -> None:
        if self.waiting:
            self.rig.life.cancel(self.waiting.pop(self.rng.randrange(len(self.waiting))))

    def evict(self) -> None:
        self.rig.ledger.evict_oldest()
        if self.rng.random() < 0.3:
            self.rig.evict_all()

    def drop_all(self) -> None:
        for request in (*self.waiting, *self.running):
            self.rig.life.cancel(request)
        self.waiting.clear()
        self.running.clear()

    def act(self) -> None:
        action = self.rng.choices(
            (self.arrive, self.admit, self.step, self.cancel, self.evict), weights=(5, 4, 10, 1, 4)
        )[0]
        action()
        self.rig.life.poll()
        self.rig.store.poll()

    def settle(self) -> None:
        self.rig.settle(
            lambda: self.rig.store.settle(0.05) and not self.rig.ledger.leases and not self.rig.ledger.stuck
        )

    def rest(self) -> None:
        """Everything at its end: each slot is free or a checkpoint with its own state."""
        self.drop_all()
        self.settle()
        self.rig.check_idle()
        assert len(self.rig.ledger.free) + self.rig.index.size + self.rig.ledger.quarantined == 8


class Run:
    """Two engines, a store, and what may befall them."""

    def __init__(self, store: Cluster, seed: int) -> None:
        self.store, self.rng = store, random.Random(seed)
        self.engines = [Engine(store, self.rng) for _ in range(2)]
        self.faults: Counter[str] = Counter()
        self.generation = 0
        self.kinds = [
            self.corrupted, self.truncated, self.owner_killed, self.sleep, self.foreign, self.owner_stands_still,
            self.master_killed, self.new_weights, self.removed_by_force, self.short_pause, self.header_lost,
        ]  # fmt: skip

    def fault(self) -> None:
        kind = self.kinds[sum(self.faults.values()) % len(self.kinds)]
        self.faults[kind.__name__] += 1
        kind()

    def _change(self, change: object) -> None:
        with contextlib.suppress(OSError):
            keys = [key for key in self.store.mooncake.list_keys() if key.startswith("cs1:")]
            for key in self.rng.sample(keys, min(4, len(keys))):
                data = self.store.raw_get(key)
                if data:
                    with contextlib.suppress(AssertionError):  # an engine put the key again in between
                        self.store.replace(key, change(data))

    def corrupted(self) -> None:
        at = self.rng.randrange(64, 250_000)
        self._change(lambda data: data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])

    def truncated(self) -> None:
        self._change(lambda data: data[: self.rng.randrange(1, len(data))])

    def foreign(self) -> None:
        keys = self.store.mooncake.list_keys()
        other = self.store.raw_get(self.rng.choice(keys)) if keys else b"x" * 100
        self._change(lambda _: other or b"x" * 100)

    def header_lost(self) -> None:
        self._change(lambda data: bytes(64) + data[64:])

    def removed_by_force(self) -> None:
        """Under readers a forced remove hands them other bytes."""
        with self.store.side as raw:
            for key in self.store.mooncake.list_keys()[:8]:
                raw.remove(key, True)

    def short_pause(self) -> None:
        self.store.mooncake.pause_owner(True)
        for _ in range(10):
            self.act()
        self.store.mooncake.pause_owner(False)

    def owner_stands_still(self) -> None:
        """Longer than the deadlines: slots go into quarantine, and come back with the pool's next life."""
        self.store.mooncake.pause_owner(True)
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            self.act()
        self.store.mooncake.pause_owner(False)
        self.sleep()

    def owner_killed(self) -> None:
        self.store.mooncake.kill_owner()
        for _ in range(10):
            self.act()
        self.store.mooncake.start_owner()
        self.recover()

    def master_killed(self) -> None:
        self.store.mooncake.kill_master()
        for _ in range(10):
            self.act()
        self.store.mooncake.start_master()
        self.recover()

    def recover(self) -> None:
        """Until the store takes states again, by the engines' own puts."""
        limit = time.monotonic() + 30
        for engine in self.engines:
            engine.drop_all()
            while True:
                self.generation += 1
                engine.rig.evict_all()
                entry = engine.rig.checkpoint([100, self.generation])
                engine.rig.store.put(entry)
                engine.settle()
                if entry.stored:
                    break
                assert time.monotonic() < limit, "the store does not come back"
                time.sleep(0.1)

    def new_weights(self) -> None:
        self.generation += 1
        for engine in self.engines:
            engine.drop_all()
            engine.rig.life.new_weights()
            engine.rig.weights = f"weights-{self.generation}"
            engine.rig.store.new_weights(engine.rig.weights)

    def sleep(self) -> None:
        for engine in self.engines:
            engine.drop_all()
            engine.rig.life.sleep(deadline_s=20, progress=engine.rig.store.poll)
            engine.rig.store.poll()
            engine.rig.life.wake()
            engine.rig.store.poll()
            assert len(engine.rig.ledger.free) == 8

    def act(self) -> None:
        engine = self.rng.choice(self.engines)
        engine.act()
        if self.rng.random() < 0.3:
            time.sleep(0.001)


@DEVICES
@pytest.mark.timeout(600)
def test_random_traffic_with_faults(tmp_path, device):
    with cluster(tmp_path, device=device, segment_bytes=16 << 20) as store:
        run = Run(store, seed=OPS)
        begun = time.monotonic()
        for number in range(1, OPS + 1):
            run.act()
            if number % FAULT_EVERY == 0:
                run.fault()
                for engine in run.engines:
                    check(engine.rig.ledger, engine.rig.index)
        for engine in run.engines:
            engine.rest()
        done: Counter[str] = Counter()
        for engine in run.engines:
            done.update(engine.done)
            counters, ledger = engine.rig.store.counters, engine.rig.ledger.counters
            done.update(
                puts_stored=counters.puts_stored, gets_ok=counters.gets_ok, put_bytes=counters.put_bytes,
                get_bytes=counters.get_bytes, verified_bytes=engine.rig.verified, expired=counters.expired,
                keys_removed=counters.keys_removed,
                **{name: getattr(ledger, name) for name in ("e_miss", "e_io", "e_data", "e_stuck", "e_capacity")},
            )  # fmt: skip
            assert ledger.puts == engine.rig.ledger._next_op - 1 - ledger.gets
            assert ledger.e_invariant == 0
        print(f"\n{OPS} operations, {sum(run.faults.values())} faults, {time.monotonic() - begun:.0f} s")
        print(dict(run.faults))
        print(dict(done))
        assert len(run.faults) == len(run.kinds)
        assert done["puts_stored"] > OPS // 50
        assert done["gets_ok"] > OPS // 100
        assert done["e_data"] + done["e_miss"] > 0
