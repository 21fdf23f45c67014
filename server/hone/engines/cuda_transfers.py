"""Copies between numpy's arrays and a GPU's memory, through pinned memory of the whole process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from hone.engines.cuda_runtime import CudaRuntime
from hone.engines.pinned import PinnedPool
from hone.types import Array

#: A copy starts when so much of its source is in pinned memory, and runs while the next part is brought there.
_CHUNK_BYTES = 1 << 20


class CudaTransfers:
    """The CUDA runtime and the pinned memory that all engines of a process share. Thread-safe; copies go to the calling
    thread's device, and whoever starts one says on which stream."""

    def __init__(self, cuda: CudaRuntime, pinned: PinnedPool | None = None) -> None:
        self.cuda = cuda
        self.pinned = pinned or PinnedPool(cuda)
        #: TVM captures on a stream that the legacy default stream waits for. Whoever works on that one meanwhile, as
        #: ONNX Runtime does while it loads a model, is refused, and spoils the capture: one of them at a time.
        self.captures = threading.Lock()

    @classmethod
    def load(cls) -> CudaTransfers:
        """Pins nothing yet. Raises EngineError where there is no CUDA runtime."""
        return cls(CudaRuntime.load())

    def upload(self, array: Array, to: int, staging: Array, stream: int) -> None:
        """Start copying an array to an address on the device, through pinned memory of its size or more: the copy of
        one part runs while the next is brought there. The staging memory is in use until the stream is done."""
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        source = staging.ctypes.data
        for start in range(0, flat.nbytes, _CHUNK_BYTES):
            part = flat[start : start + _CHUNK_BYTES]
            staging[start : start + part.nbytes] = part
            self.cuda.copy_to_device(to + start, source + start, part.nbytes, stream)

    def download(self, address: int, shape: Sequence[int], dtype: Any, stream: int) -> Array:
        """Start copying from the device into pinned memory of its own; the array is valid when the stream is done."""
        num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        place = self.pinned.take(num_bytes)
        if num_bytes:
            self.cuda.copy_to_host(place.ctypes.data, address, num_bytes, stream)
        array: Array = place.view(dtype).reshape(tuple(shape))
        return array
