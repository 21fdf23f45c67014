"""Bytes that no client library would send, over HTTP and gRPC: the server answers or closes, and lives."""

import contextlib
import json
import socket
import struct

import grpc as grpc_library
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.protocol.grpc_client import infer_request
from tests.protocol.raw_socket import DOCUMENT, INFER, ask, chunked, connected, request, still_serves
from tests.protocol.wire import Input

METHODS = ("ModelInfer", "ModelMetadata", "ModelConfig", "ModelStatistics", "RepositoryIndex", "RepositoryModelLoad")
METHODS += ("SystemSharedMemoryRegister", "TraceSetting", "LogSettings")

#: One server for many examples: what one leaves behind, the next may find.
EXAMPLES = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(autouse=True)
def alive(server):
    yield
    assert server.process.poll() is None, server.log[-2000:]
    still_serves(server.http_port)


# --- heads


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /v2\r\n\r\n",
        b"GET /v2 HTTP/9.9\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nHost: a\r\n folded\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nHo st: a\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nX: \0\r\n\r\n",
        b"G\xc3\x9c /v2 HTTP/1.1\r\n\r\n",
        b"GET /v2 HTTP/1.1\nHost: a\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        b"\0" * 64 + b"\r\n\r\n",
        b"\r\n" * 100 + b"x\r\n\r\n",
    ],
    ids=lambda data: repr(data[:24]),
)
def test_malformed_head(server, data):
    with connected(server.http_port) as connection:
        connection.send(data)
        with contextlib.suppress(OSError):
            connection.socket.shutdown(socket.SHUT_WR)
        reply = connection.reply()
        assert reply is None or (400 <= reply.status < 500 and reply.error), reply


@pytest.mark.parametrize(
    "lengths",
    [
        (b"x",),
        (b"-1",),
        (b"+1",),
        (b"1.0",),
        (b"0x10",),
        (b"",),
        (b"1, 1",),
        (b"99999999999999999999999999",),
        (b"10", b"12"),
        (b"70", b"71"),
    ],
    ids=repr,
)
def test_malformed_content_length(server, lengths):
    head = b"POST %s HTTP/1.1\r\nHost: a\r\n" % INFER
    head += b"".join(b"Content-Length: %s\r\n" % length for length in lengths)
    reply = ask(server.http_port, head + b"\r\n" + DOCUMENT)
    assert reply.status == 400 and reply.error, reply


def test_length_and_chunks_together(server):
    """The classic way to smuggle a second request past a proxy."""
    head = b"POST %s HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n" % INFER
    smuggled = b"0\r\n\r\nGET /v2/health/live HTTP/1.1\r\nHost: a\r\n\r\n"
    with connected(server.http_port) as connection:
        connection.send(head + smuggled)
        reply = connection.reply()
        assert reply is not None and reply.status == 400, reply
        assert connection.closed(), "the smuggled request was answered"


@pytest.mark.parametrize("coding", [b"gzip", b"chunked, gzip", b"gzip, chunked", b"xchunked", b"identity"])
def test_other_transfer_codings(server, coding):
    head = b"POST %s HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: %s\r\n\r\n" % (INFER, coding)
    with connected(server.http_port) as connection:
        connection.send(head + DOCUMENT)
        connection.socket.shutdown(socket.SHUT_WR)
        reply = connection.reply()
        assert reply is None or 400 <= reply.status <= 501, reply


def test_too_many_headers(server):
    reply = ask(server.http_port, request(DOCUMENT, *[b"X-%d: a" % i for i in range(500)]))
    assert reply.status == 431 and reply.error


def test_too_large_headers(server):
    for head in (b"X: " + b"a" * 100_000, b"X: " + b"a" * 65_500):
        reply = ask(server.http_port, request(DOCUMENT, head))
        assert reply.status == 431 and reply.error


def test_too_long_path(server):
    reply = ask(server.http_port, request(DOCUMENT, path=b"/v2/models/" + b"a" * 70_000 + b"/infer"))
    assert reply.status in (414, 431) and reply.error


def test_a_head_without_end_is_cut_off(server):
    with connected(server.http_port) as connection:
        connection.send(b"GET /v2 HTTP/1.1\r\n")
        for _ in range(200):
            connection.send(b"X: " + b"a" * 1000 + b"\r\n")
        reply = connection.reply()
        assert reply is not None and reply.status == 431, reply
        assert connection.closed()


@pytest.mark.parametrize(
    "path",
    [
        b"/v2/models/%/infer",
        b"/v2/models/%zz/infer",
        b"/v2/models/%ff%fe/infer",
        b"/v2/models/%00/infer",
        b"/v2/models/..%2f..%2fetc/infer",
        b"/v2/models/../../etc/passwd",
        b"//v2/models/identity_fp32/infer",
        b"/v2/models//infer",
        b"/v2/models/a;b/infer",
        b"/v2/models/" + b"a" * 5000 + b"/infer",
        b"/v2/models/identity_fp32/versions/" + b"9" * 5000 + b"/infer",
        b"/v2/models/identity_fp32/versions//infer",
        b"/v2/models/identity_fp32/versions/-1/infer",
    ],
)
def test_odd_paths(server, path):
    reply = ask(server.http_port, request(path=path))
    assert reply.status == 404 and reply.error, reply


def test_absolute_form_and_query(server):
    for path in (b"http://localhost" + INFER, INFER + b"?x=1&y", INFER + b"#fragment"):
        assert ask(server.http_port, request(path=path)).status in (200, 400, 404)
    assert ask(server.http_port, request(path=INFER + b"?x=1")).status == 200


# --- bodies


@pytest.mark.parametrize(
    "chunks",
    [
        b"zz\r\nxx\r\n0\r\n\r\n",
        b"-1\r\nx\r\n0\r\n\r\n",
        b"fffffffffffffffffffffffff\r\nx",
        b"5\r\nabcdefgh\r\n0\r\n\r\n",
        b"\r\n\r\n",
    ],
    ids=lambda data: repr(data[:16]),
)
def test_malformed_chunks(server, chunks):
    with connected(server.http_port) as connection:
        connection.send(chunked(end=chunks))
        reply = connection.reply()
        assert reply is not None and 400 <= reply.status < 500, reply
        assert connection.closed()


def test_chunk_trailers_and_extensions(server):
    body = chunked(DOCUMENT[:10], end=b"%x;name=value\r\n%s\r\n0\r\nTrailer: x\r\n\r\n" % (61, DOCUMENT[10:]))
    assert len(DOCUMENT) == 71
    reply = ask(server.http_port, body)
    assert reply.status == 200, reply


def test_long_chunk_extension(server):
    """Passed over, however long; the body it comes with is no JSON."""
    reply = ask(server.http_port, chunked(end=b"5;ext=" + b"a" * 100_000 + b"\r\nabcde\r\n0\r\n\r\n"))
    assert reply.status == 400 and reply.error


def test_body_in_many_pieces(server):
    data = request()
    with connected(server.http_port) as connection:
        connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for i in range(len(data)):
            connection.send(data[i : i + 1])
        reply = connection.reply()
        assert reply is not None and reply.status == 200, reply


def test_pipelined_requests_are_answered_in_order(server):
    with connected(server.http_port) as connection:
        ids = [f"{i}" for i in range(20)]
        bodies = [json.dumps({**json.loads(DOCUMENT), "id": name}).encode() for name in ids]
        connection.send(b"".join(map(request, bodies)))
        replies = [connection.reply() for _ in ids]
        assert [reply.document["id"] for reply in replies] == ids


def test_errors_keep_the_connection(server):
    with connected(server.http_port) as connection:
        for body in (b"{", DOCUMENT, b"[]", DOCUMENT):
            connection.send(request(body))
            reply = connection.reply()
            assert reply is not None and reply.status == (200 if body == DOCUMENT else 400)


def test_client_that_leaves_within_a_body(server):
    for part in (0, 1, 40):
        with connected(server.http_port) as connection:
            connection.send(request(DOCUMENT[:part], length=len(DOCUMENT)))


def test_client_that_resets(server):
    for _ in range(5):
        with connected(server.http_port) as connection:
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.send(request())


@EXAMPLES
@given(data=st.binary(max_size=300))
def test_any_bytes_over_http(server, data):
    with connected(server.http_port) as connection:
        connection.send(data)
        connection.socket.shutdown(socket.SHUT_WR)
        reply = connection.reply()
        assert reply is None or 400 <= reply.status < 500, reply


@EXAMPLES
@given(data=st.binary(max_size=300), header=st.integers(-5, 310))
def test_any_bytes_as_the_body_of_an_inference(server, data, header):
    with connected(server.http_port) as connection:
        connection.send(request(data, b"Inference-Header-Content-Length: %d" % header))
        reply = connection.reply()
        # With a header of no bytes, any multiple of four is a tensor.
        assert reply is not None and reply.status == (200 if header == 0 and len(data) % 4 == 0 else 400), reply


# --- gRPC


def call(grpc, method, message):
    """Status of a call with these bytes as its message."""
    try:
        grpc.channel.unary_unary(f"/inference.GRPCInferenceService/{method}")(message, timeout=30)
    except grpc_library.RpcError as problem:
        assert problem.details(), problem
        return problem.code().name
    return "OK"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "message",
    [b"\xff", b"\x0a\xff", b"\x0a\x05abc", b"\x80" * 20, b"\x00", b"\x0b\x0b\x0b", b"\x0a\x02\xff\xfe"],
    ids=repr,
)
def test_malformed_messages(grpc, method, message):
    assert call(grpc, method, message) == "INVALID_ARGUMENT"


@EXAMPLES
@given(message=st.binary(min_size=1, max_size=200))
def test_any_bytes_as_an_inference_message(grpc, message):
    assert call(grpc, "ModelInfer", message) in ("INVALID_ARGUMENT", "NOT_FOUND")


GOOD = infer_request("identity_fp32", [Input("IN", "FP32", (1, 2), raw=bytes(8))], id="id").SerializeToString()


@EXAMPLES
@given(
    position=st.integers(0, len(GOOD) - 1),
    value=st.integers(0, 255),
    cut=st.integers(0, 3),
    large=st.booleans(),
)
def test_damaged_inference_messages(grpc, position, value, cut, large):
    """One byte changed, some cut off; a large message is taken apart by another way than a small one."""
    message = GOOD
    if large:
        message = infer_request(
            "identity_fp32", [Input("IN", "FP32", (1, 20_000), raw=bytes(80_000))]
        ).SerializeToString()
    damaged = bytearray(message[: len(message) - cut])
    damaged[min(position, len(damaged) - 1)] = value
    assert call(grpc, "ModelInfer", bytes(damaged)) in ("OK", "INVALID_ARGUMENT", "NOT_FOUND")


def test_malformed_message_on_a_stream(grpc):
    stream = grpc.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
    good = infer_request("identity_fp32", [Input("IN", "FP32", (1, 2), raw=bytes(8))]).SerializeToString()
    replies = list(stream(iter([b"\xff\xff", good, b"\x0a\x05abc"]), timeout=30))
    assert len(replies) == 3


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 100]
)
def test_bytes_that_are_no_grpc(server, data):
    with socket.create_connection(("127.0.0.1", server.grpc_port), timeout=30) as raw:
        raw.sendall(data)
        raw.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            while raw.recv(1 << 16):
                pass
