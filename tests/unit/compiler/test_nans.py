"""What is not a number stays so: compiled models answer NaN and infinities as ONNX Runtime does."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from hone.engines.tvm_runtime import TvmRuntime
from tests.unit.compiler.graphs import model, run
from tests.unit.engines.tvm_artifacts import compile_to, load

NUMBER = "o = Constant <value_float = 0.5> ()\n"
#: One operator, or a few in each other, of x [4, 16].
ITEMWISE = {
    "Relu": "y = Relu(x)",
    "LeakyRelu": "y = LeakyRelu <alpha = 0.1> (x)",
    "Clip": "l = Constant <value_float = -1.0> ()\n u = Constant <value_float = 3.0> ()\n y = Clip(x, l, u)",
    "Max of a number": NUMBER + "y = Max(x, o)",
    "Max with a number": NUMBER + "y = Max(o, x)",
    "Min of a number": NUMBER + "y = Min(x, o)",
    "Max of tensors": "z = Neg(x)\n w = Tanh(z)\n y = Max(w, x)",
    "Max of tensors, turned": "z = Neg(x)\n w = Tanh(z)\n y = Max(x, w)",
    "Min of three": "z = Neg(x)\n w = Tanh(z)\n y = Min(x, w, z)",
    "HardSigmoid": "y = HardSigmoid(x)",
    "HardSwish": "y = HardSwish(x)",
    "Elu": "y = Elu(x)",
    "Selu": "y = Selu(x)",
    "Celu": "y = Celu(x)",
    "PRelu": NUMBER + "y = PRelu(x, o)",
    "Softplus": "y = Softplus(x)",
    "Sigmoid": "y = Sigmoid(x)",
    "Tanh": "y = Tanh(x)",
    "Erf": "y = Erf(x)",
    "Abs": "y = Abs(x)",
    "Softmax": "y = Softmax(x)",
    "LogSoftmax": "y = LogSoftmax(x)",
    "a chain": "a = Relu(x)\n b = Clip(a)\n c = Max(a, b)\n d = Tanh(c)\n y = Relu(d)",
}


def both(text, given, tmp_path):
    """What the compiled model gives, and what ONNX Runtime does."""
    proto = model(text)
    path = tmp_path / "model.onnx"
    onnx.save(proto, path)
    engine = load(compile_to(tmp_path / "artifact", path), TvmRuntime.load(1))
    try:
        found = np.array(engine.instantiate().run({"x": given}, ["y"])[0])
    finally:
        engine.close()
    return found, run(proto, {"x": given})[0]


@pytest.mark.parametrize("name", ITEMWISE)
def test_operators_keep_what_is_not_a_number(name, tmp_path):
    given = np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)
    given[0, 3], given[1, 0], given[2, 5] = np.nan, np.inf, -np.inf
    found, expected = both(f"g (float[4, 16] x) => (float[a, b] y) {{ {ITEMWISE[name]} }}", given, tmp_path)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("behind", ["Relu", "Clip6", "Max"])
def test_kernels_keep_it_in_their_epilogues(behind, tmp_path):
    step = {
        "Relu": "y = Relu(c)",
        "Clip6": "l = Constant <value_float = 0.0> ()\n u = Constant <value_float = 6.0> ()\n y = Clip(c, l, u)",
        "Max": "z = Neg(c)\n y = Max(c, z)",
    }[behind]
    rng = np.random.default_rng(0)
    weight = ", ".join(f"{value:.3f}" for value in rng.standard_normal(32 * 16 * 9))
    given = rng.standard_normal((1, 16, 8, 8)).astype(np.float32)
    given[0, 5, 4, 4] = np.nan
    text = (
        f"g (float[1, 16, 8, 8] x) => (float[a, b, c, d] y) <float[32, 16, 3, 3] w = {{{weight}}}>"
        f"{{ c = Conv <pads = [1, 1, 1, 1]> (x, w)\n {step} }}"
    )
    found, expected = both(text, given, tmp_path)
    assert np.isnan(expected).any()
    assert not np.isnan(expected).all()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
