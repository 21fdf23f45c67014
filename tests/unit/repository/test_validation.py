"""One case a rule; the first group are those of Triton's own golden files that concern ONNX models."""

from __future__ import annotations

import pytest

from hone.errors import ConfigError, ErrorKind
from hone.repository.config_text import parse_config
from hone.repository.validation import validate

IO = """
input [ { name: "x" data_type: TYPE_FP32 dims: [ 16 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 16 ] } ]
"""
BATCH = "max_batch_size: 8" + IO


def dynamic(rest: str) -> str:
    return BATCH + f"dynamic_batching {{ {rest} }}"


def metric(rest: str) -> str:
    return BATCH + f"model_metrics {{ metric_control {{ {rest} }} }}"


def x(rest: str) -> str:
    """An input as `rest` has it, in a config that is right otherwise."""
    return f"max_batch_size: 8 input [ {{ {rest} }} ] output [ {{ name: 'y' data_type: TYPE_FP32 dims: [ 16 ] }} ]"


REFUSED = [
    # Triton's golden cases
    ("max_batch_size: -1" + IO, "max_batch_size", "expected 0 or more, found -1"),
    ("platform: 'foobar_platform'" + IO, "platform", "expected 'onnxruntime_onnx', found 'foobar_platform'"),
    ("backend: 'tensorrt'" + IO, "backend", "expected 'onnxruntime', found 'tensorrt'"),
    ("backend: 'python'" + IO, "backend", "expected 'onnxruntime', found 'python'"),
    (x("data_type: TYPE_FP32 dims: [ 16 ]"), "input[0].name", "expected a name, found none"),
    (x("name: 'x' dims: [ 16 ]"), "input[0].data_type", "expected a data type for 'x', found none"),
    (x("name: 'x' data_type: TYPE_INVALID dims: [ 16 ]"), "input[0].data_type", "expected a data type for 'x'"),
    (x("name: 'x' data_type: TYPE_FP32"), "input[0].dims", "expected one dimension or more for 'x', found none"),
    (x("name: 'x' data_type: TYPE_FP32 dims: [ 0 ]"), "input[0].dims[0]", "expected 1 or more, or -1"),
    (x("name: 'x' data_type: TYPE_FP32 dims: [ 3, -2 ]"), "input[0].dims[1]", "found -2"),
    (x("name: 'x' data_type: TYPE_FP32 format: FORMAT_NHWC dims: [ 16 ]"), "input[0].dims", "expected 3 dims"),
    (x("name: 'x' data_type: TYPE_FP32 format: FORMAT_NCHW dims: [ 1, 2, 3, 4 ]"), "input[0].dims", "expected 3 dims"),
    (
        "max_batch_size: 8 input { name: 'x' data_type: TYPE_FP32 dims: 1 } output { name: 'y' dims: 1 }",
        "output[0].data_type",
        "expected a data type for 'y'",
    ),
    # reshape
    (x("name: 'x' data_type: TYPE_FP32 dims: [ 16 ] reshape { shape: [ 0 ] }"), "input[0].reshape.shape[0]", "found 0"),
    (x("name: 'x' data_type: TYPE_FP32 dims: [ 16 ] reshape { shape: [ 4, 5 ] }"), "input[0].reshape.shape", "[4,5]"),
    (x("name: 'x' data_type: TYPE_FP32 dims: [ 16 ] reshape { }"), "input[0].reshape.shape", "found []"),
    (x("name: 'x' data_type: TYPE_FP32 dims: [ -1 ] reshape { shape: [ 4 ] }"), "input[0].reshape.shape", "variable"),
    (
        x("name: 'x' data_type: TYPE_FP32 dims: [ 2, 4, -1, 6 ] reshape { shape: [ 6, -1, 8 ] }"),
        "input[0].reshape.shape",
        "expected as many elements as dims [2,4,-1,6]",
    ),
    (
        "max_batch_size: 0 input { name: 'x' data_type: TYPE_FP32 dims: 1 reshape {} } output { name: 'y' }",
        "input[0].reshape.shape",
        "where max_batch_size is 0",
    ),
    # dynamic batching
    (
        dynamic("preferred_batch_size: [ 4, 0 ]"),
        "dynamic_batching.preferred_batch_size[1]",
        "found 0",
    ),
    (
        dynamic("preferred_batch_size: [ -1 ]"),
        "dynamic_batching.preferred_batch_size[0]",
        "found -1",
    ),
    (
        dynamic("preferred_batch_size: [ 4, 9 ]"),
        "dynamic_batching.preferred_batch_size[1]",
        "expected at most max_batch_size, which is 8, found 9",
    ),
    (IO + "dynamic_batching { preferred_batch_size: 2 }", "dynamic_batching.preferred_batch_size[0]", "which is 0"),
    (dynamic("priority_levels: 2"), "dynamic_batching.default_priority_level", "1 to 2, found 0"),
    (
        dynamic("priority_levels: 2 default_priority_level: 3"),
        "dynamic_batching.default_priority_level",
        "1 to 2, found 3",
    ),
    (dynamic("default_priority_level: 1"), "dynamic_batching.default_priority_level", "found 1"),
    (
        BATCH
        + "dynamic_batching { priority_levels: 2 default_priority_level: 1 priority_queue_policy { key: 3 value {} } }",
        "dynamic_batching.priority_queue_policy[3]",
        "expected a level of 1 to 2",
    ),
    (
        BATCH
        + "dynamic_batching { priority_levels: 2 default_priority_level: 1 priority_queue_policy { key: 0 value {} } }",
        "dynamic_batching.priority_queue_policy[0]",
        "expected a level of 1 to 2",
    ),
    (
        dynamic("priority_queue_policy { key: 1 value {} }"),
        "dynamic_batching.priority_queue_policy[1]",
        "none where priority_levels is 0",
    ),
    (
        dynamic("preserve_ordering: true priority_levels: 2 default_priority_level: 1"),
        "dynamic_batching.priority_levels",
        "at most 1 where preserve_ordering is true",
    ),
    (
        dynamic(
            "preserve_ordering: true default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 5 }"
        ),
        "dynamic_batching.default_queue_policy.timeout_action",
        "expected REJECT",
    ),
    (
        dynamic(
            "preserve_ordering: true priority_levels: 1 default_priority_level: 1"
            " priority_queue_policy { key: 1 value { timeout_action: DELAY default_timeout_microseconds: 5 } }"
        ),
        "dynamic_batching.priority_queue_policy[1].timeout_action",
        "expected REJECT",
    ),
    # instance groups
    (BATCH + "instance_group [ { kind: KIND_GPU } ]", "instance_group[0].kind", "found KIND_GPU"),
    (BATCH + "instance_group [ { kind: KIND_CPU gpus: [ 0 ] } ]", "instance_group[0].gpus", "expected none, found [0]"),
    (BATCH + "instance_group [ { gpus: [ -1 ] } ]", "instance_group[0].gpus", "expected none, found [-1]"),
    (BATCH + "instance_group [ {}, { count: -1 } ]", "instance_group[1].count", "found -1"),
    (BATCH + "instance_group [ { count: 100000 } ]", "instance_group[0].count", "expected 1 to 1024"),
    # not in this version
    (BATCH + "sequence_batching { }", "sequence_batching", "sequence batching is not available"),
    (BATCH + "platform: 'ensemble'", "platform", "ensembles are not available"),
    (BATCH + "platform: 'ensemble' ensemble_scheduling { }", "ensemble_scheduling", "ensembles are not available"),
    (BATCH + "response_cache { enable: true }", "response_cache.enable", "not available"),
    (BATCH + "instance_group [ { rate_limiter { priority: 2 } } ]", "instance_group[0].rate_limiter", "not available"),
    (BATCH + "instance_group [ { profile: '1' } ]", "instance_group[0].profile", "not available"),
    (BATCH + "instance_group [ { passive: true } ]", "instance_group[0].passive", "not available"),
    (BATCH + "instance_group [ { secondary_devices {} } ]", "instance_group[0].secondary_devices", "not available"),
    (BATCH + "model_transaction_policy { decoupled: true }", "model_transaction_policy.decoupled", "not available"),
    (BATCH + "batch_input [ { kind: BATCH_ITEM_SHAPE } ]", "batch_input", "not available"),
    (BATCH + "batch_output [ { target_name: 'y' } ]", "batch_output", "not available"),
    (x("name: 'x' data_type: TYPE_FP32 dims: 1 allow_ragged_batch: true"), "input[0].allow_ragged_batch", "ragged"),
    (x("name: 'x' data_type: TYPE_FP32 dims: 1 is_shape_tensor: true"), "input[0].is_shape_tensor", "shape tensors"),
    (
        x("name: 'x' data_type: TYPE_FP32 dims: 1 is_non_linear_format_io: true"),
        "input[0].is_non_linear_format_io",
        "not available",
    ),
    (
        BATCH + "model_operations { op_library_filename: 'a.so' }",
        "model_operations.op_library_filename",
        "not available",
    ),
    (BATCH + "model_repository_agents { agents { name: 'a' } }", "model_repository_agents.agents", "not available"),
    (BATCH + "runtime: 'libtriton_python.so'", "runtime", "libtriton_python.so"),
    # hone's own
    (x("name: 'x' data_type: TYPE_FP32 dims: 1 } , { name: 'x' data_type: TYPE_FP32 dims: 1"), "input[1].name", "once"),
    (x(f"name: 'x' data_type: TYPE_FP32 dims: [ {2**62}, 4 ]"), "input[0].dims", "elements"),
    (BATCH + "version_policy { specific { } }", "version_policy.specific.versions", "found none"),
    (BATCH + "version_policy { specific { versions: [ 1, 0 ] } }", "version_policy.specific.versions[1]", "found 0"),
    (
        dynamic("priority_levels: 100000 default_priority_level: 1"),
        "dynamic_batching.priority_levels",
        "",
    ),
    (BATCH + "default_model_filename: '../other/1/model.onnx'", "default_model_filename", "within the model's folder"),
    (BATCH + "default_model_filename: '/etc/passwd'", "default_model_filename", "absolute"),
    (BATCH + "default_model_filename: 'a//b'", "default_model_filename", "empty part"),
    (BATCH + "default_model_filename: '.model.onnx'", "default_model_filename", "hidden or temporary"),
    (BATCH + "cc_model_filenames { key: '8.0' value: '../a' }", 'cc_model_filenames["8.0"]', "within"),
    (
        "output [ { name: 'y' data_type: TYPE_FP32 dims: 1 label_filename: '../labels' } ]",
        "output[0].label_filename",
        "within the model's folder",
    ),
    (BATCH + "metric_tags { key: 'a b' value: 'c' }", 'metric_tags["a b"]', "letters, digits"),
    (
        metric(""),
        "model_metrics.metric_control[0].metric_identifier.family",
        "none",
    ),
    (
        metric("metric_identifier { family: 'f' }"),
        "model_metrics.metric_control[0].histogram_options.buckets",
        "found none",
    ),
    (
        metric("metric_identifier { family: 'f' } histogram_options { buckets: [ 2, 1 ] }"),
        "model_metrics.metric_control[0].histogram_options.buckets",
        "increasing",
    ),
    (BATCH + "model_warmup { batch_size: 9 }", "model_warmup[0].batch_size", "at most max_batch_size 8, found 9"),
    (
        BATCH + "model_warmup { batch_size: 1 inputs { key: 'x' value { dims: 1 zero_data: true } } }",
        'model_warmup[0].inputs["x"].data_type',
        "found none",
    ),
    (
        BATCH + "model_warmup { inputs { key: 'x' value { data_type: TYPE_FP32 dims: -1 zero_data: true } } }",
        'model_warmup[0].inputs["x"].dims[0]',
        "all sizes given, found -1",
    ),
    (
        BATCH + "model_warmup { inputs { key: 'x' value { data_type: TYPE_FP32 dims: 1 } } }",
        'model_warmup[0].inputs["x"]',
        "expected one of zero_data",
    ),
    (
        BATCH + "model_warmup { inputs { key: 'x' value { data_type: TYPE_FP32 dims: 1 input_data_file: '../a' } } }",
        'model_warmup[0].inputs["x"].input_data_file',
        "within",
    ),
]


@pytest.mark.parametrize(("text", "field", "reason"), REFUSED, ids=range(len(REFUSED)))
def test_refused(text, field, reason):
    with pytest.raises(ConfigError) as caught:
        validate(parse_config(text.encode(), "m"), "m")
    assert (caught.value.field, caught.value.kind) == (field, ErrorKind.INVALID_ARGUMENT)
    assert reason in caught.value.reason
    assert str(caught.value).startswith(f"invalid model configuration for 'm': {field}: ")


ACCEPTED = [
    "",
    BATCH,
    BATCH + "platform: 'onnxruntime_onnx' backend: 'onnxruntime' default_model_filename: 'net.onnx'",
    x("name: 'x' data_type: TYPE_FP32 dims: [ 2, 4, -1, 6 ] reshape { shape: [ 8, -1, 1, 6 ] }"),
    x("name: 'x' data_type: TYPE_FP32 dims: [ 1 ] reshape { }"),
    dynamic("preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100"),
    # the size that auto-completion will find is not known yet
    "dynamic_batching { preferred_batch_size: [ 4 ] }",
    dynamic(
        "priority_levels: 2 default_priority_level: 1"
        " priority_queue_policy { key: 2 value { max_queue_size: 3 allow_timeout_override: true } }"
    ),
    BATCH + "instance_group [ { count: 2 kind: KIND_CPU }, {}, { kind: KIND_MODEL host_policy: 'h' } ]",
    # of no effect on a CPU
    BATCH + "optimization { cuda { graphs: true graph_spec { batch_size: 1 } } input_pinned_memory { enable: false } }",
    BATCH + "optimization { graph { level: 1 } priority: PRIORITY_MAX gather_kernel_buffer_threshold: 1 }",
    BATCH + "optimization { eager_batching: true output_pinned_memory { enable: true } }",
    BATCH + "cc_model_filenames { key: '8.0' value: 'a.onnx' } metric_tags { key: 'team' value: 'a b' }",
    BATCH + "parameters { key: 'intra_op_thread_count' value { string_value: '2' } }",
    metric("metric_identifier { family: 'f' } histogram_options { buckets: [ 1, 2 ] }"),
    BATCH + "response_cache { enable: false } model_transaction_policy { decoupled: false }",
    BATCH + "version_policy { latest { num_versions: 3 } }",
    BATCH + "model_warmup { batch_size: 8 inputs { key: 'x' value { data_type: TYPE_BOOL dims: 9 zero_data: true } } }",
    BATCH + "model_warmup { inputs { key: 'x' value { data_type: TYPE_FP32 dims: 16 input_data_file: 'a/b' } } }",
]


@pytest.mark.parametrize("text", ACCEPTED, ids=range(len(ACCEPTED)))
def test_accepted(text):
    validate(parse_config(text.encode(), "m"), "m")


TVM = "optimization { execution_accelerators { cpu_execution_accelerator [ %s ] } }"
CPU = "optimization.execution_accelerators.cpu_execution_accelerator"


def parameter(key: str, value: str) -> str:
    return BATCH + TVM % f"{{ name: 'tvm' parameters {{ key: '{key}' value: '{value}' }} }}"


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("precision", ["f32", "bf16", "int8", "f16", "tf32"]),
        ("tolerance", ["0.001", "1e-3"]),
        ("budget_seconds", ["0", "60", "0.5"]),
        ("signatures", ["x:1x16;x:8x16"]),
        ("objective", ["latency", "throughput"]),
        ("tuning", ["off", "on", "cache"]),
        ("capture", ["true", "false"]),
    ],
)
def test_parameters_of_tuning_are_accepted(key, values):
    for value in values:
        validate(parse_config(parameter(key, value).encode(), "m"), "m")


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("precision", "fp32", "expected f32 | bf16 | int8 | f16 | tf32, found 'fp32'"),
        ("tolerance", "0", "greater than 0"),
        ("tolerance", "nan", "greater than 0"),
        ("tolerance", "inf", "greater than 0"),
        ("tolerance", "small", "greater than 0"),
        ("budget_seconds", "-1", "0 or more"),
        ("signatures", " ", "not empty"),
        ("objective", "both", "latency | throughput"),
        ("tuning", "yes", "off | on | cache"),
        ("capture", "1", "true | false"),
        ("colour", "red", "unknown parameter, expected one of budget_seconds, capture, objective"),
    ],
)
def test_parameters_of_tuning_are_refused(key, value, reason):
    with pytest.raises(ConfigError) as caught:
        validate(parse_config(parameter(key, value).encode(), "m"), "m")
    assert caught.value.field == f'{CPU}[0].parameters["{key}"]'
    assert reason in caught.value.reason


def test_other_accelerators_are_refused():
    with pytest.raises(ConfigError) as caught:
        validate(parse_config((BATCH + TVM % "{ name: 'openvino' }").encode(), "m"), "m")
    assert (caught.value.field, caught.value.reason) == (f"{CPU}[0].name", "expected 'tvm', found 'openvino'")
    with pytest.raises(ConfigError) as caught:
        validate(parse_config((BATCH + TVM % "{ name: 'tvm' }, { name: 'tvm' }").encode(), "m"), "m")
    assert caught.value.field == f"{CPU}[1]"
    gpu = "optimization { execution_accelerators { gpu_execution_accelerator { name: 'tensorrt' } } }"
    with pytest.raises(ConfigError) as caught:
        validate(parse_config((BATCH + gpu).encode(), "m"), "m")
    assert caught.value.field == "optimization.execution_accelerators.gpu_execution_accelerator[0].name"


def test_numbers_outside_an_enum_are_refused():
    config = parse_config(BATCH.encode(), "m")
    config.input[0].data_type = 99
    with pytest.raises(ConfigError, match=r"input\[0\].data_type"):
        validate(config, "m")
    config = parse_config((BATCH + "dynamic_batching {} instance_group {}").encode(), "m")
    config.dynamic_batching.default_queue_policy.timeout_action = 7
    with pytest.raises(ConfigError, match="timeout_action"):
        validate(config, "m")
    config.dynamic_batching.default_queue_policy.timeout_action = 0
    config.instance_group[0].kind = 9
    with pytest.raises(ConfigError, match=r"instance_group\[0\].kind"):
        validate(config, "m")
