"""Settings that the compact state pool does not serve fail at start: the setting, its value, and what to do.

Nothing falls back silently: a user who asked for the compact pool and gets another one has no way to notice.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ...cute_kernels.configs.conv1d import WIDTHS
from ...cute_kernels.configs.verify import MAX_TOKENS
from ...cute_kernels.validation import HEAD_DIM
from .. import envs

MODEL_TYPES = ("qwen3_5", "qwen3_5_moe")
SPEC_METHOD = "qwen3_5_mtp"
FLASH_ATTENTION = "flash_attn_interface"
STORE_CONNECTOR = "MooncakeStoreConnector"
MIN_GPU_BLOCKS = 16
# The chunk of the prefill kernels: a checkpoint on its grid costs no shorter chunk.
CHUNK = 64


class UnsupportedSettingError(ValueError):
    """A setting that the compact state pool does not serve."""

    def __init__(self, setting: str, value: object, remedy: str) -> None:
        self.setting, self.value = setting, value
        super().__init__(
            f"The compact state pool does not support {setting}={value!r}: {remedy} (or turn the pool off with {envs.ENABLE}=0)."
        )


def _refuse(setting: str, value: object, remedy: str) -> NoReturn:
    raise UnsupportedSettingError(setting, value, remedy)


def _role(config: Any) -> None:
    name = getattr(config.role, "name", config.role)
    if name != "Hybrid":
        _refuse("role", name, "serve prefill and decode in one engine, role=EngineRole.Hybrid")


def _memdecode(config: Any) -> None:
    path = (config.hf_overrides or {}).get("memory_model_path")
    if path is not None:
        _refuse("hf_overrides['memory_model_path']", path, "leave MemDecode out")


def _executor(config: Any) -> None:
    check_backend(config.distributed_executor_backend)
    check_backend(os.environ.get("LMDEPLOY_EXECUTOR_BACKEND"), "LMDEPLOY_EXECUTOR_BACKEND")


def _blocks(config: Any) -> None:
    if config.num_gpu_blocks < MIN_GPU_BLOCKS:
        _refuse(
            "num_gpu_blocks",
            config.num_gpu_blocks,
            f"give the number of KV blocks, at least {MIN_GPU_BLOCKS}; the pool and the KV cache share the memory, so "
            "neither is sized from what happens to be free",
        )


def _transfer(config: Any) -> None:
    transfer = config.kv_transfer_config  # lmdeploy has made an object of a dictionary
    if transfer is None or transfer.kv_connector is None:
        return
    connector, extra = transfer.kv_connector, transfer.kv_connector_extra_config or {}
    if connector != STORE_CONNECTOR:
        _refuse("kv_connector", connector, f"use {STORE_CONNECTOR} or none")
    if config.num_cpu_blocks > 0:
        _refuse("num_cpu_blocks", config.num_cpu_blocks, "a store needs num_cpu_blocks=0")
    identity = extra.get("compact_model_identity")
    if not isinstance(identity, str) or not identity:
        _refuse(
            "kv_connector_extra_config['compact_model_identity']",
            identity,
            "name the model and its weights with a non-empty string: stored states of other weights must not be found",
        )
    _refuse("kv_connector", connector, "states are not transferred to a store by this version; leave the connector out")


def _adapters(config: Any) -> None:
    if config.adapters:
        _refuse("adapters", sorted(config.adapters), "serve the base model without LoRA adapters")


def _decode_interval(config: Any) -> None:
    interval = config.prefix_cache_decode_state_interval
    if interval > 0:
        _refuse(
            "prefix_cache_decode_state_interval",
            interval,
            "set it to 0; checkpoints are taken in prefill forwards only",
        )


def _microbatch(config: Any) -> None:
    if config.enable_microbatch:
        _refuse("enable_microbatch", True, "set it to False")


def _data_parallel(config: Any) -> None:
    for setting in ("dp", "ep"):
        value = getattr(config, setting)
        if value > 1:
            _refuse(setting, value, f"set {setting}=1; ranks that step on dummy inputs have not been proven")


def _dllm(config: Any) -> None:
    if config.dllm_block_length is not None:
        _refuse(
            "dllm_block_length", config.dllm_block_length, "diffusion models have no recurrent decode; leave it out"
        )


def _dtype(config: Any) -> None:
    check_dtype(config.dtype)


def _device(config: Any) -> None:
    if config.device_type != "cuda":
        _refuse("device_type", config.device_type, "use an NVIDIA GPU, device_type='cuda'")


def _alignment(config: Any) -> None:
    alignment = envs.prefill_save_alignment()
    for name, unit in (("block_size", config.block_size), ("chunk size", CHUNK)):
        if alignment % unit:
            _refuse(envs.SAVE_ALIGNMENT, alignment, f"set a multiple of {unit} ({name}), or 0 for none")


def _compiled_decode(config: Any) -> None:
    value = os.environ.get("LMDEPLOY_ENABLE_DECODE_TORCH_COMPILE", "0")
    if value.lower().strip() in ("true", "1", "yes", "on"):
        _refuse("LMDEPLOY_ENABLE_DECODE_TORCH_COMPILE", value, "set it to 0; decode runs from CUDA graphs")


ENGINE_CHECKS: Sequence[Callable[[Any], None]] = (
    _role,
    _memdecode,
    _executor,
    _device,
    _dtype,
    _blocks,
    _transfer,
    _adapters,
    _decode_interval,
    _microbatch,
    _data_parallel,
    _dllm,
    _alignment,
    _compiled_decode,
)


def check_engine(config: Any) -> None:
    """Refuse what a PytorchEngineConfig asks for and the pool does not serve. Raises UnsupportedSettingError."""
    for check in ENGINE_CHECKS:
        check(config)
    envs.backend()
    envs.fused_decode()


def check_dtype(dtype: object) -> None:
    """Refuse activations that are not bf16, by lmdeploy's word or torch's dtype: states and windows are kept of bf16 ones."""
    name = str(dtype).removeprefix("torch.")
    if name not in ("auto", "bfloat16"):
        _refuse("dtype", name, "set dtype='bfloat16' (fp32 recurrent states: LMDEPLOY_FP32_MAMBA_SSM_DTYPE=1)")


def check_backend(backend: str | None, setting: str = "distributed_executor_backend") -> None:
    """Refuse the multiprocessing executor, which lmdeploy deprecates. `None` leaves the choice to lmdeploy."""
    if backend == "mp":
        _refuse(setting, backend, "use 'uni' for one GPU or 'ray' for several")


def check_spec(method: str | None, drafts: int | None = None, draft_layers: int | None = None) -> None:
    """Refuse drafts that are not served: `method` None means that there are none.

    `drafts` is `num_speculative_tokens`, `draft_layers` the draft's `mtp_num_hidden_layers`; None: not known yet.
    """
    if method is None:
        return
    if method != SPEC_METHOD:
        _refuse("speculative method", method, f"use {SPEC_METHOD} or no drafts")
    if drafts is not None and not 1 <= drafts < MAX_TOKENS:
        _refuse(
            "num_speculative_tokens",
            drafts,
            f"set 1 to {MAX_TOKENS - 1}; a verify step runs at most {MAX_TOKENS} tokens of a request",
        )
    if draft_layers is not None and draft_layers != 1:
        _refuse("mtp_num_hidden_layers", draft_layers, "use a draft of one layer")


def check_flash_attention(method: str | None) -> None:
    """Refuse drafts where lmdeploy has no attention for them: it imports FlashAttention-3 and knows no other way."""
    if method is not None and importlib.util.find_spec(FLASH_ATTENTION) is None:
        _refuse(
            "speculative method",
            method,
            f"lmdeploy runs drafts with FlashAttention-3 and there is no module {FLASH_ATTENTION}; install it from "
            "https://github.com/Dao-AILab/flash-attention (folder hopper), or leave the drafts out",
        )


def check_model(model_config: Any) -> None:
    """Refuse models other than Qwen3.5 (dense or MoE) in bf16, of sizes with kernels. Raises UnsupportedSettingError."""
    model_type = getattr(model_config.hf_config, "model_type", None)
    if model_type not in MODEL_TYPES or not getattr(model_config, "is_gated_delta", False):
        _refuse("model_type", model_type, f"serve one of {', '.join(MODEL_TYPES)}")
    check_dtype(model_config.dtype)
    if envs.backend() == "reference":
        return
    sizes = {"linear_key_head_dim": (HEAD_DIM,), "linear_value_head_dim": (HEAD_DIM,), "linear_conv_kernel_dim": WIDTHS}
    for name, served in sizes.items():
        value = getattr(model_config.hf_config.text_config, name)
        if value not in served:
            _refuse(name, value, f"the kernels are built for {served}; {envs.BACKEND}=reference runs others, slowly")


def check_gpu(capability: tuple[int, int] | None) -> None:
    """Refuse a GPU for which there are no kernels. `None`: there is no GPU, and lmdeploy says so itself."""
    if capability is None or envs.backend() == "reference":
        return
    if capability != (9, 0):
        _refuse(
            "GPU compute capability",
            f"{capability[0]}.{capability[1]}",
            f"the kernels are built for 9.0 (H100, H200); {envs.BACKEND}=reference runs anywhere, slowly",
        )
