"""Public KDA operators (a decay per channel). Source: Kimi Delta Attention, arXiv 2510.26692. `delta_rule` does the work.

S~ = S diag(exp g);  u = beta (v - S~ k);  S' = S~ + u k^T;  o = scale S' q
"""

from __future__ import annotations

import torch

from .checkpoints import Checkpoints
from .configs.recurrent import PLAIN
from .delta_rule import commit, decode, prefill, verify
from .draft_log import DraftLog
from .opaque import operator
from .validation import Backend


@operator("state")
def kda_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    read_ids: torch.Tensor,
    write_ids: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    lower_bound: float | None = None,
    checkpoints: Checkpoints | None = None,
    scale: float | None = None,
    qk_l2norm: bool = True,
    out: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """N packed sequences of any lengths, zero included; states in and out by slot id, several kept on the way.

    Args: as `kda_decode`, with T packed tokens for its N rows, and
        cu_seqlens: `[N + 1]` int32 bounds of the sequences.
        checkpoints: states to keep at any token counts within this call.

    Returns:
        `[T, HV, V]`. Rows beyond `cu_seqlens[N]` are undefined. A sequence with neither id runs from a zero state.

    Raises:
        InvalidArgumentError, UnsupportedConfigError, BackendUnavailableError: before any launch, nothing changed.
    """
    arguments = (q, k, v, g, b, A_log, dt_bias, state, read_ids, write_ids)
    return prefill(True, lower_bound, scale, qk_l2norm, backend, out, cu_seqlens, checkpoints, *arguments)


@operator("state")
def kda_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    read_ids: torch.Tensor,
    write_ids: torch.Tensor,
    *,
    lower_bound: float | None = None,
    scale: float | None = None,
    qk_l2norm: bool = True,
    settled: bool = False,
    pdl: bool = True,
    out: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """One token for each of N sequences.

    Args:
        q, k: `[N, HK, K]`, un-normalised when `qk_l2norm`; rows may be views of a wider packed row.
        v: `[N, HV, V]`; value head h uses key head `h // (HV // HK)`.
        g: `[N, HV, K]` raw gate.
        b: `[N, HV]` logit of beta.
        A_log: `[HV]` fp32. dt_bias: `[HV * K]` or `[HV, K]` fp32.
        state: `[S, HV, V, K]` pool view, fp32 or bf16, slot stride any multiple of 16 bytes; updated in place.
        read_ids, write_ids: `[N]` int32 slots. Out of `[0, S)` means none: reading none is a zero state, writing none
            stores nothing, and a row with neither gives zeros.
        lower_bound: None for the softplus gate `-exp(A_log) softplus(g + dt_bias)`, or L < 0 for the bounded gate
            `L sigmoid(exp(A_log) (g + dt_bias))`.
        scale: of the output, default `K ** -0.5`.
        qk_l2norm: divide q and k by `sqrt(sum x^2 + 1e-6)`.
        settled: the kernel launched directly before this one on the stream wrote neither these ids nor these slots, A_log or
            dt_bias. The kernel then loads them while that one drains (programmatic dependent launch).
        pdl: launch as a programmatic dependent of the kernel before. Without it the launch is shorter behind a kernel that lets
            none start before its own end, as those of cuBLAS; `settled` then changes nothing.
        out: `[N, HV, V]`, allocated unless given.
        backend: "auto" (kernels on sm_90, references elsewhere), "kernels" or "reference".

    Returns:
        `[N, HV, V]` in v's dtype.

    Raises:
        InvalidArgumentError, UnsupportedConfigError, BackendUnavailableError: before any launch, nothing changed.
    """
    start = settled if pdl else PLAIN
    return decode(
        True, lower_bound, scale, qk_l2norm, start, backend, out, q, k, v, g, b, A_log, dt_bias, state, read_ids, write_ids
    )  # fmt: skip


@operator("state", "draft_log.k", "draft_log.u", "draft_log.g")
def kda_verify(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    read_ids: torch.Tensor,
    write_ids: torch.Tensor,
    cu_seqlens: torch.Tensor,
    draft_log: DraftLog,
    num_accepted: torch.Tensor,
    *,
    lower_bound: float | None = None,
    round_every_token: bool = False,
    scale: float | None = None,
    qk_l2norm: bool = True,
    settled: bool = False,
    pdl: bool = True,
    out: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Commit the accepted drafts of the previous step, then run up to 8 new tokens a row, for one read and one write.

    The state of `read_ids` is advanced by the first `num_accepted` logged tokens and stored to `write_ids`; the new
    tokens run from there without being stored, and are logged in the half that is not being read.

    Args: as `kda_decode`, with T packed tokens for its N rows, and
        cu_seqlens: `[N + 1]` int32; each row has 0 to `draft_log.max_tokens` tokens.
        draft_log: what the previous step logged, and where this one logs.
        num_accepted: `[N]` int32. 0 commits nothing; a count outside `0..Tmax` makes the row read and write nothing.
        round_every_token: round a bf16 state after every token, so that it equals step-by-step decode bit for bit.
        settled: the kernel launched directly before this one on the stream wrote none of these ids, counts and log halves, nor
            these slots and log rows. The kernel then loads them while that one drains.

    Returns:
        `[T, HV, V]`.

    Raises:
        InvalidArgumentError, UnsupportedConfigError, BackendUnavailableError: before any launch, nothing changed.
    """
    arguments = (q, k, v, g, b, A_log, dt_bias, state, read_ids, write_ids)
    start = settled if pdl else PLAIN
    return verify(
        True, lower_bound, round_every_token, scale, qk_l2norm, start, backend, out, cu_seqlens, draft_log, num_accepted,
        arguments,
    )  # fmt: skip


@operator("state")
def kda_commit(
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    read_ids: torch.Tensor,
    write_ids: torch.Tensor,
    draft_log: DraftLog,
    num_accepted: torch.Tensor,
    *,
    lower_bound: float | None = None,
    round_every_token: bool = False,
    backend: Backend = "auto",
) -> None:
    """The first half of a verify step alone: fold accepted drafts into the state, for instance before it is published.

    Args: as `kda_verify`. The log is only read.

    Raises:
        InvalidArgumentError, UnsupportedConfigError, BackendUnavailableError: before any launch, nothing changed.
    """
    commit(
        (A_log, dt_bias), lower_bound, round_every_token, backend, state, read_ids, write_ids, draft_log, num_accepted
    )
