"""A request whose time in the queue is over is told so then, not when the running batch ends."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests import models
from tests.process.support import EVERYTHING, ROW, num_failed, num_waiting
from tests.running import RunningServer, run_server, wait_until

ITERATIONS = 800_000


def policy(text: str) -> str:
    return f"max_batch_size: 1 dynamic_batching {{ default_queue_policy {{ {text} }} }}"


def infer(server: RunningServer, timeout_us: int = 0) -> tuple[int, object]:
    document: dict[str, Any] = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, 4], "data": ROW}]}
    if timeout_us:
        document["parameters"] = {"timeout": timeout_us}
    return server.post("/v2/models/slow/infer", document)


def test_rejected_while_the_instance_is_busy(repository: Path) -> None:
    models.write_model(
        repository, "slow", models.slow(ITERATIONS), config=policy("default_timeout_microseconds: 100000")
    )
    with run_server(repository, *EVERYTHING) as server, ThreadPoolExecutor(2) as pool:
        requests = [pool.submit(infer, server) for _ in range(2)]
        wait_until(lambda: any(request.done() for request in requests), "the one in the queue is answered")
        late = next(request for request in requests if request.done())
        runs = next(request for request in requests if request is not late)
        assert late.result() == (503, {"error": "Request timeout expired for model 'slow'"})
        assert not runs.done(), "told before the batch that ran had ended"
        assert num_failed(server, "slow", "REJECTED") == 1
        assert num_waiting(server, "slow") == 0
        assert runs.result()[0] == 200


def test_a_request_may_shorten_it_where_allowed(repository: Path) -> None:
    text = "default_timeout_microseconds: 3600000000 allow_timeout_override: true"
    models.write_model(repository, "slow", models.slow(ITERATIONS), config=policy(text))
    with run_server(repository, *EVERYTHING) as server, ThreadPoolExecutor(2) as pool:
        patient = [pool.submit(infer, server) for _ in range(2)]
        wait_until(lambda: num_waiting(server, "slow") == 1, "one runs, one waits")
        assert infer(server, timeout_us=1000)[0] == 503
        assert not any(request.done() for request in patient)
        assert [request.result()[0] for request in patient] == [200, 200]


def test_delayed_rather_than_rejected(repository: Path) -> None:
    """With the action DELAY a request past its time gives way to the others, and still runs."""
    text = "timeout_action: DELAY default_timeout_microseconds: 1000"
    models.write_model(repository, "slow", models.slow(200_000), config=policy(text))
    with run_server(repository, *EVERYTHING) as server, ThreadPoolExecutor(4) as pool:
        assert [request.result()[0] for request in [pool.submit(infer, server) for _ in range(4)]] == [200] * 4


def test_a_full_queue_is_told_at_once(repository: Path) -> None:
    models.write_model(repository, "slow", models.slow(ITERATIONS), config=policy("max_queue_size: 2"))
    with run_server(repository, *EVERYTHING) as server, ThreadPoolExecutor(3) as pool:
        first = pool.submit(infer, server)
        second = pool.submit(infer, server)
        wait_until(lambda: num_waiting(server, "slow") == 1, "one runs, one waits")
        third = pool.submit(infer, server)
        wait_until(lambda: num_waiting(server, "slow") == 2, "the queue is full")
        assert infer(server) == (503, {"error": "Exceeds maximum queue size for model 'slow'"})
        assert not first.done() or not second.done()
        assert [request.result()[0] for request in (first, second, third)] == [200, 200, 200]
        assert num_failed(server, "slow", "REJECTED") == 1
