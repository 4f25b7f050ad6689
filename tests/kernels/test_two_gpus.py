"""J7: a call works on its tensors' device and that device's current stream, whichever device is current."""

from __future__ import annotations

import pytest
import torch

from compact_state.cute_kernels import advance_state_ids, gdn_decode, gdn_prefill, reference
from compact_state.cute_kernels.reference.datasets import cu_seqlens, delta_inputs, initial_states

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"{torch.cuda.device_count()} CUDA devices; needs two"),
]


def arguments(rows, hv=4):
    inputs = delta_inputs("gdn", "randn", rows, 2, hv, device="cuda:1")
    return inputs.tensors, initial_states(2 * rows, hv).to("cuda:1")


@pytest.mark.parametrize("prefill", [False, True], ids=["decode", "prefill"])
def test_J7_tensors_of_another_device_than_the_current_one(prefill):
    torch.cuda.set_device(0)
    rows = 100 if prefill else 5
    tensors, pool = arguments(rows)
    count = 1 if prefill else rows
    read = torch.arange(count, dtype=torch.int32, device="cuda:1")
    exact = pool.double()
    extra = (cu_seqlens([rows], device="cuda:1"),) if prefill else ()
    oracle = reference.gdn_prefill if prefill else reference.gdn_decode
    expected = oracle(*(x.double() for x in tensors), exact, read, read + count, *extra)
    stream = torch.cuda.Stream("cuda:1")
    stream.wait_stream(torch.cuda.current_stream("cuda:1"))
    with torch.cuda.stream(stream):
        torch.cuda.set_device(0)
        torch.cuda._sleep(10_000_000)  # on device 0: nothing of the call may wait for it
        operator = gdn_prefill if prefill else gdn_decode
        out = operator(*tensors, pool, read, read + count, *extra, backend="kernels")
        assert torch.cuda.current_device() == 0
    stream.synchronize()
    assert out.device == torch.device("cuda:1")
    for actual, reference_value in ((out, expected), (pool[count : 2 * count], exact[count : 2 * count])):
        error = (actual.double() - reference_value).norm() / reference_value.norm()
        assert error < 5e-3


def test_J7_work_is_on_the_other_devices_current_stream():
    torch.cuda.set_device(0)
    ids = torch.zeros(3, 4, dtype=torch.int32, device="cuda:1")
    advance_state_ids(*ids.clone(), num_slots=2)  # loads the kernel, which takes longer than the sleep below
    ids[1] = 1
    stream = torch.cuda.Stream("cuda:1")
    torch.cuda.synchronize("cuda:1")
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        torch.cuda.set_device(0)
        advance_state_ids(*ids, num_slots=2)
    assert not stream.query()
    stream.synchronize()
    assert ids[0].tolist() == [1] * 4
