"""Groups: an operator that a kernel takes, with what rides behind it in registers, found in a graph.

A group is an anchor (a product, a convolution, an attention) and the item-wise operators behind it of which only the
last value is needed outside. Casts between floats ride along for nothing: a kernel's epilogue works in float32 and
rounds once, to the dtype of its output. A group is made only where a template takes it whole; if none does, its last
operators are left out until one does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import tvm
from tvm import relax

from hone.compiler.cuda.steps import canonical_steps
from hone.compiler.phases.anchors import read_anchor
from hone.compiler.phases.types import ints, tensor_type
from hone.compiler.templates.cutlass.epilogue import COLUMN_SUM
from hone.compiler.templates.epilogue import STEP_OF_OPERATOR
from hone.compiler.workload import Operand, Step, TensorType, Workload
from hone.types import NUMPY_DTYPES

#: Beside the steps that CPU kernels have.
_STEPS = {
    **STEP_OF_OPERATOR,
    "relax.nn.gelu_tanh": "gelu_tanh",
    "relax.nn.softplus": "softplus",
}
#: Steps by which a layer is not linear.
ACTIVATIONS = frozenset(
    {
        *("relu", "relu6", "leakyrelu", "clip", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh", "softplus", "erf"),
        *("hardsigmoid", "hardswish", "mish"),
    }
)
_FLOATS = frozenset({"float32", "float16", "bfloat16"})
#: After these, values are whole numbers within bounds, which a cast to an integer does not change.
_WHOLE = frozenset({"clip", "round"})
_SCALING = frozenset({"relax.multiply", "relax.divide"})


class Matches(Protocol):
    """Whether a kernel takes a workload."""

    def __call__(self, workload: Workload, /) -> bool: ...


@dataclass(slots=True)
class Group:
    """`inputs` are the kernel's arguments as Relax expressions; `bindings` what the call replaces, its result last."""

    bindings: list[Any]
    workload: Workload
    inputs: list[Any]

    @property
    def result(self) -> Any:
        return self.bindings[-1].var


@dataclass(frozen=True, slots=True)
class _Anchor:
    op: str
    inputs: tuple[Any, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Epilogue:
    """How far a group may reach: its members' positions, its steps, and what its kernel reads beside the anchor's."""

    members: tuple[int, ...]
    steps: tuple[Step, ...]
    added: tuple[Any, ...]
    output: TensorType


def find_groups(function: Any, matches: Matches, math: str) -> list[Group]:
    """All groups of a function, in the order of their results. `math` is how products of float32 are computed."""
    if not isinstance(function.body, relax.SeqExpr):
        return []
    prepared = known_at_load(function)
    found: list[Group] = []
    for block in function.body.blocks:
        if isinstance(block, relax.DataflowBlock):
            found.extend(_Block(block, prepared, matches, math).groups())
    return found


def known_at_load(function: Any) -> set[Any]:
    """Weights, and all that is computed from weights alone."""
    if not function.attrs or "num_input" not in function.attrs:
        return set()
    known = set(function.params[int(function.attrs["num_input"]) :])
    for block in function.body.blocks:
        for binding in block.bindings:
            used = relax.analysis.free_vars(binding.value)
            if used and all(var in known for var in used):
                known.add(binding.var)
    return known


class _Block:
    """One dataflow block while its groups are found."""

    def __init__(self, block: Any, prepared: set[Any], matches: Matches, math: str) -> None:
        self._prepared, self._matches, self._math = prepared, matches, math
        self._bindings = [binding for binding in block.bindings if isinstance(binding, relax.VarBinding)]
        self._values = {binding.var: binding.value for binding in self._bindings}
        self._users: dict[Any, list[int]] = {}
        for at, binding in enumerate(self._bindings):
            for var in relax.analysis.free_vars(binding.value):
                self._users.setdefault(var, []).append(at)
            if not isinstance(binding.var, relax.DataflowVar):  # a user that no group can hold
                self._users.setdefault(binding.var, []).append(len(self._bindings))

    def groups(self) -> Iterator[Group]:
        taken: set[int] = set()
        for at, binding in enumerate(self._bindings):
            if at in taken or binding.var in self._prepared:
                continue
            group = self._group_of(at, list(self._anchors(binding)), taken)
            if group is not None:
                yield group

    def _group_of(self, at: int, anchors: Sequence[_Anchor], taken: set[int]) -> Group | None:
        """The longest that a template takes; the earlier anchor where two ways of one operator are as long."""
        if not anchors:
            return None
        for epilogue in reversed(self._epilogues(at, taken)):
            for anchor in anchors:
                group = self._made(anchor, epilogue)
                if group is not None and self._matches(group.workload):
                    taken.update(epilogue.members)
                    return group
        return None

    def _made(self, anchor: _Anchor, epilogue: _Epilogue) -> Group | None:
        inputs = [*anchor.inputs, *epilogue.added]
        types = [tensor_type(value) for value in inputs]
        if any(tensor is None for tensor in types):
            return None
        dtype = types[0].dtype if types[0] is not None else ""
        # Steps name the epilogue's own inputs from 0 on.
        steps = tuple(
            Step(
                step.op,
                tuple(
                    Operand("input", operand.at + len(anchor.inputs)) if operand.kind == "input" else operand
                    for operand in step.operands
                ),
            )
            for step in canonical_steps(epilogue.steps, dtype)
        )
        weights = tuple(at for at, value in enumerate(anchor.inputs) if self._is_prepared(value))
        workload = Workload(
            op=anchor.op,
            inputs=tuple(tensor for tensor in types if tensor is not None),
            output=epilogue.output,
            attributes=tuple(sorted({**anchor.attributes, "weights": weights}.items())),
            epilogue=steps,
        )
        return Group([self._bindings[member] for member in epilogue.members], workload, inputs)

    def _is_prepared(self, value: Any) -> bool:
        used = relax.analysis.free_vars(value)
        return bool(used) and all(var in self._prepared for var in used)

    # --- anchors ---

    def _anchors(self, binding: Any) -> Iterator[_Anchor]:
        """The operator, in the ways that a kernel might take it, the better first."""
        call = binding.value
        if not isinstance(call, relax.Call) or tensor_type(binding.var) is None:
            return
        laid_out = read_anchor(call)
        if laid_out is not None:
            yield _Anchor(laid_out.op, laid_out.inputs, dict(laid_out.attributes))
        elif getattr(call.op, "name", "") == "relax.matmul":
            yield from self._products(call)
        elif getattr(call.op, "name", "") == "relax.nn.conv2d":
            yield from self._convolutions(call)

    def _products(self, call: Any) -> Iterator[_Anchor]:
        a, b = call.args
        math = self._math_of(a)
        transposed: Any = self._values.get(b) if isinstance(b, relax.Var) else None
        if getattr(getattr(transposed, "op", None), "name", "") == "relax.permute_dims":
            rank = len(transposed.args[0].ty.shape)
            axes = ints(transposed.attrs.axes) if transposed.attrs.axes is not None else tuple(range(rank))[::-1]
            if axes == (*range(rank - 2), rank - 1, rank - 2):
                yield _Anchor("matmul", (a, transposed.args[0]), {"transpose_b": True, **math})
        yield _Anchor("matmul", (a, b), math)

    def _convolutions(self, call: Any) -> Iterator[_Anchor]:
        attrs = call.attrs
        if (str(attrs.data_layout), str(attrs.kernel_layout)) != ("NHWC", "OHWI"):
            return
        data, weight = call.args
        math = self._math_of(data)
        strides, padding, groups = ints(attrs.strides), ints(attrs.padding), int(attrs.groups)
        kernel = tensor_type(weight)
        if kernel is None:
            return
        if kernel.shape[1:3] == (1, 1) and groups == 1 and set(strides) == {1} and set(padding) == {0}:
            # A product of all pixels with a matrix: the weight's two other dimensions are 1.
            matrix = relax.op.reshape(weight, (kernel.shape[0], kernel.shape[3]))
            matrix = relax.BlockBuilder().normalize(matrix)
            yield _Anchor("matmul", (data, matrix), {"transpose_b": True, **math})
        told = {
            "strides": strides,
            "padding": padding,
            "dilation": ints(attrs.dilation),
            "groups": groups,
            "data_layout": "NHWC",
            "kernel_layout": "OHWI",
            "out_layout": "NHWC",
        }
        yield _Anchor("conv2d", (data, weight), {**told, **math})

    def _math_of(self, operand: Any) -> dict[str, Any]:
        tensor = tensor_type(operand)
        return {"math": self._math} if tensor is not None and tensor.dtype == "float32" and self._math != "f32" else {}

    # --- epilogues ---

    def _epilogues(self, at: int, taken: set[int]) -> list[_Epilogue]:
        """From the bare operator on, all that leave no value inside that is needed outside."""
        var = self._bindings[at].var
        output = tensor_type(var)
        assert output is not None, "anchors have types"
        steps = _Steps(output.shape, var, scaled=output.dtype == "int32")
        members = [at]
        found = [_Epilogue((at,), (), (), output)]
        for position in sorted(self._reach(var)):
            binding = self._bindings[position]
            if position not in taken and steps.is_column_sum(binding):
                last = _Epilogue(
                    (*members, position), (*steps.steps, steps.column_sum()), tuple(steps.added), result_of(binding)
                )
                if not self._escapes(last.members):
                    found.append(last)
                break  # nothing rides behind a sum
            if position in taken or not steps.take(binding):
                break
            members.append(position)
            if not self._escapes(members):
                found.append(_Epilogue(tuple(members), tuple(steps.steps), tuple(steps.added), result_of(binding)))
        return found

    def _escapes(self, members: Sequence[int]) -> bool:
        """Whether a value but the last is needed outside."""
        held = set(members)
        return any(
            user not in held for member in members[:-1] for user in self._users.get(self._bindings[member].var, ())
        )

    def _reach(self, start: Any) -> set[int]:
        """Positions of all bindings that depend on a value."""
        reached: set[int] = set()
        pending = [start]
        while pending:
            for user in self._users.get(pending.pop(), ()):
                if user < len(self._bindings) and user not in reached:
                    reached.add(user)
                    pending.append(self._bindings[user].var)
        return reached


class _Steps:
    """The program of an epilogue while it grows. Its inputs are numbered from 0 on.

    `scaled`: it scales integers. Scales are a model's own, and differ from layer to layer: as constants they would give
    every layer a kernel of its own, so they are inputs.
    """

    def __init__(self, shape: tuple[int, ...], first: Any, *, scaled: bool) -> None:
        self._shape, self._scaled = shape, scaled
        self._values: dict[Any, Operand] = {first: Operand("value", 0)}
        self.steps: list[Step] = []
        self.added: list[Any] = []

    def take(self, binding: Any) -> bool:
        """Append the binding; False, and nothing changed, where it cannot ride along."""
        call, result = binding.value, tensor_type(binding.var)
        if not isinstance(call, relax.Call) or not isinstance(call.op, tvm.ir.Op) or result is None:
            return False
        if result.shape != self._shape:
            return False
        name = str(call.op.name)
        if name == "relax.astype":
            return self._cast(binding, call.args[0], result)
        if result.dtype not in _FLOATS:
            return False
        added = list(self.added)
        scales = self._scaled and name in _SCALING
        operands = [self._operand(argument, added, scales=scales) for argument in call.args]
        if any(operand is None for operand in operands):
            return False
        made = _program(name, call, [operand for operand in operands if operand is not None], len(self.steps))
        if made is None:
            return False
        self.added = added
        self.steps += made
        self._values[binding.var] = Operand("value", len(self.steps))
        return True

    def is_column_sum(self, binding: Any) -> bool:
        """Whether it is the sum of the last value over rows: all of them, or those of each image or batch."""
        call, result = binding.value, tensor_type(binding.var)
        if not isinstance(call, relax.Call) or getattr(call.op, "name", "") != "relax.sum" or result is None:
            return False
        value = self._values.get(call.args[0]) if isinstance(call.args[0], relax.Var) else None
        if value is None or value.at != len(self.steps) or result.dtype != "float32" or call.attrs.axis is None:
            return False
        rank = len(self._shape)
        axes = sorted(axis % rank for axis in ints(call.attrs.axis))
        return bool(axes) and axes == list(range(axes[0], rank - 1))

    def column_sum(self) -> Step:
        return Step(COLUMN_SUM, (Operand("value", len(self.steps)),))

    def _cast(self, binding: Any, source: Any, result: TensorType) -> bool:
        value = self._values.get(source) if isinstance(source, relax.Var) else None
        if value is None:
            return False
        whole = bool(self.steps) and value.at == len(self.steps) and self.steps[-1].op in _WHOLE
        if result.dtype not in _FLOATS and not (result.dtype == "int8" and whole):
            return False
        self._values[binding.var] = value
        return True

    def _operand(self, argument: Any, added: list[Any], *, scales: bool) -> Operand | None:
        constant = number_of(argument)
        if constant is not None and not (scales and isinstance(argument, tvm.ir.GenericConst)):
            return Operand("constant", constant=constant)
        if isinstance(argument, relax.Var) and argument in self._values:
            return self._values[argument]
        tensor = tensor_type(argument)
        if tensor is None or tensor.dtype not in _FLOATS or not _broadcasts(tensor.shape, self._shape):
            return None
        for at, known in enumerate(added):
            if known.same_as(argument):
                return Operand("input", at)
        added.append(argument)
        return Operand("input", len(added) - 1)


def _program(name: str, call: Any, operands: list[Operand], num_steps: int) -> list[Step] | None:
    """The operator as steps; None where kernels cannot compute it."""
    if name == "relax.power" and operands[1].kind == "constant" and operands[1].constant in (2.0, 3.0):
        base = operands[0]
        steps = [Step("multiply", (base, base))]
        if operands[1].constant == 3.0:
            steps.append(Step("multiply", (Operand("value", num_steps + 1), base)))
        return steps
    if name == "relax.square":
        return [Step("multiply", (operands[0], operands[0]))]
    op = _STEPS.get(name)
    if op is None:
        return None
    if op == "leakyrelu":
        operands = [*operands, Operand("constant", constant=float(call.attrs.alpha))]
    return [Step(op, tuple(operands))]


def result_of(binding: Any) -> TensorType:
    tensor = tensor_type(binding.var)
    assert tensor is not None, "what rides along has a shape"
    return tensor


def _broadcasts(shape: tuple[int, ...], onto: tuple[int, ...]) -> bool:
    return len(shape) <= len(onto) and all(
        dim in (1, full) for dim, full in zip(reversed(shape), reversed(onto), strict=False)
    )


def number_of(expression: Any) -> float | None:
    """The number that an expression always is: a literal, or a tensor of one item."""
    if isinstance(expression, tvm.ir.GenericConst):
        tensor = tensor_type(expression)
        if tensor is None or tensor.dtype not in _FLOATS or tensor.num_elements != 1:
            return None
        array = np.asarray(expression.value.numpy())
        if tensor.dtype == "bfloat16" and array.dtype == np.uint16:
            array = array.view(NUMPY_DTYPES["BF16"])
        return float(array.astype(np.float32).reshape(()))
    if isinstance(expression, tvm.tirx.IntImm | tvm.tirx.FloatImm):
        return float(expression.value)
    return None
