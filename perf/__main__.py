"""`python -m perf …`, from the repository root or as `python -m compact_state.perf …`."""

import sys
from pathlib import Path


def _main() -> int:
    source = Path(__file__).resolve().parents[1] / "src"
    if source.is_dir() and str(source) not in sys.path:
        sys.path.insert(0, str(source))  # run from a checkout that is not installed
    from compact_state.perf.cli import main

    return main()


if __name__ == "__main__":
    raise SystemExit(_main())
