"""Transformers as exporters write them: their parts are found, and the compiled model answers as ONNX Runtime does."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from hone.compiler.onnx_import import ImportedModel, import_model
from hone.compiler.pipeline import template_workloads
from hone.compiler.profile import profile_model
from tests.unit.compiler import graphs
from tests.unit.compiler.kernel_checks import HOST

BATCH, LENGTH, WIDTH, HEADS = 2, 5, 24, 3
DEPTH = WIDTH // HEADS


def weights(**shapes):
    generator = np.random.default_rng(0)
    return {name: (generator.standard_normal(shape) / 3).astype(np.float32) for name, shape in shapes.items()}


def compiled(text, constants, folder, inputs, opset=17):
    """The workloads of a model, after its outputs were compared with ONNX Runtime's on plain operators."""
    proto = graphs.model(text, constants, opset=opset)
    path = folder / "model.onnx"
    onnx.save(proto, path)
    model = import_model(path, {})
    assert isinstance(model, ImportedModel), model
    profile = profile_model(model, HOST, None, list(inputs.values()), rounds=1)
    graphs.assert_same(list(profile.outputs), graphs.run(proto, inputs, optimize=False), tolerance=2e-5)
    return template_workloads(model, HOST)


def of(workloads, op):
    return [workload for workload in workloads if workload.op == op]


ATTENTION = f"""
    g (float[{BATCH},{LENGTH},{WIDTH}] x, float[{BATCH},1,1,{LENGTH}] m) => (float[{BATCH},{LENGTH},{WIDTH}] y) {{
      q0 = MatMul(x, wq)  q1 = Add(q0, bq)  q2 = Reshape(q1, heads)  q = Transpose <perm = [0, 2, 1, 3]> (q2)
      k0 = MatMul(x, wk)  k1 = Add(k0, bk)  k2 = Reshape(k1, heads)  k = Transpose <perm = [0, 2, 3, 1]> (k2)
      v0 = MatMul(x, wv)  v1 = Add(v0, bv)  v2 = Reshape(v1, heads)  v = Transpose <perm = [0, 2, 1, 3]> (v2)
      SCORES
      p = Softmax <axis = -1> (s)
      o = MatMul(p, v)  o1 = Transpose <perm = [0, 2, 1, 3]> (o)  o2 = Reshape(o1, rows)
      o3 = MatMul(o2, wo)  o4 = Add(bo, o3)  y = Add(o4, x)
    }}"""
ATTENTION_WEIGHTS = {
    **weights(**{f"w{name}": (WIDTH, WIDTH) for name in "qkvo"}, **{f"b{name}": (WIDTH,) for name in "qkvo"}),
    "heads": np.array([BATCH, LENGTH, HEADS, DEPTH], np.int64),
    "rows": np.array([BATCH, LENGTH, WIDTH], np.int64),
    "root": np.float32(DEPTH**0.5),
    "inverse": np.float32(DEPTH**-0.5),
}


@pytest.mark.parametrize(
    ("scores", "masked"),
    [
        ("s0 = MatMul(q, k)  s = Div(s0, root)", False),
        ("s0 = MatMul(q, k)  s1 = Div(s0, root)  s = Add(s1, m)", True),
        ("s0 = MatMul(q, k)  s1 = Mul(inverse, s0)  s = Add(m, s1)", True),
        ("qs = Mul(q, inverse)  s0 = MatMul(qs, k)  s = Add(s0, m)", True),
    ],
)
def test_attention_is_one_kernel(scores, masked, tmp_path):
    generator = np.random.default_rng(1)
    inputs = {
        "x": generator.standard_normal((BATCH, LENGTH, WIDTH)).astype(np.float32),
        "m": np.where(generator.random((BATCH, 1, 1, LENGTH)) < 0.3, -1e4, 0).astype(np.float32),
    }
    found = compiled(ATTENTION.replace("SCORES", scores), ATTENTION_WEIGHTS, tmp_path, inputs)
    (attention,) = of(found, "attention")
    assert attention.attribute("masked") is masked
    assert attention.attribute("layouts") == ("bshd", "bshd", "bshd")
    assert attention.attribute("output_layout") == "bshd"
    assert attention.attribute("scale") == pytest.approx(DEPTH**-0.5)
    assert not of(found, "softmax")
    assert ("add", "add") in {tuple(step.op for step in one.epilogue) for one in of(found, "matmul")}  # the residual


def test_a_query_without_keys_is_not_a_number_where_softmax_says_so(tmp_path):
    """As a graph of a mask and a softmax gives with ONNX Runtime, in one kernel too."""
    generator = np.random.default_rng(1)
    inputs = {
        "x": generator.standard_normal((BATCH, LENGTH, WIDTH)).astype(np.float32),
        "m": np.zeros((BATCH, 1, 1, LENGTH), np.float32),
    }
    inputs["m"][1] = -np.inf
    scores = "s0 = MatMul(q, k)  s1 = Div(s0, root)  s = Add(s1, m)"
    found = compiled(ATTENTION.replace("SCORES", scores), ATTENTION_WEIGHTS, tmp_path, inputs)
    assert of(found, "attention")


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("rank", [3, 4])
def test_the_operator_is_one_kernel_with_zeros_for_queries_without_keys(rank, kind, tmp_path):
    shape = f"{BATCH},{LENGTH},{WIDTH}" if rank == 3 else f"{BATCH},{HEADS},{LENGTH},{DEPTH}"
    heads = f"<q_num_heads = {HEADS}, kv_num_heads = {HEADS}>" if rank == 3 else ""
    text = f"""g (float[{shape}] q, float[{shape}] k, float[{shape}] v, {kind}[{BATCH},1,{LENGTH},{LENGTH}] m)
        => (float[{shape}] y) {{ y = Attention {heads} (q, k, v, m) }}"""
    generator = np.random.default_rng(2)
    sizes = tuple(map(int, shape.split(",")))
    inputs = {name: generator.standard_normal(sizes).astype(np.float32) for name in "qkv"}
    allowed = generator.random((BATCH, 1, LENGTH, LENGTH)) < 0.7
    allowed[0, 0, 2] = False
    inputs["m"] = allowed if kind == "bool" else np.where(allowed, 0, -np.inf).astype(np.float32)
    assert len(of(compiled(text, {}, tmp_path, inputs, opset=24), "attention")) == 1


@pytest.mark.parametrize(
    "scores",
    [
        "s0 = MatMul(q, k)  s1 = Add(s0, m)  s = Mul(s1, inverse)",  # the mask is scaled too
        "s0 = MatMul(q, k)  s1 = Add(s0, m)  s2 = Mul(s1, s0)  s = Mul(s2, inverse)",  # scores are used twice
    ],
)
def test_what_only_looks_like_attention_is_left(scores, tmp_path):
    generator = np.random.default_rng(1)
    inputs = {
        "x": generator.standard_normal((BATCH, LENGTH, WIDTH)).astype(np.float32),
        "m": generator.standard_normal((BATCH, 1, 1, LENGTH)).astype(np.float32),
    }
    found = compiled(ATTENTION.replace("SCORES", scores), ATTENTION_WEIGHTS, tmp_path, inputs)
    assert not of(found, "attention")
    assert of(found, "softmax")


def test_queries_keys_and_values_of_one_product(tmp_path):
    text = f"""
    g (float[1,{LENGTH},{WIDTH}] x) => (float[1,{LENGTH},{WIDTH}] y) {{
      a = MatMul(x, w)  b = Reshape(a, split)  c = Transpose <perm = [2, 0, 3, 1, 4]> (b)
      q = Gather <axis = 0> (c, zero)  k = Gather <axis = 0> (c, one)  v = Gather <axis = 0> (c, two)
      kt = Transpose <perm = [0, 1, 3, 2]> (k)
      s0 = MatMul(q, kt)  s = Mul(s0, inverse)  p = Softmax <axis = -1> (s)
      o = MatMul(p, v)  o1 = Transpose <perm = [0, 2, 1, 3]> (o)  y = Reshape(o1, rows)
    }}"""
    constants = {
        **weights(w=(WIDTH, 3 * WIDTH)),
        "split": np.array([1, LENGTH, 3, HEADS, DEPTH], np.int64),
        "rows": np.array([1, LENGTH, WIDTH], np.int64),
        **{name: np.array(at, np.int64) for at, name in enumerate(("zero", "one", "two"))},
        "inverse": np.float32(DEPTH**-0.5),
    }
    x = np.random.default_rng(2).standard_normal((1, LENGTH, WIDTH)).astype(np.float32)
    (attention,) = of(compiled(text, constants, tmp_path, {"x": x}), "attention")
    assert attention.attribute("layouts") == ("bs0hd", "bs1hd", "bs2hd")


@pytest.mark.parametrize(
    "gelu",
    [
        "d = Div(h, root)  e = Erf(d)  f = Add(e, one)  g = Mul(h, f)  a = Mul(g, half)",
        "d = Mul(inverse, h)  e = Erf(d)  f = Add(one, e)  g = Mul(half, h)  a = Mul(f, g)",
        "d = Div(h, root)  e = Erf(d)  f = Add(e, one)  g = Mul(f, half)  a = Mul(h, g)",
        "d = Div(h, root)  e = Erf(d)  f = Add(e, one)  g = Mul(h, f)  a = Div(g, two)",
    ],
)
def test_gelu_rides_behind_its_product(gelu, tmp_path):
    """Also where the layer is written over rows, with reshapes around."""
    text = f"""
    g (float[{BATCH},{LENGTH},{WIDTH}] x) => (float[{BATCH},{LENGTH},{WIDTH}] y) {{
      r = Reshape(x, flat)  h0 = Gemm(r, w1, b1)  h1 = Reshape(h0, full)  h = Add(h1, zero)
      {gelu}
      u = Reshape(a, flat_wide)  y0 = Gemm(u, w2, b2)  y1 = Reshape(y0, rows)  y = Add(y1, x)
    }}"""
    constants = {
        **weights(w1=(WIDTH, 32), b1=(32,), w2=(32, WIDTH), b2=(WIDTH,), zero=(32,)),
        "flat": np.array([BATCH * LENGTH, WIDTH], np.int64),
        "flat_wide": np.array([BATCH * LENGTH, 32], np.int64),
        "full": np.array([BATCH, LENGTH, 32], np.int64),
        "rows": np.array([BATCH, LENGTH, WIDTH], np.int64),
        "root": np.float32(2**0.5), "inverse": np.float32(0.5**0.5), "one": np.float32(1), "half": np.float32(0.5),
        "two": np.float32(2),
    }  # fmt: skip
    x = np.random.default_rng(3).standard_normal((BATCH, LENGTH, WIDTH)).astype(np.float32)
    found = of(compiled(text, constants, tmp_path, {"x": x}), "matmul")
    assert [tuple(step.op for step in workload.epilogue) for workload in found] == [
        ("add", "add", "gelu"),
        ("add", "add"),
    ]


@pytest.mark.parametrize("square", ["e = Pow(d, two)", "e = Mul(d, d)"])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_a_layer_norm_written_out_is_one_function(square, offset, tmp_path):
    text = f"""
    g (float[2,3,16] x) => (float[2,3,16] y) {{
      m = ReduceMean <axes = [-1], keepdims = 1> (x)  d = Sub(x, m)  {square}
      v = ReduceMean <axes = [-1], keepdims = 1> (e)  w = Add(v, epsilon)  s = Sqrt(w)  n = Div(d, s)
      h = Mul(n, gamma)  y = Add(h, beta)
    }}"""
    constants = {**weights(gamma=(16,), beta=(16,)), "two": np.float32(2), "epsilon": np.float32(1e-5)}
    proto = graphs.model(text, constants, opset=12)
    onnx.save(proto, tmp_path / "model.onnx")
    model = import_model(tmp_path / "model.onnx", {})
    assert isinstance(model, ImportedModel), model
    x = (np.random.default_rng(9).standard_normal((2, 3, 16)) + offset).astype(np.float32)
    profile = profile_model(model, HOST, None, [x], rounds=1)
    exact = x.astype(np.float64)
    exact = (exact - exact.mean(-1, keepdims=True)) / np.sqrt(exact.var(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(
        profile.outputs[0], exact * constants["gamma"] + constants["beta"], rtol=1e-4, atol=1e-4 if offset else 1e-6
    )
    assert len(profile.calls) == 1


def test_a_product_with_one_hot_rows_is_a_look_up(tmp_path):
    text = """
    g (int32[2,6] x) => (float[2,6,8] y) {
      i = Unsqueeze (x, last)  e = Equal (i, places)  h = Cast <to = 1> (e)  m = MatMul (h, table)  y = Relu (m)
    }"""
    constants = {
        **weights(table=(5, 8)),
        "places": np.arange(5, dtype=np.int32).reshape(1, 1, 5),
        "last": np.array([2], np.int64),
    }
    x = np.array([[0, 4, 2, 2, 5, -1], [1, 3, -5, 99, 0, 4]], np.int32)  # some are in no row: all zeros
    assert not of(compiled(text, constants, tmp_path, {"x": x}), "matmul")


def test_gelu_by_tanh_is_a_sigmoid(tmp_path):
    text = """
    g (float[4,8] x) => (float[4,16] y) {
      h = MatMul(x, w)  h2 = Mul(h, h)  h3 = Mul(h2, h)  c = Mul(h3, cubic)  s = Add(h, c)  u = Mul(s, root)
      t = Tanh(u)  f = Add(t, one)  g = Mul(h, f)  y = Mul(g, half)
    }"""
    constants = {
        **weights(w=(8, 16)),
        "cubic": np.float32(0.044715), "root": np.float32((2 / np.pi) ** 0.5), "one": np.float32(1),
        "half": np.float32(0.5),
    }  # fmt: skip
    x = 3 * np.random.default_rng(6).standard_normal((4, 8)).astype(np.float32)
    (product,) = of(compiled(text, constants, tmp_path, {"x": x}), "matmul")
    assert [step.op for step in product.epilogue][-2:] == ["sigmoid", "multiply"]


def test_what_follows_a_convolution_of_one_dimension_rides_behind_it(tmp_path):
    text = """
    g (float[1,16,20] x) => (float[1,32] y) {
      a = Conv <kernel_shape = [3]> (x, w, b)  c = Add(a, scale)  d = Relu(c)
      y = ReduceMax <axes = [2], keepdims = 0> (d)
    }"""
    constants = weights(w=(32, 16, 3), b=(32,), scale=(32, 1))
    x = np.random.default_rng(7).standard_normal((1, 16, 20)).astype(np.float32)
    (convolution,) = of(compiled(text, constants, tmp_path, {"x": x}), "conv2d")
    assert [step.op for step in convolution.epilogue] == ["add", "relu"]  # both sums are one bias


@pytest.mark.parametrize("operand", [(5,), (3, 1), (1, 1), (2, 1, 5), (2, 3, 5), (1,)], ids=str)
def test_operands_follow_dimensions_of_one(operand, tmp_path):
    text = f"""
    g (float[2,1,3,5,1] x, float[{",".join(map(str, operand))}] z) => (float[2,3,5] y, float[2,5] s) {{
      a = Reshape(x, squeezed)  y = Mul(a, z)  s = ReduceSum <keepdims = 0> (y, axes)
    }}"""
    constants = {"squeezed": np.array([2, 3, 5], np.int64), "axes": np.array([1], np.int64)}
    generator = np.random.default_rng(8)
    inputs = {
        "x": generator.standard_normal((2, 1, 3, 5, 1)).astype(np.float32),
        "z": np.asarray(generator.standard_normal(operand), np.float32),
    }
    compiled(text, constants, tmp_path, inputs)


def test_another_constant_is_no_gelu(tmp_path):
    text = """
    g (float[2,8] x) => (float[2,8] y) {
      d = Mul(x, scale)  e = Erf(d)  f = Add(e, one)  g = Mul(x, f)  y = Mul(g, half)
    }"""
    constants = {"scale": np.float32(0.75), "one": np.float32(1), "half": np.float32(0.5)}
    x = np.random.default_rng(4).standard_normal((2, 8)).astype(np.float32)
    compiled(text, constants, tmp_path, {"x": x})


def test_rows_that_are_repeated_are_not_regrouped(tmp_path):
    text = """
    g (float[2,8] x, float[2,3,8] z) => (float[2,3,8] y, float[3,16] w) {
      a = Relu(x)  b = Reshape(a, between)  y = Add(b, z)
      c = Reshape(z, wide)  w = Relu(c)
    }"""
    constants = {"between": np.array([2, 1, 8], np.int64), "wide": np.array([3, 16], np.int64)}
    generator = np.random.default_rng(5)
    shapes = {"x": (2, 8), "z": (2, 3, 8)}
    inputs = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    compiled(text, constants, tmp_path, inputs)
