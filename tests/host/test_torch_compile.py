"""J13: `torch.compile(fullgraph=True)` over callers of the operators gives what eager calls give, states and windows included."""

from __future__ import annotations

import pytest
import torch

from compact_state import cute_kernels
from compact_state.cute_kernels import Checkpoints, DraftLog
from compact_state.cute_kernels.errors import InvalidArgumentError
from compact_state.cute_kernels.reference.datasets import cu_seqlens, ids

N, HK, HV, D, W, S, STEPS = 3, 2, 4, 8, 4, 8, 5
C = (2 * HK + HV) * D


class World:
    """Pools, parameters and a log of one layer; two worlds of one seed start alike."""

    def __init__(self, kind: str) -> None:
        rng = torch.Generator().manual_seed(7)
        self.kda = kind == "kda"
        gate = (HV, D) if self.kda else (HV,)
        self.weight = torch.randn(C, W, generator=rng)
        self.A_log, self.dt_bias = torch.randn(HV, generator=rng), torch.randn(gate, generator=rng)
        self.windows, self.states = torch.randn(S, W, C, generator=rng), torch.randn(S, HV, D, D, generator=rng)
        self.read, self.write, self.positions = ids(0, 1, -1), ids(3, 1, -1), ids(4, 9, 0)
        self.rows = [torch.randn(12, C, generator=rng) for _ in range(STEPS)]
        self.gates = [torch.randn(12, *gate, generator=rng) for _ in range(STEPS)]
        self.b = torch.randn(12, HV, generator=rng)
        options = {"head_dim_k": D, "head_dim_v": D, "dtype": torch.float32}
        self.log = DraftLog.allocate(kind, N, HK, HV, C, **options)
        for tensor in (self.log.k, self.log.u, self.log.g, self.log.x):
            tensor.zero_()

    def parameters(self, bias=None):
        return self.A_log, self.dt_bias.flatten() if bias is None else bias

    def split(self, y):
        return (part.unflatten(1, (-1, D)) for part in y.split((HK * D, HK * D, HV * D), 1))

    def kept(self):
        log = self.log
        return self.windows, self.states, self.read, self.write, self.positions, log.k, log.u, log.g, log.x, log.half


def decode_step(w, x, gate):
    """The layer twice, then the step's tracking: the second call reads what the first wrote."""
    decode = cute_kernels.kda_decode if w.kda else cute_kernels.gdn_decode
    outputs = []
    for _ in range(2):
        y = cute_kernels.causal_conv1d_decode(x[:N], w.weight, w.windows, w.read, w.write, w.positions)
        inputs = (*w.split(y), gate[:N], w.b[:N])
        outputs.append(decode(*inputs, *w.parameters(), w.states, w.read, w.write, scale=0.3))
        cute_kernels.advance_state_ids(w.read, w.write, w.positions, num_slots=S)
    return outputs[0] + 2 * outputs[1]


def prefill_step(w, x, gate):
    cu, plan = cu_seqlens([3, 5, 2]), Checkpoints.from_lists([[(2, 5)], [], [(1, 6)]])
    y = cute_kernels.causal_conv1d_prefill(
        x[:10], w.weight, w.windows, w.read, w.write, w.positions, cu, checkpoints=plan
    )
    prefill = cute_kernels.kda_prefill if w.kda else cute_kernels.gdn_prefill
    inputs = (*w.split(y), gate[:10], w.b[:10])
    return prefill(*inputs, *w.parameters(), w.states, w.read, w.write, cu, checkpoints=plan).sin()


def verify_step(w, x, gate):
    cu, counts = cu_seqlens([3, 4, 2]), ids(1, 2, 0)
    y = cute_kernels.causal_conv1d_verify(x[:9], w.weight, w.windows, w.read, w.write, w.positions, cu, w.log, counts)
    verify = cute_kernels.kda_verify if w.kda else cute_kernels.gdn_verify
    inputs = (*w.split(y), gate[:9], w.b[:9])
    out = verify(*inputs, *w.parameters(), w.states, w.read, w.write, cu, w.log, counts)
    cute_kernels.advance_state_ids(w.read, w.write, w.positions, num_slots=S, num_accepted=counts, log_half=w.log.half)
    return out


def commit_step(w, x, gate):
    counts = ids(1, 1, 0)
    cute_kernels.causal_conv1d_commit(w.windows, w.read, w.write, w.positions, w.log, counts)
    if w.kda:
        cute_kernels.kda_commit(*w.parameters(), w.states, w.read, w.write, w.log, counts)
    else:
        cute_kernels.gdn_commit(w.states, w.read, w.write, w.log, counts)
    return w.states.sum() + x.sum() + gate.sum()


def layer_step(w, x, gate):
    layer = cute_kernels.kda_layer_decode if w.kda else cute_kernels.gdn_layer_decode
    out = x.new_empty(N, HV * D)
    z, norm = x[:N, : HV * D], w.weight[:D, 0].contiguous()
    pools = (w.windows, *w.parameters(w.dt_bias), norm, w.states, w.read, w.write, w.positions)
    return layer(x[:N], gate[:N], w.b[:N], z, w.weight, *pools, out=out) + out


@pytest.mark.parametrize("step", [decode_step, prefill_step, verify_step, commit_step, layer_step])
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_J13_compiled_equals_eager_for_outputs_windows_and_states(kind, step):
    torch._dynamo.reset()
    eager, compiled = World(kind), World(kind)
    run = torch.compile(step, fullgraph=True, backend="aot_eager")
    for x, gate in zip(eager.rows, eager.gates, strict=True):
        expected, actual = step(eager, x, gate), run(compiled, x, gate)
        assert torch.equal(actual, expected)
        for ours, theirs in zip(compiled.kept(), eager.kept(), strict=True):
            assert torch.equal(ours, theirs)
    assert not torch.equal(compiled.states, World(kind).states) or step is commit_step


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_J13_every_operator_is_an_op_that_names_what_it_changes(kind):
    written = {
        f"{kind}_prefill": {"state", "out"},
        f"{kind}_decode": {"state", "out"},
        f"{kind}_verify": {"state", "out", "draft_log_k", "draft_log_u", "draft_log_g"},
        f"{kind}_commit": {"state"},
        f"{kind}_layer_decode": {
            "conv_state", "state", "out", "draft_log_k", "draft_log_u", "draft_log_g", "draft_log_x",
        },
        "causal_conv1d_verify": {"conv_state", "out", "draft_log_x"},
        "causal_conv1d_commit": {"conv_state"},
        "gated_rms_norm": {"out"},
        "advance_state_ids": {"read_ids", "write_ids", "positions", "log_half"},
    }  # fmt: skip
    for name, changed in written.items():
        getattr(cute_kernels, name)
        schema = getattr(torch.ops.compact_state, name).default._schema
        assert {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write} == changed, name
    for name in filter(str.islower, cute_kernels.__all__):
        getattr(cute_kernels, name)
        assert hasattr(torch.ops.compact_state, name), name


def test_J13_bad_arguments_are_named_at_the_call():
    w = World("gdn")

    def bad(x, gate):
        inputs = (*w.split(x[:N]), gate[:N, :1], w.b[:N])
        return cute_kernels.gdn_decode(*inputs, *w.parameters(), w.states, w.read, w.write)

    torch._dynamo.reset()
    with pytest.raises(InvalidArgumentError, match=r"^a: "):
        torch.compile(bad, backend="aot_eager")(w.rows[0], w.gates[0])
