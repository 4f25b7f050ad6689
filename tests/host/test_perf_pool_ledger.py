"""The ledger's benchmark: what it reports of given samples, and that it runs."""

import gc
import json

from compact_state.perf.pool_ledger import CONTROL, main, timing


def test_a_figure_is_that_of_the_quietest_trial_and_the_disturbed_one_stays_visible():
    quiet, disturbed = [1000] * 99 + [2000], [1000] * 90 + [900_000] * 10
    quiet[::50] = [1500] * 2
    found = timing("op", [disturbed, quiet], 5.0, overhead_us=0.25, burst=50)
    assert (found.calls, found.p50_us, found.p99_us, found.p99_all_us) == (200, 0.75, 1.75, 899.75)
    assert found.first_us == 1.25
    assert found.holds
    assert not timing("op", [disturbed], 5.0).holds


def test_it_times_every_operation_and_a_control(tmp_path):
    file = tmp_path / "ledger.json"
    try:
        code = main(["--calls", "256", "--trials", "1", "--json", str(file)])
    finally:
        gc.unfreeze()
    assert code in (0, 1)  # which of them is the machine's affair
    result = json.loads(file.read_text())
    assert result["environment"]["slots"] == 10_000
    rows = {row["op"]: row for row in result["rows"]}
    assert {CONTROL, "admit", "hit", "publish", "put_begin", "get_end", "evict_oldest"} <= set(rows)
    assert all(row["calls"] >= 8 and 0 <= row["p50_us"] <= row["p99_us"] <= row["p99_all_us"] for row in rows.values())
