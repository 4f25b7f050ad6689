"""The real ledger in a simulated world: breadth first, at random, by hypothesis; and the test of these tests by mutants.

COMPACT_STATE_SEARCH multiplies the states that each breadth-first search covers (default 1: seconds).
"""

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import compact_state.pool as real
import compact_state.pool.invariants
import compact_state.pool.ledger  # noqa: F401  (the world reaches these modules through the package)
from tests.pool.ledger_state import Violation
from tests.pool.ledger_world import World
from tests.pool.mutants import MUTANTS, Mutant, load
from tests.pool.search import ALPHABETS, at_random, breadth_first, hunt

SCALE = int(os.environ.get("COMPACT_STATE_SEARCH", "1"))
#: Depth that 2,000 states cover at least, counted from the alphabet's own start.
DEPTHS = {"cache": 4, "put": 4, "get": 4, "weights": 4, "failure": 4, "order": 6, "stuck": 6, "sleep": 4}


@pytest.mark.parametrize("policy", ["late", "early"])
@pytest.mark.parametrize("alphabet", list(ALPHABETS))
def test_every_short_history_keeps_the_invariants(alphabet: str, policy: str) -> None:
    result = breadth_first(real, alphabet, max_states=2000 * SCALE, policy=policy)
    print(f"{alphabet} {policy}: {result.states} states, {result.transitions} transitions, depth {result.depth}")
    assert not result.violation, f"{result.violation} after {result.trace}"
    assert result.depth >= DEPTHS[alphabet]


OPTIONS: dict[str, dict[str, Any]] = {
    "late": {},
    "early": {"policy": "early"},
    "two ranks": {"ranks": 2},
    "two ranks, early": {"ranks": 2, "policy": "early"},
    "never in place": {"in_place": False, "slots": 4},
    "more of everything": {"slots": 5, "requests": 4, "max_position": 6, "max_queue": 3, "max_epoch": 2},
}


@pytest.mark.parametrize("name", list(OPTIONS))
def test_long_random_histories_keep_the_invariants_and_come_to_rest(name: str) -> None:
    result = at_random(real, range(1000, 1000 + 50 * SCALE), length=80, **OPTIONS[name])
    print(f"{name}: {result.transitions} actions")
    assert not result.violation, f"{result.violation} after {result.trace}"


class LedgerMachine(RuleBasedStateMachine):
    """Hypothesis chooses and shrinks the history."""

    @initialize(options=st.sampled_from(list(OPTIONS.values())))
    def begin(self, options: dict[str, Any]) -> None:
        self.world = World(real, **options)

    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        actions = self.world.actions()
        kind = data.draw(st.sampled_from(sorted({action[0] for action in actions})))
        self.world.do(data.draw(st.sampled_from([action for action in actions if action[0] == kind])))

    @invariant()
    def counters_add_up(self) -> None:
        if hasattr(self, "world"):
            ledger = self.world.ledger
            out = ledger.counters.allocs - ledger.counters.frees
            assert out == ledger.num_slots - len(ledger.free)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.quiesce()


LedgerMachine.TestCase.settings = settings(
    max_examples=40 * SCALE, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestLedgerMachine = LedgerMachine.TestCase


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if not m.equivalent], ids=lambda mutant: mutant.name)
def test_mutant_is_killed(mutant: Mutant, tmp_path: Path) -> None:
    result = hunt(load(mutant, tmp_path))
    assert result.violation, f"no search of {result.transitions} actions notices that {mutant.name}"


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.equivalent], ids=lambda mutant: mutant.name)
def test_equivalent_mutant_is_what_its_reason_says(mutant: Mutant, tmp_path: Path) -> None:
    """They load, and the first line of defence that the reason names holds by itself."""
    result = at_random(load(mutant, tmp_path), range(20), length=60)
    assert not result.violation, f"not equivalent after all: {result.violation}"


def test_the_twelve_of_the_specification_are_all_there() -> None:
    assert sorted(mutant.number for mutant in MUTANTS if mutant.number) == list(range(1, 13))


def test_the_world_itself_notices_a_wrong_byte() -> None:
    """A world that cannot fail proves nothing."""
    world = World(real)
    for action in (("admit", 0), ("step", (0,), False), ("execute",), ("publish", 0)):
        world.do(action)
    world.memory[world.running[0].holder.rec.slot][1] = ("another state",)
    with pytest.raises(Violation, match="I7"):
        world.check()
