"""Ready flags of chunk records: a recurrence that runs beside the kernel which makes its records.

Two launches on one stream: the records kernel first, an ordinary launch or one that waits for all before it at its start; the
recurrence directly behind it, a programmatic dependent launch (`use_pdl=True`). A flag is a 32-bit word in global memory, one
for each record, of arbitrary content before the call.

    records kernel, each block                          recurrence, each block
    clear_flag of the records it will make itself       join, one thread, then a block barrier
    let_start, one warp, behind a block barrier         published, the warp that loads records, before each load
    make a record, then publish, or hand_over           leave, one block at least, before it exits
    to a warp that runs publish_handed

**A flag that the recurrence finds set is of this call.** Its blocks start when all blocks of the records kernel have passed
`let_start`, behind which a block's zeros have been performed for the whole GPU. A block clears only what it
sets itself, so no zero follows a one. Whatever else the recurrence reads that the records kernel wrote is either written before
`let_start` too, or lies behind a flag.

**A record whose flag is set is there.** Ordinary stores of the block come before its barrier, that before the flag's release;
bulk stores are complete when `hand_over` has waited for them, and its release within the block comes before the fence for the
whole GPU of the warp that finds them handed over. The lane that finds a flag set does so by an acquire, the warp's barrier hands
that on, and a proxy fence orders the bulk copy behind it.

**Nobody waits in a circle.** The records kernel never waits for the recurrence, and the recurrence has no block on the chip
before every block of the records kernel is: it can only take multiprocessors that they have left over. Where launches are
made one after the other (a profiler, a full chip) all flags are set when the recurrence starts.

**Launches before and after.** The records kernel begins when everything before it has ended, so its blocks and, behind them,
those of the recurrence may write whatever earlier launches read: slots, outputs, a workspace that the allocator gave out
again. `join` drops what the first-level cache holds from before. What the recurrence writes the records kernel must not
read. `leave` returns when the records kernel has ended; a launch behind the recurrence hence finds both complete. One
block's wait is enough, and the others give their multiprocessors up at once.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from .warp_ops import load_shared, store_shared

LAST, NONE = 1 << 30, -1  # of what is handed over


def clear_flag(address):
    """Zero to the flag at a global byte address (Int64); one thread, of the block that publishes this flag later."""
    cute.arch.inline_ptx("st.relaxed.gpu.global.u32 [{$r0}], 0;", read_only_args=[address])


def let_start():
    """Let the recurrence's blocks start; one warp of the block, behind a barrier at which the others have come behind all
    `clear_flag`. Nobody waits for its fence: that of sixteen warps would take 3 us, in which a first record is half made.
    """
    cute.arch.fence_acq_rel_gpu()
    cute.arch.sync_warp()
    cute.arch.griddepcontrol_launch_dependents()


def publish(address):
    """Set a flag behind a record of ordinary stores; one thread, behind a barrier of all that stored."""
    cute.arch.inline_ptx("st.release.gpu.global.u32 [{$r0}], 1;", read_only_args=[address])


@cute.jit
def hand_over(place: Int32, full: cute.Pointer, empty: cute.Pointer, parity: Int32, word: Int32):
    """A record of bulk stores to the warp that publishes; the thread that issued and committed them. The warp of a release for
    the whole GPU stands still for half a microsecond.

    The word at the shared `place` is the record's number, with LAST of the thread's last one, or NONE instead of that.
    """
    cute.arch.cp_async_bulk_wait_group(0)
    cute.arch.inline_ptx("fence.proxy.async.global;")
    cute.arch.mbarrier_wait(empty, parity ^ 1)
    store_shared(place, word)
    cute.arch.mbarrier_arrive(full)


@cute.jit
def publish_handed(
    places: Int32,
    full: cute.Pointer,
    empty: cute.Pointer,
    count: cutlass.Constexpr,
    flags: Int64,
    pitch: Int32,
    lane: Int32,
):
    """A warp of the block: let the recurrence start, then set the flags of what is handed over at `count` places, a lane each.

    `flags` is the address of record 0's flag, `pitch` the bytes from one to the next.
    """
    own = cutlass.min(lane, count - 1)
    if lane < count:
        cute.arch.mbarrier_init(full + lane, 1)
        cute.arch.mbarrier_init(empty + lane, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    let_start()
    is_open, parity = (Int32(1) if lane < count else Int32(0)), Int32(0)
    while cute.arch.vote_ballot_sync(is_open != 0) != 0:
        here = cute.arch.mbarrier_test_wait(full + own, parity) & (is_open != 0)
        if cute.arch.vote_ballot_sync(here) != 0:
            cute.arch.fence_acq_rel_gpu()
            if here:
                word = load_shared(places + 4 * own, 1, Int32)
                if word != NONE:
                    address = flags + Int64(word & (LAST - 1)) * Int64(pitch)
                    cute.arch.inline_ptx("st.relaxed.gpu.global.u32 [{$r0}], 1;", read_only_args=[address])
                is_open = Int32(1) if (word >= 0) & (word < LAST) else Int32(0)
                cute.arch.mbarrier_arrive(empty + own)
                parity = parity ^ 1
        else:
            cute.arch.inline_ptx("nanosleep.u32 40;")


def join():
    """First of all in a block of the recurrence: one thread, before a block barrier, or all before they read."""
    cute.arch.fence_acq_rel_gpu()


def leave():
    """Last of all in one block of the recurrence, or in each: all threads that reach the end."""
    cute.arch.griddepcontrol_wait()


@cute.jit
def published(flags: Int64, pitch: Int32, slot: Int32, end: Int32, lane: Int32) -> Int32:
    """Wait until the flag of `slot` is set; returns the first slot behind it, at most `end`, not known to be published.

    One warp. `flags` is the address of slot 0's flag, `pitch` the bytes from one slot's to the next one's. Bulk copies issued
    by the warp afterwards find the records of all slots before the returned one. Up to 32 flags are looked at together, so a
    warp that is behind need not look for each: `if slot >= known: known = published(…)`.
    """
    ahead = slot + lane
    address = flags + Int64(ahead if ahead < end else slot) * Int64(pitch)
    run = Int32(0)
    while run == 0:
        word = cute.arch.inline_ptx(
            "ld.acquire.gpu.global.u32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address]
        )
        missing = cute.arch.vote_ballot_sync((word == 0) | (ahead >= end))
        run = cute.arch.popc((missing ^ -1) & (missing - 1))
    cute.arch.sync_warp()
    cute.arch.inline_ptx("fence.proxy.async.global;")
    return slot + run
