"""How payload bytes get from a slot to the transport and back, and the ring of buffers that leases hold meanwhile.

    host     pool in host memory: the transport reads and writes the slot itself
    direct   pool in GPU memory that the transport registers: the same; bytes pass a window for their checksum
    staged   GPU memory that it cannot register (TCP): a pinned buffer of the ring stands between

`auto` is host or staged. Direct has to be asked for, since over TCP any registration is taken and only Mooncake's CUDA wheel
then moves GPU memory; where registration is refused it becomes staged.

A thread owns one ring buffer for as long as it lives, so a transfer that hangs keeps its buffer too.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from .errors import ConfigError, StateIOError
from .layout import align_up
from .store_keys import HEADER_BYTES

if TYPE_CHECKING:
    import torch

    from .mooncake import StoreClient
    from .pool import StatePool

logger = logging.getLogger("compact_state.store")
MODES = ("auto", "host", "direct", "staged")
#: Bytes of the window through which a GPU slot passes for its checksum when the payload itself does not.
WINDOW_BYTES = 4 << 20


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a host tensor of uint8, without a copy."""
    array: Any = tensor.numpy()
    return memoryview(array)


class RingBuffer:
    """One thread's buffer: a header and, where needed, room for a payload or a window of it."""

    def __init__(self, memory: torch.Tensor, stream: Any) -> None:
        self.memory, self.stream = memory, stream
        self.header = memory[:HEADER_BYTES]
        self.payload = memory[align_up(HEADER_BYTES) :]

    def write_header(self, raw: bytes) -> None:
        """Puts the header where the transport will read it."""
        bytes_of(self.header)[:] = raw

    def read_header(self) -> bytes:
        """The header as the transport left it."""
        return bytes(bytes_of(self.header))


class SlotMemory:
    """A pool's memory as one transport sees it. `count` ring buffers; `attach` registers ring and pool."""

    def __init__(self, pool: StatePool, client: StoreClient, count: int, mode: str = "auto") -> None:
        if mode not in MODES:
            raise ConfigError("mode", mode, ", ".join(MODES))
        cuda = pool.device.type == "cuda"
        if mode == "host" and cuda:
            raise ConfigError("mode", mode, "auto, direct, staged for a pool in GPU memory")
        self.pool, self.client = pool, client
        self.size = pool.slot_bytes
        self.mode = ("staged" if cuda else "host") if mode == "auto" else mode
        self._memory: torch.Tensor | None = None
        self._free: list[RingBuffer] = []
        self._make_ring(count)

    def _make_ring(self, count: int) -> None:
        import torch

        room = 0 if self.mode == "host" else self.size
        stride = align_up(HEADER_BYTES) + align_up(room)
        cuda = self.pool.device.type == "cuda"
        self._ring = torch.zeros((count, stride), dtype=torch.uint8, pin_memory=cuda)
        for row in self._ring.unbind(0):
            stream = torch.cuda.Stream(self.pool.device) if cuda else None  # type: ignore[no-untyped-call]
            self._free.append(RingBuffer(row, stream))
        code = self.client.register(self._ring.data_ptr(), self._ring.numel())
        if code != 0:
            raise StateIOError(f"the transport refused {self._ring.numel()} bytes of host memory: {code}")

    def take(self) -> RingBuffer:
        """A buffer for a new thread. There are as many as threads may live at once."""
        return self._free.pop()

    def give(self, buffer: RingBuffer) -> None:
        """A thread that ends returns its buffer."""
        self._free.append(buffer)

    def attach(self) -> None:
        """Registers the pool's memory, once for all slots, and keeps it alive until `detach`."""
        memory = self.pool.memory
        if memory is None or self._memory is memory:
            return
        self.detach()
        if self.mode != "staged":
            code = self.client.register(memory.data_ptr(), memory.numel())
            if code != 0 and self.mode == "direct":
                logger.warning("the transport refused the pool's GPU memory (%d): transfers are staged", code)
                self.mode = "staged"
            elif code != 0:
                raise StateIOError(f"the transport refused {memory.numel()} bytes of the pool ({self.mode}): {code}")
        self._memory = memory

    def detach(self) -> None:
        """Unregisters the pool's memory and lets go of it."""
        memory, self._memory = self._memory, None
        if memory is None or self.mode == "staged":
            return
        code = self.client.unregister(memory.data_ptr())
        if code != 0:
            logger.warning("the pool's memory stays registered: %d", code)

    def release_ring(self) -> None:
        """Unregisters the ring."""
        self.client.unregister(self._ring.data_ptr())

    def pieces(self, slot: int, buffer: RingBuffer) -> tuple[list[int], list[int]]:
        """Addresses and sizes of what the transport moves: the header, then the payload."""
        payload = buffer.payload if self.mode == "staged" else self._slot(slot)
        return [buffer.header.data_ptr(), payload.data_ptr()], [HEADER_BYTES, self.size]

    def load(self, slot: int, buffer: RingBuffer) -> int:
        """Before a put: brings the slot to where the transport reads it. Returns the payload's xxh3."""
        if self.mode == "staged":
            self._copy(buffer.payload[: self.size], self._slot(slot), buffer)
        return self.checksum(slot, buffer)

    def deliver(self, slot: int, buffer: RingBuffer) -> None:
        """After a get whose checksum is right: brings the payload to the slot, and waits for it."""
        if self.mode == "staged":
            self._copy(self._slot(slot), buffer.payload[: self.size], buffer)

    def checksum(self, slot: int, buffer: RingBuffer) -> int:
        """xxh3 of the payload where the transport reads or wrote it."""
        import xxhash

        state = xxhash.xxh3_64()
        if self.mode == "host":
            state.update(bytes_of(self._slot(slot)))
        elif self.mode == "staged":
            state.update(bytes_of(buffer.payload[: self.size]))
        else:
            source = self._slot(slot)
            for start in range(0, self.size, WINDOW_BYTES):
                piece = source[start : start + WINDOW_BYTES]
                window = buffer.payload[: piece.numel()]
                self._copy(window, piece, buffer)
                state.update(bytes_of(window))
        return int(state.intdigest())

    def _slot(self, slot: int) -> torch.Tensor:
        if self._memory is None:
            raise StateIOError("the pool has no registered memory")
        return self._memory[slot]

    def _copy(self, target: torch.Tensor, source: torch.Tensor, buffer: RingBuffer) -> None:
        if buffer.stream is None:
            target.copy_(source)
            return
        import torch

        with torch.cuda.stream(buffer.stream):
            target.copy_(source, non_blocking=True)
        buffer.stream.synchronize()
