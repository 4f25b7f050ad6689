"""Argument checks that tests of whole calls cannot tell apart: another check, or the references, would hide a missing one."""

from __future__ import annotations

import math

import pytest
import torch

from compact_state.cute_kernels import Checkpoints, DraftLog, delta_rule, gated_norm, validation
from compact_state.cute_kernels.errors import BackendUnavailableError, InvalidArgumentError, UnsupportedConfigError
from compact_state.cute_kernels.reference.datasets import delta_inputs, ids

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("backend", "device", "capability", "kernels"),
    [
        ("auto", "cuda", (9, 0), True),
        ("kernels", "cuda", (9, 0), True),
        ("reference", "cuda", (9, 0), False),
        ("auto", "cuda", (10, 0), False),
        ("auto", "cuda", (9, 1), False),
        ("auto", "cpu", (9, 0), False),
        ("reference", "cpu", (9, 0), False),
    ],
)
def test_what_a_call_runs_on(backend, device, capability, kernels, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    validation.uses_kernels.cache_clear()
    try:
        assert validation.uses_kernels(backend, torch.device(device)) == kernels
        with pytest.raises(BackendUnavailableError, match=r"allowed: a CUDA device of compute capability 9\.0"):
            validation.uses_kernels("kernels", torch.device("cpu"))
        if capability != (9, 0):
            with pytest.raises(BackendUnavailableError):
                validation.uses_kernels("kernels", torch.device("cuda"))
    finally:
        validation.uses_kernels.cache_clear()


@pytest.mark.parametrize("sizes", [(0, 0, 8, 8), (0, 2, 8, 8), (1, 0, 8, 8), (2, 3, 8, 8), (1, 2, 0, 8), (1, 2, 8, 0)])
def test_heads_and_sizes_that_are_none_are_refused(sizes):
    validation.check_heads(1, 1, 1, 1)
    validation.check_heads(2, 6, 1, 1)
    with pytest.raises(InvalidArgumentError, match=r"q, v: got .*; allowed: .*positive"):
        validation.check_heads(*sizes)


@pytest.mark.parametrize("size", [64, 256])
def test_head_sizes_without_kernels_are_refused_by_name(size):
    x = delta_inputs("gdn", "randn", 3, 1, 2, head_dim_k=size, head_dim_v=size, packed=False)
    pool, slots = torch.zeros(4, 2, size, size), ids(0, 1, 2)
    options = {"kda": False, "kernels": True}
    with pytest.raises(UnsupportedConfigError, match=rf"gdn_decode: head sizes K={size}, V={size}; allowed"):
        delta_rule.check_arguments("gdn_decode", *x.tensors, pool, slots, slots, None, **options)
    log = DraftLog.allocate("gdn", 3, 1, 2, None, head_dim_k=size, head_dim_v=size)
    with pytest.raises(UnsupportedConfigError, match=rf"gdn_commit: head sizes K={size}, V={size}; allowed"):
        delta_rule.check_commit_arguments("gdn_commit", None, pool, slots, slots, log, slots, kernels=True)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_dtypes_without_kernels_are_refused_by_name(kind):
    x = delta_inputs(kind, "randn", 3, 1, 2, packed=False)
    pool, slots = torch.zeros(4, 2, 128, 128), ids(0, 1, 2)
    gate = "a" if kind == "gdn" else "g"
    options = {"kda": kind == "kda", "kernels": True}
    delta_rule.check_arguments("step", *x.tensors, pool, slots, slots, None, **options)
    for names in (("q", "k", "v"), (gate,), ("b",)):
        wrong = [
            t.half() if n in names else t for n, t in zip(("q", "k", "v", gate, "b", "A_log", "dt_bias"), x.tensors)
        ]
        with pytest.raises(UnsupportedConfigError, match=rf"step: {names[0]} is torch.float16; allowed with kernels"):
            delta_rule.check_arguments("step", *wrong, pool, slots, slots, None, **options)
        delta_rule.check_arguments("step", *wrong, pool, slots, slots, None, **options | {"kernels": False})


@pytest.mark.parametrize("name", ["o", "z", "weight"])
def test_a_norms_dtypes_without_kernels_are_refused_by_name(name):
    x = {
        part: torch.zeros(shape, dtype=torch.bfloat16)
        for part, shape in (("o", (3, 128)), ("z", (3, 128)), ("weight", 128))
    }
    x[name] = x[name].half()
    gated_norm._check(*x.values(), "silu", 1e-6, None, False)
    with pytest.raises(UnsupportedConfigError, match=f"gated_rms_norm: {name} is torch.float16; allowed with kernels"):
        gated_norm._check(*x.values(), "silu", 1e-6, None, True)


@pytest.mark.parametrize("place", [1, 2])
def test_q_k_and_v_have_one_dtype(place):
    x = list(delta_inputs("gdn", "randn", 3, 1, 2, packed=False).tensors)
    x[place] = x[place].float()
    with pytest.raises(InvalidArgumentError, match=rf"^{'qkv'[place]}: got torch.float32 .*; allowed: torch.bfloat16 "):
        delta_rule.check_arguments(
            "step", *x, torch.zeros(4, 2, 128, 128), *[ids(0, 1, 2)] * 2, None, kda=False, kernels=False
        )


def test_only_addresses_and_strides_that_are_used_must_fit():
    memory = torch.zeros(64, dtype=torch.bfloat16)
    validation.check_alignment("x", memory.as_strided((2, 8), (8, 1)))
    validation.check_alignment("x", memory.as_strided((1, 8), (9, 1)))  # the stride of a single row means nothing
    for bad, what in (
        (memory.as_strided((2, 8), (9, 1)), r"row stride 18 B; .* multiples of 16 B"),
        (memory[1:9].view(1, 8), r"address 0x\w+, row stride"),
    ):
        with pytest.raises(InvalidArgumentError, match=what):
            validation.check_alignment("x", bad)
    validation.check_rows("x", memory.as_strided((2, 1, 8), (32, 5, 1)))  # nor does that of a dimension of one
    with pytest.raises(InvalidArgumentError, match="trailing dimensions"):
        validation.check_rows("x", memory.as_strided((2, 2, 4), (32, 5, 1)))


def test_what_a_message_says_of_sizes_that_may_be_any():
    with pytest.raises(InvalidArgumentError, match=r"x: .* allowed: torch.float32 or torch.int32 \[any, 3\] on cpu"):
        validation.check_tensor("x", torch.zeros(2, 4), (None, 3), (torch.float32, torch.int32), CPU)


def test_a_log_and_a_plan_have_the_sizes_that_their_makers_say():
    log = DraftLog.allocate("kda", 3, 2, 4, None)
    assert (log.batch, log.max_tokens) == (3, 8)
    assert (log.k.shape, log.u.shape, log.g.shape) == ((3, 2, 8, 2, 128), (3, 2, 8, 4, 128), (3, 2, 8, 4, 128))
    assert log.x is None
    plan = Checkpoints.from_lists([[(5, 1)], [], [(2, 3), (4, 0)]])
    assert (plan.cu.tolist(), plan.ends.tolist(), plan.slots.tolist()) == ([0, 1, 1, 3], [5, 2, 4], [1, 3, 0])


@pytest.mark.parametrize("tokens", [8, 9])
def test_logs_wider_than_the_kernels_are_refused_by_name(tokens):
    """A kernel replays eight tokens: of a longer row it would drop the rest of what was accepted."""
    log, rows = DraftLog.allocate("gdn", 3, 1, 2, 16, max_tokens=tokens), ids(0, 1, 2)
    heads = (1, 2, 128, 128)
    validation.check_log(log, rows, 3, CPU, heads=heads, kernels=False)
    validation.check_log(log, rows, 3, CPU, inputs=(16, torch.bfloat16), kernels=True)
    if tokens == 8:
        validation.check_log(log, rows, 3, CPU, heads=heads, kernels=True)
    else:
        with pytest.raises(UnsupportedConfigError, match=r"draft_log: 9 tokens a row; allowed with kernels: at most 8"):
            validation.check_log(log, rows, 3, CPU, heads=heads, kernels=True)


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("kind", lambda: DraftLog.allocate("GDN", 3, 1, 2, None)),
        ("entries", lambda: Checkpoints.from_lists([(5, 1), (2, 3)])),
        ("entries", lambda: Checkpoints.from_lists([[(5,)]])),
        ("entries", lambda: Checkpoints.from_lists([[(5, 2**31)]])),
        ("entries", lambda: Checkpoints.from_lists([[(5, "1")]])),
        ("entries", lambda: Checkpoints.from_lists(7)),
    ],
)
def test_makers_of_arguments_name_what_is_wrong(argument, call):
    with pytest.raises(InvalidArgumentError, match=f"^{argument}: got .*; allowed: "):
        call()


def test_gates_have_kernels_of_their_own():
    assert delta_rule.kind_of(False, None) == "gdn"
    assert delta_rule.kind_of(True, None) == "kda_softplus"
    assert delta_rule.kind_of(True, -5.0) == "kda_bounded"


def test_what_cannot_be_launched_has_no_function(monkeypatch):
    """Sizes that no single tensor shows to be wrong, and what is to run elsewhere, must reach the full check."""
    monkeypatch.setattr(delta_rule, "uses_kernels", lambda backend, device: backend != "reference")
    monkeypatch.setattr(delta_rule, "recurrent_decode", lambda key: key)
    decode = delta_rule.decode_function.__wrapped__
    right = {"backend": "auto", "device": 0, "kda": False, "lower_bound": None, "scale": None, "dtype": torch.float32}
    right |= {"q": torch.Size((3, 2, 128)), "hv": 4, "bias": 4}
    key, factor = decode(**right)
    assert (key.kind, key.state, factor) == ("gdn", "float32", 128**-0.5)
    assert decode(**right | {"scale": 0.25})[1] == 0.25
    bounded = right | {"kda": True, "lower_bound": -5.0, "bias": 512}
    assert decode(**bounded)[0].kind == "kda_bounded"
    for bad in (
        {"device": -1},
        {"backend": "reference"},
        {"q": torch.Size((0, 2, 128))},
        {"hv": 3, "bias": 3},
        {"bias": 512},
        {"kda": True},  # a bias a channel
        {"scale": math.nan},
        {"dtype": torch.float64},
    ):
        with pytest.raises((ValueError, KeyError)):
            decode(**right | bad)
    with pytest.raises(InvalidArgumentError, match="lower_bound"):
        decode(**bounded | {"lower_bound": 1.0})
