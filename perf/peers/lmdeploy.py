"""lmdeploy 0.18.0's GDN and conv kernels and chains (TileLang, Triton and FLA)."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch

from ...cute_kernels.reference.conv1d import live_window
from ..bench import Unsupported
from ..geometries import CONV_WIDTH
from ..inputs import ConvProblem, DeltaProblem
from .common import PeerCall, as_int64, log_decay, without_fla_models


def version() -> str:
    """Installed version; raises where its kernels cannot be imported."""
    without_fla_models()
    importlib.import_module("lmdeploy.pytorch.kernels.cuda.gated_delta_rule")
    try:
        return importlib.metadata.version("lmdeploy")
    except importlib.metadata.PackageNotFoundError:
        return str(importlib.import_module("lmdeploy").__version__)


def decode(p: DeltaProblem) -> PeerCall:
    """The recurrent kernel alone, in place; gates and beta are prepared beforehand, which favours it."""
    if p.is_kda:
        raise Unsupported("no KDA decode kernel")
    from lmdeploy.pytorch.kernels.cuda.gated_delta_rule import fused_recurrent_gated_delta_rule as function

    q, k, v = (x.contiguous().unsqueeze(1) for x in (p.q, p.k, p.v))
    g, beta = log_decay(p).unsqueeze(1).contiguous(), torch.sigmoid(p.b.float()).unsqueeze(1).contiguous()

    def make(read: torch.Tensor, write: torch.Tensor, out: torch.Tensor) -> Callable[[], torch.Tensor]:
        ids = read.long()
        return lambda: function(
            q, k, v, g, beta, initial_state=p.pool, state_indices=ids, use_qk_l2norm_in_kernel=True,
            output_final_state=True, transpose_state_layout=True,
        )[0]  # fmt: skip

    return PeerCall(make, in_place=True)


def verify(p: DeltaProblem, ws: Any) -> PeerCall:
    """The recurrent kernel over T tokens with a ring of T states a slot."""
    if p.is_kda:
        raise Unsupported("no KDA decode kernel")
    from lmdeploy.pytorch.kernels.cuda.gated_delta_rule import fused_recurrent_gated_delta_rule as function

    rows, tokens = p.workload.rows, p.workload.lengths[0]
    q, k, v = (x.contiguous().view(rows, tokens, *x.shape[1:]) for x in (p.q, p.k, p.v))
    g, beta = (x.view(rows, tokens, -1).contiguous() for x in (log_decay(p), torch.sigmoid(p.b.float())))
    rings = ws.pool(p.pool.dtype, tokens, *p.pool.shape[1:], least=rows)
    lengths = torch.zeros(rows, dtype=torch.int32, device=p.q.device)
    first: list[tuple[torch.Tensor, torch.Tensor]] = []

    def load() -> None:
        ids, read = first[0]
        rings[ids, 0] = p.pool[read.long()]

    def make(read: torch.Tensor, write: torch.Tensor, out: torch.Tensor) -> Callable[[], torch.Tensor]:
        ids = torch.randperm(rings.shape[0], device=p.q.device)[:rows]
        first.append((ids, read))
        return lambda: function(
            q, k, v, g, beta, initial_state=rings, state_indices=ids, cache_seqlens=lengths,
            use_qk_l2norm_in_kernel=True, output_final_state=True, transpose_state_layout=True,
        )[0]  # fmt: skip

    return PeerCall(make, in_place=True, states=False, load=load)


def prefill(p: DeltaProblem, cu: torch.Tensor) -> dict[str, PeerCall]:
    """The serving chain: preprocess (norms, gates, heads repeated), gather states, FLA, scatter states."""
    if p.is_kda:
        raise Unsupported("no KDA prefill chain")
    if p.workload.checkpoint_every:
        raise Unsupported("no checkpoints inside a call")
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as function
    from lmdeploy.pytorch.kernels.cuda.gated_delta_preprocess import gated_delta_preprocess

    q, k, v, a, b = (x.unsqueeze(0) for x in (p.q, p.k, p.v, p.gate, p.b))
    rate = -p.A_log.exp()  # what its models pass as the exponent: signed
    ratio = p.geometry.hv // p.geometry.hk
    cu64 = as_int64(cu)

    def make(read: torch.Tensor, write: torch.Tensor, out: torch.Tensor) -> Callable[[], torch.Tensor]:
        ids = read.long()

        def launch() -> torch.Tensor:
            qq, kk, beta, g = gated_delta_preprocess(
                q, k, b, a, p.dt_bias, rate, ratio, init_token_mask=None, apply_qk_l2norm=True
            )
            with torch.no_grad():
                o, last = function(
                    qq, kk, v, g=g, beta=beta, scale=128**-0.5, initial_state=p.pool.index_select(0, ids),
                    output_final_state=True, use_qk_l2norm_in_kernel=False, cu_seqlens=cu64, state_v_first=True,
                )  # fmt: skip
            p.pool.index_copy_(0, ids, last.to(p.pool.dtype))
            return o[0]

        return launch

    return {"lmdeploy": PeerCall(make, in_place=True)}


def _windows(p: ConvProblem) -> torch.Tensor:
    """The conv pool's memory as lmdeploy lays windows out, `[slots, C, W]`."""
    return p.pool.view(p.pool.shape[0], p.geometry.channels, CONV_WIDTH)


def _load_windows(p: ConvProblem, ids: torch.Tensor) -> None:
    """Put the live columns of our rings where its windows are looked for; positions are those of the problem."""
    live = live_window(p.pool, ids, p.positions)
    _windows(p)[ids.long(), :, 1:] = live.transpose(1, 2)


def conv_decode(p: ConvProblem) -> PeerCall:
    """The window update, shifted in place."""
    from lmdeploy.pytorch.kernels.cuda.causal_conv1d import causal_conv1d_update as function

    windows = _windows(p)
    x = p.x.contiguous()
    first: list[torch.Tensor] = []

    def make(read: torch.Tensor, write: torch.Tensor, out: torch.Tensor) -> Callable[[], torch.Tensor]:
        first.append(read)
        return lambda: function(x, windows, p.weight, None, activation="silu", conv_state_indices=read)

    return PeerCall(make, True, states=False, load=lambda: _load_windows(p, first[0]))


def conv_prefill(p: ConvProblem, cu: torch.Tensor) -> PeerCall:
    """Its chain: gather and mask the windows, convolve, scatter the new windows."""
    from lmdeploy.pytorch.kernels.cuda.causal_conv1d import causal_conv1d_fn as function

    if p.workload.checkpoint_every:
        raise Unsupported("no checkpoints inside a call")
    if min(p.workload.lengths) < CONV_WIDTH:
        raise Unsupported("sequences shorter than the window lose their history")
    device = p.x.device
    windows = _windows(p)
    x = p.x.unsqueeze(0).transpose(1, 2)
    lengths = torch.tensor(p.workload.lengths, device=device)
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=device, dtype=torch.int32), lengths)
    last = cu[1:].long()[:, None] + torch.arange(-CONV_WIDTH, 0, device=device)
    fresh = torch.zeros(len(lengths), dtype=torch.bool, device=device)
    first: list[torch.Tensor] = []

    def make(read: torch.Tensor, write: torch.Tensor, out: torch.Tensor) -> Callable[[], torch.Tensor]:
        slots = read.long()
        first.append(read)

        def launch() -> torch.Tensor:
            final = p.x[last].transpose(-2, -1)
            history = windows[slots, :, 1:]
            windows.index_copy_(0, slots, final)
            history.masked_fill_(fresh[:, None, None], 0.0)
            y = function(x, p.weight, None, seq_idx=sequence, initial_states=history, activation="silu")
            return y.transpose(1, 2)[0]

        return launch

    return PeerCall(make, True, states=False, load=lambda: _load_windows(p, first[0]))


def layer_decode(p: DeltaProblem, conv: ConvProblem, z: torch.Tensor, norm: torch.Tensor, eps: float) -> PeerCall:
    """Conv update, gate preparation, recurrence, gated norm: its kernels for one layer of one token."""
    if p.is_kda:
        raise Unsupported("no KDA decode kernel")
    from fla.modules.fused_norm_gate import rms_norm_gated
    from lmdeploy.pytorch.kernels.cuda.causal_conv1d import causal_conv1d_update
    from lmdeploy.pytorch.kernels.cuda.gated_delta_preprocess import gated_delta_preprocess
    from lmdeploy.pytorch.kernels.cuda.gated_delta_rule import fused_recurrent_gated_delta_rule

    hk, hv, rows = p.geometry.hk, p.geometry.hv, p.workload.rows
    windows = _windows(conv)
    first: list[torch.Tensor] = []
    x = conv.x.contiguous()
    a, b = p.gate.contiguous().unsqueeze(1), p.b.contiguous().unsqueeze(1)
    rate, gate = -p.A_log.exp(), z.contiguous().view(rows * hv, -1)

    def make(read: torch.Tensor, write: torch.Tensor, out: torch.Tensor) -> Callable[[], torch.Tensor]:
        ids = read.long()
        first.append(read)

        def launch() -> torch.Tensor:
            y = causal_conv1d_update(x, windows, conv.weight, None, activation="silu", conv_state_indices=read)
            q, k, v = y.split([hk * 128, hk * 128, hv * 128], dim=1)
            q, k, v = (t.view(rows, 1, -1, 128) for t in (q, k, v))
            q, k, beta, g = gated_delta_preprocess(
                q, k, b, a, p.dt_bias, rate, hv // hk, init_token_mask=None, apply_qk_l2norm=False
            )
            o, _ = fused_recurrent_gated_delta_rule(
                q, k, v, g, beta, initial_state=p.pool, state_indices=ids, use_qk_l2norm_in_kernel=True,
                output_final_state=True, transpose_state_layout=True,
            )  # fmt: skip
            return rms_norm_gated(o.view(rows * hv, 128), gate, norm, None, eps=eps).view(rows, hv * 128)

        return launch

    return PeerCall(make, in_place=True, states=False, load=lambda: _load_windows(conv, first[0]))
