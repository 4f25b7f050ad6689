"""Measured choices: shipped JSON tables that replace a heuristic's choice where a sweep found a better one.

A look-up is a plain function of shapes. A heuristic makes its choice, then `tuned` says whether a table knows better; what
comes back is always legal. A table is used only where it was measured: same GPU, same compiler, and the same kernels. The
same are sources that differ in comments alone, and also, where the table and this process know the instructions of the
kernels, an entry whose choice and the heuristic's have the instructions that were measured. Anything else, a corrupt file
included, is ignored with one log line, and the heuristic stands. Nothing is ever tuned here. Every process reads the same
files, so all ranks choose alike; and since kernels of one operator differ in speed alone, ranks that read different files
would still agree in their results.

File: {"format", "kernel", "environment": {"device", "cutlass_dsl", "source", …}, "entries": [{"match": {field: value},
"range": {field: [low, high]}, "set": {field: value}}], "code": {symbol: hash of its instructions}, "timings": […]}. An entry
applies where every field of `match` equals the shape's and every field of `range` lies within its bounds, both inclusive.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import io
import json
import logging
import os
import re
import tokenize
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

from ..compile.fingerprint import _imported_files

logger = logging.getLogger(__name__)

FORMAT = 1
ENVIRONMENT = "COMPACT_STATE_TABLES"  # a folder of tables, or "off"
SHIPPED = Path(__file__).resolve().parents[2] / "autotune" / "tables"
KERNELS = Path(__file__).resolve().parents[1] / "kernels"

Key = TypeVar("Key")
Chooser = TypeVar("Chooser", bound=Callable[..., Any])

_caches: list[Any] = []  # memoised choosers
_forced: dict[str, dict[str, Any]] = {}  # what a sweep makes a kernel's chooser return


class TableError(ValueError):
    """A table file that cannot be used; the text says why."""


@functools.cache
def code_digest(kernel: str) -> str:
    """Identity of what `kernels/<kernel>.py` and its imports compute: comments, docstrings and layout do not count."""
    pending, seen = [KERNELS / f"{kernel}.py"], set[Path]()
    while pending:
        file = pending.pop()
        # Only device code: a config module changes with every heuristic, and what it decides stands in the key.
        if file not in seen and file.parent.name in ("kernels", "device"):
            seen.add(file)
            pending += _imported_files(file)
    digest = hashlib.sha256()
    for file in sorted(seen):
        digest.update(_code(file.read_text()).encode())
    return digest.hexdigest()[:32]


def _code(text: str) -> str:
    """Source text without comments, docstrings and white space; the same under every Python version."""
    kept: list[str] = []
    fresh = True  # at the start of a statement, where a lone string is a docstring
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.NL):
            continue
        if token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            fresh = True
            continue
        if not (fresh and token.type == tokenize.STRING):
            kept.append(token.string)
        fresh = False
    # An f-string is one token or several by Python version, with its doubled braces or without.
    return re.sub(r"\s", "", "".join(kept)).replace("{{", "{").replace("}}", "}")


@functools.cache
def compiler() -> str | None:
    """Version of the DSL, or of its libraries where the compiler itself is not installed."""
    for name in ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu13"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


@functools.cache
def device_name() -> str | None:
    """The GPU of this process, None without one."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def folder_of(device: str) -> str:
    """Folder of a device's tables: "NVIDIA H200" is h200."""
    return device.lower().replace("nvidia", "").strip().replace(" ", "_")


def read(path: Path, kernel: str) -> dict[str, Any]:
    """Load a table and check its form. Raises TableError."""
    try:
        table = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise TableError(f"unreadable: {error}") from error
    if not isinstance(table, dict) or table.get("format") != FORMAT or table.get("kernel") != kernel:
        raise TableError(f"not a table of {kernel} in format {FORMAT}")
    environment, entries = table.get("environment"), table.get("entries")
    if not isinstance(environment, dict) or not isinstance(entries, list):
        raise TableError("lacks environment or entries")
    if not isinstance(table.get("code", {}), dict):
        raise TableError("code is no object")
    for entry in entries:
        parts = (entry.get("match"), entry.get("range"), entry.get("set")) if isinstance(entry, dict) else (None,)
        if not all(isinstance(part, dict) for part in parts):
            raise TableError(f"entry {entry!r}: lacks match, range or set")
        bounds = entry["range"].values()
        if not all(isinstance(b, list) and len(b) == 2 and all(isinstance(x, int) for x in b) for b in bounds):
            raise TableError(f"entry {entry!r}: a range is a pair of integers")
    return table


def _usable(table: dict[str, Any], kernel: str, device: str | None) -> str | None:
    """Why a well-formed table does not apply here, or None."""
    facts = [("cutlass_dsl", compiler())]
    facts += [("device", device)] if device is not None else []
    facts += [] if table.get("code") else [("source", code_digest(kernel))]
    for name, here in facts:
        if table["environment"].get(name) != here:
            return f"measured with {name} {table['environment'].get(name)!r}, here {here!r}"
    return None


@functools.cache
def _is_measured(kernel: str, key: Any, code: str | None) -> bool:
    """Whether a key's kernel has the instructions that a table was measured with; says so once where it has not."""
    from ..compile import cache

    here = cache.machine_code(kernel, key)
    if here is not None and here == code:
        return True
    logger.warning(
        "tuning table of %s: %s is not the kernel that was measured (%s, here %s)", kernel, key.symbol(), code, here
    )
    return False


def _paths(kernel: str, device: str | None) -> list[Path]:
    """Files that may hold a kernel's table for `device`; None: for any shipped device."""
    place = os.environ.get(ENVIRONMENT, "")
    if place == "off":
        return []
    if place:
        return [Path(place) / f"{kernel}.json"]
    if device is not None:
        return [SHIPPED / folder_of(device) / f"{kernel}.json"]
    return sorted(SHIPPED.glob(f"*/{kernel}.json"))


@functools.cache
def _entries(kernel: str, device: str | None) -> tuple[dict[str, Any], ...]:
    """Entries of a kernel's table that apply to `device` (None: of every shipped device), or nothing."""
    entries: list[dict[str, Any]] = []
    for path in _paths(kernel, device):
        if not path.is_file():
            continue
        try:
            table = read(path, kernel)
            reason = _usable(table, kernel, device)
        except TableError as error:
            reason = str(error)
        if reason is not None:
            logger.warning("tuning table %s is ignored: %s", path, reason)
            continue
        same = table["environment"].get("source") == code_digest(kernel)
        entries += table["entries"] if same else [entry | {"code": table["code"]} for entry in table["entries"]]
    return tuple(entries)


def memoised(choose: Chooser) -> Chooser:
    """`functools.lru_cache` for a chooser that asks `tuned`, dropped whenever the answer may change."""
    cached = functools.lru_cache(maxsize=4096)(choose)
    _caches.append(cached)
    return cached  # type: ignore[return-value]


def forget() -> None:
    """Drop what was read and chosen, for tests and after a table is written."""
    _entries.cache_clear()
    _is_measured.cache_clear()
    for cached in _caches:
        cached.cache_clear()


@contextmanager
def forced(kernel: str, settings: dict[str, Any]) -> Iterator[None]:
    """Within it, choosers of `kernel` return their heuristic's key with `settings` in it. For sweeps; not for threads."""
    _forced[kernel] = settings
    for cached in _caches:
        cached.cache_clear()
    try:
        yield
    finally:
        del _forced[kernel]
        for cached in _caches:
            cached.cache_clear()


def _matches(entry: dict[str, Any], shape: dict[str, Any]) -> bool:
    exact = all(shape.get(name) == value for name, value in entry["match"].items())
    return exact and all(
        isinstance(shape.get(name), int) and low <= shape[name] <= high for name, (low, high) in entry["range"].items()
    )


def _apply(default: Key, entry: dict[str, Any]) -> Key | None:
    """The key an entry asks for, None if it is not legal. Only fields that the key's class names in `TUNED` can be set."""
    reason: str | None = None
    for name, value in entry["set"].items():
        if name not in getattr(type(default), "TUNED", ()):
            reason = f"{name} is not a matter of tuning"
        elif type(value) is not type(getattr(default, name)):
            reason = f"{name}={value!r}: not a {type(getattr(default, name)).__name__}"
    if reason is None:
        key: Key = dataclasses.replace(default, **entry["set"])  # type: ignore[type-var]
        reason = key.rejection()  # type: ignore[attr-defined]
        if reason is None:
            return key
    logger.warning("tuning entry %s is ignored: %s", entry["set"], reason)
    return None


def _loadable(kernel: str, key: Any) -> bool:
    """Whether this process can get the kernel of a key: built ahead, or compiled."""
    from ..compile import cache, shared_library

    if cache.dsl_available() or shared_library.find(key.symbol(), cache.digest_of(kernel, key)) is not None:
        return True
    logger.warning("tuned kernel %s is in no prebuilt library; the default is used", key.symbol())
    return False


def tuned(kernel: str, default: Key, **shape: Any) -> Key:
    """`default`, or the key a table measured as faster for `shape`. Callers are `memoised`: this reads and compares.

    Args:
        kernel: kernel file and table name.
        default: the heuristic's frozen key.
        shape: what the table's entries match on, such as kind, state and heads.
    """
    if kernel in _forced:
        return dataclasses.replace(default, **_forced[kernel])  # type: ignore[type-var]
    device = device_name() if any(_paths(kernel, None)) else None
    if device is None:
        return default
    for entry in _entries(kernel, device):
        if _matches(entry, shape):
            key = _apply(default, entry)
            if key is None or not _loadable(kernel, key):
                return default
            code, both = entry.get("code"), cast("tuple[Any, Any]", (default, key))
            same = code is None or all(_is_measured(kernel, one, code.get(one.symbol())) for one in both)
            return key if same else default
    return default


def shipped_keys(kernel: str, shape: dict[str, Any], default: Key) -> set[Key]:
    """Keys that any device's table can ask for where `shape`'s fields are what they are, for the manifest."""
    keys: set[Key] = set()
    for entry in _entries(kernel, None):
        if all(shape.get(name) == value for name, value in entry["match"].items()):
            key = _apply(default, entry)
            keys |= {key} if key is not None else set()
    return keys
