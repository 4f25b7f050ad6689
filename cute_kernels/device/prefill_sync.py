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


@cute.jit
def wait(barrier, parity: Int32, probe: cutlass.Constexpr):
    """Until the barrier's phase of `parity` is complete.

    With a probe ("bounded", slot, log) a warp that waits too long notes 1 + parity in its word of the log and exits; with
    ("profile", slot, log) the cycles waited are added to it. The log has 18 words a warp, one for each slot.
    """
    if cutlass.const_expr(probe is None):
        cute.arch.mbarrier_wait(barrier, parity)
    else:
        mode, slot, log = probe
        thread, _, _ = cute.arch.thread_idx()
        word = log + (thread // 32) * 72 + slot * 4
        if cutlass.const_expr(mode == "profile"):
            began = cute.arch.clock()
            cute.arch.mbarrier_wait(barrier, parity)
            waited = Int32(cute.arch.clock() - began)
            if thread % 32 == 0:
                cute.arch.inline_ptx("red.global.add.s32 [{$r0}], {$r1};", read_only_args=[word, waited])
        else:
            done = cute.arch.mbarrier_test_wait(barrier, parity)
            tries = Int32(0)
            while (not done) & (tries < 2000000):
                done = cute.arch.mbarrier_test_wait(barrier, parity)
                tries += 1
            if not done:
                cute.arch.inline_ptx("st.global.b32 [{$r0}], {$r1}; exit;", read_only_args=[word, parity + 1])


def _arrive(barrier, condition=1):
    """One arrival of the warp, after the accesses of all its lanes. A predicate, no branch: products may be in flight."""
    cute.arch.sync_warp()
    cute.arch.inline_ptx(
        "{ .reg .pred one, on; elect.sync _|one, -1; setp.ne.and.s32 on, {$r1}, 0, one; "
        "@on mbarrier.arrive.shared.b64 _, [{$r0}]; }",
        read_only_args=[barrier.toint(), Int32(condition)],
    )


class Ring:
    """Full and empty barriers of `stages` stages. `barriers` points at 2 * stages mbarriers.

    `probe` is None in a shipped kernel, or (mode, number, log) for `wait`, slots 2 number (full) and 2 number + 1 (empty).
    """

    def __init__(self, barriers, stages, producers, consumers, probe=None):
        self.stages, self.producers, self.consumers = stages, producers, consumers
        self.probes = (None, None) if probe is None else [(probe[0], 2 * probe[1] + i, probe[2]) for i in range(2)]
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
        wait(self.full + stage, parity, self.probes[0])

    def test_full(self, stage, parity):
        """Whether the producers have filled this stage. No branch: products may be in flight."""
        return cute.arch.mbarrier_test_wait(self.full + stage, parity)

    def wait_empty(self, stage, parity):
        """Until the consumers have left this stage; passes at once in the first round."""
        wait(self.empty + stage, parity ^ 1, self.probes[1])

    def is_full(self, stage, parity):
        """Whether they have, as of now: the answer is under way while other work is done."""
        return cute.arch.mbarrier_test_wait(self.full + stage, parity)

    def is_empty(self, stage, parity):
        """Whether the consumers have left this stage, as of now."""
        return cute.arch.mbarrier_test_wait(self.empty + stage, parity ^ 1)

    def release(self, stage):
        """One warp has read this stage."""
        _arrive(self.empty + stage)

    def publish(self, stage, condition=1):
        """One warp has written its part of this stage with ordinary stores that ordinary loads will read.

        Nothing happens where `condition` (a warp-uniform Int32) is 0.
        """
        _arrive(self.full + stage, condition)

    def publish_to_async(self, stage):
        """The same where wgmma or a bulk copy reads the stage."""
        cute.arch.fence_view_async_shared()
        self.publish(stage)

    def expect(self, stage, transferred):
        """Producer's arrival for a bulk load of `transferred` bytes."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.full + stage, transferred)


class Bundle:
    """Rings and shared addresses that a block's roles have in common; nothing in it changes in a loop."""

    def __init__(self, **parts):
        self.__dict__.update(parts)

    def __extract_mlir_values__(self):
        return []

    def __new_from_mlir_values__(self, values):
        return self


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
