"""Single operators against ONNX Runtime and the machine's limits: `make bench-ops`.

The convolutions of ResNet-18 (C1 to C12) and the depthwise ones of MobileNet (D1 to D9) at batch 1, which the TVM paper
measures (Chen et al., "TVM: An Automated End-to-End Optimizing Compiler for Deep Learning", 2018, table 2). Each is a
model of one node, searched with all templates as tuning does, and timed in turns with ONNX Runtime in this process.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import tvm_ffi
from onnx import TensorProto, helper, numpy_helper

from benchmarks.bench import note
from benchmarks.processes import ROOT, BenchmarkError
from benchmarks.report import describe_machine
from hone.compiler.artifact import export_artifact
from hone.compiler.choices import Choices
from hone.compiler.onnx_import import ImportedModel, Unsupported, import_model
from hone.compiler.pipeline import compile_model, template_workloads
from hone.compiler.roofline import Roofline
from hone.compiler.target import CpuTarget
from hone.compiler.templates.packing import Packer
from hone.compiler.templates.registry import template_named
from hone.compiler.workload import Workload
from hone.engines.tvm import PackedWeights, TvmEngine, aligned_empty
from hone.engines.tvm_runtime import TvmRuntime
from hone.kernels import DeviceKey, KernelsCache
from hone.tuning.artifacts import Sources
from hone.tuning.parallel import parallel_pool
from hone.tuning.search import Search

RESULTS = ROOT / "benchmarks" / "results" / "ops.json"
_ROUNDS, _TURN_SECONDS, _REST_SECONDS = 11, 0.03, 0.005


@dataclass(frozen=True)
class Operator:
    """A convolution with "same" padding; depthwise ones have as many groups as channels."""

    name: str
    size: int
    channels_in: int
    channels_out: int
    kernel: int
    stride: int
    groups: int = 1

    @property
    def operations(self) -> float:
        pixels = math.ceil(self.size / self.stride) ** 2
        return 2.0 * pixels * self.channels_out * self.channels_in // self.groups * self.kernel**2

    def model(self, *, in_a_net: bool = False) -> onnx.ModelProto:
        """The operator alone, or between two convolutions to and from eight channels, which a net's layout suits."""
        rng = np.random.default_rng(0)
        nodes: list[onnx.NodeProto] = []
        weights: list[onnx.TensorProto] = []

        def convolution(data: str, channels_in: int, channels_out: int, kernel: int, stride: int, groups: int) -> str:
            shape = (channels_out, channels_in // groups, kernel, kernel)
            weight = rng.standard_normal(shape, np.float32) / np.float32(math.sqrt(math.prod(shape[1:])))
            weights.append(numpy_helper.from_array(weight, f"weight{len(weights)}"))
            output = f"features{len(nodes)}"
            inputs = [data, weights[-1].name]
            pads = [kernel // 2] * 4
            attributes = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": pads, "group": groups}
            nodes.append(helper.make_node("Conv", inputs, [output], **attributes))  # type: ignore[arg-type]
            return output

        current, outer, out_channels = "image", self.channels_in, self.channels_out
        if in_a_net:
            outer = out_channels = 8
            current = convolution(current, outer, self.channels_in, 1, 1, 1)
        current = convolution(current, self.channels_in, self.channels_out, self.kernel, self.stride, self.groups)
        if in_a_net:
            current = convolution(current, self.channels_out, out_channels, 1, 1, 1)
        nodes[-1].output[0] = "features"
        image = helper.make_tensor_value_info("image", TensorProto.FLOAT, [1, outer, self.size, self.size])
        out = math.ceil(self.size / self.stride)
        features = helper.make_tensor_value_info("features", TensorProto.FLOAT, [1, out_channels, out, out])
        graph = helper.make_graph(nodes, self.name, [image], [features], weights)
        return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])


_RESNET18 = (
    (224, 3, 64, 7, 2),
    (56, 64, 64, 3, 1),
    (56, 64, 64, 1, 1),
    (56, 64, 128, 3, 2),
    (56, 64, 128, 1, 2),
    (28, 128, 128, 3, 1),
    (28, 128, 256, 3, 2),
    (28, 128, 256, 1, 2),
    (14, 256, 256, 3, 1),
    (14, 256, 512, 3, 2),
    (14, 256, 512, 1, 2),
    (7, 512, 512, 3, 1),
)
_MOBILENET = (
    (112, 32, 1),
    (112, 64, 2),
    (56, 128, 1),
    (56, 128, 2),
    (28, 256, 1),
    (28, 256, 2),
    (14, 512, 1),
    (14, 512, 2),
    (7, 1024, 1),
)
OPERATORS = (
    *(Operator(f"C{i}", *sizes) for i, sizes in enumerate(_RESNET18, 1)),
    *(Operator(f"D{i}", size, c, c, 3, stride, c) for i, (size, c, stride) in enumerate(_MOBILENET, 1)),
)


@dataclass(frozen=True)
class Measured:
    """Microseconds of the kernel alone, of the model compiled around it (which changes layouts at both ends, as a whole
    net does not between its layers), and of ONNX Runtime's session."""

    name: str
    template: str
    parameters: dict[str, int]
    kernel_us: float
    model_us: float
    onnxruntime_us: float
    limit_us: float
    kernel_gflops: float
    onnxruntime_gflops: float
    model_vs_onnxruntime: float
    kernel_vs_onnxruntime: float
    kernel_of_limit: float


class Bench:
    """What all operators share."""

    def __init__(self, cache: Path, threads: int, seconds: float) -> None:
        self._runtime = TvmRuntime.load(threads)
        self._threads = threads
        self._seconds = seconds
        self.target = CpuTarget.detect(threads)
        device = DeviceKey.for_cpu()
        self._search = Search(KernelsCache(cache), device, self.target, Sources.installed())
        self._pool, self._pool_library = parallel_pool(KernelsCache(cache), device.architecture)
        self._runtime.parallel.load(self._pool_library, threads)

    @property
    def roofline(self) -> Roofline:
        return self._search.roofline

    def measure(self, operator: Operator, folder: Path) -> Measured:
        path = folder / f"{operator.name}.onnx"
        onnx.save(operator.model(), path)
        image = aligned_empty((1, operator.channels_in, operator.size, operator.size), np.dtype(np.float32))
        image[...] = np.random.default_rng(1).standard_normal(image.shape)
        imported = import_model(path, {"image": image.shape})
        if isinstance(imported, Unsupported):
            raise BenchmarkError(f"{operator.name}: {imported.reason}")
        workloads = template_workloads(imported, self.target)
        chosen = self._search.decide(workloads, self._seconds, lambda share, text: None)
        workload = self._workload(operator, list(workloads), folder)
        if workload.digest not in chosen:
            chosen |= self._search.decide({workload: 1}, self._seconds, lambda share, text: None)
        if workload.digest not in chosen:
            raise BenchmarkError(f"{operator.name}: no candidate of {workload} could be measured")
        candidate = chosen[workload.digest]
        template = template_named(candidate.template)
        assert template is not None
        kernel = template.build(workload, candidate, self.target)
        rng = np.random.default_rng(2)
        operands = []
        for tensor in workload.inputs:
            array = aligned_empty(tensor.shape, np.dtype(tensor.dtype))
            array[...] = rng.standard_normal(tensor.shape)
            operands.append(array)
        packed = Packer(workload, operands).pack(template, candidate, self.target)
        output = aligned_empty(workload.output.shape, np.dtype(workload.output.dtype))
        arguments = [tvm_ffi.from_dlpack(array) for array in (*packed, output)]
        options = ort.SessionOptions()
        options.intra_op_num_threads = self._threads
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        instance = self._engine(path, imported, Choices(kernels=chosen), folder / operator.name).instantiate()
        kernel_us, model_us, session_us = in_turns(
            [
                lambda: kernel(*arguments),
                lambda: instance.run({"image": image}, ["features"]),
                lambda: session.run(None, {"image": image}),
            ]
        )
        limit = self.roofline.of(workload) / 1e3
        return Measured(
            name=operator.name,
            template=candidate.template,
            parameters=dict(candidate.parameters),
            kernel_us=round(kernel_us, 2),
            model_us=round(model_us, 2),
            onnxruntime_us=round(session_us, 2),
            limit_us=round(limit, 2),
            kernel_gflops=round(operator.operations / kernel_us / 1e3, 1),
            onnxruntime_gflops=round(operator.operations / session_us / 1e3, 1),
            model_vs_onnxruntime=round(session_us / model_us, 3),
            kernel_vs_onnxruntime=round(session_us / kernel_us, 3),
            kernel_of_limit=round(limit / kernel_us, 3),
        )

    def _workload(self, operator: Operator, alone: Sequence[Workload], folder: Path) -> Workload:
        """The operator as a template takes it; in a net where the layout of the operator alone is not a template's."""
        if len(alone) == 1:
            return alone[0]
        path = folder / f"{operator.name}.net.onnx"
        onnx.save(operator.model(in_a_net=True), path)
        imported = import_model(path, {"image": (1, 8, operator.size, operator.size)})
        if isinstance(imported, Unsupported):
            raise BenchmarkError(f"{operator.name}: {imported.reason}")
        shape = (operator.channels_out, operator.channels_in // operator.groups, operator.kernel, operator.kernel)
        workloads = list(template_workloads(imported, self.target))
        found = [one for one in workloads if len(one.inputs) > 1 and one.inputs[1].shape == shape]
        if not found:
            raise BenchmarkError(f"{operator.name}: no template takes it; found {[str(one) for one in workloads]}")
        return found[0]

    def _engine(self, path: Path, imported: ImportedModel, choices: Choices, folder: Path) -> TvmEngine:
        """The model as the server would run it."""
        folder.mkdir()
        compiled = compile_model(imported, self.target, choices)
        kernels = {self._pool: self._pool_library}
        for call in compiled.kernels:
            kernels[call.digest] = folder / f"{call.digest}.so"
            call.build(self.target).export(kernels[call.digest])
        exported = export_artifact(compiled, imported, None, folder, self._pool)
        return TvmEngine.load(
            folder,
            exported.manifest,
            model=path,
            kernels=kernels,
            constants=lambda digest: {},
            runtime=self._runtime,
            packed=PackedWeights(),
        )


def in_turns(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Median microseconds of each, over rounds in which all have their turn."""
    taken: list[list[float]] = [[] for _ in calls]
    for i in range(_ROUNDS):
        turn = list(enumerate(calls))
        for at, call in turn if i % 2 == 0 else reversed(turn):
            time.sleep(_REST_SECONDS)  # for the threads of the last one to stop spinning
            for _ in range(2):
                call()
            times: list[int] = []
            end = time.perf_counter() + _TURN_SECONDS
            while not times or time.perf_counter() < end:
                started = time.perf_counter_ns()
                call()
                times.append(time.perf_counter_ns() - started)
            taken[at].append(statistics.median(times) / 1e3)
    return [statistics.median(values) for values in taken]


def format_table(rows: Sequence[Measured]) -> str:
    lines: list[tuple[str, ...]] = [
        ("", "template", "kernel us", "model us", "ORT us", "limit us", "GFLOP/s", "ORT GFLOP/s", "of limit", "vs ORT")
    ]
    for row in rows:
        numbers = (row.kernel_us, row.model_us, row.onnxruntime_us, row.limit_us)
        rates = (row.kernel_gflops, row.onnxruntime_gflops)
        lines.append(
            (
                row.name,
                row.template,
                *(f"{number:.1f}" for number in numbers),
                *(f"{rate:.0f}" for rate in rates),
                f"{row.kernel_of_limit:.0%}",
                f"{row.model_vs_onnxruntime:.2f}",
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare single convolutions with ONNX Runtime on this CPU.")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="such as C2 D1")
    parser.add_argument("--threads", type=int, default=2, help="of each side (default: %(default)s)")
    parser.add_argument("--search-secs", type=float, default=20.0, help="at most, each (default: %(default)g)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file to write (default: %(default)s)")
    arguments = parser.parse_args()

    unknown = set(arguments.only) - {operator.name for operator in OPERATORS}
    if unknown:
        raise SystemExit(f"bench-ops: unknown {sorted(unknown)}, expected some of C1 to C12 and D1 to D9")
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[: arguments.threads])
    about = describe_machine()
    rows = []
    with tempfile.TemporaryDirectory(prefix="bench-ops-") as folder:
        bench = Bench(Path(folder) / "kernels_cache", arguments.threads, arguments.search_secs)
        for operator in OPERATORS:
            if not arguments.only or operator.name in arguments.only:
                note(f"{operator.name}: searching and measuring")
                try:
                    rows.append(bench.measure(operator, Path(folder)))
                except BenchmarkError as problem:
                    raise SystemExit(f"bench-ops: {problem}") from problem
        roofline = bench.roofline.fields()
    means = {
        "model_vs_onnxruntime": geometric_mean([row.model_vs_onnxruntime for row in rows]),
        "kernel_vs_onnxruntime": geometric_mean([row.kernel_vs_onnxruntime for row in rows]),
    }
    told = {**about, "threads": arguments.threads, "roofline": roofline, "geomean": means}
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    arguments.results.write_text(json.dumps({**told, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    print(format_table(rows))
    print(
        f"geometric mean against ONNX Runtime: {means['model_vs_onnxruntime']:.2f} with changes of layout at both ends"
    )


if __name__ == "__main__":
    main()
