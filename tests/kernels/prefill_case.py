"""What the prefill tests of both rules share: pools, the float64 oracle, and the comparison of one call with it."""

from __future__ import annotations

import math

import torch

from compact_state.cute_kernels import Checkpoints, reference
from compact_state.cute_kernels.reference.datasets import cu_seqlens, delta_inputs, ids, initial_states, make_pool
from compact_state.cute_kernels.reference.metrics import assert_close, tolerance

DTYPES = (torch.float32, torch.bfloat16)
REFERENCE = {"gdn": reference.gdn_prefill, "kda": reference.kda_prefill}


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def filled_pool(slots, hv, dtype, dataset, used):
    """A NaN-filled pool on the GPU whose `used` slots hold states."""
    pool = make_pool(slots, (hv, 128, 128), dtype, device="cuda")
    for slot, state in zip(used, initial_states(len(used), hv, dataset=dataset).to("cuda", dtype)):
        pool[slot] = state
    return pool


def oracle(inputs, pool, read, write, cu, **options):
    """Outputs of the float64 recurrence; `pool` (float64) is advanced."""
    out = torch.empty(*inputs.v.shape, dtype=torch.float64, device="cuda")
    REFERENCE[inputs.kind](
        *inputs.tensors, pool, read, write, cu, out=out, compute_dtype=torch.float64, **inputs.gate_options, **options
    )
    return out


def check_inputs(run, inputs, lengths, dataset, dtype=torch.float32, kept=None, read=None, write=None, **options):
    """Calls `run`, the operator: compares outputs, written slots and checkpoints, and the bits of every other slot.

    `kept` is one list of token counts a sequence; each gets a slot of its own.
    """
    n, total, hv = len(lengths), sum(lengths), inputs.v.shape[1]
    entries = sum(len(ends) for ends in kept) if kept else 0
    slots = 2 * n + entries + 1
    order = torch.randperm(slots, generator=torch.Generator().manual_seed(total)).tolist()
    read = ids(*order[:n], device="cuda") if read is None else read
    write = ids(*order[n : 2 * n], device="cuda") if write is None else write
    pool = filled_pool(slots, hv, dtype, dataset, sorted({i for i in read.tolist() if 0 <= i < slots}))
    plan, targets = None, []
    if kept:
        free = iter(order[2 * n :])
        pairs = [[(end, next(free)) for end in ends] for ends in kept]
        targets = [slot for row in pairs for _, slot in row]
        plan = Checkpoints.from_lists(pairs, device="cuda")
    expected_pool, before = pool.double(), pool.clone()
    out = torch.full((total, hv, 128), math.nan, dtype=torch.bfloat16, device="cuda")
    cu = cu_seqlens(list(lengths), device="cuda")
    run(*inputs.tensors, pool, read, write, cu, out=out, checkpoints=plan, **inputs.gate_options, **options)
    expected = oracle(inputs, expected_pool, read, write, cu, checkpoints=plan, **options)
    assert_close(out, expected, tolerance("prefill", dataset, "output", dtype), "out")
    written = sorted({i for i in write.tolist() if 0 <= i < slots} | set(targets))
    for slot in written:
        assert_close(pool[slot], expected_pool[slot], tolerance("prefill", dataset, "state", dtype), f"slot {slot}")
    others = [slot for slot in range(slots) if slot not in written]
    assert torch.equal(bits(pool[others]), bits(before[others]))


def check_equal_repeats(run, kind, hk, hv, dtype):
    """1,000 calls, behind each other on the stream, give the outputs and states of the first, bit for bit."""
    lengths = [1000, 130, 64, 5]
    inputs = delta_inputs(kind, "trained", sum(lengths), hk, hv, device="cuda")
    pool = filled_pool(8, hv, dtype, "trained", range(4))
    read, cu = torch.arange(4, dtype=torch.int32, device="cuda"), cu_seqlens(lengths, device="cuda")
    write, out = read + 4, torch.full(inputs.v.shape, math.nan, dtype=torch.bfloat16, device="cuda")
    run(*inputs.tensors, pool, read, write, cu, out=out)
    first, state = bits(out.clone()), bits(pool[4:].clone())
    assert bool(out.isfinite().all())
    different = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(1000):
        out.fill_(math.nan)
        pool[4:].fill_(math.nan)
        run(*inputs.tensors, pool, read, write, cu, out=out)
        different |= (bits(out) != first).any() | (bits(pool[4:]) != state).any()
    assert not different


def check_thousands_of_sequences(run, kind, lengths, hk, hv):
    """Thousands of sequences of one chunk in one call, and as two halves: the same bits."""
    n, half = len(lengths), len(lengths) // 2
    inputs = delta_inputs(kind, "randn", sum(lengths), hk, hv, device="cuda")
    none = torch.full((n,), -1, dtype=torch.int32, device="cuda")
    pool = make_pool(1, (hv, 128, 128), device="cuda")
    whole = run(*inputs.tensors, pool, none, none, cu_seqlens(lengths, device="cuda"))
    middle, parts = sum(lengths[:half]), []
    for rows, tokens in ((slice(0, half), slice(0, middle)), (slice(half, n), slice(middle, None))):
        cu = cu_seqlens(lengths[rows], device="cuda")
        parts.append(run(*inputs.rows(tokens).tensors, pool, none[rows], none[rows], cu))
    assert torch.isfinite(whole).all()
    assert torch.equal(bits(torch.cat(parts)), bits(whole))


def check_pieces(run, kind, tokens, cuts, lower_bound=None, rest=None):
    """Tokens in pieces that end at `cuts`, the state of one the start of the next, against one call, within the tolerances.

    `rest` runs all pieces but the first (default: `run`).
    """
    hv = 4
    inputs = delta_inputs(kind, "trained", tokens, 2, hv, lower_bound=lower_bound, device="cuda")
    pool, slots = filled_pool(3, hv, torch.float32, "trained", (0,)), [ids(slot, device="cuda") for slot in range(3)]
    whole = run(*inputs.tensors, pool, slots[0], slots[1], cu_seqlens([tokens], device="cuda"), **inputs.gate_options)
    pieces = []
    for start, end in zip([0, *cuts], [*cuts, tokens]):
        piece, read = inputs.rows(slice(start, end)), slots[2 if start else 0]
        one = rest if start and rest is not None else run
        pieces.append(
            one(*piece.tensors, pool, read, slots[2], cu_seqlens([end - start], device="cuda"), **piece.gate_options)
        )
    assert_close(torch.cat(pieces), whole.double(), 0.006, "out")
    assert_close(pool[2], pool[1].double(), 0.01, "state")


def check_graph_replay(run, kind):
    """A captured call follows what its ids and bounds hold at each replay, and equals an eager call bit for bit."""
    hv, slots = 4, 5
    inputs = delta_inputs(kind, "randn", 200, 2, hv, device="cuda")
    start = filled_pool(slots, hv, torch.float32, "randn", range(slots))
    pool = start.clone()
    read, write, cu = ids(0, 1, device="cuda"), ids(2, 3, device="cuda"), ids(0, 130, 200, device="cuda")
    out = torch.zeros(200, hv, 128, dtype=torch.bfloat16, device="cuda")
    run(*inputs.tensors, pool, read, write, cu, out=out)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        run(*inputs.tensors, pool, read, write, cu, out=out)
    for reads, writes, bounds in (
        ((4, -1), (4, 0), (0, 3, 200)),
        ((1, 2), (-1, 2), (0, 0, 64)),
        ((0, 1), (2, 3), (0, 199, 200)),
    ):
        for target, values in ((read, reads), (write, writes), (cu, bounds)):
            target.copy_(ids(*values))
        pool.copy_(start)
        eager = start.clone()
        graph.replay()
        expected = run(*inputs.tensors, eager, read, write, cu)
        assert torch.equal(bits(out[: bounds[-1]]), bits(expected[: bounds[-1]]))
        assert torch.equal(bits(pool), bits(eager))


def check_sequences_without_tokens(run, kind, hv, dtype):
    """Their state moves from the read to the write slot, and is zero without one."""
    pool = filled_pool(4, hv, dtype, "randn", (0,))
    start = pool[0].clone()
    inputs = delta_inputs(kind, "randn", 0, 1, hv, device="cuda")
    read, write, cu = ids(0, -1, device="cuda"), ids(1, 2, device="cuda"), ids(0, 0, 0, device="cuda")
    out = run(*inputs.tensors, pool, read, write, cu)
    assert out.shape == (0, hv, 128)
    assert torch.equal(pool[1], start)
    assert torch.equal(pool[0], start)
    assert not pool[2].any()
    assert pool[3].isnan().all()


def check_slots_full_of_nan(run, kind, first, lower_bound=None):
    """A first piece of a token or two into a slot full of NaN, then 50 more: what one call gives; other slots stay."""
    inputs = delta_inputs(kind, "trained", first + 50, 2, 4, lower_bound=lower_bound, device="cuda")
    pool, none = make_pool(4, (4, 128, 128), device="cuda"), ids(-1, device="cuda")
    cold, begun = ids(1, device="cuda"), ids(2, device="cuda")
    whole = run(*inputs.tensors, pool, none, cold, cu_seqlens([first + 50], device="cuda"), **inputs.gate_options)
    pieces = []
    for rows, read in ((slice(0, first), none), (slice(first, None), begun)):
        piece = inputs.rows(rows)
        cu = cu_seqlens([piece.q.shape[0]], device="cuda")
        pieces.append(run(*piece.tensors, pool, read, begun, cu, **inputs.gate_options))
    assert_close(torch.cat(pieces), whole.double(), 0.006, "out")
    assert_close(pool[2], pool[1].double(), 0.01, "state")
    assert bool(pool[[0, 3]].isnan().all())


def check_large_state(run, dtype, **options):
    """States of 1e5 that neither decay nor change are read out as they are; the slot written holds what was read."""
    q = torch.ones(200, 1, 128, dtype=torch.bfloat16, device="cuda")
    closed = torch.full((200, 1), -1000.0, dtype=torch.bfloat16, device="cuda")
    pool, zero = make_pool(2, (1, 128, 128), dtype, device="cuda"), torch.zeros(1, device="cuda")
    pool[0] = 1e5
    slots = (ids(0, device="cuda"), ids(1, device="cuda"))
    out = run(
        q, q, torch.zeros_like(q), closed, closed, zero, zero, pool, *slots, cu_seqlens([200], device="cuda"), **options
    )
    torch.testing.assert_close(out.float(), torch.full(out.shape, 1e5, device="cuda"), rtol=2**-7, atol=0)
    torch.testing.assert_close(pool[1], pool[0], rtol=1e-5, atol=0)


def check_longer_token_buffer(run, kind):
    """Tokens beyond the last sequence are NaN, and so may their outputs be; the rest is what it is without them."""
    lengths, total, buffer = [65, 1, 135], 201, 256
    inputs = delta_inputs(kind, "randn", buffer, 2, 4, device="cuda")
    for tensor in inputs.tensors[:5]:
        tensor[total:] = math.nan
    read, write, cu = ids(0, 1, 2, device="cuda"), ids(3, 4, 5, device="cuda"), cu_seqlens(lengths, device="cuda")
    pool = filled_pool(6, 4, torch.float32, "randn", range(3))
    exact = pool.clone()
    out = torch.full((buffer, 4, 128), math.nan, dtype=torch.bfloat16, device="cuda")
    run(*inputs.tensors, pool, read, write, cu, out=out)
    alone = run(*inputs.rows(slice(0, total)).tensors, exact, read, write, cu)
    assert torch.equal(bits(out[:total]), bits(alone))
    assert torch.equal(bits(pool), bits(exact))
    assert torch.isfinite(out[:total]).all()


def check_neighbours(run, kind, lengths, value):
    """Other sequences full of `value` change no bit of one."""
    hv, n = 4, len(lengths)
    inputs = delta_inputs(kind, "trained", sum(lengths), 2, hv, device="cuda")
    cu = cu_seqlens(lengths, device="cuda")
    read = torch.arange(n, dtype=torch.int32, device="cuda")
    pool = filled_pool(2 * n, hv, torch.float32, "trained", range(n))
    spoiled_pool = pool.clone()
    out = run(*inputs.tensors, pool, read, read + n, cu)
    row = n // 2 if n > 2 else 0
    begin, end = int(cu[row]), int(cu[row + 1])
    spoiled = [x.clone() for x in inputs.tensors[:5]]
    for tensor in spoiled:
        tensor[:begin] = value
        tensor[end:] = value
    other = run(*spoiled, *inputs.tensors[5:], spoiled_pool, read, read + n, cu)
    assert torch.equal(bits(out[begin:end]), bits(other[begin:end]))
    assert torch.equal(bits(pool[n + row]), bits(spoiled_pool[n + row]))
