"""What the server writes on standard error, in both forms, and requests when they are asked for."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from tests import models
from tests.process.support import EVERYTHING, ROW, answers
from tests.running import RunningServer, run_server, wait_until


def request(server: RunningServer, request_id: str, model: str = "m") -> int:
    tensor = {"name": "IN", "datatype": "FP32", "shape": [1, 4], "data": ROW}
    return server.post(f"/v2/models/{model}/infer", {"id": request_id, "inputs": [tensor]})[0]


def test_every_line_is_one_json_object(repository: Path) -> None:
    models.write_model(repository, "m", models.identity())
    models.write_model(repository, 'odd "name"\n', b"garbage")
    with tempfile.NamedTemporaryFile() as stderr:
        flags = (*EVERYTHING, "--log-format=json", "--log-verbose=1", "--strict-readiness=false")
        with run_server(repository, *flags, stderr=stderr.file) as server:
            assert answers(server, "m", 1.0)
            assert server.stop() == 0
        lines: list[dict[str, Any]] = [json.loads(line) for line in Path(stderr.name).read_text("utf-8").splitlines()]
    assert {"time", "level", "logger", "message"} <= set.intersection(*(set(line) for line in lines))
    assert {line["level"] for line in lines} <= {"debug", "info", "warning", "error"}
    assert any(line["level"] == "error" and "odd" in line["message"] for line in lines)
    assert any(line["message"].startswith("loaded m version 1") and line["model"] == "m" for line in lines)
    assert lines[-1]["message"] == "stopped"


def test_requests_are_logged_when_asked_for(repository: Path) -> None:
    models.write_model(repository, "m", models.identity())
    with run_server(repository, *EVERYTHING, "--log-verbose=1") as server:
        assert request(server, "first-request") == 200
        wait_until(lambda: "first-request" in server.log, "a request's id is logged", seconds=20)
        assert request(server, "refused-request", model="absent") == 404
        wait_until(lambda: "absent" in server.log, "a refused one too", seconds=20)
        assert server.post("/v2/logging", {"log_verbose_level": 0})[0] == 200
        assert request(server, "second-request") == 200
        assert server.stop() == 0
        assert "second-request" not in server.log


def test_and_not_otherwise(repository: Path) -> None:
    models.write_model(repository, "m", models.identity())
    with run_server(repository, *EVERYTHING) as server:
        assert request(server, "some-request") == 200
        assert server.post("/v2/logging", {"log_info": False})[0] == 200
        assert server.post("/v2/repository/models/m/unload")[0] == 200
        assert server.post("/v2/repository/models/m/load")[0] == 200
        assert server.stop() == 0
        assert "some-request" not in server.log
        assert server.log.count("loaded m version 1") == 1, "info was switched off before the second load"


def test_names_cannot_forge_lines(repository: Path) -> None:
    models.write_model(repository, "m", models.identity())
    with run_server(repository, *EVERYTHING, "--log-verbose=1") as server:
        request(server, "x\n2026-01-01T00:00:00.000Z ERROR hone.app: forged")
        server.post("/v2/repository/models/%0A2026-01-01T00:00:00.000Z%20ERROR%20forged/load")
        assert server.stop() == 0
        assert not any(line.startswith("2026-01-01T00") for line in server.log.splitlines())
