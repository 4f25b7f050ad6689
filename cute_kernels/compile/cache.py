"""`jit_cache(file)`: from a key to a loaded function; the key is all that the kernel file's `build(key)` sees.

`build` functions are the only callers of `cute_compile`. A kernel file is named, not imported, so that a process with
kernels built ahead of time needs no compiler. Look-up order: this process, a shared library built ahead of time, an object
file in the cache folder, the compiler. An object is loaded from its file even in the process that built it, so that the
first and every later process run the same function. A corrupt file is a miss. The DSL aborts the process when two threads
compile, so one lock guards it; two processes building the same key meet at a file lock.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import filelock
import platformdirs

from ..errors import BackendUnavailableError, CompileCacheError
from . import shared_library
from .fingerprint import PACKAGE_ROOT, TARGET, cache_digest, object_digest, source_fingerprint
from .machine_code import code_hash
from .report import REMARKS
from .shared_library import replace_file


class KernelKey(Protocol):
    """Frozen dataclass of everything that changes the code of one kernel."""

    def symbol(self) -> str:
        """C identifier of this specialisation, unique among all keys of the package."""
        ...


CompiledKernel = Callable[..., None]
DSL_SERIES = "4.8."  # versions of nvidia-cutlass-dsl; the next minor may remove what this one deprecates

_compile_lock = threading.Lock()
_loaded_modules: list[Any] = []  # the objects' code lives as long as these references
compile_count = 0


def dsl_available() -> bool:
    """Whether the compiler can be imported here. A folder of its name without modules is a namespace, not the compiler."""
    spec = importlib.util.find_spec("cutlass")
    return spec is not None and spec.origin is not None


def check_dsl() -> None:
    """Raise BackendUnavailableError unless the installed compiler is of the series that the kernels are written for and loads."""
    try:
        version = importlib.metadata.version("nvidia-cutlass-dsl")
    except importlib.metadata.PackageNotFoundError:
        version = DSL_SERIES  # a source tree on the path, without metadata: imports decide
    if not version.startswith(DSL_SERIES):
        raise BackendUnavailableError(f"nvidia-cutlass-dsl: got {version}; allowed: {DSL_SERIES}*")
    try:
        importlib.import_module("cutlass")
    except Exception as error:  # without its part for a CUDA release it raises RuntimeError
        raise BackendUnavailableError(
            f"nvidia-cutlass-dsl: is installed and does not load ({type(error).__name__}: {error}); allowed: all of its parts, "
            "or a library of the same sources (compact-state build --shared)"
        ) from error


def cache_dir() -> Path:
    """Folder of compiled objects, made 0700. `COMPACT_STATE_CACHE_DIR` overrides the user's cache folder.

    Raises CompileCacheError where the folder is unreadable, another user's or writable by others: it holds native code.
    """
    override = os.environ.get("COMPACT_STATE_CACHE_DIR")
    path = Path(override) if override else Path(platformdirs.user_cache_dir("compact-state"))
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.stat()
    except OSError as error:
        raise CompileCacheError(f"compile cache {path}: {error.strerror}; set COMPACT_STATE_CACHE_DIR") from error
    if info.st_uid != os.getuid() or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CompileCacheError(
            f"compile cache {path}: owner {info.st_uid}, mode {stat.filemode(info.st_mode)}; allowed: a folder of "
            f"user {os.getuid()} that nobody else can write (chmod 700), or another COMPACT_STATE_CACHE_DIR"
        )
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise CompileCacheError(f"compile cache {path}: not readable and writable by this user")
    return path


def cute_compile(function: Any, *arguments: Any, options: str = "") -> Any:
    """`cute.compile` for sm_90a through TVM-FFI, from fake tensors. Called by `compile_*` functions alone."""
    os.environ.setdefault("CUTE_DSL_ARCH", TARGET)
    import cutlass.cute as cute

    remarks = "remarks{ptx}" if REMARKS in os.environ else ""
    return cute.compile(
        function, *arguments, options=f"--enable-tvm-ffi --gpu-arch {TARGET} {options} {remarks}".strip()
    )


def _build_object(kernel_file: str, key: KernelKey, path: Path) -> None:
    global compile_count
    with _compile_lock:
        os.environ.setdefault("CUTE_DSL_ARCH", TARGET)  # before the first import of the DSL
        module = importlib.import_module(f"..kernels.{kernel_file}", __package__)
        compiled = module.build(key)
        compile_count += 1
        replace_file(path, lambda p: compiled.export_to_c(object_file_path=str(p), function_name=key.symbol()))
    size = str(path.stat().st_size)
    replace_file(path.with_suffix(".size"), lambda p: p.write_text(size))


def _source(kernel_file: str) -> str:
    return source_fingerprint(PACKAGE_ROOT / "kernels" / f"{kernel_file}.py")


def object_path(kernel_file: str, key: KernelKey) -> Path:
    """Where the object of this specialisation lives in the cache folder."""
    return cache_dir() / f"{key.symbol()}-{cache_digest(_source(kernel_file), key.symbol(), key)}.o"


def digest_of(kernel_file: str, key: KernelKey) -> str:
    """The specialisation's identity as recorded in a shared library's index."""
    return object_digest(_source(kernel_file), key.symbol(), key)


def machine_code(kernel_file: str, key: KernelKey) -> str | None:
    """Hash of a specialisation's instructions where it is built already, in the prebuilt library or in the cache folder."""
    linked = shared_library.code_of(key.symbol(), digest_of(kernel_file, key))
    if linked is not None:
        return linked
    path = object_path(kernel_file, key)
    return code_hash(path) if _is_whole(path) else None


def _is_whole(path: Path) -> bool:
    size_file = path.with_suffix(".size")
    return path.is_file() and size_file.is_file() and size_file.read_text() == str(path.stat().st_size)


def ensure_object(kernel_file: str, key: KernelKey) -> Path:
    """Path of the built object file; compiles it when it is not there."""
    path = object_path(kernel_file, key)
    with filelock.FileLock(f"{path}.lock", mode=0o600):
        if not _is_whole(path):
            _build_object(kernel_file, key, path)
    return path


def _load_object(path: Path, symbol: str) -> CompiledKernel | None:
    """The function in an object file, or None when the file is not one of ours."""
    from cutlass.cute.runtime import load_module

    try:
        module = load_module(str(path), enable_tvm_ffi=True)
        function: CompiledKernel = getattr(module, symbol)
    except (OSError, ValueError, RuntimeError, AttributeError):
        return None
    _loaded_modules.append(module)
    return function


def _load(kernel_file: str, key: KernelKey) -> CompiledKernel:
    function = shared_library.find(key.symbol(), digest_of(kernel_file, key))
    if function is not None:
        return function
    if not dsl_available():
        raise BackendUnavailableError(
            f"kernel {key.symbol()}: not in a prebuilt library ({shared_library.describe()}) and the compiler "
            "nvidia-cutlass-dsl is not installed; allowed: a library of the same sources (compact-state build --shared), "
            "or the compiler"
        )
    check_dsl()
    for attempt in range(2):
        path = ensure_object(kernel_file, key)
        loaded = _load_object(path, key.symbol())
        if loaded is not None:
            return loaded
        if attempt == 0:
            path.unlink(missing_ok=True)
    raise CompileCacheError(f"compiled object {path} does not load after being rebuilt")


def jit_cache(kernel_file: str) -> Callable[[Any], CompiledKernel]:
    """The look-up `key -> loaded function` of one kernel file (`kernels/<kernel_file>.py`), memoised by key."""
    functions: dict[Any, CompiledKernel] = {}

    def lookup(key: Any) -> CompiledKernel:
        try:
            return functions[key]
        except KeyError:
            return functions.setdefault(key, _load(kernel_file, key))

    return lookup
