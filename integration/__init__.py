"""Adapters that put the pool and the operators under serving engines.

Importing this package imports nothing but the standard library: a start-up hook runs in every Python process.
"""

from __future__ import annotations

from ._boot import install

__all__ = ["install"]
