"""`import_model`: fixed shapes, weights apart from the code, digests by content, refusals that name what is wrong."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm
import tvm_ffi
from onnx import TensorProto, helper, numpy_helper
from tvm import relax

from hone.compiler import baseline, onnx_import, simplify
from hone.compiler.build import BuildFailed
from hone.compiler.onnx_graph import MAX_INLINE_ITEMS
from hone.compiler.onnx_import import ImportedModel, Unsupported, import_model
from hone.types import TensorSpec
from tests.unit.compiler.graphs import assert_same, model, run

DIGITS = Path("model_repo/digits/1/model.onnx")
RNG = np.random.default_rng(31)

CLASSIFIER = """g (float[n, 12] x) => (float[a, b] y) {
    hidden = MatMul (x, w1)
    shifted = Add (hidden, b1)
    active = Relu (shifted)
    y = MatMul (active, w2)
}"""


def weights():
    rng = np.random.default_rng(5)
    shapes = {"w1": (12, 32), "b1": (32,), "w2": (32, 10)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def imported(proto, shapes, tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(proto, path)
    result = import_model(path, shapes)
    assert isinstance(result, ImportedModel), result
    return result


def refused(proto, shapes, tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(proto, path)
    result = import_model(path, shapes)
    assert isinstance(result, Unsupported), result
    return result


def run_compiled(result, inputs):
    machine = relax.VirtualMachine(tvm.compile(result.mod, target="llvm"), tvm.cpu())
    arrays = [*(inputs[spec.name] for spec in result.inputs), *result.params.values()]
    output = machine["main"](*(tvm.runtime.tensor(np.asarray(array, order="C")) for array in arrays))
    return [output.numpy()] if hasattr(output, "numpy") else [item.numpy() for item in output]


@pytest.mark.parametrize("batch", [1, 4])
def test_a_batch_bucket(batch):
    result = import_model(DIGITS, {"image": (batch, 1, 8, 8)})
    assert isinstance(result, ImportedModel)
    assert result.inputs == (TensorSpec("image", "FP32", (batch, 1, 8, 8)),)
    assert result.outputs == (TensorSpec("probabilities", "FP32", (batch, 10)),)
    x = RNG.random((batch, 1, 8, 8), np.float32)
    assert_same(run_compiled(result, {"image": x}), run(onnx.load(DIGITS), {"image": x}))


def test_parameters_are_traced_to_the_files_initializers():
    result = import_model(DIGITS, {"image": (1, 1, 8, 8)})
    assert isinstance(result, ImportedModel)
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(DIGITS).graph.initializer}
    assert result.initializers
    for parameter, name in result.initializers.items():
        np.testing.assert_array_equal(result.params[parameter], stored[name])


def test_folded_weights_are_derived(tmp_path):
    proto = model(
        """g (float[n, 3, 8, 8] x) => (float[a, b, c, d] y) {
            z = Conv (x, w)
            y = BatchNormalization (z, s, o, m, v)
        }""",
        {"w": RNG.normal(size=(16, 3, 3, 3)).astype(np.float32)}
        | {name: RNG.uniform(0.5, 1, 16).astype(np.float32) for name in "somv"},
    )
    result = imported(proto, {"x": (1, 3, 8, 8)}, tmp_path)
    assert sorted(array.shape for array in result.params.values()) == [(16,), (16, 3, 3, 3)]
    assert result.initializers == {}


def test_weights_stay_out_of_the_code():
    result = import_model(DIGITS, {"image": (1, 1, 8, 8)})
    assert isinstance(result, ImportedModel)
    main = result.mod["main"]
    assert int(main.attrs["num_input"]) == 1
    assert [param.name for param in main.params] == ["i0", *result.params]
    constants = []
    relax.analysis.post_order_visit(
        main, lambda node: constants.append(node.value.numpy()) if isinstance(node, tvm.ir.GenericConst) else None
    )
    assert all(array.size <= MAX_INLINE_ITEMS or array.dtype == np.int64 for array in constants)


def shuffled(proto):
    """The same model with other names inside and its nodes in another legal order."""
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    keep = {value.name for value in (*proto.graph.input, *proto.graph.output)}
    names = {name: name if name in keep else f"other/{number}" for number, name in enumerate(_names(proto))}
    nodes = list(copy.graph.node)
    for number, node in enumerate(nodes):
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
        node.name = f"node {number}"
    for tensor in copy.graph.initializer:
        tensor.name = names[tensor.name]
    reordered = []
    made = {value.name for value in copy.graph.input} | {tensor.name for tensor in copy.graph.initializer}
    while nodes:  # the last node that can run comes first
        node = next(node for node in reversed(nodes) if made.issuperset(node.input))
        reordered.append(node)
        made.update(node.output)
        nodes.remove(node)
    del copy.graph.node[:]
    copy.graph.node.extend(reordered)
    tensors = list(copy.graph.initializer)[::-1]
    del copy.graph.initializer[:]
    copy.graph.initializer.extend(tensors)
    return copy


def _names(proto):
    return [tensor.name for tensor in proto.graph.initializer] + [
        name for node in proto.graph.node for name in node.output
    ]


BRANCHED = """g (float[n, 12] x) => (float[a, b] y) {
    left = MatMul (x, w1)
    right = Sin (x)
    more = MatMul (right, w1)
    sum = Add (left, more)
    y = MatMul (sum, w2)
}"""


@pytest.mark.parametrize("text", [CLASSIFIER, BRANCHED])
def test_the_digest_does_not_go_by_names_or_order(text, tmp_path):
    proto = model(text, weights())
    other = shuffled(proto)
    assert [node.op_type for node in other.graph.node] != [
        node.op_type for node in proto.graph.node
    ] or text == CLASSIFIER
    first, second = (imported(item, {"x": (2, 12)}, tmp_path) for item in (proto, other))
    assert first.graph_digest == second.graph_digest
    assert tvm_ffi.structural_equal(first.mod, second.mod)


def renamed_input(proto):
    proto.graph.input[0].name = proto.graph.node[0].input[0] = "data"


def other_weight(proto):
    array = numpy_helper.to_array(proto.graph.initializer[0]).copy()
    array[0, 0] += 1
    proto.graph.initializer[0].CopyFrom(numpy_helper.from_array(array, "w1"))


def other_operator(proto):
    proto.graph.node[2].op_type = "Tanh"


def other_attribute(proto):
    proto.graph.node[2].CopyFrom(helper.make_node("LeakyRelu", ["shifted"], ["active"], alpha=0.3))


def another_attribute(proto):
    proto.graph.node[2].CopyFrom(helper.make_node("LeakyRelu", ["shifted"], ["active"], alpha=0.2))


def renamed_output(proto):
    proto.graph.output[0].name = proto.graph.node[-1].output[0] = "scores"


def test_the_digest_goes_by_everything_else(tmp_path):
    changes = [renamed_input, renamed_output, other_weight, other_operator, other_attribute, another_attribute]
    digests = {
        imported(model(CLASSIFIER, weights()), {"x": shape}, tmp_path).graph_digest for shape in ((1, 12), (2, 12))
    }
    for change in changes:
        proto = model(CLASSIFIER, weights())
        change(proto)
        digests.add(imported(proto, {proto.graph.input[0].name: (1, 12)}, tmp_path).graph_digest)
    assert len(digests) == 2 + len(changes)


def test_names_that_the_importer_would_confuse(tmp_path):
    """TVM's importer cuts a prefix off, after which these two are one."""
    proto = model(CLASSIFIER, weights())
    for tensor in proto.graph.initializer:
        tensor.name = {"w1": "w", "w2": "onnx::w"}.get(tensor.name, tensor.name)
    for node in proto.graph.node:
        node.input[:] = [{"w1": "w", "w2": "onnx::w"}.get(name, name) for name in node.input]
    result = imported(proto, {"x": (3, 12)}, tmp_path)
    x = RNG.random((3, 12), np.float32)
    assert_same(run_compiled(result, {"x": x}), run(proto, {"x": x}))


def test_weights_in_a_file_of_their_own(tmp_path):
    proto = model(CLASSIFIER, weights())
    digest = imported(proto, {"x": (1, 12)}, tmp_path).graph_digest
    folder = tmp_path / "external"
    folder.mkdir()
    onnx.save(proto, folder / "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    result = import_model(folder / "model.onnx", {"x": (1, 12)})
    assert isinstance(result, ImportedModel)
    assert result.graph_digest == digest
    assert set(result.initializers.values()) == {"w1", "b1", "w2"}


def test_weights_too_large_for_one_message(tmp_path, monkeypatch):
    proto = model(CLASSIFIER, weights())
    digest = imported(proto, {"x": (1, 12)}, tmp_path).graph_digest
    monkeypatch.setattr(simplify, "_MAX_MESSAGE_BYTES", 0)
    result = imported(proto, {"x": (1, 12)}, tmp_path)
    assert result.graph_digest == digest
    assert set(result.initializers.values()) == {"w1", "b1", "w2"}


@pytest.mark.parametrize("reverse", [0, 1])
def test_products_along_an_axis_bring_no_weights(reverse, tmp_path):
    proto = model(
        f"g (float[a, b] x) => (float[c, d] y) {{ y = CumProd <reverse = {reverse}, exclusive = 1> (x, axis) }}",
        {"axis": np.array(1)},
        opset=26,
    )
    result = imported(proto, {"x": (3, 20)}, tmp_path)
    assert not result.params
    x = RNG.uniform(0.5, 1.5, (3, 20)).astype(np.float32)
    forward = np.cumprod(x[:, ::-1] if reverse else x, axis=1)[:, :-1]
    expected = np.concatenate([np.ones((3, 1), np.float32), forward], 1)
    assert_same(run_compiled(result, {"x": x}), [expected[:, ::-1] if reverse else expected])


def test_nothing_is_left_in_the_folder_of_temporary_files(tmp_path, monkeypatch):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    made = []
    monkeypatch.setattr(tempfile, "mkdtemp", lambda *arguments, **keywords: made.append(arguments))
    assert isinstance(import_model(DIGITS, {"image": (1, 1, 8, 8)}), ImportedModel)
    assert not made
    assert not list(scratch.iterdir())


def test_initializers_listed_as_inputs(tmp_path):
    proto = model(CLASSIFIER, weights())
    for tensor in proto.graph.initializer:
        proto.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    proto.ir_version = 3
    proto.opset_import[0].version = 9
    assert imported(proto, {"x": (1, 12)}, tmp_path).inputs == (TensorSpec("x", "FP32", (1, 12)),)


def test_a_dynamically_quantized_chain(tmp_path):
    """As onnxruntime.quantization.quantize_dynamic writes it: scales and zero points are computed at run time."""
    rng = np.random.default_rng(9)
    proto = model(
        """g (float[n, 3, 6, 6] x) => (float[a, b] y) {
            xq, xs, xz = DynamicQuantizeLinear (x)
            sums = ConvInteger <pads = [1, 1, 1, 1]> (xq, wq, xz, wz)
            numbers = Cast <to = 1> (sums)
            scale = Mul (xs, ws)
            scaled = Mul (numbers, scale)
            active = Relu (scaled)
            flat = Flatten (active)
            fq, fs, fz = DynamicQuantizeLinear (flat)
            more = MatMulInteger (fq, vq, fz, vz)
            floats = Cast <to = 1> (more)
            factor = Mul (fs, vs)
            y = Mul (floats, factor)
        }""",
        {
            "wq": rng.integers(-127, 128, (8, 3, 3, 3)).astype(np.int8),
            "wz": np.array(0, np.int8),
            "ws": np.array(0.01, np.float32),
            "vq": rng.integers(0, 256, (288, 10)).astype(np.uint8),
            "vz": np.array(121, np.uint8),
            "vs": np.array(0.02, np.float32),
        },
    )
    x = rng.normal(size=(2, 3, 6, 6)).astype(np.float32)
    result = imported(proto, {"x": x.shape}, tmp_path)
    assert_same(run_compiled(result, {"x": x}), run(proto, {"x": x}), tolerance=1e-4)


def test_half_precision(tmp_path):
    given = {name: value.astype(np.float16) for name, value in weights().items()}
    proto = model(CLASSIFIER.replace("float[", "float16["), given)
    x = RNG.normal(size=(2, 12)).astype(np.float16)
    result = imported(proto, {"x": x.shape}, tmp_path)
    assert result.inputs == (TensorSpec("x", "FP16", (2, 12)),)
    (got,), (wanted,) = run_compiled(result, {"x": x}), run(proto, {"x": x})
    assert got.dtype == wanted.dtype
    np.testing.assert_allclose(got, wanted, rtol=2e-2, atol=2e-2)


def test_an_output_without_a_node(tmp_path):
    proto = model("g (float[n, 12] x) => (float[a, b] y, float[c, d] z) { y = Identity (x) z = Relu (x) }")
    result = imported(proto, {"x": (2, 12)}, tmp_path)
    x = RNG.normal(size=(2, 12)).astype(np.float32)
    assert_same(run_compiled(result, {"x": x}), run(proto, {"x": x}))


#: Operators whose meaning changed: what they meant in the model's opset is what counts.
X3, X4, Y3, Y4 = "float[n, 3, 4] x", "float[n, 3, 4, 4] x", "float[a, b, c] y", "float[a, b, c, d] y"
TWICE = "s = Constant <value = float[4] {1, 1, 2, 2}> ()"
COUNT = "c = Constant <value = float[3] {1, 2, 3}> ()"
OLD = {
    "softmax over all axes from 1": (7, X3, Y3, "y = Softmax (x)"),
    "softmax of opset 11": (11, X3, Y3, "y = LogSoftmax <axis = 1> (x)"),
    "squeeze by attribute": (11, "float[n, 1, 4] x", "float[a, b] y", "y = Squeeze <axes = [1]> (x)"),
    "sum by attribute": (11, X3, "float[a, b] y", "y = ReduceSum <axes = [1], keepdims = 0> (x)"),
    "slice by attribute": (9, X3, Y3, "y = Slice <axes = [2], starts = [1], ends = [4]> (x)"),
    "pad by attribute": (10, X3, Y3, "y = Pad <pads = [0, 1, 0, 0, 0, 2]> (x)"),
    "clip by attribute": (7, X3, Y3, "y = Clip <min = 0.2, max = 0.7> (x)"),
    "top by attribute": (9, X3, f"{Y3}, int64[d, e, f] z", "y, z = TopK <k = 2, axis = 2> (x)"),
    "split by attribute": (11, X3, f"{Y3}, float[d, e, f] z", "y, z = Split <axis = 2, split = [1, 3]> (x)"),
    "upsample": (9, X4, Y4, f'{TWICE} y = Upsample <mode = "nearest"> (x, s)'),
    "resize of opset 10": (10, X4, Y4, f'{TWICE} y = Resize <mode = "nearest"> (x, s)'),
    "batch normalization": (8, X3, Y3, f"{COUNT} y = BatchNormalization (x, c, c, c, c)"),
    "dropout": (9, X3, Y3, "z = Dropout <ratio = 0.5> (x) y = Relu (z)"),
    "pool": (8, X4, Y4, "y = AveragePool <kernel_shape = [2, 2], pads = [1, 1, 0, 0]> (x)"),
}


@pytest.mark.parametrize("opset, inputs, outputs, body", OLD.values(), ids=OLD)
def test_old_opsets(opset, inputs, outputs, body, tmp_path):
    proto = model(f"g ({inputs}) => ({outputs}) {{ {body} }}", opset=opset)
    rank = inputs.count(",")
    x = RNG.random((2, *(dim.dim_value for dim in proto.graph.input[0].type.tensor_type.shape.dim[1:])), np.float32)
    assert x.ndim == rank + 1
    result = imported(proto, {"x": x.shape}, tmp_path)
    assert_same(run_compiled(result, {"x": x}), run(proto, {"x": x}))


def test_an_open_shape_is_named(tmp_path):
    assert "input x has no fixed shape" in refused(model(CLASSIFIER, weights()), {}, tmp_path).reason


def test_a_shape_for_no_input_is_named(tmp_path):
    answer = refused(model(CLASSIFIER, weights()), {"x": (1, 12), "mask": (1,)}, tmp_path)
    assert "no input mask" in answer.reason


def test_shapes_that_do_not_fit_are_refused_with_the_engines_reason(tmp_path):
    assert "MatMul" in refused(model(CLASSIFIER, weights()), {"x": (1, 11)}, tmp_path).reason


@pytest.mark.parametrize(
    "text, operator",
    [
        ("g (float[4, 4] x) => (float[a, b] y) { y = TfIdf (x) }", "TfIdf"),
        ("g (float[5, 5] x) => (float y) { y = Det (x) }", "Det"),
        ("g (float[4, 4] x) => (int64[2, a] y) { y = NonZero (x) }", "NonZero"),
        (
            "g (float[1, 9, 4] x, float[1, 2, 9] s) => (int64[a, 3] y) {"
            " n = Constant <value = int64[1] {3}> () y = NonMaxSuppression (x, s, n) }",
            "NonMaxSuppression",
        ),
        (
            "g (int64 n) => (int64 y) { i = Constant <value = int64 {0}> () k = Constant <value = int64 {1}> ()"
            " r = Range (i, n, k) axes = Constant <value = int64[1] {0}> () y = ReduceSum <keepdims = 0> (r, axes) }",
            "",
        ),
        ("g (string[4] x) => (string[4] y) { y = Identity (x) }", ""),
    ],
)
def test_what_is_unsupported_is_named(text, operator, tmp_path):
    answer = refused(model(text), {}, tmp_path)
    assert answer.operator == operator or operator in answer.reason
    assert answer.reason


def test_dropout_in_training_is_named(tmp_path):
    proto = model(
        "g (float[n, m] x) => (float[a, b] y) { y = Dropout (x, ratio, training) }",
        {"ratio": np.array(0.5, np.float32), "training": np.array(True)},
    )
    assert refused(proto, {"x": (2, 3)}, tmp_path).operator == "Dropout"


def test_an_input_that_is_no_tensor_is_named(tmp_path):
    value = helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, None)
    node = helper.make_node("SequenceLength", ["s"], ["n"])
    graph = helper.make_graph([node], "g", [value], [helper.make_tensor_value_info("n", TensorProto.INT64, ())])
    answer = refused(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), {}, tmp_path)
    assert "input s is no tensor" in answer.reason


def test_what_is_no_onnx_file_is_refused(tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(b"\x00not a model" * 100)
    answer = import_model(path, {})
    assert isinstance(answer, Unsupported)


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        import_model(tmp_path / "none.onnx", {})


@pytest.mark.parametrize(
    "place, name",
    [(baseline, "simplified"), (onnx_import, "canonicalize"), (onnx_import, "rewrite"), (onnx, "load")],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize(
    "problem",
    [
        MemoryError(),
        RuntimeError("std::bad_alloc"),
        RuntimeError("[ONNXRuntimeError] : 6 : Failed to allocate memory for requested buffer of size 4294967296"),
    ],
    ids=["python", "C++", "ONNX Runtime"],
)
def test_a_machine_without_memory_says_nothing_of_the_model(monkeypatch, place, name, problem):
    def starved(*_, **__):
        raise problem

    monkeypatch.setattr(place, name, starved)
    with pytest.raises(BuildFailed, match="importing: "):
        import_model(DIGITS, {"image": (1, 1, 8, 8)})


def test_a_converter_that_has_no_memory_says_nothing_of_the_model(monkeypatch):
    def starved(*_):
        raise MemoryError

    monkeypatch.setattr(onnx_import._Importer, "_convert_operator", starved)
    with pytest.raises(BuildFailed, match="importing: MemoryError"):
        import_model(DIGITS, {"image": (1, 1, 8, 8)})


def test_what_the_importer_prints_does_not_reach_standard_output(tmp_path, capfd):
    refused(model("g (float[4, 4] x, int64[2] axes) => (y) { y = ReduceMax (x, axes) }", opset=18), {}, tmp_path)
    assert capfd.readouterr().out == ""
