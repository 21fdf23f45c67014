"""One GPU as engines and measurements use it: tensors on it, copies to and from it, and a turn for computing.

TVM's runtime owns device memory and the code that runs; copies, streams and pinned memory go through the CUDA runtime.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tvm_ffi

from hone.engines.cuda_runtime import CudaRuntime
from hone.engines.cuda_transfers import CudaTransfers
from hone.engines.tvm_runtime import TvmRuntime
from hone.errors import EngineError
from hone.types import Array

#: DLPack's numbers of device types.
CPU_TYPE, CUDA_TYPE = 1, 2
_NAMES = {CPU_TYPE: "cpu", CUDA_TYPE: "cuda"}
#: Of what cudaMalloc gives.
_ALIGNMENT = 256


class CudaDevice:
    """A GPU of this process. Thread-safe, but for what is told of streams: each belongs to who made it."""

    def __init__(
        self,
        cuda: CudaRuntime,
        tvm: TvmRuntime,
        ordinal: int,
        *,
        device_type: int = CUDA_TYPE,
        transfers: CudaTransfers | None = None,
    ) -> None:
        """`device_type` is another than CUDA's for devices that only stand for a GPU. `transfers` are those of the
        process, on the same runtime, where it has them."""
        self.cuda, self.tvm, self.ordinal, self.device_type = cuda, tvm, ordinal, device_type
        #: Code of another kind of device is one for the host only where there is none for a GPU.
        self.place = tvm_ffi.device(_NAMES[device_type], ordinal if device_type == CUDA_TYPE else 0)
        self._transfers = transfers or CudaTransfers(cuda)
        self.pinned = self._transfers.pinned
        self.captures = self._transfers.captures
        #: TVM's memory pool is one for all streams of a device, and knows nothing of what still runs on them: memory
        #: that one machine lets go of while its kernels run must not go to another. So one computes at a time, while
        #: others copy.
        self.computing = threading.Lock()

    @property
    def machine_arguments(self) -> tuple[int, ...]:
        """What a virtual machine is told of where it runs: type, ordinal and kind of allocator; the host comes last."""
        pooled = 2
        host = (CPU_TYPE, 0, pooled)
        if self.device_type == CPU_TYPE:
            return host
        return (self.device_type, self.ordinal, pooled, *host)

    def bind(self) -> None:
        """Make it the calling thread's device."""
        self.cuda.set_device(self.ordinal)

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        """An uninitialised tensor in its memory. Raises EngineError where there is no room for it."""
        try:
            return self.tvm.allocate(tvm_ffi.Shape(tuple(shape)), tvm_ffi.dtype(dtype), self.place, None)
        except Exception as problem:  # tvm-ffi turns errors of its runtime into many classes
            self.cuda.clear_error()
            told = str(problem).strip().splitlines() or [type(problem).__name__]
            raise EngineError(f"cuda: a tensor {list(shape)} of {dtype} could not be made: {told[-1]}") from problem

    def empty_copies(self, count: int, shape: Sequence[int], dtype: str) -> list[Any]:
        """So many uninitialised tensors of one kind in one piece of memory, each aligned as memory of its own is.

        For kernels: generated code wants tensors that begin where their memory does. Raises EngineError.
        """
        kind = tvm_ffi.dtype(dtype)
        num_bytes = math.prod(shape) * ((kind.bits + 7) // 8)
        stride = max(1, -(-num_bytes // _ALIGNMENT)) * _ALIGNMENT
        whole = self.empty((count * stride,), "uint8")
        return [self.tvm.view(whole, tvm_ffi.Shape(tuple(shape)), kind, at * stride) for at in range(count)]

    def copies_of(self, array: Array, count: int, stream: int) -> list[Any]:
        """So many tensors with the array's contents, which are there; see `empty_copies`."""
        tensors = self.empty_copies(count, array.shape, array.dtype.name)
        staging = self.pinned.take(array.nbytes)
        self.upload(array, tensors[0], staging, stream)
        for tensor in tensors[1:]:
            self.cuda.copy_on_device(tensor.data_ptr(), tensors[0].data_ptr(), array.nbytes, stream)
        self.cuda.synchronize(stream)
        return tensors

    def tensor_of(self, array: Array, stream: int) -> Any:
        """A tensor with the array's contents, which are there: for weights and measurements, not for requests."""
        tensor = self.empty(array.shape, array.dtype.name)
        staging = self.pinned.take(array.nbytes)
        self.upload(array, tensor, staging, stream)
        self.cuda.synchronize(stream)
        return tensor

    def upload(self, array: Array, tensor: Any, staging: Array, stream: int) -> None:
        """Start copying an array into a tensor of its size, through pinned memory of its size: the copy of one part
        runs while the next is brought there. The staging memory is in use until the stream is done."""
        self._transfers.upload(array, tensor.data_ptr(), staging, stream)

    def download(self, tensor: Any, shape: Sequence[int], dtype: Any, stream: int) -> Array:
        """Start copying a tensor into pinned memory of its own; the array is valid when the stream is done."""
        return self._transfers.download(tensor.data_ptr(), shape, dtype, stream)

    @contextmanager
    def launching_on(self, stream: int) -> Iterator[None]:
        """What the calling thread launches meanwhile goes to this stream."""
        with tvm_ffi.use_raw_stream(self.place, stream):
            yield
