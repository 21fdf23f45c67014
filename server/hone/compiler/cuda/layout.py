"""Layout: images have their channels last (NHWC) through the whole graph; transposes stand at its ends only.

Tensor cores read runs of channels, so kernels take convolutions in no other layout. A value of four dimensions may
exist in both forms; each is made where it is first needed and once. Operators that work on images in either layout
follow what they read; anything else gets images as the model had them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from tvm import relax

from hone.compiler.phases.forms import ITEMWISE
from hone.compiler.phases.types import ints, tensor_type
from hone.compiler.workload import TensorType

#: NCHW -> NHWC and back; OIHW -> OHWI is the same move.
_LAST, _FIRST = (0, 2, 3, 1), (0, 3, 1, 2)
#: Where each axis of NCHW is in NHWC.
_PLACE = (0, 3, 1, 2)

_ANYWHERE = ITEMWISE | {"relax.astype", "relax.nn.gelu_tanh", "relax.nn.hardswish"}
_POOLINGS = {"relax.nn.max_pool2d": relax.op.nn.max_pool2d, "relax.nn.avg_pool2d": relax.op.nn.avg_pool2d}
_REDUCTIONS = {
    "relax.mean": relax.op.mean,
    "relax.sum": relax.op.sum,
    "relax.max": relax.op.max,
    "relax.min": relax.op.min,
}


def channels_last(mod: tvm.IRModule) -> tvm.IRModule:
    """Every two-dimensional convolution in NHWC with weights in OHWI, and what stands between them."""
    functions = {
        name: _ChannelsLast(mod).visit_expr(function) if isinstance(function, relax.Function) else function
        for name, function in mod.functions.items()
    }
    return tidy(_free_transposes(tidy(tvm.IRModule(functions, attrs=mod.attrs))))


def tidy(mod: tvm.IRModule) -> tvm.IRModule:
    return tvm.transform.Sequential(
        [
            relax.transform.CanonicalizeBindings(),
            relax.transform.FoldConstant(),
            relax.transform.CanonicalizeBindings(),  # what was folded goes where it is used
            relax.transform.EliminateCommonSubexpr(),
            relax.transform.DeadCodeElimination(),
        ]
    )(mod)


@relax.expr_functor.mutator
class _ChannelsLast(relax.PyExprMutator):  # type: ignore[misc]  # TVM is untyped
    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        #: Original variable -> the variable that holds it in NHWC.
        self._last: dict[Any, Any] = {}
        #: Values that exist in NHWC only, until someone asks for them as they were.
        self._only_last: set[Any] = set()
        #: Operators that know both layouts, or whose axes can be renamed.
        self._moves: dict[str, Callable[[Any], Any | None]] = {
            **dict.fromkeys(_POOLINGS, self._pooling),
            **dict.fromkeys(_REDUCTIONS, self._reduction),
            "relax.nn.adaptive_avg_pool2d": self._adaptive,
            "relax.image.resize2d": self._resize,
            "relax.concat": self._concatenation,
            "relax.nn.softmax": self._softmax,
        }

    def visit_var_binding_(self, binding: Any) -> None:
        moved = self._moved(binding)
        if moved is None:
            super().visit_var_binding_(binding)
            return
        self._last[binding.var] = self.builder_.emit(moved)
        if isinstance(binding.var, relax.DataflowVar):
            self._only_last.add(binding.var)
        else:  # seen from outside, where images are as the model has them
            first = relax.op.permute_dims(self._last[binding.var], _FIRST)
            self.set_var_remap(binding.var, self.builder_.emit_output(first))

    def visit_var_(self, var: Any) -> Any:
        if var in self._only_last:
            self._only_last.discard(var)
            first = self.builder_.emit(relax.op.permute_dims(self._last[var], _FIRST))
            self.set_var_remap(var, first)
        return super().visit_var_(var)

    visit_dataflow_var_ = visit_var_

    def _moved(self, binding: Any) -> Any | None:
        """The operator over NHWC; None where it stays as it is."""
        call, result = binding.value, tensor_type(binding.var)
        if not isinstance(call, relax.Call) or not isinstance(call.op, tvm.ir.Op) or result is None:
            return None
        name = str(call.op.name)
        if name == "relax.nn.conv2d":
            return self._convolution(call)
        if not any(argument in self._last for argument in _operands(call)):
            return None
        if len(result.shape) != 4:
            return None
        if name in _ANYWHERE:
            return self._itemwise(call, result)
        move = self._moves.get(name)
        return move(call) if move is not None else None

    def _convolution(self, call: Any) -> Any | None:
        attrs = call.attrs
        if str(attrs.data_layout) != "NCHW" or str(attrs.kernel_layout) != "OIHW":
            return None
        data, weight = tensor_type(call.args[0]), tensor_type(call.args[1])
        if data is None or weight is None:
            return None
        return relax.op.nn.conv2d(
            self._in_last(call.args[0]),
            self.builder_.emit(relax.op.permute_dims(self.visit_expr(call.args[1]), _LAST)),
            strides=ints(attrs.strides),
            padding=ints(attrs.padding),
            dilation=ints(attrs.dilation),
            groups=int(attrs.groups),
            data_layout="NHWC",
            kernel_layout="OHWI",
            out_layout="NHWC",
            out_dtype=out_dtype_of(attrs),
        )

    def _itemwise(self, call: Any, result: TensorType) -> Any | None:
        operands = []
        for argument in call.args:
            tensor = tensor_type(argument)
            if tensor is None:  # a number
                operands.append(argument)
            elif len(tensor.shape) == 4:
                operands.append(self._in_last(argument))
            elif tensor.num_elements == 1:
                plain = self.visit_expr(argument)
                operands.append(self.builder_.emit(relax.op.reshape(plain, ())) if tensor.shape else plain)
            else:  # repeated along the axes that it does not have
                shape = (1,) * (4 - len(tensor.shape)) + tensor.shape
                wide = self.builder_.emit(relax.op.reshape(self.visit_expr(argument), shape))
                operands.append(self.builder_.emit(relax.op.permute_dims(wide, _LAST)))
        return relax.Call(call.op, operands, call.attrs, call.ty_args)

    def _pooling(self, call: Any) -> Any | None:
        attrs = call.attrs
        if str(attrs.layout) != "NCHW":
            return None
        return _POOLINGS[str(call.op.name)](
            self._in_last(call.args[0]),
            pool_size=ints(attrs.pool_size),
            strides=ints(attrs.strides),
            padding=ints(attrs.padding),
            dilation=ints(attrs.dilation),
            ceil_mode=bool(attrs.ceil_mode),
            count_include_pad=bool(attrs.count_include_pad),
            layout="NHWC",
            out_layout="NHWC",
        )

    def _adaptive(self, call: Any) -> Any | None:
        if str(call.attrs.layout) != "NCHW" or call.attrs.output_size is None:
            return None
        size = ints(call.attrs.output_size)
        return relax.op.nn.adaptive_avg_pool2d(self._in_last(call.args[0]), size, layout="NHWC", out_layout="NHWC")

    def _resize(self, call: Any) -> Any | None:
        attrs = call.attrs
        if str(attrs.layout) != "NCHW":
            return None
        return relax.op.image.resize2d(
            self._in_last(call.args[0]),
            call.args[1],
            roi=tuple(float(number) for number in attrs.roi) if attrs.roi is not None else None,
            layout="NHWC",
            method=str(attrs.method),
            coordinate_transformation_mode=str(attrs.coordinate_transformation_mode),
            rounding_method=str(attrs.rounding_method),
            cubic_alpha=float(attrs.cubic_alpha),
            cubic_exclude=int(attrs.cubic_exclude),
            extrapolation_value=float(attrs.extrapolation_value),
            out_dtype=out_dtype_of(attrs),
        )

    def _reduction(self, call: Any) -> Any | None:
        if call.attrs.axis is None or not bool(call.attrs.keepdims):
            return None
        axes = [_PLACE[axis % 4] for axis in ints(call.attrs.axis)]
        return _REDUCTIONS[str(call.op.name)](self._in_last(call.args[0]), axes, keepdims=True)

    def _concatenation(self, call: Any) -> Any | None:
        parts = call.args[0]
        if not isinstance(parts, relax.Tuple) or call.attrs.axis is None:
            return None
        moved = [self._in_last(part) for part in parts.fields]
        return relax.op.concat(moved, axis=_PLACE[int(call.attrs.axis) % 4])

    def _softmax(self, call: Any) -> Any:
        return relax.op.nn.softmax(self._in_last(call.args[0]), axis=_PLACE[int(call.attrs.axis) % 4])

    def _in_last(self, argument: Any) -> Any:
        """The operand in NHWC."""
        known = self._last.get(argument) if isinstance(argument, relax.Var) else None
        if known is not None:
            return known
        moved = self.builder_.emit(relax.op.permute_dims(self.visit_expr(argument), _LAST))
        if isinstance(argument, relax.Var):
            self._last[argument] = moved
        return moved


def out_dtype_of(attrs: Any) -> str | None:
    """The dtype that an operator is told to give; None where it is that of its operands."""
    told = attrs.out_dtype
    return str(told) if told is not None and str(told) not in ("", "void") else None


def _operands(call: Any) -> list[Any]:
    found: list[Any] = []
    for argument in call.args:
        found.extend(argument.fields if isinstance(argument, relax.Tuple) else [argument])
    return [operand for operand in found if isinstance(operand, relax.Var)]


def _free_transposes(mod: tvm.IRModule) -> tvm.IRModule:
    """Transposes of transposes as one, those that change nothing left out, and those that move only dimensions of
    size 1 as reshapes, which cost nothing."""
    functions = {
        name: _Transposes(mod).visit_expr(function) if isinstance(function, relax.Function) else function
        for name, function in mod.functions.items()
    }
    return tvm.IRModule(functions, attrs=mod.attrs)


@relax.expr_functor.mutator
class _Transposes(relax.PyExprMutator):  # type: ignore[misc]  # TVM is untyped
    def visit_call_(self, call: Any) -> Any:
        call = super().visit_call_(call)
        if _name(call) == "relax.reshape" and isinstance(call.args[0], relax.Var):
            inner: Any = self.lookup_binding(call.args[0])
            return relax.op.reshape(inner.args[0], call.args[1]) if _name(inner) == "relax.reshape" else call
        if _name(call) != "relax.permute_dims" or call.attrs.axes is None:
            return call
        source, axes = call.args[0], ints(call.attrs.axes)
        inner = self.lookup_binding(source) if isinstance(source, relax.Var) else None
        while _name(inner) == "relax.permute_dims" and inner.attrs.axes is not None:
            before = ints(inner.attrs.axes)
            axes = tuple(before[axis] for axis in axes)
            source = inner.args[0]
            inner = self.lookup_binding(source) if isinstance(source, relax.Var) else None
        tensor = tensor_type(source)
        if axes == tuple(range(len(axes))):
            return source
        if tensor is not None:
            moved = [axis for axis in axes if tensor.shape[axis] != 1]
            if moved == sorted(moved):
                shape = tuple(tensor.shape[axis] for axis in axes)
                if _name(inner) == "relax.reshape":
                    source = inner.args[0]
                return relax.op.reshape(source, shape)
        return relax.op.permute_dims(source, axes)


def _name(expression: Any) -> str:
    is_operator = isinstance(expression, relax.Call) and isinstance(expression.op, tvm.ir.Op)
    return str(expression.op.name) if is_operator else ""
