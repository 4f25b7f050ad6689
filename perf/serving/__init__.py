"""lmdeploy end to end, legacy against compact: engines in processes of their own, answers compared, then load measured.

    python tests/integration/lmd_tiny.py /tmp/0.8b --shape 0.8b --device cuda
    PYTHONPATH=src python -m compact_state.perf.serving load /tmp/0.8b --out load.json

`engine` is what each process runs, `fleet` starts and asks them, `traffic` is what they are asked; `load`, `equality`,
`server` and `ray` are the programs.
"""
