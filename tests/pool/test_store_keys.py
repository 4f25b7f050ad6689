"""Store keys and headers: equal means equal bytes, and everything that changes the bytes changes the key."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from compact_state.pool import ConfigError, ErrorClass, PrefixKey, StateLayout
from compact_state.pool.store_keys import HEADER_BYTES, Header, HeaderFault, StateKeys, StoreIdentity

IDENTITY = StoreIdentity("org/model 9B", "rev-1", draft="draft-1", tenant="t", variant="kv8")
LAYOUT = StateLayout.uniform(2, channels=64, value_heads=2, key_dim=32, value_dim=32)
KEY = PrefixKey(range(100), adapter="lora-1", media=[(10, 20, b"hash")])


def text(identity=IDENTITY, layouts=(LAYOUT.digest,) * 2, key=KEY, position=64, rank=0):
    keys = StateKeys(identity, layouts)
    (name,) = keys.names(key, [position])
    return keys.of_rank(name, rank)


def other_layout(**change):
    return (
        StateLayout.uniform(2, **{"channels": 64, "value_heads": 2, "key_dim": 32, "value_dim": 32, **change}).digest,
    ) * 2


def test_I22_each_part_of_the_identity_changes_the_key():
    keys = [
        text(),
        *(text(replace(IDENTITY, **{field: "other"})) for field in ("model", "weights", "draft", "tenant", "variant")),
        text(layouts=other_layout(state_dtype="bfloat16")),
        text(layouts=other_layout(key_dim=64)),
        text(layouts=other_layout(kind="kda")),
        text(layouts=other_layout(conv_width=3)),
        text(layouts=(LAYOUT.digest,)),
        text(layouts=(LAYOUT.digest,) * 4),
        text(rank=1),
        text(position=63),
        text(key=PrefixKey(range(100), adapter="lora-1@other-weights", media=KEY.media)),
        text(key=PrefixKey(range(100), media=KEY.media)),
        text(key=PrefixKey(range(100), adapter="lora-1", media=[(10, 20, b"hush")])),
        text(key=PrefixKey(range(100), adapter="lora-1", media=[(10, 21, b"hash")])),
        text(key=PrefixKey(range(100), adapter="lora-1")),
        text(key=PrefixKey([0, *range(99)], adapter="lora-1", media=KEY.media)),
    ]
    assert len(set(keys)) == len(keys)
    assert text() == keys[0]
    assert keys[0].startswith("cs1:org-model-9B:64:")
    assert keys[0].endswith(":r0of2")


def test_fields_of_the_identity_do_not_run_into_each_other():
    assert text(replace(IDENTITY, tenant="ab", variant="c")) != text(replace(IDENTITY, tenant="a", variant="bc"))


def test_I19_keys_are_the_same_in_every_process():
    program = (
        "from compact_state.pool import PrefixKey\n"
        "from compact_state.pool.store_keys import StateKeys, StoreIdentity\n"
        "keys = StateKeys(StoreIdentity('m', 'w'), ['layout'])\n"
        "for tokens, adapter in (([1, 23], None), ([12, 3], None), ([1, 23], '')):\n"
        "    print(keys.names(PrefixKey(tokens, adapter=adapter), [2])[0].text)\n"
    )
    found = set()
    for seed in ("0", "1"):
        run = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        found.add(run.stdout)
    (lines,) = found
    assert len(set(lines.split())) == 3


def test_a_key_is_that_of_every_release():
    """What is stored is found by it: who changes what a key is made of, or its schema, changes this on purpose."""
    keys = StateKeys(StoreIdentity("a model/of 40 characters and more than that", "rev"), ["aa", "bb"])
    found = [keys.of_rank(name, 1) for name in keys.names(PrefixKey([1, 2, 3, 4, 5], adapter="x"), [2, 5])]
    assert found == [
        "cs1:a-model-of-40-characters-and-more-than-t:2:b5e99acb9945b32c796c7d3fe791da94:r1of2",
        "cs1:a-model-of-40-characters-and-more-than-t:5:1a2bd838cf09c32989b881dc097183ea:r1of2",
    ]
    with pytest.raises(ConfigError, match="layouts"):
        StateKeys(StoreIdentity("m", "w"), [])


def test_names_of_many_positions_are_those_of_each_alone():
    keys = StateKeys(IDENTITY, [LAYOUT.digest])
    positions = [99, 5, 15, 15, 100, 1]
    assert keys.names(KEY, positions) == [keys.names(KEY, [position])[0] for position in positions]
    # Media past the position are no part of the prefix.
    assert keys.names(KEY, [10]) == keys.names(PrefixKey(range(100), adapter="lora-1"), [10])
    for position in (0, 101):
        with pytest.raises(ConfigError, match="positions"):
            keys.names(KEY, [position])


@pytest.mark.parametrize("field", ["model", "weights"])
def test_identity_without_weights_or_model_is_refused(field):
    with pytest.raises(ConfigError, match=field):
        replace(IDENTITY, **{field: ""})


def test_header_comes_back_and_names_every_fault():
    header = Header(text(), step=64, payload_bytes=8704, checksum=2**64 - 1, put_id=7)
    raw = header.pack()
    assert len(raw) == HEADER_BYTES
    expected = {"key": header.key, "step": 64, "payload_bytes": 8704}
    assert Header.check(raw, **expected) == header

    def fault(changed=raw, **change):
        found = Header.check(changed, **{**expected, **change})
        assert isinstance(found, HeaderFault)
        return found.error

    assert fault(key=text(rank=1)) is ErrorClass.MISS
    assert fault(step=63) is ErrorClass.MISS
    assert fault(payload_bytes=8705) is ErrorClass.MISS
    assert fault(bytes(HEADER_BYTES)) is ErrorClass.MISS
    for position in range(HEADER_BYTES):
        changed = bytearray(raw)
        changed[position] ^= 0x10
        assert fault(bytes(changed)) is (ErrorClass.MISS if position < 12 else ErrorClass.DATA)
