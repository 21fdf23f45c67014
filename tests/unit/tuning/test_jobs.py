from __future__ import annotations

import pytest

from hone.specialization import Signature, VersionRef
from hone.tuning.jobs import Devices, Job, JobQueue, Task
from hone.tuning.making import Making
from hone.tuning.wire import Garbage


def task(rows):
    return Task(Signature.of([("IN", "FP32", (rows,))]), f"digest {rows}")


def job(model="m", version=1, graph="g", device="cpu", rows=(1,)):
    return Job(VersionRef(model, version, graph), device, tuple(task(row) for row in rows))


def test_the_most_valuable_job_comes_first_and_order_settles_ties():
    gains = {"a": 1.0, "b": 3.0, "c": 1.0}
    queue = JobQueue(lambda job: gains[job.ref.model])
    for name in "abc":
        queue.put(job(name))
    assert [queue.take("cpu").ref.model for _ in range(3)] == ["b", "a", "c"]
    assert queue.take("cpu") is None


def test_gains_are_asked_when_a_job_is_taken():
    gains = {"a": 1.0, "b": 0.0}
    queue = JobQueue(lambda job: gains[job.ref.model])
    queue.put(job("a"))
    queue.put(job("b"))
    gains["b"] = 2.0
    assert queue.take("cpu").ref.model == "b"


def test_jobs_of_another_kind_of_device_are_left():
    queue = JobQueue(lambda job: 0.0)
    queue.put(job(device="h200"))
    assert queue.take("a10") is None
    assert queue.take("h200") is not None


def test_a_newer_graph_replaces_an_older_job_and_the_same_one_joins():
    queue = JobQueue(lambda job: 0.0)
    queue.put(job(graph="old"))
    queue.put(job(graph="new", rows=(1, 2)))
    queue.put(job(graph="new", rows=(2, 4)))
    taken = queue.take("cpu")
    assert taken.ref.graph == "new"
    assert taken.tasks == (task(1), task(2), task(4))
    assert len(queue) == 0


def test_jobs_go_with_their_version():
    queue = JobQueue(lambda job: 0.0)
    queue.put(job("a"))
    queue.put(job("b"))
    assert queue.cancel(VersionRef("a", 1, "g"))
    assert not queue.cancel(VersionRef("a", 1, "g"))
    assert queue.of(VersionRef("b", 1, "g")) == [job("b")]


def test_one_job_at_a_time_on_a_device_and_for_a_kind():
    devices = Devices([("gpu:0", "h200"), ("gpu:1", "h200"), ("gpu:2", "a10")])
    assert devices.kinds == ["h200", "a10"]
    assert devices.free() == [("gpu:0", "h200"), ("gpu:2", "a10")]
    devices.acquire("gpu:0")
    assert devices.free() == [("gpu:2", "a10")], "the other card of the kind waits: they share what is learned"
    with pytest.raises(ValueError, match="has a job already"):
        devices.acquire("gpu:1")
    devices.release("gpu:0")
    assert devices.free() == [("gpu:1", "h200"), ("gpu:2", "a10")], "cards of a kind take turns"


# --- what a child tells


def making(num=3):
    heard, outcomes = [], []
    made = Making([task(i + 1) for i in range(num)], heard.append, lambda t, e: outcomes.append((t, e["outcome"])))
    return made, heard, outcomes


def test_outcomes_go_to_their_tasks():
    made, heard, outcomes = making()
    made.on_event({"event": "stage", "index": 0})
    made.on_event({"event": "specialized", "index": 0, "outcome": "passed"})
    assert heard == [{"event": "stage", "index": 0}]
    assert outcomes == [(task(1), "passed")]


@pytest.mark.parametrize(
    "event",
    [
        {"index": 3, "outcome": "passed"},
        {"index": -1, "outcome": "passed"},
        {"index": True, "outcome": "passed"},
        {"outcome": "passed"},
        {"index": 1, "outcome": "splendid"},
        {"index": 1},
    ],
)
def test_impossible_outcomes_are_garbage(event):
    made, _, _ = making()
    with pytest.raises(Garbage):
        made.on_event({"event": "specialized", **event})


def test_no_task_has_two_outcomes():
    made, _, _ = making()
    made.on_event({"event": "specialized", "index": 0, "outcome": "refused"})
    with pytest.raises(Garbage, match="once"):
        made.on_event({"event": "specialized", "index": 0, "outcome": "passed"})


def test_the_task_at_work_is_to_blame_for_the_end():
    made, _, _ = making()
    made.on_event({"event": "specialized", "index": 0, "outcome": "passed"})
    made.on_event({"event": "stage", "index": 1})
    assert made.left() == ([task(2)], [task(3)])


def test_an_end_between_tasks_blames_the_next():
    made, _, _ = making()
    made.on_event({"event": "stage", "index": 0})
    made.on_event({"event": "specialized", "index": 0, "outcome": "passed"})
    assert made.left() == ([task(2)], [task(3)])


def test_an_end_before_the_beginning_blames_all():
    made, _, _ = making()
    assert made.left() == ([task(1), task(2), task(3)], [])


def test_nothing_is_left_of_a_job_that_is_done():
    made, _, _ = making(1)
    made.on_event({"event": "specialized", "index": 0, "outcome": "failed"})
    assert made.left() == ([], [])
