"""What every one of tritonclient's four clients must be able to do. Steps are plain functions that assert."""

from __future__ import annotations

import json
import sys
import time
import traceback
import uuid
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException, np_to_triton_dtype, serialize_byte_tensor

from tests import models

ROWS = np.arange(8, dtype=np.float32).reshape(2, 4)


class Kit:
    """A client by a blocking face, with the classes that go with it."""

    def __init__(self, module: Any, client: Any, *, http: bool, connect: Callable[..., Any]) -> None:
        self.Input = module.InferInput
        self.Output = module.InferRequestedOutput
        self.client = client
        self.http = http
        self.connect = connect
        #: Dictionaries from both protocols.
        self.as_json = {} if http else {"as_json": True}

    def input(self, name: str, array: Any, **options: Any) -> Any:
        made = self.Input(name, list(array.shape), np_to_triton_dtype(array.dtype))
        made.set_data_from_numpy(array, **options)
        return made

    def identity(self, array: Any, **options: Any) -> Any:
        datatype = np_to_triton_dtype(array.dtype)
        result = self.client.infer(f"identity_{datatype.lower()}", [self.input("IN", array)], **options)
        return result.as_numpy("OUT")

    def refused(self, call: Callable[..., Any], *args: Any, **options: Any) -> InferenceServerException:
        try:
            call(*args, **options)
        except InferenceServerException as problem:
            return problem
        raise AssertionError("the server accepted it")


def health(kit: Kit) -> None:
    assert kit.client.is_server_live() and kit.client.is_server_ready()
    assert kit.client.is_model_ready("add_sub") and kit.client.is_model_ready("versions", "1")
    if kit.http:
        assert not kit.client.is_model_ready("nothing")
    else:
        assert "NOT_FOUND" in kit.refused(kit.client.is_model_ready, "nothing").status()


def metadata(kit: Kit) -> None:
    assert kit.client.get_server_metadata(**kit.as_json)["name"] == "triton"
    document = kit.client.get_model_metadata("add_sub", **kit.as_json)
    assert [tensor["name"] for tensor in document["inputs"]] == ["A", "B"]
    # Triton's gRPC client gives 64-bit numbers as strings.
    assert [int(size) for size in document["inputs"][0]["shape"]] == [-1, 4]
    config = kit.client.get_model_config("add_sub", **kit.as_json)
    config = config if kit.http else config["config"]
    assert config["max_batch_size"] == 8 and config["backend"] == "onnxruntime"
    assert config["input"][0]["data_type"] == "TYPE_FP32"


def messages(kit: Kit) -> None:
    if kit.http:
        return
    assert kit.client.get_model_config("add_sub").config.max_batch_size == 8
    assert kit.client.get_model_metadata("versions").versions == ["1", "3"]


def infer(kit: Kit) -> None:
    inputs = [kit.input("A", ROWS), kit.input("B", ROWS * 2)]
    result = kit.client.infer("add_sub", inputs, request_id="17")
    np.testing.assert_array_equal(result.as_numpy("SUM"), ROWS * 3)
    np.testing.assert_array_equal(result.as_numpy("DIFFERENCE"), -ROWS)
    response = result.get_response() if kit.http else result.get_response(as_json=True)
    assert (response["id"], response["model_version"]) == ("17", "1")
    only = kit.client.infer("add_sub", inputs, outputs=[kit.Output("SUM")])
    assert only.as_numpy("DIFFERENCE") is None
    np.testing.assert_array_equal(only.as_numpy("SUM"), ROWS * 3)


def forms_of_http(kit: Kit) -> None:
    if not kit.http:
        return
    for binary_in in (True, False):
        for binary_out in (True, False):
            given = [kit.input("IN", ROWS, binary_data=binary_in)]
            wanted = [kit.Output("OUT", binary_data=binary_out)]
            result = kit.client.infer("identity_fp32", given, outputs=wanted)
            np.testing.assert_array_equal(result.as_numpy("OUT"), ROWS)


def datatypes(kit: Kit) -> None:
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float64, np.int8, np.uint64, np.bool_):
        given = (ROWS + 1).astype(dtype)
        np.testing.assert_array_equal(kit.identity(given), given)
    empty = np.empty((1, 0), np.float32)
    assert kit.identity(empty).shape == (1, 0)


def strings(kit: Kit) -> None:
    given = np.array([[b"", "Grüße".encode(), b"x" * 70_000]], np.object_)
    assert kit.identity(given).tolist() == given.tolist()


def versions(kit: Kit) -> None:
    for version, factor in (("1", 2), ("3", 3), ("", 3)):
        result = kit.client.infer("versions", [kit.input("IN", ROWS)], model_version=version)
        np.testing.assert_array_equal(result.as_numpy("OUT"), ROWS * factor)


def classification(kit: Kit) -> None:
    given = [kit.input("IN", np.array([[0.5, 2, 1, 0]], np.float32))]
    result = kit.client.infer("labelled", given, outputs=[kit.Output("OUT", class_count=2)])
    assert result.as_numpy("OUT").tolist() == [[b"2.000000:1:dog", b"1.000000:2:bird"]]


def options(kit: Kit) -> None:
    given = [kit.input("IN", ROWS)]
    kit.client.infer("identity_fp32", given, priority=1, timeout=50_000_000, parameters={"key": "value", "n": 5})
    kit.client.infer("identity_fp32", given, sequence_id=7, sequence_start=True, sequence_end=True)
    kit.client.infer("identity_fp32", given, headers={"x-test": "1"})


def compression(kit: Kit) -> None:
    given = [kit.input("IN", np.tile(ROWS, (1, 1000)))]
    for one, other in (("gzip", "deflate"), ("deflate", "gzip"), ("gzip", None), (None, "gzip")):
        algorithms = (
            {"request_compression_algorithm": one, "response_compression_algorithm": other}
            if kit.http
            else {"compression_algorithm": one}
        )
        result = kit.client.infer("identity_fp32", given, **algorithms)
        np.testing.assert_array_equal(result.as_numpy("OUT"), np.tile(ROWS, (1, 1000)))


def large(kit: Kit) -> None:
    given = np.random.default_rng(0).random((1, 2_000_000), np.float32)
    np.testing.assert_array_equal(kit.identity(given), given)


def shared_memory(kit: Kit) -> None:
    key = f"/hone-client-{uuid.uuid4().hex}"
    text = np.array([[b"shared", b"memory"]], np.object_)
    size = ROWS.nbytes
    region = shm.create_shared_memory_region("all", key, 4096)
    try:
        shm.set_shared_memory_region(region, [ROWS])
        shm.set_shared_memory_region(region, [serialize_byte_tensor(text)], offset=2048)
        kit.client.register_system_shared_memory("all", key, 4096)
        status = kit.client.get_system_shared_memory_status(**kit.as_json)
        names = [entry["name"] for entry in status] if kit.http else list(status["regions"])
        assert names == ["all"]
        given = kit.Input("IN", [2, 4], "FP32")
        given.set_shared_memory("all", size)
        output = kit.Output("OUT")
        output.set_shared_memory("all", size, offset=1024)
        result = kit.client.infer("identity_fp32", [given], outputs=[output])
        told = result.get_output("OUT")
        assert list(told["shape"] if kit.http else told.shape) == [2, 4]
        np.testing.assert_array_equal(shm.get_contents_as_numpy(region, np.float32, [2, 4], offset=1024), ROWS)
        given = kit.Input("IN", [1, 2], "BYTES")
        given.set_shared_memory("all", 2 * 4 + 12, offset=2048)
        assert kit.client.infer("identity_bytes", [given]).as_numpy("OUT").tolist() == text.tolist()
        assert "already in manager" in str(kit.refused(kit.client.register_system_shared_memory, "all", key, 4096))
        kit.client.unregister_system_shared_memory("all")
        kit.client.unregister_system_shared_memory()
        assert "Unable to find" in str(kit.refused(kit.client.infer, "identity_bytes", [given]))
    finally:
        kit.client.unregister_system_shared_memory()
        shm.destroy_shared_memory_region(region)
    assert "not supported" in str(kit.refused(kit.client.get_cuda_shared_memory_status))


def repository(kit: Kit) -> None:
    client = kit.client
    client.load_model("late")
    assert client.is_model_ready("late")
    index = client.get_model_repository_index(**kit.as_json)
    lines = {line["name"]: line for line in (index if kit.http else index["models"])}
    assert lines["late"]["state"] == "READY"
    client.load_model("late", config=json.dumps({"max_batch_size": 3}))
    config = client.get_model_config("late", **kit.as_json)
    assert (config if kit.http else config["config"])["max_batch_size"] == 3
    client.unload_model("late")
    problem = kit.refused(client.infer, "late", [kit.input("IN", ROWS)])
    assert "has no available versions" in problem.message() and problem.status() in ("404", "StatusCode.NOT_FOUND")
    assert "failed to load 'nothing'" in kit.refused(client.load_model, "nothing").message()


def files(kit: Kit) -> None:
    """The model that comes along multiplies by five; the one on disk gives back what it gets."""
    kit.client.load_model("late", config="{}", files={"file:1/model.onnx": models.scale(5.0)})
    result = kit.client.infer("late", [kit.input("IN", ROWS)])
    np.testing.assert_array_equal(result.as_numpy("OUT"), ROWS * 5)
    kit.client.unload_model("late")


def settings(kit: Kit) -> None:
    client = kit.client
    assert client.get_trace_settings(**kit.as_json)
    updated = client.update_trace_settings("add_sub", {"trace_rate": "9"}, **kit.as_json)
    rate = updated["trace_rate"] if kit.http else updated["settings"]["trace_rate"]["value"][0]
    assert rate == "9"
    client.update_trace_settings("add_sub", {"trace_rate": None}, **kit.as_json)
    updated = client.update_log_settings({"log_verbose_level": 0, "log_info": True}, **kit.as_json)
    assert (updated if kit.http else updated["settings"])["log_info"]
    assert client.get_log_settings(**kit.as_json)
    statistics = client.get_inference_statistics("add_sub", **kit.as_json)["model_stats"][0]
    assert int(statistics["inference_count"]) > 0 and statistics["batch_stats"]


def errors(kit: Kit) -> None:
    problem = kit.refused(kit.client.infer, "nothing", [kit.input("IN", ROWS)])
    assert problem.status() in ("404", "StatusCode.NOT_FOUND")
    assert problem.message() == "Request for unknown model: 'nothing' is not found"
    problem = kit.refused(kit.client.infer, "identity_fp32", [kit.input("NO", ROWS)])
    assert problem.status() in ("400", "StatusCode.INVALID_ARGUMENT")
    assert "unexpected inference input 'NO'" in problem.message()


COMMON = (
    health,
    metadata,
    messages,
    infer,
    forms_of_http,
    datatypes,
    strings,
    versions,
    classification,
    options,
    compression,
    large,
    shared_memory,
    repository,
    files,
    settings,
    errors,
)


def run(kit: Kit, steps: tuple[Callable[[Kit], None], ...]) -> int:
    """Run all steps, whatever becomes of each; tells what failed. Returns the exit code."""
    failed = 0
    for step in steps:
        began = time.monotonic()
        try:
            step(kit)
        except Exception:
            failed += 1
            print(f"FAILED {step.__name__}", flush=True)
            traceback.print_exc(file=sys.stdout)
        else:
            print(f"ok {step.__name__} {time.monotonic() - began:.2f} s", flush=True)
    return 1 if failed else 0
