"""Dependencies point one way, and the light packages stay light."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAY_IMPORT = {
    "cute_kernels": set(),
    "pool": set(),
    "autotune": {"cute_kernels", "perf"},
    "perf": {"cute_kernels", "pool", "autotune"},
    "integration": {"cute_kernels", "pool", "autotune", "perf"},
}


def imported_packages(file: Path, package: str) -> set[str]:
    """Packages of this project that a file imports, relatively or by the import root."""
    found = set()
    depth = len(file.relative_to(ROOT / package).parts)
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level > depth:
            found |= {(node.module or node.names[0].name).split(".")[0]}
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
        found |= {name.split(".")[1] for name in names if name.startswith("compact_state.")}
    return found - {package}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_dependencies_point_one_way(package):
    for file in (ROOT / package).rglob("*.py"):
        wrong = imported_packages(file, package) - MAY_IMPORT[package]
        assert not wrong, f"{file.relative_to(ROOT)} imports {sorted(wrong)}"


def test_the_check_sees_a_wrong_import(tmp_path, monkeypatch):
    (tmp_path / "pool").mkdir()
    file = tmp_path / "pool" / "bad.py"
    file.write_text("from ..integration.demo import run_demo\nimport compact_state.autotune.runner\n")
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert imported_packages(file, "pool") == {"integration", "autotune"}


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("compact_state.pool", ("torch", "cutlass", "tvm_ffi")),
        ("compact_state.cute_kernels", ("torch", "cutlass")),
        ("compact_state.cute_kernels.configs.recurrent", ("torch", "cutlass")),
        ("compact_state.cute_kernels.gdn", ("cutlass",)),
        ("compact_state.cute_kernels.kda", ("cutlass",)),
        ("compact_state.cute_kernels.conv1d", ("cutlass",)),
    ],
)
def test_light_modules_import_nothing_heavy(module, absent):
    code = f"import sys, {module}; print([m for m in {absent!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_type_checkers_see_the_operators_as_they_are():
    """The package finds its names at run time; type checkers and editors read the imports beside that."""
    tree = ast.parse((ROOT / "cute_kernels" / "__init__.py").read_text())
    named = {
        alias.asname: node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    exports = importlib.import_module("compact_state.cute_kernels")._EXPORTS
    assert {name: module for name, module in named.items() if name in exports} == exports
    for name in exports:
        assert getattr(importlib.import_module("compact_state.cute_kernels"), name).__name__ == name
