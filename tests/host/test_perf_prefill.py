"""Prefill's shared inputs: workloads of a geometry take one oracle, and what is wrong anywhere it looks is not timed."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compact_state import cute_kernels
from compact_state.cute_kernels import reference
from compact_state.perf import prefill_inputs, run, timing, warm
from compact_state.perf.bench import WrongResultError
from compact_state.perf.cases import Case, select, workload
from compact_state.perf.geometries import Geometry
from compact_state.perf.inputs import Workspace, cu_seqlens, delta_problem
from compact_state.perf.peers.common import PeerCall
from compact_state.perf.prefill_inputs import shared_inputs

CPU = torch.device("cpu")
GDN = Geometry("Q4", "two heads", 8, "gdn", 1, 2, ("float32",))
KDA = Geometry("G2", "two heads", 8, "kda", 2, 2, ("float32",), -5.0)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "COLD_BYTES", 2**18)
    monkeypatch.setattr(prefill_inputs, "COLD_BYTES", 2**10)


def case(load: str, g: Geometry = GDN, gates: str | None = None, dtype: str = "float32") -> Case:
    return Case(f"{g.kind}_prefill", g, workload(load), dtype, gates)


def workspace(**gate_sets: tuple[str | None, ...]) -> Workspace:
    return Workspace(CPU, 2**23, shared_rows=96, gate_sets=gate_sets)


def test_workloads_of_a_geometry_share_rows_and_a_second_set_takes_the_next_ones() -> None:
    ws = workspace()
    shared = shared_inputs(case("40+8"), ws, 2)
    assert shared is shared_inputs(case("1x16"), ws, 1)
    one, other, next_set = (
        shared.problem(case("40+8"), ws),
        shared.problem(case("1x16"), ws),
        shared.problem(case("40+8"), ws, 1),
    )
    assert torch.equal(one.q[:16], other.q)
    assert torch.equal(torch.cat([one.v, next_set.v]).flatten(1), shared.packed[:96, 2 * 128 :])
    assert not torch.equal(one.gate, next_set.gate)


@pytest.mark.parametrize("gates", ["fast", "slow", "trained", "bound"])
def test_the_oracle_of_all_gate_sets_is_each_ones_own_recurrence(gates: str) -> None:
    every = ("fast", "slow", "trained", "bound")
    ws = workspace(G2=every)
    wanted = case("1x40+ckpt16", KDA, gates)
    shared = shared_inputs(wanted, ws, 1)
    oracle, p = shared.oracle(wanted), shared.problem(wanted, ws)
    assert set(shared.oracles) == set(every)
    states = torch.zeros(2, 2, 128, 128, dtype=torch.float64)
    states[0] = shared.state
    ids = torch.tensor([[0], [1]], dtype=torch.int32)
    out = torch.empty(40, 2, 128, dtype=torch.float64)
    reference.kda_prefill(
        *p.arguments, states, *ids, torch.tensor([0, 40], dtype=torch.int32), out=out, compute_dtype=torch.float64, **p.options
    )  # fmt: skip
    assert torch.allclose(oracle.out[:40], out, rtol=1e-9, atol=1e-12)
    assert torch.allclose(oracle.states[40], states[1], rtol=1e-9, atol=1e-12)
    assert {16, 32, 40} <= set(oracle.states)


def test_a_state_that_the_oracle_lacks_is_added() -> None:
    ws = workspace()
    first, second = case("1x16"), case("1x40+ckpt8")
    shared = shared_inputs(first, ws, 1)
    out = shared.oracle(first).out
    assert not shared.oracle(first).covers(second)
    assert {8, 16, 24, 32, 40} <= set(shared.oracle(second).states)
    assert torch.allclose(shared.oracle(first).out, out, rtol=1e-9, atol=1e-12)


def spoil_output(out: torch.Tensor, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    out[-1] *= 1.5


def spoil_state(out: torch.Tensor, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    arguments[7][arguments[9][0].long()] *= 1.05


def spoil_last_state(out: torch.Tensor, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    arguments[7][arguments[9][-1].long()] *= 1.05


def spoil_checkpoint(out: torch.Tensor, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    arguments[7][options["checkpoints"].slots[0].long()] *= 1.05


@pytest.mark.parametrize(
    ("spoil", "word"),
    [(spoil_output, "output"), (spoil_state, "state"), (spoil_last_state, "state"), (spoil_checkpoint, "checkpoint")],
)
def test_what_is_wrong_anywhere_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[torch.Tensor, tuple[Any, ...], dict[str, Any]], None], word: str
) -> None:
    right = cute_kernels.gdn_prefill

    def wrong(*arguments: Any, **options: Any) -> torch.Tensor:
        out = right(*arguments, **options)
        spoil(out, arguments, options)
        return out

    monkeypatch.setattr(cute_kernels, "gdn_prefill", wrong)
    with pytest.raises(WrongResultError, match=rf"RMS ratios .*{word}"):
        run.run_case(case("24+10+ckpt8"), workspace(), timing.WallTimer(), {}, None)


class Recording(timing.WallTimer):
    """Keeps the gates that each contender's launches ran on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        right = cute_kernels.kda_prefill
        self.gates: list[torch.Tensor] = []
        self.seen: dict[str, list[torch.Tensor]] = {}

        def spy(*arguments: Any, **options: Any) -> torch.Tensor:
            self.gates.append(arguments[3])
            return right(*arguments, **options)

        monkeypatch.setattr(cute_kernels, "kda_prefill", spy)

    def time(self, contenders: Any) -> timing.Timings:
        for contender in contenders:
            self.gates = []
            for launch in contender.launches:
                launch()
            self.seen[contender.name] = self.gates
        return super().time(contenders)


def test_gate_sets_of_a_cell_are_timed_side_by_side_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    ws, recording = workspace(G2=("fast", "slow")), Recording(monkeypatch)
    row = run.run_case(case("1x24", KDA, "fast"), ws, recording, {}, None)
    assert row["ours_us"] > 0
    assert row["ours_slow_us"] > 0
    assert set(row["error"]) == {"ours"}, "the other set is checked in its own case"
    shared = shared_inputs(case("1x24", KDA, "fast"), ws, 1)
    for name, gates in (("ours", "fast"), ("ours_slow", "slow")):
        assert torch.equal(recording.seen[name][0], shared.gates[gates].gate[:24])
    assert "ours_fast_us" not in run.run_case(case("1x24", KDA, "slow"), ws, timing.WallTimer(), {}, None)


def test_checkpoints_go_where_the_launch_that_is_checked_neither_reads_nor_writes() -> None:
    ws = workspace()
    used = [torch.tensor(ids, dtype=torch.int32) for ids in ([1, 4], [0, 6])]
    for _ in range(20):
        kept = ws.slots_apart(7, 3, used)
        assert sorted(kept.tolist()) == [2, 3, 5]
    with pytest.raises(ValueError, match="pool of 7 slots, 4 used, 4 more"):
        ws.slots_apart(7, 4, used)


def test_in_a_pool_that_is_nearly_full_no_checkpoint_is_overwritten() -> None:
    few = case("1x40+ckpt8")
    for seed in range(6):
        ws = Workspace(CPU, 1)
        ws.generator.manual_seed(seed)
        row = run.run_case(few, ws, timing.WallTimer(), {}, None)
        assert row["error"]["ours"]["checkpoint"] < 0.004


@pytest.mark.parametrize("name", ["flash_linear_attention", "lmdeploy"])
def test_all_input_sets_of_a_case_give_fla_one_tensor_of_lengths(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    seen: list[torch.Tensor] = []

    def chunked(q, k, v, *rest, cu_seqlens, initial_state, **options):  # type: ignore[no-untyped-def]
        seen.append(cu_seqlens)
        return v, initial_state

    def preprocess(q, k, b, a, bias, rate, ratio, **options):  # type: ignore[no-untyped-def]
        assert (rate < 0).all(), "its models pass a signed exponent"
        return q, k, b, a

    kernels = "lmdeploy.pytorch.kernels.cuda"
    for module, names in {
        "fla": {}, "fla.ops": {}, "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": chunked},
        "lmdeploy": {}, "lmdeploy.pytorch": {}, "lmdeploy.pytorch.kernels": {}, kernels: {},
        f"{kernels}.gated_delta_preprocess": {"gated_delta_preprocess": preprocess},
    }.items():  # fmt: skip
        made = types.ModuleType(module)
        vars(made).update(names)
        monkeypatch.setitem(sys.modules, module, made)
    adapter = importlib.import_module(f"compact_state.perf.peers.{name}")
    ws, load = workspace(), case("24+10").workload
    cu = cu_seqlens(load, CPU)
    for _ in range(6):
        problem = delta_problem(ws, case("24+10").geometry, load, "float32")
        (call,) = adapter.prefill(problem, cu).values()
        ids = torch.arange(2, dtype=torch.int32)
        call.make(ids, ids, problem.output())()
    assert len({id(lengths) for lengths in seen}) == 1
    assert (len(seen), seen[0].dtype) == (6, torch.int64)


def test_flashkda_is_given_raw_inputs_and_packed_states_of_bounded_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    def fwd(q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial, final, cu):  # type: ignore[no-untyped-def]
        assert all(x.is_contiguous() for x in (q, k, v, g, beta, out, initial, final, A_log, dt_bias))
        assert (cu.dtype, dt_bias.shape, initial.shape) == (torch.int64, (2, 128), (2, 2, 128, 128))
        slots = torch.arange(2, dtype=torch.int32)
        inputs = q[0], k[0], v[0], g[0], beta[0], A_log, dt_bias.flatten(), initial.clone(), slots, slots, cu.int()
        cute_kernels.kda_prefill(*inputs, scale=scale, lower_bound=lower_bound, out=out[0])

    made = types.ModuleType("flash_kda")
    made.fwd, made.__version__ = fwd, "0.0.1+abc"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_kda", made)
    adapter = importlib.import_module("compact_state.perf.peers.flash_kda")
    assert adapter.version() == "0.0.1+abc"
    ws, peers = workspace(), {"flashkda": adapter}
    row = run.run_case(case("24+10", KDA, "fast"), ws, timing.WallTimer(), peers, None)
    assert row["peers"]["flashkda"] > 0
    assert row["error"]["flashkda"]["output"] < 0.004
    for other in (case("24+10", replace(KDA, lower_bound=None), "fast"), case("40+ckpt8", KDA, "fast"), case("24+10")):
        row = run.run_case(other, workspace(), timing.WallTimer(), peers, None)
        assert row["peers"] == {}
        assert row["peers_missing"]["flashkda"].startswith("Unsupported")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cases_in_turn_pass_whatever_ran_before(dtype: str) -> None:
    ws = workspace()
    for load in ("24+10", "1x40+ckpt8", "1+3+20", "1x16"):
        row = run.run_case(case(load, dtype=dtype), ws, timing.WallTimer(), {}, None)
        assert row["error"]["ours"]["output"] < 0.004


def test_every_case_is_warmed_for_each_peer_that_keeps_kernels_on_disk() -> None:
    cases = select()
    found = warm.units(cases, ("flashinfer", "fla", "lmdeploy"))
    assert next(iter(found))[0].endswith("prefill")
    wanted = {(case.name, peer) for case in warm.distinct(cases) for peer in warm.ON_DISK.get(case.op, ())}
    assert not {case.name for case in cases if case.alone} & {name for name, _ in wanted}
    assert {(case.name, unit[2]) for unit, group in found.items() for case in group} == wanted
    for (_, name, _), group in found.items():
        assert {case.geometry.id for case in group} == {name.split(":")[0]}


def test_a_peer_that_fails_is_named_and_the_others_are_warmed(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    def failing(p: Any, cu: torch.Tensor) -> dict[str, PeerCall]:
        def make(read: torch.Tensor, write: torch.Tensor, out: torch.Tensor) -> Callable[[], torch.Tensor]:
            def launch() -> torch.Tensor:
                called.append(p.workload.name)
                raise RuntimeError("no compiler")

            return launch

        return {"fla": PeerCall(make, in_place=True)}

    monkeypatch.setattr("compact_state.perf.peers.load", lambda names: ({"fla": SimpleNamespace(prefill=failing)}, {}))
    failures = warm.warm_group([case("24+10"), case("1x16")], "fla")
    assert called == ["24+10", "1x16"]
    assert [text.split(" fla: ")[1] for text in failures] == ["RuntimeError: no compiler"] * 2
