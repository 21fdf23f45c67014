"""Low precision through the pipeline: which layers are lowered, what is stored in bfloat16, and what models compute."""

from __future__ import annotations

import numpy as np
import pytest

from hone.compiler.choices import Choices
from hone.compiler.onnx_import import ImportedModel, import_model
from hone.compiler.phases.precision import LOW_PRECISIONS, Precision, unsupported
from hone.compiler.pipeline import compile_model, lowerable_layers, template_workloads
from hone.compiler.target import CpuTarget
from hone.compiler.templates.cpp.bf16 import FEATURES, missing_features
from hone.engines.tvm_runtime import TvmRuntime
from hone.tuning.gate import PRECISION_TOLERANCES
from tests.unit.engines.tvm_artifacts import baseline, compile_to, load, save_model

HOST = CpuTarget.detect(num_threads=1)
AVX512 = CpuTarget.of_features("cooperlake", FEATURES)
AVX2 = CpuTarget.of_features("haswell", ("avx2", "fma"))
BF16 = Precision("bf16")

pytestmark = pytest.mark.usefixtures("precompiled_headers")
runs_here = pytest.mark.skipif(bool(missing_features(HOST)), reason=f"this CPU has no {missing_features(HOST)}")


@pytest.fixture(scope="module")
def residual(tmp_path_factory):
    """A picture through a first layer, a block with a residual, pooling, and a dense layer."""
    rng = np.random.default_rng(0)

    def weight(*shape):
        return (rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)

    weights = {
        "w0": weight(32, 3, 3, 3), "b0": weight(32), "w1": weight(16, 32, 1, 1), "w2": weight(16, 16, 3, 3),
        "b2": weight(16), "w3": weight(32, 16, 1, 1), "w4": weight(32, 10), "b4": weight(10),
    }  # fmt: skip
    same = {"pads": [1, 1, 1, 1]}
    nodes = [
        ("Conv", ["x", "w0", "b0"], ["c0"], {"strides": [2, 2], **same}),
        ("Relu", ["c0"], ["r0"], {}),
        ("Conv", ["r0", "w1"], ["c1"], {}),
        ("Relu", ["c1"], ["r1"], {}),
        ("Conv", ["r1", "w2", "b2"], ["c2"], same),
        ("Relu", ["c2"], ["r2"], {}),
        ("Conv", ["r2", "w3"], ["c3"], {}),
        ("Add", ["c3", "r0"], ["a3"], {}),
        ("Relu", ["a3"], ["r3"], {}),
        ("GlobalAveragePool", ["r3"], ["p"], {}),
        ("Flatten", ["p"], ["f"], {}),
        ("Gemm", ["f", "w4", "b4"], ["y"], {}),
    ]
    path = tmp_path_factory.mktemp("precision") / "model.onnx"
    return save_model(path, nodes, {"x": ("float32", [2, 3, 17, 20])}, {"y": ("float32", [2, 10])}, weights)


def imported(path) -> ImportedModel:
    model = import_model(path, {})
    assert isinstance(model, ImportedModel), model
    return model


def dtypes(workloads):
    """Per lowered layer: what comes in, what goes out."""
    return sorted(
        (workload.op, workload.inputs[0].dtype, workload.output.dtype)
        for workload in workloads
        if dict(workload.attributes).get("precision") == "bf16"
    )


def test_values_between_lowered_layers_are_stored_in_bfloat16(residual):
    workloads = template_workloads(imported(residual), AVX512, BF16)
    assert dtypes(workloads) == [
        ("conv2d", "bfloat16", "bfloat16"),  # 1x1, down
        ("conv2d", "bfloat16", "bfloat16"),  # 3x3
        ("conv2d", "bfloat16", "float32"),  # its residual is bfloat16 too, its result is pooled
        ("conv2d", "float32", "bfloat16"),  # the picture
        ("matmul", "float32", "float32"),
    ]
    [last] = [w for w in workloads if w.op == "conv2d" and w.output.dtype == "float32"]
    assert [tensor.dtype for tensor in last.inputs] == ["bfloat16", "float32", "bfloat16"]


def test_a_layer_that_is_kept_gets_and_gives_float32(residual):
    model = imported(residual)
    layers = lowerable_layers(model, AVX512, "bf16")
    assert [layer.op for layer in layers] == ["conv2d"] * 4 + ["matmul"]
    assert all("precision" not in dict(layer.attributes) for layer in layers)
    workloads = template_workloads(model, AVX512, Precision("bf16", frozenset({2})))
    kept = [w for w in workloads if w.op == "conv2d" and "precision" not in dict(w.attributes)]
    assert kept == [layers[2]]
    assert {tensor.dtype for tensor in (*kept[0].inputs, kept[0].output)} == {"float32"}
    assert ("conv2d", "bfloat16", "float32") in dtypes(workloads)  # its producer
    everything = Precision("bf16", frozenset(range(len(layers))))
    assert template_workloads(model, AVX512, everything) == template_workloads(model, AVX512)


def test_float32_asks_for_nothing_new(residual):
    model = imported(residual)
    assert not any("precision" in dict(workload.attributes) for workload in template_workloads(model, HOST))
    assert not lowerable_layers(model, AVX2, "bf16")


@runs_here
@pytest.mark.parametrize("kept", [frozenset(), frozenset({0, 2}), frozenset({4})], ids=str)
def test_a_model_in_bfloat16_is_close_to_the_baseline(residual, tmp_path, kept):
    choices = Choices(precision=Precision("bf16", kept))
    compiled = compile_model(imported(residual), HOST, choices)
    names = [call.template.name for call in compiled.kernels]
    assert sum(name.startswith("cpp.") for name in names) == 5 - len(kept)
    folder = compile_to(tmp_path, residual, choices)
    engine = load(folder, TvmRuntime.load(num_threads=1), model=residual)
    x = np.random.default_rng(3).standard_normal((2, 3, 17, 20)).astype(np.float32)
    [found] = engine.instantiate().run({"x": x}, ["y"])
    [expected] = baseline(residual, {"x": x}, ["y"])
    scale = np.sqrt(np.mean(np.square(expected)))
    error = np.max(np.abs(found - expected) / np.maximum(np.abs(expected), scale))
    assert 1e-6 < error < PRECISION_TOLERANCES["bf16"]  # rounded, and not by much
    engine.close()


@pytest.mark.parametrize(
    ("precision", "target", "reason"),
    [
        ("f32", AVX2, ""),
        ("bf16", AVX512, ""),
        ("bf16", AVX2, "precision 'bf16' needs avx512f, avx512bw, avx512dq, avx512vl, avx512bf16"),
        (
            "bf16",
            CpuTarget.of_features("skylake-avx512", (*FEATURES[:4], "fma")),
            "precision 'bf16' needs avx512bf16, which this CPU (skylake-avx512) does not have",
        ),
        ("tf32", AVX512, "precision 'tf32' is not compiled for CPUs, only f32, " + ", ".join(LOW_PRECISIONS)),
    ],
)
def test_what_a_cpu_cannot_do_is_named(precision, target, reason):
    assert unsupported(precision, target).startswith(reason)
    assert bool(unsupported(precision, target)) == bool(reason)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    """Two convolutions and a dense layer as quantisers write them; the second has one scale for all its weights."""
    rng = np.random.default_rng(1)
    nodes, weights = [], {}

    def pair(value, name, scale, zero):
        weights[f"{name}_scale"], weights[f"{name}_zero"] = np.float32(scale), np.uint8(zero)
        nodes.append(("QuantizeLinear", [value, f"{name}_scale", f"{name}_zero"], [f"{name}_q"], {}))
        nodes.append(("DequantizeLinear", [f"{name}_q", f"{name}_scale", f"{name}_zero"], [name], {}))

    def weight(name, shape, axis, scale):
        weights[f"{name}_q"] = rng.integers(-127, 128, shape).astype(np.int8)
        weights[f"{name}_scale"] = scale
        weights[f"{name}_zero"] = np.zeros(np.shape(scale), np.int8)
        inputs = [f"{name}_q", f"{name}_scale", f"{name}_zero"]
        nodes.append(("DequantizeLinear", inputs, [name], {"axis": axis}))

    same = {"pads": [1, 1, 1, 1]}
    pair("x", "x0", 0.02, 120)
    weight("w0", (32, 3, 3, 3), 0, (rng.random(32) * 0.001 + 0.0005).astype(np.float32))
    nodes += [("Conv", ["x0", "w0"], ["c0"], same), ("Relu", ["c0"], ["r0"], {})]
    pair("r0", "x1", 0.005, 0)
    nodes.append(("MaxPool", ["x1"], ["p1"], {"kernel_shape": [2, 2], "strides": [2, 2]}))
    weight("w1", (48, 32, 3, 3), 0, np.float32(0.001))
    nodes.append(("Conv", ["p1", "w1"], ["c1"], same))
    pair("c1", "x2", 0.01, 128)
    nodes += [("GlobalAveragePool", ["x2"], ["g"], {}), ("Flatten", ["g"], ["f"], {})]
    pair("f", "x3", 0.002, 128)
    weight("w2", (48, 10), 1, (rng.random(10) * 0.001 + 0.0005).astype(np.float32))
    nodes.append(("MatMul", ["x3", "w2"], ["y"], {}))
    path = tmp_path_factory.mktemp("quantized") / "model.onnx"
    return save_model(path, nodes, {"x": ("float32", [2, 3, 10, 12])}, {"y": ("float32", [2, 10])}, weights)


VNNI = CpuTarget.of_features("cascadelake", LOW_PRECISIONS["int8"])


def test_layers_that_a_model_quantised_multiply_integers(quantized):
    workloads = template_workloads(imported(quantized), VNNI, Precision("int8"))
    lowered = {w.inputs[1].shape: dict(w.attributes) for w in workloads if "precision" in dict(w.attributes)}
    assert set(lowered) == {(32, 3, 3, 3), (48, 32, 3, 3), (48, 10)}
    assert (lowered[32, 3, 3, 3]["x_low"], lowered[48, 32, 3, 3]["x_low"], lowered[48, 10]["x_low"]) == (-120, 0, -128)
    assert "w_scale_at" in lowered[32, 3, 3, 3] and "w_scale_at" in lowered[48, 10]
    assert lowered[48, 32, 3, 3]["w_scale"] == pytest.approx(0.001)
    for workload in workloads:
        if [t.shape for t in workload.inputs[1:2]] == [(32, 3, 3, 3)]:  # the next layer's rounding rides along
            assert [step.op for step in workload.epilogue] == ["relu", "divide", "round", "clip", "multiply"]


def test_a_model_that_is_not_quantised_has_no_integer_layers(residual):
    assert not lowerable_layers(imported(residual), VNNI, "int8")


@pytest.mark.skipif(not set(LOW_PRECISIONS["int8"]) <= set(HOST.features), reason="this CPU has no AVX-512 VNNI")
def test_a_quantised_model_gives_the_baselines_numbers(quantized, tmp_path):
    choices = Choices(precision=Precision("int8"))
    compiled = compile_model(imported(quantized), HOST, choices)
    assert sum(call.template.name.endswith("_int8") for call in compiled.kernels) == 3
    folder = compile_to(tmp_path, quantized, choices)
    engine = load(folder, TvmRuntime.load(num_threads=1), model=quantized)
    x = np.random.default_rng(3).standard_normal((2, 3, 10, 12)).astype(np.float32)
    [found] = engine.instantiate().run({"x": x}, ["y"])
    [expected] = baseline(quantized, {"x": x}, ["y"])
    # Scaled sums are rounded to whole numbers: one that is close to a half may go the other way.
    np.testing.assert_allclose(found, expected, atol=0.02 * np.abs(expected).max())
    engine.close()
