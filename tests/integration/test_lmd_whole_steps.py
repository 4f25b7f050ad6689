"""What the flow's tests hold with short steps, as shipped, holds with lmdeploy's own steps too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lmdeploy", reason="lmdeploy is not installed")

HERE = Path(__file__).parent
FILES = ("test_lmd_flow.py", "test_lmd_turns.py", "test_lmd_lifecycle.py", "test_lmd_drafts.py")


def test_the_flow_holds_without_short_steps() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        *(str(HERE / name) for name in FILES),
    ]
    environment = {**os.environ, "LMDEPLOY_COMPACT_SHORT_STEPS": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:]
