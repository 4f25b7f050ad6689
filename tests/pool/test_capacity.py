"""The capacity formula: never more memory than the copying design, never more than what is given.

COMPACT_STATE_SEARCH=10 covers a denser grid of settings (a minute).
"""

import itertools
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compact_state.cute_kernels.draft_log import DraftLog
from compact_state.pool import ConfigError, Ledger, plan_capacity
from compact_state.pool.capacity import copying_slot_bytes, draft_log_bytes, main_text
from compact_state.pool.models import PRESETS, ModelPreset, preset

MODELS = st.sampled_from(sorted(PRESETS))
DTYPES = st.sampled_from(["float32", "bfloat16"])


def divisor(model: ModelPreset, exponent: int) -> int:
    tp = 2**exponent
    while model.key_heads % tp or model.value_heads % tp:
        tp //= 2
    return tp


@settings(deadline=None, max_examples=60)
@given(
    MODELS,
    st.integers(0, 3),
    st.integers(1, 512),
    st.integers(0, 7),
    st.integers(0, 300),
    st.booleans(),
    DTYPES,
    st.integers(1, 4),
    st.integers(0, 1),
)
def test_never_more_memory_than_the_copying_design(
    name: str,
    exponent: int,
    batch: int,
    drafts: int,
    budget: int,
    in_bytes: bool,
    dtype: str,
    depth: int,
    reserved: int,
) -> None:
    model = preset(name)
    tp = divisor(model, exponent)
    size = model.layout(tp, state_dtype=dtype).slot_bytes
    amount = {"checkpoint_bytes": budget * size * 2 // 3} if in_bytes else {"checkpoint_slots": budget}
    plan = plan_capacity(
        model,
        tp=tp,
        max_batch=batch,
        drafts=drafts,
        state_dtype=dtype,
        steps_in_flight=depth,
        reserved=reserved,
        **amount,  # type: ignore[arg-type]
    )
    assert plan.total_bytes <= plan.copying_bytes
    assert plan.num_slots >= reserved + batch + plan.checkpoint_slots
    assert plan.spare_slots >= 0
    if not in_bytes:
        assert plan.checkpoint_slots == budget, "the budget asked for is kept"
    if not drafts:
        assert plan.spare_slots <= 2


@pytest.mark.parametrize(("batch", "spare"), [(1, 2), (16, 2), (17, 4), (64, 8)])
def test_spare_slots_are_one_a_step_in_flight_for_each_16_requests_begun(batch: int, spare: int) -> None:
    plan = plan_capacity("qwen3.5-35b-a3b", max_batch=batch, drafts=3, memory_bytes=2**40, steps_in_flight=2)
    assert plan.spare_slots == spare


#: Batches, drafts, checkpoints, steps in flight.
GRID = ((1, 64, 256), (0, 1, 5), (0, 64), (2,))
DENSE = ((1, 2, 3, 17, 64, 256, 512), range(8), (0, 1, 2, 64, 300), (1, 3))


def test_no_setting_of_a_grid_takes_more_than_the_copying_design() -> None:
    grid = DENSE if int(os.environ.get("COMPACT_STATE_SEARCH", "1")) >= 10 else GRID
    covered = 0
    for model, tp, dtype in itertools.product(PRESETS.values(), (1, 2, 4, 8), ("float32", "bfloat16")):
        if tp != divisor(model, tp.bit_length() - 1):
            continue
        size = model.layout(tp, state_dtype=dtype).slot_bytes
        for batch, drafts, budget, depth, reserved in itertools.product(*grid, (0, 1)):
            for amount in ({"checkpoint_slots": budget}, {"checkpoint_bytes": budget * size * 2 // 3}):
                plan = plan_capacity(
                    model, tp=tp, max_batch=batch, drafts=drafts, state_dtype=dtype, steps_in_flight=depth,
                    reserved=reserved, **amount,
                )  # fmt: skip
                covered += 1
                assert plan.total_bytes <= plan.copying_bytes
                assert plan.checkpoint_slots >= plan.copying_checkpoint_slots
    print(f"{covered} settings")


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.sampled_from(["gdn", "kda"]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 300),
    st.integers(0, 7),
    DTYPES,
    st.integers(0, 2**38),
)
def test_G16_live_and_checkpoints_and_rings_fit_the_memory(
    stages: list[int], kind: str, heads: int, group: int, batch: int, drafts: int, dtype: str, memory: int
) -> None:
    """Pipeline stages hold different numbers of layers; each has to fit by itself."""
    for layers in stages:
        model = ModelPreset("any", kind, layers, heads, heads * group)
        per_layer = ModelPreset("one", kind, 1, heads, heads * group).layout(state_dtype=dtype).slot_bytes
        rings = batch * draft_log_bytes(model, 1, drafts)
        if memory < batch * layers * per_layer + rings:
            with pytest.raises(ConfigError, match="memory_bytes"):
                plan_capacity(model, max_batch=batch, drafts=drafts, memory_bytes=memory, state_dtype=dtype)
            continue
        plan = plan_capacity(model, max_batch=batch, drafts=drafts, memory_bytes=memory, state_dtype=dtype)
        assert (batch + plan.checkpoint_slots + plan.spare_slots) * layers * per_layer + rings <= memory
        assert plan.total_bytes <= memory
        left = memory - plan.total_bytes
        assert left < plan.slot_bytes or plan.total_bytes + plan.slot_bytes > plan.copying_bytes, "memory left unused"


def test_published_examples() -> None:
    """GLM-5.3-Flash at TP4: 34 MiB of state and 1.6 MiB of conv window a slot, six states wide with five drafts."""
    plan = plan_capacity("glm-5.3-flash", tp=4, max_batch=64, drafts=5, checkpoint_slots=64)
    assert plan.slot_bytes == 34 * (4 * 6144 * 2 + 16 * 128 * 128 * 4)
    assert plan.copying_slot_bytes == 34 * (9 * 6144 * 2 + 6 * 16 * 128 * 128 * 4)
    assert plan.copying_slots == 130
    assert plan.total_bytes < plan.copying_bytes / 4
    wide = plan_capacity("qwen3.5-35b-a3b", max_batch=256, checkpoint_slots=64)
    assert wide.num_slots == wide.copying_slots == 322
    assert wide.total_bytes == wide.copying_bytes
    ledger = Ledger(wide.num_slots, **wide.ledger_options())
    assert (ledger.max_puts, ledger.max_publishes_per_step) == (8, 16)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_state_sizes_of_the_models(name: str) -> None:
    """bytes = layers x (conv [W, C] bf16 + state [HV, 128, 128]); at no drafts the copying design's row is as large."""
    model = preset(name)
    channels = (2 * model.key_heads + model.value_heads) * 128
    assert model.rank_channels(1) == channels
    for dtype, item in (("float32", 4), ("bfloat16", 2)):
        expected = model.layers * (4 * channels * 2 + model.value_heads * 128 * 128 * item)
        assert model.layout(state_dtype=dtype).slot_bytes == expected
        assert copying_slot_bytes(model, 1, 0, dtype) == expected


@pytest.mark.parametrize("drafts", [1, 5])
@pytest.mark.parametrize("name", ["qwen3.5-35b-a3b", "kimi-linear-48b"])
def test_draft_logs_are_as_large_as_the_formula_says(name: str, drafts: int) -> None:
    model = preset(name)
    key_heads, value_heads = model.rank_heads(2)
    log = DraftLog.allocate(
        model.kind,
        3,
        key_heads,
        value_heads,
        model.rank_channels(2),
        max_tokens=drafts + 1,  # type: ignore[arg-type]
    )
    parts = [part for part in (log.k, log.u, log.g, log.x) if part is not None]
    assert model.layers * sum(part.nbytes for part in parts) == 3 * draft_log_bytes(model, 2, drafts)


def test_text_has_the_figures() -> None:
    text = main_text("GLM-5.3-Flash", tp=4, max_batch=64, drafts=5)
    plan = plan_capacity("glm-5.3-flash", tp=4, max_batch=64, drafts=5, checkpoint_slots=64)
    for figure in (plan.num_slots, plan.max_publishes_per_step, plan.copying_checkpoint_slots, "lmdeploy 0.18.0"):
        assert str(figure) in text
    assert "some are skipped" in plan_capacity("kimi-k3", max_batch=2, checkpoint_slots=3).explain()
    none = plan_capacity("kimi-k3", max_batch=2, checkpoint_slots=0)
    assert "no checkpoint fits" in none.explain()
    assert "some are skipped" not in none.explain()
    assert none.max_publishes_per_step == 0
    for figure in ("136 = 4.73 GiB", "total                 5.42 GiB", "64 + 2 + 64 rows, 6 states wide (207.59 MiB) = 26.35 GiB",
                   "saved: 20.93 GiB (79.4 %)"):  # fmt: skip
        assert figure in text, "docs/pool.md has this plan"
    assert "reserved" not in text
    assert (
        "reserved              1 slots"
        in plan_capacity("kimi-k3", max_batch=2, checkpoint_slots=3, reserved=1).explain()
    )
    assert "one state wide" in none.explain()


@pytest.mark.parametrize("drafts", [0, 5])
def test_a_budget_in_bytes_is_that_of_whole_slots(drafts: int) -> None:
    size = plan_capacity("kimi-k3", max_batch=4, checkpoint_slots=1).slot_bytes
    for count in (0, 1, 10):
        for more in (0, size - 1):
            plan = plan_capacity("kimi-k3", max_batch=4, drafts=drafts, checkpoint_bytes=count * size + more)
            assert plan.checkpoint_slots == count
    for least, more in (
        (16, ""),
        (15, "a forward of 8192 tokens wants up to 16 checkpoints, 15 fit: some are skipped"),
    ):
        notes = plan_capacity("kimi-k3", max_batch=64, checkpoint_slots=least).notes
        assert notes == ((more,) if more else ())
    with pytest.raises(ConfigError, match="checkpoint_bytes"):
        plan_capacity("kimi-k3", max_batch=4, checkpoint_bytes=-1)


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("model", {"model": "gpt-2"}),
        ("tp", {"tp": 3}),
        ("max_batch", {"max_batch": 0}),
        ("drafts", {"drafts": 8}),
        ("checkpoint budget", {"checkpoint_slots": None}),
        ("checkpoint_slots", {"checkpoint_slots": -1}),
        ("reserved", {"reserved": 2}),
        ("state_dtype", {"state_dtype": "int8"}),
        ("memory_bytes", {"checkpoint_slots": None, "memory_bytes": 1000}),
    ],
)
def test_bad_settings_are_named(argument: str, change: dict[str, object]) -> None:
    settings: dict[str, object] = {"model": "qwen3.5-9b", "max_batch": 4, "checkpoint_slots": 4, **change}
    with pytest.raises(ConfigError, match=argument):
        plan_capacity(settings.pop("model"), **settings)  # type: ignore[arg-type]


def test_memory_that_holds_the_running_requests_and_no_more_is_taken() -> None:
    options = {"max_batch": 4, "drafts": 2}
    model = preset("glm-5.3-flash")
    least = 4 * (model.layout().slot_bytes + draft_log_bytes(model, 1, 2))
    assert plan_capacity("glm-5.3-flash", memory_bytes=least, **options).total_bytes == least  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"memory_bytes: got {least - 1}; allowed: at least {least}"):
        plan_capacity("glm-5.3-flash", memory_bytes=least - 1, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", ["checkpoint_slots", "checkpoint_bytes", "memory_bytes"])
def test_the_text_takes_each_budget_alone(budget: str) -> None:
    given = {budget: 3 if budget == "checkpoint_slots" else 64 << 30}
    text = main_text("glm-5.3-flash", max_batch=4, **given)  # type: ignore[arg-type]
    assert text == plan_capacity("glm-5.3-flash", max_batch=4, **given).explain()  # type: ignore[arg-type]
