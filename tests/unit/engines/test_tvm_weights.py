"""Reading initializers from the bytes of an ONNX file, in every way that the format stores them."""

from __future__ import annotations

import gc
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from hone.engines import protobuf
from hone.engines.onnx_weights import read_initializers
from hone.errors import EngineError

RNG = np.random.default_rng(0)
ARRAYS = {
    "float32": RNG.standard_normal((3, 4)).astype(np.float32),
    "float64": RNG.standard_normal((2, 2)),
    "float16": RNG.standard_normal(5).astype(np.float16),
    "bfloat16": RNG.standard_normal(5).astype(ml_dtypes.bfloat16),
    "int64": np.array([[-1, 2**62, -(2**63)]], np.int64),
    "int32": np.array([-7, 7], np.int32),
    "int8": np.array([-128, 127], np.int8),
    "uint8": np.array([0, 255], np.uint8),
    "uint64": np.array([2**64 - 1], np.uint64),
    "bool": np.array([True, False, True]),
    "scalar": np.array(2.5, np.float32),
    "empty": np.empty((0, 3), np.float32),
}


def save(path: Path, tensors) -> Path:
    graph = helper.make_graph([], "weights", [], [], tensors)
    path.write_bytes(helper.make_model(graph).SerializeToString())
    return path


@pytest.mark.parametrize("name", ARRAYS)
def test_raw_data(tmp_path, name):
    path = save(tmp_path / "model.onnx", [numpy_helper.from_array(array, key) for key, array in ARRAYS.items()])
    got = read_initializers(path, [name])[name]
    assert (got.dtype, got.shape) == (ARRAYS[name].dtype, ARRAYS[name].shape)
    np.testing.assert_array_equal(got, ARRAYS[name])


@pytest.mark.parametrize(
    ("kind", "values", "dtype"),
    [
        (TensorProto.FLOAT, [1.5, -2.5], np.float32),
        (TensorProto.DOUBLE, [1.5, -2.5], np.float64),
        (TensorProto.INT64, [-3, 2**62], np.int64),
        (TensorProto.INT32, [-3, 7], np.int32),
        (TensorProto.INT8, [-3, 7], np.int8),
        (TensorProto.UINT64, [2**64 - 1, 7], np.uint64),
        (TensorProto.BOOL, [1, 0], np.bool_),
        (TensorProto.FLOAT16, [1.5, -2.5], np.float16),
        (TensorProto.BFLOAT16, [1.5, -2.5], ml_dtypes.bfloat16),
    ],
)
def test_fields_of_items(tmp_path, kind, values, dtype):
    tensor = helper.make_tensor("w", kind, [2], values)
    assert not tensor.HasField("raw_data")
    got = read_initializers(save(tmp_path / "model.onnx", [tensor]), ["w"])["w"]
    np.testing.assert_array_equal(got, np.array(values, dtype))
    assert got.dtype == np.dtype(dtype)


def external(tmp_path, location: str) -> Path:
    tensor = TensorProto(name="w", dims=[4], data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", "8")):
        tensor.external_data.add(key=key, value=value)
    return save(tmp_path / "model.onnx", [tensor])


def test_data_beside_the_model(tmp_path):
    weight = np.arange(4, dtype=np.float32)
    (tmp_path / "weights.bin").write_bytes(b"\0" * 8 + weight.tobytes())
    np.testing.assert_array_equal(read_initializers(external(tmp_path, "weights.bin"), ["w"])["w"], weight)


@pytest.mark.parametrize("location", ["../outside.bin", "/etc/hostname", "gone.bin", ""])
def test_data_elsewhere_is_refused(tmp_path, location):
    (tmp_path.parent / "outside.bin").write_bytes(b"\0" * 64)
    with pytest.raises(EngineError, match=r"model\.onnx cannot be read"):
        read_initializers(external(tmp_path, location), ["w"])


def test_what_is_missing_is_named(tmp_path):
    path = save(tmp_path / "model.onnx", [numpy_helper.from_array(ARRAYS["int8"], "here")])
    with pytest.raises(EngineError, match=r"no initializer 'gone' \(1 of 2 missing\)"):
        read_initializers(path, ["here", "gone"])


@pytest.mark.parametrize("content", [b"", b"\xff" * 40, b"not a model at all"])
def test_a_file_that_is_no_model(tmp_path, content):
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(EngineError):
        read_initializers(path, ["w"])


def test_every_truncation_is_an_error(tmp_path):
    whole = save(tmp_path / "model.onnx", [numpy_helper.from_array(ARRAYS["float32"], "w")]).read_bytes()
    onnx.load_model_from_string(whole)
    path = tmp_path / "cut.onnx"
    end_of_weight = whole.index(ARRAYS["float32"].tobytes()) + ARRAYS["float32"].nbytes
    for length in range(1, end_of_weight):
        path.write_bytes(whole[:length])
        with pytest.raises(EngineError):
            read_initializers(path, ["w"])


def test_a_file_that_is_overwritten_in_place_does_not_end_the_process(tmp_path):
    """A mapping of a file that becomes shorter is a trap: whoever reads it gets SIGBUS."""
    path = save(tmp_path / "model.onnx", [numpy_helper.from_array(ARRAYS["float32"], "w")])
    arrays = read_initializers(path, ["w"])
    path.write_bytes(b"")
    np.testing.assert_array_equal(arrays["w"], ARRAYS["float32"])
    assert str(path) not in Path("/proc/self/maps").read_text(encoding="utf-8")


def test_a_large_file_is_mapped_only_while_arrays_live(tmp_path, monkeypatch):
    monkeypatch.setattr(protobuf, "_MAX_READ_BYTES", 0)
    path = save(tmp_path / "model.onnx", [numpy_helper.from_array(ARRAYS["float32"], "w")])
    arrays = read_initializers(path, ["w"])
    assert not arrays["w"].flags.writeable
    assert str(path) in Path("/proc/self/maps").read_text(encoding="utf-8")
    arrays.clear()
    gc.collect()
    assert str(path) not in Path("/proc/self/maps").read_text(encoding="utf-8")
