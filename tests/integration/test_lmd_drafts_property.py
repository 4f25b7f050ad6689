"""Random request schedules with drafts, whatever is accepted: the ledger holds, and every answer is the one without."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.lmdeploy
pytest.importorskip("lmdeploy", reason="lmdeploy is not installed")

from hypothesis import HealthCheck, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from hypothesis.stateful import initialize, invariant, rule  # noqa: E402
from lmd_drafts import draft_flow  # noqa: E402
from lmd_flow import Flow  # noqa: E402
from test_lmd_property import Schedules  # noqa: E402


class DraftSchedules(Schedules):
    """As `Schedules`; how good the drafts are changes as well, and finished turns come before and after their last step."""

    @initialize(
        drafts=st.sampled_from([1, 3, 7]), chance=st.sampled_from([0.0, 0.5, 0.9, 1.0]), seed=st.integers(0, 99)
    )
    def drafting(self, drafts: int, chance: float, seed: int) -> None:
        self.settings = {"drafts": drafts, "chance": chance, "seed": seed}

    def make(self, **sizes: Any) -> Flow:
        return draft_flow(**getattr(self, "settings", {"drafts": 3}), **sizes)

    @rule(chance=st.sampled_from([0.0, 0.3, 0.7, 1.0]))
    def other_drafts(self, chance: float) -> None:
        self.flow.device.chance = chance

    @invariant()
    def rows(self) -> None:
        if hasattr(self, "flow"):
            logs = self.flow.manager.logs
            assert sorted([*logs.free, *logs.owners]) == list(range(self.flow.scheduler.scheduler_config.max_batches))
            assert all(seq.compact_trail.row == row for row, seq in logs.owners.items())

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "flow"):
            assert not self.flow.manager.logs.owners


TestDraftSchedules = DraftSchedules.TestCase
TestDraftSchedules.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
