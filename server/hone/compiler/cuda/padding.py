"""Padding: sizes that kernels cannot read at full width are rounded up, with zeros, and results sliced at the end.

Tensor cores are fed by accesses of 16 bytes: eight items of float16. Where channels (or a product's K and N) are no
multiple of that, weights are padded at load time, so that the kernel which makes an activation makes it padded already;
item-wise operators and poolings carry the padding along. Only an activation that no kernel made is copied. What a
padded lane holds is finite, and meets weights of zero.

Padding is a choice by measurement: `Choices.paddings` tells the multiple for an operator, 1 for none. Unmeasured, what
is stored in less than four bytes is padded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import tvm
from tvm import relax

from hone.compiler.cuda.groups import known_at_load
from hone.compiler.cuda.layout import out_dtype_of, tidy
from hone.compiler.phases.forms import ITEMWISE
from hone.compiler.phases.types import ints, tensor_type
from hone.compiler.workload import TensorType, Workload

ACCESS_BYTES = 16
_BYTES = {"float16": 2, "bfloat16": 2, "int8": 1, "float32": 4}

_CARRIES = ITEMWISE | {"relax.astype", "relax.nn.gelu_tanh"}
#: Infinite or no number at zero.
_UNBOUNDED = frozenset({"relax.log", "relax.rsqrt", "relax.power"})
_POOLINGS = frozenset({"relax.nn.max_pool2d", "relax.nn.avg_pool2d", "relax.nn.adaptive_avg_pool2d"})
_RESHAPES = frozenset({"relax.reshape", "relax.flatten", "relax.squeeze", "relax.expand_dims"})
_REDUCTIONS = frozenset({"relax.mean", "relax.sum", "relax.max", "relax.min"})


@dataclass(frozen=True, slots=True)
class Padding:
    """One operator, by itself, and what it would be padded: `operator.digest` is its name in `Choices.paddings`."""

    operator: Workload
    padded: Workload
    multiple: int
    copied_bytes: int
    """Read and written by the copy of its data; 0 where what makes the data makes it padded."""

    @property
    def waste(self) -> float:
        """How much more arithmetic the padded one has, as a ratio."""
        return _multiply_adds(self.padded) / _multiply_adds(self.operator)


def pad(mod: tvm.IRModule, paddings: Mapping[str, int], *, math: str) -> tuple[tvm.IRModule, tuple[Padding, ...]]:
    """The module padded, and what was: every operator once."""
    padded, found = _run(mod, paddings, math)
    return tidy(padded), tuple(dict.fromkeys(found))


def find_paddings(mod: tvm.IRModule, paddings: Mapping[str, int], *, math: str) -> tuple[Padding, ...]:
    """Every operator of a laid-out module that could be padded, once each."""
    return tuple(dict.fromkeys(_run(mod, paddings, math)[1]))


def full_width(dtype: str) -> int:
    """Items of one access."""
    return ACCESS_BYTES // _BYTES[dtype]


def _run(mod: tvm.IRModule, paddings: Mapping[str, int], math: str) -> tuple[tvm.IRModule, list[Padding]]:
    functions, found = dict(mod.functions.items()), list[Padding]()
    for name, function in mod.functions.items():
        if isinstance(function, relax.Function):
            padder = _Padder(mod, paddings, math, known_at_load(function))
            functions[name] = padder.visit_expr(function)
            found += padder.found
    return tvm.IRModule(functions, attrs=mod.attrs), found


@relax.expr_functor.mutator
class _Padder(relax.PyExprMutator):  # type: ignore[misc]  # TVM is untyped
    def __init__(self, mod: tvm.IRModule, paddings: Mapping[str, int], math: str, prepared: set[Any]) -> None:
        super().__init__(mod)
        self._paddings, self._math, self._prepared = paddings, math, prepared
        #: Original variable -> the variable that holds it with its last dimension padded.
        self._padded: dict[Any, Any] = {}
        #: Values that exist padded only, until someone asks for them as they were.
        self._only_padded: set[Any] = set()
        #: Original variable -> its original value.
        self._values: dict[Any, Any] = {}
        self.found: list[Padding] = []

    def visit_var_binding_(self, binding: Any) -> None:
        self._values[binding.var] = binding.value
        value = None if binding.var in self._prepared else self._with_padding(binding)
        if value is None:
            super().visit_var_binding_(binding)
            return
        original = tensor_type(binding.var)
        made = self.builder_.emit(value)
        got = tensor_type(made)
        assert original is not None and got is not None, "shapes are known"
        if got.shape == original.shape:
            self._bind(binding.var, made)
            return
        self._padded[binding.var] = made
        if isinstance(binding.var, relax.DataflowVar):
            self._only_padded.add(binding.var)
        else:
            self._bind(binding.var, _sliced(made, original))

    def visit_var_(self, var: Any) -> Any:
        if var in self._only_padded:
            self._only_padded.discard(var)
            original = tensor_type(var)
            assert original is not None
            self.set_var_remap(var, self.builder_.emit(_sliced(self._padded[var], original)))
        return super().visit_var_(var)

    visit_dataflow_var_ = visit_var_

    def _bind(self, var: Any, value: Any) -> None:
        is_inside = isinstance(var, relax.DataflowVar)
        self.set_var_remap(var, value if is_inside else self.builder_.emit_output(value))

    def _with_padding(self, binding: Any) -> Any | None:
        """The value padded; None where the operator stays as it is."""
        call, result = binding.value, tensor_type(binding.var)
        if not isinstance(call, relax.Call) or not isinstance(call.op, tvm.ir.Op) or result is None or not result.shape:
            return None
        name = str(call.op.name)
        if name == "relax.nn.conv2d":
            return self._convolution(call, result)
        if name == "relax.matmul":
            return self._product(call, result)
        if not any(isinstance(argument, relax.Var) and argument in self._only_padded for argument in call.args):
            return None
        if name in _CARRIES and name not in _UNBOUNDED:
            return self._itemwise(call, name, result)
        if name in _POOLINGS and str(call.attrs.layout) == "NHWC":
            return self._with_padded_data(call)
        if name == "relax.image.resize2d" and str(call.attrs.layout) == "NHWC":
            return self._with_padded_data(call)
        if name in _RESHAPES:
            return self._reshaped(call, result)
        if name in _REDUCTIONS and call.attrs.axis is not None and bool(call.attrs.keepdims):
            rank = len(result.shape)
            spares_last = all(axis % rank != rank - 1 for axis in ints(call.attrs.axis))
            return self._with_padded_data(call) if spares_last else None
        return None

    # --- operators with weights ---

    def _convolution(self, call: Any, result: TensorType) -> Any | None:
        attrs, data, weight = call.attrs, tensor_type(call.args[0]), tensor_type(call.args[1])
        if data is None or weight is None or str(attrs.data_layout) != "NHWC" or str(attrs.kernel_layout) != "OHWI":
            return None
        groups = int(attrs.groups)
        channels, outputs = data.shape[3], weight.shape[0]
        if groups > 1:
            is_padded = call.args[0] in self._only_padded
            if not (groups == channels == outputs and is_padded):
                return None
            width = tensor_type(self._padded[call.args[0]])
            assert width is not None
            groups = wide_outputs = width.shape[3]
            kernel = self._pad_to(self.visit_expr(call.args[1]), (wide_outputs, *weight.shape[1:]))
            return self._called(call, self._padded[call.args[0]], kernel, groups)
        told = {
            "strides": ints(attrs.strides),
            "padding": ints(attrs.padding),
            "dilation": ints(attrs.dilation),
            "groups": groups,
            "data_layout": "NHWC",
            "kernel_layout": "OHWI",
            "out_layout": "NHWC",
        }
        operator = Workload("conv2d", (data, weight), result, tuple(sorted(told.items())))
        multiple = self._multiple(operator)
        wide_channels, wide_outputs = _round_up(channels, multiple), _round_up(outputs, multiple)
        wide = replace(
            operator,
            inputs=(
                _widened(data, wide_channels),
                TensorType((wide_outputs, *weight.shape[1:3], wide_channels), weight.dtype),
            ),
            output=_widened(result, wide_outputs),
        )
        if not self._note(operator, wide, call.args[0]):
            return None
        kernel = self._pad_to(self.visit_expr(call.args[1]), wide.inputs[1].shape)
        return self._called(call, self._data(call.args[0], wide_channels), kernel, groups)

    def _called(self, call: Any, data: Any, weight: Any, groups: int) -> Any:
        attrs = call.attrs
        return relax.op.nn.conv2d(
            data,
            weight,
            strides=ints(attrs.strides),
            padding=ints(attrs.padding),
            dilation=ints(attrs.dilation),
            groups=groups,
            data_layout="NHWC",
            kernel_layout="OHWI",
            out_layout="NHWC",
            out_dtype=out_dtype_of(attrs),
        )

    def _product(self, call: Any, result: TensorType) -> Any | None:
        a, b = tensor_type(call.args[0]), tensor_type(call.args[1])
        if a is None or b is None or len(a.shape) < 2 or len(b.shape) != 2 or call.args[1] not in self._prepared:
            return None
        operator = Workload("matmul", (a, b), result)
        multiple = self._multiple(operator)
        depth, columns = _round_up(a.shape[-1], multiple), _round_up(b.shape[1], multiple)
        wide = replace(
            operator,
            inputs=(_widened(a, depth), TensorType((depth, columns), b.dtype)),
            output=_widened(result, columns),
        )
        if not self._note(operator, wide, call.args[0]):
            return None
        matrix = self._matrix(call.args[1], (depth, columns))
        return relax.op.matmul(self._data(call.args[0], depth), matrix, out_dtype=out_dtype_of(call.attrs))

    def _matrix(self, weight: Any, shape: tuple[int, int]) -> Any:
        """The matrix padded; in front of its transpose, where it is one, so that kernels still see that it is."""
        value: Any = self._values.get(weight)
        if getattr(getattr(value, "op", None), "name", "") == "relax.permute_dims":
            source = self._pad_to(self.visit_expr(value.args[0]), shape[::-1])
            return self.builder_.emit(relax.op.permute_dims(source, (1, 0)))
        return self._pad_to(self.visit_expr(weight), shape)

    def _note(self, operator: Workload, wide: Workload, data: Any) -> bool:
        """Whether there is something to pad; reported if so, or if there would be at full width."""
        padded = wide != operator
        if padded:
            copied = 0
            if wide.inputs[0] != operator.inputs[0] and data not in self._padded:
                size = _BYTES.get(operator.inputs[0].dtype, 4)
                copied = (operator.inputs[0].num_elements + wide.inputs[0].num_elements) * size
            self.found.append(Padding(operator, wide, self._multiple(operator), copied))
        return padded

    def _multiple(self, operator: Workload) -> int:
        dtype = operator.inputs[0].dtype
        if dtype not in _BYTES:
            return 1
        by_default = full_width(dtype) if dtype != "float32" or self._math == "tf32" else 1
        return self._paddings.get(operator.digest, by_default)

    # --- what stands between them ---

    def _itemwise(self, call: Any, name: str, result: TensorType) -> Any | None:
        width = result.shape[-1]
        wide = next(
            tensor_type(self._padded[argument])
            for argument in call.args
            if isinstance(argument, relax.Var) and argument in self._only_padded
        )
        assert wide is not None
        if wide.shape[:-1] != result.shape[:-1] and len(wide.shape) != len(result.shape):
            return None
        operands = []
        for at, argument in enumerate(call.args):
            tensor = tensor_type(argument)
            divides = name == "relax.divide" and at == 1
            if tensor is None or not tensor.shape or tensor.shape[-1] == 1:
                operands.append(argument if tensor is None else self.visit_expr(argument))
            elif tensor.shape[-1] != width or (divides and argument not in self._prepared):
                return None
            elif divides:
                operands.append(self._pad_to(self.visit_expr(argument), (*tensor.shape[:-1], wide.shape[-1]), 1.0))
            else:
                operands.append(self._data(argument, wide.shape[-1]))
        return relax.Call(call.op, operands, call.attrs, call.ty_args)

    def _with_padded_data(self, call: Any) -> Any | None:
        if call.args[0] not in self._only_padded:
            return None
        rest = [self.visit_expr(argument) for argument in call.args[1:]]
        return relax.Call(call.op, [self._padded[call.args[0]], *rest], call.attrs, call.ty_args)

    def _reshaped(self, call: Any, result: TensorType) -> Any | None:
        """Where rows stay rows, however they are numbered."""
        data = call.args[0]
        original = tensor_type(data)
        if data not in self._only_padded or original is None or original.shape[-1] != result.shape[-1]:
            return None
        width = tensor_type(self._padded[data])
        assert width is not None
        return relax.op.reshape(self._padded[data], (*result.shape[:-1], width.shape[-1]))

    def _data(self, argument: Any, width: int) -> Any:
        """The operand with a last dimension of this width."""
        tensor = tensor_type(argument)
        assert tensor is not None
        known = self._padded.get(argument) if isinstance(argument, relax.Var) else None
        known_type = tensor_type(known) if known is not None else None
        if known_type is not None and known_type.shape[-1] == width:
            return known
        if tensor.shape[-1] == width:
            return self.visit_expr(argument)
        made = self._pad_to(self.visit_expr(argument), (*tensor.shape[:-1], width))
        if isinstance(argument, relax.Var) and known is None:
            self._padded[argument] = made
        return made

    def _pad_to(self, value: Any, shape: tuple[int, ...], filling: float = 0.0) -> Any:
        tensor = tensor_type(value)
        assert tensor is not None
        if tensor.shape == shape:
            return value
        widths = [width for now, then in zip(tensor.shape, shape, strict=True) for width in (0, then - now)]
        return self.builder_.emit(relax.op.nn.pad(value, widths, pad_mode="constant", pad_value=filling))


def _sliced(padded: Any, original: TensorType) -> Any:
    last = len(original.shape) - 1
    return relax.op.strided_slice(padded, axes=[last], begin=[0], end=[original.shape[last]])


def _widened(tensor: TensorType, width: int) -> TensorType:
    return TensorType((*tensor.shape[:-1], width), tensor.dtype)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _multiply_adds(workload: Workload) -> int:
    weight = workload.inputs[1]
    if workload.op == "conv2d":
        return workload.output.num_elements // weight.shape[0] * weight.num_elements
    return workload.output.num_elements * weight.shape[0]
