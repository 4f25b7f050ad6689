"""Invariants of the ledger that can be read off it, as one function. O(slots): for tests and debug mode.

The numbers are those of the pool's specification. I7, I8 and I13 (bytes that a device or a store sees) need a world
around the ledger and are checked by the simulated one in the tests; `violations` covers the rest and adds
I15 (progress: the slots that admitted requests may need stay reachable).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .slots import Condition, Holder, SlotRecord

if TYPE_CHECKING:
    from .index import CheckpointIndex
    from .ledger import Ledger


def violations(ledger: Ledger, index: CheckpointIndex | None = None) -> list[str]:
    """Every broken invariant as a sentence that starts with its number; empty when all hold."""
    found: list[str] = []
    free = {rec.slot for rec in ledger.free}
    if len(free) != len(ledger.free):
        found.append(f"I1 a slot is twice in the free list {sorted(rec.slot for rec in ledger.free)}")
    readers: dict[int, int] = {}
    for holder in ledger.holders.values():
        if holder.rec is not None and holder.rec.owner is not holder:
            readers[holder.rec.slot] = readers.get(holder.rec.slot, 0) + 1
    puts: dict[int, int] = {}
    gets: dict[int, int] = {}
    for lease in ledger.leases.values():
        if lease.kind == "put":
            puts[lease.handle.slot] = puts.get(lease.handle.slot, 0) + 1
        else:
            gets[lease.handle.slot] = lease.op
    waiting = quarantined = 0
    for rec in ledger.records:
        slot = rec.slot
        found += _slot(ledger, rec, slot in free, readers.get(slot, 0), puts.get(slot, 0), gets.get(slot, 0))
        waiting += rec.waits_for != 0
        quarantined += rec.quarantined
    for holder in ledger.holders.values():
        found += _holder(ledger, holder)
    for lease in ledger.leases.values():
        if ledger.records[lease.handle.slot].gen != lease.handle.generation:
            found.append(f"I11 lease {lease.op} outlived its slot {lease.handle.slot}")
    if waiting != ledger.waiting:
        found.append(f"I1 {waiting} slots wait for a step, {ledger.waiting} counted")
    if quarantined != ledger.quarantined:
        found.append(f"I1 {quarantined} slots in quarantine, {ledger.quarantined} counted")
    found += _caps(ledger, sum(puts.values()), len(gets))
    if index is not None:
        found += _cached(ledger, index)
    return found


def check(ledger: Ledger, index: CheckpointIndex | None = None) -> None:
    """Raises InvariantError, with the ledger's dump, when an invariant is broken."""
    found = violations(ledger, index)
    if found:
        raise ledger.broken("; ".join(found))


def _slot(ledger: Ledger, rec: SlotRecord, listed: bool, readers: int, puts: int, get_op: int) -> list[str]:
    name = f"slot {rec.slot}"
    found: list[str] = []
    writing = rec.write_step > ledger.release_step
    reading = rec.read_step > ledger.release_step
    tokens = rec.held() or rec.entry is not None or writing or reading
    if rec.slot < ledger.reserved:
        return [f"I1 reserved {name} is in use"] if listed or tokens else []
    if listed == bool(tokens):
        found.append(f"I1 {name} is listed free: {listed}, has a token: {bool(tokens)}")
    if (ledger.condition(rec.slot) is Condition.FREE) != listed:
        found.append(f"I1 {name} is {ledger.condition(rec.slot).value}, free list says {listed}")
    if rec.get_op and (writing or rec.owner is not None):
        found.append(f"I2 {name} has two writers")
    if rec.sealed and (rec.owner is not None or rec.get_op):
        found.append(f"I3 sealed {name} has an owner or a writer")
    if not rec.sealed and (rec.entry is not None or rec.readers or rec.puts):
        found.append(f"I3 {name} is shared but not sealed")
    if rec.sealed and rec.write_step > ledger.submitted:
        found.append(f"I6 sealed {name} is granted to the planned step {rec.write_step}")
    if rec.owner is not None and (rec.readers or rec.puts or rec.entry is not None):
        found.append(f"I6 {name} is owned and shared")
    if rec.readers != readers:
        found.append(f"I5 {name} counts {rec.readers} readers, {readers} requests read it")
    if rec.puts != puts or rec.get_op != get_op:
        found.append(f"I11 {name} counts {rec.puts} puts and get {rec.get_op}, leases say {puts} and {get_op}")
    if rec.entry is not None and (rec.epoch != ledger.epoch or rec.position <= 0):
        found.append(f"I10 {name} is cached at {rec.position} in epoch {rec.epoch}, now {ledger.epoch}")
    alone = bool(tokens) and not rec.held()
    if (rec.slot in ledger.evictable) != (alone and not writing and not reading):
        found.append(f"I4 {name} is {'' if rec.slot in ledger.evictable else 'not '}evictable against its tokens")
    if (rec.waits_for != 0) != (alone and (writing or reading)):
        found.append(f"I1 {name} waits for step {rec.waits_for} against its tokens")
    return found


def _holder(ledger: Ledger, holder: Holder) -> list[str]:
    rec = holder.rec
    if holder.closed:
        return [f"I5 closed request {holder.id!r} is still registered"]
    if rec is None:
        return []
    if rec.gen != holder.gen:
        return [f"I5 request {holder.id!r} holds slot {rec.slot} of another life"]
    if rec.owner is not holder and not (rec.sealed and rec.readers):
        return [f"I5 request {holder.id!r} has neither O nor R on slot {rec.slot}"]
    if rec.epoch != ledger.epoch and not holder.tainted:
        return [f"I10 request {holder.id!r} carries state of epoch {rec.epoch} and is not tainted"]
    return []


def _caps(ledger: Ledger, puts: int, gets: int) -> list[str]:
    found = []
    if (puts, gets) != (ledger.puts_in_flight, ledger.gets_in_flight):
        found.append(f"I11 {puts} puts and {gets} gets, counted {ledger.puts_in_flight} and {ledger.gets_in_flight}")
    if puts > ledger.max_puts or gets > ledger.max_gets:
        found.append(f"I12 {puts} puts and {gets} gets over the caps {ledger.max_puts} and {ledger.max_gets}")
    base = 0 if ledger.in_place else 1
    demand = sum(base + (0 if holder.owns else 1) for holder in ledger.holders.values())
    if demand != ledger.demand:
        found.append(f"I15 demand {ledger.demand} counted, {demand} by the requests")
    if ledger.reachable < demand:
        found.append(f"I15 {ledger.reachable} slots reachable, admitted requests may need {demand}")
    return found


def _cached(ledger: Ledger, index: CheckpointIndex) -> list[str]:
    found = []
    entries = {id(entry): entry for entry in index.entries()}
    for rec in ledger.records:
        if rec.entry is not None:
            entry = entries.pop(id(rec.entry), None)
            if entry is None:
                found.append(f"I4 slot {rec.slot} has C without an index entry")
            elif entry.handle != ledger.handle(rec):
                found.append(f"I4 slot {rec.slot} is named by an entry with handle {entry.handle}")
            elif entry.position != rec.position:
                found.append(f"I9 slot {rec.slot} stands at {rec.position}, its key says {entry.position}")
            elif entry.epoch != ledger.epoch:
                found.append(f"I10 the entry of slot {rec.slot} is of epoch {entry.epoch}")
    found += [f"I4 entry at {entry.position} names slot {entry.handle}, which has no C" for entry in entries.values()]
    return found
