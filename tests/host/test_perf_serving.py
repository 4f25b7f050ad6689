"""The serving programs without an engine: prompts, near ties, spread, one engine that fails, documents."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from compact_state.perf.report import replace_block
from compact_state.perf.serving import __main__ as serving
from compact_state.perf.serving import equality, fleet, judge, load, result, traffic

ROOT = Path(__file__).resolve().parents[2]


def rounds(ids: list[int], top: list[list[tuple[int, float]]]) -> list[dict[str, Any]]:
    return [{"tag": "solo", "ids": [ids], "top": [top], "cached": [0]}]


def test_prompts_share_their_first_half_across_seeds_and_nothing_else() -> None:
    first, second = traffic.shared_prompts(8, 256, seed=1), traffic.shared_prompts(8, 256, seed=2)
    assert all(len(ids) == 256 and set(ids) <= set(traffic.TOKENS) for ids in first + second)
    assert first[0][:128] == first[4][:128] == second[4][:128] != first[1][:128]
    assert len({tuple(ids[128:]) for ids in first + second}) == 16
    assert len({tuple(ids[:128]) for ids in traffic.shared_prompts(8, 256, seed=1, groups=8)}) == 8


@pytest.mark.parametrize(("lead", "passed"), [(0.3, True), (0.7, False)])
def test_another_token_passes_only_where_the_logits_are_nearly_tied(lead: float, passed: bool) -> None:
    step = [[(7, 5.0), (8, 5.0 - lead)]]
    other = [[(8, 5.0 - lead + 0.05), (7, 5.0 - 0.05)]]
    found = equality.compare(rounds([7], step), rounds([8], other))
    assert found["partings"] == [{"round": "solo", "prompt": 0, "step": 0, "margin": lead}]
    assert found["passed"] is passed


def test_logits_count_up_to_the_step_where_answers_part() -> None:
    mine = rounds([1, 2, 3], [[(1, 9.0), (5, 8.9)], [(2, 9.0), (4, 8.9)], [(3, 9.0), (6, 1.0)]])
    theirs = rounds([1, 4, 9], [[(1, 9.1), (5, 8.9)], [(4, 9.0), (2, 8.9)], [(9, 50.0), (3, 50.0)]])
    found = equality.compare(mine, theirs)
    assert (found["equal"], found["largest"], found["passed"]) == (0, 0.1, True)
    assert not equality.compare(mine, rounds([1, 2, 3], [[(1, 8.0), (5, 8.9)]] * 3))["passed"]


def test_without_the_prompt_of_one_token_the_others_stay() -> None:
    two = {"tag": "solo", "ids": [[1], [2]], "top": [[[(1, 9.0), (2, 1.0)]], [[(2, 9.0), (1, 1.0)]]], "cached": [0, 64]}
    assert equality.longer([two]) == [{"tag": "solo", "ids": [[2]], "top": [two["top"][1]], "cached": [64]}]


def test_each_turn_says_all_that_was_said_and_as_much_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []

    async def ask(engine: Any, session: int, ids: list[int], new: int) -> traffic.Answer:
        asked.append(list(ids))
        clock.first[session] = clock.last[session] = traffic.time.perf_counter()
        return traffic.Answer(session, traffic.time.perf_counter() - 1.0, [session] * new, cached=3)

    clock = traffic.StepClock()
    monkeypatch.setattr(traffic, "ask", ask)
    found = asyncio.run(traffic.batch(None, clock, 1000, [[1, 2], [3, 4]], 2, turns=3))
    assert [len(ids) for ids in asked] == [2, 2, 6, 6, 10, 10]
    assert asked[2][:4] == [1, 2, 1000, 1000]
    assert asked[5][:6] == asked[3]
    assert len({tuple(ids) for ids in asked}) == 6
    assert (found["tokens"], found["cached_tokens"]) == (12, 18)


def test_a_case_reads_as_it_is_written() -> None:
    assert load.Case.parse("64x2048+256:7@on") == load.Case(64, 2048, 256, 7, "on")
    assert load.Case.parse("64x2048+256").name == "64x2048+256"
    many = load.Case.parse("64x2048+256/32:3")
    assert (many.groups, many.trials, many.name) == (32, 3, "64x2048+256/32")
    chats = load.Case.parse("16x1024+128*6@on")
    assert (chats.turns, chats.only, chats.name) == (6, "on", "16x1024+128*6")
    with pytest.raises(ValueError, match="allowed: REQUESTSxINPUT"):
        load.Case.parse("64x2048")


def test_a_variant_with_variables_is_compact_and_may_have_one_caching_setting() -> None:
    specs = load.specs("model", ("legacy", "compact", "napping:A=1:B=2@on"), (False, True))
    assert [spec.label for spec in specs] == ["legacy-off", "compact-off", "legacy-on", "compact-on", "napping-on"]
    assert [spec.variant for spec in specs][2:] == ["legacy", "compact", "compact"]
    assert (specs[-1].environment, specs[-1].settings) == ({"A": "1", "B": "2"}, {"enable_prefix_caching": True})


def test_spread_is_least_median_most() -> None:
    trials = [{"seconds": value, "tpot_ms": None} for value in (3.0, 1.0, 2.0)]
    assert load.spread(trials) == {"trials": 3, "seconds": [1.0, 2.0, 3.0]}


def test_an_engine_that_does_not_start_is_left_out_with_its_error(tmp_path: Path) -> None:
    program = tmp_path / "engine.py"
    program.write_text(
        "import json, sys\n"
        "if sys.argv[1] == 'bad':\n    sys.exit('no such model')\n"
        "print(json.dumps({'ok': {'start_s': 1.0}}), flush=True)\n"
        "for line in sys.stdin:\n"
        "    do = json.loads(line)['do']\n"
        "    print(json.dumps({'ok': do} if do == 'echo' else {'error': 'unknown ' + do}), flush=True)\n"
    )
    specs = [fleet.Spec("legacy", model, name=model) for model in ("good", "bad")]
    with fleet.Fleet(specs, tmp_path / "logs", engine=[str(program)]) as running:
        assert running["good"].ask("echo") == "echo"
        with pytest.raises(fleet.EngineError, match="unknown fly"):
            running["good"].ask("fly")
        assert list(running.engines) == ["good"]
        assert "no such model" in running.failed["bad"]
        engine = running["good"]._process
        assert engine.poll() is None
    assert engine.returncode is not None
    with (
        pytest.raises(fleet.EngineError, match="no such model"),
        fleet.Fleet(specs[1:], tmp_path, engine=[str(program)]),
    ):
        pass


COUNTING = """
import json, sys
print(json.dumps({'ok': {}}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    print(json.dumps({'ok': {'seconds': 1.0, 'asked': asked}}), flush=True)
"""


def test_cases_of_one_length_warm_engines_up_once_and_share_no_prompt(tmp_path: Path) -> None:
    program = tmp_path / "engine.py"
    program.write_text(COUNTING)
    cases = [load.Case.parse(text) for text in ("4x64+1:2", "4x64+8:3@on", "4x32+1:1", "4x64+1/9:1")]
    specs = load.specs("model", ("legacy", "compact"), (False, True))
    found = load.run(
        "model",
        cases,
        engines=specs,
        logs=tmp_path,
        budget_s=60.0,
        start_s=20.0,
        save=lambda result: None,
        say=lambda text: None,
        engine=[str(program)],
    )
    trials = [(t["case"], t["engine"], t["trial"], t["asked"]["seed"]) for t in found["trials"]]
    assert [t[2] for t in trials if t[:2] == ("4x64+1", "legacy-off")] == [-1, 0, 1]
    assert [t[2] for t in trials if t[:2] == ("4x64+8", "legacy-on")] == [0, 1, 2]
    assert [t[2] for t in trials if t[:2] == ("4x32+1", "compact-off")] == [-1, 0]
    assert [t[2] for t in trials if t[:2] == ("4x64+1/9", "compact-off")] == [-1, 0]
    assert not [t for t in trials if t[:2] == ("4x64+8", "legacy-off")]
    for engine in ("legacy-on", "compact-on"):
        seeds = [seed for _, name, _, seed in trials if name == engine]
        assert len(set(seeds)) == len(seeds) == 10


ANSWERING = """
import json, sys
import time
if sys.argv[1] == 'late':
    time.sleep(30)
print(json.dumps({'ok': {'start_s': 1.0, 'slot_bytes': 1000, 'slots': 10}}), flush=True)
asked = 0
for line in sys.stdin:
    do = json.loads(line)['do']
    rounds = [{'tag': tag, 'ids': [[7]], 'top': [[[[7, 5.0], [8, 1.0]]]], 'cached': [asked]} for tag in ('solo', 'again')]
    seen = {'switch': '1', 'pool': 'CompactStateCacheEngine', 'state_bytes': 5000}
    if sys.argv[1] == 'unpatched':
        seen['switch'] = None
    answer = {'rounds': rounds, 'mixed': {'answers': [[0, [7], []]], 'ledger': None}, 'sleep': {'freed_mib': 1}}
    answer['workers'] = [{**seen, 'gpu': gpu} for gpu in '01']
    if do == 'rounds' and sys.argv[1] == 'remembers':
        asked += 1
    print(json.dumps({'error': 'out of memory'} if do == sys.argv[1] else {'ok': answer[do]}), flush=True)
"""


def test_each_engine_is_examined_as_soon_as_it_serves_and_fails_alone(tmp_path: Path) -> None:
    program = tmp_path / "engine.py"
    program.write_text(ANSWERING)
    variants = {"legacy": "fine", "one": "fine", "two": "remembers", "three": "mixed", "four": "late"}
    specs = [fleet.Spec("legacy" if n == "legacy" else "compact", model, name=n) for n, model in variants.items()]
    saved: list[str] = []
    found = equality.run(
        "model",
        engines=specs,
        logs=tmp_path,
        new=1,
        mixed=4,
        save=lambda result: saved.append(json.dumps(result)),
        limit_s=5.0,
        engine=[str(program)],
    )
    assert saved[-1] == json.dumps(found)
    assert len(saved) > len(specs)
    assert set(found["pairs"]) == {
        f"{mine} / {theirs}" for mine, theirs in itertools.combinations(("legacy", "one", "two", "three"), 2)
    }
    assert all(pair["passed"] and pair["equal"] == 2 for pair in found["pairs"].values())
    assert set(found["mixed"]) == {"legacy", "one", "two"}
    # What an engine remembers through sleep shows as tokens found by its first, cold answers.
    assert {name: some["passed"] for name, some in found["sleep"].items()} == {"one": True, "two": False}
    assert set(found["failed"]) == {"three", "four"}
    assert "out of memory" in found["failed"]["three"]
    assert json.loads((tmp_path / "rounds-one.json").read_text())[0]["ids"] == [[7]]


def test_the_judge_measures_each_group_of_prompts_and_evaluates_an_answer_once() -> None:
    prompts = traffic.asked("solo")
    assert [len(a) + 30 for a in prompts] == [len(a) for a in traffic.asked("grown")]
    asked: list[int] = []

    def evaluate(tokens: Sequence[int]) -> torch.Tensor:
        asked.append(len(tokens))
        return torch.zeros(len(tokens), 512)

    answers = {"tag": "solo", "ids": [[7, 8]] * 2, "top": [[[[7, 3.0]], [[8, 4.0]]], [[[7, 0.5]], [[8, 0.5]]]]}
    found = judge.run({"one": [answers], "two": [answers]}, evaluate, save=lambda result: None)
    # The first prompt is one token, the second three; each is followed by all of the answer but its last token.
    assert asked == [2, 4]
    assert found["one"] == found["two"]
    same = {"answers": 1, "tokens": 2, "others": 0, "behind": 0.0}
    assert found["one"]["one token"] == {**same, "rms": round(12.5**0.5, 4), "largest": 4.0}
    assert found["one"]["longer"] == {**same, "rms": 0.5, "largest": 0.5}


def test_the_judge_sees_a_wrong_token_behind_the_place_where_a_mixed_load_parted() -> None:
    def evaluate(tokens: Sequence[int]) -> torch.Tensor:
        logits = torch.zeros(len(tokens), 512)
        logits[:, 7], logits[:, 8] = 5.0, 4.9
        return logits

    cold = {"tag": "solo", "ids": [[7, 7, 7]] * 8, "top": [[]] * 8}
    mixed = {"one": [(3, [7, 7, 7], []), (3, [7, 8, 7], [[[8, 4.8]]]), (4, [7, 8, 9], [])]}
    found = judge.run({"one": [cold]}, evaluate, mixed=mixed, save=lambda result: None)["one"]
    parted = {
        "answers": 3,
        "tokens": 9,
        "others": 3,
        "behind": 5.0,
        "rms": 0.1,
        "largest": 0.1,
        "parted": 2,
        "gap": 0.1,
    }
    assert found["mixed load, longer"] == parted
    assert "mixed load, one token" not in found


@pytest.mark.parametrize(
    ("model", "passed"), [("fine", True), ("unpatched", False), ("remembers", False), ("sleep", False)]
)
def test_two_gpus_pass_when_their_workers_are_patched_and_their_answers_agree(
    model: str, passed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "engine.py"
    program.write_text(ANSWERING)
    monkeypatch.setattr(serving.signal, "signal", lambda *_: None)
    saved = tmp_path / "ray.json"
    command = [
        "ray",
        model,
        "--out",
        str(saved),
        "--logs",
        str(tmp_path),
        "--new",
        "1",
        "--mixed",
        "4",
        "--name",
        "two",
    ]
    assert serving.main([*command, "--budget", "20", "--engine", str(program)]) == 0
    found = json.loads(saved.read_text())["two"]
    assert found["passed"] is passed
    assert set(found["workers"]) == {"compact-tp2", "legacy-tp2"}
    assert len(found["pairs"]) == 3
    assert set(found["longer"]) == {"compact-tp1 / legacy-tp2", "compact-tp2 / legacy-tp2"}
    assert json.loads((tmp_path / "mixed-compact-tp2.json").read_text()) == [[0, [7], []]]


def row(variant: str, rate: float) -> dict[str, Any]:
    figures = {"output_tok_s": [rate] * 3, "ttft_ms": [5.0] * 3, "cached_tokens": [0] * 3, "trials": 5}
    return {"model": "0.8b", "case": "1x2+3", "variant": variant, "caching": "on", **figures}


def test_parts_become_one_file_whose_later_rows_replace_earlier_ones(tmp_path: Path) -> None:
    environment = {"device": "NVIDIA H200", "command": "load", "commit": "abc"}
    parts = [
        {"environment": environment, "load": {"serving": rows, "start": {"legacy-on": 1}, "notes": []}}
        for rows in ([row("legacy", 100.0), row("compact", 90.0)], [row("compact", 150.0)])
    ]
    merged = result.merge([*parts, {"environment": {**environment, "command": "server"}, "server": {"passed": True}}])
    result.dump(merged, tmp_path / "all.json")
    read = json.loads((tmp_path / "all.json").read_text())
    assert read == merged
    assert (read["environment"]["command"], read["environment"]["commit"]) == ("load; server", "abc")
    again = result.merge([{"environment": {**environment, "commit": "def"}, "server": {"passed": False}}], read)
    assert again["serving"] == read["serving"]
    assert (again["environment"]["commit"], again["server"]) == ("abc; def", {"passed": False})
    judged = [{"environment": environment, "judge": {name: {"longer": {}}}} for name in ("one", "two")]
    assert list(result.merge(judged)["judge"]) == ["one", "two"]
    assert "| 0.8b 1x2+3 | on | 100 (100 to 100) | 150 (150 to 150) | +50% |" in result.load_table(read)


def test_loads_stand_by_model_and_size_whatever_order_they_were_merged_in() -> None:
    rows = []
    cases = ("35b 8x9+1 on", "0.8b 16x2+3 on", "0.8b 8x10+3 on", "0.8b 8x9+3 on", "0.8b 8x9+3 off")
    for model, case, caching in map(str.split, cases):
        rows += [
            row(variant, 100.0) | {"model": model, "case": case, "caching": caching}
            for variant in ("compact", "legacy")
        ]
    lines = result.load_table({"serving": rows}).splitlines()[2:]
    assert [line.split(" | ")[:2] for line in lines] == [
        ["| 0.8b 8x9+3", "off"],
        ["| 0.8b 8x9+3", "on"],
        ["| 0.8b 8x10+3", "on"],
        ["| 0.8b 16x2+3", "on"],
        ["| 35b 8x9+1", "on"],
    ]


def test_the_table_of_answers_says_what_was_compared_and_what_failed() -> None:
    assert "not been compared" in result.equality_table({})
    pair = {"equal": 30, "answers": 32, "rms": 0.05, "largest": 0.6, "widest_margin": 0.1, "passed": False}
    mixed = {"equal": 80, "answers": 80, "widest_margin": 0.0, "passed": True}
    table = result.equality_table(
        {
            "equality": {"pairs": {"a / b": pair}, "longer": {}, "hits": {}, "mixed": {"a": mixed}, "sleep": {}},
            "ray": {"pairs": {"one / two": {**pair, "passed": True}}, "mixed": {"two": mixed}},
        }
    )
    assert "| a / b | 30 of 32 | 0.050 | 0.600 | 0.100 | no |" in table
    assert "| a, two | 80 of 80 | - | - | 0.000 | yes |" in table
    assert "| one / two | 30 of 32 | 0.050 | 0.600 | 0.100 | yes |" in table
    same = {**pair, "equal": 32, "largest": 0.0, "passed": True}
    pairs = {"b / c": same, "a / b": same, "a / old": pair, "b / old": pair, "a / c": same, "c / old": pair}
    found = {"equality": {"pairs": pairs, "mixed": {"a": mixed, "b": mixed}}, "moe": {"pairs": {"a / old": pair}}}
    shown = result.equality_table(found).splitlines()
    assert [line.split(" | ")[1] for line in shown[2:]] == ["a / b, a / c", "a / old, MoE: a / old", "a, b"]
    some = {"answers": 87, "tokens": 99, "others": 4, "behind": 0.1}
    groups = {"longer": {**some, "rms": 0.04, "largest": 0.2}, "mixed load, longer": {**some, "parted": 3, "gap": 0.05}}
    judged = result.judge_table({"judge": {"a": groups, "b": {"longer": groups["longer"]}}})
    assert "| a, b | longer | 87 | 0.040 | 0.200 | 4 of 99 | 0.100 | - |" in judged
    assert "| a | mixed load, longer | 87 | - | - | 4 of 99 | 0.100 | 0.050 |" in judged


def test_the_table_of_starts_shows_both_engines_with_empty_caches_and_with_those_of_the_loads() -> None:
    assert "No start" in result.start_table({})
    starts = {
        "0.8b": {"legacy-on": {"start_s": 38.4}, "compact-on": {"start_s": 36.6}, "compact-off": {"start_s": 99.0}}
    }
    table = result.start_table({"start": starts, "first_start": {"legacy 0.8b": 115.3}})
    assert "| 0.8b | 115 | - | 38 | 37 |" in table


@pytest.mark.skipif(not result.FILE.is_file(), reason="no serving result is committed")
def test_documents_show_the_committed_results() -> None:
    found = json.loads(result.FILE.read_text())
    page, readme = (ROOT / "docs" / "lmdeploy.md").read_text(), (ROOT / "README.md").read_text()
    for name, block in result.blocks(found).items():
        assert f"<!-- perf:{name} -->" in page
        assert replace_block(page, name, block) == page
        assert replace_block(readme, name, block) == readme
