"""Which kernels to build ahead of any model: Bolt's sample programs, of which an architecture needs some tens a dtype.

Kernels know no sizes, so what is built for typical layers serves all. The plan goes from what most models call to what
few do; wherever it is cut off, what was built is what helps most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from hone.compiler.cuda_target import CudaTarget
from hone.compiler.templates.base import Candidate
from hone.compiler.templates.cutlass.kernel import CutlassTemplate
from hone.compiler.templates.cutlass.registry import cutlass_templates
from hone.compiler.workload import Operand, Step, TensorType, Workload

#: What the command line calls them.
DTYPES = {"f16": "float16", "bf16": "bfloat16", "tf32": "float32", "f32": "float32", "int8": "int8"}
#: Of kernels that differ in the candidate only: further ones are built when a model wants them.
MAX_KERNELS_A_KIND = 12
FAMILIES = ("gemm", "conv2d", "depthwise")

#: (M, N, K): the products of BERT-base and of classifiers, at small and large batches.
_GEMMS = (
    (1280, 3072, 768),
    (1280, 768, 768),
    (1280, 768, 3072),
    (128, 768, 768),
    (128, 3072, 768),
    (4096, 4096, 4096),
    (32, 1000, 2048),
)
#: (batch, height and width, channels, outputs, kernel, stride): ResNet's layers.
_CONVOLUTIONS = (
    (32, 56, 64, 64, 3, 1),
    (32, 28, 128, 128, 3, 1),
    (32, 14, 256, 256, 3, 1),
    (8, 7, 512, 512, 3, 1),
    (32, 56, 64, 256, 1, 1),
    (32, 14, 1024, 256, 1, 1),
    (8, 7, 512, 2048, 1, 1),
    (32, 56, 128, 128, 3, 2),
    (32, 56, 256, 512, 1, 2),
)
_DEPTHWISE = ((32, 112, 32, 3, 1), (32, 56, 128, 3, 1), (32, 14, 512, 3, 1), (32, 56, 128, 3, 2), (32, 14, 384, 5, 1))
_Tails: TypeAlias = tuple[tuple[str, ...] | None, ...]
#: Steps after the bias, most frequent first; "residual" adds a tensor.
_GEMM_TAILS: _Tails = ((), ("gelu",), ("residual",), ("relu",), ("gelu_tanh",), ("silu",), None)
_CONVOLUTION_TAILS: _Tails = (("relu",), ("residual", "relu"), (), ("silu",), ("hardswish",), ("residual",), None)
_DEPTHWISE_TAILS: _Tails = (("relu6",), ("hardswish",), ("silu",), ("relu",))


@dataclass(frozen=True, slots=True)
class PlannedKernel:
    template: CutlassTemplate
    workload: Workload
    candidate: Candidate

    def __str__(self) -> str:
        what = self.workload.inputs[0].dtype
        if self.workload.op == "conv2d":
            _, rows, columns, _ = self.workload.inputs[1].shape
            what += f" {rows}x{columns}/{self.workload.attribute('strides')[0]}"
        return "+".join([f"{self.candidate} {what}", *(step.op for step in self.workload.epilogue)])


def plan(
    target: CudaTarget, families: Sequence[str], dtypes: Sequence[str], cuda_home: Path | None = None
) -> list[PlannedKernel]:
    """Every planned kernel once, the most useful first. Raises ToolchainMissing; ValueError for unknown names."""
    for given, known in ((families, FAMILIES), (dtypes, tuple(DTYPES))):
        if unknown := [name for name in given if name not in known]:
            raise ValueError(f"'{unknown[0]}' is unknown, expected some of {', '.join(known)}")
    templates = cutlass_templates(cuda_home)
    weighed = [
        (1.0 / ((1 + tail) * (1 + rank)), planned)
        for tail, workloads in _kinds(families, dtypes)
        for rank, planned in enumerate(_of_tail(workloads, templates, target))
    ]
    # The m-th guess for the n-th of epilogues is worth 1/(n m): the first guess for a rare one comes behind the second
    # for the most frequent. Equal ones stay in order, as a sort is stable.
    weighed.sort(key=lambda pair: -pair[0])
    found: dict[str, PlannedKernel] = {}
    for _, planned in weighed:
        found.setdefault(planned.template.digest(planned.workload, planned.candidate, target), planned)
    return list(found.values())


def _of_tail(
    workloads: Sequence[Workload], templates: Iterable[CutlassTemplate], target: CudaTarget
) -> list[PlannedKernel]:
    """Candidates for layers that differ in size only, by how high they rank for how many of them."""
    points: Counter[tuple[str, Candidate]] = Counter()
    example: dict[tuple[str, Candidate], PlannedKernel] = {}
    for workload in workloads:
        for template in templates:
            if not template.matches(workload, target):
                continue
            for rank, candidate in enumerate(template.candidates(workload, target)):
                points[template.name, candidate] += 1.0 / (1 + rank)  # type: ignore[assignment]  # counters take floats
                example.setdefault((template.name, candidate), PlannedKernel(template, workload, candidate))
    return [example[key] for key, _ in points.most_common(MAX_KERNELS_A_KIND)]


def _kinds(families: Sequence[str], dtypes: Sequence[str]) -> Iterable[tuple[int, list[Workload]]]:
    """Layers that one kernel can serve, so that its candidates are ranked for all of them together; and the place of
    their epilogue among all, by how frequent it is."""
    for dtype in dtypes:
        if "gemm" in families:
            for place, tail in enumerate(_GEMM_TAILS):
                yield place, [_gemm(size, dtype, tail) for size in _GEMMS]
        for family, layers, tails in (
            ("conv2d", _CONVOLUTIONS, _CONVOLUTION_TAILS),
            ("depthwise", tuple((n, hw, c, c, k, s) for n, hw, c, k, s in _DEPTHWISE), _DEPTHWISE_TAILS),
        ):
            if family not in families:
                continue
            for place, tail in enumerate(tails):
                for kernel, stride in sorted({layer[4:] for layer in layers}):
                    if stride > 1 and tail is not None and "residual" in tail:
                        continue  # nets add where sizes stay
                    same = [layer for layer in layers if layer[4:] == (kernel, stride)]
                    yield place, [_convolution(layer, dtype, tail, family == "depthwise") for layer in same]


def _gemm(size: tuple[int, int, int], dtype: str, tail: tuple[str, ...] | None) -> Workload:
    m, n, k = size
    item = DTYPES[dtype]
    inputs = [TensorType((m, k), item), TensorType((k, n), item)]
    return _with_tail("matmul", inputs, (m, n), {"weights": (1,)}, dtype, tail)


def _convolution(
    layer: tuple[int, int, int, int, int, int], dtype: str, tail: tuple[str, ...] | None, depthwise: bool
) -> Workload:
    batch, size, channels, outputs, kernel, stride = layer
    item, pad = DTYPES[dtype], kernel // 2
    groups = channels if depthwise else 1
    inputs = [
        TensorType((batch, size, size, channels), item),
        TensorType((outputs, kernel, kernel, channels // groups), item),
    ]
    attributes = {
        "weights": (1,),
        "strides": (stride, stride),
        "padding": (pad, pad, pad, pad),
        "dilation": (1, 1),
        "groups": groups,
        "data_layout": "NHWC",
        "kernel_layout": "OHWI",
        "out_layout": "NHWC",
    }
    side = (size + 2 * pad - kernel) // stride + 1
    return _with_tail("conv2d", inputs, (batch, side, side, outputs), attributes, dtype, tail)


def _with_tail(
    op: str,
    inputs: list[TensorType],
    shape: tuple[int, ...],
    attributes: dict[str, object],
    dtype: str,
    tail: tuple[str, ...] | None,
) -> Workload:
    """The workload with a bias and the tail behind it; None: neither. Integers are scaled to floats first."""
    quantized = dtype == "int8"
    output = "float16" if quantized else DTYPES[dtype]
    steps: list[Step] = []

    def append(op: str, *operands: Operand) -> None:
        steps.append(Step(op, (Operand("value", len(steps)), *operands)))

    def operand(tensor: TensorType) -> Operand:
        inputs.append(tensor)
        return Operand("input", len(inputs) - 1)

    if tail is not None or quantized:
        vector = TensorType((shape[-1],), "float32" if quantized else DTYPES[dtype])
        if quantized:
            append("multiply", operand(vector))
        append("add", operand(vector))
        for step in tail or ():
            if step == "residual":
                append("add", operand(TensorType(shape, output)))
            else:
                append(step)
    if dtype == "tf32":
        attributes = {**attributes, "math": "tf32"}
    return Workload(op, tuple(inputs), TensorType(shape, output), tuple(sorted(attributes.items())), tuple(steps))
