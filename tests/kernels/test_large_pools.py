"""B1, B5: slots and strides beyond 2**31 elements give the bits of near ones, in every operator; no other slot changes."""

from __future__ import annotations

import math

import pytest
import torch
from layer_case import make_step
from verify_case import DECODE, DTYPES, KINDS, PREFILL, bits, commit, ids, inputs, make_log, verify

from compact_state.cute_kernels import (
    Checkpoints,
    DraftLog,
    causal_conv1d_commit,
    causal_conv1d_decode,
    causal_conv1d_prefill,
    causal_conv1d_verify,
)
from compact_state.cute_kernels.reference.datasets import cu_seqlens, initial_states

pytestmark = pytest.mark.gpu

HK, HV, SLOTS = 16, 32, 4100
CHANNELS, STATE = (2 * HK + HV) * 128, HV * 128 * 128
WINDOW_BYTES = 4 * CHANNELS * 2
NEAR, FAR = (9, 10, 11), (SLOTS - 1, SLOTS - 2, SLOTS - 3)  # read, written, kept
#: Those beside them, and those that an offset cut to 32 bits would reach.
GUARDS = [*range(9), 12, SLOTS - 5, SLOTS - 4]


@pytest.fixture(scope="module")
def memory():
    return torch.empty(SLOTS * (STATE * 4 + WINDOW_BYTES), dtype=torch.uint8, device="cuda")


def views(memory, dtype, slots, stride):
    """Slots, windows and states of one pool: a slot is its window and its state, as `StateLayout` packs them."""
    records = memory.as_strided((slots, WINDOW_BYTES + STATE * dtype.itemsize), (stride, 1))
    windows = records[:, :WINDOW_BYTES].view(torch.bfloat16).unflatten(1, (4, CHANNELS))
    return records, windows, records[:, WINDOW_BYTES:].view(dtype).unflatten(1, (HV, 128, 128))


def decode(kind, bound, windows, state, read, write, kept):
    x = inputs(kind, bound, 1, HK, HV)
    return [DECODE[kind](*x.tensors, state, read, write, **x.gate_options, backend="kernels")]


def prefill(kind, bound, windows, state, read, write, kept):
    plan = Checkpoints(ids(0, 1), ids(3), kept)
    found = []
    for tokens in (5, 70):
        x = inputs(kind, bound, tokens, HK, HV)
        cu = cu_seqlens([tokens], device="cuda")
        options = {**x.gate_options, "checkpoints": plan, "backend": "kernels"}
        found.append(PREFILL[kind](*x.tensors, state, read, write, cu, **options))
        found.append(state[kept.long()].clone())
    return found


def verify_and_commit(kind, bound, windows, state, read, write, kept):
    x, cu, log = inputs(kind, bound, 4, HK, HV), ids(0, 4), make_log(kind, 1, HK, HV)
    found = []
    for accepted in (0, 2):
        found.append(verify(x, state, read, write, cu, log, ids(accepted)))
        log.half ^= 1
    commit(x, state, write, kept, log, ids(3))
    return found


def layer(kind, bound, windows, state, read, write, kept):
    step, log = make_step(kind, bound, 4, HK, HV), DraftLog.allocate(kind, 1, HK, HV, CHANNELS, "cuda")
    found = [step.rows(slice(0, 1)).kernel(windows, state, read, write, ids(7))]
    for position, accepted in ((8, 0), (8, 2)):
        extra = {"cu_seqlens": ids(0, 4), "draft_log": log, "num_accepted": ids(accepted)}
        found.append(step.kernel(windows, state, write, kept, ids(position), **extra))
        log.half ^= 1
    return found


def conv(kind, bound, windows, state, read, write, kept):
    rng = torch.Generator().manual_seed(2)
    x, weight = (torch.randn(n, m, generator=rng).bfloat16().cuda() for n, m in ((9, CHANNELS), (CHANNELS, 4)))
    log = DraftLog.allocate("gdn", 1, HK, HV, CHANNELS, "cuda")
    plan, on = Checkpoints(ids(0, 1), ids(3), kept), {"backend": "kernels"}
    found = [causal_conv1d_prefill(x, weight, windows, read, write, ids(5), ids(0, 9), checkpoints=plan, **on)]
    found.append(windows[kept.long()].clone())
    found.append(causal_conv1d_decode(x[:1], weight, windows, write, kept, ids(14), **on))
    found.append(causal_conv1d_verify(x[:4], weight, windows, kept, write, ids(15), ids(0, 4), log, ids(0), **on))
    log.half ^= 1
    causal_conv1d_commit(windows, write, kept, ids(15), log, ids(2), **on)
    return found


OPERATORS = pytest.mark.parametrize(
    ("operators", "kind", "bound"),
    [(operators, *kind) for operators in (decode, prefill, verify_and_commit, layer) for kind in KINDS]
    + [(conv, None, None)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)


def run(operators, kind, bound, dtype, pool, slots):
    """Outputs and the three slots after the operators ran on equal contents."""
    (records, windows, state), (read, write, kept) = pool, slots
    rng = torch.Generator().manual_seed(1)
    for slot in (write, kept):
        windows[slot], state[slot] = math.nan, math.nan
    windows[read] = torch.randn(4, CHANNELS, generator=rng).bfloat16().cuda()
    state[read] = initial_states(1, HV).to("cuda", dtype)[0]
    before = records[read].clone()
    outputs = operators(kind, bound, windows, state, ids(read), ids(write), ids(kept))
    assert torch.equal(records[read], before)
    assert not torch.isnan(outputs[0]).any()
    return [bits(tensor) for tensor in (*outputs, *(records[slot] for slot in slots))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@OPERATORS
def test_B1_slots_beyond_two_to_the_31_elements(memory, operators, kind, bound, dtype):
    stride = WINDOW_BYTES + STATE * dtype.itemsize
    assert FAR[-1] * stride // dtype.itemsize > 2**31
    pool = views(memory, dtype, SLOTS, stride)
    pool[0][GUARDS] = 0x5A
    near, far = (run(operators, kind, bound, dtype, pool, slots) for slots in (NEAR, FAR))
    assert all(map(torch.equal, near, far))
    assert bool((pool[0][GUARDS] == 0x5A).all())


@OPERATORS
def test_B5_a_slot_stride_beyond_two_to_the_31_elements(memory, operators, kind, bound):
    dtype, dense = torch.bfloat16, WINDOW_BYTES + STATE * 2
    near = run(operators, kind, bound, dtype, views(memory, dtype, 3, dense), (2, 1, 0))
    far = run(operators, kind, bound, dtype, views(memory, dtype, 3, 2 * (2**31 + 64)), (2, 1, 0))
    assert all(map(torch.equal, near, far))
