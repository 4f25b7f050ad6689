"""Kernels linked ahead of time into one shared library, loadable with the DSL's runtime library alone."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import json
import logging
import os
import subprocess
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ..errors import CompileError

logger = logging.getLogger(__name__)

LIBRARY = "compact_state_kernels.so"
INDEX = "compact_state_kernels.json"
CALLER = Path(__file__).with_name("caller.c")
ENVIRONMENT = "COMPACT_STATE_KERNELS"


def folder() -> Path | None:
    """Folder named by `COMPACT_STATE_KERNELS`, or None: without it nothing built ahead is looked for."""
    value = os.environ.get(ENVIRONMENT)
    return Path(value) if value else None


def describe() -> str:
    """Where a prebuilt library is looked for, for error texts."""
    path = folder()
    return f"{ENVIRONMENT} is not set" if path is None else f"{ENVIRONMENT}={path}"


def replace_file(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` make a file in one step: a reader sees the old one or the new one."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def link(objects: Iterable[Path], out: Path, index: dict[str, Any]) -> Path:
    """Link object files into `out/LIBRARY` beside its index {"symbols": {symbol: digest}, "code": {symbol: hash}, …}."""
    from cutlass.cute.runtime import find_runtime_libraries
    from tvm_ffi.libinfo import find_dlpack_include_path, find_include_path

    out.mkdir(parents=True, exist_ok=True)
    runtime = [Path(path) for path in find_runtime_libraries(enable_tvm_ffi=True)]
    command = ["cc", "-O2", "-shared", "-fPIC", *(str(path) for path in objects), str(CALLER)]
    command += [f"-I{path}" for path in (find_include_path(), find_dlpack_include_path())]
    command += [f"-L{path.parent}" for path in runtime] + ["-lcute_dsl_runtime", "-ltvm_ffi"]

    def run(target: Path) -> None:
        done = subprocess.run([*command, "-o", str(target)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise CompileError(f"linking {LIBRARY} failed: {done.stderr.strip()[-2000:]}")
        # Between the two no index speaks for a library that it does not describe.
        (out / INDEX).unlink(missing_ok=True)

    replace_file(out / LIBRARY, run)
    replace_file(out / INDEX, lambda file: file.write_text(json.dumps(index, indent=1, sort_keys=True)))
    return out / LIBRARY


def _preload_runtime() -> None:
    """Make the runtime's symbols visible to the library, whose link line names no absolute path."""
    spec = importlib.util.find_spec("tvm_ffi")
    if spec is None or spec.origin is None:
        raise OSError("apache-tvm-ffi is not installed")
    tvm_ffi = Path(spec.origin).parent
    site = tvm_ffi.parent
    candidates = [
        site / "nvidia_cutlass_dsl" / variant / "lib" / "libcute_dsl_runtime.so" for variant in ("cu13", "cu12")
    ]
    runtime = next((path for path in candidates if path.is_file()), None)
    if runtime is None:
        raise OSError(f"libcute_dsl_runtime.so is not under {site}")
    for path in (tvm_ffi / "lib" / "libtvm_ffi.so", runtime):
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


@functools.cache
def _open(path: Path) -> tuple[Any, dict[str, str], dict[str, str]]:
    index: dict[str, str] = {}
    code: dict[str, str] = {}
    module: Any = None
    try:
        content = json.loads((path / INDEX).read_text())
        index, code = content["symbols"], content.get("code", {})
        _preload_runtime()
        import tvm_ffi

        module = tvm_ffi.load_module(str((path / LIBRARY).resolve()))
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        logger.warning("prebuilt kernels in %s are not used: %s", path, error)
        index = {}
    return module, index, code


def find(symbol: str, digest: str) -> Callable[..., None] | None:
    """The function of a specialisation, or None when the library is absent or was built from other sources."""
    path = folder()
    if path is None:
        return None
    module, index, _ = _open(path)
    if symbol not in index:
        return None
    if index[symbol] != digest:
        logger.warning("prebuilt kernel %s was built from other sources; it is not used", symbol)
        return None
    return direct(path / LIBRARY, symbol, module[symbol])


def direct(library: Path, symbol: str, usual: Callable[..., None]) -> Callable[..., None]:
    """The function `usual` of a library without its cost for each tensor (caller.c), or itself where that cannot be had."""
    caller = _caller(library, "compact_state_caller")
    if caller is None:
        return usual
    loaded, lent, make = caller
    try:
        kernel = ctypes.cast(loaded[f"__tvm_ffi_{symbol}"], ctypes.c_void_p)
    except AttributeError:
        return usual
    make.argtypes = [ctypes.c_void_p, *[ctypes.py_object] * 4]
    function: Callable[..., None] = make(kernel, *lent, usual)
    return function


def family(choose: Callable[..., Callable[..., None]], library: Path | None = None) -> Callable[..., None]:
    """A function that calls what `choose(*arguments)` returns with the same arguments.

    In a library (by default the one in `folder()`) it asks once for each set of the tensors' sizes and dtypes and the other
    values (caller.c), else at every call.
    """
    path = folder()
    if library is None and path is not None and _open(path)[0] is not None:  # the runtime it needs is loaded then
        library = path / LIBRARY
    caller = None if library is None else _caller(library, "compact_state_family")
    function: Callable[..., None] | None = None
    if caller is not None:
        _, lent, make = caller
        make.argtypes = [ctypes.py_object] * 4
        function = make(*lent, choose)
    return (lambda *given: choose(*given)(*given)) if function is None else function


def _caller(library: Path, name: str) -> tuple[Any, tuple[Any, ...], Any] | None:
    """The library, who lends tensors and for which types, and its function `name`; None where it cannot be had."""
    import torch

    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return None
    try:
        loaded = ctypes.PyDLL(str(library.resolve()))
        exchange = torch.Tensor.__dlpack_c_exchange_api__  # type: ignore[attr-defined]
        make = loaded[name]
    except (AttributeError, OSError):
        return None
    make.restype = ctypes.py_object
    return loaded, (exchange, torch.Tensor, torch.nn.Parameter), make


def code_of(symbol: str, digest: str) -> str | None:
    """Hash of a specialisation's instructions (`machine_code.code_hash`), None where no library of these sources has it."""
    path = folder()
    if path is None:
        return None
    _, index, code = _open(path)
    return code.get(symbol) if index.get(symbol) == digest else None
