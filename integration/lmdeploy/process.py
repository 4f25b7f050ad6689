"""Worker processes: the adapter's variables travel through lmdeploy's own environment forwarding."""

from __future__ import annotations

import os
from types import ModuleType

from .. import envs


def patch_envs(module: ModuleType) -> None:
    """`get_all_envs()` is what ray actors and the ray engine get as `env_vars`: the switch and its settings join it."""
    module._ENVS.update(envs.forwarded())
    if "PYTHONPATH" in os.environ:
        # Where the package comes from PYTHONPATH, so does the start-up hook of the workers.
        module._ENVS.setdefault("PYTHONPATH", os.environ["PYTHONPATH"])
