"""The whole matrix in one command: peers warmed ahead, a turn for each family, and what is left when one is lost."""

from __future__ import annotations

import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from compact_state.perf import host, matrix, peers, run, schema, timing
from compact_state.perf.cases import Case, select
from compact_state.perf.cli import _cold_peers, _compiles, main
from compact_state.perf.matrix import Turn, by_family
from compact_state.perf.peers.common import PeerCall
from compact_state.perf.warm import IN_MEMORY, ON_DISK, _waits_for, environment, pattern, units, warm, warm_group
from tests.host.perf_case import CPU, fake_peer, refusing_peer, small, small_pools


@pytest.fixture(autouse=True)
def _small_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    small_pools(monkeypatch)


def test_the_whole_matrix_command_gives_every_family_its_turn(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["all", "--op", "advance_state_ids", "--peers", "none", "--device", "cpu", "--out", str(tmp_path)]
    assert main(arguments) == 0
    result = schema.load(tmp_path / "decode.json")
    assert {row["workload"] for row in result["rows"]} == {"B64", "B512"}
    assert result["environment"]["command"] == " ".join(["python", "-m", "perf", *arguments])
    assert "step: status 0" in capfd.readouterr().out
    assert all(row["host_us"] > 0 for row in result["rows"])
    assert result["environment"]["host"]["seconds"] >= 0


def test_host_times_can_be_left_to_a_quiet_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = ["--case", "advance_state_ids:Q1:B64:f32", "--device", "cpu", "--out", str(tmp_path)]
    assert main(["all", *chosen, "--peers", "none", "--host", "0"]) == 0
    (row,) = schema.load(tmp_path / "decode.json")["rows"]
    assert "host_us" not in row
    assert main(["host", *chosen, "--limit", "0"]) == 1, "no time for any"
    assert main(["host", *chosen]) == 0
    (timed,) = schema.load(tmp_path / "decode.json")["rows"]
    assert timed.pop("host_us") > 0
    assert timed.pop("host_slowdown") >= 1
    assert timed == row
    assert main(["host", "--case", "gdn_decode:Q1:B64:f32", *chosen[2:]]) == 1, "no row of that case"


def test_a_host_time_is_the_median_and_the_first_batch_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    lasting = iter([500.0, 500.0, 10.0, 11.0, 20.0, 21.0, 10.0, 11.0])
    now = [0.0]
    monkeypatch.setattr(host.time, "perf_counter", lambda: now[0])

    def call() -> None:
        now[0] += next(lasting) / 1e6

    assert host.microseconds([call], lambda: None, batches=3, calls=2) == pytest.approx(10.5)


def test_a_turn_is_waited_for_and_an_orphan_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os
    import threading

    turn = Turn(tmp_path / "step")
    timer = threading.Timer(0.2, turn.give, [7.0, {("step", "Q1:T6"): ["fla"]}])
    timer.start()
    assert turn.wait() == (7.0, {("step", "Q1:T6"): ["fla"]})
    assert turn.ready.exists()
    timer.join()
    parents = iter([1, 1, 2])
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    with pytest.raises(RuntimeError, match="has ended"):
        Turn(tmp_path / "conv").wait()


def test_families_cover_the_registry_and_select_exactly_their_cases(tmp_path: Path) -> None:
    cases = select()
    families = by_family(cases, tmp_path)
    assert sorted(case.name for family in families for case in family.cases) == sorted(case.name for case in cases)
    for family in families:
        assert [case.name for case in select("", pattern(family.cases))] == [case.name for case in family.cases]


def test_a_peer_that_did_not_compile_in_time_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "load", lambda names: ({"fla": fake_peer(1.0), "flashinfer": fake_peer(1.0)}, {}))
    result = run.run(
        [small("gdn_decode", "B3")],
        device=CPU,
        say=lambda text: None,
        without=lambda case: {"fla": "late", "cudnn": "late"},
    )
    (row,) = result["rows"]
    assert set(row["peers"]) == {"flashinfer"}
    assert row["peers_missing"] == {"fla": "late"}


class Process:
    """A process that has written its log and ended, or that never ends."""

    def __init__(self, code: int | None = None, ended: list[str] | None = None) -> None:
        self.returncode = code
        self.ended = ended

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        if self.ended is not None:
            self.ended.append("killed")

    def wait(self, timeout: float | None = None) -> int:
        return -9


def test_what_is_not_warm_at_the_limit_is_cold() -> None:
    cases = select("gdn_decode", "Q1:B64:f32")
    assert warm(cases, ["flashinfer", "fla"], limit_s=0.0) == {("step", "Q1"): ["flashinfer"]}
    assert warm(cases, ["fla", "cudnn"], limit_s=60.0) == {}


def test_a_peer_that_is_done_is_not_cold_though_another_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str]] = []

    def start(command: list[str], stdout: Any, env: dict[str, str], **options: Any) -> Process:
        seen.append(env)
        name = command[command.index("--peers") + 1]
        stdout.write(f"some other line\nwarm: {name}\n" if name == "flashinfer" else "Killed\n")
        return Process(0 if name == "flashinfer" else None)

    monkeypatch.setattr(matrix.subprocess, "Popen", start)
    cases = select("gdn_decode", "Q1:B64:f32")
    cold = warm(cases, ["flashinfer", "lmdeploy"], logs=tmp_path, limit_s=0.3, cache=tmp_path / "kept")
    assert cold == {("step", "Q1"): ["lmdeploy"]}
    assert {env["FLA_CONFIG_DIR"] for env in seen} == {str(tmp_path / "kept" / "fla" / "step")}
    late = {("step", "Q1"): ["flashinfer", "lmdeploy"]}
    assert _cold_peers(cases[0], late).keys() == {"lmdeploy"}
    assert _compiles(cases[0], late)
    assert not _compiles(cases[0], cold)


def test_a_users_own_folders_of_peers_stand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    found = environment(tmp_path, "gdn_prefill")
    assert found["TRITON_CACHE_DIR"] == "/mine"
    assert found["FLA_CONFIG_DIR"] == str(tmp_path / "fla" / "gdn_prefill")


METHODS = {"decode": "decode", "verify": "verify", "layer_decode": "layer_decode", "prefill": "prefill"}


@pytest.mark.parametrize("op", sorted(ON_DISK.keys() | IN_MEMORY.keys()))
def test_peers_are_warmed_only_where_their_adapter_has_a_kernel(op: str) -> None:
    import ast

    for name in (*ON_DISK.get(op, ()), *IN_MEMORY.get(op, ())):
        source = Path(peers.__file__).with_name(f"{peers.MODULES[name]}.py").read_text()
        functions = {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
        kind, _, method = op.partition("_")
        assert (f"conv_{op.rsplit('_', 1)[1]}" if kind == "causal" else METHODS[method]) in functions


def test_units_cover_every_peer_that_compiles_and_gate_sets_are_not_compiled_twice() -> None:
    found = units(select(), peers.NAMES)
    assert ("gdn_prefill", "Q1", "fla") in found
    assert ("gdn_prefill", "Q5", "lmdeploy") in found
    assert ("step", "Q1:T6", "flashinfer") in found
    assert ("step", "Q1:T6", "lmdeploy") in found
    assert not [unit for unit in found if unit[2] == "cudnn"]
    for unit, cases in found.items():
        names = [(case.op, case.workload.name, case.state_dtype) for case in cases]
        assert len(names) == len(set(names)), unit
    compiled = {(case.op, peer) for (_, _, peer), cases in found.items() for case in cases}
    assert compiled == {(op, peer) for op, names in ON_DISK.items() for peer in names}


def test_other_geometries_wait_for_the_one_that_is_tuned() -> None:
    found = list(units(select(), peers.NAMES))
    assert _waits_for(("kda_prefill", "G3", "fla"), found) in (
        ("kda_prefill", "G1", "fla"),
        ("kda_prefill", "G4", "fla"),
    )
    assert _waits_for(("kda_prefill", "G1", "fla"), found) is None
    assert _waits_for(("gdn_prefill", "Q3", "lmdeploy"), found) == ("gdn_prefill", "Q1", "lmdeploy")
    assert _waits_for(("gdn_prefill", "Q3", "fla"), [("gdn_prefill", "Q3", "fla")]) is None
    assert _waits_for(("step", "Q3:T6", "lmdeploy"), found) is None


def test_a_unit_that_takes_over_tuned_configurations_waits_unless_they_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    def start(command: list[str], stdout: Any, **options: Any) -> Process:
        started.append(command)
        stdout.write("warm: fla\nsound: fla\n")
        return Process(0)

    monkeypatch.setattr(matrix.subprocess, "Popen", start)
    cases = select("gdn_prefill", "(Q1|Q3):1x2048:f32")
    assert warm(cases, ["fla"], logs=tmp_path, cache=tmp_path, say=lambda text: None) == {}
    assert ["--after" in command for command in started] == [False, True]
    assert Path(started[1][-1]).exists(), "what was waited for is over"
    (tmp_path / "fla" / "gdn_prefill").mkdir(parents=True)
    (tmp_path / "fla" / "gdn_prefill" / "a_kernel.json").write_text("{}")
    started.clear()
    assert warm(cases, ["fla"], logs=tmp_path, cache=tmp_path, say=lambda text: None) == {}
    assert started == [], "what was warmed into a folder is not warmed again"
    more = select("gdn_prefill", "(Q1|Q3):(1x2048|1x8192):f32")
    warm(more, ["fla"], logs=tmp_path, cache=tmp_path, say=lambda text: None)
    assert ["--after" in command for command in started] == [False, False]


def test_what_failed_is_warmed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def start(command: list[str], stdout: Any, **options: Any) -> Process:
        started.append(command)
        stdout.write("warm: flashinfer\ngdn_decode:Q1:B64:f32 flashinfer: TypeError: no compiler\n")
        return Process(0)

    monkeypatch.setattr(matrix.subprocess, "Popen", start)
    cases = select("gdn_decode", "Q1:B64:f32")
    for count in (1, 2):
        assert warm(cases, ["flashinfer"], logs=tmp_path, cache=tmp_path, say=lambda text: None) == {}
        assert len(started) == count


def test_a_warm_group_says_whether_anything_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = fake_peer(1.0)
    wrong = types.SimpleNamespace(decode=lambda p: PeerCall(lambda *ids: lambda: 1 / 0, in_place=True))
    for adapter, sound, failures in ((right, True, 0), (refusing_peer(), True, 0), (wrong, False, 1)):
        monkeypatch.setattr(peers, "load", lambda names, adapter=adapter: ({"cudnn": adapter}, {"cudnn": "1"}))
        assert len(warm_group([small("gdn_decode", "B3")], "cudnn")) == failures
        said = capsys.readouterr().out.split("\n")
        assert "warm: cudnn" in said
        assert ("sound: cudnn" in said) == sound


def test_a_kernel_of_flashinfer_is_loaded_or_compiled_without_its_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    class Spec:
        def __init__(self, kept: str | None) -> None:
            self.kept, self.calls = kept, []

        def try_load(self) -> str | None:
            return self.kept

        def compile_and_persist(self) -> None:
            self.calls.append("compiled")

        def load(self) -> str:
            return "compiled and loaded"

        def build_and_load(self) -> str:
            raise AssertionError("waits for the lock")

    modules = {"flashinfer": types.ModuleType("flashinfer"), "flashinfer.jit": types.ModuleType("flashinfer.jit")}
    modules["flashinfer.jit.cute_dsl_core"] = types.SimpleNamespace(JitSpecCuteDsl=Spec)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(peers, "load", lambda names: ({}, {}))
    warm_group([], "flashinfer")
    kept, absent = Spec("kept"), Spec(None)
    assert (kept.build_and_load(), kept.calls) == ("kept", [])
    assert (absent.build_and_load(), absent.calls) == ("compiled and loaded", ["compiled"])


def test_units_that_have_most_cases_start_first() -> None:
    found = [(unit, len(cases)) for unit, cases in units(select(), peers.NAMES).items() if unit[0] in ("step", "conv")]
    assert [count for _, count in found] == sorted((count for _, count in found), reverse=True)


def test_a_family_whose_peer_compiles_for_ever_is_measured_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (slow,) = by_family(select("gdn_prefill", "Q1:1x2048"), tmp_path)
    started: list[Any] = []

    def start(command: list[str], env: dict[str, str]) -> Process:
        started.append(command[command.index("--peers") :])
        if "--warm-here" not in command:
            slow.turn.ready.touch()
        return Process(None, started)

    monkeypatch.setattr(matrix.subprocess, "Popen", start)
    monkeypatch.setattr(matrix, "PATIENCE_S", 0.2)
    slow.start(["flashinfer", "fla"])
    said: list[str] = []
    began = time.monotonic()
    assert matrix._next([slow], ["flashinfer", "fla"], said.append, began + 0.6) is slow
    assert time.monotonic() - began >= 0.6, "as long as peers may compile anyway"
    assert started == [["--peers", "flashinfer,fla", "--warm-here", "flashinfer"], "killed", ["--peers", "fla"]]
    assert "without flashinfer" in said[0]


def test_a_run_that_is_killed_leaves_valid_files_that_name_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "SAVE_EVERY_S", 0.0)
    cases = [small("advance_state_ids", "B3"), small("gdn_decode", "B3"), small("kda_decode", "B3")]
    by_name = {case.name: case for case in cases}

    def begin(case: Case) -> None:
        if case is cases[2]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.run(
            cases,
            device=CPU,
            peer_names="none",
            say=lambda text: None,
            save=lambda result: run.write(result, tmp_path, by_name),
            begin=begin,
        )
    found = schema.load(tmp_path / "decode.json")
    assert [row["op"] for row in found["rows"]] == ["gdn_decode", "advance_state_ids"]
    assert found["failures"] == {cases[2].name: "not run: the run was ended"}
    assert list(tmp_path.iterdir()) == [tmp_path / "decode.json"]
    before, left = run.unfinished(tmp_path, cases)
    assert left == [cases[2]]
    whole = run.run(left, device=CPU, peer_names="none", say=lambda text: None, before=before)
    assert {row["case"] for row in whole["rows"]} == set(by_name)
    assert whole["failures"] == {}


def test_after_a_lost_device_nothing_else_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*arguments: Any) -> dict[str, Any]:
        raise RuntimeError("an illegal memory access was encountered")

    class Timer(timing.WallTimer):
        pass

    monkeypatch.setattr(run, "run_case", lost)
    monkeypatch.setattr(run, "GraphTimer", Timer)
    monkeypatch.setattr(run, "Workspace", lambda *arguments: None)
    monkeypatch.setattr(run, "_device_works", lambda: False)
    monkeypatch.setattr(run.environment, "describe", lambda *arguments: _environment())
    monkeypatch.setattr(run.environment, "clocks", lambda: None)
    cases = [small("gdn_decode", "B3"), small("kda_decode", "B3")]
    result = run.run(cases, device=torch.device("cuda"), peer_names="none", say=lambda text: None)
    assert "illegal memory access" in result["failures"][cases[0].name]
    assert result["failures"][cases[1].name] == f"not run: {run.DEVICE_LOST}"


def _environment() -> dict[str, Any]:
    return dict.fromkeys(schema.ENVIRONMENT) | {"clocks": {}, "copy_tb_s": 4.0, "matmul_tflop_s": 700.0}


def test_a_family_that_is_lost_goes_on_without_the_case_that_lost_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # The process dies in the second case as a crash of a peer's kernel would end it: no exception, no last word.
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "try:\n"
        "    from compact_state.perf import run\n"
        "except ImportError:\n"
        "    run = None\n"
        "if run is not None:\n"
        "    right, run.SAVE_EVERY_S = run.run_case, 0.0\n"
        "    def run_case(case, *arguments):\n"
        "        return os._exit(139) if case.name == 'advance_state_ids:Q1:B512:f32' else right(case, *arguments)\n"
        "    run.run_case = run_case\n"
    )
    source = Path(run.__file__).resolve().parents[1] / "src"
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{source}")
    out = tmp_path / "out"
    arguments = ["all", "--op", "advance_state_ids,causal_conv1d_decode", "--case", "advance|Q1:B1:", "--peers", "none"]
    assert main([*arguments, "--device", "cpu", "--out", str(out), "--logs", str(tmp_path / "logs")]) == 1
    found = schema.load(out / "decode.json")
    assert [row["workload"] for row in found["rows"]] == ["B64"]
    assert found["failures"] == {"advance_state_ids:Q1:B512:f32": "the process was lost in this case"}
    assert schema.load(out / "conv.json")["environment"]["command_s"] > 0
    assert "step: status 139, goes on" in capfd.readouterr().out
