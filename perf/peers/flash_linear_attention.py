"""FLA 0.6.0 (Triton): GDN and KDA chunkwise prefill, states gathered and returned packed, no ids."""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ..bench import Unsupported
from ..inputs import DeltaProblem
from .common import PeerCall, as_int64, without_fla_models


def version() -> str:
    """Installed version; raises where the package cannot be imported."""
    without_fla_models()
    os.environ.setdefault("FLA_FLASH_KDA", "0")  # its own kernels: FlashKDA, where it is installed, is a peer by itself
    package = importlib.import_module("fla")
    importlib.import_module("fla.ops.gated_delta_rule")
    return str(package.__version__)


def prefill(p: DeltaProblem, cu: torch.Tensor) -> dict[str, PeerCall]:
    """Raw gates, beta logits and un-normalised q and k in, one packed state a sequence in and out."""
    if p.workload.checkpoint_every:
        raise Unsupported("no checkpoints inside a call")
    if p.is_kda:
        from fla.ops.kda import chunk_kda as function
    else:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as function
    q, k, v, g, b = (x.contiguous().unsqueeze(0) for x in (p.q, p.k, p.v, p.gate, p.b))
    cu64 = as_int64(cu)
    beta = torch.sigmoid(b.float())
    options = {
        "output_final_state": True,
        "cu_seqlens": cu64,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "A_log": p.A_log,
        "dt_bias": p.dt_bias,
        "state_v_first": True,
    }
    if p.is_kda and p.lower_bound is not None:
        options |= {"safe_gate": True, "lower_bound": p.lower_bound}

    def make(read: torch.Tensor, write: torch.Tensor, out: torch.Tensor) -> Callable[[], torch.Tensor]:
        state = p.pool[read.long()].float()

        def launch() -> torch.Tensor:
            with torch.no_grad():
                return function(q, k, v, g, beta, initial_state=state, **options)[0][0]

        return launch

    return {"fla": PeerCall(make, in_place=True, states=False)}


def _tuners() -> Iterator[Any]:
    """FLA's kernels that read its cache of configurations, in the modules that are loaded."""
    from fla.ops.utils.cache import CachedAutotuner

    seen: set[int] = set()
    for name, module in list(sys.modules.items()):
        for value in list(vars(module).values()) if name.startswith("fla.") and module is not None else ():
            while not isinstance(value, CachedAutotuner) and hasattr(value, "fn"):
                value = value.fn  # heuristics stand around a tuner
            if isinstance(value, CachedAutotuner) and id(value) not in seen:
                seen.add(id(value))
                yield value


def keep_tuned(folder: Path) -> None:
    """Write what FLA's tuner chose in this process into `folder`, in the form in which FLA reads it (FLA_CONFIG_DIR).

    What other processes wrote stays.
    """
    from fla.ops.utils.cache import AutotuneKey

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for tuner in _tuners():
            path = folder / f"{tuner.kernel_name}.json"
            known = json.loads(path.read_text())["autotune_entries"] if path.is_file() else {}
            for key, config in tuner.cache.items():
                chosen = {
                    name: getattr(config, name, None)
                    for name in ("kwargs", "num_warps", "num_stages", "num_ctas", "maxnreg", "ir_override")
                }
                entry = {"autotune_key": AutotuneKey.normalize_autotune_key(key), "config": chosen}
                known.setdefault(AutotuneKey.key_hash(key), entry)
            if known:
                text = json.dumps({"kernel_name": tuner.kernel_name, "autotune_entries": known}, indent=1)
                fresh = path.with_suffix(".new")
                fresh.write_text(text)
                os.replace(fresh, path)
