from __future__ import annotations

import os

import ml_dtypes
import numpy as np

from hone.tuning.inputs import InputSet
from hone.tuning.samples import MAX_SETS, pack, repeated_rows, unpack


def passed_through(sets):
    descriptor = pack(sets)
    try:
        return unpack(descriptor)
    finally:
        os.close(descriptor)


def test_arrays_arrive_as_they_were():
    arrays = {
        "F": np.arange(6, dtype=np.float32).reshape(2, 3).T,
        "B": np.array([1.5, -2.0], ml_dtypes.bfloat16),
        "I": np.array([[1]], np.int64),
        "T": np.array([True, False]),
        "E": np.zeros((0, 4), np.float16),
        "S": np.array(3.0, np.float64),
    }
    [found] = passed_through([InputSet("größer", arrays)])
    assert found.name == "größer"
    assert found.arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found.arrays[name].dtype == array.dtype
        assert found.arrays[name].shape == array.shape
        assert np.array_equal(found.arrays[name], array)


def test_texts_and_too_much_are_left_behind():
    texts = InputSet("texts", {"T": np.array([b"a"], object)})
    numbers = InputSet("numbers", {"N": np.zeros(3, np.float32)})
    assert [s.name for s in passed_through([texts, *[numbers] * 20])] == ["numbers"] * MAX_SETS


def test_it_can_be_read_more_than_once():
    descriptor = pack([InputSet("a", {"N": np.ones(3, np.float32)})])
    assert len(unpack(descriptor)) == len(unpack(descriptor)) == 1
    os.close(descriptor)


def test_rows_are_repeated_or_cut():
    arrays = {"A": np.array([[1, 2], [3, 4]])}
    assert repeated_rows(arrays, 3)["A"].tolist() == [[1, 2], [3, 4], [1, 2]]
    assert repeated_rows(arrays, 1)["A"].tolist() == [[1, 2]]
