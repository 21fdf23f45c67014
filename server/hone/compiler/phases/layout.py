"""Layout: operators work over blocks of channels where that is planned, and values change layout where they must.

A value of four dimensions (NCHW) may exist in two forms: plain, and with its channels in blocks. Each form is made
where it is first needed and once; those of weights are lifted to load time later.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from hone.compiler.phases.anchors import anchor_call
from hone.compiler.phases.blocks import block_width, to_blocks, to_plain
from hone.compiler.phases.forms import Form, is_per_channel
from hone.compiler.phases.layout_plan import LayoutPlan, plan_layouts
from hone.compiler.phases.types import tensor_type
from hone.compiler.target import CpuTarget
from hone.compiler.workload import TensorType


def convert_layouts(mod: tvm.IRModule, target: CpuTarget) -> tvm.IRModule:
    """Blocked layouts wherever that costs least in all (see `layout_plan.py`)."""
    functions = dict(mod.functions.items())
    for name, function in mod.functions.items():
        if isinstance(function, relax.Function):
            mutator = _Blocks(mod, target, plan_layouts(function, target))
            functions[name] = mutator.visit_expr(function)
            functions.update(mutator.transforms())
    return tvm.transform.Sequential(
        [
            relax.transform.CanonicalizeBindings(),
            relax.transform.FoldConstant(),
            relax.transform.EliminateCommonSubexpr(),
            relax.transform.DeadCodeElimination(),
        ]
    )(tvm.IRModule(functions, attrs=mod.attrs))


@relax.expr_functor.mutator
class _Blocks(relax.PyExprMutator):  # type: ignore[misc]  # TVM is untyped
    def __init__(self, mod: tvm.IRModule, target: CpuTarget, plan: LayoutPlan) -> None:
        super().__init__(mod)
        self._target = target
        self._plan = plan
        #: Original variable -> the variable that holds it in blocks.
        self._blocks: dict[Any, Any] = {}
        #: Values that exist in blocks only, until someone asks for them plain.
        self._only_blocked: set[Any] = set()

    def transforms(self) -> dict[Any, Any]:
        """The functions that change layouts."""
        return {var: func for var, func in self.builder_.get().functions.items() if isinstance(func, tvm.tirx.PrimFunc)}

    def visit_var_binding_(self, binding: Any) -> None:
        form = self._plan.blocked.get(binding.var)
        if form is None:
            super().visit_var_binding_(binding)
            return
        result = tensor_type(binding.var)
        assert result is not None
        blocked = self._operator(binding.value, form, result)
        self._blocks[binding.var] = self.builder_.emit(blocked)
        if isinstance(binding.var, relax.DataflowVar):
            self._only_blocked.add(binding.var)
        else:  # seen from outside, where all is plain
            plain = to_plain(self.builder_, self._blocks[binding.var], result)
            self.set_var_remap(binding.var, self.builder_.emit_output(plain))

    def visit_var_(self, var: Any) -> Any:
        if var in self._only_blocked:
            self._only_blocked.discard(var)
            tensor = tensor_type(var)
            assert tensor is not None
            self.set_var_remap(var, to_plain(self.builder_, self._blocks[var], tensor))
        return super().visit_var_(var)

    visit_dataflow_var_ = visit_var_

    def _operator(self, call: Any, form: Form, result: TensorType) -> Any:
        """The operator over blocks, as an expression."""
        name = str(call.op.name)
        if form.workload is not None:
            operands = call.args[0].fields if name == "relax.concat" else call.args[: len(form.workload.inputs)]
            inputs = [self._in_blocks(a) if a in form.blocked else self.visit_expr(a) for a in operands]
            return anchor_call(form.workload.op, inputs, dict(form.workload.attributes), form.workload.output)
        arguments = [self._itemwise_operand(argument, result) for argument in call.args]
        return relax.Call(call.op, arguments, call.attrs, call.ty_args)

    def _itemwise_operand(self, argument: Any, result: TensorType) -> Any:
        tensor = tensor_type(argument)
        if tensor is None:  # a number
            return argument
        if tensor == result or is_per_channel(tensor, result):
            return self._in_blocks(argument)
        plain = self.visit_expr(argument)
        if tensor.num_elements == 1:
            return self.builder_.emit(relax.op.reshape(plain, ())) if tensor.shape else plain
        # Repeated along channels, or along others in a way that blocks do not change.
        shape = (1,) * (4 - len(tensor.shape)) + tensor.shape
        if shape[1] == 1:
            return self.builder_.emit(relax.op.reshape(plain, (*shape, 1)))
        if shape != tensor.shape:
            plain = self.builder_.emit(relax.op.reshape(plain, shape))
        return to_blocks(self.builder_, plain, TensorType(shape, tensor.dtype), self._width(shape))

    def _in_blocks(self, argument: Any) -> Any:
        if argument in self._blocks:
            return self._blocks[argument]
        tensor = tensor_type(argument)
        assert tensor is not None
        blocks = to_blocks(self.builder_, self.visit_expr(argument), tensor, self._width(tensor.shape))
        if isinstance(argument, relax.Var):
            self._blocks[argument] = blocks
        return blocks

    def _width(self, shape: tuple[int, ...]) -> int:
        return block_width(shape[1], self._target)
