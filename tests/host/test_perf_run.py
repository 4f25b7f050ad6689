"""The harness itself, on the CPU: the gate stops wrong results, a missing peer is named, rows follow the schema."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from compact_state import cute_kernels
from compact_state.perf import matrix, peers, run, schema, timing
from compact_state.perf.bench import Unsupported, WrongResultError
from compact_state.perf.cases import GATES, Case, select, workload
from compact_state.perf.cli import _cold_peers, _compiles, main
from compact_state.perf.geometries import Geometry, geometry
from compact_state.perf.inputs import Workspace, delta_problem
from compact_state.perf.matrix import Turn, by_family
from compact_state.perf.peers.common import PeerCall, log_decay
from compact_state.perf.warm import IN_MEMORY, ON_DISK, _waits_for, environment, pattern, units, warm, warm_group

CPU = torch.device("cpu")
SMALL_GDN = Geometry("Q4", "two heads", 8, "gdn", 1, 2, ("float32",))
SMALL_KDA = Geometry("G2", "two heads", 8, "kda", 2, 2, ("float32",), -5.0)
SMALL_SOFTPLUS = Geometry("G5", "two heads", 4, "kda", 2, 2, ("float32",))


def small(op: str, load: str, dtype: str = "float32", gates: str | None = None, accepted: int | None = None) -> Case:
    g = SMALL_KDA if op.startswith("kda") else SMALL_GDN
    return Case(op, g, workload(load), dtype, gates, accepted)


@pytest.fixture(autouse=True)
def _small_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "CPU_POOL_BYTES", 16 * 2**20)
    monkeypatch.setattr(timing, "COLD_BYTES", 2**20)
    monkeypatch.setattr(timing, "WORK_US", 0.0)


EVERY_OPERATOR = [
    small("gdn_decode", "B3"),
    small("kda_decode", "B3", "bfloat16"),
    small("gdn_verify", "B2T3", accepted=2),
    small("kda_verify", "B2T3", "bfloat16", accepted=1),
    small("gdn_commit", "B2", accepted=2),
    small("kda_commit", "B2", accepted=1),
    small("gdn_layer_decode", "B2"),
    small("kda_layer_decode", "B2T2", accepted=1),
    small("gdn_prefill", "40+20+ckpt16"),
    small("kda_prefill", "33+1", gates="slow"),
    small("causal_conv1d_prefill", "5+3+ckpt2", "bfloat16"),
    small("causal_conv1d_decode", "B3", "bfloat16"),
    small("advance_state_ids", "B3"),
]


@pytest.mark.parametrize("case", EVERY_OPERATOR, ids=lambda case: case.name)
def test_every_operator_runs_is_checked_and_gives_a_valid_row(case: Case, tmp_path: Path) -> None:
    result = run.run([case], device=CPU, peer_names="none", command=["test"], say=lambda text: None)
    assert result["failures"] == {}
    (row,) = result["rows"]
    assert row["error"]["ours"]["output" if "commit" not in case.op else "state"] < 0.01
    (path,) = run.write(result, tmp_path, {case.name: case})
    assert path.name == f"{case.file}.json"
    assert schema.load(path)["rows"] == json.loads(json.dumps([row]))


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("g", [SMALL_KDA, SMALL_SOFTPLUS], ids=["bounded", "softplus"])
def test_gate_sets_have_the_stated_mean_decay(gates: str, g: Geometry) -> None:
    mean = float(log_decay(delta_problem(Workspace(CPU, 2**20), g, workload("400"), "float32", gates)).mean())
    expected = {"fast": (-2.9, -2.1), "slow": (-0.01, 0.0), "trained": (-0.3, 0.0), "bound": (-25.0, -4.9)}[gates]
    assert expected[0] < mean < expected[1]


def test_a_wrong_operator_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = cute_kernels.gdn_decode

    def wrong(*arguments: object, **options: object) -> torch.Tensor:
        return right(*arguments, **options).mul_(1.05)

    monkeypatch.setattr(cute_kernels, "gdn_decode", wrong)
    case = small("gdn_decode", "B3")
    with pytest.raises(WrongResultError, match="ours: RMS ratios"):
        run.run_case(case, Workspace(CPU, 2**24), timing.WallTimer(), {}, None)
    result = run.run([case], device=CPU, peer_names="none", say=lambda text: None)
    assert result["rows"] == []
    assert "RMS ratios" in result["failures"][case.name]


def fake_peer(scale: float) -> types.SimpleNamespace:
    """A peer that runs our own operator in place and scales its output."""

    def decode(p):  # type: ignore[no-untyped-def]
        def make(read, write, out):  # type: ignore[no-untyped-def]
            return lambda: cute_kernels.gdn_decode(*p.arguments, p.pool, read, read, out=out).mul_(scale)

        return PeerCall(make, in_place=True)

    return types.SimpleNamespace(decode=decode)


def refusing_peer() -> types.SimpleNamespace:
    def decode(p):  # type: ignore[no-untyped-def]
        raise Unsupported("bf16 pools only")

    return types.SimpleNamespace(decode=decode)


def test_peers_are_timed_when_right_and_named_when_wrong_or_unable() -> None:
    adapters = {
        "flashinfer": fake_peer(1.0),
        "fla": fake_peer(1.1),
        "cudnn": refusing_peer(),
        "lmdeploy": types.SimpleNamespace(),
    }
    row = run.run_case(small("gdn_decode", "B3"), Workspace(CPU, 2**24), timing.WallTimer(), adapters, None)
    assert set(row["peers"]) == {"flashinfer"}
    assert row["in_place_peers"] == ["flashinfer"]
    assert "wrong result" in row["peers_missing"]["fla"]
    assert row["peers_missing"]["cudnn"] == "Unsupported: bf16 pools only"
    assert row["peers_missing"]["lmdeploy"] == "Unsupported: no decode kernel"


def test_absent_peers_are_named_not_guessed() -> None:
    adapters, status = peers.load("cudnn")
    assert set(status) == set(peers.NAMES)
    assert status["fla"] == "not asked for"
    if "cudnn" not in adapters:
        assert status["cudnn"].startswith("missing: ModuleNotFoundError")
    with pytest.raises(ValueError, match="allowed: all, none, flashinfer"):
        peers.load("vllm")


def test_slot_ids_are_distinct_within_a_launch_and_return_late() -> None:
    ids = Workspace(CPU, 2**20).slot_ids(40, 4, 9)
    for read, write in ids:
        assert torch.cat([read, write]).unique().numel() == 8
    first_pass = torch.cat([torch.cat(pair) for pair in ids[:5]])
    assert first_pass.unique().numel() == 40
    with pytest.raises(ValueError, match="8 needed"):
        Workspace(CPU, 2**20).slot_ids(7, 4, 1)


def test_rotation_touches_several_times_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "COLD_BYTES", 4 * timing.L2_BYTES)
    assert timing.rotations(2**20) * 2**20 >= 4 * timing.L2_BYTES
    assert timing.rotations(2**30) == 4
    assert timing.rotations(1) == timing.MAX_LAUNCHES


def test_summary_of_samples() -> None:
    result = timing.summarize([10.0, 11.0, 12.0, 13.0, 100.0], True)
    assert (result.us, result.spread) == (12.0, pytest.approx(2.0 / 12.0))


def test_a_time_budget_names_what_was_left_out() -> None:
    cases = [small("advance_state_ids", "B3"), small("gdn_decode", "B3")]
    result = run.run(cases, device=CPU, peer_names="none", budget_s=0.0, say=lambda text: None)
    assert result["rows"] == []
    assert set(result["failures"].values()) == {"not run: time budget"}


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    arguments = ["--op", "advance_state_ids", "--case", "B64", "--peers", "none", "--device", "cpu"]
    assert main(["run", *arguments, "--out", str(out), "--commit", "abc"]) == 0
    result = schema.load(out)
    assert result["environment"]["commit"] == "abc"
    assert "advance_state_ids" in result["environment"]["command"]
    assert main(["run", "--list", "--op", "gdn_prefill", "--quick"]) == 0
    assert "gdn_prefill:Q1:1x8192:f32" in capsys.readouterr().out
    assert main(["run", "--op", "nothing"]) == 2
    if not torch.cuda.is_available():
        assert main(["run", "--op", "gdn_decode"]) == 2


def test_measuring_needs_no_plotting_or_command_line_packages() -> None:
    import subprocess
    import sys

    code = (
        "import sys; sys.modules.update(dict.fromkeys(('rich', 'typer', 'matplotlib', 'pandas', 'cutlass', 'triton')));"
        "from compact_state.perf import run; from compact_state.perf.cli import _cold_peers, main;"
        "sys.exit(main(['run', '--op', 'advance_state_ids', '--peers', 'none', '--device', 'cpu']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_runs_from_the_repository_root_without_an_installation(tmp_path: Path) -> None:
    import subprocess
    import sys

    root = Path(run.__file__).resolve().parents[1]
    if not (root / "src").is_dir():
        pytest.skip("installed from a wheel")
    command = [sys.executable, "-m", "perf", "run", "--list", "--op", "gdn_decode"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False, env={"PATH": ""})
    assert done.returncode == 0, done.stderr
    assert "gdn_decode:Q1:B64:f32" in done.stdout


def test_geometry_of_small_cases_exists() -> None:
    assert geometry(SMALL_GDN.id).kind == "gdn"
    assert geometry(SMALL_KDA.id).kind == "kda"


def test_small_launches_are_repeated_until_a_graph_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "WORK_US", 300.0)
    monkeypatch.setattr(timing, "COLD_BYTES", 0)
    for moved in (10, 2**20, 2**24):
        per_launch = timing.LAUNCH_US + moved / timing.BYTES_A_US
        assert timing.rotations(moved) >= int(300.0 / per_launch)


class BrokenCapture(timing.GraphTimer):
    """A device whose graphs cannot be captured."""

    def __init__(self) -> None:
        self._stream = None  # type: ignore[assignment]

    def _capture(self, contender: timing.Contender, pool: object) -> torch.cuda.CUDAGraph:
        raise RuntimeError("capture failed")


def test_ours_is_never_timed_outside_a_graph_and_a_peer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import contextlib

    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    timer = BrokenCapture()
    for name in ("ours", "ours_in_place", "slab_copy_pdl"):
        with pytest.raises(RuntimeError, match="capture failed"):
            timer._runner(timing.Contender(name, [lambda: None]), None)
    assert timer._runner(timing.Contender("fla", [lambda: None] * 3), None).graph is False


def test_the_whole_matrix_command_gives_every_family_its_turn(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["all", "--op", "advance_state_ids", "--peers", "none", "--device", "cpu", "--out", str(tmp_path)]
    assert main(arguments) == 0
    result = schema.load(tmp_path / "decode.json")
    assert {row["workload"] for row in result["rows"]} == {"B64", "B512"}
    assert result["environment"]["command"] == " ".join(["python", "-m", "perf", *arguments])
    assert "step: status 0" in capfd.readouterr().out


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
    assert matrix._next([slow], ["flashinfer", "fla"], said.append) is slow
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
