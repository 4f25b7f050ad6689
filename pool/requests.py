"""What a scheduler hands to the lifecycle and gets back: requests, rows of a step, and the plan of one step."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from .index import IndexEntry
from .prefix import PrefixKey
from .slots import Holder


class Phase(str, Enum):
    """Where a request is. WAITING and LOADING hold no slot."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    ENDED = "ended"


class StateRequest:
    """One request. `key` names its tokens so far; `resumed` of them came from a checkpoint at the last admission."""

    __slots__ = ("holder", "id", "key", "load_op", "phase", "resumed")

    def __init__(self, request_id: Hashable, key: PrefixKey) -> None:
        self.id, self.key = request_id, key
        self.phase = Phase.WAITING
        self.holder: Holder | None = None
        self.resumed = 0
        self.load_op = 0

    @property
    def position(self) -> int:
        """Tokens its state stands for; negative while the host does not know (drafts in flight)."""
        return 0 if self.holder is None else self.holder.position


@dataclass(slots=True)
class StepRow:
    """One request in a step: `tokens` new tokens (UNRESOLVED for a draft step), checkpoints wanted at `positions`."""

    request: StateRequest
    tokens: int = 1
    positions: Sequence[int] = ()


@dataclass(slots=True)
class StepPlan:
    """What the kernels of one step need. Row i reads `read_ids[i]` and writes `write_ids[i]`; -1 = none.

    `positions[i]`: tokens before the step (negative: only the device knows). Checkpoints of row i are entries
    `cu[i] .. cu[i+1]` of `ends` (token counts within this call, ascending) and `slots`. `entries`: what was cached.
    """

    step: int
    read_ids: list[int]
    write_ids: list[int]
    positions: list[int]
    cu: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    entries: list[IndexEntry] = field(default_factory=list)
