"""FlashInfer 0.7.4: GDN decode, verify and prefill, KDA decode and verify."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import torch

from ..bench import Unsupported
from ..inputs import DeltaProblem
from .common import PeerCall, log_decay, normalized


def version() -> str:
    """Installed version; raises where the package or its decode module cannot be imported."""
    package = importlib.import_module("flashinfer")
    importlib.import_module("flashinfer.gdn_decode")
    return str(package.__version__)


def decode(p: DeltaProblem) -> PeerCall:
    """GDN: any pool dtype, separate read and write ids. KDA: bf16 pools, in place."""
    return _kda_decode(p) if p.is_kda else _gdn_decode(p)


def _gdn_decode(p: DeltaProblem) -> PeerCall:
    from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose as function

    rows = p.workload.rows
    q, k, v, a, b = (x.contiguous().unsqueeze(1) for x in (p.q, p.k, p.v, p.gate, p.b))

    def make(read: torch.Tensor, write: torch.Tensor, out: torch.Tensor) -> Callable[[], torch.Tensor]:
        target = out.view(rows, 1, *out.shape[1:])
        return lambda: function(
            q, k, v, None, p.A_log, a, p.dt_bias, b, output=target, initial_state=p.pool, initial_state_indices=read,
            output_state_indices=write,
        )[0]  # fmt: skip

    return PeerCall(make, in_place=False)


def _kda_arguments(p: DeltaProblem) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    if p.pool.dtype != torch.bfloat16:
        raise Unsupported("KDA decode takes bf16 pools only")
    beta = torch.sigmoid(p.b.float()).to(torch.bfloat16)
    tensors = tuple(x.contiguous().unsqueeze(0) for x in (p.q, p.k, p.v, p.gate, beta))
    options = {
        "A_log": p.A_log,
        "dt_bias": p.dt_bias,
        "initial_state": p.pool,
        "use_gate_in_kernel": True,
        "lower_bound": p.lower_bound,
    }
    return tensors, options


def _kda_decode(p: DeltaProblem) -> PeerCall:
    from flashinfer.kda_decode import recurrent_kda as function

    warnings.filterwarnings("ignore", category=DeprecationWarning)
    tensors, options = _kda_arguments(p)
    cu = torch.arange(p.workload.rows + 1, dtype=torch.int32, device=p.q.device)

    def make(read: torch.Tensor, write: torch.Tensor, out: torch.Tensor) -> Callable[[], torch.Tensor]:
        target = out.unsqueeze(0)
        return lambda: function(*tensors, ssm_state_indices=read, cu_seqlens=cu, output=target, **options)[0]

    return PeerCall(make, in_place=True)


def verify(p: DeltaProblem, ws: Any) -> PeerCall:
    """All drafts of a row in one call; a state is stored after every token, from which the accepted one is read later."""
    return _kda_verify(p) if p.is_kda else _gdn_verify(p)


def _gdn_verify(p: DeltaProblem) -> PeerCall:
    from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose, gated_delta_rule_mtp

    rows, tokens = p.workload.rows, p.workload.lengths[0]
    if tokens < 2:
        raise Unsupported("verify of one token is its decode")
    q, k, v, a, b = (x.contiguous().view(rows, tokens, *x.shape[1:]) for x in (p.q, p.k, p.v, p.gate, p.b))
    states = torch.empty(rows, tokens, *p.pool.shape[1:], dtype=p.pool.dtype, device=p.pool.device)
    options = {"intermediate_states_buffer": states, "disable_state_update": True}

    def make(read: torch.Tensor, write: torch.Tensor, out: torch.Tensor) -> Callable[[], torch.Tensor]:
        target = out.view(rows, tokens, *out.shape[1:])
        if p.pool.dtype == torch.float32:
            return lambda: gated_delta_rule_mtp(
                q, k, v, p.pool, read, p.A_log, a, p.dt_bias, b, output=target, **options
            )[0]
        return lambda: gated_delta_rule_decode_pretranspose(
            q, k, v, None, p.A_log, a, p.dt_bias, b, output=target, initial_state=p.pool, initial_state_indices=read,
            **options,
        )[0]  # fmt: skip

    return PeerCall(make, in_place=True, states=False, keep=states)


def _kda_verify(p: DeltaProblem) -> PeerCall:
    from flashinfer.kda_decode import recurrent_kda as function

    warnings.filterwarnings("ignore", category=DeprecationWarning)
    rows, tokens = p.workload.rows, p.workload.lengths[0]
    if tokens < 2:
        raise Unsupported("verify of one token is its decode")
    tensors, options = _kda_arguments(p)
    cu = torch.arange(0, rows * tokens + 1, tokens, dtype=torch.int32, device=p.q.device)
    slots = p.pool.shape[0]
    if rows * tokens > slots:
        raise Unsupported(f"a state per draft token needs {rows * tokens} slots, the pool has {slots}")

    def make(read: torch.Tensor, write: torch.Tensor, out: torch.Tensor) -> Callable[[], torch.Tensor]:
        target = out.unsqueeze(0)
        others = torch.randperm(slots, device=p.q.device)
        # Token 0 reads and writes the committed slot, every later token writes one of its own.
        free = others[~torch.isin(others, read.long())][: rows * (tokens - 1)].to(torch.int32)
        ids = torch.cat([read[:, None], free.view(rows, tokens - 1)], dim=1).contiguous()
        return lambda: function(
            *tensors, ssm_state_indices=ids, cu_seqlens=cu, output=target, num_spec_tokens=tokens - 1, **options
        )[0]

    return PeerCall(make, in_place=True, states=False)


def prefill(p: DeltaProblem, cu: torch.Tensor) -> dict[str, PeerCall]:
    """GDN in place by ids: without its gate, beta and norm passes (prepared beforehand), and with them."""
    if p.is_kda:
        raise Unsupported("no KDA prefill on this architecture")
    from flashinfer.gdn_prefill import chunk_gated_delta_rule as function

    q, k, v = normalized(p.q), normalized(p.k), p.v.contiguous()
    alpha, beta = log_decay(p).exp(), torch.sigmoid(p.b.float())
    raw_q, raw_k, raw_a, raw_b = (x.contiguous() for x in (p.q, p.k, p.gate, p.b))
    cu64 = cu.long()
    options: dict[str, Any] = {
        "initial_state": p.pool,
        "output_state": p.pool,
        "output_final_state": True,
        "cu_seqlens": cu64,
        "max_seqlen": max(p.workload.lengths),
    }
    every = p.workload.checkpoint_every
    if every:
        counts = [0, *(length // every for length in p.workload.lengths)]
        options["checkpoint_every_n_tokens"] = every
        options["checkpoint_cu_starts"] = torch.tensor(counts, device=cu.device).cumsum(0)
        options["state_checkpoints"] = torch.empty(
            p.workload.checkpoints, *p.pool.shape[1:], dtype=p.pool.dtype, device=cu.device
        )
    passes = {
        "use_gate_in_kernel": True,
        "A_log": p.A_log,
        "dt_bias": p.dt_bias,
        "beta_is_logit": True,
        "use_qk_l2norm_in_kernel": True,
    }

    def bare(read: torch.Tensor, write: torch.Tensor, out: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: function(q, k, v, alpha, beta, output=out, state_indices=read, **options)[0]

    def whole(read: torch.Tensor, write: torch.Tensor, out: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: function(raw_q, raw_k, v, raw_a, raw_b, output=out, state_indices=read, **options, **passes)[0]

    return {"flashinfer": PeerCall(bare, True), "flashinfer_with_passes": PeerCall(whole, True)}
