from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from hone.metrics import Metrics, MetricsEndpoint


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(CollectorRegistry(), allow_cpu_metrics=False, allow_gpu_metrics=False)


@pytest.fixture
async def client(metrics: Metrics) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(MetricsEndpoint(metrics))
    async with httpx.AsyncClient(transport=transport, base_url="http://metrics") as client:
        yield client


async def test_get_gives_the_text(client: httpx.AsyncClient, metrics: Metrics) -> None:
    metrics.model("digits", "1").record_request("http", 1, 1, 1, 1, 1, 1)
    answer = await client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.content == metrics.render()[0]
    assert 'nv_inference_count{model="digits",version="1"} 1' in answer.text.splitlines()


async def test_query_is_ignored(client: httpx.AsyncClient, metrics: Metrics) -> None:
    assert (await client.get("/metrics?name[]=x")).content == metrics.render()[0]


async def test_many_models_are_sent_whole(client: httpx.AsyncClient, metrics: Metrics) -> None:
    for index in range(500):
        metrics.model(f"model_{index}", "1").record_request("http", 1, 1, 1, 1, 1, 1)
    assert (await client.get("/metrics")).content == metrics.render()[0]


async def test_head_has_no_body(client: httpx.AsyncClient) -> None:
    answer = await client.head("/metrics")
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
async def test_other_methods_are_405(client: httpx.AsyncClient, method: str) -> None:
    answer = await client.request(method, "/metrics")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize("path", ["/", "/metrics/", "/v2/health/live", "/metricsx"])
async def test_other_paths_are_404(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.get(path)).status_code == 404
    assert (await client.post(path)).status_code == 404


async def test_lifespan_is_answered(metrics: Metrics) -> None:
    incoming = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return incoming.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    await MetricsEndpoint(metrics)({"type": "lifespan"}, receive, send)
    assert [message["type"] for message in sent] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


async def test_websockets_are_closed(metrics: Metrics) -> None:
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await MetricsEndpoint(metrics)({"type": "websocket", "path": "/metrics"}, receive, send)
    assert [message["type"] for message in sent] == ["websocket.close"]
