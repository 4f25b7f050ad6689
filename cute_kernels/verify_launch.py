"""Launch verify, commit and token-by-token prefill on the current stream; the callers have checked the arguments."""

from __future__ import annotations

import torch

from .checkpoints import Checkpoints
from .compile.cache import jit_cache
from .configs import verify as configs
from .configs.recurrent import Kind, StateDtype
from .draft_log import DraftLog

recurrent_verify = jit_cache("recurrent_verify")
recurrent_prefill = jit_cache("recurrent_prefill")

STATE_NAMES: dict[torch.dtype, StateDtype] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def launch_verify(
    kind: Kind,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    read_ids: torch.Tensor,
    write_ids: torch.Tensor,
    cu_seqlens: torch.Tensor,
    draft_log: DraftLog,
    num_accepted: torch.Tensor,
    out: torch.Tensor,
    *,
    round_every_token: bool = False,
    scale: float | None = None,
    qk_l2norm: bool = True,
    lower_bound: float | None = None,
    key: configs.VerifyKey | None = None,
) -> None:
    """Commit the accepted drafts of each row, run and log its new ones; `out` [T, HV, V] is filled whole.

    Arguments as the public operators; `gate` is GDN's a or KDA's raw g. `key` overrides the chosen specialisation. More
    than `MAX_TOKENS` tokens in one row are cut off: the lengths are on the device.
    """
    n, hv = read_ids.shape[0], state.shape[1]
    if n == 0:
        out.zero_()
        return
    if key is None:
        key = configs.choose_verify(kind, STATE_NAMES[state.dtype], n * hv, round_tokens=round_every_token)
    rows = draft_log.rows
    recurrent_verify(key)(
        q,
        k,
        v,
        gate,
        b,
        A_log,
        dt_bias if dt_bias.dim() == 1 else dt_bias.view(-1),
        state,
        read_ids,
        write_ids,
        cu_seqlens,
        draft_log.k,
        draft_log.u,
        draft_log.g,
        draft_log.half,
        draft_log.half if rows is None else rows,
        num_accepted,
        out,
        int(rows is not None),
        int(qk_l2norm),
        q.shape[2] ** -0.5 if scale is None else scale,
        0.0 if lower_bound is None else lower_bound,
    )


def launch_commit(
    kind: Kind,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    state: torch.Tensor,
    read_ids: torch.Tensor,
    write_ids: torch.Tensor,
    draft_log: DraftLog,
    num_accepted: torch.Tensor,
    *,
    round_every_token: bool = False,
    qk_l2norm: bool = True,
    lower_bound: float | None = None,
    key: configs.VerifyKey | None = None,
) -> None:
    """Fold the accepted drafts of each row into its write slot. A_log and dt_bias are KDA's; GDN passes None."""
    if read_ids.shape[0] == 0:
        return
    if key is None:
        key = configs.choose_commit(kind, STATE_NAMES[state.dtype], round_tokens=round_every_token)
    rows = draft_log.rows
    if kind == "gdn":
        A_log = dt_bias = None
    recurrent_verify(key)(
        None,
        None,
        None,
        None,
        None,
        A_log,
        dt_bias if dt_bias is None or dt_bias.dim() == 1 else dt_bias.view(-1),
        state,
        read_ids,
        write_ids,
        None,
        draft_log.k,
        draft_log.u,
        draft_log.g,
        draft_log.half,
        draft_log.half if rows is None else rows,
        num_accepted,
        None,
        int(rows is not None),
        int(qk_l2norm),
        1.0,
        0.0 if lower_bound is None else lower_bound,
    )


def launch_recurrent_prefill(
    kind: Kind,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    read_ids: torch.Tensor,
    write_ids: torch.Tensor,
    cu_seqlens: torch.Tensor,
    out: torch.Tensor,
    *,
    checkpoints: Checkpoints | None = None,
    scale: float | None = None,
    qk_l2norm: bool = True,
    lower_bound: float | None = None,
    key: configs.RecurrentPrefillKey | None = None,
) -> None:
    """Run packed sequences of any lengths token by token; `out` [T, HV, V] is filled whole. Arguments as `launch_verify`."""
    n, hv = read_ids.shape[0], state.shape[1]
    if n == 0:
        out.zero_()
        return
    if key is None:
        key = configs.choose_prefill(kind, STATE_NAMES[state.dtype], n * hv)
    cu, ends, slots = (
        (cu_seqlens,) * 3 if checkpoints is None else (checkpoints.cu, checkpoints.ends, checkpoints.slots)
    )
    recurrent_prefill(key)(
        q,
        k,
        v,
        gate,
        b,
        A_log,
        dt_bias if dt_bias.dim() == 1 else dt_bias.view(-1),
        state,
        read_ids,
        write_ids,
        cu_seqlens,
        cu,
        ends,
        slots,
        out,
        int(checkpoints is not None),
        int(qk_l2norm),
        q.shape[2] ** -0.5 if scale is None else scale,
        0.0 if lower_bound is None else lower_bound,
    )
