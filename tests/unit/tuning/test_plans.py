"""Instances against threads: both ends are run, in threads of their own, and each objective gets its better one."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from hone.errors import EngineError
from hone.tuning.plans import Plan, better, measure_plans

INPUTS = [{"x": np.zeros(1, np.float32)}]


class Instance:
    def __init__(self, num_threads, log, seconds=0.002):
        self.thread, self.num_threads, self.log, self.seconds = threading.get_ident(), num_threads, log, seconds

    def run(self, inputs, outputs):
        assert threading.get_ident() == self.thread, "an instance belongs to the thread that made it"
        time.sleep(self.seconds)
        self.log.append((self.num_threads, self.thread))
        return []


def test_both_ends_are_run_side_by_side():
    log = []
    plans = measure_plans(lambda threads: Instance(threads, log), INPUTS, ["y"], 4, 3)
    assert [(plan.num_instances, plan.num_threads) for plan in plans] == [(1, 3), (3, 1)]
    assert len({thread for threads, thread in log if threads == 1}) >= 3
    # Three that sleep side by side do more than one; the rows of a batch are counted.
    assert plans[1].rows_per_second > plans[0].rows_per_second > 4
    assert better(plans, "throughput") is plans[1]


def test_each_objective_has_its_own_plan():
    plans = (Plan(1, 2, seconds=0.010, rows_per_second=100.0), Plan(2, 1, seconds=0.016, rows_per_second=125.0))
    assert better(plans, "latency") is plans[0]
    assert better(plans, "throughput") is plans[1]
    assert better((), "latency") is None
    assert plans[1].to_json() == {"instances": 2, "threads": 1, "ms": 16.0, "rows_per_second": 125.0}


def test_one_thread_leaves_nothing_to_choose():
    assert measure_plans(lambda threads: Instance(threads, []), INPUTS, ["y"], 1, 1) == ()


@pytest.mark.parametrize("good_runs", [0, 3])
def test_an_engine_that_fails_ends_it_and_leaves_no_thread(good_runs):
    class Failing(Instance):
        def run(self, inputs, outputs):
            if len(self.log) >= good_runs:
                raise EngineError("broken")
            return super().run(inputs, outputs)

    before = threading.active_count()
    with pytest.raises(EngineError, match="broken"):
        measure_plans(lambda threads: Failing(threads, []), INPUTS, ["y"], 1, 2)
    assert threading.active_count() == before
