"""Bad input to the public GDN and KDA operators: a named error that states the argument, before anything changes."""

from __future__ import annotations

import pytest
import torch

from compact_state.cute_kernels import (
    Checkpoints,
    DraftLog,
    advance_state_ids,
    gdn_commit,
    gdn_decode,
    gdn_prefill,
    gdn_verify,
    kda_commit,
    kda_decode,
    kda_prefill,
    kda_verify,
)
from compact_state.cute_kernels.errors import BackendUnavailableError, InvalidArgumentError
from compact_state.cute_kernels.reference.datasets import cu_seqlens, delta_inputs, ids

N, HK, HV, D, SLOTS = 3, 2, 4, 16, 5


def call(operator, **changes):
    """Run an operator on small valid arguments with some replaced; gives (output, pool)."""
    kind = "kda" if operator in (kda_prefill, kda_decode, kda_verify) else "gdn"
    inputs = delta_inputs(kind, "randn", N, HK, HV, head_dim_k=D, head_dim_v=D)
    names = ("q", "k", "v", "g" if kind == "kda" else "a", "b", "A_log", "dt_bias")
    arguments = dict(zip(names, inputs.tensors))
    arguments["state"] = torch.ones(SLOTS, HV, D, D)
    arguments["read_ids"] = arguments["write_ids"] = ids(0, 1, 2)
    if operator not in (gdn_decode, kda_decode):
        arguments["cu_seqlens"] = cu_seqlens([1, 1, 1])
    if operator in (gdn_verify, kda_verify):
        arguments["draft_log"] = DraftLog.allocate(kind, N, HK, HV, None, head_dim_k=D, head_dim_v=D)
        arguments["num_accepted"] = ids(0, 0, 0)
    options = {key: changes.pop(key) for key in list(changes) if key not in arguments}
    for key, change in changes.items():
        arguments[key] = change(arguments[key])
    pool = arguments["state"]
    return operator(*arguments.values(), **options), pool


OPERATORS = (gdn_decode, kda_decode, gdn_prefill, kda_prefill, gdn_verify, kda_verify)
name_of = lambda operator: operator.__name__


@pytest.mark.parametrize("operator", OPERATORS, ids=name_of)
def test_valid_arguments_pass(operator):
    out, pool = call(operator)
    assert out.shape == (N, HV, D)
    assert not torch.equal(pool[:3], torch.ones(3, HV, D, D)) or operator in (gdn_verify, kda_verify)


BAD = {
    "q": [
        lambda x: x[0],
        lambda x: x[:2],
        lambda x: x.long(),
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    ],
    "k": [lambda x: x[:, :1], lambda x: x.float()],
    "v": [lambda x: x[:, :3], lambda x: torch.stack([x, x], -1)[..., 0]],
    "b": [lambda x: x[:, :2], lambda x: x[0]],
    "A_log": [lambda x: x[:2], lambda x: x.long()],
    "dt_bias": [lambda x: x[:-1]],
    "state": [lambda x: x[:, :2], lambda x: x.half()[0], lambda x: x.transpose(2, 3), lambda x: x.int()],
    "read_ids": [lambda x: x.long(), lambda x: x[:, None], lambda x: x[:2], lambda x: ids(0, 9, 1, 9, 2, 9)[::2]],
    "write_ids": [lambda x: x.long(), lambda x: x[:2], lambda x: x.float()],
}


@pytest.mark.parametrize("operator", OPERATORS, ids=name_of)
@pytest.mark.parametrize(("name", "index"), [(name, i) for name, changes in BAD.items() for i in range(len(changes))])
def test_bad_tensor_is_named_and_nothing_changes(operator, name, index):
    pool = torch.ones(SLOTS, HV, D, D)
    changes = {"state": lambda _: pool} | {name: BAD[name][index]}
    with pytest.raises(InvalidArgumentError) as caught:
        call(operator, **changes)
    expected = {"read_ids": {"read_ids", "write_ids", "cu_seqlens"}, "v": {"v", "q, v"}, "q": {"q", "k"}}
    assert caught.value.argument in expected.get(name, {name})
    assert "allowed" in str(caught.value)
    assert torch.equal(pool, torch.ones_like(pool))


@pytest.mark.parametrize("bound", [0.0, 5.0, float("nan")])
def test_bound_must_be_negative(bound):
    with pytest.raises(InvalidArgumentError, match="lower_bound"):
        call(kda_decode, lower_bound=bound)


@pytest.mark.parametrize("operator", OPERATORS, ids=name_of)
def test_kernels_cannot_be_asked_for_without_their_device(operator):
    with pytest.raises(BackendUnavailableError, match=r"cpu.*9\.0"):
        call(operator, backend="kernels")
    with pytest.raises(InvalidArgumentError, match="backend"):
        call(operator, backend="fast")


def test_heads_that_do_not_divide():
    inputs = delta_inputs("gdn", "randn", N, 2, 3, head_dim_k=D, head_dim_v=D)
    with pytest.raises(InvalidArgumentError, match="2 key heads, 3 value heads"):
        gdn_decode(*inputs.tensors, torch.ones(SLOTS, 3, D, D), ids(0, 1, 2), ids(0, 1, 2))


@pytest.mark.parametrize("operator", [gdn_decode, gdn_prefill], ids=name_of)
@pytest.mark.parametrize(
    "out", [torch.empty(N, HV, D), torch.empty(N - 1, HV, D, dtype=torch.bfloat16)], ids=["dtype", "shape"]
)
def test_bad_out(operator, out):
    with pytest.raises(InvalidArgumentError, match="out"):
        call(operator, out=out)


def test_misaligned_slot_stride():
    memory = torch.ones(SLOTS, HV * D * D + 1)
    pool = memory[:, : HV * D * D].unflatten(1, (HV, D, D))
    with pytest.raises(InvalidArgumentError, match="multiples of 16 B"):
        call(gdn_decode, state=lambda _: pool)


def test_checkpoint_plan_must_fit_the_call():
    good = Checkpoints.from_lists([[(1, 3)], [], []])
    assert call(gdn_prefill, checkpoints=good)[1][3].ne(1).any()
    for plan in (
        Checkpoints(good.cu[:2], good.ends, good.slots),
        Checkpoints(good.cu, good.ends, good.slots[:0]),
        "every",
    ):
        with pytest.raises(InvalidArgumentError, match="checkpoints"):
            call(gdn_prefill, checkpoints=plan)


def test_F6_log_smaller_than_the_batch_is_refused():
    for operator in (gdn_verify, kda_verify):
        kind = operator.__name__[:3]
        small = DraftLog.allocate(kind, N - 1, HK, HV, None, head_dim_k=D, head_dim_v=D)
        with pytest.raises(InvalidArgumentError, match=f"{N - 1} log rows"):
            call(operator, draft_log=lambda _, log=small: log)
        other = DraftLog.allocate("gdn" if kind == "kda" else "kda", N, HK, HV, None, head_dim_k=D, head_dim_v=D)
        with pytest.raises(InvalidArgumentError, match=r"draft_log\.g"):
            call(operator, draft_log=lambda _, log=other: log)


def test_commit_checks_its_arguments():
    pool, one = torch.ones(SLOTS, HV, D, D), ids(0, 1, 2)
    log = DraftLog.allocate("gdn", N, HK, HV, None, head_dim_k=D, head_dim_v=D)
    with pytest.raises(InvalidArgumentError, match="num_accepted"):
        gdn_commit(pool, one, one, log, one[:2])
    with pytest.raises(InvalidArgumentError, match="state"):
        gdn_commit(pool[0], one, one, log, one)
    with pytest.raises(InvalidArgumentError, match="A_log"):
        kda_commit(torch.ones(HV - 1), torch.ones(HV * D), pool, one, one, log, one)


def test_tracking_checks_its_arguments():
    rows = [ids(0, 1), ids(2, 3), ids(0, 0)]
    with pytest.raises(InvalidArgumentError, match="positions"):
        advance_state_ids(rows[0], rows[1], rows[2].long(), num_slots=4)
    with pytest.raises(InvalidArgumentError, match="num_slots"):
        advance_state_ids(*rows, num_slots=-1)
    with pytest.raises(InvalidArgumentError, match="log_half"):
        advance_state_ids(*rows, num_slots=4, log_half=ids(0))
    assert rows[0].tolist() == [0, 1]
