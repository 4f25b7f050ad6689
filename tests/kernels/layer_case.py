"""Inputs, pools and comparisons that the tests of the fused layer step share."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from compact_state.cute_kernels import gdn_layer_decode, kda_layer_decode, reference
from compact_state.cute_kernels.reference.datasets import make_pool

DTYPES = (torch.float32, torch.bfloat16)
KINDS = (("gdn", None), ("kda", None), ("kda", -5.0))
LAYER = {"gdn": gdn_layer_decode, "kda": kda_layer_decode}
ORACLE = {"gdn": reference.gdn_layer_decode, "kda": reference.kda_layer_decode}


@dataclass(frozen=True)
class Step:
    """Inputs of a layer step; x, z, gate and b are views of one packed row."""

    kind: str
    bound: float | None
    x: torch.Tensor
    gate: torch.Tensor
    b: torch.Tensor
    z: torch.Tensor
    weight: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    norm_weight: torch.Tensor
    options: dict

    def rows(self, index) -> Step:
        return replace(self, x=self.x[index], gate=self.gate[index], b=self.b[index], z=self.z[index])

    def run(self, operator, windows, state, read, write, positions, **extra):
        return operator(
            self.x, self.gate, self.b, self.z, self.weight, windows, self.A_log, self.dt_bias, self.norm_weight, state, read,
            write, positions, **self.options, **extra,
        )  # fmt: skip

    def kernel(self, *arguments, **extra):
        return self.run(LAYER[self.kind], *arguments, backend="kernels", **extra)


def make_step(kind, bound, n, hk, hv, *, weight=torch.bfloat16, norm=torch.float32, bias=False, seed=0, **options):
    rng = torch.Generator().manual_seed(seed)
    channels, gate_width = (2 * hk + hv) * 128, hv * (128 if kind == "kda" else 1)
    width = channels + hv * 128 + gate_width + hv
    row = torch.randn(n, width + (-width) % 8 + 8, generator=rng).bfloat16().cuda()
    x, z, gate, b, _ = row.split([channels, hv * 128, gate_width, hv, row.shape[1] - width], dim=1)
    if kind == "kda":
        gate = gate.unflatten(1, (hv, 128))
        options["lower_bound"] = bound
    if bias:
        options["conv_bias"] = torch.randn(channels, generator=rng).to("cuda", weight)
    taps = (torch.randn(channels, 4, generator=rng) / 2).to("cuda", weight)
    a_log = (torch.rand(hv, generator=rng) * math.log(4.0)).cuda()
    dt_bias = (torch.randn(gate_width, generator=rng) - 2.0).cuda()
    norm_weight = (1.0 + 0.2 * torch.randn(128, generator=rng)).to("cuda", norm)
    return Step(kind, bound, x, gate, b, z, taps, a_log, dt_bias, norm_weight, options)


def make_pools(slots, step, dtype, used=None, seed=1):
    """NaN-filled windows and states on the GPU whose `used` slots (default all) hold values."""
    rng = torch.Generator().manual_seed(seed)
    hv, channels = step.b.shape[1], step.x.shape[1]
    windows = make_pool(slots, (4, channels), torch.bfloat16, device="cuda")
    state = make_pool(slots, (hv, 128, 128), dtype, device="cuda")
    for slot in range(slots) if used is None else used:
        windows[slot] = torch.randn(4, channels, generator=rng).bfloat16().cuda()
        state[slot] = torch.randn(hv, 128, 128, generator=rng).to("cuda", dtype)
    return windows, state


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)
