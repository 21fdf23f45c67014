"""The CUDA runtime as hone calls it: what the headers say, what is kept of failures, and other threads' captures."""

from __future__ import annotations

import ctypes
import re
import threading

import pytest

from hone.engines import cuda_runtime
from hone.engines.cuda_runtime import CudaError, CudaRuntime, library_places
from tests.fake_cuda import LAUNCH_FAILURE, OUT_OF_MEMORY, SUCCESS, FakeCudart


@pytest.fixture
def cudart():
    return FakeCudart()


@pytest.fixture
def cuda(cudart):
    return CudaRuntime(cudart)


@pytest.fixture(scope="module")
def headers():
    """NVIDIA's own, which come with the CUDA runtime."""
    folder = next(place.parent.parent / "include" for place in library_places() if place.is_absolute())
    return {name: (folder / name).read_text() for name in ("driver_types.h", "cuda_runtime_api.h")}


def enumerator(text, name):
    found = re.search(rf"\b{name}\s*=\s*(0x[0-9a-fA-F]+|\d+)", text) or re.search(
        rf"#define {name}\s+(0x\w+|\d+)", text
    )
    assert found, name
    return int(found[1], 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cudaDevAttrMultiProcessorCount", cuda_runtime._NUM_SMS),
        ("cudaDevAttrL2CacheSize", cuda_runtime._L2_BYTES),
        ("cudaDevAttrComputeCapabilityMajor", cuda_runtime._MAJOR),
        ("cudaDevAttrComputeCapabilityMinor", cuda_runtime._MINOR),
        ("cudaDevAttrMaxSharedMemoryPerBlockOptin", cuda_runtime._SHARED_OPT_IN),
        ("cudaMemcpyHostToDevice", cuda_runtime._TO_DEVICE),
        ("cudaMemcpyDeviceToHost", cuda_runtime._TO_HOST),
        ("cudaMemcpyDeviceToDevice", cuda_runtime._ON_DEVICE),
        ("cudaStreamNonBlocking", cuda_runtime._NON_BLOCKING),
        ("cudaEventDisableTiming", cuda_runtime._DISABLE_TIMING),
        ("cudaStreamCaptureModeThreadLocal", cuda_runtime._THREAD_LOCAL_CAPTURE),
        ("cudaErrorNotReady", cuda_runtime._NOT_READY),
        ("cudaErrorMemoryAllocation", cuda_runtime._OUT_OF_MEMORY),
    ],
)
def test_numbers_are_those_of_the_header(headers, name, value):
    assert enumerator(headers["driver_types.h"], name) == value


def test_whatever_the_header_says_ends_a_process_does(headers):
    told = re.findall(r"/\*\*(.*?)\*/\s*(cudaError\w+)\s*=\s*(\d+)", headers["driver_types.h"], re.DOTALL)
    assert len(told) > 100
    ending = {int(code) for text, _, code in told if "be terminated and relaunched" in re.sub(r"[\s*]+", " ", text)}
    assert {700, 719, 810} <= ending
    assert ending <= cuda_runtime._POISONING


def test_functions_take_what_the_header_declares(headers, cudart):
    """The number of arguments of each call that hone makes, by the stand-in that tests give the same arguments."""
    text = headers["cuda_runtime_api.h"]
    for name in sorted(name for name in dir(FakeCudart) if name.startswith("cuda")):
        declared = re.search(rf"CUDARTAPI {name}\(([^)]*(?:\(\w+\)[^)]*)*)\)", text)
        assert declared, name
        expected = 0 if declared[1].strip() == "void" else declared[1].count(",") + 1
        assert getattr(cudart, name).__code__.co_argcount - 1 == expected, name


def test_the_library_has_every_function():
    library = ctypes.CDLL(str(library_places()[0]))
    missing = [name for name in dir(FakeCudart) if name.startswith("cuda") and not hasattr(library, name)]
    assert not missing


def test_a_failure_is_not_kept_for_who_asks_next(cuda, cudart):
    cudart.cudaMalloc = lambda address, size: cudart.fail(OUT_OF_MEMORY)
    with pytest.raises(CudaError, match="out of memory") as caught:
        cuda.allocate_device(1 << 40)
    assert caught.value.is_out_of_memory
    assert cudart.cudaGetLastError() == SUCCESS
    assert not cuda.lost


def test_what_is_lost_stays_lost_and_frees_nothing(cuda, cudart):
    graph = stream = cuda.create_stream()
    cudart.failure = LAUNCH_FAILURE
    with pytest.raises(CudaError):
        cuda.synchronize(stream)
    cudart.failure = SUCCESS
    cuda.destroy_stream(stream)
    cuda.destroy_graph(graph)
    assert stream in cudart.streams
    assert "unspecified launch failure" in cuda.lost


def test_the_capture_of_another_thread_forbids_nothing(cuda, cudart):
    """TVM captures in a mode that stops all threads of the default mode, and is spoiled by what they try."""
    cudart.capturing_globally = threading.get_ident()
    done = []

    def allocate_and_free():
        address = cuda.allocate_pinned(4096)
        cuda.free_pinned(address)
        done.append(address)

    thread = threading.Thread(target=allocate_and_free)
    thread.start()
    thread.join(30)
    assert done
    assert not cudart.capture_spoiled


def test_questions_need_no_context(cuda, cudart):
    assert cuda.num_devices == 1
    assert cuda.compute_capability(0) == (9, 0)
    assert cuda.pci_bus_id(0)
    assert cuda.runtime_version == 13000
    assert not cudart.capture_modes


def test_without_a_driver_the_call_itself_is_told(cuda, cudart):
    cudart.cudaThreadExchangeStreamCaptureMode = lambda mode: cudart.fail(35)
    cudart.cudaSetDevice = lambda ordinal: cudart.fail(35)
    with pytest.raises(CudaError, match="cudaSetDevice"):
        cuda.set_device(0)
    assert cudart.cudaGetLastError() == SUCCESS
