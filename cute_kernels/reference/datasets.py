"""Inputs for tests and benchmarks of the gated delta rule, from harmless to hostile.

On independent random keys a wrong triangular inverse or a wrongly anchored gate is invisible. These sets make them
visible:

- ``randn``: independent normal inputs and gates.
- ``trained``: statistics of a trained KDA layer: keys with mean cosine 0.93, decay close to 1, beta logits from -7 to
3.7. - ``trained_fast``: the same with a mean log decay near -2.5.
- ``saturated``: log decay -5 everywhere (the bound of the bounded gate).
- ``zero``: log decay 0 everywhere, nothing is forgotten.
- ``very_negative``: log decay -320 a token; under a bounded gate, the bound.
- ``mixed_gates``: half of the decays 0, half -50, alternating over channels (KDA) or tokens (GDN), and single spikes
of -2661. - ``correlated``: keys with mean cosine 0.999, beta 0.99, almost no decay.

Source of the trained statistics: flashinfer ``tests/kda/test_kda_prefill_trained_gate_distribution.py`` (Kimi-K3,
layer 44).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Literal

import torch

Kind = Literal["gdn", "kda"]

DATASETS = ("randn", "trained", "trained_fast", "saturated", "zero", "very_negative", "mixed_gates", "correlated")
TRAINED = ("trained", "trained_fast", "correlated")
RAGGED_LENGTHS = (1, 65, 15, 0, 16, 17, 63, 64, 127, 2)

_BETA_LOGITS = (3.65, -1.82, -2.68, -1.39, 2.99, -0.22, -5.11, -4.32, -0.41, -3.29, -5.56, -7.12)
_DT_BIAS_QUANTILES = (
    (0.0, -8.20),
    (0.01, -7.10),
    (0.1, -6.53),
    (0.5, -4.69),
    (0.9, -2.83),
    (0.99, -1.96),
    (1.0, -1.29),
)
_CLOSED_GATE = -1000.0  # raw gate whose softplus and sigmoid are exactly 0: no decay


@dataclass
class DeltaInputs:
    """One call's inputs. ``gate`` is a ``[T, HV]`` (GDN) or the raw gate g ``[T, HV, K]`` (KDA).

    With ``packed`` inputs q, k, v (and the GDN gate and b) are views of one wide projection row.
    """

    kind: Kind
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    gate: torch.Tensor
    b: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    lower_bound: float | None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Leading positional arguments of prefill, decode and verify."""
        return self.q, self.k, self.v, self.gate, self.b, self.A_log, self.dt_bias

    @property
    def gate_options(self) -> dict[str, float | None]:
        """Keyword arguments that only KDA has."""
        return {"lower_bound": self.lower_bound} if self.kind == "kda" else {}

    def rows(self, index: slice | torch.Tensor) -> DeltaInputs:
        """The tokens at ``index``; slices stay views."""
        per_token = (x[index] for x in (self.q, self.k, self.v, self.gate, self.b))
        return DeltaInputs(self.kind, *per_token, self.A_log, self.dt_bias, self.lower_bound)


def delta_inputs(
    kind: Kind,
    dataset: str,
    tokens: int,
    hk: int,
    hv: int,
    *,
    head_dim_k: int = 128,
    head_dim_v: int = 128,
    lower_bound: float | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
    packed: bool = True,
) -> DeltaInputs:
    """Seeded inputs of one data set; the same seed gives the same values on every device.

    Args:
        kind: "gdn" or "kda".
        dataset: one of ``DATASETS``.
        tokens: T, all sequences together.
        hk, hv: key and value heads.
        head_dim_k, head_dim_v: K and V.
        lower_bound: KDA only; None for the softplus gate.
        dtype: of q, k, v, gate and b. A_log and dt_bias are fp32.
        device: where the tensors go.
        seed: of the generator.
        packed: q, k, v as views of one row ``[q | k | v | a | b | pad]``, else separate contiguous tensors.
    """
    if dataset not in DATASETS:
        raise ValueError(f"dataset: got {dataset!r}; allowed: {', '.join(DATASETS)}")
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng)

    trained = dataset in TRAINED
    cosines = (0.999, 0.999, 0.8) if dataset == "correlated" else (0.90, 0.93, 0.80) if trained else (0.0, 0.0, 0.0)
    rms = (0.09, 0.22, 0.06) if trained else (1.0, 1.0, 1.0)
    shapes = ((hk, head_dim_k), (hk, head_dim_k), (hv, head_dim_v))
    q, k, v = (
        size * (math.sqrt(cosine) * normal(1, *shape) + math.sqrt(1 - cosine) * normal(tokens, *shape))
        for size, cosine, shape in zip(rms, cosines, shapes)
    )
    b = _beta_logits(dataset, tokens, hv, normal)
    channels = (head_dim_k,) if kind == "kda" else ()
    gate, A_log, dt_bias = _gates(dataset, (tokens, hv, *channels), lower_bound, rng)
    flat = [x.to(dtype).flatten(1) for x in (q, k, v)]
    flat += [gate.to(dtype).flatten(1), b.to(dtype)]
    if packed:
        width = sum(part.shape[1] for part in flat)
        row = torch.cat([*flat, torch.zeros(tokens, -width % 8 + 8, dtype=dtype)], dim=1).to(device)
        flat = list(row[:, :width].split([part.shape[1] for part in flat], dim=1))
    q, k, v, gate, b = (part.to(device) for part in flat)
    return DeltaInputs(
        kind=kind,
        q=q.unflatten(1, (hk, head_dim_k)),
        k=k.unflatten(1, (hk, head_dim_k)),
        v=v.unflatten(1, (hv, head_dim_v)),
        gate=gate.unflatten(1, (hv, head_dim_k)) if kind == "kda" else gate,
        b=b,
        A_log=A_log.to(device),
        dt_bias=dt_bias.to(device),
        lower_bound=lower_bound if kind == "kda" else None,
    )


def _beta_logits(dataset: str, tokens: int, hv: int, normal) -> torch.Tensor:
    if dataset == "correlated":
        return torch.full((tokens, hv), math.log(0.99 / 0.01))
    if dataset in TRAINED:
        means = torch.tensor([_BETA_LOGITS[h % len(_BETA_LOGITS)] for h in range(hv)])
        return means + 1.5 * normal(tokens, hv)
    return normal(tokens, hv)


def _gates(
    dataset: str, shape: tuple[int, ...], lower_bound: float | None, rng: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Raw gate ``shape``, A_log ``[HV]`` and dt_bias ``shape[1:]``."""
    heads, parameters = shape[1], shape[1:]
    if dataset == "randn":
        A_log = torch.rand(heads, generator=rng) * math.log(4.0)
        return torch.randn(shape, generator=rng), A_log, torch.randn(parameters, generator=rng) - 2.0
    if dataset in ("trained", "trained_fast"):
        A_log = torch.rand(heads, generator=rng) * 0.78 - 0.04
        raw = 0.88 * torch.randn(shape, generator=rng) - 0.62
        dt_bias = _quantile_sample(torch.rand(parameters, generator=rng))
        # Shift the bias by what moves the typical log decay from near 0 to about -2.5.
        return raw, A_log, dt_bias + (6.0 if dataset == "trained_fast" else 0.0)
    A_log, dt_bias = torch.zeros(heads), torch.zeros(parameters)
    if dataset == "very_negative" and lower_bound is None:
        return torch.full(shape, 20.0), A_log + math.log(16.0), dt_bias
    if dataset in ("saturated", "very_negative"):
        return torch.full(shape, 5.0 if lower_bound is None else 1000.0), A_log, dt_bias
    if dataset == "mixed_gates":
        raw = torch.full(shape, _CLOSED_GATE)
        half = (slice(None), slice(None), slice(0, None, 2)) if len(shape) == 3 else (slice(0, None, 2),)
        raw[half] = 50.0
        raw[10::64] = _CLOSED_GATE
        raw[10::64, ..., 0] = 2661.0
        return raw, A_log, dt_bias
    raw = torch.full(shape, _CLOSED_GATE if dataset == "zero" else -7.0)
    return raw, A_log, dt_bias


def _quantile_sample(uniform: torch.Tensor) -> torch.Tensor:
    """Piecewise linear inverse of the dt_bias distribution."""
    value = torch.full_like(uniform, _DT_BIAS_QUANTILES[0][1])
    for (low, at_low), (high, at_high) in itertools.pairwise(_DT_BIAS_QUANTILES):
        value += ((uniform - low) / (high - low)).clamp(0, 1) * (at_high - at_low)
    return value


def initial_states(
    count: int, hv: int, head_dim_v: int = 128, head_dim_k: int = 128, *, dataset: str = "randn", seed: int = 1
) -> torch.Tensor:
    """``[count, HV, V, K]`` fp32 states: normal, or the rare-peak statistics of a trained layer."""
    rng = torch.Generator().manual_seed(seed)
    state = torch.randn(count, hv, head_dim_v, head_dim_k, generator=rng)
    if dataset not in TRAINED:
        return state
    peaks = torch.rand(state.shape, generator=rng) < 2e-4
    return torch.where(peaks, 0.5 * state, 0.014 * state)


def make_pool(
    num_slots: int,
    inner: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    *,
    pad_bytes: int = 256,
    fill: float = math.nan,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """``[num_slots, *inner]`` view whose slot stride exceeds the slot by ``pad_bytes`` (a multiple of 16), filled."""
    elements = math.prod(inner)
    padding = pad_bytes // torch.empty(0, dtype=dtype).element_size()
    memory = torch.full((num_slots, elements + padding), fill, dtype=dtype, device=device)
    return memory[:, :elements].unflatten(1, inner)


def cu_seqlens(lengths: list[int] | tuple[int, ...], device: torch.device | str = "cpu") -> torch.Tensor:
    """Prefix sums ``[N + 1]`` int32."""
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)


def ids(*values: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """int32 id tensor."""
    return torch.tensor(values, dtype=torch.int32, device=device)
