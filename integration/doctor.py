"""What this machine has, and which operators run on what, in words."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform

from ..cute_kernels.compile import shared_library
from ..cute_kernels.compile.cache import DSL_SERIES, cache_dir, dsl_available
from ..cute_kernels.errors import CompileCacheError

PACKAGES = (
    "torch",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "triton",
    "lmdeploy",
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine-cuda13",
)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device_lines() -> tuple[list[str], str | None]:
    """Lines about CUDA devices, and why kernels cannot run (None: they can)."""
    if importlib.util.find_spec("torch") is None:
        return ["devices: unknown"], "torch is not installed"
    import torch

    if not torch.cuda.is_available():
        return ["devices: no CUDA device"], "no CUDA device"
    lines, sm90 = [], False
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        sm90 |= capability == (9, 0)
        lines.append(
            f"device {index}: {torch.cuda.get_device_name(index)}, compute capability {capability[0]}.{capability[1]}"
        )
    return lines, None if sm90 else "no device of compute capability 9.0"


def _compiler_reason() -> str | None:
    version = _version("nvidia-cutlass-dsl")
    if version is not None and not version.startswith(DSL_SERIES):
        return f"nvidia-cutlass-dsl is {version}; allowed: {DSL_SERIES}*"
    if dsl_available() or shared_library.folder() is not None:
        return None
    return f"the compiler is not installed and {shared_library.describe()}"


def report() -> str:
    """The whole text."""
    lines = [f"python {platform.python_version()} on {platform.machine()}"]
    lines += [f"{package}: {_version(package) or 'not installed'}" for package in PACKAGES]
    devices, reason = _device_lines()
    lines += devices
    reason = reason or _compiler_reason()
    try:
        lines.append(f"compile cache: {cache_dir()}")
    except CompileCacheError as error:
        lines.append(str(error))
        reason = reason or "the compile cache cannot be used"
    lines.append(f"prebuilt kernels: {shared_library.describe()}")
    lines.append("operators: kernels" if reason is None else f"operators: references ({reason})")
    lines.append("compact-state build: " + ("works here" if dsl_available() else "needs nvidia-cutlass-dsl"))
    return "\n".join(lines)
