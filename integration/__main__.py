"""Run a program with the compact state pool on, where `.pth` files are not read.

    python -m compact_state.integration -m lmdeploy serve api_server MODEL --num-gpu-blocks 4096
    python -m compact_state.integration program.py ARGUMENT ...

The switch LMDEPLOY_ENABLE_COMPACT_STATE is set to 1 unless it is set already.
"""

from __future__ import annotations

import os
import runpy
import sys

from . import _boot, envs


def _child_environment() -> None:
    """Make child processes run the start-up hook as well."""
    hook = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_site")
    # The link `src/compact_state` must stay as it is on the path: the import root is the folder that holds it.
    root = next((path for path in sys.path if os.path.isdir(os.path.join(path or ".", "compact_state"))), None)
    parts = [hook] if root is None else [hook, os.path.abspath(root)]
    known = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in parts]
    os.environ["PYTHONPATH"] = os.pathsep.join([*parts, *known])


def main() -> None:
    """Set the environment, install the hook here, and run the named module or script."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return
    os.environ.setdefault(envs.ENABLE, "1")
    _child_environment()
    _boot.boot()
    if arguments[0] == "-m":
        if len(arguments) < 2:
            raise SystemExit("-m needs the name of a module")
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
