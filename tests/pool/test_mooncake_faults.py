"""A real Mooncake Store whose processes are killed, stopped and restarted under running transfers."""

import subprocess
import sys
import time
from dataclasses import replace

import pytest

from tests.pool.mooncake_fixture import DEVICES, LIVE, cluster
from tests.pool.store_rig import Rig

pytestmark = [pytest.mark.mooncake, DEVICES]
MIB_HEADS = 255
PROMPT = list(range(20))


@pytest.fixture
def store(tmp_path, request, device):
    """Its times of expiry can be set by a test's parameter."""
    with cluster(tmp_path, device=device, **getattr(request, "param", {})) as running:
        yield running


def until(done, timeout_s=30.0):
    limit = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < limit
        time.sleep(0.05)


def put_until_stored(rig: Rig, tokens: list[int]) -> None:
    """Puts a checkpoint again and again, as an engine does that meets the same prefix again and again."""

    def done() -> bool:
        rig.evict_all()
        return rig.put(rig.checkpoint(tokens))

    until(done)


def test_master_killed_in_a_put_and_restarted(store):
    settings = replace(LIVE, find_deadline_s=1.0, breaker_failures=2, workers=4, retry_after_s=0.0)
    rig = store.rig(slots=8, heads=MIB_HEADS, settings=settings)
    assert rig.put(rig.checkpoint(PROMPT[:5]))
    entry = rig.checkpoint(PROMPT[:10])
    store.mooncake.pause_owner(True)
    rig.store.put(entry)
    time.sleep(0.2)
    store.mooncake.kill_master()
    store.mooncake.pause_owner(False)
    assert rig.store.settle(20)
    assert not entry.stored
    rig.evict_all()
    # Requests wait for the find's deadline at most, and not at all once the breaker is open.
    waited = []
    for number in range(8):
        begun = time.monotonic()
        assert rig.resume([*PROMPT, number], [5, 10]) == 0
        waited.append(time.monotonic() - begun)
    assert rig.store.breaker.open
    assert min(waited) < 0.5
    assert sum(waited) < 8 * 1.0
    assert rig.ledger.counters.gets_ok == 0
    store.mooncake.start_master()
    # Owner and clients come back by themselves; all old keys are gone, which is a miss.
    put_until_stored(rig, PROMPT[:12])
    assert not rig.store.breaker.open
    other = store.rig(slots=8, heads=MIB_HEADS)
    assert other.resume(PROMPT, [5, 10]) == 0
    assert other.resume(PROMPT, [5, 10, 12]) == 12
    assert rig.ledger.quarantined == 0


def test_owner_killed_and_replaced(store):
    rig = store.rig(slots=8, heads=MIB_HEADS)
    for position in (5, 10):
        assert rig.put(rig.checkpoint(PROMPT[:position]))
    store.mooncake.kill_owner()
    reader = store.rig(slots=8, heads=MIB_HEADS)
    # Its states cannot be read; which error says so depends on whether the master knows already.
    assert reader.resume(PROMPT, [5, 10]) == 0
    assert reader.ledger.counters.gets_ok == 0
    assert not rig.put(rig.checkpoint(PROMPT[:11]))
    store.mooncake.start_owner()
    put_until_stored(rig, PROMPT[:12])
    until(lambda: reader.resume(PROMPT, [12]) == 12)
    assert rig.ledger.quarantined == reader.ledger.quarantined == 0


PUTTER = """
import ctypes, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", sys.argv[1])
data = ctypes.create_string_buffer(4 << 20)
store.register_buffer(ctypes.addressof(data), len(data))
sys.stdin.readline()
print("putting", flush=True)
store.put_from(sys.argv[2], ctypes.addressof(data), len(data))
"""


@pytest.mark.parametrize("store", [{"client_ttl_s": 20, "put_discard_s": 5}], indirect=True)
def test_putter_killed_in_a_put(store):
    """Its key is neither readable nor writable until the master gives the put up; a put of it does not count before."""
    rig, reader = (store.rig(slots=8, heads=MIB_HEADS) for _ in range(2))
    entry = rig.checkpoint(PROMPT[:10])
    key = rig.store._keys.of_rank(rig.store._keys.names(entry.key, [10])[0], 0)
    command = [sys.executable, "-c", PUTTER, store.mooncake.address, key]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as putter:
        putter.stdin.write(b"go\n")
        store.mooncake.pause_owner(True)
        putter.stdin.flush()
        assert putter.stdout.readline() == b"putting\n"
        time.sleep(0.3)
        putter.kill()
    store.mooncake.pause_owner(False)
    assert reader.resume(PROMPT, [10]) == 0
    assert not rig.put(entry)
    assert rig.ledger.counters.e_io == 1
    put_until_stored(rig, PROMPT[:10])
    assert reader.resume(PROMPT, [10]) == 10
    assert store.check_objects() > 0


@pytest.mark.parametrize("store", [{"client_ttl_s": 20}], indirect=True)
def test_an_owner_that_stands_still_costs_a_slot_and_no_more(store):
    """Past its deadline a transfer may still touch its slot: quarantine, and a late end that changes nothing."""
    settings = replace(LIVE, get_deadline_s=2.0, put_deadline_s=2.0)
    rig = store.rig(slots=4, heads=MIB_HEADS)
    assert rig.put(rig.checkpoint(PROMPT[:10]))
    reader = store.rig(slots=4, heads=MIB_HEADS, settings=settings)
    store.mooncake.pause_owner(True)
    begun = time.monotonic()
    assert reader.resume(PROMPT, [10]) == 0
    assert time.monotonic() - begun < 10
    assert reader.ledger.quarantined == 1
    assert reader.ledger.counters.e_stuck == 1
    for number in range(6):
        reader.checkpoint([number])
    store.mooncake.pause_owner(False)
    reader.settle(lambda: not reader.ledger.stuck)
    assert reader.ledger.quarantined == 1
    reader.check_idle()
    reader.life.sleep(deadline_s=5, progress=reader.store.poll)
    reader.life.wake()
    reader.store.poll()
    assert reader.ledger.quarantined == 0
    until(lambda: reader.resume(PROMPT, [10]) == 10)
