"""One pool of state slots for running requests and prefix-cache checkpoints. Imports without torch.

A scheduler's loop (`requests`: prompts by id, `run` launches the kernels of a plan, `sample` gives one token a row)::

    layout = StateLayout.uniform(24, channels=8192, value_heads=32)       # this rank's layers
    pool = StatePool(layout, num_slots=96, device="cuda")                 # memory + pool.ledger
    life = Lifecycle(pool.ledger, CheckpointIndex(pool.ledger, budget_slots=30), pool)
    table = StateIdTable(64, device="cuda", depth=2)                      # ids where a captured graph finds them
    waiting = [life.add(i, PrefixKey(tokens)) for i, tokens in requests.items()]
    running = []
    while waiting or running:
        table.step_done(life.poll())                                      # fences that have passed
        while waiting and len(running) < 64 and life.admit(waiting[0]):   # False: it has to wait for a slot
            running.append(waiting.pop(0))                                # it resumes at request.resumed
        rows = []
        for r in running:                                                 # a chunk of prompt, or one token
            tokens = min(512, len(r.key) - r.position)
            inside = range(r.position // 512 * 512 + 512, r.position + tokens + 1, 512)
            rows.append(StepRow(r, tokens, positions=inside))             # checkpoints wanted: best effort
        try:
            plan = life.plan(rows)                                        # in place, or read A and write B
        except CapacityError:                                             # nothing changed: wait for a step
            if not life.fences.wait_oldest():
                waiting.append(running[-1])
                life.preempt(running.pop())                               # (admission makes this branch unreachable)
            continue
        while len(life.fences) >= table.depth:
            life.fences.wait_oldest()
        table.step_done(life.poll())
        table.stage(plan.step, plan.read_ids, plan.write_ids, plan.positions)
        run(plan, table)                                                  # plan.cu, .ends, .slots: checkpoints
        life.launched(plan.step, CudaFence("cuda"))
        for r, token in zip(list(running), sample(plan)):
            if r.position == len(r.key):                                  # the prompt is done: a token came out
                life.extend(r, [token])
                if token == EOS:
                    running.remove(r)
                    life.finish(r)                                        # its last state stays as a checkpoint

`life.cancel(r)` in any phase; `life.publish(r)` for a decode checkpoint; `life.failed(step)` when a launch raised
(and `life.launched` all the same); `life.new_weights()`, `life.sleep(deadline_s=…)`, `life.wake()`. Draft steps:
`StepRow(r, UNRESOLVED)`, staged without positions (the device moves them on), and `life.resolve(r, position)` once the
accepted count is known; publish only after the drafts are folded in.
"""

from .capacity import CapacityPlan, plan_capacity
from .errors import (
    CapacityError,
    ConfigError,
    ErrorClass,
    InvariantError,
    PoolClosedError,
    PoolError,
    RankDisagreementError,
    StaleHandleError,
    StateDataError,
    StateIOError,
    StateMissError,
    StuckLeaseError,
)
from .fences import CudaFence, Fence, FenceQueue, ImmediateFence
from .handles import SlotHandle
from .id_table import StateIdTable
from .index import CheckpointIndex, IndexEntry, Lookup
from .layout import LayerSpec, StateLayout
from .leases import IoLease, IoOutcome
from .ledger import Ledger
from .lifecycle import Lifecycle
from .mooncake import MooncakeConfig
from .observe import SlotView, Snapshot, register_metrics, snapshot
from .pool import StatePool
from .prefix import PrefixKey
from .requests import Phase, StateRequest, StepPlan, StepRow
from .slots import UNRESOLVED, Condition, Holder
from .store import MooncakeStateStore
from .store_keys import StoreIdentity
from .store_report import register_store_metrics
from .store_types import StoreSettings

__all__ = [
    "UNRESOLVED",
    "CapacityError",
    "CapacityPlan",
    "CheckpointIndex",
    "Condition",
    "ConfigError",
    "CudaFence",
    "ErrorClass",
    "Fence",
    "FenceQueue",
    "Holder",
    "ImmediateFence",
    "IndexEntry",
    "InvariantError",
    "IoLease",
    "IoOutcome",
    "LayerSpec",
    "Ledger",
    "Lifecycle",
    "Lookup",
    "MooncakeConfig",
    "MooncakeStateStore",
    "Phase",
    "PoolClosedError",
    "PoolError",
    "PrefixKey",
    "RankDisagreementError",
    "SlotHandle",
    "SlotView",
    "Snapshot",
    "StaleHandleError",
    "StateDataError",
    "StateIOError",
    "StateIdTable",
    "StateLayout",
    "StateMissError",
    "StatePool",
    "StateRequest",
    "StepPlan",
    "StepRow",
    "StoreIdentity",
    "StoreSettings",
    "StuckLeaseError",
    "plan_capacity",
    "register_metrics",
    "register_store_metrics",
    "snapshot",
]
