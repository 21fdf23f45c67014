"""What the real cache remembers of verdicts."""

from __future__ import annotations

import pytest

from hone.kernels import DeviceKey, KernelsCache
from hone.specialization import Signature
from hone.tuning.artifacts import Sources, Terms, artifact_key
from hone.tuning.verdicts import Verdicts

DIGEST = "a" * 64
SCOPE = "b" * 64


@pytest.fixture
def cache(tmp_path):
    cache = KernelsCache(tmp_path / "cache")
    yield cache
    cache.close()


def publish(cache, *, proven=True, **manifest):
    assert cache.publish("artifacts", DIGEST, SCOPE, {"module.so": b"x"}, manifest, proven=proven)


def test_nothing_is_known_of_what_was_never_made(cache):
    assert Verdicts(cache, SCOPE).recall(DIGEST).state == "absent"


def test_an_artifact_carries_the_verdict_it_passed_with(cache):
    publish(cache, verdict={"speedup": 2.0, "provisional": True})
    found = Verdicts(cache, SCOPE).recall(DIGEST)
    assert (found.state, found.verdict["speedup"], found.provisional) == ("passed", 2.0, True)
    assert found.entry is not None


def test_a_later_measurement_takes_the_verdicts_place(cache, tmp_path):
    publish(cache, verdict={"speedup": 2.0, "provisional": True})
    Verdicts(cache, SCOPE).keep_measured(DIGEST, {"speedup": 1.8, "provisional": False})
    found = Verdicts(KernelsCache(tmp_path / "cache"), SCOPE).recall(DIGEST)
    assert (found.state, found.verdict["speedup"], found.provisional) == ("passed", 1.8, False)


@pytest.mark.parametrize(("outcome", "state"), [("refused", "refused"), ("unsupported", "unsupported")])
def test_refusals_are_remembered_over_restarts(cache, tmp_path, outcome, state):
    Verdicts(cache, SCOPE).keep_refusal(DIGEST, outcome, "not faster", {"speedup": 0.9})
    found = Verdicts(KernelsCache(tmp_path / "cache"), SCOPE).recall(DIGEST)
    assert (found.state, found.reason, found.verdict) == (state, "not faster", {"speedup": 0.9})
    assert Verdicts(cache, "c" * 64).recall(DIGEST).state == "absent", "another kind of device asks anew"


def test_quarantine_comes_before_everything(cache):
    publish(cache, verdict={"speedup": 2.0})
    cache.quarantine(DIGEST, SCOPE, "wrong numbers")
    found = Verdicts(cache, SCOPE).recall(DIGEST)
    assert (found.state, found.reason) == ("quarantined", "wrong numbers")


def test_imported_artifacts_are_unproven_until_they_passed_here(cache):
    publish(cache, proven=False, verdict={"speedup": 2.0})
    verdicts = Verdicts(cache, SCOPE)
    found = verdicts.recall(DIGEST)
    assert found.state == "unproven"
    cache.prove(found.entry)
    assert verdicts.recall(DIGEST).state == "passed"


def test_a_damaged_verdict_is_none(cache):
    Verdicts(cache, SCOPE).keep_refusal(DIGEST, "refused", "slow", {})
    for path in cache.path.rglob("verdict.json"):
        path.chmod(0o600)
        path.write_text("{", encoding="ascii")
    assert Verdicts(cache, SCOPE).recall(DIGEST).state == "absent"


# --- names


BASE = {
    "graph": "g",
    "signature": Signature.of([("IN", "FP32", (1, 4))]),
    "precision": "f32",
    "objective": "latency",
    "terms": Terms(None, 0.03, 2, 0),
    "device": DeviceKey({"kind": "cpu", "cores": 2, "toolchain": {"tvm": "1", "cxx": "g++ 12"}}),
    "sources": Sources("t", "p"),
}


@pytest.mark.parametrize(
    "change",
    [
        {"graph": "h"},
        {"signature": Signature.of([("IN", "FP32", (2, 4))])},
        {"signature": Signature.of([("IN", "FP16", (1, 4))])},
        {"precision": "bf16"},
        {"objective": "throughput"},
        {"terms": Terms(0.01, 0.03, 2, 0)},
        {"terms": Terms(None, 0.05, 2, 0)},
        {"terms": Terms(None, 0.03, 1, 0)},
        {"terms": Terms(None, 0.03, 2, -1)},
        {"device": DeviceKey({"kind": "cpu", "cores": 4, "toolchain": {"tvm": "1", "cxx": "g++ 12"}})},
        {"device": DeviceKey({"kind": "cpu", "cores": 2, "toolchain": {"tvm": "2", "cxx": "g++ 12"}})},
        {"sources": Sources("t2", "p")},
        {"sources": Sources("t", "p2")},
    ],
)
def test_everything_that_changes_an_artifact_or_its_verdict_changes_its_name(change):
    assert artifact_key(**BASE).digest == artifact_key(**BASE).digest
    assert artifact_key(**{**BASE, **change}).digest != artifact_key(**BASE).digest


def test_the_installed_compiler_has_digests_and_is_not_imported():
    import subprocess
    import sys

    code = (
        "from hone.tuning.artifacts import Sources; import sys; s = Sources.installed();"
        "assert len(s.templates_sha256) == len(s.pipeline_sha256) == 64 and s.templates_sha256 != s.pipeline_sha256;"
        "assert 'tvm' not in sys.modules and 'hone.compiler' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_servers_half_of_tuning_never_loads_the_compiler():
    import subprocess
    import sys

    code = (
        "import hone.tuning.tuner, hone.tuning.assembly, sys;"
        "assert not {'tvm', 'onnx', 'hone.compiler', 'xgboost'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
