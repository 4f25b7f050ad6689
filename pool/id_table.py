"""StateIdTable: the device buffers that tell a step's kernels which slots to read and write.

The device buffers never move, so a captured graph may hold their addresses. The host writes into a ring of staging
rows, one a step, and one copy brings a row to the device in stream order; a row is not written again before the fence
of the step that reads it. Everything past the rows in use is cleared to -1 ("none"), so a stale tail names no slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .errors import CapacityError, ConfigError, check_int
from .pool import device_of

if TYPE_CHECKING:
    import torch

FIELDS = ("read_ids", "write_ids", "positions", "num_accepted", "log_half")
NONE = -1
#: What the rows past the batch hold: ids name no slot, counts are zero.
CLEARED = (NONE, NONE, 0, 0, 0)


class StateIdTable:
    """Five int32 vectors of `max_rows` each on `device`; `depth` steps may be staged before the oldest is done."""

    def __init__(self, max_rows: int, *, device: str | torch.device = "cpu", depth: int = 2) -> None:
        check_int("max_rows", max_rows, 1)
        check_int("depth", depth, 1)
        import torch

        self.max_rows, self.depth = max_rows, depth
        self.device = device_of(device)
        cuda = self.device.type == "cuda"
        shape = (len(FIELDS), max_rows)
        self._staging = torch.zeros((depth, *shape), dtype=torch.int32, pin_memory=cuda)
        self._cleared = torch.tensor(CLEARED, dtype=torch.int32).unsqueeze(1)
        self._buffer = torch.zeros(shape, dtype=torch.int32, device=self.device)
        self._buffer.copy_(self._cleared.expand(shape))
        self._step_of = [0] * depth
        self._done = 0
        self.rows = 0
        self.read_ids, self.write_ids, self.positions, self.num_accepted, self.log_half = self._buffer.unbind(0)

    def view(self, name: str, rows: int | None = None) -> torch.Tensor:
        """A field's first `rows` entries (default: the staged rows). Its address never changes."""
        if name not in FIELDS:
            raise ConfigError("name", name, ", ".join(FIELDS))
        count = self.rows if rows is None else rows
        self._check_rows(count)
        return self._buffer[FIELDS.index(name), :count]

    def stage(
        self,
        step: int,
        read_ids: Sequence[int],
        write_ids: Sequence[int],
        positions: Sequence[int] | None = None,
        *,
        num_accepted: Sequence[int] | None = None,
        log_half: Sequence[int] | None = None,
        sources: Sequence[int] | None = None,
    ) -> None:
        """Brings a step's rows to the device, in stream order. CapacityError: the staging ring is full, wait for a fence.

        A field that is None keeps what the device holds: `advance_state_ids` moves those on without the host. Then
        `sources[i]` = the row of the last step whose values row i takes over (-1 = zero); default: row i itself.
        """

        rows = len(read_ids)
        self._check_rows(rows)
        fields = (read_ids, write_ids, positions, num_accepted, log_half)
        for name, values in zip(FIELDS, fields):
            if values is not None and len(values) != rows:
                raise ConfigError(name, f"{len(values)} values", f"one per row ({rows})")
        if sources is not None and (len(sources) != rows or any(not NONE <= source < self.rows for source in sources)):
            raise ConfigError("sources", list(sources), f"{rows} rows of the last step, {NONE} .. {self.rows - 1}")
        ring = step % self.depth
        if self._step_of[ring] > self._done:
            raise CapacityError(f"id row of step {self._step_of[ring]} is still read; steps done: {self._done}")
        staging = self._staging[ring]
        staging.copy_(self._cleared.expand_as(staging))
        kept = []
        for number, values in enumerate(fields):
            if values is None:
                kept.append(number)
            else:
                staging[number, :rows] = _int32(FIELDS[number], values)
        held = self._buffer[kept].clone() if kept else None
        self._buffer.copy_(staging, non_blocking=True)
        if held is not None:
            self._buffer[kept, :rows] = held[:, :rows] if sources is None else self._taken(held, sources)
        self._step_of[ring] = step
        self.rows = rows

    def _taken(self, held: torch.Tensor, sources: Sequence[int]) -> torch.Tensor:
        import torch

        index = torch.tensor(sources, dtype=torch.int64, device=self.device)
        return torch.where(index < 0, 0, held[:, index.clamp(min=0)])

    def clear(self, rows: Sequence[int]) -> None:
        """Makes the given rows name no slot, in stream order: a request that ends leaves no id behind."""
        bad = [row for row in rows if not 0 <= row < self.max_rows]
        if bad:
            raise ConfigError("rows", bad[0], f"0 .. {self.max_rows - 1}")
        for row in rows:
            self._buffer[:2, row] = NONE
            self._buffer[2:, row] = 0

    def step_done(self, step: int) -> None:
        """The fence of `step` has passed: staging rows up to it may be written again."""
        self._done = max(self._done, step)

    def _check_rows(self, rows: int) -> None:
        if not 0 <= rows <= self.max_rows:
            raise ConfigError("rows", rows, f"0 .. {self.max_rows}")


def _int32(name: str, values: Sequence[int]) -> torch.Tensor:
    import torch

    try:
        return torch.as_tensor(values, dtype=torch.int32)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(name, values, f"int32 values ({error})") from None
