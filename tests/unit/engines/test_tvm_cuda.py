"""The engine for GPUs on a device that stands for one: hone's own code, a fake CUDA runtime, the host's memory."""

from __future__ import annotations

import gc
import json
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from hone.engines.cuda_device import CPU_TYPE, CudaDevice
from hone.engines.cuda_runtime import CudaError, CudaRuntime
from hone.engines.pinned import PinnedPool
from hone.engines.tvm import PackedWeights
from hone.engines.tvm_artifact import KERNEL_FILE
from hone.engines.tvm_cuda import TvmCudaEngine, _let_go
from hone.engines.tvm_runtime import TvmRuntime
from hone.errors import DeviceLost, EngineBusy, EngineError
from hone.specialization import DEVICE_ORDINAL
from tests.fake_cuda import H100, LAUNCH_FAILURE, OUT_OF_MEMORY, FakeCudart
from tests.unit.engines.tvm_artifacts import CONSTANTS, MANIFEST, MODEL, baseline, compile_to, small_network


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("artifact")
    return compile_to(place / "made", small_network(place / "small.onnx", batch=2))


@pytest.fixture(scope="module")
def tvm_runtime():
    return TvmRuntime.load(1)


@pytest.fixture
def cudart():
    return FakeCudart([H100, H100])


@pytest.fixture
def devices(cudart, tvm_runtime):
    cuda = CudaRuntime(cudart)
    return [CudaDevice(cuda, tvm_runtime, ordinal, device_type=CPU_TYPE) for ordinal in range(2)]


def load(folder, devices, packed=None):
    manifest = json.loads((folder / MANIFEST).read_text())

    def constants(_):
        with np.load(folder / CONSTANTS) as file:
            return dict(file)

    return TvmCudaEngine.load(
        folder,
        manifest,
        model=folder / MODEL,
        kernels={digest: folder / "kernels" / digest / KERNEL_FILE for digest in manifest["kernels"]},
        constants=constants,
        devices=devices,
        packed=packed or PackedWeights(),
    )


def image(seed=0):
    return {"x": np.random.default_rng(seed).standard_normal((2, 3, 12, 12)).astype(np.float32)}


def test_it_answers_as_the_baseline_does(folder, devices):
    instance = load(folder, devices[:1]).instantiate()
    for seed in range(3):
        (found,) = instance.run(image(seed), ["y"])
        (expected,) = baseline(folder / MODEL, image(seed), ["y"])
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_each_tensor_is_copied_once_and_from_pinned_memory(folder, devices, cudart):
    instance = load(folder, devices[:1]).instantiate()
    cudart.copies.clear()
    instance.run(image(), ["y"])
    assert cudart.copies == [(1, 2 * 3 * 12 * 12 * 4), (2, 2 * 10 * 4)]


def test_answers_are_not_overwritten_while_they_live(folder, devices):
    instance = load(folder, devices[:1]).instantiate()
    (first,) = instance.run(image(0), ["y"])
    kept = first.copy()
    (second,) = instance.run(image(1), ["y"])
    np.testing.assert_array_equal(first, kept)
    assert not np.array_equal(first, second)


def test_pinned_memory_comes_back(folder, devices):
    device = devices[0]
    instance = load(folder, [device]).instantiate()
    instance.run(image(0), ["y"])
    taken = device.pinned.num_bytes
    for seed in range(5):
        instance.run(image(seed), ["y"])
    assert device.pinned.num_bytes == taken


def test_streams_go_with_instances(folder, devices, cudart):
    engine = load(folder, devices[:1])
    instance = engine.instantiate()
    assert len(cudart.streams) == 1
    del instance
    gc.collect()
    assert not cudart.streams


def test_each_card_has_its_weights_and_its_threads(folder, devices):
    packed = PackedWeights()
    engine = load(folder, devices, packed)
    one = load(folder, devices[:1], packed)
    num_weights = packed.num_weights
    assert num_weights % 2 == 0
    chosen = []

    def work(ordinal):
        DEVICE_ORDINAL.set(ordinal)
        instance = engine.instantiate()
        chosen.append((ordinal, instance._device.ordinal))
        (found,) = instance.run(image(), ["y"])
        (expected,) = one.instantiate().run(image(), ["y"])
        np.testing.assert_array_equal(found, expected)

    threads = [threading.Thread(target=work, args=(ordinal,)) for ordinal in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(chosen) == [(0, 0), (1, 1)]
    assert packed.num_weights == num_weights


def breaking(instance, cudart):
    """The instance's next kernels break the GPU's context."""
    main = instance._main

    def broken(*arguments):
        cudart.failure = LAUNCH_FAILURE
        return main(*arguments)

    instance._main = broken
    return instance


def test_who_breaks_the_device_is_told(folder, devices, cudart):
    instance = breaking(load(folder, devices[:1]).instantiate(), cudart)
    with pytest.raises(CudaError, match="unspecified launch failure") as raised:
        instance.run(image(), ["y"])
    assert isinstance(raised.value, EngineError)
    assert raised.value.is_poisoning
    assert "this process can use its GPUs no longer" in devices[0].cuda.lost


def test_others_are_not_to_blame(folder, devices, cudart):
    engine = load(folder, devices)
    other = load(folder, devices).instantiate()
    early = load(folder, devices).instantiate()
    with pytest.raises(CudaError):
        breaking(engine.instantiate(), cudart).run(image(), ["y"])
    for run in (lambda: other.run(image(), ["y"]), engine.instantiate, lambda: early.run(image(), ["y"])):
        with pytest.raises(DeviceLost, match="the GPU is lost: unspecified launch failure"):
            run()


def test_a_copy_that_finds_the_device_broken_is_not_to_blame(folder, devices, cudart):
    instance = load(folder, devices[:1]).instantiate()
    cudart.failure = LAUNCH_FAILURE  # by another, which has not told yet
    with pytest.raises(DeviceLost):
        instance.run(image(), ["y"])


def test_of_a_lost_device_nothing_is_freed(folder, devices, cudart):
    """Freeing what lies on it fails, in destructors, which ends the process."""
    engine = load(folder, devices[:1])
    instance = breaking(engine.instantiate(), cudart)
    with pytest.raises(CudaError):
        instance.run(image(), ["y"])
    held = [*instance._tensors, *(weight.tensor for weight in instance._weights), instance._machine]
    streams, pinned = set(cudart.streams), set(cudart.pinned)
    cleared = []
    devices[0].tvm = SimpleNamespace(clear_memory=lambda: cleared.append(True))
    del instance
    engine.close()
    del engine
    gc.collect()
    kept = [thing for things in devices[0].cuda._kept for thing in _flat(things)]
    assert all(any(thing is one for one in kept) for thing in held)
    assert not cleared
    assert (cudart.streams, set(cudart.pinned)) == (streams, pinned)


def _flat(things):
    for thing in things.values() if isinstance(things, dict) else things if isinstance(things, (list, tuple)) else ():
        yield from _flat(thing)
        yield thing
        if hasattr(thing, "tensor"):
            yield thing.tensor


def test_a_first_run_leaves_a_load_alone_and_later_ones_need_not(folder, devices):
    """TVM captures in the first run, which a model that is loaded onto a GPU would spoil."""
    early, late = (load(folder, devices[:1]).instantiate() for _ in range(2))
    early.run(image(), ["y"])
    with devices[0].captures:  # somebody loads
        (found,) = early.run(image(), ["y"])
        with pytest.raises(EngineBusy, match="a model is being loaded"):
            late.run(image(), ["y"])
    np.testing.assert_array_equal(late.run(image(), ["y"])[0], found)


def test_a_first_run_that_failed_is_still_the_first(folder, devices, monkeypatch):
    instance = load(folder, devices[:1]).instantiate()
    main = instance._main
    monkeypatch.setattr(instance, "_main", lambda *arguments: main())
    with pytest.raises(EngineError):
        instance.run(image(), ["y"])
    assert devices[0].captures.acquire(blocking=False)
    with pytest.raises(EngineBusy):
        instance.run(image(), ["y"])
    devices[0].captures.release()


def test_what_failed_before_is_not_the_next_kernels(folder, devices, cudart):
    instance = load(folder, devices[:1]).instantiate()
    main, kept = instance._main, []
    instance._main = lambda *arguments: kept.append(cudart.cudaGetLastError()) or main(*arguments)
    cudart.fail(OUT_OF_MEMORY)  # inside a library, which went on without it
    instance.run(image(), ["y"])
    assert kept == [0]


def test_wrong_inputs_are_named(folder, devices):
    instance = load(folder, devices[:1]).instantiate()
    with pytest.raises(EngineError, match="input 'x' is missing"):
        instance.run({}, ["y"])
    with pytest.raises(EngineError, match=r"input 'x' is float64 \[2, 3, 12, 12\], expected float32"):
        instance.run({"x": image()["x"].astype(np.float64)}, ["y"])
    with pytest.raises(EngineError, match="output 'z' is unknown"):
        instance.run(image(), ["z"])


def test_a_closed_engine_says_so(folder, devices):
    engine = load(folder, devices[:1])
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.instantiate()


def test_large_inputs_go_in_parts(devices, cudart):
    device = devices[0]
    stream = device.cuda.create_stream()
    array = np.random.default_rng(0).standard_normal((5, 300, 301)).astype(np.float32)
    cudart.copies.clear()
    tensor = device.tensor_of(array, stream)
    assert len(cudart.copies) == 2
    back = device.download(tensor, array.shape, array.dtype, stream)
    np.testing.assert_array_equal(back, array)


def test_copies_in_one_piece_are_apart_and_keep_it(devices, cudart):
    stream = devices[0].cuda.create_stream()
    array = np.arange(35, dtype=np.float32).reshape(5, 7)
    tensors = devices[0].copies_of(array, 3, stream)
    addresses = [tensor.data_ptr() for tensor in tensors]
    assert [one - addresses[0] for one in addresses] == [0, 256, 512]
    assert [kind for kind, _ in cudart.copies] == [1, 3, 3], "brought to the card once"
    last = tensors[-1]
    del tensors
    gc.collect()
    np.testing.assert_array_equal(np.from_dlpack(last), array)
    assert [tuple(one.shape) for one in devices[0].empty_copies(2, (), "float16")] == [(), ()]


def test_an_empty_tensor_is_no_copy(devices, cudart):
    device = devices[0]
    stream = device.cuda.create_stream()
    tensor = device.tensor_of(np.empty((0, 4), np.float32), stream)
    assert device.download(tensor, (0, 4), np.float32, stream).shape == (0, 4)
    assert not cudart.copies


def test_a_pool_keeps_no_more_than_it_may(cudart):
    pool = PinnedPool(CudaRuntime(cudart), keep_bytes=1 << 16)
    arrays = [pool.take(40_000) for _ in range(3)]
    assert pool.num_bytes == 3 << 16
    arrays.clear()
    gc.collect()
    assert pool.num_bytes == 1 << 16
    pool.close()
    assert pool.num_bytes == 0 and not cudart.pinned


def test_a_view_keeps_its_block(cudart):
    pool = PinnedPool(CudaRuntime(cudart))
    part = pool.take(100)[10:20]
    part[:] = 7
    other = pool.take(100)
    other[:] = 1
    assert (part == 7).all()


def test_without_a_driver_the_real_runtime_says_what_is_missing():
    cuda = CudaRuntime.load()
    assert cuda.runtime_version >= 13000
    try:
        num_devices = cuda.num_devices
    except CudaError as problem:
        assert "driver" in str(problem) or "device" in str(problem)
        assert not problem.is_poisoning
    else:
        assert num_devices >= 0


def test_a_missing_runtime_is_told(tmp_path):
    with pytest.raises(EngineError, match="install nvidia-cuda-runtime"):
        CudaRuntime.load([tmp_path / "libcudart.so.13"])


def test_out_of_memory_is_told_apart():
    error = CudaError("cudaHostAlloc", OUT_OF_MEMORY, "out of memory")
    assert error.is_out_of_memory and not error.is_poisoning


def test_what_a_gpu_holds_is_kept_also_where_the_stream_tells_first_that_it_is_lost(caplog):
    kept = []

    def destroy(stream):
        cuda.lost = "unspecified launch failure"
        raise CudaError("cudaStreamDestroy", LAUNCH_FAILURE, "unspecified launch failure")

    cuda = SimpleNamespace(lost="", destroy_stream=destroy, keep=lambda *held: kept.extend(held))
    held = [object()]
    _let_go(SimpleNamespace(cuda=cuda, ordinal=1), 7, held)
    assert kept == [held]
    assert "a stream on GPU 1 could not be destroyed" in caplog.text
