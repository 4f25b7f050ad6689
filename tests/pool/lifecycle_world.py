"""Requests over a real lifecycle whose fences pass by hand: every read must find the state of its exact prefix."""

from collections.abc import Sequence

from compact_state.pool import (
    CheckpointIndex,
    Ledger,
    Lifecycle,
    PrefixKey,
    StateRequest,
    StepPlan,
    StepRow,
)
from compact_state.pool.invariants import check


class Manual:
    """A fence that passes when the test says so."""

    def __init__(self) -> None:
        self.open = False

    def passed(self) -> bool:
        return self.open

    def wait(self) -> None:
        self.open = True


class World:
    """A lifecycle over slots whose content is the prefix they stand for; every read is compared with what is expected."""

    def __init__(self, slots: int, budget: int | None = None, **options: object) -> None:
        self.ledger = Ledger(slots, **options)  # type: ignore[arg-type]
        self.index = CheckpointIndex(self.ledger, budget_slots=budget)
        self.life = Lifecycle(self.ledger, self.index)
        self.memory: list[bytes | None] = [b"garbage"] * slots
        self.ledger.on_free = self.poison
        self.queue: list[tuple[StepPlan, list[StepRow], list[PrefixKey], Manual] | int] = []

    def poison(self, slot: int) -> None:
        """A fill in stream order: under the early policy steps that still read the slot are queued before it."""
        self.queue.append(slot)

    def request(self, name: object, tokens: Sequence[int], **key: object) -> StateRequest:
        return self.life.add(name, PrefixKey(tokens, **key))  # type: ignore[arg-type]

    def step(self, rows: list[StepRow], *, run: bool = True) -> StepPlan:
        plan = self.life.plan(rows)
        fence = Manual()
        self.queue.append((plan, rows, [row.request.key for row in rows], fence))
        self.life.launched(plan.step, fence)
        check(self.ledger, self.index)
        if run:
            self.run()
        return plan

    def run(self) -> None:
        """The device executes everything queued, in order."""
        while self.queue:
            item = self.queue.pop(0)
            if isinstance(item, int):
                self.memory[item] = b"poison"
                continue
            plan, rows, keys, fence = item
            for number, (row, key) in enumerate(zip(rows, keys)):
                start = plan.positions[number]
                read = plan.read_ids[number]
                assert (read < 0) == (start == 0)
                if read >= 0:
                    assert self.memory[read] == key.slice(0, start), "the step reads another state than it expects"
                for end, slot in list(zip(plan.ends, plan.slots))[plan.cu[number] : plan.cu[number + 1]]:
                    self.memory[slot] = key.slice(0, start + end)
                self.memory[plan.write_ids[number]] = key.slice(0, start + row.tokens)
            fence.open = True
            self.life.poll()
            check(self.ledger, self.index)
        for entry in self.index.entries():
            assert self.memory[entry.handle.slot] == entry.key.slice(0, entry.position), "label and content differ"

    def prefill(self, request: StateRequest, pieces: Sequence[int], positions: Sequence[int] = ()) -> None:
        for piece in pieces:
            self.step([StepRow(request, piece, positions)])

    def idle(self) -> None:
        """Every slot is free or cached."""
        self.run()
        assert len(self.ledger.free) + self.index.size == self.ledger.num_slots
        assert self.ledger.demand == 0
