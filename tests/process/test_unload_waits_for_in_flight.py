"""Unloading answers at once, refuses what comes after, and lets what is in flight finish."""

from __future__ import annotations

from pathlib import Path

from tests import models
from tests.process.support import EVERYTHING, EXPLICIT, ROW, answers, occupied, slow_model
from tests.running import run_server, wait_until


def test_in_flight_requests_finish(repository: Path) -> None:
    slow_model(repository, iterations=700_000)
    models.write_model(repository, "other", models.scale(2.0))
    with run_server(repository, *EVERYTHING) as server:
        with occupied(server, "slow") as requests:
            assert server.post("/v2/repository/models/slow/unload")[0] == 200
            assert server.index()["slow", "1"] == ("UNLOADING", "")
            status, answer = server.infer("slow", ROW)
            assert not any(request.done() for request in requests), "refused before the last answers"
            assert status in (404, 503)
            assert server.get("/v2/models/slow/ready")[0] != 200
            assert server.get("/v2/health/ready")[0] == 200, "unloaded on purpose"
            assert answers(server, "other", 2.0)
            assert [request.result()[0] for request in requests] == [200, 200]
        wait_until(lambda: server.index()["slow", "1"] == ("UNAVAILABLE", "unloaded"), "the unload ends")
        status, answer = server.infer("slow", ROW)
        assert (status, answer["error"]) == (404, "Request for unknown model: 'slow' has no available versions")
        assert 'model="slow"' not in server.metrics()


def test_a_load_during_the_unload_serves_at_once(repository: Path) -> None:
    slow_model(repository, iterations=700_000)
    with run_server(repository, *EVERYTHING) as server, occupied(server, "slow") as requests:
        assert server.post("/v2/repository/models/slow/unload")[0] == 200
        models.write_model(repository, "slow", models.scale(3.0))
        assert server.post("/v2/repository/models/slow/load")[0] == 200
        assert answers(server, "slow", 3.0)
        assert not any(request.done() for request in requests), "the new one did not wait for the old one's requests"
        assert [request.result()[0] for request in requests] == [200, 200]
        assert server.index()["slow", "1"] == ("READY", "")
        assert answers(server, "slow", 3.0)
        successes = server.metric("nv_inference_request_success", model="slow")
        assert successes == 4.0, "counters went on, and the old one's end removed nothing"


def test_unloading_what_is_not_there(repository: Path) -> None:
    with run_server(repository, *EXPLICIT) as server:
        for _ in range(2):
            assert server.post("/v2/repository/models/nothing/unload")[0] == 200
        assert server.index() == {}
