"""Tests here need a real NVIDIA GPU; without one, all are skipped, and say why."""

from __future__ import annotations

import pytest

from hone.engines.cuda_device import CudaDevice
from hone.engines.cuda_runtime import CudaRuntime
from hone.engines.tvm_runtime import TvmRuntime, load_cuda
from hone.errors import EngineError


@pytest.fixture(scope="session")
def cuda():
    try:
        runtime = CudaRuntime.load()
        if runtime.num_devices:
            return runtime
    except EngineError as problem:
        pytest.skip(f"no NVIDIA GPU: {problem}")
    pytest.skip("no NVIDIA GPU")


@pytest.fixture(scope="session")
def gpu(cuda):
    tvm = TvmRuntime.load(1)
    load_cuda()
    return CudaDevice(cuda, tvm, 0)
