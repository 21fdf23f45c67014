"""Schedules of what no template takes: the same numbers as unscheduled, in vectors, on threads where it pays."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tvm
from tvm import te, topi

from hone.compiler.build import build_functions
from hone.compiler.schedules.plain import plain_schedule
from hone.compiler.target import CpuTarget

ONE = CpuTarget.detect(num_threads=1)
TWO = CpuTarget.detect(num_threads=2)


def tensor(*shape, dtype="float32", name="x"):
    return te.placeholder(shape, dtype, name=name)


def _two(first, second, build):
    x, y = tensor(*first), tensor(*second, name="y")
    return [x, y, build(x, y)]


def _one(shape, build, dtype="float32"):
    x = tensor(*shape, dtype=dtype)
    return [x, build(x)]


def _layer_norm():
    x, scale, bias = tensor(12, 96), tensor(96, name="s"), tensor(96, name="b")
    return [x, scale, bias, topi.nn.layer_norm(x, scale, bias, [1])]


def _pool(kind, shape, kernel, stride, pad, layout):
    return _one(shape, lambda x: topi.nn.pool2d(x, kernel, stride, [1, 1], [pad] * 4, kind, layout=layout))


def _chain(x):
    y = te.compute(x.shape, lambda *i: x(*i) * 2.0 + 1.0)
    z = te.compute(x.shape, lambda *i: te.max(y(*i), 0.0))
    return te.compute(x.shape, lambda *i: te.exp(z(*i) * 0.1))


def _mean_centred(x):
    total = topi.sum(x, axis=(2, 3), keepdims=True)
    return topi.subtract(x, topi.divide(total, te.const(15.0, "float32")))


#: name -> (function's tensors, rules that may apply)
CASES = {
    "a chain": (lambda: _one((3, 32, 32), _chain), "element-wise"),
    "a length without divisors": (lambda: _one((1009,), topi.exp), "element-wise"),
    "a broadcast row": (lambda: _two((7, 13), (13,), topi.add), "element-wise"),
    "a broadcast column": (lambda: _two((7, 48), (7, 1), topi.multiply), "element-wise"),
    "a scalar": (lambda: _one((), topi.exp), "each block"),
    "one item": (lambda: _one((1, 1), topi.tanh), "element-wise"),
    "a transpose": (lambda: _one((5, 6, 7), lambda x: topi.transpose(x, (2, 0, 1))), "element-wise"),
    "a reshape": (lambda: _one((4, 6, 8), lambda x: topi.reshape(x, (24, 8))), "element-wise"),
    "a concatenation": (
        lambda: _two((2, 3, 5), (2, 3, 6), lambda x, y: topi.concatenate([x, y], axis=2)),
        "element-wise",
    ),
    "a padding": (lambda: _one((2, 5, 7), lambda x: topi.nn.pad(x, [0, 1, 2], [0, 1, 3])), "element-wise"),
    "integers": (lambda: _one((5, 9), lambda x: topi.add(x, x), dtype="int64"), "element-wise"),
    "a sum of rows": (lambda: _one((6, 100), lambda x: topi.sum(x, axis=1)), "reduction"),
    "a sum of long rows": (lambda: _one((3, 512), lambda x: topi.sum(x, axis=1)), "reduction"),
    "a sum of columns": (lambda: _one((100, 48), lambda x: topi.sum(x, axis=0)), "reduction"),
    "a sum of everything": (lambda: _one((9, 64), topi.sum), "reduction"),
    "a maximum": (lambda: _one((6, 128), lambda x: topi.max(x, axis=1)), "reduction"),
    "a maximum of odd rows": (lambda: _one((6, 37), lambda x: topi.max(x, axis=1)), "reduction"),
    "the place of a maximum": (lambda: _one((6, 64), lambda x: topi.argmax(x, axis=1)), ""),
    "a product": (lambda: _two((5, 40), (40, 48), topi.nn.matmul), "reduction"),
    "a product of odd width": (lambda: _two((8, 24), (24, 53), topi.nn.matmul), "reduction"),
    "a product with rows": (
        lambda: _two((5, 64), (7, 64), lambda x, y: topi.nn.matmul(x, y, transpose_b=True)),
        "reduction",
    ),
    "a vector's product": (lambda: _two((1, 128), (128, 10), topi.nn.matmul), "reduction"),
    "products in a batch": (lambda: _two((3, 5, 16), (3, 16, 32), topi.nn.matmul), "reduction"),
    "a maximum pooling": (lambda: _pool("max", (1, 3, 9, 9), [3, 3], [2, 2], 1, "NCHW"), ""),
    "a blocked pooling": (lambda: _pool("max", (1, 2, 8, 8, 16), [3, 3], [2, 2], 1, "NCHW16c"), ""),
    "an average pooling": (lambda: _pool("avg", (1, 2, 8, 8, 16), [2, 2], [2, 2], 0, "NCHW16c"), ""),
    "a convolution": (
        lambda: _two((1, 5, 9, 9), (6, 5, 3, 3), lambda x, y: topi.nn.conv2d_nchw(x, y, 1, 1, 1)),
        "",
    ),
    "a depthwise convolution": (
        lambda: _two((1, 8, 10, 10), (8, 1, 3, 3), lambda x, y: topi.nn.depthwise_conv2d_nchw(x, y, 2, 1, 1)),
        "",
    ),
    "a softmax": (lambda: _one((6, 64), lambda x: topi.nn.softmax(x, axis=-1)), "rows"),
    "a softmax of ten": (lambda: _one((1, 10), lambda x: topi.nn.softmax(x, axis=-1)), "rows"),
    "a softmax over channels": (lambda: _one((2, 5, 32), lambda x: topi.nn.softmax(x, axis=1)), "rows"),
    "a softmax of one row": (lambda: _one((33,), lambda x: topi.nn.softmax(x, axis=0)), ""),
    "a layer norm": (_layer_norm, "rows"),
    "a mean taken away": (lambda: _one((2, 4, 3, 5), _mean_centred), ""),
    "a running sum": (lambda: _one((5, 7), lambda x: topi.cumsum(x, axis=1)), ""),
}  # fmt: skip


def outputs(func, arguments, inputs, target):
    shape = [int(dim) for dim in arguments[-1].shape]
    dtype = str(arguments[-1].dtype)
    out = tvm.runtime.tensor(np.full(shape, 77, dtype))  # what is not written shows
    build_functions({"run": func}, target).function("run")(*(tvm.runtime.tensor(a) for a in inputs), out)
    return out.numpy()


@pytest.mark.parametrize("target", [ONE, TWO], ids=["serial", "threads"])
@pytest.mark.parametrize("name", CASES)
def test_same_numbers_as_unscheduled(name, target):
    build, rule = CASES[name]
    arguments = build()
    rng = np.random.default_rng(0)
    inputs = [
        rng.standard_normal([int(d) for d in a.shape]).astype(np.float32)
        if str(a.dtype) == "float32"
        else rng.integers(-9, 9, [int(d) for d in a.shape]).astype(str(a.dtype))
        for a in arguments[:-1]
    ]
    func = te.create_prim_func(arguments)
    # Every rule is tried with threads too: nothing is too small for them here.
    eager = CpuTarget(**{**{f: getattr(target, f) for f in target.__dataclass_fields__}, "parallel_min_us": 0.0})
    scheduled = plain_schedule(func, eager)
    if rule and target is ONE:
        assert scheduled.rule == rule
    expected = outputs(func, arguments, inputs, ONE)
    got = outputs(scheduled.func, arguments, inputs, ONE)
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)


def scheduled_text(name, target):
    build, _ = CASES[name]
    return plain_schedule(te.create_prim_func(build()), target).func.script()


@pytest.mark.parametrize(
    "name",
    ["a chain", "a broadcast column", "a sum of long rows", "a sum of columns", "a maximum", "a product",
     "a product with rows", "a blocked pooling", "a softmax", "a layer norm", "products in a batch"],
)  # fmt: skip
def test_inner_loops_are_vectors(name):
    assert "T.vectorized" in scheduled_text(name, ONE)


def test_a_chain_is_one_pass():
    text = scheduled_text("a chain", ONE)
    assert len(re.findall(r"T\.sblock\(", text)) == 1 + text.count('T.sblock("root")')
    assert "sblock_alloc_buffer" not in text


def test_rows_stay_in_one_loop():
    text = scheduled_text("a softmax", ONE)
    body = text[text.index("for ") :]
    assert len(re.findall(r"^    for ", body, flags=re.M)) <= 1


@pytest.mark.parametrize(
    ("shape", "threads", "parallel"), [((3, 512, 512), 2, True), ((3, 512, 512), 1, False), ((3, 16, 16), 2, False)]
)
def test_threads_only_where_they_pay(shape, threads, parallel):
    target = CpuTarget.detect(num_threads=threads)
    scheduled = plain_schedule(te.create_prim_func(_one(shape, _chain)), target)
    assert scheduled.parallel is parallel
    assert ("T.parallel" in scheduled.func.script()) is parallel


def test_opaque_code_stays_as_it_is():
    func = te.create_prim_func(_one((5, 8), lambda x: topi.sort(x, axis=1)))
    scheduled = plain_schedule(func, TWO)
    tvm.ir.assert_structural_equal(scheduled.func.without_attr("global_symbol"), func.without_attr("global_symbol"))


def test_attributes_survive():
    func = te.create_prim_func(_one((4, 16), topi.exp)).with_attr("op_pattern", 0)
    assert int(plain_schedule(func, ONE).func.attrs["op_pattern"]) == 0
