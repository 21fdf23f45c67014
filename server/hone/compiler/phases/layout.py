"""Layout: convolutions get the blocked layouts that their template wants, and blocks are carried as far as they go.

A value of four dimensions (NCHW) may exist in two forms: plain, and with its channels in blocks (NCHW{b}c). Operators
that do not care pass blocks on; one that does gets the plain form, made where it is first needed and once. Transforms
therefore stand at the ends of blocked stretches only; those of weights are lifted to load time later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from tvm import relax

from hone.compiler.phases.types import ints, tensor_type
from hone.compiler.target import CpuTarget
from hone.compiler.templates.registry import CONVOLUTION
from hone.compiler.workload import TensorType

#: Operators that compute each item from the items at the same place of their operands.
_ITEMWISE = frozenset(
    {
        *("relax.add", "relax.subtract", "relax.multiply", "relax.divide", "relax.maximum", "relax.minimum"),
        *("relax.power", "relax.abs", "relax.negative", "relax.exp", "relax.log", "relax.sqrt", "relax.rsqrt"),
        *("relax.square", "relax.sigmoid", "relax.tanh", "relax.erf", "relax.sign", "relax.floor", "relax.ceil"),
        *("relax.round", "relax.clip", "relax.nn.relu", "relax.nn.relu6", "relax.nn.leakyrelu", "relax.nn.silu"),
        *("relax.nn.gelu", "relax.nn.softplus"),
    }
)
_POOLINGS = frozenset({"relax.nn.max_pool2d", "relax.nn.avg_pool2d", "relax.nn.adaptive_avg_pool2d"})
_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "relax.mean": relax.op.mean,
    "relax.sum": relax.op.sum,
    "relax.max": relax.op.max,
    "relax.min": relax.op.min,
}


def convert_layouts(mod: tvm.IRModule, target: CpuTarget) -> tvm.IRModule:
    """Blocked layouts for every convolution of the template and what follows it."""
    functions = {
        name: _Blocks(mod, target).visit_expr(function) if isinstance(function, relax.Function) else function
        for name, function in mod.functions.items()
    }
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
    def __init__(self, mod: tvm.IRModule, target: CpuTarget) -> None:
        super().__init__(mod)
        self._target = target
        #: Original variable -> width of its blocks -> the variable that holds it so.
        self._forms: dict[Any, dict[int, Any]] = {}
        #: Values that exist in blocks only, until someone asks for them plain.
        self._only_blocked: dict[Any, int] = {}

    def visit_var_binding_(self, binding: Any) -> None:
        call = binding.value
        made = None
        if isinstance(call, relax.Call) and isinstance(call.op, tvm.ir.Op) and tensor_type(binding.var) is not None:
            name = str(call.op.name)
            if name == "relax.nn.conv2d":
                made = self._convolution(call)
            elif name in _ITEMWISE:
                made = self._itemwise(call, binding.var)
            elif name in _POOLINGS:
                made = self._pooling(call)
            elif name in _REDUCTIONS:
                made = self._reduction(call)
            elif name == "relax.concat":
                made = self._concatenation(call)
        if made is None:
            super().visit_var_binding_(binding)
            return
        blocked, width = made
        self._forms[binding.var] = {width: self.builder_.emit(blocked)}
        if isinstance(binding.var, relax.DataflowVar):
            self._only_blocked[binding.var] = width
        else:  # seen from outside, where all is plain
            plain = self.builder_.emit_output(_plain(self._forms[binding.var][width], _shape(binding.var)))
            self.set_var_remap(binding.var, plain)

    def visit_var_(self, var: Any) -> Any:
        width = self._only_blocked.pop(var, 0)
        if width:
            plain = self.builder_.emit(_plain(self._forms[var][width], _shape(var)))
            self.set_var_remap(var, plain)
        return super().visit_var_(var)

    visit_dataflow_var_ = visit_var_

    # Each of the following gives the blocked expression and the width of its blocks, or None: it stays as it is.

    def _convolution(self, call: Any) -> tuple[Any, int] | None:
        attrs = call.attrs
        data, weight = (tensor_type(argument) for argument in call.args)
        if int(attrs.groups) != 1 or data is None or weight is None or data.dtype != "float32":
            return None
        if (str(attrs.data_layout), str(attrs.kernel_layout), str(attrs.out_layout)) != ("NCHW", "OIHW", "NCHW"):
            return None
        blocks = CONVOLUTION.blocks(weight.shape[1], weight.shape[0], self._target)
        if blocks is None:
            return None
        width_in, width = blocks
        x = self._blocked(call.args[0], width_in) if width_in else self.visit_expr(call.args[0])
        w = self.visit_expr(call.args[1])
        if width_in:
            packed = relax.op.layout_transform(
                w, lambda o, i, y, x: (o // width, i // width_in, y, x, i % width_in, o % width)
            )
        else:
            packed = relax.op.layout_transform(w, lambda o, i, y, x: (o // width, i, y, x, o % width))
        result = relax.op.nn.conv2d(
            x,
            self.builder_.emit(packed),
            strides=ints(attrs.strides),
            padding=ints(attrs.padding),
            dilation=ints(attrs.dilation),
            groups=1,
            data_layout=f"NCHW{width_in}c" if width_in else "NCHW",
            kernel_layout=f"OIHW{width_in}i{width}o" if width_in else f"OIHW{width}o",
            out_layout=f"NCHW{width}c",
        )
        return result, width

    def _itemwise(self, call: Any, var: Any) -> tuple[Any, int] | None:
        result = _shape(var)
        if len(result) != 4:
            return None
        width = next((w for argument in call.args if (w := self._width(argument)) and _shape(argument) == result), 0)
        if not width:
            return None
        arguments = []
        for argument in call.args:
            tensor = tensor_type(argument)
            if tensor is None:  # a number
                arguments.append(argument)
            elif tensor.shape == result:
                arguments.append(self._blocked(argument, width))
            else:
                arguments.append(self._broadcast(argument, tensor, width, result[1]))
        return relax.Call(call.op, arguments, call.attrs, call.ty_args), width

    def _pooling(self, call: Any) -> tuple[Any, int] | None:
        width = self._width(call.args[0])
        if not width or str(call.attrs.layout) != "NCHW":
            return None
        x, attrs, layout = self._blocked(call.args[0], width), call.attrs, f"NCHW{width}c"
        if call.op.name == "relax.nn.adaptive_avg_pool2d":
            size = ints(attrs.output_size) if attrs.output_size is not None else None
            return relax.op.nn.adaptive_avg_pool2d(x, size, layout=layout, out_layout=layout), width
        pool = relax.op.nn.max_pool2d if call.op.name == "relax.nn.max_pool2d" else relax.op.nn.avg_pool2d
        result = pool(
            x,
            pool_size=ints(attrs.pool_size),
            strides=ints(attrs.strides),
            padding=ints(attrs.padding),
            dilation=ints(attrs.dilation),
            ceil_mode=bool(attrs.ceil_mode),
            count_include_pad=bool(attrs.count_include_pad),
            layout=layout,
            out_layout=layout,
        )
        return result, width

    def _reduction(self, call: Any) -> tuple[Any, int] | None:
        """Over rows and columns, which keep their places."""
        width = self._width(call.args[0])
        if not width or call.attrs.axis is None or not bool(call.attrs.keepdims):
            return None
        axes = sorted(axis % 4 for axis in ints(call.attrs.axis))
        if axes not in ([2], [3], [2, 3]):
            return None
        return _REDUCTIONS[str(call.op.name)](self._blocked(call.args[0], width), axes, keepdims=True), width

    def _concatenation(self, call: Any) -> tuple[Any, int] | None:
        """Of channels, where all parts have the same blocks."""
        parts = list(call.args[0].fields) if isinstance(call.args[0], relax.Tuple) else []
        if not parts or call.attrs.axis is None:
            return None
        width = self._width(parts[0])
        if not width or any(self._width(part) != width for part in parts) or int(call.attrs.axis) not in (1, -3):
            return None
        return relax.op.concat([self._blocked(part, width) for part in parts], axis=1), width

    def _width(self, argument: Any) -> int:
        """Of the blocks in which a value exists; 0 where it exists plain only."""
        return next(iter(self._forms.get(argument, {})), 0) if isinstance(argument, relax.Var) else 0

    def _blocked(self, argument: Any, width: int) -> Any:
        forms = self._forms.setdefault(argument, {}) if isinstance(argument, relax.Var) else {}
        if width not in forms:
            shape = _shape(argument)
            forms[width] = self.builder_.emit(_in_blocks(self.visit_expr(argument), shape, width))
        return forms[width]

    def _broadcast(self, argument: Any, tensor: TensorType, width: int, channels: int) -> Any:
        """An operand that is repeated along some axes, ready for a blocked one."""
        plain = self.visit_expr(argument)
        if tensor.num_elements == 1:
            return self.builder_.emit(relax.op.reshape(plain, ())) if tensor.shape else plain
        shape = (1,) * (4 - len(tensor.shape)) + tensor.shape
        if shape != tensor.shape:
            plain = self.builder_.emit(relax.op.reshape(plain, shape))
        if shape[1] != channels or channels == 1:
            return self.builder_.emit(relax.op.reshape(plain, (*shape, 1)))
        return self.builder_.emit(_in_blocks(plain, shape, width))


def _in_blocks(value: Any, shape: tuple[int, ...], width: int) -> Any:
    n, c, h, w = shape
    if h * w == 1:  # the same memory
        return relax.op.reshape(value, (n, c // width, 1, 1, width))
    return relax.op.layout_transform(value, lambda n, c, h, w: (n, c // width, h, w, c % width))


def _plain(value: Any, shape: tuple[int, ...]) -> Any:
    if shape[2] * shape[3] == 1:
        return relax.op.reshape(value, shape)
    width = int(value.ty.shape[4])
    return relax.op.layout_transform(value, lambda n, c, h, w, i: (n, c * width + i, h, w))


def _shape(expression: Any) -> tuple[int, ...]:
    tensor = tensor_type(expression)
    return tensor.shape if tensor is not None else ()
