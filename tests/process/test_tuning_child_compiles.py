"""The whole child with the real compiler and the real cache: a model becomes artifacts that another process runs."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from hone.engines.tvm import PackedWeights
from hone.engines.tvm_runtime import TvmRuntime
from hone.kernels import DeviceKey, KernelsCache
from hone.specialization import Signature
from hone.tuning.activity import ActivityBoard
from hone.tuning.artifacts import ArtifactLoader, Sources, Terms, artifact_key
from hone.tuning.child import Child
from hone.tuning.child_process import Limits
from hone.tuning.verdicts import Verdicts
from tests import models

LIMITS = Limits(seconds=300.0, memory_bytes=6 << 30, silence_seconds=120.0)
#: Whether something is faster depends on the machine, so tests of the way ask for less than that.
ANY_SPEED = -0.99


def convolution() -> bytes:
    """Two convolutions of equal sizes with bias and ReLU, on 16 channels."""
    generator = np.random.default_rng(0)

    def tensor(name, *dims):
        data = generator.normal(0, 0.1, dims).astype(np.float32)
        return helper.make_tensor(name, TensorProto.FLOAT, dims, data.tobytes(), raw=True)

    nodes, last = [], "IN"
    for i in range(2):
        nodes.append(helper.make_node("Conv", [last, f"w{i}", f"b{i}"], [f"c{i}"], pads=[1, 1, 1, 1]))
        last = "OUT" if i else "r0"
        nodes.append(helper.make_node("Relu", [f"c{i}"], [last]))
    dims = ("batch", 16, 8, 8)
    weights = [tensor(f"w{i}", 16, 16, 3, 3) for i in range(2)] + [tensor(f"b{i}", 16) for i in range(2)]
    return models.model(nodes, {"IN": ("FP32", dims)}, {"OUT": ("FP32", dims)}, weights)


class Compiling:
    """One cache folder, and jobs against it."""

    def __init__(self, folder: Path, onnx_bytes: bytes) -> None:
        self.path = folder / "model.onnx"
        self.path.write_bytes(onnx_bytes)
        self.graph = hashlib.sha256(onnx_bytes).hexdigest()
        self.cache = KernelsCache(folder / "cache")
        self.device = DeviceKey.for_cpu()
        self.verdicts = Verdicts(self.cache, self.device.digest)
        self.events: list[dict] = []

    precision = "f32"
    tolerance: float | None = None

    def digest(self, signature: Signature, margin: float = ANY_SPEED) -> str:
        return artifact_key(
            graph=self.graph,
            signature=signature,
            precision=self.precision,
            objective="latency",
            terms=Terms(self.tolerance, margin, 1, 0),
            device=self.device,
            sources=Sources.installed(),
        ).digest

    def run(self, *shapes, mode="build", margin=ANY_SPEED, max_batch_size=8):
        """A child for these shapes of IN; its outcomes."""
        signatures = [Signature.of([("IN", "FP32", shape)]) for shape in shapes]
        board = ActivityBoard()
        self.events = []
        spec = {
            "path": str(self.path),
            "graph": self.graph,
            "graph_level": 0,
            "max_batch_size": max_batch_size,
            "kernels_cache": str(self.cache.root),
            "device": self.device.digest,
            "device_fields": dict(self.device.fields),
            "precision": self.precision,
            "objective": "latency",
            "tolerance": self.tolerance,
            "margin": margin,
            "seconds": 60.0,
            "nice": 19,
            "build_threads": 1,
            "run_threads": 1,
            "activity": board.descriptor,
            "samples": None,
            "tasks": [{"signature": s.to_json(), "digest": self.digest(s, margin), "mode": mode} for s in signatures],
        }
        child = Child(spec, LIMITS, on_event=self.events.append, descriptors=[board.descriptor])
        result = child.run()
        board.close()
        assert result.outcome == "done", (result.reason, result.detail)
        return [event for event in self.events if event["event"] == "specialized"]

    def load(self, shape):
        runtime = TvmRuntime.load(1)
        loader = ArtifactLoader(self.cache, [self.device], runtime, PackedWeights())
        return loader.load(self.digest(Signature.of([("IN", "FP32", shape)])), self.device.digest, self.path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of one cache for all: kernels that one test decided on need not be searched in the next."""
    return tmp_path_factory.mktemp("compiling")


@pytest.fixture
def compiling(folder):
    return Compiling(folder, convolution())


@pytest.mark.timeout(600)
def test_a_model_becomes_artifacts_that_nobody_makes_twice(compiling):
    [one, two] = compiling.run((1, 16, 8, 8), (2, 16, 8, 8))
    assert (one["outcome"], two["outcome"]) == ("passed", "passed"), (one, two)
    assert one["verdict"]["max_error"] < 1e-4
    assert one["verdict"]["baseline_ms"] > 0
    assert one["report"]["candidates_measured"] > 0
    stages = {event["stage"].split(" for ")[0].split(":")[0] for event in compiling.events if "stage" in event}
    assert {"importing", "compiling", "linking", "comparing outputs", "measuring"} <= stages

    # It runs in this process, which has no compiler, and computes what the model says.
    engine = compiling.load((2, 16, 8, 8))
    given = np.random.default_rng(1).normal(size=(2, 16, 8, 8)).astype(np.float32)
    [found] = engine.instantiate().run({"IN": given}, ["OUT"])
    [expected] = ReferenceEvaluator(onnx.load_model_from_string(convolution())).run(None, {"IN": given})
    assert np.allclose(found, expected, rtol=1e-3, atol=1e-4)
    engine.close()

    # Asked again, it is known; for another batch size, only what is new is measured.
    [again] = compiling.run((1, 16, 8, 8))
    assert (again["outcome"], again["report"]) == ("passed", {})
    assert again["verdict"]["speedup"] == one["verdict"]["speedup"]
    for entry in compiling.cache.entries():
        if entry.name.kind == "artifacts":
            for file in entry.path.iterdir():
                file.unlink()
            entry.path.rmdir()
    [anew] = compiling.run((1, 16, 8, 8))
    assert (anew["outcome"], anew["report"]["candidates_built"]) == ("passed", 0)
    assert anew["report"]["workloads_remembered"] > 0

    # And the gate takes what is there without compiling.
    [gated] = compiling.run((1, 16, 8, 8), mode="gate")
    assert gated["outcome"] == "passed"
    assert not any(event.get("stage", "").startswith("compiling") for event in compiling.events)
    assert compiling.verdicts.recall(compiling.digest(Signature.of([("IN", "FP32", (1, 16, 8, 8))]))).state == "passed"


@pytest.mark.timeout(300)
def test_not_fast_enough_is_refused_with_numbers_and_remembered(compiling):
    impossible = 1000.0
    [outcome] = compiling.run((1, 16, 8, 8), margin=impossible)
    assert outcome["outcome"] == "refused"
    assert "faster by 100000%: baseline" in outcome["reason"]
    if not outcome["verdict"]["inconclusive"]:  # a machine that is too busy is sure of nothing
        digest = compiling.digest(Signature.of([("IN", "FP32", (1, 16, 8, 8))]), impossible)
        assert compiling.verdicts.recall(digest).state == "refused"
        [again] = compiling.run((1, 16, 8, 8), margin=impossible)
        assert (again["outcome"], again["reason"], again["report"]) == ("refused", outcome["reason"], {})


@pytest.mark.timeout(300)
def test_an_operator_that_cannot_be_compiled_is_named(tmp_path):
    compiling = Compiling(
        tmp_path,
        models.model(
            [helper.make_node("NonZero", ["IN"], ["n"]), helper.make_node("Cast", ["n"], ["OUT"], to=1)],
            {"IN": ("FP32", (1, 4))},
            {"OUT": ("FP32", (2, None))},
        ),
    )
    [outcome] = compiling.run((1, 4), max_batch_size=0)
    assert outcome["outcome"] == "unsupported"
    assert "NonZero" in outcome["reason"]
    digest = compiling.digest(Signature.of([("IN", "FP32", (1, 4))]))
    assert compiling.verdicts.recall(digest).state == "unsupported"


@pytest.mark.timeout(300)
def test_an_operator_that_the_importer_takes_and_the_compiler_does_not_is_named(tmp_path):
    """Nothing scattered nowhere: TVM converts it, and refuses its own form of it while it compiles."""
    nothing = [
        numpy_helper.from_array(np.zeros((0, 1), np.int64), "places"),
        numpy_helper.from_array(np.zeros((0, 4), np.float32), "updates"),
    ]
    compiling = Compiling(
        tmp_path,
        models.model(
            [
                helper.make_node("Relu", ["IN"], ["r"]),
                helper.make_node("ScatterND", ["r", "places", "updates"], ["OUT"]),
            ],
            {"IN": ("FP32", (4, 4))},
            {"OUT": ("FP32", (4, 4))},
            nothing,
        ),
    )
    [outcome] = compiling.run((4, 4), max_batch_size=0)
    assert outcome["outcome"] == "unsupported", outcome
    assert outcome["operator"] == "scatter_nd"
    assert "operator scatter_nd: phase" in outcome["reason"]
    digest = compiling.digest(Signature.of([("IN", "FP32", (4, 4))]))
    assert compiling.verdicts.recall(digest).state == "unsupported"


HAS_BF16 = {"avx512_bf16", "avx512bw", "avx512vl"} <= set(Path("/proc/cpuinfo").read_text(encoding="ascii").split())


@pytest.mark.skipif(not HAS_BF16, reason="this CPU has no AVX512_BF16")
@pytest.mark.timeout(600)
def test_a_model_in_low_precision(compiling):
    compiling.precision = "bf16"
    [one] = compiling.run((2, 16, 8, 8))
    assert one["outcome"] == "passed", one
    assert 1e-5 < one["verdict"]["max_error"] < 4e-2
    assert one["reason"] == ""

    # Where the outputs must be closer than that, layers are kept; all of them is no bf16 any more, and refused.
    compiling.tolerance = one["verdict"]["max_error"] / 50
    [strict] = compiling.run((2, 16, 8, 8))
    assert strict["outcome"] == "refused", strict
    assert "no layers to keep in f32 were found" in strict["verdict"]["note"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("precision", "reason"), [("tf32", "not compiled for CPUs"), ("int8", "quantised already")])
def test_a_precision_that_cannot_be_had_is_unsupported(compiling, precision, reason):
    compiling.precision = precision
    [outcome] = compiling.run((1, 16, 8, 8))
    assert (outcome["outcome"], outcome["reason"].count(reason)) == ("unsupported", 1), outcome
