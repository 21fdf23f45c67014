from __future__ import annotations

import pytest

from hone.tuning.activity import Activity, ActivityBoard, ActivityView
from hone.tuning.budget import GIB, OWN_BYTES, Budget, Pacer, Starvation, compiler_bytes, num_compilers


class Serving:
    """Activity as a test says: busy is one request in flight."""

    def __init__(self) -> None:
        self.busy = False
        self.num_finished = 0

    def read(self) -> Activity:
        return Activity(self.num_finished + self.busy, self.num_finished)


def run(pacer: Pacer, serving: Serving, seconds: float, start: float = 0.0, tick: float = 0.01) -> float:
    """Seconds in which the child ran."""
    ran = 0.0
    for i in range(round(seconds / tick)):
        if not pacer.step(start + i * tick):
            ran += tick
    return ran


def test_an_idle_server_leaves_the_child_alone():
    serving = Serving()
    assert run(Pacer(serving.read), serving, 10) == pytest.approx(10)


def test_requests_in_flight_pause_it_at_once():
    serving = Serving()
    pacer = Pacer(serving.read)
    assert not pacer.step(0.0)
    serving.busy = True
    assert pacer.step(0.01)


@pytest.mark.parametrize("share", [0.1, 0.4, 0.7])
def test_it_never_starves_under_endless_load(share):
    serving = Serving()
    serving.busy = True
    ran = run(Pacer(serving.read, min_share=share), serving, 60)
    assert ran == pytest.approx(60 * share, abs=0.5)


def test_short_requests_between_two_looks_count_as_busy():
    serving = Serving()
    pacer = Pacer(serving.read)
    pacer.step(0.0)
    serving.num_finished += 3
    assert pacer.step(0.01)


def test_it_goes_on_a_moment_after_the_last_request():
    serving = Serving()
    pacer = Pacer(serving.read, quiet_seconds=0.05)
    serving.busy = True
    pacer.step(0.0)
    assert pacer.step(0.01)
    serving.busy, serving.num_finished = False, 1
    assert pacer.step(0.02)
    assert pacer.step(0.06)
    assert not pacer.step(0.08)


def test_half_loaded_serving_leaves_more_than_the_share():
    serving = Serving()
    pacer, ran, now = Pacer(serving.read), 0.0, 0.0
    for _ in range(20):
        for busy in (True, False):
            serving.busy = busy
            ran += run(pacer, serving, 1.0, now)
            now += 1.0
    assert ran > 40 * 0.6


@pytest.mark.parametrize(("share", "starves"), [(0.003, True), (0.09, True), (0.11, False), (0.5, False), (1.0, False)])
def test_a_child_starves_that_gets_less_than_its_share_of_what_it_asked_for(share, starves):
    starvation = Starvation(min_share=0.1, window_seconds=60.0)
    told = [starvation.step(asked * share, asked * (1 - share)) for asked in range(0, 200, 5)]
    assert any(told) == starves
    assert not any(told[:12]), "60 seconds come first"


def test_a_child_that_asks_for_nothing_does_not_starve():
    starvation = Starvation()
    assert not any(starvation.step(1.0, 2.0) for _ in range(1000))


@pytest.mark.parametrize("share", [0.0, 1.5])
def test_shares_are_checked(share):
    with pytest.raises(ValueError, match="min_share"):
        Pacer(Serving().read, min_share=share)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seconds": -1}, "seconds: expected 0 or more, found -1"),
        ({"cpu_share": 0}, "cpu_share"),
        ({"cpu_share": 1.1}, "cpu_share"),
        ({"memory_bytes": 0}, "memory_bytes"),
        ({"nice": 20}, "nice: expected 0 to 19, found 20"),
        ({"silence_seconds": 0}, "silence_seconds"),
    ],
)
def test_budgets_are_checked(fields, message):
    with pytest.raises(ValueError, match=message):
        Budget(**fields)


@pytest.mark.parametrize(
    ("cores", "share", "threads"), [(1, 1.0, 1), (2, 1.0, 1), (8, 0.5, 4), (8, 1.0, 7), (8, 0.01, 1)]
)
def test_compiling_leaves_a_core(cores, share, threads):
    assert Budget(cpu_share=share).build_threads(cores) == threads


def test_the_board_is_seen_through_its_descriptor():
    board = ActivityBoard()
    view = ActivityView(board.descriptor)
    board.started()
    board.started()
    board.finished()
    assert view.read() == board.read() == Activity(2, 1)
    assert view.read().num_in_flight == 1
    view.close()
    board.close()


# --- memory of jobs for GPUs

HOPPER, AMPERE = "sm_90a", "sm_80"


def test_a_job_for_a_gpu_may_take_what_its_compiler_needs():
    budget = Budget(memory_bytes=4 * GIB)
    assert budget.memory_of_job("x86-64", 64 * GIB) == 4 * GIB
    assert budget.memory_of_job(AMPERE, 64 * GIB) == 4 * GIB
    assert budget.memory_of_job(HOPPER, 64 * GIB) >= OWN_BYTES + compiler_bytes(HOPPER)
    assert budget.memory_of_job(HOPPER, None) == budget.memory_of_job(HOPPER, 64 * GIB)


def test_but_no_more_than_is_free():
    budget = Budget(memory_bytes=4 * GIB)
    assert budget.memory_of_job(HOPPER, 5 * GIB) == 5 * GIB - GIB // 2
    assert budget.memory_of_job(HOPPER, 2 * GIB) == 4 * GIB, "the setting holds, as for CPUs"


def test_what_somebody_set_holds_for_gpus_too():
    assert Budget(memory_bytes=2 * GIB, memory_is_set=True).memory_of_job(HOPPER, 64 * GIB) == 2 * GIB


@pytest.mark.parametrize(
    ("architecture", "gib", "threads", "expected"),
    [(HOPPER, 6, 8, 1), (HOPPER, 9, 8, 2), (HOPPER, 64, 1, 1), (AMPERE, 4, 8, 2), (AMPERE, 2, 8, 1), (HOPPER, 1, 8, 1)],
)
def test_as_many_compilers_as_memory_and_cores_allow(architecture, gib, threads, expected):
    assert num_compilers(architecture, gib * GIB, threads) == expected
    assert num_compilers(architecture, None, 8) == 2
