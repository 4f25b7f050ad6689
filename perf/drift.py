"""How far a decoded state drifts from the float64 recurrence over thousands of tokens, by the dtype of the pool.

    python -m compact_state.perf.drift [--tokens N] [--out FILE]

Each token is a decode call in place on a bf16 pool (rounded at every store) and on an fp32 pool, beside the float64
recurrence on the same bf16 inputs. A row of the report: RMS error of the state over the RMS of the reference's, and the same
of the outputs of the last 64 tokens, which are bf16 in both cases.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from .. import cute_kernels
from ..cute_kernels import reference
from ..cute_kernels.reference.datasets import delta_inputs, initial_states
from ..cute_kernels.reference.metrics import rms_ratio

CASES = (("gdn", None, "randn"), ("gdn", None, "trained"), ("kda", -5.0, "trained"), ("kda", None, "trained"))
HEADS = (4, 8)
MARKS = (1, 16, 64, 256, 1024, 2048, 4096, 8192)
WINDOW = 64  # tokens whose outputs one figure covers
DTYPES = (torch.bfloat16, torch.float32)


def drift(kind: str, bound: float | None, dataset: str, tokens: int, device: str) -> Iterator[tuple[int, list[float]]]:
    """For each mark up to `tokens`: state and output error with a bf16 pool, then with an fp32 pool."""
    hk, hv = HEADS
    inputs = delta_inputs(kind, dataset, tokens, hk, hv, lower_bound=bound, device=device)  # type: ignore[arg-type]
    start = initial_states(1, hv, dataset=dataset).to(device, torch.bfloat16)
    pools = [start.to(dtype) for dtype in DTYPES]
    exact = start.double()
    slot = torch.zeros(1, dtype=torch.int32, device=device)
    outs = [torch.empty(tokens, hv, 128, dtype=torch.bfloat16, device=device) for _ in DTYPES]
    expected = torch.empty(tokens, hv, 128, dtype=torch.float64, device=device)
    options = inputs.gate_options
    ours, oracle = getattr(cute_kernels, f"{kind}_decode"), getattr(reference, f"{kind}_prefill")
    marks = [mark for mark in MARKS if mark <= tokens]
    for start, end in zip([0, *marks], marks):
        for t in range(start, end):
            here = slice(t, t + 1)
            for pool, out in zip(pools, outs):
                ours(*inputs.rows(here).tensors, pool, slot, slot, out=out[here], **options)
        part = slice(start, end)
        cu = torch.tensor([0, end - start], dtype=torch.int32, device=device)
        exactly = {"out": expected[part], "compute_dtype": torch.float64, **options}
        oracle(*inputs.rows(part).tensors, exact, slot, slot, cu, **exactly)
        last = slice(max(0, end - WINDOW), end)
        figures = [(rms_ratio(pool, exact), rms_ratio(out[last], expected[last])) for pool, out in zip(pools, outs)]
        yield end, [figure for pair in figures for figure in pair]


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=MARKS[-1])
    parser.add_argument("--out", type=Path, help="file the report is written to as well")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lines = [f"device {torch.cuda.get_device_name() if device == 'cuda' else device}, heads {HEADS[0]}/{HEADS[1]}"]
    for kind, bound, dataset in CASES:
        gate = "" if kind == "gdn" else f", {'softplus' if bound is None else f'bound {bound}'}"
        lines.append(f"{kind}_decode, {dataset}{gate}")
        lines.append(f"{'tokens':>8}  bf16 pool: state    output   fp32 pool: state    output")
        for tokens, (state16, out16, state32, out32) in drift(kind, bound, dataset, options.tokens, device):
            lines.append(f"{tokens:8d}  {state16:16.2e} {out16:9.2e} {state32:18.2e} {out32:9.2e}")
    text = "\n".join(lines)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
