"""A real Mooncake Store for tests: master and segment owner as processes on loopback, gone when the test is."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import xxhash

from compact_state.pool.mooncake import StoreClient, unavailable_reason
from compact_state.pool.mooncake_loopback import LoopbackMooncake
from compact_state.pool.store_keys import HEADER_BYTES, Header
from compact_state.pool.store_types import StoreSettings
from tests.pool.store_rig import Rig

#: Where an engine's slots are. In GPU memory every transfer passes the pinned ring.
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
#: Limits that suit a slow machine, and leases that run out in half a second.
LIVE = StoreSettings(
    workers=2, put_deadline_s=20.0, get_deadline_s=20.0, find_deadline_s=20.0, breaker_cooldown_s=0.2,
    retry_after_s=0.2, remove_after_s=0.6,
)  # fmt: skip


class Borrowed:
    """A client that several engines use and none closes: starting and closing one takes a second."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    def close(self) -> int:
        return 0


class Cluster:
    """The processes, two clients that engines take by turns, and engines that are closed and checked at the end."""

    def __init__(self, folder: Any, device: str = "cpu", **options: Any) -> None:
        self.device = device
        self.mooncake = LoopbackMooncake(folder, **options)
        self.clients = [self.mooncake.config.connect() for _ in range(2)]
        self.side = self.clients[0]
        self.rigs: list[Rig] = []

    def rig(self, ranks: int = 1, kind: type[Rig] = Rig, **options: Any) -> Rig:
        """An engine; the next one has another client."""
        first = len(self.rigs) + 1
        clients = [StoreClient(Borrowed(self.clients[(first + rank) % 2]._raw)) for rank in range(ranks)]
        self.rigs.append(kind(clients, **{"settings": LIVE, "device": self.device, **options}))
        return self.rigs[-1]

    def raw_get(self, key: str) -> bytes:
        """An object's bytes; empty if it is not there."""
        with self.side as raw:
            return bytes(raw.get(key))  # type: ignore[attr-defined]

    def replace(self, key: str, data: bytes) -> None:
        """Puts other bytes under a key, as a broken writer would. Nobody else may be reading."""
        with self.side as raw:
            raw.remove(key, True)
            assert raw.put(key, data) == 0  # type: ignore[attr-defined]

    def check_objects(self) -> int:
        """Every object of the store has a header that names its key and the right checksum. Returns bytes verified."""
        verified = 0
        for key in self.mooncake.list_keys():
            data = self.raw_get(key)
            if not data or not key.startswith("cs1:"):
                continue
            step, size = int(key.split(":")[2]), len(data) - HEADER_BYTES
            header = Header.check(data[:HEADER_BYTES], key=key, step=step, payload_bytes=size)
            assert isinstance(header, Header), (key, header)
            assert xxhash.xxh3_64_intdigest(data[HEADER_BYTES:]) == header.checksum, key
            verified += size
        return verified

    def finish(self) -> None:
        """Closes every engine; each must account for all its slots."""
        for rig in self.rigs:
            rig.close()
            rig.check_idle()

    def close(self) -> None:
        """Ends the processes, whatever state the engines are in."""
        try:
            for client in self.clients:
                client.close(5.0)
        finally:
            self.mooncake.close()


@contextmanager
def cluster(folder: Any, **options: Any) -> Iterator[Cluster]:
    """A cluster of its own. Skips the test with the reason where the wheel cannot load."""
    reason = unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    running = Cluster(folder, **options)
    try:
        yield running
        running.finish()
    finally:
        running.close()
