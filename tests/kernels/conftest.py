"""Helpers of this folder are plain modules (`*_case.py`); they are found through the path added here."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
