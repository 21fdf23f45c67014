"""What an operator needs to work over blocks of channels, and what it costs so and plain.

Costs are rough nanoseconds of one thread: they weigh layouts against each other, nothing else.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from math import prod
from typing import Any

from tvm import relax

from hone.compiler.phases.blocks import block_width, blocked_type
from hone.compiler.phases.types import ints, tensor_type
from hone.compiler.target import CpuTarget
from hone.compiler.templates.registry import templates_for
from hone.compiler.workload import TensorType, Workload

#: Operators that compute each item from the items at the same place of their operands.
ITEMWISE = frozenset(
    {
        *("relax.add", "relax.subtract", "relax.multiply", "relax.divide", "relax.maximum", "relax.minimum"),
        *("relax.power", "relax.abs", "relax.negative", "relax.exp", "relax.log", "relax.sqrt", "relax.rsqrt"),
        *("relax.square", "relax.sigmoid", "relax.tanh", "relax.erf", "relax.sign", "relax.floor", "relax.ceil"),
        *("relax.round", "relax.clip", "relax.nn.relu", "relax.nn.relu6", "relax.nn.leakyrelu", "relax.nn.silu"),
        *("relax.nn.gelu", "relax.nn.softplus"),
    }
)
#: Infinite or no number at zero, which is what fills blocks up: then they stay plain.
_UNBOUNDED = frozenset({"relax.log", "relax.rsqrt", "relax.power"})
_POOLINGS = {"relax.nn.max_pool2d": "max", "relax.nn.avg_pool2d": "mean"}
#: Over rows and columns at once: what a window over the whole image does.
_REDUCTIONS = {"relax.mean": "mean", "relax.sum": "sum", "relax.max": "max", "relax.min": "min"}
#: Fewer input channels than this are read plain by a convolution: a picture's three.
_FEW_CHANNELS = 5

_CALL_NS = 300
#: Bytes a nanosecond: of vectors that run along memory, and of a change of layout.
_STREAM, _TRANSFORM = 20.0, 8.0
#: Items a nanosecond in an operation on values in registers.
_ARITHMETIC = 30.0
#: Multiply-adds a nanosecond, by a template and by a schedule for anything.
_TEMPLATE, _PLAIN = 80.0, 8.0


@dataclass(frozen=True, slots=True)
class Form:
    """The blocked form of an operator. `blocked` are the operands that it takes in blocks; others it takes plain."""

    blocked: tuple[Any, ...]
    plain_ns: int
    blocked_ns: int
    workload: Workload | None = None
    """What a template is asked for; None: Relax's own operator does it."""


def transform_ns(tensor: TensorType) -> int:
    """Of one change of layout."""
    _, _, h, w = tensor.shape
    return _CALL_NS // 2 if h * w == 1 else _CALL_NS + int(8 * tensor.num_elements / _TRANSFORM)


def form_of(call: Any, var: Any, target: CpuTarget, prepared: Set[Any] = frozenset()) -> Form | None:
    """None where the operator has no blocked form, or no template for it. `prepared` are known at load time."""
    result = tensor_type(var)
    if result is None or len(result.shape) != 4 or result.dtype != "float32":
        return None
    name = str(call.op.name)
    if name in ITEMWISE:
        return _itemwise(call, result, target)
    if name == "relax.concat":
        return _concatenation(call, result, target)
    data = tensor_type(call.args[0])
    if data is None or len(data.shape) != 4 or data.dtype != "float32":
        return None
    if name == "relax.nn.conv2d":
        return _convolution(call, data, result, target, prepared)
    if name == "relax.nn.conv2d_transpose":
        return _transposed(call, data, result, target, prepared)
    if name == "relax.image.resize2d":
        return _resize(call, data, result, target)
    if name in _POOLINGS:
        return _pooling(call, data, result, target)
    if name in _REDUCTIONS and call.attrs.axis is not None and bool(call.attrs.keepdims):
        whole = sorted(axis % 4 for axis in ints(call.attrs.axis)) == [2, 3]
        return _over_image(_REDUCTIONS[name], call, data, result, target) if whole else None
    if name == "relax.nn.adaptive_avg_pool2d" and result.shape[2:] == (1, 1):
        return _over_image("mean", call, data, result, target)
    return None


def _itemwise(call: Any, result: TensorType, target: CpuTarget) -> Form | None:
    same = [argument for argument in call.args if tensor_type(argument) == result]
    if not same:
        return None
    # An operand for each channel is as good in blocks: a gate of squeeze-and-excitation.
    channels = [
        argument
        for argument in call.args
        if isinstance(argument, relax.Var) and is_per_channel(tensor_type(argument), result)
    ]
    factor = _filled(result, target)
    divides = str(call.op.name) in _UNBOUNDED or (str(call.op.name) == "relax.divide" and _is_tensor(call.args[1]))
    if factor > 1 and divides:
        return None
    # It rides along with what makes an operand: its own are arithmetic, and memory for the others.
    ns = result.num_elements / _ARITHMETIC + 4 * result.num_elements * (len(same) - 1) / _STREAM
    return Form((*(a for a in same if isinstance(a, relax.Var)), *channels), int(ns), int(ns * factor))


def _is_tensor(operand: Any) -> bool:
    tensor = tensor_type(operand)
    return tensor is not None and tensor.num_elements > 1


def is_per_channel(tensor: TensorType | None, result: TensorType) -> bool:
    if tensor is None or len(tensor.shape) != 4 or tensor == result:
        return False
    n, c, h, w = tensor.shape
    return c == result.shape[1] and c > 1 and (h, w) == (1, 1) and n in (1, result.shape[0])


def _pooling(call: Any, data: TensorType, result: TensorType, target: CpuTarget) -> Form | None:
    attrs = call.attrs
    window, strides, dilation = (ints(value) for value in (attrs.pool_size, attrs.strides, attrs.dilation))
    padding = ints(attrs.padding)
    kind, counts_padding = _POOLINGS[str(call.op.name)], bool(attrs.count_include_pad)
    reached = [
        (out - 1) * stride + (size - 1) * step + 1
        for out, stride, size, step in zip(result.shape[2:], strides, window, dilation, strict=True)
    ]
    padded = [size + padding[at] + padding[at + 2] for at, size in enumerate(data.shape[2:])]
    if str(attrs.layout) != "NCHW":
        return None
    if kind == "mean" and counts_padding and any(end > size for end, size in zip(reached, padded, strict=True)):
        return None  # a last window beyond the padding counts only what is padded
    attributes = (
        ("counts_padding", int(counts_padding)),
        ("dilation", dilation),
        ("kind", kind),
        ("padding", padding),
        ("strides", strides),
        ("window", window),
    )
    ns = _CALL_NS + 4 * result.num_elements * prod(window) / _STREAM
    return _lane_by_lane("pool2d", attributes, ns, call, data, result, target)


def _over_image(kind: str, call: Any, data: TensorType, result: TensorType, target: CpuTarget) -> Form | None:
    ns = _CALL_NS + 4 * data.num_elements / _STREAM
    return _lane_by_lane("global_pool", (("kind", kind),), ns, call, data, result, target)


def _lane_by_lane(
    op: str,
    attributes: tuple[tuple[str, Any], ...],
    ns: float,
    call: Any,
    data: TensorType,
    result: TensorType,
    target: CpuTarget,
    *,
    slowdown: float = 2.0,
) -> Form | None:
    """What treats every channel alike and alone; `ns` is the time without filling blocks up, plain it takes longer."""
    width = block_width(result.shape[1], target)
    workload = Workload(op, (blocked_type(data, width),), blocked_type(result, width), attributes)
    if not templates_for(workload, target):
        return None
    return Form((call.args[0],), int(slowdown * ns), int(ns * _filled(result, target)), workload)


def _convolution(call: Any, data: TensorType, result: TensorType, target: CpuTarget, prepared: Set[Any]) -> Form | None:
    attrs, weight = call.attrs, tensor_type(call.args[1])
    if weight is None or (str(attrs.data_layout), str(attrs.kernel_layout)) != ("NCHW", "OIHW"):
        return None
    if str(attrs.out_layout) not in ("", "NCHW"):
        return None
    groups, channels = int(attrs.groups), data.shape[1]
    width = block_width(result.shape[1], target)
    plain_data = groups == 1 and channels < _FEW_CHANNELS
    inside = 0 if plain_data else block_width(channels, target)
    attributes = {
        "strides": ints(attrs.strides),
        "padding": ints(attrs.padding),
        "dilation": ints(attrs.dilation),
        "groups": groups,
        "data_layout": f"NCHW{inside}c" if inside else "NCHW",
        "kernel_layout": "OIHW",
        "out_layout": f"NCHW{width}c",
        "weights": (1,) if call.args[1] in prepared else (),
    }
    depthwise = groups > 1 and groups == channels == result.shape[1]
    workload = Workload(
        "depthwise_conv2d" if depthwise else "conv2d",
        (blocked_type(data, inside) if inside else data, weight),
        blocked_type(result, width),
        tuple(sorted(attributes.items())),
    )
    if not templates_for(workload, target):
        return None
    work = result.num_elements * prod(weight.shape[1:])
    plain = _CALL_NS + work / _PLAIN
    blocked = _CALL_NS + work * _filled(result, target) / _TEMPLATE
    return Form(() if plain_data else (call.args[0],), int(plain), int(blocked), workload)


def _transposed(call: Any, data: TensorType, result: TensorType, target: CpuTarget, prepared: Set[Any]) -> Form | None:
    attrs, weight = call.attrs, tensor_type(call.args[1])
    if weight is None or int(attrs.groups) != 1:
        return None
    if (str(attrs.data_layout), str(attrs.kernel_layout)) != ("NCHW", "IOHW"):
        return None
    inside, width = block_width(data.shape[1], target), block_width(result.shape[1], target)
    attributes = {
        "strides": ints(attrs.strides),
        "padding": ints(attrs.padding),
        "dilation": ints(attrs.dilation),
        "weights": (1,) if call.args[1] in prepared else (),
    }
    workload = Workload(
        "conv2d_transpose",
        (blocked_type(data, inside), weight),
        blocked_type(result, width),
        tuple(sorted(attributes.items())),
    )
    if not templates_for(workload, target):
        return None
    work = data.num_elements * prod(weight.shape[1:])
    blocked = _CALL_NS + work * _filled(result, target) / _TEMPLATE + 4 * result.num_elements / _STREAM
    return Form((call.args[0],), int(_CALL_NS + work), int(blocked), workload)


def _concatenation(call: Any, result: TensorType, target: CpuTarget) -> Form | None:
    """Of channels, whatever their blocks."""
    parts = list(call.args[0].fields) if isinstance(call.args[0], relax.Tuple) else []
    types = [tensor_type(part) for part in parts]
    if not parts or call.attrs.axis is None or int(call.attrs.axis) not in (1, -3) or None in types:
        return None
    if not all(isinstance(part, relax.Var) for part in parts):
        return None
    channels = tuple(t.shape[1] for t in types if t is not None)
    return _stacked(tuple(parts), tuple(t for t in types if t), channels, (1,) * len(parts), result, target)


def _resize(call: Any, data: TensorType, result: TensorType, target: CpuTarget) -> Form | None:
    """By whole factors, to the nearest pixel (each is repeated) or linear."""
    attrs = call.attrs
    (_, _, h, w), (_, _, out_h, out_w) = data.shape, result.shape
    if str(attrs.layout) != "NCHW" or out_h % h or out_w % w:
        return None
    method, mode, rounding = (
        str(value) for value in (attrs.method, attrs.coordinate_transformation_mode, attrs.rounding_method)
    )
    factors = (out_h // h, out_w // w)
    if method == "nearest_neighbor":
        repeats = rounding == "floor" if mode == "asymmetric" else mode == "half_pixel" and rounding.startswith("round")
        if factors[0] != factors[1] or not repeats:
            return None
        return _stacked((call.args[0],), (data,), (data.shape[1],), factors[:1], result, target)
    half_pixel = mode == "half_pixel" or (mode == "pytorch_half_pixel" and min(out_h, out_w) > 1)
    if method != "linear" or not (half_pixel or mode == "asymmetric"):
        return None
    ns = _CALL_NS + 16 * result.num_elements / _STREAM
    attributes = (("factors", factors), ("half_pixel", int(half_pixel)))
    # Plain, each output works out its neighbours and looks them up.
    return _lane_by_lane("upsample_linear", attributes, ns, call, data, result, target, slowdown=10.0)


def _stacked(
    parts: tuple[Any, ...],
    types: tuple[TensorType, ...],
    channels: tuple[int, ...],
    factors: tuple[int, ...],
    result: TensorType,
    target: CpuTarget,
) -> Form | None:
    workload = Workload(
        "stack_channels",
        tuple(blocked_type(t, block_width(t.shape[1], target)) for t in types),
        blocked_type(result, block_width(result.shape[1], target)),
        (("channels", channels), ("factors", factors)),
    )
    if not templates_for(workload, target):
        return None
    ns = int(_CALL_NS + 8 * result.num_elements / _STREAM)
    return Form(parts, ns, ns, workload)


def _filled(result: TensorType, target: CpuTarget) -> float:
    """How much larger the blocks are than what they hold."""
    width = block_width(result.shape[1], target)
    return -(-result.shape[1] // width) * width / result.shape[1]
