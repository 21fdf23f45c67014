"""Precision: what the graph computes in, with casts at its ends and in front of what needs more.

Products and convolutions read float16 or bfloat16 and add up in float32; they are written as giving float32, with a
cast behind, which is what kernels do: their epilogues work on float32 and round once. Values between operators are
kept in the low precision; sums, exponentials and norms are computed in float32. Weights are cast at load time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax

from hone.compiler.cuda.layout import tidy
from hone.compiler.phases.anchors import anchor_call, read_anchor
from hone.compiler.phases.forms import ITEMWISE
from hone.compiler.phases.precision import Precision
from hone.compiler.phases.types import ints, tensor_type
from hone.compiler.workload import TensorType
from hone.types import NUMPY_DTYPES

#: Precision -> what values are stored in, and where it is float32, in what products are computed.
STORED = {"f32": "float32", "tf32": "float32", "f16": "float16", "bf16": "bfloat16", "int8": "float32"}
PRECISIONS = tuple(STORED)
#: The oldest architecture whose tensor cores take it.
_SINCE = {"tf32": 80, "bf16": 80, "f16": 70, "int8": 75}

#: Computed in whatever their operands are stored in: they only move items, choose among them or round once.
_FOLLOWING = frozenset(
    {
        *("relax.reshape", "relax.permute_dims", "relax.flatten", "relax.squeeze", "relax.expand_dims"),
        *("relax.strided_slice", "relax.take", "relax.concat", "relax.broadcast_to", "relax.nn.pad", "relax.split"),
        *("relax.nn.max_pool2d", "relax.max", "relax.min", "relax.image.resize2d", "relax.tile", "relax.repeat"),
        *("relax.where", "relax.flip", "relax.stack"),
    }
)
#: Of the item-wise ones, those that lose too much.
_EXACT_ITEMWISE = frozenset(
    {"relax.exp", "relax.log", "relax.power", "relax.sqrt", "relax.rsqrt", "relax.square", "relax.nn.softplus"}
)
#: Computed in float32, their result stored low at once: it is between bounds.
_CLOSED = frozenset({"relax.nn.softmax", "relax.nn.layer_norm", "relax.nn.rms_norm", "relax.nn.group_norm"})
_CLOSED_MEANS = frozenset({"relax.nn.avg_pool2d", "relax.nn.adaptive_avg_pool2d"})
_NUMPY = {"float16": np.dtype(np.float16), "bfloat16": NUMPY_DTYPES["BF16"]}
_F16_MAX = float(np.finfo(np.float16).max)


def unsupported(precision: str, compute_capability: int) -> str:
    """Why a GPU has no kernels of this precision; empty where it has."""
    if precision not in STORED:
        return f"precision '{precision}' is unknown, expected one of {', '.join(PRECISIONS)}"
    needed = _SINCE.get(precision, 0)
    if compute_capability < needed:
        return (
            f"precision '{precision}' needs tensor cores of sm_{needed} or newer, this GPU is sm_{compute_capability}"
        )
    return ""


def convert_precision(mod: tvm.IRModule, precision: Precision) -> tvm.IRModule:
    """The module in a precision; its inputs and outputs keep their dtypes."""
    low = STORED[precision.name]
    if low == "float32":
        return mod
    functions = {
        name: _Caster(mod, low, precision, _weights(function)).visit_expr(function)
        if isinstance(function, relax.Function)
        else function
        for name, function in mod.functions.items()
    }
    return tidy(tvm.IRModule(functions, attrs=mod.attrs))


def lowered_layers(mod: tvm.IRModule, precision: Precision) -> list[str]:
    """The layers of `main` that the precision lowers, in the order by which `Precision.kept` names them."""
    low = STORED[precision.name]
    if low == "float32":
        return []
    caster = _Caster(mod, low, precision, _weights(mod["main"]))
    caster.visit_expr(mod["main"])
    return caster.layers


def _weights(function: Any) -> set[Any]:
    num_inputs = int(function.attrs["num_input"]) if function.attrs and "num_input" in function.attrs else 0
    return set(function.params[num_inputs:])


@dataclass(slots=True)
class _Forms:
    """One value of the original graph, as far as it exists in either precision."""

    low: Any = None
    full: Any = None


@relax.expr_functor.mutator
class _Caster(relax.PyExprMutator):  # type: ignore[misc]  # TVM is untyped
    """Original values keep their dtype for whoever asks for them; what is computed low is cast back on demand."""

    def __init__(self, mod: tvm.IRModule, low: str, precision: Precision, weights: set[Any]) -> None:
        super().__init__(mod)
        self._low_dtype = low
        self._kept = precision.kept
        self._weights = weights
        self._lows: dict[Any, Any] = {}
        #: Values that exist in the low precision only, until someone asks for them in full.
        self._only_low: set[Any] = set()
        #: All that could be lowered, in words.
        self.layers: list[str] = []

    def visit_var_binding_(self, binding: Any) -> None:
        used = relax.analysis.free_vars(binding.value)
        if used and all(var in self._weights for var in used):
            # Arithmetic on weights is done at load time, in full; what it gives is a weight as good as any.
            self._weights.add(binding.var)
            super().visit_var_binding_(binding)
            return
        low = self._lowered(binding)
        if low is None:
            super().visit_var_binding_(binding)
            return
        value = self.builder_.emit(low)
        self._lows[binding.var] = value
        if isinstance(binding.var, relax.DataflowVar):
            self._only_low.add(binding.var)
        else:  # seen from outside, where dtypes are the model's
            self.set_var_remap(binding.var, self.builder_.emit_output(relax.op.astype(value, "float32")))

    def visit_var_(self, var: Any) -> Any:
        if var in self._only_low:
            self._only_low.discard(var)
            self.set_var_remap(var, self.builder_.emit(relax.op.astype(self._lows[var], "float32")))
        return super().visit_var_(var)

    visit_dataflow_var_ = visit_var_

    def _lowered(self, binding: Any) -> Any | None:
        """The binding's value in the low precision; None where it stays in full."""
        call, result = binding.value, tensor_type(binding.var)
        if not isinstance(call, relax.Call) or result is None or result.dtype != "float32":
            return None
        anchor = read_anchor(call)
        if anchor is not None:
            return self._anchor(anchor, result) if self._takes_layer(str(anchor.op), result) else None
        if not isinstance(call.op, tvm.ir.Op):
            return None
        name = str(call.op.name)
        if name in ("relax.matmul", "relax.nn.conv2d", "relax.nn.conv2d_transpose"):
            return self._product(call, name) if self._takes_layer(name, result) else None
        if name in _CLOSED or name in _CLOSED_MEANS or self._is_mean_of_image(call, name):
            return self._closed(call) if any(self._is_low(argument) for argument in _operands(call)) else None
        if name in _FOLLOWING or (name in ITEMWISE and name not in _EXACT_ITEMWISE):
            return self._following(call) if self._follows(call) else None
        return None

    def _takes_layer(self, name: str, result: TensorType) -> bool:
        self.layers.append(f"{name.rpartition('.')[2]} to {list(result.shape)}")
        return len(self.layers) - 1 not in self._kept

    def _product(self, call: Any, name: str) -> Any:
        a, b = self._in_low(call.args[0]), self._in_low(call.args[1])
        if name == "relax.matmul":
            full = relax.op.matmul(a, b, out_dtype="float32")
        else:
            attrs = call.attrs
            told: dict[str, Any] = {
                "strides": ints(attrs.strides),
                "padding": ints(attrs.padding),
                "dilation": ints(attrs.dilation),
                "groups": int(attrs.groups),
                "data_layout": str(attrs.data_layout),
                "kernel_layout": str(attrs.kernel_layout),
                "out_layout": str(attrs.out_layout),
                "out_dtype": "float32",
            }
            operator = relax.op.nn.conv2d
            if name == "relax.nn.conv2d_transpose":
                operator, told["output_padding"] = relax.op.nn.conv2d_transpose, ints(attrs.output_padding)
            full = operator(a, b, **told)
        return relax.op.astype(self.builder_.emit(full), self._low_dtype)

    def _anchor(self, anchor: Any, result: TensorType) -> Any:
        inputs = [self._in_low(operand) for operand in anchor.inputs]
        return anchor_call(anchor.op, inputs, dict(anchor.attributes), TensorType(result.shape, self._low_dtype))

    def _closed(self, call: Any) -> Any:
        full = super().visit_call_(call)
        return relax.op.astype(self.builder_.emit(full), self._low_dtype)

    def _is_mean_of_image(self, call: Any, name: str) -> bool:
        """A global pooling: its result stands for channels. Other means are parts of norms."""
        tensor = tensor_type(call.args[0]) if call.args else None
        if name != "relax.mean" or tensor is None or len(tensor.shape) != 4 or call.attrs.axis is None:
            return False
        return sorted(axis % 4 for axis in ints(call.attrs.axis)) == [2, 3]

    def _follows(self, call: Any) -> bool:
        """Whether an operand is low already, and none would have to lose what float32 gave it."""
        seen = False
        for argument in _operands(call):
            tensor = tensor_type(argument)
            if tensor is None or tensor.dtype != "float32":
                continue
            if isinstance(argument, tvm.ir.GenericConst):
                if self._low_dtype == "float16" and _exceeds(argument):
                    return False
            elif self._is_low(argument):
                seen = True
            elif argument not in self._weights:
                return False
        # Rows of a table of weights, by numbers that requests bring.
        return seen or str(call.op.name) == "relax.take"

    def _following(self, call: Any) -> Any:
        def lowered(argument: Any) -> Any:
            if isinstance(argument, relax.Tuple):
                return relax.Tuple([lowered(field) for field in argument.fields])
            tensor = tensor_type(argument)
            is_float = tensor is not None and tensor.dtype == "float32"
            return self._in_low(argument) if is_float else self.visit_expr(argument)

        return relax.Call(call.op, [lowered(argument) for argument in call.args], call.attrs, call.ty_args)

    def _is_low(self, argument: Any) -> bool:
        return isinstance(argument, relax.Var) and argument in self._lows and argument not in self._weights

    def _in_low(self, argument: Any) -> Any:
        known = self._lows.get(argument) if isinstance(argument, relax.Var) else None
        if known is not None:
            return known
        tensor = tensor_type(argument)
        full = self.visit_expr(argument)
        if tensor is None or tensor.dtype != "float32":
            return full
        if isinstance(argument, tvm.ir.GenericConst):
            array = np.asarray(argument.value.numpy())
            if self._low_dtype == "float16":
                array = np.clip(array, -_F16_MAX, _F16_MAX)
            return relax.const(array.astype(_NUMPY[self._low_dtype]), self._low_dtype)
        if self._low_dtype == "float16" and argument not in self._weights:
            # What exceeds float16 (the number that masks scores, say) becomes its largest, not infinity, of which
            # zero times would be no number.
            full = self.builder_.emit(relax.op.clip(full, -_F16_MAX, _F16_MAX))
        low = self.builder_.emit(relax.op.astype(full, self._low_dtype))
        if isinstance(argument, relax.Var):
            self._lows[argument] = low
        return low


def _exceeds(constant: Any) -> bool:
    array = np.asarray(constant.value.numpy())
    return bool(array.size) and bool((np.abs(array) > _F16_MAX).any())


def _operands(call: Any) -> list[Any]:
    found: list[Any] = []
    for argument in call.args:
        found.extend(argument.fields if isinstance(argument, relax.Tuple) else [argument])
    return [operand for operand in found if isinstance(operand, relax.Var | tvm.ir.GenericConst)]
