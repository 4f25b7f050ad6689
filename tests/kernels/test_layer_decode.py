"""The fused layer step on the GPU: against the float64 layer, and bit for bit against the single operators."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from layer_case import DTYPES, KINDS, ORACLE, bits, make_pools, make_step

from compact_state.cute_kernels import causal_conv1d_decode, gdn_decode, kda_decode
from compact_state.cute_kernels.configs import tables
from compact_state.cute_kernels.errors import InvalidArgumentError, UnsupportedConfigError
from compact_state.cute_kernels.reference.datasets import ids
from compact_state.cute_kernels.reference.layer import gated_rms_norm, split_heads
from compact_state.cute_kernels.reference.metrics import assert_close, tolerance

pytestmark = pytest.mark.gpu

# Every geometry of the benchmark matrix as (kind, bound, HK, HV), and head counts around it.
GEOMETRIES = (
    *(("kda", -5.0, h, h) for h in (16, 8, 64, 12)),
    *(("kda", None, h, h) for h in (32, 8, 1, 3)),
    *(("gdn", None, hk, hv) for hk, hv in ((16, 32), (4, 8), (4, 16), (2, 8), (16, 48), (4, 12), (16, 16), (1, 1), (1, 6))),
)  # fmt: skip
# Rounding the row to bf16 alone gives up to 0.002; a q, k or v that falls on the other side of a bf16 tie adds a little.
OUTPUT_TOLERANCE = 0.003
# bf16 passes that land by turns, as large batches and those of one wave have them.


def by_turns(kind, weight=torch.bfloat16):
    """Settings of the forms whose passes land by turns, as `configs.layer.WAVES` has them: of four warps a block and of eight."""
    landed = (4,) if weight is torch.float32 else (6 if kind == "gdn" else 5, 7, 8)
    wide = [(2, 2)] if weight is torch.float32 else [(2, 2), (1, 4)]
    return [
        *({"rows": 2, "warps": 4, "landed": count} for count in landed),
        *({"rows": rows, "warps": 8, "landed": count} for rows, count in wide),
    ]


SINGLE = {"gdn": gdn_decode, "kda": kda_decode}


def live_columns(window, position):
    """The columns of the last three tokens of a window that holds `position` tokens."""
    return torch.stack([window[(position - age) % 4] for age in (1, 2, 3)])


def check(step, dtype, read=None, write=None, positions=None, slots=None, **extra):
    """Run on poisoned pools, compare with float64, demand that all but the write slots keep their bits."""
    n = step.x.shape[0]
    slots = slots or 2 * n
    order = torch.randperm(slots, generator=torch.Generator().manual_seed(n)).tolist()
    read = ids(*order[:n], device="cuda") if read is None else read
    write = ids(*order[n : 2 * n], device="cuda") if write is None else write
    positions = ids(*((5 * i + 3) % 23 for i in range(n)), device="cuda") if positions is None else positions
    valid = sorted({i for i in read.tolist() if 0 <= i < slots})
    windows, state = make_pools(slots, step, dtype, used=valid)
    before, expected_windows, expected_state = (windows.clone(), state.clone()), windows.clone(), state.double()
    out = torch.full(step.z.shape, math.nan, dtype=torch.bfloat16, device="cuda")
    step.kernel(windows, state, read, write, positions, out=out, **extra)
    expected = step.run(
        ORACLE[step.kind], expected_windows, expected_state, read, write, positions,
        out=torch.empty(step.z.shape, dtype=torch.float64, device="cuda"), compute_dtype=torch.float64,
    )  # fmt: skip
    assert_close(out, expected, OUTPUT_TOLERANCE, "out")
    written = [(row, slot) for row, slot in enumerate(write.tolist()) if 0 <= slot < slots]
    for row, slot in written:
        assert_close(state[slot], expected_state[slot], tolerance("decode", "randn", "state", dtype), f"state {slot}")
        position = int(positions[row]) + 1
        assert torch.equal(live_columns(windows[slot], position), live_columns(expected_windows[slot], position)), slot
        if int(read[row]) == slot:
            untouched = [column for column in range(4) if column != (position - 1) % 4]
            assert torch.equal(bits(windows[slot, untouched]), bits(before[0][slot, untouched]))
    others = [slot for slot in range(slots) if slot not in {slot for _, slot in written}]
    assert torch.equal(bits(windows[others]), bits(before[0][others]))
    assert torch.equal(bits(state[others]), bits(before[1][others]))
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "bound", "hk", "hv"), GEOMETRIES)
def test_geometries(kind, bound, dtype, hk, hv):
    check(make_step(kind, bound, 3, hk, hv), dtype)


@pytest.mark.parametrize("weight", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "bound"), KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_biases_activations_and_eps(kind, bound, dtype, weight):
    for norm, bias, activation, eps in (
        (torch.float32, True, "sigmoid", 1e-5),
        (torch.bfloat16, False, "silu", 1e-6),
        (torch.bfloat16, True, "silu", 0.5),
    ):
        step = make_step(
            kind, bound, 2, 2, 2, weight=weight, norm=norm, bias=bias, gate_activation=activation, eps=eps, scale=0.3
        )
        check(step, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "bound"), KINDS)
def test_A3_A10_ids_out_of_range(kind, bound, dtype):
    read = ids(0, -1, 4, 6, 1_000_000, -1, 3, device="cuda")
    write = ids(0, -1, 5, 7, -1, 2, -(2**31), device="cuda")
    out = check(make_step(kind, bound, 7, 4, 4), dtype, read, write, slots=6)
    assert [bool(row.any()) for row in out] == [True, False, True, False, False, True, True]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_A1_padded_rows_leave_every_slot_alone(dtype):
    same = ids(1, 2, -1, -1, device="cuda")
    check(make_step("gdn", None, 4, 2, 4), dtype, same, same, slots=5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_place_duplicate_readers_and_copy_on_write(dtype):
    step = make_step("gdn", None, 3, 2, 4)
    same = ids(3, 1, 0, device="cuda")
    check(step, dtype, same, same, slots=5)
    check(step, dtype, ids(2, 2, 2, device="cuda"), ids(0, 1, 4, device="cuda"), slots=5)


@pytest.mark.parametrize("position", [0, 1, 2, 3, 4, 7, 262_143, 2**30 + 1])
def test_windows_at_positions(position):
    """The window of a fresh sequence is not read: with no read slot the inputs before the first token are zero."""
    step = make_step("gdn", None, 2, 1, 2)
    positions = ids(position, position, device="cuda")
    check(step, torch.float32, ids(0, -1, device="cuda"), ids(0, 1, device="cuda"), positions, slots=3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("kind", "bound", "hk", "hv"), [("gdn", None, 4, 12), ("kda", None, 4, 4), ("kda", -5.0, 4, 4)]
)
def test_states_and_windows_equal_the_single_operators(kind, bound, dtype, weight, hk, hv):
    """Bitwise over ten steps in place, with and without a conv bias; the output up to the rounding of o before the norm."""
    for bias in (False, True):
        n, single = 40, SINGLE[kind]
        step = make_step(kind, bound, n, hk, hv, weight=weight, bias=bias)
        windows, state = make_pools(n, step, dtype)
        apart = windows.clone(), state.clone()
        slots = torch.randperm(n, device="cuda").to(torch.int32)
        positions = torch.arange(n, dtype=torch.int32, device="cuda")
        gate_options = {} if kind == "gdn" else {"lower_bound": bound}
        for t in range(10):
            step = replace(
                make_step(kind, bound, n, hk, hv, weight=weight, seed=t), weight=step.weight, options=step.options
            )
            out = step.kernel(windows, state, slots, slots, positions)
            mixed = causal_conv1d_decode(
                step.x,
                step.weight,
                apart[0],
                slots,
                slots,
                positions,
                bias=step.options.get("conv_bias"),
                backend="kernels",
            )
            q, k, v = split_heads(mixed, hv, 128, 128)
            o = single(
                q, k, v, step.gate, step.b, step.A_log, step.dt_bias, apart[1], slots, slots, **gate_options,
                backend="kernels",
            )  # fmt: skip
            assert torch.equal(bits(windows), bits(apart[0])), t
            assert torch.equal(bits(state), bits(apart[1])), t
            z = step.z.unflatten(1, (hv, 128)).double()
            activation, eps = ("silu", 1e-6) if kind == "gdn" else ("sigmoid", 1e-5)
            expected = gated_rms_norm(o.double(), z, step.norm_weight.double(), activation, eps)
            assert_close(out, expected.flatten(1), 0.004, "out")
            positions += 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "bound"), KINDS)
def test_rows_do_not_depend_on_the_batch_or_the_slot(kind, bound, dtype):
    n = 70
    step = make_step(kind, bound, n, 8, 8)
    windows, state = make_pools(2 * n, step, dtype, used=range(n))
    every = torch.arange(n, dtype=torch.int32, device="cuda")
    positions = every * 3
    out = step.kernel(windows, state, every, every + n, positions)
    for rows in (slice(7, 8), slice(30, 33)):
        chosen = every[rows].long()
        moved = torch.flip(every[rows], (0,)).contiguous()
        small_windows, small_state = windows[:n].clone(), state[:n].clone()
        small_windows[moved.long()], small_state[moved.long()] = windows[chosen], state[chosen]
        part = step.rows(rows)
        single = part.kernel(small_windows, small_state, moved, moved, positions[rows].contiguous())
        assert torch.equal(bits(single), bits(out[rows]))
        assert torch.equal(bits(small_state[moved.long()]), bits(state[chosen + n]))


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        (torch.float32, {}),
        (torch.bfloat16, {"landed": 0}),
        *((torch.bfloat16, settings) for settings in by_turns("gdn")),
    ],
    ids=str,
)
def test_D4_a_thousand_equal_repeats_in_place(dtype, settings):
    """More blocks than fit at once, three value heads to a window: a race over the ring would show as a difference."""
    n = 64
    step = make_step("gdn", None, n, 4, 12)
    pools = make_pools(n, step, dtype)
    slots = torch.arange(n, dtype=torch.int32, device="cuda")
    now, out = [pool.clone() for pool in pools], torch.empty_like(step.z, dtype=torch.bfloat16)
    first, different = None, torch.zeros((), dtype=torch.bool, device="cuda")
    with tables.forced("layer_decode", settings):
        for _ in range(1000):
            for pool, start in zip(now, pools):
                pool.copy_(start)
            step.kernel(*now, slots, slots, slots * 5, out=out.fill_(math.nan))
            first = first or [bits(x).clone() for x in (out, *now)]
            for x, y in zip((out, *now), first):
                different |= (bits(x) != y).any()
    assert not different


@pytest.mark.parametrize("weight", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "bound"), KINDS)
def test_passes_that_land_by_turns_equal_heads_that_land_whole(kind, bound, weight):
    """Bitwise on a bf16 pool: in place, into other slots, with ids that mean none, early and late."""
    n, slots = 40, 90
    step = make_step(kind, bound, n, 4, 4, weight=weight)
    pools = make_pools(slots, step, torch.bfloat16)
    order = torch.randperm(slots, generator=torch.Generator().manual_seed(5)).to("cuda", torch.int32)
    same, apart = order[:n], order[n : 2 * n]
    none = torch.where(torch.arange(n, device="cuda") % 3 == 0, -1, same).to(torch.int32)
    positions = torch.arange(n, dtype=torch.int32, device="cuda")
    for read, write in ((same, same), (same, apart), (none, apart), (same, none)):
        for settled in (False, True):
            found = []
            for settings in ({"warps": 4, "landed": 0}, *by_turns(kind, weight)):
                now = tuple(pool.clone() for pool in pools)
                out = torch.full(
                    step.z.shape, math.nan, dtype=torch.bfloat16, device="cuda"
                )  # what stands before the launch
                with tables.forced("layer_decode", settings):
                    step.kernel(*now, read, write, positions, settled=settled, out=out)
                found.append((out, *now))
            assert all(torch.equal(bits(x), bits(y)) for other in found[1:] for x, y in zip(found[0], other))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_settled_layers_in_a_graph_equal_eager_steps(dtype):
    """Three layers a step, each behind another layer's kernel, captured once and replayed with growing positions."""
    n, layers, steps = 9, 3, 8
    problems = [make_step("gdn", None, n, 4, 8, seed=layer) for layer in range(layers)]
    pools = [make_pools(2 * n, p, dtype, seed=layer) for layer, p in enumerate(problems)]
    copies = [tuple(x.clone() for x in pair) for pair in pools]
    slots = torch.randperm(2 * n, device="cuda")[:n].to(torch.int32)
    positions = torch.arange(n, dtype=torch.int32, device="cuda")
    outs = [torch.empty(p.z.shape, dtype=p.z.dtype, device="cuda") for p in problems]

    def run(pair, layer, settled, at, out=None):
        return problems[layer].kernel(*pair[layer], slots, slots, at, settled=settled, out=out)

    for layer in range(layers):
        run([tuple(x.clone() for x in pair) for pair in pools], layer, True, positions, outs[layer])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            run(pools, layer, layer > 0, positions, outs[layer])
    eager = positions.clone()
    for _ in range(steps):
        graph.replay()
        positions += 1
        expected = [run(copies, layer, False, eager) for layer in range(layers)]
        eager += 1
        assert all(torch.equal(bits(x), bits(y)) for x, y in zip(outs, expected))
    for pair, copy in zip(pools, copies):
        assert all(torch.equal(bits(x), bits(y)) for x, y in zip(pair, copy))


def test_more_rows_than_a_grid_dimension():
    n = 65_600
    step = make_step("gdn", None, n, 1, 1)
    read = torch.full((n,), -1, dtype=torch.int32, device="cuda")
    read[torch.tensor([0, 65_534, 65_535, n - 1])] = ids(0, 1, 2, 3, device="cuda")
    windows, state = make_pools(4, step, torch.bfloat16)
    out = torch.full(step.z.shape, math.nan, dtype=torch.bfloat16, device="cuda")
    step.kernel(windows, state, read, read, torch.zeros_like(read), out=out)
    assert out.any(1).nonzero().flatten().tolist() == [0, 65_534, 65_535, n - 1]
    assert bool(out.isfinite().all())


def test_no_rows():
    step = make_step("gdn", None, 0, 1, 2)
    windows, state = make_pools(2, step, torch.float32)
    none = torch.empty(0, dtype=torch.int32, device="cuda")
    assert step.kernel(windows, state, none, none, none).shape == (0, 256)


def test_what_the_kernels_do_not_serve_is_named():
    step = make_step("gdn", None, 2, 1, 2)
    windows, state = make_pools(2, step, torch.float32)
    row = ids(0, 1, device="cuda")
    with pytest.raises(UnsupportedConfigError, match="conv width 3"):
        replace(step, weight=step.weight[:, :3].contiguous()).kernel(windows[:, :3], state, row, row, row)
    with pytest.raises(UnsupportedConfigError, match=r"x is torch\.float32"):
        replace(step, x=step.x.float()).kernel(windows.float(), state, row, row, row)
    with pytest.raises(InvalidArgumentError, match="z"):
        replace(step, z=step.z[:, :128]).kernel(windows, state, row, row, row)
    with pytest.raises(InvalidArgumentError, match="conv_state"):
        step.kernel(windows[:1], state, row, row, row)
