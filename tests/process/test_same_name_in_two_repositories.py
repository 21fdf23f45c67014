"""A name in two repositories is ambiguous: it is not served, and the index says why."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests import models
from tests.process.support import EVERYTHING, POLL, ROW, answers
from tests.running import RunningServer, run_server, wait_until

REASON = "model appears in two or more repositories"


def both(tmp_path: Path) -> tuple[Path, Path]:
    first, second = tmp_path / "first", tmp_path / "second"
    models.write_model(first, "twice", models.scale(2.0))
    models.write_model(second, "twice", models.scale(3.0))
    models.write_model(first, "a", models.scale(4.0))
    models.write_model(second, "b", models.scale(5.0))
    return first, second


def reason(server: RunningServer) -> str:
    return " ".join(why for (name, _), (state, why) in server.index().items() if name == "twice" and state != "READY")


def test_at_the_start(tmp_path: Path) -> None:
    first, second = both(tmp_path)
    with run_server(first, "--model-repository", str(second), *POLL, ready=False) as server:
        wait_until(lambda: answers(server, "a", 4.0) and answers(server, "b", 5.0), "the others are served")
        wait_until(lambda: REASON in reason(server), "the index says why")
        assert server.infer("twice", ROW)[0] in (404, 503)
        assert server.get("/v2/health/ready")[0] == 503
        shutil.rmtree(second / "twice")
        wait_until(lambda: answers(server, "twice", 2.0), "served once it is unambiguous")
        wait_until(lambda: server.get("/v2/health/ready")[0] == 200, "ready")


def test_appearing_later(tmp_path: Path) -> None:
    first, second = both(tmp_path)
    shutil.move(second / "twice", tmp_path / "aside")
    with run_server(first, "--model-repository", str(second), *POLL) as server:
        assert answers(server, "twice", 2.0)
        shutil.move(tmp_path / "aside", second / "twice")
        wait_until(lambda: REASON in reason(server), "the index says why")
        assert server.infer("twice", ROW)[0] in (404, 503)
        assert answers(server, "a", 4.0)
        shutil.rmtree(first / "twice")
        wait_until(lambda: answers(server, "twice", 3.0), "the other one is served")


def test_loading_by_request(tmp_path: Path) -> None:
    first, second = both(tmp_path)
    with run_server(first, "--model-repository", str(second), *EVERYTHING, ready=False) as server:
        wait_until(lambda: answers(server, "a", 4.0), "the others are served")
        status, answer = server.post("/v2/repository/models/twice/load")
        assert status == 500
        assert REASON in answer["error"]
