"""Load requests that bring a configuration, or files, along; and that nothing escapes the model's folder."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from tests import models
from tests.process.support import EVERYTHING, answers, first_value
from tests.running import RunningServer, run_server, wait_until

PLAIN = {"max_batch_size": 4}


def load(server: RunningServer, model: str, config: Any = None, files: dict[str, bytes] | None = None) -> Any:
    parameters: dict[str, str] = {}
    if config is not None:
        parameters["config"] = config if isinstance(config, str) else json.dumps(config)
    for name, content in (files or {}).items():
        parameters[f"file:{name}"] = base64.b64encode(content).decode()
    return server.post(f"/v2/repository/models/{model}/load", {"parameters": parameters} if parameters else {})


def max_batch_size(server: RunningServer, model: str = "m") -> int:
    return int(server.get(f"/v2/models/{model}/config")[1]["max_batch_size"])


def test_a_configuration_holds_until_the_next_load(repository: Path) -> None:
    models.write_model(repository, "m", models.scale(2.0), config="max_batch_size: 2")
    with run_server(repository, *EVERYTHING) as server:
        assert load(server, "m", {"max_batch_size": 7})[0] == 200
        assert max_batch_size(server) == 7
        assert answers(server, "m", 2.0)
        assert (repository / "m" / "config.pbtxt").read_text(encoding="utf-8") == "max_batch_size: 2"
        assert load(server, "m")[0] == 200
        assert max_batch_size(server) == 2


@pytest.mark.parametrize(
    ("config", "status"),
    [
        ("{", 400),
        ("[]", 400),
        ('{"max_batch_size": "many"}', 400),
        ('{"no_such_field": 1}', 400),
        ('{"max_batch_size": 1, "max_batch_size": 2}', 400),
        ('{"max_batch_size": -1}', 400),
        ('{"name": "other"}', 500),
        ('{"input": [{"name": "OTHER", "data_type": "TYPE_FP32", "dims": [4]}]}', 400),
    ],
)
def test_a_configuration_that_is_refused_changes_nothing(repository: Path, config: str, status: int) -> None:
    models.write_model(repository, "m", models.scale(2.0), config="max_batch_size: 2")
    with run_server(repository, *EVERYTHING) as server:
        told = load(server, "m", config)
        assert told[0] == status, told
        assert max_batch_size(server) == 2
        assert answers(server, "m", 2.0)
        assert server.get("/v2/health/ready")[0] == 200


def test_files_are_refused_unless_allowed(repository: Path) -> None:
    models.write_model(repository, "m", models.scale(2.0))
    with run_server(repository, *EVERYTHING) as server:
        status, answer = load(server, "m", PLAIN, {"1/model.onnx": models.scale(3.0)})
        assert status == 501
        assert "--allow-file-override" in answer["error"]
        assert answers(server, "m", 2.0)


def overrides(temporary: Path) -> list[Path]:
    return list(temporary.iterdir())


def test_files_that_are_allowed(repository: Path, tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    models.write_model(repository, "m", models.scale(2.0))
    before = (repository / "m" / "1" / "model.onnx").read_bytes()
    flags = (*EVERYTHING, "--allow-file-override=true")
    with run_server(repository, *flags, environment={"TMPDIR": str(temporary)}) as server:
        assert (
            load(server, "m", PLAIN, {"1/model.onnx": models.scale(3.0), "5/model.onnx": models.scale(5.0)})[0] == 200
        )
        assert answers(server, "m", 5.0), "the newest of the versions that came along"
        assert len(overrides(temporary)) == 1
        assert overrides(temporary)[0].stat().st_mode & 0o777 == 0o700, "nobody else may read or write there"

        status, answer = load(server, "m", None, {"1/model.onnx": models.scale(4.0)})
        assert (status, answer["error"]) == (400, "Load parameter 'config' must be specified for model file override")
        assert load(server, "m", PLAIN, {"1/model.onnx": b"garbage"})[0] == 400
        assert answers(server, "m", 5.0), "the failed load changed nothing"
        wait_until(lambda: len(overrides(temporary)) == 1, "and left nothing behind")

        assert load(server, "new", PLAIN, {"1/model.onnx": models.scale(6.0)})[0] == 200
        assert answers(server, "new", 6.0), "a model that is nowhere on disk"
        assert server.post("/v2/repository/models/new/unload")[0] == 200
        wait_until(lambda: len(overrides(temporary)) == 1, "its files go with it")

        assert load(server, "m")[0] == 200
        assert answers(server, "m", 2.0), "as on disk again"
        wait_until(lambda: not overrides(temporary), "the files that came along are gone")
        assert load(server, "m", PLAIN, {"1/model.onnx": models.scale(3.0)})[0] == 200
        assert server.stop() == 0
    assert overrides(temporary) == []
    assert (repository / "m" / "1" / "model.onnx").read_bytes() == before, "the repository is never written to"


ESCAPES = (
    "../escaped",
    "1/../../escaped",
    "/tmp/escaped",
    "./1/model.onnx",
    "1//model.onnx",
    "..",
    "",
    "1/model.onnx/..",
    "1/\0model.onnx",
    "a" * 300,
    "/".join(["d"] * 100) + "/f",
    "config.pbtxt",
    ".hidden",
    "1/model.onnx/inside",
)


def test_paths_that_would_escape(repository: Path, tmp_path: Path) -> None:
    temporary = tmp_path / "a" / "b" / "tmp"
    temporary.mkdir(parents=True)
    models.write_model(repository, "m", models.scale(2.0))
    files_before = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    flags = (*EVERYTHING, "--allow-file-override=true")
    with run_server(repository, *flags, environment={"TMPDIR": str(temporary)}) as server:
        for path in ESCAPES:
            status, answer = load(server, "m", PLAIN, {"1/model.onnx": models.scale(3.0), path: b"escaped"})
            assert status >= 400, f"{path!r}: {answer}"
            assert str(temporary) not in answer["error"], "no path of the server is told"
            assert first_value(server, "m") == 2.0
        assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == files_before
        for name in ("..", ".", "%2e%2e", "a%2Fb", "..%2Fm"):
            assert server.post(f"/v2/repository/models/{name}/load", {})[0] in (400, 404), name
        assert server.get("/v2/health/ready")[0] == 200
