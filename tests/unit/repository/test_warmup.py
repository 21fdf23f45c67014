from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.errors import ConfigError
from hone.repository import complete, warmup_samples
from hone.repository.datatypes import config_datatype, datatype_name
from hone.repository.warmup import _parse_bytes
from hone.types import NUMPY_DTYPES, TensorSpec

OUT = [TensorSpec("y", "FP32", (-1, 1))]


def samples(disk, warmup, inputs, outputs=OUT, text="max_batch_size: 4 "):
    disk.model("m", text + warmup)
    definition = disk.repository.read("m")
    return warmup_samples(definition, complete(definition.config, inputs, outputs, model="m"), inputs)


def one(value, key="x", batch_size=2, more=""):
    return (
        f"model_warmup {{ name: 'w' batch_size: {batch_size} {more} inputs {{ key: '{key}' value {{ {value} }} }} }} "
    )


def refused(*args, **kwargs):
    with pytest.raises(ConfigError) as caught:
        samples(*args, **kwargs)
    return caught.value


X = [TensorSpec("x", "FP32", (-1, 2, 3))]


def test_zero_data(disk):
    (sample,) = samples(disk, one("data_type: TYPE_FP32 dims: [ 2, 3 ] zero_data: true"), X)
    assert (sample.name, sample.count, list(sample.inputs)) == ("w", 1, ["x"])
    array = sample.inputs["x"]
    assert (array.shape, array.dtype, array.any()) == ((2, 2, 3), np.float32, False)
    assert array.flags.c_contiguous and array.flags.writeable


def test_count_and_batch_size_zero(disk):
    value = "data_type: TYPE_FP32 dims: [ 2, 3 ] zero_data: true"
    made = samples(disk, one(value, batch_size=0) + one(value, more="count: 5"), X)
    assert [sample.count for sample in made] == [5]


@pytest.mark.parametrize("datatype", sorted(NUMPY_DTYPES))
def test_random_data_of_every_datatype(disk, datatype):
    name = datatype_name(config_datatype(datatype))
    inputs = [TensorSpec("x", datatype, (-1, 50))]
    (sample,) = samples(disk, one(f"data_type: {name} dims: [ 50 ] random_data: true"), inputs)
    array = sample.inputs["x"]
    assert (array.shape, array.dtype) == ((2, 50), NUMPY_DTYPES[datatype])
    if datatype == "BYTES":
        assert set(array.flat) == {b""}
    else:
        assert len({float(item) for item in array.flat}) > 1
        assert np.isfinite(array.astype(np.float64)).all()


def test_without_batching_dims_are_the_whole_shape(disk):
    inputs = [TensorSpec("x", "INT32", (2, 3)), TensorSpec("s", "FP32", ())]
    warmup = (
        "model_warmup { batch_size: 1"
        " inputs { key: 'x' value { data_type: TYPE_INT32 dims: [ 2, 3 ] zero_data: true } }"
        " inputs { key: 's' value { data_type: TYPE_FP32 dims: 1 zero_data: true } } }"
    )
    (sample,) = samples(disk, warmup, inputs, [TensorSpec("y", "FP32", (1,))], "")
    assert {name: array.shape for name, array in sample.inputs.items()} == {"x": (2, 3), "s": ()}


def test_reshaped_inputs_have_the_engines_shape(disk):
    text = (
        "max_batch_size: 4 input { name: 'x' data_type: TYPE_FP32 dims: [ 2, -1 ] reshape { shape: [ 2, 1, -1 ] } }"
        "output { name: 'y' data_type: TYPE_FP32 dims: 1 } "
    )
    value = "data_type: TYPE_FP32 dims: [ 2, 5 ] zero_data: true"
    (sample,) = samples(disk, one(value), [TensorSpec("x", "FP32", (-1, 2, 1, -1))], OUT, text)
    assert sample.inputs["x"].shape == (2, 2, 1, 5)
    vector = [TensorSpec("x", "FP32", (-1,))]
    (sample,) = samples(disk, one("data_type: TYPE_FP32 dims: 1 zero_data: true"), vector)
    assert sample.inputs["x"].shape == (2,)


def test_data_from_a_file_is_every_row_of_the_batch(disk):
    row = np.arange(6, dtype=np.float32).reshape(2, 3)
    disk.write("m/warmup/row", row.tobytes())
    (sample,) = samples(disk, one("data_type: TYPE_FP32 dims: [ 2, 3 ] input_data_file: 'row'"), X)
    assert np.array_equal(sample.inputs["x"], np.stack([row, row]))


def test_strings_from_a_file(disk):
    disk.write("m/warmup/row", b"\x03\0\0\0abc" + b"\0\0\0\0")
    inputs = [TensorSpec("x", "BYTES", (-1, 2))]
    (sample,) = samples(disk, one("data_type: TYPE_STRING dims: 2 input_data_file: 'row'"), inputs)
    assert sample.inputs["x"].tolist() == [[b"abc", b""], [b"abc", b""]]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "expected 2 string elements"),
        (b"\x01\0\0\0a", "expected 2 string elements"),
        (b"\x01\0\0\0a" * 3, "unexpected number of string elements 3"),
        (b"\x01\0\0\0a\x02\0\0\0b", "string of length 2 but only 1 bytes available"),
        (b"\x01\0\0\0a\xff\xff\xff\xff", "string of length 4294967295 but only 0 bytes available"),
        (b"\x01\0\0\0a\x01\0", "incomplete string length indicator"),
    ],
)
def test_bad_strings_are_refused(disk, data, reason):
    disk.write("m/warmup/row", data)
    problem = refused(
        disk, one("data_type: TYPE_STRING dims: 2 input_data_file: 'row'"), [TensorSpec("x", "BYTES", (-1, 2))]
    )
    assert problem.field == 'model_warmup[0].inputs["x"].input_data_file'
    assert reason in problem.reason


@pytest.mark.parametrize("size", [0, 23, 25, 48])
def test_a_file_of_the_wrong_size_is_refused(disk, size):
    disk.write("m/warmup/row", bytes(size))
    problem = refused(disk, one("data_type: TYPE_FP32 dims: [ 2, 3 ] input_data_file: 'row'"), X)
    assert problem.reason == f"expected 24 bytes for FP32 [2,3] in 'row', found {size}"


def test_a_missing_file_is_refused(disk):
    problem = refused(disk, one("data_type: TYPE_FP32 dims: [ 2, 3 ] input_data_file: 'row'"), X)
    assert problem.reason == "cannot read 'row' in folder 'warmup': No such file or directory"


@pytest.mark.parametrize(
    ("warmup", "field", "reason"),
    [
        (
            one("data_type: TYPE_FP16 dims: [ 2, 3 ] zero_data: true"),
            ".data_type",
            "expected TYPE_FP32, found TYPE_FP16",
        ),
        (one("data_type: TYPE_FP32 dims: [ 2, 4 ] zero_data: true"), ".dims", "fit [2,3], found [2,4]"),
        (one("data_type: TYPE_FP32 dims: [ 6 ] zero_data: true"), ".dims", "fit [2,3], found [6]"),
    ],
)
def test_samples_must_fit_the_input(disk, warmup, field, reason):
    problem = refused(disk, warmup, X)
    assert problem.field == f'model_warmup[0].inputs["x"]{field}'
    assert reason in problem.reason


def test_names_must_be_the_models_inputs(disk):
    value = "data_type: TYPE_FP32 dims: [ 2, 3 ] zero_data: true"
    assert refused(disk, one(value, key="z"), X).field == 'model_warmup[0].inputs["z"]'
    assert refused(disk, "model_warmup { batch_size: 1 }", X).reason == "missing required input(s) ['x']"


def test_a_sample_that_would_fill_the_memory_is_refused(disk):
    inputs = [TensorSpec("x", "FP32", (-1, -1))]
    problem = refused(disk, one(f"data_type: TYPE_FP32 dims: {2**40} zero_data: true"), inputs)
    assert problem.field == 'model_warmup[0].inputs["x"].dims'
    assert "bytes a sample" in problem.reason


def test_more_than_one_row_needs_batching(disk):
    warmup = one("data_type: TYPE_FP32 dims: [ 1, 2, 3 ] zero_data: true")
    problem = refused(disk, warmup, [TensorSpec("x", "FP32", (1, 2, 3))], [TensorSpec("y", "FP32", (1,))], "")
    assert (problem.field, "found 2" in problem.reason) == ("model_warmup[0].batch_size", True)


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=40), st.integers(1, 4))
def test_any_bytes_are_strings_or_refused(data, expected):
    try:
        array = _parse_bytes("x", data, (expected,), "m", "field")
    except ConfigError:
        return
    assert b"".join(len(item).to_bytes(4, "little") + item for item in array) == data
