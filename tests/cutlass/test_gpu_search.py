"""The search for kernels on a GPU that stands for one: how it shares out its time, what it does with no compiler."""

from __future__ import annotations

import errno

import pytest

from hone.compiler.build import BuildFailed
from hone.compiler.cuda.partition import Wanted
from hone.kernels import KernelsCache
from hone.tuning.artifacts import Sources
from hone.tuning.gpu_search import GpuSearch
from hone.tuning.kernel_trials import KernelTrials
from hone.tuning.profiler import Profiler
from tests.cutlass.workloads import matmul
from tests.fake_gpu import TARGET, FillingKernels, device_key, parts_of

HEAVY, LIGHT = matmul((64, 64), (64, 64)), matmul((32, 64), (64, 64))
BUILD_SECONDS = 10.0


class SlowKernels(FillingKernels):
    """A build takes its time, on a clock of its own; `problem` is why it fails."""

    problem = None
    improves = False
    """Whether each candidate is faster than all before, so that a search goes on."""

    def __init__(self, cache, gpu):
        super().__init__(cache, gpu)
        self.now, self.asked, self.there = 0.0, [], set()

    def has(self, digest):
        return digest in self.there

    def get(self, template, workload, candidate):
        digest = self.digest_of(template, workload, candidate)
        self.asked.append(str(workload))
        times = self.gpu.table.setdefault("kernels", {})
        if self.improves:
            times.setdefault(str(candidate), 1e6 * 0.9 ** len(times))
        if digest not in self.there:
            self.now += BUILD_SECONDS
            if self.problem is not None:
                raise BuildFailed(str(candidate), self.problem) from self.problem
        return super().get(template, workload, candidate)


@pytest.fixture
def search(tmp_path):
    cache, device = KernelsCache(tmp_path / "cache"), device_key()
    parts = parts_of({}, cache)
    kernels = SlowKernels(cache, parts.device)
    profiler = Profiler(parts.device, KernelTrials(cache, device.digest))
    return GpuSearch(
        cache, device, TARGET, Sources.installed(), profiler, kernels, parts.templates, clock=lambda: kernels.now
    )


def decide(search, seconds):
    return search.decide(Wanted({HEAVY: 1, LIGHT: 1}, {}), seconds, lambda share, text: None)


def test_the_heaviest_workload_leaves_others_their_time(search):
    search.kernels.improves = True
    found = decide(search, 20 * BUILD_SECONDS)
    assert set(found) == {HEAVY.digest, LIGHT.digest}
    assert search.kernels.asked.count(str(HEAVY)) > search.kernels.asked.count(str(LIGHT)) > 0


def test_what_was_not_finished_goes_on_in_what_is_over(search):
    decide(search, 1e6)
    asked = len(search.kernels.asked)
    assert asked > 20
    decide(search, 1e6)
    assert len(search.kernels.asked) == asked, "all is known"


def test_without_room_for_a_compiler_those_that_are_there_are_measured(search):
    kernels = search.kernels
    kernels.problem = OSError(errno.ENOSPC, "No space left on device")
    lists = [(one, one.candidates(LIGHT, TARGET)) for one in search.templates if one.matches(LIGHT, TARGET)]
    template, candidates = lists[0]
    kernels.there = {kernels.digest_of(template, LIGHT, one) for one in candidates[-2:]}
    found = decide(search, 1e6)
    assert set(found) == {HEAVY.digest, LIGHT.digest}, "kernels know no sizes: what is there serves both"
    assert set(found.values()) <= set(candidates[-2:])
    num_failed = len(kernels.asked) - 2 * 2
    assert num_failed <= 1 + search.num_builders, "a build that cannot work is not tried for each candidate"


def test_a_source_that_is_refused_stops_no_other(search):
    kernels = search.kernels
    kernels.problem = RuntimeError("no such tile")
    assert decide(search, 1e6) == {}
    assert len(set(kernels.asked)) == 2
    assert len(kernels.asked) > 10
