"""States through a real Mooncake Store on loopback: the way there and back, eviction, leases, bad payloads, many threads."""

import time
from dataclasses import replace

import pytest

from compact_state.pool import PoolClosedError, StateIOError
from compact_state.pool.mooncake import MooncakeConfig
from compact_state.pool.mooncake_loopback import free_port
from tests.pool.mooncake_fixture import LIVE, cluster
from tests.pool.store_rig import QUICK, Rig, source_of_a_put_stays

pytestmark = pytest.mark.mooncake
MIB_HEADS = 255  # a slot of one MiB


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with cluster(tmp_path_factory.mktemp("mooncake"), segment_bytes=32 << 20, client_ttl_s=10) as running:
        yield running


@pytest.fixture
def prompt(request):
    """Tokens of this test's own, so that tests share the store but no key."""
    seed = sum(request.node.name.encode()) * 1000
    return [seed + i for i in range(20)]


@pytest.mark.parametrize(("mode", "ranks"), [("host", 1), ("staged", 1), ("direct", 2)])
def test_a_state_travels_between_engines(store, prompt, mode, ranks):
    first, second = store.rig(ranks, mode=mode), store.rig(ranks)
    entry = first.checkpoint(prompt[:10])
    assert first.put(entry)
    (name,) = first.store._keys.names(entry.key, [10])
    assert len([key for key in store.mooncake.list_keys() if key.startswith(name.text)]) == ranks
    assert second.resume(prompt, [5, 10, 15]) == 10
    assert second.ledger.counters.gets_ok == 1
    # The key exists: another put of it is done without a transfer, and counts.
    first.evict_all()
    assert first.put(first.checkpoint(prompt[:10]))
    assert first.store.counters.puts_present == ranks
    assert store.check_objects() >= ranks * 8704


def test_eviction_by_a_full_store_is_a_miss_and_never_a_wrong_state(store):
    """48 MiB of states into 32 MiB: refused puts are E_CAPACITY, evicted ones misses; E_IO if gone before a put is checked."""
    rig = store.rig(slots=4, heads=MIB_HEADS)
    stored = []
    for number in range(48):
        entry = rig.checkpoint([number, 5, 6])
        stored.append(rig.put(entry))
        if not stored[-1]:
            time.sleep(0.1)
    counters = rig.ledger.counters
    assert counters.e_capacity + counters.e_io == stored.count(False)
    reader = store.rig(slots=4, heads=MIB_HEADS)
    hits = [reader.resume([number, 5, 6, 7], [3]) == 3 for number in range(48)]
    assert 5 < sum(hits) < 48
    assert not [number for number in range(48) if hits[number] and not stored[number]]
    assert reader.ledger.counters.e_data == 0
    assert reader.verified == sum(hits) * reader.pools[0].slot_bytes
    assert store.check_objects() > 0


@pytest.mark.parametrize("fault", ["truncated", "longer", "corrupted", "foreign", "empty header"])
def test_bad_payloads_are_refused_and_replaced(store, prompt, fault):
    rig = store.rig()
    entry = rig.checkpoint(prompt[:10])
    assert rig.put(entry)
    key = rig.store._keys.of_rank(rig.store._keys.names(entry.key, [10])[0], 0)
    good = store.raw_get(key)
    bad = {
        "truncated": good[:-256],
        "longer": good + good[-256:],
        "corrupted": good[:-1] + bytes([good[-1] ^ 0x80]),
        "foreign": good[:20] + bytes(8) + good[28:],
        "empty header": bytes(64) + good[64:],
    }[fault]
    store.replace(key, bad)
    reader = store.rig()
    assert reader.resume(prompt, [10]) == 0
    counters = reader.ledger.counters
    assert (counters.e_miss, counters.e_data) == ((0, 1) if fault in ("corrupted", "foreign") else (1, 0))
    # The read granted a lease, so an unforced remove has to wait for it; then the state can be stored anew.
    assert reader.clients[0].remove(key) == -706
    reader.settle(lambda: reader.store.counters.keys_removed == 1)
    entry.stored = False
    assert rig.put(entry)
    assert store.rig().resume(prompt, [10]) == 10


def test_the_source_of_a_put_cannot_be_reused(store, prompt):
    source_of_a_put_stays(store, prompt, MIB_HEADS)


def test_eight_threads_each_way(store):
    settings = replace(LIVE, workers=8)
    writer, reader = (store.rig(slots=24, heads=15, settings=settings) for _ in range(2))
    prompts = [[7000 + number, *range(9)] for number in range(20)]
    entries = [writer.checkpoint(tokens) for tokens in prompts]
    for entry in entries:
        writer.store.put(entry)
    assert writer.ledger.puts_in_flight == 8
    assert writer.store.settle(30)
    assert all(entry.stored for entry in entries)
    waiting = [reader.request([*tokens, 1]) for tokens in prompts]
    for request in waiting:
        reader.store.find(request, [10])
    reader.settle(lambda: not any(reader.store.pending(request) for request in waiting))
    # Loads past the cap of eight wait for those before them.
    assert reader.ledger.counters.gets_ok == 20
    for request in waiting:
        assert reader.life.admit(request)
        assert request.resumed == 10
        reader.run(request, 1)
        reader.life.cancel(request)


def test_two_engines_put_one_key_at_once(store, prompt):
    rigs = [store.rig(heads=MIB_HEADS) for _ in range(2)]
    entries = [rig.checkpoint(prompt[:10]) for rig in rigs]
    for rig, entry in zip(rigs, entries):
        rig.store.put(entry)
    for rig in rigs:
        assert rig.store.settle(20)
    # The second may be told that the key is not there yet; then it did not store it, and says so.
    assert any(entry.stored for entry in entries)
    assert store.rig(heads=MIB_HEADS).resume(prompt, [10]) == 10


def test_I21_sleep_and_wake(store, prompt):
    rig = store.rig()
    assert rig.put(rig.checkpoint(prompt[:10]))
    for _ in range(3):
        rig.life.sleep(deadline_s=5, progress=rig.store.poll)
        rig.store.poll()
        rig.life.wake()
        assert rig.resume(prompt, [10]) == 10


def test_a_closed_client_is_never_called(store, prompt):
    """Most calls of the wheel's client crash the process after close."""
    rig = store.rig()
    entry = rig.checkpoint(prompt[:10])
    assert rig.put(entry)
    rig.close()
    client = rig.clients[0]
    for call in (lambda: client.exist(["x"]), lambda: client.get("x", [0], [0]), lambda: client.size("x")):
        with pytest.raises(PoolClosedError):
            call()
    assert not rig.store.put(entry)


def test_no_master_is_said_at_once(store):
    """The wheel's own setup blocks for 90 s."""
    begun = time.monotonic()
    with pytest.raises(StateIOError, match="no Mooncake master"):
        MooncakeConfig(f"127.0.0.1:{free_port()}").connect(probe_s=0.2)
    assert time.monotonic() - begun < 10


def test_the_rig_sees_a_wrong_state(store, prompt):
    """A test of these tests: a payload changed together with its checksum is noticed by the reader's comparison."""
    rig = Rig([store.mooncake.config.connect()], settings=QUICK)
    entry = rig.checkpoint(prompt[:10])
    rig.pools[0].memory[entry.handle.slot, 0] ^= 1
    assert rig.put(entry)
    reader = Rig([store.mooncake.config.connect()], settings=QUICK)
    with pytest.raises(AssertionError, match="wrong state"):
        reader.resume(prompt, [10])
    rig.close()
    reader.close()
