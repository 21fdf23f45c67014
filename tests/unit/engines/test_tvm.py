"""The tuned engine: right answers from memory as it lies, errors by name, and nothing left behind."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from hone.engines.tvm import PackedWeights, TvmEngine, aligned_empty
from hone.engines.tvm_parallel import ParallelPool
from hone.engines.tvm_runtime import TvmRuntime
from hone.errors import EngineError
from hone.types import TensorSpec
from tests.unit.engines.tvm_artifacts import MANIFEST, baseline, compile_to, load, save_model, small_network


@pytest.fixture(scope="module")
def runtime():
    return TvmRuntime.load(num_threads=1)


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    folder = tmp_path_factory.mktemp("network")
    return compile_to(folder / "artifact", small_network(folder / "model.onnx"))


def image(seed=0, *, aligned=True):
    data = np.random.default_rng(seed).standard_normal((1, 3, 12, 12)).astype(np.float32)
    if aligned:
        place = aligned_empty(data.shape, data.dtype)
        place[...] = data
        return place
    raw = np.empty(data.nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 64 + 4
    place = raw[start : start + data.nbytes].view(np.float32).reshape(data.shape)
    place[...] = data
    return place


def test_matches_the_baseline(network, runtime):
    engine = load(network, runtime)
    assert engine.inputs == (TensorSpec("x", "FP32", (1, 3, 12, 12)),)
    assert engine.outputs == (TensorSpec("y", "FP32", (1, 10)),)
    x = image()
    (y,) = engine.instantiate().run({"x": x}, ["y"])
    np.testing.assert_allclose(y, baseline(network / "model.onnx", {"x": x}, ["y"])[0], rtol=1e-5, atol=1e-6)
    engine.close()


@pytest.mark.parametrize("how", ["unaligned", "read-only", "of bytes", "not contiguous"])
def test_takes_memory_as_it_comes(network, runtime, how):
    instance = load(network, runtime).instantiate()
    expected = instance.run({"x": image(3)}, ["y"])[0].copy()
    x = image(3)
    if how == "unaligned":
        x = image(3, aligned=False)
    elif how == "read-only":
        x.flags.writeable = False
    elif how == "of bytes":
        x = np.frombuffer(x.tobytes(), np.float32).reshape(x.shape)
    else:
        x = np.asfortranarray(x)
    np.testing.assert_array_equal(instance.run({"x": x}, ["y"])[0], expected)


def test_aligned_input_is_not_copied(network, runtime):
    instance = load(network, runtime).instantiate()
    instance.run({"x": image()}, ["y"])
    assert not instance._scratch
    instance.run({"x": image(aligned=False)}, ["y"])
    assert list(instance._scratch) == [0]


def test_outputs_are_not_overwritten_by_later_runs(network, runtime):
    instance = load(network, runtime).instantiate()
    kept = [instance.run({"x": image(seed)}, ["y"])[0] for seed in range(8)]
    copies = [array.copy() for array in kept]
    for seed in range(8, 32):
        instance.run({"x": image(seed)}, ["y"])
    for array, copy in zip(kept, copies, strict=True):
        np.testing.assert_array_equal(array, copy)


def test_outputs_outlive_the_engine(network, runtime):
    engine = load(network, runtime)
    instance = engine.instantiate()
    (y,) = instance.run({"x": image()}, ["y"])
    copy = y.copy()
    del instance
    engine.close()
    np.testing.assert_array_equal(y, copy)
    with pytest.raises(EngineError, match="closed"):
        engine.instantiate()


def test_output_that_is_an_input_is_copied(tmp_path, runtime):
    model = save_model(
        tmp_path / "model.onnx",
        [
            ("Identity", ["x"], ["same"], {}),
            ("Reshape", ["x", "shape"], ["flat"], {}),
            ("Add", ["x", "x"], ["sum"], {}),
        ],
        {"x": ("float32", [2, 32])},
        {"same": ("float32", [2, 32]), "flat": ("float32", [64]), "sum": ("float32", [2, 32])},
        {"shape": np.array([64], np.int64)},
    )
    instance = load(compile_to(tmp_path / "artifact", model), runtime).instantiate()
    x = aligned_empty((2, 32), np.float32)
    x[...] = np.arange(64).reshape(2, 32)
    for _ in range(2):  # the first run finds out, later ones know
        same, flat, total = instance.run({"x": x}, ["same", "flat", "sum"])
        assert not np.shares_memory(same, x) and not np.shares_memory(flat, x)
        np.testing.assert_array_equal(same, x)
        np.testing.assert_array_equal(flat, x.reshape(64))
        np.testing.assert_array_equal(total, x + x)


def test_output_that_is_a_weight_is_copied(tmp_path, runtime):
    weight = np.arange(64, dtype=np.float32).reshape(2, 32)
    model = save_model(
        tmp_path / "model.onnx",
        [("Identity", ["w"], ["weight"], {}), ("Add", ["x", "w"], ["y"], {})],
        {"x": ("float32", [2, 32])},
        {"weight": ("float32", [2, 32]), "y": ("float32", [2, 32])},
        {"w": weight},
    )
    instance = load(compile_to(tmp_path / "artifact", model), runtime).instantiate()
    x = np.ones((2, 32), np.float32)
    instance.run({"x": x}, ["weight"])[0][...] = 7
    told, y = instance.run({"x": x}, ["weight", "y"])
    np.testing.assert_array_equal(told, weight)
    np.testing.assert_array_equal(y, weight + 1)


@pytest.mark.parametrize("outputs", [["w"], ["w", "y"], ["y", "w"], ["v", "w"], ["w", "a"], ["q"], ["q", "y"]])
def test_outputs_that_hang_on_no_input(tmp_path, runtime, outputs):
    """Weights, also quantized ones, that are outputs as they are: alone, beside each other, and beside a result."""
    weights = {
        "weight": np.arange(12, dtype=np.float32).reshape(3, 4),
        "other": np.arange(10, dtype=np.float32) / 3,
        "quantized": np.arange(-6, 6, dtype=np.int8).reshape(3, 4),
        "scale": np.array(0.5, np.float32),
    }
    nodes = {
        "w": ("Identity", ["weight"], ["w"], {}),
        "a": ("Identity", ["weight"], ["a"], {}),
        "v": ("Identity", ["other"], ["v"], {}),
        "q": ("DequantizeLinear", ["quantized", "scale"], ["q"], {}),
        "y": ("Add", ["x", "weight"], ["y"], {}),
    }
    shapes = {name: [10] if name == "v" else [3, 4] for name in outputs}
    model = save_model(
        tmp_path / "model.onnx",
        [nodes[name] for name in outputs],
        {"x": ("float32", [3, 4])},
        {name: ("float32", shape) for name, shape in shapes.items()},
        weights,
    )
    instance = load(compile_to(tmp_path / "artifact", model), runtime).instantiate()
    x = np.ones((3, 4), np.float32)
    results = instance.run({"x": x}, outputs)
    for got, expected in zip(results, baseline(model, {"x": x}, outputs), strict=True):
        np.testing.assert_array_equal(got, expected)
        got[...] = 7  # whoever gets an answer may do with it as they like
    np.testing.assert_array_equal(instance.run({"x": x}, outputs[:1])[0], baseline(model, {"x": x}, outputs[:1])[0])


WITHOUT_VECTORS = {
    "tan": [("Tan", ["x"], ["y"], {})],
    "sinh": [("Sinh", ["x"], ["y"], {})],
    "cosh": [("Cosh", ["x"], ["y"], {})],
    "sin / cos": [("Sin", ["x"], ["s"], {}), ("Cos", ["x"], ["c"], {}), ("Div", ["s", "c"], ["y"], {})],
    "sum of tan": [("Tan", ["x"], ["t"], {}), ("ReduceSum", ["t", "axes"], ["y"], {"keepdims": 1})],
    "tan - largest": [
        ("Tan", ["x"], ["t"], {}),
        ("ReduceMax", ["t"], ["m"], {"axes": [1]}),
        ("Sub", ["t", "m"], ["y"], {}),
    ],
}


@pytest.mark.parametrize("what", WITHOUT_VECTORS)
def test_functions_of_which_llvm_makes_no_right_vectors(tmp_path, runtime, what):
    x = np.linspace(-1.5, 1.5, 8 * 96, dtype=np.float32).reshape(8, 96)
    nodes = WITHOUT_VECTORS[what]
    shape = [8, 1] if what == "sum of tan" else [8, 96]
    axes = {"axes": np.array([1], np.int64)}
    model = save_model(tmp_path / "m.onnx", nodes, {"x": ("float32", [8, 96])}, {"y": ("float32", shape)}, axes)
    (y,) = load(compile_to(tmp_path / "artifact", model), runtime).instantiate().run({"x": x}, ["y"])
    np.testing.assert_allclose(y, baseline(model, {"x": x}, ["y"])[0], rtol=1e-5, atol=1e-4)


def test_tiles_of_powers_of_two(tmp_path, runtime):
    """LLVM makes wrong code of the remainders by which TVM tiles, on CPUs with AVX-512."""
    model = save_model(
        tmp_path / "model.onnx",
        [("Tile", ["x", "repeats"], ["y"], {})],
        {"x": ("float32", [2, 3, 4, 5])},
        {"y": ("float32", [14, 18, 16, 10])},
        {"repeats": np.array([7, 6, 4, 2], np.int64)},
    )
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 5)).astype(np.float32)
    (y,) = load(compile_to(tmp_path / "artifact", model), runtime).instantiate().run({"x": x}, ["y"])
    np.testing.assert_array_equal(y, np.tile(x, (7, 6, 4, 2)))


@pytest.mark.parametrize("operator", ["Sin", "ReduceSum"])
def test_inputs_without_items(tmp_path, runtime, operator):
    model = save_model(
        tmp_path / "model.onnx",
        [("Sin", ["x"], ["y"], {}) if operator == "Sin" else ("ReduceSum", ["x", "axes"], ["y"], {})],
        {"x": ("float32", [2, 0, 4])},
        {"y": ("float32", [2, 0, 4] if operator == "Sin" else [2, 0, 1])},
        {} if operator == "Sin" else {"axes": np.array([2], np.int64)},
    )
    instance = load(compile_to(tmp_path / "artifact", model), runtime).instantiate()
    for x in (np.empty((2, 0, 4), np.float32), aligned_empty((2, 0, 4), np.float32)):
        (y,) = instance.run({"x": x}, ["y"])
        assert y.shape == baseline(model, {"x": x}, ["y"])[0].shape


def test_picks_outputs_by_name(tmp_path, runtime):
    model = save_model(
        tmp_path / "model.onnx",
        [("Add", ["a", "b"], ["sum"], {}), ("Mul", ["a", "b"], ["product"], {})],
        {"a": ("float32", [4]), "b": ("float32", [4])},
        {"sum": ("float32", [4]), "product": ("float32", [4])},
    )
    instance = load(compile_to(tmp_path / "artifact", model), runtime).instantiate()
    a, b = np.array([1, 2, 3, 4], np.float32), np.full(4, 5, np.float32)
    (product,) = instance.run({"b": b, "a": a}, ["product"])
    np.testing.assert_array_equal(product, a * b)
    product, total = instance.run({"a": a, "b": b}, ("product", "sum"))
    np.testing.assert_array_equal(total, a + b)
    np.testing.assert_array_equal(product, a * b)


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8", "bool", "float16", "bfloat16"])
def test_datatypes(tmp_path, runtime, dtype):
    numpy_dtype = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    model = save_model(
        tmp_path / "model.onnx",
        [("Transpose", ["x"], ["y"], {"perm": [1, 0]})],
        {"x": (dtype, [3, 5])},
        {"y": (dtype, [5, 3])},
    )
    instance = load(compile_to(tmp_path / "artifact", model), runtime).instantiate()
    x = (np.arange(15).reshape(3, 5) % 2).astype(numpy_dtype)
    (y,) = instance.run({"x": x}, ["y"])
    assert y.dtype == numpy_dtype
    np.testing.assert_array_equal(y, x.T)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "input 'x' is missing"),
        ({"x": np.zeros((1, 3, 12, 13), np.float32)}, r"'x' is float32 \[1, 3, 12, 13\], expected float32"),
        ({"x": np.zeros((1, 3, 12, 12), np.float64)}, "'x' is float64"),
    ],
)
def test_wrong_inputs(network, runtime, inputs, message):
    with pytest.raises(EngineError, match=message):
        load(network, runtime).instantiate().run(inputs, ["y"])


def test_unknown_output(network, runtime):
    with pytest.raises(EngineError, match="output 'z' is unknown"):
        load(network, runtime).instantiate().run({"x": image()}, ["z"])


def test_each_thread_runs_its_own_machine(network, runtime):
    engine = load(network, runtime)
    expected = {seed: engine.instantiate().run({"x": image(seed)}, ["y"])[0].copy() for seed in range(4)}
    failures = []

    def work(seed: int) -> None:
        instance = engine.instantiate()
        for _ in range(200):
            if not np.array_equal(instance.run({"x": image(seed)}, ["y"])[0], expected[seed]):
                failures.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_instances_of_other_numbers_of_threads_take_turns(network, runtime):
    used = []

    class Recording(ParallelPool):
        def use_threads(self, num_threads: int) -> None:
            used.append(num_threads)

    engine = load(network, replace(runtime, num_threads=2, parallel=Recording()))
    x = image()
    expected = baseline(network / "model.onnx", {"x": x}, ["y"])[0]
    alone, together = engine.instantiate(1), engine.instantiate()
    for instance in (together, alone, alone, together, alone):
        np.testing.assert_allclose(instance.run({"x": x}, ["y"])[0], expected, rtol=1e-5, atol=1e-6)
    assert used == [2, 1, 1, 2, 1]


def test_engines_share_equal_weights_and_no_others(network, runtime, tmp_path):
    packed = PackedWeights()
    first = load(network, runtime, packed)
    again = load(network, runtime, packed)
    assert all(a is b for a, b in zip(first._weights, again._weights, strict=True))
    # Another batch size packs the same weights the same way; another model has others.
    batch = compile_to(tmp_path / "batch", small_network(tmp_path / "batch.onnx", batch=4))
    bigger = load(batch, runtime, packed)
    assert all(any(a is b for b in first._weights) for a in bigger._weights)
    other = load(compile_to(tmp_path / "other", small_network(tmp_path / "other.onnx", seed=1)), runtime, packed)
    assert not any(a is b for a in other._weights for b in first._weights)


def test_weights_live_as_long_as_an_engine_uses_them(network, runtime):
    packed = PackedWeights()
    first, second = load(network, runtime, packed), load(network, runtime, packed)
    first.close()
    assert packed.num_weights == len(second._weights)
    x = image()
    np.testing.assert_allclose(
        second.instantiate().run({"x": x}, ["y"])[0],
        baseline(network / "model.onnx", {"x": x}, ["y"])[0],
        rtol=1e-5,
        atol=1e-6,
    )
    second.close()
    assert packed.num_weights == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(format=99), "format is 99"),
        (lambda m: m.pop("packed"), "incomplete: KeyError 'packed'"),
        (lambda m: m["kernels"].append("0" * 64), "does not load|not in the cache"),
        (lambda m: m["inputs"][0].update(datatype="COMPLEX"), "datatype 'COMPLEX'"),
        (lambda m: m["packed"].pop(), "packs"),
        (lambda m: next(iter(m["params"].values())).update(sha256="0" * 64), "not the one that the artifact was made"),
        (lambda m: next(iter(m["params"].values())).update(shape=[1]), "the artifact was made for"),
        (lambda m: next(iter(m["params"].values())).update(initializer="gone"), "no initializer 'gone'"),
    ],
)
def test_manifest_that_does_not_fit(network, runtime, change, message):
    manifest = json.loads((network / MANIFEST).read_text(encoding="utf-8"))
    change(manifest)
    with pytest.raises(EngineError, match=message):
        load(network, runtime, manifest=manifest)


def test_weights_of_another_model_are_refused(network, runtime, tmp_path):
    with pytest.raises(EngineError, match="is not the one that the artifact was made for"):
        load(network, runtime, model=small_network(tmp_path / "other.onnx", seed=5))


def test_library_that_is_none(network, runtime, tmp_path):
    told = json.loads((network / MANIFEST).read_text(encoding="utf-8"))
    (tmp_path / "module.so").write_bytes(b"\x7fELF not a library")
    with pytest.raises(EngineError, match=r"module.so does not load") as caught:
        TvmEngine.load(
            tmp_path, told, model=network / "model.onnx", kernels={}, constants=lambda _: {}, runtime=runtime,
            packed=PackedWeights(),
        )  # fmt: skip
    assert str(tmp_path) not in str(caught.value)


def test_kernel_that_is_missing(network, runtime):
    told = json.loads((network / MANIFEST).read_text(encoding="utf-8"))
    with pytest.raises(EngineError, match="is not in the cache"):
        TvmEngine.load(
            network, told, model=network / "model.onnx", kernels={}, constants=lambda _: {}, runtime=runtime,
            packed=PackedWeights(),
        )  # fmt: skip


_WITHOUT_TVM = """
import gc, os, sys
from pathlib import Path
import numpy as np
from hone.engines.tvm_runtime import TvmRuntime
from tests.unit.engines.tvm_artifacts import load

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

def mapped():
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if sys.argv[1] in line]

before = os.sched_getaffinity(0)
start = resident()
runtime = TvmRuntime.load(num_threads=2)
print("runtime", resident() - start)
x = np.ones((1, 3, 12, 12), np.float32)
sizes = []
for round in range(30):
    engine = load(Path(sys.argv[1]), runtime)
    instance = engine.instantiate()
    for _ in range(20):
        (y,) = instance.run({"x": x}, ["y"])
    if round == 0:
        print("held", len(mapped()))
    del instance
    engine.close()
    del engine, y
    gc.collect()
    sizes.append(resident())
print("grown", max(sizes[10:]) - sizes[9])
print("mapped", len(mapped()))
print("tvm", "tvm" in sys.modules)
print("pinned", os.sched_getaffinity(0) != before)
"""


@pytest.fixture(scope="module")
def told_without_tvm(network):
    ran = subprocess.run(
        [sys.executable, "-c", _WITHOUT_TVM, str(network)],
        capture_output=True, text=True, check=False, timeout=100, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return dict(line.split() for line in ran.stdout.splitlines())


def test_runs_without_the_tvm_package(told_without_tvm):
    assert told_without_tvm["tvm"] == "False"
    assert int(told_without_tvm["runtime"]) < 12 << 20


def test_unloaded_files_are_not_mapped(told_without_tvm):
    assert int(told_without_tvm["held"]) > 0
    assert told_without_tvm["mapped"] == "0"


def test_thirty_loads_leave_memory_flat(told_without_tvm):
    assert int(told_without_tvm["grown"]) < 2 << 20


def test_threads_are_not_bound_to_cores(told_without_tvm):
    assert told_without_tvm["pinned"] == "False"
