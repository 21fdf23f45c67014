"""B7: whole models against PyTorch, on the machine with the GPU.

The same ONNX graph runs in PyTorch, node by node: eagerly under a CUDA graph, and through `torch.compile` with
`max-autotune`; in float16 and channels last, as ours does.
"""

from __future__ import annotations

import importlib
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_ROUNDS, _RUNS = 5, 10


def torch_model(folder: Path) -> Callable[..., Any]:
    """The model's function: inputs in float16, by position of their names, to outputs."""
    from hone.engines.onnx_weights import read_initializers

    torch = importlib.import_module("torch")
    told = json.loads((folder / "nodes.json").read_text(encoding="utf-8"))
    weights = {
        name: _weight(torch, array)
        for name, array in read_initializers(folder / "model.onnx", told["initializers"]).items()
    }

    def run(inputs: Mapping[str, Any]) -> list[Any]:
        values: dict[str, Any] = {**weights, **inputs, "": None}
        for node in told["nodes"]:
            operator = OPERATORS.get(node["op"])
            if operator is None:
                raise NotImplementedError(f"PyTorch's side knows no {node['op']}")
            found = operator(torch, node["attributes"], *[values[name] for name in node["inputs"]])
            values.update(zip(node["outputs"], found if isinstance(found, tuple) else (found,), strict=False))
        return [values[name] for name in told["outputs"]]

    return run


def _weight(torch: Any, array: np.ndarray[Any, Any]) -> Any:
    tensor = torch.from_numpy(np.ascontiguousarray(array)).cuda()
    tensor = tensor.half() if tensor.is_floating_point() else tensor
    return tensor.to(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


def _conv(torch: Any, told: Mapping[str, Any], x: Any, weight: Any, bias: Any = None) -> Any:
    pads = told.get("pads", [0] * 4)
    if pads[:2] != pads[2:]:
        x, pads = torch.nn.functional.pad(x, (pads[1], pads[3], pads[0], pads[2])), [0, 0]
    return torch.nn.functional.conv2d(
        x, weight, bias, told.get("strides", 1), pads[:2], told.get("dilations", 1), told.get("group", 1)
    )


def _max_pool(torch: Any, told: Mapping[str, Any], x: Any) -> Any:
    pads = told.get("pads", [0] * 4)
    return torch.nn.functional.max_pool2d(x, told["kernel_shape"], told.get("strides", 1), pads[:2])


def _gemm(torch: Any, told: Mapping[str, Any], a: Any, b: Any, c: Any = None) -> Any:
    a = a.t() if told.get("transA") else a
    b = b.t() if told.get("transB") else b
    found = a @ b if told.get("alpha", 1.0) == 1.0 else told["alpha"] * (a @ b)
    return found if c is None else found + c * told.get("beta", 1.0)


def _reshape(torch: Any, told: Mapping[str, Any], x: Any, shape: Any) -> Any:
    dims = [int(dim) for dim in shape.tolist()]
    return x.reshape([x.shape[at] if dim == 0 else dim for at, dim in enumerate(dims)])


def _norm(torch: Any, told: Mapping[str, Any], x: Any, scale: Any, bias: Any, mean: Any, variance: Any) -> Any:
    return torch.nn.functional.batch_norm(x, mean, variance, scale, bias, False, 0.0, told.get("epsilon", 1e-5))


def _layer_norm(torch: Any, told: Mapping[str, Any], x: Any, scale: Any, bias: Any = None) -> Any:
    axis = told.get("axis", -1) % x.ndim
    return torch.nn.functional.layer_norm(x, x.shape[axis:], scale, bias, told.get("epsilon", 1e-5))


def _mean(torch: Any, told: Mapping[str, Any], x: Any, axes: Any = None) -> Any:
    dims = told.get("axes") or axes.tolist()
    return x.mean(dim=dims, keepdim=bool(told.get("keepdims", 1)))


def _gather(torch: Any, told: Mapping[str, Any], x: Any, at: Any) -> Any:
    axis = told.get("axis", 0)
    return x.index_select(axis, at) if axis else torch.nn.functional.embedding(at, x)


OPERATORS: Mapping[str, Callable[..., Any]] = {
    "Conv": _conv,
    "BatchNormalization": _norm,
    "LayerNormalization": _layer_norm,
    "MaxPool": _max_pool,
    "GlobalAveragePool": lambda torch, told, x: x.mean(dim=(2, 3), keepdim=True),
    "ReduceMean": _mean,
    "Gemm": _gemm,
    "MatMul": lambda torch, told, a, b: a @ b,
    "Relu": lambda torch, told, x: torch.relu(x),
    "Erf": lambda torch, told, x: torch.erf(x),
    "Tanh": lambda torch, told, x: torch.tanh(x),
    "Sqrt": lambda torch, told, x: torch.sqrt(x),
    "Pow": lambda torch, told, a, b: a**b,
    "Add": lambda torch, told, a, b: a + b,
    "Sub": lambda torch, told, a, b: a - b,
    "Mul": lambda torch, told, a, b: a * b,
    "Div": lambda torch, told, a, b: a / b,
    "Softmax": lambda torch, told, x: torch.softmax(x, told.get("axis", -1)),
    "Gelu": lambda torch, told, x: torch.nn.functional.gelu(x, approximate=told.get("approximate", "none")),
    "Gather": _gather,
    "Transpose": lambda torch, told, x: x.permute(told["perm"]),
    "Reshape": _reshape,
    "Flatten": lambda torch, told, x: x.flatten(told.get("axis", 1)),
    "Identity": lambda torch, told, x: x,
    "Dropout": lambda torch, told, x, *_: x,
}


def time_models(
    folder: Path, models: Sequence[Mapping[str, Any]], device: Any, deadline: float, show: Callable[[str], object]
) -> list[dict[str, Any]]:
    """Milliseconds a run, inputs and outputs on the GPU, of ours, PyTorch under a CUDA graph, and torch.compile."""
    from hone.engines.cuda_device import CudaDevice
    from hone.engines.cuda_runtime import CudaRuntime
    from hone.engines.tvm import PackedWeights
    from hone.engines.tvm_cuda import TvmCudaEngine
    from hone.engines.tvm_runtime import TvmRuntime, load_cuda

    libraries = folder / "tvm"
    cuda = CudaRuntime.load([libraries / "libcudart.so.13"])
    runtime = TvmRuntime.load(1, libraries)
    load_cuda(libraries)
    card = CudaDevice(cuda, runtime, 0)
    kernels = {path.stem: path for path in (folder / "kernels").glob("*.so")}
    results = []
    show(f"B7  {'model':24}{'batch':>6}{'ours ms':>9}{'graph ms':>10}{'compile ms':>11}{'ratio':>7}{'error':>9}")
    for told in models:
        if time.monotonic() > deadline:
            show(f"B7  {told['name']} at {told['batch']}: left out, since the time was up")
            continue
        place = folder / "models" / told["name"]
        artifact = place / str(told["batch"])
        with np.load(artifact / "constants.npz") as file:
            constants = dict(file)
        engine = TvmCudaEngine.load(
            artifact,
            json.loads((artifact / "manifest.json").read_text(encoding="utf-8")),
            model=place / "model.onnx",
            kernels=kernels,
            constants=lambda digest, constants=constants: constants,  # type: ignore[misc]
            devices=[card],
            packed=PackedWeights(),
        )
        results.append(_time_model(told, place, engine, device, deadline, show))
        engine.close()
    return results


def _time_model(
    told: Mapping[str, Any], place: Path, engine: Any, device: Any, deadline: float, show: Callable[[str], object]
) -> dict[str, Any]:
    torch = importlib.import_module("torch")
    generator = np.random.default_rng(0)
    arrays = {}
    for spec in engine.inputs:
        if spec.datatype.startswith("INT"):
            arrays[spec.name] = generator.integers(0, 100, spec.shape).astype(spec.datatype.lower())
        else:
            arrays[spec.name] = generator.standard_normal(spec.shape).astype(np.float32)
    names = [spec.name for spec in engine.outputs]
    instance = engine.instantiate()
    found = instance.run(arrays, names)
    model = torch_model(place)

    def given(array: Any) -> Any:
        tensor = torch.from_numpy(array).cuda()
        tensor = tensor.half() if tensor.is_floating_point() else tensor
        return tensor.to(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor

    with torch.inference_mode():
        inputs = {name: given(array) for name, array in arrays.items()}
        expected = [tensor.float().cpu().numpy() for tensor in model(inputs)]
        error = max(
            float(np.abs(one - two).max() / max(1e-6, np.sqrt(np.mean(np.square(two)))))
            for one, two in zip(found, expected, strict=True)
        )
        samples = {"ours": lambda: instance.run(arrays, names)}
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            model(inputs)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(inputs)
        samples["graph"] = _round_trip(torch, inputs, arrays, graph.replay)
        if time.monotonic() < deadline - 60:
            compiled = torch.compile(model, mode="max-autotune")
            compiled(inputs)
            samples["compile"] = _round_trip(torch, inputs, arrays, lambda: compiled(inputs))
        times = _in_turns(samples)
    other = min((times[name] for name in ("compile", "graph") if name in times), default=float("nan"))
    shown = f"{times['compile']:11.3f}" if "compile" in times else f"{'-':>11}"
    show(
        f"B7  {told['name']:24}{told['batch']:6}{times['ours']:9.3f}{times['graph']:10.3f}{shown}"
        f"{other / times['ours']:7.2f}{error:9.1e}"
    )
    return {"name": told["name"], "batch": told["batch"], "ms": times, "error": error}


def _round_trip(
    torch: Any, inputs: Mapping[str, Any], arrays: Mapping[str, Any], run: Callable[[], Any]
) -> Callable[[], None]:
    """As ours is timed: from arrays on the host, through pinned memory, until the GPU is done."""
    pinned = {name: torch.from_numpy(array).pin_memory() for name, array in arrays.items()}

    def sample() -> None:
        for name, tensor in pinned.items():
            inputs[name].copy_(tensor, non_blocking=True)
        run()
        torch.cuda.synchronize()

    return sample


def _in_turns(samples: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in samples}
    for sample in samples.values():
        for _ in range(3):
            sample()
    for _ in range(_ROUNDS):
        for name, sample in samples.items():
            began = time.perf_counter()
            for _ in range(_RUNS):
                sample()
            times[name].append((time.perf_counter() - began) * 1e3 / _RUNS)
    return {name: statistics.median(taken) for name, taken in times.items()}
