"""The `compact-state` command, run as a user would."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


def run(*arguments, **environment):
    import os

    command = [sys.executable, "-m", "compact_state.integration.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)


def test_help_lists_every_command():
    done = run("--help")
    assert done.returncode == 0
    for command in ("build", "doctor", "demo", "capacity", "tune"):
        assert command in done.stdout


def test_doctor_says_what_operators_run_on_and_why():
    done = run("doctor")
    assert done.returncode == 0
    assert "operators: " in done.stdout
    assert "compile cache: " in done.stdout


def test_doctor_names_an_unsafe_cache_folder(tmp_path):
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o777)
    done = run("doctor", COMPACT_STATE_CACHE_DIR=str(folder))
    assert done.returncode == 0
    assert "nobody else can write" in done.stdout


def test_capacity_prints_both_designs():
    done = run("capacity", "--model", "glm-5.3-flash", "--tp", "4", "--max-batch", "64", "--drafts", "5")
    assert done.returncode == 0
    assert "copying design" in done.stdout
    assert "saved" in done.stdout


def test_bad_values_end_with_a_sentence():
    done = run("capacity", "--model", "no-such-model")
    assert done.returncode != 0
    assert "no-such-model" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert run("demo", "--requests", "0").returncode == 2


@pytest.mark.compile
def test_build_writes_objects_and_their_report(tmp_path):
    done = run("build", "--out", str(tmp_path), "--only", "^advance_state_ids", "--jobs", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report
    assert all(resources["spill_store_bytes"] == 0 for resources in report.values())
    assert len(list(tmp_path.glob("*.o"))) == len(report)
