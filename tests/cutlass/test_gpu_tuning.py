"""The compile step for GPUs in whole, on a device whose kernels are twins and whose timings come from a table."""

from __future__ import annotations

import functools
import hashlib
import re
from dataclasses import replace

import numpy as np
import pytest

from hone.compiler import metaschedule
from hone.compiler.build import BuildFailed
from hone.compiler.choices import Choices
from hone.compiler.cuda.partition import takers
from hone.compiler.cuda.pipeline import compile_cuda_model, cuda_workloads
from hone.compiler.cuda_target import CudaTarget
from hone.compiler.onnx_import import import_model
from hone.compiler.phases.precision import Precision
from hone.compiler.templates.cutlass.registry import CUTLASS_TEMPLATES
from hone.compiler.workload import TensorType, Workload
from hone.engines.tvm import PackedWeights
from hone.kernels import KernelsCache
from hone.specialization import Signature
from hone.tuning import gpu_compile
from hone.tuning.artifacts import Sources, Terms, artifact_key
from hone.tuning.compile import CacheLedger
from hone.tuning.gpu_artifacts import GpuArtifactLoader
from hone.tuning.gpu_compile import CudaCompile
from hone.tuning.gpu_parts import CachedKernels, target_of
from hone.tuning.gpu_schedules import GpuScheduleSearch
from hone.tuning.profiler import DeviceLost, Profiler, ProfilerLimits
from hone.tuning.specialize import specialize_all
from tests.fake_cuda import H100
from tests.fake_gpu import TARGET, Sharing, device_key, healed, parts_of
from tests.unit.engines.tvm_artifacts import baseline, save_model

SIGNATURE = Signature.of([("x", "FP32", (16, 64))])
FAST, SLOW = 20_000.0, 50_000_000.0


@pytest.fixture
def model(tmp_path):
    rng = np.random.default_rng(0)
    weights = {f"w{i}": rng.standard_normal((64, 64)).astype(np.float32) / 8 for i in range(2)}
    weights |= {f"b{i}": rng.standard_normal(64).astype(np.float32) for i in range(2)}
    nodes = [
        ("MatMul", ["x", "w0"], ["m0"], {}),
        ("Add", ["m0", "b0"], ["a0"], {}),
        ("Relu", ["a0"], ["r0"], {}),
        ("MatMul", ["r0", "w1"], ["m1"], {}),
        ("Add", ["m1", "b1"], ["s0"], {}),
        # What the baseline takes its time for, one by one.
        *[("Sin", [f"s{i}"], [f"s{i + 1}" if i < 59 else "y"], {}) for i in range(60)],
    ]
    shapes = {"x": ("float32", [16, 64])}
    return save_model(tmp_path / "model.onnx", nodes, shapes, {"y": ("float32", [16, 64])}, weights)


class Job:
    """Jobs for one model on one fake GPU."""

    def __init__(self, model, cache, table, precision="tf32"):
        self.model, self.cache, self.table = model, cache, table
        self.device = device_key()
        self.parts = parts_of(table, cache)
        self.graph = hashlib.sha256(model.read_bytes()).hexdigest()
        self.precision = precision
        self.events = []

    @property
    def digest(self):
        return artifact_key(
            graph=self.graph,
            signature=SIGNATURE,
            precision=self.precision,
            objective="latency",
            terms=Terms(None, 0.03, 1, 0),
            device=self.device,
            sources=Sources.installed(),
        ).digest

    def spec(self, mode="build"):
        return {
            "path": str(self.model),
            "graph": self.graph,
            "graph_level": 0,
            "max_batch_size": 0,
            "precision": self.precision,
            "objective": "latency",
            "tolerance": None,
            "margin": 0.03,
            "seconds": 120.0,
            "run_threads": 1,
            "tasks": [{"signature": SIGNATURE.to_json(), "digest": self.digest, "mode": mode}],
        }

    def step(self):
        return CudaCompile(self.spec(), self.cache, self.device, self.parts)

    def workloads(self):
        imported = import_model(self.model, SIGNATURE.shapes)
        return cuda_workloads(imported, self.parts.target, Choices(precision=Precision(self.precision))).counts

    def run(self, mode="build"):
        self.compile_step = self.step()
        self.events = []
        specialize_all(
            self.spec(mode),
            lambda event, **fields: self.events.append({"event": event, **fields}),
            self.compile_step,
            CacheLedger(self.cache, self.device.digest),
        )
        (outcome,) = [event for event in self.events if event["event"] == "specialized"]
        return outcome


def tried(job):
    return list(dict.fromkeys(job.parts.kernels.ran))


@pytest.fixture
def cache(tmp_path, twin_cache):
    """A new cache, but for the twins."""
    fresh = KernelsCache(tmp_path / "cache")
    return Sharing(fresh, twin_cache)


def test_a_model_goes_through_search_gate_and_cache(model, cache):
    job = Job(model, cache, {"model_ns": FAST, "default_ns": 9_000.0})
    outcome = job.run()
    assert outcome["outcome"] == "passed", outcome
    assert outcome["verdict"]["speedup"] > 1.03
    assert outcome["report"]["candidates_measured"] > 5
    # Another process serves it, with the baseline's outputs.
    loader = GpuArtifactLoader(
        cache, {job.device.digest: (job.device, [job.parts.device])}, PackedWeights(), {job.device.digest: "twin"}
    )
    engine = loader.load(job.digest, job.device.digest, model)
    x = np.random.default_rng(1).standard_normal((16, 64)).astype(np.float32)
    (found,) = engine.instantiate().run({"x": x}, ["y"])
    (expected,) = baseline(model, {"x": x}, ["y"])
    np.testing.assert_allclose(found, expected, atol=5e-3)
    engine.close()


def test_what_is_slower_is_refused_with_its_numbers(model, cache):
    outcome = Job(model, cache, {"model_ns": SLOW}).run()
    assert outcome["outcome"] == "refused"
    assert outcome["verdict"]["speedup"] < 1


def winners(job):
    return {str(ranked.candidate) for ranked in job.compile_step._search._best.values()}


def some_candidate(job):
    """One that was tried, and not as the first: that one is the others' reference."""
    names = tried(job)
    return names[len(names) // 2]


def test_the_table_decides_and_is_not_asked_twice(model, cache, tmp_path, twin_cache):
    first = Job(model, cache, {"model_ns": FAST})
    first.run()
    winner = some_candidate(first)
    fresh = Sharing(KernelsCache(tmp_path / "fresh"), twin_cache)
    job = Job(model, fresh, {"model_ns": FAST, "kernels": {winner: 3_000.0}})
    job.run()
    assert winners(job) == {winner}
    again = Job(model, fresh, {"model_ns": SLOW})
    again.graph = "0" * 64  # another model with the same layers
    assert again.run()["report"]["workloads_remembered"] >= 1
    assert winners(again) == {winner}
    assert not tried(again)


@pytest.mark.parametrize("how", ["breaks", "hangs"])
def test_a_kernel_that_takes_the_device_along_is_blocked_and_the_next_process_goes_on(model, cache, how, monkeypatch):
    limits = ProfilerLimits(candidate_seconds=0.3)
    monkeypatch.setattr(gpu_compile, "Profiler", functools.partial(Profiler, limits=limits))
    probe = Job(model, cache, {"model_ns": FAST})
    probe.graph = "1" * 64
    step = probe.step()
    workload = next(iter(probe.workloads()))
    order = step._search._order(workload, takers(workload, TARGET, step._search.templates), {})
    culprit = str(order[2][1])
    job = Job(model, cache, {"model_ns": FAST, how: [culprit]})
    num_lost = 0
    while True:
        try:
            outcome = job.run()
            break
        except DeviceLost as problem:
            assert re.search("broke the GPU's context|hangs on the GPU", str(problem))
            num_lost += 1
            healed(job.parts)
    assert outcome["outcome"] == "passed", outcome
    # Once for each of the two layers, whose epilogues are different kernels.
    assert num_lost == job.parts.kernels.ran.count(culprit) == 2
    records = cache.quarantine_records(job.device.digest)
    assert [record.history[-1]["cause"] for record in records] == ["crash"] * 2


def test_candidates_that_refuse_are_skipped(model, cache):
    probe = Job(model, cache, {})
    step = probe.step()
    workload = next(iter(probe.workloads()))
    order = step._search._order(workload, takers(workload, TARGET, step._search.templates), {})
    refusing = [str(candidate) for _, candidate in order[:3]]
    job = Job(model, cache, {"model_ns": FAST, "refuses": refusing})
    outcome = job.run()
    assert outcome["outcome"] == "passed", outcome
    assert outcome["report"]["candidates_failed"] >= 3
    assert not winners(job) & set(refusing)


def test_without_memory_beside_what_serving_keeps_nothing_is_brought_to_the_gpu(model, cache):
    job = Job(model, cache, {"model_ns": FAST})
    job.parts.device.cudart.free_bytes = 1 << 30
    outcome = job.run()
    assert outcome["outcome"] == "failed", outcome
    assert "0 MiB of the GPU's memory are free beside the 1024 kept for serving" in outcome["reason"]
    assert not tried(job)
    job.parts.device.cudart.free_bytes = 2 << 30
    assert job.run()["outcome"] == "passed", "another day it is"


def test_a_precision_that_the_gpu_lacks_is_told(model, cache):
    outcome = Job(model, cache, {}, precision="f64").run()
    assert outcome["outcome"] == "unsupported"
    assert "f64" in outcome["reason"]


@pytest.mark.parametrize("mode", ["build", "plain"])
def test_an_nvcc_that_does_not_know_the_architecture_ends_the_job_at_once(model, cache, mode, monkeypatch):
    installed = gpu_compile.find_toolchain()
    monkeypatch.setattr(gpu_compile, "find_toolchain", lambda: replace(installed, architectures=("75",)))
    job = Job(model, cache, {"model_ns": FAST})
    job.parts = replace(job.parts, target=CudaTarget.preset("a100"))
    outcome = job.run(mode)
    assert outcome["outcome"] == "failed"
    assert "makes no code for sm_80, only for 75: install another CUDA toolkit" in outcome["reason"]
    assert "answered by their baseline" in outcome["reason"]
    assert not tried(job)


def test_an_artifact_is_gated_again(model, cache):
    job = Job(model, cache, {"model_ns": FAST})
    assert job.run()["outcome"] == "passed"
    outcome = job.run(mode="gate")
    assert outcome["outcome"] == "passed", outcome
    slower = Job(model, cache, {"model_ns": SLOW})
    assert slower.run(mode="gate")["outcome"] == "refused"


def test_the_target_is_what_the_key_says():
    target = target_of(device_key(H100))
    assert (target.arch, target.num_sms, target.l2_bytes) == ("90a", 132, 50 << 20)
    assert target.tensor_tflops == CudaTarget.preset("h100").tensor_tflops
    assert target.memory_gbps == pytest.approx(3352, rel=0.001)
    slice_of_it = target_of(device_key({**H100, "name": "NVIDIA H800 MIG", "num_sms": 66}))
    assert slice_of_it.tensor_tflops == pytest.approx(target.tensor_tflops / 2)
    with pytest.raises(ValueError, match="architecture '120' is unknown"):
        target_of(device_key({**H100, "capability": (12, 0)}))


def test_kernels_whose_compiler_takes_too_much_are_not_built(tmp_path):
    target = CudaTarget.preset("h100")
    a, b, out = (TensorType(shape, "float16") for shape in ((256, 128), (128, 256), (256, 256)))
    workload = Workload("matmul", (a, b), out, (("weights", (1,)),))
    template = next(one for one in takers(workload, target, CUTLASS_TEMPLATES) if one.name == "cutlass.gemm3x")
    kernels = CachedKernels(KernelsCache(tmp_path / "cache"), target, memory_bytes=4 << 30)
    with pytest.raises(
        BuildFailed, match=r"raise --tuning-memory-mib to \d+ where so much is free, or build it before by"
    ):
        kernels.get(template, workload, template.candidates(workload, target)[0])


# --- schedules of what no kernel takes


@pytest.fixture
def wavy(tmp_path, monkeypatch):
    """One function that no kernel takes; functions of any size are searched, for a moment."""
    for name, value in (("max_function_seconds", 4.0), ("min_function_seconds", 0.1), ("min_microseconds", 0.0)):
        monkeypatch.setattr(GpuScheduleSearch, name, value)
    monkeypatch.setattr(metaschedule, "_PATIENCE", 16)  # so that a moment is enough to come to the end
    weights = {"w": np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)}
    nodes = [("MatMul", ["x", "w"], ["m"], {}), ("Sin", ["m"], ["y"], {})]
    return save_model(
        tmp_path / "wavy.onnx", nodes, {"x": ("float32", [16, 64])}, {"y": ("float32", [16, 64])}, weights
    )


def schedules_of(job):
    """Traces that the job compiles with, by function."""
    imported = import_model(job.model, SIGNATURE.shapes)
    found = GpuScheduleSearch(
        job.cache, job.device, Sources.installed(), job.parts.target, job.parts.templates, None, None
    )
    search = job.compile_step._search
    kernels = {digest: ranked.candidate for digest, ranked in search._best.items()}
    found.choices = Choices(kernels=kernels, precision=Precision(job.precision))
    return found.recall(imported)


def test_functions_that_no_kernel_takes_are_searched_and_remembered(wavy, cache):
    table = {"model_ns": FAST, "plain_function_ns": 500_000.0, "function_ns": 90_000.0}
    job = Job(wavy, cache, table)
    assert job.run()["outcome"] in ("passed", "refused")
    (trace,) = schedules_of(job).values()
    stages = [event.get("stage", "") for event in job.events]
    assert any(stage.startswith("trying schedules of") and "best 90.0 of 500.0 us" in stage for stage in stages)
    again = Job(wavy, cache, table)
    again.graph = "2" * 64
    again.run()
    assert not any("trying schedules" in event.get("stage", "") for event in again.events)
    # The record schedules the same function for a real GPU's compiler.
    target = CudaTarget.preset("a100")
    imported = import_model(wavy, SIGNATURE.shapes)
    (digest,) = schedules_of(job)
    compiled = compile_cuda_model(imported, target, Choices(schedules={digest: trace}, precision=Precision("tf32")))
    assert [one.rule for one in compiled.functions if one.digest == digest] == ["searched"]


def test_where_no_schedule_is_faster_that_is_remembered_too(wavy, cache):
    job = Job(wavy, cache, {"model_ns": FAST, "plain_function_ns": 50_000.0, "function_ns": 90_000.0})
    assert job.run()["outcome"] in ("passed", "refused")
    assert schedules_of(job) == {}
    again = Job(wavy, cache, {"model_ns": FAST})
    again.graph = "2" * 64
    again.run()
    assert not any("trying schedules" in event.get("stage", "") for event in again.events)


def test_a_careful_process_searches_no_schedules(wavy, cache, monkeypatch):
    job = Job(wavy, cache, {"model_ns": FAST})
    spec = job.spec()
    monkeypatch.setattr(job, "spec", lambda mode="build": {**spec, "careful": True})
    assert job.run()["outcome"] in ("passed", "refused")
    assert not any("trying schedules" in event.get("stage", "") for event in job.events)


# --- precision by the model's tolerance


@pytest.fixture
def uneven(tmp_path):
    """Three products, of which the last one's result is nearly all of the output."""
    rng = np.random.default_rng(0)
    weights = {f"w{i}": rng.standard_normal((64, 64)).astype(np.float32) / 8 for i in range(3)}
    nodes = [
        ("MatMul", ["x", "w0"], ["m0"], {}),
        ("MatMul", ["m0", "w1"], ["m1"], {}),
        ("Mul", ["m1", "little"], ["s1"], {}),
        ("MatMul", ["x", "w2"], ["m2"], {}),
        ("Add", ["s1", "m2"], ["y"], {}),
    ]
    weights["little"] = np.full(64, 0.01, np.float32)
    shapes = {"x": ("float32", [16, 64])}
    return save_model(tmp_path / "uneven.onnx", nodes, shapes, {"y": ("float32", [16, 64])}, weights)


class Tolerant(Job):
    def __init__(self, *arguments, tolerance, **named):
        super().__init__(*arguments, **named)
        self.tolerance = tolerance

    def spec(self, mode="build"):
        spec = {**super().spec(mode), "tolerance": self.tolerance}
        digest = artifact_key(
            graph=self.graph,
            signature=SIGNATURE,
            precision=self.precision,
            objective="latency",
            terms=Terms(self.tolerance, 0.03, 1, 0),
            device=self.device,
            sources=Sources.installed(),
        ).digest
        return {**spec, "tasks": [{"signature": SIGNATURE.to_json(), "digest": digest, "mode": mode}]}


def errors_of(model, cache, precision):
    """The largest error of a precision by itself, as the gate tells it."""
    outcome = Tolerant(model, cache, {"model_ns": FAST / 4}, precision=precision, tolerance=1e3).run()
    assert "max_error" in outcome["verdict"], outcome
    return outcome["verdict"]["max_error"]


def test_layers_stay_in_tf32_where_bfloat16_misses_the_tolerance(uneven, cache):
    low, high = errors_of(uneven, cache, "bf16"), errors_of(uneven, cache, "tf32")
    assert high < low / 2
    tolerance = (low * high) ** 0.5
    outcome = Tolerant(uneven, cache, {"model_ns": FAST / 4}, precision="bf16", tolerance=tolerance).run()
    assert outcome["verdict"]["max_error"] <= tolerance, outcome
    assert outcome["verdict"]["note"] == "kept in tf32: 1 of 3 layers: 2 (matmul to [16, 64])"


def test_tf32_that_misses_the_tolerance_becomes_float32(model, cache):
    error = errors_of(model, cache, "tf32")
    outcome = Tolerant(model, cache, {"model_ns": FAST}, precision="tf32", tolerance=error / 20).run()
    assert outcome["verdict"]["max_error"] <= error / 20, outcome
    assert "it is computed in f32" in outcome["verdict"]["note"]


def test_what_no_precision_reaches_is_refused_with_its_numbers(model, cache):
    outcome = Tolerant(model, cache, {"model_ns": FAST}, precision="tf32", tolerance=1e-12).run()
    assert outcome["outcome"] == "refused"
    assert "and in f32 too" in outcome["verdict"]["note"]
