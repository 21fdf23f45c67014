from __future__ import annotations

import json

import numpy as np

from hone.specialization import VersionRef
from hone.tuning.capture import Capture
from tests.unit.tuning.fakes import PASS, Rig

REF = VersionRef("m", 1, "g")


def inputs(value, rows=1):
    return {"IN": np.full((rows, 4), value, np.float32)}


def test_nothing_is_kept_without_permission():
    capture = Capture(lambda: 0.0)
    assert not capture.wants(REF)
    capture.add(REF, inputs(1))
    assert capture.samples(REF) == []


def test_the_newest_few_are_kept_now_and_then():
    now = [0.0]
    capture = Capture(lambda: now[0])
    capture.allow(REF, True)
    for value in range(6):
        assert capture.wants(REF)
        capture.add(REF, inputs(value))
        assert not capture.wants(REF)
        now[0] += 6.0
    assert [sample.arrays["IN"][0, 0] for sample in capture.samples(REF)] == [2, 3, 4, 5]
    capture.allow(REF, False)
    assert capture.samples(REF) == []


def test_large_requests_are_not_kept():
    capture = Capture(lambda: 0.0)
    capture.allow(REF, True)
    capture.add(REF, {"IN": np.zeros((32 << 20) // 4, np.float32)})
    assert capture.samples(REF) == []


def test_captured_requests_reach_the_gate(tmp_path):
    rig = Rig(tmp_path)
    ref = rig.model({"*": PASS}, max_batch_size=1, parameters={"capture": "true"})
    rig.tuner.attend()
    assert rig.watch.wants_sample(ref, 0)
    rig.watch.sampled(ref, 0, inputs(3), {})
    seen = []
    maker = rig.tuner._lanes._makers["cpu"]
    spec = maker._spec
    maker._spec = lambda *args: seen.append(maker._samples(args[0].version)) or spec(*args)
    rig.run()
    assert [sample.name for sample in seen[0]] == ["captured request 1"]
    rig.serving.unload(ref)
    rig.run()
    assert not rig.watch.wants_sample(ref, 0)
    assert json.dumps(rig.tuner.statuses()) == "[]"
    assert rig.tuner.stop()


def test_models_without_the_setting_are_not_captured(tmp_path):
    rig = Rig(tmp_path)
    ref = rig.model({"*": PASS}, max_batch_size=1)
    rig.tuner.attend()
    assert not rig.watch.wants_sample(ref, 0)
    assert rig.tuner.stop()
