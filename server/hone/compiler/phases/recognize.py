"""Recognise: functions that the importer made where Relax has an operator become that operator again.

TVM's ONNX importer writes Clip with tensors and Pad as functions of TIR, which no later phase would look into. A
function is taken for an operator only if it is structurally the one that TVM itself makes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import tvm
import tvm_ffi.structural
from tvm import relax, tirx, topi
from tvm.s_tir import SBlock

from hone.compiler.phases.types import ints, tensor_type

_BINARY: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "maximum": (topi.maximum, relax.op.maximum),
    "minimum": (topi.minimum, relax.op.minimum),
}


def recognize(mod: tvm.IRModule) -> tvm.IRModule:
    """`maximum` and `minimum` as operators; zeros put around an image as padding of the convolutions that read it."""
    functions = {
        name: _Recognizer(mod).visit_expr(function) if isinstance(function, relax.Function) else function
        for name, function in mod.functions.items()
    }
    return relax.transform.DeadCodeElimination()(tvm.IRModule(functions, attrs=mod.attrs))


@relax.expr_functor.mutator
class _Recognizer(relax.PyExprMutator):  # type: ignore[misc]  # TVM is untyped
    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        self._mod = mod
        #: New variable of a padded image -> the image, and top, left, bottom, right.
        self._padded: dict[Any, tuple[Any, tuple[int, int, int, int]]] = {}

    def visit_var_binding_(self, binding: Any) -> None:
        super().visit_var_binding_(binding)
        call = binding.value
        if isinstance(call, relax.Call) and getattr(call.op, "name", "") == "relax.call_tir":
            padding = _padding_of(self._mod[call.args[0]], call.args[1].fields)
            if padding is not None:
                padded = self.visit_expr(binding.var)
                self._padded[padded] = (self.visit_expr(call.args[1].fields[0]), padding)

    def visit_call_(self, call: Any) -> Any:
        call = super().visit_call_(call)
        name = getattr(call.op, "name", "")
        if name == "relax.call_tir":
            operator = _binary_of(self._mod[call.args[0]], call.args[1].fields)
            return call if operator is None else operator(*call.args[1].fields)
        if name == "relax.nn.conv2d" and call.args[0] in self._padded and str(call.attrs.data_layout) == "NCHW":
            image, (top, left, bottom, right) = self._padded[call.args[0]]
            a, attrs = ints(call.attrs.padding), call.attrs
            return relax.op.nn.conv2d(
                image,
                call.args[1],
                strides=ints(attrs.strides),
                padding=(a[0] + top, a[1] + left, a[2] + bottom, a[3] + right),
                dilation=ints(attrs.dilation),
                groups=int(attrs.groups),
                data_layout=str(attrs.data_layout),
                kernel_layout=str(attrs.kernel_layout),
                out_layout=str(attrs.out_layout),
            )
        return call


def _binary_of(function: Any, arguments: Any) -> Callable[..., Any] | None:
    """The operator of two tensors that a function computes."""
    for name, (make, operator) in _BINARY.items():
        if _written_by(function) == name and len(arguments) == 2:
            return operator if _same(function, arguments, make) else None
    return None


def _padding_of(function: Any, arguments: Any) -> tuple[int, int, int, int] | None:
    """Top, left, bottom and right of a function that puts zeros around rows and columns of images."""
    source = tensor_type(arguments[0]) if len(arguments) == 1 else None
    if source is None or _written_by(function) != "PadInput":
        return None
    shape = ints(function.params[-1].shape)
    if len(source.shape) != 4 or len(shape) != 4 or source.shape[:2] != shape[:2]:
        return None
    added = [shape[axis] - source.shape[axis] for axis in (2, 3)]
    for top, left in product(*(_likely(total) for total in added)):
        after = (0, 0, added[0] - top, added[1] - left)

        def pad(image: Any, top: int = top, left: int = left, after: Any = after) -> Any:
            return topi.nn.pad(image, [0, 0, top, left], list(after), tirx.const(0.0, source.dtype))

        if _same(function, arguments, pad):
            return top, left, after[2], after[3]
    return None


def _likely(total: int) -> Iterator[int]:
    """Ways to put `total` on two sides, the usual ones first."""
    return iter(dict.fromkeys(at for at in (total // 2, 0, total, (total + 1) // 2) if 0 <= at <= total))


def _written_by(function: Any) -> str:
    """The name of a function's only block, as a hint: what counts is the structure."""
    names: list[str] = []

    def see(block: Any) -> None:
        names.append(str(block.name_hint))

    tvm_ffi.structural.structural_walk(function.body, (SBlock, see))
    inner = [name for name in names if name != "root"]
    return inner[0].removeprefix("T_") if len(inner) == 1 else ""


def _same(function: Any, arguments: Any, make: Callable[..., Any]) -> bool:
    """Whether `make`, as the importer would write it, gives the function."""
    builder = relax.BlockBuilder()
    inputs = [relax.Var(f"input{at}", argument.ty) for at, argument in enumerate(arguments)]
    call = builder.call_te(make, *inputs)
    reference = builder.get()[call.args[0]]
    return bool(tvm_ffi.structural.structural_equal(_bare(function), _bare(reference), True))


def _bare(function: Any) -> Any:
    attributes = function.attrs or {}
    for name in ("global_symbol", "op_pattern"):
        if name in attributes:
            function = function.without_attr(name)
    return function
