"""The compile cache: keys, corrupt and foreign entries, folder safety, two processes."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from compact_state.cute_kernels.compile import build, cache, fingerprint, shared_library
from compact_state.cute_kernels.compile.manifest import Entry, ResourceBudget, manifest
from compact_state.cute_kernels.compile.report import ResourceReport, parse_remarks
from compact_state.cute_kernels.configs.recurrent import RecurrentDecodeKey, candidates
from compact_state.cute_kernels.configs.state_ids import StateIdsKey
from compact_state.cute_kernels.errors import (
    BackendUnavailableError,
    CompileCacheError,
    CompileError,
    InvalidArgumentError,
)

KEY = StateIdsKey()


@pytest.fixture
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("COMPACT_STATE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("COMPACT_STATE_KERNELS", raising=False)
    return tmp_path / "cache"


def test_folder_is_made_private(cache_folder):
    assert cache.cache_dir() == cache_folder
    assert cache_folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o722])
def test_folder_that_others_can_write_is_refused(cache_folder, mode):
    cache_folder.mkdir()
    cache_folder.chmod(mode)
    with pytest.raises(CompileCacheError, match=r"nobody else can write"):
        cache.cache_dir()


def test_folder_that_is_a_file_is_refused(cache_folder):
    cache_folder.write_text("")
    with pytest.raises(CompileCacheError, match="COMPACT_STATE_CACHE_DIR"):
        cache.cache_dir()


def test_every_field_of_a_key_changes_symbol_and_path(cache_folder):
    """A field that the name left out would let two kernels share one object."""
    for entry in manifest():
        for field in dataclasses.fields(entry.key):
            value = getattr(entry.key, field.name)
            if not isinstance(value, bool):
                continue
            other = dataclasses.replace(entry.key, **{field.name: not value})
            assert other.symbol() != entry.key.symbol(), field.name
            assert cache.object_path(entry.kernel_file, other) != cache.object_path(entry.kernel_file, entry.key)


def test_symbols_are_unique_identifiers():
    symbols = [entry.key.symbol() for entry in manifest()]
    assert len(set(symbols)) == len(symbols)
    assert all(symbol.isidentifier() for symbol in symbols)


def test_candidates_are_legal_and_include_the_heuristic():
    space = candidates("gdn", "float32")
    assert all(key.rejection() is None for key in space)
    assert RecurrentDecodeKey("gdn", "float32", 3, 4, False).rejection() is not None
    assert RecurrentDecodeKey("gdn", "float32", 4, 32, False).rejection() is not None


def test_fingerprint_follows_imports(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "PACKAGE_ROOT", tmp_path)
    (tmp_path / "kernels").mkdir()
    (tmp_path / "device").mkdir()
    kernel, piece, other = (
        tmp_path / "kernels" / "k.py",
        tmp_path / "device" / "piece.py",
        tmp_path / "device" / "other.py",
    )
    kernel.write_text("from ..device.piece import x\n")
    piece.write_text("x = 1\n")
    other.write_text("y = 1\n")

    def value():
        fingerprint.source_fingerprint.cache_clear()
        return fingerprint.source_fingerprint(kernel)

    first = value()
    other.write_text("y = 2\n")
    assert value() == first
    piece.write_text("x = 2\n")
    assert value() != first
    fingerprint.source_fingerprint.cache_clear()


def test_compiler_and_environment_are_part_of_the_path(cache_folder, monkeypatch):
    first = cache.object_path("state_ids", KEY)
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    assert cache.object_path("state_ids", KEY) != first
    monkeypatch.delenv("CUTE_DSL_LINEINFO")
    monkeypatch.setattr(cache, "cache_digest", lambda *a: "other")
    assert cache.object_path("state_ids", KEY) != first


@pytest.mark.compile
def test_J9_truncated_and_foreign_objects_are_rebuilt(cache_folder):
    path = cache.ensure_object("state_ids", KEY)
    whole = path.read_bytes()
    for damage in (whole[: len(whole) // 2], b"", b"not an object" + whole):
        path.write_bytes(damage)
        built = cache.compile_count
        assert cache.ensure_object("state_ids", KEY) == path
        assert cache.compile_count == built + 1
        assert path.stat().st_size > 1000
    built = cache.compile_count
    cache.ensure_object("state_ids", KEY)
    assert cache.compile_count == built


def test_without_compiler_and_library_the_error_says_what_to_do(cache_folder, monkeypatch):
    monkeypatch.setattr(cache, "dsl_available", lambda: False)
    with pytest.raises(BackendUnavailableError, match=r"advance_state_ids.*compact-state build --shared"):
        cache.jit_cache("state_ids")(KEY)


def test_a_folder_named_like_the_compiler_is_not_the_compiler(cache_folder, tmp_path, monkeypatch):
    assert cache.dsl_available()
    (tmp_path / "cutlass" / "include").mkdir(parents=True)
    monkeypatch.delitem(sys.modules, "cutlass", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert not cache.dsl_available()
    with pytest.raises(BackendUnavailableError, match="is not installed"):
        cache.jit_cache("state_ids")(KEY)


def test_a_compiler_that_does_not_load_is_named_with_its_reason(cache_folder, tmp_path, monkeypatch):
    (tmp_path / "cutlass").mkdir()
    (tmp_path / "cutlass" / "__init__.py").write_text("raise RuntimeError('no part for this release')")
    monkeypatch.delitem(sys.modules, "cutlass", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        BackendUnavailableError, match=r"does not load \(RuntimeError: no part.*compact-state build --shared"
    ):
        cache.jit_cache("state_ids")(KEY)


def test_J10_compiler_of_another_series_is_refused_before_it_is_used(cache_folder, monkeypatch):
    monkeypatch.setattr(cache.importlib.metadata, "version", lambda name: "4.9.0")
    with pytest.raises(BackendUnavailableError, match=r"got 4\.9\.0; allowed: 4\.8\."):
        cache.jit_cache("state_ids")(KEY)


def test_library_of_other_sources_is_not_used(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("COMPACT_STATE_KERNELS", str(tmp_path))
    monkeypatch.setattr(shared_library, "_open", lambda path: (object(), {"f": "digest of other sources"}, {}))
    assert shared_library.find("f", "ours") is None
    assert "other sources" in caplog.text
    assert shared_library.find("absent", "ours") is None


def test_broken_library_is_one_log_line(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("COMPACT_STATE_KERNELS", str(tmp_path))
    (tmp_path / shared_library.INDEX).write_text("{")
    assert shared_library.find("f", "ours") is None
    assert "not used" in caplog.text


def test_silent_compiler_output_is_an_error():
    with pytest.raises(CompileError, match="no resource remarks"):
        parse_remarks("all is well")


def test_remarks_report_spills_and_serialised_wgmma():
    text = "Used 168 registers\n 8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n C7512 potential"
    report = parse_remarks(text)
    assert (report.registers, report.stack_bytes, report.spill_store_bytes, report.spill_load_bytes) == (168, 8, 4, 12)
    assert report.wgmma_serialized


def test_lookup_is_by_key_alone(monkeypatch):
    loaded = []
    monkeypatch.setattr(cache, "_load", lambda file, key: loaded.append(key) or (lambda: None))
    lookup = cache.jit_cache("state_ids")
    assert lookup(KEY) is lookup(StateIdsKey())
    assert lookup(KEY) is not lookup(StateIdsKey(threads=64))
    assert len(loaded) == 2


def test_only_build_functions_call_the_compiler():
    root = Path(fingerprint.__file__).parents[1]
    for file in root.rglob("*.py"):
        text = file.read_text()
        if "cute_compile(" in text and file.name != "cache.py":
            assert file.parent.name == "kernels"
        assert "cute.compile(" not in text or file.name == "cache.py"
    assert os.environ["CUTE_DSL_ARCH"] == "sm_90a"


@pytest.mark.parametrize(
    ("argument", "options", "allowed"),
    [
        ("only", {"only": "("}, "a regular expression"),
        ("only", {"only": "no_such_kernel"}, "matches a symbol, such as"),
        ("jobs", {"jobs": 0}, "at least 1"),
        ("jobs", {"jobs": -1}, "at least 1"),
        ("shared", {"shared": True}, "out"),
    ],
)
def test_a_build_that_cannot_be_is_refused_before_it_compiles(argument, options, allowed, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "build_all", lambda *given: pytest.fail("compiled"))
    out = None if argument == "shared" else tmp_path / "out"
    with pytest.raises(InvalidArgumentError, match=f"^{argument}: got .*; allowed: .*{allowed}"):
        build.build(out, **{"shared": False, **options})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("left", ["", "{", "[]", '{"registers": 1}', None])
def test_a_report_that_was_not_written_whole_is_built_again(left, cache_folder, monkeypatch):
    """A build that was ended in the middle must not end every later one."""
    report, built = ResourceReport(9, 0, 0, 0, False), []

    def compile_with_report(action):
        built.append(action)
        path.write_bytes(b"object")
        path.with_suffix(".size").write_text("6")
        return None, report, "remarks"

    monkeypatch.setattr(build, "compile_with_report", compile_with_report)
    entry = Entry("state_ids", KEY, ResourceBudget(40))
    path = cache.object_path("state_ids", KEY)
    assert build.build_entry(entry) == (path, report)
    assert build.build_entry(entry) == (path, report)
    assert len(built) == 1
    file = path.with_suffix(".json")
    file.unlink() if left is None else file.write_text(left)
    assert build.build_entry(entry) == (path, report)
    assert len(built) == 2
    assert build.build_entry(entry) == (path, report)
    assert len(built) == 2
    assert not list(cache_folder.glob("*.tmp"))


@pytest.mark.parametrize("fails", [False, True])
def test_a_library_and_its_index_change_together_or_not_at_all(fails, tmp_path, monkeypatch):
    seen = []

    def cc(command, **options):
        target = Path(command[command.index("-o") + 1])
        seen.append((tmp_path / shared_library.LIBRARY).read_bytes())
        target.write_bytes(b"new")
        return subprocess.CompletedProcess(command, int(fails), "", "no such symbol")

    monkeypatch.setattr(shared_library.subprocess, "run", cc)
    library, index = tmp_path / shared_library.LIBRARY, tmp_path / shared_library.INDEX
    library.write_bytes(b"old")
    index.write_text('"old"')
    if fails:
        with pytest.raises(CompileError, match="no such symbol"):
            shared_library.link([], tmp_path, {"symbols": {}})
    else:
        assert shared_library.link([], tmp_path, {"symbols": {}}) == library
    assert seen == [b"old"]
    expected = (b"old", "old") if fails else (b"new", {"symbols": {}})
    assert (library.read_bytes(), json.loads(index.read_text())) == expected
    assert {file.name for file in tmp_path.iterdir()} == {library.name, index.name}


@pytest.mark.parametrize("loads", [True, False])
def test_J9_an_object_that_does_not_load_is_built_again_once(loads, cache_folder, monkeypatch):
    """As many bytes as were written, and not one of ours."""
    path, built = cache.object_path("state_ids", KEY), []

    def build_object(kernel_file, key, target):
        built.append(kernel_file)
        target.write_bytes(b"good!" if loads else b"bad!!")
        target.with_suffix(".size").write_text("5")

    monkeypatch.setattr(cache, "_build_object", build_object)
    monkeypatch.setattr(cache, "_load_object", lambda file, symbol: symbol if file.read_bytes() == b"good!" else None)
    path.write_bytes(b"alien")
    path.with_suffix(".size").write_text("5")
    lookup = cache.jit_cache("state_ids")
    if loads:
        assert [lookup(KEY), lookup(KEY)] == [KEY.symbol()] * 2
    else:
        with pytest.raises(CompileCacheError, match="does not load after being rebuilt"):
            lookup(KEY)
    assert built == ["state_ids"]


@pytest.mark.parametrize("spill", [0, 8])
def test_a_build_leaves_objects_a_report_and_a_verdict(spill, tmp_path, monkeypatch, capsys):
    asked = []

    def build_all(entries, jobs, progress):
        asked.append(([entry.key.symbol() for entry in entries], jobs, progress))
        found = []
        for number, entry in enumerate(entries):
            path = tmp_path / f"{entry.key.symbol()}.o"
            path.write_bytes(b"object")
            found.append((entry, path, ResourceReport(16, 0, spill if number else 0, 0, False)))
        return found

    monkeypatch.setattr(build, "build_all", build_all)
    out = tmp_path / "deep" / "out"
    assert build.build(out, shared=False, only="^(gated_norm|advance_state_ids)_", jobs=3, progress=False) == (
        not spill
    )
    ((symbols, jobs, progress),) = asked
    assert (len(symbols), jobs, progress) == (2, 3, False)
    assert {file.name for file in out.iterdir()} == {"report.json", *(f"{symbol}.o" for symbol in symbols)}
    report = json.loads((out / "report.json").read_text())
    assert [report[symbol]["spill_store_bytes"] for symbol in symbols] == [0, spill]
    assert ("spills 8 B stores" in capsys.readouterr().out) == bool(spill)
