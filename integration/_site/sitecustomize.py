"""Start-up hook for processes whose packages come from PYTHONPATH, where `.pth` files are not read.

`python -m compact_state.integration` puts this folder first on PYTHONPATH, so child processes run it too. A
`sitecustomize` of the environment that this one hides runs after it.
"""

import importlib.machinery
import importlib.util
import os
import sys


def _run_hidden() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    rest = [path for path in sys.path if os.path.abspath(path or os.curdir) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


try:
    from compact_state.integration._boot import boot
except ImportError:
    pass  # a child interpreter that does not see the library: it does not serve either
else:
    boot()
_run_hidden()
