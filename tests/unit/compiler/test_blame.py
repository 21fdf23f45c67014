"""A graph that TVM refuses: the phase and the operator are told, and the machine's troubles are told apart."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from hone.compiler.blame import refused_operator
from hone.compiler.build import BuildFailed, GraphRefused
from hone.compiler.onnx_import import ImportedModel, import_model
from hone.compiler.pipeline import Compilation, compile_model, run_phases
from hone.compiler.target import CpuTarget
from tests.unit.compiler.graphs import model

TARGET = CpuTarget.detect(num_threads=1)


def imported(text: str, weights, shapes, folder) -> ImportedModel:
    path = folder / "model.onnx"
    onnx.save(model(text, weights), path)
    found = import_model(path, shapes)
    assert isinstance(found, ImportedModel), found
    return found


def test_the_operator_that_is_refused_by_itself_is_named(tmp_path):
    found = imported(
        "g (float[1, 1, 4, 4] x) => (float[n, m, k, l] a, float[p, q, s, t] c) {"
        " r = Relu (x) a = Resize (r, , , nothing) c = Exp (r) }",
        {"nothing": np.array([1, 1, 0, 0])},
        {},
        tmp_path,
    )
    with pytest.raises(GraphRefused, match=r"phase 1 canonicalize: .*zero"):
        compile_model(found, TARGET)
    asked = []

    def compile_one(single):
        asked.append(single)
        compile_model(single, TARGET)

    assert refused_operator(found.mod, compile_one, lambda: True) == "image.resize2d"
    assert 1 < len(asked) <= 4
    assert refused_operator(found.mod, compile_one, lambda: False) == ""


def test_every_operator_alone_compiles_where_the_graph_does(tmp_path):
    """Constants, weights, tuples and shapes among their inputs; each kind of use once."""
    found = imported(
        "g (float[1, 8, 8, 8] x) => (float[n] y) {"
        " a = Conv <pads = [1, 1, 1, 1]> (x, w) b = Relu (a) c = Relu (b) d = Concat <axis = 1> (c, x)"
        " e = Add (d, two) f = Reshape (e, flat) y = Clip (f, two) }",
        {
            "w": np.ones((8, 8, 3, 3), np.float32),
            "two": np.array(2, np.float32),
            "flat": np.array([-1]),
        },
        {},
        tmp_path,
    )
    compiled = []

    def compile_one(single):
        compiled.append(compile_model(single, TARGET))

    assert refused_operator(found.mod, compile_one, lambda: True) == ""
    assert len(compiled) >= 5


@pytest.mark.parametrize(
    ("problem", "for_ever"),
    [
        (ValueError("no such layout"), True),
        (OSError(28, "No space left on device"), False),
        (MemoryError(), False),
        (RuntimeError("std::bad_alloc"), False),
    ],
)
def test_what_the_machine_lacks_is_not_held_against_the_graph(problem, for_ever):
    def fail(mod, compilation):
        raise problem

    with pytest.raises(BuildFailed, match="phase 9 test: ") as raised:
        run_phases(None, [("9 test", fail)], Compilation(TARGET, None), None)
    assert isinstance(raised.value, GraphRefused) is for_ever
