"""Advice about a model: what other sizes, activations and layers would cost on a kind of GPU.

The third level of Bolt: hardware that is used well by some shapes wants models to have those. Figures are measured
where the kernels cache knows a workload, and modelled (a roofline of what the GPU's maker states) where it does not;
each says which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from hone.compiler.choices import Choices
from hone.compiler.cuda.groups import ACTIVATIONS
from hone.compiler.cuda.padding import Padding
from hone.compiler.cuda.partition import Templates, Wanted, takers
from hone.compiler.cuda.pipeline import cuda_paddings, cuda_workloads
from hone.compiler.cuda_target import CudaTarget
from hone.compiler.pipeline import Model
from hone.compiler.roofline import operations, traffic
from hone.compiler.templates.cutlass.epilogue import DTYPE_BYTES, MAX_ACCESS_BYTES, largest_power
from hone.compiler.templates.cutlass.registry import CUTLASS_TEMPLATES
from hone.compiler.workload import Operand, Step, TensorType, Workload

#: Microseconds of a workload as measured on such a GPU, or None.
Measured = Callable[[Workload], float | None]

#: Times as long with accesses of so many bytes: 1.77 is the mean of Bolt's table 3 for alignment 2 of float16; what is
#: between is interpolated, and single items are taken to be no worse than pairs.
_SLOWDOWN = {16: 1.0, 8: 1.33, 4: 1.77, 2: 1.77, 1: 1.77}
#: Of a kernel launched from a CUDA graph.
_LAUNCH_US = 1.5
#: Vector units have so much less than tensor cores (float32, of the GPUs that kernels are made for).
_VECTOR_SHARE = 1 / 16
#: Instructions an item, and so much of a layer's time counts as nothing.
_ACTIVATION_OPERATIONS = 24
_FREE = 0.05
_MAX_RESIDENT = 256


@dataclass(frozen=True, slots=True)
class Cost:
    microseconds: float
    source: str
    """"measured" or "modelled"."""


@dataclass(frozen=True, slots=True)
class UnalignedAdvice:
    """Sizes that are no multiple of what one access reads. `wider` is the layer with those sizes, were the model so."""

    layer: str
    sizes: tuple[int, int]
    """Input channels and outputs (of a product: its depth and columns)."""
    padded_sizes: tuple[int, int]
    unpadded: Cost
    padded: Cost
    """With the copy of its data, where one is needed."""
    wider: Cost
    copies_data: bool


@dataclass(frozen=True, slots=True)
class ActivationAdvice:
    """An activation in a kernel's epilogue, and what it takes: `extra_ratio` of the layer's time without it.

    Where that was measured it is this activation's; modelled, it is what the dearest would take.
    """

    layer: str
    activation: str
    num_layers: int
    cost: Cost
    without: Cost
    extra_ratio: float
    source: str
    is_free: bool


@dataclass(frozen=True, slots=True)
class DeepenAdvice:
    """A 3x3 convolution behind which a 1x1 of as many channels fits into the same kernel."""

    layer: str
    num_layers: int
    alone: Cost
    with_kernel_of_its_own: Cost
    fused: Cost


@dataclass(frozen=True, slots=True)
class PairAdvice:
    """Two layers of the model that one persistent kernel can do."""

    first: str
    second: str
    num_pairs: int
    apart: Cost
    fused: Cost


@dataclass(frozen=True, slots=True)
class Advice:
    device: str
    precision: str
    unaligned: tuple[UnalignedAdvice, ...]
    activations: tuple[ActivationAdvice, ...]
    deepen: tuple[DeepenAdvice, ...]
    pairs: tuple[PairAdvice, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def advise(
    model: Model,
    target: CudaTarget,
    choices: Choices,
    measured: Measured = lambda _: None,
    *,
    templates: Templates = CUTLASS_TEMPLATES,
) -> Advice:
    """Raises BuildFailed when the model does not compile."""
    wanted = cuda_workloads(model, target, choices, templates=templates)
    costs = _Costs(target, measured)
    return Advice(
        device=target.name,
        precision=choices.precision.name,
        unaligned=tuple(_unaligned(p, costs) for p in cuda_paddings(model, target, choices, templates=templates)),
        activations=tuple(_activations(wanted, costs)),
        deepen=tuple(_deepen(wanted, costs, templates)),
        pairs=tuple(
            PairAdvice(
                str(pair.first),
                str(pair.second),
                num_pairs,
                costs.sum((pair.first, pair.second)),
                costs.of_pair(pair.fused, pair.first, pair.second),
            )
            for pair, num_pairs in wanted.pairs.items()
        ),
    )


class _Costs:
    def __init__(self, target: CudaTarget, measured: Measured) -> None:
        self.target, self._measured = target, measured

    def of(self, workload: Workload) -> Cost:
        known = self._measured(workload)
        if known is not None:
            return Cost(round(known, 2), "measured")
        return Cost(round(_slowdown(workload) * self.bare_us(workload) + _LAUNCH_US, 2), "modelled")

    def bare_us(self, workload: Workload) -> float:
        """Modelled, at full width and without a launch."""
        # Tensor cores do half as much in tf32, twice as much in int8; float32 proper is left to vector units.
        rate = {"float16": 1.0, "bfloat16": 1.0, "int8": 2.0}.get(workload.inputs[0].dtype)
        if rate is None:
            rate = 0.5 if dict(workload.attributes).get("math") == "tf32" else _VECTOR_SHARE
        return self.target.microseconds(operations(workload) / rate, traffic(workload))

    def sum(self, workloads: Iterable[Workload]) -> Cost:
        costs = [self.of(workload) for workload in workloads]
        is_measured = all(cost.source == "measured" for cost in costs)
        return Cost(round(sum(c.microseconds for c in costs), 2), "measured" if is_measured else "modelled")

    def of_pair(self, fused: Workload, first: Workload, second: Workload) -> Cost:
        """Two in one kernel: the arithmetic of both, without what would be written and read between."""
        known = self._measured(fused)
        if known is not None:
            return Cost(round(known, 2), "measured")
        between = 2 * first.output.num_elements * DTYPE_BYTES[first.output.dtype]
        moved = traffic(first) + traffic(second) - between
        modelled = self.target.microseconds(operations(first) + operations(second), moved)
        return Cost(round(modelled + _LAUNCH_US, 2), "modelled")


def _slowdown(workload: Workload) -> float:
    if workload.inputs[0].dtype == "float32" and dict(workload.attributes).get("math") != "tf32":
        return 1.0
    return _SLOWDOWN[min(_access_bytes(tensor) for tensor in (*workload.inputs[:2], workload.output))]


def _access_bytes(tensor: TensorType) -> int:
    size = DTYPE_BYTES[tensor.dtype]
    return size * largest_power(tensor.shape[-1], max(1, MAX_ACCESS_BYTES // size)) if tensor.shape else size


def _unaligned(padding: Padding, costs: _Costs) -> UnalignedAdvice:
    copy_us = costs.target.microseconds(0.0, padding.copied_bytes)
    wider = costs.of(padding.padded)
    return UnalignedAdvice(
        layer=str(padding.operator),
        sizes=_sizes(padding.operator),
        padded_sizes=_sizes(padding.padded),
        unpadded=costs.of(padding.operator),
        padded=Cost(round(wider.microseconds + copy_us, 2), wider.source if not copy_us else "modelled"),
        wider=wider,
        copies_data=padding.copied_bytes > 0,
    )


def _sizes(operator: Workload) -> tuple[int, int]:
    return operator.inputs[0].shape[-1], operator.output.shape[-1]


def _activations(wanted: Wanted, costs: _Costs) -> Iterable[ActivationAdvice]:
    for workload, num_layers in wanted.counts.items():
        found = [at for at, step in enumerate(workload.epilogue) if step.op in ACTIVATIONS]
        if not found:
            continue
        cost, without = costs.of(workload), costs.of(without_step(workload, found[-1]))
        if cost.source == without.source == "measured":
            source, ratio = "measured", max(0.0, cost.microseconds / without.microseconds - 1.0)
        else:
            # Beside what the tensor cores do; it shows where they wait for nothing else.
            extra = _ACTIVATION_OPERATIONS * workload.output.num_elements
            source, ratio = "modelled", costs.target.microseconds(extra / _VECTOR_SHARE, 0) / cost.microseconds
        yield ActivationAdvice(
            str(workload),
            workload.epilogue[found[-1]].op,
            num_layers,
            cost,
            without,
            round(ratio, 4),
            source,
            ratio <= _FREE,
        )


def without_step(workload: Workload, at: int) -> Workload:
    """The workload less one step of its epilogue that has a single value as its operand."""
    (operand,) = [operand for operand in workload.epilogue[at].operands if operand.kind == "value"]

    def moved(other: Operand) -> Operand:
        # Value 0 is the operator's own, and value n the n-th step's.
        if other.kind != "value" or other.at <= at:
            return other
        return operand if other.at == at + 1 else Operand("value", other.at - 1)

    steps = [
        Step(step.op, tuple(moved(one) for one in step.operands))
        for number, step in enumerate(workload.epilogue)
        if number != at
    ]
    return replace(workload, epilogue=tuple(steps))


def _deepen(wanted: Wanted, costs: _Costs, templates: Templates) -> Iterable[DeepenAdvice]:
    followed = {pair.first for pair in wanted.pairs}
    for workload, num_layers in wanted.counts.items():
        if workload.op != "conv2d" or workload.inputs[1].shape[1:3] != (3, 3) or workload in followed:
            continue
        pair = deepened(workload)
        if pair is None or not takers(pair[0], costs.target, templates):
            continue
        fused, pointwise = pair
        yield DeepenAdvice(
            str(workload),
            num_layers,
            costs.of(workload),
            costs.sum((workload, pointwise)),
            costs.of_pair(fused, workload, pointwise),
        )


def deepened(workload: Workload) -> tuple[Workload, Workload] | None:
    """A convolution and a 1x1 with bias and ReLU behind it as one workload, and the 1x1 alone; None where a residual is
    added between, or the channels are too many to stay in a block."""
    channels = workload.output.shape[3]
    if channels > _MAX_RESIDENT or any(tensor.shape == workload.output.shape for tensor in workload.inputs[2:]):
        return None
    data, weight = workload.inputs[:2]
    matrix = TensorType((channels, 1, 1, channels), weight.dtype)
    vector = TensorType((channels,), workload.output.dtype)
    moved = [
        [op, [[kind, at + 1 if kind == "input" else at] for kind, at in operands]]
        for op, operands in (step.fields() for step in workload.epilogue)
    ]
    told = {name: value for name, value in workload.attributes if name != "weights"}
    inputs = (data, weight, matrix, *workload.inputs[2:], vector)
    bias = len(inputs) - 1

    def epilogue(at: int) -> tuple[Step, ...]:
        return (
            Step("add", (Operand("value", 0), Operand("input", at))),
            Step("relu", (Operand("value", 1),)),
        )

    fused = Workload(
        "conv2d_conv2d",
        inputs,
        workload.output,
        tuple(
            sorted(
                {**told, "epilogue0": _frozen(moved), "intermediate": workload.output.dtype, "weights": (1, 2)}.items()
            )
        ),
        epilogue(bias),
    )
    pointwise = Workload(
        "matmul",
        (workload.output, TensorType((channels, channels), weight.dtype), vector),
        workload.output,
        (("transpose_b", True), ("weights", (1,))),
        epilogue(2),
    )
    return fused, pointwise


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
