"""How many slots a pool needs, how many bytes that is, and what the copying design would take. Explains itself.

    slots = reserved + B + P + spare           bytes = slots * S + B * a

B running requests at most, P checkpoints, S bytes of one state (whatever the draft width), a bytes of one request's
draft log (0 without drafts). A running request needs one slot: its steps go in place. A second one is needed only
between a publish and the end of the next step, and it may come out of the checkpoints' share, because a publish is
refused when admitted requests may need the slot. So the spare slots only keep publishes from waiting or evicting, and
the cap of publishes per step keeps them few. Slots pinned by transfers are checkpoints and count in P.

The copying design (lmdeploy 0.18.0) has B + 2 + P rows, each 1 + N states wide with N drafts, checkpoints included. The
spare slots are cut until this pool takes no more bytes than that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .errors import ConfigError, check_int
from .layout import ITEM_SIZES, StateLayout, align_up
from .models import ModelPreset, preset

#: Draft tokens + 1 that a verify call takes at most.
MAX_VERIFY_TOKENS = 8
#: Rows of the copying design that are neither a running request nor a checkpoint: one reserved, one for rolling prefill.
COPYING_EXTRA_ROWS = 2


@dataclass(frozen=True)
class CapacityPlan:
    """Slots and bytes of one rank's pool."""

    model: str
    tp: int
    max_batch: int
    drafts: int
    state_dtype: str
    layout: StateLayout
    reserved: int
    checkpoint_slots: int
    spare_slots: int
    steps_in_flight: int
    draft_log_bytes: int
    copying_checkpoint_slots: int
    copying_slot_bytes: int
    notes: tuple[str, ...] = field(default=())

    @property
    def slot_bytes(self) -> int:
        return self.layout.slot_bytes

    @property
    def num_slots(self) -> int:
        return self.reserved + self.max_batch + self.checkpoint_slots + self.spare_slots

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool alone."""
        return self.num_slots * self.slot_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of the pool and the draft logs of all requests."""
        return self.pool_bytes + self.max_batch * self.draft_log_bytes

    @property
    def copying_slots(self) -> int:
        return self.max_batch + COPYING_EXTRA_ROWS + self.copying_checkpoint_slots

    @property
    def copying_bytes(self) -> int:
        """Bytes that lmdeploy 0.18.0's layout takes for the same budgets."""
        return self.copying_slots * self.copying_slot_bytes

    @property
    def max_publishes_per_step(self) -> int:
        """Cap that keeps publishes within half of what checkpoints and spare slots can give while steps are in flight."""
        if not self.checkpoint_slots:
            return 0
        return max(1, (self.checkpoint_slots + self.spare_slots) // (2 * self.steps_in_flight))

    @property
    def max_transfers(self) -> int:
        """Cap of puts, and of gets, in flight: together at most half of the checkpoints are pinned by them."""
        return min(8, self.checkpoint_slots // 4)

    def ledger_options(self) -> dict[str, Any]:
        """Keywords for `Ledger` and `StatePool`."""
        return {
            "reserved": self.reserved,
            "max_publishes_per_step": self.max_publishes_per_step,
            "max_puts": self.max_transfers,
            "max_gets": self.max_transfers,
        }

    def explain(self) -> str:
        """The figures and where they come from, as text."""
        wide = f"{1 + self.drafts} states wide" if self.drafts else "one state wide"
        saved = self.copying_bytes - self.total_bytes
        lines = [
            f"{self.model}, tensor parallel {self.tp}, one rank: {self.layout.num_layers} linear-attention layers, "
            f"{self.state_dtype} state",
            f"  one state (a slot)    {_size(self.slot_bytes)}",
            f"  running requests      {self.max_batch} slots: steps go in place",
            f"  checkpoints           {self.checkpoint_slots} slots",
            f"  spare                 {self.spare_slots} slots; at most {self.max_publishes_per_step} publishes a step",
        ]
        if self.reserved:
            lines.append(f"  reserved              {self.reserved} slots")
        lines += [
            f"  slots                 {self.num_slots} = {_size(self.pool_bytes)}",
            f"  draft logs            {self.max_batch} x {_size(self.draft_log_bytes)} ({self.drafts} drafts)",
            f"  total                 {_size(self.total_bytes)}",
            f"  transfers in flight   at most {self.max_transfers} puts and {self.max_transfers} gets",
            f"copying design (lmdeploy 0.18.0 layout): {self.max_batch} + {COPYING_EXTRA_ROWS} + "
            f"{self.copying_checkpoint_slots} rows, {wide} ({_size(self.copying_slot_bytes)}) = "
            f"{_size(self.copying_bytes)}",
            f"saved: {_size(saved)} ({100 * saved / self.copying_bytes:.1f} %)",
        ]
        return "\n".join(lines + [f"note: {note}" for note in self.notes])


def draft_log_bytes(model: ModelPreset, tp: int, drafts: int) -> int:
    """Bytes of one request's draft log: two halves of drafts + 1 tokens of raw k, u, gates and conv inputs a layer."""
    if not drafts:
        return 0
    key_heads, value_heads = model.rank_heads(tp)
    gates = value_heads * 4 if model.kind == "gdn" else value_heads * model.key_dim * 2
    token = key_heads * model.key_dim * 2 + value_heads * model.value_dim * 4 + gates + model.rank_channels(tp) * 2
    return model.layers * 2 * (drafts + 1) * token


def copying_slot_bytes(model: ModelPreset, tp: int, drafts: int, state_dtype: str) -> int:
    """Bytes of one row in lmdeploy 0.18.0: conv `[L, C, W + N]` and state `[L, 1 + N, HV, V, K]`, each 256-byte aligned."""
    _, value_heads = model.rank_heads(tp)
    conv = model.layers * model.rank_channels(tp) * (model.conv_width + drafts) * ITEM_SIZES["bfloat16"]
    state = model.layers * (1 + drafts) * value_heads * model.value_dim * model.key_dim * ITEM_SIZES[state_dtype]
    return align_up(conv) + align_up(state)


def plan_capacity(
    model: str | ModelPreset,
    *,
    tp: int = 1,
    max_batch: int,
    drafts: int = 0,
    checkpoint_slots: int | None = None,
    checkpoint_bytes: int | None = None,
    memory_bytes: int | None = None,
    state_dtype: str = "float32",
    steps_in_flight: int = 2,
    reserved: int = 0,
    prefill_tokens: int = 8192,
    checkpoint_interval: int = 512,
) -> CapacityPlan:
    """The pool of one rank for a checkpoint budget in slots, in bytes, or as what `memory_bytes` leaves (give one).

    ConfigError when the memory does not hold `max_batch` running requests, or a setting is not served.
    """
    if isinstance(model, str):
        model = preset(model)
    if not isinstance(model, ModelPreset):
        raise ConfigError("model", repr(model), "a model's name, or a ModelPreset")
    if sum(budget is not None for budget in (checkpoint_slots, checkpoint_bytes, memory_bytes)) != 1:
        raise ConfigError(
            "checkpoint budget", "none or several", "one of checkpoint_slots, checkpoint_bytes, memory_bytes"
        )
    for name, value, least in (
        ("max_batch", max_batch, 1),
        ("steps_in_flight", steps_in_flight, 1),
        ("checkpoint_slots", checkpoint_slots or 0, 0),
        ("checkpoint_bytes", checkpoint_bytes or 0, 0),
        ("memory_bytes", memory_bytes or 0, 0),
        ("prefill_tokens", prefill_tokens, 1),
        ("checkpoint_interval", checkpoint_interval, 1),
    ):
        check_int(name, value, least)
    check_int("drafts", drafts, 0, MAX_VERIFY_TOKENS - 1)
    check_int("reserved", reserved, 0, COPYING_EXTRA_ROWS - 1)
    layout = model.layout(tp, state_dtype=state_dtype)
    size, log = layout.slot_bytes, draft_log_bytes(model, tp, drafts)
    wide = copying_slot_bytes(model, tp, drafts, state_dtype)
    wanted_spare = steps_in_flight * -(-max_batch // 16)
    fixed = (reserved + max_batch) * size + max_batch * log
    if memory_bytes is not None:
        if memory_bytes < fixed:
            raise ConfigError(
                "memory_bytes", memory_bytes, f"at least {fixed}: {max_batch} running requests of {size} + {log} bytes"
            )
        left = (memory_bytes - fixed) // size
        # An eighth of what is left at most: checkpoints are what the memory is for.
        spare = min(wanted_spare, left // 8)
        checkpoints = copying_checkpoints = left - spare
    elif checkpoint_bytes is not None:
        checkpoints, copying_checkpoints, spare = checkpoint_bytes // size, checkpoint_bytes // wide, wanted_spare
    else:
        assert checkpoint_slots is not None
        checkpoints = copying_checkpoints = checkpoint_slots
        spare = wanted_spare
    room = ((max_batch + COPYING_EXTRA_ROWS + copying_checkpoints) * wide - fixed) // size
    checkpoints = min(checkpoints, room)
    spare = min(spare, room - checkpoints)
    exports = -(-prefill_tokens // checkpoint_interval)
    notes = []
    if checkpoints and checkpoints < exports:
        notes.append(
            f"a forward of {prefill_tokens} tokens wants up to {exports} checkpoints, {checkpoints} fit: some are skipped"
        )
    if not checkpoints:
        notes.append("no checkpoint fits: every prompt is computed from its start")
    return CapacityPlan(
        model.name,
        tp,
        max_batch,
        drafts,
        state_dtype,
        layout,
        reserved,
        checkpoints,
        spare,
        steps_in_flight,
        log,
        copying_checkpoints,
        wide,
        tuple(notes),
    )


def main_text(
    model: str,
    *,
    tp: int = 1,
    max_batch: int = 64,
    drafts: int = 0,
    checkpoint_slots: int | None = None,
    checkpoint_bytes: int | None = None,
    memory_bytes: int | None = None,
    state_dtype: str = "float32",
    steps_in_flight: int = 2,
) -> str:
    """What `compact-state capacity` prints. Without a budget: as many checkpoints as running requests."""
    if checkpoint_slots is None and checkpoint_bytes is None and memory_bytes is None:
        checkpoint_slots = max_batch
    return plan_capacity(
        model,
        tp=tp,
        max_batch=max_batch,
        drafts=drafts,
        checkpoint_slots=checkpoint_slots,
        checkpoint_bytes=checkpoint_bytes,
        memory_bytes=memory_bytes,
        state_dtype=state_dtype,
        steps_in_flight=steps_in_flight,
    ).explain()


def _size(count: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(count) >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count} B"
