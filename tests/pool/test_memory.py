"""StatePool and StateIdTable on CPU tensors."""

import random
import subprocess
import sys

import pytest
import torch

from compact_state.pool import (
    UNRESOLVED,
    CapacityError,
    CheckpointIndex,
    ConfigError,
    InvariantError,
    LayerSpec,
    Ledger,
    Lifecycle,
    PrefixKey,
    StateIdTable,
    StateLayout,
    StatePool,
    StepRow,
    StuckLeaseError,
)
from compact_state.pool.id_table import FIELDS
from compact_state.pool.pool import device_of

LAYOUT = StateLayout.of(
    [
        LayerSpec(24, 3, 8, 4, 4, "bfloat16", "float32"),
        LayerSpec(17, 1, 5, 3, 2, "float32", "bfloat16", "kda"),
    ]
)


def test_the_package_imports_without_torch() -> None:
    code = "import sys; import compact_state.pool; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, check=True)


def test_views_address_the_record_of_each_slot() -> None:
    pool = StatePool(LAYOUT, 5)
    assert pool.memory is not None
    pool.memory.zero_()
    for number, spec in enumerate(LAYOUT.layers):
        conv, state = pool.conv_view(number), pool.state_view(number)
        assert tuple(conv.shape) == (5, *spec.conv_shape)
        assert tuple(state.shape) == (5, *spec.state_shape)
        for view in (conv, state):
            assert view.stride(0) * view.element_size() == pool.slot_bytes
            assert view[0].is_contiguous()
            assert view.data_ptr() % 16 == 0
        conv[3] = number + 1
        state[3] = -number - 1
    assert not pool.memory[[0, 1, 2, 4]].any()
    for span in LAYOUT.spans:
        assert pool.memory[3, span.offset : span.offset + span.size].any()
    with pytest.raises(ConfigError, match="layer"):
        pool.state_view(2)


def test_G2_poison_is_nan_in_every_part_and_comes_back_with_each_free() -> None:
    pool = StatePool(LAYOUT, 2, poison_on_free=True)
    life = Lifecycle(pool.ledger, CheckpointIndex(pool.ledger), pool)
    for _ in range(2):
        request = life.add("a", PrefixKey(range(9)))
        assert life.admit(request)
        plan = life.plan([StepRow(request, 4)])
        (slot,) = plan.write_ids
        for layer in range(2):
            assert pool.conv_view(layer)[slot].isnan().all()
            assert pool.state_view(layer)[slot].isnan().all()
            pool.conv_view(layer)[slot] = 0
            pool.state_view(layer)[slot] = 0
        life.launched(plan.step)
        life.finish(request, publish=False)
        assert not pool.state_view(0)[slot].isnan().any()
        life.poll()
        assert pool.state_view(0)[slot].isnan().all()


def test_G2_every_ranks_slot_is_poisoned() -> None:
    freed: list[int] = []
    ledger = Ledger(2)
    ledger.on_free = freed.append
    pools = [StatePool(LAYOUT, 2, ledger=ledger, poison_on_free=True) for _ in range(2)]
    for pool in pools:
        pool.state_view(0)[:] = 0
    step = ledger.begin_step()
    handle = ledger.alloc_besteffort(step)
    assert handle is not None
    ledger.abandon(step)
    assert freed == [handle.slot]
    for pool in pools:
        assert pool.state_view(0)[handle.slot].isnan().all()
        assert not pool.state_view(0)[1 - handle.slot].isnan().any()


def test_memory_is_freed_only_asleep() -> None:
    pool = StatePool(LAYOUT, 2)
    life = Lifecycle(pool.ledger, CheckpointIndex(pool.ledger), pool)
    with pytest.raises(StuckLeaseError, match="'run'"):
        pool.release()
    life.sleep(deadline_s=1.0)
    assert pool.memory is None
    with pytest.raises(StuckLeaseError, match="sleeps"):
        pool.conv_view(0)
    life.wake()
    assert pool.memory is not None
    assert pool.ledger.incarnation == 1


def test_I25_three_rounds_of_sleep_and_wake_leave_nothing() -> None:
    pool = StatePool(LAYOUT, 4)
    life = Lifecycle(pool.ledger, CheckpointIndex(pool.ledger), pool)
    handles = set()
    for number in range(3):
        request = life.add(number, PrefixKey(range(9)))
        assert life.admit(request)
        assert request.resumed == 0, "a checkpoint outlived the memory"
        life.launched(life.plan([StepRow(request, 8, positions=[4])]).step)
        entry = life.finish(request)
        assert entry is not None
        handles.add(entry.handle.pack())
        life.sleep(deadline_s=1.0)
        assert pool.memory is None
        assert life.index.size == 0
        life.wake()
        assert len(pool.ledger.free) == 4
    assert len(handles) == 3
    assert pool.ledger.incarnation == 3


def test_a_record_is_reached_by_a_handle_of_its_present_life_only() -> None:
    pool = StatePool(LAYOUT, 1)
    life = Lifecycle(pool.ledger, CheckpointIndex(pool.ledger), pool)
    request = life.add("a", PrefixKey(range(9)))
    life.admit(request)
    life.launched(life.plan([StepRow(request, 4)]).step)
    assert request.holder is not None
    assert request.holder.rec is not None
    handle = pool.ledger.handle(request.holder.rec)
    assert pool.slot_bytes_of(handle).numel() == pool.slot_bytes
    life.cancel(request)
    life.poll()
    with pytest.raises(InvariantError, match="stale"):
        pool.slot_bytes_of(handle)


def test_a_shared_ledger_takes_no_options() -> None:
    with pytest.raises(ConfigError, match="ledger"):
        StatePool(LAYOUT, 3, ledger=Ledger(2))
    with pytest.raises(ConfigError, match="ledger"):
        StatePool(LAYOUT, 2, ledger=Ledger(2), policy="early")


def test_id_table_addresses_never_move_and_tails_name_nothing() -> None:
    table = StateIdTable(4, depth=2)
    pointers = {name: table.view(name, 4).data_ptr() for name in ("read_ids", "write_ids", "positions", "log_half")}
    table.stage(1, [5, 6, 7], [5, 8, 7], [1, 2, 3], num_accepted=[1, 1, 1], log_half=[0, 1, 0])
    assert table.read_ids.tolist() == [5, 6, 7, -1]
    assert table.write_ids.tolist() == [5, 8, 7, -1]
    assert table.view("positions").tolist() == [1, 2, 3]
    table.step_done(1)
    table.stage(2, [9], [9], [4])
    assert table.read_ids.tolist() == [9, -1, -1, -1]
    assert table.write_ids.tolist() == [9, -1, -1, -1]
    assert table.positions.tolist() == [4, 0, 0, 0]
    assert {name: table.view(name, 4).data_ptr() for name in pointers} == pointers


def test_a_new_table_names_no_slot_and_takes_two_steps() -> None:
    """Before the first step a captured graph may run over all rows."""
    table = StateIdTable(3)
    assert [table.view(name, 3).tolist() for name in FIELDS] == [[-1] * 3, [-1] * 3, [0] * 3, [0] * 3, [0] * 3]
    assert (table.rows, table.depth) == (0, 2)
    for step in (1, 2):
        table.stage(step, [step], [step], [0])
    for sources in ([], [0, 0], [1], [-2]):
        with pytest.raises(ConfigError, match="sources"):
            table.stage(3, [3], [3], sources=sources)
    with pytest.raises(CapacityError):
        table.stage(3, [3], [3], [0])


def test_a_cleared_row_names_no_slot_and_holds_nothing() -> None:
    table = StateIdTable(3)
    table.stage(1, [5, 6], [7, 8], [10, 20], num_accepted=[2, 3], log_half=[1, 1])
    table.clear([1])
    fields = table.read_ids, table.write_ids, table.positions, table.num_accepted, table.log_half
    assert [field.tolist() for field in fields] == [[5, -1, -1], [7, -1, -1], [10, 0, 0], [2, 0, 0], [1, 0, 0]]
    for row in (-1, 3):
        with pytest.raises(ConfigError, match="rows"):
            table.clear([0, row])
    assert table.read_ids.tolist() == [5, -1, -1]


def test_a_staging_row_is_not_overwritten_before_its_fence() -> None:
    table = StateIdTable(2, depth=2)
    table.stage(1, [1], [1], [0])
    table.stage(2, [2], [2], [0])
    with pytest.raises(CapacityError, match="step 1 is still read"):
        table.stage(3, [3], [3], [0])
    assert table.read_ids.tolist() == [2, -1]
    table.step_done(1)
    table.stage(3, [3], [3], [0])
    assert table.read_ids.tolist() == [3, -1]


def test_fields_the_device_moves_on_are_kept_and_follow_their_rows() -> None:
    table = StateIdTable(4, depth=8)
    table.stage(1, [1, 2, 3], [1, 2, 3], [10, 20, 30], num_accepted=[1, 2, 3], log_half=[1, 0, 1])
    table.positions[:3] += 5
    table.stage(2, [1, 2, 3], [1, 2, 3])
    assert table.positions.tolist() == [15, 25, 35, 0]
    table.stage(3, [3, 9, 1], [3, 9, 1], sources=[2, -1, 0])
    assert table.positions.tolist() == [35, 0, 15, 0]
    assert table.num_accepted.tolist() == [3, 0, 1, 0]
    assert table.log_half.tolist() == [1, 0, 1, 0]
    table.stage(4, [3], [3], sources=[0])
    assert table.positions.tolist() == [35, 0, 0, 0]


def test_bad_rows_are_named() -> None:
    table = StateIdTable(2)
    with pytest.raises(ConfigError, match="rows"):
        table.stage(1, [1, 2, 3], [1, 2, 3])
    with pytest.raises(ConfigError, match="write_ids"):
        table.stage(1, [1, 2], [1])
    with pytest.raises(ConfigError, match="sources"):
        table.stage(1, [1], [1], sources=[0])
    for field, value in (("positions", UNRESOLVED), ("num_accepted", "one"), ("log_half", None)):
        with pytest.raises(ConfigError, match=f"{field}: got .*int32"):
            table.stage(1, [1], [1], **{"positions": [0], field: [value]})
    assert table.read_ids.tolist() == [-1, -1]
    with pytest.raises(ConfigError, match="name"):
        table.view("ids")
    for argument in ("max_rows", "depth"):
        with pytest.raises(ConfigError, match=argument):
            StateIdTable(**{"max_rows": 1, argument: 0})


def decode(pool: StatePool, table: StateIdTable, lengths: list[int]) -> None:
    """Stand-in for a graph captured over all rows of the table: adds 1 to the state of each row with a length."""
    for row, length in enumerate(lengths):
        read, write = int(table.read_ids[row]), int(table.write_ids[row])
        if 0 <= read < pool.num_slots and 0 <= write < pool.num_slots:
            pool.state_view(0)[write] = pool.state_view(0)[read] + length


def test_A6_a_row_that_ended_names_no_slot_in_later_steps() -> None:
    pool = StatePool(LAYOUT, 2)
    life = Lifecycle(pool.ledger, CheckpointIndex(pool.ledger), pool)
    table = StateIdTable(4)
    ended = life.add("r", PrefixKey(range(9)))
    life.admit(ended)
    plan = life.plan([StepRow(ended, 4)])
    table.stage(plan.step, [plan.write_ids[0]] * 4, [plan.write_ids[0]] * 4)
    life.launched(plan.step)
    life.finish(ended, publish=False)
    table.step_done(life.poll())
    table.clear(range(4))
    assert table.read_ids.tolist() == table.write_ids.tolist() == [-1] * 4
    follows = life.add("q", PrefixKey(range(9)))
    life.admit(follows)
    first = life.plan([StepRow(follows, 4)])
    assert first.write_ids == plan.write_ids
    pool.state_view(0)[first.write_ids[0]] = 0
    life.launched(first.step)
    life.poll()
    step = life.plan([StepRow(follows, 1)])
    table.stage(step.step, step.read_ids, step.write_ids)
    decode(pool, table, [1, 1, 1, 1])
    assert (pool.state_view(0)[first.write_ids[0]] == 1).all()


def test_A7_padding_costs_no_slot_and_touches_none() -> None:
    pool = StatePool(LAYOUT, 4)
    life = Lifecycle(pool.ledger, CheckpointIndex(pool.ledger), pool)
    table = StateIdTable(4)
    requests = [life.add(name, PrefixKey(range(9))) for name in range(4)]
    assert all(life.admit(request) for request in requests[:3])
    plan = life.plan([StepRow(request, 4) for request in requests[:3]])
    life.launched(plan.step)
    parked = plan.write_ids[2]
    assert pool.memory is not None
    pool.memory.copy_(torch.randint(0, 100, pool.memory.shape, dtype=torch.uint8))
    before = pool.memory[parked].clone()
    step = life.plan([StepRow(request, 1) for request in requests[:2]])
    table.stage(step.step, step.read_ids, step.write_ids)
    decode(pool, table, [1] * 4)
    life.launched(step.step)
    assert torch.equal(pool.memory[parked], before)
    assert life.admit(requests[3])
    assert life.plan([StepRow(requests[3], 1)]).write_ids == [3]


def test_G17_skipped_rows_follow_their_own_step_even_with_no_free_slot() -> None:
    pool = StatePool(LAYOUT, 2)
    life = Lifecycle(pool.ledger, CheckpointIndex(pool.ledger), pool)
    table = StateIdTable(3)
    requests = [life.add(name, PrefixKey(range(9))) for name in range(2)]
    assert all(life.admit(request) for request in requests)
    life.launched(life.plan([StepRow(request, 1) for request in requests]).step)
    assert pool.ledger.available == 0
    pool.state_view(0).zero_()
    for pattern in ([0, None, 1], [0, 1, None]):
        plan = life.plan([StepRow(request, 1) for request in requests])
        reads = [-1 if row is None else plan.read_ids[row] for row in pattern]
        table.stage(plan.step, reads, reads)
        decode(pool, table, [1] * 3)
        life.launched(plan.step)
        table.step_done(life.poll())
    assert (pool.state_view(0) == 2).all()


def test_publish_and_restore_move_no_byte() -> None:
    """Random traffic over real memory: nothing but the stand-in kernels ever writes it."""
    rng = random.Random(0)
    pool = StatePool(LAYOUT, 8)
    life = Lifecycle(pool.ledger, CheckpointIndex(pool.ledger, budget_slots=4), pool)
    assert pool.memory is not None
    pool.memory.zero_()
    for name in range(50):
        request = life.add(name, PrefixKey([rng.randrange(3)] * 12 + [name]))
        assert life.admit(request)
        while request.position < 12:
            plan = life.plan([StepRow(request, 2, positions=range(2, 13, 2))])
            before = pool.memory.clone()
            life.launched(plan.step)
            life.poll()
            assert torch.equal(pool.memory, before)
        life.finish(request)
    assert life.index.hit_tokens > 0
    assert pool.copied_bytes == 0


def test_devices_are_those_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for right in ("cpu", "cuda", "cuda:0", "cuda:1", torch.device("cuda:1")):
        assert device_of(right) == torch.device(right)
    for wrong in ("cuda:2", "cuda:7", "meta", "nonsense", 3.5):
        with pytest.raises(ConfigError, match="device"):
            device_of(wrong)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match="device"):
        device_of("cuda")
