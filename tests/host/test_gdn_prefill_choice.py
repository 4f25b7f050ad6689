"""Which form of the GDN prefill block is launched: the one measured faster for so many heads of all rows."""

from __future__ import annotations

import pytest

from compact_state.cute_kernels.configs.prefill import MULTIPROCESSORS, slabs_per_block


@pytest.mark.parametrize("heads", [1, 8, 16, 32, 48, 64, MULTIPROCESSORS // 2])
def test_half_a_head_a_block_where_every_half_has_a_multiprocessor(heads):
    assert slabs_per_block(heads) == 1


@pytest.mark.parametrize("heads", [MULTIPROCESSORS // 2 + 1, 96, 128, MULTIPROCESSORS, 133, 192, 256, 384, 4096])
def test_whole_heads_where_halves_would_wait_for_each_other(heads):
    assert slabs_per_block(heads) == 2
