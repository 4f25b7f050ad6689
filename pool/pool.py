"""StatePool: the memory of all slots of one rank, with the ledger that says who may touch them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import ConfigError, StuckLeaseError
from .handles import SlotHandle
from .layout import StateLayout
from .ledger import Ledger
from .observe import Snapshot, snapshot

if TYPE_CHECKING:
    import torch

    from .index import CheckpointIndex

#: Every byte of a freed slot in poison mode: NaN in float32, bfloat16 and float16 alike.
POISON_BYTE = 0xFF


def device_of(device: str | torch.device) -> torch.device:
    """The device as torch names it. ConfigError unless it is the CPU or a CUDA device that is there."""
    import torch

    count = torch.cuda.device_count()
    allowed = f"cpu, cuda:0 .. cuda:{count - 1}" if count else "cpu: there is no CUDA device"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ConfigError("device", repr(device), allowed) from None
    if found.type != "cpu" and (found.type != "cuda" or (found.index or 0) >= count):
        raise ConfigError("device", found, allowed)
    return found


class StatePool:
    """`memory` is uint8[num_slots, slot_bytes]; operators get typed views of it with slot stride `slot_bytes`.

    `poison_on_free` fills each freed slot with NaN, waiting for the fill (a debug mode). A fresh slot holds garbage:
    "no state" is said by the id, never by zeros. torch is imported at construction. `ledger` may be shared by the ranks
    of a tensor-parallel group; ledger keywords go to a new one otherwise.
    """

    def __init__(
        self,
        layout: StateLayout,
        num_slots: int,
        *,
        device: str | torch.device = "cpu",
        ledger: Ledger | None = None,
        poison_on_free: bool = False,
        **ledger_options: Any,
    ) -> None:
        if ledger is not None and (ledger_options or ledger.num_slots != num_slots):
            raise ConfigError(
                "ledger", f"{ledger.num_slots} slots", f"{num_slots} slots and no ledger options beside it"
            )
        if not isinstance(layout, StateLayout):
            raise ConfigError("layout", type(layout).__name__, "a StateLayout")
        self.layout, self.num_slots = layout, num_slots
        self.device = device_of(device)
        self.ledger = Ledger(num_slots, **ledger_options) if ledger is None else ledger
        self.memory: torch.Tensor | None = None
        self.poison_on_free = poison_on_free
        #: Bytes of state that the pool itself has copied. Publish and restore never add to it.
        self.copied_bytes = 0
        if poison_on_free:
            # Ranks that share a ledger poison one after the other.
            self._freed_before = self.ledger.on_free
            self.ledger.on_free = self._freed
        self.allocate()

    @property
    def slot_bytes(self) -> int:
        """Slot stride in bytes."""
        return self.layout.slot_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool."""
        return self.num_slots * self.slot_bytes

    def allocate(self) -> None:
        """Allocates the memory: at construction and after a wake. Existing memory is kept."""
        import torch

        if self.memory is None:
            self.memory = torch.empty((self.num_slots, self.slot_bytes), dtype=torch.uint8, device=self.device)
            if self.poison_on_free:
                self._fill(self.memory)

    def release(self) -> None:
        """Frees the memory. StuckLeaseError unless the ledger is asleep: a transfer or step may still touch it."""
        if self.ledger.mode != "asleep":
            raise StuckLeaseError(f"the pool is in mode {self.ledger.mode!r}: only a sleeping pool frees its memory")
        self.memory = None

    def conv_view(self, layer: int) -> torch.Tensor:
        """The conv windows of a layer: [num_slots, W, C], slot stride `slot_bytes`."""
        spec = self.layout.layers[self.layout.conv_span(layer).layer]
        return self._view(self.layout.conv_span(layer).offset, spec.conv_bytes, spec.conv_dtype, spec.conv_shape)

    def state_view(self, layer: int) -> torch.Tensor:
        """The recurrent states of a layer: [num_slots, HV, V, K], slot stride `slot_bytes`."""
        spec = self.layout.layers[self.layout.state_span(layer).layer]
        return self._view(self.layout.state_span(layer).offset, spec.state_bytes, spec.state_dtype, spec.state_shape)

    def _view(self, offset: int, size: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        import torch

        part = self._allocated()[:, offset : offset + size].view(getattr(torch, dtype))
        viewed: torch.Tensor = part.unflatten(1, shape)  # type: ignore[no-untyped-call]
        return viewed

    def slot_bytes_of(self, handle: SlotHandle) -> torch.Tensor:
        """The record of one slot: uint8[slot_bytes]. InvariantError for a stale handle."""
        return self._allocated()[self.ledger.granted(handle).slot]

    def snapshot(self, index: CheckpointIndex | None = None) -> Snapshot:
        """Slots by condition, holders, ages, transfers and counters at this moment."""
        return snapshot(self.ledger, index)

    def poison(self, slot: int) -> None:
        """Fills a slot with NaN and waits for it."""
        self._fill(self._allocated()[slot])

    def _freed(self, slot: int) -> None:
        if self._freed_before is not None:
            self._freed_before(slot)
        self.poison(slot)

    def _fill(self, part: torch.Tensor) -> None:
        """Waits, so that no step or transfer of another stream that comes later can be overwritten by the fill."""
        import torch

        part.fill_(POISON_BYTE)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _allocated(self) -> torch.Tensor:
        if self.memory is None:
            raise StuckLeaseError("the pool has no memory: it sleeps")
        return self.memory
