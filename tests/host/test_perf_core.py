"""When a core counts as the process's own, and which take of a host time is kept."""

from __future__ import annotations

import itertools
import math
import os
import time
from types import SimpleNamespace

import pytest

from compact_state.perf import core as cores
from compact_state.perf import host
from compact_state.perf.core import LOOPS, QUIET, Core

START = [1.0] * 4 * LOOPS * LOOPS  # seconds of the loops that find the fastest


def scripted(times, **options) -> Core:
    """A core whose loops take these times, then the last one for ever."""
    script = itertools.chain(START, times, itertools.repeat(times[-1]))
    return Core(lambda: next(script), **options)


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    made: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 7}, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: made.append(set(cores)), raising=False)
    monkeypatch.setattr(cores, "PAUSE_S", 0.0)
    return made


def test_a_quiet_core_is_kept(moves) -> None:
    assert scripted([1.05]).settle() == 1.05
    assert moves == []


def test_one_slow_loop_of_five_is_no_disturbance(moves) -> None:
    assert scripted([9.0, 1.0, 1.0, 1.0, 1.0]).settle() == 1.0
    assert moves == []


def test_one_quick_loop_of_five_is_no_measure_for_others(moves) -> None:
    core = scripted([0.5, *[1.0] * (LOOPS - 1), 1.05])
    assert core.settle() == 1.0
    assert core.settle() == 1.05
    assert moves == []


def test_a_slowed_thread_goes_to_another_core_and_may_use_all_again(moves) -> None:
    core = scripted([1.5] * LOOPS + [1.4] * LOOPS + [1.0])
    assert core.settle() == 1.0
    assert moves == [{5}, {7}]
    core.leave()
    assert moves[-1] == {3, 5, 7}


def test_patience_ends_and_the_slowdown_is_told(moves) -> None:
    core = scripted([1.5], patience_s=1e-9)
    assert core.settle() == 1.5
    tried = len(moves)
    assert core.settle() == 1.5
    assert len(moves) == tried > 0, "patience is for all waiting together"


def test_the_take_that_counts_is_the_least_disturbed_not_the_shortest(moves) -> None:
    slow, quiet = [2.0] * LOOPS, [1.0] * LOOPS
    figures = iter([5.0, 8.0, 1.0])
    core = scripted(quiet + slow + quiet + quiet)  # before and after: disturbed after the first take only
    assert host.take(lambda: next(figures), core) == (1.0, 8.0)
    assert next(figures) == 1.0, "an undisturbed take ends it"


def test_where_no_core_is_quiet_the_quickest_is_kept(moves) -> None:
    """Cores 5, 7 and 3 in turn: the times of their last turn decide."""
    loops = [2.0, *[1.8, 1.7, 1.6] * 3, 1.8, 1.3, 1.6]
    assert scripted([time for time in loops for _ in range(LOOPS)], patience_s=60.0).settle() == 1.3
    assert len(moves) == cores.MOST_TRIED + 1
    assert moves[-1] == {7}


def test_a_search_for_a_quiet_core_ends_before_patience_does(moves) -> None:
    core = scripted([1.5], patience_s=60.0)
    assert core.settle() == 1.5
    assert len(moves) == cores.MOST_TRIED
    assert core.patience_s > 0


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch):
    """Takes of the cases a, b and c by name, as (slowdown, us); the order they were taken in, and what was kept by pass."""
    takes = {"a": [(1.2, 20.0), (1.3, 30.0), (1.0, 8.0)], "b": [(1.0, 7.0)], "c": [(1.5, 4.0), (1.3, 9.0), (1.4, 5.0)]}
    order: list[str] = []
    kept: list[dict[str, tuple[float, float]]] = []

    def take(name, core):
        order.append(name)
        return takes[name][order.count(name) - 1]

    monkeypatch.setattr(host, "_timed", lambda case, device_us, ws: case.name)
    monkeypatch.setattr(host, "take", take)
    monkeypatch.setattr(host, "PASSES", 3)

    def measure(core, deadline=math.inf, prefill=()):
        cases = [
            (SimpleNamespace(name=name, op="gdn_prefill" if name in prefill else "gdn_decode"), 1.0) for name in takes
        ]
        found = host.measure(cases, None, print, core, deadline, lambda found: kept.append(dict(found)))
        return found, order, kept

    return measure


def test_what_was_disturbed_is_taken_again_behind_all_others(moves, passes) -> None:
    found, order, kept = passes(scripted([1.0], patience_s=60.0))
    assert order == list("abccaca"), "the most disturbed first"
    assert found == {"a": (1.0, 8.0), "b": (1.0, 7.0), "c": (1.3, 9.0)}, "by disturbance, not by time"
    assert kept[0] == {"a": (1.2, 20.0), "b": (1.0, 7.0), "c": (1.5, 4.0)}


def test_prefill_is_taken_again_behind_steps(moves, passes) -> None:
    assert passes(scripted([1.0], patience_s=60.0), prefill="c")[1] == list("abcacac")


@pytest.mark.parametrize(("limit_s", "order"), [(math.inf, "abc"), (60.0, "abccaca")])
def test_without_patience_only_a_time_limit_buys_more_passes(moves, passes, limit_s, order) -> None:
    assert passes(scripted([1.0], patience_s=0.0), time.monotonic() + limit_s)[1] == list(order)


def test_a_time_limit_ends_it(moves, passes) -> None:
    assert passes(scripted([1.0], patience_s=60.0), time.monotonic() - 1)[:2] == ({}, [])


@pytest.mark.parametrize(("patience_s", "takes"), [(0.0, 1), (60.0, host.TAKES)])
def test_where_every_take_is_disturbed_it_is_told_and_patience_bounds_them(
    moves, monkeypatch, patience_s, takes
) -> None:
    core = scripted([2.0], patience_s=patience_s)
    monkeypatch.setattr(core, "settle", core.slowdown)
    figures = iter([5.0, 6.0, 7.0, 8.0, 9.0])
    slowed, us = host.take(figures.__next__, core)
    assert slowed > QUIET
    assert us == 5.0
    assert next(figures) == 5.0 + takes
