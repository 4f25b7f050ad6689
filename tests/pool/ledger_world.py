"""A world around the real ledger: an in-order device queue that runs late, transfers in two halves, a store that commits
by itself, new weights, failed steps, sleep. A premature reuse shows as a wrong value. The searches in test_model.py drive
it by `actions` and `do`, which checks every property after each action.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from tests.pool.ledger_state import GARBAGE, Entry, Op, Request, Transfer, Value, Violation, WorldState


class World(WorldState):
    """What may happen next, what it does, and what must hold after it."""

    # Actions

    def actions(self) -> list[tuple[Any, ...]]:
        """Everything that may happen next."""
        found: list[tuple[Any, ...]] = []
        for name in range(self.names):
            request = self.running.get(name)
            if request is None:
                found.append(("admit", name))
                if self.longest(name) is not None:
                    found.append(("hit", name))
                continue
            found.append(("drop", name))
            if request.holder.owns:
                found += [("publish", name), ("finish", name), ("misplaced publish", name)]
        if len(self.queue) < self.max_queue:
            ready = [name for name, r in self.running.items() if (r.value or (0, 0, 0))[2] < self.max_position]
            found += [("step", (name,), False) for name in ready]
            found += [("step", (name,), True) for name in ready if self.position(name) + 2 <= self.max_position]
            if len(ready) > 1:
                found.append(("step", tuple(sorted(ready)), False))
            found.append(("abandon",))
        if self.queue:
            found.append(("execute",))
        found += [("fence", rank) for rank, seen in enumerate(self.reported) if seen < self.executed]
        if self.queue and not self.queue[0].failed and self.failures < 1:
            found.append(("fail",))
        if self.ledger.evictable:
            found.append(("evict",))
        found += [("unindex", key) for key in sorted(self.index)[:1]]
        if self.put is None:
            found += [("put", key) for key in sorted(self.index)[:2]]
        else:
            found += self.transfer_actions("put", self.put)
        if self.get is None:
            wanted = [key for key in sorted(self.store) if key[1] == self.ledger.epoch and key not in self.index]
            found += [("get", key) for key in wanted[:2]]
        else:
            found += self.transfer_actions("get", self.get)
            if not self.get.lease.cancelled:
                found.append(("cancel get",))
        found += [("stuck half", number) for number, t in enumerate(self.stuck) if self.movable(t)]
        found += [("stuck end", number) for number in range(len(self.stuck))]
        if (self.put or self.get) and len(self.stuck) < 1:
            found.append(("expire",))
        if self.ledger.epoch < self.max_epoch:
            found.append(("reload",))
        if self.sleeps < 1:
            found.append(("sleep",))
        return found

    def transfer_actions(self, kind: str, transfer: Transfer) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = [(kind + " half",)] if self.movable(transfer) else []
        ranks = [rank for rank in range(self.ledger.ranks) if transfer.lease.pending >> rank & 1]
        found += [(kind + " end", rank, False) for rank in ranks]
        if transfer.halves == 2:
            found += [(kind + " end", rank, True) for rank in ranks]
        return found

    def do(self, action: tuple[Any, ...]) -> None:
        """Carries one action out and checks every invariant. A refusal of the pool is no violation."""
        errors = self.errors
        handler: Callable[..., None] = getattr(self, "do_" + action[0].replace(" ", "_"))
        try:
            handler(*action[1:])
        except errors.CapacityError:
            if self.ledger._planned:
                self.ledger.abandon(self.ledger._planned)
        except errors.InvariantError as error:
            raise Violation(f"{action}: {error}") from error
        except (IndexError, KeyError, TypeError, AttributeError) as error:
            raise Violation(f"{action}: the ledger broke down: {error!r}") from error
        self.check()

    def do_admit(self, name: int) -> None:
        self.running[name] = Request(self.ledger.admit(name))

    def do_hit(self, name: int) -> None:
        self.do_admit(name)
        entry = self.longest(name)
        assert entry is not None
        request = self.running[name]
        self.ledger.hit(request.holder, entry.handle)
        request.value = entry.key

    def do_drop(self, name: int) -> None:
        self.ledger.drop(self.running.pop(name).holder)

    def do_publish(self, name: int) -> None:
        request = self.running[name]
        self.cache(request, lambda entry: self.ledger.publish(request.holder, self.position(name), entry))

    def do_finish(self, name: int) -> None:
        request, position = self.running[name], self.position(name)
        if request.value in self.index:
            self.ledger.drop(self.running.pop(name).holder)
            return
        del self.running[name]
        self.cache(request, lambda entry: self.ledger.publish_final(request.holder, position, entry))

    def cache(self, request: Request, give: Callable[[Entry], Any]) -> None:
        """What the index does: one entry per key, visible once the ledger has agreed."""
        assert request.value is not None
        if request.value in self.index:
            return
        entry = Entry(request.value)
        entry.handle = give(entry)
        if entry.handle is not None:
            if request.value[0] != "state":
                raise Violation(f"I10 a state of mixed weights was published: {request.value}")
            self.index[entry.key] = entry

    def do_misplaced_publish(self, name: int) -> None:
        try:
            self.ledger.publish(self.running[name].holder, self.position(name) + 1, Entry(GARBAGE))
        except self.errors.InvariantError:
            return
        raise Violation("I9 a state was published at a position where it does not stand")

    def do_abandon(self) -> None:
        step = self.ledger.begin_step()
        self.ledger.alloc_besteffort(step)
        self.ledger.abandon(step)

    def do_step(self, names: tuple[int, ...], export: bool) -> None:
        ledger, count = self.ledger, 2 if export else 1
        holders = [self.running[name].holder for name in names]
        step = ledger.begin_step()
        moving = sum(not (ledger.in_place and holder.owns) for holder in holders)
        enough = ledger.available >= moving
        handle = ledger.alloc_besteffort(step) if export else None
        try:
            reads, writes = ledger.submit(step, holders, [count] * len(names))
        except self.errors.CapacityError:
            if enough:
                raise Violation(f"step of {names} refused although there were slots for it") from None
            raise
        rows = []
        for name, read, write in zip(names, reads, writes):
            request = self.running[name]
            before, request.value = request.value, self.grown(request.value, name, count)
            if (read < 0) != (before is None):
                raise Violation(f"request {name} reads slot {read} although its state is {before}")
            rows.append((read, write, before, request.value))
        exports = []
        if handle is not None:
            (name,) = names
            inner = self.grown(rows[0][2], name, 1)
            exports.append((handle.slot, inner))
            if inner not in self.index:
                entry = Entry(inner)
                if ledger.export(step, handle, holders[0], inner[2], entry):
                    if inner[0] != "state":
                        raise Violation(f"I10 a state of mixed weights was exported: {inner}")
                    entry.handle = handle
                    self.index[inner] = entry
        written = writes + [slot for slot, _ in exports]
        if len(set(written)) != len(written) or set(written) & {r for r, w in zip(reads, writes) if r != w}:
            raise Violation(f"I6 step {step} reads {reads} and writes {written}")
        self.queue.append(Op(step, rows, exports))
        ledger.step_launched(step)

    def do_execute(self) -> None:
        op = self.queue.pop(0)
        inputs = [None if read < 0 else list(self.memory[read]) for read, _, _, _ in op.rows]
        for content, (read, _, before, _) in zip(inputs, op.rows):
            if not op.failed and content is not None and content != [before, before]:
                raise Violation(f"I7 step {op.step} reads {content} in slot {read}, expected {before}")
        for _, write, _, after in op.rows:
            self.memory[write] = [GARBAGE, GARBAGE] if op.failed else [after, after]
        for slot, inner in op.exports:
            self.memory[slot] = [GARBAGE, GARBAGE] if op.failed else [inner, inner]
        self.executed = op.step

    def do_fence(self, rank: int) -> None:
        self.ledger.step_done(self.executed, rank)
        self.reported[rank] = self.executed
        if self.ledger.done != min(self.reported):
            raise Violation(f"step {self.ledger.done} is done, the ranks are at {self.reported}")

    def do_fail(self) -> None:
        step = self.queue[0].step
        self.failures += 1
        lost = self.ledger.step_failed(step)
        for op in self.queue:
            op.failed = True
        for name, request in list(self.running.items()):
            if any(request.holder is holder for holder in lost):
                self.do_drop(name)

    def do_evict(self) -> None:
        self.ledger.evict_oldest()

    def do_unindex(self, key: Value) -> None:
        self.ledger.uncache(self.index[key].handle, "evicted")

    # Transfers

    def do_put(self, key: Value) -> None:
        lease = self.ledger.put_begin(self.index[key].handle, deadline=1.0)
        self.put = Transfer(lease, key, [GARBAGE, GARBAGE])

    def do_get(self, key: Value) -> None:
        entry = Entry(key)
        lease = self.ledger.get_begin(key[2], entry, deadline=1.0)
        if lease is not None:
            entry.handle = lease.handle
            self.get = Transfer(lease, key, [self.store[key]] * 2)

    def move(self, transfer: Transfer) -> None:
        """One half of the payload moves; with the second half of a put the store has it, whoever asks or not."""
        half, slot = transfer.halves, transfer.lease.handle.slot
        transfer.halves += 1
        if transfer.lease.kind == "get":
            self.memory[slot][half] = transfer.payload[half]
            return
        transfer.payload[half] = self.memory[slot][half]
        if transfer.halves == 2 and transfer.key not in self.store:
            if transfer.payload != [transfer.key] * 2:
                raise Violation(f"I8 the store commits {transfer.payload} as {transfer.key}")
            self.store[transfer.key] = transfer.key

    def do_put_half(self) -> None:
        assert self.put is not None
        self.move(self.put)

    def do_get_half(self) -> None:
        assert self.get is not None
        self.move(self.get)

    def do_put_end(self, rank: int, ok: bool) -> None:
        assert self.put is not None
        outcome = self.completed(self.put, self.ledger.put_end, rank, ok)
        if not self.put.lease.pending:
            if outcome is None:
                raise Violation("I11 all ranks are terminal and the put is not")
            self.put = None

    def do_get_end(self, rank: int, ok: bool) -> None:
        assert self.get is not None
        transfer = self.get
        outcome = self.completed(transfer, self.ledger.get_end, rank, ok)
        if transfer.lease.pending:
            return
        if outcome is None:
            raise Violation("I11 all ranks are terminal and the get is not")
        self.get = None
        if not outcome.ok:
            return
        if transfer.lease.cancelled or transfer.lease.failed:
            raise Violation("a load that was cancelled or failed is usable")
        entry = transfer.lease.entry
        if transfer.key in self.index:
            self.ledger.uncache(entry.handle, "duplicate")
        else:
            self.index[transfer.key] = entry

    def completed(self, transfer: Transfer, end: Callable[..., Any], rank: int, ok: bool) -> Any:
        """A completion, and the same one again: only the first counts."""
        outcome = end(transfer.lease.op, rank=rank, ok=ok)
        if outcome is not None and transfer.lease.pending:
            raise Violation("I11 the transfer ended while a rank still runs")
        if outcome is not None and outcome.ok and transfer.lease.failed:
            raise Violation("a transfer that failed on a rank counts as good")
        stale = self.ledger.counters.e_stale
        if end(transfer.lease.op, rank=rank, ok=ok) is not None or self.ledger.counters.e_stale != stale + 1:
            raise Violation("I11 a completion counted twice")
        return outcome

    def do_cancel_get(self) -> None:
        assert self.get is not None
        self.ledger.get_cancel(self.get.lease.op)

    def do_expire(self) -> None:
        late = self.ledger.expire(2.0)
        live = [t for t in (self.put, self.get) if t is not None]
        if {lease.op for lease in late} != {t.lease.op for t in live}:
            raise Violation("a lease past its deadline is not quarantined")
        self.stuck += live
        self.put = self.get = None

    def do_stuck_half(self, number: int) -> None:
        self.move(self.stuck[number])

    def do_stuck_end(self, number: int) -> None:
        transfer = self.stuck.pop(number)
        end = self.ledger.put_end if transfer.lease.kind == "put" else self.ledger.get_end
        for rank in range(self.ledger.ranks):
            if end(transfer.lease.op, rank=rank, ok=True) is not None:
                raise Violation("a transfer past its deadline still counts")
        if not self.ledger.records[transfer.lease.handle.slot].quarantined:
            raise Violation("a slot left quarantine before the pool was rebuilt")

    # Modes

    def do_reload(self) -> None:
        self.ledger.bump_epoch()
        if self.index:
            raise Violation(f"I10 checkpoints outlive their weights: {sorted(self.index)}")

    def do_sleep(self) -> None:
        ledger = self.ledger
        self.sleeps += 1
        ledger.drain()
        for name in list(self.running):
            self.do_drop(name)
        try:
            ledger.sleep()
        except self.errors.StuckLeaseError:
            ledger.resume()
            return
        if self.queue or self.executed != ledger.done or self.put or self.get or self.stuck:
            raise Violation("I13 memory was freed while a step or transfer is live")
        self.memory = [[GARBAGE, GARBAGE] for _ in self.memory]
        ledger.wake()
        if self.index:
            raise Violation("checkpoints outlive the memory")

    # Properties

    def check(self) -> None:
        """Invariants of the ledger, and those that need the world."""
        found = sys.modules[self.api + ".invariants"].violations(self.ledger)
        if found:
            raise Violation("; ".join(found))
        cached = {id(rec.entry): rec for rec in self.ledger.records if rec.entry is not None}
        for key, entry in self.index.items():
            rec = cached.pop(id(entry), None)
            if rec is None or entry.handle != self.ledger.handle(rec):
                raise Violation(f"I4 {key} has no slot")
            if rec.position != key[2] or rec.epoch != key[1]:
                raise Violation(f"I9 {key} is in a slot at {rec.position} of epoch {rec.epoch}")
            if rec.write_step <= self.executed and self.memory[rec.slot] != [key, key]:
                raise Violation(f"I7 slot {rec.slot} holds {self.memory[rec.slot]}, its entry says {key}")
        if cached:
            raise Violation(f"I4 {len(cached)} slots have C without an entry")
        for name, request in self.running.items():
            rec = request.holder.rec
            if (rec is None) != (request.value is None) or (rec is not None and rec.position != self.position(name)):
                raise Violation(f"I5 request {name} is at {request.value}, its slot says otherwise")
        for transfer in (self.put, self.get):
            if transfer is not None and not self.ledger.is_current(transfer.lease.handle):
                raise Violation("I11 a slot was reused under a live transfer")
        for transfer in self.stuck:
            if not self.ledger.is_current(transfer.lease.handle):
                raise Violation("a slot in quarantine was reused")

    def quiesce(self) -> None:
        """Input stops: everything under way ends, and all slots are free or cached."""
        while self.queue:
            self.do(("execute",))
        for rank, seen in enumerate(self.reported):
            if seen < self.executed:
                self.do(("fence", rank))
        for transfer, kind in ((self.put, "put"), (self.get, "get")):
            while transfer is not None and self.movable(transfer):
                self.do((kind + " half",))
            for rank in range(self.ledger.ranks):
                if transfer is not None and transfer.lease.pending >> rank & 1:
                    self.do((kind + " end", rank, transfer.halves == 2))
        for name in list(self.running):
            self.do(("drop", name))
        held = self.ledger.num_slots - len(self.ledger.free) - len(self.index) - self.ledger.quarantined
        if held:
            raise Violation(f"{held} slots leaked")
