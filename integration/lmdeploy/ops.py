"""The operators behind lmdeploy's `CudaOpsBackend.build_op`: states by id, gates and norms inside, no gather or scatter.

The three implementations are what `nn.gated_delta` calls for Qwen3.5: step metadata once per forward, causal conv and
gated delta rule once per layer. With the gated norm behind them, neither tilelang nor fla nor Dao's conv is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

from ... import cute_kernels
from ...cute_kernels.checkpoints import Checkpoints
from ...cute_kernels.draft_log import DraftLog
from ...cute_kernels.validation import HEAD_DIM
from .. import envs
from . import cache


@dataclass
class Drafts:
    """A verify forward's part: the layers' logs by the address of their states, and per row what is to be committed."""

    logs: Mapping[int, DraftLog]
    rows: torch.Tensor
    half: torch.Tensor
    num_accepted: torch.Tensor

    def log(self, states: torch.Tensor) -> DraftLog:
        """The log of the layer whose conv windows or recurrent states these are."""
        return replace(self.logs[states.data_ptr()], rows=self.rows, half=self.half)


@dataclass
class CompactMeta:
    """What the operators of one forward share: ids and positions `[N]` int32, cu_seqlens `[N + 1]` int32.

    `positions`: tokens of the read slot; with drafts it stands `num_accepted` tokens before the row's history.
    """

    is_decoding: bool
    read_ids: torch.Tensor
    write_ids: torch.Tensor
    positions: torch.Tensor
    cu_seqlens: torch.Tensor
    checkpoints: Checkpoints | None
    drafts: Drafts | None = None


def build_meta(
    state_ids: torch.Tensor,
    attn_metadata: Any,
    checkpoints: Checkpoints | None,
    logs: Mapping[int, DraftLog] | None = None,
) -> CompactMeta:
    """Metadata from `state_ids [N, 2]` (read, write; with drafts `[N, 5]`, see `ids`) and lmdeploy's sequence lengths.

    A few small kernels once per forward, no synchronisation.
    """
    read_ids, write_ids, *rest = state_ids.to(torch.int32).t().contiguous().unbind(0)
    positions = (attn_metadata.kv_seqlens - attn_metadata.q_seqlens).to(torch.int32)
    drafts = None
    if logs and attn_metadata.is_decoding:
        num_accepted, rows, half = rest
        positions = positions - num_accepted
        count = next(iter(logs.values())).batch
        drafts = Drafts(logs, rows, cache.halves(half, rows, count), num_accepted)
    return CompactMeta(
        is_decoding=attn_metadata.is_decoding,
        read_ids=read_ids,
        write_ids=write_ids,
        positions=positions,
        cu_seqlens=attn_metadata.cu_seqlens_q.to(torch.int32),
        checkpoints=checkpoints,
        drafts=drafts,
    )


def _from_context(name: str) -> Any:
    """What the model agent's patch has bound to the forward's step context, or None."""
    from lmdeploy.pytorch.model_inputs import get_step_ctx_manager

    return getattr(get_step_ctx_manager().current_context(), name, None)


def in_piecewise_graph() -> bool:
    from lmdeploy.pytorch.backends.cuda.graph_runner.piecewise import get_piecewise_graph_execution

    return get_piecewise_graph_execution() is not None


class _Piecewise:
    """Runs eagerly between the captured pieces of a prefill, on the tokens that are there, padding left out."""

    def __init__(self) -> None:
        from lmdeploy.pytorch.backends.cuda.step_metadata import register_piecewise_graph_impl

        self._piecewise = False
        register_piecewise_graph_impl(self)

    def supports_piecewise_cuda_graph(self) -> bool:
        return True

    def enable_piecewise_cuda_graph(self) -> None:
        if not self._piecewise:
            self._piecewise = True
            self.forward: Callable[..., Any] = self._piecewise_forward(self.forward)

    def _piecewise_forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        raise NotImplementedError


def _token_boundary(forward: Callable[..., Any], leading: int) -> Callable[..., Any]:
    """`forward` as an eager island whose first `leading` arguments are `[1, T, ...]` and padded in the graph pieces."""
    from lmdeploy.pytorch.backends.cuda.graph_runner.piecewise import (
        PaddedTensorOutputAdapter,
        eager_boundary,
        get_piecewise_graph_execution,
    )

    @eager_boundary(  # type: ignore[untyped-decorator, unused-ignore]
        adapter_factory=functools.partial(PaddedTensorOutputAdapter, token_axis=1), reuse_bridge_after_next_step=True
    )
    def island(*args: Any) -> torch.Tensor:
        tokens = get_piecewise_graph_execution().raw_tokens
        result: torch.Tensor = forward(*(arg[:, :tokens] for arg in args[:leading]), *args[leading:])
        return result

    @functools.wraps(forward)
    def dispatched(*args: Any, **kwargs: Any) -> torch.Tensor:
        if get_piecewise_graph_execution() is None:
            result: torch.Tensor = forward(*args, **kwargs)
            return result
        result = island(*args, *kwargs.values())
        return result

    return dispatched


class CompactMetaImpl(_Piecewise):
    """GatedDeltaMetaImpl."""

    def forward(
        self, num_tokens: int, conv_kernel_size: int, state_ids: torch.Tensor, attn_metadata: Any
    ) -> CompactMeta:
        exports = None if attn_metadata.is_decoding else _from_context("compact_exports")
        return build_meta(state_ids, attn_metadata, exports, _from_context("compact_logs"))

    def _piecewise_forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        from lmdeploy.pytorch.backends.cuda.graph_runner.piecewise import eager_boundary, get_piecewise_graph_execution

        @eager_boundary(eager_only_output=True)  # type: ignore[untyped-decorator, unused-ignore]
        def island(state_ids: torch.Tensor, attn_metadata: Any) -> Any:
            return forward(0, 0, state_ids, attn_metadata)

        def dispatched(num_tokens: int, conv_kernel_size: int, state_ids: torch.Tensor, attn_metadata: Any) -> Any:
            if get_piecewise_graph_execution() is None:
                return forward(num_tokens, conv_kernel_size, state_ids, attn_metadata)
            return island(state_ids, attn_metadata)

        return dispatched


class CompactConv1dImpl(_Piecewise):
    """CausalConv1dImpl: `x [1, T, C]`, `conv_state [slots, W, C]` rings."""

    def __init__(self) -> None:
        super().__init__()
        self._backend: Any = envs.backend()

    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        conv_state: torch.Tensor,
        gated_delta_meta: CompactMeta,
        activation: str | None,
    ) -> torch.Tensor:
        meta = gated_delta_meta
        common: dict[str, Any] = {"bias": bias, "activation": activation, "backend": self._backend}
        taps, rows = weight.detach().flatten(1), x[0]
        at = (meta.read_ids, meta.write_ids, meta.positions)
        out: torch.Tensor
        if meta.drafts is not None:
            log, accepted = meta.drafts.log(conv_state), meta.drafts.num_accepted
            # The launch before it, and before a decode, is a projection, beside which nothing starts.
            out = cute_kernels.causal_conv1d_verify(
                rows, taps, conv_state, *at, meta.cu_seqlens, log, accepted, pdl=False, **common
            )
        elif meta.is_decoding:
            out = cute_kernels.causal_conv1d_decode(rows, taps, conv_state, *at, pdl=False, **common)
        else:
            out = cute_kernels.causal_conv1d_prefill(
                rows, taps, conv_state, *at, meta.cu_seqlens, checkpoints=meta.checkpoints, **common
            )
        return out[None]

    def _piecewise_forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        return _token_boundary(forward, 1)


class CompactRuleImpl(_Piecewise):
    """GatedDeltaRuleImpl: q, k `[1, T, HK, K]`, v `[1, T, HV, V]`, b, a `[1, T, HV]` raw, `state [slots, HV, V, K]`."""

    def __init__(self) -> None:
        super().__init__()
        self._backend: Any = envs.backend()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        dt_bias: torch.Tensor,
        a_log_exp: torch.Tensor,
        recurrent_state: torch.Tensor,
        gated_delta_meta: CompactMeta,
        kv_ratio: int,
        use_qk_l2norm_in_kernel: bool,
    ) -> torch.Tensor:
        # `a_log_exp` is A_log itself: the model's accessor is patched, see `patch_models_qwen3_5`.
        meta = gated_delta_meta
        rows = (
            query[0],
            key[0],
            value[0],
            a[0],
            b[0],
            a_log_exp,
            dt_bias.detach(),
            recurrent_state,
            meta.read_ids,
            meta.write_ids,
        )
        common: dict[str, Any] = {"qk_l2norm": use_qk_l2norm_in_kernel, "backend": self._backend}
        out: torch.Tensor
        if meta.drafts is not None:
            log, accepted = meta.drafts.log(recurrent_state), meta.drafts.num_accepted
            # The launch before it is the conv, whose part of slots and logs the rule does not read.
            out = cute_kernels.gdn_verify(*rows, meta.cu_seqlens, log, accepted, settled=True, **common)
        elif meta.is_decoding:
            out = cute_kernels.gdn_decode(*rows, **common)
        else:
            out = cute_kernels.gdn_prefill(*rows, meta.cu_seqlens, checkpoints=meta.checkpoints, **common)
        return out[None]

    def _piecewise_forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        return _token_boundary(forward, 5)


class GatedRMSNorm(torch.nn.Module):
    """`x / rms(x) * weight * act(gate)` over the last dimension: the module that lmdeploy takes from fla."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        activation: str = "silu",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.activation = "sigmoid" if activation == "sigmoid" else "silu"
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, dtype=dtype, device=device))
        self._backend: Any = envs.backend() if hidden_size == HEAD_DIM else "reference"

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """`x`, `gate` `[rows, hidden]` or `[tokens, heads, hidden]`; a token's `gate` may be part of a wider row."""
        options: dict[str, Any] = {"gate_activation": self.activation, "eps": self.eps, "backend": self._backend}
        result: torch.Tensor = cute_kernels.gated_rms_norm(x, gate, self.weight.detach(), **options)
        return result


def patch_backends_cuda_op_backend(module: ModuleType) -> None:
    """The seam: three of the operators are ours, the rest are lmdeploy's."""
    from lmdeploy.pytorch.backends.causal_conv1d import CausalConv1dBuildSpec
    from lmdeploy.pytorch.backends.gated_delta_rule import GatedDeltaMetaBuildSpec, GatedDeltaRuleBuildSpec

    ours: dict[type, Callable[[], Any]] = {
        CausalConv1dBuildSpec: CompactConv1dImpl,
        GatedDeltaMetaBuildSpec: CompactMetaImpl,
        GatedDeltaRuleBuildSpec: CompactRuleImpl,
    }
    build = module.CudaOpsBackend.build_op.__func__

    @functools.wraps(build)
    def build_op(cls: type, spec: Any, *, enable_deterministic: bool = False) -> Any:
        make = ours.get(type(spec))
        return build(cls, spec, enable_deterministic=enable_deterministic) if make is None else make()

    module.CudaOpsBackend.build_op = classmethod(build_op)


def patch_nn_gated_delta(module: ModuleType) -> None:
    """The gated norm is ours: fla is not needed, and takes longer to launch its kernel than the kernel runs."""
    module.build_rmsnorm_gated = GatedRMSNorm  # type: ignore[attr-defined]


def patch_configurations_qwen3_next(module: ModuleType) -> None:
    """Linear-attention models ask for fla here; with these operators they do not need it."""

    def check_nothing(device: str) -> None:
        return None

    module._check_env_qwen3_next = check_nothing  # type: ignore[attr-defined]
