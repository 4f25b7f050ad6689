"""Documents and comparisons from result files: schema, tables, charts, two commits side by side."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from compact_state.perf import compare as comparison
from compact_state.perf import schema, tables
from compact_state.perf.cases import select
from compact_state.perf.cli import RESULTS
from compact_state.perf.compare import compare, load_set
from compact_state.perf.lines import verdicts
from compact_state.perf.overview import overview_block
from compact_state.perf.report import FILES, load_results, replace_block, write_report
from compact_state.perf.run import dump
from compact_state.perf.serving.result import FILE as SERVING

ENVIRONMENT: dict[str, Any] = {
    "device": "NVIDIA H200",
    "driver": "580.1",
    "torch": "2.11",
    "triton": "3.6",
    "cutlass_dsl": "4.8.1",
    "copy_tb_s": 4.27,
    "matmul_tflop_s": 700.0,
    "commit": "abc123",
    "date": "2026-11-29T00:00:00Z",
    "command": "python -m perf run",
    "peers": {"flashinfer": "0.7.4", "fla": "missing: ModuleNotFoundError: No module named 'fla'"},
}


def row(op: str = "gdn_decode", workload: str = "B64", ours: float = 69.0, **fields: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "op": op,
        "geometry": "Q1",
        "workload": workload,
        "state_dtype": "float32",
        "ours_us": ours,
        "floor_us": 63.0,
        "slab_copy_us": 67.0,
        "spread": 0.004,
        "peers": {},
        "heads": "16/32",
        "bytes": 270_000_000,
        "flops": 268_000_000,
        "host_us": 8.0,
    }
    return base | fields


def result(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"environment": copy.deepcopy(ENVIRONMENT), "rows": list(rows), "failures": {}}


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_committed_results_follow_the_schema(path: Path) -> None:
    assert path.stem in (*FILES, SERVING.stem)
    loaded = schema.load(path)
    assert "H200" in loaded["environment"]["device"]
    assert loaded["environment"]["commit"] not in ("unknown", "")
    assert loaded["serving" if path == SERVING else "rows"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r["environment"].pop("commit"), "environment: lacks commit"),
        (lambda r: r["rows"][0].pop("peers"), r"rows\[0\]: lacks peers"),
        (lambda r: r["rows"][0].update(op="gdn_decoder"), "allowed: gdn_decode"),
        (lambda r: r["rows"][0].update(ours_us=0.0), "a positive number"),
        *(
            (
                lambda r, us=us: r["rows"][0].update(ours_us=us),
                r"rows\[0\]\.ours_us: got .*; allowed: a positive number",
            )
            for us in (float("nan"), float("inf"), -1.0, True, "69", None)
        ),
        (lambda r: r["rows"][0].update(floor_us=-1.0), r"rows\[0\]\.floor_us"),
        (lambda r: r["rows"][0].update(spread=-0.1), r"rows\[0\]\.spread"),
        (lambda r: r["rows"][0].update(state_dtype="fp16"), "allowed: float32, bfloat16"),
        (lambda r: r["rows"][0].update(peers={"fla": None}), r"peers\.fla"),
        (lambda r: r["rows"].append(r["rows"][0]), "a second row"),
        (lambda r: r.update(rows={}), "a list"),
    ],
)
def test_schema_names_what_is_wrong(change: Any, message: str) -> None:
    schema.validate(result(row(floor_us=None, slab_copy_us=None, spread=0)))
    bad = result(row())
    schema.validate(bad)
    change(bad)
    with pytest.raises(schema.SchemaError, match=message):
        schema.validate(bad)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "decode.json"
    path.write_text(dump(result(row()))[:-40])
    with pytest.raises(schema.SchemaError, match=r"decode\.json"):
        schema.load(path)


def test_written_rows_are_one_a_line_and_load_back(tmp_path: Path) -> None:
    content = result(row(), row(workload="B128"))
    path = tmp_path / "decode.json"
    path.write_text(dump(content))
    assert schema.load(path)["rows"] == content["rows"]
    assert sum(line.startswith('  {"op"') for line in path.read_text().splitlines()) == 2


def test_a_peer_that_updates_in_place_is_compared_with_ours_in_place() -> None:
    both = row(peers={"flashinfer": 70.0, "lmdeploy": 78.0}, ours_in_place_us=71.0, in_place_peers=["lmdeploy"])
    assert tables.ratio_to_best(both) == pytest.approx(69.0 / 70.0)
    only = row(peers={"lmdeploy": 78.0}, ours_in_place_us=71.0, in_place_peers=["lmdeploy"])
    assert tables.ratio_to_best(only) == pytest.approx(71.0 / 78.0)
    assert tables.ratio_to_best(row()) is None


def test_a_peers_slower_variant_is_not_its_best() -> None:
    passes = row(op="gdn_prefill", peers={"flashinfer": 240.0, "flashinfer_with_passes": 200.0})
    assert tables.best_peer(passes) == ("flashinfer", 240.0)


def test_summary_says_plainly_where_a_peer_is_faster() -> None:
    rows = [row(peers={"flashinfer": 60.0}), row(workload="B8", peers={"flashinfer": 80.0})]
    text = tables.summary("gdn_decode", rows)
    assert "A peer is faster on 1: Q1 B64 fp32 (flashinfer, 1.150)." in text
    assert "No peer is faster" in tables.summary("gdn_decode", rows[1:])
    measured = "`gdn_decode`: 2 cells, geometric mean 1.10 x floor, a call costs the host 9.0 us (median); no peer was measured."
    assert tables.summary("gdn_decode", [row(), row(host_us=10.0)]) == measured
    bare = [row(host_us=None, floor_us=None)]
    assert tables.summary("gdn_decode", bare) == "`gdn_decode`: 1 cells; no peer was measured."


def test_the_first_page_counts_lines_and_says_where_a_peer_is_faster() -> None:
    rows = [
        row(peers={"flashinfer": 60.0}),
        row(workload="B8", peers={"flashinfer": 80.0}),
        row(op="gdn_layer_decode"),
        row(op="kda_decode", geometry="G1", peers={"flashinfer": 80.0}),
    ]
    text = overview_block({"decode": result(*rows)})
    assert (
        "**A peer is faster**: `gdn_decode`: flashinfer on 1 of 2 cells, where ours takes up to 15.0 % longer." in text
    )
    assert "Ours is faster on every cell that a peer has a figure for: `kda_decode` (1)." in text
    assert "Without any peer's figure: `gdn_layer_decode`." in text
    assert "| 1 of 2 | Q1 B64 fp32 (flashinfer) 1.150; Q1 B8 fp32 (flashinfer) 0.863 |" in text
    assert "every cell not slower than the best peer: 1.150, limit 1" in text
    assert "cells of the matrix were not measured" in text
    assert "No peer is faster on any cell." in overview_block({"decode": result(row())})


def test_missing_peers_are_explained() -> None:
    rows = [
        row(peers_missing={"fla": "no decode kernel"}),
        row(workload="B8", peers_missing={"fla": "no decode kernel"}),
    ]
    assert tables.missing_peers(rows) == "Without a figure: fla: no decode kernel (2 cells)."


def write_results(folder: Path) -> None:
    folder.mkdir()
    decode = [
        row(workload=f"B{batch}", ours=10.0 + batch, state_dtype=dtype, peers={"flashinfer": 12.0 + batch})
        for batch in (1, 8, 64)
        for dtype in ("float32", "bfloat16")
    ]
    (folder / "decode.json").write_text(dump(result(*decode)))
    prefill = [
        row(
            "kda_prefill",
            load,
            150.0,
            geometry="G1",
            gates=gates,
            slab_copy_us=None,
            peers={"cudnn": 230.0, "fla": 1107.0},
        )
        for load in ("1x2048", "1x8192")
        for gates in ("fast", "slow")
    ]
    (folder / "kda_prefill.json").write_text(dump(result(*prefill)))


def test_report_from_a_fixture(tmp_path: Path) -> None:
    write_results(tmp_path / "results")
    readme = tmp_path / "README.md"
    readme.write_text("# Title\n\n<!-- perf:headline -->\nold\n<!-- /perf:headline -->\n\ntail\n")
    written = write_report(tmp_path / "results", tmp_path / "docs", readme)
    page = (tmp_path / "docs" / "performance.md").read_text()
    assert "## Decode, one token" in page
    assert "From `perf/results/h200/decode.json`: NVIDIA H200" in page
    assert "No peer is faster on any of them" in page
    assert "| Q1 (16/32) | B64 | fp32 | 74.00 | 63.00 |" in page
    assert "old" not in readme.read_text()
    assert readme.read_text().endswith("tail\n")
    assert "kda_prefill" in readme.read_text()
    images = {path.name for path in written if path.suffix == ".png"}
    assert {"roofline.png", "decode_over_floor.png", "decode_over_peer.png", "kda_prefill.png"} <= images
    assert all(path.stat().st_size > 1000 for path in written if path.suffix == ".png")
    again = write_report(tmp_path / "results", tmp_path / "docs", readme, charts=False)
    assert (tmp_path / "docs" / "performance.md") in again


def test_a_hand_written_part_of_the_page_survives(tmp_path: Path) -> None:
    write_results(tmp_path / "results")
    page = tmp_path / "docs" / "performance.md"
    page.parent.mkdir()
    page.write_text("mine\n<!-- perf:decode -->\nstale\n<!-- /perf:decode -->\nalso mine\n")
    write_report(tmp_path / "results", tmp_path / "docs", charts=False)
    text = page.read_text()
    assert text.startswith("mine\n")
    assert text.endswith("also mine\n")
    assert "stale" not in text


def test_a_folder_without_results_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no result file"):
        write_report(tmp_path, tmp_path)


def test_a_block_is_replaced_literally() -> None:
    text = "<!-- perf:x -->\n<!-- /perf:x -->"
    assert r"a\1b" in replace_block(text, "x", r"a\1b")


def test_comparison_of_two_sets_flags_what_moved_beyond_the_spread() -> None:
    base = [result(row(ours=100.0), row(workload="B8", ours=10.0), row(workload="B4", ours=5.0))]
    new = [result(row(ours=110.0), row(workload="B8", ours=10.02), row(workload="B1", ours=2.0))]
    text = compare(base, new)
    assert "| gdn_decode Q1 B64 float32 | 100.0 | 110.0 | 1.100 | slower |" in text
    assert "| gdn_decode Q1 B8 float32 | 10.0 | 10.02 | 1.002 |  |" in text
    assert "over 2 cases" in text
    assert compare(base, [result(row(workload="B2"))]) == "no common cases"


def test_sets_load_from_files_folders_and_reject_the_rest(tmp_path: Path) -> None:
    write_results(tmp_path / "results")
    assert len(load_set(str(tmp_path / "results"))) == 2
    assert len(load_set(str(tmp_path / "results" / "decode.json"))) == 1
    with pytest.raises(ValueError, match="allowed: a result file"):
        load_set("no-such-revision")


def test_the_committed_rows_of_a_revision_are_the_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess

    folder = tmp_path / comparison.RESULTS
    (folder / "development").mkdir(parents=True)
    (folder / "decode.json").write_text(dump(result(row())))
    (folder / "lmdeploy.json").write_text('{"serving": []}')
    (folder / "development" / "decode.json").write_text("no result")
    (folder / "development" / "decode.txt").write_text("words")
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "-A"], [*who, "commit", "-q", "-m", "rows"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True, capture_output=True)
    monkeypatch.setattr(comparison, "ROOT", tmp_path)
    assert load_set("HEAD") == [schema.load(folder / "decode.json")]
    assert load_set(str(folder)) == load_set("HEAD")
    assert "geometric mean 1.000 over 1 cases" in compare(load_set("HEAD"), load_set(str(folder)))


def test_identity_tells_gates_and_accepted_apart() -> None:
    rows = [row(op="gdn_verify", workload="B64T6", accepted=n) for n in (0, 3)]
    assert schema.identity(rows[0]) != schema.identity(rows[1])
    assert json.loads(json.dumps(rows[0])) == rows[0]


def test_a_peer_timed_outside_a_graph_is_marked() -> None:
    rows = [row(peers={"fla": 80.0}, eager_peers=["fla"]), row(workload="B1", peers={"fla": 70.0})]
    text = tables.rows_table(rows)
    assert "80.00*" in text
    assert "70.00 |" in text
    assert tables.eager_note(rows) == "* fla could not be captured in a graph: its host time is included."
    assert tables.eager_note(rows[1:]) == ""


def test_cells_at_a_lower_clock_are_named() -> None:
    rows = [{"case": "a", "clock_mhz": 1980}, {"case": "b", "clock_mhz": 1531}, {"case": "c"}]
    assert tables.clock_note(rows[:1]) == "Clock between rounds, of each cell the lowest: 1980 to 1980 MHz."
    assert tables.clock_note(rows).endswith("1531 to 1980 MHz, below 0.95 of it in b (1531).")
    assert tables.clock_note(rows[2:]) == ""


def test_the_whole_matrix_goes_from_cases_to_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every case of the registry, family by family as `all` measures it, with a peer's figure wherever a peer has a kernel."""
    from compact_state.perf import run
    from compact_state.perf.matrix import by_family
    from compact_state.perf.warm import IN_MEMORY, ON_DISK

    def timed(case: Any, *arguments: Any) -> dict[str, Any]:
        moved = case.work
        names = (*ON_DISK.get(case.op, ()), *IN_MEMORY.get(case.op, ()))
        made = row(case.op, case.workload.name, 60.0, geometry=case.geometry.id, state_dtype=case.state_dtype)
        names += ("flashinfer_with_passes",) if case.op == "gdn_prefill" else ()
        made |= {"peers": dict.fromkeys(names, 70.0)}
        made |= {"case": case.name, "bytes": moved.bytes, "flops": moved.flops, "host_us": 9.0}
        made |= {"heads": case.geometry.heads, "ours_in_place_us": 61.0}
        made |= {"gates": case.gates} if case.gates else {}
        return made | ({"accepted": case.accepted} if case.accepted is not None else {})

    monkeypatch.setattr(run, "run_case", timed)
    monkeypatch.setattr(run, "SAVE_EVERY_S", 0.05)
    for number, family in enumerate(by_family(select(), tmp_path)):
        names = {case.name: case for case in family.cases}
        monkeypatch.setattr(
            run.environment,
            "describe",
            lambda *a, n=number: copy.deepcopy(ENVIRONMENT) | {"date": f"turn {n}", "clocks": {}},
        )
        done = run.run(
            family.cases,
            device=torch.device("cpu"),
            peer_names="none",
            say=lambda text: None,
            save=lambda result, names=names: run.write(result, tmp_path / "h200", names),
        )
        assert done["failures"] == {}
        run.write(done, tmp_path / "h200", names)
    loaded = load_results(tmp_path / "h200")
    assert sum(len(result["rows"]) for result in loaded.values()) == len(select())
    assert {verdict.word for verdict in verdicts(loaded)} == {"met", "missed", "reported"}, "every line is judged"
    write_report(tmp_path / "h200", tmp_path / "docs", charts=False)
    page = (tmp_path / "docs" / "performance.md").read_text()
    assert "cells of the matrix were not measured" not in page
    assert "have no row" not in page


def test_cells_without_a_row_are_gathered_by_reason() -> None:
    failures = {
        "a:Q1:1": "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has more",
        "a:Q1:2": "OutOfMemoryError: CUDA out of memory. Tried to allocate 18.00 MiB.",
        "b:Q1:1": "not run: time budget",
    }
    text = tables.failed_cells(failures)
    assert text.startswith("Not measured, 3 cells.")
    assert "OutOfMemoryError: CUDA out of memory (2): `a:Q1:1`, `a:Q1:2`; not run: time budget (1): `b:Q1:1`." in text
    assert tables.failed_cells({}) == ""
