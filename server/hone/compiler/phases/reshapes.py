"""Reshapes that only regroup rows move behind operators that work on each row alone.

A dense layer over (batch, sequence, features) is often exported with reshapes to (rows, features) and back around its
product. Behind everything that does not care, such reshapes meet and cancel, and what follows the product can be fused
with it. The same goes for dimensions of 1 that come and go, as around convolutions of one dimension, which become ones
of two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from tvm import relax

from hone.compiler.phases.graph import number_of, operator_of
from hone.compiler.phases.types import ints, tensor_type

_REGROUPINGS = frozenset({"relax.reshape", "relax.squeeze", "relax.expand_dims"})
_UNARY = frozenset(
    {
        *("relax.nn.relu", "relax.nn.relu6", "relax.nn.leakyrelu", "relax.nn.silu", "relax.nn.gelu"),
        *("relax.sigmoid", "relax.tanh", "relax.erf", "relax.exp", "relax.log", "relax.sqrt", "relax.abs"),
        *("relax.negative", "relax.clip"),
    }
)
_BINARY = frozenset(
    {
        *("relax.add", "relax.subtract", "relax.multiply", "relax.divide", "relax.maximum", "relax.minimum"),
        "relax.power",
    }
)

_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "relax.mean": relax.op.mean,
    "relax.sum": relax.op.sum,
    "relax.max": relax.op.max,
    "relax.min": relax.op.min,
}


def sink_reshapes(mod: tvm.IRModule) -> tvm.IRModule:
    functions = {
        name: _Sinker(mod).visit_expr(function) if isinstance(function, relax.Function) else function
        for name, function in mod.functions.items()
    }
    return tvm.IRModule(functions, attrs=mod.attrs)


@relax.expr_functor.mutator
class _Sinker(relax.PyExprMutator):  # type: ignore[misc]  # TVM is untyped
    """Visits in order; `_cores` tells of a value which other value it is a regrouping of."""

    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        self._cores: dict[Any, Any] = {}

    def visit_var_binding_(self, binding: Any) -> None:
        call = binding.value
        moved = None
        if self.builder_.current_block_is_dataflow() and tensor_type(binding.var) is not None:
            moved = self._moved(call, tensor_type(binding.var))
        if moved is None:
            super().visit_var_binding_(binding)
            return
        core, shape = moved
        core = self.builder_.emit(core) if isinstance(core, relax.Call) else core
        value = core if _shape(core) == shape else self.builder_.emit(relax.op.reshape(core, shape))
        if value is not core:
            self._cores[value] = core
        if not isinstance(binding.var, relax.DataflowVar):  # seen from outside
            value = self.builder_.emit_output(value)
        self.set_var_remap(binding.var, value)

    def _moved(self, call: Any, result: Any) -> tuple[Any, tuple[int, ...]] | None:
        """The core of a value, as a variable or a call of them, and the shape it is given; None: left as it is."""
        name = operator_of(call)
        if name in _REGROUPINGS or _is_whole(call):
            source = self.visit_expr(call.args[0])
            core = self._cores.get(source, source)
            regroups = _shape(core)[-1:] == result.shape[-1:] or _matching(_shape(core), result.shape) is not None
            if not regroups:
                # Another thing; still one reshape does for two.
                return None if core is source else (relax.op.reshape(core, result.shape), result.shape)
            return core, result.shape
        if name == "relax.matmul":
            return self._product(call, result)
        if name == "relax.nn.conv1d":
            return self._convolution(call, result)
        if name in _UNARY or name in ("relax.nn.layer_norm", "relax.nn.softmax"):
            return self._rowwise(call, result)
        if name in _BINARY:
            return self._binary(call, result)
        if name in _REDUCTIONS:
            return self._reduction(call, result)
        return None

    def _product(self, call: Any, result: Any) -> tuple[Any, tuple[int, ...]] | None:
        x, weight = (self.visit_expr(argument) for argument in call.args)
        core = self._cores.get(x)
        if core is None or len(_shape(core)) < 2 or len(_shape(weight)) != 2 or _shape(core)[-1] != _shape(x)[-1]:
            return None
        return relax.op.matmul(core, weight), result.shape

    def _convolution(self, call: Any, result: Any) -> tuple[Any, tuple[int, ...]] | None:
        """A convolution of one dimension is one of images of one row."""
        attrs = call.attrs
        if (str(attrs.data_layout), str(attrs.kernel_layout), str(attrs.out_layout)) != ("NCW", "OIW", "NCW"):
            return None
        x, weight = (self.visit_expr(argument) for argument in call.args)
        batch, channels, length = _shape(x)
        image = self._cores.get(x)
        if image is None or _shape(image) != (batch, channels, 1, length):
            image = self.builder_.emit(relax.op.reshape(x, (batch, channels, 1, length)))
        outputs, inputs, taps = _shape(weight)
        before, after = ints(attrs.padding)
        convolution = relax.op.nn.conv2d(
            image,
            self.builder_.emit(relax.op.reshape(weight, (outputs, inputs, 1, taps))),
            strides=(1, *ints(attrs.strides)),
            padding=(0, before, 0, after),
            dilation=(1, *ints(attrs.dilation)),
            groups=int(attrs.groups),
        )
        return convolution, result.shape

    def _rowwise(self, call: Any, result: Any) -> tuple[Any, tuple[int, ...]] | None:
        x = self.visit_expr(call.args[0])
        core = self._cores.get(x)
        if core is None:
            return None
        rest = [self.visit_expr(argument) for argument in call.args[1:]]
        name = operator_of(call)
        if name not in _UNARY and _shape(core)[-1:] != result.shape[-1:]:
            return None
        if name == "relax.nn.softmax":
            if int(call.attrs.axis) not in (-1, len(result.shape) - 1):
                return None
            return relax.op.nn.softmax(core, -1), result.shape
        if name == "relax.nn.layer_norm":
            if [axis % len(result.shape) for axis in ints(call.attrs.axes)] != [len(result.shape) - 1]:
                return None
            a = call.attrs
            norm = relax.op.nn.layer_norm(core, *rest, [-1], float(a.epsilon), bool(a.center), bool(a.scale))
            return norm, result.shape
        return relax.Call(call.op, [core, *rest], call.attrs, call.ty_args), result.shape

    def _reduction(self, call: Any, result: Any) -> tuple[Any, tuple[int, ...]] | None:
        source = self.visit_expr(call.args[0])
        core = self._cores.get(source)
        matching = _matching(_shape(core), _shape(source)) if core is not None else None
        if matching is None or call.attrs.axis is None:
            return None
        axes = {axis % len(_shape(source)) for axis in ints(call.attrs.axis)}
        if not axes <= set(matching):
            return None
        # With a dimension of 1 more, a reduction over rows alone is one over whole images.
        places = [at for at, place in enumerate(matching) if place in axes or place is None]
        return _REDUCTIONS[operator_of(call)](core, places, keepdims=True), result.shape

    def _binary(self, call: Any, result: Any) -> tuple[Any, tuple[int, ...]] | None:
        operands = [self.visit_expr(argument) for argument in call.args]
        # What is repeated to fill the result has other rows than it.
        cores = [self._cores.get(operand) if _shape(operand) == result.shape else None for operand in operands]
        shape = next((_shape(core) for core in cores if core is not None), None)
        if shape is None or len(shape) < 2:
            return None
        arguments = []
        for operand, core in zip(operands, cores, strict=True):
            if core is not None and _shape(core) == shape:
                arguments.append(core)
                continue
            own = _shape(operand)
            if all(dim == 1 for dim in own) and len(own) <= len(shape):
                arguments.append(operand)
                continue
            matching = _matching(shape, result.shape)
            if matching is not None and own:
                full = (1,) * (len(result.shape) - len(own)) + own
                aligned = tuple(1 if at is None else full[at] for at in matching)
                arguments.append(operand if aligned == own else relax.op.reshape(operand, aligned))
                continue
            if own == result.shape:  # of the same rows, as they are: regrouped here, which costs nothing
                arguments.append(relax.op.reshape(operand, shape))
                continue
            if any(dim != 1 for dim in own[:-1]) or (own and own[-1] not in (1, shape[-1])):
                return None  # different in each row
            arguments.append(operand if len(own) <= len(shape) else relax.op.reshape(operand, own[-1:]))
        if all(argument is operand for argument, operand in zip(arguments, operands, strict=True)):
            return None
        placed = [self.builder_.emit(one) if isinstance(one, relax.Call) else one for one in arguments]
        return relax.Call(call.op, placed, call.attrs, call.ty_args), result.shape


def _is_whole(call: Any) -> bool:
    """Whether it is a slice that takes everything, in order."""
    if operator_of(call) != "relax.strided_slice" or len(call.args) < 5 or not isinstance(call.args[4], relax.Tuple):
        return False
    steps = [number_of(step) for step in call.args[4].fields]
    return set(steps) == {1.0} and _shape(call.args[0]) == _shape(call)


def _matching(core: tuple[int, ...], shape: tuple[int, ...]) -> list[int | None] | None:
    """For each dimension of `core` its place in `shape`, where they differ in dimensions of 1 only; else None."""
    found: list[int | None] = []
    at = 0
    for dim in core:
        while at < len(shape) and shape[at] != dim and shape[at] == 1:
            at += 1
        if at < len(shape) and shape[at] == dim:
            found.append(at)
            at += 1
        elif dim == 1:
            found.append(None)
        else:
            return None
    return found if all(dim == 1 for dim in shape[at:]) else None


def _shape(expression: Any) -> tuple[int, ...]:
    tensor = tensor_type(expression)
    return tensor.shape if tensor is not None else ()
