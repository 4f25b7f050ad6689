"""Measured speed: one registry of cases, every peer in the same run, results as JSON, and the report drawn from it.

`python -m perf run` measures, `python -m perf report` draws. Measuring needs torch, numpy and the standard library only.
"""
