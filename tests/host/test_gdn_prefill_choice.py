"""Which form of GDN prefill is launched: the one measured faster for so many heads of all rows."""

from __future__ import annotations

import pytest

from compact_state.cute_kernels.configs.gdn_records import (
    CHUNK,
    MOST_ROWS,
    RECORD_BYTES,
    WORKERS,
    WORKSPACE_BYTES,
    forms,
    parts_from_records,
    plan_of_row,
    recurrence_slabs,
    takes_columns,
    takes_records,
)
from compact_state.cute_kernels.configs.prefill import (
    MULTIPROCESSORS,
    lead_of_long_rows,
    parts_of_long_rows,
    slabs_per_block,
)


@pytest.mark.parametrize("heads", [1, 8, 16, 32, 48, 64, MULTIPROCESSORS // 2])
def test_half_a_head_a_block_where_every_half_has_a_multiprocessor(heads):
    assert slabs_per_block(heads) == 1


@pytest.mark.parametrize("heads", [MULTIPROCESSORS // 2 + 1, 96, 128, MULTIPROCESSORS, 133, 192, 256, 384, 4096])
def test_whole_heads_where_halves_would_wait_for_each_other(heads):
    assert slabs_per_block(heads) == 2


@pytest.mark.parametrize("rows", [1, 4, 100])
@pytest.mark.parametrize("heads", [1, 8, 32, 64])
def test_records_are_made_only_where_they_fit(rows, heads):
    """The workspace is bounded: calls of many chunks fall back to one launch."""
    most = WORKSPACE_BYTES // RECORD_BYTES // heads
    assert not takes_records(most + 1, heads, rows)
    assert takes_records(1, heads, rows) == takes_records(most, heads, rows)


def test_records_are_made_where_the_heads_leave_multiprocessors_idle():
    assert takes_records(33, 32, 1)
    assert takes_records(513, 8, 1)
    assert takes_records(520, 8, 8)
    assert not takes_records(132, 32, 4)


def test_records_are_made_for_as_many_rows_as_a_warp_has_lanes():
    assert takes_records(1, 1, MOST_ROWS)
    assert not takes_records(1, 1, MOST_ROWS + 1)


@pytest.mark.parametrize("heads", [1, 8, 16, 32, 48, 64])
def test_rows_from_records_run_in_as_many_parts_or_bitwise_as_if_in_two(heads):
    parts = parts_of_long_rows(heads)
    assert parts_from_records(heads) == (parts if parts > 2 else 1)


def test_heads_are_halved_where_other_work_leaves_room():
    assert recurrence_slabs(64) == 1
    assert recurrence_slabs(64, taken=32) == 2


@pytest.mark.parametrize("items", [1, MULTIPROCESSORS // 2])
def test_the_recurrence_halves_heads_where_every_half_has_a_multiprocessor(items):
    assert recurrence_slabs(items) == 1


@pytest.mark.parametrize("heads", [1, 8, 16])
def test_some_columns_of_a_head_a_block_where_all_are_on_the_chip_at_once(heads):
    assert takes_columns(heads)


@pytest.mark.parametrize("heads", [17, 32, 66])
def test_no_columns_where_their_blocks_would_wait_for_each_other(heads):
    assert not takes_columns(heads)


def test_one_form_alone_is_launched_where_shapes_say_which():
    assert forms(2048, 33, 32, 1) == (False, True, 0)
    assert forms(32768, 514, 8, 2) == (False, True, 0)
    assert forms(8192, 132, 32, 4) == (True, False, 0)
    assert forms(32768, 520, 48, 8) == (True, False, 0)
    assert forms(8192, 136, 16, 8) == (True, False, 0)


def test_lengths_choose_between_halves_and_wholes_where_halves_do_not_fit_at_once():
    assert forms(32768, 514, 48, 2) == (False, True, 1)
    assert forms(32768, 514, 32, 2) == (False, True, 0)


@pytest.mark.parametrize("rows", [9, 64, 256])
def test_lengths_choose_between_one_launch_and_records_where_most_rows_may_be_single_tokens(rows):
    assert forms(8192, 200, 32, rows) == (True, True, 2)
    assert forms(4096, 200, 32, rows) == (True, False, 0)
    most = WORKSPACE_BYTES // RECORD_BYTES // 32
    assert forms(8192, most + 1, 32, rows) == (True, False, 0)
    assert forms(8192, 200, 32, 257) == (True, False, 0)


def test_lengths_choose_where_one_row_may_be_long_and_its_first_segment_longer_than_the_others():
    assert forms(8300, 140, 16, 8) == (True, True, 2)
    assert forms(8300, 140, 17, 8) == (True, False, 0)
    assert forms(32768, 520, 16, 8) == (True, False, 0)


@pytest.mark.parametrize("heads", [1, 8, 9, 16, 17, 48])
def test_the_first_segment_is_longer_where_its_chain_has_the_time(heads):
    assert lead_of_long_rows(heads) == (5 if 8 < heads <= 16 else 2)


@pytest.mark.parametrize(("parts", "lead"), [(1, 2), (8, 2), (5, 5)])
@pytest.mark.parametrize(
    ("heads", "together", "width"), [(8, 4, 8), (16, 4, 2), (16, 1, 8), (32, 2, 2), (48, 3, 2), (1, 1, 8)]
)
@pytest.mark.parametrize("tokens", [0, 1, 64, 2048, 8192, 32768])
def test_the_plan_of_a_row_deals_every_record_once(tokens, heads, together, width, parts, lead):
    """As `device/gdn_chains.py` reads it: the first `early` units go to all blocks, the others to those that stay."""
    stay, early, single, total = plan_of_row(tokens, heads, together, width, parts, lead)
    records = max(-(-tokens // CHUNK), 1) * heads
    if stay == 0:
        assert (early, single, total) == (0, -1, records)
        return
    blocks = min((tokens // CHUNK + 1) * heads, MULTIPROCESSORS)
    assert blocks // 4 < stay == blocks - heads * width
    assert single % heads == 0
    assert single + (total - single) * together == records
    units = [
        u
        for w in range(WORKERS)
        for b in range(blocks)
        for u in range(w * blocks + b, min(early, total), WORKERS * blocks)
    ]
    units += [
        u for w in range(WORKERS) for b in range(stay) for u in range(early + w * stay + b, total, WORKERS * stay)
    ]
    assert sorted(units) == list(range(total))
