"""Integer divisions that would end the process: safe on the baseline, right, and paid for by those models alone."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from hone.engines import onnx_assembly, onnx_divisions, onnxruntime
from hone.engines.onnx_divisions import guarded_model
from hone.engines.onnxruntime import CUDA_PROVIDER, OnnxRuntimeEngine, cuda_provider, make_session
from hone.errors import EngineError

INT32, INT64 = np.dtype(np.int32), np.dtype(np.int64)
ELEMENTS = {INT32: TensorProto.INT32, INT64: TensorProto.INT64}


def refuse(content, names):
    raise AssertionError(f"types of {names} should be known without asking")


def build(nodes, inputs, outputs, initializers=(), functions=(), opset=17, domains=()) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, element, shape) for name, element, shape in inputs],
        [helper.make_tensor_value_info(name, element, None) for name, element in outputs],
        [numpy_helper.from_array(array, name) for name, array in initializers],
    )
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
    return helper.make_model(graph, opset_imports=imports, ir_version=9, functions=list(functions))


def save(folder: Path, model: onnx.ModelProto) -> Path:
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def division(dtype, **kwargs) -> onnx.ModelProto:
    element = ELEMENTS[np.dtype(dtype)]
    inputs = [("A", element, [None]), ("B", element, [None])]
    return build([helper.make_node("Div", ["A", "B"], ["Q"])], inputs, [("Q", element)], **kwargs)


def every_pair(dtype):
    """Numbers near the ends and near zero, each with each; a divisor is never zero."""
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    some = np.array([least, least + 1, -7, -2, -1, 0, 1, 2, 7, most - 1, most], dtype)
    a, b = (side.ravel() for side in np.meshgrid(some, some[some != 0]))
    return a, b


def quotients(a, b):
    """As C divides, and wrapping."""
    exact = [abs(int(x)) // abs(int(y)) * (-1 if (x < 0) != (y < 0) else 1) for x, y in zip(a, b, strict=True)]
    bits = a.dtype.itemsize * 8
    return [(value + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1) for value in exact]


def check(path: Path, dtype, **more) -> None:
    engine = OnnxRuntimeEngine.load(path)
    a, b = every_pair(dtype)
    (q,) = engine.run({"A": a, "B": b, **more}, ["Q"])
    assert q.dtype == dtype
    assert q.tolist() == quotients(a, b)
    with pytest.raises(EngineError, match=r"(?i)division by zero"):
        engine.run({"A": a, "B": b * 0, **more}, ["Q"])


@pytest.mark.parametrize("dtype", [INT32, INT64])
@pytest.mark.parametrize("opset", [7, 8, 13, 14, 17])
def test_every_quotient_is_right(tmp_path, dtype, opset):
    check(save(tmp_path, division(dtype, opset=opset)), dtype)


def test_onnx_runtime_dies_of_it_unguarded(tmp_path):
    """The reason for all this; once it is no more, this file and what it tests can go."""
    path = save(tmp_path, division(INT64))
    code = (
        "import sys, numpy as np, onnxruntime as ort\n"
        "session = ort.InferenceSession(sys.argv[1], providers=['CPUExecutionProvider'])\n"
        "session.run(None, {'A': np.array([-(2**63)]), 'B': np.array([-1])})\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, check=False)
    assert ended.returncode == -8  # SIGFPE


def test_broadcast_scalar_and_empty(tmp_path):
    engine = OnnxRuntimeEngine.load(
        save(
            tmp_path,
            build(
                [helper.make_node("Div", ["A", "B"], ["Q"])],
                [("A", TensorProto.INT64, [None, None]), ("B", TensorProto.INT64, [])],
                [("Q", TensorProto.INT64)],
            ),
        )
    )
    least = np.iinfo(np.int64).min
    (q,) = engine.run({"A": np.full((2, 3), least), "B": np.array(-1)}, ["Q"])
    assert q.tolist() == [[least] * 3] * 2
    (q,) = engine.run({"A": np.empty((0, 3), np.int64), "B": np.array(-1)}, ["Q"])
    assert q.shape == (0, 3)


@pytest.mark.parametrize("constant", ["initializer", "node"])
def test_a_constant_divisor_of_minus_one(tmp_path, constant):
    divisor = np.array([-1, 3], np.int64)
    node = helper.make_node("Constant", [], ["B"], value=numpy_helper.from_array(divisor))
    model = build(
        [*([node] if constant == "node" else []), helper.make_node("Div", ["A", "B"], ["Q"])],
        [("A", TensorProto.INT64, [2])],
        [("Q", TensorProto.INT64)],
        [("B", divisor)] if constant == "initializer" else (),
    )
    engine = OnnxRuntimeEngine.load(save(tmp_path, model))
    least = np.iinfo(np.int64).min
    assert engine.run({"A": np.array([least, -9])}, ["Q"])[0].tolist() == [least, -3]


def test_two_constants_that_fault_when_folded(tmp_path):
    least = np.iinfo(np.int64).min
    model = build(
        [helper.make_node("Div", ["C", "B"], ["X"]), helper.make_node("Sub", ["A", "X"], ["Q"])],
        [("A", TensorProto.INT64, [None])],
        [("Q", TensorProto.INT64)],
        [("B", np.array(-1)), ("C", np.array(least))],
    )
    engine = OnnxRuntimeEngine.load(save(tmp_path, model))
    assert engine.run({"A": np.array([least])}, ["Q"])[0].tolist() == [0]


def test_an_initializer_that_a_request_may_replace_is_no_constant(tmp_path):
    path = save(tmp_path, division(INT64, initializers=[("B", np.array([5]))]))
    engine = OnnxRuntimeEngine.load(path)
    least = np.iinfo(np.int64).min
    assert engine.run({"A": np.array([least]), "B": np.array([-1])}, ["Q"])[0].tolist() == [least]
    assert engine.run({"A": np.array([10])}, ["Q"])[0].tolist() == [2]


def test_inside_of_branches_with_equal_names(tmp_path):
    def branch(operands, element, name):
        nodes = [
            helper.make_node("Cast", [operands[0]], ["a"], to=element),
            helper.make_node("Cast", [operands[1]], ["b"], to=element),
            helper.make_node("Div", ["a", "b"], ["q"]),
            helper.make_node("Cast", ["q"], [name], to=TensorProto.INT64),
        ]
        return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(name, TensorProto.INT64, None)])

    model = build(
        [
            helper.make_node(
                "If",
                ["whole"],
                ["Q"],
                then_branch=branch(("A", "B"), TensorProto.INT64, "then"),
                else_branch=branch(("A", "B"), TensorProto.DOUBLE, "else"),
            )
        ],
        [("A", TensorProto.INT64, [None]), ("B", TensorProto.INT64, [None]), ("whole", TensorProto.BOOL, [])],
        [("Q", TensorProto.INT64)],
    )
    path = save(tmp_path, model)
    check(path, INT64, whole=np.array(True))
    engine = OnnxRuntimeEngine.load(path)
    given = {"A": np.array([7]), "B": np.array([-2]), "whole": np.array(False)}
    assert engine.run(given, ["Q"])[0].tolist() == [-3]
    rewritten = onnx.load_model_from_string(guarded_model(path, refuse) or b"")
    then, other = (item.g for item in sorted(rewritten.graph.node[0].attribute, key=lambda item: item.name)[::-1])
    assert [node.op_type for node in then.node].count("Mul") == 2
    assert [node.op_type for node in other.node].count("Mul") == 0


def test_inside_of_a_functions_body(tmp_path):
    body = [
        helper.make_node("Div", ["x", "y"], ["d"]),
        helper.make_node("Identity", ["d"], ["z"]),
    ]
    function = helper.make_function("local", "Quotient", ["x", "y"], ["z"], body, [helper.make_opsetid("", 17)])
    inputs = [("A", TensorProto.INT64, [None]), ("B", TensorProto.INT64, [None]), ("F", TensorProto.FLOAT, [None])]
    model = build(
        [
            helper.make_node("Quotient", ["A", "B"], ["Q"], domain="local"),
            helper.make_node("Quotient", ["F", "F"], ["G"], domain="local"),
        ],
        inputs,
        [("Q", TensorProto.INT64), ("G", TensorProto.FLOAT)],
        functions=[function],
        domains=["local"],
    )
    path = save(tmp_path, model)
    check(path, INT64, F=np.ones(1, np.float32))
    rewritten = onnx.load_model_from_string(guarded_model(path, refuse) or b"")
    assert [node.op_type for node in rewritten.graph.node].count("Div") == 2
    assert [node.op_type for node in rewritten.graph.node].count("Mul") == 2
    assert not rewritten.functions


def quotient_of(body, imports, opset=17, domains=("local",)) -> onnx.ModelProto:
    """A model that calls a function of its own."""
    function = helper.make_function("local", "Quotient", ["x", "y"], ["z"], body, imports)
    return build(
        [helper.make_node("Quotient", ["A", "B"], ["Q"], domain="local")],
        [("A", TensorProto.INT64, [None]), ("B", TensorProto.INT64, [None])],
        [("Q", TensorProto.INT64)],
        functions=[function],
        opset=opset,
        domains=domains,
    )


def test_inside_of_a_function_of_another_opset(tmp_path):
    body = [helper.make_node("Div", ["x", "y"], ["z"])]
    path = save(tmp_path, quotient_of(body, [helper.make_opsetid("", 18)]))
    check(path, INT64)
    rewritten = onnx.load_model_from_string(guarded_model(path, refuse) or b"")
    assert not rewritten.functions


def test_a_function_that_cannot_be_put_in_place_of_its_calls_is_told_of(tmp_path, caplog):
    """Pad has axes since opset 18, and there is no way back from those. (ONNX Runtime takes no such model, as it is or
    rewritten: what it says of it is to be the same.)"""
    body = [
        helper.make_node("Constant", [], ["pads"], value_ints=[0, 0]),
        helper.make_node("Constant", [], ["axes"], value_ints=[0]),
        helper.make_node("Div", ["x", "y"], ["d"]),
        helper.make_node("Pad", ["d", "pads", "", "axes"], ["z"]),
    ]
    model = quotient_of(body, [helper.make_opsetid("", 18)])
    # A division of the model's own is made safe all the same.
    model.graph.node.append(helper.make_node("Div", ["A", "B"], ["R"]))
    model.graph.output.append(helper.make_tensor_value_info("R", TensorProto.INT64, None))
    path = save(tmp_path, model)
    with caplog.at_level(logging.WARNING):
        content = guarded_model(path, refuse)
    assert "model.onnx: its function 'Quotient' divides, and cannot be put in place of its calls" in caplog.text
    rewritten = onnx.load_model_from_string(content or b"")
    assert [function.name for function in rewritten.functions] == ["Quotient"]
    operators = [node.op_type for node in rewritten.graph.node]
    assert (operators.count("Mul"), operators.count("Quotient")) == (2, 1)
    with pytest.raises(EngineError, match="Pad"):
        OnnxRuntimeEngine.load(path)


def test_a_function_of_domains_that_the_model_does_not_list(tmp_path):
    body = [
        helper.make_node("Trilu", ["x"], ["t"], domain="com.microsoft"),
        helper.make_node("Div", ["t", "y"], ["z"]),
    ]
    model = quotient_of(body, [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)])
    for value in model.graph.input:
        value.type.tensor_type.shape.dim.add()
    engine = OnnxRuntimeEngine.load(save(tmp_path, model))
    least = np.iinfo(np.int64).min
    assert engine.run({"A": np.array([[least]]), "B": np.array([[-1]])}, ["Q"])[0].tolist() == [[least]]


@pytest.mark.parametrize("element", [TensorProto.INT64, TensorProto.FLOAT])
def test_types_behind_operators_that_onnx_does_not_know(tmp_path, element):
    """BiasDropout's like: ONNX's inference ends there, ONNX Runtime's does not."""
    nodes = [
        helper.make_node("Cast", ["A"], ["a"], to=TensorProto.FLOAT),
        helper.make_node("QuickGelu", ["a"], ["b"], domain="com.microsoft", alpha=1e6),
        helper.make_node("Trilu", ["A2"], ["c"], domain="com.microsoft", upper=1),
        helper.make_node("Div", ["c", "c2"], ["Q"]),
        helper.make_node("Trilu", ["B2"], ["c2"], domain="com.microsoft", upper=1),
    ]
    model = build(
        [nodes[2], nodes[4], nodes[3]],
        [("A2", element, [None, None]), ("B2", element, [None, None])],
        [("Q", element)],
        domains=["com.microsoft"],
    )
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    model.graph.node.append(helper.make_node("Identity", ["Q"], ["R"]))
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info("R", element, None))
    path = save(tmp_path, model)
    with pytest.raises(AssertionError, match="should be known"):
        guarded_model(path, refuse)
    engine = OnnxRuntimeEngine.load(path)
    dtype = helper.tensor_dtype_to_np_dtype(element)
    a, b = (np.array([[value]], dtype) for value in (np.iinfo(np.int64).min, -1))
    (r,) = engine.run({"A2": a, "B2": b}, ["R"])
    assert r.tolist() == ([[np.iinfo(np.int64).min]] if element == TensorProto.INT64 else [[2.0**63]])


def test_external_data_are_read_and_large_ones_are_not_copied(tmp_path):
    random = np.random.default_rng(0)
    weight = random.integers(-5, 5, (64, 64))
    model = build(
        [helper.make_node("MatMul", ["A", "W"], ["X"]), helper.make_node("Div", ["X", "B"], ["Q"])],
        [("A", TensorProto.INT64, [None, 64]), ("B", TensorProto.INT64, [64])],
        [("Q", TensorProto.INT64)],
        [("W", weight)],
    )
    a, b = random.integers(-99, 99, (3, 64)), np.full(64, -1)
    inside = save(tmp_path, model)
    assert OnnxRuntimeEngine.load(inside).run({"A": a, "B": b}, ["Q"])[0].tolist() == (-(a @ weight)).tolist()
    folder = tmp_path / "external"
    folder.mkdir()
    onnx.save_model(model, folder / "model.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    content = guarded_model(folder / "model.onnx", refuse)
    assert content is not None
    assert len(content) < weight.nbytes
    engine = OnnxRuntimeEngine.load(folder / "model.onnx")
    assert engine.run({"A": a, "B": b}, ["Q"])[0].tolist() == (-(a @ weight)).tolist()


def test_the_session_does_not_keep_the_model_a_second_time(tmp_path):
    session = make_session(save(tmp_path, division(INT64)), 0, 1)
    assert session._model_bytes is None
    assert session.run(None, {"A": np.array([7]), "B": np.array([-2])})[0].tolist() == [-3]


def test_what_would_exceed_protobufs_limit_is_told(tmp_path, monkeypatch):
    path = save(tmp_path, division(INT64))
    whole = len(guarded_model(path, refuse) or b"")
    monkeypatch.setattr(onnx_assembly, "MAX_MESSAGE_BYTES", whole)
    assert guarded_model(path, refuse) is not None
    monkeypatch.setattr(onnx_assembly, "MAX_MESSAGE_BYTES", whole - 1)
    with pytest.raises(EngineError, match=r"model\.onnx: with its integer divisions made safe it exceeds .* 2 GiB"):
        OnnxRuntimeEngine.load(path)


def test_types_are_asked_of_the_providers_that_run_the_model(tmp_path, monkeypatch):
    """Each knows operators that the others do not."""
    nodes = [
        helper.make_node("Trilu", ["A"], ["a"], domain="com.microsoft"),
        helper.make_node("Trilu", ["A"], ["b"], domain="com.microsoft"),
        helper.make_node("Div", ["a", "b"], ["d"]),
        helper.make_node("Identity", ["d"], ["Q"]),
    ]
    model = build(nodes, [("A", 7, [None, None])], [("Q", 7)], domains=["com.microsoft"])
    asked = []
    really = onnxruntime._open

    def opened(path, content, options, providers):
        asked.append(providers)
        return really(path, content, options, ["CPUExecutionProvider"])

    monkeypatch.setattr(onnxruntime, "_open", opened)
    with pytest.raises(EngineError, match="did not start on GPU 1"):
        make_session(save(tmp_path, model), 0, 1, cuda_provider(1))
    assert len(asked) == 2, "the types, then the session"
    assert all(providers[0] == (CUDA_PROVIDER, {"device_id": "1"}) for providers in asked)


@pytest.mark.parametrize("inputs, outputs", [(["A"], ["Q"]), (["A"] * 3, ["Q"]), (["A", "A"], []), (["A", ""], ["Q"])])
def test_of_a_malformed_division_onnx_runtime_tells(tmp_path, inputs, outputs):
    nodes = [helper.make_node("Div", inputs, outputs), helper.make_node("Div", ["A", "B"], ["R"])]
    model = build(nodes, [("A", 7, [None]), ("B", 7, [None])], [("R", 7)])
    path = save(tmp_path, model)
    assert guarded_model(path, refuse) is not None
    with pytest.raises(EngineError, match="ONNXRuntimeError"):
        OnnxRuntimeEngine.load(path)


def test_of_a_malformed_constant_onnx_runtime_tells(tmp_path):
    value = numpy_helper.from_array(np.array([1]))
    nodes = [helper.make_node("Constant", [], [], value=value), helper.make_node("Div", ["A", "A"], ["Q"])]
    path = save(tmp_path, build(nodes, [("A", 7, [None])], [("Q", 7)]))
    assert guarded_model(path, refuse) is not None
    with pytest.raises(EngineError, match="ONNXRuntimeError"):
        OnnxRuntimeEngine.load(path)


@pytest.mark.parametrize(
    "nodes",
    [
        [helper.make_node("Add", ["A", "A"], ["Q"])],
        [helper.make_node("Div", ["A", "three"], ["Q"])],
        [helper.make_node("Div", ["three", "A"], ["Q"])],
        [helper.make_node("Mod", ["A", "A"], ["Q"])],
    ],
)
def test_what_is_safe_stays_a_file(tmp_path, nodes):
    model = build(
        nodes, [("A", TensorProto.INT64, [None])], [("Q", TensorProto.INT64)], [("three", np.array([3], np.int64))]
    )
    assert guarded_model(save(tmp_path, model), refuse) is None


def test_floats_stay_a_file(tmp_path):
    model = build(
        [helper.make_node("Sqrt", ["A"], ["S"]), helper.make_node("Div", ["A", "S"], ["Q"])],
        [("A", TensorProto.FLOAT, [None])],
        [("Q", TensorProto.FLOAT)],
    )
    assert guarded_model(save(tmp_path, model), refuse) is None


def test_models_without_division_are_not_parsed(tmp_path, monkeypatch):
    def fail(outline):
        raise AssertionError("parsed")

    monkeypatch.setattr(onnx_divisions, "parse", fail)
    model = build([helper.make_node("Add", ["A", "A"], ["Q"])], [("A", 7, [None])], [("Q", 7)])
    assert guarded_model(save(tmp_path, model), refuse) is None


@pytest.mark.parametrize("content", [b"", b"\xff\xff\xff", b"garbage", b"\x3a\xff\xff\xff\x7f"])
def test_what_is_no_model_is_left_to_onnx_runtime(tmp_path, content):
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    assert guarded_model(path, refuse) is None
    with pytest.raises(EngineError):
        OnnxRuntimeEngine.load(path)


def test_names_of_the_rewriting_that_are_taken(tmp_path):
    model = build(
        [helper.make_node("Identity", ["A"], ["hone/division/Q/0"]),
         helper.make_node("Div", ["hone/division/Q/0", "B"], ["Q"])],
        [("A", TensorProto.INT64, [None]), ("B", TensorProto.INT64, [None])],
        [("Q", TensorProto.INT64)],
    )  # fmt: skip
    check(save(tmp_path, model), INT64)
