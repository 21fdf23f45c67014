"""Loading and unloading over a real repository and fake engines: what serves goes on serving, whatever fails."""

from __future__ import annotations

import asyncio
import re

import pytest
from prometheus_client import CollectorRegistry

from hone.errors import (
    ConfigError,
    EngineError,
    InvalidRequest,
    LoadFailed,
    ModelNotFound,
    ModelNotInRepository,
    NoVersionAvailable,
    Unsupported,
    VersionNotReady,
)
from hone.metrics import Metrics
from hone.repository import ModelRepository
from hone.serving.executor import Completions
from hone.serving.lifecycle import ModelLifecycle
from hone.serving.registry import ModelRegistry
from hone.types import LoadParameters
from tests.unit.serving.fakes import FakeEngine

CONFIG = """
input { name: "IN" data_type: TYPE_FP32 dims: 4 } output { name: "OUT" data_type: TYPE_FP32 dims: 4 }
max_batch_size: 8
"""


class World:
    """A repository on disk, a registry, and a lifecycle whose engines are made of the files' text."""

    def __init__(self, root) -> None:
        self.root = root
        self.engines: dict[str, FakeEngine] = {}
        self.registry = ModelRegistry()
        self.metrics = Metrics(CollectorRegistry(), allow_cpu_metrics=False, allow_gpu_metrics=False)
        self.completions = Completions(asyncio.get_running_loop())
        self.repository = ModelRepository([root], allow_file_override=True)
        self.lifecycle = ModelLifecycle(
            self.repository,
            self.registry,
            self.metrics,
            self.completions,
            num_threads=2,
            load_engine=self.make_engine,
        )
        self.loading = asyncio.Event()
        self.loop = asyncio.get_running_loop()

    def make_engine(self, path, config) -> FakeEngine:
        text = path.read_text()
        self.loop.call_soon_threadsafe(self.loading.set)
        if text.startswith("bad"):
            raise EngineError("bad file")
        if text.startswith("crash"):
            raise ZeroDivisionError
        self.engines[text] = FakeEngine()
        return self.engines[text]

    def write(self, name: str, text: str, version: int = 1, config: str = CONFIG) -> None:
        folder = self.root / name / str(version)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.onnx").write_text(text)
        (self.root / name / "config.pbtxt").write_text(config)

    def index(self) -> dict[tuple[str, str], tuple[str, str]]:
        return {(e.name, e.version): (e.state, e.reason) for e in self.registry.index([], ready_only=False)}


@pytest.fixture
async def world(tmp_path):
    world = World(tmp_path)
    yield world
    await world.lifecycle.close(5)
    world.completions.close()
    world.repository.close()
    world.metrics.close()


async def settled(condition):
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("not settled in time")


async def test_load_unload_and_what_is_said_meanwhile(world):
    world.write("m", "one")
    with pytest.raises(ModelNotFound):
        world.registry.lease("m", "")
    await world.lifecycle.load("m")
    assert world.index() == {("m", "1"): ("READY", "")}
    with world.registry.lease("m", "") as lease:
        await world.lifecycle.unload("m")
        assert world.index() == {("m", "1"): ("UNLOADING", "")}
        with pytest.raises(VersionNotReady):
            world.registry.lease("m", "1")
        with pytest.raises(NoVersionAvailable):
            world.registry.lease("m", "")
        assert not world.engines["one"].closed
        assert lease.version == 1
    await settled(lambda: world.engines["one"].closed)
    await settled(lambda: world.index() == {("m", "1"): ("UNAVAILABLE", "unloaded")})
    assert world.registry.all_ready()
    await world.lifecycle.unload("never heard of")


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (CONFIG.replace('"OUT"', '"OTHER"'), "output[0].name"),
        (
            CONFIG + 'optimization { execution_accelerators { cpu_execution_accelerator { name: "tvm" '
            'parameters { key: "signatures" value: "OTHER:4" } } } }',
            'optimization.execution_accelerators.cpu_execution_accelerator[0].parameters["signatures"]',
        ),
    ],
    ids=["an output", "signatures"],
)
async def test_what_does_not_fit_the_graph_is_told_with_file_and_field(world, config, field):
    world.write("m", "one", config=config)
    with pytest.raises(LoadFailed, match=re.escape(f"invalid model configuration for 'm': config.pbtxt: {field}: ")):
        await world.lifecycle.load("m")
    assert world.engines["one"].closed


async def test_whoever_wants_to_know_is_told_when_other_versions_answer(world):
    told = []
    world.registry.on_publish = lambda: told.append([model.version for model in world.registry.served()])
    world.write("m", "one")
    await world.lifecycle.load("m")
    world.write("m", "two", version=2)
    await world.lifecycle.load("m")
    await world.lifecycle.unload("m")
    assert told == [[1], [2], []]


async def test_unknown_models_leave_nothing_behind(world):
    for name in ("absent", "also-absent"):
        with pytest.raises(ModelNotInRepository):
            await world.lifecycle.load(name)
    with pytest.raises(InvalidRequest, match="path traversal"):
        await world.lifecycle.load("../m")
    assert world.registry.names() == []
    assert not world.lifecycle._locks


async def test_a_failed_reload_keeps_the_old_version_and_says_why_every_time(world):
    world.write("m", "one")
    await world.lifecycle.load("m")
    world.write("m", "bad")
    for _ in range(2):
        with pytest.raises(LoadFailed, match="version 1 is at UNAVAILABLE state: bad file;"):
            await world.lifecycle.load("m")
        assert world.index() == {("m", "1"): ("READY", "reload failed, still serving as before: bad file")}
    with world.registry.lease("m", "1"):
        pass
    assert world.registry.all_ready()
    world.write("m", "two")
    await world.lifecycle.load("m")
    assert world.index() == {("m", "1"): ("READY", "")}
    await settled(lambda: world.engines["one"].closed)


async def test_a_failed_first_load_is_unavailable_and_not_ready(world):
    world.write("m", "bad")
    with pytest.raises(LoadFailed):
        await world.lifecycle.load("m")
    assert world.index() == {("m", "1"): ("UNAVAILABLE", "bad file")}
    assert not world.registry.all_ready()
    with pytest.raises(NoVersionAvailable):
        world.registry.lease("m", "")


async def test_unexpected_faults_end_as_unavailable_not_as_loading(world, caplog):
    world.write("m", "crash")
    with pytest.raises(LoadFailed, match="internal error"):
        await world.lifecycle.load("m")
    assert world.index()[("m", "1")][0] == "UNAVAILABLE"
    assert "ZeroDivisionError" in caplog.text


async def test_a_new_version_that_fails_does_not_cost_the_old_one(world):
    world.write("m", "one")
    await world.lifecycle.load("m")
    world.write("m", "bad", version=2)
    with pytest.raises(LoadFailed, match="version 2"):
        await world.lifecycle.load("m")
    assert world.index() == {("m", "1"): ("READY", ""), ("m", "2"): ("UNAVAILABLE", "bad file")}
    world.write("m", "two", version=2)
    await world.lifecycle.load("m")
    assert world.index() == {("m", "2"): ("READY", "")}
    await settled(lambda: world.engines["one"].closed)


async def test_versions_that_did_not_change_are_kept(world):
    config = CONFIG + "version_policy { all {} }"
    world.write("m", "one", config=config)
    await world.lifecycle.load("m")
    served = world.registry.find("m", "1")
    world.write("m", "two", version=2, config=config)
    await world.lifecycle.load("m")
    assert world.registry.find("m", "1") is served
    assert world.registry.find("m", "").version == 2
    assert not world.engines["one"].closed


async def test_a_caller_that_gives_up_does_not_cancel_the_load(world):
    world.write("m", "one")
    caller = asyncio.create_task(world.lifecycle.load("m"))
    await world.loading.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    await settled(lambda: world.index() == {("m", "1"): ("READY", "")})


async def test_counters_go_on_over_a_reload_and_series_end_with_the_model(world):
    world.write("m", "one")
    await world.lifecycle.load("m")
    statistics = world.registry.find("m", "").statistics
    statistics.record_execution(1, 1, 1, 1)
    world.write("m", "two")
    await world.lifecycle.load("m")
    assert world.registry.find("m", "").statistics is statistics
    await settled(lambda: world.engines["one"].closed)
    assert b'nv_inference_exec_count{model="m",version="1"} 1' in world.metrics.render()[0]
    await world.lifecycle.unload("m")
    await settled(lambda: b'model="m"' not in world.metrics.render()[0])


async def test_files_of_an_override_live_as_long_as_the_versions_made_of_them(world):
    world.write("m", "one")
    parameters = LoadParameters('{"max_batch_size": 8}', {"1/model.onnx": b"override"})
    with pytest.raises((ConfigError, LoadFailed, InvalidRequest, Unsupported)):
        await world.lifecycle.load("m", LoadParameters("{not json", {"1/model.onnx": b"x"}))
    assert world.registry.names() == []
    await world.lifecycle.load("m", parameters)
    folder = world.registry.find("m", "").definition.path
    assert folder.is_dir()
    assert folder != world.root / "m"
    await world.lifecycle.load("m")
    await settled(lambda: not folder.exists())
    assert "one" in world.engines
