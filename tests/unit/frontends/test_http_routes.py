"""Every endpoint over a real socket: what it calls, what it answers, and which status each error gets."""

import base64
import json
import logging
import struct
import zlib

import numpy as np
import pytest

from hone.config import RESTRICTED_GROUPS
from hone.errors import EngineError, LoadFailed, QueueFull, QueueTimeout, RepositoryError, ServerStopping
from hone.frontends.http_routes import ROUTES
from tests.unit.frontends.http_serving import serving

FLOATS = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [3], "parameters": {"binary_data_size": 12}}]}
JSON_FLOATS = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [3], "data": [1, 2, 3]}]}
THREE = struct.pack("<3f", 1, 2, 3)


# --- inference


@pytest.mark.parametrize("path", ["/v2/models/echo_fp32/infer", "/v2/models/echo_fp32/versions/1/infer"])
def test_json_in_json_out(served, path):
    reply = served.post(path, {**JSON_FLOATS, "id": "r1"})
    assert reply.status == 200
    assert reply.headers["content-type"] == "application/json"
    assert "inference-header-content-length" not in reply.headers
    assert reply.json() == {
        "model_name": "echo_fp32",
        "model_version": "1",
        "id": "r1",
        "outputs": [{"name": "IN", "datatype": "FP32", "shape": [3], "data": [1.0, 2.0, 3.0]}],
    }


def test_binary_in_binary_out(served):
    reply = served.infer("echo_fp32", {**FLOATS, "parameters": {"binary_data_output": True}}, THREE)
    assert reply.headers["content-type"] == "application/octet-stream"
    length = int(reply.headers["inference-header-content-length"])
    assert json.loads(reply.body[:length])["outputs"][0]["parameters"] == {"binary_data_size": 12}
    assert reply.body[length:] == THREE
    assert served.service.requests[0].received_ns > 0


def test_raw_binary_request(served):
    reply = served.infer("echo_fp32", b"", THREE)
    assert reply.body.endswith(THREE)
    assert served.service.requests[0].inputs["IN"].shape == (3,)
    reply = served.infer("batched", b"", THREE + THREE[:4])
    assert served.service.requests[1].inputs["IN"].shape == (1, 4)


@pytest.mark.parametrize("size", [100, 1_000_000])
def test_large_and_small_tensors_arrive_aligned_and_unharmed(served, size):
    values = np.arange(size, dtype=np.float32)
    document = {
        "inputs": [{"name": "IN", "datatype": "FP32", "shape": [size], "parameters": {"binary_data_size": size * 4}}],
        "parameters": {"binary_data_output": True},
    }
    reply = served.infer("echo_fp32", document, values.tobytes())
    assert reply.body[-size * 4 :] == values.tobytes()
    received = served.service.requests[0].inputs["IN"].data
    assert received.flags.aligned
    assert received.flags.owndata is False, "the tensor was copied out of the body"


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_compressed_request_and_response(served, encoding):
    wbits = 31 if encoding == "gzip" else 15
    header = json.dumps({**FLOATS, "parameters": {"binary_data_output": True}}).encode()
    packer = zlib.compressobj(wbits=wbits)
    body = packer.compress(header + THREE) + packer.flush()
    fields = {
        "Content-Encoding": encoding,
        "Accept-Encoding": encoding,
        "Inference-Header-Content-Length": str(len(header)),
    }
    reply = served.post("/v2/models/echo_fp32/infer", body, fields)
    assert reply.headers["content-encoding"] == encoding
    plain = zlib.decompress(reply.body, wbits=wbits)
    length = int(reply.headers["inference-header-content-length"])
    assert json.loads(plain[:length])["model_name"] == "echo_fp32"
    assert plain[length:] == THREE


def test_outputs_say_themselves_whether_they_are_binary(served):
    document = {
        "inputs": [
            {"name": "A", "datatype": "FP32", "shape": [1], "data": [1]},
            {"name": "B", "datatype": "INT32", "shape": [1], "data": [2]},
        ],
        "outputs": [{"name": "B", "parameters": {"binary_data": False}}, {"name": "A"}],
        "parameters": {"binary_data_output": True},
    }
    reply = served.post("/v2/models/two/infer", document)
    length = int(reply.headers["inference-header-content-length"])
    first, second = json.loads(reply.body[:length])["outputs"]
    assert (first["name"], first["data"]) == ("B", [2])
    assert (second["name"], second["parameters"]) == ("A", {"binary_data_size": 4})


def test_shared_memory_both_ways(served):
    assert served.post("/v2/systemsharedmemory/region/r/register", {"key": "/k", "byte_size": 64}).json() == {}
    served.service.regions.memory["r"][8:20] = THREE
    place = {"shared_memory_region": "r", "shared_memory_byte_size": 12}
    document = {
        "inputs": [{**JSON_FLOATS["inputs"][0], "parameters": {**place, "shared_memory_offset": 8}}],
        "outputs": [{"name": "IN", "parameters": {**place, "shared_memory_offset": 32}}],
    }
    del document["inputs"][0]["data"]
    reply = served.post("/v2/models/echo_fp32/infer", document)
    output = reply.json()["outputs"][0]
    assert "data" not in output
    assert output["parameters"] == {**place, "shared_memory_offset": 32}
    assert served.service.regions.memory["r"][32:44] == THREE


def test_the_client_learns_its_request_id_and_traceparent_passes_on(served):
    fields = {"X-Request-ID": "abc-1", "traceparent": "00-11-22-01"}
    assert served.infer("echo_fp32", FLOATS, THREE, fields).headers["x-request-id"] == "abc-1"
    assert served.service.requests[0].traceparent == "00-11-22-01"
    assert served.get("/v2", {"X-Request-ID": "abc-2"}).headers["x-request-id"] == "abc-2"
    assert served.get("/nowhere").status == 404
    assert "x-request-id" not in served.get("/v2", {"X-Request-ID": "a b"}).headers
    assert "x-request-id" not in served.get("/v2", {"X-Request-ID": "x" * 500}).headers


def test_headers_are_forwarded_by_pattern_only():
    with serving(settings={"http_header_forward_pattern": "x-my-.*"}) as served:
        fields = {"X-My-User": "ann", "X-Other": "no", "Not-X-My-User": "no"}
        assert served.infer("echo_fp32", {**FLOATS, "parameters": {"x-my-user": "bob"}}, THREE, fields).status == 200
        assert served.service.requests[0].parameters == {"x-my-user": "ann"}
        many = {f"x-my-{number}": "1" for number in range(65)}
        assert "at most 64" in served.infer("echo_fp32", FLOATS, THREE, many).error


def test_refusals_are_logged_only_when_asked_for(served, caplog):
    with caplog.at_level(logging.DEBUG, logger="hone.frontends.http_infer"):
        served.infer("echo_fp32", FLOATS, THREE)
        served.infer("nope", FLOATS, THREE, {"X-Request-ID": "abc-1"})
        served.until(lambda: caplog.records)
    (record,) = caplog.records
    assert "404" in record.getMessage()
    assert record.model == "nope"
    assert record.http_request_id == "abc-1"


# --- errors of inference


@pytest.mark.parametrize(
    ("row", "path", "status", "message"),
    [
        (1, "/v2/models/nope/infer", 404, "Request for unknown model: 'nope' is not found"),
        (2, "/v2/models/echo_fp32/versions/99/infer", 404, "Request for unknown model: 'echo_fp32' version 99"),
        (3, "/v2/models/unloaded/infer", 404, "'unloaded' has no available versions"),
        (4, "/v2/models/loading/infer", 503, "'loading' version 1 is not at ready state"),
        (5, "/v2/models/echo_fp32/versions/v1/infer", 404, "Not Found"),
        (5, "/v2/models/echo_fp32/versions/-1/infer", 404, "Not Found"),
        (5, "/v2/models/echo_fp32/versions/%C2%B2/infer", 404, "Not Found"),
        (7, "/v2/models//infer", 404, "Not Found"),
        (7, "/v2/models/a/b/infer", 404, "Not Found"),
        (7, "/v2/models/a%2Fb/infer", 404, "Not Found"),
        (7, "/v2/models/echo_fp32/versions//infer", 404, "Not Found"),
        (7, "/v2/models/echo_fp32/infer/", 404, "Not Found"),
        (7, "/v3/models/echo_fp32/infer", 404, "Not Found"),
    ],
)
def test_rows_1_to_7_of_the_error_table(served, row, path, status, message):
    reply = served.post(path, JSON_FLOATS)
    assert reply.status == status, f"row {row}"
    assert message in reply.error


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_row_7_the_wrong_method(served, method):
    reply = served.ask(method, "/v2/models/echo_fp32/infer")
    assert (reply.status, reply.error) == (405, "Method Not Allowed")
    assert reply.headers["allow"] == "POST"
    reply = served.ask("DELETE", "/v2/trace/setting")
    assert (reply.status, reply.headers["allow"]) == (405, "GET, POST")


def test_row_8_malformed_json(served):
    reply = served.post("/v2/models/echo_fp32/infer", b"{nope")
    assert reply.status == 400
    assert "failed to parse the request JSON buffer" in reply.error


@pytest.mark.parametrize("value", ["abc", "-1", "5000", "99999999999"])
def test_rows_30_and_31_the_header_length(served, value):
    reply = served.post("/v2/models/echo_fp32/infer", b"{}", {"Inference-Header-Content-Length": value})
    assert reply.status == 400
    assert "nference" in reply.error


def test_row_37_limits_on_size():
    with serving(settings={"http_max_input_size": 10_000}) as served:
        body = json.dumps({**JSON_FLOATS, "id": "x" * 20_000}).encode()
        for sent in (body, iter([body])):  # the latter in chunks
            reply = served.ask("POST", "/v2/models/echo_fp32/infer", sent)
            assert reply.status == 400
            assert "exceeds the maximum allowed input size of 10000 bytes" in reply.error
            assert "--http-max-input-size" in reply.error
        bomb = zlib.compress(bytes(1_000_000))
        reply = served.post("/v2/models/echo_fp32/infer", bomb, {"Content-Encoding": "deflate"})
        assert reply.status == 400
        assert "decompressed request body" in reply.error
        assert served.post("/v2/logging", b" " * 20_000).status == 400


def test_row_39_an_unknown_content_encoding(served):
    reply = served.post("/v2/models/echo_fp32/infer", b"{}", {"Content-Encoding": "br"})
    assert reply.status == 501
    assert "Unsupported compression type" in reply.error
    assert reply.headers["accept-encoding"] == "gzip, deflate"


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_row_40_a_corrupt_body(served, encoding):
    reply = served.post("/v2/models/echo_fp32/infer", b"garbage", {"Content-Encoding": encoding})
    assert reply.status == 400
    assert "failed to decompress" in reply.error


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (QueueFull("m"), 503),
        (QueueTimeout("m"), 503),
        (ServerStopping("m"), 503),
        (EngineError("the engine failed"), 500),
        (RepositoryError("m", "bad config"), 500),
        (LoadFailed("m", [(1, "no such operator")]), 400),
    ],
)
def test_rows_42_to_53_errors_of_the_service(served, error, status):
    served.service.fault = error
    for reply in (served.post("/v2/models/echo_fp32/infer", JSON_FLOATS), served.post("/v2/repository/models/m/load")):
        assert reply.status == status
        assert reply.error == str(error)


@pytest.mark.parametrize("path", ["/v2/models/echo_fp32/infer", "/v2/repository/models/m/load", "/v2"])
def test_a_surprise_is_500_and_tells_nothing(served, caplog, path):
    served.service.fault = RuntimeError("the secret path")
    with caplog.at_level(logging.ERROR, logger="hone"):
        reply = served.ask("GET" if path == "/v2" else "POST", path, None if path == "/v2" else json.dumps(JSON_FLOATS))
    assert (reply.status, reply.error) == (500, "internal error")
    assert "the secret path" in caplog.text


# --- health and metadata


def test_health(served):
    assert served.get("/v2/health/live").json() == {"live": True}
    assert served.get("/v2/health/ready").json() == {"ready": True}
    served.service.is_ready = False
    served.service.is_live = False
    reply = served.get("/v2/health/ready")
    assert (reply.status, reply.error, reply.json()["ready"]) == (503, "Server not ready", False)
    assert served.get("/v2/health/live").status == 503
    served.service.broken = "the GPU is lost"
    assert served.get("/v2/health/live").json() == {"live": False, "error": "Server not live: the GPU is lost"}
    assert served.get("/v2/health/ready").error == "Server not ready: the GPU is lost"


def test_row_6_a_model_that_is_not_ready(served):
    assert served.get("/v2/models/batched/ready").json() == {"name": "batched", "ready": True}
    assert served.get("/v2/models/batched/versions/1/ready").status == 200
    reply = served.get("/v2/models/loading/ready")
    assert (reply.status, reply.error) == (400, "Model version not ready")
    assert served.get("/v2/models/nope/ready").status == 404


def test_metadata_config_and_statistics(served):
    assert served.get("/v2").json() == {
        "name": "triton",
        "version": "1.2.3",
        "extensions": ["classification", "logging"],
    }
    for base in ("/v2/models/batched", "/v2/models/batched/versions/1"):
        assert served.get(base).json() == {
            "name": "batched",
            "versions": ["1"],
            "platform": "onnxruntime_onnx",
            "inputs": [{"name": "IN", "datatype": "FP32", "shape": [-1, 4]}],
            "outputs": [{"name": "IN", "datatype": "FP32", "shape": [-1, 4]}],
        }
        assert served.get(f"{base}/config").json()["max_batch_size"] == 8
        assert served.get(f"{base}/stats").json()["model_stats"][0]["name"] == "batched"
    assert served.get("/v2/models/stats").json()["model_stats"][0]["inference_count"] == 3
    assert served.service.calls == [
        ("statistics", ("batched", "")),
        ("statistics", ("batched", "1")),
        ("statistics", ("", "")),
    ]
    assert served.get("/v2/models/nope").status == 404
    assert served.get("/v2/models/nope/config").status == 404
    assert served.get("/v2/models/batched/versions/v1").status == 404
    assert served.get("/v2/models/nope/stats").status == 400  # row 65


# --- repository


def test_index(served):
    assert served.post("/v2/repository/index").json() == [
        {"name": "identity", "version": "1", "state": "READY"},
        {"name": "broken", "version": "1", "state": "UNAVAILABLE", "reason": "no such file"},
        {"name": "idle"},
    ]
    assert served.post("/v2/repository/index", {"ready": True}).json() == [
        {"name": "identity", "version": "1", "state": "READY"}
    ]
    reply = served.post("/v2/repository/index", {"ready": "yes"})
    assert (reply.status, "Invalid value for 'ready': expected a boolean" in reply.error) == (400, True)  # row 59
    assert served.post("/v2/repository/index", b"[" * 500).status == 400  # row 9
    assert served.post("/v2/repository/index", b"[]").status == 400


def test_load_and_unload(served):
    files = {"file:1/model.onnx": base64.b64encode(b"\x00onnx").decode(), "config": '{"max_batch_size": 2}'}
    assert served.post("/v2/repository/models/m/load").json() == {}
    assert served.post("/v2/repository/models/m/load", {"parameters": files}).json() == {}
    assert served.post("/v2/repository/models/m/unload").json() == {}
    assert served.post("/v2/repository/models/m/unload", {"parameters": {"unload_dependents": True}}).json() == {}
    (_, (_, plain)), (_, (name, overridden)), *unloads = served.service.calls
    assert (plain.config, dict(plain.files)) == (None, {})
    assert (name, overridden.config) == ("m", files["config"])
    assert dict(overridden.files) == {"1/model.onnx": b"\x00onnx"}
    assert unloads == [("unload", ("m", False)), ("unload", ("m", True))]


@pytest.mark.parametrize(
    ("path", "document", "status", "message"),
    [
        ("models/m/load", {"parameters": {"file:1/m": "AA=="}}, 400, "'config' must be specified"),  # row 56
        ("models/m/load", {"parameters": {"config": "{"}}, 400, "Invalid config override"),  # row 57
        ("models/m/load", {"parameters": {"config": {}}}, 400, "expected a string, got an object"),
        ("models/m/load", {"parameters": {"config": "{}", "file:1/m": "no base64!"}}, 400, "is not base64"),
        ("models/m/load", {"parameters": {"config": "{}", "file:1/m": "é"}}, 400, "is not base64"),
        ("models/m/load", {"parameters": {"wrong": 1}}, 400, "unrecognized load parameter 'wrong'"),
        ("models/m/load", {"parameters": []}, 400, "Unable to parse 'parameters'"),
        ("models/m/load", [], 400, "expected the request to be a JSON object"),
        ("models/%20/load", None, 400, "Model name cannot be empty"),  # row 55
        ("models/a%2Fb/load", None, 404, "Not Found"),  # row 54
        ("models/m/unload", {"parameters": {"unload_dependents": 1}}, 400, "expected a boolean"),
        ("models/m/unload", {"parameters": {"wrong": 1}}, 400, "unrecognized unload parameter"),
        ("here/index", None, 501, "'repository_name' specification is not supported"),  # row 58
        ("here/models/m/load", None, 501, "'repository_name' specification is not supported"),
        ("here/models/m/unload", None, 501, "'repository_name' specification is not supported"),
        ("models/m/load", {"repository_name": "here"}, 501, "'repository_name' specification is not supported"),
    ],
)
def test_rows_54_to_58_refused_control_requests(served, path, document, status, message):
    reply = served.post(f"/v2/repository/{path}", document)
    assert reply.status == status
    assert message in reply.error


def test_row_50_control_while_polling(served):
    served.service.explicit = False
    assert served.post("/v2/repository/models/m/load").status == 503
    assert served.post("/v2/repository/models/m/unload").status == 503


# --- settings and shared memory


def test_trace_settings(served):
    expected = {"trace_level": ["OFF"], "trace_rate": "1000", "trace_count": "-1"}
    assert served.get("/v2/trace/setting").json() == expected
    assert served.get("/v2/models/batched/trace/setting").json() == expected
    update = {"trace_level": ["TIMESTAMPS"], "trace_rate": 5, "trace_count": "7", "log_frequency": None}
    assert served.post("/v2/models/batched/trace/setting", update).json() == expected
    assert served.service.calls[-1] == (
        "trace",
        ("batched", {"trace_level": ["TIMESTAMPS"], "trace_rate": ["5"], "trace_count": ["7"], "log_frequency": None}),
    )
    assert served.post("/v2/trace/setting", {"trace_file": "/x"}).status == 501  # row 68
    assert served.get("/v2/models/nope/trace/setting").status == 400  # row 69
    assert served.post("/v2/trace/setting", {"trace_rate": 1.5}).status == 400
    assert served.post("/v2/trace/setting", {"trace_level": [True]}).status == 400


def test_log_settings(served):
    assert served.get("/v2/logging").json() == {"log_file": "", "log_info": True, "log_verbose_level": 0}
    assert served.post("/v2/logging", {"log_verbose_level": 2}).json()["log_verbose_level"] == 2
    assert served.service.calls[-1] == ("logging", {"log_verbose_level": 2})
    assert served.post("/v2/logging", {"log_file": "/x"}).status == 501  # row 68
    for value in (None, 1.5, [], {}):
        assert "invalid value type for log setting 'log_info'" in served.post("/v2/logging", {"log_info": value}).error


def test_regions(served):
    base = "/v2/systemsharedmemory"
    region = {"key": "/k", "offset": 8, "byte_size": 64}
    assert served.get(f"{base}/status").json() == []
    assert served.post(f"{base}/region/r/register", region).json() == {}
    assert served.get(f"{base}/status").json() == [{"name": "r", **region}]
    assert served.get(f"{base}/region/r/status").json() == [{"name": "r", **region}]
    assert served.post(f"{base}/region/r/register", region).status == 400  # row 67
    assert served.get(f"{base}/region/z/status").status == 404
    assert served.post(f"{base}/region/r/unregister").json() == {}
    assert served.post(f"{base}/unregister").json() == {}
    assert "'region name' is necessary" in served.post(f"{base}/register", region).error
    for wrong in ({}, {**region, "key": 1}, {**region, "offset": -1}, {**region, "byte_size": "8"}, {"key": "/k"}):
        assert served.post(f"{base}/region/r/register", wrong).status == 400
    served.service.allow_shm = False
    reply = served.post(f"{base}/region/r/register", region)
    assert (reply.status, "--allow-client-shm=true" in reply.error) == (501, True)  # row 66


def test_what_is_not_offered_says_so(served):
    for route in ROUTES:
        if route.path.startswith("/v2/cudasharedmemory") or "generate" in route.path:
            path = route.path.replace("{model}", "batched").replace("{version}", "1").replace("{region}", "r")
            reply = served.ask(route.method, path)
            assert reply.status == 501, route.path
            assert "not supported by this server" in reply.error


# --- restricted groups


def test_row_70_every_endpoint_of_a_group_is_behind_its_key():
    names = tuple(f"{group}:x-{group}=s3cret-{group}" for group in RESTRICTED_GROUPS)
    with serving(settings={"http_restricted_api": names}) as served:
        for route in ROUTES:
            path = route.path
            for name, value in (("model", "batched"), ("version", "1"), ("region", "r"), ("repository", "here")):
                path = path.replace(f"{{{name}}}", value)
            for headers in ({}, {f"x-{route.group}": "wrong"}, {f"x-{route.group}": f"s3cret-{route.group}x"}):
                reply = served.ask(route.method, path, None, headers)
                assert reply.status == 403, (route.method, path)
                assert reply.error == f"This API is restricted, expecting header 'x-{route.group}'"
            reply = served.ask(route.method, path, None, {f"X-{route.group}": f"s3cret-{route.group}"})
            assert reply.status != 403, (route.method, path)


def test_other_groups_stay_open():
    with serving(settings={"http_restricted_api": ("model-repository,trace:admin-key=k",)}) as served:
        assert served.get("/v2").status == 200
        assert served.post("/v2/models/echo_fp32/infer", JSON_FLOATS).status == 200
        assert served.post("/v2/repository/index").status == 403
        assert served.get("/v2/trace/setting", {"Admin-Key": "k"}).status == 200


# --- tuning


def test_tuning_status_and_actions(served):
    for path, version in (("/v2/models/echo_fp32/tuning", ""), ("/v2/models/echo_fp32/versions/1/tuning", "1")):
        assert served.get(path).json()["state"] == "off"
        assert served.post(path, {"action": "pause"}).status == 200
        assert served.service.calls[-1] == ("tuning", ("echo_fp32", version, "pause"))
        for document in ({}, {"action": 5}, {"action": "explode"}):
            assert served.post(path, document).status == 400
    assert served.get("/v2/models/nope/tuning").status == 404


@pytest.mark.parametrize(
    ("site", "status"), [("cross-site", 403), ("same-site", 403), ("same-origin", 200), (None, 200)]
)
def test_pages_of_other_sites_steer_nothing(served, site, status):
    headers = {"Sec-Fetch-Site": site} if site else {}
    for path in ("/v2/repository/models/m/load", "/v2/repository/models/m/unload"):
        reply = served.post(path, {}, headers=headers)
        assert reply.status == status
        if status == 403:
            assert "pages of other sites" in reply.json()["error"]
    assert served.get("/v2", headers=headers).status == 200, "what only tells is not held up"
