"""Adding or removing a version leaves the others as they are, statistics included."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests import models
from tests.process.support import POLL, answers, first_value, let_polls_pass, num_loads
from tests.running import RunningServer, run_server, wait_until

ALL = "version_policy { all { } }"


def num_inferences(server: RunningServer, version: int) -> int:
    return int(server.get(f"/v2/models/m/versions/{version}/stats")[1]["model_stats"][0]["inference_count"])


def test_all_versions(repository: Path) -> None:
    folder = models.write_model(repository, "m", models.scale(2.0), config=ALL)
    with run_server(repository, *POLL) as server:
        assert answers(server, "m", 2.0)
        models.write_model(repository, "m", models.scale(3.0), version=3)
        wait_until(lambda: answers(server, "m", 3.0, version="3"), "a newer version is served")
        models.write_model(repository, "m", models.scale(4.0), version=2)
        wait_until(lambda: answers(server, "m", 4.0, version="2"), "an older number is served too")
        assert answers(server, "m", 3.0), "and is not the newest"
        assert answers(server, "m", 2.0, version="1")
        assert num_inferences(server, 1) == 2, "statistics go on"
        assert sorted(server.get("/v2/models/m")[1]["versions"]) == ["1", "2", "3"]
        shutil.rmtree(folder / "3")
        wait_until(lambda: first_value(server, "m", "3") is None, "the removed version is unloaded")
        assert answers(server, "m", 4.0), "then the next newest answers"
        wait_until(lambda: ("m", "3") not in server.index(), "the version leaves the index")
        let_polls_pass(server, repository)
        assert [num_loads(server, "m", version) for version in (1, 2, 3)] == [1, 1, 1]


def test_the_latest_version_takes_over(repository: Path) -> None:
    models.write_model(repository, "m", models.scale(2.0))
    with run_server(repository, *POLL) as server:
        models.write_model(repository, "m", models.scale(3.0), version=2)

        def taken_over() -> bool:
            value = first_value(server, "m")
            assert value is not None, "there is never a moment without a version"
            return value == 3.0

        wait_until(taken_over, "the new version takes over")
        assert server.get("/v2/models/m")[1]["versions"] == ["2"]
        assert server.infer("m", [[1.0, 2.0, 3.0, 4.0]], "1")[0] == 404
