"""Fixtures of the store's tests: one simulated store, and engines over it that must be whole when a test ends."""

import pytest

from tests.pool.store_fake import FakeBackend
from tests.pool.store_rig import Rig


@pytest.fixture
def backend():
    return FakeBackend()


@pytest.fixture
def make(backend):
    """Builds rigs over one store and closes them; each must be idle and whole at its end."""
    rigs = []

    def build(ranks=1, **options):
        rig = Rig([backend.client() for _ in range(ranks)], **options)
        rig.raw = [client._raw for client in rig.clients]
        rigs.append(rig)
        return rig

    yield build
    for rig in rigs:
        for raw in rig.raw:
            raw.gate.set()
        rig.close()
        rig.check_idle()
        assert all(raw.closed and not raw.registered for raw in rig.raw)
