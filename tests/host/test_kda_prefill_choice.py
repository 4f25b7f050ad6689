"""How a KDA prefill call is cut into launches: what holds for every choice, and the choices that measurements gave."""

from __future__ import annotations

import pytest

from compact_state.cute_kernels.configs.kda_prefill import (
    MULTIPROCESSORS,
    overlap,
    parts_of_long_rows,
    rows_at_once,
    shortest_long_row,
    slabs_per_block,
)

HEADS = (1, 8, 12, 16, 32, 64)


def beside(heads, *lengths):
    """The choice for whole rows."""
    rows, tokens = len(lengths), sum(lengths)
    slots = tokens // 64 + rows
    return overlap(slots, heads, rows, slots / rows, False, 0.0)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("chains", [1, 2, 4, 9, 30])
@pytest.mark.parametrize("transition", [False, True])
def test_both_sides_have_multiprocessors_and_no_round_is_empty(heads, chains, transition):
    for slots in (1, 33, 129, 513, 5000):
        plan = overlap(slots, heads, chains, slots / chains, transition, 0.0)
        if plan is not None:
            assert 0 < plan.stay == (MULTIPROCESSORS - chains * heads * 128 // plan.columns) // 2 * 2
            assert 2 * MULTIPROCESSORS * plan.rounds <= slots * heads
            assert plan.rounds == 0 or plan.early == 0


def test_one_long_chain_runs_beside_its_records():
    for heads, length in ((16, 1024), (12, 2048), (16, 8192), (16, 32768), (32, 8192), (32, 32768)):
        assert beside(heads, length) is not None


def test_one_chain_of_few_heads_has_narrow_blocks():
    """Eight or four a head, as far as multiprocessors are left for the records, or most records are made before."""
    plans = [beside(heads, 2048) for heads in (8, 12, 16)]
    assert [(plan.columns, plan.rounds) for plan in plans] == [(16, 0), (16, 1), (32, 0)]
    for length, rounds in ((4096, 1), (8192, 2)):
        assert (beside(12, length).columns, beside(12, length).rounds) == (16, rounds)
    for length in (8192, 32768):  # all records beside the chain: a first round of all multiprocessors takes longer
        assert (beside(16, length).columns, beside(16, length).rounds) == (32, 0)
    assert beside(32, 8192).columns == 64


def test_up_to_twelve_chains_start_before_all_multiprocessors_have_two_items():
    """With more of them the first records of all chains come later than one a multiprocessor makes them."""
    for heads, rows, early in ((4, 1, 40), (8, 1, 40), (12, 1, 40), (13, 1, 0), (16, 1, 0), (6, 2, 40)):
        plan = beside(heads, *[1024] * rows)
        assert (plan.rounds, plan.early) == (0, early)


def test_narrow_blocks_stay_where_they_were_timed():
    """Not for several rows, whose longest is not known."""
    for heads in HEADS:
        for chains in (2, 3, 4, 6, 8):
            for slots in (33, 130, 520):
                for softplus in (False, True):
                    plan = overlap(slots, heads, chains, slots / chains, False, 0.0, softplus)
                    assert plan is None or plan.columns >= 64
    assert [overlap(33, heads, 1, 33.0, False, 0.0, True).columns for heads in (8, 16)] == [16, 32]


def test_chains_that_fill_the_chip_follow_their_records():
    assert beside(64, 8192) is None
    for heads in HEADS[3:]:
        assert beside(heads, *[2048] * 4) is None
    for heads in HEADS[1:]:
        assert beside(heads, *[1024] * 8) is None


def test_whole_heads_of_several_rows_beside_their_records():
    """Behind one round: four rows, which are 48 blocks, and six of which most are short."""
    for lengths in ([1024] * 4, [2048] * 4, [1300, 547, 2048, 963, 271, 3063]):
        plan = beside(12, *lengths)
        assert (plan.columns, plan.rounds) == (128, 1)
    assert (beside(8, *[1024] * 4).columns, beside(8, *[1024] * 4).rounds) == (64, 1)


def test_further_rounds_of_several_rows_where_the_first_records_stay_in_l2():
    """As long as records are made beside the chain for two rounds more."""
    assert beside(8, *[2048] * 4).rounds == beside(16, 2048, 2048).rounds == 2
    assert beside(8, 1300, 547, 2048, 963, 271, 3063).rounds == 3


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("slabs", [1, 2])
def test_rows_walked_at_once_are_those_whose_blocks_fit_the_chip(heads, slabs):
    for rows in (1, 4, 32):
        count = rows_at_once(rows, heads, slabs)
        assert 1 <= count <= rows
        assert count == 1 or count * heads * 2 // slabs <= MULTIPROCESSORS
        assert count == rows or (count + 1) * heads * 2 // slabs > MULTIPROCESSORS


def test_halves_where_wholes_leave_multiprocessors_idle():
    assert [slabs_per_block(1, heads) for heads in HEADS] == [1] * len(HEADS)
    assert slabs_per_block(6, 16) == slabs_per_block(6, 32) == 1
    assert slabs_per_block(6, 64) == 1
    assert slabs_per_block(6, 16, equal=True) == slabs_per_block(8, 16) == slabs_per_block(32, 16) == 2


def test_where_most_rows_are_short_one_long_chain_decides():
    for heads in (8, 12, 16):
        assert slabs_per_block(62, heads, tokens=34) == 1
        assert slabs_per_block(62, heads, tokens=64) == 2
    assert slabs_per_block(62, 32, tokens=34) == 2


def test_a_long_row_of_few_heads_has_as_many_parts_as_ended_soonest():
    """Of 1 to 8 parts, 8,192 and 32,768 tokens: `perf/results/h200/development/kda_prefill.txt`."""
    assert [parts_of_long_rows(heads) for heads in HEADS] == [5, 5, 4, 1, 1, 1]
    assert [shortest_long_row(heads) for heads in HEADS[:3]] == [8192, 16_384, 16_384]


@pytest.mark.parametrize("slots", [129, 513])
def test_records_of_many_heads_are_made_ahead_and_further_for_the_slower_gate(slots):
    bounded, softplus = (overlap(slots, 32, 1, slots, False, 0.0, gate) for gate in (False, True))
    assert bounded is not None
    assert softplus is not None
    assert bounded.columns == softplus.columns == 64
    assert 1 < bounded.rounds < softplus.rounds < slots * 32 // (2 * MULTIPROCESSORS)
    # Of 0 to 31 rounds, in the mean of several allocations, 4 to 6 and 13 to 20 end soonest, softplus 6 to 8 and 22 to 28.
    assert slots // 40 < bounded.rounds <= slots // 25
    assert softplus.rounds <= slots // 20
