from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.errors import ConfigError
from hone.protos import config_pb
from hone.repository import complete
from hone.repository.config_text import parse_config
from hone.types import NUMPY_DTYPES, TensorSpec

IMAGE = [TensorSpec("image", "FP32", (-1, 3, 224, 224))]
SCORES = [TensorSpec("scores", "FP32", (-1, 10))]
FIXED = [TensorSpec("image", "FP32", (1, 3, 224, 224))]


def completed(text="", inputs=IMAGE, outputs=SCORES, **more):
    return complete(parse_config(text.encode(), "m"), inputs, outputs, model="m", **more)


def refused(text="", inputs=IMAGE, outputs=SCORES, **more):
    with pytest.raises(ConfigError) as caught:
        completed(text, inputs, outputs, **more)
    return caught.value


def test_without_a_config_everything_comes_from_the_graph():
    expected = """
        name: "m" platform: "onnxruntime_onnx" backend: "onnxruntime" default_model_filename: "model.onnx"
        version_policy { latest { num_versions: 1 } }
        max_batch_size: 4
        input [ { name: "image" data_type: TYPE_FP32 dims: [ 3, 224, 224 ] } ]
        output [ { name: "scores" data_type: TYPE_FP32 dims: [ 10 ] } ]
        dynamic_batching { preferred_batch_size: [ 4 ] }
        instance_group [ { name: "m" count: 1 kind: KIND_CPU } ]
        optimization { input_pinned_memory { enable: true } output_pinned_memory { enable: true } }
    """
    assert completed() == parse_config(expected.encode(), "m")


def test_completing_twice_changes_nothing_and_the_given_config_stays():
    given = config_pb.ModelConfig()
    once = complete(given, IMAGE, SCORES, model="m")
    assert given == config_pb.ModelConfig()
    assert complete(once, IMAGE, SCORES, model="m") == once


@pytest.mark.parametrize(("default", "size", "dynamic"), [(4, 4, True), (1, 1, False), (0, 0, False), (16, 16, True)])
def test_default_max_batch_size(default, size, dynamic):
    config = completed(default_max_batch_size=default)
    assert (config.max_batch_size, config.HasField("dynamic_batching")) == (size, dynamic)
    assert list(config.input[0].dims) == ([3, 224, 224] if size else [-1, 3, 224, 224])


def test_a_given_max_batch_size_stands():
    config = completed("max_batch_size: 32")
    assert (config.max_batch_size, list(config.dynamic_batching.preferred_batch_size)) == (32, [32])


def test_given_dynamic_batching_stands():
    config = completed("max_batch_size: 8 dynamic_batching { preferred_batch_size: [ 2, 4 ] }")
    assert list(config.dynamic_batching.preferred_batch_size) == [2, 4]
    assert (
        refused("dynamic_batching { preferred_batch_size: [ 8 ] }").field == "dynamic_batching.preferred_batch_size[0]"
    )


def test_a_full_config_is_not_made_to_batch():
    """Both input and output given: max_batch_size 0 means a model without batching, as in Triton."""
    config = completed(
        "input { name: 'image' data_type: TYPE_FP32 dims: [ -1, 3, 224, 224 ] }"
        "output { name: 'scores' data_type: TYPE_FP32 dims: [ -1, 10 ] }"
    )
    assert config.max_batch_size == 0
    assert not config.HasField("dynamic_batching")


def test_only_inputs_given():
    config = completed("input { name: 'image' data_type: TYPE_FP32 dims: [ 3, 224, 224 ] }")
    assert (config.max_batch_size, list(config.output[0].dims)) == (4, [10])
    whole = completed("input { name: 'image' data_type: TYPE_FP32 dims: [ -1, 3, 224, 224 ] }")
    assert (whole.max_batch_size, list(whole.output[0].dims)) == (0, [-1, 10])


def test_a_graph_without_a_variable_first_dimension_does_not_batch():
    for inputs, outputs in [
        (FIXED, SCORES),
        (IMAGE, [TensorSpec("scores", "FP32", (1, 10))]),
        (IMAGE, [TensorSpec("mean", "FP32", ())]),
    ]:
        config = completed("", inputs, outputs)
        assert config.max_batch_size == 0
        assert list(config.input[0].dims) == list(inputs[0].shape)


def test_batched_vectors_get_an_empty_reshape():
    config = completed("", [TensorSpec("x", "INT64", (-1,))], [TensorSpec("y", "BYTES", (-1,))])
    assert list(config.input[0].dims) == [1]
    assert config.input[0].HasField("reshape") and list(config.input[0].reshape.shape) == []
    assert config.output[0].data_type == config_pb.TYPE_STRING


def test_scalars_without_batching_are_written_as_one():
    config = completed("", [TensorSpec("x", "FP32", ())], [TensorSpec("y", "FP32", ())])
    assert (config.max_batch_size, list(config.input[0].dims), list(config.output[0].dims)) == (0, [1], [1])
    assert not config.input[0].HasField("reshape")
    assert completed(
        "input { name: 'x' data_type: TYPE_FP32 dims: [ 1 ] } output { name: 'y' data_type: TYPE_FP32 dims: [ 1 ] }",
        [TensorSpec("x", "FP32", ())],
        [TensorSpec("y", "FP32", ())],
    )


def test_order_is_the_graphs():
    config = completed(
        "", [TensorSpec("b", "FP32", (-1, 1)), TensorSpec("a", "FP32", (-1, 1))], [TensorSpec("z", "FP32", (-1, 1))]
    )
    assert [tensor.name for tensor in config.input] == ["b", "a"]


def test_instance_groups_and_version_policy_are_filled():
    config = completed(
        "instance_group [ {}, { name: 'mine' count: 3 }, { kind: KIND_MODEL } ] version_policy { latest {} }"
    )
    assert [(g.name, g.count, g.kind) for g in config.instance_group] == [
        ("m_0", 1, config_pb.ModelInstanceGroup.KIND_CPU),
        ("mine", 3, config_pb.ModelInstanceGroup.KIND_CPU),
        ("m_2", 1, config_pb.ModelInstanceGroup.KIND_MODEL),
    ]
    assert config.version_policy.latest.num_versions == 1


def test_pinned_memory_stays_off_where_it_is_off():
    config = completed("optimization { input_pinned_memory { enable: false } }")
    assert not config.optimization.input_pinned_memory.enable
    assert config.optimization.output_pinned_memory.enable


# --- against the graph ---------------------------------------------------------------------------------------------

FULL = (
    "max_batch_size: %s input { name: '%s' data_type: %s dims: [ %s ] }"
    " output { name: '%s' data_type: %s dims: [ %s ] }"
)


def full(size=8, x="image", xt="TYPE_FP32", xd="3, 224, 224", y="scores", yt="TYPE_FP32", yd="10"):
    return FULL % (size, x, xt, xd, y, yt, yd)


def test_a_right_full_config():
    assert completed(full()).max_batch_size == 8


@pytest.mark.parametrize(
    ("text", "field", "reason"),
    [
        (full(x="picture"), "input[0].name", "unexpected inference input 'picture', allowed inputs are: image"),
        (full(y="score"), "output[0].name", "unexpected inference output 'score', allowed outputs are: scores"),
        (full(xt="TYPE_FP16"), "input[0].data_type", "has datatype TYPE_FP32 in the model, found TYPE_FP16"),
        (full(yt="TYPE_INT64"), "output[0].data_type", "has datatype TYPE_FP32 in the model, found TYPE_INT64"),
        (full(xd="3, 224, 225"), "input[0].dims", "has shape [-1,3,224,224] in the model, so [3,224,224] is expected"),
        (full(xd="3, 224"), "input[0].dims", "found [3,224]"),
        (full(xd="3, -1, -1"), "input[0].dims", "found [3,-1,-1]"),
        (full(xd="-1, 3, 224, 224"), "input[0].dims", "the batch dimension comes by itself: leave it out"),
        (full(yd="11"), "output[0].dims", "found [11]"),
        (
            full(size=0),
            "input[0].dims",
            "the full shape is needed: write the batch dimension too, or set",
        ),
        (full(size=0, xd="-1, 3, 224, 224"), "output[0].dims", "found [10]"),
    ],
)
def test_a_config_that_does_not_fit_says_what_to_change(text, field, reason):
    problem = refused(text)
    assert problem.field == field
    assert reason in problem.reason


def test_a_fixed_batch_of_one_says_what_to_change():
    for text in (full(), "max_batch_size: 8"):
        problem = refused(text, FIXED)
        assert problem.field == "max_batch_size"
        assert problem.reason.startswith("model does not support batching while non-zero max_batch_size is specified")
        assert "input 'image' has shape [1,3,224,224] in the model, a first dimension fixed to 1" in problem.reason
        assert "Set max_batch_size to 0" in problem.reason


def test_a_scalar_output_does_not_batch():
    problem = refused("max_batch_size: 8", IMAGE, [TensorSpec("mean", "FP32", ())])
    assert (problem.field, "output 'mean' has shape []" in problem.reason) == ("max_batch_size", True)


def test_an_output_may_be_told_more_or_less_than_the_graph_knows():
    completed(full(yd="10"), IMAGE, [TensorSpec("scores", "FP32", (-1, -1))])
    completed(full(yd="-1"))


def test_outputs_may_be_left_out_and_inputs_may_not():
    two = [*SCORES, TensorSpec("features", "FP32", (-1, 64))]
    assert [tensor.name for tensor in completed(full(), IMAGE, two).output] == ["scores"]
    problem = refused(full(), [*IMAGE, TensorSpec("mask", "BOOL", (-1, 1))])
    assert problem.field == "input"
    assert "expects 1 inputs, model provides 2; missing ['mask']" in problem.reason


def test_a_reshape_is_what_the_graph_sees():
    text = (
        "max_batch_size: 8 input { name: 'x' data_type: TYPE_FP32 dims: [ 1 ] reshape { } }"
        "output { name: 'y' data_type: TYPE_FP32 dims: [ 2, 2 ] reshape { shape: [ 4 ] } }"
    )
    completed(text, [TensorSpec("x", "FP32", (-1,))], [TensorSpec("y", "FP32", (-1, 4))])
    problem = refused(text, [TensorSpec("x", "FP32", (-1, 1))], [TensorSpec("y", "FP32", (-1, 4))])
    assert problem.field == "input[0].reshape.shape"


OPTIONAL = (
    "max_batch_size: %d input [ { name: 'x' data_type: TYPE_FP32 dims: [ -1 ] },"
    " { name: 'scale' data_type: TYPE_FP32 dims: [ 1 ] optional: %s } ]"
    " output { name: 'y' data_type: TYPE_FP32 dims: [ -1 ] }"
)
X, Y, SCALE = TensorSpec("x", "FP32", (-1,)), TensorSpec("y", "FP32", (-1,)), TensorSpec("scale", "FP32", (1,))


def test_optional_inputs_are_the_graphs_overridable_constants():
    config = completed(OPTIONAL % (0, "true"), [X], [Y], initializers=[SCALE])
    assert [tensor.optional for tensor in config.input] == [False, True]
    assert refused(OPTIONAL % (0, "false"), [X], [Y], initializers=[SCALE]).field == "input[1].optional"
    assert refused(OPTIONAL % (0, "true"), [X, SCALE], [Y]).field == "input[1].optional"
    assert refused(OPTIONAL % (0, "true"), [X], [Y]).field == "input[1].name"


def test_optional_inputs_do_not_batch():
    scale = TensorSpec("scale", "FP32", (-1, 1))
    text = (OPTIONAL % (8, "true")).replace("dims: [ -1 ]", "dims: [ 5 ]")
    x, y = TensorSpec("x", "FP32", (-1, 5)), TensorSpec("y", "FP32", (-1, 5))
    problem = refused(text, [x], [y], initializers=[scale])
    assert (problem.field, "support batching" in problem.reason) == ("input[1].optional", True)


_SHAPES = st.lists(st.just(-1) | st.integers(1, 9), max_size=4).map(tuple)
_DATATYPES = st.sampled_from(sorted(NUMPY_DTYPES))


def _specs(prefix):
    return st.lists(st.tuples(_DATATYPES, _SHAPES), min_size=1, max_size=3).map(
        lambda pairs: [TensorSpec(f"{prefix}{i}", datatype, shape) for i, (datatype, shape) in enumerate(pairs)]
    )


@settings(deadline=None, max_examples=300)
@given(_specs("x"), _specs("y"), st.integers(0, 9), st.sampled_from(["", "input", "output", "input output"]))
def test_any_graph_completes_and_stays_as_it_is(inputs, outputs, default, kept):
    config = complete(config_pb.ModelConfig(), inputs, outputs, model="m", default_max_batch_size=default)
    batching = config.max_batch_size > 0
    assert not batching or all(spec.shape[:1] == (-1,) for spec in (*inputs, *outputs))
    assert [tensor.name for tensor in config.input] == [spec.name for spec in inputs]

    assert complete(config, inputs, outputs, model="m", default_max_batch_size=default) == config
    partial = config_pb.ModelConfig(max_batch_size=config.max_batch_size)
    for field in kept.split():
        getattr(partial, field).extend(getattr(config, field))
    if batching or kept == "input output":  # without both, a config of max_batch_size 0 asks for batching
        again = complete(partial, inputs, outputs, model="m", default_max_batch_size=default)
        assert (list(again.input), list(again.output)) == (list(config.input), list(config.output))


ACCELERATOR = """
optimization {{ execution_accelerators {{ {}_execution_accelerator {{
  name: "tvm" parameters {{ key: "signatures" value: "{}" }}
}} }} }}
"""


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("image:1x3x224", "input 'image': expected a shape that fits [-1, 3, 224, 224], found [1, 3, 224]"),
        ("picture:1x3x224x224", "unknown input 'picture', expected one of ['image']"),
        ("nonsense", "expected NAME:DIMxDIM, as in 'IN:1x3x224x224', found 'nonsense'"),
        ("image:1x3x224x0", "expected NAME:DIMxDIM, as in 'IN:1x3x224x224', found 'image:1x3x224x0'"),
    ],
)
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_signatures_that_do_not_fit_the_graph_are_refused(kind, value, reason):
    problem = refused(ACCELERATOR.format(kind, value))
    path = f"optimization.execution_accelerators.{kind}_execution_accelerator[0]"
    assert (problem.field, problem.reason) == (f'{path}.parameters["signatures"]', reason)


@pytest.mark.parametrize(("size", "fits"), [(-1, True), (8, True), (9, False)])
def test_signatures_fit_what_the_config_makes_of_the_graph(size, fits):
    open_ended = [TensorSpec("image", "FP32", (-1, 3, -1, -1))]
    config = f"""
        max_batch_size: 2 input {{ name: "image" data_type: TYPE_FP32 dims: [ 3, {size}, {size} ] }}
        output {{ name: "scores" data_type: TYPE_FP32 dims: 10 }} {ACCELERATOR.format("cpu", "image:1x3x8x8")}
    """
    if fits:
        completed(config, open_ended)
    else:
        assert "expected a shape that fits [-1, 3, 9, 9]" in refused(config, open_ended).reason
