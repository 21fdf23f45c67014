"""An ONNX graph in PyTorch, node by node, for comparison: eagerly, under a CUDA graph, or through `torch.compile`.

What is constant (shapes among it, since every input's shape is fixed) is computed once, at load; values go as soon as
nothing reads them any more. Checked on the CPU in float32 against ONNX Runtime by `check_torch.py`.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

#: ONNX's numbers of dtypes, as Cast names them. Floats are all the model's.
_FLOATS, _BOOL = (1, 10, 11, 16), 9
_INTEGERS = {6: "int32", 7: "int64"}


@dataclass(frozen=True, slots=True)
class _Node:
    """`arguments`: names of values; or constants, tensors as numbers in `TorchGraph.weights`."""

    run: Callable[..., Any]
    attributes: Mapping[str, Any]
    arguments: tuple[tuple[str, Any], ...]
    outputs: tuple[str, ...]
    last_reads: tuple[str, ...]
    """Values that nothing reads behind this one."""


class TorchGraph:
    """Call it with the inputs in their order: float32 and contiguous, as they come from the host, or integers; gives
    the outputs in float32. In between all is of `dtype`, and images are channels last."""

    def __init__(self, folder: Path, inputs: Mapping[str, np.ndarray[Any, Any]], device: str, dtype: str) -> None:
        """`folder` has nodes.json and model.onnx. `inputs` tell shapes, and are run once.

        Raises NotImplementedError for an operator that is unknown here.
        """
        torch: Any = importlib.import_module("torch")

        from hone.engines.onnx_weights import read_initializers

        self._torch, self._device, self._dtype = torch, device, getattr(torch, dtype)
        told = json.loads((folder / "nodes.json").read_text(encoding="utf-8"))
        initial = read_initializers(folder / "model.onnx", told["initializers"])
        self._constants = {name: torch.from_numpy(np.array(array)) for name, array in initial.items()}
        self.weights: list[Any] = []
        self._numbers: dict[str, int] = {}
        self.names = list(inputs)
        self._outputs: list[str] = told["outputs"]
        self._nodes = self._lowered(told["nodes"], inputs)
        self._constants.clear()

    def __call__(self, *inputs: Any) -> list[Any]:
        values = {name: self._own(tensor) for name, tensor in zip(self.names, inputs, strict=True)}
        for node in self._nodes:
            arguments = [
                values[told] if kind == "value" else self.weights[told] if kind == "weight" else told
                for kind, told in node.arguments
            ]
            found = node.run(self._torch, node.attributes, *arguments)
            values.update(zip(node.outputs, _several(found), strict=False))
            for name in node.last_reads:
                del values[name]
        return [values[name].float() for name in self._outputs]

    def _own(self, tensor: Any) -> Any:
        """In the graph's dtype; images channels last."""
        tensor = tensor.to(self._dtype) if tensor.is_floating_point() else tensor
        return tensor.to(memory_format=self._torch.channels_last) if tensor.ndim == 4 else tensor

    # --- at load

    def _lowered(self, nodes: Sequence[Mapping[str, Any]], inputs: Mapping[str, Any]) -> list[_Node]:
        """What is left to run, found by running it once."""
        torch, constants = self._torch, self._constants
        values = {name: self._own(torch.from_numpy(np.array(array)).to(self._device)) for name, array in inputs.items()}
        reads: dict[str, int] = {}
        for at, node in enumerate(nodes):
            reads.update(dict.fromkeys(node["inputs"], at))
        reads.update(dict.fromkeys(self._outputs, len(nodes)))
        found = []
        with torch.inference_mode():
            for at, node in enumerate(nodes):
                run, named = OPERATORS.get(node["op"]), node["inputs"]
                attributes = dict(node["attributes"])
                if node["op"] == "Shape":
                    shape = (constants[named[0]] if named[0] in constants else values[named[0]]).shape
                    constants[node["outputs"][0]] = torch.tensor(list(shape))
                    continue
                if run is None:
                    raise NotImplementedError(f"PyTorch's side knows no {node['op']}: add it to OPERATORS")
                as_lists = _LISTS.get(node["op"], ())
                if all(name in constants or not name for name in named):
                    given = [
                        self._listed(name) if n in as_lists else constants.get(name) for n, name in enumerate(named)
                    ]
                    results = run(torch, attributes, *given)
                    constants.update(zip(node["outputs"], _several(results), strict=False))
                    continue
                attributes["float"] = self._dtype
                arguments = tuple(
                    ("value", name)
                    if name in values
                    else ("told", self._listed(name))
                    if n in as_lists or not name
                    else ("weight", self._placed(name))
                    for n, name in enumerate(named)
                )
                here: list[Any] = []
                for kind, what in arguments:
                    known: Any = {"value": values, "weight": self.weights}.get(kind)
                    here.append(what if known is None else known[what])
                values.update(zip(node["outputs"], _several(run(torch, attributes, *here)), strict=False))
                gone = [name for name in (*named, *node["outputs"]) if name in values and reads.get(name, at) <= at]
                for name in (gone := list(dict.fromkeys(gone))):
                    del values[name]
                found.append(_Node(run, attributes, arguments, tuple(node["outputs"]), tuple(gone)))
        return found

    def _listed(self, name: str) -> Any:
        """A constant that is no tensor for PyTorch; None for what is left out."""
        return self._constants[name].tolist() if name else None

    def _placed(self, name: str) -> int:
        """The number of a constant among the weights. What its dtype does not hold (the least float32, which masks
        scores) becomes the largest that it holds, and no infinity."""
        if name not in self._numbers:
            torch, tensor = self._torch, self._constants[name].to(self._device)
            if tensor.is_floating_point():
                limit = torch.finfo(self._dtype).max
                tensor = tensor.clamp(-limit, limit).to(self._dtype)
            if tensor.ndim == 4:
                tensor = tensor.to(memory_format=torch.channels_last)
            self._numbers[name] = len(self.weights)
            self.weights.append(tensor)
        return self._numbers[name]


def _several(found: Any) -> Sequence[Any]:
    return found if isinstance(found, tuple | list) else (found,)


# --- operators: (torch, attributes, inputs)


def _padded(
    torch: Any, told: Mapping[str, Any], x: Any, kernel: Sequence[int], value: float = 0.0
) -> tuple[Any, list[int]]:
    """The data and PyTorch's symmetric padding; what is not symmetric is padded before."""
    num, auto = x.ndim - 2, told.get("auto_pad", "NOTSET")
    pads = told.get("pads") or [0] * (2 * num)
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        strides, dilations = (told.get(name) or [1] * num for name in ("strides", "dilations"))
        totals = [
            max(0, (-(-size // stride) - 1) * stride + dilation * (k - 1) + 1 - size)
            for size, stride, dilation, k in zip(x.shape[2:], strides, dilations, kernel, strict=True)
        ]
        less, more = [total // 2 for total in totals], [total - total // 2 for total in totals]
        pads = [*less, *more] if auto == "SAME_UPPER" else [*more, *less]
    if pads[:num] == pads[num:]:
        return x, pads[:num]
    sides = [side for at in reversed(range(num)) for side in (pads[at], pads[num + at])]
    return torch.nn.functional.pad(x, sides, value=value), [0] * num


def _conv(torch: Any, told: Mapping[str, Any], x: Any, weight: Any, bias: Any = None) -> Any:
    x, pads = _padded(torch, told, x, weight.shape[2:])
    run = torch.nn.functional.conv1d if x.ndim == 3 else torch.nn.functional.conv2d
    return run(x, weight, bias, told.get("strides", 1), pads, told.get("dilations", 1), told.get("group", 1))


def _conv_transpose(torch: Any, told: Mapping[str, Any], x: Any, weight: Any, bias: Any = None) -> Any:
    pads = told.get("pads", [0] * 4)
    if pads[:2] != pads[2:] or told.get("output_shape"):
        raise NotImplementedError("a transposed convolution with pads that are not symmetric, in PyTorch")
    return torch.nn.functional.conv_transpose2d(
        x, weight, bias, told.get("strides", 1), pads[:2], told.get("output_padding", 0), told.get("group", 1),
        told.get("dilations", 1),
    )  # fmt: skip


def _max_pool(torch: Any, told: Mapping[str, Any], x: Any) -> Any:
    x, pads = _padded(torch, told, x, told["kernel_shape"], float("-inf"))
    return torch.nn.functional.max_pool2d(
        x, told["kernel_shape"], told.get("strides", 1), pads, told.get("dilations", 1), bool(told.get("ceil_mode", 0))
    )


def _average_pool(torch: Any, told: Mapping[str, Any], x: Any) -> Any:
    pads = told.get("pads", [0] * 4)
    if pads[:2] != pads[2:]:
        raise NotImplementedError("an average pooling with pads that are not symmetric, in PyTorch")
    counted = bool(told.get("count_include_pad", 0))
    return torch.nn.functional.avg_pool2d(
        x, told["kernel_shape"], told.get("strides", 1), pads[:2], bool(told.get("ceil_mode", 0)), counted
    )


def _gemm(torch: Any, told: Mapping[str, Any], a: Any, b: Any, c: Any = None) -> Any:
    a = a.t() if told.get("transA") else a
    b = b.t() if told.get("transB") else b
    alpha, beta = told.get("alpha", 1.0), told.get("beta", 1.0)
    if c is not None and alpha == beta == 1.0:
        return torch.addmm(c, a, b)  # the bias rides along, as in nn.Linear
    found = a @ b if alpha == 1.0 else alpha * (a @ b)
    return found if c is None else found + c * beta


def _reshape(torch: Any, told: Mapping[str, Any], x: Any, shape: Sequence[int]) -> Any:
    keeps = not told.get("allowzero", 0)
    return x.reshape([x.shape[at] if dim == 0 and keeps else dim for at, dim in enumerate(shape)])


def _flatten(torch: Any, told: Mapping[str, Any], x: Any) -> Any:
    axis = told.get("axis", 1)
    return x.flatten(axis) if axis == 1 else x.reshape(int(np.prod(x.shape[:axis])), -1)


def _norm(torch: Any, told: Mapping[str, Any], x: Any, scale: Any, bias: Any, mean: Any, variance: Any) -> Any:
    return torch.nn.functional.batch_norm(x, mean, variance, scale, bias, False, 0.0, told.get("epsilon", 1e-5))


def _layer_norm(torch: Any, told: Mapping[str, Any], x: Any, scale: Any, bias: Any = None) -> Any:
    axis = told.get("axis", -1) % x.ndim
    return torch.nn.functional.layer_norm(x, x.shape[axis:], scale, bias, told.get("epsilon", 1e-5))


def _axes(told: Mapping[str, Any], axes: Sequence[int] | None, x: Any) -> list[int]:
    chosen = axes if axes is not None else told.get("axes")
    return list(range(x.ndim)) if chosen is None else list(chosen)


def _mean(torch: Any, told: Mapping[str, Any], x: Any, axes: Any = None) -> Any:
    return x.mean(dim=_axes(told, axes, x), keepdim=bool(told.get("keepdims", 1)))


def _sum(torch: Any, told: Mapping[str, Any], x: Any, axes: Any = None) -> Any:
    return x.sum(dim=_axes(told, axes, x), keepdim=bool(told.get("keepdims", 1)))


def _reduce_max(torch: Any, told: Mapping[str, Any], x: Any, axes: Any = None) -> Any:
    return x.amax(dim=_axes(told, axes, x), keepdim=bool(told.get("keepdims", 1)))


def _gather(torch: Any, told: Mapping[str, Any], x: Any, at: Any) -> Any:
    axis = told.get("axis", 0) % x.ndim
    if axis == 0 and x.ndim == 2 and at.ndim:
        return torch.nn.functional.embedding(at, x)
    if at.ndim == 0:
        return x.select(axis, int(at)) if not at.is_cuda else x.index_select(axis, at.reshape(1)).squeeze(axis)
    return x.index_select(axis, at.reshape(-1)).reshape(*x.shape[:axis], *at.shape, *x.shape[axis + 1 :])


def _unsqueeze(torch: Any, told: Mapping[str, Any], x: Any, axes: Any = None) -> Any:
    chosen = _axes(told, axes, x)
    for axis in sorted(axis % (x.ndim + len(chosen)) for axis in chosen):
        x = x.unsqueeze(axis)
    return x


def _squeeze(torch: Any, told: Mapping[str, Any], x: Any, axes: Any = None) -> Any:
    chosen = axes if axes is not None else told.get("axes")
    if chosen is None:
        chosen = [axis for axis, dim in enumerate(x.shape) if dim == 1]
    return x.squeeze(tuple(chosen))


def _slice(
    torch: Any, told: Mapping[str, Any], x: Any, starts: Any, ends: Any, axes: Any = None, steps: Any = None
) -> Any:
    for n, (start, end) in enumerate(zip(starts, ends, strict=True)):
        step = steps[n] if steps else 1
        if step < 1:
            raise NotImplementedError("a slice that goes backwards, in PyTorch")
        at: list[Any] = [slice(None)] * x.ndim
        at[axes[n] if axes else n] = slice(start, end, step)
        x = x[tuple(at)]
    return x


def _cast(torch: Any, told: Mapping[str, Any], x: Any) -> Any:
    if told["to"] in _FLOATS:
        return x if x.is_floating_point() else x.to(told.get("float", torch.get_default_dtype()))
    return x.bool() if told["to"] == _BOOL else x.to(getattr(torch, _INTEGERS[told["to"]]))


def _clip(torch: Any, told: Mapping[str, Any], x: Any, low: Any = None, high: Any = None) -> Any:
    low, high = (told.get(name) if value is None else value for name, value in (("min", low), ("max", high)))
    return torch.clamp(x, low, high)


def _resize(torch: Any, told: Mapping[str, Any], x: Any, _: Any = None, scales: Any = None, sizes: Any = None) -> Any:
    plain = told.get("coordinate_transformation_mode", "half_pixel") == "asymmetric" and told.get("mode") == "nearest"
    wanted = sizes[2:] if sizes else [int(dim * scale) for dim, scale in zip(x.shape[2:], scales[2:], strict=True)]
    if not plain or any(new % old for new, old in zip(wanted, x.shape[2:], strict=True)):
        raise NotImplementedError("a resizing that is not by whole factors to the nearest, in PyTorch")
    return torch.nn.functional.interpolate(x, size=wanted, mode="nearest")


def _constant(torch: Any, told: Mapping[str, Any]) -> Any:
    for name in ("value", "value_float", "value_floats", "value_int", "value_ints"):
        if name in told:
            dtype = getattr(torch, told["dtype"]) if name == "value" else None
            return torch.tensor(told[name], dtype=dtype)
    raise NotImplementedError(f"a constant by {', '.join(told)}, in PyTorch")


def _attention(torch: Any, told: Mapping[str, Any], q: Any, k: Any, v: Any, mask: Any = None) -> Any:
    """Keys come turned, as the product of scores has them."""
    return torch.nn.functional.scaled_dot_product_attention(
        q, k.transpose(-1, -2), v, attn_mask=mask, scale=told["scale"]
    )


def _divide(torch: Any, told: Mapping[str, Any], a: Any, b: Any) -> Any:
    return a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


#: Inputs that are told as lists (or numbers), since PyTorch does not take them as tensors.
_LISTS: Mapping[str, tuple[int, ...]] = {
    "Reshape": (1,),
    "Expand": (1,),
    "Unsqueeze": (1,),
    "Squeeze": (1,),
    "Slice": (1, 2, 3, 4),
    "ReduceMean": (1,),
    "ReduceSum": (1,),
    "ReduceMax": (1,),
    "Clip": (1, 2),
    "Resize": (1, 2, 3),
    "Dropout": (1, 2),
}

OPERATORS: Mapping[str, Callable[..., Any]] = {
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "BatchNormalization": _norm,
    "LayerNormalization": _layer_norm,
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
    "GlobalAveragePool": lambda torch, told, x: x.mean(dim=(2, 3), keepdim=True),
    "GlobalMaxPool": lambda torch, told, x: x.amax(dim=tuple(range(2, x.ndim)), keepdim=True),
    "ReduceMean": _mean,
    "ReduceSum": _sum,
    "ReduceMax": _reduce_max,
    "Gemm": _gemm,
    "MatMul": lambda torch, told, a, b: a @ b,
    "Linear": lambda torch, told, x, weight, bias: torch.nn.functional.linear(x, weight.t(), bias),
    "SDPA": _attention,
    "Relu": lambda torch, told, x: torch.relu(x),
    "Sigmoid": lambda torch, told, x: torch.sigmoid(x),
    "HardSigmoid": lambda torch, told, x: torch.clamp(told.get("alpha", 0.2) * x + told.get("beta", 0.5), 0.0, 1.0),
    "HardSwish": lambda torch, told, x: torch.nn.functional.hardswish(x),
    "Clip": _clip,
    "Erf": lambda torch, told, x: torch.erf(x),
    "Tanh": lambda torch, told, x: torch.tanh(x),
    "Exp": lambda torch, told, x: torch.exp(x),
    "Sqrt": lambda torch, told, x: torch.sqrt(x),
    "Reciprocal": lambda torch, told, x: torch.reciprocal(x),
    "Pow": lambda torch, told, a, b: a**b,
    "Add": lambda torch, told, a, b: a + b,
    "Sub": lambda torch, told, a, b: a - b,
    "Mul": lambda torch, told, a, b: a * b,
    "Div": _divide,
    "Max": lambda torch, told, a, b: torch.maximum(a, b),
    "Equal": lambda torch, told, a, b: a == b,
    "Where": lambda torch, told, which, a, b: torch.where(which, a, b),
    "Softmax": lambda torch, told, x: torch.softmax(x, told.get("axis", -1)),
    "Gelu": lambda torch, told, x: torch.nn.functional.gelu(x, approximate=told.get("approximate", "none")),
    "Gather": _gather,
    "Concat": lambda torch, told, *x: torch.cat(x, told["axis"]),
    "Expand": lambda torch, told, x, shape: x.expand(torch.broadcast_shapes(x.shape, tuple(shape))),
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Slice": _slice,
    "Cast": _cast,
    "Resize": _resize,
    "Constant": _constant,
    "Transpose": lambda torch, told, x: x.permute(told.get("perm") or tuple(reversed(range(x.ndim)))),
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Identity": lambda torch, told, x: x,
    "Dropout": lambda torch, told, x, *_: x,
}
