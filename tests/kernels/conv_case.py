"""Operands, oracles and comparisons that the conv tests share: outputs to one bf16 ulp of float64, windows bit for bit."""

from __future__ import annotations

import math

import pytest
import torch

from compact_state.cute_kernels import (
    causal_conv1d_commit,
    causal_conv1d_decode,
    causal_conv1d_prefill,
    causal_conv1d_verify,
)
from compact_state.cute_kernels.compile import cache, shared_library
from compact_state.cute_kernels.compile.manifest import manifest
from compact_state.cute_kernels.draft_log import DraftLog
from compact_state.cute_kernels.reference import conv1d as reference
from compact_state.cute_kernels.reference.datasets import cu_seqlens, ids
from compact_state.cute_kernels.reference.metrics import ulp_distance

BF16, F32 = torch.bfloat16, torch.float32
# width, weight, bias, activation: the forms that ship
FORMS = (
    (4, BF16, False, "silu"),
    (4, BF16, True, "silu"),
    (4, F32, False, "silu"),
    (4, F32, True, "silu"),
    (4, BF16, False, None),
    (3, BF16, True, "silu"),
    (2, BF16, True, "silu"),
)
FORM = FORMS[0]
CHANNELS = 328  # neither a multiple of a block's channels nor of a warp's


def gpu_ids(*values):
    return ids(*values, device="cuda")


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


class Case:
    """Random operands of one form; every slot, gap and output starts as NaN or garbage that must not be read."""

    def __init__(self, form=FORM, channels=CHANNELS, slots=12, seed=0, pad=24):
        width, w_dtype, use_bias, self.activation = form
        self.width, self.channels, self.pad = width, channels, pad
        self.generator = torch.Generator("cuda").manual_seed(seed)
        self.weight = self.random(channels, width).to(w_dtype)
        self.bias = self.random(channels).to(w_dtype) if use_bias else None
        record = torch.full((slots, width * channels + 64), math.nan, dtype=BF16, device="cuda")
        self.pool = record[:, : width * channels].unflatten(1, (width, channels))
        self.pool.copy_(self.random(slots, width, channels))

    def random(self, *shape):
        return torch.randn(*shape, generator=self.generator, device="cuda")

    def tokens(self, count):
        """x [count, C], a view of wider rows whose other columns are NaN."""
        rows = torch.full((count, self.channels + 2 * self.pad), math.nan, dtype=BF16, device="cuda")
        rows[:, self.pad : self.pad + self.channels] = self.random(count, self.channels)
        return rows[:, self.pad : self.pad + self.channels]

    def output(self, count):
        rows = torch.full((count, self.channels + self.pad), math.nan, dtype=BF16, device="cuda")
        return rows[:, : self.channels]

    def decode(self, x, pool, read, write, positions, out=None, settled=False):
        out = self.output(x.shape[0]) if out is None else out
        return causal_conv1d_decode(
            x, self.weight, pool, read, write, positions, bias=self.bias, activation=self.activation, settled=settled,
            out=out, backend="kernels",
        )  # fmt: skip

    def prefill(self, x, pool, read, write, positions, lengths, checkpoints=None):
        return causal_conv1d_prefill(
            x, self.weight, pool, read, write, positions, cu_seqlens(lengths).cuda(), bias=self.bias,
            activation=self.activation, checkpoints=checkpoints, out=self.output(x.shape[0]), backend="kernels",
        )  # fmt: skip

    def verify(self, x, pool, read, write, positions, lengths, log, accepted, settled=False, out=None):
        out = self.output(x.shape[0]) if out is None else out
        cu = lengths if isinstance(lengths, torch.Tensor) else cu_seqlens(lengths).cuda()
        return causal_conv1d_verify(
            x, self.weight, pool, read, write, positions, cu, log, accepted, bias=self.bias,
            activation=self.activation, settled=settled, out=out, backend="kernels",
        )  # fmt: skip

    def check_decode(self, x, read, write, positions, **options):
        """Decode against float64: outputs, windows written, all other slots. Gives the outputs and the pool before."""
        original, oracle = self.pool.clone(), self.pool.clone()
        expected = reference.causal_conv1d_decode(
            x, self.weight, oracle, read, write, positions, out=float64_out(self, x.shape[0]), **self.options()
        )
        out = self.decode(x, self.pool, read, write, positions, **options)
        self.check_output(out, expected)
        check_windows(self.pool, (oracle, original), write, positions + 1)
        return out, original

    def options(self):
        return {"bias": self.bias, "activation": self.activation, "compute_dtype": torch.float64}

    def check_output(self, out, expected, what="out"):
        bad = ~torch.isfinite(out)
        assert not bool(bad.any()), f"{what}: not finite at {bad.nonzero()[:4].tolist()}, {int(bad.sum())} in all"
        # A sum that cancels leaves fp32 rounding of its terms, which no ulp of the result measures.
        near = (out.double() - expected).abs() <= 1e-5
        worst = ulp_distance(torch.where(near, 0, out), torch.where(near, 0, expected))
        assert worst <= 1, f"{what}: {worst} ulp"


def commit(*arguments):
    causal_conv1d_commit(*arguments, backend="kernels")


def float64_out(case, count):
    return torch.empty(count, case.channels, dtype=torch.float64, device="cuda")


def check_windows(pool, before, write, positions):
    """`before`: the reference's pool after its call, and the pool before. Live columns of written slots equal the one's,
    all other slots the other's, bit for bit."""
    reference_pool, original = before
    named = {slot for slot in write.tolist() if 0 <= slot < pool.shape[0]}
    got = reference.live_window(pool, write, positions)
    want = reference.live_window(reference_pool, write, positions)
    wrong = (bits(got) != bits(want)).flatten(1)
    assert torch.equal(bits(got), bits(want)), f"windows of rows {wrong.any(1).nonzero().flatten().tolist()} differ"
    for slot in range(pool.shape[0]):
        if slot not in named:
            assert torch.equal(bits(pool[slot]), bits(original[slot])), f"slot {slot} changed"


def same_windows(pool, a, b, position):
    """Whether two slots hold the same live window after `position` tokens."""
    at = gpu_ids(position)
    return torch.equal(reference.live_window(pool, gpu_ids(a), at), reference.live_window(pool, gpu_ids(b), at))


def skip_unless_built(kernel_file, key):
    """Skip a key that does not ship where there is no compiler; a library that lacks one that ships fails the test."""
    ships = any(entry.key == key for entry in manifest())
    built = shared_library.find(key.symbol(), cache.digest_of(kernel_file, key)) is not None
    if not ships and not built and not cache.dsl_available():
        pytest.skip(f"{key.symbol()} does not ship and no compiler is installed")


def make_log(case, batch, rows=None):
    log = DraftLog.allocate("gdn", batch, 1, 1, case.channels, "cuda", dtype=BF16, rows=rows)
    log.x.fill_(math.nan)
    return log


def copy_of(log):
    return DraftLog(k=log.k, u=log.u, g=log.g, x=log.x.clone(), half=log.half.clone(), rows=log.rows)


def log_of(log, rows):
    """The same log memory under another map of rows."""
    return DraftLog(k=log.k, u=log.u, g=log.g, x=log.x, half=log.half, rows=rows)
