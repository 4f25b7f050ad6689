"""What a call launches, and with what, without a GPU: functions behind the public operators, kernels that take notes."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compact_state.cute_kernels import conv_launch, layer_launch, prefill_launch, state_ids, verify_launch
from compact_state.cute_kernels.configs import conv1d
from compact_state.cute_kernels.configs import layer as layer_configs
from compact_state.cute_kernels.errors import InvalidArgumentError
from compact_state.cute_kernels.reference.datasets import ids


@pytest.mark.parametrize("kind", ["gdn", "kda_softplus", "kda_bounded"])
@pytest.mark.parametrize(("tokens", "rows"), [(0, 0), (5, 0), (0, 2), (1, 1), (16, 16), (16, 3), (17, 17), (300, 2)])
def test_rows_of_up_to_16_tokens_go_token_by_token_and_the_others_in_chunks(kind, tokens, rows, monkeypatch):
    """Every row has one kernel, whatever the batch: that is what makes its bits its own."""
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        prefill_launch.verify_launch, "launch_recurrent_prefill",
        lambda kind, *given, max_tokens, overlaps=False, **options: seen.append(("tokens", kind, max_tokens, overlaps)),
    )  # fmt: skip
    for name in ("gdn", "kda"):

        def chunks(*given, min_tokens, name=name, lower_bound=None, **options):
            seen.append(("chunks", name, min_tokens, lower_bound))

        monkeypatch.setattr(getattr(prefill_launch, f"{name}_launch"), "launch_chunked", chunks)
    q, read = torch.zeros(tokens, 1, 128), torch.zeros(rows, dtype=torch.int32)
    bound = -5.0 if kind == "kda_bounded" else None
    options = {"checkpoints": None, "scale": None, "qk_l2norm": True, "lower_bound": bound}
    prefill_launch.launch_prefill(kind, q, *[None] * 7, read, None, None, None, **options)
    if rows == 0:
        assert seen == []
    elif tokens <= 16:
        assert seen == [("tokens", kind, 16, False)]
    else:
        assert seen == [("chunks", kind[:3], 17, bound), ("tokens", kind, 16, True)]


def refuses(function, *given):
    with pytest.raises((ValueError, KeyError)):
        function(*given)


def test_conv_functions_take_what_a_kernel_serves(monkeypatch):
    for name in ("_decode", "_prefill", "_verify"):
        monkeypatch.setattr(conv_launch, name, lambda key: key)
    size, bf16 = torch.Size, torch.bfloat16
    facts = (size((16, 4)), bf16, size((16,)), "silu")
    decode = conv_launch.decode_function.__wrapped__
    key, flags = decode(size((3, 16)), *facts)
    assert (key.symbol()[:22], flags) == ("conv1d_decode_w4_bf16_", conv1d.BIAS | conv1d.SILU)
    assert decode(size((3, 16)), size((16, 2)), bf16, None, None)[1] == 0
    refuses(decode, size((0, 16)), *facts)
    for bad in (
        (size((16, 5)), bf16, None, "silu"),
        (size((16, 4)), torch.float16, None, "silu"),
        (size((16, 4)), bf16, None, "relu"),
        (size((16, 4)), bf16, size((15,)), "silu"),
    ):
        refuses(decode, size((3, 16)), *bad)
        refuses(conv_launch.prefill_function.__wrapped__, size((30, 16)), 3, 4, *bad)
    prefill = conv_launch.prefill_function.__wrapped__
    assert prefill(size((30, 16)), 3, 4, *facts)[1] == conv1d.BIAS | conv1d.SILU
    for bounds in (3, 5):
        refuses(prefill, size((30, 16)), 3, bounds, *facts)


def test_conv_logs_hold_a_row_for_each_sequence_or_have_a_map(monkeypatch):
    monkeypatch.setattr(conv_launch, "_verify", lambda key: key)
    verify, commit = conv_launch.verify_function.__wrapped__, conv_launch.commit_function.__wrapped__
    facts = (torch.Size((16, 4)), torch.bfloat16, None, None)
    log = torch.Size((3, 2, 8))
    assert verify((3, 3, log, log, False), 4, *facts)[1] == 0
    assert verify((5, 3, log, log, True), 6, *facts)[1] == conv1d.MAPPED
    assert commit((2, 3, log, log, False), 4)[1] == 0
    assert commit((5, 3, log, log, True), 4)[1] == conv1d.MAPPED
    for lengths in ((4, 3, log, log, False), (0, 3, log, log, False), (3, 3, log, torch.Size((3, 2, 7)), False)):
        refuses(verify, lengths, lengths[0] + 1, *facts)
        refuses(commit, lengths, 4)
    refuses(verify, (3, 3, log, log, False), 3, *facts)
    refuses(commit, (3, 3, log, log, False), 5)


OPTIONAL = ("num_tokens", "num_accepted", "log_half", "next_write_ids")


@pytest.mark.parametrize("given", [(), *((name,) for name in OPTIONAL), OPTIONAL[:2], OPTIONAL[2:], OPTIONAL])
def test_id_tracking_says_which_tensors_it_was_given(given, monkeypatch):
    seen: list[Any] = []
    monkeypatch.setattr(state_ids, "_advance", lambda key: lambda *arguments: seen.extend(arguments))
    read, write, positions = ids(0, 1), ids(0, 2), ids(5, 6)
    tokens, accepted, half, next_ids = (ids(1, 1) if name in given else None for name in OPTIONAL)
    state_ids._launch(read, write, positions, 9, tokens, accepted, half, next_ids)
    counts = tokens if accepted is None else accepted
    expected = (read, write, positions, *(read if tensor is None else tensor for tensor in (counts, half, next_ids)))
    assert all(a is b for a, b in zip(seen, expected))
    flags = ((counts, state_ids.COUNTS), (half, state_ids.HALF), (next_ids, state_ids.NEXT_IDS))
    assert seen[6:] == [9, sum(flag for tensor, flag in flags if tensor is not None)]
    for slots in (-1, 2**31):
        with pytest.raises(ValueError):
            state_ids._launch(read, write, positions, slots, None, None, None, None)
    state_ids._launch(read, write, positions, 0, None, None, None, None)
    state_ids._launch(read, write, positions, 2**31 - 1, None, None, None, None)
    with pytest.raises(InvalidArgumentError, match="num_tokens"):
        state_ids._launch(read, write, positions, 9, ids(1), ids(1, 1), None, None)


def layer_arguments(kind, rows=3, hk=1, hv=2, log_rows=3, mapped=False):
    """Those that `layer_function` looks at, in the order of the launch."""
    channels = (2 * hk + hv) * 128
    sized = lambda n: SimpleNamespace(numel=lambda: n)
    given = [
        SimpleNamespace(shape=(rows, channels)),
        None,
        None,
        sized(rows * hv * 128),
        SimpleNamespace(dtype=torch.bfloat16),
    ]
    given += [None, None, sized(hv), sized(hv if kind == "gdn" else hv * 128), sized(128)]
    given += [SimpleNamespace(dtype=torch.float32), sized(rows), None, None]
    given += [
        sized(rows + 1),
        SimpleNamespace(shape=(log_rows, 2, 8, hk, 128)),
        None,
        None,
        None,
        sized(log_rows),
        sized(rows),
    ]
    return [*given, layer_configs.NORM_BF16 | (layer_configs.MAPPED if mapped else 0), 0.1, None, 1e-6]


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("kind", ["gdn", "kda_softplus", "kda_bounded"])
def test_a_layer_step_has_a_function_only_for_sizes_that_agree(kind, verify, monkeypatch):
    monkeypatch.setattr(layer_launch, "runs_kernels", lambda backend, name, x: backend != "reference")
    monkeypatch.setattr(layer_launch, "layer_decode", lambda key: key)
    monkeypatch.setattr(
        layer_launch, "layer_verify", {"layer_verify": lambda key: key, "wy_layer_verify": lambda key: key}
    )
    right = layer_arguments(kind)

    def function(*changes, backend="auto", of=right):
        given = list(of)
        for place, value in changes:
            given[place] = value
        return layer_launch.layer_function(kind, verify, backend, *given)

    assert function().kind == kind
    sized = lambda n: SimpleNamespace(numel=lambda: n)
    wrong = [
        [(0, SimpleNamespace(shape=(3, 256)))],  # no key heads
        [(0, SimpleNamespace(shape=(3, 2 * 128 + 256 + 8)))],
        [(3, sized(3 * 2 * 128 - 1))],
        [(9, sized(64))],
        [(8, sized(3))],
        [(11, sized(0))],
        [(-1, -1e-6)],
        [(-1, math.nan)],
    ]
    if verify:
        logs = [[(15, SimpleNamespace(shape=shape))] for shape in ((3, 2, 8, 2, 128), (3, 2, 9, 1, 128))]
        wrong += [[(14, sized(3))], *logs, [(19, sized(2))]]
    for changes in wrong:
        with pytest.raises((ValueError, KeyError)):
            function(*changes)
    with pytest.raises(ValueError):
        function(backend="reference")
    with pytest.raises(InvalidArgumentError, match="scale"):
        function((-3, math.inf))
    if verify:
        mapped = layer_arguments(kind, log_rows=1, mapped=True)
        assert function(of=mapped).kind == kind
        with pytest.raises(ValueError):
            function((20, sized(2)), of=mapped)


@pytest.mark.parametrize("kind", ["gdn", "kda_softplus", "kda_bounded"])
def test_verify_and_commit_have_a_function_only_for_sizes_that_agree(kind, monkeypatch):
    monkeypatch.setattr(verify_launch, "runs_kernels", lambda backend, name, x: backend != "reference")
    monkeypatch.setattr(
        verify_launch, "verify_kernels", {"recurrent_verify": lambda key: key, "wy_verify": lambda key: key}
    )
    sized = lambda *shape: torch.zeros(shape, device="meta")
    q, hv, rows = sized(5, 1, 128), 2, 3
    bias = sized(hv if kind == "gdn" else hv * 128)
    state, read = sized(4, hv, 128, 128), sized(rows)
    log = [sized(rows, 2, 8, 1, 128), None, None, sized(rows), sized(rows)]
    right = [q, None, None, None, None, sized(hv), bias, state, read, read, sized(rows + 1), *log, read, None]
    right += [False, True, False, 0, None, 0.0]
    for function, wrong in (
        (verify_launch.verify_function, [(10, sized(rows)), (5, sized(3)), (22, math.nan)]),
        (verify_launch.commit_function, []),
    ):
        commit = not wrong
        if commit and kind == "gdn":
            right[6] = None  # its decay stands in the log
        assert function(kind, None, "auto", *right).commit == commit
        wrong += [(6, sized(7)), (8, sized(0)), (11, sized(rows, 2, 9, 1, 128)), (14, sized(2))]
        for place, value in wrong:
            given = list(right)
            given[place] = value
            with pytest.raises((ValueError, KeyError)):
                function(kind, None, "auto", *given)
        with pytest.raises(ValueError):
            function(kind, None, "reference", *right)
        mapped = [*right[:14], sized(1), read, *right[16:18], True, *right[19:]]
        assert function(kind, None, "auto", *mapped)
