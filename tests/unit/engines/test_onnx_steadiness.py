"""Models whose work hangs on shapes alone are told from those in which the items of a tensor choose it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from hone.engines.onnx_steadiness import STEADY_OPERATORS, has_steady_operators
from hone.engines.onnxruntime import OnnxRuntimeEngine
from tests.unit.engines.test_onnx_divisions import build, save

FLOAT, INT64, STRING = TensorProto.FLOAT, TensorProto.INT64, TensorProto.STRING
DIGITS = Path(__file__).parents[3] / "model_repo" / "digits" / "1" / "model.onnx"


def chain(*operators: str, domains=(), **fields) -> onnx.ModelProto:
    nodes = [
        helper.make_node(name, [f"v{i}" if i else "X"], [f"v{i + 1}"], domain=domain)
        for i, (domain, _, name) in enumerate(one.rpartition(":") for one in operators)
    ]
    return build(nodes, [("X", FLOAT, [None, 4])], [(f"v{len(nodes)}", FLOAT)], domains=domains, **fields)


def test_plain_networks_are_steady(tmp_path):
    assert has_steady_operators(DIGITS)
    assert has_steady_operators(save(tmp_path, chain("Relu", "Softmax", "Transpose")))
    assert OnnxRuntimeEngine.load(DIGITS).is_steady


@pytest.mark.parametrize(
    "operator",
    [
        *("Loop", "Scan", "If", "Range", "Expand", "Tile", "ConstantOfShape", "Resize", "Upsample", "Pad", "OneHot"),
        *("NonZero", "NonMaxSuppression", "Unique", "Compress", "SequenceMap", "StringNormalizer", "NoSuchOperator"),
    ],
)
def test_operators_whose_work_the_items_choose_are_not(tmp_path, operator):
    assert not has_steady_operators(save(tmp_path, chain("Relu", operator, "Relu")))


def test_operators_of_other_domains_are_not(tmp_path):
    assert not has_steady_operators(save(tmp_path, chain("com.example:Relu", domains=["com.example"])))
    assert has_steady_operators(save(tmp_path, chain("ai.onnx.ml:Scaler", domains=["ai.onnx.ml"])))
    assert not has_steady_operators(save(tmp_path, chain("ai.onnx.ml:LabelEncoder", domains=["ai.onnx.ml"])))


def test_functions_of_the_model_are_not(tmp_path):
    body = [helper.make_node("Relu", ["x"], ["y"])]
    function = helper.make_function("", "Relu", ["x"], ["y"], body, [helper.make_opsetid("", 17)])
    assert not has_steady_operators(save(tmp_path, chain("Relu", functions=[function])))


@pytest.mark.parametrize("content", [b"no model", b"\x3a\xff\xff\xff\xff\x0f", b"\x3a\x04\x0a\x02\x22\x09"])
def test_malformed_files_are_not_and_nothing_is_raised(tmp_path, content):
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    assert not has_steady_operators(path)


def test_names_that_are_no_text_are_not(tmp_path):
    model = chain("Relu").SerializeToString()
    path = tmp_path / "model.onnx"
    path.write_bytes(model.replace(b"Relu", b"\xff\xfe\xfd\xfc"))
    assert not has_steady_operators(path)


def test_texts_are_not(tmp_path):
    node = helper.make_node("Identity", ["X"], ["Y"])
    path = save(tmp_path, build([node], [("X", STRING, [None])], [("Y", STRING)]))
    assert has_steady_operators(path)
    assert not OnnxRuntimeEngine.load(path).is_steady


def test_large_models_are_not_looked_at(tmp_path):
    weight = numpy_helper.from_array(np.zeros((600, 600), np.float32), "W")
    model = build([helper.make_node("MatMul", ["X", "W"], ["Y"])], [("X", FLOAT, [1, 600])], [("Y", FLOAT)])
    model.graph.initializer.append(weight)
    engine = OnnxRuntimeEngine.load(save(tmp_path, model))
    assert not engine.is_steady


def test_every_operator_of_the_list_exists():
    known = {(schema.domain, schema.name) for schema in onnx.defs.get_all_schemas_with_history()}
    for domain, names in STEADY_OPERATORS.items():
        assert not {name for name in names if (domain if domain != "ai.onnx" else "", name) not in known}


def test_none_of_them_takes_a_size_or_a_graph():
    """By their schemas: no graph among the attributes, no input that is a shape, number of repeats or of steps."""
    sizes = {"shape", "repeats", "pads", "sizes", "scales", "depth", "limit", "start", "M", "cond", "condition"}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.name in STEADY_OPERATORS.get(schema.domain, ()) and schema.name not in ("Reshape", "Where"):
            assert not any(a.type in (a.type.GRAPH, a.type.GRAPHS) for a in schema.attributes.values()), schema.name
            assert not sizes & {one.name for one in schema.inputs}, schema.name
