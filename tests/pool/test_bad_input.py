"""What the pool is given and cannot serve: a ConfigError that names the argument, what it was and what is allowed."""

from collections.abc import Callable

import pytest
import torch

from compact_state.pool import (
    UNRESOLVED,
    CheckpointIndex,
    ConfigError,
    LayerSpec,
    Ledger,
    Lifecycle,
    PrefixKey,
    SlotHandle,
    StateIdTable,
    StateLayout,
    StatePool,
    StepRow,
    plan_capacity,
)
from compact_state.pool.invariants import check
from compact_state.pool.mooncake import MooncakeConfig
from compact_state.pool.store_keys import StoreIdentity

LAYOUT = StateLayout.uniform(1, channels=64, value_heads=2, key_dim=32, value_dim=32)
NO_CUDA = "there is no CUDA device" if not torch.cuda.device_count() else "cuda:0 .. "


def ledger(**options: object) -> Callable[[], object]:
    return lambda: Ledger(**{"num_slots": 4, **options})  # type: ignore[arg-type]


def layer(**options: object) -> Callable[[], object]:
    return lambda: LayerSpec(**{"channels": 64, "value_heads": 2, **options})  # type: ignore[arg-type]


def index(**options: object) -> Callable[[], object]:
    return lambda: CheckpointIndex(Ledger(4), **options)  # type: ignore[arg-type]


def capacity(**options: object) -> Callable[[], object]:
    given = {"model": "glm-5.3-flash", "max_batch": 4, "checkpoint_slots": 4, **options}
    return lambda: plan_capacity(given.pop("model"), **given)  # type: ignore[arg-type]


def second_index() -> object:
    CheckpointIndex(shared := Ledger(4))
    return CheckpointIndex(shared)


def fence_of_rank(rank: int) -> None:
    submitted = Ledger(4)
    submitted.submit(submitted.begin_step(), [])
    submitted.step_done(1, rank)


CASES: list[tuple[str, object, str, Callable[[], object]]] = [
    *(
        (name, value, "an int, at least" if name != "num_slots" and name != "reserved" else " .. ", ledger(**{name: value}))
        for name, value in (
            ("num_slots", 0), ("num_slots", 2.5), ("num_slots", "8"), ("num_slots", True), ("num_slots", 1 << 21),
            ("reserved", 4), ("reserved", -1), ("ranks", 0), ("ranks", 1.5), ("fence_ranks", 0), ("max_puts", -1),
            ("max_gets", 1.5), ("max_publishes_per_step", -1),
        )
    ),
    ("policy", "never", "late, early", ledger(policy="never")),
    *(
        (name, value, "an int, at least 1", layer(**{name: value}))
        for name, value in (("channels", 0), ("value_heads", -2), ("key_dim", 1.5), ("conv_width", "4"))
    ),
    ("state_dtype", "float64", "float32, bfloat16, float16", layer(state_dtype="float64")),
    ("conv_dtype", "int8", "float32, bfloat16, float16", layer(conv_dtype="int8")),
    ("kind", "mamba", "gdn, kda", layer(kind="mamba")),
    ("num_layers", 0, "at least 1", lambda: StateLayout.uniform(0, channels=64, value_heads=2)),
    ("layers", "none", "at least one", lambda: StateLayout.of([])),
    ("layers", "int", "LayerSpec", lambda: StateLayout.of([1])),  # type: ignore[list-item]
    ("layer", 1, "0 .. 0", lambda: LAYOUT.state_span(1)),
    ("layout", "str", "a StateLayout", lambda: StatePool("layout", 4)),  # type: ignore[arg-type]
    ("device", "tpu", NO_CUDA, lambda: StatePool(LAYOUT, 4, device="tpu")),
    ("device", "meta", NO_CUDA, lambda: StatePool(LAYOUT, 4, device="meta")),
    ("device", "cuda:99", NO_CUDA, lambda: StatePool(LAYOUT, 4, device="cuda:99")),
    ("device", "cuda:99", NO_CUDA, lambda: StateIdTable(4, device="cuda:99")),
    ("max_rows", 1.5, "at least 1", lambda: StateIdTable(1.5)),  # type: ignore[arg-type]
    ("depth", 0, "at least 1", lambda: StateIdTable(4, depth=0)),
    ("tokens", "'str' object", "int32", lambda: PrefixKey([1, "a"])),  # type: ignore[list-item]
    ("tokens", "greater than maximum", "int32", lambda: PrefixKey([2**31])),
    ("tokens", "3 bytes", "a multiple of 4", lambda: PrefixKey(b"abc")),
    ("tokens", "3 bytes", "a multiple of 4", lambda: PrefixKey(bytearray(b"abc"))),  # type: ignore[arg-type]
    ("media", "(0, 2)", "hashed spans", lambda: PrefixKey([1, 2], media=[(0, 2)])),  # type: ignore[list-item]
    ("adapter", 3, "a name, or None", lambda: PrefixKey([1], adapter=3)),  # type: ignore[arg-type]
    ("media", "(0, 3", "within 2 tokens", lambda: PrefixKey([1, 2], media=[(0, 3, b"x")])),
    ("media", "'x'", "hashed spans", lambda: PrefixKey([1, 2], media=[(0, 1, "x")])),  # type: ignore[list-item]
    ("budget_slots", -1, "at least 0", index(budget_slots=-1)),
    ("budget_slots", 1.5, "at least 0", index(budget_slots=1.5)),
    ("budget_bytes", -5, "at least 0", index(budget_bytes=-5, slot_bytes=4)),
    ("slot_bytes", None, "needed with budget_bytes", index(budget_bytes=5)),
    ("max_ghosts", -1, "at least 0", index(max_ghosts=-1)),
    ("ledger", "one with an index", "one index a ledger", second_index),
    ("rank", -1, "0 .. 0", lambda: fence_of_rank(-1)),
    ("rank", 1, "0 .. 0", lambda: fence_of_rank(1)),
    ("ledger", "another", "one ledger", lambda: Lifecycle(Ledger(4), CheckpointIndex(Ledger(4)))),
    ("model", "gpt-2", "glm-5.3-flash", capacity(model="gpt-2")),
    ("tp", 3, "a divisor of", capacity(tp=3)),
    ("tp", "'2'", "at least 1", capacity(tp="2")),
    ("tp", 2.0, "at least 1", capacity(tp=2.0)),
    ("model", None, "a ModelPreset", capacity(model=None)),
    ("max_batch", 2.5, "at least 1", capacity(max_batch=2.5)),
    ("drafts", 8, "0 .. 7", capacity(drafts=8)),
    ("memory_bytes", -1, "at least 0", capacity(checkpoint_slots=None, memory_bytes=-1)),
    ("weights", "''", "never names other weights", lambda: StoreIdentity("model", "")),
    ("tenant", 3, "a string", lambda: StoreIdentity("model", "w", tenant=3)),  # type: ignore[arg-type]
    ("master", "host:70000", "host:port", lambda: MooncakeConfig("host:70000")),
    ("segment_bytes", -1, "at least 0", lambda: MooncakeConfig("host:1", segment_bytes=-1)),
    ("master", None, "host:port", lambda: MooncakeConfig(None)),  # type: ignore[arg-type]
    ("packed", "x", "unsigned 64-bit", lambda: SlotHandle.unpack("x")),  # type: ignore[arg-type]
    ("packed", -1, "unsigned 64-bit", lambda: SlotHandle.unpack(-1)),
]  # fmt: skip


@pytest.mark.parametrize(("argument", "given", "allowed", "call"), CASES, ids=lambda value: str(value)[:24])
def test_the_error_names_argument_value_and_what_is_allowed(
    argument: str, given: object, allowed: str, call: Callable[[], object]
) -> None:
    with pytest.raises(ConfigError) as caught:
        call()
    assert caught.value.argument == argument
    text = str(caught.value)
    assert text.startswith(f"{argument}: got ")
    assert str(given) in text
    assert allowed in text.partition("; allowed: ")[2]


def test_a_step_of_negative_tokens_changes_nothing() -> None:
    life = Lifecycle(ledger := Ledger(4), CheckpointIndex(ledger))
    request = life.add("a", PrefixKey(range(9)))
    assert life.admit(request)
    before = ledger.dump()
    with pytest.raises(ConfigError, match="counts: got -3; allowed: 0 or more tokens, or UNRESOLVED"):
        life.plan([StepRow(request, -3)])
    assert ledger.dump() == before
    check(ledger, life.index)
    life.plan([StepRow(request, UNRESOLVED)])
