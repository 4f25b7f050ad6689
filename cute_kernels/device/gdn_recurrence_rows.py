"""Row work of the GDN recurrence from records: ends of short chunks and finished output rows."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .prefill_gdn_rows import copy_output_rows, store_output_rows, zero_rows
from .prefill_layout import CHUNK, INPUT_STAGES, OPERAND_BYTES, WORK_STAGES, Field, Flag
from .prefill_sync import advance, read_record
from .warp_ops import load_shared


@cute.jit
def run_ends(shared, lane):
    """Zero rows of a short chunk beyond its end in K and V, then let the state at the chunk; by one warp."""
    stage, parity, work, work_parity = Int32(0), Int32(0), Int32(0), Int32(0)
    stage_v, parity_v = Int32(0), Int32(0)
    shared.inputs.wait_full(stage, parity)
    record = read_record(shared.records, stage)
    while (record[Field.FLAGS] & Flag.STOP) == 0:
        count = record[Field.COUNT]
        if count < CHUNK:
            shared.v.wait_full(stage_v, parity_v)
            for part in cutlass.range(4, unroll=1):
                zero_rows(shared.k_base + stage * OPERAND_BYTES, 16 * part, 16, count, lane)
                zero_rows(shared.v_base + stage_v * shared.value_bytes, 16 * part, 16, count, lane, shared.slabs)
        shared.ready.wait_empty(work, work_parity)
        shared.ready.publish(work)
        stage, parity = advance(stage, parity, INPUT_STAGES)
        stage_v, parity_v = advance(stage_v, parity_v, shared.v.stages)
        work, work_parity = advance(work, work_parity, WORK_STAGES)
        shared.inputs.wait_full(stage, parity)
        record = read_record(shared.records, stage)
    shared.ready.wait_empty(work, work_parity)
    shared.ready.publish(work)


@cute.jit
def run_output(shared, lane, tma_out, gOut, sV, mOut):
    """Finished output rows of every chunk to global memory, where the stage's record says."""
    stage, parity = Int32(0), Int32(0)
    shared.output.wait_full(stage, parity)
    token, column, count = read_output(shared, stage)
    while count >= 0:
        cute.arch.fence_view_async_shared()
        if count == CHUNK:
            store_output_rows(tma_out, gOut, sV, shared.slabs, token, column, stage)
        else:
            copy_output_rows(shared.v_base + stage * shared.value_bytes, shared.slabs, mOut, token, count, column, lane)
            cute.arch.fence_view_async_shared()
        shared.v.release(stage)
        stage, parity = advance(stage, parity, shared.v.stages)
        shared.output.wait_full(stage, parity)
        token, column, count = read_output(shared, stage)


def read_output(shared, stage):
    """(token, column, count) of a V stage's output; count -1 at the end."""
    words = load_shared(shared.outputs + stage * 16, 4, Int32)
    return [cute.arch.make_warp_uniform(word) for word in words[:3]]
