"""Tuning tables do no harm: bad, truncated, foreign or stale ones are ignored with one line, and every shape stays legal."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from compact_state.cute_kernels.compile import cache, shared_library
from compact_state.cute_kernels.configs import recurrent, tables

KERNEL = "recurrent_decode"
H200 = "NVIDIA H200"
FASTER = {"rows": 1, "warps": 8, "pdl": False}
SHAPES = [
    (kind, state, heads) for kind in recurrent.KINDS for state in recurrent.STATE_DTYPES for heads in (1, 64, 9999)
]


def table(entries: list[Any] | None = None, **environment: Any) -> dict[str, Any]:
    entry = {"match": {"kind": "gdn", "state": "float32"}, "range": {"heads": [32, 128]}, "set": FASTER}
    facts = {"device": H200, "cutlass_dsl": tables.compiler(), "source": tables.code_digest(KERNEL)} | environment
    return {"format": tables.FORMAT, "kernel": KERNEL, "environment": facts, "entries": entries or [entry]}


@pytest.fixture(autouse=True)
def _on_an_h200(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(tables, "device_name", lambda: H200)
    monkeypatch.setattr(cache, "dsl_available", lambda: True)
    monkeypatch.setenv(tables.ENVIRONMENT, str(tmp_path))
    tables.forget()
    yield
    monkeypatch.undo()
    tables.forget()


def plant(folder: Path, content: object) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / f"{KERNEL}.json").write_text(text)
    tables.forget()


def assert_heuristic_everywhere() -> None:
    for kind, state, heads in SHAPES:
        assert recurrent.choose(kind, state, heads) == recurrent.heuristic(kind, state, heads)


def test_a_table_is_used_where_it_was_measured_and_nowhere_else(tmp_path):
    plant(tmp_path, table())
    for heads, tuned in ((31, False), (32, True), (128, True), (129, False)):
        key = recurrent.choose("gdn", "float32", heads)
        assert (key == recurrent.RecurrentDecodeKey("gdn", "float32", **FASTER)) == tuned
    for kind, state in (("gdn", "bfloat16"), ("kda_bounded", "float32")):
        assert recurrent.choose(kind, state, 64) == recurrent.heuristic(kind, state, 64)


@pytest.mark.parametrize(
    ("environment", "word"),
    [
        ({"device": "NVIDIA B200"}, "B200"),
        ({"device": None}, "device"),
        ({"cutlass_dsl": "4.7.0"}, "4.7.0"),
        ({"source": "0" * 32}, "source"),
    ],
)
def test_a_table_of_another_gpu_compiler_or_source_is_ignored_with_one_line(tmp_path, caplog, environment, word):
    plant(tmp_path, table(**environment))
    with caplog.at_level(logging.WARNING):
        assert_heuristic_everywhere()
    assert [word in record.getMessage() for record in caplog.records] == [True]


WHOLE = json.dumps(table())
CORRUPT = {
    "empty": "",
    "truncated": WHOLE[: len(WHOLE) // 2],
    "truncated at the end": WHOLE[:-1],
    "not an object": "[1, 2]",
    "deep": "[" * 100_000,
    "format": json.dumps(table() | {"format": 99}),
    "other kernel": json.dumps(table() | {"kernel": "conv1d_decode"}),
    "no environment": json.dumps({k: v for k, v in table().items() if k != "environment"}),
    "entry not an object": json.dumps(table(["rows"])),
    "entry without set": json.dumps(table([{"match": {}, "range": {}}])),
    "range of three": json.dumps(table([{"match": {}, "range": {"heads": [1, 2, 3]}, "set": FASTER}])),
    "code of a list": json.dumps(table() | {"code": ["f"]}),
    "range of text": json.dumps(table([{"match": {}, "range": {"heads": ["a", "b"]}, "set": FASTER}])),
}


@pytest.mark.parametrize("content", CORRUPT.values(), ids=CORRUPT.keys())
def test_a_corrupt_table_is_ignored_with_one_line(tmp_path, caplog, content):
    plant(tmp_path, content)
    with caplog.at_level(logging.WARNING):
        assert_heuristic_everywhere()
    assert len(caplog.records) == 1


def test_bytes_that_are_no_text_are_ignored(tmp_path, caplog):
    (tmp_path / f"{KERNEL}.json").write_bytes(b"\xff\xfe\x00")
    tables.forget()
    assert_heuristic_everywhere()
    assert len(caplog.records) == 1


PLANTED = {
    "illegal tile": {"rows": 4, "warps": 6},
    "rows the kernel has not": {"rows": 3},
    "text": {"rows": "4"},
    "a truth for a number": {"rows": True},
    "a number for a truth": {"pdl": 1},
    "no such field": {"stages": 3},
    "another gate": {"kind": "kda_bounded"},
    "another state dtype": {"state": "bfloat16"},
    "nothing": {"rows": None},
    "list": {"rows": [1]},
}


@pytest.mark.parametrize("settings", PLANTED.values(), ids=PLANTED.keys())
def test_a_planted_entry_cannot_change_what_a_kernel_computes(tmp_path, settings):
    """Whatever an entry asks for, the key stays legal and of the call's own kind and dtype, in look-up and manifest."""
    everywhere = {"match": {}, "range": {}, "set": settings}
    plant(tmp_path, table([everywhere]))
    assert_heuristic_everywhere()
    kinds = {(entry.key.kind, entry.key.state) for entry in recurrent.shipped()}
    assert kinds == {(kind, state) for kind in recurrent.KINDS for state in recurrent.STATE_DTYPES}
    assert all(entry.key.rejection() is None for entry in recurrent.shipped())


def test_every_shape_has_a_legal_key_under_any_legal_entry(tmp_path):
    for candidate in recurrent.candidates("gdn", "float32"):
        settings = {name: getattr(candidate, name) for name in recurrent.RecurrentDecodeKey.TUNED}
        plant(tmp_path, table([{"match": {}, "range": {}, "set": settings}]))
        for kind, state, heads in SHAPES:
            key = recurrent.choose(kind, state, heads)
            assert key.rejection() is None
            assert (key.kind, key.state, key.rows, key.warps) == (kind, state, candidate.rows, candidate.warps)


def test_what_a_table_asks_for_is_in_the_manifest(tmp_path):
    plant(tmp_path, table())
    wanted = recurrent.RecurrentDecodeKey("gdn", "float32", **FASTER)
    assert wanted in {entry.key for entry in recurrent.shipped()}


def test_without_the_compiler_only_prebuilt_kernels_are_chosen(tmp_path, monkeypatch, caplog):
    plant(tmp_path, table())
    monkeypatch.setattr(cache, "dsl_available", lambda: False)
    monkeypatch.setattr(shared_library, "find", lambda symbol, digest: None)
    assert recurrent.choose("gdn", "float32", 64) == recurrent.heuristic("gdn", "float32", 64)
    assert "no prebuilt library" in caplog.text
    monkeypatch.setattr(shared_library, "find", lambda symbol, digest: print)
    tables.forget()
    assert recurrent.choose("gdn", "float32", 64).rows == FASTER["rows"]


def test_off_and_no_gpu_mean_the_heuristic(tmp_path, monkeypatch):
    plant(tmp_path, table())
    monkeypatch.setenv(tables.ENVIRONMENT, "off")
    tables.forget()
    assert_heuristic_everywhere()
    monkeypatch.setenv(tables.ENVIRONMENT, str(tmp_path))
    monkeypatch.setattr(tables, "device_name", lambda: None)
    tables.forget()
    assert_heuristic_everywhere()


def test_forcing_a_key_ends_with_its_block(tmp_path):
    before = recurrent.choose("gdn", "float32", 64)
    with tables.forced(KERNEL, FASTER):
        assert recurrent.choose("gdn", "float32", 64).rows == FASTER["rows"]
        assert recurrent.choose("kda_bounded", "bfloat16", 64).kind == "kda_bounded"
    assert recurrent.choose("gdn", "float32", 64) == before


CHOICES = """
import sys
from compact_state.cute_kernels.compile import cache
from compact_state.cute_kernels.configs import recurrent, tables
tables.device_name = lambda: "NVIDIA H200"
cache.dsl_available = lambda: True
for kind in recurrent.KINDS:
    for state in recurrent.STATE_DTYPES:
        for heads in range(1, 4096, 7):
            print(recurrent.choose(kind, state, heads).symbol())
"""


def test_J2_two_ranks_choose_alike_and_a_rank_that_reads_another_table_stays_legal(tmp_path):
    """Ranks read the same shipped files. One that was pointed elsewhere differs in speed alone: same kinds, same dtypes."""

    def rank(where: str | None) -> list[str]:
        env = {k: v for k, v in os.environ.items() if k != tables.ENVIRONMENT}
        env |= {tables.ENVIRONMENT: where} if where is not None else {}
        done = subprocess.run([sys.executable, "-c", CHOICES], capture_output=True, text=True, check=True, env=env)
        return done.stdout.split()

    plant(tmp_path, table([{"match": {}, "range": {}, "set": FASTER}]))
    shipped, again, planted = rank(None), rank(None), rank(str(tmp_path))
    assert shipped == again
    assert planted != shipped
    assert [name.rsplit("_r", 1)[0] for name in planted] == [name.rsplit("_r", 1)[0] for name in shipped]


def test_other_sources_with_the_same_instructions_keep_a_table(tmp_path, caplog, monkeypatch):
    default, faster = (
        recurrent.heuristic("gdn", "float32", 64),
        recurrent.RecurrentDecodeKey("gdn", "float32", **FASTER),
    )
    code = {default.symbol(): "d", faster.symbol(): "f"}
    here = dict(code)
    monkeypatch.setattr(cache, "machine_code", lambda kernel, key: here.get(key.symbol()))
    plant(tmp_path, table(source="0" * 32) | {"code": code})
    with caplog.at_level(logging.WARNING):
        assert recurrent.choose("gdn", "float32", 64) == faster
    assert caplog.records == []
    for symbol, other in ((default.symbol(), "x"), (faster.symbol(), "x"), (faster.symbol(), None)):
        here = code | {symbol: other}
        tables.forget()
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert recurrent.choose("gdn", "float32", 64) == default
            assert recurrent.choose("gdn", "float32", 65) == default
        assert [symbol in record.getMessage() for record in caplog.records] == [True], "one line a kernel"


def test_the_same_instructions_do_not_make_up_for_another_gpu_or_compiler(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "machine_code", lambda kernel, key: "same")
    for environment in ({"device": "NVIDIA B200"}, {"cutlass_dsl": "4.7.0"}):
        plant(tmp_path, table(**environment) | {"code": {"any": "same"}})
        assert_heuristic_everywhere()


def test_comments_and_layout_do_not_count_as_source():
    text = 'def f(x):\n    """Old words."""\n    return f"{x}"  # why\n'
    assert tables._code(text) == tables._code('def f(\n    x,\n):\n    return f"{x}"\n'.replace("x,\n", "x\n"))
    assert tables._code(text) != tables._code(text.replace("return", "yield"))


SHIPPED = sorted(tables.SHIPPED.glob("*/*.json"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_shipped_tables_are_well_formed(path):
    content = tables.read(path, path.stem)
    assert content["entries"]
    assert content["timings"]
    assert tables.folder_of(content["environment"]["device"]) == path.parent.name
