"""Faulty ledgers: one change each to the source of the real one. A search that lets one live is not worth its time.

`EQUIVALENT` ones change nothing that any user of the ledger can see: the defence they remove is a second line, and the
reason says which first line makes it so.
"""

from __future__ import annotations

import importlib
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import compact_state.pool

SOURCE = Path(compact_state.pool.__file__).parent
FILES = (
    "errors",
    "handles",
    "slots",
    "ledger_base",
    "ledger_steps",
    "ledger_cache",
    "leases",
    "ledger",
    "invariants",
    "observe",
)


@dataclass(frozen=True)
class Mutant:
    """`old` is replaced by `new` in one file of the pool. `number`: its row in the pool's specification, 0 = ours."""

    name: str
    file: str
    old: str
    new: str
    number: int = 0
    equivalent: str = ""


MUTANTS = (
    Mutant("hit takes no reference", "ledger_steps", "        rec.readers += 1\n", "", 1),
    Mutant(
        "publish leaves the owner, who writes in place",
        "ledger_cache",
        "        rec.owner = None\n        rec.readers = 1\n",
        "",
        2,
    ),
    Mutant(
        "eviction ignores readers",
        "ledger_base",
        "rec.owner is not None or rec.readers or",
        "rec.owner is not None or",
        3,
    ),
    Mutant(
        "put does not wait for its producer",
        "leases",
        'self._lease("put", rec, rec.write_step, rec',
        'self._lease("put", rec, 0, rec',
        4,
    ),
    Mutant(
        "put never gives its lease back",
        "leases",
        "        rec.puts -= 1\n        self.puts_in_flight -= 1\n        self._settle(rec)\n",
        "        self.puts_in_flight -= 1\n",
        5,
    ),
    Mutant(
        "new weights keep the old checkpoints", "ledger", '        self._uncache_all(self.records, "epoch")\n', "", 6
    ),
    Mutant(
        "sleep does not wait for transfers",
        "ledger",
        "return self.done == self.submitted and not self.leases and not self.stuck",
        "return self.done == self.submitted",
        7,
    ),
    Mutant(
        "cancel frees the destination of a get",
        "leases",
        "            lease.cancelled = True\n\n    def get_end",
        "            lease.cancelled = True\n"
        "            rec = self.records[lease.handle.slot]\n"
        "            rec.get_op = 0\n"
        "            self._settle(rec)\n\n    def get_end",
        8,
    ),
    Mutant("free ignores transfers", "ledger_base", "rec.readers or rec.puts or", "rec.readers or", 9),
    Mutant(
        "get does not wait for earlier steps",
        "leases",
        "rec, last if last > after_step else after_step, position",
        "rec, after_step, position",
        10,
    ),
    Mutant(
        "in place although sealed",
        "ledger_steps",
        "if rec.gen != holder.gen or rec.sealed:",
        "if rec.gen != holder.gen:",
        11,
        "an owner excludes sealed: publishing takes O away before it seals, and nothing unseals before the slot is free",
    ),
    Mutant(
        "grants ignore the generation",
        "ledger_base",
        "rec.handle is handle or (rec.gen == handle[1] and handle[2] == self.incarnation & INCARNATION_MASK)",
        "True",
        12,
        "whoever holds a handle in this world holds a token too; stale handles are tried by the lifecycle's own tests",
    ),
    Mutant(
        "steps are forgotten when a slot is let go",
        "ledger_base",
        "if last > self.release_step:",
        "if last > self.submitted:",
    ),
    Mutant("a step's read is not recorded", "ledger_steps", "        old.read_step = step\n", ""),
    Mutant(
        "un-indexing unseals",
        "ledger_base",
        "        entry, rec.entry = rec.entry, None\n",
        "        entry, rec.entry = rec.entry, None\n        rec.sealed = False\n",
    ),
    Mutant(
        "publish reserves no slot",
        "ledger_cache",
        "            and len(self.free) + len(self.evictable) + self.waiting > self.demand\n",
        "",
    ),
    Mutant(
        "admission reserves no slot",
        "ledger_steps",
        "if len(self.free) + len(self.evictable) + self.waiting < self.demand + charge:",
        "if False:",
    ),
    Mutant("a hit may starve others", "ledger_steps", "if self._starves(rec):", "if False:"),
    Mutant("a put may starve others", "leases", "if self._starves(rec):", "if False:"),
    Mutant(
        "a get may starve others",
        "leases",
        "< self.max_gets and len(self.free) + len(self.evictable) > self.demand",
        "< self.max_gets and self.available > 0",
    ),
    Mutant(
        "exports may starve others",
        "ledger_steps",
        "if len(self.free) + len(self.evictable) <= self.demand:",
        "if not self.available:",
    ),
    Mutant(
        "a failed step keeps its checkpoints",
        "ledger",
        'self._uncache_all((rec for rec in self.records if id(rec) in made), "failed")',
        "pass",
    ),
    Mutant(
        "a failed step lets its puts run", "ledger", "                lease.revoked = True\n", "                pass\n"
    ),
    Mutant(
        "a failed step forgets puts past their deadline",
        "ledger",
        "(*self.leases.values(), *self.stuck.values())",
        "self.leases.values()",
    ),
    Mutant(
        "a failed step names nobody",
        "ledger",
        "h.rec.write_step >= step > self.done]",
        "h.rec.write_step >= step > self.submitted]",
    ),
    Mutant(
        "one rank's completion ends a transfer", "leases", "        if lease.pending:\n            return None\n", ""
    ),
    Mutant("a completion counts twice", "leases", " or not lease.pending & bit:", ":"),
    Mutant(
        "ranks that disagree are ok",
        "leases",
        "        if not lease.failed:\n            return None\n",
        "        if lease.failed < self.ranks:\n            return None\n",
    ),
    Mutant(
        "publish is offered to mixed weights",
        "ledger_cache",
        "            and not holder.tainted\n",
        "",
        equivalent="publish asks _publishable first, which refuses tainted requests by itself",
    ),
    Mutant(
        "mixed weights are exported",
        "ledger_cache",
        "        if holder.tainted or rec.epoch != self.epoch:\n            self.counters.exports_skipped",
        "        if rec.epoch != self.epoch:\n            self.counters.exports_skipped",
    ),
    Mutant(
        "mixed weights outlive their request",
        "ledger_cache",
        "return None if holder.tainted or rec.epoch != self.epoch else rec",
        "return rec",
    ),
    Mutant("new weights taint nobody", "ledger", "            holder.tainted = True\n", "            pass\n"),
    Mutant("a cancelled load is published", "leases", "fault is None and not lease.cancelled and", "fault is None and"),
    Mutant(
        "a load of old weights is published", "leases", " and lease.epoch == self.epoch and self.mode", " and self.mode"
    ),
    Mutant(
        "a stuck slot is not quarantined",
        "leases",
        "                rec.quarantined = True\n                self.quarantined += 1\n",
        "                pass\n",
    ),
    Mutant(
        "a stuck slot is used again once its transfer reports",
        "leases",
        "            del self.stuck[op]\n",
        "            del self.stuck[op]\n"
        "            rec = self.records[lease.handle.slot]\n"
        "            rec.quarantined = False\n"
        "            self.quarantined -= 1\n"
        "            self._settle(rec)\n",
    ),
    Mutant(
        "publish believes the position it is given",
        "ledger_cache",
        "if rec.position != position or position <= 0:",
        "if position <= 0:",
    ),
    Mutant(
        "pinning leaves a slot evictable",
        "ledger_base",
        "        else:\n            self.evictable.pop(rec.slot, None)\n\n    def _settle",
        "\n    def _settle",
    ),
    Mutant(
        "abandon forgets earlier steps",
        "ledger_steps",
        "            rec.write_step = self.release_step\n",
        "            rec.write_step = 0\n",
    ),
    Mutant(
        "a fence counts for all ranks",
        "ledger_steps",
        "done = step if len(self._rank_done) == 1 else min(self._rank_done)",
        "done = max(self._rank_done)",
    ),
    Mutant("readers are not given back", "ledger_base", "            rec.readers -= 1\n", "            pass\n"),
    Mutant(
        "a move keeps its reservation",
        "ledger_steps",
        "        if old.owner is not holder:\n            self.demand -= 1\n",
        "",
    ),
    Mutant(
        "exports sit at the end of their step",
        "ledger_cache",
        "        rec.position = position\n        self.counters.exports += 1\n",
        "        rec.position = end\n        self.counters.exports += 1\n",
    ),
    Mutant("a position is not moved on", "ledger_steps", "                rec.position += count\n", ""),
    Mutant(
        "a checkpoint is freed under its index entry",
        "ledger_base",
        "        elif rec.entry is not None:\n            self.evictable[rec.slot] = rec\n        else:",
        "        else:",
    ),
    Mutant(
        "most recently used first out",
        "ledger_base",
        "self.evictable.popitem(last=False)",
        "self.evictable.popitem(last=True)",
        0,
        "the order of eviction is no matter of ownership; the index's own tests pin it",
    ),
    Mutant(
        "the counts of waiting slots drift",
        "ledger_steps",
        "                    rec.waits_for = 0\n                    self.waiting -= 1\n",
        "                    rec.waits_for = 0\n",
    ),
    Mutant(
        "a wake keeps the incarnation",
        "ledger",
        "        self.incarnation += 1\n",
        "",
        0,
        "sleep frees every slot, so generations alone already tell old handles; incarnations are for restarted ledgers",
    ),
)


def load(mutant: Mutant, folder: Path) -> Any:
    """The pool's pure Python files as a package of their own with the change in it."""
    name = "mutant_" + "".join(c if c.isalnum() else "_" for c in mutant.name)
    package = folder / name
    package.mkdir()
    (package / "__init__.py").touch()
    for file in FILES:
        shutil.copy(SOURCE / f"{file}.py", package / f"{file}.py")
    target = package / f"{mutant.file}.py"
    text = target.read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(f"mutant {mutant.name!r}: its text occurs {text.count(mutant.old)} times in {mutant.file}.py")
    target.write_text(text.replace(mutant.old, mutant.new))
    sys.path.insert(0, str(folder))
    try:
        importlib.import_module(f"{name}.ledger")
        importlib.import_module(f"{name}.invariants")
    finally:
        sys.path.remove(str(folder))
    return sys.modules[name]
