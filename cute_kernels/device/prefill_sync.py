"""Rings of shared-memory stages between the roles of a prefill block.

A ring has a full and an empty mbarrier per stage. The producer of a stage waits for *empty* with the parity of the pass
before, its consumers for *full*; every role walks all rings in chunk order, so stage and parity follow from a cursor alone.
Arrivals are one per warp, after the warp's last access of the stage.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .prefill_layout import RECORD_WORDS
from .warp_ops import load_shared, store_shared


class Ring:
    """Full and empty barriers of `stages` stages. `barriers` points at 2 * stages mbarriers."""

    def __init__(self, barriers, stages, producers, consumers):
        self.stages, self.producers, self.consumers = stages, producers, consumers
        self.full, self.empty = barriers, barriers + stages

    # The compiler carries objects used in a dynamic loop through it; a ring has nothing that changes there.
    def __extract_mlir_values__(self):
        return []

    def __new_from_mlir_values__(self, values):
        return self

    def initialise(self):
        """Set arrival counts; one thread, before any use."""
        for stage in range(self.stages):
            cute.arch.mbarrier_init(self.full + stage, self.producers)
            cute.arch.mbarrier_init(self.empty + stage, self.consumers)

    def wait_full(self, stage, parity):
        """Until the producers have filled this stage."""
        cute.arch.mbarrier_wait(self.full + stage, parity)

    def wait_empty(self, stage, parity):
        """Until the consumers have left this stage; passes at once in the first round."""
        cute.arch.mbarrier_wait(self.empty + stage, parity ^ 1)

    def release(self, stage):
        """One warp has read this stage."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.empty + stage)

    def publish(self, stage):
        """One warp has written its part of this stage with ordinary stores that ordinary loads will read."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.full + stage)

    def publish_to_async(self, stage):
        """The same where wgmma or a bulk copy reads the stage."""
        cute.arch.fence_view_async_shared()
        self.publish(stage)

    def expect(self, stage, transferred):
        """Producer's arrival for a bulk load of `transferred` bytes."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.full + stage, transferred)


@cute.jit
def advance(stage: Int32, parity: Int32, stages: cutlass.Constexpr):
    """The next stage of a ring and its parity."""
    following = stage + 1
    wraps = following == stages
    return (Int32(0) if wraps else following), (parity ^ 1 if wraps else parity)


def read_record(address, stage):
    """The chunk record of a stage as 8 uniform words, in the order of `Field`."""
    base = address + stage * (4 * RECORD_WORDS)
    words = [*load_shared(base, 4, Int32), *load_shared(base + 16, 4, Int32)]
    return [cute.arch.make_warp_uniform(word) for word in words]


def write_record(address, stage, words):
    """Write a chunk record; one lane."""
    base = address + stage * (4 * RECORD_WORDS)
    store_shared(base, *words[:4])
    store_shared(base + 16, *words[4:])
