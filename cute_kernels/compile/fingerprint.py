"""What a compiled object depends on: the sources it was traced from, the target and the compiler."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import os
from pathlib import Path

import xxhash

PACKAGE_ROOT = Path(__file__).resolve().parents[1]
TARGET = "sm_90a"
NOT_TRACED = ("cache.py", "manifest.py", "tables.py")  # imported by kernel files, but no part of the code they trace


def _imported_files(path: Path) -> list[Path]:
    """Files of this package that `path` imports relatively."""
    files: list[Path] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or node.level == 0:
            continue
        base = path.parents[node.level - 1]
        if node.module:
            base = base.joinpath(*node.module.split("."))
        candidates = [base.with_suffix(".py"), *(base / f"{alias.name}.py" for alias in node.names)]
        files += [candidate for candidate in candidates if candidate.is_file()]
    return files


@functools.cache
def source_fingerprint(path: Path) -> str:
    """Digest of a kernel file and of every file of this package it imports, directly or not.

    A change to one kernel so leaves the others' compiled objects valid.
    """
    pending, seen = [path.resolve()], {}
    while pending:
        file = pending.pop()
        if file in seen or not file.is_relative_to(PACKAGE_ROOT) or file.name in NOT_TRACED:
            continue
        seen[file] = file.read_bytes()
        pending += _imported_files(file)
    digest = xxhash.xxh3_128()
    for file in sorted(seen):
        digest.update(str(file.relative_to(PACKAGE_ROOT)).encode() + b"\0" + seen[file] + b"\0")
    return digest.hexdigest()


@functools.cache
def compiler_version() -> str:
    """Version of the installed DSL with its library variants, or "none"."""
    versions = []
    for name in ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu13", "nvidia-cutlass-dsl-libs-cu12"):
        try:
            versions.append(f"{name}={importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ";".join(versions) or "none"


def compile_environment() -> str:
    """Variables of the DSL that change generated code; part of every cache key."""
    names = ("CUTE_DSL_LINEINFO", "CUTE_DSL_DEBUG", "CUTE_DSL_COMPILER_OPT", "CUTE_DSL_PTXAS_PATH")
    return ";".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)


def _digest(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode())


def object_digest(source: str, symbol: str, key: object) -> str:
    """Identity of one specialisation, independent of the compiler that built it."""
    return _digest(f"{source}|{symbol}|{key!r}|{TARGET}")


def cache_digest(source: str, symbol: str, key: object) -> str:
    """Identity of one object in the disk cache: the specialisation, its compiler and the environment."""
    return _digest(f"{object_digest(source, symbol, key)}|{compiler_version()}|{compile_environment()}")
