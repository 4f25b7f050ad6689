"""The harness itself, on the CPU: the gate stops wrong results, a missing peer is named, rows follow the schema."""

from __future__ import annotations

import contextlib
import json
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compact_state import cute_kernels
from compact_state.perf import peers, run, schema, timing
from compact_state.perf.bench import WrongResultError
from compact_state.perf.cases import GATES, Case, workload
from compact_state.perf.cli import main
from compact_state.perf.geometries import Geometry, geometry
from compact_state.perf.inputs import Workspace, delta_problem
from compact_state.perf.peers.common import PeerCall, log_decay
from tests.host.perf_case import CPU, SMALL_GDN, SMALL_KDA, SMALL_SOFTPLUS, fake_peer, refusing_peer, small, small_pools


@pytest.fixture(autouse=True)
def _small_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    small_pools(monkeypatch)


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


def test_what_a_wrong_peer_wrote_into_a_pool_is_not_read_by_the_next_case() -> None:
    ws = Workspace(CPU, 2**24)

    def decode(p):  # type: ignore[no-untyped-def]
        def ruin(read, write, out):  # type: ignore[no-untyped-def]
            return lambda: (p.pool.fill_(float("inf")), out.zero_())[1]

        return PeerCall(ruin, in_place=True)

    case = small("gdn_decode", "B3")
    row = run.run_case(case, ws, timing.WallTimer(), {"fla": types.SimpleNamespace(decode=decode)}, None)
    assert "wrong result" in row["peers_missing"]["fla"]
    pool = ws.pool(torch.float32, 2, 128, 128)
    assert torch.isfinite(pool).all()
    assert 0.05 < pool.std() < 0.2, "random states again"


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
        pytest.skip("needs a source tree; this is an installed wheel")
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
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    timer = BrokenCapture()
    for name in ("ours", "ours_in_place", "slab_copy_pdl"):
        with pytest.raises(RuntimeError, match="capture failed"):
            timer._runner(timing.Contender(name, [lambda: None]), None)
    assert timer._runner(timing.Contender("fla", [lambda: None] * 3), None).graph is False


class FakeRounds(timing.GraphTimer):
    """Contenders run on the host, each round a microsecond; a peer's third run fails."""

    def __init__(self) -> None:
        self._stream = None  # type: ignore[assignment]
        self._takes = timing.Takes(lambda seconds: None)

    def _runner(self, contender: timing.Contender, pool: object) -> timing.Runner:
        def run() -> None:
            for launch in contender.launches:
                launch()

        return timing.Runner(run, True, len(contender.launches), None)

    @staticmethod
    def _rounds(runners: dict[str, timing.Runner], samples: timing.Samples, count: int) -> float:
        for _ in range(count):
            for name, runner in runners.items():
                timing.GraphTimer._run(name, runner)
                samples[name].append(1.0)
        return 1980.0


@pytest.fixture
def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(timing, "WARM_UP_S", 0.0)


@pytest.mark.parametrize(
    ("takes", "us", "left"),
    [
        ([[10.0] * 11, [9.0] * 11], 10.0, 1),  # steady: one take
        ([[10.0, 15.0] * 6, [11.0] * 11], 11.0, 0),  # disturbed, then steady, though slower than half of its rounds
        ([[10.0] * 6 + [11.0] * 5, *[[1.0, 30.0] * 6] * 3], 10.0, 0),  # disturbed four times: the steadiest one
    ],
)
@pytest.mark.usefixtures("_no_device")
def test_a_disturbed_case_is_taken_again_and_the_steadier_take_counts(
    takes: list[list[float]], us: float, left: int
) -> None:
    class Scripted(FakeRounds):
        def _measure(self, runners: dict[str, timing.Runner]) -> tuple[timing.Samples, float]:
            return {"ours": takes.pop(0), "fla": [5.0] * 11}, 1980.0

    timings = Scripted().time([timing.Contender(name, [lambda: None]) for name in ("ours", "fla")])
    assert timings.by_name["ours"].us == us
    assert len(takes) == left


@pytest.mark.usefixtures("_no_device")
def test_a_contender_that_lasts_long_gets_three_rounds_and_no_more() -> None:
    taken: dict[str, int] = {"ours": 0, "fla": 0}

    class Slow(FakeRounds):
        @staticmethod
        def _rounds(runners: dict[str, timing.Runner], samples: dict[str, list[float]], count: int) -> float:
            for _ in range(count):
                for name, runner in runners.items():
                    if not timing.GraphTimer._is_done(samples[name], runner):
                        taken[name] += 1
                        samples[name].append(timing.SLOW_S * 1e6 * (1.01 if name == "fla" else 0.1))
            return 1980.0

    Slow().time([timing.Contender(name, [lambda: None]) for name in taken])
    assert taken["fla"] == timing.SLOW_ROUNDS
    assert taken["ours"] >= timing.MIN_ROUNDS


@pytest.mark.usefixtures("_no_device")
def test_a_peer_that_fails_while_it_is_timed_costs_no_other_its_figure() -> None:
    calls: list[int] = []

    def fails() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("repeats can not be negative")

    contenders = [
        timing.Contender(name, [fails if name == "fla" else lambda: None]) for name in ("ours", "fla", "cudnn")
    ]
    timings = FakeRounds().time(contenders)
    assert set(timings.by_name) == {"ours", "cudnn"}
    assert timings.failures == {"fla": "ValueError: repeats can not be negative"}
    assert timings.clock_mhz == 1980.0
    calls.clear()
    with pytest.raises(ValueError, match="negative"):
        FakeRounds().time([timing.Contender("ours", [fails])])


def test_a_case_that_fails_beside_peers_is_measured_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    right = run.run_case

    def fails_beside_peers(
        case: Case, ws: Workspace, timer: object, adapters: dict[str, object], *more: object
    ) -> object:
        if adapters:
            raise RuntimeError("CUDA out of memory")
        return right(case, ws, timer, adapters, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(run, "run_case", fails_beside_peers)
    monkeypatch.setattr(run.peers, "load", lambda names: ({"fla": fake_peer(1.0)}, {"fla": "0.6.0"}))
    result = run.run([small("gdn_decode", "B3")], device=CPU, say=lambda text: None)
    (row,) = result["rows"]
    assert result["failures"] == {}
    assert row["peers_missing"] == {"fla": "the case failed beside the peers: RuntimeError: CUDA out of memory"}


def test_a_case_of_its_own_is_measured_without_peers_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.peers, "load", lambda names: ({"fla": fake_peer(1.0)}, {"fla": "0.6.0"}))
    result = run.run([replace(small("gdn_decode", "B3"), alone=True)], device=CPU, say=lambda text: None)
    (row,) = result["rows"]
    assert row["peers"] == {}
    assert row["peers_missing"] == {"fla": run.ALONE}


def test_a_wrong_result_of_ours_is_not_tried_again_without_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(case: Case, ws: Workspace, timer: object, adapters: dict[str, object], *more: object) -> object:
        assert adapters, "a second try"
        raise WrongResultError("ours: RMS ratios")

    monkeypatch.setattr(run, "run_case", wrong)
    monkeypatch.setattr(run.peers, "load", lambda names: ({"fla": fake_peer(1.0)}, {"fla": "0.6.0"}))
    result = run.run([small("gdn_decode", "B3")], device=CPU, say=lambda text: None)
    assert result["rows"] == []
    assert "WrongResultError" in result["failures"]["gdn_decode:" + small("gdn_decode", "B3").name.split(":", 1)[1]]


def test_memory_is_given_back_where_much_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[str] = []
    monkeypatch.setattr(run.gc, "collect", lambda: collected.append("garbage"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: collected.append("pools"))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: run.GARBAGE_BYTES)
    run._collect(True)
    assert collected == []
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: run.GARBAGE_BYTES + 1)
    run._collect(False)
    assert collected == []
    run._collect(True)
    assert collected == ["garbage", "pools"]


@pytest.mark.parametrize(
    ("clocks", "counts", "pauses"),
    [
        ([1980.0], 0, 0),
        ([1530.0, 1960.0], 1, 1),  # down once, then up
        ([1530.0, 1700.0, 1600.0, 1650.0], 1, 3),  # never up again: the highest of the four
    ],
)
def test_a_case_at_a_lower_clock_than_others_is_taken_again(clocks: list[float], counts: int, pauses: int) -> None:
    waited: list[float] = []
    steady = timing.Takes(waited.append)
    steady.fastest = 1980.0
    left = iter(enumerate(clocks))

    def take() -> tuple[timing.Samples, float]:
        number, clock = next(left)
        return {"ours": [float(number)]}, clock

    samples, clock = steady.undisturbed(take)
    assert (samples["ours"], clock, len(waited)) == ([float(counts)], clocks[counts], pauses)


def test_the_first_cases_set_the_clock_and_patience_ends() -> None:
    steady = timing.Takes(lambda seconds: None)
    assert steady.undisturbed(lambda: ({}, 1900.0))[1] == steady.fastest == 1900.0
    takes = iter([1700.0, 1990.0])
    assert steady.undisturbed(lambda: ({}, next(takes)))[1] == steady.fastest == 1990.0
    steady.patience_s = 0.0
    takes = iter([1700.0, 1990.0])
    assert steady.undisturbed(lambda: ({}, next(takes)))[1] == 1700.0
