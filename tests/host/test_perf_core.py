"""When a core counts as the process's own, and which take of a host time is kept."""

from __future__ import annotations

import itertools
import os

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


def test_a_slowed_thread_goes_to_another_core_and_may_use_all_again(moves) -> None:
    core = scripted([1.5] * LOOPS + [1.4] * LOOPS + [1.0])
    assert core.settle() == 1.0
    assert moves == [{5}, {7}]
    core.leave()
    assert moves[-1] == {3, 5, 7}


def test_patience_ends_and_the_slowdown_is_told(moves) -> None:
    core = scripted([1.5], patience_s=0.01)
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
