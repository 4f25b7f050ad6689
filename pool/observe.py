"""What the pool tells the outside: a dump for a broken invariant."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .slots import Condition

if TYPE_CHECKING:
    from .ledger_base import LedgerBase


def dump_text(ledger: LedgerBase) -> str:
    """Every slot that is not free, and the last events, one a line."""
    lines = [
        f"mode={ledger.mode} incarnation={ledger.incarnation} epoch={ledger.epoch} submitted={ledger.submitted} "
        f"launched={ledger.launched} done={ledger.done} free={len(ledger.free)} evictable={len(ledger.evictable)} "
        f"waiting={ledger.waiting} demand={ledger.demand}"
    ]
    for rec in ledger.records:
        condition = ledger.condition(rec.slot)
        if condition is not Condition.FREE:
            owner = None if rec.owner is None else rec.owner.id
            lines.append(
                f"slot={rec.slot} gen={rec.gen} {condition.value} sealed={rec.sealed} epoch={rec.epoch} "
                f"position={rec.position} owner={owner!r} readers={rec.readers} cached={rec.entry is not None} "
                f"write_step={rec.write_step} read_step={rec.read_step} puts={rec.puts} get={rec.get_op}"
            )
    lines += [f"step={step} {event} slot={slot} position={position}" for step, event, slot, position in ledger.log]
    return "\n".join(lines)
