"""The GPU at run time, on a real one: keys, copies, kernels under the profiler, and a model through the whole child."""

from __future__ import annotations

import ctypes
import hashlib
import threading

import numpy as np
import pynvml
import pytest

from hone.compiler.templates.cutlass.gemm2x import Gemm2x
from hone.compiler.templates.cutlass.published import published_kernel
from hone.compiler.workload import TensorType, Workload
from hone.engines.cuda_runtime import CudaError
from hone.kernels import KernelsCache
from hone.kernels.gpu_key import find_gpus
from hone.specialization import Signature
from hone.tuning.artifacts import Sources, Terms, artifact_key
from hone.tuning.compile import CacheLedger
from hone.tuning.gpu_compile import CudaCompile
from hone.tuning.gpu_operands import Operands
from hone.tuning.gpu_parts import CachedKernels, GpuParts, target_of
from hone.tuning.gpu_schedules import BuiltFunctions
from hone.tuning.kernel_trials import KernelTrials
from hone.tuning.profiler import Profiler, Subject
from hone.tuning.specialize import specialize_all
from tests.unit.engines.tvm_artifacts import save_model


@pytest.fixture(scope="session")
def key(cuda):
    pynvml.nvmlInit()
    try:
        return find_gpus(pynvml, cuda)[0].key
    finally:
        pynvml.nvmlShutdown()


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return KernelsCache(tmp_path_factory.mktemp("cache"))


def test_the_key_says_what_the_card_is(key):
    assert key.fields["num_sms"] > 0 and key.fields["l2_bytes"] > 1 << 18
    assert key.architecture.startswith("sm_")


def test_copies_come_back(gpu):
    gpu.bind()
    stream = gpu.cuda.create_stream()
    array = np.random.default_rng(0).standard_normal((3, 1000, 1001)).astype(np.float32)
    tensor = gpu.tensor_of(array, stream)
    found = gpu.download(tensor, array.shape, array.dtype, stream)
    gpu.cuda.synchronize(stream)
    np.testing.assert_array_equal(found, array)
    gpu.cuda.destroy_stream(stream)


def test_what_failed_is_not_told_of_the_next_launch(gpu):
    gpu.bind()
    with pytest.raises(CudaError) as caught:
        gpu.cuda.allocate_device(1 << 50)
    assert caught.value.is_out_of_memory
    assert gpu.cuda._library.cudaGetLastError() == 0
    event = gpu.cuda.create_event()
    stream = gpu.cuda.create_stream()
    gpu.cuda.record(event, stream)
    while not gpu.cuda.has_happened(event):
        assert gpu.cuda._library.cudaGetLastError() == 0
    gpu.cuda.destroy_event(event)
    gpu.cuda.destroy_stream(stream)


def test_memory_is_pinned_and_freed_while_another_thread_captures(gpu):
    """As TVM captures: in the mode that forbids it to every thread which has not said that it knows."""
    gpu.bind()
    stream = gpu.cuda.create_stream()
    assert gpu.cuda._library.cudaStreamBeginCapture(ctypes.c_void_p(stream), ctypes.c_int(0)) == 0
    problems = []

    def pin():
        try:
            gpu.cuda.free_pinned(gpu.cuda.allocate_pinned(1 << 20))
        except CudaError as problem:
            problems.append(problem)

    thread = threading.Thread(target=pin)
    thread.start()
    thread.join()
    gpu.cuda.destroy_graph(gpu.cuda.end_capture(stream))
    gpu.cuda.destroy_stream(stream)
    assert not problems


def test_copies_in_one_piece_are_the_same(gpu):
    gpu.bind()
    stream = gpu.cuda.create_stream()
    array = np.arange(1001, dtype=np.float32)
    for tensor in gpu.copies_of(array, 3, stream):
        found = gpu.download(tensor, array.shape, array.dtype, stream)
        gpu.cuda.synchronize(stream)
        np.testing.assert_array_equal(found, array)
    gpu.cuda.destroy_stream(stream)


def test_a_kernel_is_right_and_timed(gpu, key, cache):
    target, template = target_of(key), Gemm2x()
    shapes = ((512, 256), (256, 384), (512, 384))
    a, b, out = (TensorType(shape, "float16") for shape in shapes)
    workload = Workload("matmul", (a, b), out, (("weights", (1,)),))
    candidate = template.candidates(workload, target)[0]
    kernel = published_kernel(cache, template, workload, candidate, target)
    profiler = Profiler(gpu, KernelTrials(cache, key.digest))
    operands = Operands(workload, profiler)
    sets = operands.sets(template, candidate, target)
    subject = Subject(kernel.digest, lambda arguments: kernel(*arguments), sets)
    assert profiler.run_once(subject) is None
    left, right = (array.astype(np.float64) for array in operands._arrays)
    np.testing.assert_allclose(operands.output_of(sets[0]), left @ right, atol=0.1)
    timing = profiler.measure(subject)
    assert timing.ns > 0 and timing.by == "graph"
    profiler.close()


def test_a_model_goes_through_the_child(gpu, key, cache, tmp_path):
    rng = np.random.default_rng(0)
    weights = {
        "w": rng.standard_normal((64, 64)).astype(np.float32) / 8,
        "b": rng.standard_normal(64).astype(np.float32),
    }
    nodes = [("MatMul", ["x", "w"], ["m"], {}), ("Add", ["m", "b"], ["a"], {}), ("Relu", ["a"], ["y"], {})]
    shapes = {"x": ("float32", [16, 64])}
    model = save_model(tmp_path / "m.onnx", nodes, shapes, {"y": ("float32", [16, 64])}, weights)
    target, graph = target_of(key), hashlib.sha256(model.read_bytes()).hexdigest()
    signature = Signature.of([("x", "FP32", (16, 64))])
    digest = artifact_key(
        graph=graph,
        signature=signature,
        precision="tf32",
        objective="latency",
        terms=Terms(None, -0.99, 1, 0),
        device=key,
        sources=Sources.installed(),
    ).digest
    spec = {
        "path": str(model),
        "graph": graph,
        "graph_level": 0,
        "max_batch_size": 0,
        "precision": "tf32",
        "objective": "latency",
        "tolerance": None,
        "margin": -0.99,  # whether so small a model gains anything is not this test's business
        "seconds": 240.0,
        "run_threads": 1,
        "tasks": [{"signature": signature.to_json(), "digest": digest, "mode": "build"}],
    }
    events = []
    parts = GpuParts(gpu, target, CachedKernels(cache, target), lambda function: BuiltFunctions(target))
    compile_step = CudaCompile(spec, cache, key, parts)
    specialize_all(
        spec, lambda event, **told: events.append((event, told)), compile_step, CacheLedger(cache, key.digest)
    )
    (outcome,) = [told for event, told in events if event == "specialized"]
    assert outcome["outcome"] == "passed", outcome
