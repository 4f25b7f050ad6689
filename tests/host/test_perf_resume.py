"""A run that goes on from result files: they keep the environment of their rows, and say what was added to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compact_state.perf import peers, run, schema
from compact_state.perf.cases import Case
from compact_state.perf.cli import main
from compact_state.perf.lines import Results
from compact_state.perf.tables import environment_line
from tests.host.perf_case import CPU, small, small_pools

CASES = [small("advance_state_ids", load) for load in ("B3", "B4", "B5", "B6")]
CONV = small("causal_conv1d_decode", "B3", "bfloat16")
VERSIONS = {"flashinfer": "0.7.4", "fla": "0.6.0", "cudnn": "1.3", "lmdeploy": "missing: ModuleNotFoundError"}
FIRST = "python -m perf all"


@pytest.fixture(autouse=True)
def _small_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    small_pools(monkeypatch)


def measure(out: Path, cases: list[Case], **options: Any) -> list[Path]:
    """Write a run of these cases; gives the files written."""
    result = run.run(cases, device=CPU, peer_names="none", say=lambda text: None, **options)
    return run.write(result, out, {case.name: case for case in [*CASES, CONV]})


def first(out: Path, cases: list[Case], monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with peers, whose command took its time."""
    with monkeypatch.context() as patched:
        patched.setattr(peers, "load", lambda names: ({}, VERSIONS))
        for path in measure(out, cases, command=[FIRST], commit="abc"):
            result = schema.load(path)
            result["environment"] |= {"compile_s": 150.0, "command_s": 300.0}
            run.replace(path, result)


def go_on(out: Path, cases: list[Case], **options: Any) -> list[Path]:
    """A run without peers that goes on from what is there."""
    before, left = run.unfinished(out, cases)
    options = {"command": ["python -m perf run --resume"], "commit": "def"} | options
    return measure(out, left, before=before, **options)


def test_a_resumed_file_keeps_its_environment_and_says_what_was_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first(tmp_path, CASES[:1], monkeypatch)
    path = tmp_path / "decode.json"
    kept = schema.load(path)["environment"]
    assert go_on(tmp_path, CASES[:2]) == [path]
    found = schema.load(path)
    assert [row["case"] for row in found["rows"]] == [case.name for case in CASES[:2]]
    (entry,) = found["environment"].pop("resumed")
    assert found["environment"] == kept
    assert entry["cases"] == [CASES[1].name]
    assert (entry["command"], entry["commit"]) == ("python -m perf run --resume", "def")
    assert set(entry["peers"].values()) == {"not asked for"}
    assert " ".join(entry) == "command date commit peers copy_tb_s matmul_tflop_s seconds cases"

    monkeypatch.setattr(run, "NAMED_CASES", 1)
    monkeypatch.setattr(run, "SAVE_EVERY_S", 0.0)
    saved: list[Any] = []
    by_name = {case.name: case for case in CASES}
    go_on(tmp_path, CASES, save=lambda result: saved.append(run.write(result, tmp_path, by_name)))
    assert saved == [[path], [path]], "what is saved on the way is recorded once"
    again = schema.load(path)["environment"].pop("resumed")
    assert again[0] == entry
    assert [each["cases"] for each in again[1:]] == [2]


def test_a_file_of_which_no_row_was_measured_anew_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first(tmp_path, [CONV, CASES[0]], monkeypatch)
    conv, decode = tmp_path / "conv.json", tmp_path / "decode.json"
    text, written = conv.read_text(), conv.stat().st_ino
    assert go_on(tmp_path, [CONV, *CASES[:2]]) == [decode]
    assert (conv.read_text(), conv.stat().st_ino) == (text, written)
    text, written = decode.read_text(), decode.stat().st_ino
    assert go_on(tmp_path, [CONV, *CASES[:2]]) == []
    assert go_on(tmp_path, [CONV, *CASES], budget_s=0.0) == []
    assert (decode.read_text(), decode.stat().st_ino) == (text, written)


def test_a_case_that_fails_is_named_and_nothing_else_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first(tmp_path, CASES[:1], monkeypatch)
    path = tmp_path / "decode.json"
    kept = schema.load(path)

    def fails(*arguments: Any) -> dict[str, Any]:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(run, "run_case", fails)
    assert go_on(tmp_path, CASES[:2]) == [path]
    assert schema.load(path) == kept | {"failures": {CASES[1].name: "RuntimeError: no such kernel"}}
    assert go_on(tmp_path, CASES[:2]) == []


def test_without_rows_to_go_on_from_the_environment_is_the_runs_own(tmp_path: Path) -> None:
    measure(tmp_path, CASES[:1], command=[FIRST])
    path = tmp_path / "decode.json"
    run.replace(path, schema.load(path) | {"rows": []})
    assert go_on(tmp_path, [*CASES[:1], CONV]) == [tmp_path / "conv.json", path]
    for file in (tmp_path / "conv.json", path):
        found = schema.load(file)["environment"]
        assert found["command"] == "python -m perf run --resume"
        assert "resumed" not in found


def test_another_device_and_host_times_are_recorded_with_what_was_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = ["--peers", "none", "--device", "cpu", "--out", str(tmp_path)]
    assert main(["run", "--case", "advance_state_ids:Q1:B64:f32", "--commit", "abc", *out]) == 0
    path = tmp_path / "decode.json"
    result = schema.load(path)
    result["environment"]["device"] = "NVIDIA H200"
    run.replace(path, result)
    kept = result["environment"]
    assert main(["run", "--case", "advance_state_ids:Q1:", "--commit", "abc", "--resume", *out]) == 0
    found = schema.load(path)
    (entry,) = found["environment"].pop("resumed")
    assert found["environment"] == kept
    assert entry["cases"] == ["advance_state_ids:Q1:B512:f32"]
    assert "--resume" in entry["command"]
    assert entry["device"] == "cpu"
    assert entry["host"]["seconds"] >= 0
    assert main(["host", "--case", "advance_state_ids:Q1:", *out[2:]]) == 0
    timed = schema.load(path)["environment"]
    assert timed["resumed"] == [entry]
    assert timed["host"]["date"] > entry["host"]["date"]


def test_the_caption_and_the_seconds_say_what_was_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first(tmp_path, CASES[:1], monkeypatch)
    path = tmp_path / "decode.json"
    kept = schema.load(path)["environment"]
    line = environment_line("decode.json", kept)
    assert "resumed" not in line
    entry = {"date": "2027", "commit": "abc", "peers": dict.fromkeys(VERSIONS, "not asked for"), "seconds": 7.5}
    without = kept | {"resumed": [entry | {"cases": 85}]}
    assert environment_line("decode.json", without) == f"{line} 85 cells by a resumed run without peers."
    other = entry | {"commit": "def", "device": "cpu", "peers": VERSIONS | {"cudnn": "not asked for"}, "cases": ["a"]}
    both = kept | {"resumed": [entry | {"peers": VERSIONS, "cases": ["a", "b"]}, other]}
    assert environment_line("decode.json", both).removeprefix(line) == (
        " 2 cells by a resumed run; 1 cell by a resumed run beside flashinfer, fla on cpu at `def`."
    )
    took = Results({"decode": {"environment": without, "rows": []}}).seconds
    assert sum(took.values()) == kept["seconds"] + 7.5
