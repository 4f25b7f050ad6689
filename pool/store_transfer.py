"""The transfer half of one rank: threads that move slots between the pool's memory and the store.

It decides nothing about slots: the ledger's half (store.py) granted the lease, and hears of its end exactly once. A call
of the client cannot be interrupted, so a thread that hangs is left alone with its buffer and another takes its place.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from . import mooncake
from .errors import ErrorClass, PoolError, StateIOError, StuckLeaseError
from .fences import Fence
from .mooncake import StoreClient, error_of, is_transport
from .observe import traced
from .pool import StatePool
from .store_keys import HEADER_BYTES, Header, HeaderFault
from .store_memory import RingBuffer, SlotMemory
from .store_types import Breaker, Completion, Job, StoreSettings


class StepFences:
    """Fences of one rank's steps for its transfer threads, where the ledger hears of another rank's fences only."""

    def __init__(self, timeout_s: float = 10.0) -> None:
        self.timeout_s = timeout_s
        self._fences: deque[tuple[int, Fence]] = deque()
        self._last = 0
        self._changed = threading.Condition()

    def record(self, step: int, fence: Fence) -> None:
        """The step's work is queued on this rank's device; `fence` comes after it."""
        with self._changed:
            while self._fences and self._fences[0][1].passed():
                self._fences.popleft()
            self._fences.append((step, fence))
            self._last = step
            self._changed.notify_all()

    def wait(self, step: int) -> None:
        """Returns once the work of `step` is done here. StateIOError if it is not even queued within `timeout_s`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._last >= step, self.timeout_s):
                raise StateIOError(f"step {step} was not launched on this rank within {self.timeout_s} s")
            fence = next((fence for number, fence in self._fences if number >= step), None)
        if fence is not None:
            fence.wait()


class StateTransfer:
    """A `RankPort` over a Mooncake client in this process.

    `wait_step(step)` blocks a transfer thread until this rank's fence of `step` has passed (`StepFences.wait`); needed
    only where the ledger's half hears of the fences of another rank (`fence_ranks=1`). `mode`: see store_memory.
    """

    def __init__(
        self,
        pool: StatePool,
        client: StoreClient,
        settings: StoreSettings | None = None,
        *,
        mode: str = "auto",
        wait_step: Callable[[int], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool, self.client = pool, client
        self.settings = settings or StoreSettings()
        self.breaker = Breaker(self.settings.breaker_failures, self.settings.breaker_cooldown_s)
        self.memory = SlotMemory(pool, client, self.settings.workers + self.settings.max_wedged, mode)
        self._wait_step, self._clock = wait_step, clock
        self._queue: deque[Job] = deque()
        self._running: dict[int, Job] = {}
        self._wedged: set[int] = set()
        self._done: deque[Completion] = deque()
        self._wake = threading.Condition()
        self._closing = self._closed = False
        self._threads: set[threading.Thread] = set()
        try:
            self.memory.attach()
        except BaseException:
            self.memory.release_ring()
            raise
        for _ in range(self.settings.workers):
            self._spawn()

    @property
    def layout_digest(self) -> str:
        """Digest of this rank's slot layout."""
        return self.pool.layout.digest

    # The ledger's side

    def submit(self, job: Job) -> None:
        """Queues a job; exactly one completion follows unless it is withdrawn."""
        with self._wake:
            if not self._closing:
                self._queue.append(job)
                self._wake.notify()
                return
        self._done.append(_failed(job, "the transfer threads are closed"))

    def withdraw(self, op: int) -> bool:
        """True if the job had not started and never will: no completion follows."""
        with self._wake:
            for job in self._queue:
                if job.op == op:
                    self._queue.remove(job)
                    return True
        return False

    def replace(self, op: int) -> None:
        """The job's thread hangs: starts another, up to `max_wedged`."""
        with self._wake:
            if op in self._running and op not in self._wedged and len(self._wedged) < self.settings.max_wedged:
                self._wedged.add(op)
                self._spawn()

    def completions(self) -> Sequence[Completion]:
        """Terminal reports since the last call, in the order in which they came."""
        found = []
        while self._done:
            found.append(self._done.popleft())
        return found

    def attach(self) -> None:
        """Registers the pool's memory with the transport."""
        if not self._closed:
            self.memory.attach()

    def detach(self) -> None:
        """Unregisters it. StuckLeaseError while a transfer may touch it."""
        with self._wake:
            busy = [op for op, job in self._running.items() if job.kind in ("put", "get")]
        if busy:
            raise StuckLeaseError(f"transfers {busy} may still touch the pool's memory")
        self.memory.detach()

    def close(self, timeout_s: float) -> None:
        """Ends threads and client; queued jobs complete as failed. StuckLeaseError if a call still hangs."""
        limit = self._clock() + timeout_s
        with self._wake:
            self._closing = True
            while self._queue:
                self._done.append(_failed(self._queue.popleft(), "the transfer threads are closed"))
            self._wake.notify_all()
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, limit - self._clock()))
        if any(thread.is_alive() for thread in threads):
            raise StuckLeaseError(f"store calls of transfers {sorted(self._running)} still hang: the memory must stay")
        if not self._closed:
            self._closed = True
            self.memory.detach()
            self.memory.release_ring()
            self.client.close(timeout_s)

    # The threads

    def _spawn(self) -> None:
        buffer = self.memory.take()
        thread = threading.Thread(target=self._loop, args=(buffer,), name="compact-state store", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _loop(self, buffer: RingBuffer) -> None:
        while True:
            with self._wake:
                while not self._queue and not self._closing:
                    self._wake.wait()
                if not self._queue:
                    self._threads.discard(threading.current_thread())
                    self.memory.give(buffer)
                    return
                job = self._queue.popleft()
                op = job.op
                self._running[op] = job
            completion = self._perform(job, buffer)
            with self._wake:
                del self._running[op]
                surplus = op in self._wedged
                self._wedged.discard(op)
                self._done.append(completion)
                if surplus:
                    self._threads.discard(threading.current_thread())
                    self.memory.give(buffer)
                    return

    def _perform(self, job: Job, buffer: RingBuffer) -> Completion:
        if job.deadline is not None and self._clock() >= job.deadline:
            return _failed(job, "its deadline passed while it waited")
        if not self.breaker.allows(self._clock()):
            return _failed(job, "the breaker is open: the store did not answer")
        work = {"put": self._put, "get": self._get, "find": self._find, "remove": self._remove}[job.kind]
        try:
            with traced(f"store.{job.kind}"):
                completion = work(job, buffer)
        except PoolError as error:
            return _failed(job, str(error), error=error.error_class)
        except Exception as error:  # A thread that dies would leave its lease without an end.
            return _failed(job, f"{type(error).__name__}: {error}")
        if completion.transport:
            self.breaker.failure(self._clock())
        else:
            self.breaker.success()
        return completion

    def _put(self, job: Job, buffer: RingBuffer) -> Completion:
        key = job.keys[0]
        there = self.client.exist([key])[0]
        if there == 1:
            return Completion(job.op, "put", True)
        if there < 0:
            return _coded(job, there, "is_exist before the put")
        self._fence(job)
        checksum = self.memory.load(job.slot, buffer)
        size = self.memory.size
        buffer.write_header(Header(key, job.step, size, checksum, secrets.randbits(64)).pack())
        code = self.client.put(key, *self.memory.pieces(job.slot, buffer))
        if code not in (mooncake.OK, mooncake.EXISTS):
            return _coded(job, code, "put")
        there = self.client.exist([key])[0]
        if there < 0:
            return _coded(job, there, "is_exist after the put")
        if there != 1:
            return _failed(job, "put returned 0, yet the key is not there")
        return Completion(job.op, "put", True, stored=True, payload_bytes=size)

    def _get(self, job: Job, buffer: RingBuffer) -> Completion:
        key, size = job.keys[0], self.memory.size
        self._fence(job)
        buffer.write_header(bytes(HEADER_BYTES))
        code = self.client.get(key, *self.memory.pieces(job.slot, buffer))
        if code == mooncake.LEASE_EXPIRED:
            code = self.client.get(key, *self.memory.pieces(job.slot, buffer))
        if code != HEADER_BYTES + size:
            return self._wrong_size(job, code)
        header = Header.check(buffer.read_header(), key=key, step=job.step, payload_bytes=size)
        if isinstance(header, HeaderFault):
            return _failed(job, header.reason, error=header.error, bad=True)
        if self.memory.checksum(job.slot, buffer) != header.checksum:
            return _failed(job, "the payload's checksum does not match", error=ErrorClass.DATA, bad=True)
        self.memory.deliver(job.slot, buffer)
        return Completion(job.op, "get", True, payload_bytes=size)

    def _wrong_size(self, job: Job, code: int) -> Completion:
        wanted = HEADER_BYTES + self.memory.size
        # An object of another size reads as bad parameters or a failed transfer: ask which it is.
        stored = self.client.size(job.keys[0]) if code in (mooncake.BAD_PARAMS, mooncake.TRANSFER) else code
        if stored >= 0 and stored != wanted:
            return _failed(job, f"{stored} bytes stored, {wanted} expected", error=ErrorClass.MISS, bad=True)
        return _coded(job, code if code < 0 else mooncake.BAD_PARAMS, "get")

    def _find(self, job: Job, _: RingBuffer) -> Completion:
        found = self.client.exist(job.keys)
        bad = next((code for code in found if code < 0), 0)
        if bad:
            return _coded(job, bad, "is_exist")
        return Completion(job.op, "find", True, present=tuple(code == 1 for code in found))

    def _remove(self, job: Job, _: RingBuffer) -> Completion:
        code = self.client.remove(job.keys[0])
        if code in (mooncake.OK, mooncake.NOT_FOUND):
            return Completion(job.op, "remove", True)
        return _coded(job, code, "remove")

    def _fence(self, job: Job) -> None:
        if self._wait_step is not None and job.after_step:
            self._wait_step(job.after_step)


def _failed(job: Job, reason: str, *, error: ErrorClass = ErrorClass.IO, bad: bool = False) -> Completion:
    return Completion(job.op, job.kind, False, error, reason, bad=bad)


def _coded(job: Job, code: int, call: str) -> Completion:
    return Completion(
        job.op, job.kind, False, error_of(code, job.kind), f"{call} returned {code}", transport=is_transport(code)
    )
