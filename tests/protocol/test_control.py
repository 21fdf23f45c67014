"""Health, metadata, configuration, statistics, index and settings, as Triton's clients read them."""

import numpy as np
import pytest

from tests.protocol.repository import LABELS
from tests.protocol.wire import DATATYPES, accepted, raw_input

EXTENSIONS = [
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "cuda_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
    "tuning",
]


def test_health(client):
    assert accepted(client.live()) == {"live": True}
    assert accepted(client.ready()) == {"ready": True}
    for version in ("", "1", "3"):
        assert accepted(client.model_ready("versions", version))["ready"] is True


def test_server_metadata(client):
    from hone import __version__

    expected = {"name": "triton", "version": __version__, "extensions": EXTENSIONS}
    assert accepted(client.server_metadata()) == expected


def test_model_metadata(client):
    assert accepted(client.metadata("add_sub")) == {
        "name": "add_sub",
        "versions": ["1"],
        "platform": "onnxruntime_onnx",
        "inputs": [
            {"name": "A", "datatype": "FP32", "shape": [-1, 4]},
            {"name": "B", "datatype": "FP32", "shape": [-1, 4]},
        ],
        "outputs": [
            {"name": "SUM", "datatype": "FP32", "shape": [-1, 4]},
            {"name": "DIFFERENCE", "datatype": "FP32", "shape": [-1, 4]},
        ],
    }


def test_metadata_without_batching(client):
    assert accepted(client.metadata("plain"))["inputs"][0]["shape"] == [2, 4]


@pytest.mark.parametrize("datatype", DATATYPES)
def test_metadata_tells_datatypes(client, datatype):
    document = accepted(client.metadata(f"identity_{datatype.lower()}"))
    assert document["inputs"] == [{"name": "IN", "datatype": datatype, "shape": [-1, -1]}]
    config = accepted(client.config(f"identity_{datatype.lower()}"))
    assert config["input"][0]["data_type"] == f"TYPE_{'STRING' if datatype == 'BYTES' else datatype}"


def test_metadata_of_versions(client):
    assert accepted(client.metadata("versions"))["versions"] == ["1", "3"]
    assert accepted(client.metadata("versions", "1"))["versions"] == ["1"]


def test_config(client):
    """The completed one: defaults filled in, in Triton's JSON form (gRPC's messages have a few fields more)."""
    config = accepted(client.config("labelled"))
    expected = {
        "name": "labelled",
        "platform": "onnxruntime_onnx",
        "backend": "onnxruntime",
        "runtime": "",
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": 4,
        "default_model_filename": "model.onnx",
        "cc_model_filenames": {},
        "metric_tags": {},
        "parameters": {},
        "model_warmup": [],
        "batch_input": [],
        "batch_output": [],
        "input": [
            {
                "name": "IN",
                "data_type": "TYPE_FP32",
                "format": "FORMAT_NONE",
                "dims": [len(LABELS)],
                "is_shape_tensor": False,
                "allow_ragged_batch": False,
                "optional": False,
                "is_non_linear_format_io": False,
            }
        ],
        "output": [
            {
                "name": "OUT",
                "data_type": "TYPE_FP32",
                "dims": [len(LABELS)],
                "label_filename": "labels.txt",
                "is_shape_tensor": False,
                "is_non_linear_format_io": False,
            }
        ],
        "instance_group": [
            {
                "name": "labelled",
                "kind": "KIND_CPU",
                "count": 1,
                "gpus": [],
                "secondary_devices": [],
                "profile": [],
                "passive": False,
                "host_policy": "",
            }
        ],
        "optimization": {
            "priority": "PRIORITY_DEFAULT",
            "input_pinned_memory": {"enable": True},
            "output_pinned_memory": {"enable": True},
            "gather_kernel_buffer_threshold": 0,
            "eager_batching": False,
        },
    }
    for field, value in expected.items():
        assert config[field] == value, field
    assert set(config) <= {*expected, "model_repository_agents", "model_metrics"}


def test_config_of_dynamic_batching(client):
    config = accepted(client.config("patient_http"))
    batching = config["dynamic_batching"]
    assert batching["preferred_batch_size"] == [1]
    assert batching["default_queue_policy"] == {
        "timeout_action": "REJECT",
        "default_timeout_microseconds": 0,
        "allow_timeout_override": True,
        "max_queue_size": 0,
    }


def test_config_of_a_version(client):
    assert accepted(client.config("versions", "1")) == accepted(client.config("versions", "3"))


DURATION = {"count", "ns"}
STATISTICS = {"success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss"}


def test_statistics(client):
    before = accepted(client.statistics("versions", "1"))["model_stats"][0]
    for rows in (1, 3):
        given = np.ones((rows, 4), np.float32)
        accepted(client.infer("versions", [raw_input("IN", "FP32", given)], version="1"))
    (after,) = accepted(client.statistics("versions", "1"))["model_stats"]
    assert set(after) == {
        "name",
        "version",
        "last_inference",
        "inference_count",
        "execution_count",
        "inference_stats",
        "response_stats",
        "batch_stats",
        "memory_usage",
    }
    assert (after["name"], after["version"]) == ("versions", "1")
    assert after["inference_count"] - before["inference_count"] == 4
    assert after["execution_count"] - before["execution_count"] == 2
    assert after["last_inference"] > 1_700_000_000_000
    assert set(after["inference_stats"]) == STATISTICS
    assert all(set(value) == DURATION for value in after["inference_stats"].values())
    assert after["inference_stats"]["success"]["count"] - before["inference_stats"]["success"]["count"] == 2
    assert after["inference_stats"]["success"]["ns"] > before["inference_stats"]["success"]["ns"]
    sizes = {batch["batch_size"] for batch in after["batch_stats"]}
    assert {1, 3} <= sizes
    for batch in after["batch_stats"]:
        assert set(batch) == {"batch_size", "compute_input", "compute_infer", "compute_output"}
        assert set(batch["compute_infer"]) == DURATION
    assert isinstance(after["memory_usage"], list) and isinstance(after["response_stats"], dict)


def test_statistics_count_failures(client):
    def failed():
        return accepted(client.statistics("versions", "3"))["model_stats"][0]["inference_stats"]["fail"]["count"]

    before = failed()
    assert not client.infer("versions", [raw_input("IN", "FP32", np.ones((1, 5)))], version="3").ok
    assert failed() == before + 1


def test_statistics_of_all(client):
    documents = accepted(client.statistics())["model_stats"]
    assert {("versions", "1"), ("versions", "3"), ("add_sub", "1")} <= {(d["name"], d["version"]) for d in documents}
    assert [d["version"] for d in accepted(client.statistics("versions"))["model_stats"]] == ["1", "3"]


def test_index(client):
    lines = {(line["name"], line.get("version")): line for line in accepted(client.index())}
    assert lines["versions", "3"] == {"name": "versions", "version": "3", "state": "READY"}
    assert lines["versions", "1"]["state"] == "READY"
    broken = lines["broken", "1"]
    assert broken["state"] == "UNAVAILABLE" and "parsing failed" in broken["reason"]
    assert ("broken", "1") not in {(e["name"], e.get("version")) for e in accepted(client.index(ready=True))}


TRACE = {
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_file": "",
    "trace_mode": "opentelemetry",
}


def test_trace_settings(client):
    assert accepted(client.trace()) == TRACE
    assert accepted(client.trace("add_sub")) == TRACE
    changed = accepted(client.trace("add_sub", {"trace_rate": "7", "trace_count": "3"}))
    assert changed == {**TRACE, "trace_rate": "7", "trace_count": "3"}
    assert accepted(client.trace("add_sub")) == changed
    assert accepted(client.trace()) == TRACE and accepted(client.trace("plain")) == TRACE
    assert accepted(client.trace("add_sub", {"trace_rate": None, "trace_count": None})) == TRACE


def test_global_trace_settings_reach_models(client):
    try:
        assert accepted(client.trace("", {"trace_rate": "5"}))["trace_rate"] == "5"
        assert accepted(client.trace("add_sub"))["trace_rate"] == "5"
    finally:
        assert accepted(client.trace("", {"trace_rate": None})) == TRACE


def test_log_settings(client):
    before = accepted(client.log())
    assert before == {
        "log_file": "",
        "log_info": True,
        "log_warning": True,
        "log_error": True,
        "log_verbose_level": 0,
        "log_format": "default",
    }
    try:
        changed = {**before, "log_info": False, "log_verbose_level": 2, "log_format": "ISO8601"}
        wanted = {name: changed[name] for name in ("log_info", "log_verbose_level", "log_format")}
        assert accepted(client.log(wanted)) == changed
        assert accepted(client.log()) == changed
    finally:
        restored = {name: before[name] for name in ("log_info", "log_verbose_level", "log_format")}
        assert accepted(client.log(restored)) == before
