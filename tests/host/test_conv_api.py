"""Conv operators and id tracking on a CPU: named errors before anything changes, and the references behind "auto"."""

from __future__ import annotations

import pytest
import torch

from compact_state.cute_kernels import (
    advance_state_ids,
    causal_conv1d_commit,
    causal_conv1d_decode,
    causal_conv1d_prefill,
    causal_conv1d_verify,
    conv_launch,
    reference,
    validation,
)
from compact_state.cute_kernels import state_ids as state_ids_api
from compact_state.cute_kernels.checkpoints import Checkpoints
from compact_state.cute_kernels.compile.manifest import manifest
from compact_state.cute_kernels.configs import conv1d as configs
from compact_state.cute_kernels.draft_log import DraftLog
from compact_state.cute_kernels.errors import InvalidArgumentError, UnsupportedConfigError
from compact_state.cute_kernels.reference.datasets import cu_seqlens, ids, make_pool

N, C, W, S = 3, 16, 4, 5
BF16 = torch.bfloat16
OPERATORS = {
    "prefill": causal_conv1d_prefill,
    "decode": causal_conv1d_decode,
    "verify": causal_conv1d_verify,
    "commit": causal_conv1d_commit,
}
ALL = ("prefill", "decode", "verify")


def arguments(operator, dtype=BF16):
    """Correct arguments: N rows of one token each."""
    rng = torch.Generator().manual_seed(5)

    def normal(*shape):
        return torch.randn(*shape, generator=rng).to(dtype)

    given = {
        "x": normal(N, C), "weight": normal(C, W), "conv_state": normal(S, W, C), "read_ids": ids(0, 1, -1),
        "write_ids": ids(0, 2, 3), "positions": ids(4, 9, 0),
    }  # fmt: skip
    if operator in ("prefill", "verify"):
        given["cu_seqlens"] = cu_seqlens([1] * N)
    if operator in ("verify", "commit"):
        given["draft_log"] = DraftLog.allocate("gdn", N, 1, 1, C, head_dim_k=8, head_dim_v=8, dtype=dtype)
        given["draft_log"].x.zero_()
        given["num_accepted"] = ids(0, 0, 0)
    if operator == "commit":
        del given["x"], given["weight"]
    return given


@pytest.fixture
def on_kernels(monkeypatch):
    """Every call takes the kernels' path, whose launches only record that they happened."""
    launches = []
    monkeypatch.setattr(validation, "uses_kernels", lambda backend, device: True)
    for name in ("launch_prefill", "launch_decode", "launch_verify", "launch_commit"):
        monkeypatch.setattr(conv_launch, name, lambda *a, name=name, **k: launches.append(name))
    return launches


def refused(operator, given, error, match):
    tensors = [value for value in given.values() if isinstance(value, torch.Tensor) and value.is_floating_point()]
    before = [tensor.clone() for tensor in tensors]
    with pytest.raises(error, match=match) as caught:
        OPERATORS[operator](**given)
    assert "allowed" in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before))


@pytest.mark.parametrize("operator", ALL)
def test_auto_runs_the_reference_here(operator):
    ours, theirs = arguments(operator), arguments(operator)
    out = torch.empty(N, C, dtype=BF16)
    assert OPERATORS[operator](**ours, bias=torch.ones(C), activation=None, out=out) is out
    oracle = getattr(reference, f"causal_conv1d_{operator}")
    assert torch.equal(out, oracle(**theirs, bias=torch.ones(C), activation=None))
    assert torch.equal(ours["conv_state"], theirs["conv_state"])


def refuse_by_itself(request, operator):
    """Most checks are left to the loaded function, which refuses what is wrong before it launches."""

    def launch(*given, **options):
        raise TypeError("the loaded function's own words")

    request.getfixturevalue("monkeypatch").setattr(conv_launch, f"launch_{operator}", launch)


UNSERVED = [
    ({"x": torch.zeros(N, C), "conv_state": torch.zeros(S, W, C)}, r"x is torch.float32; allowed with kernels"),
    ({"weight": torch.zeros(C, W, dtype=torch.float16)}, r"weight is torch.float16; allowed with kernels"),
    ({"bias": torch.zeros(C)}, r"bias is torch.float32; allowed with kernels: weight's torch.bfloat16"),
    (
        {"weight": torch.zeros(C, 5, dtype=BF16), "conv_state": torch.zeros(S, 5, C, dtype=BF16)},
        r"width 5, 16 channels; allowed with kernels: width 2, 3 or 4",
    ),
    (
        {
            "x": torch.zeros(N, 12, dtype=BF16),
            "weight": torch.zeros(12, W, dtype=BF16),
            "conv_state": torch.zeros(S, W, 16, dtype=BF16)[..., :12].contiguous()[:0],
        },
        r"width 4, 12 channels; allowed with kernels: .*multiple of 8 channels",
    ),
]


@pytest.mark.parametrize("operator", ["prefill", "decode"])
@pytest.mark.parametrize(("change", "match"), UNSERVED)
def test_what_only_references_serve_is_named(operator, change, match, on_kernels, request):
    refuse_by_itself(request, operator)
    refused(operator, {**arguments(operator), **change}, UnsupportedConfigError, match)
    assert not on_kernels


@pytest.mark.parametrize(
    ("shape", "dtype", "match"),
    [
        ((S, W, C), torch.float32, r"causal_conv1d_commit: conv_state is torch.float32; allowed with kernels"),
        ((S, 5, C), BF16, r"causal_conv1d_commit: width 5, 16 channels; allowed with kernels: width 2, 3 or 4"),
        ((S, W, 12), BF16, r"causal_conv1d_commit: width 4, 12 channels; allowed with kernels"),
    ],
)
def test_commits_that_only_references_serve_are_named(shape, dtype, match, on_kernels, request):
    refuse_by_itself(request, "commit")
    given = arguments("commit", dtype)
    log = DraftLog.allocate("gdn", N, 1, 1, shape[2], dtype=dtype)
    pool = make_pool(shape[0], shape[1:], dtype, fill=0.0)
    refused("commit", {**given, "conv_state": pool, "draft_log": log}, UnsupportedConfigError, match)
    assert not on_kernels


def test_drafts_of_no_sequence_are_zero(on_kernels, request):
    """A packed call of no rows is nothing to launch; its outputs are defined all the same."""
    refuse_by_itself(request, "verify")
    given = arguments("verify")
    none = {name: ids() for name in ("read_ids", "write_ids", "positions", "num_accepted")}
    out = torch.full((N, C), float("nan"), dtype=BF16)
    assert causal_conv1d_verify(**given | none | {"cu_seqlens": cu_seqlens([]), "out": out}) is out
    assert not out.any()


def test_prefill_into_its_input_is_refused_by_kernels(on_kernels):
    given = arguments("prefill")
    refused("prefill", {**given, "out": given["x"]}, InvalidArgumentError, "out: got x itself; allowed: memory apart")
    assert not on_kernels


@pytest.mark.parametrize("operator", OPERATORS)
def test_right_arguments_launch_once(operator, on_kernels):
    OPERATORS[operator](**arguments(operator))
    assert on_kernels == [f"launch_{operator}"]


def test_no_rows_launch_nothing(monkeypatch):
    asked, none = [], ids()
    monkeypatch.setattr(conv_launch, "_decode", asked.append)
    monkeypatch.setattr(validation, "uses_kernels", lambda backend, device: True)
    out = causal_conv1d_decode(
        torch.zeros(0, C, dtype=BF16), torch.zeros(C, W, dtype=BF16), torch.zeros(S, W, C, dtype=BF16), none, none, none
    )
    assert out.shape == (0, C)
    assert not asked


def test_launches_pass_flags_and_stand_ins(monkeypatch):
    """What a call leaves out becomes a flag and a tensor that is not looked at; nothing is allocated for it."""
    calls = []
    for name in ("_decode", "_prefill", "_verify"):
        monkeypatch.setattr(conv_launch, name, lambda key: lambda *given: calls.append((key, given)))
        monkeypatch.setattr(
            conv_launch, f"{name[1:]}_function", getattr(conv_launch, f"{name[1:]}_function").__wrapped__
        )
    monkeypatch.setattr(validation, "uses_kernels", lambda backend, device: True)
    given = arguments("decode")
    causal_conv1d_decode(**given, activation=None)
    causal_conv1d_decode(**given, bias=torch.zeros(C, dtype=BF16), settled=True)
    (key, plain), (other, full) = calls
    assert key == other == configs.choose_decode(W, "bfloat16", N * C)
    assert plain[2] is given["weight"]
    assert plain[-1] == 0
    assert full[2].shape == (1, C)
    assert full[-1] == configs.SETTLED | configs.BIAS | configs.SILU
    calls.clear()
    given = arguments("prefill")
    marks = Checkpoints(ids(0, 1, 1, 1), ids(1), ids(4))
    causal_conv1d_prefill(**given)
    causal_conv1d_prefill(**given, checkpoints=marks)
    (_, plain), (_, kept) = calls
    assert plain[-1] == configs.SILU
    assert all(given["read_ids"] is stand_in for stand_in in plain[9:11])
    assert kept[-1] == configs.SILU | configs.CHECKPOINTS
    assert kept[8:11] == (marks.cu, marks.ends, marks.slots)


def test_every_conv_key_has_its_own_symbol():
    """Any two keys of the spaces differ in their symbol, so every field is in it; the choices are legal and in the space."""
    for width in configs.WIDTHS:
        decodes = [key for weight in configs.SHORT for key in configs.decode_candidates(width, weight)]
        prefills = [key for weight in configs.SHORT for key in configs.prefill_candidates(width, weight)]
        keys = [*decodes, *prefills, configs.ConvVerifyKey(width, "float32"), configs.ConvCommitKey(width)]
        assert len({key.symbol() for key in keys}) == len(keys)
        for weight in configs.SHORT:
            assert {configs.choose_decode(width, weight, size) for size in (1, 1 << 24)} <= set(decodes)
            assert {configs.choose_prefill(width, weight, size, 8) for size in (8, 1 << 14)} <= set(prefills)
    for key in (
        configs.ConvDecodeKey(5, "bfloat16"),
        configs.ConvDecodeKey(4, "bfloat16", vec=16),
        configs.ConvDecodeKey(4, "bfloat16", threads=48),
        configs.ConvDecodeKey(4, "bfloat16", threads=256, lanes=2),
        configs.ConvPrefillKey(4, "bfloat16", vec=2),
        configs.ConvPrefillKey(4, "bfloat16", tokens=2),
        configs.ConvCommitKey(1),
    ):
        assert key.rejection() is not None
    shipped = [
        entry for entry in manifest() if entry.kernel_file.startswith("conv1d") or entry.kernel_file == "state_ids"
    ]
    assert len(shipped) <= 14
    for size in (1, 1 << 20, (1 << 20) + 1, 1 << 30):
        assert configs.choose_decode(4, "bfloat16", size) in {entry.key for entry in shipped}
        assert configs.choose_prefill(4, "bfloat16", size, 1) in {entry.key for entry in shipped}
    assert all(getattr(entry.key, "rejection", lambda: None)() is None for entry in shipped)


# --- id tracking -------------------------------------------------------------------------------------------------------


def test_tracking_passes_flags(monkeypatch):
    from compact_state.cute_kernels.configs.state_ids import COUNTS, HALF, NEXT_IDS

    calls = []
    monkeypatch.setattr(validation, "uses_kernels", lambda backend, device: True)
    monkeypatch.setattr(state_ids_api, "_advance", lambda key: lambda *given: calls.append(given))
    read, write, positions, counts, half, following = (ids(n, n) for n in range(6))
    advance_state_ids(read, write, positions, num_slots=S)
    advance_state_ids(read, write, positions, num_slots=S, num_tokens=counts)
    advance_state_ids(read, write, positions, num_slots=S, num_tokens=half, num_accepted=counts, log_half=half)
    advance_state_ids(read, write, positions, num_slots=S, next_write_ids=following)
    advance_state_ids(ids(), ids(), ids(), num_slots=S)
    assert [call[-1] for call in calls] == [0, COUNTS, COUNTS | HALF, NEXT_IDS]
    assert calls[0][3:6] == (read, read, read)
    assert calls[1][3] is calls[2][3] is counts
    assert calls[2][4] is half
    assert calls[3][5] is following
