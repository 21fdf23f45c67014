"""Where a tuned model's time goes, layer by layer, beside its baseline's: what `hone explain` tells.

The model is compiled again with what the cache has decided, and every call of it is timed in place; the baseline is
profiled by ONNX Runtime itself. Layers are matched by what they compute. Imports the compiler: for processes of their
own, never for a server.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from hone.compiler.choices import Choices
from hone.compiler.onnx_import import Unsupported, import_model
from hone.compiler.phases.precision import Precision
from hone.compiler.pipeline import template_workloads
from hone.compiler.profile import Profile, ProfiledCall, profile_model
from hone.compiler.roofline import Roofline, operations
from hone.compiler.target import CpuTarget
from hone.compiler.workload import Workload
from hone.engines.tvm_runtime import TvmRuntime
from hone.errors import EngineError
from hone.kernels import DeviceKey, Entry, KernelsCache
from hone.specialization import Signature
from hone.tuning.artifacts import Sources
from hone.tuning.baseline_profile import BaselineProfile, ProfiledNode, profile_baseline
from hone.tuning.lowering import Lowering
from hone.tuning.parallel import parallel_pool
from hone.tuning.schedules import ScheduleSearch
from hone.tuning.search import Search
from hone.types import Array

#: A layer lost when it takes so much longer than the baseline's.
_LOST = 1.05
_CONVOLUTIONS = ("Conv", "FusedConv", "ConvTranspose", "QLinearConv", "ConvInteger")
_PRODUCTS = ("MatMul", "FusedMatMul", "Gemm", "FusedGemm", "MatMulInteger", "QLinearMatMul")
_REST = "everything else"

#: What a layer computes, alike on both sides: its kind and the sizes that do not hang on a layout.
LayerKey: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """One call of the compiled model: an operator with what is fused behind it."""

    name: str
    what: str
    layout: str
    template: str
    parameters: Mapping[str, int]
    microseconds: float
    share: float
    gflops: float
    precision: str
    """What its products are computed in: "f32", or the lower one that was asked for."""
    of_roofline: float | None
    """The least time that the machine's limits allow, as a share of the time taken; above 1 where an algorithm needs
    less arithmetic than the operator's definition. None where there is no workload to count."""

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Layer:
    """All groups of one kind and size on both sides."""

    what: str
    num_tuned: int
    num_baseline: int
    tuned_us: float
    baseline_us: float

    @property
    def lost(self) -> bool:
        return self.tuned_us > _LOST * self.baseline_us

    def to_json(self) -> dict[str, Any]:
        return {**{name: getattr(self, name) for name in self.__slots__}, "lost": self.lost}


@dataclass(frozen=True, slots=True)
class Explanation:
    """One signature. `baseline` is what ONNX Runtime's profiler tells, node by node."""

    signature: str
    precision: str
    lowering: Lowering | None
    """Which layers are kept in float32, where some are; None where none is, or it was not promoted."""
    roofline: Roofline
    groups: tuple[Group, ...]
    layers: tuple[Layer, ...]
    profile: Profile
    baseline: BaselineProfile

    def to_json(self) -> dict[str, Any]:
        nodes = self.baseline.nodes
        total = sum(node.microseconds for node in nodes) or 1.0
        return {
            "signature": self.signature,
            "precision": self.precision,
            "lowering": None if self.lowering is None else self.lowering.to_json(),
            "roofline": self.roofline.fields(),
            "tuned": {
                "microseconds": self.profile.total_us,
                "overhead_microseconds": self.profile.overhead_us,
                "groups": [group.to_json() for group in self.groups],
                "in_place": [asdict(placement) for placement in self.profile.placements],
            },
            "baseline": {
                "microseconds": self.baseline.total_us,
                "nodes": [
                    {
                        "name": node.name,
                        "op": node.op,
                        "microseconds": node.microseconds,
                        "share": node.microseconds / total,
                    }
                    for node in nodes
                ],
            },
            "layers": [layer.to_json() for layer in self.layers],
        }

    def trace(self) -> dict[str, Any]:
        """The last round of both sides as a Chrome trace (chrome://tracing, Perfetto)."""
        events: list[dict[str, Any]] = []
        for process, name in ((1, f"tuned {self.precision}"), (2, "ONNX Runtime")):
            events.append({"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}})
        for call, group in zip(self.profile.calls, self.groups, strict=True):
            told = {"what": group.what, "template": group.template, "parameters": dict(group.parameters)}
            events.append(_event(1, group.name, call.start_us, call.times_us[-1], told))
        for node in self.baseline.nodes:
            events.append(_event(2, node.name, node.start_us, node.times_us[-1], {"op": node.op}))
        return {"traceEvents": events, "displayTimeUnit": "ms"}


def explain(
    model: Path,
    signature: Signature,
    inputs: Mapping[str, Array],
    *,
    precision: str,
    cache: KernelsCache,
    device: DeviceKey,
    num_threads: int,
    tell: Callable[[str], None],
    rounds: int = 20,
    artifact: str | None = None,
) -> Explanation | Unsupported:
    """Explain a model for one signature; `artifact` names what was promoted for it, which says what layers are kept in
    float32. Raises EngineError, BuildFailed and LinkFailed."""
    runtime = TvmRuntime.load(num_threads)
    runtime.parallel.load(parallel_pool(cache, device.architecture)[1], num_threads)
    target = CpuTarget.detect(num_threads)
    sources = Sources.installed()
    tell("importing the model")
    imported = import_model(model, signature.shapes)
    if isinstance(imported, Unsupported):
        return imported
    search = Search(cache, device, target, sources)
    tell("looking up what is decided")
    lowering = recall_lowering(cache, device, artifact) if artifact else None
    lowered = Precision(precision, lowering.layers if lowering is not None else frozenset())
    kernels = search.recall(template_workloads(imported, target, lowered))
    schedules = ScheduleSearch(cache, device, target, sources).recall(imported)
    tell("measuring the machine's limits")
    roofline = search.roofline
    tell("profiling the tuned model")
    choices = Choices(kernels=kernels, schedules=schedules, precision=lowered)
    profile = profile_model(imported, target, choices, [inputs[spec.name] for spec in imported.inputs], rounds=rounds)
    tell("profiling the baseline")
    baseline = profile_baseline(model, inputs, rounds)
    if not baseline.nodes:
        raise EngineError(f"{model.name}: ONNX Runtime's profiler told of no node")
    return Explanation(
        signature.text,
        precision,
        lowering,
        roofline,
        groups_of(profile, roofline),
        layers_of(profile.calls, baseline.nodes),
        profile,
        baseline,
    )


def recall_lowering(cache: KernelsCache, device: DeviceKey, artifact: str) -> Lowering | None:
    """What the artifact's manifest says of the layers that are kept in float32; None where it keeps none."""
    entry = cache.get("artifacts", artifact, device.digest)
    if not isinstance(entry, Entry) or "lowering" not in entry.manifest:
        return None
    try:
        return Lowering.from_json(entry.manifest["lowering"])
    except (KeyError, TypeError, ValueError) as problem:
        raise EngineError(
            f"artifact {artifact[:12]}: what it says of its precision is not understood: {problem}"
        ) from None


def groups_of(profile: Profile, roofline: Roofline) -> tuple[Group, ...]:
    """The calls in program order."""
    total = sum(call.microseconds for call in profile.calls) or 1.0
    return tuple(_group(call, call.microseconds / total, roofline) for call in profile.calls)


def layers_of(calls: Sequence[ProfiledCall], nodes: Sequence[ProfiledNode]) -> tuple[Layer, ...]:
    """Both sides by layer, the greatest loss of the tuned side first; what has no counterpart is one layer."""
    tuned: dict[LayerKey, list[float]] = defaultdict(list)
    baseline: dict[LayerKey, list[float]] = defaultdict(list)
    for call in calls:
        tuned[_key_of_workload(call.kernel.workload) if call.kernel else (_REST,)].append(call.microseconds)
    for node in nodes:
        baseline[_key_of_node(node)].append(node.microseconds)
    for side, other in ((tuned, baseline), (baseline, tuned)):
        for key in [key for key in side if key not in other and key != (_REST,)]:
            side[(_REST,)] += side.pop(key)
    layers = [
        Layer(" ".join(key), len(tuned[key]), len(baseline[key]), sum(tuned[key]), sum(baseline[key]))
        for key in {**tuned, **baseline}
    ]
    return tuple(sorted(layers, key=lambda layer: layer.baseline_us - layer.tuned_us))


def _group(call: ProfiledCall, share: float, roofline: Roofline) -> Group:
    nanoseconds = max(call.microseconds * 1e3, 1.0)
    if call.kernel is None:
        rule = call.function.rule if call.function is not None else ""
        shapes = " ".join("x".join(map(str, shape)) for shape in call.shapes)
        return Group(call.name, shapes, "", rule, {}, call.microseconds, share, 0.0, "f32", None)
    workload = call.kernel.workload
    return Group(
        name=call.name,
        what=str(workload),
        layout=_layout_of(workload),
        template=call.kernel.candidate.template,
        parameters=dict(call.kernel.candidate.parameters),
        microseconds=call.microseconds,
        share=share,
        gflops=operations(workload) / nanoseconds,
        precision=str(dict(workload.attributes).get("precision", "f32")),
        of_roofline=roofline.of(workload) / nanoseconds,
    )


def _layout_of(workload: Workload) -> str:
    def told(shape: tuple[int, ...]) -> str:
        return f"NCHW{shape[4]}c" if len(shape) == 5 else "NCHW" if len(shape) == 4 else "rows"

    before, after = told(workload.inputs[0].shape), told(workload.output.shape)
    return before if before == after else f"{before} -> {after}"


def _key_of_workload(workload: Workload) -> LayerKey:
    output = workload.output.shape
    weight = workload.inputs[1].shape if len(workload.inputs) > 1 else ()
    if "conv" in workload.op and len(weight) == 4 and len(output) >= 4:
        return _convolution(weight, output[0] * output[2] * output[3])
    if "matmul" in workload.op:
        return _product(workload.output.num_elements, workload.inputs[0].shape[-1])
    return (_REST,)


def _key_of_node(node: ProfiledNode) -> LayerKey:
    if not node.outputs or not node.inputs:
        return (_REST,)
    output = node.outputs[0]
    if node.op in _CONVOLUTIONS and len(node.inputs) > 1 and len(node.inputs[1]) == 4:
        return _convolution(node.inputs[1], output[0] * output[2] * output[3])
    if node.op in _PRODUCTS and output:
        elements = 1
        for dim in output:
            elements *= dim
        return _product(elements, node.inputs[0][-1])
    return (_REST,)


def _convolution(weight: Sequence[int], num_pixels: int) -> LayerKey:
    return ("convolution", "x".join(map(str, weight)), f"to {num_pixels} pixels")


def _product(num_elements: int, depth: int) -> LayerKey:
    return ("product", f"of depth {depth}", f"to {num_elements} numbers")


def _event(process: int, name: str, start_us: float, took_us: float, told: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "pid": process, "tid": 0, "name": name, "ts": start_us, "dur": took_us, "args": told}
