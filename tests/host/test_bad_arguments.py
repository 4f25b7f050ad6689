"""Every public operator, every argument, every way to get it wrong: a named error before any launch, and nothing changed.

The operators run on the references of a CPU, again as if kernels were there, whose launches are failures, and on the GPU.
"""

from __future__ import annotations

import dataclasses
import inspect
import math

import pytest
import torch

from compact_state import cute_kernels
from compact_state.cute_kernels import (
    Checkpoints,
    DraftLog,
    conv_launch,
    delta_rule,
    gated_norm,
    layer_launch,
    prefill_launch,
    state_ids,
    validation,
    verify_launch,
)
from compact_state.cute_kernels.errors import BackendUnavailableError, CompactStateError, InvalidArgumentError
from compact_state.cute_kernels.reference.datasets import cu_seqlens, ids, make_pool

N, T, SLOTS, HK, HV, W = 3, 5, 4, 1, 2, 4
VERIFY = ("cu_seqlens", "draft_log", "num_accepted")
NAMES = [name for name in cute_kernels.__all__ if inspect.isfunction(getattr(cute_kernels, name))]
CALLS = [*NAMES, "gdn_layer_decode, drafts", "kda_layer_decode, drafts"]
MODES = ("reference", "kernels", pytest.param("gpu", marks=pytest.mark.gpu))
IDS = ("read_ids", "write_ids", "positions", "num_tokens", "log_half", "next_write_ids", "num_accepted", "cu_seqlens")
POOLS = ("state", "conv_state")
#: Vectors of any stride: the references read them element by element.
VECTORS = ("A_log", "dt_bias", "bias", "conv_bias", "norm_weight")
#: What kernels load in vectors of 16 bytes.
ALIGNED = (
    "o",
    "q",
    "k",
    "v",
    "g",
    "x",
    "z",
    "out",
    "dt_bias",
    "weight",
    "bias",
    "conv_weight",
    "conv_bias",
    "norm_weight",
)


#: Of those, what some kernels take element by element.
UNALIGNED = (
    ("gdn_decode", "out"),
    ("kda_decode", "out"),
    ("gdn_layer_decode", "dt_bias"),
    ("gdn_layer_decode, drafts", "dt_bias"),
)


class Launched(ValueError):
    """A launch was reached. (A ValueError, as the loaded functions raise: decode has its arguments checked after one.)"""


@pytest.fixture(params=MODES)
def mode(request, monkeypatch):
    if request.param != "kernels":
        return request.param

    def launch(*_, **__):
        raise Launched

    def uses_kernels(backend, device):
        validation.check_choice("backend", backend, validation.BACKENDS)
        return True

    monkeypatch.setattr(validation, "uses_kernels", uses_kernels)
    for module, names in {
        delta_rule: ("decode_function",),
        layer_launch: ("layer_function",),
        prefill_launch: ("launch_prefill",),
        verify_launch: ("launch_verify", "launch_commit"),
        conv_launch: ("decode_function", "prefill_function", "verify_function", "commit_function"),
    }.items():
        for name in names:
            monkeypatch.setattr(module, name, launch)
    monkeypatch.setattr(state_ids, "_advance", lambda key: launch)
    monkeypatch.setattr(gated_norm, "_norm", lambda key: launch)
    return "kernels"


def arguments(call, mode):
    """Right arguments of a call, every optional one given."""
    name, _, drafts = call.partition(", ")
    kind, layer, conv = name[:3], "_layer_" in name, name.startswith("causal")
    K, V, dtype = (128, 128, torch.bfloat16) if mode != "reference" else (8, 16, torch.float32)
    tokens = N if name.endswith("decode") and not drafts else T
    channels = 2 * HK * K + HV * V
    rng = torch.Generator().manual_seed(1)

    def normal(*shape, of=dtype):
        return torch.randn(*shape, generator=rng).to(of)

    def pool(*inner, of):
        return make_pool(SLOTS, inner, of, fill=1.0)

    out = (tokens, channels) if conv else (tokens, HV * V) if layer else (tokens, HV, V)
    exact, bias = torch.float32, (HV, K) if kind == "kda" else (HV,)
    log = DraftLog.allocate(
        kind if kind == "kda" else "gdn", N, HK, HV, channels, head_dim_k=K, head_dim_v=V, dtype=dtype
    )
    log.rows = ids(0, 1, 2)
    for part in (log.k, log.u, log.g, log.x):
        part.zero_()
    values = {
        "q": normal(tokens, HK, K), "k": normal(tokens, HK, K), "v": normal(tokens, HV, V), "a": normal(tokens, HV),
        "g": normal(tokens, HV, K), "b": normal(tokens, HV), "A_log": normal(HV, of=exact),
        "dt_bias": normal(*bias, of=exact), "state": pool(HV, V, K, of=exact), "x": normal(tokens, channels),
        "weight": normal(channels, W), "conv_weight": normal(channels, W), "conv_state": pool(W, channels, of=dtype),
        "z": normal(tokens, HV * V), "norm_weight": normal(V), "bias": normal(channels), "conv_bias": normal(channels),
        "read_ids": ids(0, 1, -1), "write_ids": ids(0, 2, -1), "positions": ids(4, 9, 0), "num_tokens": ids(1, 1, 1),
        "num_accepted": ids(0, 0, 0), "log_half": ids(0, 0, 0), "next_write_ids": ids(3, 2, 1), "num_slots": SLOTS,
        "cu_seqlens": cu_seqlens([2, 2, 1]), "checkpoints": Checkpoints.from_lists([[(1, 3)], [], []]),
        "draft_log": log, "activation": "silu", "gate_activation": "silu", "lower_bound": -5.0, "scale": 0.5,
        "eps": 1e-5, "out": torch.zeros(out, dtype=dtype), "backend": "auto",
    }  # fmt: skip
    if name == "gated_rms_norm":
        values |= {"o": normal(T, V), "z": normal(T, V), "weight": normal(V), "out": torch.zeros(T, V, dtype=dtype)}
    parameters = inspect.signature(getattr(cute_kernels, name)).parameters
    given = {n: v for n, v in values.items() if n in parameters and (drafts or not layer or n not in VERIFY)}
    return {n: on_gpu(value) for n, value in given.items()} if mode == "gpu" else given


def on_gpu(value):
    """The value in GPU memory, strides kept."""
    if isinstance(value, torch.Tensor):
        memory = torch.empty(value.untyped_storage().nbytes(), dtype=torch.uint8, device="cuda").view(value.dtype)
        return memory.as_strided(value.shape, value.stride()).copy_(value)
    if dataclasses.is_dataclass(value):
        return dataclasses.replace(value, **{name: on_gpu(part) for name, part in vars(value).items()})
    return value


def free_size(call, name, dim):
    """Whether nothing else of the call says that size: slots of one pool, width of a commit's windows, its key heads."""
    slots = name in POOLS and dim == 0 and "layer" not in call
    return slots or (call, name, dim) in (
        ("causal_conv1d_commit", "conv_state", 1),
        ("gdn_commit", "draft_log.k", 3),
        ("kda_commit", "draft_log.k", 3),
    )


def wrong_tensors(call, mode, name, value):
    """(what is wrong, the tensor or what stands in for it)"""
    operator = getattr(cute_kernels, call.partition(", ")[0])
    if inspect.signature(operator).parameters[name].default is inspect.Parameter.empty:
        yield "None", None
    yield from (
        ("a list", value.tolist()),
        ("an array", value.float().cpu().numpy()),
        ("a text", "zero"),
        ("a number", 1.0),
    )
    yield from ((str(of), value.to(of)) for of in (torch.int8, torch.int64, torch.complex64) if of is not value.dtype)
    if name in IDS:
        yield "float32", value.float()
    yield from (("a rank more", value[None]), ("a rank less", value[0]), ("another device", value.to("meta")))
    for dim in range(value.dim()):
        if not free_size(call, name, dim):
            yield f"dimension {dim} short", value.narrow(dim, 0, value.shape[dim] - 1).clone()
            yield f"dimension {dim} long", torch.cat([value, value.narrow(dim, 0, 1)], dim)
    if name not in VECTORS or mode != "reference":
        yield "every other element", torch.stack([value, value], -1)[..., 0]
    if name in POOLS or (name in ALIGNED and mode != "reference" and (call, name) not in UNALIGNED):
        yield "off 16 bytes", value.new_zeros(value.numel() + 1)[1:].view(value.shape)
        if value.dim() > 1 and name not in ("dt_bias", "weight", "conv_weight"):
            row = value[0].numel()
            memory = value.new_zeros(value.shape[0], row + 1)
            yield "rows off 16 bytes", memory[:, :row].view(value.shape)


def wrong_plans(value):
    yield from (("a list", [0]), ("a text", "every"), ("a log", DraftLog(*[ids(0)] * 5)))
    yield "cu short", dataclasses.replace(value, cu=value.cu[:-1])
    yield "ends without slots", dataclasses.replace(value, slots=value.slots[:0])
    for field in ("cu", "ends", "slots"):
        column = getattr(value, field)
        for what, wrong in (("a list", column.tolist()), ("None", None), ("int64", column.long()), ("a rank more", column[None]),
                            ("another device", column.to("meta"))):  # fmt: skip
            yield f"{field}: {what}", dataclasses.replace(value, **{field: wrong})
    yield "cu: every other element", dataclasses.replace(value, cu=torch.stack([value.cu, value.cu], -1)[:, 0])


def wrong_logs(call, mode, value):
    conv, layer = call.startswith("causal"), "layer" in call
    yield from (("None", None), ("a list", [0]), ("a plan", Checkpoints(ids(0), ids(0), ids(0))))
    for field in ("x", "half", "rows") if conv else ("k", "u", "g", "half", "rows", *(("x",) if layer else ())):
        part = getattr(value, field)
        changes = {
            "a list": part.tolist(),
            "int64": part.long(),
            "a rank less": part[0],
            "another device": part.to("meta"),
        }
        if field != "rows":
            changes["None"] = None
        for dim in range(part.dim()):
            if not free_size(call, f"draft_log.{field}", dim):
                changes[f"dimension {dim} long"] = torch.cat([part, part.narrow(dim, 0, 1)], dim)
        if field in ("half", "rows") or mode != "reference":
            changes["every other element"] = torch.stack([part, part], -1)[..., 0]
        if mode != "reference" and field not in ("half", "rows"):
            changes["off 16 bytes"] = part.new_zeros(part.numel() + 1)[1:].view(part.shape)
        for what, wrong in changes.items():
            yield f"{field}: {what}", dataclasses.replace(value, **{field: wrong})
    half = [getattr(value, field)[:1] for field in ("k", "u", "g", "x", "half")]
    yield "fewer rows than sequences", DraftLog(*(part.clone() for part in half))


WRONG_VALUES = {
    "activation": ("relu", 1, ["silu"], torch.zeros(2)),
    "gate_activation": ("relu", None, ["silu"], torch.zeros(2)),
    "lower_bound": (0.0, 5.0, math.nan, -math.inf, "-5", [-5.0]),
    "scale": (math.nan, math.inf, "1", [1.0]),
    "eps": (math.nan, -1e-6, math.inf, "1", None, [1.0]),
    "num_slots": (-1, 1.0, "4", None, [4], 2**31),
    "backend": ("fast", None, 1, ["auto"], {}),
}


def wrong(call, mode, name, value):
    if isinstance(value, torch.Tensor):
        return wrong_tensors(call, mode, name, value)
    if isinstance(value, Checkpoints):
        return wrong_plans(value)
    if isinstance(value, DraftLog):
        return wrong_logs(call, mode, value)
    return ((repr(bad), bad) for bad in WRONG_VALUES[name])


def tensors_of(given):
    for value in given.values():
        for part in vars(value).values() if dataclasses.is_dataclass(value) else (value,):
            if isinstance(part, torch.Tensor):
                yield part


@pytest.mark.parametrize("call", CALLS)
def test_right_arguments_are_taken(call, mode):
    given = arguments(call, mode)
    operator = getattr(cute_kernels, call.partition(", ")[0])
    if mode == "kernels":
        with pytest.raises(Launched):
            operator(**given)
    else:
        assert operator(**given) is given.get("out")


@pytest.mark.parametrize("call", [call for call in CALLS if call.endswith("_prefill")])
def test_E12_calls_without_tokens_are_taken(call, mode):
    """All tensors without elements have one address, which says nothing of shared memory; states still move between slots."""
    given = arguments(call, mode)
    for name, value in given.items():
        if isinstance(value, torch.Tensor) and value.shape[0] == T and name not in POOLS:
            given[name] = value[:0]
    given |= {"cu_seqlens": torch.zeros_like(given["cu_seqlens"]), "checkpoints": None}
    if mode == "kernels":
        with pytest.raises(Launched):
            getattr(cute_kernels, call)(**given)
    else:
        assert getattr(cute_kernels, call)(**given) is given["out"]


@pytest.mark.parametrize(
    ("call", "name"), [(call, name) for call in CALLS for name in arguments(call, "reference")], ids=str
)
def test_a_wrong_argument_is_named_before_any_launch(call, name, mode):
    """The argument named may be another one of a pair that disagrees; whatever says a size or a device cannot be wrong alone."""
    operator = getattr(cute_kernels, call.partition(", ")[0])
    given = arguments(call, mode)
    before = [tensor.clone() for tensor in tensors_of(given)]
    found = 0
    faults = []
    for what, value in wrong(call, mode, name, given[name]):
        bad = {**given, name: value}
        found += 1
        try:
            operator(**bad)
        except InvalidArgumentError as error:
            named = {part.partition(".")[0] for part in error.argument.split(", ")}
            if not named <= {*given, "q", "v"}:
                faults.append(f"{what}: names {error.argument}")
            elif (not isinstance(value, torch.Tensor) and name not in named) or "allowed: " not in str(error):
                faults.append(f"{what}: {error}")
        except CompactStateError as error:
            if "allowed" not in str(error):
                faults.append(f"{what}: {error}")
        except Exception as error:
            faults.append(f"{what}: {type(error).__name__} {str(error)[:100]}")
        else:
            faults.append(f"{what}: taken")
    if torch.stack([(a != b).any() for a, b in zip(tensors_of(given), before)]).any():
        faults.append("something changed")
    assert found > 1
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("call", CALLS)
def test_kernels_without_their_device_are_refused_by_name(call):
    operator = getattr(cute_kernels, call.partition(", ")[0])
    with pytest.raises(BackendUnavailableError, match=r"tensors are on cpu; allowed: a CUDA device .* 9\.0"):
        operator(**{**arguments(call, "reference"), "backend": "kernels"})


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("form", ["int64", "[N, 1]", "a column of a table"])
def test_A8_other_forms_of_ids_are_refused(call, form, mode):
    operator, given = getattr(cute_kernels, call.partition(", ")[0]), arguments(call, mode)
    for name in set(IDS) & set(given):
        value = given[name]
        table = torch.zeros(value.numel(), 7, dtype=torch.int32, device=value.device)
        wrong = {"int64": value.long(), "[N, 1]": value[:, None], "a column of a table": table[:, 0]}[form]
        with pytest.raises(InvalidArgumentError, match=rf"^{name}: got .*allowed: "):
            operator(**{**given, name: wrong})


@pytest.mark.parametrize("call", [call for call in CALLS if "q" in arguments(call, "reference")])
def test_heads_that_do_not_divide_are_named(call, mode):
    operator, given = getattr(cute_kernels, call), arguments(call, mode)
    for name in ("q", "k"):
        given[name] = torch.cat([given[name]] * 3, 1)
    with pytest.raises(InvalidArgumentError, match="3 key heads, 2 value heads"):
        operator(**given)


def test_a_dimension_of_one_may_have_any_stride():
    heads = torch.zeros(2, 6, 128)[:, ::3]
    validation.check_rows("q", heads[:, :1])
    with pytest.raises(InvalidArgumentError, match="q"):
        validation.check_rows("q", heads)
