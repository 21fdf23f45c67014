"""One engine with one model in a process of its own, timed when it is told to: `make bench-cpu` runs one for each.

It reads a job as JSON from its first argument, answers `{"ready": ...}`, then one line for each line of input:
`{"batch": 8, "seconds": 0.2}` -> `{"ns": [...]}`, the time of each call. It needs numpy and its engine alone, so that
engines may live in environments of their own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

_NUM_WARMUPS, _WARMUP_SECONDS = 2, 0.03
_MIN_CALLS = 3

Inputs = dict[str, Any]
Call = Callable[[], Any]


def onnxruntime_calls(job: dict[str, Any], inputs: dict[int, Inputs]) -> dict[int, Call]:
    """With threads that spin between operators, as it does on its own, and one session for each shape that it is to
    know at load."""
    import onnxruntime

    onnxruntime.set_default_logger_severity(3)
    calls: dict[int, Call] = {}
    for batch, values in inputs.items():
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = job["threads"]
        options.inter_op_num_threads = 1
        plain = onnxruntime.InferenceSession(job["model"], options, providers=["CPUExecutionProvider"])
        sizes: dict[str, set[int]] = {}
        for one in plain.get_inputs():
            for given, size in zip(one.shape, values[one.name].shape, strict=True):
                if isinstance(given, str) and given:
                    sizes.setdefault(given, set()).add(size)
        for given, found in sizes.items():
            if len(found) == 1:  # some exporters call all unknown sizes by one name
                options.add_free_dimension_override_by_name(given, *found)
        session = onnxruntime.InferenceSession(job["model"], options, providers=["CPUExecutionProvider"])
        calls[batch] = lambda session=session, values=values: session.run(None, values)  # type: ignore[misc]
    return calls


def openvino_calls(job: dict[str, Any], inputs: dict[int, Inputs]) -> dict[int, Call]:
    import openvino  # type: ignore[import-not-found, unused-ignore]

    core = openvino.Core()
    settings = {
        "INFERENCE_NUM_THREADS": job["threads"],
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": job["precision"],
    }
    calls: dict[int, Call] = {}
    for batch, values in inputs.items():
        model = core.read_model(job["model"])
        by_name = {name: port for port in model.inputs for name in port.get_names()}
        model.reshape({by_name[name]: list(array.shape) for name, array in values.items()})
        request = core.compile_model(model, "CPU", settings).create_infer_request()
        calls[batch] = lambda request=request, values=values: request.infer(  # type: ignore[misc]
            values, share_inputs=True, share_outputs=True
        )
    return calls


def hone_calls(job: dict[str, Any], inputs: dict[int, Inputs]) -> dict[int, Call]:
    """The artifacts that tuning left in the cache, loaded as the server loads them."""
    from hone.engines.tvm import PackedWeights
    from hone.engines.tvm_runtime import TvmRuntime
    from hone.kernels import DeviceKey, KernelsCache
    from hone.tuning.artifacts import ArtifactLoader

    device = DeviceKey.for_cpu()
    runtime = TvmRuntime.load(job["threads"])
    loader = ArtifactLoader(KernelsCache(Path(job["cache"])), [device], runtime, PackedWeights())
    calls: dict[int, Call] = {}
    for batch, values in inputs.items():
        engine = loader.load(job["artifacts"][str(batch)], device.digest, Path(job["model"]))
        names = [spec.name for spec in engine.outputs]
        instance = engine.instantiate()
        calls[batch] = lambda instance=instance, values=values, names=names: instance.run(values, names)  # type: ignore[misc]
    return calls


ENGINES = {"onnxruntime": onnxruntime_calls, "openvino": openvino_calls, "hone": hone_calls}


def time_calls(call: Call, seconds: float) -> list[int]:
    """Nanoseconds of calls one after the other, after the first few; at least three."""
    warm_until = time.perf_counter() + _WARMUP_SECONDS
    num_warm = 0
    while num_warm < _NUM_WARMUPS or time.perf_counter() < warm_until:
        call()
        num_warm += 1
        if time.perf_counter() > warm_until + seconds:
            break
    taken: list[int] = []
    end = time.perf_counter() + seconds
    while len(taken) < _MIN_CALLS or time.perf_counter() < end:
        started = time.perf_counter_ns()
        call()
        taken.append(time.perf_counter_ns() - started)
    return taken


def main() -> None:
    job = json.loads(sys.argv[1])
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    inputs: dict[int, Inputs] = {}
    for batch, path in job["inputs"].items():
        with np.load(path) as stored:
            inputs[int(batch)] = {name: _aligned(stored[name]) for name in stored.files}
    calls = ENGINES[job["engine"]](job, inputs)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps({"ns": time_calls(calls[asked["batch"]], asked["seconds"])}), flush=True)


def _aligned(array: Any) -> Any:
    """Where requests' tensors lie in a server: at an address that no engine has to copy from."""
    memory = np.empty(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


if __name__ == "__main__":
    main()
