"""Partition: operators that a template takes, with what rides behind them, become calls of kernels by name.

A group is an anchor (a convolution, a matrix product) and the element-wise operators that follow it as long as only
the last value is needed outside. The call is `R.call_dps_packed(kernel, arguments)`, and nothing in the module knows
how the kernel is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tvm
from tvm import relax

from hone.compiler.choices import Choices, KernelCall
from hone.compiler.phases.anchors import read_anchor
from hone.compiler.phases.precision import F32, Precision, lower, lowerable
from hone.compiler.phases.types import OPAQUE, tensor_type
from hone.compiler.target import CpuTarget
from hone.compiler.templates.epilogue import STEP_OF_OPERATOR
from hone.compiler.templates.packing import Packing
from hone.compiler.templates.registry import template_named, templates_for
from hone.compiler.workload import Operand, Step, TensorType, Workload


@dataclass(slots=True)
class _Group:
    """An anchor's binding and its epilogue; `inputs` are the kernel's arguments as Relax expressions."""

    bindings: list[Any]
    workload: Workload
    inputs: list[Any]


def partition(mod: tvm.IRModule, target: CpuTarget, choices: Choices) -> tuple[tvm.IRModule, list[KernelCall]]:
    """Every group that a template matches, replaced by a call; what is called, each kernel once.

    Weights are packed in front of the call as its candidate wants them; a later phase lifts that to load time.
    """
    kernels: dict[Workload, KernelCall] = {}
    functions = dict(mod.functions.items())
    for name, function in mod.functions.items():
        if not isinstance(function, relax.Function):
            continue
        groups = _groups(function, target, choices.precision)
        for group in groups:
            kernels.setdefault(group.workload, _choose(group.workload, target, choices)).num_calls += 1
        rewriter = _Rewriter(mod, groups, kernels, target)
        functions[name] = rewriter.visit_expr(function)
        functions.update(rewriter.packings())
    mod = tvm.IRModule(functions, attrs=mod.attrs)
    return relax.transform.DeadCodeElimination()(mod), list(kernels.values())


def _choose(workload: Workload, target: CpuTarget, choices: Choices) -> KernelCall:
    candidate = choices.kernels.get(workload.digest)
    template = template_named(candidate.template) if candidate is not None else None
    if candidate is None or template is None:
        template = templates_for(workload, target)[0]  # a group is made only where a template matches
        candidate = template.candidates(workload, target)[0]
    return KernelCall(workload, template, candidate, template.digest(workload, candidate, target))


def workloads(mod: tvm.IRModule, target: CpuTarget, precision: Precision) -> dict[Workload, int]:
    """What a laid-out module asks of templates: each workload and how often it is called."""
    counts: dict[Workload, int] = {}
    for function in mod.functions.values():
        if isinstance(function, relax.Function):
            for group in _groups(function, target, precision):
                counts[group.workload] = counts.get(group.workload, 0) + 1
    return counts


def layers(mod: tvm.IRModule, target: CpuTarget, precision: str) -> list[Workload]:
    """What can be lowered to a precision, in the order by which `Precision.kept` names layers."""
    return layers_in_order(mod, target, precision)[0]


def layers_in_order(mod: tvm.IRModule, target: CpuTarget, precision: str) -> tuple[list[Workload], list[int]]:
    """The same, and their places in that list in the order of execution: a group is called where its last member
    stands, and named where its first does."""
    found: list[Workload] = []
    order: list[int] = []
    for function in mod.functions.values():
        if not isinstance(function, relax.Function):
            continue
        groups = _groups(function, target, F32)
        chosen = [groups[at] for at in lowerable(function, groups, target, precision)]
        block = function.body.blocks if isinstance(function.body, relax.SeqExpr) else ()
        stands = {binding.var: at for at, binding in enumerate(one for part in block for one in part.bindings)}
        places = sorted(range(len(chosen)), key=lambda i: stands[chosen[i].bindings[-1].var])
        order += [len(found) + place for place in places]
        found += [group.workload for group in chosen]
    return found, order


def _groups(function: Any, target: CpuTarget, precision: Precision) -> list[_Group]:
    found: list[_Group] = []
    prepared = _prepared(function) if isinstance(function.body, relax.SeqExpr) else set()
    for block in function.body.blocks if isinstance(function.body, relax.SeqExpr) else ():
        if isinstance(block, relax.DataflowBlock):
            found.extend(_groups_of_block(block, prepared, target))
    lower(function, found, target, precision)
    return found


def _groups_of_block(block: Any, prepared: set[Any], target: CpuTarget) -> Iterable[_Group]:
    bindings = [binding for binding in block.bindings if isinstance(binding, relax.VarBinding)]
    users: dict[Any, list[int]] = {}
    for at, binding in enumerate(bindings):
        for var in _vars_of(binding.value):
            users.setdefault(var, []).append(at)
    # Values needed outside the dataflow block have a user that no group can hold.
    for binding in bindings:
        if not isinstance(binding.var, relax.DataflowVar):
            users.setdefault(binding.var, []).append(len(bindings))
    taken: set[int] = set()
    for at, binding in enumerate(bindings):
        if at in taken:
            continue
        anchor = _anchor(binding, prepared)
        if anchor is None:
            continue
        group = _grow(anchor, at, bindings, users, taken)
        if templates_for(group.workload, target):
            taken.update(bindings.index(member) for member in group.bindings)
            yield group


def _vars_of(expression: Any) -> list[Any]:
    return list(relax.analysis.free_vars(expression))


@dataclass(slots=True)
class _Anchor:
    op: str
    inputs: list[Any]
    attributes: dict[str, Any] = field(default_factory=dict)


def _anchor(binding: Any, prepared: set[Any]) -> _Anchor | None:
    call = binding.value
    if not isinstance(call, relax.Call) or not isinstance(call.op, tvm.ir.Op):
        return None
    laid_out = read_anchor(call)
    if laid_out is not None:
        return _Anchor(laid_out.op, list(laid_out.inputs), dict(laid_out.attributes))
    types = [tensor_type(argument) for argument in call.args]
    if None in types or tensor_type(binding.var) is None:
        return None
    weights = tuple(at for at, argument in enumerate(call.args) if argument in prepared)
    if call.op.name == "relax.matmul":
        return _Anchor("matmul", list(call.args), {"weights": weights})
    if call.op.name == "relax.nn.softmax" and int(call.attrs.axis) in (-1, len(types[0].shape) - 1):  # type: ignore[union-attr]
        return _Anchor("softmax", list(call.args))
    return None


def _prepared(function: Any) -> set[Any]:
    """Weights, and all that is computed from weights alone: it will be done at load time."""
    num_inputs = int(function.attrs["num_input"]) if function.attrs and "num_input" in function.attrs else None
    if num_inputs is None:
        return set()
    known = set(function.params[num_inputs:])
    for block in function.body.blocks:
        for binding in block.bindings:
            used = _vars_of(binding.value)
            if used and all(var in known for var in used):
                known.add(binding.var)
    return known


def _grow(anchor: _Anchor, at: int, bindings: Sequence[Any], users: dict[Any, list[int]], taken: set[int]) -> _Group:
    """The longest epilogue of which only the last value is needed outside."""
    output = tensor_type(bindings[at].var)
    assert output is not None
    inputs = list(anchor.inputs)
    members, steps = [at], list[Step]()
    values = {bindings[at].var: Operand("value", 0)}
    best = (1, 0, len(inputs))
    for position in sorted(_reach(bindings[at].var, bindings, users)):
        if position in taken:
            break
        step = _step(bindings[position], output, values, inputs)
        if step is None:
            break
        steps.append(step)
        members.append(position)
        values[bindings[position].var] = Operand("value", len(steps))
        held = set(members)
        escaping = [
            member for member in members[:-1] if any(user not in held for user in users.get(bindings[member].var, ()))
        ]
        if not escaping:
            best = (len(members), len(steps), len(inputs))
    num_members, num_steps, num_inputs = best
    inputs = inputs[:num_inputs]
    types = tuple(tensor_type(value) for value in inputs)
    workload = Workload(
        op=anchor.op,
        inputs=types,  # type: ignore[arg-type]  # anchors and steps take only what has a type
        output=output,
        attributes=tuple(sorted(anchor.attributes.items())),
        epilogue=tuple(steps[:num_steps]),
    )
    return _Group([bindings[member] for member in members[:num_members]], workload, inputs)


def _reach(start: Any, bindings: Sequence[Any], users: dict[Any, list[int]]) -> set[int]:
    """Positions of all bindings that depend on a value."""
    reached: set[int] = set()
    pending = [start]
    while pending:
        for user in users.get(pending.pop(), ()):
            if user < len(bindings) and user not in reached:
                reached.add(user)
                pending.append(bindings[user].var)
    return reached


def _step(binding: Any, output: TensorType, values: dict[Any, Operand], inputs: list[Any]) -> Step | None:
    """The binding as a step, its new operands appended to `inputs`; None where it cannot ride along."""
    call = binding.value
    if not isinstance(call, relax.Call) or not isinstance(call.op, tvm.ir.Op) or tensor_type(binding.var) != output:
        return None
    op = STEP_OF_OPERATOR.get(call.op.name)
    if op is None:
        return None
    operands: list[Operand] = []
    added: list[Any] = []
    for argument in call.args:
        constant = _constant(argument)
        if constant is not None:
            operands.append(Operand("constant", constant=constant))
        elif argument in values:
            operands.append(values[argument])
        else:
            tensor = tensor_type(argument)
            if tensor is None or tensor.dtype != output.dtype or not _broadcasts(tensor.shape, output.shape):
                return None
            known = [at for at, value in enumerate([*inputs, *added]) if value.same_as(argument)]
            if not known:
                added.append(argument)
                known = [len(inputs) + len(added) - 1]
            operands.append(Operand("input", known[0]))
    if op == "leakyrelu":
        operands.append(Operand("constant", constant=float(call.attrs.alpha)))
    inputs.extend(added)
    return Step(op, tuple(operands))


def _broadcasts(shape: tuple[int, ...], onto: tuple[int, ...]) -> bool:
    return len(shape) <= len(onto) and all(
        dim in (1, full) for dim, full in zip(reversed(shape), reversed(onto), strict=False)
    )


def _constant(expression: Any) -> float | None:
    """The number that an expression always is: a literal, or a tensor of one item."""
    if isinstance(expression, tvm.ir.GenericConst):
        array = np.asarray(expression.value.numpy())
        return float(array.reshape(())) if array.size == 1 and array.dtype.kind == "f" else None
    if isinstance(expression, tvm.tirx.IntImm | tvm.tirx.FloatImm):
        return float(expression.value)
    return None


@relax.expr_functor.mutator
class _Rewriter(relax.PyExprMutator):  # type: ignore[misc]  # TVM is untyped
    """Leaves groups out and calls their kernels where their last members stood."""

    def __init__(
        self,
        mod: tvm.IRModule,
        groups: Iterable[_Group],
        kernels: Mapping[Workload, KernelCall],
        target: CpuTarget,
    ) -> None:
        super().__init__(mod)
        self._kernels = kernels
        self._target = target
        self._last = {group.bindings[-1].var: group for group in groups}
        self._dropped = {binding.var for group in groups for binding in group.bindings[:-1]}
        #: Weight and packing -> the variable that holds the result, so that calls share it.
        self._packed: dict[tuple[Any, Any], Any] = {}

    def packings(self) -> dict[Any, Any]:
        """The functions that the rewritten one calls to pack weights."""
        return {var: func for var, func in self.builder_.get().functions.items() if isinstance(func, tvm.tirx.PrimFunc)}

    def visit_dataflow_block_(self, block: Any) -> Any:
        self._packed.clear()  # its variables end with it
        return super().visit_dataflow_block_(block)

    def visit_var_binding_(self, binding: Any) -> None:
        if binding.var in self._dropped:
            return
        group = self._last.get(binding.var)
        if group is None:
            super().visit_var_binding_(binding)
            return
        kernel = self._kernels[group.workload]
        packings = kernel.template.packing(group.workload, kernel.candidate, self._target)
        arguments = [
            self._pack(packings[at], value, group.workload.inputs[at]) if at in packings else value
            for at, value in enumerate(group.inputs)
        ]
        output = group.workload.output
        call = relax.call_dps_packed(kernel.name, relax.Tuple(arguments), relax.TensorType(output.shape, output.dtype))
        super().visit_var_binding_(relax.VarBinding(binding.var, call))

    def _pack(self, packing: Packing, value: Any, source: TensorType) -> Any:
        # By itself: fused with what makes the weight, its buffers would have to agree in the dtype of their shapes.
        function = self.builder_.add_func(packing.prim_func(source).with_attr("op_pattern", OPAQUE), "pack")
        if (value, function) not in self._packed:
            ty = relax.TensorType(packing.result.shape, packing.result.dtype)
            call = relax.call_tir(function, relax.Tuple([self.visit_expr(value)]), ty)
            self._packed[value, function] = self.builder_.emit(call)
        return self._packed[value, function]
