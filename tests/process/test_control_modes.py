"""none loads all and keeps to it; poll follows; explicit loads what it is told: each refuses the others' requests."""

from __future__ import annotations

from pathlib import Path

from tests import models
from tests.process.support import EXPLICIT, POLL, answers, is_serving
from tests.running import run_server


def test_none(repository: Path) -> None:
    models.write_model(repository, "m", models.scale(2.0))
    with run_server(repository) as server:
        assert answers(server, "m", 2.0)
        for what in ("load", "unload"):
            status, answer = server.post(f"/v2/repository/models/m/{what}")
            assert status == 503
            assert "not allowed" in answer["error"]
        assert answers(server, "m", 2.0)


def test_poll(repository: Path) -> None:
    models.write_model(repository, "m", models.scale(2.0))
    with run_server(repository, *POLL) as server:
        for what in ("load", "unload"):
            status, answer = server.post(f"/v2/repository/models/m/{what}")
            assert status == 503
            assert answer["error"] == "explicit model load / unload is not allowed if polling is enabled"
        assert answers(server, "m", 2.0)


def test_explicit(repository: Path) -> None:
    for name in ("a", "b", "c"):
        models.write_model(repository, name, models.scale(2.0))
    with run_server(repository, *EXPLICIT, "--load-model=a", "--load-model=b") as server:
        assert [is_serving(server, name) for name in "abc"] == [True, True, False]
        assert {name for name, _ in server.index()} == {"a", "b", "c"}, "the index shows what could be loaded"
        ready = server.post("/v2/repository/index", {"ready": True})[1]
        assert [(line["name"], line["version"], line["state"]) for line in ready] == [
            ("a", "1", "READY"),
            ("b", "1", "READY"),
        ]
        models.write_model(repository, "a", models.scale(3.0))
        assert server.post("/v2/repository/models/c/load")[0] == 200
        assert [answers(server, name, 2.0) for name in "abc"] == [True, True, True], "nothing else is looked at"
        assert server.post("/v2/repository/models/a/load")[0] == 200
        assert answers(server, "a", 3.0)


def test_loading_takes_the_newest_version(repository: Path) -> None:
    models.write_model(repository, "m", models.scale(2.0))
    with run_server(repository, *EXPLICIT, "--load-model=m") as server:
        models.write_model(repository, "m", models.scale(10.0), version=10)
        models.write_model(repository, "m", models.scale(9.0), version=9)
        assert server.post("/v2/repository/models/m/load")[0] == 200
        assert answers(server, "m", 10.0)
        assert server.get("/v2/models/m")[1]["versions"] == ["10"]
