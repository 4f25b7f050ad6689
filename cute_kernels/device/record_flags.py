"""Ready flags of chunk records: a recurrence that runs beside the kernel which makes its records.

Two launches on one stream: the records kernel first, an ordinary launch or one that waits for all before it at its start; the
recurrence directly behind it, a programmatic dependent launch (`use_pdl=True`). A flag is a 32-bit word in global memory, one
for each record, of arbitrary content before the call.

    records kernel, each block                          recurrence, each block
    clear_flag of the records it will make itself       join, one thread, then a block barrier
    start_recurrence, all threads (let_start, a warp)   published, the warp that loads records, before each load
    make a record, then publish (or publish_bulk)       leave, one block at least, before it exits

**A flag that the recurrence finds set is of this call.** Its blocks start when all blocks of the records kernel have passed
`start_recurrence`, behind which a block's zeros have been performed for the whole GPU. A block clears only what it
sets itself, so no zero follows a one. Whatever else the recurrence reads that the records kernel wrote is either written before
`start_recurrence` too, or lies behind a flag.

**A record whose flag is set is there.** Ordinary stores of the block come before its barrier, that before the flag's release;
bulk stores are complete when `publish_bulk` has waited for them. The lane that finds a flag set does so by an acquire, the
warp's barrier hands that on, and a proxy fence orders the bulk copy behind it.

**Nobody waits in a circle.** The records kernel never waits for the recurrence, and the recurrence has no block on the chip
before every block of the records kernel is: it can only take multiprocessors that they have left over. Where launches are
made one after the other (a profiler, a full chip) all flags are set when the recurrence starts.

**Launches before and after.** The records kernel begins when everything before it has ended, so its blocks and, behind them,
those of the recurrence may write whatever earlier launches read: slots, outputs, a workspace that the allocator gave out
again. `join` drops what the first-level cache holds from before. What the recurrence writes the records kernel must not
read. `leave` returns when the records kernel has ended; a launch behind the recurrence hence finds both complete. One
block's wait is enough, and the others give their multiprocessors up at once.
"""

import cutlass.cute as cute
from cutlass import Int32, Int64


def clear_flag(address):
    """Zero to the flag at a global byte address (Int64); one thread, of the block that publishes this flag later."""
    cute.arch.inline_ptx("st.relaxed.gpu.global.u32 [{$r0}], 0;", read_only_args=[address])


@cute.jit
def start_recurrence():
    """Let the recurrence's blocks start; all threads of the block, outside branches, behind all its `clear_flag`.

    One warp's fence is enough for the stores of all that came to the barrier, and nobody waits for it: sixteen of them would
    take 3 us, in which a first record is half made.
    """
    cute.arch.sync_threads()
    if cute.arch.thread_idx()[0] >= cute.arch.block_dim()[0] - 32:
        let_start()


def let_start():
    """The same by one warp of the block, behind a barrier at which the others have arrived behind all `clear_flag`."""
    cute.arch.fence_acq_rel_gpu()
    cute.arch.sync_warp()
    cute.arch.griddepcontrol_launch_dependents()


def publish(address):
    """Set a flag behind a record of ordinary stores; one thread, behind a barrier of all that stored."""
    cute.arch.inline_ptx("st.release.gpu.global.u32 [{$r0}], 1;", read_only_args=[address])


def publish_bulk(address):
    """The same behind a record of bulk stores; the thread that issued and committed them."""
    cute.arch.cp_async_bulk_wait_group(0)
    cute.arch.inline_ptx("fence.proxy.async.global; st.release.gpu.global.u32 [{$r0}], 1;", read_only_args=[address])


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
