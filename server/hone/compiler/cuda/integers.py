"""Integers: layers that the model quantised itself multiply int8 on tensor cores and add up in int32.

A model says with QuantizeLinear and DequantizeLinear which values are whole multiples of a scale. Where that holds for
a layer's data and its weight, both symmetric, the layer takes the whole numbers; its scales ride in its epilogue, and
so does the rounding that the next layer's data wants. What is left stays in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tvm
from tvm import relax

from hone.compiler.cuda.layout import tidy
from hone.compiler.phases.precision import Precision
from hone.compiler.phases.quantization import Multiples, definitions, find_multiples, find_quantized_weight
from hone.compiler.phases.types import ints, tensor_type

_INT8 = (-128, 127)
#: Along which axis of a weight the outputs lie.
_OUTPUT_AXES = {"relax.nn.conv2d": 0, "relax.matmul": 1}


def convert_integers(mod: tvm.IRModule, precision: Precision) -> tvm.IRModule:
    """With precision "int8"; else the module as it is."""
    if precision.name != "int8":
        return mod
    functions = {
        name: _Integers(mod, definitions(function), precision.kept).visit_expr(function)
        if isinstance(function, relax.Function)
        else function
        for name, function in mod.functions.items()
    }
    return tidy(tvm.IRModule(functions, attrs=mod.attrs))


def integer_layers(mod: tvm.IRModule) -> list[str]:
    """The layers of `main` that can be computed with integers, in the order by which `Precision.kept` names them."""
    function = mod["main"]
    integers = _Integers(mod, definitions(function), frozenset())
    integers.visit_expr(function)
    return integers.layers


@relax.expr_functor.mutator
class _Integers(relax.PyExprMutator):  # type: ignore[misc]  # TVM is untyped
    def __init__(self, mod: tvm.IRModule, defined: Mapping[Any, Any], kept: frozenset[int]) -> None:
        super().__init__(mod)
        self._defined, self._kept = defined, kept
        #: Original variable -> its whole numbers, as int8.
        self._whole: dict[Any, Any] = {}
        #: All that could be lowered, in words.
        self.layers: list[str] = []

    def visit_var_binding_(self, binding: Any) -> None:
        multiples = find_multiples(binding.var, self._defined)
        value = binding.value
        if _fits(multiples) and _name(value) == "relax.multiply" and isinstance(binding.var, relax.DataflowVar):
            # The numbers are stored as they are; whoever wants them scaled scales them.
            whole = self.builder_.emit(relax.op.astype(self.visit_expr(value.args[0]), "int8"))
            self._whole[binding.var] = whole
            scale = relax.const(np.float32(multiples.scale), "float32")  # type: ignore[union-attr]  # it fits
            full = self.builder_.emit(relax.op.astype(whole, "float32"))
            self.set_var_remap(binding.var, self.builder_.emit(relax.op.multiply(full, scale)))
            return
        super().visit_var_binding_(binding)

    def visit_call_(self, call: Any) -> Any:
        name = _name(call)
        if name not in _OUTPUT_AXES:
            return super().visit_call_(call)
        data, weight = call.args
        multiples = find_multiples(data, self._defined)
        quantized = find_quantized_weight(weight, self._defined, _OUTPUT_AXES[name])
        if multiples is None or not _fits(multiples) or quantized is None:
            return super().visit_call_(call)
        result = tensor_type(call)
        self.layers.append(f"{name.rpartition('.')[2]} to {list(result.shape) if result is not None else '?'}")
        if len(self.layers) - 1 in self._kept:
            return super().visit_call_(call)
        operands = self._numbers(data, multiples), self.visit_expr(quantized.values)
        if name == "relax.matmul":
            product = relax.op.matmul(*operands, out_dtype="int32")
        else:
            attrs = call.attrs
            product = relax.op.nn.conv2d(
                *operands,
                strides=ints(attrs.strides),
                padding=ints(attrs.padding),
                dilation=ints(attrs.dilation),
                groups=int(attrs.groups),
                data_layout=str(attrs.data_layout),
                kernel_layout=str(attrs.kernel_layout),
                out_layout=str(attrs.out_layout),
                out_dtype="int32",
            )
        total = self.builder_.emit(relax.op.astype(self.builder_.emit(product), "float32"))
        return relax.op.multiply(total, self._scale(multiples.scale, quantized.scale, name))

    def _numbers(self, data: Any, multiples: Multiples) -> Any:
        """The whole numbers of a tensor that is known to be multiples."""
        known = self._whole.get(data)
        if known is not None:
            return known
        # It went through a pooling, say: those took some of the multiples, and dividing gives the numbers again.
        scale = relax.const(np.float32(multiples.scale), "float32")
        ratio = self.builder_.emit(relax.op.divide(self.visit_expr(data), scale))
        whole = self.builder_.emit(relax.op.round(ratio))
        self._whole[data] = self.builder_.emit(relax.op.astype(whole, "int8"))
        return self._whole[data]

    def _scale(self, data: float, weight: Any, name: str) -> Any:
        """Of the products: a number, or one for each output channel, shaped to spread over the result."""
        if isinstance(weight, float):
            return relax.const(np.float32(data * weight), "float32")
        scale = self.builder_.emit(relax.op.multiply(self.visit_expr(weight), relax.const(np.float32(data), "float32")))
        if name == "relax.matmul":
            return scale
        tensor = tensor_type(weight)
        assert tensor is not None, "weights have types"
        return self.builder_.emit(relax.op.reshape(scale, (1, tensor.num_elements, 1, 1)))


def _fits(multiples: Multiples | None) -> bool:
    return multiples is not None and _INT8[0] <= multiples.low and multiples.high <= _INT8[1]


def _name(expression: Any) -> str:
    is_operator = isinstance(expression, relax.Call) and isinstance(expression.op, tvm.ir.Op)
    return str(expression.op.name) if is_operator else ""
