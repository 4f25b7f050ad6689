"""The KDA prefill kernel's dataflow in torch, with its rounding points, to check its mathematics without a device.

Every operand of a matrix product is rounded where the kernel rounds it, products are summed in float64 (the hardware's
fp32 sums are finer than the operands), and elementwise work is fp32. Layouts, masks and pipelines are not modelled.
"""

from __future__ import annotations

import torch

CHUNK = 64
GROUP = 16
LEVELS = (32, 16, 8, 4, 2, 1)
HALF_MAX = 65504.0


def half(x: torch.Tensor) -> torch.Tensor:
    """Rounded to fp16, saturating."""
    return x.clamp(-HALF_MAX, HALF_MAX).half()


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Matrix product of 16-bit operands with wide sums, fp32 result."""
    return (a.double() @ b.double()).float()


def fp16_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Elementwise product of two fp32 tensors rounded to fp16, rounded to fp16 itself; as fp32."""
    return half(half(a).float() * half(b).float()).float()


def decay_factors(alpha: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Running products inside 16-row groups: inclusive from the first row, exclusive up to the last. ``alpha [.., 16,
    K]``."""
    prefix = alpha.cumprod(-2)
    suffix = torch.ones_like(alpha)
    for i in range(alpha.shape[-2] - 2, -1, -1):
        suffix[..., i, :] = suffix[..., i + 1, :] * alpha[..., i + 1, :]
    return prefix, suffix


def level_products(kn: torch.Tensor, qn: torch.Tensor, alpha: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Strictly lower ``kk`` and ``qk`` with per-channel decay, one product per level. ``[.., 64, K] -> [.., 64, 64]``.

    At half size h the anchor is the last row of the lower half: rows decay from it, columns decay to it, so every
    factor is a product of decays, at most 1, and depends on no later token than its row.
    """
    kk = torch.zeros(*kn.shape[:-2], CHUNK, CHUNK)
    qk = torch.zeros_like(kk)
    for h in LEVELS:
        for start in range(0, CHUNK, 2 * h):
            middle, end = start + h, start + 2 * h
            rows = alpha[..., middle:end, :].cumprod(-2)
            columns = torch.ones_like(rows)
            for j in range(h - 2, -1, -1):
                columns[..., j, :] = columns[..., j + 1, :] * alpha[..., start + j + 1, :]
            b = half(kn[..., start:middle, :] * columns).mT
            kk[..., middle:end, start:middle] = product(half(kn[..., middle:end, :] * rows), b)
            qk[..., middle:end, start:middle] = product(half(qn[..., middle:end, :] * rows), b)
    return kk, qk


def rounded_rows(x: torch.Tensor) -> torch.Tensor:
    """A lower triangular block in fp16 whose rows keep their sums: what rounding an entry leaves goes to the one on its left, in
    two chains of 8; what the right chain leaves goes to the last entry.
    """
    rounded = torch.zeros_like(x, dtype=torch.float16)
    remainder = torch.zeros_like(x[..., 0])
    for first in (8, 0):
        left = torch.zeros_like(remainder)
        for j in range(first + 7, first - 1, -1):
            wanted = x[..., j] + (left + remainder if j == 0 else left)
            rounded[..., j] = half(wanted)
            left = wanted - rounded[..., j].float()
        remainder = left
    return rounded


def scaled_inverse(L: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """``(I + L)^-1 diag(beta)`` of strictly lower ``L [.., 64, 64]``, fp16: 16-row diagonals by substitution in fp32, the
    blocks below them, a block column at a time, by products of fp16 blocks.
    """
    blocks = [slice(s, s + GROUP) for s in range(0, CHUNK, GROUP)]
    low, beta = half(L), beta[..., None, :]
    T = torch.zeros_like(low)
    diagonal = []
    for at in blocks:
        x = torch.eye(GROUP).expand(*L.shape[:-2], GROUP, GROUP).clone()
        for m in range(GROUP - 1, 0, -1):
            x[..., :m] -= L[..., at, at][..., m, None, :m] * x[..., m, None]
        diagonal.append(rounded_rows(x))
        T[..., at, at] = rounded_rows(x * beta[..., at])
    for w, columns in enumerate(blocks):
        X = {w: diagonal[w]}
        for i in range(w + 1, len(blocks)):
            rows = blocks[i]
            z = half(-sum(product(low[..., rows, blocks[m]], X[m]) for m in range(w, i)))
            block = product(diagonal[i], z)
            X[i], T[..., rows, columns] = half(block), half(block * beta[..., columns])
    return T


def padded(x: torch.Tensor, value: float) -> torch.Tensor:
    """Up to one chunk of ``[H, T, ..]`` as fp32 with ``value`` behind its tokens."""
    shape = list(x.shape)
    shape[1] = CHUNK - x.shape[1]
    return torch.cat([x.float(), torch.full(shape, value)], 1)


def prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    S: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence. Raw bf16 ``q, k, v [H, T, 128]``, fp32 log decay ``g [H, T, 128]``, fp32 ``beta [H, T]``, state
    ``[H, V, K]``.

    Returns bf16 ``o [H, T, V]`` and the fp32 end state ``[H, V, K]``.
    """
    S, outputs = S.float(), []
    for start in range(0, q.shape[1], CHUNK):
        sl = slice(start, start + CHUNK)
        count = min(CHUNK, q.shape[1] - start)

        qc, kc, vc = (padded(x[:, sl], 0.0) for x in (q, k, v))
        alpha, bc = padded(g[:, sl].exp(), 1.0), padded(beta[:, sl], 0.0)
        rk = torch.rsqrt((kc * kc).sum(-1, keepdim=True) + 1e-6)
        rq = torch.rsqrt((qc * qc).sum(-1, keepdim=True) + 1e-6) * scale
        kn, qn = half(kc * rk).float(), half(qc * rq).float()
        groups = alpha.unflatten(1, (4, GROUP))
        prefix, suffix = decay_factors(groups)
        total = prefix[:, :, -1]
        before = torch.ones_like(total)
        after = torch.ones_like(total)
        for i in range(1, 4):
            before[:, i] = before[:, i - 1] * total[:, i - 1]
            after[:, 3 - i] = after[:, 4 - i] * total[:, 4 - i]
        from_start = fp16_product(prefix, before[:, :, None]).flatten(1, 2)
        to_end = fp16_product(suffix, after[:, :, None]).flatten(1, 2)
        kg, qg, ku = half(kn * from_start), half(qn * from_start), half(kn * to_end)
        kk, qk = level_products(kn, qn, alpha)
        P = qk + torch.diag_embed(rq[..., 0] * rk[..., 0] * (qc * kc).sum(-1))
        T = scaled_inverse(kk * bc[..., None], bc)
        packed = half(S)
        X = half(vc.mT - product(packed, kg.mT))
        U = half(product(X, T.mT))
        o = product(packed, qg.mT) + product(U, half(P).mT)
        outputs.append(o.mT[:, :count].bfloat16())
        S = S * (before[:, 3] * total[:, 3])[:, None, :] + product(U, ku)
    return torch.cat(outputs, 1), S
