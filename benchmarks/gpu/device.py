"""Runs a bundle's kernels and models on the machine it was brought to, and prints one table. See `run.sh`.

Correctness first: every kernel of every row against float64 on the same operands. Then time: of each row the fastest
kernel against PyTorch (cuBLAS, cuDNN) and against our own kernels that do the same in more steps. Without a GPU, a
bundle of host twins goes the same way, checked against numpy, and its times mean nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi

HERE = Path(__file__).parent
#: Largest error, as a share of the root mean square of what was expected: float16 results of float32 sums.
TOLERANCE = 1e-2
ROUNDS, LAUNCHES = 5, 20
_MAX_SETS = 64


class Gpu:
    """PyTorch on the first GPU."""

    def __init__(self) -> None:
        self.torch = torch = importlib.import_module("torch")
        torch.backends.cudnn.benchmark = True
        self.properties = torch.cuda.get_device_properties(0)
        self.stream = torch.cuda.Stream()
        self.cache_bytes = int(getattr(self.properties, "L2_cache_size", 50 << 20))
        self.name = self.properties.name

    def put(self, array: np.ndarray[Any, Any]) -> Any:
        return self.torch.from_numpy(array).cuda()

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        return self.torch.empty(tuple(shape), dtype=getattr(self.torch, dtype), device="cuda")

    def get(self, tensor: Any) -> np.ndarray[Any, Any]:
        self.torch.cuda.synchronize()
        found: np.ndarray[Any, Any] = tensor.cpu().numpy()
        return found

    def launching(self) -> Any:
        return tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 0), self.torch.cuda.current_stream().cuda_stream)

    def time(self, call: Callable[[int], object]) -> Callable[[], float]:
        """A function that gives microseconds a call, of many launches captured as a graph; `call` is told which one."""
        torch = self.torch
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

    def vendor(self, row: dict[str, Any], arguments: Sequence[Any]) -> Callable[[], Any] | None:
        """What PyTorch does for a row, in float16 and channels last."""
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

    def _finish(self, value: Any, row: dict[str, Any], arguments: Sequence[Any]) -> Any:
        functional = self.torch.nn.functional
        for step in row["steps"]:
            value = value + arguments[2] if step == "bias" else getattr(functional, step)(value)
        return value

    def pad(self, data: Any, channels: int) -> Callable[[], Any]:
        return lambda: self.torch.nn.functional.pad(data, (0, channels - data.shape[-1]))

    def convolve(self, data: np.ndarray[Any, Any], weight: np.ndarray[Any, Any], told: dict[str, Any]) -> Any:
        """In float64, on the GPU."""
        one, two = (self.put(array).double().permute(0, 3, 1, 2) for array in (data, weight))
        found = self.torch.nn.functional.conv2d(one, two, None, told["strides"], told["padding"][:2])
        return self.get(found.permute(0, 2, 3, 1).contiguous())

    def multiply(self, one: np.ndarray[Any, Any], two: np.ndarray[Any, Any]) -> Any:
        return self.get(self.put(one).double() @ self.put(two).double())

    def ceiling(self) -> float:
        """TFLOP/s of a large product by cuBLAS: what this card gives."""
        one, two = (self.torch.randn(8192, 8192, dtype=self.torch.float16, device="cuda") for _ in range(2))
        sample = self.time(lambda at: self.torch.matmul(one, two))
        return 2 * 8192**3 / min(sample() for _ in range(3)) / 1e6


class Host:
    """No GPU: twins on the host's memory, numpy, and a clock."""

    name, cache_bytes = "no GPU (host twins: times mean nothing)", 0

    def put(self, array: np.ndarray[Any, Any]) -> Any:
        place = self.empty(array.shape, array.dtype.name)
        place[...] = array
        return place

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        size = math.prod(shape) * np.dtype(dtype).itemsize
        block = np.zeros(size + 64, np.uint8)
        start = -block.ctypes.data % 64
        return block[start : start + size].view(dtype).reshape(tuple(shape))

    def get(self, tensor: Any) -> Any:
        return tensor

    def launching(self) -> Any:
        return nullcontext()

    def time(self, call: Callable[[int], object]) -> Callable[[], float]:
        def sample() -> float:
            began = time.perf_counter()
            call(0)
            return (time.perf_counter() - began) * 1e6

        return sample

    def vendor(self, row: dict[str, Any], arguments: Sequence[Any]) -> None:
        return None

    def pad(self, data: Any, channels: int) -> Callable[[], Any]:
        return lambda: np.pad(data, [(0, 0)] * (data.ndim - 1) + [(0, channels - data.shape[-1])])

    def convolve(self, data: np.ndarray[Any, Any], weight: np.ndarray[Any, Any], told: dict[str, Any]) -> Any:
        top, left = told["padding"][:2]
        step, across = told["strides"]
        padded = np.pad(data.astype(np.float64), [(0, 0), (top, top), (left, left), (0, 0)])
        windows = np.lib.stride_tricks.sliding_window_view(padded, weight.shape[1:3], (1, 2))[:, ::step, ::across]
        return np.einsum("nhwcrs,orsc->nhwo", windows, weight.astype(np.float64))

    def multiply(self, one: np.ndarray[Any, Any], two: np.ndarray[Any, Any]) -> Any:
        return one.astype(np.float64) @ two.astype(np.float64)

    def ceiling(self) -> float:
        return float("nan")


class Bench:
    def __init__(self, folder: Path, device: Any, deadline: float) -> None:
        self.folder, self.device, self.deadline = folder, device, deadline
        self.modules: dict[str, Any] = {}
        self.results: dict[str, dict[str, Any]] = {}
        self.wrong: list[str] = []

    def kernel(self, digest: str) -> Callable[..., None]:
        if digest not in self.modules:
            self.modules[digest] = tvm_ffi.load_module(str(self.folder / "kernels" / f"{digest}.so"))
        function: Callable[..., None] = self.modules[digest][f"hone_kernel_{digest}"]
        return function

    def row(self, row: dict[str, Any]) -> None:
        """Check all kernels, time them, keep the best. A row whose time is up is left out, and told."""
        device = self.device
        arrays = _operands(row)
        expected = self._expected(row, arrays)
        arguments = [device.put(array) for array in arrays]
        num_bytes = sum(array.nbytes for array in arrays)
        copies = min(_MAX_SETS, 1 + 2 * device.cache_bytes // max(1, num_bytes))
        sets = [arguments, *([device.put(array) for array in arrays] for _ in range(copies - 1))]
        output = device.empty(*row["output"])
        samples: dict[str, Callable[[], float]] = {}
        worst = 0.0
        for told in row["kernels"]:
            if time.monotonic() > self.deadline:
                break
            kernel, workspace = self.kernel(told["digest"]), device.empty((told["workspace"],), "uint8")

            def call(at: int, kernel: Any = kernel, workspace: Any = workspace) -> None:
                kernel(*map(_tensor, sets[at % len(sets)]), _tensor(workspace), _tensor(output))

            try:
                with device.launching():
                    call(0)
                error = _error(device.get(output), expected)
                if not error <= TOLERANCE:
                    self.wrong.append(f"{row['name']}: {told['candidate']}: error {error:.2g}")
                    continue
                samples[told["candidate"]] = device.time(call)
            except Exception as problem:  # a kernel may refuse a card: the others go on
                print(f"  {row['name']}: {told['candidate']}: {str(problem).splitlines()[0]}", file=sys.stderr)
                continue
            worst = max(worst, error)
        vendor = device.vendor(row, arguments)
        rivals = [device.vendor(row, one) for one in sets] if vendor is not None else []
        if rivals:
            samples["vendor"] = device.time(lambda at: rivals[at % len(rivals)]())
        if row["pads"]:
            narrow = device.put(np.ones(row["pads"], np.float16))
            padding = device.pad(narrow, row["inputs"][0][0][-1])
            samples["padding"] = device.time(lambda at: padding())
        times: dict[str, list[float]] = {name: [] for name in samples}
        for _ in range(ROUNDS):  # in turns, so that what disturbs one disturbs all
            for name, sample in samples.items():
                times[name].append(sample())
        usual = {name: statistics.median(taken) for name, taken in times.items()}
        ours = {name: us for name, us in usual.items() if name not in ("vendor", "padding")}
        best = min(ours, key=lambda name: ours[name], default="")
        self.results[row["name"]] = {
            "table": row["table"],
            "us": ours.get(best),
            "kernel": best,
            "vendor_us": usual.get("vendor"),
            "padding_us": usual.get("padding", 0.0),
            "parts": row["parts"],
            "steps": row["steps"],
            "flops": _flops(row),
            "error": worst,
            "num_kernels": len(ours),
        }

    def _expected(self, row: dict[str, Any], arrays: Sequence[np.ndarray[Any, Any]]) -> Any:
        told, steps = row["attributes"], list(row["steps"])
        if "_" in row["op"]:
            cut = steps.index("then")
            before, behind = steps[:cut], steps[cut + 1 :]
            biases = list(arrays[3:])
            first = self._operator(row["op"].split("_")[0], arrays[0], arrays[1], told)
            first = _finish(first, before, biases).astype(np.float16)
            plain = {"strides": [1, 1], "padding": [0, 0, 0, 0], "transpose_b": told.get("transpose_b1", False)}
            return _finish(self._operator(row["op"].split("_")[1], first, arrays[2], plain), behind, biases)
        return _finish(self._operator(row["op"], arrays[0], arrays[1], told), steps, list(arrays[2:]))

    def _operator(self, op: str, one: Any, two: Any, told: dict[str, Any]) -> Any:
        if op == "conv2d":
            return self.device.convolve(one, two, told)
        return self.device.multiply(one, np.ascontiguousarray(two.T) if told.get("transpose_b") else two)

    # --- the table

    def compared(self, name: str) -> tuple[str, float | None]:
        """With what a row is compared, and microseconds of that."""
        result = self.results[name]
        if not result["parts"]:
            return "vendor", result["vendor_us"]
        parts = [self.results[part] for part in result["parts"] if part in self.results]
        if len(parts) < len(result["parts"]) or any(part["us"] is None for part in parts):
            return "its parts", None
        total = sum(part["us"] for part in parts)
        if result["table"] == "B3":
            # Apart: our plain kernel, then the item-wise operators as PyTorch has them, which is vendor less plain.
            plain = parts[0]["vendor_us"]
            if plain is None or result["vendor_us"] is None:
                return "unfused", None
            return "unfused", total + max(0.0, result["vendor_us"] - plain)
        return ("unpadded" if result["padding_us"] else "two kernels"), total

    def table(self) -> list[str]:
        lines = [f"{'':4}{'row':42}{'ours us':>10}{'TFLOP/s':>9}  {'against':12}{'us':>10}{'ratio':>8}{'error':>9}"]
        ratios: dict[str, list[float]] = {}
        for name, result in self.results.items():
            ours = result["us"]
            against, other = self.compared(name)
            shown = [f"{result['table']:4}{name[:41]:42}"]
            if ours is None:
                lines.append(f"{shown[0]}{'no kernel ran':>19}")
                continue
            ours += result["padding_us"]
            ratio = other / ours if other else None
            if ratio is not None and (result["parts"] or result["table"] in ("B1", "B2")):
                ratios.setdefault(f"{result['table']} against {against}", []).append(ratio)
            shown.append(f"{ours:10.1f}{result['flops'] / ours / 1e6:9.1f}  {against:12}")
            shown.append(f"{other:10.1f}{ratio:8.2f}" if other and ratio else f"{'-':>10}{'-':>8}")
            lines.append("".join([*shown, f"{result['error']:9.1e}"]))
        lines += [
            f"geometric mean, {what}: {_geometric(found):.2f} ({len(found)} rows)" for what, found in ratios.items()
        ]
        return lines


def _operands(row: dict[str, Any]) -> list[np.ndarray[Any, Any]]:
    """Random, never zero; weights are as small as their sums are long, so that results stay in float16."""
    generator = np.random.default_rng(0)
    arrays = []
    for at, (shape, dtype) in enumerate(row["inputs"]):
        values = generator.uniform(0.25, 1.0, shape) * generator.choice((-1.0, 1.0), shape)
        if len(shape) > 1 and at:
            values /= math.sqrt(math.prod(shape[1:]) if "conv" in row["op"] else shape[0])
        arrays.append(values.astype(dtype))
    return arrays


def _finish(value: Any, steps: Sequence[str], biases: list[Any]) -> Any:
    for step in steps:
        value = value + biases.pop(0).astype(np.float64) if step == "bias" else _ACTIVATIONS[step](value)
    return value


_erf = np.vectorize(math.erf, otypes=[np.float64])
_ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: 0.5 * x * (1 + _erf(x / math.sqrt(2))),
    "hardswish": lambda x: x * np.clip(x + 3, 0, 6) / 6,
    "softplus": lambda x: np.logaddexp(x, 0),
}


def _error(found: Any, expected: Any) -> float:
    """The largest difference, as a share of the root mean square of what was expected."""
    difference = np.abs(np.asarray(found, np.float64) - expected)
    if not np.isfinite(difference).all():
        return math.inf
    return float(difference.max() / np.sqrt(np.mean(np.square(expected))))


def _flops(row: dict[str, Any]) -> float:
    """Of the problem as it is asked for: what padding adds counts for nothing."""
    shapes: list[list[int]] = [shape for shape, _ in row["inputs"]]
    output: list[int] = row["output"][0]
    if row["op"] == "matmul":
        return 2.0 * math.prod(output) * shapes[0][-1]
    if row["op"] == "matmul_matmul":
        return 2.0 * math.prod(shapes[0][:-1]) * (math.prod(shapes[1]) + math.prod(shapes[2]))
    channels: int = row["pads"][-1] if row["pads"] else shapes[1][3]
    first = 2.0 * math.prod(output[:3]) * math.prod(shapes[1][:3]) * channels
    return first + (2.0 * math.prod(output) * shapes[2][3] if row["op"] == "conv2d_conv2d" else 0.0)


def _tensor(value: Any) -> Any:
    return tvm_ffi.from_dlpack(value)


def _geometric(ratios: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, ratios)))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=330.0, help="what all may take")
    parser.add_argument("--folder", type=Path, default=HERE)
    told = parser.parse_args(arguments)
    bundle = json.loads((told.folder / "bundle.json").read_text(encoding="utf-8"))
    deadline = time.monotonic() + told.seconds
    runtime = told.folder / "tvm" / "libcudart.so.13"
    if runtime.exists():  # the one that the kernels were linked with, which PyTorch need not have
        ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
    device: Any = Host() if bundle["twin"] else Gpu()
    print(f"{device.name}; kernels for sm_{bundle['arch']}{' (twins)' if bundle['twin'] else ''}")
    ceiling = device.ceiling()
    print(f"ceiling, by a product of 8192: {ceiling:.0f} TFLOP/s" if math.isfinite(ceiling) else "no ceiling")
    bench = Bench(told.folder, device, deadline)
    left_out = []
    for row in bundle["rows"]:
        if time.monotonic() > deadline:
            left_out.append(row["name"])
            continue
        bench.row(row)
    print("\n".join(bench.table()))
    models: list[dict[str, Any]] = []
    if bundle["models"] and not bundle["twin"]:
        models = importlib.import_module("torch_graph").time_models(
            told.folder, bundle["models"], device, deadline, print
        )
    results = {"device": device.name, "ceiling_tflops": ceiling, "rows": bench.results, "models": models}
    (told.folder / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    if left_out:
        print(f"left out, since the time was up: {', '.join(left_out)}")
    for wrong in bench.wrong:
        print(f"WRONG: {wrong}", file=sys.stderr)
    return 1 if bench.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
