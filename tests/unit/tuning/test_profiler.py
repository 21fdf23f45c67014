"""Timing kernels on a GPU: with a fake CUDA runtime, whose clock kernels move by what they take."""

from __future__ import annotations

import itertools

import pytest

from hone.engines.cuda_device import CPU_TYPE, CudaDevice
from hone.engines.cuda_runtime import CudaRuntime
from hone.engines.tvm_runtime import TvmRuntime
from hone.kernels import KernelsCache
from hone.tuning.activity import Activity
from hone.tuning.kernel_trials import KernelTrials
from hone.tuning.profiler import DeviceLost, Profiler, ProfilerLimits, Skipped, Subject, Timing
from tests.fake_cuda import H100, INVALID, LAUNCH_FAILURE, NOT_READY, SUCCESS, FakeCudart


class Rig:
    """A profiler, and kernels that take so many nanoseconds. Time passes on the device, and while one rests."""

    def __init__(self, folder, **limits):
        self.cudart = FakeCudart([H100])
        self.device = CudaDevice(CudaRuntime(self.cudart), TvmRuntime.load(1), 0, device_type=CPU_TYPE)
        self.trials = KernelTrials(KernelsCache(folder / "cache"), "d" * 64)
        self.in_flight, self.rests, self.now = 0, [], 0.0
        self.profiler = Profiler(
            self.device,
            self.trials,
            activity=lambda: Activity(self.in_flight, 0),
            limits=ProfilerLimits(**limits),
            clock=self.clock,
            sleep=self.rests.append,
        )

    def clock(self):
        self.now += 0.001
        return self.now + self.cudart.now_ns / 1e9

    def kernel(self, ns, *, digest="a" * 64, num_sets=3, then=lambda: None):
        seen = []

        def call(arguments):
            seen.append(arguments[0])
            self.cudart.now_ns += ns() if callable(ns) else ns
            then()

        subject = Subject(digest, call, [[at] for at in range(num_sets)])
        return subject, seen


@pytest.fixture
def rig(tmp_path):
    return Rig(tmp_path)


def test_short_kernels_are_timed_as_a_graph_over_all_operands(rig):
    subject, seen = rig.kernel(10_000)
    timing = rig.profiler.measure(subject)
    assert timing == Timing(pytest.approx(10_000), 5, "graph")
    assert set(seen) == {0, 1, 2}
    assert not rig.cudart.graphs


def test_long_kernels_are_timed_one_by_one(rig):
    subject, _ = rig.kernel(60_000_000)
    assert rig.profiler.measure(subject) == Timing(pytest.approx(60_000_000), 5, "launches")


def test_no_burst_is_longer_than_it_may_be(rig):
    subject, _ = rig.kernel(10_000, num_sets=100_000)
    rig.profiler.measure(subject)
    assert subject._num_launches * 10_000 <= 0.05 * 1e9


def test_what_slows_all_down_counts_for_nobody(rig):
    reference, _ = rig.kernel(lambda: 20_000 * rig.cudart.slowdown, digest="b" * 64)
    assert rig.profiler.settle(reference).ns == pytest.approx(20_000)
    rig.cudart.slowdown = 1.7
    subject, _ = rig.kernel(lambda: 10_000 * rig.cudart.slowdown)
    assert rig.profiler.measure(subject, reference).ns == pytest.approx(10_000)
    rig.profiler.release(reference)
    assert not rig.cudart.graphs


def test_who_is_clearly_behind_is_measured_once(rig):
    subject, _ = rig.kernel(10_000)
    assert rig.profiler.measure(subject, best_ns=5_000).num_rounds == 1


def test_it_rests_only_while_requests_are_in_flight(rig):
    subject, _ = rig.kernel(10_000)
    rig.profiler.measure(subject)
    assert not any(rig.rests)
    rig.in_flight = 1
    rig.profiler.measure(subject)
    assert set(rig.rests) == {0.05}
    assert len(rig.rests) >= 5


def test_operands_fill_more_than_twice_the_cache(rig):
    assert rig.profiler.num_sets(10 << 20) == 11
    assert rig.profiler.num_sets(1 << 30) == 2
    assert rig.profiler.num_sets(64 << 10) == 1601


def test_memory_for_serving_is_left(rig):
    rig.cudart.free_bytes = (1 << 30) + (25 << 20)
    assert rig.profiler.num_sets(10 << 20) == 2
    refused = rig.profiler.num_sets(30 << 20)
    assert isinstance(refused, Skipped)
    assert "take 30 MiB, and 25 MiB of the GPU's memory are free" in refused.reason


def test_a_refusal_harms_nobody(rig):
    def refuse():
        raise RuntimeError("can_implement: misaligned operand")

    subject, _ = rig.kernel(10_000, then=refuse)
    assert rig.profiler.run_once(subject) == Skipped("can_implement: misaligned operand")
    assert rig.trials.blocked(subject.digest) is None


def test_a_broken_context_blocks_the_kernel_and_ends_the_process(rig):
    def crash():
        rig.cudart.failure = LAUNCH_FAILURE

    subject, _ = rig.kernel(10_000, then=crash)
    with pytest.raises(DeviceLost, match="unspecified launch failure"):
        rig.profiler.run_once(subject)
    assert "unspecified launch failure" in rig.trials.blocked(subject.digest)


def test_a_kernel_that_never_ends_is_blocked(rig):
    def hang():
        rig.cudart.hangs = True

    subject, _ = rig.kernel(10_000, then=hang)
    with pytest.raises(DeviceLost, match="hangs on the GPU: it ran for more than 5 s"):
        rig.profiler.run_once(subject)
    assert rig.trials.blocked(subject.digest)


def test_refused_captures_are_timed_by_launches(rig):
    rig.cudart.cudaStreamBeginCapture = lambda stream, mode: 901
    subject, _ = rig.kernel(10_000)
    assert rig.profiler.measure(subject) == Timing(pytest.approx(10_000), 5, "launches")


def test_a_graph_of_some_of_the_launches_is_not_timed_for_all(rig):
    launches = itertools.count()

    def refuse_in_the_middle_of_the_capture():
        if next(launches) == 10:
            raise RuntimeError("operation not permitted when stream is capturing")

    subject, _ = rig.kernel(10_000, then=refuse_in_the_middle_of_the_capture)
    assert rig.profiler.measure(subject) == Timing(pytest.approx(10_000), 5, "launches")
    assert not rig.cudart.graphs


def test_a_context_that_breaks_under_a_graph_is_told_as_such(rig):
    subject, _ = rig.kernel(10_000)
    launch, num_replays = rig.cudart.cudaGraphLaunch, []

    def break_at_the_third(graph, stream):
        num_replays.append(graph)
        if len(num_replays) == 3:
            rig.cudart.failure = LAUNCH_FAILURE
        return launch(graph, stream)

    rig.cudart.cudaGraphLaunch = break_at_the_third
    with pytest.raises(DeviceLost, match="broke the GPU's context"):
        rig.profiler.measure(subject)
    assert rig.trials.blocked(subject.digest)


def test_a_wait_leaves_no_error_for_the_next_launch(rig):
    """A kernel is checked by asking the runtime what failed last, and "not ready" is kept like any failure."""
    polls = iter([NOT_READY] * 3)
    rig.cudart.cudaEventQuery = lambda event: rig.cudart.fail(next(polls, SUCCESS))
    kept = []
    subject, _ = rig.kernel(10_000, then=lambda: kept.append(rig.cudart.cudaGetLastError()))
    for _ in range(2):
        assert rig.profiler.run_once(subject) is None
    assert kept == [SUCCESS, SUCCESS]


def test_a_refusal_is_not_told_of_the_next_kernel(rig):
    def refuse():
        rig.cudart.fail(INVALID)  # as cudaFuncSetAttribute does of too much shared memory
        raise RuntimeError("initialize: Error Internal (invalid argument)")

    refused, _ = rig.kernel(10_000, then=refuse)
    assert isinstance(rig.profiler.run_once(refused), Skipped)
    kept = []
    innocent, _ = rig.kernel(10_000, digest="b" * 64, then=lambda: kept.append(rig.cudart.cudaGetLastError()))
    assert rig.profiler.run_once(innocent) is None
    assert kept == [SUCCESS]


@pytest.mark.parametrize("code", [214, 226, 721, 999])
def test_what_the_hardware_reports_ends_the_process(rig, code):
    def crash():
        rig.cudart.failure = code

    subject, _ = rig.kernel(10_000, then=crash)
    with pytest.raises(DeviceLost):
        rig.profiler.run_once(subject)
    assert rig.device.cuda.lost


def test_nothing_is_left_on_the_device(rig):
    subject, _ = rig.kernel(10_000)
    rig.profiler.measure(subject)
    rig.profiler.close()
    assert not rig.cudart.streams and not rig.cudart.events and not rig.cudart.graphs
