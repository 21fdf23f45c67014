"""Which kernels to build ahead of any model: Bolt's sample programs, of which an architecture needs some tens a dtype.

Kernels know no sizes, so what is built for typical layers serves all. The plan goes from what most models call to what
few do; wherever it is cut off, what was built is what helps most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hone.compiler.cuda_target import CudaTarget
from hone.compiler.templates.base import Candidate
from hone.compiler.templates.cutlass.epilogue import DTYPE_BYTES, MAX_ACCESS_BYTES
from hone.compiler.templates.cutlass.kernel import CutlassTemplate
from hone.compiler.templates.cutlass.registry import cutlass_templates
from hone.compiler.workload import Operand, Step, TensorType, Workload

#: What the command line calls them.
DTYPES = {"f16": "float16", "bf16": "bfloat16", "tf32": "float32", "f32": "float32", "int8": "int8"}
#: Of kernels that differ in the candidate only: further ones are built when a model wants them.
MAX_KERNELS_A_KIND = 12
FAMILIES = ("gemm", "conv2d", "depthwise", "attention")

#: Whether a layer's output is stored as the layer is, or the operator behind it (a norm) or the caller wants float32.
_STORED, _FULL = "", "float32"


@dataclass(frozen=True, slots=True)
class _Tail:
    """What rides behind a layer: steps after the bias ("residual" adds a tensor), and what is written."""

    steps: tuple[str, ...] = ()
    output: str = _STORED
    biased: bool = True


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
#: (batch, height and width, channels, outputs): ResNet's pointwise layers, which are products with a transposed matrix.
_POINTWISE = (
    (32, 56, 64, 256),
    (32, 56, 256, 64),
    (32, 28, 512, 128),
    (8, 14, 256, 1024),
    (32, 14, 1024, 256),
    (8, 7, 2048, 512),
    (8, 7, 512, 2048),
)
#: (batch, height and width, channels, outputs, kernel, stride): ResNet's others, and RepVGG's; 0 channels are a
#: picture's, padded.
_CONVOLUTIONS = (
    (32, 56, 64, 64, 3, 1),
    (32, 28, 128, 128, 3, 1),
    (32, 14, 256, 256, 3, 1),
    (8, 7, 512, 512, 3, 1),
    (8, 28, 96, 96, 3, 1),
    (8, 14, 192, 192, 3, 1),
    (32, 56, 128, 128, 3, 2),
    (8, 28, 256, 256, 3, 2),
    (32, 56, 256, 512, 1, 2),
    (8, 14, 1024, 2048, 1, 2),
    (32, 224, 0, 64, 7, 2),
    (8, 224, 0, 64, 7, 2),
)
_DEPTHWISE = ((32, 112, 32, 3, 1), (32, 56, 128, 3, 1), (32, 14, 512, 3, 1), (32, 56, 128, 3, 2), (32, 14, 384, 5, 1))
#: (batch, heads, rows, depth): BERT-base, and heads as language models have them.
_ATTENTIONS = ((8, 12, 128, 64), (1, 12, 512, 64), (1, 32, 1024, 128))

#: Most frequent first, by what models ask for once they are partitioned: `tests/cutlass/test_prebuilt.py` counts.
_GEMM_TAILS = (
    _Tail(),
    _Tail(("residual",), _FULL),
    _Tail(("gelu",)),
    _Tail(output=_FULL),
    _Tail(("residual",)),
    _Tail(("relu",)),
    _Tail(("gelu_tanh",)),
    _Tail(("silu",)),
    _Tail(("tanh",), _FULL),
    _Tail(biased=False),
)
#: Where weights are float32 they stay as the model has them, and ONNX's Gemm has them transposed.
_TRANSPOSED_TAILS = (_Tail(), _Tail(("relu",)), _Tail(("tanh",)), _Tail(("gelu",)))
_POINTWISE_TAILS = (
    _Tail(("relu",)),
    _Tail(("residual", "relu")),
    _Tail(),
    _Tail(("silu",)),
    _Tail(("hardswish",)),
    _Tail(("residual",)),
    _Tail(("relu6",)),
    _Tail(("residual", "relu", "column_sum"), _FULL),
)
_CONVOLUTION_TAILS = (
    _Tail(("relu",)),
    _Tail(("residual", "relu")),
    _Tail(),
    _Tail(("silu",)),
    _Tail(("hardswish",)),
    _Tail(("residual",)),
    _Tail(("relu", "column_sum"), _FULL),
)
#: Projections beside a stage's first block; pictures' first layers.
_SHORTCUT_TAILS = (_Tail(), _Tail(("residual", "relu")))
_FIRST_TAILS = (_Tail(("relu",)), _Tail(("silu",)))
_DEPTHWISE_TAILS = (_Tail(("relu6",)), _Tail(("hardswish",)), _Tail(("silu",)), _Tail(("relu",)))


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
                # A layer's first guess weighs more than some layers' second.
                points[template.name, candidate] += 1.0 / (1 + rank) ** 2  # type: ignore[assignment]  # counters take floats
                example.setdefault((template.name, candidate), PlannedKernel(template, workload, candidate))
    return [example[key] for key, _ in points.most_common(MAX_KERNELS_A_KIND)]


def _kinds(families: Sequence[str], dtypes: Sequence[str]) -> Iterator[tuple[int, list[Workload]]]:
    """Layers that one kernel can serve, so that its candidates are ranked for all of them together; and the place of
    their epilogue among all, by how frequent it is."""
    for dtype in dtypes:
        if "gemm" in families:
            for place, tail in enumerate(_GEMM_TAILS):
                yield place, [_gemm(size, dtype, tail) for size in _GEMMS]
            for place, tail in enumerate(_TRANSPOSED_TAILS if DTYPES[dtype] == "float32" else ()):
                yield place, [_gemm(size, dtype, tail, transposed=True) for size in _GEMMS]
        if "conv2d" in families:
            for place, tail in enumerate(_POINTWISE_TAILS):
                yield place, [_pointwise(layer, dtype, tail) for layer in _POINTWISE]
            yield from _convolution_kinds(_CONVOLUTIONS, dtype)
        if "depthwise" in families:
            for place, tail in enumerate(_DEPTHWISE_TAILS):
                for kernel, stride in sorted({layer[3:] for layer in _DEPTHWISE}):
                    same = [(n, hw, c, c, k, s) for n, hw, c, k, s in _DEPTHWISE if (k, s) == (kernel, stride)]
                    yield place, [_convolution(layer, dtype, tail, depthwise=True) for layer in same]
        if "attention" in families and dtype != "int8":
            for place, (packed, masked) in enumerate(((False, True), (True, False), (False, False))):
                for depth in sorted({sizes[3] for sizes in _ATTENTIONS}):
                    same_depth = [sizes for sizes in _ATTENTIONS if sizes[3] == depth]
                    yield place, [_attention(sizes, dtype, packed, masked) for sizes in same_depth]


def _convolution_kinds(
    layers: Sequence[tuple[int, int, int, int, int, int]], dtype: str
) -> Iterator[tuple[int, list[Workload]]]:
    for kernel, stride in sorted({layer[4:] for layer in layers}):
        same = [layer for layer in layers if layer[4:] == (kernel, stride)]
        tails = {1: _SHORTCUT_TAILS, 7: _FIRST_TAILS}.get(kernel, _CONVOLUTION_TAILS)
        for place, tail in enumerate(tails):
            if kernel == 3 and stride > 1 and "residual" in tail.steps:
                continue  # nets add where sizes stay
            yield place, [_convolution(layer, dtype, tail) for layer in same]


def _gemm(size: tuple[int, int, int], dtype: str, tail: _Tail, *, transposed: bool = False) -> Workload:
    m, n, k = size
    item = DTYPES[dtype]
    inputs = [TensorType((m, k), item), TensorType((n, k) if transposed else (k, n), item)]
    attributes: dict[str, object] = {"weights": (1,), **({"transpose_b": True} if transposed else {})}
    return _with_tail("matmul", inputs, (m, n), attributes, dtype, tail)


def _pointwise(layer: tuple[int, int, int, int], dtype: str, tail: _Tail) -> Workload:
    batch, size, channels, outputs = layer
    item = DTYPES[dtype]
    inputs = [TensorType((batch, size, size, channels), item), TensorType((outputs, channels), item)]
    attributes = {"weights": (1,), "transpose_b": True}
    return _with_tail("matmul", inputs, (batch, size, size, outputs), attributes, dtype, tail)


def _convolution(
    layer: tuple[int, int, int, int, int, int], dtype: str, tail: _Tail, *, depthwise: bool = False
) -> Workload:
    batch, size, channels, outputs, kernel, stride = layer
    item, pad = DTYPES[dtype], kernel // 2
    channels = channels or MAX_ACCESS_BYTES // DTYPE_BYTES[item]
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


def _attention(sizes: tuple[int, int, int, int], dtype: str, packed: bool, masked: bool) -> Workload:
    """`packed`: query, key and value are parts of one tensor, as one product makes them."""
    batch, heads, rows, depth = sizes
    item = DTYPES[dtype]
    output = TensorType((batch, rows, heads, depth), item)
    data = TensorType((batch, rows, 3, heads, depth), item) if packed else output
    inputs = [data] * 3 + [TensorType((batch, 1, 1, rows), item)] * masked
    attributes: dict[str, object] = {
        "layouts": ("bs0hd", "bs1hd", "bs2hd") if packed else ("bshd",) * 3,
        "output_layout": "bshd",
        "masked": masked,
        "scale": depth**-0.5,
        "weights": (),
    }
    if dtype == "tf32":
        attributes["math"] = "tf32"
    return Workload("attention", tuple(inputs), output, tuple(sorted(attributes.items())))


def _with_tail(
    op: str,
    inputs: list[TensorType],
    shape: tuple[int, ...],
    attributes: dict[str, object],
    dtype: str,
    tail: _Tail,
) -> Workload:
    """The workload with a bias and the tail behind it. Integers are scaled to floats first, and what is stored is
    scaled to the next layer's integers and rounded."""
    quantized = dtype == "int8"
    stored = DTYPES[dtype]
    output = tail.output or stored
    vector = TensorType((shape[-1],), "float32" if quantized else stored)
    number = TensorType((), "float32")
    steps: list[Step] = []

    def append(op: str, *operands: Operand) -> None:
        steps.append(Step(op, (Operand("value", len(steps)), *operands)))

    def operand(tensor: TensorType) -> Operand:
        inputs.append(tensor)
        return Operand("input", len(inputs) - 1)

    if quantized:
        append("multiply", operand(vector))
    if tail.biased:
        append("add", operand(vector))
    for step in tail.steps:
        if step == "residual":
            append("add", operand(TensorType(shape, "float32" if quantized else stored)))
        else:
            append(step)
    if quantized and output == "int8":
        append("divide", operand(number))
        append("round")
        append("clip", *(Operand("constant", constant=bound) for bound in (-128.0, 127.0)))
    if dtype == "tf32":
        attributes = {**attributes, "math": "tf32"}
    written = (shape[0], *(1,) * (len(shape) - 2), shape[-1]) if "column_sum" in tail.steps else shape
    return Workload(op, tuple(inputs), TensorType(written, output), tuple(sorted(attributes.items())), tuple(steps))
