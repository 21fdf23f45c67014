from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from hone.tuning.confidence import Median
from hone.tuning.gate import check_output, check_outputs, judge, tolerance_of
from hone.tuning.measure import Comparison, NotMeasured
from hone.types import NUMPY_DTYPES


def checked(expected, found, datatype="FP32", tolerance=1e-3):
    dtype = NUMPY_DTYPES[datatype]
    return check_output("OUT", datatype, np.asarray(expected, dtype), np.asarray(found, dtype), tolerance, "set 1")


def test_rounding_passes_and_the_error_is_told():
    check = checked([1.0, 2.0, -3.0], [1.0001, 2.0, -3.0])
    assert check.passed
    assert check.max_error == pytest.approx(1e-4, rel=0.01)


def test_a_wrong_number_is_refused_with_its_place_in_the_story():
    check = checked([1.0, 2.0, -3.0], [1.0, 2.5, -3.0])
    assert not check.passed
    assert check.reason == (
        "output 'OUT' on set 1: 1 of 3 elements are off by more than 0.001, the worst by 0.25 (expected 2, found 2.5)"
    )


def test_small_outputs_are_held_to_their_own_size():
    assert not checked([1e-6, 2e-6], [1.5e-6, 2e-6]).passed, "an absolute tolerance of 1e-3 would let this pass"


def test_small_elements_beside_large_ones_are_held_to_an_absolute_difference():
    boxes_and_score = [500.0, 300.0, 640.0, 0.7]
    assert checked(boxes_and_score, [500.0, 300.0, 640.0, 0.7005]).passed
    assert not checked(boxes_and_score, [500.0, 300.0, 640.0, 0.71]).passed


def test_elements_that_cancel_to_zero_may_differ_by_rounding():
    assert checked([1.0, -1.0, 1e-9], [1.0, -1.0, 3e-7]).passed


def test_all_zero_must_stay_all_zero():
    assert checked([0.0, 0.0], [0.0, 0.0]).passed
    assert not checked([0.0, 0.0], [0.0, 1e-6]).passed


@pytest.mark.parametrize(
    ("expected", "found", "reason"),
    [
        ([np.nan, 1.0], [1.0, 1.0], "expected 1 NaN, found 0"),
        ([1.0, 1.0], [np.nan, 1.0], "expected 0 NaN, found 1"),
        ([np.nan, 1.0], [1.0, np.nan], "elsewhere"),
        ([np.inf, 1.0], [1e30, 1.0], "infinities"),
        ([np.inf, 1.0], [-np.inf, 1.0], "infinities"),
        ([1.0, 1.0], [np.inf, 1.0], "infinities"),
    ],
)
def test_nan_and_infinity_must_match(expected, found, reason):
    check = checked(expected, found)
    assert reason in check.reason
    json.dumps(check.to_json(), allow_nan=False)


def test_noise_is_held_to_its_root_mean_square_and_single_elements_to_ten_times_it():
    generator = np.random.default_rng(0)
    expected = generator.standard_normal(100_000)

    def off_by(error):
        return check_output(
            "OUT", "FP32", *(np.float32(one) for one in (expected, expected + error)), 4e-2, "set 1", noisy=True
        )

    noise = generator.standard_normal(100_000)
    assert off_by(0.03 * noise).passed, "many single elements are off by more than 4 %"
    assert 0.02 < off_by(0.03 * noise).max_error < 0.03
    assert "root mean square" in off_by(0.08 * noise).reason
    one_wrong = np.zeros(100_000)
    one_wrong[7] = 3.0
    assert "1 of 100000 elements are off by more than 0.4" in off_by(one_wrong).reason
    assert off_by(one_wrong).max_error > 4e-2, "what is told is comparable with the tolerance"


def test_low_precision_alone_may_be_noisy():
    expected, found = [np.ones(1000, np.float32)], [np.ones(1000, np.float32)]
    found[0][0] = 1.1
    checked = {
        precision: check_outputs(
            ["A"], {"A": "FP32"}, expected, found, precision=precision, tolerance=0.04, inputs="set 1"
        )[0].passed
        for precision in ("f32", "int8", "bf16")
    }
    assert checked == {"f32": False, "int8": False, "bf16": True}


def test_nan_and_infinity_in_the_same_places_pass():
    assert checked([np.nan, np.inf, -np.inf, 1.0], [np.nan, np.inf, -np.inf, 1.0]).passed
    assert checked([np.nan, np.nan], [np.nan, np.nan]).passed


@pytest.mark.parametrize("datatype", ["INT64", "UINT8", "BOOL"])
def test_integers_and_booleans_are_exact(datatype):
    assert checked([1, 0, 1], [1, 0, 1], datatype, 0.0).passed
    assert not checked([1, 0, 1], [1, 1, 1], datatype, 0.0).passed


def test_half_precision_is_compared_in_double():
    assert checked([60000.0], [60000.0], "FP16", 1e-2).passed
    assert not checked([60000.0], [-60000.0], "FP16", 1e-2).passed
    assert checked([1.0, 2.0], [1.0078125, 2.0], "BF16", 4e-2).passed


def test_shape_and_datatype_must_be_the_same():
    check = check_output("OUT", "FP32", np.zeros((2, 3), np.float32), np.zeros((3, 2), np.float32), 1e-3, "s")
    assert "expected shape [2, 3], found [3, 2]" in check.reason
    check = check_output("OUT", "FP32", np.zeros(3, np.float32), np.zeros(3, np.float64), 1e-3, "s")
    assert "expected FP32, found float64" in check.reason


def test_empty_outputs_pass():
    assert checked([], []).passed


def test_tolerance_by_datatype_precision_and_setting():
    assert tolerance_of("FP32", "f32", None) == 1e-3
    assert tolerance_of("FP32", "bf16", None) == 4e-2
    assert tolerance_of("FP32", "bf16", 1e-5) == 1e-5
    assert tolerance_of("INT32", "f32", 0.5) == 0.0, "a setting does not make integers inexact"


def test_outputs_are_checked_in_order_with_their_own_tolerance():
    checks = check_outputs(
        ["A", "B"],
        {"A": "FP32", "B": "INT64"},
        [np.ones(2, np.float32), np.ones(2, np.int64)],
        [np.ones(2, np.float32), np.ones(2, np.int64)],
        precision="f32",
        tolerance=None,
        inputs="s",
    )
    assert [(c.output, c.tolerance, c.passed) for c in checks] == [("A", 1e-3, True), ("B", 0.0, True)]


def comparison(low: float, ratio: float, high: float) -> Comparison:
    return Comparison(Median(2e6, 2e6, 2e6), Median(2e6 * ratio, 0, 0), Median(ratio, low, high), 40, 40, 0, False)


GOOD = [checked([1.0], [1.0])]


def test_right_and_surely_faster_passes_with_all_numbers():
    verdict = judge(GOOD, comparison(0.48, 0.5, 0.52), 0.03)
    assert verdict.passed
    told = verdict.to_json()
    assert (told["passed"], told["speedup"], told["baseline_ms"], told["tuned_ms"]) == (True, 2.0, 2.0, 1.0)
    json.dumps(told, allow_nan=False)


def test_wrong_outputs_are_refused_however_fast():
    verdict = judge([*GOOD, checked([1.0], [2.0])], comparison(0.1, 0.1, 0.1), 0.03)
    assert "output 'OUT'" in verdict.reason
    assert verdict.comparison is None
    assert verdict.max_error == 1.0


@pytest.mark.parametrize(
    ("measured", "reason"),
    [
        (comparison(0.9, 0.98, 0.99), "not surely faster by 3%: baseline 2 ms, tuned 1.96 ms, speed-up 1.02"),
        (comparison(1.1, 1.2, 1.3), "not faster by 3%: baseline 2 ms, tuned 2.4 ms, speed-up 0.833, over 40 rounds"),
        (NotMeasured("too busy"), "too busy"),
        (None, "it was not measured"),
    ],
)
def test_refusals_of_speed_show_their_numbers(measured, reason):
    verdict = judge(GOOD, measured, 0.03)
    assert not verdict.passed
    assert verdict.reason.startswith(reason)


def test_nothing_passes_unchecked():
    assert not judge([], comparison(0.5, 0.5, 0.5), 0.03).passed


def test_outputs_without_one_finite_number_are_no_evidence():
    blind = [checked([np.nan, np.inf], [np.nan, np.inf])]
    verdict = judge(blind, comparison(0.5, 0.5, 0.5), 0.03)
    assert "nothing was compared" in verdict.reason
    assert "'OUT'" in verdict.reason
    assert verdict.is_certain
    assert judge([*blind, checked([1.0], [1.0])], comparison(0.5, 0.5, 0.5), 0.03).passed, "another set has shown it"
    assert judge([checked([], [])], comparison(0.5, 0.5, 0.5), 0.03).passed, "there is nothing to compare"


@pytest.mark.parametrize(
    ("bounds", "certain"),
    [
        ((0.975, 1.0, 1.02), True),  # at best 2.6 % faster
        ((0.96, 1.0, 1.02), False),  # may be 4 % faster
        ((0.90, 0.96, 0.99), False),  # faster, though not surely by the margin
        ((-np.inf, 2.0, np.inf), False),  # too few rounds to say
    ],
)
def test_a_refusal_is_certain_only_where_the_bounds_leave_no_gain(bounds, certain):
    verdict = judge([checked([1.0], [1.0])], comparison(*bounds), 0.03)
    assert not verdict.passed
    assert verdict.is_certain is certain
    told = dataclasses.replace(comparison(*bounds), provisional=True)
    assert not judge([checked([1.0], [1.0])], told, 0.03).is_certain, "on a busy machine nothing is"


def test_what_was_not_measured_is_not_certain_and_wrong_outputs_are():
    assert not judge([checked([1.0], [1.0])], NotMeasured("too few rounds"), 0.03).is_certain
    assert judge([checked([1.0], [2.0])], None, 0.03).is_certain
