"""The compile step where an engine misses its tolerance: what the clock or the machine decided stays open."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hone.compiler.artifact import ExportedArtifact
from hone.compiler.build import BuildFailed, LinkFailed
from hone.compiler.onnx_import import Unsupported
from hone.errors import EngineError
from hone.kernels import DeviceKey, KernelsCache
from hone.specialization import Signature
from hone.tuning import compile as compile_module
from hone.tuning import compiling
from hone.tuning.compile import TvmCompile
from hone.tuning.compiling import Artifacts, Loaded, temporary_folder
from hone.tuning.lowering import KeptLayer, Lowering
from hone.tuning.search import Search
from hone.tuning.specialize import Compiled, NotCompiled
from tests.unit.tuning.fakes import Engine

SIGNATURE = Signature.of([("IN", "FP32", (1, 4))])
LOWERING = Lowering("bf16", 2, 3.0, 0.9, (KeptLayer(0, "matmul", 2.0),))


class Step:
    """A real compile step whose compiler, searches and comparisons are a test's: its engines are all too far off."""

    def __init__(self, folder, monkeypatch, precision: str) -> None:
        device = DeviceKey.for_cpu()
        spec = {
            "path": str(folder / "model.onnx"), "run_threads": 1, "precision": precision, "careful": True,
            "samples": None, "max_batch_size": 0,
        }  # fmt: skip
        self.real = TvmCompile(spec, KernelsCache(folder / "cache"), device)
        self.made: list[Engine] = []
        self.failure: NotCompiled | Exception | None = None
        monkeypatch.setattr(compiling, "import_model", lambda path, shapes: SimpleNamespace())
        monkeypatch.setattr(compile_module, "unsupported", lambda name, target: "")
        monkeypatch.setattr(compile_module, "template_workloads", lambda imported, target, precision: {"one": 1})
        monkeypatch.setattr(compile_module, "is_lowered", lambda workload: True)
        monkeypatch.setattr(compile_module, "lowerable_layers", lambda imported, target, name: ["a", "b"])
        monkeypatch.setattr(TvmCompile, "_use_pool", lambda step: ("", folder))
        monkeypatch.setattr(TvmCompile, "_make", self._make)
        monkeypatch.setattr(Artifacts, "output_error", lambda artifacts, signature: lambda engine: 3.0)
        monkeypatch.setattr(Artifacts, "publisher", lambda artifacts, loaded, signature, digest: lambda told: "")
        monkeypatch.setattr(Search, "decide", lambda search, workloads, seconds, tell: {})

    def _make(self, *_):
        """The first engine is made; what is made with layers kept meets the test's failure."""
        if self.made and isinstance(self.failure, Exception):
            raise self.failure
        if self.made and self.failure is not None:
            return self.failure
        self.made.append(Engine())
        return Loaded(self.made[-1], ExportedArtifact({}, {}), temporary_folder())

    def build(self) -> Compiled | NotCompiled:
        return self.real.build(SIGNATURE, "digest", 60.0, lambda share, stage, **details: None)


@pytest.fixture(params=["bf16", "int8"])
def step(request, tmp_path, monkeypatch):
    return Step(tmp_path, monkeypatch, request.param)


@pytest.fixture
def rounded(tmp_path, monkeypatch):
    return Step(tmp_path, monkeypatch, "bf16")


def test_when_time_is_up_before_layers_to_keep_are_found_it_is_open(step, monkeypatch):
    monkeypatch.setattr(compile_module, "_KEEPING_END", -1.0)
    monkeypatch.setattr(compile_module, "find_lowering", lambda *_, **__: None)
    built = step.build()
    assert isinstance(built, Compiled)
    assert built.is_open
    assert "no layers to keep in f32 were found in the time that there was" in built.note
    assert not step.made[0].closed, "the gate has it, and says no with its numbers"
    built.engine.close()


def test_when_nothing_helps_it_is_not_open(step, monkeypatch):
    monkeypatch.setattr(compile_module, "find_lowering", lambda *_, **__: None)
    built = step.build()
    assert isinstance(built, Compiled)
    assert not built.is_open
    assert built.note.endswith("no layers to keep in f32 were found")
    built.engine.close()


@pytest.mark.parametrize(
    "failure",
    [
        LinkFailed("g++ exited with 1"),
        BuildFailed("a kernel", MemoryError("no memory")),
        EngineError("it does not load"),
        NotCompiled("failed", "a kernel could not be kept: full"),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_what_fails_while_layers_are_looked_for_does_not_fail_the_bucket(step, monkeypatch, failure):
    def look(imported, target, error_of, attempt, **_):
        assert attempt(LOWERING) is None

    monkeypatch.setattr(compile_module, "find_lowering", look)
    step.failure = failure
    built = step.build()
    assert isinstance(built, Compiled), built
    assert built.is_open
    assert len(step.made) == 1
    built.engine.close()
    assert step.made[0].closed


def test_an_attempt_that_is_given_up_is_closed(rounded, monkeypatch):
    def look(imported, target, error_of, attempt, **_):
        attempt(LOWERING)
        raise LinkFailed("g++ exited with 1")

    monkeypatch.setattr(compile_module, "find_lowering", look)
    built = rounded.build()
    assert isinstance(built, Compiled)
    assert "which layers to keep in f32 was not found: g++ exited with 1" in built.note
    assert [engine.closed for engine in rounded.made] == [False, True]
    built.engine.close()


def test_layers_that_are_found_are_kept(rounded, monkeypatch):
    def look(imported, target, error_of, attempt, **_):
        attempt(LOWERING)
        return LOWERING

    monkeypatch.setattr(compile_module, "find_lowering", look)
    built = rounded.build()
    assert isinstance(built, Compiled)
    assert (built.is_open, built.note) == (False, LOWERING.note)
    assert [engine.closed for engine in rounded.made] == [True, False]
    built.engine.close()


def test_what_the_machine_lacks_while_importing_is_no_verdict_on_the_model(rounded, monkeypatch):
    def starved(path, shapes):
        raise BuildFailed("importing", MemoryError())

    monkeypatch.setattr(compiling, "import_model", starved)
    assert rounded.build() == NotCompiled("failed", "importing: MemoryError")
    monkeypatch.setattr(compiling, "import_model", lambda path, shapes: Unsupported("Loop", "no converter"))
    refused = rounded.build()
    assert isinstance(refused, NotCompiled)
    assert refused.outcome == "unsupported"
