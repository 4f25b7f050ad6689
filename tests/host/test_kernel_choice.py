"""Which specialisations the public operators ask for over many shapes: all of them are in the manifest, and they are few.

The operators run on CPU tensors up to the look-up of their kernels, which records the key and launches nothing.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections import defaultdict

import pytest
import torch

from compact_state import cute_kernels
from compact_state.cute_kernels import Checkpoints, DraftLog, conv_launch, delta_rule, layer_launch, verify_launch
from compact_state.cute_kernels.compile import cache
from compact_state.cute_kernels.compile.manifest import manifest
from compact_state.cute_kernels.configs import recurrent, tables

HK, HV, SLOTS, WIDTH = 1, 2, 4, 4
CHANNELS = (2 * HK + HV) * 128
TOKENS = (1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 64, 128)
BATCHES = range(1, 257)
DTYPES = (torch.float32, torch.bfloat16)


class Recorder(defaultdict):
    """Keys asked for, by kernel file; stands in for every look-up of the package. `launches` names the files in order."""

    def __init__(self):
        super().__init__(set)
        self.launches = []

    def lookup(self, kernel_file):
        def look(key):
            self[kernel_file].add(key)
            return lambda *arguments: self.launches.append(kernel_file)

        return look


def kernel_file_of(function):
    """The file a look-up made by `jit_cache` serves, or None for anything else."""
    if getattr(function, "__qualname__", "") != "jit_cache.<locals>.lookup":
        return None
    names = function.__code__.co_freevars
    return function.__closure__[names.index("kernel_file")].cell_contents


@pytest.fixture
def asked(monkeypatch):
    recorder = Recorder()
    for info in pkgutil.iter_modules(cute_kernels.__path__):
        if info.ispkg:
            continue
        module = importlib.import_module(f"{cute_kernels.__name__}.{info.name}")
        if hasattr(module, "uses_kernels"):
            monkeypatch.setattr(module, "uses_kernels", lambda backend, device: backend != "reference")
        for name, value in list(vars(module).items()):
            if file := kernel_file_of(value):
                monkeypatch.setattr(module, name, recorder.lookup(file))
            elif isinstance(value, dict):
                for entry, item in value.items():
                    if file := kernel_file_of(item):
                        monkeypatch.setitem(value, entry, recorder.lookup(file))
    # What is loaded is remembered by shapes; here nothing is loaded, and tensors of no device stand for those of device 0.
    for module in (conv_launch, layer_launch, verify_launch):
        for name in [name for name in vars(module) if name.endswith("_function")]:
            function = getattr(module, name)
            monkeypatch.setattr(module, name, getattr(function, "__wrapped__", function))
    decode = delta_rule.decode_function.__wrapped__
    monkeypatch.setattr(delta_rule, "decode_function", lambda backend, device, *shapes: decode(backend, 0, *shapes))
    before = cache.compile_count
    yield recorder
    assert cache.compile_count == before


def bf16(*shape):
    return torch.zeros(*shape, dtype=torch.bfloat16)


def delta(kda, tokens, rows, dtype):
    """Arguments of a delta-rule operator: q, k, v, gate, b, A_log, dt_bias, state, read ids, write ids."""
    gate = (HV, 128) if kda else (HV,)
    ids = torch.zeros(rows, dtype=torch.int32)
    pool = torch.zeros(SLOTS, HV, 128, 128, dtype=dtype)
    inputs = (
        bf16(tokens, HK, 128),
        bf16(tokens, HK, 128),
        bf16(tokens, HV, 128),
        bf16(tokens, *gate),
        bf16(tokens, HV),
    )
    return (*inputs, torch.zeros(HV), torch.zeros(gate).flatten(), pool, ids, ids)


def bounds(rows, tokens):
    return torch.arange(rows + 1, dtype=torch.int32) * tokens


def decode_all(rows, dtype):
    cute_kernels.gdn_decode(*delta(False, rows, rows, dtype))
    for bound in (None, -5.0):
        cute_kernels.kda_decode(*delta(True, rows, rows, dtype), lower_bound=bound)
    x, weight, windows = bf16(rows, CHANNELS), bf16(CHANNELS, WIDTH), bf16(SLOTS, WIDTH, CHANNELS)
    ids = torch.zeros(rows, dtype=torch.int32)
    cute_kernels.causal_conv1d_decode(x, weight, windows, ids, ids, ids)
    cute_kernels.advance_state_ids(ids, ids.clone(), ids.clone(), num_slots=SLOTS)
    for kda in (False, True):
        _, _, _, gate, b, A_log, dt_bias, pool, *_ = delta(kda, rows, rows, dtype)
        layer = cute_kernels.kda_layer_decode if kda else cute_kernels.gdn_layer_decode
        bias = dt_bias.view(HV, 128) if kda else dt_bias
        layer(x, gate, b, bf16(rows, HV * 128), weight, windows, A_log, bias, torch.ones(128), pool, ids, ids, ids)


def prefill_all(rows, tokens, dtype):
    entries = torch.zeros(rows, dtype=torch.int32)
    for plan in (None, Checkpoints(bounds(rows, 1), entries + 1, entries)):
        for kda, bound in ((False, None), (True, None), (True, -5.0)):
            arguments = (*delta(kda, rows * tokens, rows, dtype), bounds(rows, tokens))
            if kda:
                cute_kernels.kda_prefill(*arguments, lower_bound=bound, checkpoints=plan)
            else:
                cute_kernels.gdn_prefill(*arguments, checkpoints=plan)
        x, weight, windows = bf16(rows * tokens, CHANNELS), bf16(CHANNELS, WIDTH), bf16(SLOTS, WIDTH, CHANNELS)
        ids = torch.zeros(rows, dtype=torch.int32)
        cute_kernels.causal_conv1d_prefill(x, weight, windows, ids, ids, ids, bounds(rows, tokens), checkpoints=plan)


def verify_all(rows, tokens, dtype):
    counts, cu = torch.zeros(rows, dtype=torch.int32), bounds(rows, tokens)
    for kda, bound in ((False, None), (True, None), (True, -5.0)):
        arguments = delta(kda, rows * tokens, rows, dtype)
        log = DraftLog.allocate("kda" if kda else "gdn", rows, HK, HV, CHANNELS)
        A_log, dt_bias, pool, ids, _ = arguments[5:]
        for rounds in (False, True):
            if kda:
                options = {"lower_bound": bound, "round_every_token": rounds}
                cute_kernels.kda_verify(*arguments, cu, log, counts, **options)
                cute_kernels.kda_commit(A_log, dt_bias, pool, ids, ids, log, counts, **options)
            else:
                cute_kernels.gdn_verify(*arguments, cu, log, counts, round_every_token=rounds)
                cute_kernels.gdn_commit(pool, ids, ids, log, counts, round_every_token=rounds)
    x, weight, windows = bf16(rows * tokens, CHANNELS), bf16(CHANNELS, WIDTH), bf16(SLOTS, WIDTH, CHANNELS)
    ids = torch.zeros(rows, dtype=torch.int32)
    cute_kernels.causal_conv1d_verify(x, weight, windows, ids, ids, ids, cu, log, counts)
    cute_kernels.causal_conv1d_commit(windows, ids, ids, ids, log, counts)


def shipped():
    return {(entry.kernel_file, entry.key) for entry in manifest()}


def pairs(asked):
    return {(file, key) for file, keys in asked.items() for key in keys}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_J4_no_count_of_tokens_or_rows_asks_for_a_kernel_that_does_not_ship(asked, dtype):
    for tokens in TOKENS:
        for rows in (1, 2, 3, 65):
            prefill_all(rows, tokens, dtype)
            if tokens <= 8:
                verify_all(rows, tokens, dtype)
            decode_all(rows * tokens, dtype)
    assert pairs(asked) <= shipped()
    assert len(asked) >= 10


@pytest.mark.parametrize("rows", [1, 2, 65])
def test_J1_a_first_call_launches_what_every_call_does(asked, rows, monkeypatch):
    """With nothing tuned and nothing chosen yet: no trial runs on the caller's states."""
    monkeypatch.setenv(tables.ENVIRONMENT, "off")
    tables.forget()
    decode_all(rows, torch.float32)
    first, asked.launches = asked.launches, []
    decode_all(rows, torch.float32)
    tables.forget()
    assert first == asked.launches
    assert sorted(first) == [
        "conv1d_decode", "layer_decode", "layer_decode", *["recurrent_decode"] * 3, "state_ids"
    ]  # fmt: skip


def test_J6_kernels_of_batches_1_to_256_are_a_constant_few(asked):
    for dtype in DTYPES:
        for rows in BATCHES:
            decode_all(rows, dtype)
    counts = defaultdict(set)
    for file, key in pairs(asked):
        counts[file, getattr(key, "kind", ""), getattr(key, "state", ""), getattr(key, "weight", "")].add(key)
    assert pairs(asked) <= shipped()
    assert max(len(keys) for keys in counts.values()) <= 3
    assert sum(len(keys) for keys in counts.values()) <= 40


def test_the_recorder_sees_a_key_that_does_not_ship(asked, monkeypatch):
    from compact_state.cute_kernels.configs import recurrent

    odd = recurrent.RecurrentDecodeKey("gdn", "float32", 1, 1, False)
    monkeypatch.setattr(recurrent, "choose", lambda *arguments: odd)
    decode_all(1, torch.float32)
    assert pairs(asked) - shipped() == {("recurrent_decode", odd)}


def test_large_batches_keep_the_states_they_read():
    """device/kept.py: from 768 pairs of row and head on; layers on fp32 pools and where passes land by turns."""
    for state in ("float32", "bfloat16"):
        for heads in (1, 767, 768, 16384):
            assert recurrent.heuristic("gdn", state, heads).kept == (heads >= 768)
    layers = [entry.key for entry in manifest() if entry.kernel_file == "layer_decode"]
    assert {key.landed for key in layers if key.kept and key.state == "bfloat16"} == {2, 4, 5, 6, 7, 8}
    assert {(key.state, key.landed) for key in layers if not key.kept} == {("bfloat16", 0)}
    assert all(key.kept for key in layers if key.state == "float32")
