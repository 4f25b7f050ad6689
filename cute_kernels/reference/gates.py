"""Gates, l2norm and the packing of one call's tokens into the form the recurrence takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

L2NORM_EPS = 1e-6


def exactly(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """``function(x)`` evaluated in float64 and rounded once to x's dtype.

    Torch's CPU kernels evaluate transcendental functions with other code for the last few elements of a tensor.
    Rounding from float64 hides that: a row's bits do not depend on its place in the batch.
    """
    return function(x.double()).to(x.dtype)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Logistic function."""
    return exactly(torch.sigmoid, x)


def silu(x: torch.Tensor) -> torch.Tensor:
    """``x sigmoid(x)``."""
    return exactly(F.silu, x)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """``log1p(exp(x))``, and x itself above 20."""
    return exactly(lambda y: F.softplus(y, threshold=20.0), x)


def l2norm(x: torch.Tensor) -> torch.Tensor:
    """``x / sqrt(sum x^2 + 1e-6)`` over the last dimension; zero rows stay zero."""
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + L2NORM_EPS)


def gdn_log_decay(a: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
    """``g = -exp(A_log) softplus(a + dt_bias)``, natural log, ``<= 0``. ``a [..., HV]``, parameters ``[HV]``."""
    return -exactly(torch.exp, A_log) * softplus(a + dt_bias)


def kda_log_decay(
    gate: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, lower_bound: float | None
) -> torch.Tensor:
    """Per-channel log decay from the raw gate ``[..., HV, K]``.

    ``lower_bound`` None: ``-exp(A_log) softplus(gate + dt_bias)``. A negative bound L: ``L sigmoid(exp(A_log) (gate +
    dt_bias))``.
    """
    rate = exactly(torch.exp, A_log)[:, None]
    biased = gate + dt_bias.view(gate.shape[-2:])
    if lower_bound is None:
        return -rate * softplus(biased)
    return lower_bound * sigmoid(rate * biased)


@dataclass(frozen=True)
class Tokens:
    """Tokens in the arithmetic dtype, ready for the recurrence; key heads are already repeated over value heads.

    Attributes:
        q: ``[T, HV, K]``, normalised and multiplied by the scale.
        k: ``[T, HV, K]``, normalised.
        v: ``[T, HV, V]``.
        g: ``[T, HV, G]`` log decay, G = 1 (GDN) or K (KDA).
        beta: ``[T, HV]``.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    def decay(self) -> torch.Tensor:
        """``exp(g)``, ``[T, HV, G]``."""
        return exactly(torch.exp, self.g)


def prepare_keys(k: torch.Tensor, value_heads: int, qk_l2norm: bool, dtype: torch.dtype) -> torch.Tensor:
    """Raw keys or queries ``[..., HK, K]`` to normalised ``[..., HV, K]``: value head h takes head ``h // (HV //
    HK)``."""
    # Contiguous before any sum: elementwise kernels round strided and contiguous operands differently.
    k = k.to(dtype).contiguous()
    if qk_l2norm:
        k = l2norm(k)
    return k.repeat_interleave(value_heads // k.shape[-2], dim=-2)


def prepare_tokens(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    b: torch.Tensor,
    scale: float | None,
    qk_l2norm: bool,
    dtype: torch.dtype,
) -> Tokens:
    """Pack one call's inputs; ``g`` is the log decay ``[T, HV, G]`` in ``dtype``, ``b`` the raw beta logit."""
    value_heads = v.shape[-2]
    if scale is None:
        scale = k.shape[-1] ** -0.5
    return Tokens(
        q=prepare_keys(q, value_heads, qk_l2norm, dtype) * scale,
        k=prepare_keys(k, value_heads, qk_l2norm, dtype),
        v=v.to(dtype).contiguous(),
        g=g,
        beta=sigmoid(b.to(dtype).contiguous()),
    )
