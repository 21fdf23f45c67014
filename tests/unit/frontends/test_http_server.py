"""The life of the server: binding, stopping while requests run, and applications other than hone's own."""

import asyncio
import errno
import json
import socket
import time

import httpx
import pytest

from hone.config import Settings
from hone.frontends.http import build_http_app
from hone.frontends.http_connection import ConnectionLimits
from hone.frontends.http_server import HttpServer
from hone.types import InferRequest, InferResponse
from tests.unit.frontends.http_fakes import FakeService
from tests.unit.frontends.http_serving import read_reply, replies, serving
from tests.unit.frontends.test_http_connection import BODY, TENSOR, chunked, request

JSON_FLOATS = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [2], "data": [1, 2]}]}


def held_service() -> tuple[FakeService, asyncio.Event]:
    """Its requests wait for the event."""
    service, release = FakeService(), asyncio.Event()

    async def wait(request: InferRequest) -> InferResponse:
        await release.wait()
        return service.echo(request)

    service.answer = wait
    return service, release


def refuses(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_port_in_use_is_an_error(served):
    async def start_another() -> None:
        with pytest.raises(OSError) as refused:
            await HttpServer(served.app, "127.0.0.1", served.port, settings=Settings()).start()
        assert refused.value.errno == errno.EADDRINUSE

    served.run(start_another())


def test_limits_come_from_the_settings():
    server = HttpServer(None, "127.0.0.1", 0, settings=Settings(http_max_input_size=5, http_max_connections=7))
    assert (server.limits.max_body, server.limits.max_connections) == (5, 7)


def test_stopping_lets_requests_in_flight_finish_and_closes_idle_connections():
    service, release = held_service()
    with serving(service) as served, served.connect() as idle, served.connect() as busy:
        idle.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\n\r\n")
        assert read_reply(idle).status == 200
        busy.sendall(request())
        served.until(lambda: bool(service.requests))
        stopping = asyncio.run_coroutine_threadsafe(served.server.stop(20), served.loop)
        assert idle.recv(1) == b""
        assert refuses(served.port)
        assert not stopping.done()
        served.on_loop(release.set)
        reply = read_reply(busy)
        assert reply.status == 200
        assert reply.headers["connection"] == "close"
        assert reply.body.endswith(TENSOR)
        assert busy.recv(1) == b""
        stopping.result(20)


def test_stopping_cuts_what_does_not_finish_in_time():
    service, _ = held_service()
    with serving(service) as served, served.connect() as client:
        client.sendall(request())
        served.until(lambda: bool(service.requests))
        began = time.monotonic()
        served.run(served.server.stop(0.05))
        assert time.monotonic() - began < 10
        assert client.recv(1) == b""
        served.until(lambda: service.num_cancelled == 1)


def test_stopping_ends_a_half_sent_head_at_once(served):
    with served.connect() as client:
        client.sendall(b"GET /v2 HTTP/1.1\r\nHo")
        served.until(lambda: served.server.num_connections == 1)
        served.run(served.server.stop(20))
        assert client.recv(1) == b""


def test_a_server_that_never_started_can_be_stopped(served):
    served.run(HttpServer(served.app, "127.0.0.1", 0, settings=Settings()).stop(1))


# --- plain ASGI, both ways round


async def test_hone_runs_on_any_asgi_server():
    service = FakeService()
    app = build_http_app(service, Settings(http_max_input_size=1000))
    try:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            reply = await client.post("/v2/models/echo_fp32/infer", json=JSON_FLOATS)
            assert reply.json()["outputs"][0]["data"] == [1, 2]
            reply = await client.post("/v2/models/echo_fp32/infer", content=b"x" * 1001)
            assert reply.status_code == 400
            assert (await client.get("/v2")).json()["name"] == "triton"
            # Through FastAPI's own router, as when it is mounted somewhere.
            inner = httpx.AsyncClient(transport=httpx.ASGITransport(app.fastapi), base_url="http://test")
            async with inner:
                reply = await inner.post("/v2/models/echo_fp32/versions/1/infer", json=JSON_FLOATS)
                assert reply.json()["outputs"][0]["data"] == [1, 2]
                assert (await inner.post("/v2/models/echo_fp32/versions/v/infer")).status_code == 404
    finally:
        app.close()


async def test_on_plain_asgi_a_disconnect_cancels_too():
    service, _ = held_service()
    app = build_http_app(service, Settings())
    gone = asyncio.Event()
    messages = [{"type": "http.request", "body": json.dumps(JSON_FLOATS).encode(), "more_body": False}]

    async def receive() -> dict[str, object]:
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, object]) -> None:
        raise AssertionError(f"nobody is there to read {message}")

    scope = {"type": "http", "method": "POST", "path": "/v2/models/echo_fp32/infer", "headers": []}
    try:
        task = asyncio.ensure_future(app(scope, receive, send))
        await service.until(lambda: bool(service.requests))
        gone.set()
        async with asyncio.timeout(10):
            await task
        assert (service.num_cancelled, service.num_leases) == (1, 0)
    finally:
        app.close()


@pytest.fixture
def other_app():
    """Serve another ASGI application with hone's server; the test gives what it does."""

    async def app(scope, receive, send):
        await app.behave(scope, receive, send)

    with serving(limits={"max_body": 1000}) as served:
        served.server.app = app
        yield served, app


def test_other_asgi_applications_are_served(other_app):
    served, app = other_app

    async def echo_in_pieces(scope, receive, send):
        body = (await receive())["body"]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        for position in range(len(body)):
            await send({"type": "http.response.body", "body": body[position : position + 1], "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    app.behave = echo_in_pieces
    with served.connect() as client:
        for _ in range(3):
            client.sendall(request())
            assert read_reply(client).body == BODY
            client.sendall(chunked(BODY[:9], BODY[9:], b""))
            assert read_reply(client).body == BODY


def test_a_body_that_another_application_may_not_have_is_refused(other_app):
    served, app = other_app

    async def read(scope, receive, send):
        assert (await receive())["type"] == "http.disconnect"

    app.behave = read
    (reply,) = replies(served.send(request(b"", length=5000)))
    assert (reply.status, "exceeds the maximum" in reply.error) == (400, True)


def test_another_application_that_fails_is_500(other_app, caplog):
    served, app = other_app

    async def fail(scope, receive, send):
        raise RuntimeError("the secret path")

    async def silent(scope, receive, send):
        pass

    for app.behave in (fail, silent):
        (reply,) = replies(served.send(request()))
        assert (reply.status, reply.error) == (500, "internal error")
    assert "the secret path" in caplog.text


def test_another_application_that_fails_halfway_ends_the_connection(other_app, caplog):
    served, app = other_app

    async def half(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"10")]})
        await send({"type": "http.response.body", "body": b"12345", "more_body": True})
        raise RuntimeError("halfway")

    app.behave = half
    assert b"1234567890" not in served.send(request())
    assert "halfway" in caplog.text


def test_limits_name_their_units():
    assert ConnectionLimits(1, 1).max_chunks == 65_536
