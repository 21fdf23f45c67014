"""ONNX Runtime on a GPU that is not there: hone's own code, a CUDA runtime that does everything as late as it may, and
a session that stands for one with the CUDA provider: it computes on the CPU what lies in the "card's" memory."""

from __future__ import annotations

import gc
import threading

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from hone.engines import onnxruntime, onnxruntime_cuda
from hone.engines.cuda_runtime import CudaRuntime
from hone.engines.cuda_transfers import CudaTransfers
from hone.engines.onnxruntime import OnnxRuntimeEngine, SessionSettings
from hone.engines.onnxruntime_cuda import load_baseline
from hone.errors import DeviceLost, EngineError
from hone.types import NUMPY_DTYPES
from tests.fake_cuda import H100, LAUNCH_FAILURE, SUCCESS, LazyCudart
from tests.fake_onnxruntime import Session

SETTINGS = SessionSettings(0, 1, gpu=1)


def network(path):
    """Y = X + X; N = the numbers in X that are not zero, whose count depends on X."""
    nodes = [
        helper.make_node("Add", ["X", "X"], ["Y"]),
        helper.make_node("Compress", ["X", "KEEP"], ["N"], axis=0),
    ]
    inputs = [
        helper.make_tensor_value_info("X", TensorProto.FLOAT, ["n"]),
        helper.make_tensor_value_info("KEEP", TensorProto.BOOL, ["n"]),
    ]
    outputs = [
        helper.make_tensor_value_info("Y", TensorProto.FLOAT, ["n"]),
        helper.make_tensor_value_info("N", TensorProto.FLOAT, ["m"]),
    ]
    return _save(path, nodes, inputs, outputs)


def _save(path, nodes, inputs, outputs):
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


@pytest.fixture
def cudart():
    return LazyCudart([H100, H100])


@pytest.fixture
def transfers(cudart):
    return CudaTransfers(CudaRuntime(cudart))


@pytest.fixture
def load(cudart, transfers, monkeypatch):
    made = []

    def make(path, graph_level, num_threads, cuda=None):
        made.append((graph_level, num_threads, cuda))
        return Session(path, cudart, int(cuda["device_id"]), int(cuda["user_compute_stream"]))

    def load(path, **more):
        monkeypatch.setattr(onnxruntime_cuda, "make_session", make)
        return load_baseline(path, SETTINGS, transfers, **more)

    load.made = made
    return load


@pytest.fixture
def path(tmp_path):
    return network(tmp_path / "model.onnx")


def given(*numbers):
    x = np.array(numbers, np.float32)
    return {"X": x, "KEEP": x != 0}


def test_the_session_is_on_its_card_and_on_a_stream_of_its_own(load, path, cudart):
    engine = load(path)
    assert load.made == [(0, 1, {"device_id": "1", "user_compute_stream": str(engine.stream.handle)})]
    assert engine.stream.handle in cudart.streams
    assert engine.kind == "onnxruntime"
    assert [spec.name for spec in engine.inputs] == ["X", "KEEP"]


def test_libraries_from_pypi_are_loaded_for_the_provider_and_its_complaints_told(path, monkeypatch, capsys):
    """The provider's own library does not look among PyPI's packages. The ONNX Runtime of this environment has none."""
    calls = []

    def preload():
        calls.append(1)
        print("Failed to load libcublasLt.so.13: no such file")

    onnxruntime._load_cuda_libraries.cache_clear()
    monkeypatch.setattr(onnxruntime.ort, "preload_dlls", preload)
    really = onnxruntime._open
    monkeypatch.setattr(onnxruntime, "_open", lambda *told: really(*told[:3], ["CPUExecutionProvider"]))
    try:
        onnxruntime.make_session(path, 0, 1)
        assert not calls, "the CPU needs none"
        for _ in range(2):
            with pytest.raises(EngineError, match=r"did not start on GPU 0.*Failed to load libcublasLt"):
                onnxruntime.make_session(path, 0, 1, {"device_id": "0"})
        assert calls == [1]
        assert capsys.readouterr().out == ""
    finally:
        onnxruntime._load_cuda_libraries.cache_clear()


def test_a_load_waits_for_captures_and_they_for_it(load, path, transfers, monkeypatch):
    held = []
    real = onnxruntime_cuda.cuda_provider
    monkeypatch.setattr(
        onnxruntime_cuda, "cuda_provider", lambda *told: held.append(transfers.captures.locked()) or real(*told)
    )
    load(path)
    assert held == [True]
    assert not transfers.captures.locked()


def test_memory_is_left_for_others(load, path, cudart):
    cudart.free_bytes = 5 << 30
    load(path, reserve_bytes=1 << 30)
    options = load.made[0][2]
    assert options["gpu_mem_limit"] == str(4 << 30)
    assert options["arena_extend_strategy"] == "kSameAsRequested"
    streams = set(cudart.streams)
    with pytest.raises(EngineError, match="5120 MiB of GPU 1 are free, and as much is kept for serving"):
        load(path, reserve_bytes=5 << 30)
    assert cudart.streams == streams


def test_outputs_are_those_of_the_cpu_whatever_their_shapes(load, path):
    instance = load(path).instantiate()
    for numbers in ((1, 0, 3), (0, 0, 5), (1, 2, 3, 4, 5), ()):
        y, n = instance.run(given(*numbers), ["Y", "N"])
        np.testing.assert_array_equal(y, 2 * np.array(numbers, np.float32))
        np.testing.assert_array_equal(n, [number for number in numbers if number])
    (n,) = instance.run(given(7, 0), ["N"])
    np.testing.assert_array_equal(n, [7])


def test_each_tensor_is_copied_once_through_pinned_memory(load, path, cudart):
    instance = load(path).instantiate()
    instance.run(given(1, 0, 3), ["Y", "N"])
    cudart.copies.clear()  # the fake refuses any copy whose host side is not pinned
    instance.run(given(1, 0, 3), ["Y", "N"])
    assert cudart.copies == [(1, 12), (1, 3), (2, 12), (2, 8)]


def test_memory_is_used_again_and_nothing_bound_anew(load, path, cudart, transfers):
    engine = load(path)
    instance = engine.instantiate()
    instance.run(given(1, 0, 3), ["Y", "N"])
    taken = set(cudart.allocated), transfers.pinned.num_bytes
    (binding,) = engine.session.bindings
    assert binding.num_bound == 2
    for number in range(5):
        instance.run(given(number, 0, 3), ["Y", "N"])
    assert (set(cudart.allocated), transfers.pinned.num_bytes) == taken
    assert binding.num_bound == 2
    instance.run(given(1, 2), ["Y"])
    assert binding.num_bound == 4
    assert set(cudart.allocated) == taken[0]


def test_larger_inputs_get_larger_memory_and_the_old_one_goes(load, path, cudart):
    instance = load(path).instantiate()
    instance.run(given(1), ["Y"])
    small = set(cudart.allocated)
    numbers = np.arange(1, 2001, dtype=np.float32)
    (y,) = instance.run(given(*numbers), ["Y"])
    np.testing.assert_array_equal(y, 2 * numbers)
    gc.collect()
    assert len(cudart.allocated) == 2
    assert set(cudart.allocated) != small


def test_answers_stay_as_they_are_while_somebody_looks(load, path):
    instance = load(path).instantiate()
    answers = [instance.run(given(number, 1), ["Y"])[0] for number in range(4)]
    np.testing.assert_array_equal(answers, [[2 * number, 2] for number in range(4)])


def test_inputs_of_another_type_and_two_bytes(tmp_path, load):
    nodes = [helper.make_node("Identity", ["X"], ["Y"])]
    told = [helper.make_tensor_value_info(name, TensorProto.BFLOAT16, [2]) for name in ("X", "Y")]
    engine = load(_save(tmp_path / "b.onnx", nodes, told[:1], told[1:]))
    engine.session.real = type("Real", (), {"run": staticmethod(lambda names, inputs: [inputs["X"]])})
    x = np.array([1.5, -2], NUMPY_DTYPES["BF16"])
    (y,) = engine.instantiate().run({"X": x}, ["Y"])
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(y.view(np.uint16), x.view(np.uint16))


def test_text_goes_by_onnx_runtimes_own_copies(tmp_path, load):
    nodes = [helper.make_node("Identity", ["X"], ["Y"])]
    told = [helper.make_tensor_value_info(name, TensorProto.STRING, [1]) for name in ("X", "Y")]
    engine = load(_save(tmp_path / "t.onnx", nodes, told[:1], told[1:]))
    (y,) = engine.instantiate().run({"X": np.array([b"word"], np.object_)}, ["Y"])
    assert y[0] == b"word"
    assert engine.session.num_plain == 1


def test_instances_of_two_threads_take_turns_on_the_card(load, path):
    engine = load(path)
    found = {}

    def work(number):
        instance = engine.instantiate()
        found[number] = [instance.run(given(number, turn), ["Y"])[0] for turn in range(50)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(3):
        np.testing.assert_array_equal(found[number], [[2 * number, 2 * turn] for turn in range(50)])


def test_a_failed_run_is_told_and_the_next_one_is_right(load, path):
    engine = load(path)
    instance = engine.instantiate()

    def fail():
        raise RuntimeError("[ONNXRuntimeError] : 1 : FAIL : out of memory")

    engine.session.fails = fail
    with pytest.raises(EngineError, match=r"onnxruntime: \[ONNXRuntimeError\] : 1 : FAIL : out of memory"):
        instance.run(given(1, 2), ["Y"])
    engine.session.fails = None
    np.testing.assert_array_equal(instance.run(given(3, 4), ["Y"])[0], [6, 8])


def test_all_goes_with_the_engine(load, path, cudart, transfers):
    engine = load(path)
    instance = engine.instantiate()
    (y,) = instance.run(given(1, 2), ["Y"])
    del instance
    engine.close()
    stream = engine.stream
    assert stream.handle in cudart.streams
    del engine, stream
    gc.collect()
    assert not cudart.streams and not cudart.allocated and not cudart.events
    np.testing.assert_array_equal(y, [2, 4])
    with pytest.raises(EngineError, match="closed"):
        closed = load(path)
        closed.close()
        closed.instantiate()


def test_outputs_that_a_copy_still_goes_to_are_held_when_another_fails(load, path, cudart, transfers, monkeypatch):
    instance = load(path).instantiate()
    instance.run(given(1, 2), ["Y"])
    gc.collect()
    staging = transfers.pinned.usage[1]
    download, synchronize = transfers.download, transfers.cuda.synchronize
    arrays, used = [], []

    def fails_the_second_time(*arguments):
        arrays.append(arguments)
        if len(arrays) == 2:
            raise EngineError("no more can be pinned")
        return download(*arguments)

    def look(stream):
        used.append(transfers.pinned.usage[1] - staging)
        synchronize(stream)

    monkeypatch.setattr(transfers, "download", fails_the_second_time)
    monkeypatch.setattr(transfers.cuda, "synchronize", look)
    with pytest.raises(EngineError, match="no more can be pinned"):
        instance.run(given(1, 2), ["Y", "N"])
    assert used[0] > 0


def test_inputs_that_were_not_all_bound_are_bound_anew(load, path, monkeypatch):
    engine = load(path)
    instance = engine.instantiate()
    instance.run(given(1, 0), ["Y"])
    (binding,) = engine.session.bindings

    def fails(*arguments):
        raise EngineError("told to fail")

    with monkeypatch.context() as patched:
        patched.setattr(binding, "bind_input", fails)
        with pytest.raises(EngineError, match="told to fail"):
            instance.run(given(1, 2, 3), ["Y"])
    np.testing.assert_array_equal(instance.run(given(4, 0), ["Y"])[0], [8, 0])


# --- the GPU is lost


@pytest.fixture
def lose(cudart):
    def kill():
        cudart.failure = LAUNCH_FAILURE
        raise RuntimeError("CUDA failure 719: unspecified launch failure ; GPU=1")

    return kill


def test_a_lost_gpu_is_followed_by_the_cpu(load, path, cudart, lose, caplog):
    engine = load(path)
    instance = engine.instantiate()
    instance.run(given(1, 2), ["Y"])
    engine.session.fails = lose
    np.testing.assert_array_equal(instance.run(given(3, 4), ["Y"])[0], [6, 8])
    np.testing.assert_array_equal(instance.run(given(5, 6), ["Y"])[0], [10, 12])
    np.testing.assert_array_equal(engine.instantiate().run(given(7, 8), ["Y"])[0], [14, 16])
    assert caplog.text.count("a model that ran on GPU 1 goes on on the CPU: unspecified launch failure") == 1
    assert "a new one can" in engine.transfers.cuda.lost


def test_what_a_lost_gpu_holds_is_never_freed(load, path, cudart, lose):
    engine = load(path)
    instance = engine.instantiate()
    engine.session.fails = lose
    instance.run(given(3, 4), ["Y"])
    held = set(cudart.streams), set(cudart.allocated), set(cudart.pinned)
    session = engine.session
    del instance
    engine.close()
    del engine
    gc.collect()
    assert (set(cudart.streams), set(cudart.allocated), set(cudart.pinned)) == held
    assert any(referrer for referrer in gc.get_referrers(session) if isinstance(referrer, tuple))


def test_what_is_loaded_afterwards_is_on_the_cpu_from_the_start(load, path, lose):
    engine = load(path)
    engine.session.fails = lose
    engine.instantiate().run(given(3, 4), ["Y"])
    later = load(path)
    assert type(later) is OnnxRuntimeEngine
    np.testing.assert_array_equal(later.instantiate().run(given(3, 4), ["Y"])[0], [6, 8])


def test_where_the_cpu_is_no_answer_the_loss_is_told(load, path, lose):
    engine = load(path, falls_back=False)
    instance = engine.instantiate()
    engine.session.fails = lose
    with pytest.raises(DeviceLost, match="the GPU is lost: unspecified launch failure"):
        instance.run(given(3, 4), ["Y"])


def test_a_session_for_the_cpu_needs_no_transfers(path):
    engine = load_baseline(path, SessionSettings(0, 1))
    assert type(engine) is OnnxRuntimeEngine
    engine.close()
    with pytest.raises(ValueError, match="transfers"):
        load_baseline(path, SETTINGS)
    with pytest.raises(ValueError, match="found those for GPU 1"):
        OnnxRuntimeEngine.load(path, SETTINGS)


def test_other_failures_are_no_loss(transfers, cudart):
    cudart.failure = 2
    with pytest.raises(EngineError, match="out of memory"):
        transfers.cuda.synchronize(1)
    assert not transfers.cuda.lost
    cudart.failure = SUCCESS
    transfers.cuda.check_not_lost()
