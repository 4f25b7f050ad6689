"""Every mode that the compact pool does not serve fails at start with the setting, its value and what to do."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from asyncio import run_coroutine_threadsafe as run
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from compact_state.integration import envs
from compact_state.integration.lmdeploy import guards

pytestmark = pytest.mark.lmdeploy
pytest.importorskip("lmdeploy", reason="lmdeploy is not installed")

import lmd_flow  # noqa: E402  turns the adapter on in this process
import torch  # noqa: E402
from lmdeploy import PytorchEngineConfig  # noqa: E402
from lmdeploy.messages import KVTransferConfig  # noqa: E402
from lmdeploy.pytorch.disagg.config import EngineRole  # noqa: E402

STORE = "MooncakeStoreConnector"


def store(**extra: Any) -> KVTransferConfig:
    return KVTransferConfig(kv_connector=STORE, kv_role="kv_both", kv_connector_extra_config=extra)


def config(**settings: Any) -> PytorchEngineConfig:
    return PytorchEngineConfig(**{"num_gpu_blocks": 64, **settings})


REFUSED = [
    ({"role": EngineRole.Prefill}, "role='Prefill'", "one engine"),
    ({"role": EngineRole.Decode}, "role='Decode'", "one engine"),
    ({"hf_overrides": {"memory_model_path": "/m"}}, "memory_model_path", "leave MemDecode out"),
    ({"distributed_executor_backend": "mp"}, "distributed_executor_backend='mp'", "'ray'"),
    ({"num_gpu_blocks": 0}, "num_gpu_blocks=0", "at least 16"),
    (
        {"kv_transfer_config": KVTransferConfig(kv_connector="OtherConnector", kv_role="kv_both")},
        "kv_connector='OtherConnector'",
        STORE,
    ),
    ({"kv_transfer_config": store(), "num_cpu_blocks": 8}, "num_cpu_blocks=8", "num_cpu_blocks=0"),
    ({"kv_transfer_config": store()}, "compact_model_identity", "non-empty string"),
    ({"kv_transfer_config": store(compact_model_identity="")}, "compact_model_identity", "non-empty string"),
    ({"kv_transfer_config": store(compact_model_identity="m@1")}, "kv_connector", "leave the connector out"),
    ({"adapters": {"a": "/a"}}, "adapters=['a']", "without LoRA"),
    ({"prefix_cache_decode_state_interval": 64}, "prefix_cache_decode_state_interval=64", "set it to 0"),
    ({"enable_microbatch": True}, "enable_microbatch=True", "set it to False"),
    ({"dp": 2}, "dp=2", "dp=1"),
    ({"ep": 2}, "ep=2", "ep=1"),
    ({"dllm_block_length": 4}, "dllm_block_length=4", "leave it out"),
    ({"device_type": "ascend"}, "device_type='ascend'", "NVIDIA GPU"),
    ({"dtype": "float16"}, "dtype='float16'", "dtype='bfloat16'"),
    ({"block_size": 1024}, f"{envs.SAVE_ALIGNMENT}=512", "multiple of 1024"),
]


@pytest.mark.parametrize(("settings", "says", "remedy"), REFUSED, ids=[says for _, says, _ in REFUSED])
def test_a_setting_is_refused_in_words(settings: dict[str, Any], says: str, remedy: str) -> None:
    with pytest.raises(guards.UnsupportedSettingError) as refusal:
        guards.check_engine(config(**settings))
    assert says in str(refusal.value)
    assert remedy in str(refusal.value)
    assert f"{envs.ENABLE}=0" in str(refusal.value)


def test_what_is_served_passes() -> None:
    guards.check_engine(config())
    guards.check_engine(config(enable_prefix_caching=True, prefix_cache_state_budget=8, enable_mp_engine=True))
    guards.check_engine(config(tp=2, distributed_executor_backend="ray", piecewise_cudagraph_max_tokens=512))
    guards.check_engine(config(num_cpu_blocks=8))  # host paging of KV alone is lmdeploy's business
    guards.check_engine(config(dtype="bfloat16"))


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("LMDEPLOY_EXECUTOR_BACKEND", "mp", "LMDEPLOY_EXECUTOR_BACKEND='mp'"),
        ("LMDEPLOY_ENABLE_DECODE_TORCH_COMPILE", "1", "LMDEPLOY_ENABLE_DECODE_TORCH_COMPILE"),
        (envs.SAVE_ALIGNMENT, "100", "multiple of 64"),
        (envs.SAVE_ALIGNMENT, "-64", "non-negative"),
        (envs.SAVE_ALIGNMENT, "many", "non-negative"),
        (envs.BACKEND, "triton", "auto, kernels, reference"),
        (envs.FUSED_DECODE, "perhaps", "Allowed true values"),
    ],
)
def test_a_variable_is_refused_in_words(name: str, value: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=says):
        guards.check_engine(config())


def model(model_type: str, gated: bool = True, dtype: torch.dtype = torch.bfloat16, **sizes: int) -> Any:
    text = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, **sizes}
    hf_config = SimpleNamespace(model_type=model_type, text_config=SimpleNamespace(**text))
    return SimpleNamespace(hf_config=hf_config, is_gated_delta=gated, dtype=dtype)


@pytest.mark.parametrize("model_type", ["qwen3_next", "deepseek_v4", "intern_s2_preview", "llama"])
def test_another_model_is_refused(model_type: str) -> None:
    with pytest.raises(guards.UnsupportedSettingError, match=f"model_type='{model_type}'.*qwen3_5, qwen3_5_moe"):
        guards.check_model(model(model_type, model_type != "llama"))


def test_qwen35_dense_and_moe_are_served() -> None:
    guards.check_model(model("qwen3_5"))
    guards.check_model(model("qwen3_5_moe"))


def test_a_model_whose_weights_are_fp16_is_refused() -> None:
    with pytest.raises(guards.UnsupportedSettingError, match=r"dtype='float16'.*dtype='bfloat16'"):
        guards.check_model(model("qwen3_5", dtype=torch.float16))


@pytest.mark.parametrize("name", ["linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"])
def test_sizes_without_kernels_are_refused_unless_the_references_are_asked_for(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(guards.UnsupportedSettingError, match=f"{name}=64.*{envs.BACKEND}=reference"):
        guards.check_model(model("qwen3_5", **{name: 64}))
    monkeypatch.setenv(envs.BACKEND, "reference")
    guards.check_model(model("qwen3_5", **{name: 64}))


@pytest.mark.parametrize("method", ["eagle3", "dflash", "hy3_mtp", "deepseek_mtp"])
def test_another_draft_method_is_refused(method: str) -> None:
    with pytest.raises(guards.UnsupportedSettingError, match=method):
        guards.check_spec(method)


def test_a_draft_of_two_layers_is_refused() -> None:
    with pytest.raises(guards.UnsupportedSettingError, match=r"mtp_num_hidden_layers=2.*one layer"):
        guards.check_spec("qwen3_5_mtp", 3, 2)


@pytest.mark.parametrize("drafts", [0, 8, 15])
def test_more_drafts_than_a_verify_step_runs_are_refused(drafts: int) -> None:
    with pytest.raises(guards.UnsupportedSettingError, match=f"num_speculative_tokens={drafts}.*1 to 7"):
        guards.check_spec("qwen3_5_mtp", drafts, 1)


def test_mtp_drafts_are_served() -> None:
    guards.check_spec(None)
    for drafts in range(1, 8):
        guards.check_spec("qwen3_5_mtp", drafts, 1)


def test_drafts_without_flash_attention_3_are_refused_at_start_by_its_name() -> None:
    from lmdeploy.messages import SpeculativeConfig
    from lmdeploy.pytorch.engine import engine

    drafts = SpeculativeConfig(method="qwen3_5_mtp", num_speculative_tokens=3)
    too_late = mock.patch.object(engine.ConfigBuilder, "update_engine_config", side_effect=AssertionError("too late"))
    missing = mock.patch("importlib.util.find_spec", return_value=None)
    with too_late, missing, pytest.raises(guards.UnsupportedSettingError) as refused:
        engine.Engine("nowhere", config(), speculative_config=drafts)
    for word in ("qwen3_5_mtp", "FlashAttention-3", "flash_attn_interface", "leave the drafts out"):
        assert word in str(refused.value)
    with too_late, mock.patch("importlib.util.find_spec", return_value=object()), pytest.raises(AssertionError):
        engine.Engine("nowhere", config(), speculative_config=drafts)
    with too_late, missing, pytest.raises(AssertionError):
        engine.Engine("nowhere", config())


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_a_gpu_without_kernels_is_refused_unless_the_references_are_asked_for(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(guards.UnsupportedSettingError, match=f"{capability[0]}.{capability[1]}.*9.0"):
        guards.check_gpu(capability)
    monkeypatch.setenv(envs.BACKEND, "reference")
    guards.check_gpu(capability)
    guards.check_gpu((9, 0))


def test_the_engine_is_refused_before_anything_is_loaded() -> None:
    from lmdeploy.pytorch.engine import engine

    with (
        mock.patch.object(engine.ConfigBuilder, "update_engine_config", side_effect=AssertionError("too late")),
        pytest.raises(guards.UnsupportedSettingError, match="num_gpu_blocks=0"),
    ):
        engine.Engine("nowhere", PytorchEngineConfig())


def test_the_gpu_is_looked_at_before_anything_is_loaded() -> None:
    from lmdeploy.pytorch.engine import engine

    with (
        mock.patch.object(engine.ConfigBuilder, "update_engine_config", side_effect=AssertionError("too late")),
        mock.patch("compact_state.integration.lmdeploy.engine._capability", return_value=(8, 0)),
        pytest.raises(guards.UnsupportedSettingError, match=r"8\.0"),
    ):
        engine.Engine("nowhere", config())


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_prefixes_are_forgotten_before_and_after_an_update(fails: bool, waits: bool) -> None:
    from compact_state.integration.lmdeploy import engine

    happened = []

    def update(self: Any) -> str:
        happened.append("update")
        if fails:
            raise RuntimeError("no such weight")
        return "done"

    async def later(self: Any) -> str:
        return update(self)

    owner = SimpleNamespace(scheduler="scheduler")
    with mock.patch.object(engine.paging, "forget", happened.append):
        wrapped = engine._forgetting(later if waits else update)
        with pytest.raises(RuntimeError, match="weight") if fails else contextlib.nullcontext():
            assert (asyncio.run(wrapped(owner)) if waits else wrapped(owner)) == "done"
    assert happened == ["scheduler", "update", "scheduler"]


@pytest.mark.parametrize("inside", [False, True])
def test_an_update_from_another_thread_forgets_on_that_of_the_engines_loop(inside: bool) -> None:
    from compact_state.integration.lmdeploy import engine

    happened = []

    def note(what: object) -> None:
        happened.append((what, threading.current_thread() is worker))

    wrapped = engine._forgetting(lambda self: note("update"))
    loop = asyncio.new_event_loop()
    worker = threading.Thread(target=loop.run_forever)

    async def started() -> Any:
        return asyncio.current_task()

    async def asked() -> None:
        wrapped(owner)

    worker.start()
    try:
        owner = SimpleNamespace(scheduler="scheduler", _loop_main=run(started(), loop).result())
        with mock.patch.object(engine.paging, "forget", note):
            run(asked(), loop).result(timeout=10) if inside else wrapped(owner)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        worker.join()
        loop.close()
    assert happened == [("scheduler", True), ("update", inside), ("scheduler", True)]


def test_the_resolved_executor_and_the_model_are_checked_before_workers_exist() -> None:
    from lmdeploy.pytorch.engine import executor

    arguments: dict[str, Any] = {
        "model_path": "nowhere",
        "cache_config": SimpleNamespace(block_size=64, quant_policy=0),
        "backend_config": None,
        "dist_config": SimpleNamespace(dp=1, world_size=2),
        "misc_config": SimpleNamespace(hf_overrides=None, model_format=None, memdecode_config=None, empty_init=False),
    }
    workers = mock.patch("lmdeploy.pytorch.engine.executor.uni_executor.UniExecutor", side_effect=AssertionError)
    with workers, mock.patch.object(executor.ModelConfig, "from_pretrained", return_value=model("qwen3_next")):
        with pytest.raises(guards.UnsupportedSettingError, match="qwen3_next"):
            executor.build_executor(**arguments)
        with pytest.raises(guards.UnsupportedSettingError, match="'mp'"):
            executor.build_executor(**arguments, distributed_executor_backend="mp")
    memdecode = SimpleNamespace(**{**vars(arguments["misc_config"]), "memdecode_config": mock.Mock()})
    memdecode.memdecode_config.memory_model_path = "/memory"
    with workers, pytest.raises(guards.UnsupportedSettingError, match="memdecode_config='/memory'"):
        executor.build_executor(**{**arguments, "misc_config": memdecode})
    draft = SimpleNamespace(hf_config=SimpleNamespace(text_config=SimpleNamespace(mtp_num_hidden_layers=2)))
    drafts = SimpleNamespace(method="qwen3_5_mtp", num_speculative_tokens=3, model_config=draft)
    with workers, pytest.raises(guards.UnsupportedSettingError, match="mtp_num_hidden_layers=2"):
        executor.build_executor(**arguments, specdecode_config=drafts)
    fitting = model("qwen3_5")
    fitting.mla_index_topk = None
    with (
        workers,
        mock.patch.object(executor.ModelConfig, "from_pretrained", return_value=fitting),
        mock.patch.object(executor.envs, "executor_backend", "mp"),
        pytest.raises(guards.UnsupportedSettingError, match="'mp'"),
    ):
        executor.build_executor(**arguments)


def test_the_pool_is_sized_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    from lmdeploy.pytorch.engine.executor.base import ExecutorBase, logger

    from compact_state.integration.lmdeploy.cache import layout_of

    cache_config = SimpleNamespace(
        max_batches=64, prefix_cache_state_budget=16, num_state_caches=None, states_shapes=lmd_flow.SHAPES
    )
    executor = SimpleNamespace(cache_config=cache_config, model_config=SimpleNamespace(state_cache_specs=None))
    slot = layout_of(lmd_flow.SHAPES).slot_bytes
    with mock.patch.object(logger, "info") as info:
        first = ExecutorBase._get_state_cache_mem(executor)
        again = ExecutorBase._get_state_cache_mem(executor)  # ray asks once more at wake-up
    assert first == again == 82 * slot
    assert cache_config.num_state_caches == 82
    text = info.call_args.args[0] % info.call_args.args[1:]
    assert text == f"Enable unified compact state: 82 slots of {slot} bytes, {82 * slot} bytes per rank"


@pytest.mark.parametrize("drafts", [1, 5])
def test_draft_logs_join_the_memory_and_slots_stay_one_state_wide(drafts: int) -> None:
    from lmdeploy.pytorch.engine.executor.base import ExecutorBase, logger

    from compact_state.integration.lmdeploy.cache import layout_of

    shapes = lmd_flow.shapes(drafts)
    cache_config = SimpleNamespace(
        max_batches=64, prefix_cache_state_budget=16, num_state_caches=None, states_shapes=shapes
    )
    executor = SimpleNamespace(cache_config=cache_config, model_config=SimpleNamespace(state_cache_specs=None))
    slot = layout_of(lmd_flow.SHAPES).slot_bytes
    # Two key heads and four value heads of 128: k and conv inputs in bf16, u and the gate in fp32, two halves, 3 layers.
    token = 2 * 128 * 2 + 4 * 128 * 4 + 4 * 4 + 1024 * 2
    logs = 64 * 3 * 2 * (1 + drafts) * token
    with mock.patch.object(logger, "info") as info:
        assert ExecutorBase._get_state_cache_mem(executor) == 82 * slot + logs
    assert f"82 slots of {slot} bytes" in info.call_args_list[0].args[0] % info.call_args_list[0].args[1:]
    text = info.call_args.args[0] % info.call_args.args[1:]
    assert text == f"Draft logs: 64 rows, {logs} bytes per rank"


def test_a_failed_update_forgets_all_the_same() -> None:
    from lmdeploy.pytorch.engine.engine import Engine

    flow = lmd_flow.Flow()
    flow.end(flow.serve(list(range(3, 43)) * 8, 1))
    assert flow.checkpoints
    engine = mock.Mock(spec=["scheduler", "_run_weights_update", "executor"])
    engine.scheduler = flow.scheduler
    engine._run_weights_update = mock.AsyncMock(side_effect=RuntimeError("half the weights"))
    with pytest.raises(RuntimeError, match="half"):
        asyncio.run(Engine.update_weights_from_distributed(engine, None))
    assert flow.checkpoints == []
