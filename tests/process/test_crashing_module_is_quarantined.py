"""A tuned module that takes the server along is known for it at the next start, and stays out; others serve on."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path

import pytest

from hone.kernels import DeviceKey, KernelsCache
from hone.repository import ModelRepository
from hone.specialization import Signature, VersionRef
from hone.tuning.artifacts import KeyMaker
from hone.tuning.inputs import Domain
from hone.tuning.ports import TunableVersion
from hone.tuning.settings import ModelTuning
from tests import models
from tests.process.crashing_server import FATAL
from tests.running import RunningServer, run_server, wait_until

PROGRAM = (str(Path(__file__).with_name("crashing_server.py")),)
CONFIG = "max_batch_size: 1 instance_group { count: 2 kind: KIND_CPU }"
SIGNATURE = Signature.of([("IN", "FP32", (1, 4))])


def publish_tuned(repository: Path, cache_folder: Path, model: str) -> str:
    """Have the cache say that the model's one specialization passed. Returns the artifact's digest."""
    device = DeviceKey.for_cpu()
    definitions = ModelRepository((repository,))
    definition = definitions.read(model)
    ref = VersionRef(model, 1, definition.version_fingerprints[1])
    definitions.close()
    version = TunableVersion(ref, definition.versions[1], baseline=None, max_batch_size=1)  # type: ignore[arg-type]
    digest = KeyMaker([device], margin=0.03, run_threads=1)(version, ModelTuning(), SIGNATURE, device.digest)
    cache = KernelsCache(cache_folder)
    domains = {"IN": Domain("FP32", (1, 4), -1, 1).to_json()}
    manifest = {"verdict": {"passed": True, "speedup": 2.0}, "domains": domains}
    assert cache.publish("artifacts", digest, device.digest, {"module.so": b"x"}, manifest)
    cache.close()
    return digest


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name, factor in (("good", None), ("bad", 1.0)):  # another graph, so that they share no artifact
        onnx = models.identity() if factor is None else models.scale(factor)
        models.write_model(tmp_path / "models", name, onnx, config=CONFIG)
    return tmp_path


def engine(server: RunningServer, model: str) -> str:
    _, told = server.get(f"/v2/models/{model}/tuning")
    return told["buckets"][0]["engine"] if told["buckets"] else ""


@pytest.mark.timeout(120)
def test_only_the_module_that_ran_is_blamed(place: Path) -> None:
    good = publish_tuned(place / "models", place / "cache", "good")
    bad = publish_tuned(place / "models", place / "cache", "bad")
    flags = ("--tuning=cache", f"--kernels-cache={place / 'cache'}", "--intra-op-threads=1")
    with run_server(place / "models", *flags, program=PROGRAM) as server:
        for model in ("good", "bad"):
            wait_until(lambda model=model: engine(server, model) == "tvm", f"{model} is promoted")
            assert server.infer(model, [[1.0, 2.0, 3.0, 4.0]])[0] == 200
        with suppress(OSError):  # the connection dies with the server
            server.infer("bad", [[FATAL, 2.0, 3.0, 4.0]])
        assert server.process.wait(60) == -signal.SIGSEGV

    with run_server(place / "models", *flags, program=PROGRAM) as server:
        wait_until(lambda: engine(server, "good") == "tvm", "good is promoted again")
        wait_until(lambda: engine(server, "bad") == "onnxruntime", "bad has been looked at")
        status, answer = server.infer("bad", [[FATAL, 2.0, 3.0, 4.0]])
        assert (status, answer["outputs"][0]["data"][0]) == (200, FATAL)
        _, told = server.get("/v2/models/bad/tuning")
        assert told["buckets"][0]["outcome"] == "quarantined"
        assert told["buckets"][0]["reason"] == "a server died of SIGSEGV while it ran, on probation"
        line = f"quarantined bad {SIGNATURE.text} (artifact {bad[:12]}): a server died of SIGSEGV while it ran"
        wait_until(lambda: line in server.log, "the log names artifact and signal")
        assert good[:12] not in server.log, "it was on probation too, and did not run"
        assert server.stop() == 0

    cache = KernelsCache(place / "cache")
    scope = DeviceKey.for_cpu().digest
    assert cache.quarantined(good, scope) is None
    assert "SIGSEGV" in (cache.quarantined(bad, scope) or "")
    cache.close()
