"""What an operator must move and compute: the fewest bytes through device memory, and the floating-point operations.

Each input is read once and each output written once. Inputs are bf16; states are `state_bytes` an element; conv weights,
norm weights and gate parameters are read once a call and count too small to matter, so they are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from .geometries import CONV_WIDTH, HEAD_DIM, Geometry

BF16 = 2
ID_BYTES = 8  # read and write id
GDN_CHUNK_FLOPS_PER_VALUE_HEAD = 131_072  # a token, chunks of 64: S k, S q, update, Q K^T V', T V
GDN_CHUNK_FLOPS_PER_KEY_HEAD = 32_768  # a token: K K^T and Q K^T
STEP_FLOPS = 8 * HEAD_DIM * HEAD_DIM  # a token and value head: decay, S k, S q, rank-1 update
REPLAY_FLOPS = 3 * HEAD_DIM * HEAD_DIM


@dataclass(frozen=True)
class Work:
    """Bytes moved and floating-point operations of one call."""

    bytes: int
    flops: int


def state_bytes(geometry: Geometry, state_dtype: str) -> int:
    """Bytes of one layer's recurrent state."""
    return geometry.hv * HEAD_DIM * HEAD_DIM * (4 if state_dtype == "float32" else 2)


def token_bytes(geometry: Geometry) -> int:
    """q, k, v, gate, beta in and the output out, one token."""
    qk = 2 * geometry.hk * HEAD_DIM
    v_and_out = 2 * geometry.hv * HEAD_DIM
    gate = geometry.hv * (HEAD_DIM if geometry.kind == "kda" else 1)
    return (qk + v_and_out + gate + geometry.hv) * BF16


def log_token_bytes(geometry: Geometry, conv: bool) -> int:
    """One draft-log entry: raw k, u in fp32, the gate (GDN fp32 a head, KDA raw bf16 a channel), conv inputs if logged."""
    gate = geometry.hv * (HEAD_DIM * BF16 if geometry.kind == "kda" else 4)
    conv_inputs = geometry.channels * BF16 if conv else 0
    return geometry.hk * HEAD_DIM * BF16 + geometry.hv * HEAD_DIM * 4 + gate + conv_inputs


def decode(geometry: Geometry, state_dtype: str, batch: int) -> Work:
    """One token a row: the state read and written once."""
    row = 2 * state_bytes(geometry, state_dtype) + token_bytes(geometry) + ID_BYTES
    return Work(batch * row, batch * geometry.hv * STEP_FLOPS)


def verify(geometry: Geometry, state_dtype: str, batch: int, tokens: int, accepted: int) -> Work:
    """`tokens` drafts in each of `batch` rows, all logged, after a replay of `accepted` logged ones, summed over rows."""
    row = 2 * state_bytes(geometry, state_dtype) + tokens * token_bytes(geometry) + ID_BYTES
    log = (batch * tokens + accepted) * log_token_bytes(geometry, conv=False)
    return Work(batch * row + log, geometry.hv * (batch * tokens * STEP_FLOPS + accepted * REPLAY_FLOPS))


def commit(geometry: Geometry, state_dtype: str, batch: int, accepted: int) -> Work:
    """The state read and written once, and a replay of `accepted` logged tokens, summed over rows."""
    row = 2 * state_bytes(geometry, state_dtype) + ID_BYTES
    log = accepted * log_token_bytes(geometry, conv=False)
    return Work(batch * row + log, geometry.hv * accepted * REPLAY_FLOPS)


def prefill(geometry: Geometry, state_dtype: str, lengths: tuple[int, ...], checkpoints: int = 0) -> Work:
    """Packed sequences, each with its state in and out, and `checkpoints` further states out."""
    tokens = sum(lengths)
    states = (2 * len(lengths) + checkpoints) * state_bytes(geometry, state_dtype)
    flops = tokens * (geometry.hv * GDN_CHUNK_FLOPS_PER_VALUE_HEAD + geometry.hk * GDN_CHUNK_FLOPS_PER_KEY_HEAD)
    return Work(tokens * token_bytes(geometry) + states, flops)


def conv_prefill(geometry: Geometry, lengths: tuple[int, ...], checkpoints: int = 0) -> Work:
    """Every input once in and once out; windows of W - 1 live columns in and out."""
    tokens, window = sum(lengths), (CONV_WIDTH - 1) * geometry.channels * BF16
    moved = tokens * geometry.channels * 2 * BF16 + (2 * len(lengths) + checkpoints) * window
    return Work(moved, tokens * geometry.channels * 2 * CONV_WIDTH)


def conv_decode(geometry: Geometry, batch: int) -> Work:
    """One token in place: three columns of the ring read, one written."""
    channel = BF16 * (2 + (CONV_WIDTH - 1) + 1)
    return Work(batch * geometry.channels * channel, batch * geometry.channels * 2 * CONV_WIDTH)


def layer(geometry: Geometry, state_dtype: str, batch: int, tokens: int = 1, accepted: int | None = None) -> Work:
    """The fused layer: projection row (conv channels, gates, output gate) in, normalised row out, conv ring in place.

    accepted: None for one token without a log, else replayed tokens summed over rows; their conv inputs move from the log
    into the ring.
    """
    gate = geometry.hv * (HEAD_DIM if geometry.kind == "kda" else 1)
    row = (
        geometry.channels + gate + geometry.hv + 2 * geometry.hv * HEAD_DIM
    ) * BF16  # x, gate, beta, z and the output
    column = geometry.channels * BF16
    states = batch * (2 * state_bytes(geometry, state_dtype) + (CONV_WIDTH - 1) * column + ID_BYTES)
    replayed = accepted or 0
    if accepted is None:
        states += batch * column
    else:
        states += accepted * column + (batch * tokens + accepted) * log_token_bytes(geometry, conv=True)
    flops = batch * tokens * (geometry.hv * STEP_FLOPS + geometry.channels * 2 * CONV_WIDTH)
    return Work(batch * tokens * row + states, flops + replayed * geometry.hv * REPLAY_FLOPS)
