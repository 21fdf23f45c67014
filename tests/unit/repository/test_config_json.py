from __future__ import annotations

import json

import orjson
import pytest
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.errors import ConfigError, ErrorKind, InvalidRequest
from hone.protos import config_pb
from hone.repository import complete, config_from_json, config_to_json
from hone.repository.config_text import MAX_CONFIG_BYTES, parse_config
from hone.repository.validation import validate
from hone.types import TensorSpec

RICH = b"""
name: "m" max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 3, -1 ] reshape { shape: [ 3, 1, -1 ] } } ]
output [ { name: "y" data_type: TYPE_STRING dims: [ 10 ] label_filename: "labels.txt" } ]
version_policy { specific { versions: [ 1, 9007199254740993 ] } }
dynamic_batching {
  max_queue_delay_microseconds: 9007199254740993 priority_levels: 2 default_priority_level: 1
  default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 5 }
  priority_queue_policy { key: 2 value { default_timeout_microseconds: 7 max_queue_size: 3 } }
}
instance_group [ { count: 2 kind: KIND_CPU } ]
model_warmup [ { batch_size: 1 inputs { key: "x" value { data_type: TYPE_FP32 dims: [ 3, 4 ] zero_data: true } } } ]
parameters { key: "k" value { string_value: "v" } }
metric_tags { key: "team" value: "t" }
optimization { cuda { graph_spec { batch_size: 1 input { key: "x" value { dim: [ 3, 4 ] } } } } }
"""


def test_numbers_enums_names_and_defaults():
    document = config_to_json(parse_config(RICH, "m"))
    assert document["input"][0]["dims"] == [3, -1]
    assert document["input"][0]["reshape"] == {"shape": [3, 1, -1]}
    assert document["input"][0]["data_type"] == "TYPE_FP32"
    assert document["input"][0]["allow_ragged_batch"] is False
    assert document["output"][0]["data_type"] == "TYPE_STRING"
    assert document["version_policy"] == {"specific": {"versions": [1, 9007199254740993]}}
    batching = document["dynamic_batching"]
    assert batching["max_queue_delay_microseconds"] == 9007199254740993
    assert (batching["priority_levels"], batching["default_priority_level"]) == (2, 1)
    assert batching["default_queue_policy"] == {
        "timeout_action": "DELAY",
        "default_timeout_microseconds": 5,
        "allow_timeout_override": False,
        "max_queue_size": 0,
    }
    assert list(batching["priority_queue_policy"]) == ["2"]
    assert batching["priority_queue_policy"]["2"]["default_timeout_microseconds"] == 7
    assert document["model_warmup"][0]["inputs"]["x"]["dims"] == [3, 4]
    assert document["optimization"]["cuda"]["graph_spec"][0]["input"]["x"]["dim"] == [3, 4]
    assert document["instance_group"][0]["kind"] == "KIND_CPU"
    assert document["batch_input"] == [] and document["cc_model_filenames"] == {}
    assert "sequence_batching" not in document and "response_cache" not in document
    orjson.dumps(document)


def test_every_64_bit_field_is_a_number():
    """Set every 64-bit field of the message, wherever it is, and find no number written as a string."""
    config = config_pb.ModelConfig()
    _fill(config, 0)

    def strings(value):
        if isinstance(value, dict):
            return [s for item in value.values() for s in strings(item)]
        if isinstance(value, list):
            return [s for item in value for s in strings(item)]
        return [value] if isinstance(value, str) and value.isdigit() else []

    assert strings(config_to_json(config)) == []


def _fill(message, depth):
    for field in message.DESCRIPTOR.fields:
        repeated = isinstance(getattr(message, field.name), object) and hasattr(getattr(message, field.name), "__len__")
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            value = field.message_type.fields_by_name["value"]
            if value.message_type is not None:
                key = 5 if field.message_type.fields_by_name["key"].type != FieldDescriptor.TYPE_STRING else "k"
                _fill(getattr(message, field.name)[key], depth + 1)
        elif field.message_type is not None:
            target = getattr(message, field.name)
            if repeated:
                _fill(target.add(), depth + 1)
            elif field.containing_oneof is None or message.WhichOneof(field.containing_oneof.name) is None:
                target.SetInParent()
                _fill(target, depth + 1)
        elif field.type in (FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_UINT64):
            if repeated:
                getattr(message, field.name).append(7)
            else:
                setattr(message, field.name, 7)


def test_what_is_printed_can_be_loaded_again():
    for config in (
        parse_config(RICH, "m"),
        complete(
            config_pb.ModelConfig(),
            [TensorSpec("x", "FP32", (-1, 3))],
            [TensorSpec("y", "FP32", (-1,))],
            model="m",
        ),
    ):
        again = config_from_json(json.dumps(config_to_json(config)), "m")
        assert again == config
        validate(again, "m")


def test_protobufs_own_json_is_read_too():
    config = config_from_json(
        '{"maxBatchSize": 2, "input": [{"name": "x", "data_type": "type_fp32", "dims": ["3"]}]}', "m"
    )
    assert (config.max_batch_size, config.input[0].data_type) == (2, config_pb.TYPE_FP32)
    assert list(config.input[0].dims) == [3]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "line 1 column 2"),
        ("[]", "expected a JSON object, found list"),
        ("null", "expected a JSON object, found NoneType"),
        ('{"colour": 1}', "colour"),
        ('{"max_batch_size": "many"}', "max_batch_size"),
        ('{"max_batch_size": 1e400}', "max_batch_size"),
        ('{"max_batch_size": 1, "max_batch_size": 2}', "duplicate key 'max_batch_size'"),
        ('{"max_batch_size": 99999999999}', "max_batch_size"),
        ('{"input": [null]}', "input"),
        ('{"input": {"name": "x"}}', "input"),
        ('{"parameters": {"a": null}}', "parameters"),
        ('{"input": [{"data_type": "TYPE_FLOAT"}]}', "TYPE_FLOAT"),
        ('{"dynamic_batching": {}, "sequence_batching": {}}', "oneof"),
        ('{"name": "\\ud800"}', "name"),
        ("[" * 100_000, "nested too deeply"),
        ('{"input":' * 100_000, "nested too deeply"),
        ('{"max_batch_size": ' + "9" * 10_000 + "}", "Exceeds the limit"),
        (" " * (MAX_CONFIG_BYTES + 1), "longer than"),
    ],
)
def test_a_bad_override_is_refused(text, reason):
    with pytest.raises(InvalidRequest) as caught:
        config_from_json(text, "m")
    assert caught.value.kind is ErrorKind.INVALID_ARGUMENT
    assert str(caught.value).startswith("Invalid config override: ")
    assert reason in str(caught.value)
    assert len(str(caught.value)) < 500


_KEYS = st.sampled_from(
    [field.name for field in config_pb.ModelConfig.DESCRIPTOR.fields] + ["dims", "name", "x", "enable"]
)
_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["TYPE_FP32", "-1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=3),
    max_leaves=12,
)


@settings(deadline=None, max_examples=300)
@given(st.one_of(st.text(max_size=200), st.dictionaries(_KEYS, _JSON, max_size=4).map(json.dumps)))
def test_any_override_gives_a_config_or_a_refusal(text):
    try:
        config = config_from_json(text, "m")
    except InvalidRequest as refusal:
        str(refusal).encode("utf-8")
        return
    orjson.dumps(config_to_json(config))
    try:
        validate(config, "m")
    except ConfigError as refusal:
        str(refusal).encode("utf-8")
