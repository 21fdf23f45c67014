"""What a hostile, slow, careless or merely unusual client can do with raw bytes."""

import asyncio
import json
import socket
import struct
import time

import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hone.types import InferRequest, InferResponse
from tests.unit.frontends.http_fakes import FakeService
from tests.unit.frontends.http_serving import Served, read_reply, read_to_end, replies, serving

INFER = "/v2/models/echo_fp32/infer"
DOCUMENT = json.dumps(
    {
        "inputs": [{"name": "IN", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": 8}}],
        "parameters": {"binary_data_output": True},
    }
).encode()
TENSOR = struct.pack("<2f", 1.5, -2.5)
BODY = DOCUMENT + TENSOR

LOOPS = {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


def request(
    body: bytes = BODY, *, path: str = INFER, method: str = "POST", headers: str = "", length: int | None = None
):
    size = len(body) if length is None else length
    return (
        f"{method} {path} HTTP/1.1\r\nHost: test\r\nInference-Header-Content-Length: {len(DOCUMENT)}\r\n"
        f"Content-Length: {size}\r\n{headers}\r\n"
    ).encode() + body


def chunked(*chunks: bytes) -> bytes:
    parts = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return (
        f"POST {INFER} HTTP/1.1\r\nHost: test\r\nInference-Header-Content-Length: {len(DOCUMENT)}\r\n"
        "Transfer-Encoding: chunked\r\n\r\n"
    ).encode() + parts


def usable(served: Served) -> None:
    """The server still answers others."""
    assert served.get("/v2/health/live").status == 200


@pytest.fixture(params=LOOPS)
def on_any_loop(request):
    with serving(loop_factory=LOOPS[request.param]) as running:
        yield running


# --- requests in all the shapes that HTTP allows


def test_one_connection_serves_many_requests(on_any_loop):
    with on_any_loop.connect() as client:
        for _ in range(20):
            client.sendall(request())
            reply = read_reply(client)
            assert reply.status == 200
            assert reply.body.endswith(TENSOR)
            client.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: test\r\n\r\n")
            assert read_reply(client).json() == {"live": True}


def test_a_request_may_arrive_byte_by_byte(on_any_loop):
    with on_any_loop.connect() as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in request():
            client.sendall(bytes([byte]))
        assert read_reply(client).body.endswith(TENSOR)


@pytest.mark.parametrize("size", [60_000, 70_000, 1_000_000])
@pytest.mark.parametrize("ways", ["whole", "pieces"])
def test_large_bodies_between_small_requests(on_any_loop, size, ways):
    tensor = bytes(range(256)) * (size // 256 + 1)
    tensor = tensor[: size // 4 * 4]
    document = json.dumps(
        {
            "inputs": [
                {
                    "name": "IN",
                    "datatype": "INT32",
                    "shape": [len(tensor) // 4],
                    "parameters": {"binary_data_size": len(tensor)},
                }
            ],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    head = (
        "POST /v2/models/echo_int32/infer HTTP/1.1\r\nHost: test\r\n"
        f"Inference-Header-Content-Length: {len(document)}\r\n"
        f"Content-Length: {len(document) + len(tensor)}\r\n\r\n"
    ).encode()
    with on_any_loop.connect() as client:
        for _ in range(3):
            if ways == "whole":
                client.sendall(head + document + tensor)
            else:
                client.sendall(head + document[:10])
                client.sendall(document[10:] + tensor[:30_000])
                client.sendall(tensor[30_000:])
            assert read_reply(client).body.endswith(tensor)
            client.sendall(request())
            assert read_reply(client).body.endswith(TENSOR)


def test_a_large_body_with_the_next_request_behind_it(on_any_loop):
    tensor = bytes(400_000)
    document = (
        b'{"inputs":[{"name":"IN","datatype":"UINT8","shape":[400000],"parameters":{"binary_data_size":400000}}]}'
    )
    head = (
        "POST /v2/models/echo_uint8/infer HTTP/1.1\r\nHost: test\r\n"
        f"Inference-Header-Content-Length: {len(document)}\r\n"
        f"Content-Length: {len(document) + len(tensor)}\r\n\r\n"
    ).encode()
    with on_any_loop.connect() as client:
        client.sendall((head + document + tensor + request()) * 2)
        for _ in range(2):
            assert len(read_reply(client).json()["outputs"][0]["data"]) == 400_000
            assert read_reply(client).body.endswith(TENSOR)


def test_pipelined_requests_are_answered_in_order(on_any_loop):
    with on_any_loop.connect() as client:
        paths = ["/v2/health/live", "/v2/nowhere", "/v2", "/v2/health/ready"] * 20
        client.sendall(b"".join(request(b"", path=path, method="GET") for path in paths))
        statuses = [read_reply(client).status for _ in paths]
    assert statuses == [200, 404, 200, 200] * 20


def test_chunked_bodies(on_any_loop):
    with on_any_loop.connect() as client:
        client.sendall(chunked(BODY[:5], BODY[5:50], BODY[50:], b""))
        assert read_reply(client).body.endswith(TENSOR)
        client.sendall(chunked(*(BODY[i : i + 1] for i in range(len(BODY))), b""))
        assert read_reply(client).body.endswith(TENSOR)


def test_expect_100_continue(on_any_loop):
    with on_any_loop.connect() as client:
        whole = request(headers="Expect: 100-continue\r\n")
        client.sendall(whole[: -len(BODY)])
        assert client.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(BODY)
        assert read_reply(client).status == 200


def test_http_1_0_and_connection_close_end_the_connection(on_any_loop):
    old = request().replace(b"HTTP/1.1", b"HTTP/1.0")
    for sent in (old, request(headers="Connection: close\r\n")):
        (reply,) = replies(on_any_loop.send(sent))
        assert reply.status == 200
        assert reply.headers["connection"] == "close"


def test_urls_with_queries_escapes_and_hosts(served):
    for path in (f"{INFER}?x=1", "/v2/models/echo%5Ffp32/infer", f"http://test{INFER}"):
        with served.connect() as client:
            client.sendall(request(path=path))
            assert read_reply(client).status == 200


def test_an_upgrade_is_not_taken_up(served):
    ask = b"GET /v2 HTTP/1.1\r\nHost: test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    (reply,) = replies(served.send(ask))
    assert reply.status == 200
    with_body = request(headers="Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n")
    (reply,) = replies(served.send(with_body))
    assert (reply.status, "Upgrade" in reply.error) == (400, True)


# --- requests that are none

MALFORMED = {
    "garbage": b"\x00\x01\x02\x03\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "http2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no version": b"GET /v2\r\n\r\n",
    "bad version": b"GET /v2 HTTP/9.9\r\nHost: a\r\n\r\n",
    "space in the name": b"GET /v2 HTTP/1.1\r\nBad Name: x\r\n\r\n",
    "null in a value": b"GET /v2 HTTP/1.1\r\nX: a\x00b\r\n\r\n",
    "url beyond ascii": b"GET /v2/\xff\xfe HTTP/1.1\r\nHost: a\r\n\r\n",
    "no url": b"GET  HTTP/1.1\r\nHost: a\r\n\r\n",
    "length no number": b"POST /v2 HTTP/1.1\r\nContent-Length: ten\r\n\r\n",
    "length negative": b"POST /v2 HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    "length beyond 64 bits": b"POST /v2 HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n",
    "two lengths": b"POST /v2 HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
    "length and chunks": b"POST /v2 HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
    "chunk size no number": chunked() + b"xyz\r\n",
    "chunk size beyond 64 bits": chunked() + b"fffffffffffffffff\r\n",
    "chunk longer than said": chunked() + b"1\r\nabcdef\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
def test_malformed_bytes_are_400_and_end_the_connection(served, data):
    (reply,) = replies(served.send(data))
    assert reply.status == 400
    assert reply.error
    assert reply.headers["connection"] == "close"
    usable(served)


def test_malformed_bytes_behind_a_good_request_do_not_disturb_its_answer(served):
    first, second = replies(served.send(request() + b"\x00garbage\r\n\r\n"))
    assert first.status == 200
    assert first.body.endswith(TENSOR)
    assert second.status == 400


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(min_size=1, max_size=300))
def test_any_bytes_leave_the_server_standing(served, data):
    with served.connect() as client:
        client.sendall(data + b"\r\n\r\n")
        client.shutdown(socket.SHUT_WR)
        answer = read_to_end(client)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 ")
    usable(served)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, len(request()) - 1), st.binary(min_size=1, max_size=8))
def test_a_damaged_request_gets_an_answer_of_the_protocol(served, position, damage):
    whole = request(headers="Connection: close\r\n")
    damaged = whole[:position] + damage + whole[position + len(damage) :]
    with served.connect() as client:
        client.sendall(damaged)
        client.shutdown(socket.SHUT_WR)
        answer = read_to_end(client)
    for reply in replies(answer):
        assert reply.status == 200 or reply.error
        assert reply.status != 500
    usable(served)


# --- limits


def test_row_41_too_many_chunks():
    with serving(limits={"max_chunks": 1000}) as served:
        fine = chunked(*(b"x" for _ in range(1000)), b"")
        with served.connect() as client:
            client.sendall(fine)
            assert "Chunked" not in read_reply(client).error
        (reply,) = replies(served.send(chunked(*(b"x" for _ in range(1002)))))
        assert reply.status == 400
        assert reply.error == "Chunked request body exceeds maximum of 1000 non-empty chunks"
        assert reply.headers["connection"] == "close"
        usable(served)


def test_the_default_chunk_limit_holds_against_a_flood(served):
    data = served.send(chunked() + b"1\r\nx\r\n" * 70_000)
    assert "65536 non-empty chunks" in replies(data)[0].error
    usable(served)


def test_too_many_headers_and_too_large_heads(served):
    many = "".join(f"X-{number}: y\r\n" for number in range(200))
    (reply,) = replies(served.send(request(headers=many)))
    assert (reply.status, "at most 128 are allowed" in reply.error) == (431, True)
    (reply,) = replies(served.send(request(headers=f"X: {'y' * 100_000}\r\n")))
    assert (reply.status, "exceeds 65536 bytes" in reply.error) == (431, True)
    (reply,) = replies(served.send(b"GET /" + b"a" * 100_000))
    assert reply.status == 431
    usable(served)


def test_a_content_length_beyond_the_limit_is_refused_before_the_body_arrives(served):
    with served.connect() as client:
        client.sendall(request(b"", length=10**12))
        reply = read_reply(client)
    assert reply.status == 400
    assert "request body of 1000000000000 bytes exceeds" in reply.error
    assert reply.headers["connection"] == "close"


def test_a_client_that_sends_too_much_still_reads_why():
    with serving(settings={"http_max_input_size": 1_000_000}) as served, served.connect() as client:
        body = bytes(3_000_000)
        client.sendall(request(body))
        reply = read_reply(client)
        assert "exceeds the maximum allowed input size" in reply.error
        assert client.recv(1) == b""


def test_a_client_that_never_stops_sending_is_cut():
    with serving(settings={"http_max_input_size": 1000}) as served, served.connect() as client:
        client.sendall(request(b"", length=10**12))
        with pytest.raises(OSError):
            while True:
                client.sendall(bytes(100_000))


def test_a_connection_over_the_limit_is_told_503():
    with serving(settings={"http_max_connections": 2}) as served:
        with served.connect() as first, served.connect() as second:
            for client in (first, second):
                client.sendall(request())
                assert read_reply(client).status == 200
            (reply,) = replies(served.send(request()))
            assert (reply.status, "maximum number of connections" in reply.error) == (503, True)
        served.until(lambda: served.server.num_connections == 0)
        usable(served)


def test_a_flood_of_connections_is_cut():
    with serving(settings={"http_max_connections": 1}) as served:
        clients = [served.connect() for _ in range(300)]
        try:
            served.until(lambda: served.server.num_connections == 257)
        finally:
            for client in clients:
                client.close()
        served.until(lambda: served.server.num_connections == 0)
        usable(served)


# --- time


def test_a_slow_head_is_408():
    with serving(limits={"head_seconds": 0.1}) as served, served.connect() as client:
        client.sendall(b"GET /v2 HTTP/1.1\r\nX-Slow")
        reply = read_reply(client)
        assert (reply.status, "head did not arrive" in reply.error) == (408, True)
        assert client.recv(1) == b""


@pytest.mark.parametrize("length", [1000, 500_000])
def test_a_stalled_body_is_408(length):
    with serving(limits={"body_seconds": 0.1}) as served, served.connect() as client:
        client.sendall(request(b"x", length=length))
        reply = read_reply(client)
        assert (reply.status, "body did not arrive" in reply.error) == (408, True)
        assert client.recv(1) == b""


def test_an_idle_connection_is_closed():
    with serving(limits={"idle_seconds": 0.1}) as served, served.connect() as client:
        client.sendall(request())
        assert read_reply(client).status == 200
        assert client.recv(1) == b""


def test_a_client_that_does_not_read_is_cut():
    with serving(limits={"write_seconds": 0.1}) as served:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", served.port))
        with client:
            tensor = bytes(20_000_000)
            document = (
                b'{"inputs":[{"name":"IN","datatype":"UINT8","shape":[20000000],'
                b'"parameters":{"binary_data_size":20000000}}],"parameters":{"binary_data_output":true}}'
            )
            head = (
                f"POST /v2/models/echo_uint8/infer HTTP/1.1\r\nInference-Header-Content-Length: {len(document)}\r\n"
                f"Content-Length: {len(document) + len(tensor)}\r\n\r\n"
            ).encode()
            client.sendall(head + document + tensor)
            served.until(lambda: bool(served.service.requests))
            served.until(lambda: served.server.num_connections == 0)


def test_a_request_that_runs_long_is_not_timed_out():
    release = asyncio.Event()
    service = FakeService()

    async def slow(request: InferRequest) -> InferResponse:
        await release.wait()
        return service.echo(request)

    service.answer = slow
    limits = {"head_seconds": 0.1, "body_seconds": 0.1, "idle_seconds": 0.1, "write_seconds": 0.1}
    with serving(service, limits=limits) as served, served.connect() as client:
        client.sendall(request())
        served.until(lambda: bool(service.requests))
        began = time.monotonic()
        ticks = served.on_loop(served.loop.time)
        served.until(lambda: served.loop.time() > ticks + 2.2)  # two looks at the deadlines at least
        assert time.monotonic() - began > 2
        served.on_loop(release.set)
        assert read_reply(client).status == 200


# --- clients that go away


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
def test_a_client_that_goes_away_cancels_its_request(loop, how):
    service = FakeService()

    async def forever(request: InferRequest) -> InferResponse:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    service.answer = forever
    with serving(service, loop_factory=LOOPS[loop]) as served:
        client = served.connect()
        client.sendall(request())
        served.until(lambda: bool(service.requests))
        if how == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if how == "half-close":
            client.shutdown(socket.SHUT_WR)
        else:
            client.close()
        served.until(lambda: service.num_cancelled == 1)
        served.until(lambda: served.server.num_connections == 0 and service.num_leases == 0)
        client.close()
        usable(served)


@pytest.mark.parametrize("length", [1000, 500_000])
def test_a_client_that_goes_away_within_its_body_leaves_nothing(on_any_loop, length):
    with on_any_loop.connect() as client:
        client.sendall(request(bytes(900), length=length))
        on_any_loop.until(lambda: on_any_loop.server.num_connections == 1)
    on_any_loop.until(lambda: on_any_loop.server.num_connections == 0)
    assert on_any_loop.service.requests == []
    usable(on_any_loop)


def test_a_pipelining_client_that_goes_away_loses_all_its_requests():
    service = FakeService()

    async def forever(request: InferRequest) -> InferResponse:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    service.answer = forever
    with serving(service) as served:
        with served.connect() as client:
            client.sendall(request() * 3)
            served.until(lambda: bool(service.requests))
        served.until(lambda: served.server.num_connections == 0)
        assert len(service.requests) == 1
        assert service.num_cancelled == 1
