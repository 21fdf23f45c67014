"""The whole tuner on a fake GPU: job, child, search, gate, cache, promotion, and children that kernels take along."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from hone.engines.onnxruntime import OnnxRuntimeEngine, SessionSettings
from hone.engines.tvm import PackedWeights
from hone.kernels import KernelsCache
from hone.specialization import VersionRef
from hone.tuning.artifacts import KeyMaker
from hone.tuning.budget import Budget
from hone.tuning.gpu_artifacts import GpuArtifactLoader
from hone.tuning.jobs import PLAIN
from hone.tuning.options import Device, TunerOptions
from hone.tuning.ports import TunableVersion
from hone.tuning.probation import Probation
from hone.tuning.signatures import Traffic
from hone.tuning.tuner import Tuner
from hone.tuning.verdicts import Verdicts
from hone.tuning.watch import Watch
from tests.cutlass.test_gpu_tuning import FAST, SLOW, model  # noqa: F401 (a fixture)
from tests.fake_gpu import FakeGpu, Sharing, device_key
from tests.running import wait_until
from tests.unit.tuning.fakes import Serving

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, str(Path(__file__).parent / "gpu_worker.py"))


class Server:
    """A tuner with its cache, and serving in memory; `again` is the same after a restart."""

    def __init__(self, folder, twins, model_path, with_plain=False):
        self.with_plain = with_plain
        self.folder, self.twins, self.model_path = folder, twins, model_path
        self.device = device_key()
        self.cache = Sharing(KernelsCache(folder / "cache"), twins)
        self.serving = Serving()
        self.gpu = FakeGpu({})
        loader = GpuArtifactLoader(
            self.cache,
            {self.device.digest: (self.device, [self.gpu])},
            PackedWeights(),
            {self.device.digest: "twin"},
        )
        options = TunerOptions(
            budget=Budget(pause=False, silence_seconds=60.0, seconds=120.0),
            kernels_cache=folder / "cache",
            command=COMMAND,
        )
        watch = Watch(self.serving)
        self.tuner = Tuner(
            self.serving,
            self.serving,
            devices=[Device("gpu0", self.device.digest, self.device.fields, "a gpu")],
            memories={self.device.digest: Verdicts(self.cache, self.device.digest)},
            quarantine=self.cache,
            key_of=KeyMaker([self.device], margin=options.margin, run_threads=1),
            plain_key_of=KeyMaker([self.device], margin=options.margin, run_threads=1).plain if with_plain else None,
            load=loader,
            watch=watch,
            probation=Probation(folder / "probation"),
            traffic=Traffic(),
            options=options,
            num_cores=2,
        )
        self.graph = graph = hashlib.sha256(model_path.read_bytes()).hexdigest()
        self.ref = VersionRef("m", 1, graph)
        self.baseline = OnnxRuntimeEngine.load(model_path, SessionSettings(0, 1, fit_threads=False))
        self.serving.versions[self.ref] = TunableVersion(
            self.ref, model_path, self.baseline, 0, {"precision": "tf32"}, kinds=frozenset(["a gpu"])
        )

    def tell(self, **table):
        told = {"twins": str(self.twins.root), **table}
        (self.folder / "table.json").write_text(json.dumps(told), encoding="utf-8")

    def run(self):
        self.tuner.wake()
        while self.tuner.step():
            pass
        return self.tuner.status("m")

    @property
    def num_children(self):
        path = self.folder / "children"
        return len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else 0

    def specialization(self):
        (stack,) = self.serving.routes.values()
        return stack[-1][1]

    def again(self):
        return Server(self.folder, self.twins, self.model_path, self.with_plain)


@pytest.fixture
def server(tmp_path, twin_cache, model, monkeypatch):  # noqa: F811
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return Server(tmp_path, twin_cache, model)


def test_a_model_is_tuned_promoted_and_remembered(server):
    server.tell(model_ns=FAST)
    status = server.run()
    assert status["state"] == "tuned", status
    one = server.specialization()
    assert one.device == "a gpu"
    x = np.random.default_rng(3).standard_normal((16, 64)).astype(np.float32)
    (found,) = one.engine.instantiate().run({"x": x}, ["y"])
    (expected,) = server.baseline.run({"x": x}, ["y"])
    np.testing.assert_allclose(found, expected, atol=5e-3)
    assert server.num_children == 1
    after = server.again()
    assert after.run()["state"] == "tuned"
    assert server.num_children == 1


def test_what_is_slower_is_not_promoted_and_not_tried_again(server):
    server.tell(model_ns=SLOW)
    status = server.run()
    assert status["buckets"][0]["outcome"] == "refused", json.dumps(status, indent=1)
    assert not server.serving.routes
    server.again().run()
    assert server.num_children == 1


def test_children_that_kernels_take_along_are_followed_by_others(server):
    server.tell(model_ns=FAST, breaks_at=5, num_broken=2)
    status = server.run()
    assert status["state"] == "tuned", json.dumps(status, indent=1)
    assert server.num_children == 3
    records = server.cache.quarantine_records(server.device.digest)
    assert len(records) == 2
    assert {record.history[-1]["cause"] for record in records} == {"crash"}


@pytest.fixture
def eager(tmp_path, twin_cache, model, monkeypatch):  # noqa: F811
    """A server whose baseline runs on the CPU: plain modules serve until a search has ended."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return Server(tmp_path, twin_cache, model, with_plain=True)


def promotions(status):
    return [line["generation"] for line in status["history"] if line["event"] == "promoted"]


def test_a_plain_module_serves_until_the_one_that_is_searched_for_takes_its_place(eager):
    eager.tell(model_ns=2 * FAST, searched_ns=FAST, wait_for="go")
    thread = threading.Thread(target=eager.run)
    thread.start()
    try:
        wait_until(lambda: eager.serving.routes, "the plain module serves")
        plain = eager.specialization()
        status = eager.tuner.status("m")
        assert status["state"] == "tuning"
        assert status["buckets"][0]["reason"] == PLAIN
        assert (status["buckets"][0]["artifact"], status["buckets"][0]["engine"]) == (plain.artifact, "tvm")
    finally:
        (eager.folder / "go").touch()
        thread.join(120)
    status = eager.tuner.status("m")
    assert status["state"] == "tuned", status
    assert promotions(status) == [1, 2]
    (bucket,) = status["buckets"]
    assert (bucket["generation"], bucket["reason"]) == (2, "")
    assert bucket["artifact"] == eager.specialization().artifact != plain.artifact
    manifests = [
        eager.cache.get("artifacts", one, eager.device.digest).manifest for one in (plain.artifact, bucket["artifact"])
    ]
    assert [bool(manifest["kernels"]) for manifest in manifests] == [False, True]
    maps = [[line["template"] for line in manifest["kernel_map"]] for manifest in manifests]
    assert maps[0] and not any(maps[0]), "dlight's functions alone"
    assert any(template.startswith("cutlass.") for template in maps[1])
    # A roll-back goes back to the plain one, and a restart to the one that was searched for.
    x = np.random.default_rng(3).standard_normal((16, 64)).astype(np.float32)
    (expected,) = eager.baseline.run({"x": x}, ["y"])
    for one in (plain, eager.specialization()):
        np.testing.assert_allclose(one.engine.instantiate().run({"x": x}, ["y"])[0], expected, atol=5e-3)
    after = eager.again()
    assert promotions(after.run()) == [1]
    assert after.specialization().artifact == bucket["artifact"]
    assert eager.num_children == 1


def test_a_search_that_finds_nothing_faster_leaves_the_plain_module(eager):
    eager.tell(model_ns=FAST, searched_ns=2 * FAST)
    status = eager.run()
    assert status["state"] == "tuned", status
    assert promotions(status) == [1]
    assert "no faster than the module with plain schedules" in status["buckets"][0]["reason"]
    after = eager.again()
    assert promotions(after.run()) == [1]
    assert after.specialization().artifact == eager.specialization().artifact
    assert eager.num_children == 1


def test_a_plain_module_that_is_slower_leaves_the_way_to_the_search(eager):
    eager.tell(model_ns=SLOW, searched_ns=FAST)
    status = eager.run()
    assert status["state"] == "tuned", status
    assert promotions(status) == [1]
    assert [line["reason"].startswith(PLAIN) for line in status["history"] if line["event"] == "refused"] == [True]


def test_a_faulty_module_is_rolled_back_to_the_plain_one_and_that_to_the_baseline(eager):
    eager.tell(model_ns=2 * FAST, searched_ns=FAST)
    eager.run()
    (stack,) = eager.serving.routes.values()
    for generation, artifact in ((1, stack[0][1].artifact), (0, "")):
        eager.tuner._watch.failed(eager.ref, generation + 1, "told to fail")
        eager.tuner.attend()
        (bucket,) = eager.tuner.status("m")["buckets"]
        assert bucket["generation"] == generation
        assert not artifact or bucket["artifact"] == artifact
    after = eager.again()
    after.run()
    assert not after.serving.routes, "both are quarantined"


def test_a_version_that_runs_on_the_cpu_has_no_job_on_the_gpu(server):
    server.tell(model_ns=FAST)
    version = server.serving.versions[server.ref]
    server.serving.versions[server.ref] = TunableVersion(
        server.ref, version.path, version.baseline, 0, kinds=frozenset(["cpu"])
    )
    server.run()
    assert server.num_children == 0
