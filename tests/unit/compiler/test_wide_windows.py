"""Windows so wide that a kernel which writes them out takes minutes to compile: they are built in seconds."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from hone.compiler.templates.cpu.emit import MAX_WRITTEN, Axis, num_edges, written_steps
from hone.engines.tvm_runtime import TvmRuntime
from tests.unit.compiler.graphs import model, run
from tests.unit.engines.tvm_artifacts import compile_to, load

#: Name: (shape of the data, shape of the weights, the operator with its attributes).
WINDOWS = {
    "spectrum": ((1, 1, 1, 640), (258, 1, 1, 256), "Conv <strides = [1, 128]> (x, w)"),
    "filter with padding": ((1, 16, 1, 320), (32, 16, 1, 127), "Conv <pads = [0, 63, 0, 63]> (x, w)"),
    "positions": ((1, 64, 1, 96), (64, 8, 1, 64), "Conv <group = 8, pads = [0, 32, 0, 31]> (x, w)"),
    "depthwise": ((1, 32, 1, 320), (32, 1, 1, 128), "Conv <group = 32, pads = [0, 64, 0, 63]> (x, w)"),
    "large depthwise": ((1, 16, 40, 40), (16, 1, 31, 31), "Conv <group = 16, pads = [15, 15, 15, 15]> (x, w)"),
    "transposed": ((1, 16, 1, 32), (16, 16, 1, 128), "ConvTranspose <strides = [1, 8]> (x, w)"),
    "pooling": ((1, 16, 40, 40), None, "MaxPool <kernel_shape = [32, 32]> (x)"),
    "mean": ((1, 16, 20, 30), None, "AveragePool <kernel_shape = [20, 30]> (x)"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", WINDOWS)
def test_they_compile_in_time(name, tmp_path):
    data, weights, operator = WINDOWS[name]
    rng = np.random.default_rng(0)
    shape = ", ".join(map(str, data))
    proto = model(f"g (float[{shape}] x) => (float[a, b, c, d] y) {{ y = {operator} }}")
    if weights is not None:
        values = (rng.standard_normal(weights) / np.sqrt(np.prod(weights[1:]))).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(values, "w"))
    path = tmp_path / "model.onnx"
    onnx.save(proto, path)
    engine = load(compile_to(tmp_path / "artifact", path), TvmRuntime.load(1))
    given = rng.standard_normal(data).astype(np.float32)
    try:
        found = np.array(engine.instantiate().run({"x": given}, ["y"])[0])
    finally:
        engine.close()
    np.testing.assert_allclose(found, run(proto, {"x": given})[0], rtol=1e-4, atol=1e-4)


def test_edges_are_counted_one_by_one():
    axis = Axis(size=20, out=20, stride=1, kernel=5, dilation=1, before=2)
    assert (num_edges(axis), written_steps(axis, 8), written_steps(axis, 100)) == (4, 12 * 5, 20 * 5)
    usual = Axis(size=56, out=56, stride=1, kernel=7, dilation=1, before=3)
    assert written_steps(usual, 14) * 7 <= MAX_WRITTEN, "a filter of 7 x 7 is written out"
