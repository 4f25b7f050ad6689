"""Layer steps on a CPU: named errors before anything changes, and the references behind backend="auto"."""

from __future__ import annotations

import pytest
import torch

from compact_state.cute_kernels import DraftLog, gdn_layer_decode, kda_layer_decode, reference
from compact_state.cute_kernels.configs import layer as configs
from compact_state.cute_kernels.configs.verify import choose_verify
from compact_state.cute_kernels.errors import InvalidArgumentError
from compact_state.cute_kernels.layer_launch import check_arguments
from compact_state.cute_kernels.reference.datasets import cu_seqlens, ids

N, HK, HV, K, V, W, S = 3, 2, 4, 8, 16, 4, 5
C = 2 * HK * K + HV * V
LAYER = {"gdn": gdn_layer_decode, "kda": kda_layer_decode}


def arguments(kind, tokens=N):
    rng = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(*shape, generator=rng)

    gate = (HV,) if kind == "gdn" else (HV, K)
    return {
        "x": normal(tokens, C), "a" if kind == "gdn" else "g": normal(tokens, *gate), "b": normal(tokens, HV),
        "z": normal(tokens, HV * V), "conv_weight": normal(C, W), "conv_state": normal(S, W, C), "A_log": normal(HV),
        "dt_bias": normal(*gate), "norm_weight": normal(V), "state": normal(S, HV, V, K), "read_ids": ids(0, 1, -1),
        "write_ids": ids(0, 2, -1), "positions": ids(4, 9, 0),
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_auto_runs_the_reference_here(kind):
    ours, theirs = arguments(kind), arguments(kind)
    oracle = reference.gdn_layer_decode if kind == "gdn" else reference.kda_layer_decode
    out = torch.empty(N, HV * V)
    assert LAYER[kind](**ours, eps=0.1, conv_bias=torch.ones(C), gate_activation="sigmoid", out=out) is out
    expected = oracle(**theirs, eps=0.1, conv_bias=torch.ones(C), gate_activation="sigmoid")
    assert torch.equal(out, expected)
    assert torch.equal(ours["state"], theirs["state"])
    assert torch.equal(ours["conv_state"], theirs["conv_state"])
    assert not out[2].any()


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_verify_takes_all_three_of_its_arguments(kind):
    verify = {
        "cu_seqlens": cu_seqlens([2, 1, 1]),
        "draft_log": DraftLog.allocate(kind, N, HK, HV, C, head_dim_k=K, head_dim_v=V, dtype=torch.float32),
        "num_accepted": ids(0, 0, 0),
    }
    assert LAYER[kind](**arguments(kind, 4), **verify).shape == (4, HV * V)
    for name in verify:
        given = {key: value for key, value in verify.items() if key != name}
        with pytest.raises(InvalidArgumentError, match="all three"):
            LAYER[kind](**arguments(kind, 4), **given)
    unlogged = DraftLog.allocate(kind, N, HK, HV, None, head_dim_k=K, head_dim_v=V, dtype=torch.float32)
    with pytest.raises(InvalidArgumentError, match="draft_log"):
        LAYER[kind](**arguments(kind, 4), **{**verify, "draft_log": unlogged})


def test_what_only_the_references_serve_is_refused_by_name():
    given = arguments("gdn")
    with pytest.raises(NotImplementedError, match="head sizes K=8, V=16"):
        check_arguments(
            "gdn_layer_decode",
            tuple(given.values()),
            None,
            "silu",
            None,
            None,
            1e-6,
            None,
            None,
            kda=False,
            kernels=True,
        )


def test_every_choice_is_legal_and_ships():
    shipped = {entry.key: entry.kernel_file for entry in configs.shipped()}
    ruled = set()
    for kind in configs.KINDS:
        for state in configs.STATE_DTYPES:
            for weight in configs.WEIGHT_DTYPES:
                waves = (configs.SMS * most for most, _ in configs.WAVES[:-1])
                edges = (*configs.ONE_WAVE, configs.STREAMED_HEADS, *waves)
                edges = (edge + step for edge in edges for step in (-1, 0, 1))
                for heads in (0, 1, *edges, 10**6):
                    key = configs.heuristic(kind, state, weight, heads)
                    ruled.add(key)
                    assert shipped[key] == "layer_decode"
                    assert shipped[configs.choose(kind, state, weight, heads)] == "layer_decode"
                for heads in (1, configs.LATE_VERIFY_HEADS, configs.LATE_VERIFY_HEADS + 1, 10**6):
                    verify = configs.choose_verify_layer(kind, state, weight, heads)
                    ruled.add(verify)
                    assert shipped[verify] == configs.verify_file(verify)
                    assert verify.rejection() is None
                    assert verify.verify.tile == 128, "a norm over V takes a block that has all of it"
                    assert verify.verify.wy == choose_verify(kind, state, heads).wy, (
                        "the bare verify's bits need its form"
                    )
    assert len(ruled) == 51
    for key, kernel in shipped.items():  # by rule or from a table
        if kernel == "layer_decode":
            assert key.rejection() is None
            assert key in configs.candidates(key.kind, key.state, key.weight)
            assert key.shared_bytes() <= 76 * 1024
        else:
            assert key in ruled


def test_verify_keys_that_do_not_fit_say_why():
    keys = [configs.LayerVerifyKey("kda_bounded", "float32", "bfloat16", blocks) for blocks in (2, 3)]
    assert keys[0].rejection() is None
    assert "shared memory" in (keys[1].rejection() or "")


@pytest.mark.parametrize(("rows", "warps"), [(3, 8), (2, 2), (4, 32), (2, 6)])
def test_illegal_tiles_say_why(rows, warps):
    assert configs.LayerDecodeKey("gdn", "float32", "bfloat16", rows, warps).rejection()
