"""StateLayout, handles and prefix hashes: pure functions with properties."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compact_state.pool.errors import ConfigError
from compact_state.pool.handles import SlotHandle
from compact_state.pool.layout import ALIGNMENT, LayerSpec, StateLayout
from compact_state.pool.prefix import PrefixKey

LAYERS = st.builds(
    LayerSpec,
    channels=st.integers(1, 5000),
    value_heads=st.integers(1, 9),
    key_dim=st.sampled_from([3, 64, 128]),
    value_dim=st.sampled_from([5, 128, 192]),
    conv_width=st.integers(1, 5),
    conv_dtype=st.sampled_from(["bfloat16", "float32"]),
    state_dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    kind=st.sampled_from(["gdn", "kda"]),
)


@given(st.lists(LAYERS, min_size=1, max_size=6))
def test_parts_are_aligned_and_disjoint_and_fill_the_slot(layers: list[LayerSpec]) -> None:
    layout = StateLayout.of(layers)
    end = 0
    for span in layout.spans:
        assert span.offset % ALIGNMENT == 0
        assert 0 <= span.offset - end < ALIGNMENT
        end = span.offset + span.size
    assert layout.slot_bytes % ALIGNMENT == 0
    assert 0 <= layout.slot_bytes - end < ALIGNMENT
    assert [(s.layer, s.part) for s in layout.spans] == [(i, p) for i in range(len(layers)) for p in ("conv", "state")]
    assert layout.conv_span(0).size == layers[0].conv_bytes
    assert layout.state_span(len(layers) - 1).size == layers[-1].state_bytes


@given(LAYERS, LAYERS)
def test_digest_is_equal_iff_the_layers_are(a: LayerSpec, b: LayerSpec) -> None:
    assert (StateLayout.of([a]).digest == StateLayout.of([b]).digest) == (a == b)
    assert StateLayout.of([a, b]).digest != StateLayout.of([b, a]).digest or a == b


def test_the_digest_of_a_layout_is_that_of_every_release() -> None:
    """States in a store are found by it: who changes bytes of a slot, or what the digest is made of, changes this on purpose."""
    layers = [LayerSpec(24, 3, 8, 4, 4), LayerSpec(17, 1, 5, 3, 2, "float32", "bfloat16", "kda")]
    assert StateLayout.of(layers).digest == "d60bcc5d5ddd337e5378addda9337a36"
    assert LayerSpec(24, 3) == LayerSpec(24, 3, 128, 128, 4, "bfloat16", "float32", "gdn")
    assert StateLayout.of([LayerSpec(24, 3)]).slot_bytes == 256 + 3 * 128 * 128 * 4


def test_known_sizes_of_a_real_model() -> None:
    """GLM-5.3-Flash at TP4: 34 layers, 16 heads, 4 conv columns."""
    layout = StateLayout.uniform(34, channels=6144, value_heads=16, kind="kda")
    assert layout.slot_bytes == 34 * (4 * 6144 * 2 + 16 * 128 * 128 * 4)
    assert layout.payload_bytes == layout.slot_bytes


@pytest.mark.parametrize("field", ["channels", "value_heads", "key_dim", "value_dim", "conv_width"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_bad_sizes_are_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        LayerSpec(**{"channels": 8, "value_heads": 1, field: value})  # type: ignore[arg-type]


def test_bad_names_are_named() -> None:
    with pytest.raises(ConfigError, match="state_dtype"):
        LayerSpec(8, 1, state_dtype="int8")
    with pytest.raises(ConfigError, match="conv_dtype"):
        LayerSpec(8, 1, conv_dtype="float64")
    with pytest.raises(ConfigError, match="kind"):
        LayerSpec(8, 1, kind="mamba")
    with pytest.raises(ConfigError, match="layers"):
        StateLayout.of([])
    with pytest.raises(ConfigError, match="layer"):
        StateLayout.uniform(2, channels=8, value_heads=1).conv_span(2)


@given(st.integers(0, 2**20 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**12 - 1))
def test_handles_pack_into_64_bits_and_back(slot: int, generation: int, incarnation: int) -> None:
    handle = SlotHandle(slot, generation, incarnation)
    assert 0 <= handle.pack() < 2**64
    assert SlotHandle.unpack(handle.pack()) == handle


def test_a_number_that_is_no_handle_is_refused() -> None:
    for packed in (-1, 1 << 64):
        with pytest.raises(ConfigError, match="packed"):
            SlotHandle.unpack(packed)


def test_I19_digest_is_the_same_in_every_process_and_unambiguous() -> None:
    code = (
        "from compact_state.pool.prefix import PrefixKey as K;"
        "print(K(range(100), adapter='a', media=[(3, 9, b'm')]).digest())"
    )
    seen = set()
    for seed in ("0", "1", "77", "random"):
        run = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        seen.add(run.stdout.strip())
    assert len(seen) == 1
    assert len(seen.pop()) == 32
    assert PrefixKey([1, 23]).digest() != PrefixKey([12, 3]).digest()
    assert PrefixKey([1], adapter=None).digest() != PrefixKey([1], adapter="").digest()
    assert PrefixKey([1], adapter="n").digest() != PrefixKey([1]).digest()


@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=12),
    st.sampled_from([None, "", "lora"]),
    st.lists(st.integers(0, 300), min_size=1, max_size=12),
    st.sampled_from([None, "", "lora"]),
)
def test_digests_differ_iff_the_identity_does(a: list[int], x: str | None, b: list[int], y: str | None) -> None:
    same = PrefixKey(a, adapter=x).digest() == PrefixKey(b, adapter=y).digest()
    assert same == ((a, x) == (b, y))


def test_a_prefix_hashes_like_the_prompt_cut_there() -> None:
    media = [(2, 4, b"cat"), (6, 8, b"dog")]
    key = PrefixKey(range(10), media=media)
    assert key.digest(5) == PrefixKey(range(5), media=media[:1]).digest()
    assert key.digest(2) == PrefixKey(range(2)).digest()
    assert key.digest(8) != PrefixKey(range(8), media=[media[0], (6, 8, b"cow")]).digest()


def test_bad_keys_are_named() -> None:
    with pytest.raises(ConfigError, match="tokens"):
        PrefixKey([2**31])
    with pytest.raises(ConfigError, match="tokens"):
        PrefixKey(b"abc")
    for spans in ([(3, 3, b"x")], [(0, 4, b"x"), (2, 5, b"y")], [(0, 11, b"x")], [(0, 1, b"")]):
        with pytest.raises(ConfigError, match="media"):
            PrefixKey(range(10), media=spans)
    with pytest.raises(ConfigError, match="position"):
        PrefixKey([1]).digest(2)
