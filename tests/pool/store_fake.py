"""A store in memory with the calls, return codes and habits of Mooncake's client, and faults on demand.

Like the real one it moves raw memory, commits by itself, keeps the first of two puts to a key and says 0 to the second.
"""

import ctypes
import threading
from collections import defaultdict, deque


class FakeBackend:
    """What the clients of one store share."""

    def __init__(self, capacity: int = 1 << 30) -> None:
        self.objects: dict[str, bytes] = {}
        self.leased: set[str] = set()
        self.pending: set[str] = set()
        self.capacity = capacity
        self.lock = threading.Lock()

    def client(self) -> "FakeClient":
        return FakeClient(self)


class FakeClient:
    """`codes["put"].append(-800)`: the next put returns that. `gate`: transfers stop half-way until it is set."""

    def __init__(self, backend: FakeBackend) -> None:
        self.backend = backend
        self.codes: dict[str, deque[int]] = defaultdict(deque)
        self.calls: dict[str, int] = defaultdict(int)
        self.gate = threading.Event()
        self.gate.set()
        self.half_way = threading.Event()
        self.registered: dict[int, int] = {}
        self.refuse: set[int] = set()
        #: Added to what a get that moved everything returns.
        self.lie = 0
        self.closed = False

    def _scripted(self, call: str) -> int | None:
        assert not self.closed, f"{call} after close: the real client crashes here"
        self.calls[call] += 1
        return self.codes[call].popleft() if self.codes[call] else None

    def _check_registered(self, pointers: list[int], sizes: list[int]) -> None:
        for pointer, size in zip(pointers, sizes):
            assert any(base <= pointer and pointer + size <= base + room for base, room in self.registered.items()), (
                f"{size} bytes at {pointer:#x} are not registered"
            )

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        if size in self.refuse or buffer_ptr in self.registered:
            return -600
        self.registered[buffer_ptr] = size
        return 0

    def unregister_buffer(self, buffer_ptr: int) -> int:
        return 0 if self.registered.pop(buffer_ptr, None) is not None else -600

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        code = self._scripted("exist")
        if code is not None:
            return [code] * len(keys)
        with self.backend.lock:
            found = [int(key in self.backend.objects) for key in keys]
            self.backend.leased |= {key for key, there in zip(keys, found) if there}
        return found

    def batch_put_from_multi_buffers(
        self, keys: list[str], all_buffer_ptrs: list[list[int]], all_sizes: list[list[int]]
    ) -> list[int]:
        code = self._scripted("put")
        if code is not None:
            return [code] * len(keys)
        return [self._put(*one) for one in zip(keys, all_buffer_ptrs, all_sizes)]

    def _put(self, key: str, pointers: list[int], sizes: list[int]) -> int:
        self._check_registered(pointers, sizes)
        backend = self.backend
        with backend.lock:
            if key in backend.objects or key in backend.pending:
                return 0
            if sum(map(len, backend.objects.values())) + sum(sizes) > backend.capacity:
                return -200
            backend.pending.add(key)
        data = b""
        for pointer, size in zip(pointers, sizes):
            data += ctypes.string_at(pointer, size // 2)
            self.half_way.set()
            self.gate.wait(20)
            data += ctypes.string_at(pointer + size // 2, size - size // 2)
        with backend.lock:
            backend.pending.discard(key)
            backend.objects[key] = data
        return 0

    def batch_get_into_multi_buffers(
        self, keys: list[str], all_buffer_ptrs: list[list[int]], all_sizes: list[list[int]]
    ) -> list[int]:
        code = self._scripted("get")
        if code is not None:
            return [code] * len(keys)
        return [self._get(*one) for one in zip(keys, all_buffer_ptrs, all_sizes)]

    def _get(self, key: str, pointers: list[int], sizes: list[int]) -> int:
        self._check_registered(pointers, sizes)
        with self.backend.lock:
            data = self.backend.objects.get(key)
            if data is None:
                return -703 if key in self.backend.pending else -704
            self.backend.leased.add(key)
        if len(data) != sum(sizes):
            return -600 if len(data) > sum(sizes) else -800
        at = 0
        for pointer, size in zip(pointers, sizes):
            ctypes.memmove(pointer, data[at : at + size // 2], size // 2)
            self.half_way.set()
            self.gate.wait(20)
            ctypes.memmove(pointer + size // 2, data[at + size // 2 : at + size], size - size // 2)
            at += size
        return len(data) + self.lie

    def get_size(self, key: str) -> int:
        code = self._scripted("size")
        if code is not None:
            return code
        with self.backend.lock:
            return len(self.backend.objects[key]) if key in self.backend.objects else -704

    def remove(self, key: str, force: bool = False) -> int:
        code = self._scripted("remove")
        if code is not None:
            return code
        with self.backend.lock:
            if key in self.backend.leased and not force:
                return -706
            return 0 if self.backend.objects.pop(key, None) is not None else -704

    def close(self) -> int:
        self.closed = True
        return 0
