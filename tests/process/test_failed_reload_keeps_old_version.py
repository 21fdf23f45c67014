"""A reload that fails leaves what was serving, and the index says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import models
from tests.process.support import EVERYTHING, POLL, answers, first_value
from tests.running import RunningServer, run_server, wait_until


def reason(server: RunningServer, version: str = "1") -> str:
    state, why = server.index()["m", version]
    assert state == "READY"
    return why


def test_polling(repository: Path) -> None:
    models.write_model(repository, "m", models.scale(2.0))
    with run_server(repository, *POLL) as server:
        models.write_model(repository, "m", b"garbage")
        wait_until(lambda: reason(server), "the index tells the reason")
        assert "reload failed" in reason(server)
        assert answers(server, "m", 2.0)
        assert server.get("/v2/health/ready")[0] == 200
        assert server.get("/v2/models/m/ready")[0] == 200
        models.write_model(repository, "m", models.scale(3.0))
        wait_until(lambda: answers(server, "m", 3.0), "the fixed model answers")
        assert reason(server) == ""


def test_polling_a_bad_configuration(repository: Path) -> None:
    folder = models.write_model(repository, "m", models.scale(2.0), config="max_batch_size: 2")
    with run_server(repository, *POLL) as server:
        (folder / "config.pbtxt").write_text("max_batch_size: {", encoding="utf-8")
        wait_until(lambda: reason(server), "the index tells the reason")
        assert answers(server, "m", 2.0)
        assert server.get("/v2/models/m/config")[1]["max_batch_size"] == 2
        assert server.get("/v2/health/ready")[0] == 200
        (folder / "config.pbtxt").write_text("max_batch_size: 3", encoding="utf-8")
        wait_until(lambda: server.get("/v2/models/m/config")[1]["max_batch_size"] == 3, "the fixed configuration")
        assert reason(server) == ""


def test_polling_a_bad_new_version(repository: Path) -> None:
    models.write_model(repository, "m", models.scale(2.0))
    with run_server(repository, *POLL) as server:
        models.write_model(repository, "m", b"garbage", version=2)
        wait_until(lambda: ("m", "2") in server.index(), "the new version is tried")
        wait_until(lambda: server.index()["m", "2"][0] == "UNAVAILABLE", "and refused")
        assert server.index()["m", "2"][1]
        assert answers(server, "m", 2.0)
        assert server.get("/v2/health/ready")[0] == 200, "a bad roll-out does not take the server out of service"
        models.write_model(repository, "m", models.scale(5.0), version=2)
        wait_until(lambda: answers(server, "m", 5.0), "the fixed version answers")
        wait_until(lambda: first_value(server, "m", "1") is None, "and the one before goes")


def test_each_load_of_a_broken_model_is_an_error(repository: Path) -> None:
    models.write_model(repository, "m", models.scale(2.0))
    with run_server(repository, *EVERYTHING) as server:
        models.write_model(repository, "m", b"garbage")
        for _ in range(3):
            status, answer = server.post("/v2/repository/models/m/load")
            assert status == 400
            assert answer["error"].startswith("load failed for model 'm': version 1 is at UNAVAILABLE state:")
            assert str(repository) not in answer["error"]
            assert answers(server, "m", 2.0)
            assert "reload failed" in reason(server)
        models.write_model(repository, "m", models.scale(3.0))
        assert server.post("/v2/repository/models/m/load")[0] == 200
        assert answers(server, "m", 3.0)
        assert reason(server) == ""


@pytest.mark.parametrize("config", ['name: "other"', "max_batch_size: -1", "nonsense: 1", "sequence_batching { }"])
def test_a_refused_configuration(repository: Path, config: str) -> None:
    folder = models.write_model(repository, "m", models.scale(2.0))
    with run_server(repository, *EVERYTHING) as server:
        (folder / "config.pbtxt").write_text(config, encoding="utf-8")
        for _ in range(2):
            status, answer = server.post("/v2/repository/models/m/load")
            assert status >= 400
            assert answers(server, "m", 2.0)
            told = answer["error"].rpartition(": ")[2]
            assert told in reason(server)
        assert server.get("/v2/health/ready")[0] == 200
