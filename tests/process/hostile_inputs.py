"""Runs operators on inputs that only an attacker would send, each with its name told first: the last name is who died.

    python -m tests.process.hostile_inputs FOLDER

Every operator whose result's shape, place or count an input decides, with numbers at the ends of their types.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

from hone.engines.onnxruntime import OnnxRuntimeEngine, SessionSettings
from hone.errors import EngineError

#: What a session asks for beyond this fails here, as it would on a machine without the memory.
_MEMORY_BYTES = 8 << 30
_WIDTHS = (np.int8, np.int16, np.int32, np.int64)
_ENDS = (-(2**63), -(2**63) + 1, -5, 0, 99, 2**40, 2**63 - 1)
_ODD = (np.nan, np.inf, -np.inf, 1e30, -1.0, 0.0, 1e-30)

Case = tuple[str, str, list[Any], dict[str, Any], int]


def image(*shape: int) -> Any:
    return np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)


def whole(*numbers: int) -> Any:
    return np.array(numbers, np.int64)


def scalar(number: float, dtype: Any = np.int64) -> Any:
    return np.array(number, dtype)


def cases() -> Iterator[Case]:
    yield from _arithmetic()
    for number in _ENDS:
        for operator, inputs, attributes, *opset in _integers(number):
            yield f"{operator} {attributes} {number}", operator, inputs, attributes, *(opset or [21])
    for number in _ODD:
        for operator, inputs, attributes in _floats(number):
            yield f"{operator} {attributes} {number}", operator, inputs, attributes, 21
    for operator, inputs, attributes in _shapes():
        yield f"{operator} {[array.shape for array in inputs]}", operator, inputs, attributes, 21


def _arithmetic() -> Iterator[Case]:
    for dtype in _WIDTHS:
        least = np.iinfo(dtype).min
        for shape in ((), (41,)):
            for by in (-1, 0):
                pair = [np.full(shape, least, dtype), np.full(shape, by, dtype)]
                yield f"Div {dtype.__name__}{shape} by {by}", "Div", pair, {}, 21
                for fmod in (0, 1):
                    yield f"Mod {dtype.__name__}{shape} by {by}, {fmod}", "Mod", pair, {"fmod": fmod}, 21
        for operator in ("Abs", "Neg"):
            yield f"{operator} {dtype.__name__}", operator, [np.full(41, least, dtype)], {}, 21
        for power in (least, -1, 0, np.iinfo(dtype).max):
            pair = [np.array([least, -1, 0, 2], dtype), np.full(4, power, dtype)]
            yield f"Pow {dtype.__name__} {power}", "Pow", pair, {}, 21
    for dtype in (np.uint8, np.uint16, np.uint32, np.uint64):
        for direction in ("LEFT", "RIGHT"):
            shift = [np.full(41, 7, dtype), np.full(41, 200, dtype)]
            yield f"BitShift {dtype.__name__} {direction}", "BitShift", shift, {"direction": direction}, 21
        for operator in ("Div", "Mod"):
            yield f"{operator} {dtype.__name__} by 0", operator, [np.full(41, 7, dtype), np.zeros(41, dtype)], {}, 21


def _integers(n: int) -> Iterator[Any]:
    data, plane = image(2, 3, 4), image(1, 1, 2, 2)
    for operator in ("Gather", "GatherElements"):
        yield operator, [data, whole(n).reshape(1, 1, 1)], {}
    yield "GatherND", [data, whole(n, n).reshape(1, 2)], {}
    yield "ScatterND", [data, whole(n).reshape(1, 1), data[:1]], {}
    yield "ScatterElements", [data, whole(n).reshape(1, 1, 1), data[:1, :1, :1]], {}
    yield "TopK", [data, whole(n)], {}
    yield "OneHot", [whole(0, n), whole(5), image(2)], {}
    yield "OneHot", [whole(0, 1), whole(n), image(2)], {"axis": 0}
    yield "Reshape", [data, whole(n, -1)], {}
    yield "Reshape", [data, whole(n, n, 24)], {"allowzero": 1}
    yield "Expand", [data, whole(n, n, 1, 1, 1)], {}
    yield "Tile", [data, whole(n, n, 1)], {}
    yield "ConstantOfShape", [whole(n, n)], {}
    yield "ConstantOfShape", [whole(n, 0)], {}
    yield "Slice", [data, whole(0), whole(9), whole(2), whole(n)], {}
    yield "Slice", [data, whole(0), whole(9), whole(n), whole(1)], {}
    yield "Slice", [data, whole(n), whole(n), whole(2), whole(-1)], {}
    for mode in ("constant", "reflect", "edge", "wrap"):
        yield "Pad", [data, whole(0, 0, n, 0, 0, n)], {"mode": mode}
        yield "Pad", [data, whole(n, 0, 0, 0, 0, 0)], {"mode": mode}
    for operator in ("Unsqueeze", "Squeeze", "ReduceSum", "ReduceMax", "Split"):
        yield operator, [data[:1], whole(n)], {}
    for operator in ("CumSum", "Trilu"):
        yield operator, [data, scalar(n)], {}
    yield "ReverseSequence", [data, whole(n, n, n)], {}
    yield "CenterCropPad", [data, whole(n, 3, 4)], {}
    yield "Range", [scalar(0), scalar(n), scalar(1)], {}
    yield "Range", [scalar(-(2**63)), scalar(2**63 - 1), scalar(n)], {}
    yield "NonMaxSuppression", [image(1, 5, 4), image(1, 1, 5), whole(n)], {}
    unpool = {"kernel_shape": [2, 2], "strides": [2, 2]}
    yield "MaxUnpool", [plane, np.full((1, 1, 2, 2), n)], unpool
    yield "MaxUnpool", [plane, np.zeros((1, 1, 2, 2), np.int64), whole(1, 1, n, n)], unpool
    yield "RoiAlign", [image(1, 1, 4, 4), image(1, 4), whole(n)], {}
    yield "AffineGrid", [image(1, 2, 3), whole(1, 1, n, 2)], {}
    yield "Col2Im", [image(1, 5, 5), whole(n, 5), whole(1, 5)], {}
    yield "Col2Im", [image(1, 5, 5), whole(5, 5), whole(n, 5)], {}
    yield "DFT", [image(1, 5, 1), scalar(n)], {}
    yield "DFT", [image(1, 5, 1), scalar(5), scalar(n)], {}
    yield "STFT", [image(1, 32, 1), scalar(n), image(8)], {}
    yield "HannWindow", [scalar(n)], {}
    yield "MelWeightMatrix", [scalar(n), scalar(16), scalar(8000), scalar(0, "f4"), scalar(4000, "f4")], {}
    yield "MelWeightMatrix", [scalar(8), scalar(n), scalar(8000), scalar(0, "f4"), scalar(4000, "f4")], {}
    yield "TensorScatter", [image(1, 1, 4, 4), image(1, 1, 1, 4), whole(n)], {}, 24
    yield "NegativeLogLikelihoodLoss", [image(2, 3), whole(n, 0), image(3)], {}
    yield "SoftmaxCrossEntropyLoss", [image(2, 3), whole(n, 0)], {}
    for operator, gates in (("LSTM", 4), ("GRU", 3), ("RNN", 1)):
        lengths = np.full(2, np.clip(n, -(2**31), 2**31 - 1), np.int32)
        recurrent = [image(3, 2, 5), image(1, gates * 4, 5), image(1, gates * 4, 4), image(1, 2 * gates * 4), lengths]
        yield operator, recurrent, {"hidden_size": 4}


def _floats(n: float) -> Iterator[tuple[str, list[Any], dict[str, Any]]]:
    plane = image(1, 1, 4, 4)
    for mode in ("nearest", "linear", "cubic"):
        yield "Resize", [plane, image(0), np.array([1, 1, n, n], "f4")], {"mode": mode}
        for padding in ("zeros", "border", "reflection"):
            yield "GridSample", [plane, np.full((1, 2, 2, 2), n, "f4")], {"mode": mode, "padding_mode": padding}
    crop = {"mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize"}
    yield "Resize", [plane, np.array([0, 0, n, n, 1, 1, n, 1], "f4"), np.array([1, 1, 2, 2], "f4")], crop
    for mode in ("avg", "max"):
        yield "RoiAlign", [plane, np.array([[0, n, n, 2]], "f4"), whole(0)], {"mode": mode, "sampling_ratio": 2}
        yield "RoiAlign", [plane, np.array([[0, 0, n, n]], "f4"), whole(0)], {"mode": mode}
    yield "MaxRoiPool", [plane, np.array([[0, 0, 0, n, n]], "f4")], {"pooled_shape": [2, 2]}
    yield "MaxRoiPool", [plane, np.array([[n, 0, 0, 2, 2]], "f4")], {"pooled_shape": [2, 2]}
    yield "DeformConv", [image(1, 1, 3, 3), image(1, 1, 2, 2), np.full((1, 8, 2, 2), n, "f4")], {}
    yield "Range", [scalar(0, "f4"), scalar(10, "f4"), scalar(n, "f4")], {}
    yield "Range", [scalar(0, "f4"), scalar(n, "f4"), scalar(1, "f4")], {}
    boxes = [np.full((1, 5, 4), n, "f4"), np.full((1, 1, 5), n, "f4"), whole(3), *[np.array([n], "f4")] * 2]
    yield "NonMaxSuppression", boxes, {}
    yield "Cast", [np.full(41, n, "f4")], {"to": onnx.TensorProto.INT32}
    yield "QuantizeLinear", [np.full(41, n, "f4"), scalar(n, "f4"), scalar(0, "u1")], {}
    yield "Multinomial", [np.full((1, 5), n, "f4")], {"sample_size": 3}
    for operator in ("DynamicQuantizeLinear", "ArgMax", "Unique", "Hardmax", "NonZero"):
        yield operator, [np.full((1, 5), n, "f4")], {}


def _shapes() -> Iterator[tuple[str, list[Any], dict[str, Any]]]:
    """Inputs whose sizes do not fit each other, or that are empty."""
    data, none = image(2, 3, 4), np.zeros(0, np.int64)
    yield "Slice", [data, whole(0, 0), whole(9), whole(2), whole(1)], {}
    yield "Slice", [data, whole(0, 0), whole(9, 9), whole(2, 2), whole(1, 1)], {}
    yield "TopK", [data, none], {}
    yield "OneHot", [whole(0, 1), none, image(2)], {}
    yield "OneHot", [whole(0, 1), whole(5), image(0)], {}
    yield "Pad", [data, none], {}
    for mode in ("reflect", "edge", "wrap"):
        yield "Pad", [image(0), whole(1, 1)], {"mode": mode}
    for operator in ("CumSum", "Trilu", "Tile", "Reshape", "Expand", "Split"):
        yield operator, [data, none], {}
    yield "ReverseSequence", [data, whole(1)], {}
    yield "ScatterND", [data, whole(0, 1).reshape(2, 1), data[:1]], {}
    yield "ScatterElements", [data, np.zeros((5, 5, 5), np.int64), image(5, 5, 5)], {}
    yield "ScatterElements", [data, np.zeros((2, 3, 4), np.int64), image(1, 1, 1)], {}
    yield "GatherElements", [data, np.zeros((5, 5, 5), np.int64)], {}
    yield "GatherND", [data, np.zeros((3, 1), np.int64)], {"batch_dims": 1}
    yield "Compress", [data, np.ones(99, bool)], {"axis": 1}
    yield "Conv", [image(1, 1, 1, 1), image(1, 1, 3, 3)], {}
    yield "Conv", [image(1, 1, 4, 4), image(4, 1, 3, 3), image(1)], {}
    yield "ConvTranspose", [image(1, 1, 4, 4), image(1, 4, 3, 3), image(1)], {}
    for operator in ("MaxPool", "AveragePool"):
        yield operator, [image(1, 1, 1, 1)], {"kernel_shape": [3, 3]}
        yield operator, [image(1, 1, 0, 4)], {"kernel_shape": [2, 2]}
    yield "BatchNormalization", [image(1, 4, 4, 4), *[image(2)] * 4], {}
    for operator in ("InstanceNormalization", "LayerNormalization"):
        yield operator, [image(1, 4, 4, 4), image(2), image(2)], {}
    yield "PRelu", [image(1, 4, 4, 4), image(3)], {}
    yield "Gemm", [image(2, 3), image(3, 4), image(5)], {}
    for operator in ("ArgMax", "ReduceMax", "ReduceMean", "Softmax", "Det", "GlobalAveragePool"):
        yield operator, [image(2, 0)], {}
    yield "ReduceMean", [np.zeros((2, 0), np.int32), whole(1)], {}


_NUM_OUTPUTS = {"TopK": 2, "DynamicQuantizeLinear": 3}


def run(case: Case, folder: Path) -> str:
    """How it ended, in a word."""
    _, operator, inputs, attributes, opset = case
    names = [f"i{place}" for place in range(len(inputs))]
    outputs = [f"o{place}" for place in range(_NUM_OUTPUTS.get(operator, 1))]
    graph = helper.make_graph(
        [helper.make_node(operator, names, outputs, **attributes)],
        "g",
        [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), [None] * array.ndim)
            for name, array in zip(names, inputs, strict=True)
        ],
        [onnx.ValueInfoProto(name=name) for name in outputs],
    )
    path = folder / "model.onnx"
    path.write_bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10).SerializeToString()
    )
    try:
        engine = OnnxRuntimeEngine.load(path, SessionSettings(num_threads=1))
    except EngineError:
        return "not loaded"
    try:
        engine.run(dict(zip(names, inputs, strict=True)), outputs)
    except EngineError:
        return "refused"
    return "answered"


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    for case in cases():
        print(case[0], end=": ", flush=True)
        print(run(case, Path(sys.argv[1])), flush=True)


if __name__ == "__main__":
    main()
