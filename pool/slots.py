"""The host record of one slot, the holders of slots, and the condition of a slot, which is derived and never stored.

A slot carries tokens; what it *is* follows from them:

    W   writer      a step (`write_step` not yet released) or a store get (`get_op`)
    O   owner       one request (`owner`), never on a sealed slot
    R   reader      requests whose recovery state this is (`readers`), steps that read it (`read_step`)
    C   cache       one index entry (`entry`), only on a sealed slot
    IO  transfer    store puts (`puts`), only on a sealed slot
    Q   quarantine  a transfer past its deadline (`quarantined`), until the pool is rebuilt

Steps finish in order, so one step number per kind of access says as much as a set of step tokens.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum

from .handles import SlotHandle

#: Added to a position when the host does not know the count of tokens (drafts in flight): sums with it are negative.
UNRESOLVED = -(1 << 40)


class Condition(str, Enum):
    """What a slot is, derived from its tokens."""

    FREE = "free"
    FILLING = "filling"
    OWNED = "owned"
    SEALED = "sealed"
    DRAINING = "draining"
    LOADING = "loading"
    QUARANTINED = "quarantined"


class SlotRecord:
    """Tokens of one slot. Only the ledger writes these fields."""

    __slots__ = (
        "entry",
        "epoch",
        "gen",
        "get_op",
        "handle",
        "owner",
        "position",
        "puts",
        "quarantined",
        "read_step",
        "readers",
        "sealed",
        "since",
        "slot",
        "waits_for",
        "write_step",
    )

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.gen = 0
        self.sealed = False
        self.epoch = 0
        self.position = 0
        self.owner: Holder | None = None
        self.readers = 0
        self.entry: object | None = None
        self.write_step = 0
        self.read_step = 0
        self.puts = 0
        self.get_op = 0
        self.quarantined = False
        #: Step whose release this slot waits for with no other token than step tokens and C; 0 = not waiting.
        self.waits_for = 0
        self.since = 0
        #: The handle of the present life, made when it is first asked for.
        self.handle: SlotHandle | None = None

    def held(self) -> bool:
        """Whether a token other than step tokens and C is on the slot."""
        return bool(self.owner is not None or self.readers or self.puts or self.get_op or self.quarantined)


class Holder:
    """One admitted request in the ledger: its recovery slot and whether its state mixes weight epochs."""

    __slots__ = ("closed", "gen", "id", "rec", "tainted")

    def __init__(self, request_id: Hashable) -> None:
        self.id = request_id
        self.rec: SlotRecord | None = None
        self.gen = 0
        self.tainted = False
        self.closed = False

    @property
    def owns(self) -> bool:
        """Whether the recovery slot is this request's alone, so that the next step may write it in place."""
        return self.rec is not None and self.rec.owner is self

    @property
    def position(self) -> int:
        """Tokens the recovery state stands for; 0 without state, negative while unresolved on the host."""
        return 0 if self.rec is None else self.rec.position


def condition_of(rec: SlotRecord, release_step: int, submitted: int) -> Condition:
    """The condition of a slot. Steps up to `release_step` hold nothing any more; later than `submitted` = planned."""
    if rec.quarantined:
        return Condition.QUARANTINED
    if rec.get_op:
        return Condition.LOADING
    if rec.sealed and (rec.entry is not None or rec.readers):
        return Condition.SEALED
    writing = rec.write_step > release_step
    if rec.owner is not None:
        return Condition.FILLING if writing else Condition.OWNED
    if rec.write_step > submitted:
        return Condition.FILLING
    if writing or rec.read_step > release_step or rec.puts:
        return Condition.DRAINING
    return Condition.FREE
