"""Launch verify, commit and token-by-token prefill on the current stream; the callers have checked the arguments."""

from __future__ import annotations

from typing import Any

import torch

from .checkpoints import Checkpoints
from .compile.cache import CompiledKernel, jit_cache
from .compile.shared_library import family
from .configs import tables
from .configs import verify as configs
from .configs.recurrent import Kind, StateDtype
from .draft_log import DraftLog
from .validation import HEAD_DIM, Backend, check_gate, runs_kernels

verify_kernels = {file: jit_cache(file) for file in ("recurrent_verify", "wy_verify")}
recurrent_prefill = jit_cache("recurrent_prefill")

NO_LIMIT = 2**31 - 1
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
    round_every_token: bool = False,
    scale: float | None = None,
    qk_l2norm: bool = True,
    lower_bound: float | None = None,
    settled: int = 0,
    key: configs.VerifyKey | None = None,
    backend: Backend = "kernels",
) -> None:
    """Commit the accepted drafts of each row, run and log its new ones; `out` [T, HV, V] is filled whole.

    Arguments as the public operators; `gate` is GDN's a or KDA's raw g. `settled`: the kernel launched directly before this
    one wrote no ids, counts or log halves, nor these slots and log rows, so that they may be loaded while it drains. `key`
    overrides the chosen specialisation. More than `MAX_TOKENS` tokens in one row are cut off: the lengths are on the device.
    Raises one of `REFUSALS` where the loaded function or `verify_function` refuses the arguments, before any launch.
    """
    log, rows = draft_log, draft_log.rows
    verify_family(kind, lower_bound, key, backend)(
        q,
        k,
        v,
        gate,
        b,
        A_log,
        dt_bias.view(-1) if kind != "gdn" and dt_bias.dim() == 2 else dt_bias,
        state,
        read_ids,
        write_ids,
        cu_seqlens,
        log.k,
        log.u,
        log.g,
        log.half,
        log.half if rows is None else rows,
        num_accepted,
        out,
        rows is not None,
        qk_l2norm,
        round_every_token,
        settled,
        HEAD_DIM**-0.5 if scale is None else scale,
        lower_bound or 0.0,
    )


@tables.memoised
def verify_family(
    kind: Kind, lower_bound: float | None, key: configs.VerifyKey | None, backend: Backend
) -> CompiledKernel:
    """What launches verify steps of this kind: a kernel is chosen once for each set of sizes, dtypes and flags."""
    check_gate(lower_bound, None)
    return family(lambda *given: verify_function(kind, key, backend, *given))


def verify_function(kind: Kind, key: configs.VerifyKey | None, backend: Backend, *given: Any) -> CompiledKernel:
    """The loaded function for such arguments of it, that of `key` where one is given.

    Raises ValueError or KeyError where the reference is to run, there are no rows or the sizes contradict each other.
    """
    if not runs_kernels(backend, "q", given[0]):
        raise ValueError
    (q, _, _, _, _, A_log, dt_bias, state, read_ids, _, cu_seqlens), log_keys = given[:11], given[11]
    half, log_rows = given[14:16]
    mapped, _, round_tokens, _, scale = given[18:23]
    hk, hv, rows = q.shape[1], A_log.numel(), read_ids.numel()
    sound = hv % hk == 0 and dt_bias.numel() == (hv if kind == "gdn" else hv * HEAD_DIM)
    sound &= log_keys.shape[2] <= configs.MAX_TOKENS and cu_seqlens.numel() == rows + 1
    sound &= rows == log_rows.numel() if mapped else rows <= half.numel()
    if rows == 0 or not sound:
        raise ValueError
    check_gate(None, scale)
    if key is None:
        key = configs.choose_verify(kind, STATE_NAMES[state.dtype], rows * hv, round_tokens=round_tokens)
    return verify_kernels[configs.kernel_file(key)](key)


def launch_commit(
    kind: Kind,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    state: torch.Tensor,
    read_ids: torch.Tensor,
    write_ids: torch.Tensor,
    draft_log: DraftLog,
    num_accepted: torch.Tensor,
    round_every_token: bool = False,
    qk_l2norm: bool = True,
    lower_bound: float | None = None,
    key: configs.VerifyKey | None = None,
    backend: Backend = "kernels",
) -> None:
    """Fold the accepted drafts of each row into its write slot. A_log and dt_bias are KDA's; GDN passes None.

    Raises as `launch_verify`.
    """
    log, rows = draft_log, draft_log.rows
    commit_family(kind, lower_bound, key, backend)(
        None,
        None,
        None,
        None,
        None,
        A_log,
        dt_bias.view(-1) if dt_bias is not None and dt_bias.dim() == 2 else dt_bias,
        state,
        read_ids,
        write_ids,
        None,
        log.k,
        log.u,
        log.g,
        log.half,
        log.half if rows is None else rows,
        num_accepted,
        None,
        rows is not None,
        qk_l2norm,
        round_every_token,
        0,
        1.0,
        lower_bound or 0.0,
    )


@tables.memoised
def commit_family(
    kind: Kind, lower_bound: float | None, key: configs.VerifyKey | None, backend: Backend
) -> CompiledKernel:
    """What launches commits of this kind, as `verify_family`."""
    check_gate(lower_bound, None)
    return family(lambda *given: commit_function(kind, key, backend, *given))


def commit_function(kind: Kind, key: configs.VerifyKey | None, backend: Backend, *given: Any) -> CompiledKernel:
    """The loaded function for such arguments of it. Raises as `verify_function`."""
    (dt_bias, state, read_ids), log_keys, (half, log_rows), mapped = given[6:9], given[11], given[14:16], given[18]
    if not runs_kernels(backend, "state", state):
        raise ValueError
    rows = read_ids.numel()
    sound = dt_bias is None or dt_bias.numel() == state.shape[1] * HEAD_DIM
    sound &= log_keys.shape[2] <= configs.MAX_TOKENS
    sound &= rows == log_rows.numel() if mapped else rows <= half.numel()
    if rows == 0 or not sound:
        raise ValueError
    key = key or configs.choose_commit(kind, STATE_NAMES[state.dtype])
    return verify_kernels[configs.kernel_file(key)](key)


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
    min_tokens: int = 0,
    max_tokens: int | None = None,
    overlaps: bool = False,
    key: configs.RecurrentPrefillKey | None = None,
) -> None:
    """Run packed sequences token by token; `out` [T, HV, V] is filled whole. Arguments as `launch_verify`.

    A sequence of fewer than `min_tokens` or more than `max_tokens` tokens is left alone: nothing of it is read or written,
    its rows of `out` included. Rows of `out` beyond `cu_seqlens[N]` become zeros all the same. `overlaps`: the launch before
    writes nothing that this one touches, and both may run at once.
    """
    if read_ids.shape[0] == 0:
        out.zero_()
        return
    if key is None:
        key = configs.choose_prefill(kind, STATE_NAMES[state.dtype])
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
        min_tokens,
        NO_LIMIT if max_tokens is None else max_tokens,
        int(qk_l2norm),
        q.shape[2] ** -0.5 if scale is None else scale,
        0.0 if lower_bound is None else lower_bound,
        int(overlaps),
    )
