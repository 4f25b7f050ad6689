"""The sweep without a GPU: space, builds that fail, checks, restored state, resuming, and what becomes an entry."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from compact_state.autotune import report, runner, store
from compact_state.autotune.builds import build_candidates
from compact_state.autotune.cli import tune_command
from compact_state.autotune.journal import Journal, Trial
from compact_state.autotune.measure import measure_case
from compact_state.autotune.space import SPACES, settings, space_of
from compact_state.cute_kernels.compile.manifest import Entry, ResourceBudget
from compact_state.cute_kernels.configs import recurrent, tables
from compact_state.perf import timing
from compact_state.perf.cases import Case, workload
from compact_state.perf.geometries import Geometry, geometry
from compact_state.perf.inputs import Workspace
from compact_state.perf.timing import Contender, Timing, Timings

CPU = torch.device("cpu")
SMALL = Geometry("Q1", "two heads", 1, "gdn", 1, 2, ("float32",))
SPACE = SPACES["gdn_decode"]
FACTS = {"device": "cpu", "cutlass_dsl": "4.8.1", "source": "s"}


class FakeTimer:
    """Runs every launch once and says what `us` gives for a symbol; counts the cases."""

    def __init__(self, us: Any) -> None:
        self.us, self.calls = us, 0

    def time(self, contenders: Sequence[Contender]) -> Timings:
        self.calls += 1
        results = Timings()
        for contender in contenders:
            assert contender.restore is not None
            contender.restore()
            contender.launches[0]()
            results.by_name[contender.name] = Timing(self.us(contender.name), 0.001)
        return results


def build_all(entries: Sequence[Entry], jobs: int, advance: Any) -> dict[str, str | None]:
    return {entry.key.symbol(): None for entry in entries}


def small_cases(*batches: int) -> list[Case]:
    return [Case("gdn_decode", SMALL, workload(f"B{batch}"), "float32") for batch in batches]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(timing, "COLD_BYTES", 2**20)
    monkeypatch.setattr(timing, "WORK_US", 0.0)
    monkeypatch.setattr(tables, "device_name", lambda: None)
    monkeypatch.setattr(runner, "cases_of", lambda op, *rest: small_cases(1, 2, 4))
    yield
    tables.forget()


def sweep(folder: Path, us: Any, **options: Any) -> runner.Sweep:
    options = {"build": build_all, "timer": FakeTimer(us), "device": CPU, "progress": False} | options
    return runner.tune("gdn_decode", out=folder, **options)


def test_every_space_is_legal_holds_the_heuristic_and_is_read_by_the_operator() -> None:
    for op, space in SPACES.items():
        kind = op.split("_")[0]
        for name in ("Q1", "Q5") if kind == "gdn" else ("G1", "G4"):
            for dtype in space.states:
                shape = space.shape(Case(op.split(":")[0], geometry(name), workload("B64"), dtype))
                keys = space.candidates(shape)
                assert all(key.rejection() is None for key in keys)
                assert len({key.symbol() for key in keys}) == len(keys) >= 3
                assert space.heuristic(**shape) in keys
                assert space.is_wired(shape)


def test_an_operator_that_does_not_read_tables_is_refused(monkeypatch) -> None:
    monkeypatch.setitem(SPACES, "gdn_decode", replace(SPACE, choose=recurrent.heuristic))
    with pytest.raises(runner.TuneError, match="does not ask the tables"):
        sweep(Path("unused"), lambda name: 1.0)


def test_unknown_names_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="nothing to tune; allowed: gdn_decode"):
        space_of("gdn_decoder")


def test_cases_come_from_the_registry_and_take_workloads_it_has_not(monkeypatch) -> None:
    monkeypatch.undo()
    names = [case.name for case in runner.cases_of("kda_decode", state_dtypes=["float32"])]
    assert "kda_decode:G1:B64:f32" in names
    assert not any("Q1" in name or "bf16" in name for name in names)
    verify = runner.cases_of("kda_verify:wy", workloads=["B64T6"])
    assert {(c.op, c.workload.name, c.state_dtype) for c in verify} == {("kda_verify", "B64T6", "bfloat16")}
    (extra,) = runner.cases_of("gdn_decode", ["Q2"], ["B7"], ["bfloat16"])
    assert extra.name == "gdn_decode:Q2:B7:bf16"
    with pytest.raises(ValueError, match="G1: no GDN geometry"):
        runner.cases_of("gdn_decode", ["G1"])
    with pytest.raises(ValueError, match="float16: allowed"):
        runner.cases_of("gdn_decode", state_dtypes=["float16"])


def test_candidates_are_checked_under_their_own_key_and_on_restored_state(monkeypatch) -> None:
    """The state a candidate starts from is the same for all, whatever the one before it did to the pool."""
    seen: list[tuple[str, float]] = []
    ws = Workspace(CPU, 2**22)
    pool: list[torch.Tensor] = []

    class Spy(FakeTimer):
        def time(self, contenders: Sequence[Contender]) -> Timings:
            for contender in contenders:
                contender.restore()
                seen.append((contender.name, float(pool[0].double().sum())))
                contender.launches[0]()
                pool[0].add_(1.0)
            return super().time(contenders)

    original = ws.pool

    def spied(*arguments: Any, **options: Any) -> torch.Tensor:
        pool[:] = [original(*arguments, **options)]
        return pool[0]

    monkeypatch.setattr(ws, "pool", spied)
    chosen: list[str] = []
    real = tables.tuned
    monkeypatch.setattr(
        tables, "tuned", lambda *a, **k: (lambda key: (chosen.append(key.symbol()), key)[1])(real(*a, **k))
    )
    (case,) = small_cases(2)
    keys = SPACE.candidates(SPACE.shape(case))[:4]
    trials = measure_case(case, keys, SPACE, ws, Spy(lambda name: 5.0), FACTS)
    assert [trial.settings for trial in trials] == [settings(key) for key in keys]
    assert all(trial.us == 5.0 and trial.error is None for trial in trials)
    assert {name for name, _ in seen} == {key.symbol() for key in keys}
    assert len({total for _, total in seen}) == 1


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda out: out.add_(1.0), "wrong result"),
        (lambda out: out.view(torch.int16)[0, 0, 0].bitwise_xor_(1), "other bits"),
    ],
)
def test_a_candidate_with_another_result_is_not_timed(monkeypatch, change, word) -> None:
    from compact_state import cute_kernels

    right = cute_kernels.gdn_decode
    (case,) = small_cases(2)
    shape = SPACE.shape(case)
    keys = [key for key in SPACE.candidates(shape) if key != SPACE.heuristic(**shape)][:3]

    def wrong_for_one(*arguments: Any, **options: Any) -> torch.Tensor:
        out = right(*arguments, **options)
        if recurrent.choose(**shape) == keys[1]:
            change(out)
        return out

    monkeypatch.setattr(cute_kernels, "gdn_decode", wrong_for_one)
    trials = measure_case(case, keys, SPACE, Workspace(CPU, 2**22), FakeTimer(lambda name: 5.0), FACTS)
    assert [trial.us is None for trial in trials] == [False, True, False]
    assert word in (trials[1].error or "")


def test_candidates_that_do_not_build_are_left_out_and_named(tmp_path) -> None:
    bad = recurrent.RecurrentDecodeKey("gdn", "float32", 1, 8, False).symbol()

    def build(entries: Sequence[Entry], jobs: int, advance: Any) -> dict[str, str | None]:
        return build_all(entries, jobs, advance) | {bad: "spills 8 B stores, 0 B loads"}

    done = sweep(tmp_path, lambda name: 1.0, build=build)
    assert done.rejected == {bad: "spills 8 B stores, 0 B loads"}
    assert not any(trial.settings == {"rows": 1, "warps": 8, "pdl": False} for trial in done.trials)
    assert bad in report.describe(done)


def test_a_build_that_fails_is_a_reason_not_an_end() -> None:
    reasons = build_candidates([Entry("no_such_kernel", recurrent.RecurrentDecodeKey("gdn", "float32", 4, 2, True),
                                      ResourceBudget(128))], jobs=1)  # fmt: skip
    ((symbol, reason),) = reasons.items()
    assert symbol == "recurrent_decode_gdn_f32_r4w2_pdl"
    assert reason is not None


def test_build_only_needs_no_gpu_and_times_nothing(tmp_path) -> None:
    timer = FakeTimer(lambda name: 1.0)
    done = sweep(tmp_path, None, build_only=True, device=None, timer=timer)
    assert (timer.calls, done.trials, done.table) == (0, [], None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_no_gpu_is_said(tmp_path) -> None:
    with pytest.raises(runner.TuneError, match="no CUDA device"):
        sweep(tmp_path, lambda name: 1.0, device=None)


def test_an_interrupted_sweep_goes_on_and_a_changed_kernel_starts_again(tmp_path, monkeypatch) -> None:
    book = tmp_path / "journal.jsonl"
    first = FakeTimer(lambda name: 1.0)
    assert len(sweep(tmp_path, None, timer=first, journal=book, budget_s=-1.0).left) == 3
    sweep(tmp_path, None, timer=first, journal=book)
    text = book.read_text()
    lines = text.splitlines(keepends=True)
    book.write_text("".join(lines[:-1]) + lines[-1][:40])  # killed while it wrote the last trial of the last case
    second = FakeTimer(lambda name: 1.0)
    done = sweep(tmp_path, None, timer=second, journal=book)
    assert (done.resumed, second.calls) == (2, 1)
    assert all(json.loads(line) for line in book.read_text().splitlines() if line.endswith("}"))
    third = FakeTimer(lambda name: 1.0)
    assert sweep(tmp_path, None, timer=third, journal=book).resumed == 3
    monkeypatch.setattr(tables, "code_digest", lambda kernel: "another")
    assert sweep(tmp_path, None, timer=third, journal=book).resumed == 0


def fake_us(fast: str, by: float) -> Any:
    return lambda name: 10.0 * (1.0 - by) if name.endswith(fast) else 10.0


def test_a_sweep_writes_a_table_that_the_operator_then_reads(tmp_path, monkeypatch) -> None:
    done = sweep(tmp_path, fake_us("_r1w8", 0.10), commit="c0ffee")
    assert done.table == tmp_path / "cpu" / "recurrent_decode.json"
    table = tables.read(done.table, "recurrent_decode")
    facts = table["environment"]
    assert (facts["commit"], facts["source"]) == ("c0ffee", tables.code_digest("recurrent_decode"))
    assert "2: (1 8 False) 0.900; 4: (1 8 False) 0.900" in report.describe(done)
    (entry,) = table["entries"]
    found = entry["set"], entry["range"], entry["gain"]
    assert found == ({"rows": 1, "warps": 8, "pdl": False}, {"heads": [2, 8]}, [0.1, 0.1])
    assert len(table["timings"]) == 3 * len(SPACE.candidates(SPACE.shape(small_cases(1)[0])))
    monkeypatch.setattr(tables, "device_name", lambda: "cpu")
    monkeypatch.setenv(tables.ENVIRONMENT, str(done.table.parent))
    tables.forget()
    assert recurrent.choose("gdn", "float32", 8) == recurrent.RecurrentDecodeKey("gdn", "float32", 1, 8, False)
    assert all(recurrent.choose("gdn", "float32", n) == recurrent.heuristic("gdn", "float32", n) for n in (1, 9))


def test_a_table_holds_the_instructions_of_what_was_measured(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(runner, "machine_code", lambda kernel, key: f"code of {key.symbol()}")
    done = sweep(tmp_path, fake_us("_r1w8", 0.10))
    assert done.table is not None
    code = tables.read(done.table, "recurrent_decode")["code"]
    symbols = {entry.key.symbol() for entry in done.candidates}
    assert code == {symbol: f"code of {symbol}" for symbol in symbols}
    again = runner.assemble("gdn_decode", done.table, out=tmp_path / "again", environment_facts={"device": "cpu"})
    assert again.table is not None
    assert tables.read(again.table, "recurrent_decode")["code"] == code


def test_a_near_sweep_tries_what_differs_in_one_field(tmp_path) -> None:
    case = small_cases(4)[0]
    default = settings(SPACE.heuristic(**SPACE.shape(case)))
    near = [settings(key) for key in runner._candidates(SPACE, case, near=True)]
    assert default in near
    assert len(near) < len(runner._candidates(SPACE, case))
    assert all(sum(found[name] != default[name] for name in default) <= 1 for found in near)
    assert {name for found in near for name in default if found[name] != default[name]} == set(default)


def test_within_the_threshold_the_heuristic_stays(tmp_path) -> None:
    done = sweep(tmp_path, fake_us("_r1w8", 0.019))
    assert done.entries == []
    assert done.table is not None
    assert "no entry" in report.table_block(done.table)


def test_a_second_operator_adds_to_the_table_and_other_facts_replace_it(tmp_path, monkeypatch) -> None:
    sweep(tmp_path, fake_us("_r1w8", 0.10))
    monkeypatch.setattr(runner, "cases_of", lambda op, *rest: small_cases(64))
    done = sweep(tmp_path, fake_us("_r1w8", 0.10))
    assert done.table is not None
    rows = tables.read(done.table, "recurrent_decode")["timings"]
    assert {row["case"] for row in rows} == {f"gdn_decode:Q1:B{n}:f32" for n in (1, 2, 4, 64)}
    monkeypatch.setattr(tables, "code_digest", lambda kernel: "another")
    sweep(tmp_path, fake_us("_r1w8", 0.10))
    rows = tables.read(done.table, "recurrent_decode")["timings"]
    assert {row["case"] for row in rows} == {"gdn_decode:Q1:B64:f32"}


def trials(size: int, times: dict[int, float], case: str = "") -> list[Trial]:
    """Trials of one size: microseconds by rows; 2 is what the heuristic chooses."""
    shape = {"kind": "gdn", "state": "float32", "heads": size}
    return [
        Trial(case or f"c{size}", "recurrent_decode", shape, rows(count), us, 0.0, None) for count, us in times.items()
    ]


def rows(count: int) -> dict[str, Any]:
    return {"rows": count, "warps": 2, "pdl": True}


def test_a_range_ends_at_the_sizes_measured_and_equal_neighbours_are_one_entry() -> None:
    measured = [*trials(16, {2: 10.0, 1: 8.0}), *trials(64, {2: 10.0, 1: 9.0}), *trials(256, {2: 10.0, 1: 11.0})]
    measured += trials(1024, {2: 10.0, 4: 9.0})
    space = replace(SPACE, heuristic=lambda kind, state, heads: recurrent.RecurrentDecodeKey(kind, state, 2, 2, True))
    first, second = store.entries(space, measured)
    assert (first["range"], first["set"], first["gain"]) == ({"heads": [16, 64]}, rows(1), [0.1, 0.2])
    assert (second["range"], second["set"]) == ({"heads": [1024, 1024]}, rows(4))


def test_settings_that_lose_in_one_geometry_of_a_size_make_no_entry() -> None:
    fast = trials(64, {2: 10.0, 1: 5.0, 4: 9.0}, "Q1")
    for slow in ({2: 10.0, 1: 10.1, 4: 9.5}, {2: 10.0, 4: 9.5}):  # the fastest loses there, or was not tried
        (entry,) = store.entries(SPACE, fast + trials(64, slow, "Q3"))
        assert entry["set"] == rows(4)


def test_a_gain_within_the_spread_of_its_timings_makes_no_entry() -> None:
    quiet = [replace(trial, spread=0.02) for trial in trials(64, {2: 10.0, 1: 9.5})]
    (entry,) = store.entries(SPACE, quiet)
    assert (entry["set"], entry["gain"]) == (rows(1), [0.05, 0.05])
    for noisy in (rows(1), rows(2)):
        measured = [replace(trial, spread=0.06 if trial.settings == noisy else 0.01) for trial in quiet]
        assert store.entries(SPACE, measured) == []


def test_failed_trials_and_sizes_without_a_default_make_no_entry() -> None:
    broken = [replace(trial, us=None, error="x") for trial in trials(64, {2: 10.0})]
    assert store.entries(SPACE, broken + trials(64, {1: 5.0})) == []


def test_what_counts_is_the_heuristic_of_this_code() -> None:
    """A sweep that was measured before its findings moved the heuristic gains nothing more by them."""
    measured = [replace(trial, is_default=trial.settings["rows"] == 4) for trial in trials(64, {4: 10.0, 2: 8.0})]
    assert store.entries(SPACE, measured) == []
    old = replace(SPACE, heuristic=lambda kind, state, heads: recurrent.RecurrentDecodeKey(kind, state, 4, 2, True))
    (entry,) = store.entries(old, measured)
    assert (entry["set"], entry["gain"]) == (rows(2), [0.2, 0.2])


def test_a_journal_takes_only_whole_cases_under_the_same_facts(tmp_path) -> None:
    book = Journal(tmp_path / "j")
    found = [replace(trial, facts=FACTS) for trial in trials(64, {2: 1.0, 1: 2.0})]
    book.add(found)
    again = Journal(tmp_path / "j")
    assert again.found("c64", [rows(1), rows(2)], FACTS) == [found[1], found[0]]
    assert again.found("c64", [rows(1), rows(4)], FACTS) is None
    assert again.found("c64", [rows(1)], FACTS | {"device": "NVIDIA B200"}) is None


def test_a_table_is_made_from_a_journal_alone(tmp_path) -> None:
    book = tmp_path / "j"
    facts = FACTS | {"device": "NVIDIA H200"}
    stale = [replace(trial, us=1.0, facts=FACTS | {"source": "old"}) for trial in trials(64, {4: 1.0})]
    Journal(book).add(stale + [replace(trial, facts=facts) for trial in trials(64, {2: 10.0, 1: 8.0, 4: 11.0})])
    done = runner.assemble("gdn_decode", book, out=tmp_path, environment_facts={"driver": "580"})
    assert done.table == tmp_path / "h200" / "recurrent_decode.json"
    table = tables.read(done.table, "recurrent_decode")
    assert table["environment"]["driver"] == "580"
    assert table["entries"][0]["set"] == rows(1)
    assert sorted(row["us"] for row in table["timings"]) == [8.0, 10.0, 11.0]
    text = done.table.read_text()
    runner.assemble("gdn_decode", done.table, out=tmp_path)
    assert done.table.read_text() == text, "a table made again from its own timings is the same"
    with pytest.raises(runner.TuneError, match="no such file"):
        runner.assemble("gdn_decode", tmp_path / "none", out=tmp_path)
    (tmp_path / "empty").write_text("")
    with pytest.raises(runner.TuneError, match="no trial of"):
        runner.assemble("gdn_decode", tmp_path / "empty", out=tmp_path)


def test_the_page_is_drawn_from_tables_between_its_markers(tmp_path) -> None:
    sweep(tmp_path, fake_us("_r1w8", 0.10), commit="c0ffee")
    page = tmp_path / "autotune.md"
    page.write_text("before\n<!-- autotune -->\nold\n<!-- /autotune -->\nafter\n")
    report.refresh(page, tmp_path)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "heads 2 to 8: rows 1, warps 8, pdl False; 10.0 to 10.0 % faster" in text
    default, used = "10.00 (2 2 True)", "9.00 (1 8 False)"
    assert f"| gdn_decode:Q1:B2:f32 | {default} | {default} | {used} | {used} | 10.0 % |" in text
    page.write_text("no markers")
    with pytest.raises(ValueError, match="markers"):
        report.refresh(page, tmp_path)


def test_the_command_reports_errors_in_one_line(monkeypatch) -> None:
    import typer

    app = typer.Typer()
    app.command()(tune_command)
    result = CliRunner().invoke(app, ["--op", "nonsense"])
    assert result.exit_code == 2
    assert "allowed: gdn_decode" in result.output
    help_text = CliRunner().invoke(app, ["--help"]).output
    assert all(option in help_text for option in ("--build-only", "--journal", "--geometry", "--workload"))
