"""Where kernels run: PyTorch on the first GPU, or the host for twins. Both put, time, and compute in float64 alike."""

from __future__ import annotations

import ctypes
import importlib.util
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import tvm_ffi

Array = np.ndarray[Any, Any]

LAUNCHES = 20
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class Gpu:
    """PyTorch on the first GPU. Arrays of bfloat16 go by their bits, since PyTorch's numpy knows none."""

    def __init__(self, folder: Path) -> None:
        if importlib.util.find_spec("torch") is None:
            raise SystemExit(f"{sys.executable} has no PyTorch to compare with: name one that has by PYTHON=...")
        # The runtime that kernels were linked with, which PyTorch need not have.
        ctypes.CDLL(str(folder / "tvm" / "libcudart.so.13"), mode=ctypes.RTLD_GLOBAL)
        self.torch = torch = importlib.import_module("torch")
        if not torch.cuda.is_available():
            raise SystemExit("PyTorch finds no NVIDIA GPU here: is its driver installed, and is this a build for CUDA?")
        torch.backends.cudnn.benchmark = True
        properties = torch.cuda.get_device_properties(0)
        self.stream = torch.cuda.Stream()
        self.cache_bytes = int(getattr(properties, "L2_cache_size", 50 << 20))
        self.name = f"{properties.name} (PyTorch {torch.__version__})"

    def put(self, array: Array) -> Any:
        array = np.ascontiguousarray(array)
        if array.dtype == _BFLOAT16:
            return self.torch.from_numpy(array.view(np.int16)).cuda().view(self.torch.bfloat16)
        return self.torch.from_numpy(array).cuda()

    def copy(self, tensor: Any) -> Any:
        return tensor.clone()

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        return self.torch.empty(tuple(shape), dtype=getattr(self.torch, dtype), device="cuda")

    def poison(self, tensor: Any) -> None:
        """Leave nothing that a kernel could pass off as its own."""
        tensor.fill_(math.nan if tensor.is_floating_point() else 77)

    def get(self, tensor: Any) -> Array:
        self.torch.cuda.synchronize()
        if tensor.dtype == self.torch.bfloat16:
            bits: Array = tensor.view(self.torch.int16).cpu().numpy()
            return bits.view(_BFLOAT16)
        found: Array = tensor.cpu().numpy()
        return found

    def argument(self, tensor: Any) -> Any:
        """As kernels take it."""
        return tvm_ffi.from_dlpack(tensor)

    def is_lost(self) -> bool:
        """Whether a kernel broke the context: nothing runs in this process any more."""
        try:
            self.torch.cuda.synchronize()
        except RuntimeError:
            return True
        return False

    def launching(self) -> Any:
        return tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 0), self.torch.cuda.current_stream().cuda_stream)

    def time(self, call: Callable[[int], object]) -> Callable[[], float]:
        """A function that gives microseconds a call, of many launches captured as a graph; `call` is told which one."""
        torch = self.torch
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for at in range(3):
                with self.launching():
                    call(at)
            self.stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream), self.launching():
                for at in range(LAUNCHES):
                    call(at)
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

        def sample() -> float:
            with torch.cuda.stream(self.stream):
                first.record()
                graph.replay()
                last.record()
            last.synchronize()
            return float(first.elapsed_time(last)) * 1e3 / LAUNCHES

        return sample

    def vendor(self, row: Mapping[str, Any], arguments: Sequence[Any]) -> Callable[[], Any] | None:
        """What PyTorch does for a row of B1 to B3 and B6, in its dtype and channels last."""
        torch, functional = self.torch, self.torch.nn.functional
        if row["op"] == "matmul":
            return lambda: self._finish(torch.matmul(arguments[0], arguments[1]), row, arguments)
        if row["op"] == "conv2d":
            data, weight = (tensor.permute(0, 3, 1, 2) for tensor in arguments[:2])
            told = row["attributes"]

            def run() -> Any:
                found = functional.conv2d(data, weight, None, told["strides"], told["padding"][:2])
                return self._finish(found.permute(0, 2, 3, 1), row, arguments)

            return run
        return None

    def _finish(self, value: Any, row: Mapping[str, Any], arguments: Sequence[Any]) -> Any:
        functional = self.torch.nn.functional
        for step in row["steps"]:
            value = value + arguments[2] if step == "bias" else getattr(functional, step)(value)
        return value

    def pad(self, data: Any, channels: int) -> Callable[[], Any]:
        return lambda: self.torch.nn.functional.pad(data, (0, channels - data.shape[-1]))

    def convolve(self, data: Array, weight: Array, told: Mapping[str, Any]) -> Array:
        """NHWC by OHWI in float64."""
        one, two = (self.put(array).double().permute(0, 3, 1, 2) for array in (data, weight))
        top, left, bottom, right = told["padding"]
        functional = self.torch.nn.functional
        one = functional.pad(one, (left, right, top, bottom))
        found = functional.conv2d(
            one, two, None, told["strides"], 0, told.get("dilation", [1, 1]), told.get("groups", 1)
        )
        return self.get(found.permute(0, 2, 3, 1).contiguous())

    def multiply(self, one: Array, two: Array) -> Array:
        return self.get(self.put(one).double() @ self.put(two).double())

    def erf_gelu(self, values: Array) -> Array:
        return self.get(self.torch.nn.functional.gelu(self.put(values)))

    def ceiling(self) -> float:
        """TFLOP/s of a large product by cuBLAS: what this card gives."""
        one, two = (self.torch.randn(8192, 8192, dtype=self.torch.float16, device="cuda") for _ in range(2))
        sample = self.time(lambda at: self.torch.matmul(one, two))
        return 2 * 8192**3 / min(sample() for _ in range(3)) / 1e6


class Host:
    """No GPU: twins on the host's memory, numpy, and a clock."""

    name, cache_bytes = "no GPU (host twins: times mean nothing)", 0

    def __init__(self, folder: Path) -> None:
        # Twins name CUDA's runtime as kernels do; TVM's gives tensors of dtypes that DLPack's numpy does not know.
        for name in ("libcudart.so.13", "libtvm_runtime.so"):
            ctypes.CDLL(str(folder / "tvm" / name), mode=ctypes.RTLD_GLOBAL)
        self._view = tvm_ffi.get_global_func("runtime.TVMTensorCreateView")

    def put(self, array: Array) -> Any:
        place = self.empty(array.shape, array.dtype.name)
        place[...] = array
        return place

    def copy(self, tensor: Any) -> Any:
        return self.put(tensor)

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        item = _BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
        size = math.prod(shape) * item.itemsize
        block = np.zeros(size + 64, np.uint8)
        start = -block.ctypes.data % 64
        return block[start : start + size].view(item).reshape(tuple(shape))

    def poison(self, tensor: Any) -> None:
        tensor[...] = 77 if tensor.dtype.kind in "iu" else math.nan

    def get(self, tensor: Any) -> Any:
        return tensor

    def argument(self, tensor: Any) -> Any:
        if tensor.dtype != _BFLOAT16:
            return tvm_ffi.from_dlpack(tensor)
        bits = tvm_ffi.from_dlpack(tensor.view(np.uint16))
        return self._view(bits, tvm_ffi.Shape(tensor.shape), tvm_ffi.dtype("bfloat16"), 0)

    def is_lost(self) -> bool:
        return False

    def launching(self) -> Any:
        return nullcontext()

    def time(self, call: Callable[[int], object]) -> Callable[[], float]:
        def sample() -> float:
            began = time.perf_counter()
            call(0)
            return (time.perf_counter() - began) * 1e6

        return sample

    def vendor(self, row: Mapping[str, Any], arguments: Sequence[Any]) -> None:
        return None

    def pad(self, data: Any, channels: int) -> Callable[[], Any]:
        return lambda: np.pad(data, [(0, 0)] * (data.ndim - 1) + [(0, channels - data.shape[-1])])

    def convolve(self, data: Array, weight: Array, told: Mapping[str, Any]) -> Array:
        """See `Gpu.convolve`."""
        top, left, bottom, right = told["padding"]
        step, across = told["strides"]
        down, along = told.get("dilation", [1, 1])
        groups: int = told.get("groups", 1)
        padded = np.pad(data.astype(np.float64), [(0, 0), (top, bottom), (left, right), (0, 0)])
        spans = (down * (weight.shape[1] - 1) + 1, along * (weight.shape[2] - 1) + 1)
        windows = np.lib.stride_tricks.sliding_window_view(padded, spans, (1, 2))
        windows = windows[:, ::step, ::across, :, ::down, ::along]
        parts = zip(np.split(windows, groups, 3), np.split(weight.astype(np.float64), groups, 0), strict=True)
        return np.concatenate([np.einsum("nhwcrs,orsc->nhwo", one, two) for one, two in parts], axis=3)

    def multiply(self, one: Array, two: Array) -> Array:
        product: Array = one.astype(np.float64) @ two.astype(np.float64)
        return product

    def erf_gelu(self, values: Array) -> Array:
        found: Array = 0.5 * values * (1 + np.vectorize(math.erf, otypes=[np.float64])(values / math.sqrt(2)))
        return found

    def ceiling(self) -> float:
        return math.nan
