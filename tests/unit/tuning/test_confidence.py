from __future__ import annotations

import math

import numpy as np
import pytest

from hone.tuning.confidence import median_of


def test_the_median_is_that_of_the_samples():
    assert median_of([3.0, 1.0, 2.0], 0.01).value == 2.0
    assert median_of([4.0, 1.0, 2.0, 3.0], 0.01).value == 2.5


def test_bounds_are_the_order_statistics_that_the_binomial_distribution_names():
    # Twenty samples, 1 % error: P(Bin(20, 1/2) <= 14) = 0.9793, P(<= 15) = 0.9941, so the upper bound is the 16th.
    found = median_of([float(i) for i in range(1, 21)], 0.01)
    assert (found.low, found.high) == (5.0, 16.0)


def test_too_few_samples_bound_nothing():
    found = median_of([1.0] * 6, 0.01)  # 2**-6 > 1 %
    assert (found.low, found.high) == (-math.inf, math.inf)
    found = median_of([1.0] * 7, 0.01)
    assert (found.low, found.high) == (1.0, 1.0)


def test_no_samples_are_refused():
    with pytest.raises(ValueError, match="at least one sample"):
        median_of([], 0.01)


@pytest.mark.parametrize("num", [10, 21, 40])
def test_each_bound_is_wrong_no_more_often_than_stated(num):
    generator = np.random.default_rng(1)
    error = 0.05
    trials = 2000
    true_median = 1.0  # of a lognormal distribution, which has a long tail as times have
    wrong = [0, 0]
    for _ in range(trials):
        found = median_of(generator.lognormal(0.0, 0.5, num).tolist(), error)
        wrong[0] += found.low > true_median
        wrong[1] += found.high < true_median
    for count in wrong:
        assert count <= trials * error + 4 * math.sqrt(trials * error)
