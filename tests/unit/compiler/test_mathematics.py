"""Transcendental functions as arithmetic: how deep they may stand in each other's arguments."""

from __future__ import annotations

import onnx
import pytest
import tvm
from tvm import te, topi
from tvm_ffi.structural import structural_walk

from hone.compiler.build import BuildFailed, build_functions
from hone.compiler.mathematics import MAX_NESTING, expand_transcendentals, nesting
from hone.compiler.onnx_import import import_model
from hone.compiler.pipeline import compile_model
from hone.compiler.schedules.plain import plain_schedule
from hone.compiler.target import CpuTarget
from tests.unit.compiler.graphs import model

HOST = CpuTarget.detect(num_threads=1)
NAMES = ("tirx.exp", "tirx.tanh", "tirx.erf", "tirx.log", "tirx.sigmoid")


def chain(depth):
    """One function of `depth` in each other's arguments, in one expression."""
    x = te.placeholder((64,), "float32", name="x")

    def nested(i):
        value = x[i]
        for _ in range(depth):
            value = tvm.tirx.tanh(value * tvm.tirx.const(1.5, "float32"))
        return value

    return te.create_prim_func([x, te.compute((64,), nested, name="y")])


def library_calls(func):
    found = []
    structural_walk(func, (tvm.ir.Call, lambda call: found.append(getattr(call.op, "name", ""))))
    return sum(name in NAMES for name in found)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_functions_too_deep_in_each_other_are_the_librarys(depth):
    func = chain(depth)
    assert nesting(func.body) == depth
    assert library_calls(expand_transcendentals(func)) == max(0, depth - MAX_NESTING)


def test_side_by_side_is_not_in_each_other():
    x = te.placeholder((64,), "float32", name="x")
    sums = [tvm.tirx.tanh(x[0] * tvm.tirx.const(float(at), "float32")) for at in range(6)]
    func = te.create_prim_func([x, te.compute((64,), lambda i: sum(sums, x[i]), name="y")])
    assert nesting(func.body) == 1
    assert library_calls(expand_transcendentals(func)) == 0


def test_what_is_deeper_than_can_be_built_is_refused():
    with pytest.raises(BuildFailed, match="4 transcendental functions in each other's arguments are too many"):
        build_functions({"run": chain(4)}, HOST)


def test_a_value_is_stored_before_it_is_too_deep():
    """Sixteen operators are a few passes of vectors, not one that TVM would not get done with."""
    x = te.placeholder((2, 512), "float32", name="x")
    value = x
    for _ in range(4):
        value = topi.abs(topi.tanh(topi.sigmoid(topi.nn.relu(value))))
    func = te.create_prim_func([x, value])
    scheduled = plain_schedule(func, HOST).func
    text = scheduled.script()
    assert text.count("T.vectorized(") == 4  # a pass for each pair of functions
    assert library_calls(expand_transcendentals(scheduled)) == 0


@pytest.mark.parametrize(
    "operators", [("Relu", "Sigmoid", "Tanh", "Abs"), ("Tanh",), ("Erf",), ("Exp", "Neg"), ("Softplus", "Tanh")]
)
def test_long_chains_compile(operators, tmp_path):
    text, name = "", "x"
    for at in range(16):
        text += f"v{at} = {operators[at % len(operators)]}({name})\n"
        name = f"v{at}"
    path = tmp_path / "model.onnx"
    onnx.save(model(f"g (float[1, 4096] x) => (float[1, 4096] {name}) {{ {text} }}"), path)
    compiled = compile_model(import_model(path, {}), HOST)
    assert compiled.functions
