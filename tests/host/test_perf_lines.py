"""Speed lines: judged from rows alone, on the worst cell or in the mean, and never met by what was not measured."""

from __future__ import annotations

from typing import Any

import pytest

from compact_state.perf import lines
from compact_state.perf.lines import LINES, Verdict, lines_table, unmeasured, verdicts


def row(op: str, geometry: str, load: str, ours: float, dtype: str = "float32", **fields: Any) -> dict[str, Any]:
    base = {"op": op, "geometry": geometry, "workload": load, "state_dtype": dtype, "ours_us": ours, "peers": {}}
    return base | {"floor_us": 60.0, "slab_copy_us": 66.0, "bytes": 10**8} | fields


def judged(*rows: dict[str, Any]) -> dict[str, Verdict]:
    result = {"environment": {"copy_tb_s": 4.0}, "rows": list(rows)}
    return {verdict.line.text: verdict for verdict in verdicts({"any": result})}


def one(found: dict[str, Verdict], part: str) -> Verdict:
    (verdict,) = [verdict for text, verdict in found.items() if part in text]
    return verdict


def test_without_rows_no_line_is_met() -> None:
    assert {verdict.word for verdict in judged().values()} == {"not measured"}


def test_rows_without_a_copy_bandwidth_have_no_floor_to_be_held_against() -> None:
    loads = (("gdn_decode", "B64"), ("causal_conv1d_decode", "B256"), ("causal_conv1d_prefill", "1x8192"))
    rows = [row(op, "Q1", load, 60.0, floor_us=None) for op, load in loads]
    result = {"environment": {"copy_tb_s": None}, "rows": rows}
    assert {verdict.word for verdict in verdicts({"any": result}) if "floor" in verdict.line.text} == {"not measured"}
    assert len({line.text for line in LINES}) == len(LINES)


def test_the_worst_cell_decides_and_is_named() -> None:
    rows = [row("gdn_decode", "Q1", "B64", 67.0), row("gdn_decode", "Q1", "B256", 70.0)]
    verdict = one(judged(*rows), "fp32, 1,024 heads and more: time over slab copy")
    assert verdict.value == pytest.approx(70.0 / 66.0)
    assert (verdict.word, verdict.count, verdict.over) == ("missed", 2, 1)
    assert "B256" in verdict.worst
    assert one(judged(rows[0]), "fp32, 1,024 heads and more: time over slab copy").word == "met"


def test_a_limit_is_not_rounded_away() -> None:
    exact = row("gdn_decode", "Q1", "B64", 66.0 / 0.97)
    assert one(judged(exact), "fp32, 1,024 heads").word == "met"
    assert one(judged(exact | {"ours_us": 66.0 / 0.97 + 0.001}), "fp32, 1,024 heads").word == "missed"


def test_means_are_geometric_and_small_batches_do_not_count_as_large() -> None:
    rows = [
        row("gdn_decode", "Q1", "B8", 8.0, peers={"flashinfer": 10.0}),
        row("gdn_decode", "Q1", "B64", 72.0, peers={"flashinfer": 71.0, "lmdeploy": 80.0}),
    ]
    found = judged(*rows)
    assert one(found, "geometric mean over the best peer").value == pytest.approx((0.8 * 72.0 / 71.0) ** 0.5)
    assert one(found, "every cell not slower than the best peer").word == "missed"
    assert one(found, "fp32, 1,024 heads").count == 1


def test_verify_is_set_against_one_token_of_the_same_rows() -> None:
    rows = [
        row("gdn_decode", "Q1", "B64", 70.0),
        row("gdn_verify", "Q1", "B64T6", 90.0, accepted=3),
        row("gdn_verify", "Q1", "B64T6", 98.0, accepted=6),
        row("gdn_verify", "Q3", "B64T6", 980.0, accepted=6),
    ]
    found = judged(*rows)
    assert one(found, "the same, 3 accepted").value == pytest.approx(90.0 / 70.0)
    assert (one(found, "the same, 6 accepted").value, one(found, "the same, 6 accepted").word) == (1.4, "met")


def test_a_layer_step_is_set_against_the_same_step_without_the_rest_of_the_layer() -> None:
    rows = [
        row("gdn_decode", "Q1", "B64", 70.0),
        row("gdn_layer_decode", "Q1", "B64", 77.0, accepted=None),
        row("gdn_decode", "Q1", "B8", 7.0),
        row("gdn_layer_decode", "Q1", "B8", 14.0, accepted=None),
        row("gdn_verify", "Q1", "B64T6", 90.0, "bfloat16", accepted=3),
        row("gdn_layer_decode", "Q1", "B64T6", 108.0, "bfloat16", accepted=3),
        row("gdn_layer_decode", "Q1", "B64T6", 700.0, "bfloat16", accepted=6),
        row("kda_verify", "G1", "B64T8", 90.0, "bfloat16", accepted=3),
    ]
    found = judged(*rows)
    single = one(found, "layer step over the bare recurrence")
    assert (single.value, single.count) == (pytest.approx(1.1), 1)
    drafts = one(found, "fused layer verify over bare verify")
    assert (drafts.value, drafts.count, drafts.word) == (pytest.approx(1.2), 1, "missed")
    assert one(found, "bf16, up to 8 drafts").word == "not measured"


def test_of_a_cell_that_two_files_hold_the_first_counts() -> None:
    files = [{"environment": {"copy_tb_s": 4.0}, "rows": [row("gdn_decode", "Q1", "B64", us)]} for us in (60.0, 90.0)]
    (verdict,) = [v for v in verdicts(dict(enumerate(files))) if "fp32, 1,024 heads" in v.line.text]  # type: ignore[arg-type]
    assert (verdict.value, verdict.count) == (pytest.approx(60.0 / 66.0), 1)


def test_gates_checkpoints_and_mixes() -> None:
    rows = [
        row("kda_prefill", "G1", "1x8192", us, gates=gates, peers={"cudnn": cudnn, "fla": 900.0})
        for gates, us, cudnn in (("fast", 200.0, 210.0), ("slow", 211.0, 2300.0))
    ]
    rows += [
        row("gdn_prefill", "Q1", "1x8192", 240.0, bytes=10**8),
        row("gdn_prefill", "Q1", "1x8192+ckpt512", 260.0, bytes=14 * 10**7),
        row("gdn_prefill", "Q1", "8x4096", 400.0),
        row("gdn_prefill", "Q1", "28672+4096", 500.0),
        row("gdn_prefill", "Q1", "63x1+8192", 160.0),
    ]
    found = judged(*rows)
    assert one(found, "slowest gate set over the fastest").value == pytest.approx(211.0 / 200.0)
    assert one(found, "slowest gate set over the fastest").word == "missed"
    assert one(found, "geometric mean over cuDNN, fast gates").value == pytest.approx(200.0 / 210.0)
    assert one(found, "every cell faster than the best peer").count == 2
    assert one(found, "checkpoints every 512 tokens").value == pytest.approx(20.0 / 10.0)
    assert one(found, "the same read as time with checkpoints").value == pytest.approx(260.0 / 250.0)
    assert one(found, "the same read as time with checkpoints").word == "reported"
    mix = one(found, "a long sequence in a mix")
    assert (mix.value, mix.count, mix.over) == (pytest.approx(500.0 / 400.0), 2, 1)


def test_gate_sets_timed_side_by_side_are_what_counts() -> None:
    fast = row("kda_prefill", "G1", "1x8192", 200.0, gates="fast", ours_slow_us=204.0, ours_bound_us=198.0)
    alone = row("kda_prefill", "G1", "1x8192", 260.0, gates="slow")
    assert one(judged(fast, alone), "slowest gate set over the fastest").value == pytest.approx(204.0 / 198.0)
    assert one(judged(fast, alone), "slowest gate set over the fastest").floor == (1.0, 0)


def test_single_tokens_of_a_mix_count_with_the_state_they_move() -> None:
    found = judged(row("gdn_prefill", "Q1", "8x4096", 400.0), row("gdn_prefill", "Q1", "63x1+8192", 160.0))
    states = 63 * (2 * 32 * 128 * 128 * 4 + (2 * 16 * 128 + 2 * 32 * 128 + 2 * 32) * 2 + 8)
    assert one(found, "a long sequence in a mix").value == pytest.approx(160.0 / (100.0 + states / 4e6))


def test_a_peer_that_has_a_kernel_and_no_figure_leaves_a_line_incomplete() -> None:
    def word(**more: Any) -> str:
        return one(
            judged(row("gdn_decode", "Q1", "B64", 60.0, **more)), "every cell not slower than the best peer"
        ).word

    assert word(peers={"flashinfer": 70.0}, peers_missing={"fla": "Unsupported: no decode kernel"}) == "met"
    late = {"lmdeploy": "not compiled and tuned within the limit of this run"}
    assert word(peers={"flashinfer": 70.0}, peers_missing=late) == "incomplete"
    assert word(peers={"flashinfer": 50.0}, peers_missing=late) == "missed"
    assert word(peers_missing=late) == "not measured"


def test_flashinfer_with_its_passes_is_reported_without_a_limit() -> None:
    cell = row(
        "gdn_prefill", "Q1", "1x8192", 150.0, peers={"flashinfer": 100.0, "flashinfer_with_passes": 200.0},
    )  # fmt: skip
    found = judged(cell)
    with_passes = one(found, "geometric mean over FlashInfer with its")
    assert (with_passes.value, with_passes.word) == (pytest.approx(0.75), "reported")
    assert one(found, "every cell not slower than FlashInfer without").value == pytest.approx(1.5)


def test_host_times_of_prefill_are_not_those_of_a_step() -> None:
    found = judged(
        row("kda_prefill", "G1", "1x8192", 200.0, gates="fast", host_us=300.0),
        row("causal_conv1d_decode", "Q1", "B8", 2.0, state_dtype="bfloat16", host_us=9.0),
    )
    assert one(found, "host time of a public call").value == 9.0


def test_a_peer_that_writes_in_place_is_compared_with_ours_in_place() -> None:
    cell = row(
        "gdn_layer_decode", "Q1", "B64", 80.0, ours_in_place_us=72.0, peers={"lmdeploy": 120.0}, in_place_peers=["lmdeploy"]
    )  # fmt: skip
    assert one(judged(cell), "layer step over lmdeploy").value == pytest.approx(0.6)


def test_the_table_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    result = {
        "environment": {"copy_tb_s": 4.0},
        "rows": [row("gdn_decode", "Q1", "B64", 67.0, case="gdn_decode:Q1:B64:f32")],
    }
    names = unmeasured({"decode": result})
    assert "gdn_decode:Q1:B64:f32" not in names
    assert "gdn_decode:Q1:B4:f32" in names
    text = lines_table({"decode": result})
    assert f"{len(names)} cells of the matrix have no row" in text
    assert "| not measured |" in text
    monkeypatch.setattr(lines, "registry", lambda: [])
    assert "have no row" not in lines_table({"decode": result})


def test_the_whole_matrix_counts_only_when_it_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [case for case in lines.registry() if case.name in ("gdn_decode:Q1:B64:f32", "gdn_decode:Q1:B8:f32")]
    monkeypatch.setattr(lines, "registry", lambda: cases)
    rows = [row("gdn_decode", "Q1", case.workload.name, 60.0, case=case.name) for case in cases]
    environments = [
        {"copy_tb_s": 4.0, "date": date, "seconds": seconds} for date, seconds in (("a", 100.0), ("b", 390.0))
    ]

    def word(*results: dict[str, Any]) -> str:
        found = {verdict.line.text: verdict for verdict in verdicts(dict(enumerate(results)))}  # type: ignore[arg-type]
        return one(found, "the whole matrix").word

    first, second = ({"environment": environment, "rows": [it]} for environment, it in zip(environments, rows))
    assert word(first) == "not measured"
    assert word(first, second) == "missed"
    assert word(first, second | {"environment": environments[0]}) == "met"
    slow = {"copy_tb_s": 4.0, "date": "a", "seconds": 100.0, "host": {"seconds": 390.0}}
    assert word(first | {"environment": slow}, second | {"environment": slow}) == "missed", "host times count"


def test_what_bytes_alone_would_give_is_told_beside_each_line() -> None:
    rows = [
        row(
            "gdn_layer_decode", "Q1", "B256", 80.0, peers={"lmdeploy": 75.0}
        ),  # 60 us of bytes are 0.8 of the peer's time
        row("gdn_layer_decode", "Q3", "B256", 80.0, peers={"lmdeploy": 150.0}),
        row("gdn_decode", "Q1", "B256", 60.0, floor_us=50.0),
        row("gdn_decode", "Q3", "B256", 60.0, floor_us=58.0),
    ]
    found = judged(*rows)
    assert one(found, "lmdeploy's kernels").floor == (0.8, 1)
    assert one(found, "layer step over the bare recurrence").floor == (60.0 / 50.0, 1)
    assert one(judged(row("gdn_decode", "Q1", "B64", 60.0, host_us=12.0)), "host time").floor is None
    text = lines_table({"any": {"environment": {"copy_tb_s": 4.0}, "rows": rows}})
    assert "| 0.800 (1 over) |" in text
