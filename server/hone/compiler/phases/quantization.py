"""Quantisation: what a model says with QuantizeLinear and DequantizeLinear, in a form that other phases understand.

A pair of both rounds a value to a multiple of a scale within bounds. Written as arithmetic on float32 it rides behind
kernels and keeps blocked layouts; `find_multiples` reads it again, for kernels that multiply the integers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax

from hone.compiler.phases.types import tensor_type

_BOUNDS = {"uint8": (0, 255), "int8": (-128, 127)}
#: Operators whose results are among the numbers of their (first) operand, or zeros.
_CARRIERS = frozenset(
    {
        *("relax.layout_transform", "relax.reshape", "relax.permute_dims", "relax.nn.max_pool2d", "relax.nn.relu"),
        *("relax.flatten", "relax.squeeze", "relax.expand_dims", "relax.strided_slice"),
    }
)


@dataclass(frozen=True, slots=True)
class Multiples:
    """Values scale * k with whole k from `low` to `high`."""

    scale: float
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """An int8 tensor; its scale is a number, or a tensor with one for each output channel."""

    values: Any
    scale: float | Any


def fold_quantization(mod: tvm.IRModule) -> tvm.IRModule:
    """Pairs of quantize and dequantize with one scale and zero point for all as divide, round, clip, multiply."""
    functions = {
        name: _Pairs(mod).visit_expr(function) if isinstance(function, relax.Function) else function
        for name, function in mod.functions.items()
    }
    return tvm.IRModule(functions, attrs=mod.attrs)


@relax.expr_functor.mutator
class _Pairs(relax.PyExprMutator):  # type: ignore[misc]  # TVM is untyped
    def visit_call_(self, call: Any) -> Any:
        call = super().visit_call_(call)
        if _name(call) != "relax.dequantize":
            return call
        quantize: Any = self.lookup_binding(call.args[0]) if isinstance(call.args[0], relax.Var) else None
        if _name(quantize) != "relax.quantize":
            return call
        scale, zero = _number(call.args[1]), _number(call.args[2])
        tensor = tensor_type(call.args[0])
        bounds = _BOUNDS.get(tensor.dtype) if tensor is not None else None
        if scale is None or zero is None or bounds is None or scale <= 0:
            return call
        if (scale, zero) != (_number(quantize.args[1]), _number(quantize.args[2])):
            return call
        value = tensor_type(quantize.args[0])
        if value is None or value.dtype != "float32":
            return call
        factor = relax.const(np.float32(scale), "float32")
        multiple = self.builder_.emit(relax.op.round(self.builder_.emit(relax.op.divide(quantize.args[0], factor))))
        clipped = self.builder_.emit(relax.op.clip(multiple, bounds[0] - zero, bounds[1] - zero))
        return relax.op.multiply(clipped, factor)


def definitions(function: Any) -> Mapping[Any, Any]:
    """Variable -> the expression that it is bound to."""
    return {binding.var: binding.value for block in function.body.blocks for binding in block.bindings}


def find_multiples(value: Any, defined: Mapping[Any, Any]) -> Multiples | None:
    """What a tensor's numbers are known to be multiples of; zero is always among them."""
    call: Any = defined.get(value) if isinstance(value, relax.Var) else None
    while _name(call) in _CARRIERS:
        call = defined.get(call.args[0]) if isinstance(call.args[0], relax.Var) else None
    if _name(call) == "relax.dequantize":
        tensor = tensor_type(call.args[0])
        scale, zero = _number(call.args[1]), _number(call.args[2])
        bounds = _BOUNDS.get(tensor.dtype) if tensor is not None else None
        if scale is None or zero is None or bounds is None:
            return None
        return Multiples(scale, bounds[0] - int(zero), bounds[1] - int(zero))
    if _name(call) != "relax.multiply":
        return None
    clip: Any = defined.get(call.args[0])
    scale = _number(call.args[1])
    if scale is None or _name(clip) != "relax.clip" or _name(defined.get(clip.args[0])) != "relax.round":
        return None
    low, high = (_number(bound) for bound in clip.args[1:3])
    if low is None or high is None or not low.is_integer() or not high.is_integer() or high - low > 255:
        return None
    return Multiples(scale, int(low), int(high))


def find_quantized_weight(value: Any, defined: Mapping[Any, Any], output_axis: int) -> QuantizedWeight | None:
    """The int8 numbers that a weight is made of, where that is all: no zero point, scales along `output_axis`."""
    call: Any = defined.get(value) if isinstance(value, relax.Var) else None
    if _name(call) != "relax.dequantize" or _number(call.args[2]) != 0.0:
        return None
    tensor = tensor_type(call.args[0])
    if tensor is None or tensor.dtype != "int8" or not isinstance(call.args[0], relax.Var):
        return None
    scale = _number(call.args[1])
    if scale is not None:
        return QuantizedWeight(call.args[0], scale)
    axis = int(call.attrs.axis) % len(tensor.shape)
    if axis != output_axis or not isinstance(call.args[1], relax.Var):
        return None
    return QuantizedWeight(call.args[0], call.args[1])


def _name(expression: Any) -> str:
    is_operator = isinstance(expression, relax.Call) and isinstance(expression.op, tvm.ir.Op)
    return str(expression.op.name) if is_operator else ""


def _number(expression: Any) -> float | None:
    """What a constant of equal items always is."""
    if isinstance(expression, tvm.ir.GenericConst):
        array = np.asarray(expression.value.numpy())
        return float(array.flat[0]) if array.size and np.all(array == array.flat[0]) else None
    if isinstance(expression, tvm.tirx.IntImm | tvm.tirx.FloatImm):
        return float(expression.value)
    return None
