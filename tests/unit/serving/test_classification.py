"""The classification extension's strings."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from hone.errors import InvalidRequest
from hone.serving.classification import classify


def test_top_classes_of_each_batch_row_best_first():
    array = np.array([[0.1, 0.7, 0.2], [3, 1, 2]], np.float32)
    top = classify("o", array, 2, ["a", "b", "c"], batched=True)
    assert top.shape == (2, 2)
    assert top.tolist() == [[b"0.700000:1:b", b"0.200000:2:c"], [b"3.000000:0:a", b"2.000000:2:c"]]


def test_without_batch_the_whole_tensor_is_one_row_and_k_is_limited():
    top = classify("o", np.array([[5, -1], [7, 7]], np.int64), 100, [], batched=False)
    assert top.tolist() == [b"7:2", b"7:3", b"5:0", b"-1:1"]


def test_unsigned_and_extreme_integers_keep_their_order():
    top = classify("o", np.array([0, 2**64 - 1, 5], np.uint64), 3, [], batched=False)
    assert top.tolist() == [b"18446744073709551615:1", b"5:2", b"0:0"]
    top = classify("o", np.array([-(2**63), 2**63 - 1], np.int64), 2, [], batched=False)
    assert top.tolist() == [b"9223372036854775807:1", b"-9223372036854775808:0"]


def test_not_a_number_comes_last():
    top = classify("o", np.array([np.nan, 1, 2], np.float16), 3, ["n"], batched=False)
    assert top.tolist() == [b"2.000000:2", b"1.000000:1", b"nan:0:n"]


def test_bfloat16_is_classified_too():
    top = classify("o", np.array([1, 2], ml_dtypes.bfloat16), 1, [], batched=False)
    assert top.tolist() == [b"2.000000:1"]


@pytest.mark.parametrize("dtype", [object, bool])
def test_tensors_without_order_are_refused(dtype):
    with pytest.raises(InvalidRequest, match="output 'o' cannot be classified"):
        classify("o", np.array([b"a", b"b"] if dtype is object else [True, False], dtype), 1, [], batched=False)
