"""Slots in GPU memory and a real Mooncake Store over TCP: a pinned ring between them, CUDA events as fences.

The engine's compute stream writes each state long after the host has queued it, so a transfer that does not wait for the
event of its step is seen: it moves other bytes.
"""

import json

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from compact_state.pool import CudaFence
from compact_state.pool.mooncake import StoreClient
from tests.pool.mooncake_fixture import LIVE, Borrowed, cluster
from tests.pool.store_rig import Rig, source_of_a_put_stays

pytestmark = [pytest.mark.gpu, pytest.mark.mooncake]
MIB_HEADS = 255  # a slot of one MiB
LATE = 600_000_000  # clock cycles: about 0.3 s


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with cluster(tmp_path_factory.mktemp("mooncake"), device="cuda", client_ttl_s=10) as running:
        yield running


@pytest.fixture
def prompt(request):
    """Tokens of this test's own, so that tests share the store but no key."""
    seed = sum(request.node.name.encode()) * 1000
    return [seed + i for i in range(20)]


class LateRig(Rig):
    """States are written by a compute stream, 0.3 s after the host has queued them, and fenced by its events."""

    def __init__(self, *arguments, **options):
        self.compute = torch.cuda.Stream()
        with torch.cuda.stream(self.compute):
            super().__init__(*arguments, **options)
        self.ledger.on_free = None  # a fill on a stream would hide the late write

    def fill(self, slot, key, position):
        pattern = self.pattern(key, position, 0).pin_memory()
        with torch.cuda.stream(self.compute):
            torch.cuda._sleep(LATE)
            self.pools[0].memory[slot].copy_(pattern, non_blocking=True)

    def fence(self):
        return CudaFence("cuda", self.compute)

    def verify(self, slot, key, position):
        self.compute.synchronize()
        super().verify(slot, key, position)


class Recording(Borrowed):
    """A client that lists what is registered with it."""

    def __init__(self, raw):
        super().__init__(raw)
        self.registered = []

    def register_buffer(self, pointer, size):
        self.registered.append((pointer, size))
        return self._raw.register_buffer(pointer, size)


def copies(prof, path):
    """(direction, bytes) of every copy by the copy engine, and every kernel, of a trace."""
    prof.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    moved = [(e["name"].split()[1], int(e["args"]["bytes"])) for e in events if e.get("cat") == "gpu_memcpy"]
    return moved, [e["name"] for e in events if e.get("cat") == "kernel"]


def test_gpu_slots_pass_a_pinned_ring_that_alone_is_registered(store, prompt, tmp_path):
    client = Recording(store.side._raw)
    rig = Rig([StoreClient(client)], heads=MIB_HEADS, device="cuda", settings=LIVE)
    memory, size = rig.ports[0].memory, rig.pools[0].slot_bytes
    assert memory.mode == "staged"
    assert memory._ring.is_pinned()
    assert client.registered == [(memory._ring.data_ptr(), memory._ring.numel())]
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    entry = rig.checkpoint(prompt[:10])
    with profile(activities=activities) as put:
        assert rig.put(entry)
    rig.evict_all()
    request = rig.request(prompt)
    with profile(activities=activities) as get:
        rig.store.find(request, [10])
        rig.settle(lambda: not rig.store.pending(request))
    # One copy each way, and nothing else runs on the device.
    assert copies(put, tmp_path / "put.json") == ([("DtoH", size)], [])
    assert copies(get, tmp_path / "get.json") == ([("HtoD", size)], [])
    rig.life.cancel(request)
    rig.check_idle()
    assert rig.index.size == 1
    assert rig.verified == size
    rig.close()


def test_direct_transfers_over_tcp_are_right_or_refused(store, prompt):
    """The CUDA wheel moves GPU memory itself; the other one takes the registration and then fails every transfer."""
    rig = store.rig(heads=MIB_HEADS, mode="direct")
    memory = rig.ports[0].memory
    assert memory.mode == "direct"
    entry = rig.checkpoint(prompt[:10])
    if rig.put(entry):
        assert store.rig(heads=MIB_HEADS, mode="direct").resume(prompt, [10]) == 10
        assert store.rig(heads=MIB_HEADS, device="cpu").resume(prompt, [10]) == 10
    else:
        assert rig.ledger.counters.e_io == 1
        assert store.rig(heads=MIB_HEADS).resume(prompt, [10]) == 0
    print("moved" if entry.stored else "refused")


@pytest.mark.parametrize("reader", ["cpu", "cuda"])
def test_a_put_waits_for_the_event_of_its_step(store, prompt, reader):
    rig = store.rig(kind=LateRig, heads=MIB_HEADS)
    entry = rig.checkpoint(prompt[:10])
    assert rig.store.put(entry)
    assert rig.ledger.done < rig.ledger.submitted, "the step ended before the put was asked for"
    rig.settle(lambda: entry.stored)
    assert rig.ledger.done == rig.ledger.submitted
    assert store.rig(heads=MIB_HEADS, device=reader).resume(prompt, [10]) == 10
    assert store.check_objects() >= rig.pools[0].slot_bytes


def test_a_put_that_does_not_wait_stores_other_bytes(store, prompt):
    """A test of the test above."""
    rig = store.rig(kind=LateRig, heads=MIB_HEADS)
    rig.ledger.may_start = lambda lease: True
    entry = rig.checkpoint(prompt[:10])
    rig.store.put(entry)
    rig.settle(lambda: entry.stored)
    reader = unchecked(store, heads=MIB_HEADS)
    with pytest.raises(AssertionError, match="wrong state"):
        reader.resume(prompt, [10])
    reader.close()


def unchecked(store, **options):
    """An engine that may end in a wrong state."""
    rig = store.rig(**options)
    store.rigs.remove(rig)
    return rig


def overtaken(store, prompt):
    """A load into a slot that a cancelled request's step is still to write; returns engine, request and slot."""
    assert (writer := store.rig(heads=MIB_HEADS)).put(writer.checkpoint(prompt[:10]))
    rig = unchecked(store, kind=LateRig, heads=MIB_HEADS, slots=2, policy="early")
    gone = rig.request([prompt[0] + 500] * 8)
    assert rig.life.admit(gone)
    rig.run(gone, 8)
    slot = gone.holder.rec.slot
    rig.life.cancel(gone)
    assert rig.ledger.free[-1].slot == slot, "the early policy gives the slot back at once"
    request = rig.request(prompt)
    rig.store.find(request, [10])
    return rig, request, slot


def test_a_load_waits_for_steps_that_still_write_its_slot(store, prompt):
    rig, request, slot = overtaken(store, prompt)
    rig.settle(lambda: bool(rig.ledger.leases))
    (lease,) = rig.ledger.leases.values()
    assert lease.handle.slot == slot
    assert rig.ledger.done < lease.after_step
    rig.settle(lambda: not rig.store.pending(request))
    assert rig.life.admit(request)
    assert request.resumed == 10
    rig.run(request, 10)
    rig.life.finish(request)
    rig.settle(rig.ledger.quiet)
    rig.check_idle()
    rig.close()


def test_a_load_that_does_not_wait_is_overwritten(store, prompt, monkeypatch):
    """A test of the test above."""
    rig, request, _ = overtaken(store, prompt)
    monkeypatch.setattr(rig.ledger, "may_start", lambda lease: True)
    rig.settle(lambda: not rig.store.pending(request))
    assert rig.life.admit(request)
    with pytest.raises(AssertionError, match="wrong state"):
        rig.run(request, 10)
    rig.close()


def test_the_source_of_a_put_cannot_be_reused(store, prompt):
    source_of_a_put_stays(store, prompt, MIB_HEADS)


def test_I21_sleep_frees_the_device_memory_and_wake_loads_again(store, prompt):
    rig = store.rig(heads=MIB_HEADS)
    assert rig.put(rig.checkpoint(prompt[:10]))
    for _ in range(3):
        rig.life.sleep(deadline_s=5, progress=rig.store.poll)
        rig.store.poll()
        assert rig.pools[0].memory is None
        rig.life.wake()
        rig.store.poll()
        assert rig.resume(prompt, [10]) == 10
