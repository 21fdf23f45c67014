"""A version's series live as long as the version."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests import models
from tests.process.support import EVERYTHING, POLL, answers, first_value
from tests.running import RunningServer, run_server, wait_until


def series(server: RunningServer, model: str, version: int = 1) -> list[str]:
    wanted = (f'model="{model}"', f'version="{version}"')
    return [line for line in server.metrics().splitlines() if all(label in line for label in wanted)]


def test_after_an_unload(repository: Path) -> None:
    models.write_model(repository, "m", models.scale(2.0))
    models.write_model(repository, "other", models.scale(3.0))
    with run_server(repository, *EVERYTHING) as server:
        assert answers(server, "m", 2.0)
        assert answers(server, "other", 3.0)
        others = [line for line in series(server, "other") if "pending" not in line]
        assert series(server, "m")
        assert server.post("/v2/repository/models/m/unload")[0] == 200
        wait_until(lambda: not series(server, "m"), "the model's series disappear")
        assert [line for line in series(server, "other") if "pending" not in line] == others
        assert server.post("/v2/repository/models/m/load")[0] == 200
        assert server.metric("nv_inference_request_success", model="m") == 0.0, "it begins anew"


def test_of_a_version_that_gives_way(repository: Path) -> None:
    models.write_model(repository, "m", models.scale(2.0))
    with run_server(repository, *POLL) as server:
        assert answers(server, "m", 2.0)
        models.write_model(repository, "m", models.scale(3.0), version=2)
        wait_until(lambda: answers(server, "m", 3.0), "version 2 answers")
        wait_until(lambda: not series(server, "m", 1), "the series of version 1 disappear")
        assert series(server, "m", 2)
        shutil.rmtree(repository / "m" / "2")
        wait_until(lambda: answers(server, "m", 2.0), "version 1 is back")
        wait_until(lambda: not series(server, "m", 2), "the series of version 2 disappear")


def test_counters_of_a_version_go_on_over_a_reload(repository: Path) -> None:
    models.write_model(repository, "m", models.scale(2.0))
    with run_server(repository, *EVERYTHING) as server:
        for _ in range(3):
            assert answers(server, "m", 2.0)
        models.write_model(repository, "m", models.scale(3.0))
        assert server.post("/v2/repository/models/m/load")[0] == 200
        assert answers(server, "m", 3.0)
        assert server.metric("nv_inference_request_success", model="m") == 4.0, "a counter never goes back"


def test_unknown_names_make_no_series(repository: Path) -> None:
    models.write_model(repository, "m", models.scale(2.0))
    with run_server(repository, *EVERYTHING) as server:
        before = len(server.metrics().splitlines())
        for number in range(50):
            assert first_value(server, f"absent{number}") is None
            assert server.post(f"/v2/repository/models/absent{number}/load")[0] == 500
            assert server.post(f"/v2/repository/models/absent{number}/unload")[0] == 200
        assert len(server.metrics().splitlines()) == before
        assert {name for name, _ in server.index()} == {"m"}
