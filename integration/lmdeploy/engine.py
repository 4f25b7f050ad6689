"""The engine's start, sleep and weight updates."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from . import guards, paging


def patch_engine_executor(module: ModuleType) -> None:
    """Check what only the resolved configuration tells, before any worker starts."""
    build, finalize, choose = (
        module.build_executor,
        module._finalize_sparse_mla_cache_policy,
        module.get_distributed_executor_backend,
    )

    @functools.wraps(finalize)
    def finalize_checked(model_configs: Any, cache_config: Any) -> Any:
        # build_executor passes the target's configuration here as soon as it has one, workers still unborn.
        guards.check_model(model_configs[0])
        return finalize(model_configs, cache_config)

    @functools.wraps(choose)
    def choose_checked(*args: Any, **kwargs: Any) -> Any:
        backend = choose(*args, **kwargs)
        guards.check_backend(backend)
        return backend

    @functools.wraps(build)
    def build_checked(*args: Any, **kwargs: Any) -> Any:
        guards.check_backend(kwargs.get("distributed_executor_backend"))
        spec = kwargs.get("specdecode_config")
        if spec is not None:
            text = getattr(spec.model_config.hf_config, "text_config", spec.model_config.hf_config)
            guards.check_spec(spec.method, spec.num_speculative_tokens, getattr(text, "mtp_num_hidden_layers", None))
        misc = kwargs.get("misc_config")
        if misc is not None and misc.memdecode_config is not None:
            guards._refuse("memdecode_config", misc.memdecode_config.memory_model_path, "leave MemDecode out")
        return build(*args, **kwargs)

    module._finalize_sparse_mla_cache_policy = finalize_checked  # type: ignore[attr-defined]
    module.get_distributed_executor_backend = choose_checked  # type: ignore[attr-defined]
    module.build_executor = build_checked  # type: ignore[attr-defined]


def _capability() -> tuple[int, int] | None:
    import torch

    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def patch_engine_engine(module: ModuleType) -> None:
    """Guards first of all; every state of the old weights or the old memory is forgotten on update and sleep."""
    engine = module.Engine
    init, sleep, wakeup = engine.__init__, engine.sleep, engine.wakeup

    @functools.wraps(init)
    def init_checked(
        self: Any,
        model_path: str,
        engine_config: Any = None,
        trust_remote_code: bool = False,
        speculative_config: Any = None,
    ) -> None:
        config = module.PytorchEngineConfig() if engine_config is None else engine_config
        guards.check_engine(config)
        if speculative_config is not None:
            guards.check_spec(speculative_config.method, speculative_config.num_speculative_tokens)
            guards.check_flash_attention(speculative_config.method)
        guards.check_gpu(_capability())
        init(self, model_path, engine_config, trust_remote_code, speculative_config)

    @functools.wraps(sleep)
    async def sleep_forgetting(self: Any, level: int = 1) -> None:
        await sleep(self, level)
        # The loop is drained, every session ended, the workers have synchronised: nothing uses a slot any more.
        paging.forget(self.scheduler)
        self.scheduler.state_manager.sleep()

    @functools.wraps(wakeup)
    def wakeup_with_pool(self: Any, tags: list[str] | None = None) -> None:
        if tags is None or "kv_cache" in tags:
            # Before lmdeploy lets requests in; the workers rebuild their pools in the call below.
            self.scheduler.state_manager.wake()
        wakeup(self, tags)

    engine.__init__ = init_checked
    engine.sleep = sleep_forgetting
    engine.wakeup = wakeup_with_pool
    updates = ("update_params", "update_weights_from_ipc", "update_weights_from_distributed", "complete_weights_update")
    for name in updates:
        setattr(engine, name, _forgetting(getattr(engine, name)))


def _forget(engine: Any) -> None:
    """Forget prefixes on the thread of the engine's loop: the API server updates weights on another, while requests run."""
    task = getattr(engine, "_loop_main", None)
    loop = None if task is None else task.get_loop()
    try:
        elsewhere = asyncio.get_running_loop() is not loop
    except RuntimeError:
        elsewhere = True

    async def there() -> None:
        paging.forget(engine.scheduler)

    if elsewhere and loop is not None and loop.is_running():
        asyncio.run_coroutine_threadsafe(there(), loop).result()
    else:
        paging.forget(engine.scheduler)


def _forgetting(update: Callable[..., Any]) -> Callable[..., Any]:
    """An update of weights, before and after which prefixes are forgotten.

    Before: nothing of the old weights is found. After: a prefill between two buckets of weights leaves nothing either.
    """

    @functools.wraps(update)
    def now(self: Any, *args: Any, **kwargs: Any) -> Any:
        _forget(self)
        try:
            return update(self, *args, **kwargs)
        finally:
            _forget(self)

    @functools.wraps(update)
    async def later(self: Any, *args: Any, **kwargs: Any) -> Any:
        _forget(self)
        try:
            return await update(self, *args, **kwargs)
        finally:
            _forget(self)

    return later if inspect.iscoroutinefunction(update) else now
