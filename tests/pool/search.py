"""Two searchers over the simulated world: breadth first over a small configuration, and at random."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tests.pool.ledger_state import Violation
from tests.pool.ledger_world import World

#: Kinds of action that every alphabet has.
BASE = frozenset({"admit", "hit", "drop", "step", "execute", "fence", "publish", "finish", "evict"})
#: Small alphabets search deeper than one that holds everything.
ALPHABETS = {
    "cache": BASE | {"misplaced publish", "abandon", "unindex"},
    "put": (BASE - {"publish"}) | {"put", "put half", "put end", "unindex"},
    "get": (BASE - {"publish", "hit"}) | {"get", "get half", "get end", "cancel get", "abandon", "reload"},
    "weights": BASE | {"reload", "put", "put half", "put end"},
    "failure": BASE | {"fail", "put", "put half", "put end", "expire", "stuck half", "stuck end"},
    "order": frozenset({"admit", "drop", "step", "execute", "fence", "abandon", "get", "get half", "get end"}),
    "stuck": frozenset({"admit", "step", "finish", "execute", "fail", "expire", "put", "put half", "stuck half"}),
    "sleep": BASE | {"sleep", "put", "put half", "put end", "expire", "stuck half", "stuck end"},
}
#: One checkpoint that nobody uses, one in the store besides.
WARM = (("admit", 0), ("step", (0,), True), ("execute",), ("fence", 0), ("finish", 0))
STORED = (*WARM, ("put", ("state", 0, 1, 0)), ("put half",), ("put half",), ("put end", 0, True))
STARTS: dict[str, Iterable[tuple[Any, ...]]] = {
    "cache": (),
    "put": WARM,
    "get": (*STORED, ("unindex", ("state", 0, 1, 0))),
    "weights": WARM,
    "failure": (),
    "order": (*STORED, ("unindex", ("state", 0, 1, 0))),
    "stuck": (),
    "sleep": WARM,
}


@dataclass
class Result:
    """What a search saw: `depth` = every sequence of that many actions from the start was covered."""

    states: int
    transitions: int
    depth: int
    violation: str = ""
    trace: tuple[tuple[Any, ...], ...] = ()


def breadth_first(
    api: Any,
    alphabet: str,
    *,
    max_depth: int = 99,
    max_states: int = 10**9,
    seconds: float = 1e9,
    **options: Any,
) -> Result:
    """Covers the worlds that an alphabet reaches, shortest sequences first."""
    kinds, world = ALPHABETS[alphabet], World(api, **options)
    for action in STARTS[alphabet]:
        world.do(action)
    seen = {hash(world.state())}
    level: list[tuple[Any, tuple[Any, ...]]] = [(world.save(), ())]
    transitions, limit = 0, time.process_time() + seconds
    for depth in range(1, max_depth + 1):
        following: list[tuple[Any, tuple[Any, ...]]] = []
        for saved, trace in level:
            if len(seen) >= max_states or time.process_time() > limit:
                return Result(len(seen), transitions, depth - 1)
            world.load(saved)
            for action in [action for action in world.actions() if action[0] in kinds]:
                world.load(saved)
                transitions += 1
                try:
                    world.do(action)
                except Violation as error:
                    return Result(len(seen), transitions, depth - 1, str(error), (*trace, action))
                key = hash(world.state())
                if key not in seen:
                    seen.add(key)
                    following.append((world.save(), (*trace, action)))
        level = following
        if not level:
            return Result(len(seen), transitions, depth)
    return Result(len(seen), transitions, max_depth)


def at_random(
    api: Any, seeds: Iterable[int], *, length: int = 60, alphabet: str | None = None, **options: Any
) -> Result:
    """Random walks over an alphabet (default: everything), each ended by letting all come to rest."""
    transitions = 0
    kinds = None if alphabet is None else ALPHABETS[alphabet]
    for seed in seeds:
        rng, trace = random.Random(seed), []
        world = World(api, **options)
        try:
            for action in STARTS[alphabet] if alphabet and world.ledger.ranks == 1 else ():
                world.do(action)
            for _ in range(length):
                actions = [action for action in world.actions() if kinds is None or action[0] in kinds]
                # Kinds first: else the many steps and drops drown the rare kinds.
                kind = rng.choice(sorted({action[0] for action in actions}))
                trace.append(rng.choice([action for action in actions if action[0] == kind]))
                transitions += 1
                world.do(trace[-1])
            world.quiesce()
        except Violation as error:
            return Result(0, transitions, 0, str(error), tuple(trace))
    return Result(0, transitions, length)


def hunt(api: Any) -> Result:
    """Everything the searchers have, in rounds of growing length, until something breaks."""
    options: tuple[dict[str, Any], ...] = ({}, {"policy": "early"}, {"ranks": 2}, {"in_place": False, "slots": 4})
    walks: list[tuple[str | None, dict[str, Any], int]] = [(None, option, 60) for option in options]
    # Streams without a common start: one request's state never looks like another's.
    walks.append(("order", {"policy": "early", "shared": 0}, 20))
    walks += [(alphabet, option, 30) for alphabet in ALPHABETS for option in options[:2]]
    transitions = 0
    for seeds in (range(6), range(6, 24), range(24, 96), range(96, 384)):
        for alphabet, option, length in walks:
            result = at_random(api, seeds, alphabet=alphabet, length=length, **option)
            transitions += result.transitions
            if result.violation:
                return result
        for alphabet, states in (("weights", 300), ("get", 1500)) if not seeds.start else ():
            result = breadth_first(api, alphabet, max_states=states)
            transitions += result.transitions
            if result.violation:
                return result
    return Result(0, transitions, 0)
