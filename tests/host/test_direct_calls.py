"""Kernels of a prebuilt library are called without tvm_ffi's wrappers; what such a call cannot take goes the usual way."""

from __future__ import annotations

import shutil
import subprocess

import pytest
import torch

from compact_state.cute_kernels.compile import shared_library

tvm_ffi = pytest.importorskip("tvm_ffi")

KERNEL = """
#include <tvm/ffi/c_api.h>
static double seen[8];
double* result(void) { return seen; }
int __tvm_ffi_probe(void* self, const TVMFFIAny* given, int32_t count, TVMFFIAny* out) {
  const DLTensor* tensor = given[0].v_ptr;
  if (given[0].type_index != kTVMFFIDLTensorPtr || count != 6) return -1;
  if (given[2].type_index != kTVMFFIInt || given[3].type_index != kTVMFFIBool) return -1;
  if (given[4].type_index != kTVMFFIFloat || given[5].type_index != kTVMFFINone) return -1;
  const double* values = (const double*)((const char*)tensor->data + tensor->byte_offset);
  seen[0] = values[0], seen[1] = tensor->shape[0], seen[2] = tensor->strides[0];
  seen[3] = ((const DLTensor*)given[1].v_ptr)->ndim;
  seen[4] = given[2].v_int64, seen[5] = given[3].v_int64, seen[6] = given[4].v_float64;
  return given[2].v_int64 < 0 ? -1 : 0;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A library of one kernel, whose caller takes CPU tensors for CUDA's."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler (cc) to build the caller")
    from tvm_ffi.libinfo import find_dlpack_include_path, find_include_path, find_libtvm_ffi

    folder = tmp_path_factory.mktemp("library")
    (folder / "probe.c").write_text(KERNEL)
    path = folder / "probe.so"
    command = ["cc", "-shared", "-fPIC", "-DDEVICE=kDLCPU", "-o", path, folder / "probe.c", shared_library.CALLER]
    command += [f"-I{find_include_path()}", f"-I{find_dlpack_include_path()}", find_libtvm_ffi()]
    subprocess.run([str(part) for part in command], check=True)
    return path


@pytest.fixture
def usual():
    calls = []
    return lambda *given: calls.append(given), calls


def test_tensors_and_numbers_arrive(library, usual):
    import ctypes

    function, calls = usual
    kernel = shared_library.direct(library, "probe", function)
    assert kernel is not function
    tensor = torch.arange(12, dtype=torch.float64)[2:].view(2, 5)
    kernel(tensor, torch.nn.Parameter(torch.zeros(2, 3, 4)), 2**40, True, 0.25, None)
    result = ctypes.CDLL(str(library)).result
    result.restype = ctypes.POINTER(ctypes.c_double)
    assert result()[:7] == [2.0, 2.0, 5.0, 3.0, 2.0**40, 1.0, 0.25]
    assert not calls


@pytest.mark.parametrize(
    "change",
    [{0: [1.0]}, {1: "text"}, {2: -1}, {2: 2**70}, {4: torch.float32}, {5: 1}, {0: torch.zeros(1, device="meta")}],
    ids=str,
)
def test_what_is_refused_goes_the_usual_way(library, usual, change):
    function, calls = usual
    given = [torch.zeros(3, dtype=torch.float64), torch.zeros(2), 3, False, 1.0, None]
    for index, value in change.items():
        given[index] = value
    shared_library.direct(library, "probe", function)(*given)
    (seen,) = calls
    assert all(a is b for a, b in zip(seen, given, strict=True))


def test_errors_of_the_usual_way_are_raised(library):
    def refuse(*given):
        raise ValueError("its own words")

    with pytest.raises(ValueError, match="its own words"):
        shared_library.direct(library, "probe", refuse)(None)


def test_a_family_asks_once_for_each_set_of_sizes_dtypes_and_values(library, usual):
    function, calls = usual
    kernel, asked = shared_library.direct(library, "probe", function), []

    def choose(*given):
        asked.append(given)
        return kernel

    family = shared_library.family(choose, library)
    first, second = torch.zeros(3, dtype=torch.float64), torch.zeros(2)
    for _ in range(3):
        family(first, second, 3, False, 1.0, None)
        family(torch.ones(3, dtype=torch.float64), torch.ones(2), 3, False, 1.0, None)
    assert len(asked) == 1
    others = (
        (torch.zeros(4, dtype=torch.float64), second, 3, False, 1.0, None),
        (torch.zeros(3, dtype=torch.int64), second, 3, False, 1.0, None),
        (torch.zeros(1, 3, dtype=torch.float64), second, 3, False, 1.0, None),
        (first, second, 4, False, 1.0, None),
        (first, second, 3, True, 1.0, None),
        (first, second, 3, False, 1.5, None),
    )
    for _ in range(2):
        for given in others:
            family(*given)
    assert len(asked) == 1 + len(others)
    assert not calls


def test_a_family_forgets_the_oldest_choices(library, usual):
    function, _ = usual
    kernel, asked = shared_library.direct(library, "probe", function), []
    family = shared_library.family(lambda *given: asked.append(given) or kernel, library)
    tensor, other = torch.zeros(3, dtype=torch.float64), torch.zeros(2)
    for value in (*range(300), *range(299, 299 - 256, -1)):
        family(tensor, other, value, False, 1.0, None)
    assert len(asked) == 300
    family(tensor, other, 0, False, 1.0, None)
    assert len(asked) == 301


def test_a_family_raises_what_its_choice_raises_and_keeps_no_other_function(library, usual):
    def refuse(*given):
        raise KeyError("none fits")

    given = (torch.zeros(3, dtype=torch.float64), torch.zeros(2), 3, False, 1.0, None)
    with pytest.raises(KeyError, match="none fits"):
        shared_library.family(refuse, library)(*given)
    function, calls = usual
    asked = []
    family = shared_library.family(lambda *given: asked.append(given) or function, library)
    family(*given)
    family(*given)
    family([1.0], "text")  # nothing that a description can be made of
    assert len(asked) == len(calls) == 3


def test_a_kernel_that_refuses_goes_the_usual_way_in_a_family_too(library, usual):
    function, calls = usual
    kernel = shared_library.direct(library, "probe", function)
    family = shared_library.family(lambda *given: kernel, library)
    for _ in range(2):
        family(torch.zeros(3, dtype=torch.float64), torch.zeros(2), -1, False, 1.0, None)
    assert len(calls) == 2


def test_a_library_without_caller_or_kernel_is_called_as_usual(library, tmp_path, usual):
    function, _ = usual
    assert shared_library.direct(library, "absent", function) is function
    assert shared_library.direct(tmp_path / "absent.so", "probe", function) is function
    calls = []
    shared_library.family(lambda *seen: calls.append, tmp_path / "absent.so")(torch.zeros(1))
    assert len(calls) == 1
