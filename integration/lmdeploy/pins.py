"""The one lmdeploy that the adapter fits: its version and the sources of everything that is replaced, wrapped or relied on.

`pins.json` holds the first 16 hex digits of the SHA-256 of each source text, per module. Another text under the same
version (a local patch, a vendor's build) is refused as well: patches on code that nobody looked at corrupt states silently.
Rewrite the file, after reading the differences: `python -m compact_state.integration.lmdeploy.pins`.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
from functools import lru_cache
from pathlib import Path
from types import ModuleType

VERSION = "0.18.0"
_FILE = Path(__file__).with_name("pins.json")

_INPUTS_TASK = "_ForwardInputsTask."
_LIFECYCLE = "StateCheckpointLifecycle."
PINNED: dict[str, tuple[str, ...]] = {
    "envs": ("get_all_envs", "env_to_bool", "set_envs"),
    "engine.engine": (
        "Engine.__init__",
        "Engine.sleep",
        "Engine.wakeup",
        "Engine.update_params",
        "Engine.update_weights_from_ipc",
        "Engine.update_weights_from_distributed",
        "Engine.complete_weights_update",
        "Engine._cancel_and_end_all_sessions",
        "Engine.async_loop",
    ),
    "engine.executor": ("build_executor", "get_distributed_executor_backend"),
    "engine.executor.base": ("ExecutorBase._get_state_cache_mem", "ExecutorBase.update_configs"),
    "engine.cache_engine.state": ("StateCacheEngine",),
    "engine.inputs_maker": (
        _INPUTS_TASK + "_build_prefill_inputs",
        _INPUTS_TASK + "_build_chunk_inputs",
        _INPUTS_TASK + "_try_decode",
        _INPUTS_TASK + "_build_payload",
        "InputsMakerAsync._prepare_prefill_cache_inputs",
        "InputsMakerAsync._make_decode_cache_inputs",
        "InputsMakerAsync.create_model_inputs",
        "InputsMakerAsync.create_model_inputs_long_context",
        "InputsMakerAsync.create_model_inputs_delta",
        "InputsMakerAsync.update_running_seqs",
        "InputsMakerAsync._forward_kind",
        "InputsMakerAsync._send_next_inputs_impl",
        "InputsMakerAsync.reset_runtime_state",
    ),
    "engine.engine_loop": ("EngineLoop._make_infer_outputs",),
    "engine.model_agent.agent": (
        "model_forward",
        "_restore_cache_checkpoint",
        "_save_cache_checkpoint",
        "BaseModelAgent._async_step",
        "BaseModelAgent._get_inputs_from_delta",
        "BaseModelAgent._prepare_inputs_prefill",
        "BaseModelAgent._async_loop_inputs_preprocess",
        "BaseModelAgent._push_output",
        "BaseModelAgent._step_postprocess_with_output",
        "BaseModelAgent.get_output_async",
        "BatchedOutputs",
        "BaseModelAgent.sleep",
    ),
    "paging.scheduler": ("Scheduler.__init__", "Scheduler.schedule", "Scheduler.schedule_running"),
    "paging.prefill_scheduler": ("_TentativePrefixMatch", "_PrefillAdmissionAttempt", "_PrefillScheduler"),
    "paging.state_manager": ("StateManager", "build_state_manager"),
    "paging.block_trie.checkpoint_lifecycle": ("StateCheckpointLifecycle", "CheckpointCopyPlan"),
    "paging.block_trie.trie": ("BlockTrie",),
    "model_inputs": ("ModelInputs", "ModelInputsDelta", "StepContext.new"),
    "strategies.base.model_inputs": ("make_dummy_inputs",),
    "strategies.ar.model_inputs": (
        "get_model_inputs_next_decoding",
        "merge_model_inputs",
        "index_select_model_inputs",
    ),
    "strategies.ar.model_agent": ("ARStoppingCriteria",),
    "strategies.ar.sampling": ("ARSamplingStrategy", "SamplingInputs"),
    "strategies.ar.sequence": ("SchedulerSequence", "SchedulerSequenceDefault", "ARSequenceStrategy"),
    "strategies.ar.step_inputs": (
        "_reindex_model_inputs",
        "reindex_sampling_delta",
        "step_sampling_delta",
        "SamplingInputsDelta",
        "ARStepInputs",
    ),
    "strategies.ar_spec.model_inputs": ("ARSpecModelInputsStrategy",),
    "strategies.ar_spec.step_inputs": ("_reindex_model_inputs_arspec", "ARSpecStepInputs"),
    "strategies.ar_spec.sequence": ("SchedulerSequenceARSpec", "ARSpecSequenceStrategy.update_running"),
    "models.utils.cudagraph": (
        "CudaGraphMixin.make_buffers_cudagraph",
        "CudaGraphMixin.fill_buffers_cudagraph",
        "CudaGraphMixin.update_context_cudagraph",
        "CudaGraphMixin.get_outputs_cudagraph",
        "CudaGraphMeta",
    ),
    "models.qwen3_5": (
        "Qwen3_5GatedDeltaNet",
        "Qwen3_5TextModel.forward",
        "Qwen3_5ForConditionalGeneration.prepare_inputs_for_generation",
    ),
    "backends.cuda.op_backend": ("CudaOpsBackend.build_op",),
    "backends.cuda.graph_runner.runner": (
        "CUDAGraphRunner",
        "CUDASingleGraphRunner",
        "GraphRunner",
    ),
    "nn.gated_delta": (
        "build_rmsnorm_gated",
        "GatedDeltaMetaBuilder",
        "CausalConv1dFunc",
        "GatedDelta",
        "CausalConv1d.forward",
    ),
    "nn.linear.default": ("BaseLinear", "MergedBaseLinear"),
    "configurations.qwen3_next": ("_check_env_qwen3_next",),
}


class UnsupportedLmdeployError(RuntimeError):
    """lmdeploy is not the one that the adapter was written for."""


def _digest(module: ModuleType, name: str) -> str | None:
    target: object = module
    for part in name.split("."):
        target = getattr(target, part, None)
    try:
        source = inspect.getsource(target)  # type: ignore[arg-type]
    except (OSError, TypeError):
        return None
    return hashlib.sha256(source.encode()).hexdigest()[:16]


@lru_cache(maxsize=1)
def _recorded() -> dict[str, dict[str, str]]:
    recorded: dict[str, dict[str, str]] = json.loads(_FILE.read_text())
    return recorded


def check_version(found: str) -> None:
    """Raise UnsupportedLmdeployError unless lmdeploy's version is the pinned one."""
    if found != VERSION:
        raise UnsupportedLmdeployError(
            f"compact-state fits lmdeploy {VERSION} and found {found}. Install lmdeploy=={VERSION}, or turn the compact "
            "state pool off with LMDEPLOY_ENABLE_COMPACT_STATE=0."
        )


def check(module: ModuleType) -> None:
    """Raise UnsupportedLmdeployError unless version and pinned sources of `module` are the ones the patches fit."""
    check_version(importlib.import_module("lmdeploy.version").__version__)
    key = module.__name__.removeprefix("lmdeploy.pytorch.")
    recorded = _recorded()[key]
    changed = [name for name in PINNED[key] if _digest(module, name) != recorded.get(name)]
    if changed:
        raise UnsupportedLmdeployError(
            f"lmdeploy {VERSION} is installed, but {module.__name__} differs from the released source in "
            f"{', '.join(changed)}. compact-state patches these and refuses code it was not written for: reinstall "
            f"lmdeploy=={VERSION}, or turn the compact state pool off with LMDEPLOY_ENABLE_COMPACT_STATE=0."
        )


def record() -> None:
    """Write pins.json from the installed lmdeploy."""
    digests: dict[str, dict[str, str]] = {}
    for key, names in PINNED.items():
        module = importlib.import_module(f"lmdeploy.pytorch.{key}")
        found = {name: _digest(module, name) for name in names}
        missing = [name for name, digest in found.items() if digest is None]
        if missing:
            raise UnsupportedLmdeployError(f"{module.__name__} has no {', '.join(missing)}")
        digests[key] = {name: digest for name, digest in found.items() if digest is not None}
    _FILE.write_text(json.dumps(digests, indent=1) + "\n")


if __name__ == "__main__":
    record()
