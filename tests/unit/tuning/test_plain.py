"""Plain modules, which serve on a GPU until the ones that are searched for are there; children follow a script."""

from __future__ import annotations

import pytest

from hone.specialization import Signature, VersionRef
from hone.tuning.maker import jobs_to_ask_again
from hone.tuning.record import Bucket, Record
from hone.tuning.verdicts import Recalled
from tests.running import wait_until
from tests.unit.tuning.fakes import PASS, Rig

ONE, TWO = "IN:FP32[1,4]", "IN:FP32[2,4]"


@pytest.fixture
def rig(tmp_path):
    rig = Rig(tmp_path, kinds=[("gpu:0", "gpu")], plain=True)
    yield rig
    assert rig.tuner.stop()


def bucket_of(rig) -> Bucket:
    (record,) = rig.tuner._book.records.values()
    (bucket,) = record.buckets.values()
    return bucket


def both(rig) -> VersionRef:
    """A model whose plain module served before the one that was searched for passed."""
    ref = VersionRef("m", 1, "g1")
    assert rig.model({rig.plain_key(ref, ONE): PASS, "*": "slow"}, max_batch_size=1) == ref
    wait_until(lambda: rig.tuner.step() and rig.serving.running("gpu"), "the plain module serves")
    (rig.folder / "m.onnx.go").touch()
    rig.run()
    return ref


def test_the_plain_module_serves_first_and_is_kept_for_returning(rig):
    ref = both(rig)
    assert rig.children() == [[[rig.plain_key(ref, ONE), "plain"], [rig.key(ref, ONE, "gpu"), "build"]]]
    assert rig.serving.running("gpu") == {ONE: 2}
    assert (bucket_of(rig).generation, bucket_of(rig).before) == (2, 1)


def test_a_plain_generation_that_fails_late_is_not_returned_to(rig):
    """A request that began on it may fail when it runs no other any more."""
    ref = both(rig)
    rig.watch.failed(ref, 1, "tvm: it broke")
    rig.run()
    assert rig.serving.running("gpu") == {ONE: 2}, "what serves now goes on"
    assert rig.buckets()[ONE]["outcome"] == "passed"
    rig.watch.failed(ref, 2, "tvm: it broke too")
    rig.run()
    assert rig.serving.running("gpu") == {}
    assert (rig.buckets()[ONE]["engine"], rig.status()["state"]) == ("onnxruntime", "baseline")
    assert set(rig.cache.out) == {rig.plain_key(ref, ONE), rig.key(ref, ONE, "gpu")}


def test_a_reload_ends_the_watch_over_what_was_kept_for_returning(rig):
    ref = both(rig)
    assert sorted(one.generation for one in rig.watch.watched()) == [1, 2]
    rig.serving.unload(ref)
    rig.model({"*": PASS}, max_batch_size=1)
    rig.run()
    assert rig.serving.running("gpu") == {ONE: 3}
    assert [one.generation for one in rig.watch.watched()] == [3]


def test_retuning_forgets_the_refusal_of_a_plain_module_too(rig):
    ref = rig.model({"*": {"outcome": "refused", "reason": "slow"}}, max_batch_size=1)
    plain, searched = rig.plain_key(ref, ONE), rig.key(ref, ONE, "gpu")
    rig.cache.known[plain] = Recalled("refused", "slow")
    rig.run()
    assert rig.children() == [[[searched, "build"]]]
    rig.tuner.act("m", "", "retune")
    rig.run()
    assert rig.children()[1] == [[plain, "plain"], [searched, "build"]]
    assert set(rig.cache.withdrawn) == {plain, searched}


def test_a_plain_module_that_is_there_and_unproven_is_first_and_known_for_what_it_is(rig):
    """Whoever makes the searched one is told what it has to beat."""
    ref = rig.model({"*": PASS}, max_batch_size=2)
    rig.cache.put(rig.plain_key(ref, TWO), "unproven")
    specs = []
    maker = rig.tuner._lanes._makers["gpu"]
    spec = maker._spec
    maker._spec = lambda *args: specs.append(spec(*args)) or specs[-1]
    rig.run()
    told = [(task["digest"], task["mode"], task["is_plain"]) for task in specs[0]["tasks"]]
    assert told == [
        (rig.plain_key(ref, ONE), "plain", True),
        (rig.plain_key(ref, TWO), "gate", True),
        (rig.key(ref, ONE, "gpu"), "build", False),
        (rig.key(ref, TWO, "gpu"), "build", False),
    ]


def test_while_the_plain_module_serves_nothing_is_asked_of_another_that_is_not_there():
    class Version:
        ref = VersionRef("m", 1, "graph")

    record = Record(Version())
    signature = Signature.of([("IN", "FP32", (1, 4))])
    bucket = Bucket("gpu", signature, "searched", "quarantined", verdict={"provisional": True}, plain="plain")
    record.buckets["gpu", signature] = bucket
    bucket.promoted(1, "plain")
    assert bucket.serves_plain
    assert jobs_to_ask_again(record) == []
    bucket.promoted(2, "searched")
    assert [task.digest for job in jobs_to_ask_again(record) for task in job.tasks] == ["searched"]
