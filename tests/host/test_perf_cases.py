"""The benchmark registry: floors against hand-computed figures, the workload grammar, the fixed matrix."""

from __future__ import annotations

import pytest

from compact_state.perf import cases, work
from compact_state.perf.cases import Case, registry, select, workload
from compact_state.perf.geometries import GEOMETRIES, PRIMARY, geometry

COPY_TB_S = 4.27


def floor_us(case: Case) -> float:
    return case.work.bytes / COPY_TB_S / 1e6


@pytest.mark.parametrize(
    ("op", "name", "load", "dtype", "expected"),
    [
        # Floors at 4.27 TB/s, computed by hand for the peers' baselines.
        ("gdn_decode", "Q1", "B8", "float32", 7.9),
        ("gdn_decode", "Q1", "B8", "bfloat16", 3.9),
        ("gdn_decode", "Q1", "B64", "float32", 62.9),
        ("gdn_decode", "Q1", "B256", "bfloat16", 126.0),
        ("gdn_decode", "Q3", "B64", "float32", 31.4),
        ("kda_decode", "G1", "B64", "bfloat16", 15.7),
        ("kda_decode", "G4", "B256", "bfloat16", 126.0),
        ("gdn_prefill", "Q1", "1x8192", "float32", 49.0),
        ("gdn_prefill", "Q1", "1x32768", "float32", 195.0),
        ("gdn_prefill", "Q3", "1x8192", "float32", 20.0),
        ("gdn_prefill", "Q4", "1x8192", "float32", 10.0),
        ("gdn_prefill", "Q5", "1x8192", "float32", 65.0),
        ("causal_conv1d_prefill", "Q1", "1x8192", "bfloat16", 63.0),
        ("causal_conv1d_decode", "Q1", "B256", "bfloat16", 5.9),
        ("causal_conv1d_decode", "Q1", "B64", "bfloat16", 1.5),
    ],
)
def test_floor_matches_hand_computed(op: str, name: str, load: str, dtype: str, expected: float) -> None:
    case = Case(op, geometry(name), workload(load), dtype)
    assert floor_us(case) == pytest.approx(expected, rel=0.03)


def test_kda_prefill_moves_1284_bytes_a_token_and_head() -> None:
    g = geometry("G1")
    assert work.token_bytes(g) / g.hv == pytest.approx(1284, abs=2)  # beta is read as a bf16 logit, not in fp32


def test_verify_floor_is_one_read_one_write_and_the_log() -> None:
    g = geometry("Q1")
    states = 64 * 2 * 32 * 128 * 128 * 4
    # decode_design.md 3.2: 4,096 + 16,384 + 128 bytes a token; 6 written and 3 read a row.
    log = 64 * 9 * (4096 + 16384 + 128)
    tokens = 64 * 6 * work.token_bytes(g)
    assert work.verify(g, "float32", 64, 6, 64 * 3).bytes == states + log + tokens + 64 * 8


def test_prefill_floor_is_every_token_and_the_state_of_every_sequence_in_and_out() -> None:
    g, states = geometry("G1"), 2 * 4 * 16 * 128 * 128 * 4
    assert work.prefill(g, "float32", (2048,) * 4).bytes == 8192 * work.token_bytes(g) + states


def test_layer_floor_is_the_projection_row_the_state_and_four_columns_of_the_window() -> None:
    g = geometry("Q1")  # q | k | v of 64 heads, a and b of 32, z and the output of 32
    row = 64 * 128 + 2 * 32 + 2 * 32 * 128
    states, window = 2 * 32 * 128 * 128 * 4, 4 * 64 * 128
    assert work.layer(g, "float32", 8).bytes == 8 * (2 * row + states + 2 * window + 8)


def test_conv_floor_is_each_row_in_and_out_and_the_live_columns_of_the_windows() -> None:
    row = 8192 * 2
    packed = work.conv_prefill(geometry("Q1"), (100, 28), 3)
    assert (packed.bytes, packed.flops) == (128 * 2 * row + (2 * 2 + 3) * 3 * row, 128 * 8192 * 8)
    step = work.conv_decode(geometry("Q1"), 5)
    assert (step.bytes, step.flops) == (5 * (2 + 3 + 1) * row, 5 * 8192 * 8)


def test_commit_and_layer_drafts_move_what_was_accepted() -> None:
    g, matrix = geometry("Q1"), 128 * 128
    token = 16 * 128 * 2 + 32 * 128 * 4 + 32 * 4
    folded = work.commit(g, "bfloat16", 4, 6)
    assert folded.bytes == 4 * (2 * 32 * matrix * 2 + 8) + 6 * token
    assert folded.flops == 32 * 6 * 3 * matrix
    row, inputs = (8192 + 32 + 32 + 2 * 32 * 128) * 2, 8192 * 2
    drafts = work.layer(g, "float32", 4, 3, 6)
    windows = 4 * 3 * inputs + 6 * inputs
    assert drafts.bytes == 4 * (3 * row + 2 * 32 * matrix * 4 + 8) + windows + (4 * 3 + 6) * (token + inputs)
    assert drafts.flops == 4 * 3 * (32 * 8 * matrix + 8192 * 8) + 6 * 32 * 3 * matrix


def test_a_checkpoint_adds_one_state() -> None:
    g = geometry("Q1")
    plain, kept = (Case("gdn_prefill", g, workload(w), "float32").work for w in ("4x2048", "4x2048+ckpt512"))
    assert kept.bytes - plain.bytes == 16 * work.state_bytes(g, "float32")


def test_prefill_flops_match_the_study() -> None:
    assert Case("gdn_prefill", geometry("Q1"), workload("1x8192"), "float32").work.flops == pytest.approx(
        38.7e9, rel=0.01
    )
    assert Case("gdn_prefill", geometry("Q5"), workload("1x8192"), "float32").work.flops == pytest.approx(
        55.8e9, rel=0.03
    )


def test_geometries_are_the_fixed_matrix() -> None:
    channels = {"G1": 6144, "G2": 3072, "G3": 24576, "G4": 12288, "G6": 4608}
    channels |= {"Q1": 8192, "Q2": 2048, "Q3": 3072, "Q4": 1536, "Q5": 10240, "Q6": 2560, "Q7": 6144}
    assert {name: geometry(name).channels for name in channels} == channels
    assert all(g.hv % g.hk == 0 and (g.kind == "kda") == (g.id[0] == "G" or g.id == "32/32") for g in GEOMETRIES)
    with pytest.raises(KeyError, match="allowed: G1"):
        geometry("Z9")


@pytest.mark.parametrize(
    ("name", "lengths", "checkpoints"),
    [
        ("B3", (1, 1, 1), 0),
        ("B2T6", (6, 6), 0),
        ("28672+4096", (28672, 4096), 0),
        ("60x1+2000+48", (1,) * 60 + (2000, 48), 0),
        ("2x1300+ckpt512", (1300, 1300), 4),
    ],
)
def test_workload_grammar(name: str, lengths: tuple[int, ...], checkpoints: int) -> None:
    assert (workload(name).lengths, workload(name).checkpoints) == (lengths, checkpoints)


def test_ragged_is_the_same_list_every_time_and_has_the_awkward_lengths() -> None:
    lengths = workload("ragged64").lengths
    assert lengths == workload("ragged64").lengths
    assert len(lengths) == 64
    assert {1, 15, 16, 17, 63, 64, 65, 127} <= set(lengths) <= set(range(1, 129))


@pytest.mark.parametrize("bad", ["", "B", "8192x", "1x8192+", "B4+1x2", "ckpt"])
def test_workload_rejects(bad: str) -> None:
    with pytest.raises(ValueError, match="allowed"):
        workload(bad)


def test_registry_holds_the_matrices() -> None:
    names = [case.name for case in registry()]
    assert len(names) == len(set(names))
    for name in PRIMARY:
        g = geometry(name)
        for batch in cases.BATCHES:
            assert f"{g.kind}_decode:{name}:B{batch}:f32" in names
            assert f"{g.kind}_decode:{name}:B{batch}:bf16" in names
        for accepted in (0, 3, 6):
            assert f"{g.kind}_verify:{name}:B64T6:f32:a{accepted}" in names
    for name, kind in (("Q1", "gdn"), ("G1", "kda")):
        for batch in (1, 8, 32, 64, 128):
            for tokens in range(2, 9):
                assert f"{kind}_verify:{name}:B{batch}T{tokens}:bf16:arandom" in names
    for name in ("Q1", "Q3", "Q4", "Q5", "Q7"):
        for load in ("1x2048", "1x32768", "28672+4096", "ragged64", "4x2048+ckpt512"):
            assert f"gdn_prefill:{name}:{load}:f32" in names
    for name in ("G2", "G6", "G1", "32/32", "G3"):
        for gates in cases.GATES:
            assert f"kda_prefill:{name}:32x1024:f32:{gates}" in names
    assert {case.file for case in registry()} == {"decode", "verify", "gdn_prefill", "kda_prefill", "conv"}


def test_random_accepted_counts_are_fixed_and_in_range() -> None:
    case = Case("gdn_verify", geometry("Q1"), workload("B32T5"), "float32", None, cases.RANDOM)
    assert case.accepted_counts == case.accepted_counts
    assert set(case.accepted_counts) <= set(range(1, 6))
    assert len(set(case.accepted_counts)) > 1


def test_select_names_what_is_allowed() -> None:
    assert {case.op for case in select("gdn_decode,kda_decode", "B64")} == {"gdn_decode", "kda_decode"}
    assert 0 < len(select(quick=True)) < len(select()) / 10
    with pytest.raises(ValueError, match="allowed: gdn_decode"):
        select("gdn_decoder")
    with pytest.raises(ValueError, match="no case"):
        select("gdn_decode", "no such case")
