"""Prefill calls with a signature that has passed are not checked again; any other signature is, whatever passed before."""

from __future__ import annotations

import pytest
import torch

from compact_state.cute_kernels import Checkpoints, DraftLog, delta_rule, gdn, kda, validation
from compact_state.cute_kernels.errors import InvalidArgumentError
from compact_state.cute_kernels.reference.datasets import cu_seqlens, ids

N, T, HK, HV, D, S = 2, 5, 1, 2, 8, 4


@pytest.fixture(autouse=True)
def _nothing_remembered(monkeypatch):
    monkeypatch.setattr(validation, "_sound", set())


@pytest.fixture
def checks(monkeypatch):
    """Names of the operators whose arguments were checked."""
    seen = []
    check = delta_rule.check_arguments

    def counted(operator, *arguments, **options):
        seen.append(operator)
        check(operator, *arguments, **options)

    monkeypatch.setattr(delta_rule, "check_arguments", counted)
    return seen


def arguments(kind):
    gate = (HV,) if kind == "gdn" else (HV, D)
    names = ("q", "k", "v", "a" if kind == "gdn" else "g", "b", "A_log", "dt_bias", "state", "read_ids", "write_ids")
    tensors = (
        torch.randn(T, HK, D), torch.randn(T, HK, D), torch.randn(T, HV, D), torch.randn(T, *gate), torch.randn(T, HV),
        torch.randn(HV), torch.randn(*gate).flatten(), torch.randn(S, HV, D, D), ids(0, 1), ids(2, 3),
    )  # fmt: skip
    return dict(zip(names, tensors, strict=True)) | {"cu_seqlens": cu_seqlens([2, 3])}


def call(kind, operator, **changed):
    module = gdn if kind == "gdn" else kda
    given = arguments(kind)
    if operator == "verify":
        options = {"head_dim_k": D, "head_dim_v": D, "dtype": torch.float32}
        given |= {"draft_log": DraftLog.allocate(kind, N, HK, HV, None, **options), "num_accepted": ids(0, 0)}
    else:
        given |= {"checkpoints": Checkpoints.from_lists([[(1, 0)], []])}
    return getattr(module, f"{kind}_{operator}")(**given | changed)


CASES = [("gdn", "prefill"), ("kda", "prefill")]


@pytest.mark.parametrize(("kind", "operator"), CASES)
def test_the_second_call_of_a_signature_is_not_checked(checks, kind, operator):
    call(kind, operator)
    call(kind, operator)
    assert checks == [f"{kind}_{operator}"]
    call(kind, operator, out=torch.empty(T, HV, D))
    assert len(checks) == 2


def misaligned(*shape, dtype):
    return torch.zeros(torch.Size(shape).numel() + 1, dtype=dtype)[1:].view(shape)


@pytest.mark.parametrize(("kind", "operator"), CASES)
@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("k", lambda: torch.randn(T, HK, D + 1)),
        ("q", lambda: torch.randn(T, HK, D).int()),
        ("k", lambda: torch.randn(T, HK, 2 * D)[..., ::2]),
        ("b", lambda: torch.randn(T + 1, HV)),
        ("state", lambda: torch.randn(S, HV, D, D).to(torch.int8)),
        ("read_ids", lambda: ids(0, 1).long()),
        ("cu_seqlens", lambda: cu_seqlens([2, 2, 1])),
        ("out", lambda: torch.empty(T, HV, D, dtype=torch.float16)),
        ("v", lambda: [1.0]),
    ],
)
def test_a_wrong_argument_is_named_after_calls_that_passed(checks, kind, operator, name, bad):
    call(kind, operator)
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match=rf"^{name}: "):
            call(kind, operator, **{name: bad()})
    call(kind, operator)
    assert len(checks) == 3


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_a_wrong_log_plan_or_bound_is_named_after_calls_that_passed(kind):
    call(kind, "verify")
    call(kind, "prefill")
    options = {"head_dim_k": D, "head_dim_v": D, "dtype": torch.float32}
    with pytest.raises(InvalidArgumentError, match=r"^draft_log: "):
        call(kind, "verify", draft_log=DraftLog.allocate(kind, 1, HK, HV, None, **options))
    with pytest.raises(InvalidArgumentError, match=r"^draft_log: "):
        call(kind, "verify", draft_log=Checkpoints.from_lists([[], []]))
    with pytest.raises(InvalidArgumentError, match=r"^num_accepted: "):
        call(kind, "verify", num_accepted=ids(0))
    with pytest.raises(InvalidArgumentError, match=r"^checkpoints\.cu: "):
        call(kind, "prefill", checkpoints=Checkpoints.from_lists([[]]))
    if kind == "kda":
        with pytest.raises(InvalidArgumentError, match=r"^lower_bound: "):
            call(kind, "prefill", lower_bound=1.0)


def test_alignment_counts_and_the_memory_is_bounded(monkeypatch):
    aligned, odd = torch.zeros(4), misaligned(4, dtype=torch.float32)
    assert validation.signature(aligned) != validation.signature(odd)
    assert validation.signature(aligned) == validation.signature(torch.ones(4))
    assert validation.signature([1]) is None
    monkeypatch.setattr(validation, "MAX_SOUND", 3)
    for number in range(10):
        validation.remember(validation.signature(number))
        assert validation.is_sound(validation.signature(number))
        assert len(validation._sound) <= 3
    assert not validation.is_sound(None)
