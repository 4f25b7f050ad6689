"""The Mooncake client: how it is started and closed, what its return codes mean, and a guard around its life.

The wheel's client crashes the process when some of its calls come after `close`, and blocks for 90 s when there is no
master at start; the guard and the probe here prevent both.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .errors import ConfigError, ErrorClass, PoolClosedError, StateIOError, StuckLeaseError, check_int

INSTALL = "pip install 'compact-state[mooncake]' (GPU: [mooncake-cuda]) and the system library libibverbs1"

OK, NO_SPACE, BAD_PARAMS, NOT_READY, NOT_FOUND, EXISTS = 0, -200, -600, -703, -704, -705
LEASED, LEASE_EXPIRED, BUSY, TRANSFER, CHECKSUM = -706, -707, -714, -800, -801
#: What a get's return code says about the state; everything else is E_IO.
_GET_ERRORS = {NOT_FOUND: ErrorClass.MISS, NOT_READY: ErrorClass.MISS, BAD_PARAMS: ErrorClass.MISS}
_ERRORS = {NO_SPACE: ErrorClass.CAPACITY, CHECKSUM: ErrorClass.DATA}
#: Codes by which the master or an owner has answered, so they say nothing against the connection.
_ANSWERS = {OK, NO_SPACE, BAD_PARAMS, NOT_READY, NOT_FOUND, EXISTS, LEASED, LEASE_EXPIRED, BUSY, CHECKSUM}


def error_of(code: int, kind: str) -> ErrorClass:
    """The error class of a negative return code of a put, get or remove."""
    if kind == "get" and code in _GET_ERRORS:
        return _GET_ERRORS[code]
    return _ERRORS.get(code, ErrorClass.IO)


def is_transport(code: int) -> bool:
    """Whether a code says that master or owner cannot be reached."""
    return code < 0 and code not in _ANSWERS


class RawClient(Protocol):
    """The calls of `mooncake.store.MooncakeDistributedStore` that are used."""

    def register_buffer(self, buffer_ptr: int, size: int) -> int: ...
    def unregister_buffer(self, buffer_ptr: int) -> int: ...
    def batch_is_exist(self, keys: list[str]) -> list[int]: ...
    def batch_put_from_multi_buffers(
        self, keys: list[str], all_buffer_ptrs: list[list[int]], all_sizes: list[list[int]]
    ) -> list[int]: ...
    def batch_get_into_multi_buffers(
        self, keys: list[str], all_buffer_ptrs: list[list[int]], all_sizes: list[list[int]]
    ) -> list[int]: ...
    def get_size(self, key: str) -> int: ...
    def remove(self, key: str, force: bool = False) -> int: ...
    def close(self) -> int: ...


class StoreClient:
    """One Mooncake client, usable from many threads; no call reaches it once it is closed."""

    def __init__(self, raw: RawClient) -> None:
        self._raw = raw
        self._calls = 0
        self._state = "open"
        self._changed = threading.Condition()

    def __enter__(self) -> RawClient:
        with self._changed:
            if self._state != "open":
                raise PoolClosedError("the store client is closed")
            self._calls += 1
        return self._raw

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._calls -= 1
            self._changed.notify_all()

    def register(self, pointer: int, size: int) -> int:
        """Registers a memory range for transfers; the return code."""
        with self as raw:
            return raw.register_buffer(pointer, size)

    def unregister(self, pointer: int) -> int:
        """Takes the registration back; the return code."""
        with self as raw:
            return raw.unregister_buffer(pointer)

    def exist(self, keys: Sequence[str]) -> list[int]:
        """Per key 1, 0 or a negative code. A present key is under lease afterwards."""
        with self as raw:
            found = raw.batch_is_exist(list(keys))
        return found if len(found) == len(keys) else [BAD_PARAMS] * len(keys)

    def put(self, key: str, pointers: list[int], sizes: list[int]) -> int:
        """0 also when the key exists (nothing is written then) or another put of it is under way."""
        with self as raw:
            return raw.batch_put_from_multi_buffers([key], [pointers], [sizes])[0]

    def get(self, key: str, pointers: list[int], sizes: list[int]) -> int:
        """Bytes read, or a negative code."""
        with self as raw:
            return raw.batch_get_into_multi_buffers([key], [pointers], [sizes])[0]

    def size(self, key: str) -> int:
        """Bytes of the object, or a negative code."""
        with self as raw:
            return raw.get_size(key)

    def remove(self, key: str) -> int:
        """Never forced: a forced remove under a reader gives it another object's bytes."""
        with self as raw:
            return raw.remove(key, False)

    def close(self, timeout_s: float) -> None:
        """Waits for calls in flight, then closes. StuckLeaseError if one hangs; no new call is let in either way."""
        with self._changed:
            if self._state == "closed":
                return
            self._state = "closing"
            if not self._changed.wait_for(lambda: self._calls == 0, timeout_s):
                raise StuckLeaseError(f"{self._calls} store calls still run after {timeout_s} s: the client stays open")
            self._state = "closed"
        self._raw.close()


@dataclass(frozen=True)
class MooncakeConfig:
    """How to reach a Mooncake Store. `segment_bytes` of this process's memory join the store; 0: a pure client."""

    master: str
    local_hostname: str = "127.0.0.1"
    metadata: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    device: str = ""
    segment_bytes: int = 0
    local_buffer_bytes: int = 16 << 20

    def __post_init__(self) -> None:
        host, _, port = str(self.master).rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
            raise ConfigError("master", self.master, "host:port of mooncake_master")
        check_int("segment_bytes", self.segment_bytes, 0)
        check_int("local_buffer_bytes", self.local_buffer_bytes, 0)
        if self.protocol not in ("tcp", "rdma"):
            raise ConfigError("protocol", self.protocol, "tcp, rdma")

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> MooncakeConfig:
        """From the JSON file that MOONCAKE_CONFIG_PATH names for serving engines; it brings no segment of its own."""
        with open(path, encoding="utf-8") as file:
            raw: dict[str, Any] = json.load(file)
        if "master_server_address" not in raw:
            raise ConfigError("master_server_address", f"missing in {path}", "host:port of mooncake_master")
        return cls(
            master=raw["master_server_address"],
            local_hostname=raw.get("local_hostname", "127.0.0.1"),
            metadata=raw.get("metadata_server", "P2PHANDSHAKE"),
            protocol=raw.get("protocol", "rdma"),
            device=raw.get("device_name", ""),
        )

    def connect(self, *, probe_s: float = 5.0) -> StoreClient:
        """A client. StateIOError if no master answers within `probe_s`; ConfigError if the wheel cannot load."""
        raw = client_class()()
        wait_for_port(self.master, probe_s)
        code = raw.setup(
            self.local_hostname, self.metadata, self.segment_bytes, self.local_buffer_bytes, self.protocol, self.device,
            self.master,
        )  # fmt: skip
        if code != OK:
            raise StateIOError(f"Mooncake setup at {self.master} over {self.protocol} returned {code}")
        return StoreClient(raw)


def client_class() -> Any:
    """The wheel's client class. ConfigError says why it cannot load and what to install."""
    reason = unavailable_reason()
    if reason is not None:
        raise ConfigError("mooncake", reason, INSTALL)
    from mooncake.store import MooncakeDistributedStore

    return MooncakeDistributedStore


def unavailable_reason() -> str | None:
    """Why the Mooncake wheel cannot be used here; None if it can."""
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        return f"the Mooncake wheel does not load: {error}"
    return None


def wait_for_port(address: str, timeout_s: float) -> None:
    """Returns once something listens at host:port. StateIOError after `timeout_s`."""
    host, _, port = address.rpartition(":")
    limit = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1.0).close()
            return
        except OSError as error:
            if time.monotonic() >= limit:
                raise StateIOError(f"no Mooncake master at {address} within {timeout_s} s: {error}") from error
            time.sleep(0.02)
