"""The KDA prefill kernel's dataflow in torch, with its rounding points, to check its mathematics without a device.

Every operand of a matrix product is rounded where the kernel rounds it, products are summed in float64 (the hardware's
fp32 sums are finer than the operands), and elementwise work is fp32. Layouts, masks and pipelines are not modelled.
"""

from __future__ import annotations

import torch

CHUNK = 64
GROUP = 16
FLOOR = -14.0  # base-2 log decay of a token, below which it counts as this much in its group's own products
SHIFT = 112.0  # of the exponents there
LOWEST = -160.0  # what leaves less than this of a channel leaves nothing
HALF_MAX = 65504.0
LOG2E = 1.4426950408889634


def half(x: torch.Tensor) -> torch.Tensor:
    """Rounded to fp16, saturating."""
    return x.clamp(-HALF_MAX, HALF_MAX).half()


def tf32(x: torch.Tensor) -> torch.Tensor:
    """What a tf32 product reads of fp32: 10 bits of mantissa, the others cut off."""
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Matrix product of 16-bit operands with wide sums, fp32 result."""
    return (a.double() @ b.double()).float()


def fp16_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Elementwise product of two fp32 tensors rounded to fp16, rounded to fp16 itself; as fp32."""
    return half(half(a).float() * half(b).float()).float()


def decayed(x: torch.Tensor, factor: torch.Tensor, steep: bool) -> torch.Tensor:
    """``x`` decayed within its group, fp16, as fp32: for steep gates a product of fp16 operands, else of fp32 ones."""
    return fp16_product(x, factor) if steep else half(x * factor).float()


def range_decays(g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Decays inside 16-row groups from base-2 logarithms ``g [.., 16, K]``, each one exponential of a sum: up to and with each
    row, behind each row, and of the whole group."""
    upto = g.cumsum(-2)
    whole = upto[..., -1:, :]
    return upto.exp2(), (whole - upto).exp2(), whole.squeeze(-2)


def block_products(
    kn: torch.Tensor, qn: torch.Tensor, g: torch.Tensor, steep: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """``kk`` and ``qk`` of one group of 16 rows, relative to its start, in tf32; entries above the diagonal mean nothing."""
    if steep:
        g = g.clamp_min(FLOOR)
    G = g.cumsum(-2) + (SHIFT if steep else 0.0)
    columns = tf32(kn * (-G).exp2()).mT
    return tuple(product(tf32(x * G.exp2()), columns).nan_to_num(0.0, 0.0, 0.0) for x in (kn, qn))


def pair_products(
    kn: torch.Tensor, qn: torch.Tensor, g: torch.Tensor, steep: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Strictly lower ``kk`` and ``qk`` with per-channel decay, by groups of 16 rows and columns. ``[.., 64, K] -> [.., 64, 64]``.

    Rows decay from their group's start, columns to their group's end, and rows through the groups between: factors are products
    of decays, at most 1, of no later token than the row, but for those of `block_products`.
    """
    upto, behind, whole = range_decays(g.unflatten(-2, (CHUNK // GROUP, GROUP)))
    through = half(whole.exp2()).float()
    kk = torch.zeros(*kn.shape[:-2], CHUNK, CHUNK)
    qk = torch.zeros_like(kk)
    for i in range(CHUNK // GROUP):
        rows = slice(i * GROUP, (i + 1) * GROUP)
        kk[..., rows, rows], qk[..., rows, rows] = block_products(
            kn[..., rows, :], qn[..., rows, :], g[..., rows, :], steep
        )
        left = [decayed(x[..., rows, :], upto[..., i, :, :], steep) for x in (kn, qn)]
        for j in range(i - 1, -1, -1):
            columns = slice(j * GROUP, (j + 1) * GROUP)
            right = half(decayed(kn[..., columns, :], behind[..., j, :, :], steep)).mT
            for x, out in zip(left, (kk, qk)):
                out[..., rows, columns] = product(half(x), right)
            left = [fp16_product(x, through[..., j, None, :]) for x in left]
    return kk.tril(-1), qk.tril(-1)


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
    steep: bool = True,
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
        log2 = half((padded(g[:, sl], 0.0) * LOG2E).clamp_min(LOWEST)).float()
        bc = padded(beta[:, sl], 0.0)
        rk = torch.rsqrt((kc * kc).sum(-1, keepdim=True) + 1e-6)
        rq = torch.rsqrt((qc * qc).sum(-1, keepdim=True) + 1e-6) * scale
        kn, qn = kc * rk, qc * rq
        upto, behind, whole = range_decays(log2.unflatten(1, (CHUNK // GROUP, GROUP)))
        before = (whole.cumsum(1) - whole)[:, :, None].exp2()
        after = (whole.sum(1, keepdim=True) - whole.cumsum(1))[:, :, None].exp2()

        def operand(x: torch.Tensor, inside: torch.Tensor, outside: torch.Tensor) -> torch.Tensor:
            near = decayed(x.unflatten(1, (CHUNK // GROUP, GROUP)), inside, steep)
            return half(fp16_product(near, outside.expand_as(near))).flatten(1, 2)

        kg, qg, ku = operand(kn, upto, before), operand(qn, upto, before), operand(kn, behind, after)
        kk, qk = pair_products(kn, qn, log2, steep)
        P = qk + torch.diag_embed(rq[..., 0] * rk[..., 0] * (qc * kc).sum(-1))
        T = scaled_inverse(kk * bc[..., None], bc)
        packed = half(S)
        X = half(vc.mT - product(packed, kg.mT))
        U = half(product(X, T.mT))
        o = product(packed, qg.mT) + product(U, half(P).mT)
        outputs.append(o.mT[:, :count].bfloat16())
        S = S * whole.sum(1).exp2()[:, None, :] + product(U, ku)
    return torch.cat(outputs, 1), S
