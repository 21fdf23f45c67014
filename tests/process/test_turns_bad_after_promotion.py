"""A kernel that turns wrong or slow after its promotion is rolled back, and clients get right answers from then on."""

from __future__ import annotations

import json
from pathlib import Path

from hone.kernels import DeviceKey, KernelsCache
from tests.process.real_artifacts import FATAL_ROW, Place, assert_answers, engine, mapped, tuning, with_kernel
from tests.running import RunningServer, run_server, wait_until

#: Every request is a sample, and pairs are timed as often as there are any.
PROGRAM = (
    str(Path(__file__).with_name("altered_server.py")),
    json.dumps({"watch": {"sample_interval_seconds": 0.0, "max_share": 1e6}}),
)


def events(server: RunningServer) -> list[str]:
    return [event["event"] for event in tuning(server, "m")["history"]]


def quarantined(place: Place, digest: str) -> str | None:
    cache = KernelsCache(place.cache)
    try:
        return cache.quarantined(digest, DeviceKey.for_cpu().digest)
    finally:
        cache.close()


def test_wrong(place: Place, compiled_softmax: Path, tmp_path: Path) -> None:
    """By more than the tolerance, on inputs unlike those of the gate: rolled back, and kept out for good."""
    digest = place.add("m", with_kernel(compiled_softmax, tmp_path / "artifact", "if (is_fatal) out[0] *= 1.01f;"))
    flags = ("--tuning=cache", *place.flags)
    with run_server(place.repository, *flags, program=PROGRAM) as server:
        wait_until(lambda: engine(server, "m") == "tvm", "promoted")
        assert_answers(server, "m")
        assert engine(server, "m") == "tvm"

        def rolled_back() -> bool:
            assert server.infer("m", FATAL_ROW)[0] == 200
            return engine(server, "m") == "onnxruntime"

        wait_until(rolled_back, "rolled back")
        assert_answers(server, "m", FATAL_ROW)
        assert {"rolled_back", "quarantined"} <= set(events(server))
        assert server.metric("hone_tuning_rollbacks_total", cause="outputs") == 1
        wait_until(lambda: mapped(server) == [], "its code is gone")
        assert quarantined(place, digest)
        assert server.stop() == 0
    with run_server(place.repository, *flags) as server:
        wait_until(lambda: engine(server, "m") == "onnxruntime", "it has been looked at")
        assert tuning(server, "m")["buckets"][0]["outcome"] == "quarantined"


def test_slow(place: Place, compiled_softmax: Path, tmp_path: Path) -> None:
    """From its hundredth run on: rolled back, and quarantined only when that happens a second time."""
    spin = "static int runs = 0; if (++runs > 100) for (double end = seconds() + 5e-4; seconds() < end;) {}"
    digest = place.add("m", with_kernel(compiled_softmax, tmp_path / "artifact", spin))
    flags = ("--tuning=cache", *place.flags)
    for time in (1, 2):
        with run_server(place.repository, *flags, program=PROGRAM) as server:
            wait_until(lambda server=server: engine(server, "m") == "tvm", "promoted")

            def rolled_back(server: RunningServer = server) -> bool:
                assert_answers(server, "m")
                return engine(server, "m") == "onnxruntime"

            wait_until(rolled_back, "rolled back")
            assert_answers(server, "m")
            assert server.metric("hone_tuning_rollbacks_total", cause="latency") == 1
            reason = next(e["reason"] for e in tuning(server, "m")["history"] if e["event"] == "rolled_back")
            assert "slower than the baseline on live requests" in reason
            assert server.stop() == 0
        assert bool(quarantined(place, digest)) == (time == 2)
