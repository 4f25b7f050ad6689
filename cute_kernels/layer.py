"""Public layer steps: everything between a linear-attention layer's two projections, for one token or a verify step.

    q, k, v = silu(conv(x));  q, k normalised;  gated delta rule;  out = o / rms(o) * norm_weight * act(z)

Sources: Gated DeltaNet (arXiv 2412.06464), Kimi Delta Attention (arXiv 2510.26692).
"""

from __future__ import annotations

import torch

from .draft_log import DraftLog
from .layer_launch import step, verify_arguments
from .opaque import operator
from .reference.layer import GateActivation
from .validation import Backend


@operator("conv_state", "state", "draft_log.k", "draft_log.u", "draft_log.g", "draft_log.x")
def gdn_layer_decode(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    z: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_state: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    state: torch.Tensor,
    read_ids: torch.Tensor,
    write_ids: torch.Tensor,
    positions: torch.Tensor,
    *,
    conv_bias: torch.Tensor | None = None,
    gate_activation: GateActivation = "silu",
    eps: float = 1e-6,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    draft_log: DraftLog | None = None,
    num_accepted: torch.Tensor | None = None,
    settled: bool = False,
    pdl: bool = True,
    out: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """One GDN layer step from the packed projection row; x, a, b and z may be views of one row.

    One launch. Without `cu_seqlens`, `draft_log` and `num_accepted` it is one token for each of N sequences: states and windows
    equal those of `causal_conv1d_decode` and `gdn_decode` bit for bit. With all three it is a verify step: states, windows and
    logs equal those of `causal_conv1d_verify` and `gdn_verify`, whose rules for ids, counts and lengths hold. In both, o enters
    the norm unrounded.

    Args:
        x: `[N, C]` raw conv inputs q | k | v, `C = 2 HK K + HV V`; row stride a multiple of 8 elements.
        a: `[N, HV]` raw gate. b: `[N, HV]` logit of beta.
        z: `[N, HV * V]` output gate; row stride a multiple of 8 elements.
        conv_weight: `[C, W]`, bf16 or fp32; kernels serve W = 4.
        conv_state: `[S, W, C]` pool view in x's dtype, slot stride any multiple of 16 bytes; updated in place.
        A_log, dt_bias: `[HV]` fp32.
        norm_weight: `[V]`, bf16 or fp32.
        state: `[S, HV, V, K]` pool view, fp32 or bf16, slot stride any multiple of 16 bytes; updated in place.
        read_ids, write_ids: `[N]` int32 slots of both pools. Out of `[0, S)` means none: reading none is a zero state and a
            zero window, writing none stores nothing, and a row with neither gives zeros.
        positions: `[N]` int32, tokens of each sequence before this call.
        conv_bias: `[C]` in conv_weight's dtype.
        gate_activation: of z, "silu" or "sigmoid".
        eps: of the norm. scale: of the recurrence output, default `K ** -0.5`.
        cu_seqlens: `[N + 1]` int32 bounds of each sequence's new tokens; x, a, b, z then have T packed rows.
        draft_log: a log with conv inputs. num_accepted: `[N]` int32.
        settled: the kernel launched directly before this one on the stream wrote neither ids, positions, counts, halves nor
            these slots, log rows and parameters: they are loaded while that kernel drains (programmatic dependent launch).
        pdl: launch as a programmatic dependent of the kernel before. Without it the launch is shorter behind a kernel that lets
            none start before its own end, as those of cuBLAS; `settled` then changes nothing.
        out: `[N, HV * V]`, allocated unless given.
        backend: "auto" (kernels on sm_90, references elsewhere), "kernels" or "reference".

    Returns:
        `[N, HV * V]` in z's dtype: the row that goes into the output projection.

    Raises:
        InvalidArgumentError, UnsupportedConfigError, BackendUnavailableError: before any launch, nothing changed.
    """
    arguments = (
        x, a, b, z, conv_weight, conv_state, A_log, dt_bias, norm_weight, state, read_ids, write_ids, positions,
    )  # fmt: skip
    verify = verify_arguments(cu_seqlens, draft_log, num_accepted)
    return step(False, None, conv_bias, gate_activation, eps, scale, verify, settled, pdl, out, backend, arguments)


@operator("conv_state", "state", "draft_log.k", "draft_log.u", "draft_log.g", "draft_log.x")
def kda_layer_decode(
    x: torch.Tensor,
    g: torch.Tensor,
    b: torch.Tensor,
    z: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_state: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    state: torch.Tensor,
    read_ids: torch.Tensor,
    write_ids: torch.Tensor,
    positions: torch.Tensor,
    *,
    lower_bound: float | None = None,
    conv_bias: torch.Tensor | None = None,
    gate_activation: GateActivation = "sigmoid",
    eps: float = 1e-5,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    draft_log: DraftLog | None = None,
    num_accepted: torch.Tensor | None = None,
    settled: bool = False,
    pdl: bool = True,
    out: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """One KDA layer step from the packed projection row, as `gdn_layer_decode` with a gate per channel.

    Args: as `gdn_layer_decode`, but
        g: `[N, HV, K]` raw gate, row stride a multiple of 8 elements.
        dt_bias: `[HV, K]` or `[HV * K]` fp32.
        lower_bound: None for the softplus gate, or the negative bound of the sigmoid gate.

    Returns:
        `[N, HV * V]` in z's dtype.

    Raises:
        InvalidArgumentError, UnsupportedConfigError, BackendUnavailableError: before any launch, nothing changed.
    """
    arguments = (
        x, g, b, z, conv_weight, conv_state, A_log, dt_bias, norm_weight, state, read_ids, write_ids, positions,
    )  # fmt: skip
    verify = verify_arguments(cu_seqlens, draft_log, num_accepted)
    return step(
        True, lower_bound, conv_bias, gate_activation, eps, scale, verify, settled, pdl, out, backend, arguments
    )
